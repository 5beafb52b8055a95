"""Request for a calibration: data, and how layers are solved. No torch here: a plan names it, and
only a run computes (`qconvert/calibrate/`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import xxhash

from qconvert.core.errors import PlanError
from qconvert.core.int_scheme import Signs
from qconvert.core.shown import shortened
from qconvert.samples.data import DataSpec
from qconvert.samples.data import digest as data_digest

FACT = "calibration"
_PLACES = ("data", "save_stats", "devices", "distributed")
_MOST_SWEEPS = 1000  # of refits and descents: far more than change anything
# What only `solver: best` has.
OF_BEST = ("scales", "signs", "order", "refit", "descent", "propagated_error")


@dataclass(frozen=True, slots=True)
class Calibration(DataSpec):
    """Samples of tokens, and GPTQ's settings.

    `experts` says which tokens an expert is calibrated on: `routed`, its own, or `all`. One with fewer
    than `min_tokens` of its own gets all (`undersampled: all`) or is rounded to nearest
    (`undersampled: rtn`).
    `dampening_frac` is added to the Hessian's diagonal as a part of its mean; `block_size` columns
    are solved before their error goes on to the rest. `solver` is `best`, or `llmcompressor` for
    llm-compressor's codes. Of the best: `scales` are searched for, or follow the largest weight
    (`amax`), `signs` are those that searched scales of symmetric INT4 may have, `order` is that in which
    columns are solved, by importance or as stored, `refit` how often scales are fitted to codes,
    `descent` how many sweeps of coordinate descent end it; `propagated_error` is what layers before
    lost: ignored, or corrected by half, with the hidden states of the unquantized model. `save_stats` is
    a folder for expert counts and moments of activations. `devices` are torch's names of what to compute
    on: none for all GPUs there are, or else the CPU. `distributed`: this process is one of those that
    torchrun or Slurm has started for it, on one host or several. Raises DataError as DataSpec does,
    PlanError for settings out of range.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    dampening_frac: float = 0.01
    block_size: int = 128
    experts: Literal["routed", "all"] = "routed"
    min_tokens: int = 128
    undersampled: Literal["all", "rtn"] = "all"
    solver: Literal["best", "llmcompressor"] = "best"
    scales: Literal["search", "amax"] = "search"
    signs: Signs = "both"
    order: Literal["importance", "stored"] = "importance"
    refit: int = 2
    descent: int = 2
    propagated_error: Literal["ignore", "correct"] = "correct"
    save_stats: str | None = None
    devices: tuple[str, ...] = ()
    distributed: bool = False

    def __post_init__(self) -> None:
        DataSpec.__post_init__(self)  # super() does not find a class that slots made anew
        if not 0 < self.dampening_frac < 1:
            raise PlanError(
                f"dampening_frac: expected a number between 0 and 1, found {self.dampening_frac}; 0.01 "
                "is usual"
            )
        if self.block_size < 1:
            raise PlanError(
                f"block_size: expected 1 column or more, found {self.block_size}; 128 is usual"
            )
        if self.min_tokens < 1:
            raise PlanError(
                f"min_tokens: expected 1 token or more, found {self.min_tokens}; nothing can be learnt "
                "of an expert from no token"
            )
        for name in ("refit", "descent"):
            asked = getattr(self, name)
            if not 0 <= asked <= _MOST_SWEEPS:
                found = shortened(str(asked), 40)
                raise PlanError(f"{name}: expected 0 to {_MOST_SWEEPS}, found {found}; 2 is usual")
        if self.solver == "llmcompressor":
            for field in fields(self):
                value = getattr(self, field.name)
                if field.name in OF_BEST and value != field.default:
                    raise PlanError(
                        f"{field.name}: solver llmcompressor has no such option, found {value!r}; leave "
                        "it out, or take solver best"
                    )


def digest_of(request: Calibration, folder: Path) -> str:
    """xxh3-128, hex, of all that decides a result: the data's content under the tokenizer in `folder`,
    and the settings; no path. Raises DataError where the data cannot be read."""
    settings = fact(request, data_digest(request, folder))
    return xxhash.xxh3_128_hexdigest(json.dumps(settings, sort_keys=True).encode())


def fact(request: Calibration, digest: str) -> dict[str, Any]:
    """The request as plans and manifests keep it: the data by its digest, no place on a disk, and of
    solver llmcompressor no setting that it has not."""
    left = {*_PLACES, *(() if request.solver == "best" else OF_BEST)}
    names = [field.name for field in fields(request) if field.name not in left]
    return {"data": digest, **{name: getattr(request, name) for name in names}}
