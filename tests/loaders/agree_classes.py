"""Tables of classes compared with the loaders: for what each converting command makes of a small model,
whether the simulator that is fed with the table of its class says what the runtime's own loader does.

As a program, it writes the forms that agree into the tables, and says what does not:

    .venv/bin/python tests/loaders/agree_classes.py vllm [MODEL_TYPE ...]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the tests' modules are found from their folder
    sys.path.insert(0, str(Path(__file__).parents[1]))

from loaders.agreement import config_of, disagreements, headers, once
from loaders.client import PYTHON, Rank, Server
from loaders.recorded_tables import written
from loaders.small_models import COMMANDS, FURTHER, MODELS, made, origin
from qconvert.core.versions import RELEASES
from qconvert.runtimes.classes import record as records
from qconvert.runtimes.classes.record import (
    STAGES,
    architecture_of,
    class_record,
    form_of,
    recorded,
)
from qconvert.runtimes.loading.setting import NotSimulated, Setting
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


def compared(
    folder: Path, command: str, runtime: str, server: Server, sizes: Sequence[int] = SIZES
) -> Iterator[Compared]:
    """Ask both about a folder at its last rank of each size; of a stage, at one rank of the stage."""
    config, tensors = config_of(folder), headers(folder)
    manifest = folder / "qconvert.json"
    stage = json.loads(manifest.read_bytes()).get("stage") if manifest.exists() else None
    form = STAGES if stage else form_of(config, tensors)
    table = class_record(runtime, architecture_of(config))
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
        real = server.load(folder, rank, environment=(stage or {}).get("environment"))
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
            yield from compared(folder, command, runtime, server)


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


def table_of(runtime: str, architecture: str) -> Path:
    """The file of a class's table."""
    version = RELEASES[runtime].version
    return Path(records.__file__).parent / f"{runtime}-{version}" / f"{architecture}.json"


def noted(runtime: str, architecture: str, found: Sequence[Compared]) -> None:
    """Write the forms that agree into a table, and forget what was read of it."""
    path = table_of(runtime, architecture)
    table: dict[str, Any] = json.loads(path.read_bytes())
    path.write_text(written({**table, "agrees": agreed(found)}))
    records.reread()


def main(words: Sequence[str] | None = None) -> int:
    """Compare the classes of some model types, by default all, and write what agrees."""
    takes = argparse.ArgumentParser(description=__doc__)
    takes.add_argument("runtime", choices=sorted(_BY_TABLE))
    takes.add_argument("models", nargs="*")
    asked = takes.parse_args(words)
    with tempfile.TemporaryDirectory() as room:
        server = Server(PYTHON, Path(room), asked.runtime)
        for model in asked.models or MODELS:
            folder = Path(room) / "folders"
            folder.mkdir(exist_ok=True)
            print(model, *_written(model, folder, asked.runtime, server), sep="\n  ", flush=True)
            shutil.rmtree(folder)
        server.close()
    return 0


def _written(model: str, folders: Path, runtime: str, server: Server) -> Iterator[str]:
    """Compare a small model, write what agrees into the table of its class, and say what does not."""
    architecture = architecture_of(config_of(origin(folders, model)))
    if recorded(runtime, architecture) is None:
        yield f"{architecture} was not recorded"
        return
    found = list[Compared]()
    for command in (*COMMANDS, *FURTHER):
        try:
            found += of_model(model, folders, runtime, server, (command,))
        except AssertionError as reason:  # of `made`: what commands refuse is test_class_matrix's
            yield f"{command}: {reason}"
    noted(runtime, architecture, found)
    yield json.dumps(agreed(found))
    yield from _told(found)


def _told(found: Sequence[Compared]) -> Iterator[str]:
    for one in found:
        for text in one.differences:
            yield f"{one.command} ({one.form}) at tp {one.tp}: {text}"


if __name__ == "__main__":
    sys.exit(main())
