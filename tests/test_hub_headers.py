"""Repos on the Hub as sources: by headers where nothing more is wanted, else from the client's cache."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import (
    bf16_moe,
    convert,
    edit_json,
    run_cli,
    tensor,
    wide_moe,
)
from hub_client import FIRST_READ, files_in, hub_and_client
from loopback_hub import LoopbackHub

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.hub_cache import Repo, cached_id, parse_repo
from qconvert.client.ranges import ranges_of
from qconvert.core.errors import CheckpointError, UsageError
from qconvert.hub.headers import place_of

REPO = "org/model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of about 1 MiB."""
    return wide_moe(65_536).write(tmp_path_factory.mktemp("headers") / "model")


@pytest.fixture
def hub(folder: Path, tmp_path: Path) -> Iterator[LoopbackHub]:
    with hub_and_client(tmp_path / "home") as (server, _):
        server.add(REPO, files_in(folder))
        yield server


def header_bytes(raw: bytes) -> int:
    return int(8 + struct.unpack("<Q", raw[:8])[0])


def fetched(hub: LoopbackHub) -> int:
    """Bytes of files that the server sent."""
    return sum(a.sent for a in hub.asked("GET", "/resolve/|/cdn/"))


# --- What is fetched ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [REPO, f"hf://{REPO}@main"])
def test_validate_fetches_headers_only(hub: LoopbackHub, folder: Path, name: str) -> None:
    here = run_cli("validate", folder)
    there = run_cli("validate", name, "--level", "headers")
    assert (there.code, there.out) == (here.code, here.out) == (0, here.out)
    files = files_in(folder)
    shards = {n: raw for n, raw in files.items() if n.endswith(".safetensors")}
    small = sum(len(raw) for n, raw in files.items() if n not in shards)
    assert sum(map(len, shards.values())) > 2_000_000
    for raw in shards.values():
        assert header_bytes(raw) < FIRST_READ
    assert fetched(hub) == small + len(shards) * FIRST_READ
    commit = hub.repos[REPO].refs["main"][:12]
    size = f"{fetched(hub) / 1000:.1f} KB"
    said = f"{REPO}@{commit}: {size} fetched in {len(files)} requests\n"
    assert there.err == said


def test_inspect_says_the_same_of_both(hub: LoopbackHub, folder: Path) -> None:
    name = f"{REPO}@{hub.repos[REPO].refs['main'][:12]}"
    for more in ([], ["--json"], ["--tensors", "*.q_proj.*"]):
        here, there = run_cli("inspect", folder, *more), run_cli("inspect", REPO, *more)
        assert there.code == here.code == 0
        assert there.out == here.out.replace(str(folder), name)
    assert fetched(hub) < 200_000


def test_a_long_header_takes_a_second_request(hub: LoopbackHub, tmp_path: Path) -> None:
    model = bf16_moe()
    model.tensors |= {f"model.layers.0.extra.{i}.weight": tensor("BF16", 4) for i in range(900)}
    files = files_in(model.write(tmp_path / "long", shards=1))
    raw = files["model.safetensors"]
    assert header_bytes(raw) > 3 * FIRST_READ
    hub.add("org/long", files)
    assert run_cli("inspect", "org/long").code == 0
    asked = [a.range for a in hub.asked("GET", "/cdn/")]
    assert asked == [
        f"bytes=0-{FIRST_READ - 1}", f"bytes={FIRST_READ}-{header_bytes(raw) - 1}",
    ]  # fmt: skip
    assert sum(a.sent for a in hub.asked("GET", "/cdn/")) == header_bytes(raw)


def test_the_folder_is_sparse_and_goes_again(hub: LoopbackHub, folder: Path) -> None:
    with place_of(REPO) as place:
        made = Path(place.folder)
        for name, raw in files_in(folder).items():
            status = (made / name).stat()
            assert status.st_size == len(raw)
            if name.endswith(".safetensors"):
                assert status.st_blocks * 512 < len(raw) // 4
                assert (made / name).read_bytes()[: header_bytes(raw)] == raw[: header_bytes(raw)]
            else:
                assert (made / name).read_bytes() == raw
    assert not made.exists()


def test_findings_speak_of_the_repo(hub: LoopbackHub, folder: Path, tmp_path: Path) -> None:
    files = files_in(folder)
    shard = next(name for name in files if name.endswith(".safetensors"))
    hub.add("org/short", files | {shard: files[shard][:-4]})
    result = run_cli("validate", "org/short", "--json")
    assert result.code == 3
    found = json.loads(result.out)
    name = f"org/short@{hub.repos['org/short'].refs['main'][:12]}"
    assert [f["rule"] for f in found["findings"]] == ["QC001"]
    assert found["findings"][0]["where"] == name
    assert f"{name}/{shard}: is truncated" in found["findings"][0]["message"]
    assert "qconvert-headers" not in result.out + result.err
    result = run_cli("inspect", "org/short")
    assert result.code == 1
    assert f"{name}/{shard}: is truncated" in result.err
    assert "qconvert-headers" not in result.err


def test_a_made_folder_is_held_against_its_source(
    hub: LoopbackHub, folder: Path, tmp_path: Path
) -> None:
    convert("dequant", folder, tmp_path / "out")
    hub.add("me/out", files_in(tmp_path / "out"))
    result = run_cli("validate", "me/out", "--against", folder)
    assert result.code == 0, result.out
    assert "proved: every source byte was used, or dropped by a named rule" in result.out
    edit_json(tmp_path / "out" / "config.json", lambda c: c.update(num_experts_per_tok=7))
    hub.add("me/out", files_in(tmp_path / "out"))
    assert run_cli("validate", "me/out", "--against", folder).code == 3
    assert run_cli("validate", tmp_path / "out", "--against", REPO).code == 3
    assert fetched(hub) < 500_000, "no weights of either side"


def test_weights_of_other_kinds_are_not_fetched(hub: LoopbackHub, folder: Path) -> None:
    pickle = bytes(300_000)
    hub.add("org/both", files_in(folder) | {"pytorch_model.bin": pickle})
    result = run_cli("validate", "org/both")
    assert "QC056 pytorch_model.bin" in result.out
    assert hub.asked("GET", "pytorch_model.bin") == []


def test_a_file_too_large_to_fetch_is_named(
    hub: LoopbackHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("checkpoint.mirror", "hub.headers"):
        monkeypatch.setattr(f"qconvert.{module}.MOST_WHOLE", 1 << 20)
    hub.add("org/video", files_in(folder) | {"demo.mp4": bytes((1 << 20) + 1)})
    result = run_cli("validate", "org/video", "-v")
    assert result.code == 0
    assert "not checked: demo.mp4 (larger than 1 MiB, not fetched)" in result.out
    assert hub.asked("GET", "demo.mp4") == []


# --- Which commit, and from where -----------------------------------------------------------------


def test_a_revision(hub: LoopbackHub, folder: Path) -> None:
    repo = hub.repos[REPO]
    old = repo.refs["main"]
    config = json.loads((folder / "config.json").read_bytes()) | {"model_type": "new_moe"}
    new = dict(repo.tree()) | {"config.json": hub.blob("config.json", json.dumps(config).encode())}
    repo.commit("feature/x", new, "another class")
    repo.commit("refs/pr/3", new, "the same")
    for revision in ("feature/x", "refs/pr/3", repo.refs["feature/x"]):
        assert run_cli("inspect", f"{REPO}@{revision}").out.startswith("new_moe (family generic)")
    assert run_cli("inspect", f"{REPO}@{old}").out.startswith("qwen3_moe: ")
    gone = run_cli("inspect", f"{REPO}@gone")
    assert gone.code == 1
    assert "404" in gone.err


def test_what_is_cached_is_not_fetched_again(
    hub: LoopbackHub, folder: Path, tmp_path: Path
) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download(REPO)
    hub.log.clear()
    assert run_cli("inspect", REPO).code == 0
    assert fetched(hub) == 0
    assert [a.path.partition("?")[0].split("/")[-2] for a in hub.log] == ["org", "tree"]
    # With weights wanted, or without a Hub, the snapshot itself is opened.
    convert("dequant", Path(REPO), tmp_path / "out")
    sampled = run_cli("validate", tmp_path / "out", "--against", f"hf://{REPO}", "--level", "full")
    assert sampled.code == 0, sampled.out
    assert f"against: hf://{REPO}" in sampled.out or "against the source" in sampled.out
    hub.server.server_close()
    hub.server.shutdown()
    offline = run_cli("inspect", REPO)
    assert (offline.code, offline.err) == (0, "")


def test_offline_the_cache_is_asked(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for words in (("inspect", REPO), ("validate", REPO), ("dequant", f"hf://{REPO}@v1", "x")):
        result = run_cli(*words)
        assert result.code == 1
        assert "download it first: hf download org/model" in result.err
    assert "hf download org/model --revision v1" in result.err
    assert hub.log == []


def test_a_folder_goes_before_a_repo_of_its_name(
    hub: LoopbackHub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bf16_moe().write(tmp_path / "org" / "model")
    assert "BF16" in run_cli("inspect", REPO).out
    assert "F8_E4M3" not in run_cli("inspect", REPO).out
    assert hub.log == []
    assert "F8_E4M3" in run_cli("inspect", f"hf://{REPO}").out


# --- What goes wrong ------------------------------------------------------------------------------


def test_a_repo_that_is_not_there(hub: LoopbackHub) -> None:
    for command in ("inspect", "validate"):
        result = run_cli(command, "org/gone")
        assert result.code == 1
        assert "org/gone is neither a folder nor a repo that can be read" in result.err
        assert result.err.count("\n") == 1
    assert hub.waits == []


def test_a_server_without_ranges(hub: LoopbackHub, folder: Path) -> None:
    """What was asked for is taken, and no more."""
    hub.ranges = False
    with place_of(REPO) as place:
        assert place.nbytes < 400_000 + sum(
            len(raw) for name, raw in files_in(folder).items() if not name.endswith("safetensors")
        ) + 2 * (1 << 20)
        assert Checkpoint.open(place.folder).nbytes == Checkpoint.open(folder).nbytes


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "too short"),
        (b"abc", "too short"),
        (struct.pack("<Q", 1 << 60) + bytes(50), "claims a header"),
        (struct.pack("<Q", 4000) + bytes(50), "is truncated inside its header"),
        (b"version https://git-lfs", "claims a header"),
    ],
)
def test_shards_that_are_none(hub: LoopbackHub, folder: Path, raw: bytes, said: str) -> None:
    config = (folder / "config.json").read_bytes()
    hub.add("org/broken", {"config.json": config, "model.safetensors": raw})
    result = run_cli("inspect", "org/broken")
    assert result.code == 1
    assert said in result.err


def test_a_listing_that_lies_about_a_size(hub: LoopbackHub, folder: Path) -> None:
    reader = ranges_of(hub.url, REPO, hub.repos[REPO].refs["main"])
    size = (folder / "config.json").stat().st_size
    with pytest.raises(CheckpointError, match="shorter than the Hub lists"):
        reader.read("config.json", 0, size + 1)


# --- Names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "repo"),
    [
        ("org/model", Repo("org/model")),
        ("org/model@main", Repo("org/model", "main")),
        ("hf://org/model", Repo("org/model")),
        ("hf://models/org/model", Repo("org/model")),
        ("hf://org/model@feature/x", Repo("org/model", "feature/x")),
        ("hf://org/model@refs/pr/4", Repo("org/model", "refs/pr/4")),
        ("org/model@refs/pr/4", Repo("org/model", "refs/pr/4")),
        ("org/model.v1_x-y", Repo("org/model.v1_x-y")),
        ("model", None),
        ("a/b/c", None),
        ("../model", None),
        ("./model", None),
        ("/data/model", None),
        ("org/mo--del", None),
        ("org/model@", None),
        ("datasets/model", None),
        ("", None),
    ],
)
def test_what_names_a_repo(text: str, repo: Repo | None) -> None:
    assert parse_repo(text) == repo


@pytest.mark.parametrize(
    "text", ["hf://", "hf://model", "hf://datasets/a/b", "hf://a/b/file.txt", "hf://a/b@"]
)
def test_what_says_it_is_a_repo_and_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="hf://ORG/NAME"):
        parse_repo(text)


def test_the_id_of_a_snapshot() -> None:
    assert cached_id(Path("/h/hub/models--org--a-b/snapshots/0123")) == "org/a-b"
    for other in ("/h/models--org--a/other/0", "/h/datasets--o--a/snapshots/0", "/data/org/a"):
        assert cached_id(Path(other)) is None
