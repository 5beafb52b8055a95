"""NVFP4 matrices of a plan, in either dialect, and how they are read as BF16.

Names and types say what is NVFP4: codes in U8, an E4M3 scale for each 16 columns, and a global scale in
F32 under its dialect's name. The config has nothing to add, since the format has one block size.
"""

from __future__ import annotations

from dataclasses import dataclass

from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, apply
from qconvert.core.names import split_parameter
from qconvert.formats.nvfp4.config import NAMES
from qconvert.ops.fp4 import DequantNvfp4, Dialect
from qconvert.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Nvfp4Matrix:
    """A matrix by its module, and the dialect that it is stored in."""

    module: str
    dialect: Dialect

    @property
    def weight(self) -> str:
        """The name of its codes."""
        return f"{self.module}.{NAMES[self.dialect].weight}"

    @property
    def scales(self) -> tuple[str, str]:
        """The names of its block scales and of its global scale."""
        names = NAMES[self.dialect]
        return f"{self.module}.{names.scale}", f"{self.module}.{names.global_scale}"

    def decoded(self, plan: Plan, *, overflow: bool) -> Output:
        """The matrix in BF16. Raises PlanError where a tensor is of another type."""
        names = self.weight, *self.scales
        try:
            op = DequantNvfp4(self.dialect, overflow)
            return apply(op, *(plan.tensors[name] for name in names))[0]
        except PlanError as error:
            raise PlanError(f"weight {names[0]!r} with scales {names[1]!r}: {error}") from error


def nvfp4_matrices(plan: Plan) -> list[Nvfp4Matrix]:
    """Every matrix that has a global scale beside it, in the order of the plan. Raises PlanError where
    its codes or block scales are missing."""
    dialects = {names.global_scale: dialect for dialect, names in NAMES.items()}
    found = []
    for name in plan.tensors:
        module, parameter = split_parameter(name)
        if parameter not in dialects:
            continue
        matrix = Nvfp4Matrix(module, dialects[parameter])
        for part in (matrix.weight, *matrix.scales):
            if part not in plan.tensors:
                raise PlanError(f"{part!r} is missing, and {name!r} says that {module!r} is NVFP4")
        found.append(matrix)
    return found
