"""What kt-kernel's own client answers with AMXINT4 folders of a model: the error of the experts' output
against the BF16 model's, for the same inputs of held-out tokens. Part of quality.py (--kt); needs
kt-kernel and AVX512."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.validation.runner import Folder
from qconvert.validators.amx.amx_client import _client, _distance, _Inputs
from qconvert.validators.amx.reading import read_block

hf: Any = transformers
WAYS: dict[str, tuple[str, ...]] = {
    "round to nearest": (),
    "--rounding search": ("--rounding", "search"),
    "--solver llmcompressor": ("--gptq", "--solver", "llmcompressor"),
    "--solver best": ("--gptq",),
}


def compare(folder: Path, tokens: torch.Tensor, test: torch.Tensor) -> None:
    """Of a model's folder; `tokens` int64 [S, T] calibrate, `test` int64 [S, T] are held out."""
    seen = _seen(folder, test)
    with tempfile.TemporaryDirectory(prefix="qconvert-quality-") as where:
        data = Path(where) / "tokens.safetensors"
        save_file({"input_ids": tokens}, data)
        calibrated = ("--data", str(data), "--samples", str(len(tokens)), "--length",
                      str(tokens.shape[1]), "--device", "cpu")  # fmt: skip
        for number, (way, options) in enumerate(WAYS.items()):
            out = Path(where) / str(number)
            more = (*options, *calibrated) if "--gptq" in options else options
            subprocess.run(
                [sys.executable, "-m", "qconvert", "amx", folder, out, "--method", "int4", "--numa",
                 "1", *more], check=True, capture_output=True,
            )  # fmt: skip
            made = Folder(Checkpoint.open(out))
            block = read_block(made.checkpoint)
            errors = [
                _distance(_client(made, block, layer, inputs), expected)
                for layer, (inputs, expected) in enumerate(seen)
            ]
            said = "  ".join(f"{error:.3f}" for error in errors)
            print(f"  kt-kernel AMXINT4    {way:26} error by layer  {said}", flush=True)


@torch.no_grad()
def _seen(folder: Path, test: torch.Tensor) -> list[tuple[_Inputs, Any]]:
    """By layer what goes into its experts, in BF16, where to, and what comes out, float32 [T, H]."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    caught: list[Any] = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_hook(lambda _, given, made: caught.append((given, made)))
    model(test, use_cache=False)
    found = []
    for (hidden, ids, shares), made in caught:
        bits = hidden.contiguous().view(torch.int16).numpy().view(np.uint16)
        inputs = _Inputs(bits, ids.numpy().astype(np.int64), shares.float().numpy())
        found.append((inputs, made.float().numpy()))
    return found
