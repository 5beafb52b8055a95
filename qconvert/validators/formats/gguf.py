"""Types of ggml in a GGUF file, as its block states them: blocks of codes with their scales, heads whose
halves are interleaved, and norms that are stored as 1 + weight.

Format sources: ggml, `ggml-common.h` and `ggml-quants.c` (`dequantize_row_*`, `get_scale_min_k4`), here
as the place of each code's bits; llama.cpp, `convert_hf_to_gguf.py`. No code is shared with the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache, partial
from itertools import zip_longest
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.gguf.stated import NOTHING, SECOND, StoredAs, stored_in
from qconvert.core.dtypes import DTYPE_BITS
from qconvert.validators.reading.decode import floats
from qconvert.validators.reading.forms import Encoding, Form, Shape, Spec

if TYPE_CHECKING:
    import numpy as np

    from qconvert.validators.reading.decode import Bytes, Floats

_NUMBERS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}


class Bits(NamedTuple):
    """Some bits of a byte of a block, which are a number's from bit `up` on."""

    byte: int
    shift: int
    width: int
    up: int = 0


Place = Callable[[int], Sequence[Bits]]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A block: columns, bytes, and where each number in it lies. A weight is scale x (code - middle) -
    least. Scales are F16 at byte `scale`, times six or fewer bits for each `group` of columns, less
    `center`; minima are alike (at `least`), or added as they are. `signed`: codes are, `exponent`:
    the scale is a power of two, and codes are E2M1's."""

    columns: int
    nbytes: int
    code: Place
    middle: int = 0
    scale: int = 0
    least: int | None = None
    group: int = 0
    share: Place | None = None
    least_share: Place | None = None
    center: int = 0
    signed: bool = False
    signed_share: bool = False
    exponent: bool = False


def _nibbles(at: int) -> Place:
    """32 codes in 16 bytes, the first half in the low nibbles."""
    return lambda i: [Bits(at + i % 16, i // 16 * 4, 4)]


def _and_bit(nibbles: int, bits: int) -> Place:
    return lambda i: [Bits(nibbles + i % 16, i // 16 * 4, 4), Bits(bits + i // 8, i % 8, 1, 4)]


def _two(at: int, i: int) -> Bits:
    """Two bits of 256: four codes a byte, 128 of them in 32 bytes."""
    return Bits(at + i // 128 * 32 + i % 32, i % 128 // 32 * 2, 2)


def _four(at: int, i: int) -> Bits:
    """Four bits of 256: two codes a byte, 64 of them in 32 bytes."""
    return Bits(at + i // 64 * 32 + i % 32, i % 64 // 32 * 4, 4)


def _six(i: int) -> Sequence[Bits]:
    half, quarter, line = i // 128, i % 128 // 32, i % 32
    return [
        Bits(half * 64 + line + quarter % 2 * 32, quarter // 2 * 4, 4),
        Bits(128 + half * 32 + line, quarter * 2, 2, 4),
    ]


def _k_scale(g: int) -> Sequence[Bits]:
    if g < 4:
        return [Bits(4 + g, 0, 6)]
    return [Bits(4 + g + 4, 0, 4), Bits(4 + g - 4, 6, 2, 4)]


def _k_least(g: int) -> Sequence[Bits]:
    if g < 4:
        return [Bits(4 + g + 4, 0, 6)]
    return [Bits(4 + g + 4, 4, 4), Bits(4 + g, 6, 2, 4)]


LAYOUTS: Mapping[str, Layout] = {
    "Q4_0": Layout(columns=32, nbytes=18, code=_nibbles(2), middle=8),
    "Q4_1": Layout(columns=32, nbytes=20, code=_nibbles(4), least=2),
    "Q5_0": Layout(columns=32, nbytes=22, code=_and_bit(6, 2), middle=16),
    "Q5_1": Layout(columns=32, nbytes=24, code=_and_bit(8, 4), least=2),
    "Q8_0": Layout(columns=32, nbytes=34, code=lambda i: [Bits(2 + i, 0, 8)], signed=True),
    "MXFP4": Layout(columns=32, nbytes=17, code=_nibbles(1), exponent=True),
    "Q2_K": Layout(
        columns=256, nbytes=84, code=lambda i: [_two(16, i)], scale=80, least=82, group=16,
        share=lambda g: [Bits(g, 0, 4)], least_share=lambda g: [Bits(g, 4, 4)],
    ),
    "Q3_K": Layout(
        columns=256, nbytes=110, middle=4, scale=108, group=16, center=32,
        code=lambda i: [_two(32, i), Bits(i % 32, i // 32, 1, 2)],
        share=lambda g: [Bits(96 + g % 8, g // 8 * 4, 4), Bits(104 + g % 4, g // 4 * 2, 2, 4)],
    ),
    "Q4_K": Layout(
        columns=256, nbytes=144, code=lambda i: [_four(16, i)], least=2, group=32,
        share=_k_scale, least_share=_k_least,
    ),
    "Q5_K": Layout(
        columns=256, nbytes=176, code=lambda i: [_four(48, i), Bits(16 + i % 32, i // 32, 1, 4)],
        least=2, group=32, share=_k_scale, least_share=_k_least,
    ),
    "Q6_K": Layout(
        columns=256, nbytes=210, code=_six, middle=32, scale=208, group=16,
        share=lambda g: [Bits(192 + g, 0, 8)], signed_share=True,
    ),
}  # fmt: skip


@cache
def _places(place: Place, count: int) -> list[np.ndarray[Any, Any]]:
    """Bytes, shifts, masks and places of `count` numbers, [parts, 4, count]."""
    import numpy as np

    every = [place(i) for i in range(count)]
    return [
        np.array([(b.byte, b.shift, (1 << b.width) - 1, b.up) for b in part]).T
        for part in zip_longest(*every, fillvalue=Bits(0, 0, 0))
    ]


def _numbers(blocks: Bytes, place: Place, count: int, *, signed: bool = False) -> Floats:
    """Numbers [n, count] of blocks [n, bytes]."""
    import numpy as np

    found = np.zeros((blocks.shape[0], count), np.int16)
    for byte, shift, mask, up in _places(place, count):
        found |= (blocks[:, byte].astype(np.int16) >> shift & mask) << up
    if signed:
        found = (found ^ 128) - 128
    return found.astype(np.float32)


def _half(blocks: Bytes, at: int) -> Floats:
    import numpy as np

    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def block_floats(kind: str, data: Bytes, dtype: str) -> Floats:
    """Bytes of whole blocks as float32, in the order of the columns."""
    import numpy as np

    layout = LAYOUTS[kind]
    blocks = data.reshape(-1, layout.nbytes)
    codes = _numbers(blocks, layout.code, layout.columns, signed=layout.signed)
    with np.errstate(all="ignore"):
        if layout.exponent:
            sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
            # Code 8 is 0 as code 0 is, not -0: ggml has its values as integers.
            values = np.concatenate([sizes, 0 - sizes])[codes.astype(np.int16)]
            powers = 2.0 ** (blocks[:, :1].astype(np.float64) - 127)
            return (values * powers).astype(np.float32).reshape(-1)
        scale = _half(blocks, layout.scale)
        least = None if layout.least is None else _half(blocks, layout.least)
        groups = 1
        if layout.share is not None:
            groups = layout.columns // layout.group
            shares = _numbers(blocks, layout.share, groups, signed=layout.signed_share)
            scale = scale * (shares - np.float32(layout.center))
        if least is not None:
            if layout.least_share is None:
                least = -least
            else:
                least = least * _numbers(blocks, layout.least_share, groups)
        values = (codes - np.float32(layout.middle)).reshape(-1, groups, layout.columns // groups)
        values *= scale[:, :, None]
        if least is not None:
            values -= least[:, :, None]
    return values.reshape(-1)


def _less_one(data: Bytes, dtype: str) -> Floats:
    import numpy as np

    return floats(data, dtype) - np.float32(1)


@lru_cache(maxsize=8)  # asked for each tensor
def _stated(checkpoint: Checkpoint) -> StoredAs:
    return stored_in(checkpoint)


def _stored(checkpoint: Checkpoint, name: str) -> bool:
    """Tell whether a tensor is not plain numbers in their order."""
    stated = _stated(checkpoint)
    is_stack = name in stated.kinds and len(checkpoint[name].type.shape) == 3
    is_other = name in stated.halves or name in stated.plus_one or name + SECOND in checkpoint
    return is_stack or is_other or stated.kinds.get(name) in LAYOUTS


def _read(checkpoint: Checkpoint, name: str) -> Form:
    stated, weight = _stated(checkpoint), checkpoint[name]
    kind, (rows, *inner) = stated.kinds[name], weight.type.shape
    halves = stated.halves.get(name, 0)
    layout, beside = LAYOUTS.get(kind), checkpoint.get(name + SECOND)
    if beside is not None and layout is None:
        width = weight.type.nbytes // max(1, weight.type.numel)
        columns = 2 * prod(inner)
        return Form(_NUMBERS[kind], weight, 0, rows, columns, beside=beside, unit=width)
    if layout is None:
        if name not in stated.plus_one:
            return Form(_NUMBERS[kind], weight, 0, rows, prod(inner), halves=halves)
        return Form(f"{_NUMBERS[kind]} less 1", weight, 0, rows, prod(inner))
    return Form(kind, weight, 0, rows, inner[0] // layout.nbytes * layout.columns, halves=halves)


def _stack(checkpoint: Checkpoint, name: str) -> Iterator[Form]:
    """The matrix of each expert in a stack, with rows of a second one by turns where there is one."""
    stated, weight, beside = _stated(checkpoint), checkpoint[name], checkpoint.get(name + SECOND)
    kind, layout, shape = stated.kinds[name], LAYOUTS.get(stated.kinds[name]), weight.type.shape
    experts, rows, columns = shape
    if layout is not None:
        columns = columns // layout.nbytes * layout.columns
    size = weight.type.nbytes // max(1, experts)
    for expert in range(experts):
        yield Form(
            _NUMBERS.get(kind, kind), weight, expert * size, rows if beside is None else 2 * rows,
            columns, beside=beside, unit=size // max(1, rows),
        )  # fmt: skip


def _shape(checkpoint: Checkpoint, name: str, shape: Shape) -> Shape | None:
    layout = LAYOUTS.get(_stated(checkpoint).kinds.get(name, ""))
    if layout is None or len(shape) != 2:
        return None
    rows, columns = shape
    return rows, -1 if columns < 0 else columns // layout.columns * layout.nbytes


SPEC = Spec(
    name="GGUF",
    dtypes=("U8", "F32", "F16", "BF16"),
    applies=lambda checkpoint: _stated(checkpoint) is not NOTHING,
    stored=_stored,
    read=_read,
    stack=_stack,
    by_rows=True,
    parts=(SECOND,),
    shape=_shape,
    encodings=(
        *(
            Encoding(name=f"{name} less 1", bits=DTYPE_BITS[dtype], floats=_less_one)
            for dtype, name in _NUMBERS.items()
        ),
        *(
            Encoding(
                name=kind, bits=Fraction(8 * layout.nbytes, layout.columns),
                floats=partial(block_floats, kind), scaled=True,
            )
            for kind, layout in LAYOUTS.items()
        ),
    ),
)  # fmt: skip
