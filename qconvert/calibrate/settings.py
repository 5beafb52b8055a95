"""Settings of a calibration, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from qconvert.core.errors import PlanError
from qconvert.core.int_scheme import Codes, IntScheme, Scheme
from qconvert.samples.request import GptqSettings

if TYPE_CHECKING:
    import numpy as np

    Counts = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

Solver = Literal["best", "llmcompressor"]

# Parts of amax / (largest code) that are tried as scales where a search is asked for.
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25)


@dataclass(frozen=True)
class Settings(GptqSettings):
    """Every field enters the result. Raises PlanError for values that make no sense.

    `search` says which schemes get the scale with the least error weighted by the inputs' mean squares
    among `CLIPS`, instead of the largest weight's: none, narrow ones, or all symmetric ones; it is of
    the solver "llmcompressor". `attention` is transformers' name of an implementation. `gather` is how
    many tokens' expert inputs are worked on together: None takes one sample on a CPU and 262,144 tokens
    or more elsewhere; `together` how many matrices an accelerator solves at a time.
    """

    search: Literal["none", "narrow", "all"] = "narrow"
    attention: Literal["sdpa", "eager"] = "sdpa"
    gather: int | None = None
    together: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gather is not None and self.gather < 1:
            raise PlanError(f"gather must be at least 1 token, found {self.gather}")
        if self.together < 1:
            raise PlanError(f"together must be at least 1 matrix, found {self.together}")

    @classmethod
    def of(cls, asked: GptqSettings) -> Settings:
        """Settings of a request."""
        return cls(**{one.name: getattr(asked, one.name) for one in fields(GptqSettings)})

    @property
    def corrects(self) -> bool:
        """Return whether what layers before lost is made up for."""
        return self.solver == "best" and self.propagated_error == "correct"

    def searches(self, scheme: IntScheme) -> bool:
        """Return whether llm-compressor's solver searches a scheme's scales."""
        if self.solver == "best" or not scheme.symmetric or self.search == "none":
            return False
        return self.search == "all" or scheme.narrow


@dataclass(frozen=True, slots=True)
class ExpertSchemes:
    """One format to solve for: gate and up have one scheme, down may have another (AMX cuts its columns
    into a part a NUMA node)."""

    gate_up: Scheme
    down: Scheme

    def scheme(self, kind: str) -> Scheme:
        return self.down if kind == "down_proj" else self.gate_up


Schemes = Sequence[Scheme | ExpertSchemes]


@dataclass(frozen=True, eq=False)
class LayerStats:
    """Statistics of a layer's routed experts, in numpy.

    counts int64 [E]: tokens routed to each. saliency float32 [E], REAP's: the mean over those tokens of
    the router's weight times the L2 norm of the answer, before anything of the layer is quantized; 0
    where it was not measured. Mean square and absmax of each input column, over the
    tokens that an expert was calibrated with: gate_up_* float32 [E, H], down_* float32 [E, I].
    `few` are experts with fewer routed tokens than asked for, `rounded` those that were rounded to
    nearest for it (or because all their inputs were zero). `dead_columns` counts input columns that
    were zero throughout (llm-compressor's solver zeroes their weights), by kind; `fallbacks` are
    matrices that were rounded to nearest because their Hessian could not be factorized: (expert, kind).
    """

    counts: Counts
    saliency: Floats
    gate_up_mean_square: Floats
    gate_up_absmax: Floats
    down_mean_square: Floats
    down_absmax: Floats
    few: tuple[int, ...]
    rounded: tuple[int, ...]
    dead_columns: Mapping[str, int]
    fallbacks: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """One solved matrix: codes for each target in order. `kind` is gate_proj, up_proj or down_proj, or,
    where `expert` is None, a linear's module in the checkpoint; `sources` are the ranges it was read
    from: name, start, stop, xxh3."""

    layer: int
    expert: int | None
    kind: str
    codes: Sequence[Codes]
    sources: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class LayerDone:
    """All matrices of a layer have been yielded; a layer in which none is solved has none of these. The
    calibration goes on to the next layer, and forgets this one's input, once the item after this one is
    asked for. `stats` is None where no routed expert was looked at."""

    layer: int
    stats: LayerStats | None
