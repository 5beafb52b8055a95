"""Repos on the Hub as sources, read by ranges: the bytes of the local way, each fetched once, whatever
the network and the branch do."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from checkpoints import bf16_moe, run_cli, shard_name, tree, wide_moe
from hub_client import FIRST_READ, files_in, hub_and_client, on_disk, size_of_samples
from loopback_hub import TOKEN, LoopbackHub, _Handler

from qconvert import api
from qconvert.checkpoint.hub_store import HubStore
from qconvert.checkpoint.store import mirrored_repo, source_store
from qconvert.core.errors import (
    CheckpointError,
    OutputError,
    PlanError,
    QConvertError,
    RunError,
    UsageError,
)
from qconvert.run.work.options import Until

REPO = "org/model"
WIDE = 65_536


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of about 1 MiB."""
    return wide_moe(WIDE).write(tmp_path_factory.mktemp("store") / "model")


@pytest.fixture(scope="module")
def near(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, object]:
    """What the conversion of the folder leaves."""
    out = tmp_path_factory.mktemp("near") / "out"
    api.run("dequant-fp8", folder, out, jobs=1, base_model=REPO)
    return tree(out)


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with hub_and_client(tmp_path / "home") as (server, _):
        server.add(REPO, files_in(folder))
        yield server


def overhead(folder: Path) -> int:
    """Reads of shards beside those that a conversion needs."""
    return size_of_samples(folder) + FIRST_READ * len(list(folder.glob("*.safetensors")))


def fetched(hub: LoopbackHub) -> int:
    """Bytes of weights that the server sent."""
    return sum(asked.sent for asked in hub.asked("GET", f"/cdn/({'|'.join(marks(hub))})"))


def marks(hub: LoopbackHub) -> list[str]:
    """Of the shards of all commits."""
    return [
        str(blob.lfs)
        for repo in hub.repos.values()
        for commit in repo.commits.values()
        for path, blob in commit.items()
        if path.endswith(".safetensors")
    ]


def dequant(where: str | Path, out: Path) -> api.Result:
    return api.run("dequant-fp8", where, out, jobs=1)


def moved(hub: LoopbackHub, ref: str = "main") -> tuple[str, str]:
    """The branch goes on to a commit with another weight. The commits before and after."""
    repo = hub.repos[REPO]
    before, name = repo.refs[ref], shard_name(1)
    data = bytearray(repo.tree(ref)[name].data)
    data[-1] ^= 1
    return before, repo.commit(ref, {**repo.tree(ref), name: hub.blob(name, bytes(data))}, "moved")


# --- the same bytes, once -------------------------------------------------------------------------


@pytest.mark.parametrize("name", [REPO, f"hf://{REPO}@main"])
def test_a_conversion_by_id_is_that_of_the_folder(
    hub: LoopbackHub, folder: Path, near: object, tmp_path: Path, name: str
) -> None:
    done = run_cli("run", "dequant-fp8", name, tmp_path / "out", "--jobs", "1")
    assert done.code == 0, done.err
    commit = hub.repos[REPO].refs["main"]
    assert f"source  hf://{REPO}@{commit}: 2 files" in done.err
    assert tree(tmp_path / "out") == near
    weights = api.open_checkpoint(folder).nbytes
    assert weights <= fetched(hub) <= weights + overhead(folder)
    read = Counter(
        (asked.path.partition("?")[0], byte)
        for asked in hub.asked("GET", "/cdn/")
        if asked.sent > FIRST_READ
        for start, stop in [spans(str(asked.range))]
        for byte in range(start, stop, 1 << 10)
    )
    assert max(read.values()) == 1, "no byte of a tensor is fetched twice"


def spans(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"bytes=(\d+)-(\d+)", text)
    assert found is not None
    return int(found[1]), int(found[2]) + 1


def test_a_range_takes_one_request(hub: LoopbackHub, tmp_path: Path) -> None:
    """The link that a file redirects to is used again; the token stays with the Hub."""
    dequant(REPO, tmp_path / "out")
    shards = 2
    assert len(hub.asked("GET", "/resolve/.*safetensors$")) <= 8 * shards, (
        "threads that begin at once"
    )
    assert {asked.token for asked in hub.asked("GET", "/cdn/")} == {None}
    assert {asked.token for asked in hub.asked("GET", "/resolve/|/api/")} == {TOKEN}
    # A commit that was opened before is listed, and no file of it is fetched again.
    hub.log.clear()
    api.open_checkpoint(REPO)
    assert [asked.path.partition("?")[0] for asked in hub.log] == [f"/api/models/{REPO}"]


def test_every_way_to_read(hub: LoopbackHub, folder: Path, near: object, tmp_path: Path) -> None:
    made = dequant(REPO, tmp_path / "out").folder
    assert not api.diff(REPO, folder)
    assert api.diff(f"hf://{REPO}", made)
    report = api.validate(made, REPO, level="full")
    assert report.findings == []
    assert "every weight is the source's within its format's rounding" in report.proved
    assert api.validate(made, f"hf://{REPO}", level="sample").errors == 0
    hub.add("me/made", files_in(made))
    there = api.validate("me/made", REPO, level="full")
    assert there.findings == []
    assert there.about["folder"].startswith("hf://me/made@"), there.about
    assert there.proved == report.proved


def test_a_finding_names_the_repo(hub: LoopbackHub, folder: Path, tmp_path: Path) -> None:
    files = files_in(dequant(folder, tmp_path / "out").folder)
    shard = next(name for name in files if name.endswith(".safetensors"))
    flipped = bytearray(files[shard])
    flipped[-1] ^= 1
    hub.add("me/made", files | {shard: bytes(flipped)})
    result = run_cli("validate", "me/made", "--against", folder, "--level", "full")
    assert result.code == 3
    assert "QC022" in result.out
    assert str(tmp_path / "cache") not in result.out + result.err


# --- the client's cache ---------------------------------------------------------------------------


def test_what_the_cache_has_is_read_there(
    hub: LoopbackHub, folder: Path, near: object, tmp_path: Path
) -> None:
    from huggingface_hub import hf_hub_download

    hf_hub_download(REPO, shard_name(1))
    hf_hub_download(REPO, "config.json")
    hub.log.clear()
    dequant(REPO, tmp_path / "out")
    assert tree(tmp_path / "out") == near
    assert hub.asked("GET", f"/resolve/.*/({shard_name(1)}|config.json)") == []
    size = (folder / shard_name(2)).stat().st_size
    assert fetched(hub) <= size + overhead(folder)


def test_a_finished_snapshot_needs_no_hub(hub: LoopbackHub, near: object, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download(REPO)
    moved(hub)
    hub.log.clear()
    dequant(REPO, tmp_path / "out")
    assert tree(tmp_path / "out") == near
    assert hub.log == []


def test_offline(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import hf_hub_download

    hf_hub_download(REPO, "config.json")
    hub.log.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="safetensors"):
        dequant(REPO, tmp_path / "out")
    with pytest.raises(CheckpointError, match="download it first: hf download org/other"):
        dequant("org/other", tmp_path / "out")
    assert hub.log == []


# --- which commit ---------------------------------------------------------------------------------


def test_a_branch_that_moves_while_it_is_read(
    hub: LoopbackHub, near: object, tmp_path: Path
) -> None:
    """What the branch stood for when the command began is read to the end, and validated against."""

    def move(method: str, path: str) -> None:
        with hub.lock:
            if "/cdn/" in path and len(hub.repos[REPO].commits) == 1:
                moved(hub)

    hub.watch = move
    words = ("run", "dequant-fp8", REPO, tmp_path / "out", "--jobs", "1", "--validate", "full")
    done = run_cli(*words)
    assert done.code == 0, done.out + done.err
    assert len(hub.repos[REPO].commits) == 2
    assert tree(tmp_path / "out") == near
    assert len(hub.asked("GET", f"/api/models/{REPO}$")) == 1


def stopped(hub: LoopbackHub, out: Path) -> None:
    """A run whose time was over when its first unit was done, of the first shard."""
    over = Until(1.0, 0.0, now=lambda: 5.0)
    done = api.run("dequant-fp8", REPO, out, jobs=1, until=over)
    assert done.left_units
    hub.log.clear()


def test_a_resumed_run_fetches_what_is_left(
    hub: LoopbackHub, folder: Path, near: object, tmp_path: Path
) -> None:
    stopped(hub, tmp_path / "out")
    assert dequant(REPO, tmp_path / "out").resumed_units
    assert tree(tmp_path / "out") == near
    mark = hub.repos[REPO].tree()[shard_name(1)].lfs
    sizes = [asked.sent for asked in hub.asked("GET", f"/cdn/{mark}")]
    assert sum(sizes) < WIDE * 16 // 4, "of the tensor that was done, samples alone"


def test_a_branch_that_moves_between_two_runs(
    hub: LoopbackHub, near: object, tmp_path: Path
) -> None:
    """Another source is refused, with both commits; the first one goes on."""
    stopped(hub, tmp_path / "out")
    before, after = moved(hub)
    refused = run_cli("run", "dequant-fp8", REPO, tmp_path / "out", "--jobs", "1")
    assert refused.code == 1
    assert f"it was read from hf://{REPO}@{before}, and is hf://{REPO}@{after} now" in refused.err
    assert f"name the source {REPO}@{before} to go on" in refused.err
    assert dequant(f"{REPO}@{before}", tmp_path / "out").resumed_units
    assert tree(tmp_path / "out") == near


def test_a_branch_that_moves_to_the_same_weights(
    hub: LoopbackHub, near: object, tmp_path: Path
) -> None:
    """What the result is made of is the same: the run goes on."""
    stopped(hub, tmp_path / "out")
    repo = hub.repos[REPO]
    repo.commit("main", {**repo.tree(), ".gitattributes": hub.blob("", b"*.bin\n")}, "no weights")
    assert dequant(REPO, tmp_path / "out").resumed_units
    assert tree(tmp_path / "out") == near


# --- the network ----------------------------------------------------------------------------------


def test_faults_are_survived(
    hub: LoopbackHub, near: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qconvert.client.ranges.TIMEOUT", 0.5)
    hub.fail("GET", f"/api/models/{REPO}$", 503)
    hub.fail("GET", "/tree/", 429, headers={"Retry-After": "7"})
    hub.fail("GET", "/resolve/", 503, times=2)
    hub.cut("GET", "/resolve/", times=2)
    hub.cut("GET", "/cdn/", times=2)
    hub.cut_answer("/cdn/", 100, times=3)
    hub.fail("GET", "/cdn/", 500, times=2)
    hub.stall("/cdn/", 1000, 1.0, times=2)
    dequant(REPO, tmp_path / "out")
    assert tree(tmp_path / "out") == near
    assert [fault.times for fault in hub.faults] == [0] * 8
    assert 7 in hub.waits


def test_links_that_expire(hub: LoopbackHub, near: object, tmp_path: Path) -> None:
    hub.link_uses = 3
    dequant(REPO, tmp_path / "out")
    assert tree(tmp_path / "out") == near
    assert {asked.status for asked in hub.asked("GET", "/cdn/")} == {206, 403}


def test_links_for_one_range(hub: LoopbackHub, near: object, tmp_path: Path) -> None:
    """They are not kept, once that is known."""
    hub.one_range_links = True
    dequant(REPO, tmp_path / "out")
    assert tree(tmp_path / "out") == near
    refused = [asked for asked in hub.asked("GET", "/cdn/") if asked.status == 403]
    assert 0 < len(refused) < 40 < len(hub.asked("GET", "/cdn/"))


def test_a_server_without_ranges(hub: LoopbackHub, tmp_path: Path) -> None:
    """A whole file in answer to a range is refused, not taken for it."""
    hub.ranges = False
    with pytest.raises(CheckpointError, match="found the whole file: the server does not answer"):
        dequant(REPO, tmp_path / "out")
    assert hub.waits == []
    assert fetched(hub) == 0 or not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "gated repo log in with `hf auth login`, or set HF_TOKEN"),
        (403, "the token has no access"),
        (404, "check its name"),
    ],
)
@pytest.mark.parametrize("where", [f"/api/models/{REPO}$", "/tree/", "/resolve/"])
def test_a_refusal_ends_it_at_once(
    hub: LoopbackHub, tmp_path: Path, status: int, said: str, where: str
) -> None:
    hub.fail("GET", where, status, times=1000)
    result = run_cli("run", "dequant-fp8", REPO, tmp_path / "out", "--jobs", "1")
    assert (result.code, result.err.count("\n")) == (1, 1), result.err
    assert f"status {status}" in result.err
    assert said in result.err
    assert len([a for a in hub.log if a.status == status]) == 1, "it is not tried again"
    assert hub.waits == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("status", "error", "said", "waits"),
    [
        (503, RunError, r"status 503.*, 6 times; run the same command again later", 5),
        (403, CheckpointError, r"status 403.*the token has no access", 0),
    ],
)
def test_a_shard_that_cannot_be_had(
    hub: LoopbackHub,
    near: object,
    tmp_path: Path,
    status: int,
    error: type[QConvertError],
    said: str,
    waits: int,
) -> None:
    """A Hub that fails for good, or a gate that was closed meanwhile: the same command goes on later."""
    planned = api.plan("dequant-fp8", REPO, tmp_path / "out", jobs=1)
    assert planned.source.sample_digest, "the samples are read before the fault"
    mark = hub.repos[REPO].tree()[shard_name(2)].lfs
    hub.fail("GET", f"/cdn/{mark}|/resolve/.*/{shard_name(2)}", status, times=1000)
    with pytest.raises(error, match=said):
        api.carry_out(planned)
    assert (len(hub.waits) >= waits) if waits else hub.waits == []
    hub.faults.clear()
    dequant(REPO, tmp_path / "out")
    assert tree(tmp_path / "out") == near


def test_no_hub_at_all(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.server.shutdown()
    hub.server.server_close()
    result = run_cli("run", "dequant-fp8", REPO, tmp_path / "out")
    assert result.code == 1
    assert "the Hub cannot be asked (offline, or no answer)" in result.err
    assert hub.waits == []


# --- the disk -------------------------------------------------------------------------------------


def test_a_disk_budget(hub: LoopbackHub, folder: Path, near: object, tmp_path: Path) -> None:
    """What is too small is refused with the smallest that works, which does."""
    words = ("run", "dequant-fp8", REPO, tmp_path / "out", "--jobs", "1", "--disk-budget")
    refused = run_cli(*words, "1MiB")
    assert refused.code == 1
    found = re.search(
        r"--disk-budget 1 MiB: the result takes up to .*; give --disk-budget (\d+MiB)", refused.err
    )
    assert found is not None, refused.err
    assert not (tmp_path / "out").exists()
    size = int(found[1].removesuffix("MiB"))
    assert run_cli(*words, f"{size - 1}MiB").code == 1
    taken: list[int] = []  # at each request, headers and what the client keeps included
    hub.watch = lambda method, path: taken.append(on_disk(tmp_path))
    done = run_cli(*words, found[1])
    assert done.code == 0, done.err
    assert 0 < max(taken) <= size << 20
    assert f" disk of --disk-budget {size} MiB" in done.err
    assert tree(tmp_path / "out") == near
    assert sum(len(data) for data in files_in(tmp_path / "out").values()) <= size << 20


def test_a_disk_budget_counts_all_folders(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"the result, 2 folders, takes up to"):
        api.plan_stages("copy", folder, tmp_path / "out", "1,1", link=False, disk_budget="1MiB")
    planned = run_cli("plan", "copy", folder, "--disk-budget", "1GB", "--json")
    assert json.loads(planned.out)["disk_budget"] == 10**9


def test_only_headers_lie_on_disk(hub: LoopbackHub, folder: Path, tmp_path: Path) -> None:
    root = api.open_checkpoint(REPO).root
    assert mirrored_repo(root) == REPO
    assert mirrored_repo(tmp_path) is None
    shards = list(root.glob("*.safetensors"))
    assert sum(file.stat().st_blocks * 512 for file in shards) < 100_000
    assert sum(file.stat().st_size for file in shards) > 2_000_000


# --- names ----------------------------------------------------------------------------------------


def test_a_store_of_a_commit(hub: LoopbackHub) -> None:
    commit = hub.repos[REPO].refs["main"]
    store = source_store(f"hf://{REPO}@{commit}")
    assert isinstance(store, HubStore)
    assert store.url == f"hf://{REPO}@{commit}"
    assert {each.name for each in store.listed()} == set(hub.repos[REPO].tree())
    for url in (f"hf://{REPO}", f"hf://{REPO}@main"):
        with pytest.raises(UsageError, match="expected hf://ORG/NAME@COMMIT"):
            source_store(url)


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "a/../../evil", "a\\evil", "a//evil"])
def test_a_tree_that_leaves_the_folder(
    hub: LoopbackHub, folder: Path, tmp_path: Path, path: str
) -> None:
    hub.add("org/evil", files_in(folder) | {path: b"x"})
    with pytest.raises(CheckpointError, match="is no file inside the folder"):
        dequant("org/evil", tmp_path / "out")
    assert hub.asked("GET", "/resolve/") == []


def test_redirects_that_lead_nowhere(hub: LoopbackHub, tmp_path: Path) -> None:
    """A circle is refused at once; what is no URL is an answer that was garbled."""
    shard = f"/{REPO}/resolve/{hub.repos[REPO].refs['main']}/{shard_name(1)}"
    hub.redirect = hub.url + shard
    with pytest.raises(CheckpointError, match="after at most 5 redirects"):
        dequant(REPO, tmp_path / "out")
    assert hub.waits == []
    hub.redirect = "http://localhost:port/x"
    with pytest.raises(RunError, match=r"Invalid URL in location header.*, 6 times"):
        dequant(REPO, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "value"),
    [("sha", "../../../evil"), ("sha", "main"), ("size", -1), ("size", "12"), ("oid", "../x")],
)
def test_answers_are_not_trusted(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    """Commits are names of folders, sizes those of files."""
    answer = _Handler._answer

    def wrong(self: _Handler, status: int, body: Any = b"", headers: Any = None) -> None:
        if isinstance(body, dict) and name in body:
            body = body | {name: value}
        if isinstance(body, list):
            body = [entry | {name: value} if "lfs" not in entry else entry for entry in body]
        answer(self, status, body, headers)

    monkeypatch.setattr(_Handler, "_answer", wrong)
    with pytest.raises(CheckpointError, match="check HF_ENDPOINT"):
        dequant(REPO, tmp_path / "out")
    assert not list(tmp_path.rglob("evil*"))


def test_a_source_that_is_the_output(hub: LoopbackHub, tmp_path: Path) -> None:
    root = api.open_checkpoint(REPO).root
    with pytest.raises(OutputError, match="must lie apart from the source"):
        dequant(REPO, root / "out")


def test_a_repo_is_not_written_to(hub: LoopbackHub, tmp_path: Path) -> None:
    """Not the mirror in its place either."""
    before = tree(api.open_checkpoint(REPO).root)
    with pytest.raises(UsageError, match=f"hf://{REPO}@.*: is on the Hub, which is not written to"):
        api.evaluate(REPO, REPO, tmp_path / "ids.jsonl", write=True)
    with pytest.raises(UsageError, match="name a folder for the changed files"):
        api.repair(REPO)
    assert tree(api.open_checkpoint(REPO).root) == before


def test_stages_of_a_repo(hub: LoopbackHub, tmp_path: Path) -> None:
    source = bf16_moe().write(tmp_path / "source")
    api.carry_out(api.plan_stages("copy", source, tmp_path / "stages", "1,1", link=False, jobs=1))
    hub.add("me/stages", files_in(tmp_path / "stages"))
    assert not api.diff("me/stages", source)
    done = run_cli("join", "me/stages", tmp_path / "joined", "--jobs", "1")
    assert done.code == 0, done.err
    assert not api.diff(tmp_path / "joined", source)
