"""Triton kernels that read what folders hold, each with a reference in torch and cases that compare
the two. Not validators themselves: discovery skips a subpackage, so none of them is imported
before `device()` has said where it is to run.

On a machine without a GPU they run in Triton's interpreter, whose known errors (3.9) must be avoided:
float32 to bf16 truncates, `tl.dot` of bf16 is garbage unless both operands are
float32, and FP8 types have no NaN. So codes are decoded, and bf16 is rounded, on integers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from math import inf, isnan, nan
from typing import TYPE_CHECKING

from qconvert.core.extras import lacking
from qconvert.core.graph import Source
from qconvert.core.names import parse
from qconvert.validation.findings import Finding, Proved, Skipped, Table
from qconvert.validators.amx.reading import read_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from qconvert.run.work.reader import Reader
    from qconvert.validation.runner import Folder, Need

if not __name__.startswith("qconvert."):
    # Imported by its folder name it would be a second module whose classes differ from ours.
    raise ImportError("import qconvert.validators.kernels.device, not kernels")

Said = Finding | Proved | Skipped | Table

INTERPRETER = "Triton's interpreter"
NO_DATA = "no tensor of the folder was checked: give --level sample"

_AT_MOST = 1 << 21  # elements of a matrix, in the interpreter


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison of a kernel with its reference. `bound` 0 means bitwise, and `difference` counts
    elements that differ; else both are relative errors. A difference of nan never fits."""

    name: str
    difference: float
    bound: float

    @property
    def fits(self) -> bool:
        return self.difference <= self.bound

    @property
    def share(self) -> float:
        """Share of its bound that a case takes; of bitwise ones, the difference."""
        if isnan(self.difference):
            return inf
        return self.difference / self.bound if self.bound else self.difference


def device() -> str:
    """`cuda` if there is a GPU, else `cpu`: Triton's interpreter, which must be requested before
    Triton is imported. Raises NotChecked if Triton is missing, or was imported too early."""
    from qconvert.validation.runner import NotChecked

    if missing := lacking("kernels"):
        raise NotChecked(missing)
    asked = os.environ.get("TRITON_INTERPRET") == "1"
    if not asked:
        import torch

        if torch.cuda.is_available():
            return "cuda"
    if "triton" in sys.modules and not _interprets():
        raise NotChecked(
            "there is no GPU, and this process imported Triton without TRITON_INTERPRET=1: set it "
            "in the environment and run the command again"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    return "cpu"


@dataclass(frozen=True)
class KernelValidator:
    """Tries a kernel on random weights, which its module `kernel` draws, and on `cases` of a folder,
    each with its tensor; a note says why there are none. What does not fit is a finding of `rule`."""

    name: str
    proves: str
    rule: str
    kernel: str
    cases: Callable[[Folder, str], tuple[Iterable[tuple[str, Case]], str]]
    needs: frozenset[Need] = frozenset({"kernels"})

    def random(self) -> Iterator[Said]:
        """On random weights, without a folder."""
        yield from self._said(device(), (), "")

    def __call__(self, folder: Folder) -> Iterator[Said]:
        where = device()
        yield from self._said(where, *self.cases(folder, where))

    def _said(self, where: str, real: Iterable[tuple[str, Case]], note: str) -> Iterator[Said]:
        module = import_module(f"qconvert.validators.kernels.triton.{self.kernel}")
        yield from said(self.name, self.rule, where, module.random_cases(where), real, note)


def place(device: str) -> str:
    """Name of a device in a report: the GPU's name, or the interpreter."""
    if device == "cpu":
        return INTERPRETER
    import torch

    return str(torch.cuda.get_device_name(device))


def bitwise(name: str, found: Tensor, expected: Tensor) -> Case:
    """Number of elements of two tensors of one shape and dtype with different bits, nan if they are of
    another kind. For floats, any NaN equals any: its bits are the processor's own."""
    import torch

    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return Case(name, nan, 0.0)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    differ = found.view(bits) != expected.view(bits)
    differ &= ~(found.isnan() & expected.isnan())
    return Case(name, float(differ.sum().item()), 0.0)


def chosen(names: Iterable[str], layers: tuple[int, ...] | None) -> list[str]:
    """For tensors of one kind, those of some layers, the first and the last layer if none are
    asked for; in a layer, the first and last of those that differ only in the expert."""
    found: dict[int, dict[str, list[str]]] = {}
    for name in names:
        template, layer, _ = parse(name)
        if layer is not None:
            found.setdefault(layer, {}).setdefault(template, []).append(name)
    wanted = {min(found), max(found)} if found and layers is None else set(layers or ())
    picked: list[str] = []
    for layer in sorted(wanted & set(found)):
        for alike in found[layer].values():
            picked += dict.fromkeys((alike[0], alike[-1]))
    return picked


def head(rows: int, columns: int, step: int, device: str) -> int:
    """Number of rows of a matrix to check: all on a GPU; in the interpreter, which takes a second for
    about four million elements, the first whole steps."""
    return rows if device == "cuda" else min(rows, max(1, _AT_MOST // (step * columns)) * step)


def read(reader: Reader, tensor: Source, start: int, nbytes: int) -> Tensor:
    """A tensor's bytes from `start` on, as uint8."""
    import torch

    return torch.from_numpy(read_bytes(reader, tensor, start, start + nbytes))


def said(
    kernel: str,
    rule: str,
    device: str,
    random: Iterable[Case],
    real: Iterable[tuple[str, Case]],
    note: str,
) -> Iterator[Said]:
    """Report of a validator's cases: a finding for each that does not fit, and a table with the
    worst of the random ones and all of real tensors, by name."""
    where = place(device)
    tried = list(random)
    worst = max(tried, key=lambda case: case.share)
    first = f"random weights, the worst of {len(tried)}: {worst.name}"
    rows = [(first, f"{worst.difference:g}", _spell(worst.bound), where)]
    for case in tried:
        if not case.fits:
            yield Finding(rule, "error", f"kernel {kernel}", _complaint(case, where))
    for tensor, case in real:
        rows.append((case.name, f"{case.difference:g}", _spell(case.bound), where))
        if not case.fits:
            yield Finding(rule, "error", tensor, _complaint(case, where))
    columns = ("case", "difference", "bound", "device")
    yield Table(f"kernel {kernel}", columns, tuple(rows), note)
    yield Proved(f"kernel {kernel} gives the results of its references, on {where}")
    if note:
        yield Skipped(f"kernel {kernel} on this folder ({note})")


def _spell(bound: float) -> str:
    return f"{bound:g}" if bound else "bitwise"


def _complaint(case: Case, where: str) -> str:
    if isnan(case.difference):
        return f"{case.name}: the result is not a number, or has another shape ({where})"
    if not case.bound:
        return f"{case.name}: expected equal bits, found {case.difference:g} that differ ({where})"
    return f"{case.name}: expected at most {case.bound:g}, found {case.difference:g} ({where})"


def _interprets() -> bool:
    """Tell whether the Triton that this process has imported interprets: its own functions say so."""
    import triton.language as tl

    return type(tl.sigmoid).__name__ == "InterpretedFunction"
