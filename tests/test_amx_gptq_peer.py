"""AMX codes found by calibration, through kt-kernel's own client: for tokens that were not calibrated
with, its output is nearer to the model's than with the best rounded codes of the same format, and with
`--solver best` nearer than with llm-compressor's solver. Of a trained model: benchmarks/quality.py --kt.

Run with `pytest -m peer tests/test_amx_gptq_peer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from calibrate_models import qwen3_moe, samples, saved, with_outliers
from checkpoints import ran
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


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose experts have outlier channels."""
    folder = tmp_path_factory.mktemp("amx-heavy")
    config = qwen3_moe(num_hidden_layers=2, moe_intermediate_size=256)
    save_file(
        {"input_ids": torch.from_numpy(np.stack(samples(COUNT, LENGTH)))},
        folder / "tokens.safetensors",
    )
    return with_outliers(saved(config, folder / "model"))


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


def errors(
    model: Path, ways: Mapping[str, tuple[str, ...]], method: str, numa: int, out: Path
) -> dict[tuple[str, int], float]:
    """Of each way in each layer: the part of the experts' output that kt-kernel's differs by."""
    data = str(model.parent / "tokens.safetensors")
    calibrated = ("--data", data, "--samples", str(COUNT), "--length", str(LENGTH))
    found = {}
    for way, options in ways.items():
        more = (*options, *calibrated) if "--gptq" in options else options
        ran("amx", model, out / way, "--method", method, "--numa", str(numa), *more)
        folder = Folder(Checkpoint.open(out / way))
        block = read_block(folder.checkpoint)
        for layer in range(2):
            inputs, expected = seen(model, layer)
            made = _client(folder, block, layer, inputs)
            found[way, layer] = _distance(made, expected.numpy())
    return found


@needs_avx512
@pytest.mark.parametrize(("method", "numa"), [("int4", 2), ("int8", 1)])
def test_calibrated_codes_beat_searched_ones(
    method: str, numa: int, model: Path, tmp_path: Path
) -> None:
    ways = {"gptq": ("--gptq",), "search": ("--rounding", "search")}
    found = errors(model, ways, method, numa, tmp_path)
    for layer in range(2):
        if method == "int4":
            assert found["gptq", layer] < found["search", layer]
        else:  # hardly any error is the codes': activations are int8 as well
            assert found["gptq", layer] < 1.05 * found["search", layer]


@needs_avx512
def test_each_way_answers_nearer_than_the_one_before(heavy: Path, tmp_path: Path) -> None:
    """Held-out tokens through kt-kernel, INT4: rounded, llm-compressor's solver, the best one."""
    ways = {
        "rounded": (), "llmcompressor": ("--gptq", "--solver", "llmcompressor"),
        "best": ("--gptq", "--solver", "best"),
    }  # fmt: skip
    found = errors(heavy, ways, "int4", 1, tmp_path)
    print(found)
    for layer in range(2):
        best, theirs, rounded = (found[way, layer] for way in ("best", "llmcompressor", "rounded"))
        assert best < theirs < rounded
