"""Options of a validation: each is stated once, here, for the command line and the API."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, cast

from qconvert.core.errors import UsageError
from qconvert.core.options import explained, option, options_in
from qconvert.core.shown import parse_size, shortened

if TYPE_CHECKING:
    from qconvert.validation.runner import Level, Request

_MOST_LAYERS = 65_536
_NUMBER = re.compile(r"[0-9]{1,6}")
LEVELS = ("headers", "sample", "full")
SAYS_LEVEL = (
    "What is validated: `headers` reads no weights, `sample` some of each kind, `full` every byte."
)


def _layers(given: str | tuple[int, ...]) -> tuple[int, ...]:
    """Layer numbers: 0,3,58-60. Raises ValueError."""
    if not isinstance(given, str):
        return given
    numbers: set[int] = set()
    for part in given.split(","):
        first, dash, last = part.strip().partition("-")
        if not _NUMBER.fullmatch(first) or (dash and not _NUMBER.fullmatch(last)):
            text = shortened(part, 80)
            raise ValueError(f"{text!r} is not a layer number or range; write 0,3,58-60")
        begin, end = int(first), int(last or first)
        if end < begin or end > _MOST_LAYERS:
            raise ValueError(f"{part!r} is not a range of layers from first to last")
        numbers.update(range(begin, end + 1))
    return tuple(sorted(numbers))


def partition(given: str | int) -> str:
    """Layers of each stage, or a number of stages, as text. Raises UsageError."""
    from qconvert.runtimes.pipeline import parse_partition

    parse_partition(str(given))
    return str(given)


def _names(given: Sequence[str | Path] | str | Path) -> tuple[str, ...]:
    """Names of folders, or of one."""
    return (str(given),) if isinstance(given, str | Path) else tuple(map(str, given))


@dataclass(frozen=True)
class ValidateOptions:
    """Options of a validation. Raises UsageError for options that exclude one another."""

    against: str | None = option(
        None, "The source that the folder was made from, to compare it with.", kind="source", parse=str,
        metavar="SRC",
    )  # fmt: skip
    draft: str | None = option(
        None, "The folder of the draft that was grafted to SRC. [with --against]", kind="source",
        parse=str, metavar="DRAFT",
    )  # fmt: skip
    adapter: tuple[str, ...] = option(
        (), "An adapter that was merged into SRC, in the order of the merge. Repeatable. "
        "[with --against]", kind="source", parse=_names, metavar="ADAPTER", repeated=True,
    )  # fmt: skip
    beside: str | None = option(
        None, "Another folder made from SRC: it is checked too, and shown side by side with OUT in the "
        "text, JSON and HTML reports. [with --against]", kind="source", parse=str, metavar="OTHER",
        rare=True,
    )  # fmt: skip
    level: Level = option("headers", SAYS_LEVEL, choices=LEVELS)
    pair: str | None = option(
        None, "The GPU side that a folder of CPU experts is served with.", kind="source", parse=str,
        metavar="GPU",
    )  # fmt: skip
    kernels: bool = option(
        False, "Compare qconvert's Triton kernels with torch, on random weights and on those of OUT. "
        "Without a GPU they run in Triton's interpreter, on small shapes.", rare=True,
    )  # fmt: skip
    layers: tuple[int, ...] | None = option(
        None, "Layers for --kernels.", kind="layers", parse=_layers, metavar="0,3,58-60",
        shown="a few", rare=True,
    )  # fmt: skip
    runtime: str | None = option(
        None, "The runtime or model class that will load the result. [sglang, whose loader is "
        "simulated: an H200 without other options]",
        kind="runtime", metavar="NAME[==VERSION]", words=("--for",),
    )  # fmt: skip
    tp: int | None = option(
        None, "Tensor-parallel ranks of the server. [with --for; default: 1]",
        kind="count", metavar="N",
    )  # fmt: skip
    pp: str | None = option(
        None, "Layers of each stage, or a number of stages to split as the runtime would. [with --for]",
        kind="partition", parse=partition, metavar="15,15,15,16|N", rare=True,
    )  # fmt: skip
    ep: int | None = option(
        None, "Groups of experts among the tensor-parallel ranks. [with --for; default: 1]",
        kind="count", metavar="N", rare=True,
    )  # fmt: skip
    loader: str | None = option(
        None, "Ask the runtime itself, by the Python of the environment that serves: it builds the "
        "model without memory and loads from headers. This runs the runtime's code. [with --for]",
        kind="interpreter", parse=str, metavar="PYTHON",
    )  # fmt: skip
    jobs: int | None = option(
        None, "Worker processes.", kind="count", metavar="N",
        shown="the cores, as far as the work needs them",
    )  # fmt: skip
    memory: int | None = option(
        None, "Memory of all processes together, such as 512MiB.", kind="size", parse=parse_size,
        metavar="SIZE", shown="not limited",
    )  # fmt: skip
    follow_links: bool = option(
        False, "Follow links that lead out of the folder, which are refused otherwise.", rare=True
    )

    def __post_init__(self) -> None:
        if self.against is None and self.draft is not None:
            raise UsageError("--draft was grafted to a source: give --against SRC")
        if self.against is None and self.adapter:
            raise UsageError("--adapter was merged into a source: give --against SRC")
        if self.against is None and self.beside is not None:
            raise UsageError("--beside compares two folders of one source: give --against SRC")
        if self.runtime is None and (self.tp or self.pp or self.ep):
            raise UsageError("--tp, --pp and --ep are sizes of a runtime: give --for NAME")
        if self.runtime is None and self.loader:
            raise UsageError("--loader asks a runtime: give --for NAME")

    def keywords(self) -> ValidateKeywords:
        """The options as the API's function takes them, but the source."""
        names = [name for name in options_in(ValidateOptions) if name != "against"]
        return cast(ValidateKeywords, {name: getattr(self, name) for name in names})

    @property
    def request(self) -> Request:
        """Return what the validators are asked for. Raises UsageError for a runtime without simulator,
        LoaderError for an interpreter without the runtime."""
        from qconvert.runtimes.consumers import parse_consumer
        from qconvert.runtimes.loader.ask import loader_of
        from qconvert.runtimes.pipeline import parse_partition
        from qconvert.runtimes.serving import ServingSetup
        from qconvert.validation.runner import Request

        serving = None
        if self.runtime is not None:
            stages = (1,) if self.pp is None else parse_partition(self.pp)
            consumer = parse_consumer(self.runtime)
            own = None if self.loader is None else loader_of(self.loader, consumer)
            serving = ServingSetup(consumer, self.tp or 1, stages, self.ep or 1, own)
        return Request(self.level, self.layers, self.kernels, self.jobs, self.memory, serving)


class ValidateKeywords(TypedDict, total=False):
    draft: str | Path | None
    adapter: Sequence[str | Path]
    beside: str | Path | None
    level: Literal["headers", "sample", "full"]
    pair: str | Path | None
    kernels: bool
    layers: str | tuple[int, ...] | None
    runtime: str | None
    tp: int | None
    pp: int | str | None
    ep: int | None
    loader: str | Path | None
    jobs: int | None
    memory: int | str | None
    follow_links: bool


ValidateKeywords.__doc__ = f"""Keywords of `validate`, as its command has them.

{explained(ValidateOptions)}"""
