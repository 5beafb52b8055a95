"""Checkpoints in object stores: the same bytes as from a folder, each fetched once, whatever the network
does. Those of `make check` talk to an S3 server (tests/s3_server.py), the others to fsspec's files."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import INDEX, fp8_moe, run_cli, tree, wide_moe
from crews import CrewEngine
from hub_client import FIRST_READ, SAMPLES, size_of_samples
from s3_server import BUCKET, Server, serving

from qconvert import __version__, api
from qconvert.checkpoint import fsspec_store
from qconvert.checkpoint.store import is_url, named, store_of
from qconvert.cli.demo import write_sample
from qconvert.core.errors import CheckpointError, RunError, UsageError
from qconvert.run import executor
from qconvert.run.engines.ray import Node
from qconvert.run.work.cluster_node import NodeCheck, check_node


@pytest.fixture(autouse=True)
def _own_mirrors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test fetched is not there for the next; and nobody waits."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fsspec_store, "FIRST_WAIT", 0.0)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


@pytest.fixture(autouse=True)
def _sound(request: pytest.FixtureRequest) -> Iterator[None]:
    """A fault that a test asks for ends with it."""
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").fault = lambda number, method, path: None


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "sample"
    write_sample(folder)
    return folder


@pytest.fixture(scope="module")
def url(server: Server, sample: Path) -> str:
    return server.put(sample, "org/sample")


# --- without a server -----------------------------------------------------------------------------


def test_a_conversion_from_a_url_is_that_of_the_folder(tmp_path: Path) -> None:
    source = fp8_moe().write(tmp_path / "source")
    near = api.run("dequant-fp8", source, tmp_path / "near", jobs=1)
    far = api.run("dequant-fp8", source.as_uri(), tmp_path / "far", jobs=1)
    assert tree(far.folder) == tree(near.folder)
    assert api.validate(far.folder, source.as_uri(), level="full").findings == []
    assert api.validate(source.as_uri(), level="full").errors == 0
    assert not api.diff(source.as_uri(), source)


def test_what_is_shown_is_the_url(tmp_path: Path) -> None:
    source = fp8_moe().write(tmp_path / "source")
    uri = source.as_uri()
    seen = run_cli("inspect", uri, "--json")
    assert json.loads(seen.out)["path"] == uri
    planned = run_cli("dequant", uri, tmp_path / "out", "--dry-run")
    assert f"source  {uri}: 2 files" in planned.out, planned.err
    (source / INDEX).write_bytes(b"{}")
    refused = run_cli("inspect", uri)
    assert refused.code == 1
    assert refused.err.strip().endswith(f"{uri}/{INDEX}: has no weight_map")


def test_a_source_that_changes(tmp_path: Path) -> None:
    """Its size is the same, its time is not: that is what local files have for a mark."""
    source = fp8_moe().write(tmp_path / "source")
    planned = api.plan("dequant-fp8", source.as_uri(), tmp_path / "out", jobs=1)
    shard = source / "model-00002-of-00002.safetensors"
    os.utime(shard, (1, 1))
    with pytest.raises(CheckpointError, match=rf"{source.as_uri()}/{shard.name} changed while"):
        api.carry_out(planned)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"00002\.safetensors: is gone since"):
        api.carry_out(planned)


def _swapped(data: bytes) -> bytes:
    """A shard saved again: the same tensors in the same size, two of them in the other's place."""
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    alike: dict[str, str] = {}
    for name, entry in header.items():
        kind = json.dumps([entry.get("dtype"), entry.get("shape")])
        if kind in alike and len(entry.get("shape", [])) == 2:
            first = header[alike[kind]]
            (a, b), (c, d) = first["data_offsets"], entry["data_offsets"]
            body[a:b], body[c:d] = body[c:d], body[a:b]
            first["data_offsets"], entry["data_offsets"] = [c, d], [a, b]
            text = json.dumps(header, separators=(",", ":")).encode()
            return struct.pack("<Q", length) + text.ljust(length) + bytes(body)
        alike[kind] = name
    raise AssertionError("no two tensors are alike")


def _replace(file: Path, data: bytes) -> None:
    file.with_suffix(".new").write_bytes(data)
    file.with_suffix(".new").replace(file)


@pytest.mark.parametrize("read", range(6, 12))
def test_an_object_that_is_replaced_at_any_moment(
    read: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its header, the samples of its bytes, the start of the run and each range: nothing is made
    of new bytes by an old header."""
    source = fp8_moe().write(tmp_path / "source")
    shard = source / "model-00001-of-00002.safetensors"
    count, real = 0, fsspec_store.FsspecStore.read

    def counted(self: fsspec_store.FsspecStore, *of: Any) -> bytes:
        nonlocal count
        count += 1
        if count == read:
            _replace(shard, _swapped(shard.read_bytes()))
        return real(self, *of)

    monkeypatch.setattr(fsspec_store.FsspecStore, "read", counted)
    result = run_cli("dequant", source.as_uri(), tmp_path / "out", "--jobs", "1")
    assert count >= read, "it was replaced"
    assert result.code == 1
    assert "changed" in result.err
    assert not (tmp_path / "out" / "config.json").exists()


def test_an_object_that_is_replaced_and_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after a run it is the same; what one range is read of is not."""
    source = fp8_moe().write(tmp_path / "source")
    planned = api.plan("dequant-fp8", source.as_uri(), tmp_path / "out", jobs=1)
    assert planned.source.sample_digest
    shard = source / "model-00001-of-00002.safetensors"
    kept, real = tmp_path / "kept", fsspec_store.FsspecStore.read

    def once(self: fsspec_store.FsspecStore, *of: Any) -> bytes:
        monkeypatch.setattr(fsspec_store.FsspecStore, "read", real)
        data = _swapped(shard.read_bytes())
        shard.rename(kept)
        shard.write_bytes(data)
        try:
            return real(self, *of)
        finally:
            kept.replace(shard)

    monkeypatch.setattr(fsspec_store.FsspecStore, "read", once)
    with pytest.raises(CheckpointError, match=rf"{shard.name}: changed since its header was read"):
        api.carry_out(planned)


def test_a_validation_reads_no_object_by_the_header_of_another(tmp_path: Path) -> None:
    """Nothing looks at its source again at the end."""
    source = fp8_moe().write(tmp_path / "source")
    opened = api.open_checkpoint(source.as_uri())
    shard = source / "model-00001-of-00002.safetensors"
    _replace(shard, _swapped(shard.read_bytes()))
    with pytest.raises(CheckpointError, match=rf"{shard.name}: changed since its header was read"):
        api.diff(opened, fp8_moe().write(tmp_path / "other"))


def test_a_store_that_has_no_times() -> None:
    """memory:// gives when an object was made, and knows no conditions."""
    store = store_of("memory://marks/model")
    store.put("a.safetensors", b"0123456789")
    (found,) = store.listed()
    assert store.read(found, 2, 5) == b"234"
    store.put("a.safetensors", b"9876543210")
    with pytest.raises(CheckpointError, match=r"a\.safetensors: changed since its header was read"):
        store.read(found, 2, 5)
    (again,) = store.listed()
    assert store.read(again, 2, 5) == b"765"


def test_a_file_that_is_replaced_as_a_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of files here, too, with the old time set back: what is read is what was planned."""
    source = fp8_moe().write(tmp_path / "source")
    planned = api.plan("dequant-fp8", source, tmp_path / "out", jobs=1)
    shard = source / "model-00001-of-00002.safetensors"
    real = executor.engine_of

    def late(*of: Any) -> Any:  # called after the source was looked at, before units are run
        status = shard.stat()
        _replace(shard, _swapped(shard.read_bytes()))
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
        return real(*of)

    monkeypatch.setattr(executor, "engine_of", late)
    with pytest.raises(CheckpointError, match=rf"{shard.name} changed while it was being"):
        api.carry_out(planned)


def test_a_source_that_was_written_to_while_nobody_looked(tmp_path: Path) -> None:
    """Its mark was set back, the time of writing is another: what finished units were made from is
    hashed again, as with files."""
    source = wide_moe(65_536).write(tmp_path / "source")
    shard = source / "model-00001-of-00002.safetensors"
    status, data = shard.stat(), bytearray(shard.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qconvert.run.executor._publish", _stopped)
        for _ in ("begun", "gone on with"):
            with pytest.raises(RunError, match="stopped"):
                api.run("dequant-fp8", source.as_uri(), tmp_path / "out", jobs=1)
            os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    data[len(data) // SAMPLES * 3 + 8192] ^= 1  # where no sample is taken
    shard.write_bytes(data)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(CheckpointError, match=rf"{shard.name}: tensor .*: its bytes changed since"):
        api.run("dequant-fp8", source.as_uri(), tmp_path / "out", jobs=1)


def test_nodes_of_a_cluster_read_the_store_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = fp8_moe().write(tmp_path / "source")
    near = api.run("dequant-fp8", source, tmp_path / "near", jobs=1)
    planned = api.plan("dequant-fp8", source.as_uri(), tmp_path / "far", jobs=1)
    engine = CrewEngine([Node(name, name, 2) for name in ("one", "two")])
    monkeypatch.setattr("qconvert.run.executor.engine_of", lambda *_: engine)
    api.carry_out(planned)
    assert tree(tmp_path / "far") == tree(near.folder)
    assert engine.crew is not None
    probe = NodeCheck(__version__, [], planned.source.shards)
    assert check_node(probe) is None
    shard = source / "model-00001-of-00002.safetensors"
    os.utime(shard, (1, 1))
    assert str(check_node(probe)).startswith(
        f"sees another object as {source.as_uri()}/{shard.name}"
    )
    shard.unlink()
    assert str(check_node(probe)).startswith("cannot read the source:")


@pytest.mark.big
def test_a_calibration_reads_a_store(tmp_path: Path) -> None:
    import calibrate_models

    source = calibrate_models.saved(calibrate_models.qwen3_moe(), tmp_path / "source")
    options = ("--gptq", "--synthetic", "--group-size", "32", "--samples", "4", "--length", "16")
    for name, where in (("near", source), ("far", source.as_uri())):
        done = run_cli("w4a16", where, tmp_path / name, *options, "--jobs", "1")
        assert done.code == 0, done.err
    assert tree(tmp_path / "far") == tree(tmp_path / "near")


def _stopped(*_: object) -> None:
    raise RunError("stopped")


def test_a_mirror_is_no_folder_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is opened as a folder, by whatever path, its shards still are the store's."""
    source = fp8_moe().write(tmp_path / "source")
    root = api.open_checkpoint(source.as_uri()).root
    assert (root / "model-00001-of-00002.safetensors").read_bytes()[-100:] == bytes(100)
    (tmp_path / "link").symlink_to(root)
    monkeypatch.chdir(root)
    for path in (root, tmp_path / "link", Path()):
        opened = api.open_checkpoint(path)
        assert all(shard.remote is not None for shard in opened.shards)
        with pytest.raises(CheckpointError, match="is not a file of this machine"):
            opened.shards[0].open()
        assert not api.diff(path, source)


def test_a_list_of_objects_elsewhere_is_not_asked(tmp_path: Path) -> None:
    """A folder that came from somewhere cannot send qconvert to a store."""
    source = fp8_moe().write(tmp_path / "source")
    root = api.open_checkpoint(source.as_uri()).root
    elsewhere = tmp_path / "download" / root.parent.name
    shutil.copytree(root.parent, elsewhere)
    opened = api.open_checkpoint(elsewhere / "files")
    assert all(shard.remote is None for shard in opened.shards)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://host/model", "expected the URL of a folder"),
        ("s3://bucket/a//b", "between slashes"),
        ("s3://bucket/../b", "between slashes"),
        ("s3://", "between slashes"),
        ("s3://bucket/new\nline", "between slashes"),
        ("s3://bucket/model.safetensors", "names a file; name the folder"),
        ("nosuch://bucket/model", "fsspec knows no nosuch://"),
    ],
)
def test_urls_that_name_no_folder(url: str, why: str) -> None:
    assert is_url(url)
    with pytest.raises(UsageError, match=re.escape(why)):
        store_of(url).listed()


@pytest.mark.parametrize(
    ("missing", "url", "said"),
    [
        ("s3fs", "s3://bucket/model", "a package for s3:// is missing: pip install 'qconvert[s3]'"),
        ("gcsfs", "gs://b/model", "a package for gs:// is missing: Please install gcsfs to access"),
        ("fsspec.core", "s3://bucket/model", "fsspec is missing: pip install 'qconvert[s3]'"),
    ],
)
def test_missing_packages(
    missing: str, url: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(fsspec_store, "_OPENED", {})
    refused = run_cli("dequant", url, tmp_path / "out", "--dry-run")
    assert refused.code == 2
    assert said in refused.err


def test_texts_that_are_no_urls() -> None:
    assert not any(map(is_url, ("model", "org/name", "hf://org/name", "./s3:/a", "C://", "")))


def test_names_of_mirrors() -> None:
    state = f"@{'0' * 32}"
    root = Path(os.environ["XDG_CACHE_HOME"]) / "qconvert" / "stores"
    text = (
        f"{root}/s3/bucket/a/b/{state}/files/x.json: broken, {root}/file/tmp/c/{state}/files is not"
    )
    assert named(text) == "s3://bucket/a/b/x.json: broken, file:///tmp/c is not"
    assert named("/elsewhere/s3/b/files") == "/elsewhere/s3/b/files"


def test_a_large_file_that_is_no_weights(tmp_path: Path) -> None:
    source = fp8_moe().write(tmp_path / "source")
    with (source / "movie.mp4").open("wb") as stream:
        stream.truncate((128 << 20) + 1)
    with pytest.raises(CheckpointError, match=r"movie\.mp4: expected at most 134\.2 MB of a file"):
        api.open_checkpoint(source.as_uri())
    (source / "movie.mp4").rename(source / "other.bin")
    assert "other.bin" in api.open_checkpoint(source.as_uri()).denied_files


def test_stages_in_a_store(tmp_path: Path) -> None:
    source = fp8_moe().write(tmp_path / "source")
    planned = api.plan_stages("copy", source, tmp_path / "stages", "1,1", link=False, jobs=1)
    api.carry_out(planned)
    assert not api.diff((tmp_path / "stages").as_uri(), source)
    from_store = api.plan_stages("copy", source.as_uri(), tmp_path / "again", "1,1", jobs=1)
    api.carry_out(from_store)
    assert tree(tmp_path / "again") == tree(tmp_path / "stages")


# --- with a server --------------------------------------------------------------------------------


@pytest.mark.peer
def test_workers_fetch_each_byte_once(
    url: str, sample: Path, server: Server, tmp_path: Path
) -> None:
    server.forget()
    api.run("dequant-fp8", url, tmp_path / "far", jobs=3)
    fetched = server.fetched(".safetensors")
    api.run("dequant-fp8", sample, tmp_path / "near", jobs=1)
    assert tree(tmp_path / "far") == tree(tmp_path / "near")
    tensors = api.open_checkpoint(sample).nbytes
    overhead = size_of_samples(sample) + 2 * FIRST_READ
    assert tensors <= fetched - overhead <= 1.01 * tensors
    ours = [asked for asked in server.asked if asked.is_get and "safetensors" in asked.path]
    assert all(asked.range for asked in ours if not asked.path.endswith(".json"))


@pytest.mark.peer
def test_only_headers_are_fetched_to_look(url: str, sample: Path, server: Server) -> None:
    server.forget()
    looked = run_cli("inspect", url)
    assert looked.code == 0, looked.err
    assert server.fetched(".safetensors") == 2 * FIRST_READ
    server.forget()
    assert run_cli("validate", url).code == 0
    assert server.fetched() == 0, "the mirror is there"


@pytest.mark.peer
def test_a_folder_in_a_store_is_validated_in_full(
    url: str, sample: Path, server: Server, tmp_path: Path
) -> None:
    made = api.run("dequant-fp8", url, tmp_path / "made", jobs=1)
    there = server.put(made.folder, "org/made")
    report = api.validate(there, url, level="full")
    assert (report.errors, report.about["folder"]) == (0, there)
    assert "every byte has the hash it was written with" in report.proved
    assert "every weight is the source's within its format's rounding" in report.proved
    key = "org/made/model.safetensors"
    whole = bytearray(server.client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    whole[-1] ^= 1
    server.client.put_object(Bucket=BUCKET, Key=key, Body=bytes(whole))
    found = api.validate(there, url, level="full").findings
    assert "QC022" in {finding.rule for finding in found}


@pytest.mark.peer
def test_s3_is_asked_for_ranges_under_the_mark(server: Server) -> None:
    store = store_of(f"s3://{BUCKET}/org/marked")
    server.client.put_object(Bucket=BUCKET, Key="org/marked/a.safetensors", Body=b"0123456789")
    (found,) = store.listed()
    assert store.read(found, 2, 5) == b"234"
    server.client.put_object(Bucket=BUCKET, Key="org/marked/a.safetensors", Body=b"9876543210")
    server.forget()
    with pytest.raises(CheckpointError, match=r"a\.safetensors: changed since its header was read"):
        store.read(found, 2, 5)
    assert [asked.status for asked in server.asked] == [412], "the store refuses it, once"


@pytest.mark.peer
def test_bad_answers_and_cut_connections(
    url: str, sample: Path, server: Server, tmp_path: Path
) -> None:
    """One request in five fails, in turn in each of the ways."""
    faults = (503, "cut", 500, "cut")
    server.fault = lambda number, method, path: faults[number // 5 % 4] if number % 5 == 2 else None
    server.forget()
    api.run("dequant-fp8", url, tmp_path / "far", jobs=1)
    failed = [asked.status for asked in server.asked]
    assert {503, 500} <= set(failed)
    api.run("dequant-fp8", sample, tmp_path / "near", jobs=1)
    assert tree(tmp_path / "far") == tree(tmp_path / "near")


@pytest.mark.peer
def test_a_store_that_fails_for_good(
    url: str, sample: Path, server: Server, tmp_path: Path
) -> None:
    """Finished work is kept, and the same command goes on."""
    planned = api.plan("dequant-fp8", url, tmp_path / "far", jobs=1)
    assert planned.source.sample_digest, "the samples are read before the fault"
    server.forget()
    server.fault = lambda number, method, path: (
        503 if method == "GET" and "0002-of" in path else None
    )
    with pytest.raises(RunError, match=r"0002-of-00002\.safetensors: .*, 6 times; run the same"):
        api.carry_out(planned)
    server.fault = lambda number, method, path: None
    api.run("dequant-fp8", url, tmp_path / "far", jobs=1)
    api.run("dequant-fp8", sample, tmp_path / "near", jobs=1)
    assert tree(tmp_path / "far") == tree(tmp_path / "near")


@pytest.mark.peer
def test_what_is_not_there_or_not_allowed(server: Server) -> None:
    with pytest.raises(CheckpointError, match="s3://models/none: holds no files"):
        api.open_checkpoint(f"s3://{BUCKET}/none")
    with pytest.raises(CheckpointError, match=r"listing s3://nobucket/x: .*; check its name"):
        api.open_checkpoint("s3://nobucket/x")
    server.forget()
    server.fault = lambda number, method, path: 403
    with pytest.raises(CheckpointError, match="the credentials do not allow it") as caught:
        api.open_checkpoint(f"s3://{BUCKET}/secret")
    assert len(server.asked) == 1, "a refusal is not tried again"
    assert "not-a-secret" not in str(caught.value)


@pytest.mark.peer
def test_missing_credentials(server: Server, tmp_path: Path) -> None:
    code = f"from qconvert import api; api.open_checkpoint('s3://{BUCKET}/x')"
    bare = {key: value for key, value in os.environ.items() if "ACCESS_KEY" not in key}
    done = subprocess.run(
        [sys.executable, "-c", code], env=bare, capture_output=True, text=True, check=False
    )
    assert "CheckpointError" in done.stderr
    assert "set AWS_PROFILE, AWS_ACCESS_KEY_ID or their like" in done.stderr
