"""The options of commands that can calibrate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from qconvert.cli.options import Parsed, from_options, option_of, options_of, rare, stacked
from qconvert.core.options import options_in
from qconvert.samples.request import OF_BEST, SETTINGS, Calibration

if TYPE_CHECKING:
    from qconvert.cli.convert import CommandOptions

F = TypeVar("F", bound=Callable[..., Any])

# Fields of a calibration that were given.
Asked = dict[str, Any]


def _setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE, of a field in SETTINGS. The value is converted as a recipe's is."""
    from typing import get_type_hints

    from pydantic import TypeAdapter, ValidationError

    name, equals, value = text.partition("=")
    if not equals or name not in SETTINGS:
        raise ValueError(f"{text!r}: expected NAME=VALUE of {', '.join(SETTINGS)}")
    try:
        return name, TypeAdapter(get_type_hints(Calibration)[name]).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{name}: {error.errors()[0]['msg']}, found {value!r}") from error


# Fields that name samples, and what runs them.
DATA_NAMES = (
    "data", "synthetic", "samples", "length", "seed", "column", "save_stats", "devices", "distributed",
)  # fmt: skip
_SAMPLES = DATA_NAMES[:-1]
# For commands that seldom need data: for --kv-scale calibrated alone.
SAMPLES: Callable[[F], F] = options_of(Calibration, *_SAMPLES, given=True, rare=True)
# For commands whose recipe decides whether there is a calibration.
DATA: Callable[[F], F] = stacked(
    options_of(Calibration, *_SAMPLES, given=True),
    rare(
        "--set", "settings", metavar="NAME=VALUE", multiple=True, type=Parsed("setting", _setting),
        help="A rarer setting, as a recipe's `calibrate` has it: dampening_frac, experts, "
        "min_tokens, undersampled; of --solver best descent, order, propagated_error, refit, signs. "
        "Repeatable. [docs/calibration.md]",
    ),
    option_of(Calibration, "distributed"),
)  # fmt: skip
CALIBRATION: Callable[[F], F] = stacked(
    click.option(
        "--gptq", is_flag=True,
        help="Calibrate with GPTQ, one layer in memory at a time, instead of rounding to nearest.",
    ),
    options_of(Calibration, "solver", "scales", given=True),
    DATA,
)  # fmt: skip


def calibration_from(asked: Asked, *, gptq: bool) -> Calibration | None:
    """The requested calibration, or None. Raises click.UsageError for options that need --gptq, and for
    --gptq without data."""
    if not gptq:
        if asked:
            raise click.UsageError(f"{flag(next(iter(asked)))} needs --gptq")
        return None
    if asked.get("solver") == "llmcompressor":
        for name in OF_BEST:
            if name in asked:
                raise click.UsageError(f"{flag(name)} needs --solver best")
    if ("synthetic" in asked) == ("data" in asked):
        raise click.UsageError(
            "a calibration needs --data FILE, or --synthetic (random tokens) for a trial"
        )
    with from_options():
        return Calibration(**asked)


def flag(name: str) -> str:
    """A field of a Calibration as it is typed."""
    if name in SETTINGS:
        return f"--set {name}"
    return "--device" if name == "devices" else f"--{name.replace('_', '-')}"


def split(given: Mapping[str, Any]) -> tuple[Asked, dict[str, Any]]:
    """Fields of a calibration that were given, by --set too, and all other options. Raises
    click.UsageError for one that is given twice."""
    fields = [name for name in options_in(Calibration) if name in given]
    # A 0 equals False, and says something.
    asked = {n: v for n in fields if (v := given[n]) is not None and v is not False and v != ()}
    if "save_stats" in asked:
        asked["save_stats"] = str(asked["save_stats"])
    for name, value in given.get("settings", ()):
        if name in asked:
            raise click.UsageError(f"{flag(name)} is given twice")
        asked[name] = value
    rest = {name: value for name, value in given.items() if name not in (*fields, "settings")}
    return asked, rest


def split_data(given: Mapping[str, Any]) -> tuple[Asked, CommandOptions]:
    """For a command with DATA: the given fields of a Calibration, and the options of the run. Raises
    click.UsageError for options that exclude one another."""
    from qconvert.cli.convert import CommandOptions

    asked, rest = split(given)
    if asked:
        with from_options():
            Calibration(**asked)
    return asked, CommandOptions(**rest)
