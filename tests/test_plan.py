"""Plans: what passes may do, what check() refuses, and that units carry out the whole plan once."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import headers
import pytest
from header_checkpoints import ANY, checkpoint, published
from hypothesis import given
from hypothesis import strategies as st
from sampled import sampled

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, Source, apply, concat, nodes, only_node
from qconvert.core.names import ACTIVATIONS
from qconvert.formats.amx.encode import Amx
from qconvert.ops.cast import ToBf16
from qconvert.passes.amx import ExpertsToAmx
from qconvert.passes.dequant import STALE_RULE, Dequant
from qconvert.passes.drop import Drop
from qconvert.passes.fp8 import ToFp8
from qconvert.passes.replace_weights import OF_CACHE_RULE
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.plan import LogEntry, Plan, run_passes
from qconvert.plan.units import Compute, Copy, _unit, units
from qconvert.repair.blocks import methods_of
from qconvert.run.work.memory import searched
from qconvert.validation.runner import Folder, judge_headers
from qconvert.validators.reading import quantization_tensors


def fp8(rows: int, columns: int, name: str = "a") -> dict[str, TensorType]:
    """An FP8 weight and its scales in blocks of 128."""
    grid = (-(-rows // 128), -(-columns // 128))
    return {
        f"{name}.weight": TensorType("F8_E4M3", (rows, columns)),
        f"{name}.weight_scale_inv": TensorType("F32", grid),
    }


FP8_BLOCKS = {
    "model_type": ANY,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


# ---- identity and check


def test_identity_accounts_for_every_byte() -> None:
    plan = Plan.identity(published("qwen3-30b-a3b-fp8")).check()
    assert plan.bytes_in == plan.bytes_out
    assert not plan.losses()


def without(plan: Plan, *names: str) -> Plan:
    return replace(plan, tensors={n: o for n, o in plan.tensors.items() if n not in names})


def test_a_tensor_lost_without_a_rule_is_named() -> None:
    plan = Plan.identity(published("qwen3-30b-a3b-fp8"))
    with pytest.raises(PlanError, match=r"'model\.norm\.weight' reaches no output and no rule"):
        without(plan, "model.norm.weight").check()


def test_half_an_expert_is_named() -> None:
    plan = Plan.identity(published("qwen3.5-35b-a3b"))
    name = "model.language_model.layers.7.mlp.experts.down_proj"
    whole = plan.tensors[name]
    half = whole.rows(0, 1)
    with pytest.raises(PlanError, match=rf"'{name}', bytes from {half.type.nbytes} on, reaches no"):
        replace(plan, tensors={**plan.tensors, name: half}).check()


@pytest.mark.parametrize(
    ("model", "match", "said"),
    [
        ("qwen3-30b-a3b-fp8", "model.layers.3.mlp.experts.1.up_proj.*",
         r"experts\.1\.up_proj.*kept or dropped whole"),
        ("deepseek-v3", "model.layers.61.self_attn.*", "MTP layers are kept or dropped whole"),
    ],
)  # fmt: skip
def test_half_of_a_group_dropped_by_a_rule_is_refused(model: str, match: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        run_passes(Plan.identity(published(model)), (Drop(match=match, why="to save space"),))


def test_bytes_written_twice_are_refused() -> None:
    plan = Plan.identity(checkpoint({"a.weight": TensorType("BF16", (4, 4))}))
    again = plan.tensors["a.weight"].rows(1, 2)
    with pytest.raises(PlanError, match=r"'a\.weight' would be written twice"):
        replace(plan, tensors={**plan.tensors, "b.weight": again}).check()


def test_an_output_that_is_not_filled_is_refused() -> None:
    plan = Plan.identity(checkpoint({"a.weight": TensorType("BF16", (4, 4))}))
    short = Output(TensorType("BF16", (5, 4)), plan.tensors["a.weight"].pieces)
    with pytest.raises(PlanError, match=r"expected 40 bytes for .*, found pieces of 32 bytes"):
        replace(plan, tensors={"a.weight": short}).check()


def test_orphans_are_refused() -> None:
    both = fp8(128, 128)
    for lost, said in (("a.weight", "has no weight"), ("a.weight_scale_inv", "has no scale")):
        rest = {name: kind for name, kind in both.items() if name != lost}
        with pytest.raises(PlanError, match=said):
            Plan.identity(checkpoint(rest, FP8_BLOCKS)).check()


# Parameters of models, and others that only look like parts of a stored weight.
OWN = (
    "router.scale", "attn.q_l2_clip.scale", "mixer.weight_scale", "mixer.weight_scale_inv",
    "mixer.weight_scale_2", "mixer.weight_global_scale", "mixer.scales", "mixer.g_idx", "mixer.qzeros",
    "mixer.input_scale", "mixer.activation_scale", "mixer.k_scale", "mixer.v_scale",
    "mixer.weight_shape",
    "mixer.weight_zero_point", "mixer.weight_g_idx", "mixer.q_proj_scale", "mixer.gate_proj_blocks",
    "attn.relative_blocks",
    "experts.w13_weight_scale", "block.layer_scale_2", "lm_head.logit_scale",
)  # fmt: skip


def judged(of: Checkpoint) -> list[str]:
    """The errors of the header rules, without those of a folder that has no more than these tensors."""
    found = judge_headers(Folder(of, planned=True))
    return [f"{one.rule} {one.where}" for one in found if one.severity == "error"]


@pytest.mark.parametrize("name", OWN)
def test_a_parameter_of_the_model_is_no_part_of_a_stored_weight(name: str) -> None:
    """By its name alone: neither for a plan nor for validators, which read names on their own."""
    tensors = {
        f"layers.0.{name}": TensorType("BF16", (4,)),
        "layers.0.router.proj.weight": TensorType("BF16", (2, 4)),
    }
    of = checkpoint(tensors)
    Plan.identity(of).check()
    assert judged(of) == []
    assert methods_of(of) == frozenset()


@pytest.mark.parametrize(
    "name", ["router.scale", "attn.q_proj_scale", "mixer.weight_scale", "mlp.up_proj.scale"]
)
def test_a_parameter_of_a_model_in_block_fp8(name: str) -> None:
    """Codes with scales beside it do not make it a scale under a name that these have not."""
    own = {f"layers.0.{name}": TensorType("F32", (4,))}
    of = checkpoint({**fp8(128, 128, "layers.0.mlp.up_proj"), **own}, FP8_BLOCKS)
    plan = Plan.identity(of).check()
    assert judged(of) == []
    done = run_passes(plan, (Dequant(),))
    assert done.tensors.keys() == {"layers.0.mlp.up_proj.weight", f"layers.0.{name}"}


@pytest.mark.parametrize("end", ["scale", "weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_scale_of_a_lost_weight_is_found(end: str, lost: int) -> None:
    """Modules alike, of another layer or expert, say what it is."""
    names = ["layers.0.experts.1.up", "layers.1.experts.0.up"]
    tensors = {f"{name}.weight": TensorType("F8_E4M3", (4, 4)) for name in names}
    tensors |= {f"{name}.{end}": TensorType("F32", (4,)) for name in names}
    del tensors[f"{names[lost]}.weight"]
    of = checkpoint(tensors)
    with pytest.raises(PlanError, match=rf"'{names[lost]}\.{end}' has no weight"):
        Plan.identity(of).check()
    assert f"QC011 {names[lost]}.{end}" in judged(of)


# Of AutoFP8, modelopt, compressed-tensors, transformers (Ministral 3, Gemma) and Mistral's own form.
SPELLED = (
    "input_scale", "activation_scale", "act_scale", "qscale_act", "input_zero_point",
    "input_activation_scale", "output_activation_scale", "input_scale_inv",
)  # fmt: skip
REPLACES: dict[str, Any] = {
    "dequant": Dequant(),
    "fp8": ToFp8(block=64),
    "w4a16": ExpertsToW4A16(targets=("Linear",)),
    "experts": ExpertsToW4A16(),
}


CASES = [*((end, "dequant") for end in SPELLED), *(("activation_scale", step) for step in REPLACES)]


@pytest.mark.parametrize(("end", "step"), CASES)
def test_what_is_known_of_activations_leaves_with_the_codes(end: str, step: str) -> None:
    model = headers.few("qwen3-30b-a3b-fp8")
    one = TensorType("F32", ())
    codes = [name for name, kind in model.tensors.items() if kind.dtype == "F8_E4M3"]
    static = {f"{name.removesuffix('weight')}{end}": one for name in codes}
    own = {"model.layers.0.mixer.gain.input_scale": one, "model.layers.0.k_proj.k_scale": one}
    of = checkpoint({**model.tensors, **static, **own}, model.config)
    done = run_passes(Plan.identity(of), (REPLACES[step],))
    left = [name for name in static if name in done.tensors]
    if step == "experts":
        assert not any(".experts." in name for name in left)
    else:
        assert left == []
    gain, cache = own
    assert gain in done.tensors
    assert (cache in done.tensors) == (step != "dequant")
    assert step != "dequant" or set(done.dropped.values()) == {STALE_RULE, OF_CACHE_RULE}


@pytest.mark.parametrize("end", ["input_scale", "activation_scale"])
def test_what_is_known_of_the_inputs_of_a_stack_leaves_with_it(end: str) -> None:
    """As transformers stores FP8 experts with static activations."""
    stack = "layers.0.experts.gate_up_proj"
    kinds = {
        stack: TensorType("F8_E4M3", (2, 128, 128)),
        f"{stack}_scale_inv": TensorType("F32", (2, 1, 1)),
        f"{stack}_{end}": TensorType("F32", (2,)),
        f"layers.0.gain_{end}": TensorType("F32", (2,)),
    }
    done = run_passes(Plan.identity(checkpoint(kinds, FP8_BLOCKS)), (Dequant(),))
    assert done.tensors.keys() == {stack, f"layers.0.gain_{end}"}


def test_validators_have_the_same_spellings_of_their_own() -> None:
    assert set(ACTIVATIONS) == set(quantization_tensors.ACTIVATIONS)
    assert set(SPELLED) < set(ACTIVATIONS)


def test_a_drop_rule_for_a_tensor_in_use_is_refused() -> None:
    plan = Plan.identity(checkpoint({"a.weight": TensorType("BF16", (4, 4))}))
    with pytest.raises(PlanError, match="is dropped by 'x' and used as well"):
        replace(plan, dropped={"a.weight": "x"}).check()


# Names that no loader reads, in place of those that were published.
OTHER_NAMES = {
    "experts behind the projection": (r"experts\.(\d+)\.(\w+)\.", r"experts.\2.\1."),
    "experts before their module": (r"mlp\.experts\.(\d+)\.", r"mlp.\1.experts."),
    "w1, w2, w3": (r"(experts\.\d+)\.(gate|up|down)_proj", r"\1.w_\2"),
    "attention": (r"self_attn\.q_proj", r"self_attn.query"),
}


@pytest.mark.parametrize("kind", OTHER_NAMES)
@pytest.mark.parametrize("step", ["copy", "experts"])
@pytest.mark.parametrize("name", ["glm-4.5-air", "qwen3-30b-a3b-fp8"])
def test_matrices_under_names_that_no_loader_reads(kind: str, step: str, name: str) -> None:
    model = headers.few(name)
    renamed = {re.sub(*OTHER_NAMES[kind], one): of for one, of in model.tensors.items()}
    assert renamed.keys() != model.tensors.keys()
    plan = Plan.identity(checkpoint(renamed, model.config))
    with pytest.raises(PlanError, match="has no tensor of this name, so loaders skip it") as said:
        run_passes(plan, () if step == "copy" else (ExpertsToW4A16(),))
    first, read = re.findall(r"'([^']+)'", str(said.value))[:2]
    assert first in renamed.keys() - model.tensors.keys()
    assert read in model.tensors.keys() - renamed.keys()
    if kind.startswith("experts"):
        assert sorted(first.split(".")) == sorted(read.split("."))


def test_matrices_of_no_family_are_copied_under_any_name() -> None:
    names = ["layers.0.mlp.experts.gate.0.weight", "layers.0.mlp.experts.gate.1.weight"]
    of = checkpoint(dict.fromkeys(names, TensorType("BF16", (4, 4))))
    assert Plan.identity(of).check().tensors.keys() == set(names)


def test_ties_must_stay_alike() -> None:
    plan = Plan.identity(published("qwen3.5-0.8b"))
    embed = plan.tensors["model.language_model.embed_tokens.weight"]
    head = checkpoint({"lm_head.weight": TensorType("F32", embed.type.shape)})["lm_head.weight"]
    sources = {**plan.checkpoint.sources, "lm_head.weight": head}
    tied = replace(
        plan,
        checkpoint=replace(plan.checkpoint, sources=sources),
        tensors={**plan.tensors, "lm_head.weight": head.output},
    )
    with pytest.raises(PlanError, match=r"config ties 'lm_head\.weight'.*F32.*BF16"):
        tied.check()


# ---- dequant


@pytest.mark.parametrize(
    "model",
    sampled([n for n in headers.names() if n == "deepseek-v3" or n.endswith("fp8")], 3),
)
def test_published_fp8_models_dequantize(model: str) -> None:
    plan = run_passes(Plan.identity(published(model)), (Dequant(),))
    (entry,) = plan.log
    assert entry.matched == entry.expected
    assert not any(o.type.dtype.startswith("F8") for o in plan.tensors.values())
    assert not any("scale" in name for name in plan.tensors)
    assert "quantization_config" not in str(plan.config)


@pytest.mark.big
def test_a_missing_layer_is_named() -> None:
    found = headers.load("qwen3-30b-a3b-fp8")
    lost = {f"model.layers.35.self_attn.o_proj.weight{s}" for s in ("", "_scale_inv")}
    rest = {name: kind for name, kind in found.tensors.items() if name not in lost}
    with pytest.raises(
        PlanError, match=r"dequant: 'model\.layers\.35\.self_attn\.o_proj\.weight' is"
    ):
        run_passes(Plan.identity(checkpoint(rest, found.config)), (Dequant(),))


def test_a_missing_expert_is_named_in_an_unknown_family_too() -> None:
    tensors = {}
    for expert in (0, 1, 3):
        tensors.update(fp8(128, 128, f"model.layers.0.mlp.experts.{expert}.up_proj"))
    with pytest.raises(PlanError, match=r"experts\.2\.up_proj\.weight' is missing"):
        run_passes(
            Plan.identity(checkpoint(tensors, {**FP8_BLOCKS, "num_experts": 4})), (Dequant(),)
        )


def test_no_fp8_weight_is_an_error() -> None:
    plan = Plan.identity(checkpoint({"a.weight": TensorType("BF16", (4, 4))}))
    with pytest.raises(PlanError, match="no quantized weight found"):
        run_passes(plan, (Dequant(),))


@pytest.mark.parametrize(
    ("shape", "scale"),
    [
        ((192, 100), ()),
        ((192, 100), (1,)),
        ((192, 100), (192,)),
        ((192, 100), (192, 1)),
        ((3, 192, 100), (3,)),
        ((3, 192, 100), (3, 1, 1)),
        ((3, 192, 100), (3, 192, 1)),
        ((3, 192, 100), ()),
    ],
)
def test_per_channel_and_per_tensor(shape: tuple[int, ...], scale: tuple[int, ...]) -> None:
    tensors = {"a.weight": TensorType("F8_E4M3", shape), "a.weight_scale": TensorType("F32", scale)}
    config = {"model_type": ANY, "quantization_config": {"quant_method": "fp8"}}
    plan = run_passes(Plan.identity(checkpoint(tensors, config)), (Dequant(),))
    assert {n: o.type for n, o in plan.tensors.items()} == {"a.weight": TensorType("BF16", shape)}


def test_a_grid_without_a_stated_block_is_refused() -> None:
    """Dividing rows by scale rows would answer 96 here, and be wrong."""
    config = {"model_type": ANY, "quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(PlanError, match="states no block size"):
        run_passes(Plan.identity(checkpoint(fp8(192, 256), config)), (Dequant(),))


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"quant_method": "awq"}, "'awq' is not an FP8 format"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight block of two sizes"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight block of two sizes"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            "expected an FP8 quant_algo, found 'NVFP4'",
        ),
        ({"quant_method": "compressed-tensors"}, "without config_groups"),
    ],
)
def test_schemes_that_are_not_fp8_are_refused(block: dict[str, Any], said: str) -> None:
    config = {"model_type": ANY, "quantization_config": block}
    with pytest.raises(PlanError, match=said):
        run_passes(Plan.identity(checkpoint(fp8(128, 128), config)), (Dequant(),))


def compressed_tensors(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    block = {"quant_method": "compressed-tensors", "config_groups": groups}
    return {"model_type": ANY, "quantization_config": block}


def test_compressed_tensors_configs() -> None:
    blocks = compressed_tensors("block", block_structure=[128, 128])
    renamed = {n.replace("_scale_inv", "_scale"): t for n, t in fp8(192, 256).items()}
    run_passes(Plan.identity(checkpoint(renamed, blocks)), (Dequant(),))
    channel = {
        "a.weight": TensorType("F8_E4M3", (192, 256)),
        "a.weight_scale": TensorType("BF16", (192, 1)),
    }
    run_passes(Plan.identity(checkpoint(channel, compressed_tensors("channel"))), (Dequant(),))
    config = compressed_tensors("channel", num_bits=4, type="int")
    with pytest.raises(PlanError, match="4-bit int"):
        run_passes(Plan.identity(checkpoint(channel, config)), (Dequant(),))


def test_nested_and_disagreeing_quantization_blocks() -> None:
    """A stale nested block overrides the root in some runtimes: both go, and both must agree."""
    block = FP8_BLOCKS["quantization_config"]
    nested = {**FP8_BLOCKS, "text_config": {"quantization_config": block, "hidden_size": 8}}
    plan = run_passes(Plan.identity(checkpoint(fp8(128, 128), nested)), (Dequant(),))
    assert plan.config == {"model_type": ANY, "text_config": {"hidden_size": 8}}
    stale = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}
    other = {**FP8_BLOCKS, "text_config": stale}
    with pytest.raises(PlanError, match="disagree on the weight block"):
        run_passes(Plan.identity(checkpoint(fp8(128, 128), other)), (Dequant(),))


def test_u8_scales_are_exponents_only_by_declaration() -> None:
    tensors = fp8(128, 128)
    tensors["a.weight_scale_inv"] = TensorType("U8", (1, 1))
    with pytest.raises(PlanError, match="scale_fmt: ue8m0"):
        run_passes(Plan.identity(checkpoint(tensors, FP8_BLOCKS)), (Dequant(),))
    block = {**FP8_BLOCKS["quantization_config"], "scale_fmt": "ue8m0"}  # type: ignore[dict-item]
    stated = {"model_type": ANY, "quantization_config": block}
    run_passes(Plan.identity(checkpoint(tensors, stated)), (Dequant(),))


# ---- drop


def test_dropping_mtp_by_name_sets_its_count_to_zero() -> None:
    plan = run_passes(Plan.identity(published("deepseek-v3")), (Drop(what="mtp"), Dequant()))
    assert plan.config["num_nextn_predict_layers"] == 0
    assert not any(name.startswith("model.layers.61.") for name in plan.tensors)
    assert all(name.startswith("model.layers.61.") for name in plan.dropped)
    assert plan.bytes_dropped == sum(plan.checkpoint[n].type.nbytes for n in plan.dropped) > 0


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (Drop(), "give either"),
        (Drop(what="mtp", match="*"), "give either"),
        (Drop(match="x.*"), "needs `why:`"),
        (Drop(match="x.*", why="y"), "nothing matches"),
        (Drop(what="mtp"), "nothing to drop"),
    ],
)
def test_drop_says_what_it_needs(rule: Drop, said: str) -> None:
    plan = Plan.identity(checkpoint({"a.weight": TensorType("BF16", (4, 4))}))
    with pytest.raises(PlanError, match=f"drop: .*{said}"):
        run_passes(plan, (rule,))


def test_drop_comes_before_what_computes() -> None:
    with pytest.raises(PlanError, match="dropped here: put that pass later"):
        run_passes(Plan.identity(published("deepseek-v3")), (Dequant(), Drop(what="mtp")))


# ---- units and fingerprint


@pytest.mark.parametrize("model", sampled(headers.names(), 4))
def test_units_partition_the_outputs(model: str) -> None:
    start = Plan.identity(published(model))
    is_fp8 = any(o.type.dtype == "F8_E4M3" for o in start.tensors.values())
    plan = run_passes(start, (Dequant(),) if is_fp8 else ())
    cut = units(plan.tensors)
    made = [name for unit in cut for name in unit.names]
    assert sorted(made) == sorted(plan.tensors)
    assert sum(unit.write for unit in cut) == plan.bytes_out
    assert sum(unit.read for unit in cut) == plan.bytes_in


def test_every_output_byte_is_written_once() -> None:
    """Over an output made of copied rows, cut results and a shared result."""
    plan = run_passes(Plan.identity(checkpoint(fp8(384, 256), FP8_BLOCKS)), (Dequant(),))
    result = plan.tensors["a.weight"]
    plain = Source("b", TensorType("BF16", (4, 256)), 0, 0)
    tensors = {
        "x": concat([result.rows(128, 256), plain.rows(2, 4), result.rows(0, 128)]),
        "y": concat([plain.rows(0, 2), result.rows(256, 384)]),
    }
    (unit,) = units(tensors)
    for index, output in enumerate(unit.made):
        spans = []
        for step in unit.steps:
            if isinstance(step, Copy):
                found = (
                    [(step.at, step.at + step.stop - step.start)] if step.output == index else []
                )
            else:
                writes = [w for w in step.writes if w.output == index]
                found = [(w.at, w.at + w.stop - w.start) for w in writes]
            spans += found
        spans.sort()
        assert spans[0][0] == 0
        assert spans[-1][1] == output.type.nbytes
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    assert sum(isinstance(step, Compute) for step in unit.steps) == 1, "computed once"


def test_a_unit_of_one_node_is_that_of_any_nodes() -> None:
    """Its steps and bytes, which are made in a shorter way, against the general one."""
    steps = (ExpertsToAmx("int4", numa=2),)
    plans = [
        run_passes(Plan.identity(published("deepseek-v3")), (Dequant(),)),
        run_passes(_few("deepseek-v3"), steps),
        run_passes(_few("deepseek-v3"), (ExpertsToAmx("int8", numa=1),)),
    ]
    for plan in plans:
        cut = units(plan.tensors)
        short = [unit for unit in cut if unit.node is not None]
        assert len(short) > 50
        for unit in short:
            slow = _unit(unit.names, unit.made)
            assert slow.node is None
            assert (unit.steps, unit.read, unit.write, unit.peak) == (
                slow.steps, slow.read, slow.write, slow.peak
            )  # fmt: skip
        assert searched(cut) == searched([_unit(unit.names, unit.made) for unit in cut])


def test_walks_find_the_same_nodes_in_one_piece_or_several() -> None:
    plan = run_passes(Plan.identity(checkpoint(fp8(384, 256), FP8_BLOCKS)), (Dequant(),))
    result = plan.tensors["a.weight"]
    again, _ = apply(Amx("int8", 1, "reference"), result.rows(0, 128))
    cut = concat([result.rows(128, 256), result.rows(0, 128)])
    first, second = nodes([again])
    assert only_node(result) is first
    assert only_node(result.rows(1, 3)) is first
    assert only_node(again) is None, "it depends on two"
    assert only_node(cut) is None, "two pieces"
    assert only_node(plan.checkpoint["a.weight"].output) is None
    assert list(nodes([again, result, cut])) == [first, second]
    assert list(nodes([result, cut, again])) == [first, second]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), min_size=1, max_size=8))
def test_check_finds_the_first_byte_that_no_node_reads(cuts: list[tuple[int, int]]) -> None:
    """Rows of one source, read in any order, twice or not at all, against a set of its bytes."""
    start = Plan.identity(checkpoint({"a": TensorType("F32", (16,))}, {"model_type": ANY}))
    source = start.checkpoint["a"]
    made = [apply(ToBf16(), source.rows(at, at + size))[0] for at, size in cuts]
    plan = replace(start, tensors={f"b.{number}": output for number, output in enumerate(made)})
    read = {byte for at, size in cuts for byte in range(4 * at, 4 * (at + size))}
    hole = min(set(range(64)) - read, default=None)
    if hole is None:
        assert plan.check() is plan
    else:
        with pytest.raises(PlanError, match=f"tensor 'a', bytes from {hole} on, reaches no output"):
            plan.check()


def test_other_files_leave_what_is_known_of_the_tensors() -> None:
    plan = run_passes(Plan.identity(published("deepseek-v3")), (Dequant(),))
    other = plan.beside(new_files={"README.md": "text"})
    assert other.new_files == {"README.md": "text"}
    assert other.nodes is plan.nodes
    fresh = replace(plan, new_files={"README.md": "text"})
    assert other.losses() == fresh.losses()
    assert other.role_index.places == fresh.role_index.places
    assert other.fingerprint() == fresh.fingerprint() != plan.fingerprint()


def test_roles_are_of_the_names_there_are() -> None:
    """Of as many tensors as the source has, one of which has the name of another role."""
    plan = Plan.identity(published("deepseek-v3"))
    name, other = (f"model.layers.3.mlp.experts.{n}.up_proj.weight" for n in (0, 999))
    assert other not in plan.tensors
    found = {other if each == name else each: output for each, output in plan.tensors.items()}
    renamed = replace(plan, tensors=found)
    assert plan.role_index.places[name].expert == 0
    assert name not in renamed.role_index.places
    assert renamed.role_index.places[other].expert == 999


def _few(model: str) -> Plan:
    found = headers.few(model)
    return Plan.identity(checkpoint(found.tensors, found.config))


def test_fingerprint_tells_plans_apart() -> None:
    base = checkpoint(fp8(256, 256), FP8_BLOCKS)
    identity, converted = Plan.identity(base), run_passes(Plan.identity(base), (Dequant(),))
    other_block = {"quant_method": "fp8", "weight_block_size": [128, 128], "x": 1}
    variants = [
        identity,
        converted,
        replace(converted, side_files=("a",)),
        replace(converted, config={**converted.config, "b": 1}),
        Plan.identity(replace(base, header_digest="1" * 64)),
        Plan.identity(
            checkpoint(fp8(256, 256), {**FP8_BLOCKS, "quantization_config": other_block})
        ),
    ]
    found = [plan.fingerprint() for plan in variants]
    assert len(set(found)) == len(found)
    assert run_passes(Plan.identity(base), (Dequant(),)).fingerprint() == converted.fingerprint()


def test_the_log_keeps_what_passes_did() -> None:
    plan = Plan.identity(checkpoint({"a.weight": TensorType("BF16", (4, 4))}))
    entry = LogEntry("x", {}, 1, None)
    assert plan.logged(entry, facts={"layout": "y"}).log == (entry,)
    assert plan.logged(entry, facts={"layout": "y"}).facts == {"layout": "y"}
