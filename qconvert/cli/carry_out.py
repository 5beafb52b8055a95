"""A planned conversion carried out: what it left is printed and, with --validate, checked."""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert.checkpoint.delta import Patched
from qconvert.cli.command import is_quiet
from qconvert.cli.options import FINDINGS, MORE
from qconvert.cli.profile import profile_json
from qconvert.core.say import say, say_json, say_report

if TYPE_CHECKING:
    from qconvert.api import Planned, Result
    from qconvert.checkpoint.checkpoint import Checkpoint
    from qconvert.cli.convert import CommandOptions
    from qconvert.run.folder.prepare import Prepared
    from qconvert.validation.runner import Report


# --- Advice on a result ---------------------------------------------------------------------------


def tell_next(
    folders: Sequence[str],
    source: str,
    draft: str | None,
    adapters: Sequence[str] = (),
    *,
    validated: bool,
    lossy: bool = False,
    patched: bool = False,
) -> None:
    """Name, on stderr, the command that compares the first folder with its source, or, where that has
    been done, the place of the line that serves it; of what lost something, the one that measures how
    much. Of two folders the second is the GPU side."""
    if is_quiet():
        return
    first, *others = folders
    pair = ["--pair", others[0]] if others else []
    if lossy:
        measure = ["qconvert", "eval", first, "--against", source, *pair, "--data", "TEXT"]
        say(f"cost    {shlex.join(measure)}", err=True)
    if patched:
        say(f"next    qconvert diff NEW {first}    (NEW: what the delta was made of)", err=True)
        return
    if validated:
        say(
            f"next    {first}/README.md says which runtimes load it, at which sizes, and how",
            err=True,
        )
        return
    words = ["qconvert", "validate", first, "--against", source, *pair]
    if draft is not None:
        words += ["--draft", draft]
    words += [word for adapter in adapters for word in ("--adapter", adapter)]
    say(f"next    {shlex.join([*words, '--level', 'full'])}", err=True)


@dataclass(frozen=True)
class Started:
    """The command line, as the root context's object. `finishing`: it was taken from a shard's journal,
    to publish that folder."""

    words: tuple[str, ...]
    finishing: Path | None = None

    @staticmethod
    def now() -> Started:
        context = click.get_current_context(silent=True)
        found = None if context is None else context.find_root().obj
        return found if isinstance(found, Started) else Started(())


def carry_out(
    planned: Planned,
    options: CommandOptions,
    source: str | Checkpoint,
    draft: str | None = None,
    *,
    part: bool = False,
) -> None:
    """Run the plan, print the result and, with --validate, check it against `source`, from which it was
    made, and against `draft`, which was grafted to that. Ends the command with exit code 3 where the
    check finds an error, with 4 where --until ended the run. `part`: it is one of several, which are
    shown and checked together."""
    import time

    from qconvert import api
    from qconvert.checkpoint.adapter import names_of_adapters
    from qconvert.cli.progress import Bar

    whole = Started.now().finishing
    if whole is not None:
        _check_finishing(planned, whole)
    begin = time.monotonic()
    with Bar(log=options.log_json) as bar:
        results = api.carry_out(planned, events=bar)
    seconds = time.monotonic() - begin
    for remark in results[0].remarks:
        say(f"remark  {remark}", err=True)
    as_json = options.as_json
    adapters = names_of_adapters(planned.source)
    more = results[0].left_units > 0
    if not as_json:
        for result in results[:1] if more else results:
            say(_ending(result, seconds, planned.folders[0].ready))
    if more:
        if as_json:
            found = [_summary(result, seconds) for result in results]
            found[0].update(profile_json())
            say_json(found if len(found) > 1 else found[0])
        click.get_current_context().exit(MORE)
    if part:
        return
    reports = []
    if options.validate is not None and results[0].published:
        # A folder of experts for CPUs is read together with that of its GPU side.
        pairs = (results[1].folder,) if len(results) > 1 else ()
        for result, pair in itertools.zip_longest(results, pairs):
            where = result.url or result.folder
            found_there = checked(where, source, options, pair=pair, draft=draft, adapters=adapters)
            reports.append(found_there)
    if as_json:
        from qconvert.validation.reports import as_object

        found = [
            {**_summary(result, seconds), **({"validation": as_object(report)} if report else {})}
            for result, report in itertools.zip_longest(results, reports)
        ]
        found[0].update(profile_json())
        say_json(found if len(found) > 1 else found[0])
    end_with(reports)
    if results[0].published and not as_json:
        name = source if isinstance(source, str) else source.name
        names = [result.name for result in results]
        # What a delta makes has been compared with its hashes, and differs from its source.
        patched = isinstance(planned.source, Patched)
        known = bool(reports) or patched
        plan = planned.folders[0].ready.plan
        # What dequantizing loses is below what BF16 itself does.
        lossy = bool(plan.losses()) and any(entry.name != "dequant" for entry in plan.log)
        tell_next(names, name, draft, adapters, validated=known, lossy=lossy, patched=patched)


def checked(
    folder: Path | str,
    source: str | Checkpoint,
    options: CommandOptions,
    *,
    pair: Path | None = None,
    draft: str | None = None,
    adapters: Sequence[str] = (),
) -> Report:
    """Return what --validate finds in a folder that was made from `source`; printed, unless as JSON."""
    from qconvert import api
    from qconvert.cli.progress import Bar
    from qconvert.validation.reports import render

    assert options.validate is not None
    against = source if isinstance(source, str) else source.name
    with Bar() as bar:
        report = api.validate(
            folder, against, level=options.validate, pair=pair, draft=draft, adapter=adapters,
            jobs=options.jobs if options.engine == "local" else None, memory=options.memory,
            follow_links=options.follow_links, events=bar,
        )  # fmt: skip
    if not options.as_json:
        styled = sys.stdout.isatty()
        say_report(render(report, "text", terminal=styled), "text", styled=styled)
    return report


def _check_finishing(planned: Planned, whole: Path) -> None:
    """Raise OutputError where a command that a journal holds would write elsewhere."""
    from qconvert.checkpoint.checkpoint import MANIFEST, WORK_DIR
    from qconvert.core.errors import OutputError

    root = whole.resolve()
    outs = [folder.out.resolve() for folder in planned.folders if folder.out is not None]
    # A stage of a split lies in the folder; the GPU side of a pair elsewhere, where shards began it.
    within = [root in (out, out.parent) for out in outs]
    begun = [any((out / name).exists() for name in (WORK_DIR, MANIFEST)) for out in outs]
    if not any(within) or not all(map(or_, within, begun)):
        raise OutputError(
            f"{whole}: its journal holds a command for {', '.join(map(str, outs))}; if the folder was "
            "moved, run the command of the shards with its new name and without --shard"
        )


def end_with(reports: Sequence[Report]) -> None:
    """End the command with exit code 3 if a report has an error."""
    if any(report.errors for report in reports):
        click.get_current_context().exit(FINDINGS)


def _summary(result: Result, seconds: float) -> dict[str, Any]:
    return {
        "out": result.name, "fingerprint": result.fingerprint,
        "files": list(result.files), "bytes": result.nbytes, "seconds": seconds,
        "remarks": list(result.remarks), "already_done": result.already_done,
        "resumed_units": result.resumed_units, "repaired": dict(result.repaired),
        "published": result.published, "left_units": result.left_units,
        "left_bytes": result.left_bytes,
    }  # fmt: skip


def _ending(result: Result, seconds: float, ready: Prepared) -> str:
    from qconvert.cli.plan_report import held
    from qconvert.core.shown import count, format_size, message

    shard = ready.options.shard
    if result.left_units:
        left = f"{count(result.left_units, 'unit')} of {len(ready.units)}"
        whose = result.name if shard is None else f"shard {shard} of {result.name}"
        return (
            f"stopped {whose} after {seconds:.1f} s, as --until asks: {left} "
            f"({format_size(result.left_bytes)}) are left; the same command goes on"
        )
    if result.already_done:
        return f"{result.name} {held(verified=ready.options.verify)}"
    if result.repaired:
        shown = ", ".join(f"{name} ({why})" for name, why in list(result.repaired.items())[:3])
        more = f" and {len(result.repaired) - 3} more" if len(result.repaired) > 3 else ""
        return message(f"repaired {result.name}: {shown}{more}")
    units = count(result.resumed_units, "unit")
    resumed = f", {units} from before" if result.resumed_units else ""
    if not result.published and shard is None:
        return f"took part in calibrating {result.name} for {seconds:.1f} s; number 0 writes it"
    if not result.published:
        return (
            f"shard {shard} of {result.name} is done: {format_size(result.nbytes)} in {seconds:.1f} s"
            f"{resumed}; `qconvert status` shows the others, `qconvert finish` publishes"
        )
    return (
        f"wrote {result.name}: {format_size(result.nbytes)} in {seconds:.1f} s "
        f"({format_size(result.nbytes / seconds)}/s){resumed}{_for_whom(ready)}"
    )


def _for_whom(ready: Prepared) -> str:
    """Say that nobody else can read the result, as the source: libraries make their files so."""
    modes = [shard.path.stat().st_mode for shard in ready.plan.checkpoint.shards]
    return (
        ""
        if any(mode & 0o044 for mode in modes)
        else "; its owner alone may read it (file mode), as the source"
    )
