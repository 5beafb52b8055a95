"""Options of a run: each is stated once, here, for the command line, the API and the run itself."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, cast

from qconvert.core.errors import PlanError, UsageError
from qconvert.core.extras import lacking, pip_line
from qconvert.core.options import explained, option, options_in
from qconvert.core.shown import parse_size

if TYPE_CHECKING:
    from qconvert.run.work.division import Shard


_UNITS = re.compile(
    r"(?:(?P<d>[0-9]{1,4})d)?(?:(?P<h>[0-9]{1,6})h)?(?:(?P<m>[0-9]{1,7})m)?(?:(?P<s>[0-9]{1,9})s)?"
)
# As Slurm writes what is left of a job: 3:50:00, 1-03:50:00.
_CLOCK = re.compile(
    r"(?:(?P<d>[0-9]{1,4})-)?(?P<h>[0-9]{1,4}):(?P<m>[0-5]?[0-9]):(?P<s>[0-5]?[0-9])"
)
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def parse_until(text: str) -> int:
    """Seconds: `3h50m`, `90m`, `3:50:00`, `1d2h`, `1-02:00:00`. Raises UsageError, also for a number
    without a unit: Slurm takes that for minutes, `timeout` for seconds."""
    found = _UNITS.fullmatch(text) or _CLOCK.fullmatch(text)
    parts = {} if found is None else found.groupdict()
    seconds = sum(int(value) * _SECONDS[unit] for unit, value in parts.items() if value)
    if seconds < 1:
        raise UsageError(f"--until {text[:40]!r}: write a time such as 90s, 50m, 3h50m or 3:50:00")
    return seconds


@dataclass(frozen=True)
class Until:
    """A run is to have ended `seconds` after `began`, by a clock that only goes forward."""

    seconds: float
    began: float
    now: Callable[[], float] = time.monotonic

    @staticmethod
    def of(given: Until | str | float | None) -> Until | None:
        """A time that begins now, unless it has begun. Raises UsageError for a text that is no time, and
        for a number of seconds that is not above 0."""
        if given is None or isinstance(given, Until):
            return given
        seconds = parse_until(given) if isinstance(given, str) else given
        if not seconds > 0:
            raise UsageError(f"until {seconds}: expected seconds above 0")
        return Until(seconds, time.monotonic())

    @property
    def left(self) -> float:
        return self.seconds - (self.now() - self.began)

    @property
    def over(self) -> bool:
        return self.left <= 0


class Pace:
    """Steps of a run that cannot be stopped within. The first one is always taken, so that whatever the
    time given, the same command comes to an end."""

    def __init__(self, until: Until | None) -> None:
        self._until = until
        self._begun = 0.0 if until is None else until.now()
        self.longest = 0.0

    def another(self) -> bool:
        """A step has been made: whether what is left holds one as long as the longest so far."""
        if self._until is None:
            return True
        now = self._until.now()
        self.longest = max(self.longest, now - self._begun)
        self._begun = now
        return self._until.left > self.longest


DEFAULT_SHARD_BYTES = 5_000_000_000  # what transformers long used; every loader copes with it
# A sync waits for the disk, so units are committed in batches: after this much output or time.
COMMIT_BYTES = 256 << 20


# Those that a user chooses from; a shard is an engine by its own option.
EngineName = Literal["local", "ray"]
ENGINES: tuple[EngineName, ...] = ("local", "ray")
# A cluster of this process's own, on this machine alone.
OWN = "local"
_ADDRESS = re.compile(r"auto|local|([A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")


def check_address(address: str) -> None:
    """Raise UsageError for an address that is none."""
    if address.startswith("ray://"):
        raise UsageError(
            f"--address {address[:60]}: a Ray client is outside of the cluster; run qconvert on one of "
            "its machines, and name the head as HOST:PORT"
        )
    if not _ADDRESS.fullmatch(address):
        raise UsageError(f"--address {address[:60]!r}: write HOST:PORT, auto or local")


def check_engine(engine: str, address: str | None, shard: object | None) -> None:
    """Raise UsageError for options that exclude one another, and words that are none."""
    if engine not in ENGINES:
        raise UsageError(f"--engine {engine[:40]!r}: write one of {', '.join(ENGINES)}")
    if engine != "ray":
        if address is not None:
            raise UsageError("--address names a Ray cluster: give --engine ray with it")
        return
    if shard is not None:
        raise UsageError(
            "--engine ray and --shard exclude one another: a shard is done by the machine that is given "
            "it; leave one of them out"
        )
    if address is not None:
        check_address(address)


def check_installed() -> None:
    """Raise PlanError where ray is not installed."""
    missing = lacking("ray")
    if missing:
        raise PlanError(f"--engine ray: {missing}, on every node")


def _shard(given: str | Shard) -> Shard:
    from qconvert.run.work.division import parse_shard

    return parse_shard(given, os.environ) if isinstance(given, str) else given


def _address(given: str) -> str:
    check_address(given)
    return given


def repo_id(given: str) -> str:
    """Read the id of a repo on the Hub. Raises ValueError."""
    from qconvert.checkpoint.hub_cache import is_id

    if not is_id(given):
        raise ValueError(f"{given!r} is not a valid repo id; write ORG/NAME")
    return given


@dataclass(frozen=True)
class RunOptions:
    """Options of a run. None lets qconvert choose; sizes are in bytes. `commit_bytes` is how much work a
    crash may lose. `link_near`, the output folder, lets source files that a plan may hold as they are
    stand in by hard link where they are on the same disk. `streamed`: files are sent elsewhere while the
    run goes on, and removed here. Raises UsageError for options that exclude one another."""

    memory: int | None = option(
        None, "Memory of all processes together, such as 512MiB.", kind="size", parse=parse_size,
        metavar="SIZE", shown="1 GiB, or what all cores need; at most half of what is free",
        planning=True,
    )  # fmt: skip
    jobs: int | None = option(
        None, "Worker processes.", kind="count", metavar="N", shown="as many cores as speed it up",
        planning=True,
    )  # fmt: skip
    max_shard_size: int | None = option(
        None, "Largest output file.", kind="size", parse=parse_size, metavar="SIZE", shown="5GB",
        rare=True, planning=True,
    )  # fmt: skip
    base_model: str | None = option(
        None, "The source's repo, for the model card.", kind="id", parse=repo_id,
        metavar="ORG/NAME", shown="what the source names", rare=True, planning=True,
    )  # fmt: skip
    follow_links: bool = option(
        False, "Follow links that lead out of the folder, which are refused otherwise.", rare=True
    )
    sha256: bool = option(False, "Also write each file's sha256 to the receipt.", rare=True)
    verify: bool = option(
        False, "Hash everything that an earlier run left in OUT before continuing it.", rare=True,
        shown="sizes, headers, small files, and what was written last",
    )  # fmt: skip
    shard: Shard | None = option(
        None, "Do part I of N, counted from 0, of what machines that share the folder do together. "
        "auto, auto/N: I as Slurm, torchrun or Kubernetes say in the environment. "
        "[afterwards: qconvert finish OUT]",
        kind="shard", parse=_shard, metavar="I/N|auto", rare=True,
    )  # fmt: skip
    until: Until | None = option(
        None, "Stop after 3h50m, 90m, 3:50:00. A calibration does at the end of a layer, where another "
        "as long as the longest so far would not fit, all else at a unit; one is always done. Exit code "
        "4: the same command goes on, to the same bytes.",
        # Looked up when it is called: a test's clock takes its place.
        kind="time", parse=lambda given: Until.of(given), metavar="TIME",
    )  # fmt: skip
    engine: EngineName = option(
        "local", "Where the work is done: by processes of this machine, or on the nodes of a Ray "
        "cluster. All must see SRC and OUT under the same paths (a shared file system); --memory is "
        f"what each machine gives, --jobs the workers of all nodes. [ray: {pip_line('ray')}]",
        choices=("local", "ray"), rare=True,
    )  # fmt: skip
    address: str | None = option(
        None, "The head of the Ray cluster; `local` starts one of this machine alone. [with --engine "
        "ray; default: RAY_ADDRESS, or the cluster that this machine belongs to]",
        kind="address", parse=_address, metavar="HOST:PORT", rare=True,
    )  # fmt: skip
    work_dir: Path | None = option(
        None, "Where an OUT in a store (s3://...) is made before it is sent, which takes disk for all "
        "of it, and shards of one on the Hub (hf://ORG/NAME) until they are.",
        kind="folder", parse=Path, metavar="DIR", shown="~/.cache/qconvert/outputs", rare=True,
    )  # fmt: skip
    disk_budget: int | None = option(
        None, "Most disk that the run may take, such as 60GiB. One that is too small is refused while "
        "planning, with the smallest that works.",
        kind="size", parse=parse_size, metavar="SIZE", rare=True,
        shown="no limit; for an OUT on the Hub, some shards", planning=True,
    )  # fmt: skip
    private: bool = option(False, "Make the repo private if it is created.", rare=True)
    loader: str | None = option(
        None, "Ask the runtime itself, by the Python of the environment that serves: it builds the "
        "model without memory and loads from headers. This runs the runtime's code.",
        kind="interpreter", parse=str, metavar="PYTHON", rare=True, planning=True,
    )  # fmt: skip
    for_run: bool = option(
        False, "Refuse an `out` inside the source, or around it, before planning; a run refuses it in "
        "any case.", command=False,
    )  # fmt: skip
    finish: bool = option(
        False, "Publish what all shards did, and refuse a folder where units miss.", command=False
    )
    command: tuple[str, ...] = option(
        (), "The command line that a shard's journal names, for `qconvert finish`.", parse=tuple,
        command=False,
    )  # fmt: skip
    commit_bytes: int = COMMIT_BYTES
    link_near: Path | None = None
    streamed: bool = False

    def __post_init__(self) -> None:
        check_engine(self.engine, self.address, self.shard)

    @property
    def shard_bytes(self) -> int:
        """Bytes of the largest output file."""
        return self.max_shard_size or DEFAULT_SHARD_BYTES

    def keywords(self) -> PlanOptions:
        """The options as the API's functions take them."""
        return cast(PlanOptions, {name: getattr(self, name) for name in options_in(RunOptions)})


class PlanOptions(TypedDict, total=False):
    memory: int | str | None
    jobs: int | None
    max_shard_size: int | str | None
    base_model: str | None
    follow_links: bool
    sha256: bool
    verify: bool
    shard: str | Shard | None
    until: Until | str | float | None
    engine: EngineName
    address: str | None
    work_dir: str | Path | None
    disk_budget: int | str | None
    private: bool
    loader: str | Path | None
    for_run: bool
    finish: bool
    command: tuple[str, ...]


PlanOptions.__doc__ = f"""Keywords of `plan`, `plan_pair`, `plan_graft`, `plan_stages` and `run`.

Sizes are bytes, or texts as a command takes them.

{explained(RunOptions)}"""
