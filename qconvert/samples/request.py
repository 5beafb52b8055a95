"""Request for a calibration: data, and how layers are solved. No torch here: a plan names it, and
only a run computes (`qconvert/calibrate/`)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from qconvert.core.errors import DataError, PlanError
from qconvert.core.int_scheme import Signs
from qconvert.core.options import option, options_in
from qconvert.core.shown import shortened

FACT = "calibration"
DATASET = "hf-dataset:"
Kind = Literal["text", "jsonl", "tokens", "dataset", "synthetic"]

_SUFFIXES: dict[str, Kind] = {
    ".txt": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".safetensors": "tokens",
}  # fmt: skip
_SEEDS = 2**32
_DATASET_NAME = re.compile(r"hf-dataset(:[^:]+){1,3}")
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,4})?")
_PLACES = ("data", "save_stats", "devices", "distributed")
_MOST_SWEEPS = 1000  # of refits and descents: far more than change anything
# What only `solver: best` has.
OF_BEST = ("scales", "signs", "order", "refit", "descent", "propagated_error")


def _data_name(given: str) -> str:
    """Calibration data: a file of a known kind, or hf-dataset:NAME[:SPLIT]."""
    if DataSpec(data=given).kind == "dataset" and not _DATASET_NAME.fullmatch(given):
        raise ValueError(f"{given!r}: write hf-dataset:NAME, NAME:SPLIT or NAME:CONFIG:SPLIT")
    return given


def _device(given: str) -> str:
    if not _DEVICE.fullmatch(given):
        raise ValueError(f"{given!r} is not a device; write cpu, cuda or cuda:N")
    return given


@dataclass(frozen=True, slots=True)
class DataSpec:
    """`samples` samples of at most `length` ids each. `column` is the JSONL key, dataset column or
    tensor to take where it is not the usual one. Raises DataError where it names no data."""

    data: str | None = option(
        None, "Samples: text, JSONL (`text`, `messages` under the model's chat template, or "
        "`input_ids`), safetensors (`input_ids`), or hf-dataset:NAME[:SPLIT].",
        kind="data", parse=_data_name, metavar="FILE",
    )  # fmt: skip
    samples: int = option(512, "Number of samples.", kind="count", shown="512")
    length: int = option(2048, "Tokens per sample.", kind="count", least=2, shown="2048", rare=True)
    seed: int = option(
        0, "Seed for the choice of samples.", kind="count", least=0, most=_SEEDS - 1, shown="0",
        rare=True,
    )  # fmt: skip
    synthetic: bool = option(
        False, "Random tokens instead of data. [for trials, not for serving]", rare=True
    )
    column: str | None = option(None, "JSONL key or dataset column with the text.", rare=True)

    def __post_init__(self) -> None:
        if self.samples < 1 or self.length < 1:
            raise DataError(f"expected samples of tokens, found {self.samples} x {self.length}")
        if not 0 <= self.seed < _SEEDS:
            raise DataError(f"expected a seed from 0 to {_SEEDS - 1}, found {self.seed}")
        if self.synthetic and self.data is not None:
            raise DataError(f"--synthetic generates random tokens: omit --data {self.data}")
        if self.column is not None and self.kind in ("text", "synthetic"):
            raise DataError(f"text has no column {self.column!r}; omit --column")
        _ = self.kind  # raises for an unknown form

    @property
    def kind(self) -> Kind:
        """Return which form of data it is, from its name."""
        if self.synthetic:
            return "synthetic"
        if self.data is None:
            raise DataError("calibration needs data: give --data FILE, or --synthetic for a trial")
        if self.data.startswith(DATASET):
            return "dataset"
        kind = _SUFFIXES.get(Path(self.data).suffix.lower())
        if kind is None:
            raise DataError(
                f"{self.data}: expected a name that ends in {', '.join(_SUFFIXES)}, or "
                f"{DATASET}NAME; convert it to one of these"
            )
        return kind


@dataclass(frozen=True)
class GptqSettings:
    """Settings of GPTQ: how layers are solved.

    `experts` says which tokens an expert is calibrated on: `routed`, its own, or `all`. One with fewer
    than `min_tokens` of its own gets all (`undersampled: all`) or is rounded to nearest
    (`undersampled: rtn`).
    `dampening_frac` is added to the Hessian's diagonal as a part of its mean; `block_size` columns
    are solved before their error goes on to the rest. `solver` is `best` (calibrate/solver/), or
    `llmcompressor` for llm-compressor's codes. Of the best: `scales` are searched for, by what no other
    column makes up for, or follow the largest weight (`amax`), `signs` are those that searched scales of
    symmetric INT4 may have, `order` is that in which columns are solved, by importance or as stored,
    `refit` how often scales are fitted to codes, and codes found anew, `descent` how many sweeps of
    coordinate descent end it (of NVFP4 over blocks, whose scales are chosen anew in the first `refit`);
    `propagated_error` is what layers before lost: ignored, or corrected by half, with the hidden states
    of the unquantized model (calibrate/propagated_error.py). Raises PlanError for settings out of range.
    """

    dampening_frac: float = option(
        0.01, "Part of the Hessian's mean diagonal that is added to it.", setting=True
    )
    block_size: int = 128
    experts: Literal["routed", "all"] = option(
        "routed", "Tokens that an expert is calibrated on.", setting=True
    )
    min_tokens: int = option(128, "Of fewer tokens an expert is undersampled.", setting=True)
    undersampled: Literal["all", "rtn"] = option(
        "all", "An undersampled expert: calibrated on all tokens, or rounded.", setting=True
    )
    solver: Literal["best", "llmcompressor"] = option(
        "best", "Of --gptq. `best`: scales are searched for and refitted, columns ordered, codes "
        "improved one by one. `llmcompressor`: llm-compressor's codes.",
        choices=("best", "llmcompressor"), shown="best", rare=True,
    )  # fmt: skip
    scales: Literal["search", "amax"] = option(
        "search", "Which scale a group or block of weights gets, in the same format. `amax`: its "
        "largest weight decides. `search`: the one whose codes lose least, of rounding by squared "
        "error, of --gptq by what other columns cannot make up for. Asymmetric codes of --gptq keep an "
        "observer's; amx and kt round as --rounding says.",
        choices=("amax", "search"), shown="amax; with --gptq search",
    )  # fmt: skip
    signs: Signs = option("both", "Those of searched scales of symmetric INT4.", setting=True)
    order: Literal["importance", "stored"] = option(
        "importance", "Order in which columns are solved.", setting=True
    )
    refit: int = option(
        2, "How often scales are fitted to codes, and codes found anew.", setting=True
    )
    descent: int = option(2, "Sweeps of coordinate descent after that.", setting=True)
    propagated_error: Literal["ignore", "correct"] = option(
        "correct", "What layers before lost: half of it is made up for, or none.", setting=True
    )

    def __post_init__(self) -> None:
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


@dataclass(frozen=True)
class Calibration(GptqSettings, DataSpec):
    """Samples of tokens, and GPTQ's settings.

    `save_stats` is a folder for expert counts and moments of activations. `devices` are torch's names of
    what to compute on: none for all GPUs there are, or else the CPU. `distributed`: this process is one
    of those that torchrun or Slurm has started for it, on one host or several. Raises DataError as
    DataSpec does, PlanError as GptqSettings does.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    save_stats: str | None = option(
        None, "Save counts of routed experts, moments of their activations, and a map of hot experts "
        "for --init-expert-location.", kind="folder", parse=str, metavar="DIR", rare=True,
    )  # fmt: skip
    devices: tuple[str, ...] = option(
        (), "Device to compute on, cpu or cuda:N. Repeatable.", kind="device", parse=_device,
        metavar="NAME", words=("--device", "devices"), repeated=True,
        shown="all GPUs, else the CPU",
    )  # fmt: skip
    distributed: bool = option(
        False, "Calibrate on several machines, on each of which torchrun or srun starts this command, "
        "with one SRC and OUT on a file system that they share. RANK, WORLD_SIZE (SLURM_PROCID, "
        "SLURM_NTASKS) tell them apart; number 0, which writes, is met at MASTER_ADDR, MASTER_PORT.",
        rare=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        DataSpec.__post_init__(self)
        GptqSettings.__post_init__(self)
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
    import xxhash

    from qconvert.samples.data import digest

    settings = fact(request, digest(request, folder))
    return xxhash.xxh3_128_hexdigest(json.dumps(settings, sort_keys=True).encode())


def fact(request: Calibration, digest: str) -> dict[str, Any]:
    """The request as plans and manifests keep it: the data by its digest, no place on a disk, and of
    solver llmcompressor no setting that it has not."""
    left = {*_PLACES, *(() if request.solver == "best" else OF_BEST)}
    names = [field.name for field in fields(request) if field.name not in left]
    return {"data": digest, **{name: getattr(request, name) for name in names}}


# Fields that --set takes: rare enough to be no options.
SETTINGS = tuple(sorted(name for name, (_, one) in options_in(Calibration).items() if one.setting))
