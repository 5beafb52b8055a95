"""Results sent to object stores: what arrives is what was made, and looks finished when all is there.
Those of `make check` talk to an S3 server (tests/s3_server.py), the others to fsspec's files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import md5
from pathlib import Path
from typing import Any

import pytest
from checkpoints import INDEX, fp8_moe, run_cli, tree, wide_moe
from s3_server import BUCKET, Server, serving

from qconvert import api
from qconvert.checkpoint import fsspec_store
from qconvert.checkpoint.fsspec_store import FsspecStore
from qconvert.cli.demo import write_sample
from qconvert.core.errors import OutputError, RunError, UsageError
from qconvert.passes.amx import ExpertsToAmx
from qconvert.service import output as store_upload
from qconvert.service.output import NOTE, md5_mark, part_size

SHARD_SIZE = 400  # bytes: several shards


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fsspec_store, "FIRST_WAIT", 0.0)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return fp8_moe().write(tmp_path / "source")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("delivery") / "sample"
    write_sample(folder)
    return folder


def files(folder: Path) -> dict[str, Any]:
    return {name: data for name, data in tree(folder).items() if data is not None}


def convert(source: Path | str, out: Path | str, recipe: str = "dequant-fp8") -> api.Result:
    return api.run(recipe, source, out, jobs=1, max_shard_size=SHARD_SIZE)


# --- without a server -----------------------------------------------------------------------------


def test_what_arrives_is_what_is_made(source: Path, tmp_path: Path) -> None:
    near = convert(source, tmp_path / "near")
    there = tmp_path / "there"
    made = convert(source, there.as_uri())
    assert files(there) == files(near.folder)
    assert (made.url, made.name, made.already_done) == (there.as_uri(), there.as_uri(), False)
    assert not made.folder.exists(), "what was sent is removed"
    again = convert(source, there.as_uri())
    assert again.already_done
    assert api.validate(there.as_uri(), source, level="full").findings == []


def test_from_store_to_store_on_the_command_line(source: Path, tmp_path: Path) -> None:
    there, work = (tmp_path / "there").as_uri(), tmp_path / "work"
    words = ("dequant", source.as_uri(), there, "--jobs", "1", "--work-dir", work)
    dry = run_cli(*words, "--dry-run")
    assert f"output  {there}: 1 file" in dry.out, dry.err
    assert not (tmp_path / "there").exists()
    done = run_cli(*words, "--validate", "full", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["out"] == there
    assert found["validation"]["errors"] == 0
    assert list(work.rglob("*.safetensors")) == []
    once_more = run_cli(*words)
    assert f"{there} already holds this result" in once_more.out
    assert f"{there} already holds this result" in run_cli(*words, "--dry-run").out


class Broken(RunError):
    """The connection ends for good."""


def breaking(monkeypatch: pytest.MonkeyPatch, at: int) -> list[str]:
    """From the operation of that number on, the store takes nothing. Returns what it was asked for."""
    asked: list[str] = []

    def counted(kind: str, call: Callable[..., None]) -> Callable[..., None]:
        def asking(self: FsspecStore, *given: Any) -> None:
            name = given[1] if kind == "send" else given[0]
            asked.append(f"{kind} {name}")
            if len(asked) > at:
                raise Broken("the store is gone")
            call(self, *given)

        return asking

    for kind in ("put", "send", "remove"):
        monkeypatch.setattr(FsspecStore, kind, counted(kind, getattr(FsspecStore, kind)))
    return asked


def test_the_order_and_an_end_at_every_point(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index comes last but for the note's end, and whatever ends a run, the same command goes on."""
    near = convert(source, tmp_path / "near")
    with monkeypatch.context() as patch:
        asked = breaking(patch, 1000)
        convert(source, (tmp_path / "whole").as_uri())
    assert asked[0] == f"put {NOTE}"
    assert [step.partition(" ")[2] for step in asked[-5:]] == [
        "qconvert.receipt.jsonl", "qconvert.json", "config.json", INDEX, NOTE,
    ]  # fmt: skip
    shards = [number for number, step in enumerate(asked) if "-of-" in step]
    assert len(shards) > 3
    assert max(shards) == len(shards), "shards are sent first"
    there = tmp_path / "there"
    for at in range(len(asked)):
        with monkeypatch.context() as patch:
            first = breaking(patch, at)
            with pytest.raises(Broken):
                convert(source, there.as_uri())
        if at < len(asked) - 1:
            assert not (there / INDEX).exists(), f"at {at}: {asked[at]}"
        with monkeypatch.context() as patch:
            left = breaking(patch, 1000)
            made = convert(source, there.as_uri())
        sent = {step for step in first[:at] if step.startswith("send")}
        assert not sent & set(left), f"at {at}: sent again"
        assert files(there) == files(near.folder)
        assert not made.folder.exists()
        shutil.rmtree(there)


def test_folders_of_others_are_refused(source: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "mine.txt").write_text("mine")
    with pytest.raises(
        OutputError, match=r"there: holds mine\.txt, which is not of this conversion"
    ):
        convert(source, there.as_uri())
    assert not (tmp_path / "cache" / "qconvert" / "outputs").exists(), "it is refused at once"
    looks = api.plan("dequant-fp8", source, there.as_uri(), jobs=1).dry_run()
    assert "holds mine.txt" in looks[0].refusals[0]
    (there / "mine.txt").unlink()
    convert(source, there.as_uri())
    with pytest.raises(OutputError, match=r"qconvert\.json is of another conversion; remove what"):
        convert(source, there.as_uri(), "copy")
    (there / "mine.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"holds mine\.txt"):
        convert(source, there.as_uri())


def test_a_note_of_another_conversion(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    with monkeypatch.context() as patch:
        breaking(patch, 2)
        with pytest.raises(Broken):
            convert(source, there.as_uri())
    assert (there / NOTE).is_file()
    with pytest.raises(OutputError, match=r"upload\.json is of another conversion"):
        convert(source, there.as_uri(), "copy")
    (there / NOTE).write_text("{}")
    with pytest.raises(OutputError, match="which is not of this conversion"):
        convert(source, there.as_uri())


def test_an_object_that_is_damaged_or_gone_is_sent_again(source: Path, tmp_path: Path) -> None:
    near = convert(source, tmp_path / "near")
    there = tmp_path / "there"
    convert(source, there.as_uri())
    shards = sorted(there.glob("*.safetensors"))
    shards[0].write_bytes(b"short")
    shards[1].unlink()
    assert not convert(source, there.as_uri()).already_done
    assert files(there) == files(near.folder)


def test_what_arrives_as_something_else_is_noticed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that loses a bit, and says nothing."""
    send = FsspecStore.send

    def lossy(self: FsspecStore, file: Path, name: str, part: int) -> None:
        send(self, file, name, part)
        path = tmp_path / "there" / name
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    monkeypatch.setattr(FsspecStore, "send", lossy)
    with pytest.raises(OutputError, match="is not what was sent"):
        convert(source, (tmp_path / "there").as_uri())
    assert not (tmp_path / "there" / INDEX).exists()


def test_what_cannot_be_done_in_a_store(source: Path, tmp_path: Path) -> None:
    url = (tmp_path / "there").as_uri()
    with pytest.raises(OutputError, match="must lie apart from the source"):
        convert(source.as_uri(), f"{source.as_uri()}/out")
    with pytest.raises(OutputError, match="must lie apart from the source"):
        convert(source.as_uri(), source.as_uri())
    with pytest.raises(
        UsageError, match="--shard: name a folder that all machines share by --work"
    ):
        api.plan("dequant-fp8", source, url, shard="0/2")
    with pytest.raises(UsageError, match="several folders are made at once"):
        api.plan_stages("copy", source, url, "1,1")
    with pytest.raises(UsageError, match="several folders are made at once"):
        api.plan_pair(ExpertsToAmx("int4", 2), source, url, tmp_path / "gpu")
    with pytest.raises(UsageError, match="--work-dir is for an OUT in a store"):
        api.plan("dequant-fp8", source, tmp_path / "out", work_dir=tmp_path / "work")
    for words in (("clean", url), ("status", url), ("split", source, url, "--pp", "1,1")):
        refused = run_cli(*words)
        assert refused.code == 2
        assert "is a URL; name a folder of this machine" in refused.err


@pytest.mark.parametrize("by", ["finish", "the same command"])
def test_shards_of_a_result_in_a_store(by: str, tmp_path: Path) -> None:
    """They fill a folder that they share, and who publishes it sends it."""
    source = wide_moe(65_536).write(tmp_path / "source")
    there, work = tmp_path / "there", tmp_path / "work"
    words = ("dequant", source.as_uri(), there.as_uri(), "--work-dir", work, "--jobs", "1")
    for number in range(4):
        done = run_cli(*words, "--shard", f"{number}/4")
        assert done.code == 0, done.err
        assert f"shard {number}/4 of {there.as_uri()} is done" in done.out
        assert not there.exists()
    (folder,) = (path.parent for path in work.rglob(".qconvert"))
    last = run_cli("finish", folder) if by == "finish" else run_cli(*words)
    assert last.code == 0, last.err
    near = api.run("dequant-fp8", source, tmp_path / "near", jobs=1)
    assert files(there) == files(near.folder)
    assert not folder.exists()


def test_parts_of_large_files() -> None:
    assert part_size(1) == store_upload.PART_BYTES
    for size in (160 << 30, (1 << 40) + 1):
        assert -(-size // part_size(size)) <= 10_000
        assert part_size(size) % (1 << 20) == 0


def test_marks_are_those_of_s3(tmp_path: Path) -> None:
    """By hand: the MD5 of a whole object; of one in parts, that of the MD5s of its parts."""
    file = tmp_path / "file"
    file.write_bytes(bytes(range(250)))
    assert md5_mark(file, 126) == md5(bytes(range(250))).hexdigest()
    halves = md5(bytes(range(125))).digest() + md5(bytes(range(125, 250))).digest()
    assert md5_mark(file, 125) == f"{md5(halves).hexdigest()}-2"


# --- with a server --------------------------------------------------------------------------------


@pytest.mark.peer
def test_a_result_in_s3(
    sample: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts, compared by marks alone; and back, it is what was made here."""
    monkeypatch.setattr(store_upload, "PART_BYTES", 5 << 20)
    server.forget()
    source = server.put(sample, "org/in")
    made = api.run("dequant-fp8", source, f"s3://{BUCKET}/org/out", jobs=1)
    near = api.run("dequant-fp8", sample, tmp_path / "near", jobs=1)
    sent = [asked for asked in server.asked if "org/out" in asked.path]
    assert server.get("org/out") == files(near.folder)
    assert made.url == f"s3://{BUCKET}/org/out"
    assert any("uploadId" in asked.path for asked in sent), "it is sent in parts"
    back = [a for a in sent if a.is_get]
    assert not back, "marks were enough"
    last = [a.path.rpartition("/")[2] for a in sent if a.method in ("PUT", "POST")][-1]
    assert last.startswith("model.safetensors?uploadId"), "what makes it a checkpoint comes last"
    assert api.run("dequant-fp8", source, f"s3://{BUCKET}/org/out", jobs=1).already_done


_RUN = """
import sys
from qconvert import api
from qconvert.service import output as store_upload
store_upload.PART_BYTES = 5 << 20
print(api.run("dequant-fp8", sys.argv[1], sys.argv[2], jobs=1, max_shard_size=11_000_000).name)
"""


@pytest.mark.peer
def test_killed_while_sending(sample: Path, server: Server, tmp_path: Path) -> None:
    """What has arrived is not sent again, what was sent in part is dropped."""
    words = [sys.executable, "-c", _RUN, str(sample), f"s3://{BUCKET}/org/killed"]

    def killed_at(what: str) -> set[str]:
        """What is there when it was killed while it sent that."""
        running: list[subprocess.Popen[bytes]] = []

        def kill(number: int, method: str, path: str) -> None:
            if method == "PUT" and what in path:
                os.kill(running[0].pid, signal.SIGKILL)

        server.fault = kill
        running.append(subprocess.Popen(words, stdout=subprocess.DEVNULL))
        running[0].wait(timeout=120)
        server.fault = lambda number, method, path: None
        assert running[0].returncode == -signal.SIGKILL
        return set(server.get("org/killed")) - {NOTE}

    assert killed_at("partNumber=2") == set()
    assert server.client.list_multipart_uploads(Bucket=BUCKET)["Uploads"], "parts were left behind"
    before = killed_at("tokenizer_config.json")
    assert {name for name in before if name.startswith("model-")} == {
        f"model-0000{number}-of-00002.safetensors" for number in (1, 2)
    }
    assert INDEX not in before
    named = {**os.environ, "AWS_EXECUTION_ENV": "last"}
    done = subprocess.run(words, env=named, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == f"s3://{BUCKET}/org/killed"
    puts = [a for a in server.asked if a.method == "PUT" and "exec-env/last" in a.agent]
    sent = {asked.path.split("?")[0].rpartition("/")[2] for asked in puts}
    assert INDEX in sent
    assert not sent & before
    near = api.run("dequant-fp8", sample, tmp_path / "near", jobs=1, max_shard_size=11_000_000)
    assert server.get("org/killed") == files(near.folder)
    assert not server.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads")


@pytest.mark.peer
def test_bad_answers_while_sending(sample: Path, server: Server, tmp_path: Path) -> None:
    faults = (503, "cut", 500)
    server.fault = lambda n, method, path: faults[n // 4 % 3] if n % 4 == 1 else None
    api.run("dequant-fp8", sample, f"s3://{BUCKET}/org/faulty", jobs=1)
    server.fault = lambda number, method, path: None
    near = api.run("dequant-fp8", sample, tmp_path / "near", jobs=1)
    assert server.get("org/faulty") == files(near.folder)
