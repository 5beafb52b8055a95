"""Results of several folders that go to the Hub while they are made: both sides of a pair, stages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import run_cli, tree
from hub_client import hub_and_client
from loopback_hub import LoopbackHub
from models import qwen3_moe

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the client

CPU, GPU = "me/model-cpu", "me/model-gpu"
PAIR = (
    "--cpu", "int4", "--numa", "1", "--gpu", "w4a16", "--jobs", "1", "--max-shard-size", "64KiB",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3_moe(layers=2).write(tmp_path_factory.mktemp("pairs") / "source")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    with hub_and_client(tmp_path / "home") as (server, _):
        yield server


def shown(hub: LoopbackHub, repo: str) -> dict[str, bytes]:
    found = hub.repos[repo].tree()
    return {path: blob.data for path, blob in found.items() if path != ".gitattributes"}


def weights(files: dict[str, Any]) -> dict[str, Any]:
    return {name: data for name, data in files.items() if name.endswith(".safetensors")}


def test_both_sides_of_a_pair(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    near = run_cli(
        "kt", source, "--cpu-out", tmp_path / "cpu", "--gpu-out", tmp_path / "gpu", *PAIR
    )
    assert near.code == 0, near.err
    words = ("kt", source, "--cpu-out", f"hf://{CPU}", "--gpu-out", f"hf://{GPU}", *PAIR)
    made = run_cli(*words)
    assert made.code == 0, made.err
    for repo, folder in ((CPU, "cpu"), (GPU, "gpu")):
        wanted, found = tree(tmp_path / folder), shown(hub, repo)
        assert weights(found) == weights(wanted)
        assert len(weights(found)) > 1
        assert found.keys() == wanted.keys()
        assert list(hub.repos[repo].refs) == ["main"]
    assert f"https://huggingface.co/{GPU}" in shown(hub, CPU)["README.md"].decode()
    assert f"https://huggingface.co/{CPU}" in shown(hub, GPU)["README.md"].decode()
    assert f"hf://{CPU}" in made.out
    for repo in (CPU, GPU):
        place = tmp_path / repo
        place.mkdir(parents=True)
        for name, data in shown(hub, repo).items():
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_bytes(data)
        checked = run_cli("validate", place, "--level", "full")
        assert checked.code == 0, checked.out
    hub.log.clear()
    again = run_cli(*words)
    assert "already holds this result" in again.out
    assert {asked.method for asked in hub.log} == {"GET"}


def test_a_pair_goes_on_where_one_side_is_shown(
    hub: LoopbackHub, source: Path, tmp_path: Path
) -> None:
    words = ("kt", source, "--cpu-out", f"hf://{CPU}", "--gpu-out", f"hf://{GPU}", *PAIR)
    hub.fail("POST", f"{CPU}/commit/main", 403, times=1)
    refused = run_cli(*words)
    assert refused.code == 1
    assert shown(hub, CPU) == {}
    assert weights(shown(hub, GPU))
    hub.log.clear()
    done = run_cli(*words)
    assert done.code == 0, done.err
    assert weights(shown(hub, CPU))
    sent = [asked for asked in hub.asked("PUT") if asked.received]
    sizes = {len(data) for repo in (CPU, GPU) for data in weights(shown(hub, repo)).values()}
    assert not {asked.received for asked in sent} & sizes, "no weights are sent again"


def test_what_does_not_go_together(source: Path, tmp_path: Path) -> None:
    for cpu, gpu, says in (
        (f"hf://{CPU}", str(tmp_path / "gpu"), "name two of a kind"),
        (f"hf://{CPU}", f"hf://{CPU}", "is named for both sides"),
    ):
        refused = run_cli("kt", source, "--cpu-out", cpu, "--gpu-out", gpu, *PAIR)
        assert refused.code == 2, refused.err
        assert says in refused.err


def test_a_repo_for_each_stage(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    near = run_cli("split", source, tmp_path / "stages", "--pp", "1,1", "--copy", "--jobs", "1")
    assert near.code == 0, near.err
    words = ("split", source, "hf://me/split", "--pp", "1,1", "--jobs", "1")
    made = run_cli(*words)
    assert made.code == 0, made.err
    names = sorted(path.name for path in (tmp_path / "stages").iterdir())
    assert sorted(hub.repos) == [f"me/split-{name}" for name in names]
    for name in names:
        found = shown(hub, f"me/split-{name}")
        assert weights(found) == weights(tree(tmp_path / "stages" / name))
        card = found["README.md"].decode()
        assert all(f"https://huggingface.co/me/split-{other}" in card for other in names)
    assert "already holds this result" in run_cli(*words).out
    refused = run_cli(*words, "--validate", "headers")
    assert (refused.code, "validated each by itself" in refused.err) == (2, True)
