"""A Triton kernel multiplies tokens with packed INT4 matrices, like a GPU that serves them: on
random weights, and on the folder's. The products must be those of the weights that the format means,
except for rounding in float32 sums. The kernel computes only compressed-tensors' symmetric INT4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qconvert.run.reader import Reader
from qconvert.validation.findings import Rule
from qconvert.validation.runner import Folder, Need
from qconvert.validators.kernels.device import NO_DATA, Case, Said, chosen, device, head, read, said
from qconvert.validators.reading.forms import Form, Forms, Unread

RULES = (
    Rule(
        "QC073",
        "tokens times packed INT4 weights, by the Triton kernel, differ from torch's by more than "
        "rounding",
        "Triton or the GPU's driver computes differently: products rounded to TF32 or bf16, or words "
        "unpacked in another order. Only on a tensor: its scales are NaN or infinite.",
        "Try another release of Triton or of the driver. On a tensor: check what --level full --against "
        "SRC says about it.",
    ),
)

_PACKED = (".weight_packed", ".qweight")
_TOKENS = 7


@dataclass(frozen=True)
class W4a16:
    """Kernel against torch, on random tokens and weights, and on random tokens and the folder's."""

    name: str = "w4a16"
    proves: str = (
        "the w4a16 kernel multiplies with INT4 weights within float32's rounding (its table says of "
        "what, and on which device)"
    )
    needs: frozenset[Need] = frozenset({"kernels"})

    def random(self) -> Iterator[Said]:
        """On random weights, without a folder."""
        where = device()
        from qconvert.validators.kernels.triton import w4a16

        yield from said(self.name, "QC073", where, w4a16.random_cases(where), (), "")

    def __call__(self, folder: Folder) -> Iterator[Said]:
        where = device()
        matrices, note = _matrices(folder)
        from qconvert.validators.kernels.triton import w4a16

        real = _cases(folder, matrices, where)
        yield from said(self.name, "QC073", where, w4a16.random_cases(where), real, note)


def _matrices(folder: Folder) -> tuple[list[tuple[str, Form]], str]:
    """What to check, or why there is nothing."""
    names = [name for name in folder.checkpoint if name.endswith(_PACKED)]
    names = [name for name in names if folder.checkpoint[name].type.dtype == "I32"]
    if not names:
        return [], "the folder holds no packed INT4 weights"
    if folder.request.level == "headers":
        return [], NO_DATA
    forms = Forms(folder.checkpoint)
    try:
        found = [(name, forms.of(name)) for name in chosen(names, folder.request.layers)]
    except Unread as why:
        return [], f"the folder's INT4 weights cannot be read: {why}"
    if not found:
        return [], "the layers asked for hold no packed INT4 weights"
    taken = [pair for pair in found if _is_taken(pair[1])]
    other = next((form for _, form in found if not _is_taken(form)), None)
    note = "" if other is None else f"the kernel computes only symmetric INT4, not {_called(other)}"
    return taken, note


def _is_taken(form: Form) -> bool:
    """Whether the kernel takes it."""
    codes = form.codes
    plain = codes is not None and codes.bits == 4 and codes.symmetric and codes.order is None
    return plain and not form.transposed


def _called(form: Form) -> str:
    """A form in words."""
    codes = form.codes
    if codes is None:
        return "weights of this form"
    if form.transposed:
        return f"INT{codes.bits} in GPTQ's form"
    kind = "" if codes.symmetric else "asymmetric "
    return f"{kind}INT{codes.bits}" + ("" if codes.order is None else " with a g_idx")


def _cases(
    folder: Folder, matrices: list[tuple[str, Form]], where: str
) -> Iterator[tuple[str, Case]]:
    import torch

    from qconvert.validators.kernels.triton import w4a16

    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    generator = torch.Generator().manual_seed(0)
    reader = Reader(folder.checkpoint.shards)
    try:
        for name, form in matrices:
            grid = form.grid
            assert grid is not None
            rows, columns = form.rows, form.columns
            count = head(rows, columns, 1, where)
            words = read(reader, form.weight, 0, count * form.row_nbytes).view(torch.int32)
            kind = grid.scale.type
            factors = read(reader, grid.scale, 0, count * kind.row_nbytes).view(kinds[kind.dtype])
            tokens = w4a16.tokens(_TOKENS, columns, generator).to(torch.bfloat16)
            of = "" if count == rows else f" of {rows}"
            case = w4a16.compared(
                f"{name}, {count}{of} x {columns}, {_TOKENS} tokens bf16", tokens.to(where),
                words.reshape(count, -1).to(where), factors.reshape(count, -1).to(where),
                grid.block[1],
            )  # fmt: skip
            yield name, case
    finally:
        reader.close()


VALIDATOR = W4a16()
