"""Experts prepared for TensorRT-LLM's MoE kernels: the maps, the op, the passes and the commands."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Model, Tensor, ran, read_shard, read_tensors, run_cli, unjudged
from hypothesis import given, settings
from hypothesis import strategies as st
from models import NVFP4_EXPERTS, nvfp4_moe
from ops_harness import buffer, run_op
from trtllm_layout import interleaved, shuffled, source_row

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.prepared import DERIVED, QUANT_METHOD
from qconvert.contrib.trtllm_gen.layout import (
    DerivedScalars,
    Rows,
    Scales,
    check_sizes,
    row_index,
    scale_index,
    tp_sizes,
)
from qconvert.contrib.trtllm_gen.prepare import Prepare, Unprepare
from qconvert.contrib.trtllm_gen.sglang_plugin import tp_slice
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RunError
from qconvert.core.graph import Op
from qconvert.ops.gather import Gather, Order, Scatter
from qconvert.plan.plan import Plan, run_passes
from qconvert.run.folder.prepare import prepare
from qconvert.run.work.options import RunOptions

_AT = "model.layers.1.mlp.experts"
_BOTH = pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
_GATED = pytest.mark.parametrize("gated", [True, False])


def prepared(model: Model, folder: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    source = model.write(folder / "source")
    ran("prepare", "trtllm-gen", source, folder / "out", "--jobs", "1")
    return read_tensors(folder / "out"), json.loads((folder / "out/config.json").read_bytes())


def plan_of(model: Model, folder: Path) -> Plan:
    return Plan.identity(Checkpoint.open(model.write(folder / "source")))


# --- maps ---------------------------------------------------------------------------------------


def test_rows_of_a_gated_tile() -> None:
    """n = 0, 1, 2: the shuffle takes rows 0, 4, 8 of [w3; w1] in turn, which are w3's 0, 2, 4; in
    [w1; w3] of 64 rows each w3 begins at 64. n = 8 takes row 1 in turn: w1's 0. n = 31 takes 31: w1's
    15. n = 32 takes 32: w3's 16."""
    found = row_index(128, True)
    assert [found[n] for n in (0, 1, 2, 8, 31, 32)] == [64, 66, 68, 0, 15, 80]


@_GATED
@pytest.mark.parametrize("rows", [128, 256, 4096])
def test_rows_step_by_step(rows: int, gated: bool) -> None:
    assert row_index(rows, gated).tolist() == [source_row(n, rows, gated) for n in range(rows)]


def test_scales_of_a_plain_tile() -> None:
    """Two words a row. Word 1 is 32 rows on at the same columns: row 32's source, 32, whose first word
    is 64. Word 4 is prepared row 1, which is row 4: word 8. Word 128 * 1 begins the second tile of
    columns: row 0, word 1."""
    found = scale_index(128, 8, False)
    assert [found[n] for n in (0, 1, 4, 128)] == [0, 64, 8, 1]


# --- the op -------------------------------------------------------------------------------------


_ORDERS: list[tuple[Order, Callable[[bytes, int, bool], bytes]]] = [
    (Rows(True), shuffled), (Rows(False), shuffled),
    (Scales(True), interleaved), (Scales(False), interleaved),
]  # fmt: skip


@pytest.mark.parametrize(("order", "oracle"), _ORDERS)
@given(tiles=st.integers(1, 4), words=st.integers(1, 5), limit=st.sampled_from([1, 3000, 1 << 20]))
@settings(max_examples=15)
def test_gather_and_scatter(
    order: Order, oracle: Callable[[bytes, int, bool], bytes], tiles: int, words: int, limit: int
) -> None:
    """Whole, in parts of any size, and back."""
    rows, columns = 128 * tiles, 4 * words
    data = random.Random(tiles * 31 + words).randbytes(rows * columns)
    kind = TensorType("U8", (rows // order.halves, columns))
    size = len(data) // order.halves
    ins = [buffer(kind, data[n * size : (n + 1) * size]) for n in range(order.halves)]
    gated = order.halves == 2
    wanted = oracle(data, rows, gated)
    (whole,), _ = run_op(Gather(order), ins)
    assert whole == wanted
    assert run_op(Gather(order), ins, limit)[0] == [wanted]
    made = buffer(TensorType("U8", (rows, columns)), wanted)
    assert b"".join(run_op(Scatter(order), [made])[0]) == data
    assert b"".join(run_op(Scatter(order), [made], limit)[0]) == data


def test_results_need_not_be_aligned() -> None:
    """The sink's memory begins where the file does."""
    data = random.Random(5).randbytes(128 * 8)
    kind = TensorType("F8_E4M3", (128, 8))
    room = memoryview(bytearray(128 * 8 + 1))[1:]
    op = Gather(Scales(False))
    op.run([buffer(kind, data)], [buffer(kind, data)._replace(data=room)], memoryview(bytearray()))
    assert bytes(room) == interleaved(data, 128, False)


@pytest.mark.parametrize(
    ("op", "shapes", "said"),
    [
        (Gather(Rows(True)), [(64, 8)], "expected 2 matrices"),
        (Gather(Rows(True)), [(64, 8), (64, 4)], "expected 2 matrices"),
        (Gather(Rows(True)), [(48, 8), (48, 8)], "whole tiles of 128 rows, found 96"),
        (Gather(Rows(False)), [(64, 8)], "whole tiles of 128 rows, found 64"),
        (Gather(Rows(False)), [(2, 128, 8)], "expected a matrix"),
        (Gather(Scales(False)), [(128, 6)], "whole words of 4, found 6"),
        (Scatter(Scales(True)), [(128, 6)], "whole words of 4, found 6"),
        (Scatter(Rows(True)), [(192, 8)], "whole tiles of 128 rows, found 192"),
    ],
)
def test_what_does_not_fit_is_refused(op: Op, shapes: list[tuple[int, ...]], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        op.infer(*(TensorType("U8", shape) for shape in shapes))


# --- derived scalars ----------------------------------------------------------------------------


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def derive(inverted: bool, gated: bool, *args: tuple[float, ...]) -> dict[str, list[float]]:
    experts = len(args[1])
    kinds = [
        TensorType("F32", (experts, 2) if gated and n % 2 == 0 else (experts,)) for n in range(4)
    ]
    ins = [buffer(kind, floats(*values)) for kind, values in zip(kinds, args, strict=True)]
    results, _ = run_op(DerivedScalars(inverted, gated), ins)
    return {
        name: list(struct.unpack(f"<{len(data) // 4}f", data))
        for name, data in zip(DERIVED, results, strict=True)
    }


def test_derived_of_multipliers() -> None:
    """a1 = max(1, 2, .5, .25) = 2, a2 = max(4, 2) = 4. g1 = 2 * gate, g2 = 4 * w2, g1_scale_c =
    1/4 * 2 * up."""
    found = derive(False, True, (1, 3, 5, 7), (0.5, 2), (1, 2, 0.5, 0.25), (4, 2))
    assert found == {
        "g1_alphas": [2, 10], "g2_alphas": [2, 8], "g1_scale_c": [1.5, 3.5],
        "w13_input_scale_quant": [0.5], "w2_input_scale_quant": [0.25],
    }  # fmt: skip


def test_derived_of_divisors() -> None:
    """The same numbers, inverted: min divisor 1/2 and 1/4, and the quantizing factors are those."""
    found = derive(True, True, (1, 0.5, 0.25, 0.125), (2, 0.5), (1, 0.5, 2, 4), (0.25, 0.5))
    assert found == {
        "g1_alphas": [2, 8], "g2_alphas": [2, 8], "g1_scale_c": [1, 4],
        "w13_input_scale_quant": [0.5, 0.5], "w2_input_scale_quant": [0.25, 0.25],
    }  # fmt: skip


def test_derived_of_plain_experts() -> None:
    """Without a gate the kernel only requantizes: 1/a2 an expert."""
    found = derive(False, False, (3, 5), (0.5, 2), (1, 2), (4, 2))
    assert found["g1_scale_c"] == [0.25, 0.25]
    assert found["g1_alphas"] == [6, 10]


@pytest.mark.parametrize("broken", [0.0, float("nan"), float("inf")])
def test_broken_scales_are_told(broken: float) -> None:
    with pytest.raises(RunError, match="g1_alphas is not a finite, positive number"):
        derive(False, True, (1, 1, broken, 1), (1, 1), (1, 1, 1, 1), (1, 1))


# --- the passes ---------------------------------------------------------------------------------


@_BOTH
@_GATED
def test_prepared_tensors(dialect: str, gated: bool, tmp_path: Path) -> None:
    """Every fused tensor against the oracle; what is no expert's is untouched."""
    model = nvfp4_moe(dialect, gated=gated, intermediate=128, hidden=256)
    made, _ = prepared(model, tmp_path)
    first = ("gate_proj", "up_proj")[not gated :]
    weight = "weight" if dialect == "modelopt" else "weight_packed"
    for parameter, oracle in ((weight, shuffled), ("weight_scale", interleaved)):
        columns = {"weight_scale": 16}.get(parameter, 2)
        w13, w2 = b"", b""
        for expert in range(NVFP4_EXPERTS):
            ins = [model.tensors[f"{_AT}.{expert}.{p}.{parameter}"].data for p in first]
            w13 += oracle(b"".join(ins), 128 * len(first), gated)
            w2 += oracle(model.tensors[f"{_AT}.{expert}.down_proj.{parameter}"].data, 256, False)
        dtype = "F8_E4M3" if columns == 16 else "U8"
        shape = (NVFP4_EXPERTS, 128 * len(first), 256 // columns)
        assert made[f"{_AT}.w13_{parameter}"] == Tensor(dtype, shape, w13)
        assert made[f"{_AT}.w2_{parameter}"] == Tensor(
            dtype, (NVFP4_EXPERTS, 256, 128 // columns), w2
        )
    others = {name for name in model.tensors if ".experts." not in name}
    assert {name: made[name] for name in others} == {name: model.tensors[name] for name in others}
    assert len(made) == len(others) + 2 * (8 + len(DERIVED))


@_BOTH
def test_scalars_are_fused_and_derived(dialect: str, tmp_path: Path) -> None:
    """Per-tensor scales in the order gate, up; what follows from them as numpy computes it."""
    model = nvfp4_moe(dialect)
    made, _ = prepared(model, tmp_path)
    tensor = "weight_scale_2" if dialect == "modelopt" else "weight_global_scale"
    activation = "input_scale" if dialect == "modelopt" else "input_global_scale"

    def numbers(name: str, *projections: str) -> Any:
        data = [
            [model.tensors[f"{_AT}.{e}.{p}.{name}"].data for p in projections]
            for e in range(NVFP4_EXPERTS)
        ]
        return np.frombuffer(b"".join(map(b"".join, data)), np.float32).reshape(NVFP4_EXPERTS, -1)

    w13, in13 = (numbers(name, "gate_proj", "up_proj") for name in (tensor, activation))
    w2, in2 = (numbers(name, "down_proj")[:, 0] for name in (tensor, activation))
    assert made[f"{_AT}.w13_{tensor}"] == Tensor("F32", (NVFP4_EXPERTS, 2), w13.tobytes())
    assert made[f"{_AT}.w2_{activation}"] == Tensor("F32", (NVFP4_EXPERTS,), in2.tobytes())
    if dialect == "modelopt":
        a1, a2 = in13.max(), in2.max()
        quant = [1 / a1, 1 / a2]
    else:
        quant = [in13.min(), in2.min()]
        a1, a2 = 1 / quant[0], 1 / quant[1]
        w13, w2 = 1 / w13, 1 / w2
    wanted = (a1 * w13[:, 0], a2 * w2, quant[1] * (a1 * w13[:, 1]))
    for name, value in zip(DERIVED, wanted, strict=False):
        assert made[f"{_AT}.{name}"] == Tensor("F32", (NVFP4_EXPERTS,), value.tobytes())
    for name, value in zip(DERIVED[3:], quant, strict=True):
        found = np.frombuffer(made[f"{_AT}.{name}"].data, np.float32)
        assert (found == value).all()
        assert made[f"{_AT}.{name}"].shape == (() if dialect == "modelopt" else (NVFP4_EXPERTS,))


@_BOTH
@_GATED
@pytest.mark.parametrize("inputs", [True, False])
def test_round_trip(dialect: str, gated: bool, inputs: bool, tmp_path: Path) -> None:
    """prepare, then unprepare: the tensors and the config are the source's."""
    model = nvfp4_moe(dialect, gated=gated, inputs=inputs, intermediate=128)
    model.side_files["hf_quant_config.json"] = b'{"quantization":   {"quant_algo": "NVFP4"}}'
    prepared(model, tmp_path)
    ran("unprepare", tmp_path / "out", tmp_path / "back", "--jobs", "1")
    assert read_tensors(tmp_path / "back") == model.tensors
    assert json.loads((tmp_path / "back/config.json").read_bytes()) == model.config
    for name, data in model.side_files.items():
        assert (tmp_path / "back" / name).read_bytes() == data
    assert not (tmp_path / "back/PREPARED.md").exists()
    table, _ = read_shard(next((tmp_path / "back").glob("*.safetensors")))
    assert table["__metadata__"] == {"format": "pt"}


def test_the_marker(tmp_path: Path) -> None:
    """A quant_method of nobody's, the layout, the source's block; the same in the files' metadata and
    the manifest."""
    model = nvfp4_moe()
    model.side_files["hf_quant_config.json"] = b"{}"
    _, config = prepared(model, tmp_path)
    block = config["quantization_config"]
    assert isinstance(block, dict)
    assert block["quant_method"] == QUANT_METHOD
    assert block["replaced"] == [
        {"at": ["quantization_config"], "block": model.config["quantization_config"]}
    ]
    layout = block["layout"]
    assert (layout["hidden_size"], layout["intermediate_size"], layout["num_experts"]) == (
        128,
        64,
        3,
    )
    assert not (tmp_path / "out/hf_quant_config.json").exists()
    table, _ = read_shard(next((tmp_path / "out").glob("*.safetensors")))
    marked = json.loads(table["__metadata__"]["trtllm_gen"])
    manifest = json.loads((tmp_path / "out/qconvert.json").read_bytes())
    assert {k: layout[k] for k in manifest["trtllm_gen"]} == manifest["trtllm_gen"]
    assert {k: marked[k] for k in manifest["trtllm_gen"]} == manifest["trtllm_gen"]
    assert "experimental" in (tmp_path / "out/PREPARED.md").read_text()
    card = (tmp_path / "out/README.md").read_text()
    assert "PREPARED.md says how to serve it" in card
    assert "vllm serve" not in card


def test_nested_blocks_go_back_to_their_places(tmp_path: Path) -> None:
    model = nvfp4_moe()
    block = model.config.pop("quantization_config")
    model.config["text_config"] = {"quantization_config": block, "a": 1}
    _, config = prepared(model, tmp_path)
    assert config["text_config"] == {"a": 1}
    done = ran("unprepare", tmp_path / "out", tmp_path / "back", "--jobs", "1")
    # Where they stood, sglang does not look: as wrong as before, which is said.
    assert "QC037" in done.err
    assert json.loads((tmp_path / "back/config.json").read_bytes()) == model.config


def test_without_input_scales_it_is_said(tmp_path: Path) -> None:
    source = nvfp4_moe(inputs=False).write(tmp_path / "source")
    result = run_cli("prepare", "trtllm-gen", source, tmp_path / "out", "--jobs", "1")
    assert "no input scales, so g1_alphas, " in result.err
    made = read_tensors(tmp_path / "out")
    assert not [name for name in made if name.endswith(DERIVED) or "input_scale" in name]
    assert f"{_AT}.w13_weight_scale_2" in made


def test_other_layers_stay(tmp_path: Path) -> None:
    """A layer of BF16 experts among NVFP4 ones: carried along, counted, and told."""
    model = nvfp4_moe()
    first = "model.layers.0.mlp.experts."
    for name in [name for name in model.tensors if name.startswith(first)]:
        value = model.tensors.pop(name)
        if name.endswith(".weight"):
            rows, columns = value.shape
            model.tensors[name] = Tensor("BF16", (rows, 2 * columns), bytes(4 * rows * columns))
    model.config["quantization_config"]["ignore"].append("model.layers.0.mlp.experts*")
    source = model.write(tmp_path / "source")
    result = ran("prepare", "trtllm-gen", source, tmp_path / "out", "--jobs", "1")
    assert "model.layers.0.mlp.experts is not NVFP4 and stays" in result.err
    made = read_tensors(tmp_path / "out")
    assert f"{first}0.up_proj.weight" in made
    # The rules know one format of experts a model, so the command line would refuse.
    unjudged("passes: [unprepare]", tmp_path / "out", tmp_path / "back")
    assert read_tensors(tmp_path / "back") == model.tensors


def without(model: Model, name: str) -> None:
    del model.tensors[name]


def retyped(model: Model, name: str, value: Tensor) -> None:
    assert name in model.tensors
    model.tensors[name] = value


_ONE = f"{_AT}.1.up_proj"
_BROKEN: list[tuple[str, Callable[[Model], object]]] = [
    (f"'{_ONE}.weight_scale' is missing", lambda m: without(m, f"{_ONE}.weight_scale")),
    (f"'{_ONE}.input_scale' is missing", lambda m: without(m, f"{_ONE}.input_scale")),
    (
        f"'{_ONE}.bias' is not a parameter",
        lambda m: m.tensors.update({f"{_ONE}.bias": Tensor("BF16", (64,), bytes(128))}),
    ),
    (
        f"'{_AT}.7.up_proj': the config counts 3 experts",
        lambda m: m.tensors.update({f"{_AT}.7.up_proj.weight": m.tensors[f"{_ONE}.weight"]}),
    ),
    (
        rf"'{_ONE}.weight_scale': expected F8_E4M3 \[64, 8\], found F8_E4M3 \[64, 4\]",
        lambda m: retyped(m, f"{_ONE}.weight_scale", Tensor("F8_E4M3", (64, 4), bytes(256))),
    ),
    (
        rf"'{_ONE}.weight_scale_2': expected F32 \[\], found F32 \[2\]",
        lambda m: retyped(m, f"{_ONE}.weight_scale_2", Tensor("F32", (2,), bytes(8))),
    ),
    (
        rf"{_AT.replace('.1.', '.0.')}.0.down_proj.weight_scale_2': expected one element",
        lambda m: retyped(
            m, f"{_AT.replace('.1.', '.0.')}.0.down_proj.weight_scale_2", Tensor("F32", (2,), bytes(8))
        ),
    ),
    ("the config counts no experts", lambda m: m.config.update(num_experts=0)),
    ("matched 9 of 18 expert matrices expected from the config", lambda m: _drop_layer(m)),
    ("no expert has its own matrix in NVFP4", lambda m: _drop_layer(m, 0, 1)),
]  # fmt: skip


def _drop_layer(model: Model, *layers: int) -> None:
    for layer in layers or (0,):
        for name in [
            n for n in model.tensors if n.startswith(f"model.layers.{layer}.mlp.experts.")
        ]:
            del model.tensors[name]


@pytest.mark.parametrize(("said", "change"), _BROKEN, ids=[said[:40] for said, _ in _BROKEN])
def test_what_is_missing_is_named(
    said: str, change: Callable[[Model], object], tmp_path: Path
) -> None:
    model = nvfp4_moe()
    change(model)
    with pytest.raises(PlanError, match=said):
        run_passes(plan_of(model, tmp_path), [Prepare()])


@pytest.mark.parametrize(
    ("hidden", "intermediate", "gated", "said"),
    [
        (128, 96, True, r"whole 64s \(gated experts, tiles of 128 rows\), found 96"),
        (128, 64, False, r"whole 128s \(plain experts, tiles of 128 rows\), found 64"),
        (2880, 2880, True, "hidden size in whole 128s"),
        (192, 64, True, "hidden size in whole 128s"),
    ],
)
def test_sizes_that_are_padded_are_refused(
    hidden: int, intermediate: int, gated: bool, said: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=said):
        check_sizes(hidden, intermediate, gated)
    if hidden < 1000:
        model = nvfp4_moe(hidden=hidden, intermediate=intermediate, gated=gated)
        with pytest.raises(PlanError, match=rf"prepare: model.layers.0.mlp.experts: .*{said}"):
            run_passes(plan_of(model, tmp_path), [Prepare()])


def test_a_clamp_asks_for_one_scale(tmp_path: Path) -> None:
    """With swiglu_limit the runtime rescales halves of what is mixed by then, where scales differ."""
    model = nvfp4_moe()
    model.config["swiglu_limit"] = 7.0
    with pytest.raises(PlanError, match="one weight_scale_2 of gate and up, found two"):
        run_passes(plan_of(model, tmp_path), [Prepare()])
    for layer in range(2):
        for expert in range(NVFP4_EXPERTS):
            at = f"model.layers.{layer}.mlp.experts.{expert}"
            model.tensors[f"{at}.up_proj.weight_scale_2"] = model.tensors[
                f"{at}.gate_proj.weight_scale_2"
            ]
    run_passes(plan_of(model, tmp_path), [Prepare()])


def test_layers_must_be_alike(tmp_path: Path) -> None:
    model = nvfp4_moe()
    for name in [name for name in model.tensors if _AT in name and name.endswith("input_scale")]:
        del model.tensors[name]
    said = f"{_AT}: .* 3 gated experts of modelopt, .* with input scales, found .* without input"
    with pytest.raises(PlanError, match=said):
        run_passes(plan_of(model, tmp_path), [Prepare()])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda block: block.pop("replaced"), "marker of a prepared folder is broken"),
        (lambda block: block.update(layout=3), "marker of a prepared folder is broken"),
        (
            lambda block: block["layout"].update(dialect="x"),
            "layout of a prepared folder is broken",
        ),
        (lambda block: block["layout"].pop("gated"), "layout of a prepared folder is broken"),
    ],
)
def test_broken_markers(change: Callable[[Any], object], said: str, tmp_path: Path) -> None:
    made, config = prepared(nvfp4_moe(), tmp_path)
    change(config["quantization_config"])
    plan = Plan.identity(Checkpoint.open(Model(config, made).write(tmp_path / "broken")))
    with pytest.raises(PlanError, match=said):
        run_passes(plan, [Unprepare()])


def test_prepared_twice_is_refused(tmp_path: Path) -> None:
    """Also where somebody has put the old config.json back."""
    model = nvfp4_moe()
    prepared(model, tmp_path)
    plan = Plan.identity(Checkpoint.open(tmp_path / "out"))
    with pytest.raises(PlanError, match="already prepared"):
        run_passes(plan, [Prepare()])
    (tmp_path / "out/config.json").write_text(json.dumps(model.config), encoding="utf-8")
    with pytest.raises(PlanError, match="already prepared"):
        run_passes(Plan.identity(Checkpoint.open(tmp_path / "out")), [Prepare()])


def test_unprepare_wants_a_marker_and_all_parts(tmp_path: Path) -> None:
    model = nvfp4_moe()
    with pytest.raises(PlanError, match="expected a source that `qconvert prepare` made"):
        run_passes(plan_of(model, tmp_path), [Unprepare()])
    made, config = prepared(model, tmp_path)
    del made[f"{_AT}.w2_weight_scale"]
    broken = Plan.identity(Checkpoint.open(Model(config, made).write(tmp_path / "broken")))
    with pytest.raises(PlanError, match=rf"'{_AT}.w2_weight_scale' is missing"):
        run_passes(broken, [Unprepare()])
    config["quantization_config"]["layout"]["version"] = 2  # type: ignore[index]
    other = Plan.identity(Checkpoint.open(Model(config, made).write(tmp_path / "other")))
    with pytest.raises(
        PlanError, match=r"expected layout trtllm-gen version 1, found .* version 2"
    ):
        run_passes(other, [Unprepare()])


def test_an_expert_is_worked_on_in_parts(tmp_path: Path) -> None:
    """No step needs a whole matrix of an expert: a tile of its arguments and results does."""
    model = nvfp4_moe(hidden=1024, intermediate=512, experts=2)
    ready = prepare(run_passes(plan_of(model, tmp_path), [Prepare()]), RunOptions(jobs=1))
    tile = 128 * 1024 // 2
    assert max(unit.peak for unit in ready.units) <= 3 * tile < 512 * 1024 // 2


# --- tensor-parallel slices -----------------------------------------------------------------------


def test_tp_sizes() -> None:
    assert tp_sizes(2048, True) == [1, 2, 4, 8, 16, 32]
    assert tp_sizes(1536, True) == [1, 2, 4, 8]
    assert tp_sizes(2048, False) == [1, 2, 4, 8, 16]


def prepared_arrays(
    w13: list[bytes], w2: bytes, hidden: int, intermediate: int, scales: bool
) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.uint8]], ...]:
    """One expert's w13 and w2 as the op prepares them, [1, rows, columns]."""
    order = Scales if scales else Rows
    divisor = 16 if scales else 2
    gated = len(w13) == 2
    first = TensorType("U8", (intermediate, hidden // divisor))
    last = TensorType("U8", (hidden, intermediate // divisor))
    (a,), _ = run_op(Gather(order(gated)), [buffer(first, data) for data in w13])
    (b,), _ = run_op(Gather(order(False)), [buffer(last, w2)])
    rows = len(w13) * intermediate
    return (
        np.frombuffer(a, np.uint8).reshape(1, rows, -1),
        np.frombuffer(b, np.uint8).reshape(1, hidden, -1),
    )


@given(
    tp=st.sampled_from([1, 2, 4]), steps=st.integers(1, 3), tiles=st.integers(1, 2),
    gated=st.booleans(), scales=st.booleans(), seed=st.integers(0, 1 << 30),
)  # fmt: skip
@settings(max_examples=40)
def test_a_slice_of_the_prepared_is_the_slice_prepared(
    tp: int, steps: int, tiles: int, gated: bool, scales: bool, seed: int
) -> None:
    """For every rank: cutting w1, w3 by rows and w2 by columns, then preparing, gives the ranges that
    `tp_slice` takes of the whole."""
    hidden, intermediate = 128 * tiles, (64 if gated else 128) * tp * steps
    divisor = 16 if scales else 2
    draw = random.Random(seed)
    w13 = [draw.randbytes(intermediate * hidden // divisor) for _ in range(1 + gated)]
    w2 = draw.randbytes(hidden * intermediate // divisor)
    whole = prepared_arrays(w13, w2, hidden, intermediate, scales)
    share, width = intermediate // tp, intermediate // divisor // tp
    for rank in range(tp):
        size = share * hidden // divisor
        rows = [data[rank * size : (rank + 1) * size] for data in w13]
        grid = np.frombuffer(w2, np.uint8).reshape(hidden, -1)
        columns = grid[:, rank * width : (rank + 1) * width].tobytes()
        wanted = prepared_arrays(rows, columns, hidden, share, scales)
        for name, prepared_whole, alone in zip(("w13", "w2"), whole, wanted, strict=True):
            parameter = f"{name}_weight_scale" if scales else f"{name}_weight"
            found = tp_slice(parameter, prepared_whole, rank, tp)
            assert (found == alone).all()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("w13_weight", (1, 128, 64)),
        ("w13_weight_scale", (1, 128, 8)),
        ("w2_weight_packed", (1, 128, 32)),
        ("w2_weight_scale", (1, 128, 4)),
    ],
)
def test_slices_do_not_cut_tiles(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"{name}: .* are not whole tiles"):
        tp_slice(name, np.zeros(shape, np.uint8), 0, 2)
