"""Serve every row's folder by a runtime's own engine on a GPU, and judge it: `make served`.

    python tests/served/run.py FOLDER [--runtime sglang] [--only REGEX] [--workers 6] [--table FILE]

Models are made, converted and dequantized by processes on the CPU, while workers, each a process with
the runtime imported, take the folders that are ready. A worker ends after a load that failed, because
process groups stay half made, and another takes its place; sglang's ends after each folder. Exit
code 1 where a row is not as expected, or is not run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a file that is run: `served` and `loaders` lie beside its folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from served.rows import MARLIN, REAL, ROWS, ROWS_OF, Row

if __name__ == "__mp_main__":  # a rank of vLLM on one of several GPUs imports what its parent ran
    importlib.import_module("served.vllm_engine").prepare()

_GGUF = "SERVED_GGUF"  # the file of the real model; without it, its rows are left out
_FAILED = 77  # a worker that must not load another folder
_LONGEST = 240.0  # seconds of one row
_DOES_NOT_LOAD = 3  # of `qconvert validate --for`; 5: not known for the class
_COMPILING = "compiling"  # a file that is there while kernels of MARLIN are compiled
_WIDTH = 170  # of a line that is printed of a row; the table and the records have the rest
_LINES = 40  # of a log or a traceback that are kept where a row failed


@dataclass(frozen=True, slots=True)
class Run:
    """Folders in `root`, which runtimes share, and what became of them with one runtime: of a row the
    files NAME.ready, NAME.claim and NAME.json."""

    root: Path
    runtime: str

    @property
    def notes(self) -> Path:
        return self.root / f"with-{self.runtime}"

    def engine(self) -> Any:
        """The module that serves, which imports the runtime only when it is asked to prepare."""
        return importlib.import_module(f"served.{self.runtime}_engine")

    def record(self, record: dict[str, Any]) -> None:
        (self.notes / f"{record['name']}.json").write_text(json.dumps(record))

    def has(self, name: str, what: str) -> bool:
        return (self.notes / f"{name}.{what}").exists()


def _qconvert(*arguments: str) -> tuple[int, str]:
    """Run a command without a GPU: its exit code, and its errors where it failed."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}
    made = subprocess.run(
        [sys.executable, "-m", "qconvert", *arguments], capture_output=True, text=True, env=environment,
        check=False,
    )  # fmt: skip
    said = (made.stderr or made.stdout)[-1500:] or "no message"
    return made.returncode, said if made.returncode else ""


def _made(run: Run, row: Row, earlier: Future[str] | None) -> str:
    """Make a row's folder `root/NAME`, its dequantized weights `NAME.f32` and what the simulator says of
    it; why not, "" where it was made. The file `NAME.ready` says that it is done."""
    root = run.root
    folder, source = _folder(root, row), root / row.source
    error = earlier.result() if earlier is not None else ""
    answer: dict[str, Any] = {}
    if not error and not folder.exists():
        error = _built(root, row, source)
    if not error:
        config = json.loads((folder / "config.json").read_text())
        quantized = "quantization_config" in config or (folder / "hf_quant_config.json").exists()
        wanted = root / f"{folder.name}.f32"
        if row.damage:
            quantized = False  # its reference is that of its source
        if quantized and not wanted.exists():
            _, error = _qconvert("dequant", str(folder), str(wanted), "--dtype", "f32", "-q")
        given = ("--for", run.runtime, "--tp", str(row.gpus))
        code, answer["simulator"] = _qconvert("validate", str(folder), *given)
        answer["foretold"] = code == _DOES_NOT_LOAD
    answer["error"] = error
    (run.notes / f"{row.name}.ready").write_text(json.dumps(answer))
    return error


def _built(root: Path, row: Row, source: Path) -> str:
    if row.damage:
        from served.damage import damaged

        damaged(source, root / row.name, row.damage)
        return ""
    if row.command:
        arguments = [*row.command.split(), str(source), str(root / row.name), "-q", "--jobs", "1"]
        return _qconvert(*arguments)[1]
    from served.models import build, build_real

    if row.name == REAL:
        build_real(Path(os.environ[_GGUF]), root / row.name)
    else:
        build(row.name, root / row.name)
    return ""


def _folder(root: Path, row: Row) -> Path:
    return root / (row.source if row.again else row.name)


def _reference_of(root: Path, row: Row) -> Path:
    """The folder of dequantized weights: of its source where the row's is damaged, named for one
    runtime, or the source itself."""
    sound = ROWS[row.source] if row.damage or row.layout or row.again else row
    dequantized = root / f"{sound.name}.f32"
    return dequantized if dequantized.exists() else root / sound.name


def _work(run: Run, names: Sequence[str], deadline: float) -> None:
    """Serve rows whose folders are ready, one after another, each claimed by one worker."""
    engine = run.engine()
    engine.prepare()
    from served.judge import judged

    folders = 0
    while time.time() < deadline:
        open_rows = [name for name in names if not run.has(name, "claim")]
        if not open_rows:
            return
        ready = [name for name in open_rows if run.has(name, "ready")]
        if not ready:
            time.sleep(0.5)
            continue
        if (run.notes / _COMPILING).exists():
            ready.sort(key=MARLIN.__contains__)
        row = ROWS[ready[0]]
        try:
            os.close(os.open(run.notes / f"{row.name}.claim", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        (run.notes / f"worker.{os.getpid()}").write_text(f"{row.name} {time.time()}")
        made = json.loads((run.notes / f"{row.name}.ready").read_text())
        if made["error"]:
            run.record(
                {"name": row.name, "status": "not converted", "faults": [made["error"][-400:]]}
            )
            continue
        print(f"--- {row.name}", flush=True)
        try:
            compares = (
                row.same_as_source and engine.FOLDERS != 1
            )  # it would be served in this process
            source = run.root / row.source if compares else None
            reference = _reference_of(run.root, row)
            record = judged(row, _folder(run.root, row), reference, source, engine)
        except Exception as error:
            said, trace = f"{type(error).__name__}: {error}"[:600], traceback.format_exc()
            print(trace, flush=True)
            run.record({"name": row.name, "status": "refused", "faults": [said],
                        "foretold": made["foretold"], "log": trace.splitlines()[-_LINES:]})  # fmt: skip
            os._exit(_FAILED)
        record["foretold"] = made["foretold"]
        run.record(record)
        folders += 1
        if folders == engine.FOLDERS:
            os._exit(_FAILED)


def _supervise(
    run: Run, names: Sequence[str], workers: int, deadline: float,
    builds: subprocess.Popen[bytes] | None,
) -> None:  # fmt: skip
    """Keep workers running until all rows are done or the time is over."""
    live: dict[int, subprocess.Popen[bytes]] = {}
    logs: dict[int, Path] = {}
    starts = 0
    only = "|".join(f"^{re.escape(name)}$" for name in names)
    command = [sys.executable, __file__, str(run.root), "--runtime", run.runtime, "--only", only,
               "--worker", str(deadline)]  # fmt: skip
    while time.time() < deadline:
        if builds is not None and builds.poll() is not None:
            (run.notes / _COMPILING).unlink(missing_ok=True)
        for number in range(workers):
            process = live.get(number)
            if process is None or process.poll() not in (None, 0):
                if process is not None:
                    _note_death(run, process, logs[number])
                if starts > workers + len(names):
                    continue
                starts += 1
                logs[number] = run.notes / f"worker{number}.{starts}.log"
                with logs[number].open("wb") as log:
                    live[number] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            elif process.poll() is None and _is_stuck(run, process.pid):
                process.kill()
        if len(live) == workers and all(one.poll() == 0 for one in live.values()):
            return
        time.sleep(0.5)
    for number, process in live.items():
        process.kill()
        process.wait()
        _note_death(run, process, logs[number])


def _note_death(run: Run, process: subprocess.Popen[bytes], log: Path) -> None:
    claimed = run.notes / f"worker.{process.pid}"
    if claimed.exists():
        name = claimed.read_text().split()[0]
        if not run.has(name, "json"):
            said = f"its worker ended with {process.returncode}"
            lines = log.read_text(errors="replace").splitlines()[-_LINES:]
            run.record({"name": name, "status": "died", "faults": [said], "log": lines})


def _is_stuck(run: Run, pid: int) -> bool:
    claimed = run.notes / f"worker.{pid}"
    if not claimed.exists():
        return False
    name, began = claimed.read_text().split()
    return time.time() - float(began) > _LONGEST and not run.has(name, "json")


def _is_as_expected(row: Row, record: dict[str, Any]) -> bool:
    """A folder that the simulator says does not load is refused or served wrong; any other is as its row
    expects, of which a control is to be found wrong."""
    if record.get("foretold") and not row.damage:
        return record["status"] in ("refused", "wrong")
    return bool(record["status"] == row.expects)


def table(run: Run, names: Sequence[str]) -> tuple[list[tuple[str, ...]], list[str]]:
    """A table of the rows, its heading first, and the names of those that are not as expected."""
    lines: list[tuple[str, ...]] = [
        ("folder", "verdict", "largest error of a module", "KL / bf16's own", "made by", "kernels")
    ]
    other = []
    for name in names:
        row = ROWS[name]
        record: dict[str, Any] = {"status": "not run", "faults": []}
        if run.has(name, "json"):
            record = json.loads((run.notes / f"{name}.json").read_text())
        if not _is_as_expected(row, record):
            other.append(name)
        errors = ", ".join(f"{key} {value:.4f}" for key, value in record.get("modules", {}).items())
        noise = f"{record['noise']:.2f}" if "noise" in record else ""
        kernels = ", ".join(
            sorted({one.split()[-1] for one in record.get("kernels", ())} - {"NoneType"})
        )
        verdict = record["status"]
        if record.get("foretold") and not row.damage:
            verdict += " as foretold"
        if said := " ".join("; ".join(record["faults"]).split()):
            verdict += f": {said[:160]}"
        made = row.damage or f"{row.command or 'transformers'} of {row.source}"
        lines.append((name, verdict, errors, noise, made, kernels))
    return lines, other


def _prepared(run: Run) -> subprocess.Popen[bytes] | None:
    """Have the engine compile what takes minutes, beside everything else, and try its kernels, each in a
    process of its own; workers take definitions in place of kernels that do not load or are wrong. The
    process that compiles, None for an engine that has nothing to prepare."""
    engine = run.engine()
    stand_ins: str | None = getattr(engine, "STAND_INS", None)
    if stand_ins is None:
        return None
    (run.notes / _COMPILING).touch()
    builds = _started(run, engine, "build")
    check = _started(run, engine, "check")
    try:
        code = check.wait(_LONGEST)
    except subprocess.TimeoutExpired:
        check.kill()
        code = check.wait()
    said = (run.notes / "check.log").read_text(errors="replace").splitlines()[-_LINES // 4 :]
    print(*said, f"the check of kernels ended with {code}", sep="\n", flush=True)
    if code:
        os.environ[stand_ins] = "1"
    return builds


def _started(run: Run, engine: Any, what: str) -> subprocess.Popen[bytes]:
    with (run.notes / f"{what}.log").open("wb") as log:
        command = [sys.executable, engine.__file__, what]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def _count_gpus() -> int:
    """The number of GPUs, by their driver: this process does not start CUDA, which its children would
    inherit."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        return 0
    return len(listed.stdout.splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--runtime", choices=sorted(ROWS_OF), default="vllm")
    parser.add_argument("--only", default="")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    run = Run(given.root, given.runtime)
    there = bool(os.environ.get(_GGUF))
    gpus = _count_gpus()
    known = [
        name for name in ROWS_OF[run.runtime]
        if (there or not name.startswith(REAL)) and ROWS[name].gpus <= gpus
    ]  # fmt: skip
    names = [name for name in known if re.search(given.only, name)]
    if given.worker is not None:
        _work(run, names, given.worker)
        return 0
    run.notes.mkdir(parents=True, exist_ok=True)
    deadline = time.time() + 60 * given.minutes
    futures: dict[str, Future[str]] = {}
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) - 4)) as pool:
        for name in _in_turn(names):
            row = ROWS[name]
            earlier = futures.get(row.source) if row.source != name else None
            futures[name] = pool.submit(_made, run, row, earlier)
        builds = _prepared(run)
        _supervise(run, names, given.workers, deadline, builds)
        if builds is not None:
            builds.kill()
        pool.shutdown(wait=False, cancel_futures=True)
    lines, other = table(run, names)
    print("\n".join(" | ".join(line[:4])[:_WIDTH] for line in lines))
    if given.table is not None:
        lines.insert(1, ("---",) * len(lines[0]))
        given.table.write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))
    print(
        f"{len(names) - len(other)} of {len(names)} as expected; others: {', '.join(other) or 'none'}"
    )
    return 1 if other else 0


def _in_turn(names: Sequence[str]) -> list[str]:
    """Rows that must be made: these in their order, each after its sources."""
    found: list[str] = []
    for name in names:
        line = [name]
        while ROWS[line[-1]].source != line[-1]:
            line.append(ROWS[line[-1]].source)
        found += [one for one in reversed(line) if one not in found]
    return found


if __name__ == "__main__":
    sys.exit(main())
