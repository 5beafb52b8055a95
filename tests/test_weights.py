"""Experts in every form they are stored in become the bytes that AMX codes of their bf16 values are:
small real checkpoints through the command line, decoded here by torch and numpy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from amx_rows import Bits, bf16
from checkpoints import (
    Model,
    Result,
    Tensor,
    published,
    read_tensors,
    run_cli,
    tree,
    watched_reads,
    without,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_harness import buffer, run_op

from qconvert.checkpoint.checkpoint import MANIFEST
from qconvert.cli.progress import Bar
from qconvert.core.dtypes import TensorType
from qconvert.core.graph import Source
from qconvert.formats.amx.encode import Amx, Rounding
from qconvert.formats.amx.format import Method
from qconvert.formats.base import Stored
from qconvert.formats.fp8.decode import DequantFp8
from qconvert.formats.int_packed.decode import DequantInts
from qconvert.models.experts import STALE_RULE
from qconvert.ops.cast import ToBf16
from qconvert.ops.rowwise import Decoder
from qconvert.ops.transpose import Columns
from qconvert.validation.findings import Proved, Skipped
from qconvert.validators.weights.weights import _calibrated

Key = tuple[int, int, str]  # layer, expert, projection
Matrices = dict[Key, Bits]

EXPERTS = 2
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
OTHER_LAYERS = "elsewhere: no routed expert; the runtime reads it from its GPU side"


@dataclass
class Case:
    """A checkpoint, and the bf16 matrix [rows, columns] that each of its projections is."""

    model: Model
    matrices: Matrices = field(default_factory=dict)


def shape_of(kind: str, hidden: int, intermediate: int) -> tuple[int, int]:
    return (hidden, intermediate) if kind == "down_proj" else (intermediate, hidden)


def weights(rows: int, columns: int, seed: int) -> Bits:
    """Eight bits between 2^-13 and 4, of both signs, and zeros of both: float16 holds each."""
    random = np.random.default_rng(seed)
    size = np.ldexp(
        random.integers(128, 256, (rows, columns)) / 128, random.integers(-13, 2, rows)[:, None]
    )
    found = bf16(size * random.choice([-1.0, -0.0, 0.0, 1.0, 1.0, -1.0], (rows, columns)))
    assert np.array_equal(floats(found).astype(np.float16).astype(np.float32), floats(found))
    return found


def floats(bits: Bits) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bits_of(values: torch.Tensor) -> Bits:
    found: Bits = values.contiguous().view(torch.int16).numpy().view(np.uint16)
    return found


def raw(dtype: str, values: np.ndarray[Any, Any]) -> Tensor:
    return Tensor(dtype, tuple(values.shape), np.ascontiguousarray(values).tobytes())


def config(family: str, hidden: int, intermediate: int, layers: int, **more: Any) -> dict[str, Any]:
    count = "n_routed_experts" if family in ("kimi_k2", "deepseek_v3") else "num_experts"
    return {
        "model_type": family,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        count: EXPERTS,
        "moe_intermediate_size": intermediate,
        "tie_word_embeddings": False,
        **more,
    }


def others(prefix: str, layers: int, hidden: int) -> dict[str, Tensor]:
    """Some of a model's other tensors: what the runtime reads from its GPU side."""
    found = {f"{prefix}embed_tokens.weight": raw("BF16", weights(10, hidden, 1))}
    for layer in range(layers):
        at = f"{prefix}layers.{layer}"
        found[f"{at}.input_layernorm.weight"] = raw("BF16", weights(1, hidden, 2)[0])
        found[f"{at}.mlp.gate.weight"] = raw("BF16", weights(EXPERTS, hidden, 3))
    found["lm_head.weight"] = raw("BF16", weights(10, hidden, 4))
    return found


# How one matrix is stored: tensors by what follows the module's name, and its bf16 values.
Form = Callable[[int, int, int], tuple[dict[str, Tensor], Bits]]


def plain(dtype: str) -> Form:
    kinds = {"F16": np.float16, "F32": np.float32}

    def form(rows: int, columns: int, seed: int) -> tuple[dict[str, Tensor], Bits]:
        bits = weights(rows, columns, seed)
        stored = bits if dtype == "BF16" else floats(bits).astype(kinds[dtype])
        return {".weight": raw(dtype, stored)}, bits

    return form


def fp8(block: tuple[int, int] | None, scale_dtype: str, suffix: str = ".weight_scale_inv") -> Form:
    """Blocks of [b0, b1], or, without, a scale a row. Scales are no powers of two."""

    def form(rows: int, columns: int, seed: int) -> tuple[dict[str, Tensor], Bits]:
        random = np.random.default_rng(seed)
        codes = random.integers(0, 256, (rows, columns), dtype=np.uint8)
        codes[codes & 0x7F == 0x7F] = 0x7E
        height, width = block or (1, columns)
        grid = -(-rows // height), -(-columns // width)
        scale = torch.from_numpy(random.uniform(0.001, 0.02, grid).astype(np.float32))
        if scale_dtype == "BF16":
            stored = raw("BF16", bits_of(scale.bfloat16()))
            scale = scale.bfloat16().float()
        else:
            stored = raw("F32", scale.numpy())
        spread = scale.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
        values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float() * spread
        tensors = {".weight": raw("F8_E4M3", codes), suffix: stored}
        return tensors, bits_of(values.bfloat16())

    return form


def int4(rows: int, columns: int, seed: int) -> tuple[dict[str, Tensor], Bits]:
    """compressed-tensors: eight codes + 8 a word, the first lowest, in groups of 32."""
    random = np.random.default_rng(seed)
    codes = random.integers(-8, 8, (rows, columns))
    scale = torch.from_numpy(random.uniform(0.001, 0.02, (rows, columns // 32))).bfloat16()
    words = np.zeros((rows, columns // 8), np.int64)
    for i in range(8):
        words |= (codes[:, i::8] + 8) << (4 * i)
    values = torch.from_numpy(codes).float() * scale.float().repeat_interleave(32, 1)
    tensors = {
        ".weight_packed": raw("I32", words.astype(np.uint32).view(np.int32)),
        ".weight_scale": raw("BF16", bits_of(scale)),
        ".weight_shape": raw("I32", np.array([rows, columns], np.int32)),
    }
    return tensors, bits_of(values.bfloat16())


def compressed(**scheme: Any) -> dict[str, Any]:
    group = {"weights": scheme, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def in_blocks(*block: int) -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}


CHANNEL = compressed(type="float", num_bits=8, strategy="channel", symmetric=True)
GROUPS = compressed(type="int", num_bits=4, strategy="group", group_size=32, symmetric=True)


def apart(
    form: Form,
    hidden: int,
    intermediate: int,
    quantization: dict[str, Any] | None = None,
    family: str = "qwen3_moe",
    layers: int = 2,
    **more: Any,
) -> Case:
    """A matrix an expert, in the form given, in all layers that the config does not call dense."""
    if quantization is not None:
        more["quantization_config"] = quantization
    tensors = others("model.", layers, hidden)
    case = Case(Model(config(family, hidden, intermediate, layers, **more), tensors))
    for layer in range(more.get("first_k_dense_replace", 0), layers):
        put_apart(case, f"model.layers.{layer}.mlp.experts", layer, form, hidden, intermediate)
    return case


def put_apart(case: Case, at: str, layer: int, form: Form, hidden: int, intermediate: int) -> None:
    for expert in range(EXPERTS):
        for number, kind in enumerate(PROJECTIONS):
            seed = 100 * layer + 10 * expert + number
            made, bits = form(*shape_of(kind, hidden, intermediate), seed)
            module = f"{at}.{expert}.{kind}"
            case.model.tensors.update({module + suffix: value for suffix, value in made.items()})
            case.matrices[layer, expert, kind] = bits


def stacked(
    family: str, hidden: int, intermediate: int, *, turned: bool, layers: int = 2, **more: Any
) -> Case:
    """BF16 stacks: [E, 2I, H] and [E, H, I], or, turned, [E, H, 2I] and [E, I, H]."""
    prefix = "model.language_model." if family == "qwen3_vl_moe" else "model."
    tensors = others(prefix, layers, hidden)
    case = Case(Model(config(family, hidden, intermediate, layers, **more), tensors))
    for layer in range(layers):
        both, down = [], []
        for expert in range(EXPERTS):
            seed = 100 * layer + 10 * expert
            gate, up = (weights(intermediate, hidden, seed + i) for i in range(2))
            last = weights(hidden, intermediate, seed + 2)
            both.append(np.concatenate([gate, up]))
            down.append(last)
            for kind, bits in zip(PROJECTIONS, (gate, up, last), strict=True):
                case.matrices[layer, expert, kind] = bits
        for name, found in (("gate_up_proj", both), ("down_proj", down)):
            stack = np.stack([m.T if turned else m for m in found])
            tensors[f"{prefix}layers.{layer}.mlp.experts.{name}"] = raw("BF16", stack)
    return case


def stacked_fp8(hidden: int, intermediate: int, block: int) -> Case:
    """FP8 stacks with scales beside them, rows of gate and up in one matrix."""
    case = Case(
        Model(
            config("qwen3_5_moe_text", hidden, intermediate, 1,
                   quantization_config=in_blocks(block, block)),
            others("model.", 1, hidden),
        )
    )  # fmt: skip
    form = fp8((block, block), "F32", "_scale_inv")
    shapes = {"gate_up_proj": (2 * intermediate, hidden), "down_proj": (hidden, intermediate)}
    for number, (name, shape) in enumerate(shapes.items()):
        made = [form(*shape, 10 * expert + number) for expert in range(EXPERTS)]
        for suffix in (".weight", "_scale_inv"):
            each = [tensors[suffix] for tensors, _ in made]
            stack = Tensor(
                each[0].dtype, (EXPERTS, *each[0].shape), b"".join(value.data for value in each)
            )
            at = f"model.layers.0.mlp.experts.{name}{suffix.removeprefix('.weight')}"
            case.model.tensors[at] = stack
        for expert, (_, bits) in enumerate(made):
            if name == "down_proj":
                case.matrices[0, expert, name] = bits
            else:
                case.matrices[0, expert, "gate_proj"] = bits[:intermediate]
                case.matrices[0, expert, "up_proj"] = bits[intermediate:]
    return case


# --- what comes out ---------------------------------------------------------------------------


def wanted(
    matrices: Mapping[Key, Bits], method: Method, numa: int, rounding: Rounding = "reference"
) -> dict[str, Tensor]:
    """Every tensor of the result: Amx of the reference matrices, cut here."""
    found: dict[str, Tensor] = {}
    for (layer, expert, kind), bits in matrices.items():
        parts = np.split(bits, numa, axis=1 if kind == "down_proj" else 0)
        for shard, part in enumerate(parts):
            source = buffer(TensorType("BF16", part.shape), part.tobytes())
            (weight, scale), _ = run_op(Amx(method, 1, rounding), [source])
            base = f"blk.{layer}.ffn_{kind.removesuffix('_proj')}_exps.{expert}.numa.{shard}"
            found[f"{base}.weight"] = Tensor("I8", (len(weight),), weight)
            found[f"{base}.scale"] = Tensor("F32", (part.shape[0],), scale)
    return found


def amx(source: Path, out: Path, method: Method, numa: int, *more: str) -> Result:
    """`qconvert amx` in this process."""
    words = ("--method", method, "--numa", str(numa), *more)
    jobs = () if "--jobs" in more else ("--jobs", "1")
    return run_cli("amx", source, out, *words, *jobs)


def converted(case: Case, folder: Path, method: Method, numa: int, *more: str) -> Path:
    source, out = case.model.write(folder / "source"), folder / "out"
    result = amx(source, out, method, numa, *more)
    assert result.code == 0, result.err
    return out


def check(case: Case, folder: Path, method: Method, numa: int, *more: str) -> None:
    found = read_tensors(converted(case, folder, method, numa, *more))
    expected = wanted(case.matrices, method, numa)
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert found[name] == value, name


def refused(case: Case, folder: Path, method: Method, numa: int, *more: str) -> str:
    """The one sentence of a refusal; nothing is published."""
    out = folder / "out"
    result = amx(case.model.write(folder / "source"), out, method, numa, *more)
    assert result.code == 1
    assert result.out == ""
    assert published(out) == []
    assert "Traceback" not in result.err
    last = result.err.splitlines()[-1]
    assert last.startswith("qconvert: error: ")
    return last


@pytest.mark.parametrize(("method", "numa"), [("int4", 1), ("int4", 2), ("int8", 2), ("int8", 4)])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_matrices_as_they_are(dtype: str, method: Method, numa: int, tmp_path: Path) -> None:
    check(apart(plain(dtype), 128, 256), tmp_path, method, numa)


def test_one_value_in_three_dtypes_is_one_result(tmp_path: Path) -> None:
    found = []
    for dtype in ("BF16", "F16", "F32"):
        out = converted(apart(plain(dtype), 128, 128), tmp_path / dtype, "int4", 1)
        found.append(read_tensors(out))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("scale", ["F32", "BF16"])
@pytest.mark.parametrize("block", [128, 32])
@pytest.mark.parametrize(
    ("method", "intermediate", "numa"),
    [
        ("int4", 256, 2),
        ("int8", 256, 4),  # shards of 64 rows: half a block of 128
        ("int8", 192, 3),  # and blocks that the matrix ends within
        ("int8", 320, 5),
    ],
)
def test_fp8_in_blocks(
    scale: str, block: int, method: Method, intermediate: int, numa: int, tmp_path: Path
) -> None:
    case = apart(fp8((block, block), scale), 128, intermediate, in_blocks(block, block), layers=1)
    check(case, tmp_path, method, numa)


def test_fp8_in_blocks_that_are_not_square(tmp_path: Path) -> None:
    """96 rows a block, shards of 64: cuts at 64 and 128 leave blocks of 32 rows."""
    check(apart(fp8((96, 48), "F32"), 128, 192, in_blocks(96, 48), layers=1), tmp_path, "int8", 3)


@pytest.mark.parametrize("scale", ["F32", "BF16"])
@pytest.mark.parametrize(("method", "intermediate", "numa"), [("int4", 256, 2), ("int8", 192, 3)])
def test_fp8_per_channel(
    scale: str, method: Method, intermediate: int, numa: int, tmp_path: Path
) -> None:
    case = apart(fp8(None, scale, ".weight_scale"), 128, intermediate, CHANNEL, layers=1)
    check(case, tmp_path, method, numa)


def test_fp8_per_tensor(tmp_path: Path) -> None:
    """One scale for a matrix that NUMA shards cut; beside it the activations' scale, which nobody
    needs, and modelopt's file, which no longer holds."""
    case = apart(fp8((256, 256), "F32", ".weight_scale"), 128, 256, layers=1)
    for name, value in list(case.model.tensors.items()):
        if name.endswith(".weight_scale"):
            scalar = value._replace(shape=())
            case.model.tensors[name] = scalar
            case.model.tensors[name.replace(".weight_scale", ".input_scale")] = scalar
    block = {"quantization": {"quant_algo": "FP8"}, "producer": {"name": "modelopt"}}
    case.model.side_files["hf_quant_config.json"] = json.dumps(block).encode()
    out = converted(case, tmp_path, "int4", 2)
    assert read_tensors(out) == wanted(case.matrices, "int4", 2)
    assert "hf_quant_config.json" not in published(out)


@pytest.mark.parametrize(("method", "intermediate", "numa"), [("int4", 256, 2), ("int8", 192, 3)])
@pytest.mark.parametrize(
    ("family", "turned"), [("qwen3_5_moe_text", False), ("qwen3_vl_moe", True)]
)
def test_stacks(
    family: str, turned: bool, method: Method, intermediate: int, numa: int, tmp_path: Path
) -> None:
    check(stacked(family, 128, intermediate, turned=turned), tmp_path, method, numa)


@pytest.mark.parametrize(
    ("block", "method", "intermediate", "numa"),
    [
        (128, "int4", 256, 2),
        (128, "int8", 192, 3),  # row 192, where up begins, lies within a block
        (32, "int8", 192, 1),
    ],
)
def test_fp8_stacks(
    block: int, method: Method, intermediate: int, numa: int, tmp_path: Path
) -> None:
    check(stacked_fp8(128, intermediate, block), tmp_path, method, numa)


@pytest.mark.parametrize("scales", ["[E]", "[E, 1, 1]", "[E, N]", "[E, N, 1]"])
def test_fp8_stacks_without_blocks(scales: str, tmp_path: Path) -> None:
    """A scale an expert, here that of a block as large as its matrix, or, the same, one a row."""
    case = stacked_fp8(128, 256, 512)
    case.model.config["quantization_config"] = CHANNEL
    for name, value in list(case.model.tensors.items()):
        if not name.endswith("_scale_inv"):
            continue
        rows = case.model.tensors[name.removesuffix("_scale_inv")].shape[1]
        numbers = np.frombuffer(value.data, np.float32).reshape(EXPERTS, 1, 1)
        if "N" in scales:
            numbers = np.repeat(numbers, rows, axis=1)
        shape = numbers.shape[: scales.count(",") + 1]
        del case.model.tensors[name]
        case.model.tensors[name.removesuffix("_inv")] = raw("F32", numbers.reshape(shape))
    check(case, tmp_path, "int8", 4)


@pytest.mark.parametrize(("method", "intermediate", "numa"), [("int4", 256, 2), ("int8", 192, 3)])
def test_packed_int4(method: Method, intermediate: int, numa: int, tmp_path: Path) -> None:
    case = apart(
        int4, 128, intermediate, GROUPS, family="kimi_k2", first_k_dense_replace=1, layers=2
    )
    out = converted(case, tmp_path, method, numa)
    assert read_tensors(out) == wanted(case.matrices, method, numa)
    assert "quantization_config" not in json.loads((out / "config.json").read_bytes())
    shapes = {name for name in case.model.tensors if name.endswith(".weight_shape")}
    rules = {dropped(out)[name] for name in shapes}
    assert rules == {STALE_RULE}


def test_searched_rounding(tmp_path: Path) -> None:
    case = apart(plain("BF16"), 128, 256, layers=1)
    out = converted(case, tmp_path, "int4", 2, "--rounding", "search")
    assert read_tensors(out) == wanted(case.matrices, "int4", 2, "search")
    assert read_tensors(out) != wanted(case.matrices, "int4", 2)


def values_of(stored: Stored, tensors: Mapping[str, Tensor]) -> Bits:
    """The bf16 values of what a plan would read, gathered from sources without the engine."""
    args = []
    for arg in stored.args:
        data = b"".join(
            tensors[piece.origin.name].data[piece.start : piece.stop]
            for piece in arg.pieces
            if isinstance(piece.origin, Source)
        )
        args.append(buffer(arg.type, data))
    result = bytes(args[0].data) if stored.decoder is None else run_op(stored.decoder, args)[0][0]
    return np.frombuffer(result, np.uint16).reshape(stored.rows, stored.columns)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(["BF16", "F32", "fp8", "int4", "turned"]),
    rows=st.integers(1, 300),
    block=st.tuples(st.integers(1, 150), st.integers(1, 150)),
    cuts=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=3),
    seed=st.integers(0, 100),
)
def test_any_rows_of_any_rows_are_those_of_the_matrix(
    kind: str, rows: int, block: tuple[int, int], cuts: list[tuple[float, float]], seed: int
) -> None:
    """A stack's half is cut, then a NUMA shard of that: wherever blocks of scales end."""
    columns = 64
    tensors, bits = {
        "fp8": fp8(block, "F32"), "int4": int4, "F32": plain("F32")
    }.get(kind, plain("BF16"))(rows, columns, seed)  # fmt: skip
    if kind == "turned":
        tensors = {".weight": raw("BF16", bits.T)}
    args = tuple(
        Source(name, TensorType(value.dtype, value.shape), 0, 0).output
        for name, value in tensors.items()
        if name != ".weight_shape"
    )
    decoders: dict[str, Decoder] = {
        "F32": ToBf16(), "fp8": DequantFp8(block), "int4": DequantInts(4, 32),
        "turned": Columns(0, rows),
    }  # fmt: skip
    stored = Stored(decoders.get(kind), args, rows, columns)
    for low, high in cuts:
        start = min(int(low * stored.rows), stored.rows - 1)
        stop = start + 1 + int(high * (stored.rows - start - 1))
        stored, bits = stored.cut(start, stop), bits[start:stop]
        assert np.array_equal(values_of(stored, tensors), bits)


# --- which way a stack lies -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "turned"), [("qwen3_5_moe_text", False), ("qwen3_vl_moe", True)]
)
def test_square_stacks_lie_as_their_family_has_them(
    family: str, turned: bool, tmp_path: Path
) -> None:
    """2I == H: gate_up is [E, 256, 256] either way."""
    case = stacked(family, 256, 128, turned=turned, layers=1)
    check(case, tmp_path, "int4", 1)


_SIZES = pytest.mark.parametrize(("hidden", "intermediate"), [(128, 256), (256, 128)])


@_SIZES
def test_stacks_that_lie_the_other_way_are_refused(
    hidden: int, intermediate: int, tmp_path: Path
) -> None:
    """Square ones too, by their down_proj."""
    case = stacked("qwen3_5_moe_text", hidden, intermediate, turned=True, layers=1)
    said = refused(case, tmp_path, "int4", 1)
    assert "[E, outputs, inputs]" in said
    assert "moe_intermediate_size" in said


@_SIZES
def test_stacks_as_transformers_saves_them_are_read_by_shape(
    hidden: int, intermediate: int, tmp_path: Path
) -> None:
    """transformers 5.17 saves Qwen3-VL-MoE the other way round than it is published."""
    case = stacked("qwen3_vl_moe", hidden, intermediate, turned=False, layers=1)
    check(case, tmp_path, "int4", 1)


# --- what cannot be converted -----------------------------------------------------------------


def spoiled(case: Case, name: str, at: int, value: bytes) -> Case:
    old = case.model.tensors[name]
    data = old.data[:at] + value + old.data[at + len(value) :]
    case.model.tensors[name] = old._replace(data=data)
    return case


NAN_BF16, NAN_F32, INFINITY_F16 = b"\xc0\x7f", b"\x00\x00\xc0\x7f", b"\x00\x7c"


@pytest.mark.parametrize("rounding", ["reference", "search"])
@pytest.mark.parametrize(
    ("dtype", "size", "value"),
    [("BF16", 2, NAN_BF16), ("F32", 4, NAN_F32), ("F16", 2, INFINITY_F16)],
)
@pytest.mark.parametrize(("kind", "row"), [("up_proj", 200), ("gate_proj", 0), ("down_proj", 77)])
def test_nan_in_a_matrix(
    rounding: str, dtype: str, size: int, value: bytes, kind: str, row: int, tmp_path: Path
) -> None:
    """The row counts in the tensor, whichever NUMA shard it is wanted for."""
    name = f"model.layers.1.mlp.experts.1.{kind}.weight"
    case = apart(plain(dtype), 128, 256)
    columns = case.model.tensors[name].shape[1]
    spoiled(case, name, (row * columns + columns - 1) * size, value)
    said = refused(case, tmp_path, "int4", 2, "--rounding", rounding)
    assert f"tensor {name!r}: row {row}," in said
    assert f"blk.1.ffn_{kind.removesuffix('_proj')}_exps.1.numa." in said
    assert "holds NaN or infinity" in said


@pytest.mark.parametrize(("name", "rows", "row"), [
    ("gate_up_proj", 512, 300), ("gate_up_proj", 512, 10), ("down_proj", 128, 77),
])  # fmt: skip
def test_nan_in_a_stack(name: str, rows: int, row: int, tmp_path: Path) -> None:
    case = stacked("qwen3_5_moe_text", 128, 256, turned=False)
    at = f"model.layers.1.mlp.experts.{name}"
    columns = case.model.tensors[at].shape[2]
    spoiled(case, at, 2 * ((rows + row) * columns + 3), NAN_BF16)
    said = refused(case, tmp_path, "int4", 2)
    assert f"tensor {at!r}: expert 1, row {row}," in said


@pytest.mark.parametrize(("name", "rows", "column"), [
    ("gate_up_proj", 128, 300), ("gate_up_proj", 128, 10), ("down_proj", 256, 77),
])  # fmt: skip
def test_nan_in_a_turned_stack(name: str, rows: int, column: int, tmp_path: Path) -> None:
    """What is a row of the result is a column of the tensor."""
    case = stacked("qwen3_vl_moe", 128, 256, turned=True)
    at = f"model.language_model.layers.1.mlp.experts.{name}"
    columns = case.model.tensors[at].shape[2]
    spoiled(case, at, 2 * ((rows + 5) * columns + column), NAN_BF16)
    said = refused(case, tmp_path, "int4", 2)
    assert f"tensor {at!r}: expert 1, column {column}," in said


def test_nan_among_fp8_codes(tmp_path: Path) -> None:
    """Row 130 of 192 lies in the third shard, in a block that was cut for it."""
    name = "model.layers.0.mlp.experts.1.gate_proj.weight"
    case = apart(fp8((128, 128), "F32"), 128, 192, in_blocks(128, 128), layers=1)
    said = refused(spoiled(case, name, 130 * 128 + 9, b"\x7f"), tmp_path, "int8", 3)
    assert f"{name!r} with '{name}_scale_inv': row 130," in said


def test_nan_among_scales_of_packed_int4(tmp_path: Path) -> None:
    module = "model.layers.0.mlp.experts.1.up_proj"
    case = apart(int4, 128, 256, GROUPS, family="kimi_k2", layers=1)
    spoiled(case, f"{module}.weight_scale", 2 * (4 * 201 + 2), NAN_BF16)
    said = refused(case, tmp_path, "int4", 2)
    assert f"'{module}.weight_packed' with '{module}.weight_scale': row 201," in said
    assert "NaN or infinity" in said


def test_gpt_oss_is_refused_with_the_reason(tmp_path: Path) -> None:
    case = apart(plain("BF16"), 128, 256, layers=1)
    case.model.config["model_type"] = "gpt_oss"
    said = refused(case, tmp_path, "int4", 1)
    assert "biases" in said
    assert "clamped activation" in said


@pytest.mark.parametrize(
    ("change", "says"),
    [({"hidden_act": "gelu"}, "hidden_act 'gelu'"), ({"swiglu_limit": 7.0}, "a swiglu_limit")],
)
def test_other_activations_are_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    said = refused(apart(plain("BF16"), 128, 256, layers=1, **change), tmp_path, "int4", 1)
    assert says in said
    assert "plain SiLU only" in said


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "unheard_of"}, "'unheard_of' is not known"),
        ({"num_experts": 0}, "counts no experts"),
    ],
)
def test_models_without_known_experts_are_refused(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    case = apart(plain("BF16"), 128, 256, layers=1)
    case.model.config.update(change)
    assert says in refused(case, tmp_path, "int4", 1)


def test_a_numa_count_that_does_not_divide_is_refused_before_data_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = watched_reads(monkeypatch)
    case = apart(plain("BF16"), 128, 384, layers=1)
    said = refused(case, tmp_path, "int4", 2)
    assert "supported counts: 1, 3;" in said
    assert "--method int8" in said
    assert reads == []
    result = amx(tmp_path / "source", tmp_path / "out", "int4", 3)
    assert result.code == 0, result.err
    assert reads != []


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_a_missing_matrix_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    case = apart(plain("BF16"), 128, 256)
    gone = f"model.layers.1.mlp.experts.1.{kind}.weight"
    case.model.tensors = without(case.model.tensors, [gone])
    assert f"layer 1: {kind} of expert 1 is missing" in refused(case, tmp_path, "int4", 1)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("made", ["apart", "stacked"])
def test_a_missing_layer_is_refused_by_number(made: str, layer: int, tmp_path: Path) -> None:
    case = (
        apart(plain("BF16"), 128, 256)
        if made == "apart"
        else stacked("qwen3_5_moe_text", 128, 256, turned=False)
    )
    at = f"model.layers.{layer}.mlp.experts."
    gone = [name for name in case.model.tensors if name.startswith(at)]
    case.model.tensors = without(case.model.tensors, gone)
    said = refused(case, tmp_path, "int4", 1)
    assert re.search(rf"\blayers?[ .]{layer}\b", said), said


def test_a_missing_stack_is_refused_by_name(tmp_path: Path) -> None:
    case = stacked("qwen3_5_moe_text", 128, 256, turned=False)
    case.model.tensors = without(case.model.tensors, ["model.layers.1.mlp.experts.down_proj"])
    assert "layer 1: down_proj of expert 0 is missing" in refused(case, tmp_path, "int4", 1)


def test_a_missing_scale_is_refused_by_name(tmp_path: Path) -> None:
    case = apart(fp8((128, 128), "F32"), 128, 256, in_blocks(128, 128))
    weight = "model.layers.1.mlp.experts.1.up_proj.weight"
    case.model.tensors = without(case.model.tensors, [f"{weight}_scale_inv"])
    assert f"{weight!r} has no scale" in refused(case, tmp_path, "int4", 1)


def test_an_expert_with_a_bias_is_refused_by_name(tmp_path: Path) -> None:
    """The kernels add none, and the GPU side leaves experts to them: without it the model babbles."""
    case = apart(plain("BF16"), 128, 256, layers=1)
    name = "model.layers.0.mlp.experts.1.up_proj.bias"
    case.model.tensors[name] = raw("BF16", weights(1, 256, 9)[0])
    assert name in refused(case, tmp_path, "int4", 1)


def test_experts_of_a_layer_too_many_are_refused_by_name(tmp_path: Path) -> None:
    """They are routed experts, so they do not leave by the rule for what is none."""
    case = apart(plain("BF16"), 128, 256)
    case.model.config["num_hidden_layers"] = 1
    assert "model.layers.1.mlp.experts." in refused(case, tmp_path, "int4", 1)


def test_an_expert_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    case = apart(plain("BF16"), 128, 256)
    module = "model.layers.1.mlp.experts.1.up_proj"
    case.model.tensors[f"{module}.weight"] = raw("BF16", weights(256, 256, 0))
    said = refused(case, tmp_path, "int4", 1)
    assert f"{module}: expected [256, 128]" in said
    assert "found [256, 256]" in said


# --- draft layers -----------------------------------------------------------------------------


def dropped(out: Path) -> dict[str, str]:
    """The rule that drops each source, as the manifest has it."""
    found: dict[str, str] = {}
    for rule, names in json.loads((out / MANIFEST).read_bytes())["dropped"].items():
        found.update(dict.fromkeys(names, rule))
    return found


def with_draft(family: str) -> Case:
    """Two layers and a draft layer, whose experts are apart. Qwen numbers drafts from 0 on under
    `mtp.`, DeepSeek from the model's last layer on."""
    if family == "qwen3_5_moe_text":
        case = stacked(family, 128, 256, turned=False, mtp_num_hidden_layers=1)
    elif family == "qwen3_next":  # a draft layer is there unless the config counts none
        case = apart(plain("BF16"), 128, 256, family=family)
    else:
        case = apart(plain("BF16"), 128, 256, family=family, num_nextn_predict_layers=1)
    at = "model.layers.2" if family == "deepseek_v3" else "mtp.layers.0"
    case.model.tensors[f"{at}.input_layernorm.weight"] = raw("BF16", weights(1, 128, 2)[0])
    put_apart(case, f"{at}.mlp.experts", 2, plain("BF16"), 128, 256)
    return case


DRAFTED = ["qwen3_5_moe_text", "qwen3_next", "deepseek_v3"]


@pytest.mark.parametrize("family", DRAFTED)
def test_draft_layers_are_numbered_on(family: str, tmp_path: Path) -> None:
    case = with_draft(family)
    out = converted(case, tmp_path, "int4", 1)
    found = read_tensors(out)
    assert found == wanted(case.matrices, "int4", 1)
    assert sum(name.startswith("blk.2.") for name in found) == EXPERTS * 3 * 2
    assert dropped(out) == {
        name: OTHER_LAYERS for name in case.model.tensors if ".experts." not in name
    }


@pytest.mark.parametrize("family", DRAFTED)
def test_draft_layers_leave_by_a_rule(family: str, tmp_path: Path) -> None:
    case = with_draft(family)
    out = converted(case, tmp_path, "int4", 1, "--mtp", "drop")
    kept = {key: bits for key, bits in case.matrices.items() if key[0] < 2}
    assert read_tensors(out) == wanted(kept, "int4", 1)
    at = "model.layers.2." if family == "deepseek_v3" else "mtp."
    rules = {name: OTHER_LAYERS for name in case.model.tensors if ".experts." not in name}
    for name in case.model.tensors:
        if ".experts." in name and name.startswith(at):
            rules[name] = "amx: mtp=drop"
    assert dropped(out) == rules


def test_draft_experts_in_stacks_leave_too(tmp_path: Path) -> None:
    """As Qwen3.6 stores them."""
    case = stacked("qwen3_5_moe_text", 128, 256, turned=False, mtp_num_hidden_layers=1)
    for name in ("gate_up_proj", "down_proj"):
        stack = case.model.tensors[f"model.layers.0.mlp.experts.{name}"]
        case.model.tensors[f"mtp.layers.0.mlp.experts.{name}"] = stack
    out = converted(case, tmp_path / "drop", "int4", 1, "--mtp", "drop")
    assert read_tensors(out) == wanted(case.matrices, "int4", 1)
    assert dropped(out)["mtp.layers.0.mlp.experts.down_proj"] == "amx: mtp=drop"
    for expert in range(EXPERTS):
        for kind in PROJECTIONS:
            case.matrices[2, expert, kind] = case.matrices[0, expert, kind]
    check(case, tmp_path / "keep", "int4", 1)


# --- nothing else decides ---------------------------------------------------------------------


def large() -> Case:
    """Matrices that little memory cuts into several parts, results of which several are."""
    return apart(fp8((128, 128), "F32"), 512, 1024, in_blocks(128, 128), layers=1)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source and what one worker with the usual memory makes of it."""
    folder = tmp_path_factory.mktemp("one")
    return folder / "source", converted(large(), folder, "int4", 2)


def test_the_large_one_is_right(one: tuple[Path, Path]) -> None:
    assert read_tensors(one[1]) == wanted(large().matrices, "int4", 2)


def test_jobs_do_not_show(one: tuple[Path, Path], tmp_path: Path) -> None:
    result = amx(one[0], tmp_path / "out", "int4", 2, "--jobs", "2", "--memory", "512MiB")
    assert result.code == 0, result.err
    assert tree(tmp_path / "out") == tree(one[1])


def test_memory_does_not_show(one: tuple[Path, Path], tmp_path: Path) -> None:
    said = amx(one[0], tmp_path / "out", "int4", 2, "--memory", "1MiB")
    assert said.code == 1
    found = re.search(r"give --memory (\d+)MiB", said.err)
    assert found is not None
    least = int(found.group(1))
    for memory in (least, least + 1, least + 3):
        out = tmp_path / str(memory)
        result = amx(one[0], out, "int4", 2, "--memory", f"{memory}MiB")
        assert result.code == 0, result.err
        assert tree(out) == tree(one[1])


@pytest.mark.big
def test_results_too_large_to_be_gathered_are_written_in_parts(tmp_path: Path) -> None:
    """Where the least memory has no room for the whole results of a matrix."""
    source = apart(plain("BF16"), 3840, 1024, layers=1).model.write(tmp_path / "source")
    said = amx(source, tmp_path / "out", "int8", 2, "--memory", "1MiB")
    found = re.search(r"give --memory (\d+)MiB", said.err)
    assert found is not None, said.err
    for name, memory in (("least", f"{found.group(1)}MiB"), ("ample", "512MiB")):
        result = amx(source, tmp_path / name, "int8", 2, "--memory", memory)
        assert result.code == 0, result.err
    assert tree(tmp_path / "least") == tree(tmp_path / "ample")


@pytest.mark.parametrize("count", [1, 4, 10])
def test_interruptions_do_not_show(
    count: int, one: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at the first write, within the run and at the last, and the same command again."""
    out = tmp_path / "out"
    left = count

    def interrupt(_bar: Bar, _nbytes: int) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Bar, "wrote", interrupt)
        assert amx(one[0], out, "int4", 2).code == 130
    assert published(out) == []
    result = amx(one[0], out, "int4", 2)
    assert result.code == 0, result.err
    assert tree(out) == tree(one[1])


@pytest.mark.parametrize(
    ("hows", "said"),
    [
        (["calibrated", "solved"], ["calibrated weights have scales that fit"]),
        (
            ["nearest", "solved"],
            ["calibrated weights have", "every other weight that was compared"],
        ),
    ],
)
def test_the_quality_of_calibrated_codes_is_not_proved(hows: list[str], said: list[str]) -> None:
    """Codes that add errors keep scales and follow the source's rows: no more is said of them."""
    tasks: Any = [SimpleNamespace(how=how) for how in hows]
    found = [*_calibrated(tasks)]
    proved = [one.text for one in found if isinstance(one, Proved)]
    assert len(proved) == len(said)
    assert all(text.startswith(start) for text, start in zip(proved, said, strict=True))
    (skipped,) = (one.text for one in found if isinstance(one, Skipped))
    assert "whether they are better than rounding" in skipped
