"""`diff` with a repo by the hashes that the Hub lists, and `clean` of what runs to a repo left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import copied, fp8_moe, run_cli, tree
from hub_client import files_in, hub_and_client
from loopback_hub import LoopbackHub

from qconvert import api
from qconvert.checkpoint.checkpoint import WORK_DIR
from qconvert.core.errors import RunError
from qconvert.hub.upload_target import UNFINISHED

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the client

REPO = "me/model"
OUT = f"hf://{REPO}"
SHARD = 1_000


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fp8_moe().write(tmp_path_factory.mktemp("diff") / "source")


@pytest.fixture(scope="module")
def made(source: Path) -> Path:
    out = source.parent / "out"
    return api.run("dequant-fp8", source, out, jobs=1, max_shard_size=SHARD).folder


@pytest.fixture
def hub(tmp_path: Path, made: Path) -> Iterator[LoopbackHub]:
    """A Hub with a repo of the folder's files."""
    with hub_and_client(tmp_path / "home") as (server, _):
        server.add(REPO, {**files_in(made), ".gitattributes": b"*.safetensors filter=lfs\n"})
        yield server


def test_equal_without_a_byte_of_weights(hub: LoopbackHub, made: Path) -> None:
    for words in ((made, OUT), (OUT, made), (OUT, f"{OUT}@main")):
        done = run_cli("diff", *words)
        assert (done.code, done.err) == (0, "")
        assert done.out.startswith(f"no difference: {len(tree(made))} files equal by size and hash")
    assert hub.asked("GET", "/resolve/") == hub.asked("GET", "/cdn/") == []
    assert all(asked.sent < 10_000 for asked in hub.log)


def test_files_that_differ_are_named(hub: LoopbackHub, made: Path, tmp_path: Path) -> None:
    folder = copied(made, tmp_path / "out")
    first, *_, last = sorted(folder.glob("*.safetensors"))
    raw = bytearray(first.read_bytes())
    raw[-1] ^= 1
    first.write_bytes(raw)  # of the same size
    last.unlink()
    (folder / "notes.txt").write_text("mine")
    (folder / "config.json").write_text("{}")
    done = run_cli("diff", folder, OUT)
    assert done.code == 3
    lines = dict(line.split(": ", 1) for line in done.out.splitlines()[:-1])
    assert list(lines) == ["config.json", first.name, last.name, "notes.txt"]
    assert "sha256" in lines[first.name]
    assert "2 bytes in A" in lines["config.json"]
    assert lines[last.name].startswith("is only in B")
    assert lines["notes.txt"] == "is only in A (4 bytes)"
    assert done.out.splitlines()[-1].startswith("4 differences, ")
    found = json.loads(run_cli("diff", OUT, folder, "--json").out)
    assert [(each["file"], each["kind"]) for each in found] == [
        ("config.json", "data"), (first.name, "data"), (last.name, "only-a"), ("notes.txt", "only-b"),
    ]  # fmt: skip
    assert hub.asked("GET", "/resolve/") == []


def test_a_repo_that_is_not_there(hub: LoopbackHub, made: Path) -> None:
    done = run_cli("diff", made, "hf://me/nothing")
    assert done.code == 1
    assert "hf://me/nothing" in done.err
    assert "status 404" in done.err
    with pytest.raises(api.UsageError, match="name one, hf://ORG/NAME"):
        api.diff_files(made, made)


def test_clean_lists_then_removes(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    repo = "hf://me/new"
    assert "nothing to clean" in run_cli("clean", repo).out
    hub.fail("PUT", "/lfs/", 503, times=1000)
    with pytest.raises(RunError):
        api.run("dequant-fp8", source, repo, jobs=1, max_shard_size=SHARD + 1)
    hub.faults.clear()
    (side,) = (ref for ref in hub.repos["me/new"].refs if ref.startswith(UNFINISHED))
    hub.repos["me/new"].refs["somebodys"] = hub.repos["me/new"].refs["main"]
    work = tmp_path / "own" / "qconvert" / "outputs" / "hf" / "me" / "new"
    dry = run_cli("clean", repo, "--dry-run")
    assert dry.out == f"unfinished work in {work}\nbranch {side} of me/new\n"
    assert (work / WORK_DIR).is_dir()
    done = run_cli("clean", repo)
    assert done.out == "".join(f"dropped {line}\n" for line in dry.out.splitlines())
    assert not (work / WORK_DIR).exists()
    assert sorted(hub.repos["me/new"].refs) == ["main", "somebodys"]
    assert "nothing to clean" in run_cli("clean", repo).out


def test_a_dry_run_of_clean_on_a_folder(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    api.run("dequant-fp8", source, out, jobs=1)
    shutil.copytree(out, tmp_path / "half" / WORK_DIR / "stage")
    half = tmp_path / "half"
    before = tree(tmp_path)
    assert run_cli("clean", half, "--dry-run").out == f"unfinished work in {half}\n"
    assert run_cli("clean", out, "--dry-run").out == "nothing to clean\n"
    assert tree(tmp_path) == before
    assert "dropped unfinished work" in run_cli("clean", half).out
