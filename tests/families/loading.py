"""Folders in transformers: no key may be missing or unexpected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from qconvert.layouts.derived.transformers_class import class_of

hf: Any = transformers


def loaded(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The folder's class, loaded; every key must be there and none unexpected."""
    found = hf.AutoConfig.from_pretrained(folder)
    model, told = class_of(hf, found).from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not told["missing_keys"], sorted(told["missing_keys"])[:3]
    assert not told["unexpected_keys"], sorted(told["unexpected_keys"])[:3]
    return model.eval()


# Classes that fail on tokens alone in a release, after their text model has answered.
_FAILING = {("llama4", "5.24.0")}


def logits(folder: Path, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """For fixed tokens."""
    torch.manual_seed(0)
    model = loaded(folder, dtype)
    if (model.config.model_type, transformers.__version__) in _FAILING:
        model = model.language_model
    with torch.no_grad():
        tokens = torch.arange(24).view(2, 12) * 7 % 300 + 3
        found: torch.Tensor = model(tokens, use_cache=False).logits
    return found
