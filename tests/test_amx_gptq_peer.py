"""AMX codes found by calibration, through kt-kernel's own client: for tokens that were not calibrated
with, its output is nearer to the model's than with the best rounded codes of the same format.

Run with `pytest -m peer tests/test_amx_gptq_peer.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from calibrate_models import qwen3_moe, samples, saved
from checkpoints import run_cli
from kt_machine import needs_avx512
from safetensors.torch import save_file

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.validation.runner import Folder
from qconvert.validators.amx.amx_client import _client, _distance, _Inputs
from qconvert.validators.amx.reading import read_block

pytestmark = pytest.mark.peer

hf: Any = transformers

COUNT, LENGTH = 32, 96


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("amx-gptq")
    config = qwen3_moe(num_hidden_layers=2, moe_intermediate_size=256)
    save_file(
        {"input_ids": torch.from_numpy(np.stack(samples(COUNT, LENGTH)))},
        folder / "tokens.safetensors",
    )
    return saved(config, folder / "model")


def seen(model: Path, layer: int) -> tuple[_Inputs, torch.Tensor]:
    """Of held-out tokens: what goes into a layer's experts, where to, and what comes out, in bf16."""
    loaded = hf.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    caught: list[Any] = []
    experts = loaded.model.layers[layer].mlp.experts
    experts.register_forward_hook(lambda module, given, made: caught.append((given, made)))
    with torch.no_grad():
        loaded(torch.from_numpy(np.stack(samples(2, 24, seed=9))), use_cache=False)
    (hidden, ids, shares), made = caught[0]
    inputs = _Inputs(
        hidden.contiguous().view(torch.int16).numpy().view(np.uint16),
        ids.numpy().astype(np.int64),
        shares.float().numpy(),
    )
    return inputs, made.float()


@needs_avx512
@pytest.mark.parametrize(("method", "numa"), [("int4", 2), ("int8", 1)])
def test_calibrated_codes_beat_searched_ones(
    method: str, numa: int, model: Path, tmp_path: Path
) -> None:
    data = str(model.parent / "tokens.safetensors")
    ways = {
        "gptq": ("--gptq", "--data", data, "--samples", str(COUNT), "--length", str(LENGTH)),
        "search": ("--rounding", "search"),
    }
    errors: dict[tuple[str, int], float] = {}
    for way, options in ways.items():
        done = run_cli(
            "amx", model, tmp_path / way, "--method", method, "--numa", str(numa), *options
        )
        assert done.code == 0, done.err
        folder = Folder(Checkpoint.open(tmp_path / way))
        block = read_block(folder.checkpoint)
        for layer in range(2):
            inputs, expected = seen(model, layer)
            made = _client(folder, block, layer, inputs)
            errors[way, layer] = _distance(made, expected.numpy())
    for layer in range(2):
        if method == "int4":
            assert errors["gptq", layer] < errors["search", layer]
        else:  # hardly any error is the codes': activations are int8 as well
            assert errors["gptq", layer] < 1.05 * errors["search", layer]
