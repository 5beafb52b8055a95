"""`qconvert upload` with the real client against a Hub on the loopback: what is sent, what is waited
for, what ends it, and that a difference is noticed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from checkpoints import (
    Result,
    bf16_moe,
    convert,
    copied,
    edit_json,
    run_cli,
    tensor,
    tree,
    wide_moe,
    write_shard,
)
from hub_client import files_in, hub_and_client
from loaders.published import published
from loopback_hub import TOKEN, LoopbackHub, loopback_hub

from qconvert.client.retries import TRIES, fault_of, library

# Of the client, on its way to httpx.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = "me/model-bf16"
BASE = "org/model-fp8"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversion's folder of three shards, one of 160 KiB and more."""
    folder = tmp_path_factory.mktemp("hub")
    model = wide_moe(10_240)
    model.side_files["assets/notes.txt"] = b"a file in a folder\n"
    source = model.write(folder / "source")
    convert("dequant", source, folder / "out", "--max-shard-size", "200KB")
    return folder / "out"


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return copied(made, tmp_path / "out")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    with hub_and_client(tmp_path / "home") as (server, _):
        yield server


def upload(folder: Path, *more: str, repo: str = REPO) -> Result:
    return run_cli("upload", folder, repo, "--base-model", BASE, "--level", "headers", *more)


def refused(folder: Path, said: str, *more: str, code: int = 1) -> Result:
    """An upload that must end with this code and these words."""
    result = upload(folder, *more)
    assert result.code == code, result.err
    assert said in result.err
    assert "Traceback" not in result.err
    return result


def uploaded(folder: Path, *more: str) -> dict[str, Any]:
    """An upload that must succeed, as its JSON."""
    result = upload(folder, "--json", *more)
    assert result.code == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


def writes(hub: LoopbackHub) -> list[str]:
    """Requests that could change anything, or carry a file."""
    kinds = ("PUT", "POST")
    return [f"{a.method} {a.path}" for a in hub.log if a.method in kinds]


def files_of(hub: LoopbackHub, revision: str = "main") -> dict[str, bytes]:
    found = hub.repos[REPO].tree(revision)
    return {path: blob.data for path, blob in found.items() if path != ".gitattributes"}


# --- What arrives ---------------------------------------------------------------------------------


def test_what_is_uploaded_comes_back_to_the_byte(
    hub: LoopbackHub, folder: Path, tmp_path: Path
) -> None:
    from huggingface_hub import snapshot_download

    result = upload(folder)
    assert result.code == 0, result.err
    count = len(files_in(folder))
    assert f"proved  {count} files listed with size and hash: as they are here" in result.out
    assert files_of(hub) == files_in(folder)
    back = Path(snapshot_download(REPO, cache_dir=tmp_path / "cache"))
    fetched = {
        path.relative_to(back).as_posix(): path.read_bytes()
        for path in back.rglob("*")
        if path.is_file() and path.name != ".gitattributes"
    }
    assert fetched == files_in(folder)
    # With its new card the folder is as valid as before: the receipt knows it.
    checked = run_cli("validate", folder, "--level", "full", "--json")
    assert json.loads(checked.out)["findings"] == []


def test_a_listing_in_pages(hub: LoopbackHub, folder: Path) -> None:
    hub.page = 2
    assert uploaded(folder)["differences"] == []
    assert len(hub.asked("GET", "cursor=")) >= 4
    assert uploaded(folder)["sent"] == []


def test_a_second_upload_sends_nothing(hub: LoopbackHub, folder: Path) -> None:
    first = uploaded(folder)
    assert set(first["sent"]) == set(files_in(folder))
    hub.log.clear()
    again = uploaded(folder)
    assert (again["sent"], again["bytes"], again["differences"]) == ([], 0, [])
    assert again["commit"] == first["commit"]
    assert writes(hub) == []
    assert len(hub.repos[REPO].commits) == 2  # the Hub's own first one, and ours


def test_after_a_change_only_that_is_sent(hub: LoopbackHub, folder: Path) -> None:
    uploaded(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.10"}\n')
    shard = sorted(folder.glob("*.safetensors"))[1]
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    hub.log.clear()
    # The receipt speaks of the old tokenizer, so this is not a folder to upload without force.
    assert upload(folder).code == 3
    assert hub.log == []
    found = uploaded(folder, "--force", "--no-card")
    assert found["sent"] == [shard.name, "tokenizer.json"]
    assert [asked.received for asked in hub.asked("PUT")] == [len(raw)]
    assert len(hub.asked("POST", "/commit/")) == 1
    assert hub.asked("POST", "/commit/")[0].received < 1000
    assert hub.asked("POST", "/preupload/")[0].received < 1000  # it is not asked about the others
    assert files_of(hub) == files_in(folder)


def test_names_that_are_patterns(hub: LoopbackHub, folder: Path) -> None:
    names = ["a[1].txt", "a*.txt", "what?.txt", "with space.txt", "ümläut.txt", "#1 %20.txt"]
    for name in names:
        (folder / "assets" / name).write_text(name)
    found = uploaded(folder, "--force", "--read-back")
    assert found["differences"] == []
    for name in names:
        assert files_of(hub)[f"assets/{name}"] == name.encode()
    (folder / "assets" / "a[1].txt").write_text("another")
    (folder / "assets" / "a1.txt").write_text("what the pattern would fit")
    sent = uploaded(folder, "--force", "--no-card")["sent"]
    assert sent == ["assets/a1.txt", "assets/a[1].txt"]
    assert files_of(hub) == files_in(folder)


def test_hidden_files_stay_here_and_are_named(hub: LoopbackHub, folder: Path) -> None:
    """Of caches and version control nobody needs to hear."""
    caches = (".git/config", ".cache/huggingface/x", "__pycache__/x.pyc")
    for name in (".env", ".gitattributes", "assets/.netrc", ".vscode/settings.json", *caches):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("SECRET=1\n")
    names = [".env", ".gitattributes", ".vscode/settings.json", "assets/.netrc"]
    for words in (("--dry-run",), ()):
        result = upload(folder, *words, "--force")
        assert result.code == 0, result.err
        assert f"left out, hidden files: {', '.join(names)}" in result.err
    assert uploaded(folder, "--force")["hidden"] == names
    there = hub.repos[REPO].tree()
    assert "assets/notes.txt" in there
    assert not set(there) & {".env", "assets/.netrc", ".vscode/settings.json", *caches}
    assert there[".gitattributes"].data != b"SECRET=1\n"  # the Hub's own stays


# --- Options --------------------------------------------------------------------------------------


def test_a_private_repo(hub: LoopbackHub, folder: Path) -> None:
    """A private upload never goes to a repo that is public."""
    for _ in ("made", "found"):
        uploaded(folder, "--private")
        assert hub.repos[REPO].private
    hub.add(REPO, {"README.md": b"# Mine\n"})
    hub.log.clear()
    refused(folder, "public", "--private")
    assert writes(hub) == []


def test_a_revision_is_a_branch(hub: LoopbackHub, folder: Path) -> None:
    hub.add(REPO, {"old.txt": b"stays\n"})
    main = hub.repos[REPO].refs["main"]
    found = uploaded(folder, "--revision", "w4a16/v2")
    assert hub.repos[REPO].refs["w4a16/v2"] == found["commit"]
    assert hub.repos[REPO].refs["main"] == main
    branch = files_of(hub, "w4a16/v2")
    assert {**files_in(folder), "old.txt": b"stays\n"} == branch
    hub.log.clear()
    assert upload(folder, repo=f"hf://{REPO}@w4a16/v2").code == 0
    assert writes(hub) == []


def test_a_pull_request(hub: LoopbackHub, folder: Path) -> None:
    hub.add(REPO, {"README.md": b"# Mine\n"})
    main = hub.repos[REPO].refs["main"]
    found = uploaded(folder, "--create-pr")
    assert found["pull_request"] == f"{hub.url}/{REPO}/discussions/1"
    assert hub.repos[REPO].refs["main"] == main
    assert files_of(hub, "refs/pr/1") == files_in(folder)
    # What came after goes into the same one.
    (folder / "assets" / "more.txt").write_text("more\n")
    more = uploaded(folder, "--revision", "refs/pr/1", "--no-card", "--force")
    assert more["sent"] == ["assets/more.txt"]
    assert hub.repos[REPO].pull_requests == 1
    assert files_of(hub, "refs/pr/1") == files_in(folder)


def test_a_pull_request_that_is_not_there(hub: LoopbackHub, folder: Path) -> None:
    hub.add(REPO, {})
    refused(folder, "--create-pr", "--revision", "refs/pr/7")
    assert writes(hub) == []


def test_the_commit_says_what_made_it(hub: LoopbackHub, folder: Path) -> None:
    uploaded(folder)
    assert hub.repos[REPO].messages[-1].endswith(": dequant")
    edit_json(folder / "generation_config.json", lambda value: value.update(seed=1))
    uploaded(folder, "--commit-message", "My words", "--force")
    assert hub.repos[REPO].messages[-1] == "My words"


def test_stages_are_uploaded_one_by_one(tmp_path: Path) -> None:
    """The folder of all of them is no checkpoint, and none that is broken."""
    source = published("qwen3_moe").write(tmp_path / "source")
    stages = tmp_path / "stages"
    made = run_cli("split", source, stages, "--pp", "2", "--for", "sglang", "--jobs", "1")
    assert made.code == 0, made.err
    for more in ([], ["--dry-run"], ["--force"]):
        said = run_cli("upload", stages, "me/model", *more)
        assert said.code == 2, said.out
        assert "QC001" not in said.out + said.err
        assert (
            f"upload {stages / 'stage-00-of-02'} to ORG/NAME-stage-00-of-02, and the others"
            in said.err
        )
    assert run_cli("upload", stages / "stage-01-of-02", "me/model", "--dry-run").code == 0


def test_a_dry_run_needs_no_hub_and_lists_what_would_be_sent(
    hub: LoopbackHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the sizes of the card and the receipt as they are written before; no Hub answers, and the
    client is told to be offline."""
    before = tree(folder)
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection was made"))
        result = upload(folder, "--dry-run")
        assert result.code == 0, result.err
        found = uploaded(folder, "--dry-run", "--private")
    assert f"{len(before) - 1} files for {REPO}; which of them it has already, " in result.out
    assert result.out.startswith("valid   at level headers: 0 errors, ")
    assert "## How it was made" in upload(folder, "--dry-run", "-v").out
    asked = upload(folder, "--dry-run", "--create-pr", "--commit-message", "FP8 back to BF16")
    assert "a pull request would be opened: FP8 back to BF16\n" in asked.out
    assert not {"sent", "would", "changed", "stale"} & set(result.out.replace(";", " ").split())
    assert {"sent", "stale"}.isdisjoint(found)
    assert found["dry_run"] is True
    assert found["files"] == len(found["considered"])
    assert tree(folder) == before
    assert hub.log == []
    sent = uploaded(folder)
    assert [entry["path"] for entry in found["considered"]] == sent["sent"]
    assert found["bytes"] == sent["bytes"] == sum(map(len, files_in(folder).values()))


def test_stale_shards_on_the_hub_are_named(hub: LoopbackHub, folder: Path) -> None:
    hub.add(REPO, {"model-00001-of-00009.safetensors": b"old", "notes.bin.txt": b"", "x.bin": b""})
    found = uploaded(folder)
    assert found["stale"] == ["model-00001-of-00009.safetensors", "x.bin"]
    text = upload(folder).out
    assert "stale   the repo also holds model-00001-of-00009.safetensors, x.bin" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nonsense",), "ORG/NAME"),
        (("me/model", "--create-pr", "--revision", "x"), "--create-pr"),
        (("me/model@a", "--revision", "b"), "two revisions"),
        (("me/model", "--base-model", "/data/model"), "ORG/NAME"),
        (("me/model", "--base-model", "../model"), "ORG/NAME"),
    ],
)
def test_usage(words: tuple[str, ...], said: str, made: Path) -> None:
    result = run_cli("upload", made, *words)
    assert result.code == 2
    assert said in result.err


# --- What does not validate -----------------------------------------------------------------------


def test_what_does_not_validate_is_not_sent(hub: LoopbackHub, folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.update(num_hidden_layers=3))
    before = tree(folder)
    result = refused(folder, "not uploaded", "--json", code=3)
    assert json.loads(result.out)["errors"] > 0
    assert hub.log == []
    assert tree(folder) == before


def test_force_is_said_in_the_card(hub: LoopbackHub, folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.update(num_hidden_layers=3))
    found = uploaded(folder, "--force")
    card = files_of(hub)["README.md"].decode()
    assert "**Uploaded although it failed validation.**" in card
    assert f"{found['errors']} errors" in card
    rule = next(f["rule"] for f in found["findings"] if f["severity"] == "error")
    assert f"- error {rule}: " in card
    assert str(folder) not in card


@pytest.mark.parametrize(
    ("text", "said"),
    [("{}", "lacks identity, passes"), (None, "lacks bytes.out, passes[0].options")],
)
@pytest.mark.parametrize("words", [(), ("--no-card",), ("--dry-run",)])
def test_a_manifest_that_is_none_is_one_error(
    hub: LoopbackHub, folder: Path, text: str | None, said: str, words: tuple[str, ...]
) -> None:
    file = folder / "qconvert.json"
    found = json.loads(file.read_text())
    del found["bytes"]["out"], found["passes"][0]["options"]
    file.write_text(json.dumps(found) if text is None else text)
    refused(folder, f"qconvert.json: {said}", "--force", *words)
    assert writes(hub) == []


def test_an_unfinished_folder_is_refused_even_with_force(hub: LoopbackHub, folder: Path) -> None:
    (folder / ".qconvert").mkdir()
    refused(folder, "unfinished", "--force")
    assert hub.log == []


def test_a_folder_with_nothing_in_it(hub: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "gone"):
        assert upload(tmp_path / name).code == 1
    assert hub.log == []


def test_a_readme_written_by_hand_is_kept_and_no_error(hub: LoopbackHub, folder: Path) -> None:
    uploaded(folder)
    readme = folder / "README.md"
    text = readme.read_text()
    mine = text.replace("\n# ", "\nwritten by hand\n\n# ", 1) + "\n## Mine\n\nand after\n"
    readme.write_text(mine)
    assert uploaded(folder, "--dry-run")["errors"] == 0
    assert readme.read_text() == mine
    found = uploaded(folder)
    assert set(found["sent"]) == {"README.md", "qconvert.receipt.jsonl"}
    assert files_of(hub)["README.md"] == readme.read_bytes() == mine.encode()
    assert uploaded(folder)["sent"] == []


# --- Failures that pass, and those that do not ----------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", f"/api/models/{REPO}$"),
        ("POST", "/api/repos/create"),
        ("POST", "/preupload/"),
        ("POST", "/objects/batch"),
        ("PUT", "/lfs/"),
        ("POST", "/verify"),
        ("POST", "/commit/"),
        ("GET", "/tree/"),
    ],
)
def test_what_passes_is_waited_for(hub: LoopbackHub, folder: Path, method: str, path: str) -> None:
    hub.fail(method, path, 503, times=2)
    hub.cut(method, path, times=2)
    assert uploaded(folder)["differences"] == []
    assert files_of(hub) == files_in(folder)
    assert [fault.times for fault in hub.faults] == [0, 0]
    assert len(hub.waits) == 4
    assert hub.waits[0] == 1


@pytest.mark.parametrize("status", [500, 502, 504, 429])
def test_a_commit_is_tried_again(hub: LoopbackHub, folder: Path, status: int) -> None:
    hub.fail("POST", "/commit/", status, times=3)
    result = upload(folder)
    assert result.code == 0
    assert files_of(hub) == files_in(folder)
    assert hub.waits == [1.0, 2.0, 4.0]
    assert result.err.count(f"status {status}") == 3
    # What was sent before is not sent again.
    sent = [a.path for a in hub.asked("PUT", "/lfs/")]
    assert len(sent) == len(set(sent)) > 0


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "17"}, 17), ({"ratelimit": '"api";r=0;t=17'}, 17),
        ({"Retry-After": "inf"}, 300), ({"Retry-After": "1e9"}, 300),
    ],
)  # fmt: skip
def test_the_hubs_own_wait_is_kept_up_to_five_minutes(
    hub: LoopbackHub, folder: Path, headers: dict[str, str], seconds: int
) -> None:
    hub.fail("POST", "/commit/", 429, headers=headers)
    result = upload(folder)
    assert result.code == 0
    assert hub.waits == [seconds]
    assert f"retrying in {seconds} s" in result.err


def test_an_answer_that_is_no_hubs(
    hub: LoopbackHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import HfApi

    hub.add(REPO, {})
    asked = HfApi.repo_info

    def without_id(self: HfApi, *args: Any, **more: Any) -> Any:
        from huggingface_hub import ModelInfo

        asked(self, *args, **more)
        return ModelInfo(sha="0" * 40, private=False)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(HfApi, "repo_info", without_id)
    refused(folder, f"looking for {REPO}: the answer lacks 'id'")


def test_a_secret_in_the_endpoint_is_not_printed(
    hub: LoopbackHub,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from huggingface_hub import CommitInfo, HfApi

    secret = f"someone:{TOKEN}@"
    send = HfApi.upload_folder

    def sent(self: HfApi, **more: Any) -> Any:
        info = send(self, **more)
        return CommitInfo(
            commit_url=info.commit_url.replace("://", f"://{secret}"),
            commit_message="", commit_description="", oid=info.oid,
        )  # fmt: skip

    monkeypatch.setattr(HfApi, "upload_folder", sent)
    monkeypatch.setattr(
        "huggingface_hub.constants.ENDPOINT", hub.url.replace("://", f"://{secret}")
    )
    client_logger = logging.getLogger("huggingface_hub")
    monkeypatch.setattr(client_logger, "propagate", True)
    hub.fail("POST", "/preupload/", 503)
    for words in ((), ("--json",)):
        for _ in ("sends", "has nothing to send"):
            result = upload(folder, *words)
            assert result.code == 0, result.err
            assert f"{hub.url}/{REPO}/commit/" in result.out
            assert TOKEN not in result.out + result.err + caplog.text
        (folder / "README.md").write_text("# Another\n")
    assert "thrown while requesting POST http" in caplog.text


def test_a_commit_whose_answer_is_lost_is_made_once(hub: LoopbackHub, folder: Path) -> None:
    hub.cut("POST", "/commit/", after=True)
    found = uploaded(folder)
    assert len(hub.repos[REPO].commits) == 2
    assert found["commit"] == hub.repos[REPO].refs["main"]
    assert files_of(hub) == files_in(folder)


def test_a_pull_request_is_never_opened_twice(hub: LoopbackHub, folder: Path) -> None:
    hub.add(REPO, {})
    hub.cut("POST", "/commit/", after=True)
    refused(folder, "--revision refs/pr/", "--create-pr")
    assert hub.repos[REPO].pull_requests == 1
    hub.fail("POST", "/commit/", 500)  # nor does it say what of it was done
    assert upload(folder, "--create-pr").code == 1
    assert len(hub.asked("POST", "/commit/")) == 2
    hub.fail("POST", "/commit/", 503)  # where it says that it did nothing, it is asked again
    assert upload(folder, "--create-pr").code == 0
    assert hub.repos[REPO].pull_requests == 2


def test_what_does_not_pass_in_time(hub: LoopbackHub, folder: Path) -> None:
    hub.fail("POST", "/commit/", 503, times=99)
    refused(folder, f"{TRIES} times; what was sent is kept")
    assert len(hub.asked("POST", "/commit/")) == TRIES
    assert hub.waits == [1.0, 2.0, 4.0, 8.0, 16.0]
    hub.faults.clear()
    hub.log.clear()
    uploaded(folder)
    assert hub.asked("PUT") == []  # the next one goes on


@pytest.mark.parametrize("status", [401, 403, 404, 413])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", f"/api/models/{REPO}$"),
        ("POST", "/preupload/"),
        ("POST", "/objects/batch"),
        ("PUT", "/lfs/"),
        ("POST", "/commit/"),
        ("GET", "/tree/"),
    ],
)
def test_what_does_not_pass_ends_it_at_once(
    hub: LoopbackHub, folder: Path, method: str, path: str, status: int
) -> None:
    hub.add(REPO, {"README.md": b"# Mine\n"})
    if method == "PUT":
        for shard in list(folder.glob("*.safetensors"))[1:]:
            hub.objects[sha256(shard.read_bytes()).hexdigest()] = shard.read_bytes()
        hub.lfs_from = 1 << 30  # so there is one file to send, and one request
    if (method, status) == ("GET", 404) and "tree" not in path:
        hub.fail("POST", "/api/repos/create", 403, times=99)  # a repo that is not there is made
    hub.fail(method, path, status, times=99)
    result = upload(folder)
    assert result.code == 1
    assert result.err.splitlines()[-1].startswith("qconvert: error: ")
    assert "/api/" in result.err or "/lfs/" in result.err or ".git/" in result.err
    if (method, status) != ("GET", 404) or "tree" in path:
        assert f"status {status} from " in result.err
        assert len([a for a in hub.asked(method, path) if a.status == status]) == 1
        assert hub.log[-1].status == status, "nothing is asked after it"
    assert hub.waits == []
    assert TOKEN not in result.err + result.out


def test_the_token_is_never_printed(hub: LoopbackHub, folder: Path) -> None:
    hub.fail("POST", "/commit/", 503)
    said = {"X-Error-Message": "You must have write access"}
    hub.fail("POST", "/commit/", 403, headers=said)
    result = refused(folder, "You must have write access")
    assert "write access to the repo" in result.err
    assert {a.token for a in hub.asked("POST", "/commit/")} == {TOKEN}
    assert TOKEN not in result.err + result.out


def test_a_wrong_token(hub: LoopbackHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(REPO, {})
    monkeypatch.setenv("HF_TOKEN", "hf_wrongSECRET")
    result = refused(folder, "status 401")
    assert "hf auth login" in result.err
    assert "wrongSECRET" not in result.err + result.out
    assert len([a for a in hub.log if a.status == 401]) == 1
    assert hub.asked("PUT") == []
    assert hub.waits == []


# --- What is not there as it is here --------------------------------------------------------------


def test_a_flipped_bit_on_the_server_is_reported(hub: LoopbackHub, folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    hub.garble[shard.name] = 4321
    result = upload(folder)
    assert result.code == 3
    assert f"WRONG   {shard.name} its sha256 is " in result.out
    assert "1 file not on the Hub as here" in result.out
    found = json.loads(upload(folder, "--json").out)
    assert [d["file"] for d in found["differences"]] == [shard.name]


def test_a_hub_that_lists_what_it_does_not_have(hub: LoopbackHub, folder: Path) -> None:
    """A listing only repeats what the Hub was told: bytes are proved by fetching them."""
    shard = sorted(folder.glob("*.safetensors"))[0]
    hub.garble[shard.name] = 4321
    hub.lying_tree = True
    assert upload(folder).code == 0
    result = upload(folder, "--read-back")
    assert result.code == 3
    assert f"WRONG   {shard.name} read back, its sha256 is " in result.out
    assert len([line for line in result.out.splitlines() if line.startswith("WRONG")]) == 1


def test_reading_back_fetches_every_byte(hub: LoopbackHub, folder: Path) -> None:
    assert uploaded(folder, "--read-back")["read_back"] == len(files_in(folder))
    fetched = sum(a.sent for a in hub.asked("GET", "/resolve/|/cdn/"))
    assert fetched == sum(map(len, files_in(folder).values()))


def test_a_file_that_the_server_leaves_out_is_reported(hub: LoopbackHub, folder: Path) -> None:
    """As the Hub does with what a .gitignore names."""
    hub.ignored.add("tokenizer.json")
    result = upload(folder, "--json")
    assert result.code == 3
    assert json.loads(result.out)["differences"] == [
        {"file": "tokenizer.json", "what": "is missing on the Hub"}
    ]


def test_a_size_that_differs_is_said_before_any_hash(hub: LoopbackHub, folder: Path) -> None:
    uploaded(folder)
    repo = hub.repos[REPO]
    for blobs in repo.commits.values():
        if "tokenizer.json" in blobs:
            blobs["tokenizer.json"] = hub.blob("tokenizer.json", b"{}")
    found = uploaded(folder, "--no-card")
    assert found["sent"] == ["tokenizer.json"]


# --- From a shell ---------------------------------------------------------------------------------


def _shell(words: list[str], **settings: str) -> subprocess.CompletedProcess[str]:
    of_client = ("HF_", "TRANSFORMERS_OFFLINE")
    known = {k: v for k, v in os.environ.items() if not k.startswith(of_client)}
    return subprocess.run(
        [sys.executable, "-m", "qconvert", *words], env=known | settings, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.big
def test_the_clients_environment_is_respected(folder: Path, tmp_path: Path) -> None:
    home = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    words = ["upload", str(folder), REPO, "--base-model", BASE, "--level", "headers", "--json"]
    with loopback_hub() as hub:
        there = {**home, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "token").write_text(TOKEN)
        done = _shell(words, **there)
        assert done.returncode == 0, done.stderr
        assert "%|" not in done.stderr
        assert json.loads(done.stdout)["differences"] == []
        assert files_of(hub) == files_in(folder)
        hub.log.clear()
        refused = _shell(words, **there, HF_TOKEN="hf_wrongSECRET")
        assert refused.returncode == 0  # all of it is there, and public: nothing needs a token
        assert writes(hub) == []
        offline = _shell(words, **there, HF_HUB_OFFLINE="1")
        assert offline.returncode == 1
        assert "HF_HUB_OFFLINE is set" in offline.stderr
        for result in (done, refused, offline):
            for secret in (TOKEN, "wrongSECRET"):
                assert secret not in result.stdout + result.stderr


def test_shards_that_are_links_are_sent_as_files(
    hub: LoopbackHub, folder: Path, tmp_path: Path
) -> None:
    """A snapshot in the client's cache is a folder of links."""
    shard = sorted(folder.glob("*.safetensors"))[0]
    shutil.move(shard, tmp_path / "blob")
    shard.symlink_to(tmp_path / "blob")
    uploaded(folder, "--follow-links")
    assert files_of(hub)[shard.name] == (tmp_path / "blob").read_bytes()


def test_another_tools_folder(hub: LoopbackHub, tmp_path: Path) -> None:
    plain = bf16_moe().write(tmp_path / "plain")
    (plain / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n\nText.\n")
    uploaded(plain)
    text = files_of(hub)["README.md"].decode()
    assert "license: mit" in text
    assert "Text." in text
    assert "## What was checked" in text
    assert "How it was made" not in text
    write_shard(plain / "extra.safetensors", {"x": tensor("BF16", 2)})
    assert "QC056" in upload(plain).err


@pytest.mark.parametrize("name", ["httpx", "httpx2"])
def test_faults_of_either_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub 1.33 raises httpx's errors, 2.4 httpx2's, whatever else is installed."""
    http, errors = ModuleType(name), ModuleType("huggingface_hub.errors")
    base: type[Exception] = type("HTTPError", (OSError,), {"__module__": f"{name}._exceptions"})
    lost = type("TransportError", (base,), {"request": None})
    vars(http).update(HTTPError=base, TransportError=lost, Response=type("Response", (), {}))
    vars(errors)["HfHubHTTPError"] = type("HfHubHTTPError", (base,), {})
    monkeypatch.setitem(sys.modules, name, http)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    library.cache_clear()
    try:
        assert library() is http
        failed = lost("connection reset")
        failed.request = SimpleNamespace(url=SimpleNamespace(path="/api/models"))
        found = fault_of(failed)
    finally:
        library.cache_clear()
    assert str(found) == "no answer from /api/models: connection reset"
