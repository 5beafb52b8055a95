"""Numbers, and products of codes and scales, that bf16 cannot hold: never written or quantized without a
word, and not called broken."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from checkpoints import BLOCK, Model, Tensor, fp8_moe, published, read_tensors, run_cli
from models import numbers_only, qwen3_moe
from ops_harness import buffer, run_op

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import RowError
from qconvert.core.graph import Buffer, Op
from qconvert.formats.int_packed.awq import DequantAwq
from qconvert.formats.int_packed.decode import DequantInt8, DequantInts
from qconvert.formats.int_packed.gptq import DequantGptq
from qconvert.ops.cast import DequantTo

HUGE = 2.0**120  # times the largest code, 448, it is beyond bf16; times 240 it is not
WEIGHT = "model.layers.1.mlp.experts.1.gate_proj.weight"
SCALE = f"{WEIGHT}_scale_inv"


def with_scale(value: float, row: int = 0, column: int = 1) -> Model:
    """One block's scale is another; its codes are 0x7E (448), 0x70 (128) and zeros."""
    model = fp8_moe()
    rows, columns = model.tensors[WEIGHT].shape
    codes = bytearray(rows * columns)
    for at, code in ((0, 0x7E), (1, 0xFE), (2, 0x70)):  # the first two of the block overflow
        codes[row * BLOCK * columns + column * BLOCK + at] = code
    model.tensors[WEIGHT] = Tensor("F8_E4M3", (rows, columns), bytes(codes))
    grid = model.tensors[SCALE].shape
    scales = [1.0] * (grid[0] * grid[1])
    scales[row * grid[1] + column] = value
    model.tensors[SCALE] = Tensor("F32", grid, struct.pack(f"<{len(scales)}f", *scales))
    return model


@pytest.mark.parametrize(
    "words",
    [
        ("dequant",),
        ("amx", "--method", "int8", "--numa", "1"),
        ("w4a16", "--rtn", "--group-size", "32"),
    ],
)
@pytest.mark.parametrize(("row", "column"), [(0, 1), (1, 0)])
def test_an_overflow_is_refused_with_its_tensor_block_and_count(
    words: tuple[str, ...], row: int, column: int, tmp_path: Path
) -> None:
    model = with_scale(HUGE, row, column) if words[0] == "dequant" else big(HUGE, row, column)
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    command, *rest = words
    result = run_cli(command, source, out, *rest, "--jobs", "1")
    assert result.code == 1, result.err
    assert f"'{WEIGHT}' with '{SCALE}': block [{row}, {column}]" in result.err
    assert "values decoded with it 2 are infinite or beyond bf16" in result.err
    assert published(out) == []


def big(value: float, row: int, column: int) -> Model:
    """Experts of sizes that kernels take."""
    model = fp8_moe(hidden_size=128, moe_intermediate_size=64)
    model.config["quantization_config"]["weight_block_size"] = [32, 32]
    for name, held in list(model.tensors.items()):
        if held.dtype != "F8_E4M3":
            continue
        rows, columns = (128, 64) if "down_proj" in name else (64, 128)
        if ".experts." not in name:
            rows, columns = 32, 32
        codes = bytearray(rows * columns)
        if name == WEIGHT:
            for at, code in ((0, 0x7E), (1, 0xFE), (2, 0x70)):
                codes[row * 32 * columns + column * 32 + at] = code
        model.tensors[name] = Tensor(held.dtype, (rows, columns), bytes(codes))
        grid = rows // 32, columns // 32
        scales = [1.0] * (grid[0] * grid[1])
        if name == WEIGHT:
            scales[row * grid[1] + column] = value
        data = struct.pack(f"<{len(scales)}f", *scales)
        model.tensors[f"{name}_scale_inv"] = Tensor("F32", grid, data)
    return model


def test_allowed_it_is_written_and_said(tmp_path: Path) -> None:
    source, out = with_scale(HUGE).write(tmp_path / "source"), tmp_path / "out"
    result = run_cli("dequant", source, out, "--allow-overflow", "--jobs", "1")
    assert result.code == 0, result.err
    values = struct.unpack(f"<{6 * 8}H", read_tensors(out)[WEIGHT].data)
    assert values[BLOCK : BLOCK + 3] == (0x7F80, 0xFF80, 0x7F00)  # 128 * 2^120 = 2^127
    remark = f"tensor '{WEIGHT}' with '{SCALE}': 2 values beyond bf16, written as infinite"
    assert f"remark  {remark}" in result.err
    manifest = json.loads((out / "qconvert.json").read_bytes())
    assert manifest["passes"][0]["options"]["allow_overflow"]
    (loss,) = manifest["lossy_steps"]
    assert loss.endswith("; what is beyond bf16 becomes infinite")
    assert "what is beyond bf16 becomes infinite" in (out / "README.md").read_text()
    checked = run_cli("validate", out, "--against", source, "--level", "full", "--jobs", "1")
    assert checked.code == 0, checked.out
    assert "QC066" in checked.out
    assert "dequant was allowed to write" in checked.out


def test_infinities_that_nobody_allowed_stay_an_error(tmp_path: Path) -> None:
    source, out = with_scale(HUGE).write(tmp_path / "source"), tmp_path / "out"
    run_cli("dequant", source, out, "--allow-overflow", "--jobs", "1")
    for file in ("qconvert.json", "qconvert.receipt.jsonl"):
        (out / file).unlink()
    assert run_cli("validate", out, "--level", "full", "--jobs", "1").code == 3


def test_an_option_of_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("passes:\n- dequant: {allow_overflow: true}\n")
    source, out = with_scale(HUGE).write(tmp_path / "source"), tmp_path / "out"
    assert run_cli("run", recipe, source, out, "--jobs", "1").code == 0
    shown = run_cli("dequant", source, out, "--allow-overflow", "--print-recipe").out
    assert shown == "passes:\n- dequant:\n    allow_overflow: true\n"


def test_largest_finite_products_are_written(tmp_path: Path) -> None:
    """Half a step below infinity bf16 still rounds down."""
    largest = (2.0 - 2.0**-7) * 2.0**127  # bf16's
    source, out = with_scale(largest / 448).write(tmp_path / "source"), tmp_path / "out"
    assert run_cli("dequant", source, out, "--jobs", "1").code == 0
    values = struct.unpack(f"<{6 * 8}H", read_tensors(out)[WEIGHT].data)
    assert values[BLOCK : BLOCK + 2] == (0x7F7F, 0xFF7F)


def test_infinities_of_e5m2_are_refused_too(tmp_path: Path) -> None:
    """Their codes are infinite already, under any scale."""
    model = with_scale(1.0)
    codes = bytearray(model.tensors[WEIGHT].data)
    codes[BLOCK], codes[BLOCK + 1] = 0x7C, 0xFC
    for name, held in list(model.tensors.items()):
        if held.dtype == "F8_E4M3":
            data = bytes(codes) if name == WEIGHT else bytes(len(held.data))
            model.tensors[name] = Tensor("F8_E5M2", held.shape, data)
    model.config["quantization_config"]["fmt"] = "e5m2"
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    result = run_cli("dequant", source, out, "--jobs", "1")
    assert result.code == 1
    assert f"'{WEIGHT}' with '{SCALE}': block [0, 1]" in result.err
    assert published(out) == []


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_broken_scale_is_named_by_its_block(bad: float, tmp_path: Path) -> None:
    source, out = with_scale(bad, 1, 1).write(tmp_path / "source"), tmp_path / "out"
    result = run_cli("dequant", source, out, "--allow-overflow", "--jobs", "1")
    assert result.code == 1
    assert f"'{SCALE}': block [1, 1]: its scale is NaN or infinite" in result.err


@pytest.mark.parametrize(
    ("shape", "place"),
    [
        ((6,), "row 4: its scale is"),
        ((6, 1), "row 4: its scale is"),
        ((), "': its scale is"),
        ((1,), "': its scale is"),
    ],
)
def test_scales_without_blocks(shape: tuple[int, ...], place: str, tmp_path: Path) -> None:
    model = fp8_moe()
    del model.config["quantization_config"]["weight_block_size"]
    for name, held in list(model.tensors.items()):
        if not name.endswith("_scale_inv"):
            continue
        rows = model.tensors[name.removesuffix("_scale_inv")].shape[0]
        mine = name == SCALE
        one = shape if mine else ()
        count = one[0] if one else 1
        values = [float("nan") if mine and at == min(4, count - 1) else 1.0 for at in range(count)]
        assert rows >= count or not mine
        model.tensors.pop(name)
        stored = name.removesuffix("_inv")
        data = struct.pack(f"<{count}f", *values)
        model.tensors[stored] = Tensor(held.dtype, one, data)
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    result = run_cli("dequant", source, out, "--jobs", "1")
    assert result.code == 1
    assert WEIGHT in result.err
    assert place in result.err


# --- Numbers that are finite where they are stored -------------------------------------------------


def in_f32(value: float) -> Model:
    """A model of FP32 weights, one of which is `value`."""
    model = numbers_only(qwen3_moe(hidden=256, intermediate=256))
    for name, held in model.tensors.items():
        wide = np.frombuffer(held.data, np.uint16).astype(np.uint32) << np.uint32(16)
        values = np.clip(wide.view(np.float32), -1, 1)
        if name == WEIGHT:
            values[5 * held.shape[1] + 3] = value
        model.tensors[name] = Tensor("F32", held.shape, values.tobytes())
    return model


@pytest.mark.parametrize(
    "words",
    [
        ("fp8",),
        ("fp8", "--channel"),
        ("nvfp4", "--dialect", "modelopt"),
        ("nvfp4", "--dialect", "compressed-tensors"),
        ("mx",),
        ("w4a16", "--rtn"),
        ("w4a16", "--rtn", "--scales", "search"),
        ("int8",),
        ("amx", "--method", "int8", "--numa", "1"),
    ],
)
def test_fp32_beyond_bf16_is_refused_as_what_it_is(words: tuple[str, ...], tmp_path: Path) -> None:
    """The weight is finite, the checkpoint not broken. Runtimes compute what is quantized in bf16."""
    command, *rest = words
    for value, said in (
        (-3.4e38, "has weights of up to 3.4e+38, beyond bf16 (3.3895e+38 at most)"),
        (float("inf"), "holds NaN or infinity; the checkpoint is broken"),
    ):
        source, out = in_f32(value).write(tmp_path / f"source{value}"), tmp_path / f"out{value}"
        result = run_cli(command, source, out, *rest, "--jobs", "1")
        assert result.code == 1, result.err
        assert f"tensor '{WEIGHT}': row 5, " in result.err
        assert said in result.err
        assert published(out) == []


def _integers(form: str) -> tuple[Op, list[Buffer]]:
    """Eight rows of the codes 15 or 127, under scales of 1 but for row 6's: the largest bf16."""
    scale = np.full(8, 1.0, np.float32)
    scale[6] = np.float32(3.3895e38)
    words = np.full((8, 8), 0xFFFFFFFF, np.uint32)
    zeros = np.full((1, 1), 0x77777777, np.uint32)
    parts: dict[str, list[tuple[str, tuple[int, ...], bytes]]] = {
        "compressed-tensors": [
            ("I32", (8, 8), words.tobytes()),
            ("F32", (8, 1), scale.tobytes()),
        ],
        "int8": [("I8", (8, 64), b"\x7f" * 512), ("F32", (8, 1), scale.tobytes())],
        "gptq": [
            ("I32", (8, 8), words.tobytes()),
            ("I32", (1, 1), zeros.tobytes()),
            ("F32", (1, 8), scale.tobytes()),
        ],
        "awq": [("I32", (64, 1), words.tobytes()[:256]), ("F32", (1, 8), scale.tobytes())],
    }
    ops: dict[str, Op] = {
        "compressed-tensors": DequantInts(4, None),
        "int8": DequantInt8(),
        "gptq": DequantGptq(4, None, 1, 0, 8),
        "awq": DequantAwq(None, False, 0, 8),
    }
    ins = [buffer(TensorType(dtype, shape), data) for dtype, shape, data in parts[form]]
    return ops[form], ins


@pytest.mark.parametrize("form", ["compressed-tensors", "int8", "gptq", "awq"])
def test_integers_times_scales_beyond_bf16_are_refused(form: str) -> None:
    """As FP8's and FP4's products are; they were written as infinite, without a word."""
    op, ins = _integers(form)
    with pytest.raises(RowError, match=r"6 has weights of up to inf, beyond bf16"):
        run_op(op, ins)
    _, scale, *_ = ins if form != "gptq" else ins[1:]
    scale.data[:] = np.ones(8, np.float32).tobytes()
    (found,), _ = run_op(op, ins)
    assert np.isfinite(np.frombuffer(found, np.uint16).astype(np.uint32) << 16).all()
    scale.data[:] = np.full(8, 65504, np.float32).tobytes()
    with pytest.raises(RowError, match=r"beyond F16 \(65504 at most\); take another dtype$"):
        run_op(DequantTo(op, "F16"), ins)  # type: ignore[arg-type]
