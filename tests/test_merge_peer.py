"""merge against peft's own merge_and_unload. peft adds in the dtype of the weights, so that in BF16 its
sums are rounded twice: it is asked in float32, and ours must be that, rounded once. A quantized base is
dequantized for it, and what we quantize anew must be near what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrate_models import llama, qwen3_5_moe, qwen3_moe, saved
from families.classes import config
from families.loading import loaded
from families.tiny import saved as tiny
from safetensors.torch import load_file
from sampled import sampled

from qconvert import api
from qconvert.passes.dequant import Dequant
from qconvert.passes.experts import Stack
from qconvert.passes.fp8 import ToFp8
from qconvert.passes.fuse import Fuse
from qconvert.passes.merge import Merge
from qconvert.passes.nvfp4 import ToNvfp4
from qconvert.passes.quantize import ToInt8, ToMx
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.plan import Pass

pytestmark = pytest.mark.peer

_peft: Any = pytest.importorskip("peft", reason="needs .venv-newest: make check")

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
_ATTENTION = {"target_modules": ["q_proj", "o_proj"]}
_MOE = {"target_modules": ["q_proj"], "target_parameters": EXPERTS}
# By family, options of LoraConfig; a number behind a name tells apart adapters of one family.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "llama 2": {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    "llama 3": {
        "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"], "use_rslora": True,
        "rank_pattern": {"layers.1.self_attn.q_proj": 8}, "alpha_pattern": {"layers.0.*q_proj": 3},
    },
    "qwen2": {"target_modules": ["q_proj", "v_proj"], "lora_bias": True, "bias": "all"},
    "gpt2": {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    "phi3": {"target_modules": ["qkv_proj", "gate_up_proj"]},
    "gemma3": _ATTENTION, "mistral3": _ATTENTION, "jamba": {"target_modules": ["q_proj", "in_proj"]},
    "qwen3_5_moe": {"target_modules": ["in_proj_qkv", "in_proj_b"], "target_parameters": EXPERTS},
    "qwen3_next": {"target_modules": ["in_proj_qkvz", "in_proj_ba"], "target_parameters": EXPERTS[1:]},
    "mixtral": _MOE, "gpt_oss": _MOE, "qwen3_vl_moe": _MOE, "minimax_m2": _MOE, "ernie4_5_moe": _MOE,
    "llama4": {"target_parameters": ["feed_forward.experts.gate_up_proj"], "target_modules": ["q_proj"]},
}  # fmt: skip
_LINEAR = ("Linear",)
FORMS: dict[str, Pass] = {
    "fp8": ToFp8(), "rows": ToFp8("compressed-tensors", None), "tensor": ToFp8(tensor=True),
    "w4a16": ExpertsToW4A16(32, targets=_LINEAR),
    "zero points": ExpertsToW4A16(32, symmetric=False, targets=_LINEAR),
    "gptq": ExpertsToW4A16(32, packing="gptq", targets=_LINEAR),
    "awq": ExpertsToW4A16(32, symmetric=False, packing="awq", targets=_LINEAR),
    "nvfp4": ToNvfp4(targets=_LINEAR),
    "nvfp4 packed": ToNvfp4("compressed-tensors", targets=_LINEAR),
    "mxfp4": ToMx(targets=_LINEAR), "mxfp8": ToMx("mxfp8", targets=_LINEAR), "int8": ToInt8(),
}  # fmt: skip


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def run(step: Pass | tuple[Pass, ...], base: Path, out: Path) -> Path:
    return api.run(step, base, out, jobs=1).folder


@pytest.mark.parametrize("case", sampled(FAMILIES, 4))
def test_bf16_is_rounded_once(case: str, tmp_path: Path) -> None:
    family = case.partition(" ")[0]
    given = {key: value for key, value in config(family).items() if key != "model_type"}
    base = tiny(family, tmp_path / "base", given, {})
    adapter = trained(base, tmp_path / "adapter", **FAMILIES[case])
    out = run(Merge((str(adapter),)), base, tmp_path / "out")
    ours, exact = tensors(out), merged(base, [adapter], tmp_path / "peft")
    assert ours.keys() == exact.keys()
    assert [name for name in exact if not is_rounded_once(ours[name], exact[name])] == []
    report = api.validate(out, base, adapter=[str(adapter)], level="full", jobs=1)
    assert report.errors == 0, report.findings[:3]


@pytest.mark.parametrize("form", sampled(FORMS, 4))
def test_a_quantized_base(form: str, tmp_path: Path) -> None:
    model = saved(llama(hidden_size=256, intermediate_size=512, head_dim=64), tmp_path / "model")
    targets = ["q_proj", "v_proj", "down_proj"]
    first = trained(model, tmp_path / "first", target_modules=targets)
    second = trained(model, tmp_path / "second", 1, target_modules=targets, use_dora=True)
    both = str(first), str(second)
    base = run(FORMS[form], model, tmp_path / "base")
    numbers = run(Dequant(dtype="f32"), base, tmp_path / "numbers")
    exact = merged(numbers, [first, second], tmp_path / "peft")
    plain = run(Merge(both, requantize="bf16"), base, tmp_path / "plain")
    ours = tensors(plain)
    assert [name for name in exact if not is_rounded_once(ours[name], exact[name])] == []
    again = run(Merge(both), base, tmp_path / "again")
    assert {n: t.shape for n, t in tensors(again).items()} == {
        n: t.shape for n, t in tensors(base).items()
    }
    for folder in (plain, again):
        report = api.validate(folder, base, adapter=both, level="full", jobs=1)
        assert report.errors == 0, report.findings[:3]
    decoded = tensors(run(Dequant(), again, tmp_path / "decoded"))
    bound = {"rows": 0.04, "fp8": 0.04, "tensor": 0.04, "mxfp8": 0.04, "int8": 0.04}.get(form, 0.13)
    for name in exact:
        if "proj" in name:
            off = (decoded[name].float() - exact[name]).norm() / exact[name].norm()
            assert off < bound, name


@pytest.mark.parametrize("step", [Fuse(groups=1), Stack()], ids=["fused", "stacked"])
def test_before_or_after_rows_are_moved(step: Pass, tmp_path: Path) -> None:
    moe = qwen3_5_moe if isinstance(step, Fuse) else qwen3_moe
    base = saved(moe(), tmp_path / "base")
    targets = ["in_proj_qkv", "in_proj_z", "in_proj_a"] if isinstance(step, Fuse) else ["q_proj"]
    adapter = trained(base, tmp_path / "adapter", target_modules=targets, target_parameters=EXPERTS)
    merge = Merge((str(adapter),))
    moved = run(step, base, tmp_path / "moved")
    one, other = run(merge, moved, tmp_path / "one"), run((merge, step), base, tmp_path / "other")
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    report = api.validate(one, moved, adapter=[str(adapter)], level="full", jobs=1)
    assert report.errors == 0, report.findings[:3]


# --- peft ----------------------------------------------------------------------------------------


def trained(base: Path, folder: Path, seed: int = 0, **options: Any) -> Path:
    """A folder with an adapter of a model, with weights that change it."""
    torch.manual_seed(seed)
    config = _peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **options})
    model = _peft.get_peft_model(loaded(base, torch.float32), config)
    for name, value in model.named_parameters():
        if value.requires_grad and "magnitude" in name:
            value.data *= 1 + 0.1 * torch.rand_like(value)
        elif value.requires_grad:
            value.data += 0.05 * torch.randn_like(value)
    model.save_pretrained(folder)
    return folder


def merged(base: Path, adapters: Sequence[Path], room: Path) -> dict[str, torch.Tensor]:
    """Tensors of the base in float32 with these adapters merged by peft, one after another, under the
    names that transformers saves."""
    model = loaded(base, torch.float32)
    for adapter in adapters:
        model = _peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
    model.save_pretrained(room)
    found: dict[str, torch.Tensor] = {}
    for file in sorted(room.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def is_rounded_once(ours: torch.Tensor, exact: torch.Tensor) -> bool:
    """Return whether BF16 numbers are the nearest to float32 ones, but for sums in another order."""
    nearest = exact.bfloat16()
    if torch.equal(ours, nearest):
        return True
    off, least = ((one.float() - exact).abs() for one in (ours, nearest))
    return bool((off <= least + 2e-7 * exact.abs().max()).all())
