"""What is in memory, or on its way through a layer, while its experts are worked on."""

from __future__ import annotations

from dataclasses import dataclass, field

from qconvert.calibrate.experts import Expert, Seen
from qconvert.calibrate.rows import Rows


@dataclass(frozen=True, eq=False)
class Stream:
    """A model's way through a layer: what goes into its experts, and what they answer [T, H]."""

    seen: Seen
    answers: Rows


@dataclass(frozen=True, eq=False)
class Taken:
    """Experts of one device in memory, and as they were read where the unquantized model runs too."""

    experts: list[Expert] = field(default_factory=list)
    plain: list[Expert] = field(default_factory=list)
