"""Dense families of transformers: all their linears are calibrated, and what a calibration gives the
next layer is what transformers' own model computes with those codes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibrate_models import calibrated, hf, plan_of
from safetensors.torch import load_file, save_file

from families.test_eval import made
from qconvert.calibrate.settings import Settings
from qconvert.core.int_scheme import IntScheme
from qconvert.models.linears import quantizable

pytestmark = pytest.mark.peer

# Fused projections, biases, norms after, parallel blocks, no gate, several kinds of attention.
FAMILIES = [
    "phi3", "cohere2", "gemma2", "arcee", "glm4", "olmo2", "qwen2", "granite", "smollm3", "qwen3",
    "mistral", "gemma3_text", "llama",
]  # fmt: skip
ALL = bool(os.environ.get("QCONVERT_ALL"))
SAMPLES = [np.random.default_rng(length).integers(3, 250, length) for length in (30, 17)]


@pytest.mark.parametrize("family", FAMILIES[:: 1 if ALL else 4])
def test_a_family_goes_on_as_its_whole_model(family: str, tmp_path: Path) -> None:
    folder = made(family, tmp_path / "model")
    plan, scheme = plan_of(folder), IntScheme(4, None)
    modules = [module for module, _ in quantizable(plan, ())]
    assert modules
    settings = Settings(refit=0, descent=0, attention="eager")
    asked = dict.fromkeys(modules, (scheme,))
    kept = calibrated(plan, tmp_path / "room", SAMPLES, [], settings, linears=asked)
    assert kept.linears.keys() == set(modules)
    stored = load_file(folder / "model.safetensors")
    for module, (codes,) in kept.linears.items():
        scale = torch.from_numpy(codes.scale).bfloat16()
        stored[f"{module}.weight"] = torch.from_numpy(codes.codes).bfloat16() * scale
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    model = hf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    (last,) = (tmp_path / "room").glob("hidden.*.rows")
    data = torch.frombuffer(bytearray(last.read_bytes()), dtype=torch.bfloat16)
    found: list[Any] = []
    model.model.layers[-1].register_forward_hook(lambda m, a, result: found.append(result))
    with torch.no_grad():
        for sample in SAMPLES:
            model.model(torch.from_numpy(sample)[None], use_cache=False)
    states = [one[0] if isinstance(one, tuple) else one for one in found]
    wanted = torch.cat([one.flatten(0, -2) for one in states])
    assert torch.equal(data.view(wanted.shape), wanted)
