"""One changed bit anywhere in a folder is found by `validate --level full`, without the source."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from broken_repos import sealed_again
from checkpoints import INDEX, convert, copied, fp8_moe
from commands import COMMANDS, Command
from data_folders import unsealed
from sampled import sampled

from qconvert.checkpoint.checkpoint import MANIFEST, RECEIPT
from qconvert.checkpoint.receipt import (
    digest,
    manifest_seal,
    parse_receipt,
    sealed_lines,
    sealed_manifest,
)
from qconvert.hub.readme import account_for_readme
from qconvert.validation.runner import Report, Request, validate_folder

FAST, ALL = 20, 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted folder of several shards."""
    root = tmp_path_factory.mktemp("seals")
    source = fp8_moe().write(root / "source")
    out = root / "out"
    convert("dequant", source, out, "--max-shard-size", "600B")
    assert len(list(out.glob("*.safetensors"))) >= 2
    return out


def _full(folder: Path) -> Report:
    return validate_folder(folder, request=Request("full", jobs=1))


def _found(folder: Path) -> bool:
    return bool(_full(folder).errors)


def _header(data: bytes) -> range:
    return range(8 + int.from_bytes(data[:8], "little"))


# What of which file is changed: places in it, of its bytes.
Places = Callable[[bytes], range]
WHERE: dict[str, tuple[str, Places]] = {
    "data": ("*.safetensors", lambda data: range(_header(data).stop, len(data))),
    "header": ("*.safetensors", _header),
    "index": (INDEX, lambda data: range(len(data))),
    "config": ("config.json", lambda data: range(len(data))),
    "receipt": (RECEIPT, lambda data: range(len(data))),
    "manifest": (MANIFEST, lambda data: range(len(data))),
    "a side file": ("tokenizer.json", lambda data: range(len(data))),
}


def _flips(folder: Path, what: str, count: int) -> Iterator[tuple[Path, int, int]]:
    pattern, places = WHERE[what]
    files = sorted(folder.glob(pattern))
    chooser = random.Random(what)
    for _ in range(count):
        file = chooser.choice([f for f in files if places(f.read_bytes())])
        yield file, chooser.choice(places(file.read_bytes())), chooser.randrange(8)


@contextmanager
def _flipped(file: Path, at: int, bit: int) -> Iterator[None]:
    whole = file.read_bytes()
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
    yield
    file.write_bytes(whole)


def _missed(folder: Path, what: str, count: int) -> list[tuple[str, int, int]]:
    missed = []
    for file, at, bit in _flips(folder, what, count):
        with _flipped(file, at, bit):
            if not _found(folder):
                missed.append((file.name, at, bit))
    return missed


@pytest.mark.parametrize("what", WHERE)
def test_single_bits_are_found(folder: Path, what: str) -> None:
    assert _missed(folder, what, FAST) == []


@pytest.mark.big
@pytest.mark.parametrize("what", WHERE)
def test_a_hundred_single_bits_are_found(folder: Path, what: str) -> None:
    assert _missed(folder, what, ALL) == []


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


@pytest.mark.parametrize("command", sampled(COMMANDS, 10, name=lambda command: command.words))
def test_single_bits_of_what_any_command_makes(
    command: Command, sources: Path, tmp_path: Path
) -> None:
    """In each file but README.md, which is for people to edit, and in the header of each shard."""
    command.begin(sources, tmp_path)
    command.run(sources, tmp_path)
    chooser = random.Random(command.words)
    for out in sorted(file.parent for file in (tmp_path / "out").rglob(MANIFEST)):
        sound = set(map(str, _full(out).findings))
        for file in sorted(f for f in out.rglob("*") if f.is_file() and f.name != "README.md"):
            whole = file.read_bytes()
            places = [range(len(whole))]
            if file.suffix == ".safetensors":
                places = [_header(whole), range(_header(whole).stop, len(whole))]
            for at, bit in [
                (chooser.choice(part), chooser.randrange(8)) for part in places if part
            ]:
                with _flipped(file, at, bit):
                    report = _full(out)
                new = [f for f in report.findings if str(f) not in sound and f.severity == "error"]
                assert new, f"bit {bit} of byte {at} of {file}"


def test_a_sound_folder_is_proved_sealed(folder: Path) -> None:
    report = _full(folder)
    assert report.errors == 0
    assert "receipt and manifest match their seals" in report.proved


@pytest.mark.parametrize("name", [RECEIPT, MANIFEST])
def test_a_seal_that_was_cut_off_is_missed(folder: Path, tmp_path: Path, name: str) -> None:
    """The rest is sound, and what was sealed with it says that there was one."""
    out = copied(folder, tmp_path / "out")
    if name == RECEIPT:
        lines = (out / name).read_bytes().splitlines(keepends=True)
        (out / name).write_bytes(b"".join(lines[:-1]))
    else:
        manifest = json.loads((out / name).read_bytes())
        del manifest["seal"]
        (out / name).write_text(json.dumps(manifest, indent=2) + "\n")
    found = validate_folder(out, request=Request("headers"))
    assert ("QC049", name) in {(f.rule, f.where) for f in found.findings}


def test_an_edit_that_keeps_every_size_is_found_from_headers_alone(
    folder: Path, tmp_path: Path
) -> None:
    out = copied(folder, tmp_path / "out")
    text = (out / RECEIPT).read_text()
    at = text.index('"xxh3":"') + 8
    (out / RECEIPT).write_text(text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :])
    found = validate_folder(out, request=Request("headers"))
    assert [(f.rule, f.where) for f in found.findings] == [("QC049", RECEIPT)]


def test_a_folder_from_before_seals_still_validates(folder: Path, tmp_path: Path) -> None:
    out = copied(folder, tmp_path / "out")
    unsealed(out)
    report = _full(out)
    assert report.errors == 0
    told = " ".join(report.not_checked)
    assert "made by a version that wrote no seals" in told
    assert "its receipt is older than such hashes" in told


def test_a_broken_seal_is_not_made_good_by_a_readme(folder: Path, tmp_path: Path) -> None:
    out = copied(folder, tmp_path / "out")
    text = (out / RECEIPT).read_text().replace('"offset":4096', '"offset":4097', 1)
    (out / RECEIPT).write_text(text)
    (out / "README.md").write_text("mine\n")
    account_for_readme(out)
    assert "QC049" in {finding.rule for finding in _full(out).findings}


# --- what a line may say ----------------------------------------------------------------------

_FILE = {"file": "config.json", "nbytes": 3}
_TENSOR = {
    "name": "a", "dtype": "U8", "shape": [1], "file": "model.safetensors", "offset": 0, "nbytes": 1,
    "xxh3": "0", "sources": [],
}  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        {**_FILE, "file": "../secret"},
        {**_FILE, "file": "/etc/passwd"},
        {**_FILE, "file": ".qconvert/lock"},
        {**_FILE, "file": "a//b"},
        {**_FILE, "nbytes": True},
        {**_FILE, "surprise": 1},
        {**_FILE, "xxh3": 5},
        {**_TENSOR, "shape": ["1"]},
        {**_TENSOR, "sources": [{}]},
        {key: value for key, value in _TENSOR.items() if key != "dtype"},
        [],
    ],
)
def test_a_foreign_receipt_line_is_refused(folder: Path, tmp_path: Path, line: object) -> None:
    out = copied(folder, tmp_path / "out")
    with (out / RECEIPT).open("r+") as stream:
        rest = stream.read()
        stream.seek(0)
        stream.write(json.dumps(line) + "\n" + rest)
    sealed_again(out)
    report = validate_folder(out, request=Request("headers"))
    assert [finding.rule for finding in report.findings] == ["QC001"]
    assert f"{RECEIPT}:1:" in report.findings[0].message


def test_seals_are_of_the_bytes_before_them() -> None:
    """Worked out here by hand."""
    data = sealed_manifest({"a": 1})
    body = b'{\n  "a": 1,\n'
    assert data == body + f'  "seal": "{digest(body)}"\n}}\n'.encode()
    assert json.loads(data) == {"a": 1, "seal": digest(body)}
    assert manifest_seal(data) == "sound"
    assert manifest_seal(data.replace(b"1", b"2", 1)) == "broken"
    assert manifest_seal(b'{\n  "a": 1\n}\n') == "none"
    text = json.dumps(_FILE)
    lines = sealed_lines([text])
    count, xxh3 = 1, digest((text + "\n").encode())
    assert lines == [text, f'{{"receipt":{{"lines":{count},"xxh3":"{xxh3}"}}}}']
    assert parse_receipt(("\n".join(lines) + "\n").encode(), Path("r")).seal == "sound"
