"""Serve every row's folder by vLLM's own engine on a GPU, and judge it: `make served`.

    python tests/served/run.py FOLDER [--only REGEX] [--workers 6] [--table FILE]

Models are made, converted and dequantized by processes on the CPU, while workers, each a process with
vLLM imported, take the folders that are ready. A worker ends after a load that failed, because
process groups stay half made, and another takes its place. Exit code 1 where a row is not as
expected, or is not run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a file that is run: `served` and `loaders` lie beside its folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from served.rows import REAL, ROWS, Row

_GGUF = "SERVED_GGUF"  # the file of the real model; without it, its rows are left out
_FAILED = 77  # a worker that must not load another folder
_LONGEST = 240.0  # seconds of one row


_DOES_NOT_LOAD = 3  # of `qconvert validate --for`; 5: not known for the class


def _qconvert(*arguments: str) -> tuple[int, str]:
    """Run a command without a GPU: its exit code, and its errors where it failed."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}
    made = subprocess.run(
        [sys.executable, "-m", "qconvert", *arguments], capture_output=True, text=True, env=environment,
        check=False,
    )  # fmt: skip
    said = (made.stderr or made.stdout)[-1500:] or "no message"
    return made.returncode, said if made.returncode else ""


def _made(root: Path, row: Row, earlier: Future[str] | None) -> str:
    """Make a row's folder `root/NAME`, its dequantized weights `NAME.f32` and what the simulator says of
    it; why not, "" where it was made. The file `NAME.ready` says that it is done."""
    folder, source = root / row.name, root / row.source
    error = earlier.result() if earlier is not None else ""
    answer: dict[str, Any] = {}
    if not error and not folder.exists():
        error = _built(root, row, source)
    if not error:
        config = json.loads((folder / "config.json").read_text())
        quantized = "quantization_config" in config or (folder / "hf_quant_config.json").exists()
        wanted = root / f"{row.name}.f32"
        if row.damage:
            quantized = False  # its reference is that of its source
        if quantized and not wanted.exists():
            _, error = _qconvert("dequant", str(folder), str(wanted), "--dtype", "f32", "-q")
        code, answer["simulator"] = _qconvert("validate", str(folder), "--for", "vllm")
        answer["foretold"] = code == _DOES_NOT_LOAD
    answer["error"] = error
    (root / f"{row.name}.ready").write_text(json.dumps(answer))
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


def _reference_of(root: Path, row: Row) -> Path:
    """The folder of dequantized weights: of an undamaged folder where the row's is damaged."""
    sound = ROWS[row.source] if row.damage else row
    dequantized = root / f"{sound.name}.f32"
    return dequantized if dequantized.exists() else root / sound.name


def _work(root: Path, names: Sequence[str], deadline: float) -> None:
    """Serve rows whose folders are ready, one after another, each claimed by one worker."""
    from served import vllm_engine

    vllm_engine.prepare()
    from served.judge import judged

    while time.time() < deadline:
        open_rows = [name for name in names if not (root / f"{name}.claim").exists()]
        if not open_rows:
            return
        ready = [name for name in open_rows if (root / f"{name}.ready").exists()]
        if not ready:
            time.sleep(0.5)
            continue
        row = ROWS[ready[0]]
        try:
            os.close(os.open(root / f"{row.name}.claim", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        (root / f"worker.{os.getpid()}").write_text(f"{row.name} {time.time()}")
        made = json.loads((root / f"{row.name}.ready").read_text())
        if made["error"]:
            _record(
                root,
                {"name": row.name, "status": "not converted", "faults": [made["error"][-400:]]},
            )
            continue
        print(f"--- {row.name}", flush=True)
        try:
            source = root / row.source if row.same_as_source else None
            record = judged(row, root / row.name, _reference_of(root, row), source, vllm_engine)
        except Exception as error:
            print(traceback.format_exc(), flush=True)
            said = f"{type(error).__name__}: {error}"[:600]
            _record(root, {"name": row.name, "status": "refused", "faults": [said],
                           "foretold": made["foretold"]})  # fmt: skip
            os._exit(_FAILED)
        record["foretold"] = made["foretold"]
        _record(root, record)


def _record(root: Path, record: dict[str, Any]) -> None:
    (root / f"{record['name']}.json").write_text(json.dumps(record))


def _supervise(root: Path, names: Sequence[str], workers: int, deadline: float) -> None:
    """Keep workers running until all rows are done or the time is over."""
    live: dict[int, subprocess.Popen[bytes]] = {}
    starts = 0
    only = "|".join(f"^{re.escape(name)}$" for name in names)
    command = [sys.executable, __file__, str(root), "--only", only,
               "--worker", str(deadline)]  # fmt: skip
    while time.time() < deadline:
        for number in range(workers):
            process = live.get(number)
            if process is None or process.poll() not in (None, 0):
                if process is not None:
                    _note_death(root, process)
                if starts > workers + len(names):
                    continue
                starts += 1
                with (root / f"worker{number}.{starts}.log").open("wb") as log:
                    live[number] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            elif process.poll() is None and _is_stuck(root, process.pid):
                process.kill()
        if len(live) == workers and all(one.poll() == 0 for one in live.values()):
            return
        time.sleep(0.5)
    for process in live.values():
        process.kill()


def _note_death(root: Path, process: subprocess.Popen[bytes]) -> None:
    claimed = root / f"worker.{process.pid}"
    if claimed.exists():
        name = claimed.read_text().split()[0]
        if not (root / f"{name}.json").exists():
            said = f"its worker ended with {process.returncode}"
            _record(root, {"name": name, "status": "died", "faults": [said]})


def _is_stuck(root: Path, pid: int) -> bool:
    claimed = root / f"worker.{pid}"
    if not claimed.exists():
        return False
    name, began = claimed.read_text().split()
    return time.time() - float(began) > _LONGEST and not (root / f"{name}.json").exists()


def _is_as_expected(row: Row, record: dict[str, Any]) -> bool:
    """A refusal that the simulator foretold is as expected; so is a control that is found wrong."""
    if record["status"] == "refused":
        return bool(record.get("foretold"))
    return bool(record["status"] == row.expects and (row.damage or not record.get("foretold")))


def table(root: Path, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Lines of a Markdown table of the rows, and the names of those that are not as expected."""
    lines = ["| folder | made by | verdict | largest error of a module | KL / bf16's own | kernels |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    other = []
    for name in names:
        row, path = ROWS[name], root / f"{name}.json"
        record: dict[str, Any] = {"status": "not run", "faults": []}
        if path.exists():
            record = json.loads(path.read_text())
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
        lines.append(f"| {name} | {made} | {verdict} | {errors} | {noise} | {kernels} |")
    return lines, other


def _needed(names: Sequence[str]) -> set[str]:
    """Rows that must be made: these, and the sources of each."""
    found: set[str] = set()
    for name in names:
        while name not in found:
            found.add(name)
            name = ROWS[name].source
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    there = bool(os.environ.get(_GGUF))
    known = [name for name in ROWS if there or not name.startswith(REAL)]
    names = [name for name in known if re.search(given.only, name)]
    if given.worker is not None:
        _work(given.root, names, given.worker)
        return 0
    given.root.mkdir(parents=True, exist_ok=True)
    deadline = time.time() + 60 * given.minutes
    needed = _needed(names)
    futures: dict[str, Future[str]] = {}
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) - 4)) as pool:
        for name, row in ROWS.items():
            if name in needed:
                earlier = futures.get(row.source) if row.source != name else None
                futures[name] = pool.submit(_made, given.root, row, earlier)
        _supervise(given.root, names, given.workers, deadline)
    lines, other = table(given.root, names)
    text = "\n".join(lines)
    print(text)
    if given.table is not None:
        given.table.write_text(f"{text}\n")
    print(
        f"{len(names) - len(other)} of {len(names)} as expected; others: {', '.join(other) or 'none'}"
    )
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
