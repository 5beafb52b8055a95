"""Arguments and options that several commands share, and the options of dataclasses as click's.

A value that is invalid whatever the files hold ends a command with exit code 2, before one is opened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from qconvert.cli import completion
from qconvert.core.options import Option, options_in
from qconvert.core.shown import parse_size
from qconvert.run.work.options import RunOptions, repo_id
from qconvert.validation.options import SAYS_LEVEL, ValidateOptions, partition

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])

FINDINGS = 3  # exit code of a command that checked and found an error
NOT_KNOWN = 5  # exit code where nobody knows whether a runtime loads it: another class or version
MORE = 4  # exit code of a conversion that --until ended: the same command goes on
MOST = (
    2**31 - 1
)  # the largest count that an option takes; the product of two is still a sensible number

_EMPTY = "the name is empty; name a folder (`.` is the current one)"
_NULL = "a path cannot hold a null character"
_BRANCH = re.compile(r"[^\s~^:?*\[\\\x00-\x1f\x7f]+")


# --- Types of values ------------------------------------------------------------------------------


class Parsed(click.ParamType[Any]):
    """A text that a function reads, and refuses with ValueError or QConvertError; `completed` lists what
    a shell offers."""

    def __init__(
        self,
        name: str,
        parse: Callable[[str], Any],
        completed: Callable[[str], list[CompletionItem]] | None = None,
    ) -> None:
        self.name, self._parse, self._completed = name, parse, completed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from qconvert.core.errors import QConvertError

        try:
            return self._parse(str(value))
        except (QConvertError, ValueError) as error:
            self.fail(str(error), param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [] if self._completed is None else self._completed(incomplete)


def _capability(text: str) -> tuple[int, int]:
    """A compute capability, such as 9.0. Raises ValueError."""
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal() and len(text) <= 4):
        raise ValueError(f"{text!r}: expected a compute capability such as 9.0")
    return int(major), int(minor)


# Of `option` or of a function that hides it.
CAPABILITY: Mapping[str, Any] = {
    "type": Parsed("capability", _capability), "metavar": "M.N", "default": "9.0", "show_default": True,
    "help": "Compute capability of the GPUs: 8.0 is an A100, 8.9 an L40S, 9.0 an H200, 10.0 a B200.",
}  # fmt: skip


def _is_runtime(only: tuple[str, ...], text: str) -> str:
    """A consumer with known layouts, with or without its version. `only` are the names that a command
    takes."""
    from qconvert.core.errors import PlanError
    from qconvert.runtimes.consumers import parse_consumer

    if text in only:  # a runtime may be no consumer of layouts: ktransformers
        return text
    if text == "ktransformers":
        raise ValueError(
            "ktransformers serves a pair of folders, and no loader of it is simulated: `qconvert "
            "validate CPU_FOLDER --pair GPU_FOLDER --against SRC` checks both"
        )
    try:
        consumer = parse_consumer(text)
    except PlanError as error:
        raise ValueError(str(error)) from error
    if only and consumer.name not in only:
        raise ValueError(f"{consumer.name!r} is not one of {', '.join(only)}")
    return text


def _is_source(text: str) -> str:
    """A folder, here or in an object store, a file, or a repo on the Hub. An empty name (an unset shell
    variable) is refused."""
    from qconvert.checkpoint.hub_cache import parse_repo
    from qconvert.checkpoint.store import is_url, store_of

    if not text:
        raise ValueError(_EMPTY)
    if "\0" in text:
        raise ValueError(_NULL)
    if text.startswith("hf://"):  # the client's import is slow, and all else may be a path
        parse_repo(text)
    elif is_url(text):
        store_of(text)
    return text


def _is_pass(text: str) -> str:
    """A pass, `source` or `end`. Whether the recipe has that pass is checked later."""
    from qconvert.passes import passes

    known = ["source", *passes(), "end"]
    if text not in known:
        raise ValueError(f"unknown pass {text!r}; passes are {', '.join(known)}")
    return text


def _is_pattern(text: str) -> str:
    """Modules by name, by the end of a name, or by `re:` and a regular expression."""
    if not text.removeprefix("re:"):
        raise ValueError(
            f"{text!r} names no module; write a name, the end of a name, or re:PATTERN"
        )
    if text.startswith("re:"):
        from qconvert.core.patterns import compiled

        try:
            compiled(text[3:])
        except re.error as error:
            raise ValueError(f"{text!r} is not a regular expression: {error}") from error
    return text


def _is_branch(text: str) -> str:
    """A branch of a repo, or refs/pr/N."""
    bad = ".." in text or text.startswith(("/", "-")) or text.endswith(("/", ".", ".lock"))
    if bad or not _BRANCH.fullmatch(text):
        raise ValueError(f"{text!r} is not a valid branch name")
    return text


def _is_log(text: str) -> str:
    """A file that lines are added to, or `-` for stderr."""
    if not text:
        raise ValueError("the name is empty; name a file, or - for stderr")
    if "\0" in text:
        raise ValueError(_NULL)
    return text


class FolderPath(click.Path):
    """A folder's path. An empty one (an unset shell variable) would mean the current folder. `urls`: the
    URL of one in a store, and a repo on the Hub, may be named as well; `repos`: a repo may."""

    def __init__(self, *, urls: bool = False, repos: bool = False) -> None:
        super().__init__(path_type=Path)
        self._urls, self._repos = urls, repos or urls

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return completion.paths(incomplete, "dir")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from qconvert.checkpoint.store import is_url, store_of
        from qconvert.core.errors import UsageError
        from qconvert.hub.destination import hub_destination

        if not value:
            self.fail(_EMPTY, param, ctx)
        if "\0" in str(value):
            self.fail(_NULL, param, ctx)
        hub = str(value).startswith("hf://")
        if (hub and not self._repos) or (is_url(value) and not self._urls):
            more = ", or hf://ORG/NAME" if self._repos else ""
            self.fail(f"{value} is a URL; name a folder of this machine{more}", param, ctx)
        try:
            if hub:
                return f"hf://{hub_destination(value)}"
            return store_of(value).url if is_url(value) else super().convert(value, param, ctx)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class File(click.Path):
    """The path of a file, which is there already unless something else looks."""

    def __init__(self, *, exists: bool = True) -> None:
        super().__init__(exists=exists, dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value or "\0" in str(value):
            self.fail(_NULL if value else _EMPTY, param, ctx)
        return super().convert(value, param, ctx)


class Positive(click.FloatRange):
    """A number above 0 that a float32 holds, and not NaN, which comparisons let through."""

    def __init__(self) -> None:
        super().__init__(1e-37, 1e37)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if number != number:
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


class PositiveOr(Positive):
    """One of these, or a word."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word = word

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == self.word else super().convert(value, param, ctx)


class Count(click.IntRange):
    """A whole number up to MOST, which help does not show."""

    def __init__(self, least: int = 1, most: int = MOST) -> None:
        super().__init__(least, most)

    def _describe_range(self) -> str:
        return f"x>={self.min}" if self.min != 1 else ""

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "N"


SOURCE_NAME = Parsed("source", _is_source, completion.paths)
PARTITION = Parsed("partition", partition)
SIZE = Parsed("size", parse_size)


def _with_unit(text: str) -> int:
    if text.isdigit() and int(text) < 10**6:
        raise ValueError(f"{text} bytes are no GPU's memory; give the unit, such as {text}GB")
    return parse_size(text)


GPU_MEMORY = Parsed("size", _with_unit)
BRANCH = Parsed("branch", _is_branch)
REPO_ID = Parsed("id", repo_id)
_TYPES: dict[str, click.ParamType[Any]] = {
    "source": SOURCE_NAME, "partition": PARTITION, "folder": FolderPath(),
    "runtime": Parsed("consumer", partial(_is_runtime, ("sglang", "vllm"))),
    "pass": Parsed("pass", _is_pass, completion.passes), "log": Parsed("file", _is_log),
}  # fmt: skip
# --- Options of dataclasses -----------------------------------------------------------------------


class Rare(click.Option):
    """An option that --help leaves to --help-all."""


rare = partial(click.option, cls=Rare)


def option_of(
    kind: type,
    name: str,
    *,
    given: bool = False,
    rare: bool = False,
    help: str | None = None,
    default: str | None = None,
) -> Callable[[F], F]:
    """A field of a dataclass as an option. `given`: a command must know whether it was, so that its
    default is None. `rare`, `help` and `default`, what is shown of them, may differ by command."""
    field, one = options_in(kind)[name]
    shown = one.shown if default is None else default
    text = (help or one.help) + ("" if shown is None else f" [default: {shown}]")
    more: dict[str, Any] = {"help": text, "cls": Rare if rare or one.rare else click.Option}
    if field.default is False:
        more["is_flag"] = True
    else:
        more |= {
            "type": _type_of(one),
            "metavar": one.metavar or ("N" if one.kind == "count" else None),
            "multiple": one.repeated,
        }
        if not given and field.default not in (None, ()):
            more |= {"default": field.default, "show_default": True}
    words = one.words or (f"--{name.replace('_', '-')}",)
    return click.option(*words, *(() if len(words) > 1 else (name,)), **more)


def _type_of(one: Option) -> click.ParamType[Any] | None:
    if one.choices:
        return click.Choice(one.choices)
    if one.kind == "count":
        return Count(one.least) if one.most is None else click.IntRange(one.least, one.most)
    if one.kind in _TYPES:
        return _TYPES[one.kind]
    if one.parse is None:
        return None
    return Parsed(one.kind, one.parse, completion.paths if one.kind == "data" else None)


def options_of(
    kind: type, *names: str, given: bool = False, rare: bool = False
) -> Callable[[F], F]:
    return stacked(*(option_of(kind, name, given=given, rare=rare) for name in names))


def stacked(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in the order that --help lists them."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


@contextmanager
def from_options() -> Iterator[None]:
    """Around building a pass or a calibration from options alone: an error there is a usage error,
    since no file is involved."""
    from qconvert.core.errors import DataError, PlanError, RecipeError

    try:
        yield
    except (DataError, PlanError, RecipeError) as error:
        raise click.UsageError(str(error)) from error


# --- Options of several commands: one meaning, so one text ----------------------------------------


def made_for(names: str, *only: str) -> Callable[[F], F]:
    """`--for`; `names` are those that the command has layouts for, `only` the ones that it takes."""
    kind = Parsed(
        "consumer", partial(_is_runtime, only), lambda text: completion.consumers(text, only)
    )
    return click.option(
        "--for", "consumer", type=kind, metavar="NAME[==VERSION]",
        help=f"The runtime or model class that will load the result. [{names}]",
    )  # fmt: skip


def dialect(
    note: str, *choices: str, required: bool = False, kind: type[click.Option] = click.Option
) -> Callable[[F], F]:
    """`--dialect`; `note` says how the choices differ."""
    return click.option(
        "--dialect", type=click.Choice(choices), required=required, cls=kind,
        help=f"Whose names, scales and config to write. [{note}]",
    )  # fmt: skip


NVFP4_DIALECT: Callable[..., Callable[[F], F]] = partial(
    dialect,
    "sglang and vLLM load either; beside block FP8 vLLM loads compressed-tensors' alone",
    "compressed-tensors", "modelopt",
)  # fmt: skip


def _read_as(
    ctx: click.Context, param: click.Parameter, value: str | Path | None
) -> str | Path | None:
    """Return whose layout, or which encoding, checkpoints have that this command opens, until it
    ends."""
    from qconvert.checkpoint.reading import reading_as

    if value is not None:
        ctx.with_resource(reading_as(**{str(param.name): value}))  # type: ignore[arg-type]
    return value


# How a checkpoint is opened, by every command that opens one.
OPENING: Callable[[F], F] = stacked(
    option_of(RunOptions, "follow_links"),
    rare(
        "--architecture", metavar="CLASS", expose_value=False, callback=_read_as,
        help="Read SRC as a class of transformers with the same layout, by its name or model_type, "
        "such as Qwen3MoeForCausalLM: for models whose own class is remote code.",
    ),
    rare(
        "--family", type=File(), metavar="FILE", expose_value=False, callback=_read_as,
        help="Read SRC as the family in FILE, Python as in qconvert/layouts, which is run.",
    ),
    rare(
        "--as", "scheme", metavar="SCHEME", expose_value=False, callback=_read_as,
        help="Read SRC, whose config lost its quantization block, as stored in fp8-tensor, fp8-channel, "
        "fp8-block:128x128, mxfp4, mxfp8, nvfp4, gptq:4:128, awq:4:128 (bits, and columns of a group; "
        "-1: a row), int4:128 or int8:-1 (compressed-tensors').",
    ),
)  # fmt: skip
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
DRY_RUN = click.option(
    "--dry-run", is_flag=True, help="Show what would be done, and what would be refused; write and "
    "send nothing.",
)  # fmt: skip
LEVEL = option_of(ValidateOptions, "level")


FULL_LEVEL = click.option(
    "--level", type=click.Choice(["headers", "sample", "full"]), default="full", show_default=True,
    help=SAYS_LEVEL,
)  # fmt: skip


def report(forms: str) -> Callable[[F], F]:
    return click.option(
        "--report", "files", multiple=True, type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help=f"Also write the report to FILE, in the form of its suffix. Repeatable. [{forms}]",
    )  # fmt: skip


SOURCE_GROUPS = click.option(
    "--source-groups", type=Count(), metavar="N",
    help="Groups in which the rows of the source's fused projections are ordered.",
)  # fmt: skip
# What a quantization takes: the same words and patterns for each format.
_PATTERN = Parsed("pattern", _is_pattern)


def _targets(default: str) -> Callable[[F], F]:
    """Option of the targets; `default`: those where nothing is said."""
    return click.option(
        "--targets", multiple=True, type=_PATTERN,
        metavar="NAME", shell_complete=completion.targets,
        help="What is quantized: `experts` (the routed experts), `Linear` (all linear layers that "
        "runtimes load so), a module's name, the end of a name, or re:PATTERN. Repeatable. "
        f"[default: {default}]",
    )  # fmt: skip


_IGNORE = click.option(
    "--ignore", multiple=True, type=_PATTERN, metavar="NAME",
    help="Targets to leave unquantized, named likewise. Repeatable.",
)  # fmt: skip
INPUT_SCALE = click.option(
    "--input-scale", type=Positive(), metavar="X",
    help="One constant scale for the activations of all that is quantized, by which they are divided; "
    "no data is needed.",
)  # fmt: skip
KV_SCALE = rare(
    "--kv-scale", type=PositiveOr("calibrated"), metavar="X|calibrated",
    help="Scale for the keys and values that runtimes keep in FP8, by which they are divided: one "
    "constant, or `calibrated`, a layer's largest key and value in --data / 448.",
)  # fmt: skip
STATS = click.option(
    "--stats", type=FolderPath(), metavar="DIR",
    help="Statistics in DIR, which `experts stats` or a calibration saved: input scales of activations "
    "follow from them (nvfp4), or which experts stay (prune).",
)  # fmt: skip
_SHARED_EXPERTS = rare(
    "--shared-experts", type=click.Choice(["quantize", "keep"]), default=None,
    help="Quantize shared experts as the routed ones, or keep them. [default: as --targets names them; "
    "where it names none, keep them beside calibrated experts (--gptq, NVFP4's --stats), and beside "
    "rounded ones quantize where sglang fuses both, so that it loads the result without options]",
)  # fmt: skip
TP = click.option(
    "--tp", type=Count(), metavar="N",
    help="Tensor-parallel ranks of the server. [blocks that they would cut are refused]",
)  # fmt: skip


def quantizing(default: str) -> Callable[[F], F]:
    """Options of every command that quantizes for GPUs: the fields of `passes/quantize.Quantizing`.
    `default`: its targets."""
    return stacked(_targets(default), _IGNORE, _SHARED_EXPERTS, TP)


SOURCE = click.argument("source", metavar="SRC", type=SOURCE_NAME)
OUT = click.argument("out", type=FolderPath(urls=True))
# What is found again under its name, by others or later, is a folder of this machine.
OUT_FOLDER = click.argument("out", type=FolderPath())
