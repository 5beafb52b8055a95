"""--profile: where a command's time went, as a table after it and as JSON in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from qconvert.cli.options import rare
from qconvert.core.links import writing
from qconvert.core.profiling import phase
from qconvert.core.say import say

if TYPE_CHECKING:
    from qconvert.run.profile import Profile, ProfileRow, Profiling

F = TypeVar("F", bound=Callable[..., Any])

_TABLE = "-"  # the option without a file
_SUFFIX = ".json"
_OPTION = "--profile"


class ProfileFile(click.ParamType[str]):
    """A file for the profile, or none. Its suffix tells it from a folder that follows the option."""

    name = "profile"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if text != _TABLE and (not text.endswith(_SUFFIX) or "\0" in text):
            self.fail(
                f"{text!r} is not a file for the profile; write --profile=FILE{_SUFFIX}, or "
                "--profile alone after the other arguments",
                param,
                ctx,
            )
        return text


class _Asked:
    """A profile that was asked for, and whether the command's JSON has it."""

    def __init__(self, profiling: Profiling) -> None:
        self.profiling = profiling
        self.as_json = False


_asked: ContextVar[_Asked | None] = ContextVar("asked", default=None)


def profile_json() -> dict[str, Any]:
    """Return what the command adds to the object that it prints with --json; nothing without
    --profile."""
    asked = _asked.get()
    if asked is None:
        return {}
    asked.as_json = True
    return {"profile": asked.profiling.profile().as_json()}


def without_profile(words: Sequence[str]) -> tuple[str, ...]:
    """A command line without its option --profile: it is no part of what is converted."""
    kept: list[str] = []
    after = False
    for word in words:
        value = after and not (word.startswith("-") and len(word) > 1)
        after = word == _OPTION
        if not (value or after or word.startswith(f"{_OPTION}=")):
            kept.append(word)
    return tuple(kept)


@contextmanager
def _profiled(file: str) -> Iterator[None]:
    from qconvert.core.errors import OutputError
    from qconvert.run.profile import profiled

    path = None if file == _TABLE else Path(file)
    if path is not None and not path.absolute().parent.is_dir():
        raise OutputError(f"{path}: folder {path.parent} does not exist")
    with profiled(whole_process=True) as profiling:
        asked = _Asked(profiling)
        token = _asked.set(asked)
        try:
            with phase("import"):
                from qconvert.service import checking, converting  # noqa: F401 - what the command imports
            yield
        finally:
            _asked.reset(token)
            if profiling.has_run:
                _report(profiling.profile(), path, table=not asked.as_json)


def _report(profile: Profile, path: Path | None, *, table: bool) -> None:
    import json

    if path is not None:
        text = json.dumps(profile.as_json(), indent=2) + "\n"
        with writing(path):
            path.write_text(text, encoding="utf-8")
    if table:
        say("", *profile_lines(profile), err=True)


def PROFILE(command: F) -> F:
    """The option --profile, around a command."""

    @wraps(command)
    def measured(*args: Any, profile: str | None, **given: Any) -> Any:
        with nullcontext() if profile is None else _profiled(profile):
            return command(*args, **given)

    option = rare(
        _OPTION, type=ProfileFile(), metavar="[FILE.json]", is_flag=False, flag_value=_TABLE,
        help="Show at the end where the time went, by phase, op, reading, writing and waiting; "
        "FILE.json gets the same for programs.",
    )  # fmt: skip
    return cast(F, option(measured))


def profile_lines(profile: Profile) -> list[str]:
    """The profile as a table."""
    from qconvert.core.shown import count, format_size

    machine = profile.machine
    packages = "".join(f", {n} {machine[n]}" for n in ("numpy", "numba") if machine[n])
    memory = format_size(machine["memory"])
    lines = [
        f"profile  {profile.seconds:.2f} s, {profile.cpu_seconds:.2f} s of CPU",
        f"machine  {machine['cpu']}, {count(machine['cores'], 'core')}, {memory} memory",
        f"system   {machine['system']}, Python {machine['python']}{packages}",
    ]
    for run in profile.runs:
        if run["kind"] == "validation":
            lines.append(
                f"checked  {count(run['tasks'], 'task')}, {format_size(run['bytes_to_read'])} to read; "
                f"{count(run['jobs'], 'job')}"
            )
            continue
        shard = f" of shard {run['shard']}" if run["shard"] else ""
        read, write = format_size(run["bytes_to_read"]), format_size(run["bytes_to_write"])
        # On a cluster as many as it has room for.
        jobs = count(run["jobs"], "job") if run["jobs"] else count(profile.processes, "worker")
        where = "" if run["engine"] == "local" else f" on {run['engine'].capitalize()}"
        lines.append(
            f"run      {run['units_run']} of {count(run['units'], 'unit')}{shard}, "
            f"{read} to read, {write} to write; "
            f"{jobs}{where}, {format_size(run['memory'])} memory; ops in "
            f"{' and '.join(profile.kernels) or run['kernels']}"
        )
    width = max((len(row.step) for row in (*profile.main, *profile.workers)), default=0)
    lines += ["", *_table("main process", profile.main, width)]
    if profile.processes:
        title = f"{count(profile.processes, 'worker')}, together"
        lines += ["", *_table(title, profile.workers, width)]
    if profile.worker_seconds:
        lines.append(
            f"workers waited {100 * profile.waited_for_work:.0f} % of their time for work, "
            f"{100 * profile.waited_for_disk:.0f} % for the disk"
        )
    return lines


def _table(title: str, rows: Sequence[ProfileRow], width: int) -> list[str]:
    from qconvert.core.shown import format_size

    width = max(width, len(title))
    lines = [f"{title:<{width}}   seconds     CPU s      times       bytes     GB/s"]
    for row in rows:
        if not (row.times or row.seconds >= 0.0005):
            if row.step[0].isupper():  # an op: a resumed run had none of it left
                lines.append(f"{row.step:<{width}}         -")
            continue
        size = format_size(row.bytes) if row.bytes else ""
        rate = f"{row.bytes / row.seconds / 1e9:.2f}" if row.bytes and row.seconds else ""
        times = f"{row.times}" if row.times else ""
        beside = "  beside the others" if row.beside else ""
        lines.append(
            f"{row.step:<{width}}  {row.seconds:>8.3f}  {row.cpu_seconds:>8.3f}  {times:>9}  {size:>10}"
            f"  {rate:>7}{beside}".rstrip()
        )
    return lines
