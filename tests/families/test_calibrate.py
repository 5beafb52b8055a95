"""GPTQ of every family with routed experts that a calibration can run, tiny: what each expert's matrices
see is what they see in the whole model as transformers runs it, calibrated codes are better than rounded
ones on tokens that calibration did not see, and what cannot be run is refused while planning.

`QCONVERT_ALL=1 pytest -m peer tests/families/test_calibrate.py` runs all families, else one in eight.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibrate_models import calibrated, samples
from checkpoints import ran, run_cli
from compressed_peer import decompressed, tensors
from safetensors.torch import save_file

from families.classes import config
from families.loading import loaded
from families.test_commands import as_bf16
from families.tiny import saved
from qconvert.calibrate.experts import ExpertQuantizer
from qconvert.calibrate.settings import Settings

pytestmark = pytest.mark.peer

FAMILIES = [
    "mixtral", "qwen2_moe", "olmoe", "flex_olmo", "minimax", "minimax_m2", "minimax_m3_vl",
    "ernie4_5_moe", "hunyuan_v1_moe", "hy_v3", "phimoe", "glm4_moe_lite", "jamba", "kimi_linear",
    "lfm2_moe", "mimo_v2_flash", "solar_open", "exaone_moe", "cohere2_moe", "afmoe", "laguna",
    "mistral4", "mellum", "granitemoe", "granitemoeshared", "granitemoehybrid", "qwen3_moe",
    "qwen3_next", "qwen3_5_moe", "qwen3_vl_moe", "deepseek_v3",
]  # fmt: skip
# Refused while planning, and why.
REFUSED = {
    "gpt_oss": "neither quantized nor stacked",
    "glm_moe_dsa": "does not call its layers in turn",
    "hy_v4": "does not call its layers in turn",
    "zaya": "does not call its layers in turn",
}
# Of these held-out tokens are asked too: each is loaded decompressed, with a matrix for each expert.
HELD_OUT = ["mixtral", "olmoe", "minimax_m2", "ernie4_5_moe", "phimoe", "jamba", "kimi_linear"]
ALL = bool(os.environ.get("QCONVERT_ALL"))
Sums = dict[tuple[int, int, str], torch.Tensor]


def made(family: str, folder: Path, **sizes: int) -> Path:
    given = {key: value for key, value in config(family).items() if key != "model_type"}
    return saved(family, folder, given, sizes)


def tokens() -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    random = np.random.default_rng(0)
    return [random.integers(3, 512, 24).astype(np.int64) for _ in range(3)]


def seen_in_the_whole_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Sums:
    """2 x x^T of the input of every expert's matrices, by layer, expert and matrix: all linears of
    transformers' own eager experts are listened to, and told apart by where their weights lie."""
    import transformers

    from qconvert.layouts.derived.transformers_class import class_of

    hf: Any = transformers
    found = hf.AutoConfig.from_pretrained(folder)
    model = class_of(hf, found).from_pretrained(
        folder, dtype=torch.bfloat16, experts_implementation="eager"
    )
    where: dict[int, tuple[int, int, str]] = {}
    for name, module in model.eval().named_modules():
        if not hasattr(module, "is_concatenated"):
            continue
        layer = int(re.findall(r"\.(\d+)\.", name)[0])
        for kind in ("gate_up", "down"):
            stack = getattr(module, f"{kind}_proj")
            for expert in range(stack.shape[0]):
                where[stack[expert].data_ptr()] = layer, expert, kind
    sums: Sums = {}
    real: Callable[..., torch.Tensor] = torch.nn.functional.linear

    def listening(rows: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        key = where.get(weight.data_ptr())
        if key is not None:
            x = rows.double().flatten(0, -2)
            sums[key] = sums.get(key, 0) + 2 * x.t() @ x
        return real(rows, weight, bias)

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(torch.nn.functional, "linear", listening)
        for sample in tokens():
            model(input_ids=torch.from_numpy(sample)[None], use_cache=False)
    return sums


@pytest.mark.parametrize("family", FAMILIES[:: 1 if ALL else 8])
def test_hessians_are_the_whole_models(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(family, tmp_path / "model")
    theirs = seen_in_the_whole_model(folder, monkeypatch)
    ours: Sums = {}
    real = ExpertQuantizer.quantize

    def keeping(self: ExpertQuantizer, experts: Any, calls: int, found: Any, *names: Any) -> Any:
        for expert in experts:
            at = self.layer.number, expert.number
            ours[*at, "gate_up"] = expert.inputs.hessian.clone()
            ours[*at, "down"] = expert.middle.hessian.clone()
        return real(self, experts, calls, found, *names)

    monkeypatch.setattr(ExpertQuantizer, "quantize", keeping)
    settings = Settings(min_tokens=1, undersampled="rtn")
    kept = calibrated(folder, tmp_path / "work", tokens(), [], settings)
    assert kept.stats
    assert theirs.keys() == {key for key, hessian in ours.items() if hessian.any()}
    assert len(theirs) > len(kept.stats)
    for key, hessian in theirs.items():
        wrong = (ours[key] - hessian).norm() / hessian.norm()
        assert wrong < 1e-5, (key, float(wrong))


def held_out(folder: Path) -> torch.Tensor:
    """Logits [T, vocabulary] of samples that no calibration has seen."""
    model, asked = loaded(folder), np.stack(samples(7, 96, seed=9))
    with torch.no_grad():
        found: torch.Tensor = model(torch.from_numpy(asked), use_cache=False).logits
    return found.flatten(0, 1).float()


@pytest.mark.parametrize("family", HELD_OUT[:: 1 if ALL else 4])
def test_better_than_rounding_on_tokens_held_out(family: str, tmp_path: Path) -> None:
    """The median over tokens: in a random model a token that is routed otherwise is another token."""
    source = made(family, tmp_path / "source", num_hidden_layers=2)
    right, errors = held_out(source), {}
    data = tmp_path / "tokens.safetensors"
    save_file({"input_ids": torch.from_numpy(np.stack(samples(14, 128)))}, data)
    sizes = ["--samples", "14", "--length", "128", "--device", "cpu"]
    ways = {"rtn": ["--rtn"], "gptq": ["--gptq", "--data", str(data), *sizes]}
    for way, options in ways.items():
        out = tmp_path / way
        ran("w4a16", source, out, "--group-size", "32", *options)
        assert tensors(source).keys() == decompressed(out).keys()
        found = held_out(as_bf16(source, out, tmp_path / f"{way} in bf16"))
        errors[way] = float(((found - right).norm(dim=-1) / right.norm(dim=-1)).median())
    print(family, errors)
    assert 0 < errors["gptq"] < errors["rtn"]


@pytest.mark.parametrize("family", list(REFUSED)[:: 1 if ALL else 2])
def test_refused_while_planning(family: str, tmp_path: Path) -> None:
    source = made(family, tmp_path / "source")
    done = run_cli("w4a16", source, tmp_path / "out", "--gptq", "--synthetic", "--dry-run")
    assert done.code == 1
    assert re.search(REFUSED[family], done.err), done.err
    assert not (tmp_path / "out").exists()
