"""Conversions by id that are killed, run out of disk, or meet a bad network; every command, by id."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import published, run_cli, tree, watched_reads
from faults import InTurn
from hub_client import FIRST_READ, client_of, files_in, size_of_samples
from loopback_hub import TOKEN, LoopbackHub, loopback_hub

from qconvert import api
from qconvert.cli.demo import write_sample
from qconvert.core.errors import OutputError
from qconvert.run.executor import run_prepared
from qconvert.run.folder.journal import read_journal
from qconvert.run.folder.workspace import JOURNAL
from qconvert.run.work.reader import AT_ONCE, PIECE_BYTES

REPO = "org/sample"
AHEAD = AT_ONCE * PIECE_BYTES
# At these parts of a run's requests it is killed; `QCONVERT_ALL=1 make check` kills at 20.
MOMENTS = range(20) if os.environ.get("QCONVERT_ALL") else range(1, 20, 6)

_RUN = """
import sys
from dataclasses import replace
from pathlib import Path
from qconvert import api
from qconvert.run.executor import run_prepared
planned = api.plan("dequant-fp8", sys.argv[1], sys.argv[2], jobs=int(sys.argv[3]))
ready = planned.folders[0].ready
ready = replace(ready, options=replace(ready.options, commit_bytes=256 << 10))
print(run_prepared(ready, Path(sys.argv[2])).resumed_units)
"""


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "sample"
    write_sample(folder)
    return folder


@pytest.fixture(scope="module")
def near(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes | str | None]:
    out = tmp_path_factory.mktemp("near") / "out"
    api.run("dequant-fp8", sample, out, jobs=1, base_model=REPO)
    return tree(out)


@pytest.fixture
def hub(sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with loopback_hub() as server, client_of(server, tmp_path / "home", monkeypatch):
        server.add(REPO, files_in(sample))
        yield server


def environment(hub: LoopbackHub, room: Path) -> dict[str, str]:
    """Of a process of its own that talks to that Hub."""
    return os.environ | {
        "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(room / "hf"),
        "XDG_CACHE_HOME": str(room / "cache"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0",
    }  # fmt: skip


def started(hub: LoopbackHub, room: Path, jobs: int = 1) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", _RUN, REPO, str(room / "out"), str(jobs)]
    return subprocess.Popen(
        words, env=environment(hub, room), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def fetched(hub: LoopbackHub, after: int = 0) -> int:
    """Bytes of weights that the server sent since a request."""
    marks = {
        str(blob.lfs)
        for path, blob in hub.repos[REPO].tree().items()
        if path.endswith(".safetensors")
    }
    return sum(
        asked.sent
        for asked in hub.log[after:]
        if asked.path.partition("?")[0].rpartition("/")[2] in marks
    )


def kept_of(out: Path) -> int:
    """Source bytes that finished units of an unfinished folder were made from."""
    found = read_journal(out / ".qconvert" / JOURNAL) if out.is_dir() else None
    texts = [] if found is None else [text for made in found.units.values() for text in made]
    parts = {
        (part["name"], part["start"], part["stop"])
        for text in texts
        for part in json.loads(text)["sources"]
    }
    return sum(stop - start for _, start, stop in parts)


@pytest.fixture(scope="module")
def requests_of_a_run(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    room = tmp_path_factory.mktemp("whole")
    with loopback_hub() as server:
        server.add(REPO, files_in(sample))
        running = started(server, room)
        assert running.communicate(timeout=120)[0].strip() == "0"
        return len(server.log)


@pytest.mark.crash
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_a_moment(
    moment: int,
    requests_of_a_run: int,
    sample: Path,
    near: dict[str, bytes | str | None],
    hub: LoopbackHub,
    tmp_path: Path,
) -> None:
    """Nothing looks finished; the same command goes on, and fetches nothing for what was done."""
    at = 1 + moment * requests_of_a_run // 20
    ready = threading.Event()

    def kill(method: str, path: str) -> None:
        with hub.lock:
            at_moment = len(hub.log) >= at
        if at_moment and ready.wait(10) and running.poll() is None:
            os.kill(running.pid, signal.SIGKILL)

    hub.watch = kill
    running = started(hub, tmp_path)
    ready.set()
    running.communicate(timeout=120)
    assert running.returncode == -signal.SIGKILL
    hub.watch = lambda method, path: None
    out = tmp_path / "out"
    assert published(out) == [], "all is in the work folder"
    found = read_journal(out / ".qconvert" / JOURNAL) if out.is_dir() else None
    kept, before = kept_of(out), len(hub.log)
    again = started(hub, tmp_path)
    said, wrong = again.communicate(timeout=120)
    assert again.returncode == 0, wrong
    assert int(said) == (0 if found is None else len(found.units))
    left = api.open_checkpoint(sample).nbytes - kept
    more = size_of_samples(sample) + 2 * FIRST_READ
    assert left <= fetched(hub, before) <= 1.01 * left + more
    assert tree(out) == near


@pytest.mark.crash
def test_workers_fetch_each_byte_once(
    sample: Path, near: dict[str, bytes | str | None], hub: LoopbackHub, tmp_path: Path
) -> None:
    """Three processes, each with a session and links of its own, while one request in seven fails."""
    numbers = iter(range(1_000_000))
    at_first = started(hub, tmp_path, jobs=3)
    assert at_first.communicate(timeout=120)[0].strip() == "0"
    assert tree(tmp_path / "out") == near
    weights = api.open_checkpoint(sample).nbytes
    more = size_of_samples(sample) + 2 * FIRST_READ
    assert weights <= fetched(hub) <= 1.01 * weights + more

    def some_fail(method: str, path: str) -> None:
        number = next(numbers)
        if "/cdn/" in path and number % 7 == 3:
            with hub.lock:
                if number % 21 == 3:
                    hub.cut_answer("/cdn/", 50)
                else:
                    hub.fail("GET", "/cdn/", 503, headers={"Retry-After": "0"})

    hub.watch = some_fail
    (tmp_path / "second").mkdir()
    second = started(hub, tmp_path / "second", jobs=3)
    _, wrong = second.communicate(timeout=300)
    assert second.returncode == 0, wrong
    assert "retrying in 0 s" in wrong
    assert tree(tmp_path / "second" / "out") == near


@pytest.mark.crash
def test_a_disk_that_fills_up(
    sample: Path,
    near: dict[str, bytes | str | None],
    hub: LoopbackHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Finished work is kept, and what it was made from is not fetched again."""
    out, pwrite = tmp_path / "out", os.pwrite
    ready = api.plan("dequant-fp8", REPO, out, jobs=1).folders[0].ready
    ready = replace(ready, options=replace(ready.options, commit_bytes=256 << 10))
    written = 0

    def full(fd: int, data: memoryview, offset: int) -> int:
        nonlocal written
        written += len(data)
        if written > ready.layout.nbytes // 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(
            OutputError, match=r"cannot write: No space left .* run the same command"
        ):
            run_prepared(ready, out, files=InTurn())
    before, kept = len(hub.log), kept_of(out)
    assert kept > 0
    assert api.run("dequant-fp8", REPO, out, jobs=1).resumed_units
    assert tree(out) == near
    left = api.open_checkpoint(sample).nbytes - kept
    # What was asked for ahead may still arrive.
    assert fetched(hub, before) <= 1.01 * left + size_of_samples(sample) + AHEAD


# --- every command --------------------------------------------------------------------------------

CONVERSIONS = {
    "copy": ("run", "copy"),
    "dequant": ("dequant",),
    "fuse": ("fuse", "--for", "sglang"),
    "amx": ("amx", "--method", "int4", "--numa", "2"),
    "searched": ("w4a16", "--rtn", "--scales", "search"),
    "drop": ("mtp", "drop"),
    "split": ("split", "--pp", "2,2", "--copy"),
}


@pytest.mark.crash
@pytest.mark.parametrize("name", CONVERSIONS)
def test_every_conversion(
    name: str, sample: Path, hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result is that of the folder; what is fetched is what it needs, each byte once."""
    with monkeypatch.context() as patch:
        sizes = watched_reads(patch)
        _convert(CONVERSIONS[name], sample, tmp_path / "near", "--base-model", REPO)
    hub.log.clear()
    _convert(CONVERSIONS[name], REPO, tmp_path / "far")
    assert tree(tmp_path / "far") == tree(tmp_path / "near")
    overhead = (2 if name == "split" else 1) * size_of_samples(sample) + 2 * FIRST_READ
    # The head's embeddings go to two folders of a split, which are made one after another.
    needed = api.open_checkpoint(sample).nbytes if name != "split" else sum(sizes)
    assert fetched(hub) <= 1.01 * min(sum(sizes), needed) + overhead


OTHERS = {
    "plan": ("plan", "copy", REPO),
    "inspect": ("inspect", REPO),
    "advise": ("advise", REPO, "--for", "sglang"),
    "diff": ("diff", REPO, "{sample}"),
    "validate": ("validate", REPO, "--level", "full"),
    "against": ("validate", "{sample}", "--against", REPO, "--level", "full"),
    "kt": ("kt", REPO, "--cpu", "int4", "--numa", "1", "--cpu-out", "{room}/cpu"),
    "pair": ("kt", REPO, "--cpu", "int4", "--numa", "1", "--cpu-out", "{room}/cpu2", "--gpu", "w4a16",
             "--gpu-out", "{room}/gpu"),
    "unfuse": ("unfuse", "{fused}", "{room}/unfused", "--for", "vllm"),
    "repair": ("repair", REPO, "--dry-run"),
    "report": ("report", REPO),
    "dump": ("plan", "dequant-fp8", REPO, "--dump-after", "dequant"),
    "checked": ("dequant", REPO, "{room}/checked", "--validate", "full"),
}  # fmt: skip


@pytest.mark.crash
@pytest.mark.parametrize("name", OTHERS)
def test_every_other_command(name: str, sample: Path, hub: LoopbackHub, tmp_path: Path) -> None:
    if name == "unfuse":
        _convert(("fuse", "--for", "sglang"), sample, tmp_path / "fused")
        hub.add("me/fused", files_in(tmp_path / "fused"))
    places = {"sample": str(sample), "room": str(tmp_path), "fused": "me/fused"}
    done = run_cli(*(word.format(**places) for word in OTHERS[name]))
    assert done.code == 0, done.out + done.err
    assert str(tmp_path / "cache") not in done.out + done.err, "what is named is the repo"


def _convert(words: Sequence[str], source: Path | str, out: Path, *more: str) -> None:
    at = 2 if words[0] in ("run", "experts", "mtp") else 1
    done = run_cli(*words[:at], source, out, *words[at:], "--jobs", "1", *more)
    assert done.code == 0, done.err
