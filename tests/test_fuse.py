"""fuse, unfuse, stack, unstack and as_class as plans: what they make of published shapes, and what
they refuse by name."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import watched_reads
from header_checkpoints import checkpoint, published

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.quantization_config import complete_ignore_lists
from qconvert.checkpoint.safetensors import build_header
from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.errors import PlanError
from qconvert.core.graph import Source
from qconvert.passes.as_class import AsClass
from qconvert.passes.dequant import Dequant
from qconvert.passes.experts import Stack, Unstack
from qconvert.passes.fuse import EQUAL_RULE, Fuse, Unfuse
from qconvert.plan.plan import Plan, run_passes
from qconvert.run.executor import execute
from qconvert.run.work.options import RunOptions
from qconvert.run.work.sink import WINDOW_BYTES
from qconvert.runtimes.consumers import parse_consumer
from qconvert.validation.diff import compare

# hidden_size, value heads, qkvz rows, ba rows; 16 key heads of 128 everywhere.
_MODELS = {
    "Qwen3-Next-80B-A3B": (2048, 32, 12288, 64),
    "Qwen3.5-0.8B": (1024, 16, 8192, 32),
    "Qwen3.5-9B": (4096, 32, 12288, 64),
    "Qwen3.5-27B": (5120, 48, 16384, 96),
    "Qwen3.5-35B-A3B": (2048, 32, 12288, 64),
    "Qwen3.5-122B-A10B": (3072, 64, 20480, 128),
    "Qwen3.5-397B-A17B": (4096, 64, 20480, 128),
}
_AT = "model.layers.0.linear_attn"


def gdn_config(hidden: int, nk: int, nv: int, dk: int, dv: int, *, fp8: bool) -> dict[str, Any]:
    """A text-only Qwen3.5 config of one linear-attention layer."""
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return {
        "model_type": "qwen3_5_text", "hidden_size": hidden, "num_hidden_layers": 1,
        "layer_types": ["linear_attention"], "linear_num_key_heads": nk,
        "linear_num_value_heads": nv, "linear_key_head_dim": dk, "linear_value_head_dim": dv,
        **({"quantization_config": block} if fp8 else {}),
    }  # fmt: skip


def gdn_tensors(
    hidden: int, nk: int, nv: int, dk: int, dv: int, *, fp8: bool
) -> dict[str, TensorType]:
    rows = {"in_proj_qkv": 2 * nk * dk + nv * dv, "in_proj_z": nv * dv}
    found = {}
    for name, count in rows.items():
        found[f"{_AT}.{name}.weight"] = TensorType("F8_E4M3" if fp8 else "BF16", (count, hidden))
        if fp8:
            grid = (ceil_div(count, 128), ceil_div(hidden, 128))
            found[f"{_AT}.{name}.weight_scale_inv"] = TensorType("F32", grid)
    for name in ("in_proj_b", "in_proj_a"):
        found[f"{_AT}.{name}.weight"] = TensorType("BF16", (nv, hidden))
    return found


def gdn_plan(
    hidden: int = 256, nk: int = 4, nv: int = 8, dk: int = 128, dv: int = 128, *, fp8: bool = True
) -> Plan:
    config = gdn_config(hidden, nk, nv, dk, dv, fp8=fp8)
    return Plan.identity(checkpoint(gdn_tensors(hidden, nk, nv, dk, dv, fp8=fp8), config))


@pytest.mark.parametrize("model", sorted(_MODELS))
@pytest.mark.parametrize("groups", [1, 16])
def test_real_models_fuse_at_fp8_with_their_scales(model: str, groups: int) -> None:
    hidden, nv, qkvz, ba = _MODELS[model]
    plan = run_passes(gdn_plan(hidden, 16, nv), (Fuse(groups=groups),))
    types = {name.removeprefix(f"{_AT}."): output.type for name, output in plan.tensors.items()}
    assert types == {
        "in_proj_qkvz.weight": TensorType("F8_E4M3", (qkvz, hidden)),
        "in_proj_qkvz.weight_scale_inv": TensorType("F32", (qkvz // 128, hidden // 128)),
        "in_proj_ba.weight": TensorType("BF16", (ba, hidden)),
    }
    assert plan.facts == {"gdn_groups": groups}
    assert not plan.losses()


@pytest.mark.parametrize("model", ["qwen3.5-35b-a3b-fp8", "qwen3.5-27b-fp8", "qwen3.5-35b-a3b"])
def test_published_qwen3_5_fuses_for_sglang(model: str) -> None:
    plan = run_passes(Plan.identity(published(model)), (Fuse(consumer="sglang==0.5.23"),))
    assert not any(".in_proj_qkv." in name or ".in_proj_z." in name for name in plan.tensors)
    assert plan.log[0].matched == plan.log[0].expected
    assert run_passes(plan, (Unfuse(),)).tensors == Plan.identity(published(model)).tensors


@pytest.mark.big
def test_published_qwen3_next_unfuses_and_back() -> None:
    start = Plan.identity(published("qwen3-next-80b-a3b-fp8"))
    back = run_passes(start, (Unfuse(), Fuse(consumer="vllm")))
    assert back.tensors == start.tensors


def test_consumers() -> None:
    dims = published("qwen3.5-35b-a3b").role_index.dims
    found = {
        (name, family): parse_consumer(name).gdn_groups(family, dims)
        for name in ("sglang", "vllm", "transformers")
        for family in ("qwen3_5", "qwen3_next")
    }
    assert found == {
        ("sglang", "qwen3_5"): 1, ("sglang", "qwen3_next"): 16,
        ("vllm", "qwen3_5"): 0, ("vllm", "qwen3_next"): 16,
        ("transformers", "qwen3_5"): 0, ("transformers", "qwen3_next"): 16,
    }  # fmt: skip
    with pytest.raises(PlanError, match="unknown consumer 'tgi'"):
        parse_consumer("tgi")


# ---- refusals


def refused(plan: Plan, step: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        run_passes(plan, (step,))


def _both_forms() -> dict[str, TensorType]:
    tensors = gdn_tensors(256, 4, 8, 128, 128, fp8=False)
    return {**tensors, f"{_AT}.in_proj_ba.weight": TensorType("BF16", (16, 256))}


def _mixed_schemes() -> dict[str, TensorType]:
    tensors = gdn_tensors(256, 4, 8, 128, 128, fp8=True)
    del tensors[f"{_AT}.in_proj_z.weight_scale_inv"]
    return {**tensors, f"{_AT}.in_proj_z.weight": TensorType("BF16", (1024, 256))}


def _with(parameter: str) -> dict[str, TensorType]:
    tensors = gdn_tensors(256, 4, 8, 128, 128, fp8=False)
    return {**tensors, f"{_AT}.in_proj_z.{parameter}": TensorType("I32", (8, 32))}


@pytest.mark.parametrize(
    ("tensors", "fp8", "said"),
    [
        (_both_forms(), False, "whole and alone"),
        (_mixed_schemes(), True, r"in_proj_qkv is weight F8_E4M3, .*in_proj_z is weight BF16"),
        (
            _with("qweight"),
            False,
            "a packed weight of GPTQ or AutoAWQ holds its rows on another axis",
        ),
        (_with("weight_g_idx"), False, "the columns of each part are in an order of its own"),
        (_with("weight_scale_2"), False, "they cannot become one"),
    ],
    ids=["split and fused", "mixed schemes", "qweight", "weight_g_idx", "weight_scale_2"],
)
def test_sets_that_cannot_be_fused(tensors: dict[str, TensorType], fp8: bool, said: str) -> None:
    config = gdn_config(256, 4, 8, 128, 128, fp8=fp8)
    refused(Plan.identity(checkpoint(tensors, config)), Fuse(groups=1), said)


def test_half_a_set_is_refused() -> None:
    kept = gdn_plan(fp8=False).checkpoint
    sources = {n: s for n, s in kept.items() if n != f"{_AT}.in_proj_z.weight"}
    plan = Plan.identity(replace(kept, sources=sources))
    refused(plan, Fuse(groups=1), r"linear_attn has in_proj_a, in_proj_b, in_proj_qkv: expected")


def test_scales_that_may_not_move_are_refused() -> None:
    """dk = 64 interleaved: one scale block would span q and k."""
    plan = gdn_plan(256, 4, 8, 64, 64)
    refused(
        plan, Fuse(groups=4), r"in_proj_qkvz\.weight_scale_inv: runs of .* are not whole blocks"
    )
    run_passes(plan, (Fuse(groups=1),))
    run_passes(plan, (Dequant(), Fuse(groups=4)))


def packed_tensors(word: int, heads: int = 8) -> dict[str, TensorType]:
    """Asymmetric packed projections, zero points in words of so many rows."""
    tensors = gdn_tensors(256, 4, heads, 16, 16, fp8=False)
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"):
        rows = tensors.pop(f"{_AT}.{name}.weight").shape[0]
        tensors[f"{_AT}.{name}.weight_packed"] = TensorType("I32", (rows, 256 // word))
        tensors[f"{_AT}.{name}.weight_scale"] = TensorType("BF16", (rows, 2))
        zeros = ceil_div(rows, word), 2
        tensors[f"{_AT}.{name}.weight_zero_point"] = TensorType("I32", zeros)
    return tensors


def test_zero_points_move_in_words_of_rows() -> None:
    """Word i of the zero points stays beside rows 8 i to 8 i + 7."""
    config = gdn_config(256, 4, 8, 16, 16, fp8=False)
    plan = run_passes(Plan.identity(checkpoint(packed_tensors(8), config)), (Fuse(groups=1),))
    codes = plan.tensors[f"{_AT}.in_proj_qkvz.weight_packed"]
    zeros = plan.tensors[f"{_AT}.in_proj_qkvz.weight_zero_point"]
    assert codes.type.shape == (384, 32)
    assert zeros.type.shape == (48, 2)
    # A row of codes has 128 bytes, a word of zero points for each of two groups 8.
    rows = [(piece.start // 128, piece.stop // 128) for piece in codes.pieces]
    assert [(piece.start, piece.stop) for piece in zeros.pieces] == rows


@pytest.mark.parametrize("shape", [(), (3, 2)])
def test_zero_points_that_fit_no_rows_are_refused(shape: tuple[int, ...]) -> None:
    tensors = packed_tensors(8)
    for name in [name for name in tensors if name.endswith("zero_point")]:
        tensors[name] = TensorType("I32", shape)
    plan = Plan.identity(checkpoint(tensors, gdn_config(256, 4, 8, 16, 16, fp8=False)))
    refused(plan, Fuse(groups=1), r"weight_zero_point: ")


def test_zero_points_within_one_word_are_refused() -> None:
    """Of 4 key heads each group has 2 value heads' rows of b, and a word has 8."""
    config = gdn_config(256, 4, 8, 16, 16, fp8=False)
    plan = Plan.identity(checkpoint(packed_tensors(8), config))
    refused(plan, Fuse(groups=4), r"in_proj_ba\.weight_zero_point: runs of .* are not whole blocks")


def test_what_sglang_would_drop_is_refused() -> None:
    plan = Plan.identity(published("qwen3.5-35b-a3b"))
    for what, name in (("gate_up", "gate_up_proj"), ("qkv", "qkv_proj")):
        refused(plan, Fuse(consumer="sglang", what=what), f"{name}: sglang is not known to take it")  # type: ignore[arg-type]


def test_groups_against_the_consumer_are_refused() -> None:
    plan = Plan.identity(published("qwen3.5-35b-a3b"))
    refused(plan, Fuse(consumer="sglang", groups=16), "load without error and generate garbage")
    refused(plan, Fuse(consumer="vllm"), "split already; nothing to fuse")
    refused(plan, Fuse(groups=3), "3 groups do not divide")
    refused(plan, Fuse(), "no order is stated")
    refused(Plan.identity(published("deepseek-v3")), Fuse(consumer="sglang"), "no linear-attention")


def test_an_order_nobody_states_is_not_guessed() -> None:
    fused = run_passes(gdn_plan(), (Fuse(groups=1),))
    types = {name: output.type for name, output in fused.tensors.items()}
    bare = Plan.identity(checkpoint(types, gdn_config(256, 4, 8, 128, 128, fp8=True)))
    refused(bare, Unfuse(), "its order is unknown")
    run_passes(bare, (Unfuse(source_groups=1),))
    known = Plan.identity(published("qwen3-next-80b-a3b"))
    refused(known, Unfuse(source_groups=1), "known to have 16")


# ---- per-channel and per-tensor scales


def scaled_tensors(scale: tuple[int, ...]) -> tuple[dict[str, TensorType], dict[str, Any]]:
    tensors = gdn_tensors(256, 4, 8, 16, 16, fp8=False)
    for name, rows in (("in_proj_qkv", 256), ("in_proj_z", 128)):
        tensors[f"{_AT}.{name}.weight"] = TensorType("F8_E4M3", (rows, 256))
        shape = tuple(rows if n < 0 else n for n in scale)
        tensors[f"{_AT}.{name}.weight_scale"] = TensorType("F32", shape)
    config = gdn_config(256, 4, 8, 16, 16, fp8=True)
    config["quantization_config"] = {"quant_method": "fp8"}
    return tensors, config


@pytest.mark.parametrize("scale", [(-1,), (-1, 1)])
def test_per_channel_scales_move_with_their_rows(scale: tuple[int, ...]) -> None:
    plan = run_passes(Plan.identity(checkpoint(*scaled_tensors(scale))), (Fuse(groups=4),))
    weight = plan.tensors[f"{_AT}.in_proj_qkvz.weight"]
    moved = plan.tensors[f"{_AT}.in_proj_qkvz.weight_scale"]
    assert moved.type == TensorType("F32", (384, *scale[1:]))
    # Byte for row: a weight row has 256 bytes, a scale 4.
    assert [(p.start // 256, p.stop // 256) for p in weight.pieces] == [
        (p.start // 4, p.stop // 4) for p in moved.pieces
    ]


@pytest.mark.parametrize("scale", [(), (1,)])
def test_per_tensor_scales_fuse_where_they_are_equal(
    scale: tuple[int, ...], tmp_path: Path
) -> None:
    tensors, config = scaled_tensors(scale)
    source = written(tmp_path / "s", tensors, config, scale=0.5)
    plan = run_passes(Plan.identity(source), (Fuse(groups=1),))
    assert plan.tensors[f"{_AT}.in_proj_qkvz.weight_scale"].type.shape == scale
    assert dict(plan.dropped) == {f"{_AT}.in_proj_z.weight_scale": EQUAL_RULE}
    execute(plan, tmp_path / "fused", RunOptions(jobs=1))
    back = run_passes(Plan.identity(Checkpoint.open(tmp_path / "fused")), (Unfuse(),))
    execute(back, tmp_path / "back", RunOptions(jobs=1))
    assert compare(Checkpoint.open(tmp_path / "back"), source) == []


def test_different_per_tensor_scales_are_refused(tmp_path: Path) -> None:
    source = written(tmp_path / "s", *scaled_tensors(()))
    refused(Plan.identity(source), Fuse(groups=1), "different per-tensor scales")


# ---- experts


def test_experts_unstack_and_stack() -> None:
    start = Plan.identity(published("qwen3.5-35b-a3b"))
    apart = run_passes(start, (Unstack(),))
    name = "model.language_model.layers.3.mlp.experts.2.up_proj.weight"
    assert apart.tensors[name].type == TensorType("BF16", (512, 2048))
    assert apart.log[0].matched == apart.log[0].expected == 80
    again = run_passes(apart, (Stack(),))
    for key, output in start.tensors.items():
        if ".experts." in key and not key.startswith("mtp."):
            assert again.tensors[key] == output


def test_fp8_experts_stack_with_their_scales_and_dequantize() -> None:
    start = Plan.identity(published("qwen3.5-35b-a3b-fp8"))
    stacked = run_passes(start, (Stack(),))
    at = "model.language_model.layers.0.mlp.experts"
    assert stacked.tensors[f"{at}.gate_up_proj"].type == TensorType("F8_E4M3", (3, 1024, 2048))
    scale = stacked.tensors[f"{at}.gate_up_proj_scale_inv"]
    assert scale.type.shape == (3, 8, 16)
    run_passes(stacked, (Dequant(),))
    assert run_passes(stacked, (Unstack(),)).tensors == start.tensors


@pytest.mark.parametrize("packed", ["qweight", "weight_packed", "scales"])
def test_packed_experts_are_not_stacked(packed: str) -> None:
    base = published("qwen3-30b-a3b-fp8")
    name = f"model.layers.0.mlp.experts.0.up_proj.{packed}"
    odd = Source(name, TensorType("I32", (8, 8)), 0, 0)
    plan = Plan.identity(replace(base, sources={**base.sources, name: odd}))
    refused(plan, Stack(), rf"up_proj\.{packed}.*packed 4-bit")


def test_unstack_refuses_what_it_cannot_know() -> None:
    odd = {"model.layers.0.mlp.experts.gate_up_proj": TensorType("BF16", (4, 64, 64))}
    refused(
        Plan.identity(checkpoint(odd)),
        Unstack(),
        "the config counts no experts by a name that is known",
    )
    refused(Plan.identity(published("qwen3-30b-a3b-fp8")), Unstack(), "already matrices")
    refused(Plan.identity(published("qwen3.5-0.8b")), Unstack(), "no experts")
    base = published("qwen3.5-35b-a3b")
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    turned = replace(base[name], type=TensorType("BF16", (3, 2048, 1024)))
    plan = Plan.identity(replace(base, sources={**base.sources, name: turned}))
    refused(plan, Unstack(), r"stacks are \[E, 2I, H\] with H = 2048")


# ---- as_class and ignore lists


def test_as_class_drops_vision_by_name_and_renames_ignore_lists() -> None:
    steps = (Fuse(consumer="qwen3-next"), AsClass("qwen3_next"))
    plan = run_passes(Plan.identity(published("qwen3.5-35b-a3b-fp8")), steps)
    assert plan.config["model_type"] == "qwen3_next"
    assert set(plan.dropped.values()) == {"as_class: qwen3_next has no vision tower"}
    assert all(".visual." in name for name in plan.dropped)
    assert plan.role_index.unknown == ()
    ignored = plan.config["quantization_config"]["modules_to_not_convert"]
    assert not any(name.startswith("model.language_model.") for name in ignored)
    assert any(name.endswith(".in_proj_ba") for name in ignored)


def test_as_class_wants_the_order_of_its_class() -> None:
    plan = Plan.identity(published("qwen3.5-35b-a3b"))
    refused(plan, AsClass("qwen3_next"), "in another order; run `fuse")
    refused(plan, AsClass("qwen3_5_text"), "made from qwen3_next, found qwen3_5")


def test_ignore_lists_name_all_of_a_set() -> None:
    at = "model.layers.0.linear_attn"
    config = {
        "quantization_config": {
            "modules_to_not_convert": ["lm_head", f"{at}.in_proj_b", "in_proj_z"]
        }
    }
    (found,) = complete_ignore_lists(config, [])["quantization_config"].values()
    assert found == [
        "lm_head", f"{at}.in_proj_b", f"{at}.in_proj_a", f"{at}.in_proj_ba",
        "in_proj_z", "in_proj_qkv", "in_proj_qkvz",
    ]  # fmt: skip


# ---- bytes


def written(
    folder: Path,
    tensors: dict[str, TensorType],
    config: dict[str, Any],
    scale: float | None = None,
) -> Checkpoint:
    """A checkpoint of random bytes on disk; FP8 codes are never NaN, scales lie near one (or all
    are `scale`)."""
    folder.mkdir()
    random = np.random.default_rng(0)
    header, _ = build_header(list(tensors.items()), {"format": "pt"})
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(header)
        for kind in tensors.values():
            if kind.dtype == "F32":
                drawn = random.uniform(0.5, 2, kind.shape)
                values = drawn if scale is None else np.full(kind.shape, scale)
                stream.write(np.asarray(values, dtype=np.float32).tobytes())
            else:
                stream.write((random.integers(0, 256, kind.nbytes, np.uint8) & 0xBE).tobytes())
    (folder / "config.json").write_text(json.dumps(config))
    return Checkpoint.open(folder)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_dequantizing_and_fusing_commute(groups: int, tmp_path: Path) -> None:
    """Fused FP8 with moved scales, dequantized, is the dequantized weights fused, bit for bit."""
    tensors = gdn_tensors(200, 4, 8, 128, 128, fp8=True)
    source = written(tmp_path / "s", tensors, gdn_config(200, 4, 8, 128, 128, fp8=True))
    start = Plan.identity(source)
    for name, steps in (
        ("a", (Fuse(groups=groups), Dequant())),
        ("b", (Dequant(), Fuse(groups=groups))),
    ):
        execute(run_passes(start, steps), tmp_path / name, RunOptions(jobs=1))
    fused, plain = (tmp_path / name / "model.safetensors" for name in "ab")
    assert fused.read_bytes() == plain.read_bytes()


@pytest.mark.big
def test_a_big_stack_is_cut_and_put_together_in_small_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stack of 128 MiB taken apart, gate split from up, and stacked again: no read is larger than
    4 MiB, and no buffer than a window of the sink."""
    sizes = watched_reads(monkeypatch)
    stack_type = TensorType("BF16", (16, 2048, 2048))
    down = TensorType("BF16", (16, 2048, 1024))
    at = "model.layers.0.mlp.experts"
    config = {
        "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 1,
        "num_experts": 16, "moe_intermediate_size": 1024, "layer_types": ["full_attention"],
    }  # fmt: skip
    tensors = {f"{at}.gate_up_proj": stack_type, f"{at}.down_proj": down}
    source = written(tmp_path / "s", tensors, config)
    small = RunOptions(memory=64 << 20, jobs=1)
    first = execute(run_passes(Plan.identity(source), (Unstack(),)), tmp_path / "apart", small)
    apart = Checkpoint.open(tmp_path / "apart")
    assert len(apart) == 48
    second = execute(run_passes(Plan.identity(apart), (Stack(),)), tmp_path / "again", small)
    for receipt in (first, second):
        assert receipt.share is not None
        assert max(receipt.share.arena, receipt.share.window) <= WINDOW_BYTES == 8 << 20
    assert 0 < max(sizes) <= 4 << 20
    assert compare(Checkpoint.open(tmp_path / "again"), source) == []


@pytest.mark.parametrize("runtime", ["sglang", "vllm"])
def test_no_runtime_reads_six_projections_as_one_matrix(runtime: str) -> None:
    """So that `fuse` has no such form: docs/sglang.md."""
    folder = Path(str(resources.files("qconvert.runtimes.classes")))
    tables = [file.read_text() for file in folder.glob(f"{runtime}-*/*.json")]
    assert any("in_proj_qkvz" in text and "in_proj_ba" in text for text in tables)
    assert not any("qkvzba" in text for text in tables)
