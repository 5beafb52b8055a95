"""Rows of a matrix, read as its consumer computes with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qconvert.core.dtypes import DTYPE_BITS
from qconvert.core.graph import Source
from qconvert.validation.compiled import LOOPS, done
from qconvert.validators.reading.decode import FNUZ, as_bf16, fields_of, rounded, scale_floats, warm
from qconvert.validators.reading.forms import Codes, Form, Grid
from qconvert.validators.reading.matrices import Matrix

if TYPE_CHECKING:
    import numpy as np

    from qconvert.validation.workers import Reads
    from qconvert.validators.reading.decode import Bytes, Floats

    Numbers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

# Elements worked on at a time: a few copies of them fit in a core's cache.
TILE = 1 << 17
# Every row of a transposed matrix takes a read for each column, so as many rows as possible.
_TURNED_TILE = 1 << 20
# Bytes an element takes while two matrices are compared: float32 copies, what numpy makes of them.
_EACH = 40
_TABLES = 2 << 20


def tile_rows(matrix: Matrix) -> int:
    """Rows to check at a time."""
    tile = _TURNED_TILE if matrix.form.transposed else TILE
    return max(1, min(matrix.rows, tile // matrix.form.columns))


def scratch(matrix: Matrix) -> int:
    """Bytes needed to compare a tile of a matrix with another's."""
    return _TABLES + _EACH * tile_rows(matrix) * matrix.form.columns


def row_bytes(reader: Reads, matrix: Matrix, start: int, stop: int) -> Bytes:
    """Rows [start, stop) as stored, without scales: uint8 [rows * bytes of a row]."""
    import numpy as np

    warm()
    form = matrix.form
    if form.encoding.apart:
        stored = _stored_bytes(reader, matrix, start, stop)
        words = stored.view("<u4").reshape(stop - start, -1)
        return fields_of(words, form.encoding.apart, 0, form.columns).astype(np.uint8).reshape(-1)
    return _stored_bytes(reader, matrix, start, stop)


def _stored_bytes(reader: Reads, matrix: Matrix, start: int, stop: int) -> Bytes:
    """Rows [start, stop) side by side, codes of odd widths in words."""
    import numpy as np

    form = matrix.form
    if form.transposed:
        return _turned_bytes(reader, matrix, start, stop)
    if form.beside is not None:
        return _by_turns(reader, matrix, form.beside, start, stop)
    size = form.stored_nbytes
    data = np.empty((stop - start) * size, np.uint8)
    view, at = data.data, 0
    for first, last in matrix.spans(start, stop):
        part = view[at : at + (last - first) * size]
        reader.read(form.weight, form.at + first * size, part)
        at += part.nbytes
    return data


def _by_turns(reader: Reads, matrix: Matrix, beside: Source, start: int, stop: int) -> Bytes:
    """Rows whose units are of one tensor and of another by turns."""
    import numpy as np

    form, parts = matrix.form, []
    each = form.row_nbytes // form.unit  # units of a row
    for first, last in matrix.spans(start, stop):
        low, high = first * each // 2, -(-last * each // 2)
        both = np.empty((high - low, 2, form.unit), np.uint8)
        for number, source in enumerate((form.weight, beside)):
            data = np.empty((high - low) * form.unit, np.uint8)
            reader.read(source, form.at + low * form.unit, data.data)
            both[:, number] = data.reshape(-1, form.unit)
        skip = first * each - 2 * low
        found = both.reshape(-1, form.unit)[skip : skip + (last - first) * each]
        parts.append(found.reshape(-1))
    return np.concatenate(parts)


def _turned_bytes(reader: Reads, matrix: Matrix, start: int, stop: int) -> Bytes:
    """Columns of a stored matrix: a short read for each stored row. Words of packed integers come out as
    those of a matrix that is stored by rows."""
    import numpy as np

    form = matrix.form
    if form.codes is not None and form.codes.row_order:
        return _words_of_rows(reader, matrix, form.codes, start, stop)
    width = DTYPE_BITS[form.weight.type.dtype] // 8
    lines = form.stored_nbytes // width
    parts = []
    for first, last in matrix.spans(start, stop):
        block = np.empty((lines, (last - first) * width), np.uint8)
        for line in range(lines):
            at = form.at + (line * form.rows + first) * width
            reader.read(form.weight, at, block[line].data)
        cells = block.reshape(lines, last - first, width)
        parts.append(np.ascontiguousarray(cells.transpose(1, 0, 2)).reshape(-1))
    return np.concatenate(parts)


def _words_of_rows(reader: Reads, matrix: Matrix, codes: Codes, start: int, stop: int) -> Bytes:
    """Columns of words [columns, rows / 8], as rows of two codes a byte, the first low."""
    import numpy as np

    form = matrix.form
    parts = []
    for first, last in matrix.spans(start, stop):
        low, high = first // 8, -(-last // 8)
        words = np.empty((form.columns, high - low), "<u4")
        for column in range(form.columns):
            at = 4 * (column * (form.rows // 8) + low)
            reader.read(form.weight, at, words[column].view(np.uint8).data)
        each = _nibbles(words, codes)[:, first - 8 * low : last - 8 * low].T.astype(np.uint8)
        parts.append((each[:, ::2] | each[:, 1::2] << np.uint8(4)).reshape(-1))
    return np.concatenate(parts)


def _nibbles(words: Numbers, codes: Codes) -> Numbers:
    """Words [n, m] -> codes [n, 8 m], plus 8 if in two's complement, each at the row that it is of."""
    import numpy as np

    found = np.empty((*words.shape, 8), np.int64)
    for nibble, row in enumerate(codes.row_order):
        found[..., row] = words.astype(np.int64) >> 4 * nibble & 15
    if codes.complement:
        found ^= 8
    return found.reshape(words.shape[0], -1)


def rows(reader: Reads, matrix: Matrix, start: int, stop: int, *, bf16: bool = False) -> Floats:
    """Rows [start, stop) as float32 [rows, columns]: codes times scales in float32, rounded once more
    where `bf16` are asked for."""
    if (numbers := matrix.form.numbers) is not None:
        import numpy as np

        parts = [numbers.rows(reader, *span) for span in matrix.spans(start, stop)]
        values = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return as_bf16(values) if bf16 else values
    data = row_bytes(reader, matrix, start, stop)
    loop = _loop_of(matrix.form)
    if loop:
        made = _in_loop(loop, reader, matrix, data, (start, stop), bf16)
        if made is not None:
            return made
    found = _rows(reader, matrix, data, start, stop)
    return as_bf16(found) if bf16 else found


def _loop_of(form: Form) -> str:
    """The compiled loop that decodes a form, "" for none."""
    grid, codes, encoding = form.grid, form.codes, form.encoding
    if LOOPS.in_use() is None or grid is None or form.offset is not None:
        return ""
    plain = codes is None or (codes.zeros is None and codes.order is None)
    even = encoding.bits == 8 or grid.block[1] % 2 == 0 or grid.columns == 1
    other = form.weight.type.dtype in ("F8_E5M2", *FNUZ)
    return encoding.loop if plain and even and not other else ""


def _in_loop(
    loop: str, reader: Reads, matrix: Matrix, data: Bytes, tile: tuple[int, int], bf16: bool
) -> Floats | None:
    """Rows as a compiled loop makes them; None where it declines."""
    import numpy as np

    form = matrix.form
    grid = form.grid
    assert grid is not None
    high, wide = grid.block
    codes = data.view(np.int8 if loop == "fp8_rows" else np.uint8).reshape(-1, form.row_nbytes)
    found = np.empty((codes.shape[0], form.columns), np.float32)
    at = 0
    for first, last in matrix.spans(*tile):
        lines = grid_lines(reader, grid, first // high, -(-last // high))
        part = slice(at, at + last - first)
        width = min(wide, form.columns)
        if not done(loop, codes[part], lines, first % high, high, width, bf16, found[part]):
            return None
        at = part.stop
    return found


def _rows(reader: Reads, matrix: Matrix, data: Bytes, start: int, stop: int) -> Floats:
    """Rows as numpy makes them of their bytes."""
    import numpy as np

    form = matrix.form
    values = form.encoding.floats(data, form.weight.type.dtype)
    values = values.reshape(stop - start, form.columns)
    if form.codes is not None and form.codes.zeros is not None:
        with np.errstate(all="ignore"):
            values -= spread(reader, zero_points(reader, matrix, start, stop), form)
    if form.codes is not None and form.codes.order is not None:
        with np.errstate(all="ignore"):
            values *= spread(reader, scales(reader, matrix, start, stop), form)
    elif form.grid is not None:
        at = 0
        with np.errstate(all="ignore"):  # infinity is what fp32 arithmetic gives
            for first, last in matrix.spans(start, stop):
                part = values[at : at + last - first]
                # Zeros stay zeros, whatever exponent a block of them has.
                zeros = np.nonzero(part == 0) if form.encoding.exact_zero else None
                kept = None if zeros is None else part[zeros]
                _scale(reader, form.grid, part, first)
                if zeros is not None:
                    part[zeros] = kept
                at += last - first
    values = rounded(values, form.steps)
    if form.offset is not None:
        with np.errstate(all="ignore"):
            values += np.repeat(
                scales(reader, matrix, start, stop, form.offset), form.offset.block[1], axis=1
            )
    return rounded(values, form.steps)


def bf16_rows(reader: Reads, matrix: Matrix, start: int = 0, stop: int | None = None) -> Floats:
    """Rows [start, stop) (all) rounded once to bf16, as consumers compute with them, as float32."""
    last = matrix.rows if stop is None else stop
    return rows(reader, matrix, start, last, bf16=matrix.format != "bf16")


def scales(
    reader: Reads, matrix: Matrix, start: int, stop: int, grid: Grid | None = None
) -> Floats:
    """The scales of rows [start, stop), or the numbers of another grid, float32 [rows, columns of the
    grid]."""
    import numpy as np

    grid = grid or matrix.form.grid
    assert grid is not None
    parts = []
    for first, last in matrix.spans(start, stop):
        lines = grid_lines(reader, grid, first // grid.block[0], -(-last // grid.block[0]))
        at = np.arange(first, last) // grid.block[0] - first // grid.block[0]
        parts.append(lines[at])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def zero_points(reader: Reads, matrix: Matrix, start: int, stop: int) -> Floats:
    """Zero points of rows [start, stop) minus the middle of their range, float32 [rows, groups]; 0 if
    none are stored."""
    import numpy as np

    form = matrix.form
    assert form.codes is not None
    assert form.grid is not None
    if form.codes.zeros is None:
        return np.zeros((stop - start, form.grid.columns), np.float32)
    parts = [
        _zeros(reader, form.codes, form.codes.zeros, form.grid, first, last)
        for first, last in matrix.spans(start, stop)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _zeros(reader: Reads, codes: Codes, zeros: Source, grid: Grid, first: int, last: int) -> Floats:
    """Those of stored rows [first, last)."""
    import numpy as np

    if codes.signed:
        signed = np.empty((last - first, grid.columns), np.int8)
        reader.read(zeros, first * grid.columns, signed.view(np.uint8).data)
        return signed.astype(np.float32)
    low, high = first * codes.bits // 32, -(-last * codes.bits // 32)
    groups = grid.columns
    if grid.transposed:
        words = np.empty((groups, high - low), "<u4")
        line = zeros.type.shape[1]
        for group in range(groups):
            reader.read(zeros, 4 * (group * line + low), words[group].view(np.uint8).data)
    else:
        raw = np.empty((high - low) * groups, "<u4")
        reader.read(zeros, 4 * low * groups, raw.view(np.uint8).data)
        words = raw.reshape(high - low, groups).T
    if codes.row_order:
        each = _nibbles(words, codes)
        found = each[:, first - 8 * low : last - 8 * low].T - np.int64(8)
        return np.ascontiguousarray(found, np.float32)
    lines = fields_of(words, codes.bits, first * codes.bits - 32 * low, last - first).T
    middle = (1 << (codes.bits - 1)) - codes.less
    spread_out: Floats = np.ascontiguousarray(lines, np.float32) - np.float32(middle)
    return spread_out


def group_of(reader: Reads, form: Form) -> Numbers | None:
    """The group of each column [columns], -1 for an invalid one; None if groups are adjacent."""
    import numpy as np

    if form.codes is None or form.codes.order is None:
        return None
    assert form.grid is not None
    kind = form.codes.order.type
    raw = np.empty(kind.nbytes, np.uint8)
    reader.read(form.codes.order, 0, raw.data)
    found = raw.view("<i4" if kind.dtype == "I32" else "<i8").astype(np.int64)
    return np.where((found >= 0) & (found < form.grid.columns), found, -1)


def spread(reader: Reads, scale: Floats, form: Form) -> Floats:
    """Scales [rows, columns of the grid] spread over their columns: [rows, columns]; NaN for a
    column of no group."""
    import numpy as np

    assert form.grid is not None
    wide = form.grid.block[1]
    groups = group_of(reader, form)
    if groups is not None:
        return np.where(groups >= 0, scale[:, groups], np.float32(np.nan))
    if wide >= form.columns:
        return np.broadcast_to(scale, (scale.shape[0], form.columns))
    return np.repeat(scale, wide, axis=1)[:, : form.columns]


def _scale(reader: Reads, grid: Grid, values: Floats, first: int) -> None:
    """Multiply stored rows from `first` on by their scales."""
    import numpy as np

    high, wide = grid.block
    count, columns = values.shape
    begin = first // high
    lines = grid_lines(reader, grid, begin, -(-(first + count) // high))
    if high == 1:
        if columns % wide == 0:
            shaped = values.reshape(count, columns // wide, wide)
            np.multiply(shaped, lines[:, :, None], out=shaped)
        else:
            np.multiply(values, np.repeat(lines, wide, axis=1)[:, :columns], out=values)
        return
    over = np.repeat(lines, min(wide, columns), axis=1)[:, :columns]
    for number in range(lines.shape[0]):
        low = max(0, (begin + number) * high - first)
        part = values[low : (begin + number + 1) * high - first]
        np.multiply(part, over[number], out=part)


def grid_lines(reader: Reads, grid: Grid, first: int, last: int) -> Floats:
    """Rows [first, last) of a grid of scales, float32."""
    import numpy as np

    kind = grid.scale.type
    width = DTYPE_BITS[kind.dtype] // 8
    if grid.transposed:
        block = np.empty((grid.columns, (last - first) * width), np.uint8)
        for column in range(grid.columns):
            reader.read(grid.scale, (column * grid.rows + first) * width, block[column].data)
        lines = scale_floats(block.reshape(-1), kind.dtype).reshape(grid.columns, last - first)
        return np.ascontiguousarray(lines.T)
    data = np.empty((last - first) * grid.columns * width, np.uint8)
    reader.read(grid.scale, (grid.first + first * grid.columns) * width, data.data)
    lines = scale_floats(data, grid.kind or kind.dtype).reshape(last - first, grid.columns)
    return lines if grid.global_scale is None else grid.global_scale.applied(reader, lines)
