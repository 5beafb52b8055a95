"""What a foreign folder makes qconvert read: nothing beyond it, no pipe, no more than a stated size."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from checkpoints import (
    INDEX,
    bf16_moe,
    convert,
    edit_json,
    fp8_moe,
    published,
    run_cli,
    shard_name,
    tree,
    write_shard,
)
from hostile_inputs import device, escapes, huge, no_hang, pipe

import qconvert
from qconvert.checkpoint.checkpoint import Checkpoint, index_limit
from qconvert.checkpoint.safetensors import read_header
from qconvert.core.errors import CheckpointError, DataError, OutputError
from qconvert.hub.compare import local_files
from qconvert.samples.data import DataSpec, digest

FIRST = shard_name(1)
MANIFEST, RECEIPT = "qconvert.json", "qconvert.receipt.jsonl"
Change = Callable[[Path], None]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return bf16_moe().write(tmp_path / "source")


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that qconvert made."""
    folder = tmp_path_factory.mktemp("reach")
    source = bf16_moe().write(folder / "source")
    convert("copy", source, folder / "made")
    return folder / "made"


@pytest.fixture
def made(master: Path, tmp_path: Path) -> Path:
    return shutil.copytree(master, tmp_path / "made")


def refused(*words: str | Path, says: tuple[str, ...], code: int = 1) -> None:
    """The command ends with this code and one message."""
    with no_hang():
        result = run_cli(*words)
    said = result.err if code == 1 else result.out
    assert result.code == code, result.out + result.err
    for text in says:
        assert text in said, said
    if code == 1:
        assert said.count("\n") == 1, said


def commands(source: Path, out: Path) -> list[tuple[str | Path, ...]]:
    """Every command that reads a source, but validate and upload."""
    return [
        ("inspect", source),
        ("run", "copy", source, out),
        ("plan", "copy", source),
        ("dequant", source, out),
        ("unfuse", source, out),
        ("kt", source, "--cpu-out", out, "--cpu", "int4", "--numa", "1"),
        ("split", source, out, "--pp", "1,1"),
        ("diff", source, source),
        ("eval", source, "--against", source, "--data", "x.txt"),
    ]


# --- Links ---------------------------------------------------------------------------------------

EVERY = ("notes.txt", "config.json", INDEX, FIRST, "README.md", "hf_quant_config.json", "tokenizer.json",
         MANIFEST)  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_a_link_out_of_the_folder_is_refused_by_name(
    name: str, source: Path, tmp_path: Path
) -> None:
    escapes(source / name)
    refused("run", "copy", source, tmp_path / "out", says=(name, "leads out of its folder"))
    assert published(tmp_path / "out") == []


def test_every_command_refuses_it(source: Path, tmp_path: Path) -> None:
    escapes(source / "notes.txt")
    for words in commands(source, tmp_path / "out"):
        refused(*words, says=("notes.txt", "leads out of its folder"))
    assert not (tmp_path / "out").exists()
    refused("validate", source, code=3, says=("notes.txt", "leads out of its folder"))
    with pytest.raises(OutputError, match=r"notes\.txt: is a link that leads out"):
        local_files(source)


def test_the_owner_may_follow_links(source: Path, tmp_path: Path) -> None:
    escapes(source / "notes.txt")
    escapes(source / FIRST)
    convert("copy", source, tmp_path / "out", "--follow-links")
    assert (tmp_path / "out" / "notes.txt").read_bytes() == b"{}"
    assert not (tmp_path / "out" / "notes.txt").is_symlink()
    for words in (("inspect", source), ("validate", source), ("diff", source, tmp_path / "out")):
        assert run_cli(*words, "--follow-links").code == 0
    assert "notes.txt" in local_files(source, follow_links=True)


@pytest.mark.parametrize("name", ["config.json", INDEX, FIRST])
def test_a_link_to_a_pipe_is_never_followed(name: str, source: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (source / name).unlink()
    (source / name).symlink_to(tmp_path / "pipe")
    for more in ((), ("--follow-links",)):
        refused("inspect", source, *more, says=(name if not more else "regular file",))


def test_a_folder_of_shards_that_is_a_link(source: Path, tmp_path: Path) -> None:
    """The index names `sub/x.safetensors`, and `sub` leads elsewhere."""
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.move(source / FIRST, outside / FIRST)
    (source / "sub").symlink_to(outside)
    edit_json(source / INDEX, lambda index: index["weight_map"].update(
        {name: f"sub/{file}" for name, file in index["weight_map"].items() if file == FIRST}
    ))  # fmt: skip
    refused("inspect", source, says=(FIRST, "leads out of its folder"))


def test_links_within_the_folder_and_to_it(source: Path, tmp_path: Path) -> None:
    (source / "again.txt").symlink_to("tokenizer.json")
    (tmp_path / "link").symlink_to(source)
    convert("copy", tmp_path / "link", tmp_path / "out")
    made = tmp_path / "out" / "again.txt"
    assert made.read_bytes() == (source / "tokenizer.json").read_bytes()
    assert not made.is_symlink()


def test_blobs_of_another_repo_are_out_of_reach(tmp_path: Path) -> None:
    home = tmp_path / "models--org--name"
    snapshot = bf16_moe().write(home / "snapshots" / ("0" * 40))
    for repo in (home, tmp_path / "models--org--private"):
        (repo / "blobs").mkdir(parents=True)
        (repo / "blobs" / "abc").write_text("secret")
    (snapshot / "ours.txt").symlink_to("../../blobs/abc")
    assert "ours.txt" in Checkpoint.open(snapshot).side_files
    (snapshot / "theirs.txt").symlink_to("../../../models--org--private/blobs/abc")
    refused("inspect", snapshot, says=("theirs.txt", "leads out of its folder"))


def test_a_single_file_may_be_a_link_and_its_config_may_not(tmp_path: Path) -> None:
    source = bf16_moe().write(tmp_path / "source", shards=1)
    file = source / "model.safetensors"
    escapes(file)
    assert run_cli("inspect", file).code == 0
    escapes(source / "config.json")
    refused("inspect", file, says=("config.json", "leads out of its folder"))


def test_a_shard_exchanged_for_a_link_is_not_opened(source: Path, tmp_path: Path) -> None:
    """Between planning and reading."""
    opened = Checkpoint.open(source)
    escapes(source / FIRST)
    shard = next(shard for shard in opened.shards if shard.path.name == FIRST)
    with pytest.raises(CheckpointError, match="symbolic link"):
        os.close(shard.open())


@pytest.mark.parametrize("name", ["../victim", "/etc/hostname", "..", ""])
def test_a_receipt_that_names_a_file_elsewhere(name: str, made: Path) -> None:
    """Its hash would tell whether a file elsewhere holds what somebody guesses."""
    (made.parent / "victim").write_bytes(b"secret")
    line = {"file": name, "nbytes": 6, "xxh3": "0" * 32}
    with (made / RECEIPT).open("a") as stream:
        stream.write(json.dumps(line) + "\n")
    result = run_cli("validate", made, "--level", "full", "--json")
    assert result.code == 3, result.err
    found = [f for f in json.loads(result.out)["findings"] if f["rule"] == "QC022"]
    assert [f for f in found if f["where"] == name] == []


def test_stages_that_lie_elsewhere(source: Path, tmp_path: Path) -> None:
    assert run_cli("split", source, tmp_path / "stages", "--pp", "1,1", "--copy").code == 0
    stage = tmp_path / "stages" / "stage-01-of-02"
    stage.rename(tmp_path / "elsewhere")
    stage.symlink_to(tmp_path / "elsewhere")
    refused("join", tmp_path / "stages", tmp_path / "out", says=("stage-01-of-02", "leads out"))


# --- Pipes, devices, and files without end ---------------------------------------------------------

SPECIAL: tuple[Change, ...] = (pipe, huge)
READ_WHOLE = ("config.json", INDEX, "hf_quant_config.json", MANIFEST)


@pytest.mark.parametrize(
    ("length", "size"),
    [(99_999_999, 8), (99_999_999, 1000), (99_999_999, 100_000_007), (2**63, 8), (0, 8)],
)
def test_a_shard_that_claims_a_header_allows_no_larger_index(
    length: int, size: int, source: Path, tmp_path: Path
) -> None:
    """Of an index the limit grows with the headers next to it: with what they hold, and not for ever."""
    if length == 99_999_999 and size > length:  # true, of zeros that take no disk
        length = size - 8
    claims = source / "model-00009-of-00009.safetensors"
    with claims.open("wb") as stream:
        stream.write(struct.pack("<Q", length))
        stream.truncate(size)
    huge(source / INDEX)
    limit = index_limit(source, follow_links=False)
    assert limit <= 256 << 20
    if size < 10_000:
        assert limit < 17 << 20
    refused("inspect", source, says=(INDEX, f"expected at most {limit} bytes"))


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("--report", "a.json"),
        ("--report", "a.html"),
        ("--profile", "a.json"),
        ("--log-json", "a.jsonl"),
    ],
)
def test_a_full_disk_names_the_file(option: str, name: str, made: Path, tmp_path: Path) -> None:
    """The system's error of a write names none: which of several disks is it?"""
    full = tmp_path / name
    full.symlink_to("/dev/full")
    words: tuple[str | Path, ...] = ("run", "copy", made, tmp_path / "out")
    if option == "--report":
        words = ("validate", made)
    result = run_cli(*words, "--jobs", "1", option, full)
    assert result.code == 1
    assert f"{full}: cannot be written: No space left on device" in result.err


@pytest.mark.parametrize("name", READ_WHOLE)
@pytest.mark.parametrize("change", SPECIAL, ids=["pipe", "huge"])
def test_what_is_read_whole_is_a_file_of_a_stated_size(
    name: str, change: Change, source: Path, tmp_path: Path
) -> None:
    change(source / name)
    what = "regular file" if change is pipe else "expected at most"
    refused("plan", "copy", source, says=(name, what))
    refused("validate", source, code=3, says=(name, what))


@pytest.mark.parametrize("change", SPECIAL, ids=["pipe", "huge"])
def test_a_receipt_that_is_none(change: Change, made: Path) -> None:
    change(made / RECEIPT)
    refused("validate", made, code=3, says=(RECEIPT,))


@pytest.mark.parametrize("change", [pipe, huge, device], ids=["pipe", "huge", "device"])
def test_a_recipe_that_is_none(change: Change, source: Path, tmp_path: Path) -> None:
    change(tmp_path / "r.yaml")
    refused("plan", tmp_path / "r.yaml", source, says=("r.yaml",))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "notes.txt"])
def test_calibration_waits_for_no_pipe(name: str, source: Path, tmp_path: Path) -> None:
    """transformers opens what it finds beside the weights."""
    pipe(source / name)
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a"}\n')
    with no_hang():
        done = run_cli("w4a16", source, tmp_path / "out", "--gptq", "--data", data, "--dry-run")
    assert done.code == 1


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "safetensors"])
@pytest.mark.parametrize("change", [pipe, device], ids=["pipe", "device"])
def test_data_that_is_none(change: Change, suffix: str, source: Path, tmp_path: Path) -> None:
    data = tmp_path / f"data.{suffix}"
    change(data)
    with no_hang(), pytest.raises(DataError, match=r"data\..*regular file"):
        digest(DataSpec(str(data)), source)


def test_sixty_thousand_keys_and_one_of_them_twice(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    one = '"t{}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    keys = [one.format(number) for number in [*range(60_000), 59_999]]
    text = ("{" + ",".join(keys) + "}").encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    with no_hang(), pytest.raises(CheckpointError, match="'t59999' twice"):
        read_header(file)


@pytest.mark.parametrize(
    "text",
    [
        b'{"x":[' + b"[]," * 400_000 + b"[]]}",
        b'{"__metadata__":{"a":[' + b"{}," * 400_000 + b"{}]}}",
        b'{"x":{"dtype":"U8","shape":[' + b"1," * 600_000 + b'1],"data_offsets":[0,1]}}',
    ],
    ids=["entry", "metadata", "shape"],
)
def test_a_header_takes_no_multiple_of_its_size(text: bytes, tmp_path: Path) -> None:
    """json made 25 MB of the first, which has 1.2; at the limit of 100 MB it is 2 GB."""
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"x\.safetensors"):
            read_header(file)
        assert tracemalloc.get_traced_memory()[1] < 6 * len(text)
    finally:
        tracemalloc.stop()


def test_headers_that_are_written_otherwise_say_the_same(tmp_path: Path) -> None:
    """Spaces, another order of keys, escapes in names: JSON like any other."""
    plain, odd = tmp_path / "plain.safetensors", tmp_path / "odd.safetensors"
    write_shard(plain, fp8_moe().tensors)
    raw = plain.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8 : 8 + length])
    turned = {
        name: dict(reversed(list(entry.items()))) if name != "__metadata__" else entry
        for name, entry in reversed(list(table.items()))
    }
    text = json.dumps(turned, indent=2).replace("model.", "mod\\u0065l.").encode() + b" \n"
    odd.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    ours, theirs = read_header(plain), read_header(odd)
    assert [(e.name, e.type) for e in ours.entries] == [(e.name, e.type) for e in theirs.entries]
    assert ours.metadata == theirs.metadata


def test_a_large_readme_is_no_reason_not_to_convert(source: Path, tmp_path: Path) -> None:
    with (source / "README.md").open("wb") as stream:
        stream.truncate(64 << 20)
    convert("copy", source, tmp_path / "out")
    assert len(tree(tmp_path / "out")["README.md"] or "") < 1 << 20


# --- The sources ---------------------------------------------------------------------------------

# Who opens files by itself: the readers everyone else goes through; writers of our own files; what is
# the system's or our package's.
_READERS = {
    "core/links.py": "the reader of files of a foreign folder, and of small ones",
    "core/own_process.py": "/dev/null for a process without streams",
    "core/discovery.py": "what installed packages add",
    "runtimes/classes/record.py": "tables of our package",
    "runtimes/loader/ask.py": "writes config and headers into a folder of its own",
    "runtimes/loader/process.py": "what a runtime's process printed",
    "runtimes/loader/server/from_headers.py": "runs in the runtime's process",
    "runtimes/loader/server/record.py": "runs in the runtime's process",
    "runtimes/loader/server/serving.py": "runs in the runtime's process",
    "checkpoint/checkpoint.py": "gives descriptors of both",
    "checkpoint/safetensors.py": "descriptors",
    "checkpoint/mirror.py": "writes headers into our own cache",
    "cli/demo.py": "writes the demo's sample",
    "cli/progress.py": "adds to the log that the user names",
    "recipe/recipe.py": "recipes of our package",
    "layouts/derived/find.py": "data of our package, our own cache, tables of transformers",
    "hub/readme.py": "writes a card",
    "hub/headers.py": "writes headers into a folder of its own",
    "hub/compare.py": "descriptors",
    "hub/signing.py": "descriptors; writes a signature",
    "calibrate/kernel_choice.py": "/proc",
    "calibrate/memory.py": "/proc",
    "compiled/choice.py": "our own sources, our own cache",
    "compiled/jit.py": "locks in our own cache",
    "repair/write.py": "writes what it staged",
    "calibrate/activation_store.py": "our own file of hidden states",
    "calibrate/expert_stats.py": "writes statistics",
    "calibrate/work_dir.py": "our own state",
    "validation/reports/__init__.py": "GitHub's summary, which is added to",
    "validation/reports/as_html.py": "parts of our package",
    "validation/reports/markup.py": "parts of our package",
    "validation/runner.py": "texts of rules, parts of our package",
    "validation/workers.py": "/proc",
    "validators/amx/amx_client.py": "our own temporary folder",
    "validators/amx/kt_forward.py": "our own temporary folder",
}
_OWN_ROOMS = ("run/",)  # the work folder, which is ours
_OPENING = {"read_bytes", "read_text", "open"}
_PARSING = {
    ("json", "loads"), ("json", "load"), ("yaml", "load"), ("yaml", "safe_load"), ("yaml", "compose"),
}  # fmt: skip
_PARSERS = {
    "core/json_text.py", "core/yaml_lines.py", "checkpoint/safetensors.py",
    "run/folder/workspace.py", "run/folder/journal.py", "run/folder/staging.py",
    "run/folder/verify.py", "run/folder/target.py",
    "validation/judgement.py",  # our own files, and texts that journal and receipt were read to
    "contrib/trtllm_gen/sglang_plugin.py",  # runs within sglang, without qconvert
    "calibrate/distributed.py",  # what processes of one run tell one another
    "validators/amx/kt_forward.py", "client/retries.py",  # our own job; answers of the Hub
    "layouts/derived/transformers_class.py",  # what find.py asks it
    # What a runtime's process answers to what it is asked, and tables of our package.
    "runtimes/loader/process.py", "runtimes/classes/record.py",
    *(f"runtimes/loader/server/{name}.py" for name in ("from_headers", "record", "serving")),
}  # fmt: skip
_ROOT = Path(qconvert.__file__).parent


def _sources() -> dict[str, Path]:
    return {file.relative_to(_ROOT).as_posix(): file for file in sorted(_ROOT.rglob("*.py"))}


@cache
def _calls(file: Path) -> list[ast.Call]:
    text = file.read_text(encoding="utf-8")
    if not re.search(r"open\(|read_bytes|read_text|json|yaml", text):
        return []  # parsing takes most of the time
    tree = ast.parse(text)
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_nobody_else_opens_files() -> None:
    found = set()
    for name, file in _sources().items():
        for call in _calls(file):
            what = call.func
            if isinstance(what, ast.Name) and what.id == "open":
                found.add(name)
            if isinstance(what, ast.Attribute) and what.attr in _OPENING:
                on = ast.unparse(what.value)
                if not on.endswith(("Checkpoint", "files", "_files", "shard", "largest")):
                    found.add(name)
    assert {name for name in found if not name.startswith(_OWN_ROOMS)} <= set(_READERS)


def test_nobody_else_parses_json_or_yaml() -> None:
    found = {
        name
        for name, file in _sources().items()
        for call in _calls(file)
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.value.id, call.func.attr) in _PARSING
    }
    assert found <= _PARSERS
