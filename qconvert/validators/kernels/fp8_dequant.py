"""A Triton kernel decodes FP8 to BF16, on random weights and, if the output holds the source's FP8
matrices in BF16, on those: it must give the output's bits.

That is a third way to the same numbers, after the op that made the output and the validators' tables,
and the one that runs on the GPU that may serve it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.dtypes import DTYPE_BITS, ceil_div
from qconvert.core.graph import Source
from qconvert.run.work.reader import Reader
from qconvert.validation.runner import Folder
from qconvert.validators.kernels.device import NO_DATA, Case, KernelValidator, chosen, head, read
from qconvert.validators.reading.forms import Form, Unread, form_of, forms_of_stack


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One matrix of the source, codes and scales, and the tensor that holds it in the output, whose
    numbers are at the same positions as the codes."""

    name: str
    form: Form
    made: Source


def _found(folder: Folder, device: str) -> tuple[Iterator[tuple[str, Case]], str]:
    matrices, note = _matrices(folder)
    return _cases(folder, matrices, device), note


def _matrices(folder: Folder) -> tuple[list[_Matrix], str]:
    """Cases to check, or the reason why there is none."""
    source, made = folder.source, folder.checkpoint
    if source is None:
        return [], "no tensor of the folder was checked: give --against SRC"
    names = [
        name
        for name, tensor in source.items()
        if tensor.type.dtype == "F8_E4M3"
        and len(tensor.type.shape) in (2, 3)
        and name in made
        and (made[name].type.dtype, made[name].type.shape) == ("BF16", tensor.type.shape)
    ]
    if not names:
        return [], "no FP8 matrix of the source is BF16 here"
    if folder.request.level == "headers":
        return [], NO_DATA
    try:
        picked = chosen(names, folder.request.layers)
        found = [matrix for name in picked for matrix in _of(source, made[name], name)]
    except Unread as why:
        return [], f"the source's FP8 cannot be read: {why}"
    return found, "" if found else "the layers asked for hold no FP8 matrix that is BF16 here"


def _of(source: Checkpoint, made: Source, name: str) -> Iterator[_Matrix]:
    """A tensor's matrix; for a stack, those of the first and the last expert, or all rows as one if
    all have one scale."""
    if len(made.type.shape) == 2:
        yield _Matrix(name, form_of(source, name), made)
        return
    each = list(forms_of_stack(source, name, transposed=False))
    first, rows = each[0], sum(form.rows for form in each)
    if first.grid is not None and first.grid.scale.type.numel == 1:
        grid = replace(first.grid, block=(rows, first.columns))
        yield _Matrix(name, replace(first, rows=rows, grid=grid), made)
        return
    for i in dict.fromkeys((0, len(each) - 1)):
        yield _Matrix(f"{name}[{i}]", each[i], made)


def _cases(folder: Folder, matrices: list[_Matrix], where: str) -> Iterator[tuple[str, Case]]:
    import torch

    from qconvert.validators.kernels.device import bitwise
    from qconvert.validators.kernels.triton import fp8

    if not matrices:
        return
    assert folder.source is not None
    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    ours, theirs = Reader(folder.checkpoint.shards), Reader(folder.source.shards)
    try:
        for matrix in matrices:
            form, grid = matrix.form, matrix.form.grid
            assert grid is not None
            rows, columns, height = form.rows, form.columns, grid.block[0]
            count = head(rows, columns, min(height, rows), where)
            codes = read(theirs, form.weight, form.at, count * columns).reshape(count, columns)
            dtype, lines = grid.scale.type.dtype, ceil_div(count, height)
            width = DTYPE_BITS[dtype] // 8
            scales = read(theirs, grid.scale, grid.first * width, lines * grid.columns * width)
            scales = scales.view(kinds.get(dtype, torch.uint8)).reshape(lines, grid.columns)
            made = read(ours, matrix.made, 2 * form.at, 2 * count * columns)
            made = made.view(torch.int16).reshape(count, columns)
            found = fp8.dequant(codes.to(where), scales.to(where), grid.block)
            of = "" if count == rows else f" of {rows}"
            name = f"{matrix.name}, {count}{of} x {columns}"
            yield matrix.name, bitwise(name, found.cpu(), made)
    finally:
        ours.close()
        theirs.close()


VALIDATOR = KernelValidator(
    "fp8_dequant",
    "the fp8_dequant kernel decodes bit for bit (its table says what, and on which device)",
    "QC071", "fp8", _found,
)  # fmt: skip
