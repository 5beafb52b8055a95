"""llm-compressor's `oneshot` on the same checkpoint and tokens: GPTQ of the routed experts, groups
of 128."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np


def oneshot(folder: Path, tokens: np.ndarray[Any, Any], length: int) -> list[float]:
    """Seconds between the ends of its layers' solving; the first from the start of the data's first
    pass."""
    import torch
    import transformers
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.entrypoints.oneshot import oneshot as entry
    from llmcompressor.modifiers.gptq import GPTQModifier
    from loguru import logger

    logger.disable("llmcompressor")  # a line a matrix
    hf: Any = transformers
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    # Not a Dataset: these are hashed by pickling them, which fails where pyarrow lacks a part.
    rows = [torch.from_numpy(sample)[None] for sample in tokens.astype(np.int64)]
    samples: Any = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]
    data = torch.utils.data.DataLoader(samples, batch_size=None)
    args = QuantizationArgs(num_bits=4, symmetric=True, strategy="group", group_size=128)
    scheme = QuantizationScheme(targets=[r"re:.*\.mlp\.experts\..*_proj$"], weights=args)
    ends: list[float] = []
    solve: Any = GPTQModifier.compress_modules

    def solved(self: Any, *given: Any, **named: Any) -> Any:
        found = solve(self, *given, **named)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        ends.append(time.monotonic())
        return found

    patched: Any = GPTQModifier
    patched.compress_modules = solved
    try:
        start = time.monotonic()
        entry(
            model=model, dataset=data, processor=_tokenizer(folder),
            recipe=GPTQModifier(config_groups={"group_0": scheme}, ignore=[]),
            num_calibration_samples=len(tokens), max_seq_length=length, batch_size=1,
            shuffle_calibration_samples=False, moe_calibrate_all_experts=False,
        )  # fmt: skip
    finally:
        patched.compress_modules = solve
    return [b - a for a, b in pairwise([start, *ends])]


def _tokenizer(folder: Path) -> Any:
    """One that `oneshot` can save; the samples are tokens already."""
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    hf: Any = transformers
    inner = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made = hf.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="a", eos_token="b")
    made.save_pretrained(folder)
    return made
