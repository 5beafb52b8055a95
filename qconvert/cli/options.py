"""Arguments and option types that several commands share.

A value that is invalid whatever the files hold ends a command with exit code 2, before one is opened.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from qconvert.cli import completion

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


# --- `--for NAME[==VERSION]` ----------------------------------------------------------------------


class ConsumerName(click.ParamType[str]):
    """A consumer with known layouts, with or without its version. `only` are the names that a command
    takes."""

    name = "consumer"

    def __init__(self, *only: str) -> None:
        self._only = only

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from qconvert.core.errors import PlanError
        from qconvert.runtimes.consumers import parse_consumer

        if str(value) in self._only:  # a runtime may be no consumer of layouts: ktransformers
            return str(value)
        try:
            consumer = parse_consumer(str(value))
        except PlanError as error:
            self.fail(str(error), param, ctx)
        if self._only and consumer.name not in self._only:
            self.fail(f"{consumer.name!r} is not one of {', '.join(self._only)}", param, ctx)
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return completion.consumers(incomplete, self._only)


def made_for(names: str, *only: str) -> Callable[[F], F]:
    """`--for`; `names` are those that the command has layouts for, `only` the ones that it takes."""
    return click.option(
        "--for", "consumer", type=ConsumerName(*only), metavar="NAME[==VERSION]",
        help=f"The runtime or model class that will load the result. [{names}]",
    )  # fmt: skip


FINDINGS = 3  # exit code of a command that checked and found an error
NOT_KNOWN = 5  # exit code where nobody knows whether a runtime loads it: another class or version
MORE = 4  # exit code of a conversion that --until ended: the same command goes on

F = TypeVar("F", bound=Callable[..., Any])

_EMPTY = "the name is empty; name a folder (`.` is the current one)"
_NULL = "a path cannot hold a null character"
_DATASET = re.compile(r"hf-dataset(:[^:]+){1,3}")
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,4})?")
_BRANCH = re.compile(r"[^\s~^:?*\[\\\x00-\x1f\x7f]+")


class _Text(click.ParamType[str]):
    """A text, refused by `check` with ValueError or QConvertError if it is invalid."""

    @abstractmethod
    def check(self, text: str) -> None:
        """Raise ValueError or QConvertError, saying what is wrong with the text."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from qconvert.core.errors import QConvertError

        try:
            self.check(str(value))
        except (QConvertError, ValueError) as error:
            self.fail(str(error), param, ctx)
        return str(value)


class Size(click.ParamType[int]):
    """A size in bytes: 512MiB, 5GB, 4096."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from qconvert.core.errors import UsageError
        from qconvert.core.shown import parse_size

        try:
            return parse_size(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class ModelId(_Text):
    """The id of a repo on the Hub, ORG/NAME."""

    name = "id"

    def check(self, text: str) -> None:
        from qconvert.hub.card.front import is_id

        if not is_id(text):
            raise ValueError(f"{text!r} is not a valid repo id; write ORG/NAME")


class SourceName(_Text):
    """A folder, here or in an object store, a file, or a repo on the Hub. An empty name (an unset shell
    variable) is refused."""

    name = "source"

    def check(self, text: str) -> None:
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

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return completion.paths(incomplete)


class Partition(_Text):
    """Layers of each pipeline stage, or a number of stages."""

    name = "partition"

    def check(self, text: str) -> None:
        from qconvert.runtimes.pipeline import parse_partition

        parse_partition(text)


class PassName(_Text):
    """A pass, `source` or `end`. Whether the recipe has that pass is checked later."""

    name = "pass"

    def check(self, text: str) -> None:
        from qconvert.passes import passes

        known = ["source", *passes(), "end"]
        if text not in known:
            raise ValueError(f"unknown pass {text!r}; passes are {', '.join(known)}")

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return completion.passes(incomplete)


class Pattern(_Text):
    """Modules by name, by the end of a name, or by `re:` and a regular expression."""

    name = "pattern"

    def check(self, text: str) -> None:
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


class DataName(_Text):
    """Calibration data: a file of a known kind, or hf-dataset:NAME[:SPLIT]."""

    name = "data"

    def check(self, text: str) -> None:
        from qconvert.samples.data import DataSpec

        if DataSpec(data=text).kind == "dataset" and not _DATASET.fullmatch(text):
            raise ValueError(f"{text!r}: write hf-dataset:NAME, NAME:SPLIT or NAME:CONFIG:SPLIT")

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return completion.paths(incomplete)


class Device(_Text):
    """A device that a calibration runs on, by torch's name."""

    name = "device"

    def check(self, text: str) -> None:
        if not _DEVICE.fullmatch(text):
            raise ValueError(f"{text!r} is not a device; write cpu, cuda or cuda:N")


class Branch(_Text):
    """A branch of a repo, or refs/pr/N."""

    name = "branch"

    def check(self, text: str) -> None:
        bad = ".." in text or text.startswith(("/", "-")) or text.endswith(("/", ".", ".lock"))
        if bad or not _BRANCH.fullmatch(text):
            raise ValueError(f"{text!r} is not a valid branch name")


class ShardName(_Text):
    """A part of a run, I/N, or `auto`: found in the environment."""

    name = "shard"

    def check(self, text: str) -> None:
        import os

        from qconvert.run.division import parse_shard

        parse_shard(text, os.environ)


class Time(_Text):
    """Time that a command may take."""

    name = "time"

    def check(self, text: str) -> None:
        from qconvert.run.until import parse_until

        parse_until(text)


class LogFile(_Text):
    """A file that lines are added to, or `-` for stderr."""

    name = "file"

    def check(self, text: str) -> None:
        if not text:
            raise ValueError("the name is empty; name a file, or - for stderr")
        if "\0" in text:
            raise ValueError(_NULL)


class Address(_Text):
    """The head of a Ray cluster."""

    name = "address"

    def check(self, text: str) -> None:
        from qconvert.run.cluster import check_address

        check_address(text)


class Folder(click.Path):
    """A folder's path. An empty one (an unset shell variable) would mean the current folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return completion.paths(incomplete, "dir")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value:
            self.fail(_EMPTY, param, ctx)
        if "\0" in str(value):
            self.fail(_NULL, param, ctx)
        from qconvert.checkpoint.store import is_url

        if is_url(value) or str(value).startswith("hf://"):
            self.fail(f"{value} is a URL; name a folder of this machine", param, ctx)
        return super().convert(value, param, ctx)


class OutName(Folder):
    """A folder's path, the URL of one in a store, or a repo on the Hub."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from qconvert.checkpoint.store import is_url, store_of
        from qconvert.core.errors import UsageError
        from qconvert.hub.destination import hub_destination, is_hub

        try:
            if is_hub(value):
                return f"hf://{hub_destination(value)}"
            if not is_url(value):
                return super().convert(value, param, ctx)
            return store_of(value).url
        except UsageError as error:
            self.fail(str(error), param, ctx)


class FolderOrRepo(Folder):
    """A folder's path, or a repo on the Hub."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from qconvert.checkpoint.store import is_url

        if is_url(value):
            self.fail(
                f"{value} is a URL; name a folder of this machine, or hf://ORG/NAME", param, ctx
            )
        return OutName().convert(value, param, ctx)


class File(Folder):
    """The path of a file that exists."""

    def __init__(self) -> None:
        click.Path.__init__(self, exists=True, dir_okay=False, path_type=Path)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return completion.paths(incomplete)


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


@contextmanager
def from_options() -> Iterator[None]:
    """Around building a pass or a calibration from options alone: an error there is a usage error,
    since no file is involved."""
    from qconvert.core.errors import DataError, PlanError, RecipeError

    try:
        yield
    except (DataError, PlanError, RecipeError) as error:
        raise click.UsageError(str(error)) from error


def stacked(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in the order that --help lists them."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


MOST = (
    2**31 - 1
)  # the largest count that an option takes; the product of two is still a sensible number


class Count(click.IntRange):
    """A whole number up to MOST, which help does not show."""

    def __init__(self, least: int = 1, most: int = MOST) -> None:
        super().__init__(least, most)

    def _describe_range(self) -> str:
        return f"x>={self.min}" if self.min != 1 else ""


# Options of several commands: one meaning, so one text. What differs is their default.
FOLLOW_LINKS = click.option(
    "--follow-links", is_flag=True, help="Follow links that lead out of the folder, which are refused "
    "otherwise.",
)  # fmt: skip


def _read_as(
    ctx: click.Context, param: click.Parameter, value: str | Path | None
) -> str | Path | None:
    """Return whose layout checkpoints have that this command opens, until it ends."""
    from qconvert.checkpoint.reading import reading_as

    if value is not None:
        ctx.with_resource(reading_as(**{str(param.name): value}))  # type: ignore[arg-type]
    return value


# How a checkpoint is opened, by every command that opens one.
OPENING: Callable[[F], F] = stacked(
    FOLLOW_LINKS,
    click.option(
        "--architecture", metavar="CLASS", expose_value=False, callback=_read_as,
        help="Read SRC as a class of transformers with the same layout, by its name or model_type, "
        "such as Qwen3MoeForCausalLM: for models whose own class is remote code.",
    ),
    click.option(
        "--family", type=File(), metavar="FILE", expose_value=False, callback=_read_as,
        help="Read SRC as the family in FILE, Python as in qconvert/layouts, which is run.",
    ),
)  # fmt: skip
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
DRY_RUN = click.option(
    "--dry-run", is_flag=True, help="Show what would be done, and what would be refused; write and "
    "send nothing.",
)  # fmt: skip


def memory(default: str) -> Callable[[F], F]:
    return click.option(
        "--memory", type=Size(), metavar="SIZE",
        help=f"Memory of all processes together, such as 512MiB. [default: {default}]",
    )  # fmt: skip


def jobs(default: str) -> Callable[[F], F]:
    return click.option(
        "--jobs", type=Count(), metavar="N",
        help=f"Worker processes. [default: {default}]",
    )  # fmt: skip


SHARD = click.option(
    "--shard", type=ShardName(), metavar="I/N|auto",
    help="Do part I of N, counted from 0, of what machines that share the folder do together. auto, "
    "auto/N: I as Slurm, torchrun or Kubernetes say in the environment. "
    "[afterwards: qconvert finish OUT]",
)  # fmt: skip
UNTIL = click.option(
    "--until", type=Time(), metavar="TIME",
    help="Stop after 3h50m, 90m, 3:50:00. A calibration does at the end of a layer, where another as "
    "long as the longest so far would not fit, all else at a unit; one is always done. Exit code 4: the "
    "same command goes on, to the same bytes.",
)  # fmt: skip


LOG_JSON = click.option(
    "--log-json", type=LogFile(), metavar="FILE",
    help="Also add the progress to FILE (- for stderr), a JSON object a line: seconds, phase, bytes, "
    "the part that is done, seconds left, work by kind.",
)  # fmt: skip


DISK_BUDGET = click.option(
    "--disk-budget", type=Size(), metavar="SIZE",
    help="Most disk that the run may take, such as 60GiB. One that is too small is refused while "
    "planning, with the smallest that works. [default: no limit; for an OUT on the Hub, some shards]",
)  # fmt: skip


WORK_FOLDER = click.option(
    "--work-dir", type=Folder(), metavar="DIR",
    help="Where an OUT in a store (s3://...) is made before it is sent, which takes disk for all of it, "
    "and shards of one on the Hub (hf://ORG/NAME) until they are. "
    "[default: ~/.cache/qconvert/outputs]",
)  # fmt: skip
PRIVATE = click.option("--private", is_flag=True, help="Make the repo private if it is created.")


def base_model(default: str) -> Callable[[F], F]:
    return click.option(
        "--base-model", metavar="ORG/NAME", type=ModelId(),
        help=f"The source's repo, for the model card. [default: {default}]",
    )  # fmt: skip


def level(default: str) -> Callable[[F], F]:
    return click.option(
        "--level", type=click.Choice(["headers", "sample", "full"]), default=default,
        show_default=True,
        help="What is validated: `headers` reads no weights, `sample` some of each kind, `full` every "
        "byte.",
    )  # fmt: skip


AGAINST = click.option(
    "--against", type=SourceName(), metavar="SRC",
    help="The source that the folder was made from, to compare it with.",
)  # fmt: skip


def pair(default: str | None = None) -> Callable[[F], F]:
    shown = "" if default is None else f" [default: {default}]"
    return click.option(
        "--pair", type=SourceName(), metavar="GPU",
        help=f"The GPU side that a folder of CPU experts is served with.{shown}",
    )  # fmt: skip


DATA_HELP = (
    "Samples: text, JSONL (`text`, or `messages` under the model's chat template), tokenized "
    "safetensors (`input_ids`), or hf-dataset:NAME[:SPLIT]."
)
DEVICE = click.option(
    "--device", "devices", multiple=True, metavar="NAME", type=Device(),
    help="Device to compute on, cpu or cuda:N. Repeatable. [default: all GPUs, else the CPU]",
)  # fmt: skip


def report(forms: str) -> Callable[[F], F]:
    return click.option(
        "--report", "files", multiple=True, type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help=f"Also write the report to FILE, in the form of its suffix. Repeatable. [{forms}]",
    )  # fmt: skip


DRAFT = click.option(
    "--draft", type=SourceName(), metavar="DRAFT",
    help="The folder of the draft that was grafted to SRC. [with --against]",
)  # fmt: skip
SOURCE_GROUPS = click.option(
    "--source-groups", type=Count(), metavar="N",
    help="Groups in which the rows of the source's fused projections are ordered.",
)  # fmt: skip
# What a quantization takes: the same words and patterns for each format.


def targets(default: str) -> Callable[[F], F]:
    """Return what a conversion quantizes, and what it does where nothing is said."""
    return click.option(
        "--targets", multiple=True, type=Pattern(),
        metavar="NAME", shell_complete=completion.targets,
        help="What is quantized: `experts` (the routed experts), `Linear` (all linear layers that "
        "runtimes load so), a module's name, the end of a name, or re:PATTERN. Repeatable. "
        f"[default: {default}]",
    )  # fmt: skip


TARGETS, LINEAR_TARGETS = targets("experts"), targets("Linear")
IGNORE = click.option(
    "--ignore", multiple=True, type=Pattern(), metavar="NAME",
    help="Targets to leave unquantized: a module's name, the end of a name, or re:PATTERN. "
    "Repeatable.",
)  # fmt: skip
DIALECT_HELP = (
    "Whose names, scales and config to write NVFP4 in. The bytes differ too: one divides by the global "
    "scale, the other multiplies by it."
)
INPUT_SCALE = click.option(
    "--input-scale", type=Positive(), metavar="X",
    help="One constant scale for the activations of all that is quantized, by which they are divided; "
    "no data is needed.",
)  # fmt: skip
KV_SCALE = click.option(
    "--kv-scale", type=Positive(), metavar="X",
    help="One constant scale for the keys and values that runtimes keep in FP8, by which they are "
    "divided; no data is needed.",
)  # fmt: skip
STATS = click.option(
    "--stats", type=Folder(), metavar="DIR",
    help="Statistics of a calibration (DIR of `w4a16 --gptq --save-stats DIR`), to take the input "
    "scales of activations from.",
)  # fmt: skip
SHARED_EXPERTS = click.option(
    "--shared-experts", type=click.Choice(["quantize", "keep"]), default=None,
    help="Quantize shared experts as the routed ones, or keep them. [default: as --targets names them; "
    "where it names none, keep them beside calibrated experts (--gptq, NVFP4's --stats), and beside "
    "rounded ones quantize where sglang fuses both, so that it loads the result without options]",
)  # fmt: skip
TP = click.option(
    "--tp", type=Count(), metavar="N",
    help="Refuse a result that would not load on N tensor-parallel ranks.",
)  # fmt: skip
SOURCE = click.argument("source", metavar="SRC", type=SourceName())
OUT = click.argument("out", type=OutName())
# What is found again under its name, by others or later, is a folder of this machine.
OUT_FOLDER = click.argument("out", type=Folder())
