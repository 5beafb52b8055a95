"""The options of commands that can calibrate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, cast

import click

from qconvert.cli.options import (
    DATA_HELP,
    DEVICE,
    Count,
    DataName,
    Folder,
    from_options,
    stacked,
)

if TYPE_CHECKING:
    from qconvert.cli.convert import RunOptions
    from qconvert.core.int_scheme import Signs
    from qconvert.formats.int_packed.encode import Scales
    from qconvert.samples.request import Calibration

F = TypeVar("F", bound=Callable[..., Any])


class CalibrationOptions(TypedDict):
    """Values of the options in `CALIBRATION`, those of --set among them; None for what was not given."""

    gptq: bool
    solver: Literal["best", "llmcompressor"] | None
    scales: Scales | None
    signs: Signs | None
    order: Literal["importance", "stored"] | None
    refit: int | None
    descent: int | None
    propagated_error: Literal["ignore", "correct"] | None
    data: str | None
    synthetic: bool
    samples: int | None
    length: int | None
    seed: int | None
    column: str | None
    dampening_frac: float | None
    experts: Literal["routed", "all"] | None
    min_tokens: int | None
    undersampled: Literal["all", "rtn"] | None
    save_stats: Path | None
    devices: tuple[str, ...]
    distributed: bool


# What --set takes: fields of a Calibration, rare enough to be no options.
SETTINGS = (
    "dampening_frac", "descent", "experts", "min_tokens", "order", "propagated_error", "refit", "signs",
    "undersampled",
)  # fmt: skip


class Setting(click.ParamType[tuple[str, Any]]):
    """NAME=VALUE, of a field in SETTINGS. The value is converted as a recipe's is."""

    name = "setting"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Any]:
        from typing import get_type_hints

        from pydantic import TypeAdapter, ValidationError

        from qconvert.samples.request import Calibration

        name, equals, text = str(value).partition("=")
        if not equals or name not in SETTINGS:
            self.fail(f"{value!r}: expected NAME=VALUE of {', '.join(SETTINGS)}", param, ctx)
        try:
            return name, TypeAdapter(get_type_hints(Calibration)[name]).validate_python(text)
        except ValidationError as error:
            self.fail(f"{name}: {error.errors()[0]['msg']}, found {text!r}", param, ctx)


# For commands whose recipe decides whether there is a calibration.
DATA: Callable[[F], F] = stacked(
    click.option("--data", metavar="FILE", type=DataName(), help=DATA_HELP),
    click.option(
        "--synthetic", is_flag=True,
        help="Random tokens instead of data. [for trials, not for serving]",
    ),
    click.option("--samples", type=Count(), help="Number of samples. [default: 512]"),
    click.option("--length", type=Count(2), help="Tokens per sample. [default: 2048]"),
    click.option(
        "--seed", type=click.IntRange(0, 2**32 - 1), help="Seed for the choice of samples. [default: 0]"
    ),
    click.option("--column", help="JSONL key or dataset column with the text."),
    click.option(
        "--save-stats", metavar="DIR", type=Folder(),
        help="Save counts of routed experts, moments of their activations, and a map of hot experts for "
        "--init-expert-location.",
    ),
    DEVICE,
    click.option(
        "--set", "settings", metavar="NAME=VALUE", multiple=True, type=Setting(),
        help="A rarer setting, as a recipe's `calibrate` has it: dampening_frac, experts, "
        "min_tokens, undersampled; of --solver best descent, order, propagated_error, refit, signs. "
        "Repeatable. [docs/calibration.md]",
    ),
    click.option(
        "--distributed", is_flag=True,
        help="Calibrate on several machines, on each of which torchrun or srun starts this command, "
        "with one SRC and OUT on a file system that they share. RANK, WORLD_SIZE (SLURM_PROCID, "
        "SLURM_NTASKS) tell them apart; number 0, which writes, is met at MASTER_ADDR, MASTER_PORT.",
    ),
)  # fmt: skip
SCALES = click.option(
    "--scales", type=click.Choice(["amax", "search"]),
    help="Which scale a group or block of weights gets, in the same format. `amax`: its largest weight "
    "decides. `search`: the one whose codes lose least, of rounding by squared error, of --gptq by what "
    "other columns cannot make up for. Asymmetric codes of --gptq keep an observer's; amx and kt "
    "round as --rounding says. [default: amax; with --gptq search]",
)  # fmt: skip
CALIBRATION: Callable[[F], F] = stacked(
    click.option(
        "--gptq", is_flag=True,
        help="Calibrate with GPTQ, one layer in memory at a time, instead of rounding to nearest.",
    ),
    click.option(
        "--solver", type=click.Choice(["best", "llmcompressor"]),
        help="Of --gptq. `best`: scales are searched for and refitted, columns ordered, codes improved "
        "one by one. `llmcompressor`: llm-compressor's codes. [default: best]",
    ),
    SCALES,
    DATA,
)  # fmt: skip


def calibration_from(options: CalibrationOptions) -> Calibration | None:
    """The requested calibration, or None. Raises click.UsageError for options that need --gptq, and for
    --gptq without data."""
    from qconvert.samples.request import OF_BEST, Calibration

    given = _given(options)
    if not options["gptq"]:
        if given:
            raise click.UsageError(f"{flag(next(iter(given)))} needs --gptq")
        return None
    if given.get("solver") == "llmcompressor":
        for name in OF_BEST:
            if name in given:
                raise click.UsageError(f"{flag(name)} needs --solver best")
    if options["synthetic"] == (options["data"] is not None):
        raise click.UsageError(
            "--gptq needs --data FILE, or --synthetic (random tokens) for a trial"
        )
    with from_options():
        return Calibration(**given)


def flag(name: str) -> str:
    """A field of a Calibration as it is typed."""
    if name in SETTINGS:
        return f"--set {name}"
    return "--device" if name == "devices" else f"--{name.replace('_', '-')}"


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The given options as fields of a Calibration."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in options.items()
        # A 0 equals False, and says something.
        if name != "gptq" and value is not None and value is not False and value != ()
    }


def _split(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of a calibration with those of --set, and all others. Raises click.UsageError for one
    that is given twice."""
    own = {name: given[name] for name in CalibrationOptions.__annotations__ if name in given}
    for name, value in given["settings"]:
        if own.get(name) is not None:
            raise click.UsageError(f"{flag(name)} is given twice")
        own[name] = value
    rest = {name: value for name, value in given.items() if name not in own and name != "settings"}
    return own, rest


def split_data(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """For a command with DATA: the given fields of a Calibration, and all other options. Raises
    click.UsageError for options that exclude one another."""
    from qconvert.samples.request import Calibration

    own, rest = _split(given)
    asked = _given(own)
    if asked:
        with from_options():
            Calibration(**asked)
    return asked, rest


def split_options(given: Mapping[str, Any]) -> tuple[CalibrationOptions, RunOptions]:
    """For a command with CALIBRATION: its options, and those of every conversion. Raises
    click.UsageError for several devices without --gptq."""
    own, rest = _split(given)
    own = {**dict.fromkeys(CalibrationOptions.__annotations__), **own}
    return cast(CalibrationOptions, own), cast("RunOptions", rest)
