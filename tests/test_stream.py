"""Results that go to the Hub while they are made, with the real client against a Hub on the loopback."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from checkpoints import run_cli, tree, wide_moe
from hub_client import hub_and_client, on_disk
from loopback_hub import Blob, LoopbackHub

from qconvert import api
from qconvert.cli.demo import write_sample
from qconvert.core.errors import OutputError, PlanError, RunError, UsageError
from qconvert.hub.upload_target import UNFINISHED, HubUploadTarget
from qconvert.run.engines.upload_queue import StreamWorkspace, seen_whole
from qconvert.run.work.events import NoEvents
from qconvert.run.work.files import Files
from qconvert.run.work.upload_target import SentFile

# Of the client, on its way to httpx.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = "me/model-bf16"
OUT = f"hf://{REPO}"
SHARD = 3_000


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some shards of 3 KB, and two of a tensor of 128 KB."""
    return wide_moe(8192).write(tmp_path_factory.mktemp("stream") / "source")


@pytest.fixture(scope="module")
def near(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The files of a run that stays here."""
    folder = tmp_path_factory.mktemp("near") / "out"
    api.run("dequant-fp8", source, folder, jobs=1, max_shard_size=SHARD)
    return tree(folder)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    with hub_and_client(tmp_path / "home") as (server, _):
        yield server


def convert(source: Path, out: str = OUT, **options: Any) -> api.Result:
    return api.run("dequant-fp8", source, out, jobs=1, max_shard_size=SHARD, **options)


def shown(hub: LoopbackHub, revision: str = "main") -> dict[str, bytes]:
    """What a branch has."""
    found = hub.repos[REPO].tree(revision)
    return {path: blob.data for path, blob in found.items() if path != ".gitattributes"}


def weights(files: dict[str, Any]) -> list[str]:
    return [name for name in files if name.endswith(".safetensors")]


def sent_bytes(hub: LoopbackHub, files: dict[str, Any]) -> int:
    """Bytes of weights that went to the Hub."""
    shards = "|".join(sha256(files[name]).hexdigest() for name in weights(files))
    return sum(asked.received for asked in hub.asked("PUT", shards))


# --- What arrives ---------------------------------------------------------------------------------


def test_what_arrives_is_what_is_made(
    hub: LoopbackHub, source: Path, near: dict[str, Any], tmp_path: Path
) -> None:
    from huggingface_hub import snapshot_download

    made = convert(source)
    assert len(weights(near)) > 3
    assert shown(hub) == near
    assert (made.url, made.name, made.already_done) == (OUT, OUT, False)
    assert list(hub.repos[REPO].refs) == ["main"], "the branch of what is unfinished is gone"
    assert not made.folder.exists()
    back = Path(snapshot_download(REPO, cache_dir=tmp_path / "cache"))
    assert {name: (back / name).read_bytes() for name in near} == near
    listed = {name: blob.lfs for name, blob in hub.repos[REPO].tree().items() if blob.lfs}
    assert listed.items() >= {n: sha256(near[n]).hexdigest() for n in weights(near)}.items()
    # Nothing is shown before all is: one commit shows the result, and shards were kept before.
    trees = hub.repos[REPO].commits.values()
    assert len([files for files in trees if "config.json" in files]) == 1
    side = [files for files in trees if weights(dict(files)) and "config.json" not in files]
    assert side
    kinds = {name for files in side for name in files if not name.endswith(".safetensors")}
    assert kinds == {".gitattributes"}


def test_from_a_repo_to_a_repo_on_a_quarter_of_the_disk(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read by ranges, sent while it is made, fetched again: the bytes of converting the downloaded
    folder, with no more on the disk than the budget at any request, caches and headers included."""
    from huggingface_hub import snapshot_download

    source, room = tmp_path / "sample", tmp_path / "room"
    write_sample(source)
    files = {name: data for name, data in tree(source).items() if isinstance(data, bytes)}
    hub.add("org/sample", files)
    size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(room))
    most = 0

    def sampled(_method: str, _path: str) -> None:
        nonlocal most
        most = max(most, on_disk(room))

    hub.watch = sampled
    options: dict[str, Any] = {"jobs": 1, "max_shard_size": 400_000}
    api.run("dequant-fp8", "org/sample", OUT, disk_budget=size // 4, **options)
    hub.watch = lambda _method, _path: None
    assert size // 100 < most <= size // 4
    read = sum(asked.sent for asked in hub.asked("GET", "/cdn/"))
    assert size <= read < 1.02 * size + 100_000, "each byte once, headers and samples beside"
    near = tree(
        api.run("dequant-fp8", source, tmp_path / "near", base_model="org/sample", **options).folder
    )
    assert shown(hub) == near
    back = Path(snapshot_download(REPO, cache_dir=tmp_path / "cache"))
    assert {name: (back / name).read_bytes() for name in near} == near


def test_the_same_again_sends_nothing(hub: LoopbackHub, source: Path) -> None:
    convert(source)
    hub.log.clear()
    assert convert(source).already_done
    assert {asked.method for asked in hub.log} == {"GET"}
    (hub.repos[REPO].tree())["README.md"] = Blob(b"# Edited by people\n", None)
    assert convert(source).already_done


def test_one_file_alone_with_its_hash_in_the_receipt(
    hub: LoopbackHub, source: Path, tmp_path: Path
) -> None:
    folder = api.run("dequant-fp8", source, tmp_path / "near", jobs=1, sha256=True).folder
    api.run("dequant-fp8", source, OUT, jobs=1, sha256=True)
    assert shown(hub) == tree(folder)
    assert weights(shown(hub)) == ["model.safetensors"]


def test_several_workers(hub: LoopbackHub, source: Path, near: dict[str, Any]) -> None:
    api.run("dequant-fp8", source, OUT, jobs=3, max_shard_size=SHARD)
    assert shown(hub) == near


def test_a_branch(hub: LoopbackHub, source: Path, near: dict[str, Any]) -> None:
    hub.add(REPO, {"notes.txt": b"stays\n"})
    main = hub.repos[REPO].refs["main"]
    made = convert(source, f"{OUT}@w4a16/v2")
    assert made.url == f"{OUT}@w4a16/v2"
    assert shown(hub, "w4a16/v2") == {**near, "notes.txt": b"stays\n"}
    assert hub.repos[REPO].refs["main"] == main
    assert sorted(hub.repos[REPO].refs) == ["main", "w4a16/v2"]


def test_a_private_repo(hub: LoopbackHub, source: Path) -> None:
    convert(source, private=True)
    assert hub.repos[REPO].private
    hub.add("me/public", {})
    with pytest.raises(OutputError, match="already exists and is public"):
        convert(source, "hf://me/public", private=True)
    assert hub.asked("POST", "me/public") == []


def test_on_the_command_line(hub: LoopbackHub, source: Path, near: dict[str, Any]) -> None:
    words = ("dequant", source, OUT, "--jobs", "1", "--max-shard-size", str(SHARD))
    dry = run_cli(*words, "--dry-run")
    assert dry.code == 0, dry.err
    assert f"output  {OUT}: {len(weights(near))} files" in dry.out
    assert hub.repos == {}
    done = run_cli(*words, "--validate", "headers", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (found["out"], found["validation"]["errors"]) == (OUT, 0)
    assert shown(hub) == near
    assert f"{OUT} already holds this result" in run_cli(*words).out
    assert f"{OUT} already holds this result" in run_cli(*words, "--dry-run").out


# --- The disk -------------------------------------------------------------------------------------


class Staged:
    """What lies in work folders, at each moment when a file is made."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        place = StreamWorkspace.make_file

        def noting(space: StreamWorkspace, file: Any) -> None:
            place(space, file)
            self.sizes.append(
                sum(each.stat().st_size for each in space.stage.glob("*.safetensors"))
            )

        patch.setattr(StreamWorkspace, "make_file", noting)


def test_a_budget_is_kept(
    hub: LoopbackHub, source: Path, near: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = Staged(monkeypatch)
    planned = api.plan("dequant-fp8", source, OUT, max_shard_size=SHARD)
    room = planned.folders[0].ready.room
    assert room is not None
    total = sum(len(near[name]) for name in weights(near))
    assert room.least < total + room.rest
    convert(source, disk_budget=room.least)
    assert shown(hub) == near
    assert 0 < max(staged.sizes) <= room.least - room.rest < total


def test_a_budget_that_is_too_small(hub: LoopbackHub, source: Path) -> None:
    room = api.plan("dequant-fp8", source, OUT, max_shard_size=SHARD).folders[0].ready.room
    assert room is not None
    with pytest.raises(
        PlanError, match=rf"--disk-budget {room.least - 1} B .* {room.least} B or more"
    ):
        convert(source, disk_budget=room.least - 1)
    with pytest.raises(PlanError, match="is too small"):
        api.run("dequant-fp8", source, OUT, disk_budget=100)
    assert hub.repos == {}


def test_shards_as_a_budget_allows(tmp_path: Path) -> None:
    """Smaller ones where those of the default size do not fit, unless their size was given."""
    write_sample(tmp_path / "sample")
    whole = api.plan("copy", tmp_path / "sample", OUT).folders[0].ready
    assert whole.room is not None
    assert len(whole.layout.files) == 1
    budget = whole.room.least // 2
    ready = api.plan("copy", tmp_path / "sample", OUT, disk_budget=budget).folders[0].ready
    assert ready.room is not None
    assert ready.room.least <= ready.room.takes <= budget
    assert len(ready.layout.files) > 2
    with pytest.raises(PlanError, match="or a smaller --max-shard-size"):
        api.plan("copy", tmp_path / "sample", OUT, disk_budget=budget, max_shard_size="1GB")


def test_a_full_disk(
    hub: LoopbackHub, source: Path, near: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third shard finds no room; when there is some, the same command goes on."""
    made: list[Path] = []
    create = Files.create

    def full(self: Files, path: Path, size: int) -> None:
        if path.suffix == ".safetensors":
            made.append(path)
            if len(made) == 3:
                reason = OSError(errno.ENOSPC, "No space left on device")
                raise OutputError(f"{path}: cannot reserve {size} bytes: {reason.strerror}")
        create(self, path, size)

    with monkeypatch.context() as patch:
        patch.setattr(Files, "create", full)
        with pytest.raises(OutputError, match="No space left"):
            convert(source)
    assert shown(hub) == {}
    convert(source)
    assert shown(hub) == near
    total = sum(len(near[name]) for name in weights(near))
    assert sent_bytes(hub, near) == total, "each byte once"


# --- What goes wrong on the way -------------------------------------------------------------------

_REQUESTS = {
    "looking": ("GET", r"/api/models/me/"), "creating": ("POST", r"/repos/create"),
    "branch": ("POST", r"/branch/"), "preupload": ("POST", r"/preupload/"),
    "batch": ("POST", r"/objects/batch"), "sending": ("PUT", r"/lfs/"),
    "checking": ("POST", r"/verify"), "keeping": ("POST", rf"/commit/{UNFINISHED}"),
    "listing": ("POST", r"/paths-info/"), "publishing": ("POST", r"/commit/main"),
    "comparing": ("GET", r"/tree/"), "tidying": ("DELETE", r"/branch/"),
}  # fmt: skip


def _some(kinds: Iterable[Any], first: str) -> list[Any]:
    """One with every test run, the others with those that kill processes."""
    return [
        pytest.param(*kind, marks=() if kind[0] == first else pytest.mark.crash) for kind in kinds
    ]


@pytest.mark.parametrize("what", _some(((name,) for name in _REQUESTS), "sending"))
def test_requests_that_fail_for_a_while(
    what: str, hub: LoopbackHub, source: Path, near: dict[str, Any]
) -> None:
    method, pattern = _REQUESTS[what]
    hub.fail(method, pattern, 503, times=2)
    hub.cut(method, pattern, times=1)
    hub.cut(method, pattern, times=1, after=True)
    convert(source)
    assert shown(hub) == near
    assert list(hub.repos[REPO].refs) == ["main"]
    assert not any(fault.times for fault in hub.faults), "all of them happened"
    with_config = [files for files in hub.repos[REPO].commits.values() if "config.json" in files]
    assert len(with_config) == 1


_REFUSALS = [(what, (401, 403, 413)[n % 3]) for n, what in enumerate(_REQUESTS)]
if os.environ.get("QCONVERT_ALL"):
    _REFUSALS = [(what, status) for what in _REQUESTS for status in (401, 403, 413)]


@pytest.mark.parametrize(("what", "status"), _some(_REFUSALS, "keeping"))
def test_a_refusal_ends_it_within_one_request(
    what: str, status: int, hub: LoopbackHub, source: Path, near: dict[str, Any]
) -> None:
    method, pattern = _REQUESTS[what]
    hub.fail(method, pattern, status, times=1000)
    with pytest.raises(OutputError, match=f"status {status}"):
        convert(source)
    hub.faults.clear()
    refused = [asked for asked in hub.asked(method, pattern) if asked.status == status]
    # Several files may be on their way when the first is refused.
    assert 1 <= len(refused) <= (3 if what in ("preupload", "batch", "sending", "checking") else 1)
    assert hub.waits == []
    convert(source)
    assert shown(hub) == near


def test_a_hub_that_stays_away(hub: LoopbackHub, source: Path, near: dict[str, Any]) -> None:
    hub.fail("PUT", r"/lfs/", 503, times=1000)
    with pytest.raises(RunError, match="what was sent is kept; run the same command again"):
        convert(source)
    hub.faults.clear()
    convert(source)
    assert shown(hub) == near


def test_bytes_that_change_on_the_way_are_seen(
    hub: LoopbackHub, source: Path, near: dict[str, Any]
) -> None:
    name = weights(near)[1]
    hub.garble[name] = 100
    with pytest.raises(OutputError, match=rf"{name}: expected \d+ bytes with sha256"):
        convert(source)
    assert shown(hub) == {}


def test_bytes_that_change_on_this_disk_are_not_sent(
    hub: LoopbackHub, source: Path, near: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = HubUploadTarget.upload
    finished: list[str] = []

    def noting(self: HubUploadTarget, file: Path, sent: SentFile) -> None:
        finished.append(sent.name)
        upload(self, file, sent)

    monkeypatch.setattr(HubUploadTarget, "upload", noting)
    with monkeypatch.context() as patch:
        patch.setattr("qconvert.run.engines.upload_queue.seen_whole", _after_damage)
        with pytest.raises(
            OutputError, match="has other bytes than were computed; it was not sent"
        ):
            convert(source)
    assert finished == []
    convert(source, verify=True)
    assert shown(hub) == near


def _after_damage(path: Path, *given: Any) -> SentFile:
    """A bit flips in the file before it is looked at."""
    with path.open("r+b") as stream:
        stream.seek(-1, 2)
        byte = stream.read(1)
        stream.seek(-1, 2)
        stream.write(bytes([byte[0] ^ 1]))
    return seen_whole(path, *given)


# --- Somebody else at the destination -------------------------------------------------------------


def meanwhile(patch: pytest.MonkeyPatch, method: str, do: Callable[[], None]) -> None:
    """Once, right before an outlet's method."""
    call, done = getattr(HubUploadTarget, method), list[bool]()

    def with_it(self: HubUploadTarget, *given: Any) -> Any:
        if not done:
            done.append(True)
            do()
        return call(self, *given)

    patch.setattr(HubUploadTarget, method, with_it)


def add_file(hub: LoopbackHub, name: str, data: bytes, branch: str = "main") -> None:
    repo = hub.repos[REPO]
    repo.commit(branch, {**repo.tree(branch), name: hub.blob(name, data)}, "somebody's")


def test_what_is_not_of_this_conversion_is_refused(
    hub: LoopbackHub, source: Path, near: dict[str, Any]
) -> None:
    for name in ("config.json", "model-00009-of-00009.safetensors", weights(near)[0]):
        hub.add(REPO, {"README.md": b"# Mine\n", name: b"{}"})
        with pytest.raises(OutputError, match=f"{OUT}: holds {name}, which is not of this"):
            convert(source)
    hub.add(REPO, {"README.md": b"# Mine\n"})
    convert(source)
    assert shown(hub) == near
    with pytest.raises(OutputError, match=r"qconvert\.json is of another conversion"):
        api.run("copy", source, OUT, jobs=1)
    looks = api.plan("copy", source, OUT, jobs=1).dry_run()
    assert "is of another conversion" in looks[0].refusals[0]
    assert shown(hub) == near


def test_a_branch_that_moves_is_followed(
    hub: LoopbackHub, source: Path, near: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the last look at it and the commit, too."""
    meanwhile(monkeypatch, "publish", lambda: add_file(hub, "notes.txt", b"1"))
    meanwhile(monkeypatch, "_commit", lambda: add_file(hub, "more.txt", b"2"))
    convert(source)
    assert shown(hub) == {**near, "notes.txt": b"1", "more.txt": b"2"}
    assert [asked.status for asked in hub.asked("POST", "/commit/main")] == [412, 200]


def test_a_checkpoint_that_appears_meanwhile_is_refused(
    hub: LoopbackHub, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        meanwhile(patch, "publish", lambda: add_file(hub, "config.json", b"{}"))
        with pytest.raises(
            OutputError, match=r"holds config\.json.* was not there when the run began"
        ):
            convert(source)
    assert shown(hub) == {"config.json": b"{}"}


def lose(hub: LoopbackHub, name: str) -> None:
    """Somebody takes a shard off the branch of what is unfinished."""
    side = next(ref for ref in hub.repos[REPO].refs if ref.startswith(UNFINISHED))
    held = dict(hub.repos[REPO].tree(side))
    del held[name]
    hub.repos[REPO].commit(side, held, "somebody's")


def test_a_shard_that_is_lost_once_is_made_again_in_the_same_run(
    hub: LoopbackHub, source: Path, near: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The units that write to it run a second time, and those alone; then all is shown."""
    name = weights(near)[-1]
    settle, looks = StreamWorkspace.missing, list[list[str]]()

    def look(space: StreamWorkspace) -> list[str]:
        if not looks:
            lose(hub, name)
        looks.append(settle(space))
        return looks[-1]

    phases: list[str] = []

    class Told(NoEvents):
        def phase(self, text: str) -> None:
            phases.append(text)

    monkeypatch.setattr(StreamWorkspace, "missing", look)
    convert(source, events=Told())
    assert looks == [[name], []]
    assert phases.count("making again what was sent and is lost") == 1
    assert shown(hub) == near
    assert list(hub.repos[REPO].refs) == ["main"]


def test_shards_that_are_lost_there_are_made_again(
    hub: LoopbackHub, source: Path, near: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody takes one off their branch each time that it is looked at; then a killed run's go."""

    def gone() -> None:
        for ref in [ref for ref in hub.repos[REPO].refs if ref.startswith(UNFINISHED)]:
            del hub.repos[REPO].refs[ref]

    settle = StreamWorkspace.missing
    with monkeypatch.context() as patch:
        patch.setattr(
            StreamWorkspace, "missing",
            lambda s: (lose(hub, weights(near)[0]), settle(s))[1] if s.away else [],  # type: ignore[func-returns-value]
        )  # fmt: skip
        with pytest.raises(RunError, match="lost again and again"):
            convert(source)
    assert shown(hub) == {}
    gone()
    convert(source)
    assert shown(hub) == near


def test_what_only_some_machines_do_is_refused(source: Path) -> None:
    for options in ({"shard": "0/2"}, {"engine": "ray"}):
        with pytest.raises(UsageError, match="is not for an OUT on the Hub"):
            convert(source, **options)
    with pytest.raises(UsageError, match="is not a valid branch name"):
        convert(source, f"{OUT}@a..b")
    with pytest.raises(UsageError, match="--private is of a repo"):
        convert(source, str(source.parent / "out"), private=True)


def test_killed_before_the_other_branch_went(
    hub: LoopbackHub, source: Path, near: dict[str, Any]
) -> None:
    """All is shown, and the same command has only that branch to remove."""
    hub.fail("DELETE", "/branch/", 403)
    with pytest.raises(OutputError, match="status 403"):
        convert(source)
    assert shown(hub) == near
    assert len(hub.repos[REPO].refs) == 2
    hub.log.clear()
    assert convert(source).already_done
    assert list(hub.repos[REPO].refs) == ["main"]
    assert hub.asked("PUT") == hub.asked("POST") == []
