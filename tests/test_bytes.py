"""docs/bytes.md: every line with an arrow in its drawings is what the formats' code makes or reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ops_harness import buffer

from qconvert.core.dtypes import TensorType
from qconvert.core.graph import Buffer
from qconvert.core.int_scheme import Codes, IntScheme
from qconvert.core.parameter_names import Dialect
from qconvert.formats.amx.tiles import place_codes
from qconvert.formats.fp8.decode import DequantFp8
from qconvert.formats.int_packed.packers import PackAwq, PackGptq, PackQuantized
from qconvert.formats.mx.decode import DequantMxfp4
from qconvert.formats.nvfp4.encode import inverse
from qconvert.validators.reading.amx import tile_codes, tile_floats
from qconvert.validators.reading.decode import fp8_value, int4_floats

_PAGE = (Path(__file__).parent.parent / "docs" / "bytes.md").read_text(encoding="utf-8")
_SIZES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def arrows(title: str) -> list[tuple[str, str]]:
    """Left and right sides of the arrows below the heading that begins so."""
    (section,) = (part for part in _PAGE.split("\n## ") if part.startswith(title))
    return re.findall(r"^ (\S.*?) -> (.+?)$", section, re.MULTILINE)


def _some(title: str, pattern: str) -> Iterator[tuple[re.Match[str], str]]:
    for left, right in arrows(title):
        if match := re.fullmatch(pattern, left):
            yield match, right


def _read(code: int) -> float:
    return float(fp8_value(code, "F8_E4M3"))


def _zeros(kind: TensorType) -> Buffer:
    return Buffer(kind, memoryview(bytearray(kind.nbytes)))


def _hex(data: Any) -> str:
    return " ".join(f"{byte:02X}" for byte in bytes(data))


def _packed(packer: Any, codes: np.ndarray[Any, Any], group: int) -> list[Buffer]:
    rows, columns = codes.shape
    outs = [_zeros(kind) for kind in packer.infer(TensorType("BF16", (rows, columns)))]
    scale = np.ones((rows, columns // group), np.float32)
    packer.pack(Codes(codes.astype(np.int8), scale), outs)
    return outs


def test_every_drawing_has_lines_that_are_checked() -> None:
    titles = [part.partition("\n")[0] for part in _PAGE.split("\n## ")[1:]]
    assert [len(arrows(title)) for title in titles] == [7, 3, 3, 2, 4, 4, 9]


def test_fp8_codes() -> None:
    found = list(_some("FP8", r"code (..)"))
    assert len(found) == 5
    for match, value in found:
        assert _read(int(match[1], 16)) == float(value)


def test_fp8_scales() -> None:
    """Each block's scale is another; codes of 1 become the scale of their place."""
    (rows, columns), grid = (300, 300), (3, 3)
    scales = np.arange(1, 10, dtype="<f4").reshape(grid)
    kinds = TensorType("F8_E4M3", (rows, columns)), TensorType("F32", grid)
    op = DequantFp8((128, 128))
    (kind,) = op.infer(*kinds)
    out = _zeros(kind)
    ins = [buffer(kinds[0], bytes([0x38]) * rows * columns), buffer(kinds[1], scales.tobytes())]
    op.run(ins, [out], memoryview(bytearray(op.scratch(*kinds))))
    bits = np.frombuffer(out.data, "<u2").astype(np.uint32) << 16
    values = bits.view(np.float32).reshape(rows, columns)
    found = list(_some("FP8", r"weight\[(\d+), (\d+)\]"))
    assert len(found) == 2
    for match, right in found:
        line, place = map(int, re.findall(r"\d+", right))
        assert values[int(match[1]), int(match[2])] == scales[line, place]


def test_int4_of_compressed_tensors() -> None:
    found = list(_some("INT4", r"codes ([-\d ]+)"))
    assert len(found) == 3
    for match, right in found:
        codes = np.array([match[1].split() * 4], np.int64)
        words = _packed(PackQuantized(IntScheme(4, 32)), codes, 32)[0].data
        assert "bytes " + _hex(words[:4]) == right
        read = int4_floats(np.frombuffer(words, np.uint8)).reshape(-1)
        assert read.tolist() == codes[0].tolist()


def test_gptq() -> None:
    ((match, right),) = _some("GPTQ", r"rows ([-\d ]+) \| ([-\d ]+)")
    pair = [[int(code) for code in side.split()] for side in (match[1], match[2])]
    # Eight rows, as zero points are packed, of four times eight columns each.
    codes = np.array([pair[0] * 4, pair[1] * 4, *[[0] * 32] * 6])
    for version in (1, 2):
        qweight, qzeros, *_ = _packed(PackGptq(IntScheme(4, 32), version), codes, 32)
        assert "bytes " + _hex(qweight.data[:8]) == right
        ((_, zeros),) = _some("GPTQ", f"symmetric, version {version}")
        assert "qzeros " + _hex(qzeros.data) == zeros


def test_awq() -> None:
    found = list(_some("AutoAWQ", r"rows ([-\d ]+)"))
    assert len(found) == 2
    for match, right in found:
        codes = np.array([[int(code)] * 32 for code in match[1].split()])
        qweight, *_ = _packed(PackAwq(IntScheme(4, 32)), codes, 32)
        assert "bytes " + _hex(qweight.data[:4]) == right
        assert bytes(qweight.data) == bytes(qweight.data[:4]) * 32


def _drawn_codes(title: str) -> np.ndarray[Any, Any]:
    """The bytes that a line of values is drawn as, after they were computed from the values."""
    ((match, right),) = _some(title, r"values ([-.\d ]+)")
    words = match[1].split()
    codes = [_SIZES.index(abs(float(word))) + 8 * word.startswith("-") for word in words]
    made = bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))
    assert "bytes " + _hex(made) == right
    assert len(made) == 8
    return np.frombuffer(made, np.uint8)


DIALECTS: tuple[Dialect, ...] = ("modelopt", "compressed-tensors")
_E2M1 = [*_SIZES, *(-size for size in _SIZES)]


def test_nvfp4() -> None:
    packed = _drawn_codes("NVFP4")
    found = list(_some("NVFP4", r"scale (..), global (\d)(?:, (.+))?"))
    assert len(found) == 3
    for match, right in found:
        scale, own = np.array([[int(match[1], 16)]], np.uint8), float(match[2])
        for dialect in DIALECTS if match[3] is None else [d for d in DIALECTS if d == match[3]]:
            values = inverse(packed[None], scale, own, dialect)[0]
            times = float(right.removeprefix("times "))
            assert values.tolist() == [times * value for value in _E2M1]


def test_mxfp4() -> None:
    packed = np.tile(_drawn_codes("MXFP4"), 2)
    found = list(_some("MXFP4", r"exponent (..)"))
    assert len(found) == 3
    for match, right in found:
        kinds = TensorType("U8", (1, 16)), TensorType("U8", (1, 1))
        op = DequantMxfp4()
        (kind,) = op.infer(*kinds)
        out = _zeros(kind)
        ins = [buffer(kinds[0], packed.tobytes()), buffer(kinds[1], bytes.fromhex(match[1]))]
        op.run(ins, [out], memoryview(bytearray(op.scratch(*kinds))))
        values = (np.frombuffer(out.data, "<u2").astype(np.uint32) << 16).view(np.float32)
        times = float(right.removeprefix("times "))
        assert values.tolist() == [times * value for value in _E2M1 * 2]


@pytest.mark.parametrize(("method", "lines"), [("int8", 5), ("int4", 4)])
def test_amx(method: Any, lines: int) -> None:
    """A single code that is not 0 is found where the drawing has it, and read back from there."""
    rows, columns = 256, 256
    found = list(_some("AMX", method + r", row (\d+), column (\d+)"))
    assert len(found) == lines
    for match, right in found:
        place = int(match[1]), int(match[2])
        codes = np.zeros((rows, columns), np.int8)
        codes[place] = 5
        packed = np.zeros(rows * columns // (2 if method == "int4" else 1), np.uint8)
        place_codes(method, codes, packed)
        (at,) = np.flatnonzero(packed)
        half = {0x05: " low", 0x50: " high"}[int(packed[at])] if method == "int4" else ""
        assert f"byte {at}{half}" == right
        assert np.array_equal(tile_codes(method, packed, rows, columns), codes)
        scales = np.full(rows, 0.5, np.float32)
        step = 0.5 * (16 if method == "int4" else 1)
        assert tile_floats(method, packed, scales, columns)[place] == 5 * step
