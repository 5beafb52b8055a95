"""A Triton kernel multiplies tokens with packed INT4 matrices, as a GPU that serves them does: on
random weights, and on the folder's. The products must be those of the weights that the format means,
but for rounding in float32 sums. The kernel computes compressed-tensors' symmetric INT4 alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qconvert.core.errors import PlanError
from qconvert.matrices.stored import Stored, read_matrix
from qconvert.ops.gptq import DequantGptq
from qconvert.ops.int4 import DequantInt4
from qconvert.ops.ints import DequantInts
from qconvert.plan.plan import Plan
from qconvert.run.reader import Reader
from qconvert.validation.findings import Rule
from qconvert.validation.runner import Folder, Need
from qconvert.validators.kernels.device import NO_DATA, Case, Said, chosen, device, head, read, said

RULES = (
    Rule(
        "QC073",
        "tokens times packed INT4 weights, by the Triton kernel, are further from torch's than rounding",
        "Triton or the GPU's driver computes otherwise: products rounded to TF32 or bf16, or words "
        "unpacked in another order. On a tensor alone: its scales are NaN or infinite.",
        "Try another release of Triton or of the driver. On a tensor: see what --level full --against "
        "SRC says of it.",
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


def _matrices(folder: Folder) -> tuple[list[tuple[str, Stored]], str]:
    """What to look at, or why there is nothing."""
    names = [name for name in folder.checkpoint if name.endswith(_PACKED)]
    if not names:
        return [], "the folder holds no packed INT4 weights"
    if folder.request.level == "headers":
        return [], NO_DATA
    plan = Plan.identity(folder.checkpoint)
    try:
        found = [
            (name, read_matrix(plan, name.rpartition(".")[0])[0])
            for name in chosen(names, folder.request.layers)
        ]
    except PlanError as error:
        return [], f"the folder's INT4 weights cannot be read: {error}"
    if not found:
        return [], "the layers asked for hold no packed INT4 weights"
    taken = [pair for pair in found if _group(pair[1]) is not None]
    other = next((stored for _, stored in found if _group(stored) is None), None)
    note = "" if other is None else f"it computes symmetric INT4 alone, not {_called(other)}"
    return taken, note


def _group(stored: Stored) -> int | None:
    """Columns that share a scale in a form that the kernel takes, None of others."""
    decoder = stored.decoder
    if isinstance(decoder, DequantInt4):
        return decoder.group
    if isinstance(decoder, DequantInts) and decoder.bits == 4:
        plain = decoder.symmetric and not decoder.g_idx
        return (decoder.group or stored.columns) if plain else None
    return None


def _called(stored: Stored) -> str:
    """A form in words."""
    decoder = stored.decoder
    if isinstance(decoder, DequantGptq):
        return f"INT{decoder.bits} in GPTQ's form"
    if not isinstance(decoder, DequantInts):
        return "weights of this form"
    kind = "" if decoder.symmetric else "asymmetric "
    return f"{kind}INT{decoder.bits}" + (" with a g_idx" if decoder.g_idx else "")


def _cases(
    folder: Folder, matrices: list[tuple[str, Stored]], where: str
) -> Iterator[tuple[str, Case]]:
    import torch

    from qconvert.validators.kernels.triton import w4a16

    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    generator = torch.Generator().manual_seed(0)
    reader = Reader(folder.checkpoint.shards)
    try:
        for name, stored in matrices:
            group = _group(stored)
            assert group is not None
            count = head(stored.rows, stored.columns, 1, where)
            packed, scales = (arg.rows(0, count) for arg in stored.args)
            words = read(reader, packed).view(torch.int32).reshape(packed.type.shape)
            factors = read(reader, scales).view(kinds[scales.type.dtype])
            factors = factors.reshape(scales.type.shape)
            tokens = w4a16.tokens(_TOKENS, stored.columns, generator).to(torch.bfloat16)
            of = "" if count == stored.rows else f" of {stored.rows}"
            case = w4a16.compared(
                f"{name}, {count}{of} x {stored.columns}, {_TOKENS} tokens bf16",
                tokens.to(where), words.to(where), factors.to(where), group,
            )  # fmt: skip
            yield name, case
    finally:
        reader.close()


VALIDATOR = W4a16()
