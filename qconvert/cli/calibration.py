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
    Share,
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
    """Values of the options in `CALIBRATION`; None for an option that was not given."""

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
        "--dampening-frac", type=Share(),
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
        "--undersampled", type=click.Choice(["all", "rtn"]),
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
SCALES = click.option(
    "--scales", type=click.Choice(["amax", "search"]),
    help="Which scale a group or block of weights gets, in the same format. `amax`: its largest weight "
    "decides. `search`: the one whose codes lose least. Of rounding to nearest, by squared error: "
    "on heavy-tailed weights .74 of the other's in INT4 (.83 to .86 with --signs positive), .95 in "
    "INT8, .81 in NVFP4 (gaussian: .73); a core searches .2 to .5 GB/s in compiled loops, which "
    "long runs take (extra `fast`), else .005 to .02. Of --gptq --solver best, by the error that "
    "other columns cannot make up for: .4 of the KL of `amax` with outlier channels, .9 without, in "
    "NVFP4 .75, for a tenth of solving. Asymmetric codes of --gptq keep an observer's; amx and kt "
    "round as --rounding says. [default: amax; with --gptq search]",
)  # fmt: skip
SIGNS = click.option(
    "--signs", type=click.Choice(["both", "positive"]),
    help="Of scales that are searched for in symmetric INT4 (--gptq, or w4a16 --rtn --scales search). "
    "`both`: below 0 too, which turns codes of -8 to 7 around where that loses less: .87 to .95 of the "
    "squared error of rounding, for 1.4 times the search. Runtimes multiply by scales, whatever their "
    "sign. AMX, asymmetric codes and INT8 have positive ones. [default: both]",
)  # fmt: skip
# The steps of --solver best. How much each gains and costs: benchmarks/README.md.
_STEPS: Callable[[F], F] = stacked(
    SCALES,
    SIGNS,
    click.option(
        "--order", type=click.Choice(["importance", "stored"]),
        help="Of --solver best: which columns are solved first. `importance`: those with the largest "
        "inputs, whose error all others then make up for: .87 to .94 of the KL of `stored` with "
        "outlier channels, as much without, for nothing. Groups stay as they are stored. [default: "
        "importance]",
    ),
    click.option(
        "--refit", metavar="N", type=click.IntRange(0, MOST),
        help="Of --solver best and symmetric codes: how often scales are fitted to codes by least "
        "squares, and codes found anew: with outlier channels 2 leave .94 to .97 of the KL of 0, "
        "without as much, for half of solving. In NVFP4: in how many sweeps of --descent scales are "
        "chosen, too. [default: 2]",
    ),
    click.option(
        "--descent", metavar="N", type=click.IntRange(0, MOST),
        help="Of --solver best: sweeps that end it, in which each code becomes the best one while all "
        "others stay: with outlier channels 2 leave .7 of the KL of 0, without .95, for a third of "
        "solving. In NVFP4 sweeps are over blocks, no fewer than --refit: .9 of the KL, for half of "
        "solving. [default: 2]",
    ),
    click.option(
        "--propagated-error", type=click.Choice(["ignore", "correct"]),
        help="Of --solver best: what layers before lost. `correct`: codes make up for half of it, as "
        "the unquantized model shows: .94 to .97 of the KL on a small model, for twice the hidden "
        "states on disk and a second forward; never where linears beside the experts are solved too. "
        "[default: correct]",
    ),
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
    _STEPS,
    DATA,
)  # fmt: skip


def calibration_from(options: CalibrationOptions) -> Calibration | None:
    """The requested calibration, or None. Raises click.UsageError for options that need --gptq, and for
    --gptq without data."""
    from qconvert.samples.request import OF_BEST, Calibration

    given = _given(options)
    if not options["gptq"]:
        if given:
            name = next(n for n in options if n in given)
            flag = "device" if name == "devices" else name.replace("_", "-")
            raise click.UsageError(f"--{flag} needs --gptq")
        return None
    if given.get("solver") == "llmcompressor":
        for name in OF_BEST:
            if name in given:
                raise click.UsageError(f"--{name.replace('_', '-')} needs --solver best")
    if options["synthetic"] == (options["data"] is not None):
        raise click.UsageError(
            "--gptq needs --data FILE, or --synthetic (random tokens) for a trial"
        )
    with from_options():
        return Calibration(**given)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The given options as fields of a Calibration."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in options.items()
        # A 0 equals False, and says something.
        if name != "gptq" and value is not None and value is not False and value != ()
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
    """For a command with CALIBRATION: its options, and those of every conversion."""
    names = CalibrationOptions.__annotations__
    own = {name: value for name, value in given.items() if name in names}
    rest = {name: value for name, value in given.items() if name not in names}
    return cast(CalibrationOptions, own), cast("RunOptions", rest)
