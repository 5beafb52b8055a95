"""A Triton kernel decodes FP8 to BF16, on random weights and, where the output holds the source's FP8
matrices in BF16, on those: it must give the output's bits.

That is a third way to the same numbers, after the op that made the output and the validators' tables,
and the one that runs on the GPU that may serve it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qconvert.core.dtypes import ceil_div
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output
from qconvert.matrices.stored import fp8_reading, fp8_scale_name, fp8_scheme_of
from qconvert.plan.plan import Plan
from qconvert.run.reader import Reader
from qconvert.validation.findings import Rule
from qconvert.validation.runner import Folder, Need
from qconvert.validators.kernels.device import NO_DATA, Case, Said, chosen, device, head, read, said

RULES = (
    Rule(
        "QC071",
        "FP8 decoded by the Triton kernel is not BF16 as torch, or the output, has it",
        "On random weights: Triton or the GPU's driver computes otherwise than float32 arithmetic. On "
        "a tensor of the folder alone: its bytes are not what the source's decode to.",
        "On random weights: try another release of Triton or of the driver. On a tensor: see what "
        "--level full --against SRC says of it, and convert again.",
    ),
)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One matrix of the source, codes and scales in blocks, and the same in the output."""

    name: str
    codes: Output
    scales: Output
    block: tuple[int, int]
    made: Output


@dataclass(frozen=True)
class Fp8Dequant:
    """Kernel against torch on random weights, and against the output's BF16 bit for bit."""

    name: str = "fp8_dequant"
    proves: str = (
        "the fp8_dequant kernel decodes bit for bit (its table says what, and on which device)"
    )
    needs: frozenset[Need] = frozenset({"kernels"})

    def random(self) -> Iterator[Said]:
        """On random weights, without a folder."""
        where = device()
        from qconvert.validators.kernels.triton import fp8

        yield from said(self.name, "QC071", where, fp8.random_cases(where), (), "")

    def __call__(self, folder: Folder) -> Iterator[Said]:
        where = device()
        matrices, note = _matrices(folder)
        from qconvert.validators.kernels.triton import fp8

        real = _cases(folder, matrices, where)
        yield from said(self.name, "QC071", where, fp8.random_cases(where), real, note)


def _matrices(folder: Folder) -> tuple[list[_Matrix], str]:
    """What to look at, or why there is nothing."""
    source, made = folder.source, folder.checkpoint
    if source is None:
        return [], "no tensor of the folder was looked at: give --against SRC"
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
    plan = Plan.identity(source)
    try:
        picked = chosen(names, folder.request.layers)
        found = [matrix for name in picked for matrix in _of(plan, made[name].output, name)]
    except PlanError as error:
        return [], f"the source's FP8 cannot be read: {error}"
    return found, "" if found else "the layers asked for hold no FP8 matrix that is BF16 here"


def _of(plan: Plan, made: Output, name: str) -> Iterator[_Matrix]:
    """A tensor's matrix; of a stack, those of the first and the last expert."""
    scale = fp8_scale_name(plan, name)
    scheme = fp8_scheme_of(plan, scale)
    op, codes, scales = fp8_reading(plan.tensors[name], plan.tensors[scale], scheme)
    op.infer(codes.type, scales.type)
    made = made.reshape(codes.type.shape)
    if len(codes.type.shape) == 2:
        yield _Matrix(name, codes, scales, op.block, made)
        return
    for i in dict.fromkeys((0, codes.type.shape[0] - 1)):
        part = codes.index(i), scales.index(i), op.block, made.index(i)
        yield _Matrix(f"{name}[{i}]", *part)


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
            rows, columns = matrix.codes.type.shape
            height = matrix.block[0]
            count = head(rows, columns, min(height, rows), where)
            codes = read(theirs, matrix.codes.rows(0, count)).reshape(count, columns)
            grid = matrix.scales.rows(0, ceil_div(count, height))
            scales = read(theirs, grid).view(kinds.get(grid.type.dtype, torch.uint8))
            scales = scales.reshape(grid.type.shape)
            made = read(ours, matrix.made.rows(0, count)).view(torch.int16).reshape(count, columns)
            found = fp8.dequant(codes.to(where), scales.to(where), matrix.block)
            of = "" if count == rows else f" of {rows}"
            name = f"{matrix.name}, {count}{of} x {columns}"
            yield matrix.name, bitwise(name, found.cpu(), made)
    finally:
        ours.close()
        theirs.close()


VALIDATOR = Fp8Dequant()
