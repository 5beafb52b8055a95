"""Tables of classes compared with the loaders: for what each converting command makes of a small model,
whether the simulator that is fed with the table of its class says what the runtime's own loader does.

As a program, it writes the forms that agree into the tables, and says what does not:

    .venv/bin/python tests/loaders/agree_classes.py vllm [MODEL ...] [--jobs N]

By default it takes every class that has a table, in as many processes as there are cores, a model in
each. A MODEL is one of `MODELS`, any other model_type, a class that reads one (`LIKE`), or a model_type
and `.draft`, or `.bf16` or `.fp8`: as it is published.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the tests' modules are found from their folder
    sys.path.insert(0, str(Path(__file__).parents[1]))

from loaders.agreement import config_of, disagreements, headers, once
from loaders.client import PYTHON, Rank, Server, version_of
from loaders.published import TYPES
from loaders.recorded_tables import written
from loaders.small_models import (
    COMMANDS,
    DRAFT,
    LIKE,
    MODELS,
    commands_of,
    is_draft,
    made,
    origin,
)
from qconvert.runtimes.classes import record as records
from qconvert.runtimes.classes.names import of_draft
from qconvert.runtimes.classes.record import (
    STAGES,
    architecture_of,
    form_of,
    recorded,
    whole,
)
from qconvert.runtimes.loading.building import text_config
from qconvert.runtimes.loading.setting import NotSimulated, Setting
from qconvert.runtimes.misreadings import misread
from qconvert.runtimes.pipeline import VARIABLE, one_stage
from qconvert.runtimes.sglang import simulator as sglang
from qconvert.runtimes.vllm import simulator as vllm

SIZES = (1, 2, 8)
_BY_TABLE = {"sglang": sglang.by_table, "vllm": vllm.by_table}


@dataclass(frozen=True)
class Compared:
    """A folder at one size: its form, the command that made it, where both differ, and whether the
    loader took it."""

    command: str
    form: str
    tp: int
    differences: tuple[str, ...]
    loaded: bool = False


@dataclass(frozen=True)
class OfModel:
    """Cells compared of a model, lines about what failed, and whether it was carried to its end."""

    found: tuple[Compared, ...]
    lines: tuple[str, ...]
    whole: bool
    seconds: float


def compared(
    folder: Path,
    command: str,
    runtime: str,
    server: Server,
    sizes: Sequence[int] = SIZES,
    *,
    draft: bool = False,
) -> Iterator[Compared]:
    """Ask both about a folder, or the draft in it, at its last rank of each size; of a stage, which has
    no draft, at one rank of the stage."""
    config, tensors = config_of(folder), headers(folder)
    manifest = folder / "qconvert.json"
    stage = json.loads(manifest.read_bytes()).get("stage") if manifest.exists() else None
    version = version_of(runtime)
    if stage and (draft or one_stage(runtime, config, version)):
        return  # sglang asks a class about stages once it is loaded
    if stage and VARIABLE[runtime] not in stage["environment"]:
        return  # of a partition that another runtime is told
    table = recorded(runtime, architecture_of(config), version, draft=draft)
    if table is None:
        return  # of a text model that is not recorded
    if misread(runtime, config, tensors):
        return  # which is said before a simulator is asked (test_misreadings.py)
    own = of_draft(table, text_config(config), tensors) if draft else tensors
    form = STAGES if stage else form_of(config, own)
    for tp in (1,) if stage else sizes:
        at, rank = Setting(tp=tp, rank=tp - 1), Rank(tp, tp - 1)
        if stage:
            partition = tuple(stage["partition"])
            at = Setting(pp=len(partition), stage=stage["number"], partition=partition)
            rank = Rank(1, 0, len(partition), stage["number"])
        try:
            simulation = _BY_TABLE[runtime](table, config, tensors, at)
        except NotSimulated as reason:
            yield Compared(command, form, tp, (f"not simulated: {reason}",))
            continue
        environment = (stage or {}).get("environment")
        real = server.load(folder, rank, draft=draft, environment=environment)
        real = once(real) if runtime == "vllm" else real
        # A table does not state errors, so that which one ends a load is not compared.
        found = [one for one in disagreements(simulation, real) if not one.startswith("reason:")]
        yield Compared(command, form, tp, tuple(found), real.error is None)


def of_model(
    model: str, folders: Path, runtime: str, server: Server, commands: Sequence[str] = COMMANDS
) -> Iterator[Compared]:
    """The same for what commands make of a small model."""
    for command in commands:
        for folder in made(folders, model, command):
            yield from compared(folder, command, runtime, server, draft=is_draft(model))


def agreed(found: Sequence[Compared]) -> dict[str, list[int]]:
    """Forms in which nothing differed in any folder, at any size. Of several ranks those count that some
    folder was loaded with: what both refuse shows nothing of one that both take, unless one rank is
    refused, too."""
    forms: dict[str, dict[int, bool]] = {}
    for one in found:
        sizes = forms.setdefault(one.form, {})
        sizes[one.tp] = sizes.get(one.tp, False) or one.loaded
    wrong = {one.form for one in found if one.differences}
    return {
        form: [tp for tp in sorted(sizes) if tp == 1 or sizes[tp] or not sizes[1]]
        for form, sizes in sorted(forms.items())
        if form not in wrong
    }


def tables(runtime: str) -> dict[Path, list[str]]:
    """The files of the tables of a runtime's classes, each with the models that are compared for it."""
    folder = Path(records.__file__).parent / f"{runtime}-{version_of(runtime)}"
    found: dict[Path, list[str]] = {}
    for file in sorted(folder.glob("*.json")):
        if file.stem != "not_recorded":
            model_type = json.loads(file.read_bytes())["model_type"]
            own = file.stem.removesuffix(DRAFT)
            named = own if own in LIKE else model_type
            named += DRAFT if file.stem.endswith(DRAFT) else ""
            others = [one for one, (of, own) in MODELS.items() if own and of == named]
            found[file] = [named, *others, *(named + one for one in TYPES.get(named, ()))]
    return found


def joined(before: Mapping[str, Sequence[int]], found: Sequence[Compared]) -> dict[str, list[int]]:
    """Forms that agree, beside those of a table that other tests saw to (test_simulator_*.py) and that
    do not differ here."""
    now, wrong = agreed(found), {one.form for one in found if one.differences}
    forms = sorted({*now, *before} - wrong)
    return {form: sorted({*now.get(form, ()), *before.get(form, ())}) for form in forms}


def noted(file: Path, found: Sequence[Compared]) -> None:
    """Write the forms that agree into a table, and forget what was read of it; of one that is as
    another, into that one."""
    table: dict[str, Any] = json.loads(file.read_bytes())
    if same := whole(file).get("same_as"):
        noted(file.with_stem(same), found)
        return
    file.write_text(written({**table, "agrees": joined(table.get("agrees", {}), found)}))
    records.reread()


def main(words: Sequence[str] | None = None) -> int:
    """Compare the classes of some models, by default of all tables, and write what agrees."""
    takes = argparse.ArgumentParser(description=__doc__)
    takes.add_argument("runtime", choices=sorted(_BY_TABLE))
    takes.add_argument("models", nargs="*")
    takes.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes; a model each")
    takes.add_argument("--limit", type=int, default=1800, help="seconds that a model may take")
    asked = takes.parse_args(words)
    known, chosen = tables(asked.runtime), {*asked.models}
    for name in chosen.difference(*known.values()):
        takes.error(f"no class of {name} has a table for {asked.runtime}")
    files = [file for file, models in known.items() if not chosen or chosen & {*models}]
    for name in ("torch", "transformers"):
        importlib.import_module(name)  # once for the processes that are forked
    count, unfinished = Counter[str](), []
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as room,
        ProcessPoolExecutor(asked.jobs, get_context("fork")) as pool,
    ):
        # Large classes first, so that none is left for the end.
        files.sort(key=lambda file: file.stat().st_size, reverse=True)
        run = {
            pool.submit(_of_model, model, asked.runtime, Path(room), asked.limit): file
            for file in files
            for model in known[file]
        }
        done: dict[Path, list[OfModel]] = {file: [] for file in files}
        for future in as_completed(run):
            file = run[future]
            done[file].append(future.result())
            if len(done[file]) < len(known[file]):
                continue
            of_class = done.pop(file)
            found = [one for model in of_class for one in model.found]
            own = Counter(map(_outcome, found))
            print(file.stem, f"{sum(model.seconds for model in of_class):.0f} s")
            print(*(line for model in of_class for line in _said(model)), sep="", end="")
            print(f"  {_counted(own)}; {json.dumps(agreed(found))}", flush=True)
            count += own
            if all(model.whole for model in of_class):
                noted(file, found)
            else:
                unfinished.append(file.stem)
    print(f"{asked.runtime}: {_counted(count)}")
    print(*(f"not carried to its end, so not written: {name}" for name in unfinished), sep="\n")
    return bool(unfinished)


def _of_model(model: str, runtime: str, room: Path, limit: int) -> OfModel:
    """Everything that is compared of a model, in a process of its own, which ends it after `limit`
    seconds; of a command, or a model, that fails, what it says."""
    found, lines, whole, start = list[Compared](), list[str](), False, time.monotonic()
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(limit)
    folders = Path(tempfile.mkdtemp(dir=room))
    try:
        server = _server(room, runtime)
        for command in _commands(model, folders, lines):
            try:
                found += of_model(model, folders, runtime, server, (command,))
            except AssertionError as reason:  # of `made`: refusals are test_class_matrix's
                lines.append(f"{model} {command}: {reason}")
        whole = True
    except Exception as reason:  # the other models go on
        lines.append(f"{model}: {type(reason).__name__}: {str(reason)[:400]}")
    finally:
        signal.alarm(0)
        shutil.rmtree(folders, ignore_errors=True)
    return OfModel(tuple(found), tuple(lines), whole, time.monotonic() - start)


@cache
def _server(room: Path, runtime: str) -> Server:
    """The loader that this process asks, with a few others: one alone would fork for all of them."""
    shared = room / f"{os.getpid() % -(-(os.cpu_count() or 1) // 4)}"
    shared.mkdir(exist_ok=True)
    return Server(PYTHON, shared, runtime)


def _commands(model: str, folders: Path, lines: list[str]) -> Sequence[str]:
    """The commands whose results are compared; none of what transformers does not make."""
    try:
        origin(folders, model)
    except TimeoutError:
        raise
    except Exception as reason:
        lines.append(f"{model}: no small model: {type(reason).__name__}: {str(reason)[:200]}")
        return ()
    return commands_of(model)


def _too_long(*_: object) -> None:
    raise TimeoutError("it took longer than --limit")


def _outcome(one: Compared) -> str:
    return "differ" if one.differences else "agree"


def _counted(count: Mapping[str, int]) -> str:
    return f"{sum(count.values())} cells, {count.get('agree', 0)} agree, {count.get('differ', 0)} differ"


def _said(model: OfModel) -> Iterator[str]:
    """Lines about what differs, or failed."""
    yield from (f"  {line}\n" for line in model.lines)
    for one in model.found:
        yield from (
            f"  {one.command} ({one.form}) at tp {one.tp}: {text}\n" for text in one.differences
        )


if __name__ == "__main__":
    sys.exit(main())
