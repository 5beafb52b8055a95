"""The options of commands that can calibrate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, cast

import click

from qconvert.cli.options import (
    DATA_HELP,
    DEVICE,
    MOST,
    DataName,
    Folder,
    Renamed,
    Share,
    from_options,
    one_device,
    stacked,
)

if TYPE_CHECKING:
    from qconvert.cli.convert import RunOptions
    from qconvert.core.int_scheme import Signs
    from qconvert.samples.request import Calibration

F = TypeVar("F", bound=Callable[..., Any])


class CalibrationOptions(TypedDict):
    """Values of the options in `CALIBRATION`; None for an option that was not given."""

    gptq: bool
    solver: Literal["best", "llmcompressor"] | None
    signs: Signs | None
    propagated_error: Literal["ignore", "correct"] | None
    data: str | None
    synthetic: bool
    samples: int | None
    length: int | None
    seed: int | None
    column: str | None
    dampening: float | None
    experts: Literal["routed", "all"] | None
    min_tokens: int | None
    few: Literal["all", "rtn"] | None
    save_stats: Path | None
    devices: tuple[str, ...]


# For commands whose recipe decides whether there is a calibration.
DATA: Callable[[F], F] = stacked(
    click.option("--data", metavar="FILE", type=DataName(), help=DATA_HELP),
    click.option(
        "--synthetic", is_flag=True,
        help="Random tokens instead of data: for trials, not for serving.",
    ),
    click.option("--samples", type=click.IntRange(1, MOST), help="Number of samples. [default: 512]"),
    click.option("--length", type=click.IntRange(2, MOST), help="Tokens per sample. [default: 2048]"),
    click.option(
        "--seed", type=click.IntRange(0, 2**32 - 1), help="Seed for the choice of samples. [default: 0]"
    ),
    click.option("--column", help="JSONL key or dataset column with the text."),
    click.option(
        "--dampening", type=Share(),
        help="Part of the Hessian's mean diagonal that is added to it. [default: 0.01]",
    ),
    click.option(
        "--experts", type=click.Choice(["routed", "all"]),
        help="Tokens that an expert is calibrated on: those routed to it, or all. [default: routed]",
    ),
    click.option(
        "--min-tokens", type=click.IntRange(1, MOST),
        help="An expert that fewer tokens reach is undersampled: it is listed, and calibrated as "
        "--undersampled says. [default: 128]",
    ),
    click.option(
        "--undersampled", "few", cls=Renamed, old=("--few",), type=click.Choice(["all", "rtn"]),
        help="`all`: calibrate an undersampled expert on all tokens. `rtn`: round it to nearest. "
        "[default: all]",
    ),
    click.option(
        "--save-stats", metavar="DIR", type=Folder(),
        help="Save counts of routed experts, moments of their activations, and a map of hot experts for "
        "--init-expert-location.",
    ),
    DEVICE,
)  # fmt: skip
SIGNS = click.option(
    "--signs", type=click.Choice(["both", "positive"]),
    help="Of scales that are searched for in symmetric INT4 (--gptq, or w4a16 --rtn --scales search). "
    "`both`: below 0 too, which turns codes of -8 to 7 around where that loses less: .87 to .95 of the "
    "squared error of rounding, for 1.4 times the search. Runtimes multiply by scales, whatever their "
    "sign; but with VLLM_MARLIN_INPUT_DTYPE=int8 vLLM divides by the largest first. AMX, asymmetric "
    "codes and INT8 have positive ones. [default: both]",
)  # fmt: skip
CALIBRATION: Callable[[F], F] = stacked(
    click.option(
        "--gptq", is_flag=True,
        help="Calibrate with GPTQ, one layer in memory at a time, instead of rounding to nearest.",
    ),
    click.option(
        "--solver", type=click.Choice(["best", "llmcompressor"]),
        help="Of --gptq. `best`: scales are searched for and refitted, columns ordered, codes improved "
        "one by one: .6 to .7 of `llmcompressor`'s KL on a small model, less with outlier channels, "
        "in 6 times its solving. `llmcompressor`: llm-compressor's codes. [default: best]",
    ),
    SIGNS,
    click.option(
        "--propagated-error", type=click.Choice(["ignore", "correct"]),
        help="Of --solver best: what layers before lost. `correct`: codes make up for half of it, as "
        "the unquantized model shows: .94 to .97 of the KL on a small model, for twice the hidden "
        "states on disk and a second forward; never where linears beside the experts are solved too. "
        "[default: correct]",
    ),
    DATA,
)  # fmt: skip

_FIELDS = {"dampening": "dampening_frac"}


def calibration_from(options: CalibrationOptions) -> Calibration | None:
    """The requested calibration, or None. Raises click.UsageError for options that need --gptq, and for
    --gptq without data."""
    from qconvert.samples.request import Calibration

    given = _given(options)
    if not options["gptq"]:
        if given:
            name = next(n for n in options if _FIELDS.get(n, n) in given)
            flag = {"devices": "device", "few": "undersampled"}.get(name, name.replace("_", "-"))
            raise click.UsageError(f"--{flag} needs --gptq")
        return None
    if "propagated_error" in given and given.get("solver") == "llmcompressor":
        raise click.UsageError("--propagated-error needs --solver best")
    if options["synthetic"] == (options["data"] is not None):
        raise click.UsageError(
            "--gptq needs --data FILE, or --synthetic (random tokens) for a trial"
        )
    with from_options():
        return Calibration(**given)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The given options as fields of a Calibration."""
    return {
        _FIELDS.get(name, name): str(value) if isinstance(value, Path) else value
        for name, value in options.items()
        if name != "gptq" and value not in (None, False, ())
    }


def split_data(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """For a command with DATA: the given fields of a Calibration, and all other options. Raises
    click.UsageError for options that exclude one another."""
    from qconvert.samples.request import Calibration

    names = CalibrationOptions.__annotations__
    own = _given({name: value for name, value in given.items() if name in names})
    if own:
        with from_options():
            Calibration(**own)
    return own, {name: value for name, value in given.items() if name not in names}


def split_options(given: Mapping[str, Any]) -> tuple[CalibrationOptions, RunOptions]:
    """For a command with CALIBRATION: its options, and those of every conversion. Without --gptq
    --device is where scales are searched for. Raises click.UsageError for several devices then."""
    names = CalibrationOptions.__annotations__
    own = {name: value for name, value in given.items() if name in names}
    rest = {name: value for name, value in given.items() if name not in names}
    if not own["gptq"]:
        rest["device"], own["devices"] = one_device(own["devices"]), ()
    return cast(CalibrationOptions, own), cast("RunOptions", rest)
