"""Texts that are too deep, too long or of another kind: one sentence, no traceback."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import click
import pytest
from checkpoints import INDEX, bf16_moe, convert, edit_header_text, edit_json, run_cli, shard_name
from hostile_inputs import no_hang

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.cli import main as cli
from qconvert.core.errors import CheckpointError, RecipeError
from qconvert.core.json_text import parse_json
from qconvert.core.manifest_keys import parse_manifest
from qconvert.core.yaml_lines import load
from qconvert.recipe.recipe import parse_recipe

FIRST = shard_name(1)
MANIFEST, RECEIPT = "qconvert.json", "qconvert.receipt.jsonl"
DEEP = 100_000

YAML = {
    "deep lists": "passes: " + "[" * DEEP,
    "deep maps": "passes: " + "{a: " * DEEP,
    "deep blocks": "".join(" " * n + "a:\n" for n in range(400)),
    "deep dashes": "- " * DEEP,
    "deep questions": "? " * DEEP,
    "aliases": "\n".join(
        [
            "a0: &a0 [x, x]",
            *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)),
        ]
    ),
    "a chain of aliases": "\n".join(
        ["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 2000))]
    ),
    "itself": "passes: &a [*a]",
    "5,000 digits": "passes:\n  - amx: {numa: " + "9" * 5000 + "}",
    "4,000 digits": "passes:\n  - amx: {numa: " + "9" * 4000 + "}",
    "a size of digits": "passes: []\nmax_shard_size: " + "9" * 5000,
    "month 13": "passes:\n  - amx: {numa: 2024-13-01}",
    "no integer": "passes:\n  - amx: {numa: !!int x}",
    "no boolean": "passes:\n  - amx: {numa: !!bool maybe}",
    "sexagesimal": "passes:\n  - amx: {numa: 1" + ":59" * 3000 + "}",
    "merge": "a: &a {x: 1}\nb: {<<: *a}",
}


@pytest.mark.parametrize("text", YAML.values(), ids=YAML.keys())
def test_yaml_that_no_recipe_is(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with no_hang():
        result = run_cli("plan", tmp_path / "r.yaml", "x")
    assert result.code == 1
    assert "r.yaml" in result.err
    assert result.err.count("\n") == 1
    assert len(result.err) < 2000
    with no_hang(), pytest.raises(RecipeError):
        parse_recipe(text, "r")


@pytest.mark.parametrize("what", ["deep lists", "aliases", "5,000 digits", "no boolean"])
def test_the_same_as_front_matter(what: str, tmp_path: Path) -> None:
    """validate names it, and a conversion does not mind."""
    source = bf16_moe().write(tmp_path / "source")
    (source / "README.md").write_text(f"---\n{YAML[what]}\n---\n# x\n")
    with no_hang():
        assert run_cli("plan", "copy", source).code == 0
        result = run_cli("validate", source)
    assert result.code in (0, 3), result.err


@pytest.mark.parametrize("text", ["a: [1, 2]", "b: {c: no}", "", "- &x 1\n- *x"])
def test_yaml_that_is_one(text: str) -> None:
    import yaml

    assert load(text, "x") == yaml.safe_load(text)


# --- JSON ----------------------------------------------------------------------------------------

JSON = {
    "deep lists": "[" * DEEP,
    "deep and closed": "[" * 2000 + "]" * 2000,
    "deep objects": '{"a":' * DEEP,
    "5,000 digits": '{"a": ' + "9" * 5000 + "}",
    "4,000 digits": '{"a": ' + "9" * 4000 + "}",
    "many lists": '{"a": [' + "[]," * (1 << 20) + "[]]}",
    "half a surrogate": '{"a": "\\ud800"}',
    "no UTF-8": b'{"a": "\xff"}'.decode("latin-1"),
}


@pytest.mark.parametrize(
    ("name", "what"),
    [*(("config.json", what) for what in JSON),
     *((name, "many lists") for name in (INDEX, "hf_quant_config.json", MANIFEST))],
)  # fmt: skip
def test_json_that_is_none(name: str, what: str, tmp_path: Path) -> None:
    source = bf16_moe().write(tmp_path / "source")
    (source / name).write_bytes(JSON[what].encode("latin-1"))
    with no_hang():
        result = run_cli("plan", "copy", source)
    assert result.code == 1, result.out
    assert name in result.err
    assert result.err.count("\n") == 1
    assert len(result.err) < 2000


@pytest.mark.parametrize("text", JSON.values(), ids=JSON.keys())
def test_a_receipt_that_is_none(text: str, made: Path) -> None:
    with (made / RECEIPT).open("ab") as stream:
        stream.write(text.encode("latin-1") + b"\n")
    with no_hang():
        result = run_cli("validate", made, "--json")
    assert result.code == 3, result.err
    assert RECEIPT in json.loads(result.out)["findings"][0]["message"]


def test_json_that_is_some() -> None:
    for text in ("1", "[]", '{"a": [1, {"b": null}]}', "1" + "0" * 90, '"\\ud83d\\ude00"', "NaN"):
        assert str(parse_json(text, "x")) == str(json.loads(text))
    with pytest.raises(CheckpointError, match="x: is not valid JSON: an integer of thousands"):
        parse_json("9" * 5000, "x")


# --- The manifest --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bounded")
    convert("copy", bf16_moe().write(folder / "source"), folder / "made")
    return folder / "made"


@pytest.fixture
def made(master: Path, tmp_path: Path) -> Path:
    return shutil.copytree(master, tmp_path / "made")


MANIFESTS: list[dict[str, Any]] = [
    {"stage": 5},
    {"stage": {}},
    {"stage": {"number": 0, "of": 1, "layers": 5, "partition": [1], "environment": {}}},
    {"stage": {"number": 0, "of": 1, "layers": [0], "partition": [1], "environment": {}}},
    {"identity": 5},
    {"identity": {"qconvert": 5}},
    {"passes": [5]},
    {"passes": [{"name": 5, "options": {}}]},
    {"passes": [{"name": "dequant", "options": "Dequant()"}]},
    {"dropped": {"rule": [["x"]]}},
    {"dropped_files": {"a": 5}},
    {"amx": 5},
    {"amx": {}},
    {"pair": 5},
    {"gdn_groups": []},
    {"gdn_groups": -1},
    {"bytes": []},
    {"lossy_steps": {"a": "b"}},
    {"calibration": []},
    {"trtllm_gen": 5},
    {"merge": [{"name": "lora", "digest": "ab", "scale": "1"}]},
]


@pytest.mark.parametrize("facts", MANIFESTS, ids=str)
def test_a_manifest_of_other_kinds(facts: dict[str, Any], made: Path, tmp_path: Path) -> None:
    edit_json(made / MANIFEST, lambda manifest: manifest.update(facts))
    for words in (
        ("inspect", made),
        ("plan", "copy", made),
        ("run", "copy", made, tmp_path / "out"),
    ):
        result = run_cli(*words)
        assert result.code == 1, words
        assert MANIFEST in result.err
        assert repr(next(iter(facts))) in result.err
        assert result.err.count("\n") == 1
    assert run_cli("validate", made).code == 3


def test_every_manifest_of_ours_passes(made: Path) -> None:
    data = (made / MANIFEST).read_bytes()
    assert parse_manifest(data, MANIFEST) == json.loads(data)
    assert run_cli("inspect", made).code == 0


# --- Numbers and names ---------------------------------------------------------------------------


@pytest.mark.parametrize("digits", [20, 4000, 5000])
@pytest.mark.parametrize("key", ["shape", "data_offsets"])
def test_a_header_of_many_digits(digits: int, key: str, tmp_path: Path) -> None:
    source = bf16_moe().write(tmp_path / "source")
    number = "9" * digits

    def change(text: bytes) -> bytes:
        table = json.loads(text)
        name = next(name for name in table if name != "__metadata__")
        table[name][key] = ["N", "N"]
        return json.dumps(table).replace('"N"', number).encode()

    edit_header_text(source / FIRST, change)
    result = run_cli("inspect", source)
    assert result.code == 1
    assert FIRST in result.err
    assert len(result.err) < 2000


def test_a_header_of_many_dimensions(tmp_path: Path) -> None:
    """Their product has more digits than Python prints."""
    source = bf16_moe().write(tmp_path / "source")

    def change(text: bytes) -> bytes:
        table = json.loads(text)
        name = next(name for name in table if name != "__metadata__")
        table[name]["shape"] = [2**62] * 500
        return json.dumps(table).encode()

    edit_header_text(source / FIRST, change)
    result = run_cli("inspect", source)
    assert result.code == 1
    assert "dimensions" in result.err


@pytest.mark.parametrize(
    "words",
    [
        ("validate", "x", "--layers", "9" * 5000),
        ("validate", "x", "--layers", "0-" + "9" * 5000),
        ("plan", "copy", "x", "--memory", "9" * 5000),
        ("plan", "copy", "x", "--jobs", "9" * 5000),
        ("w4a16", "x", "y", "--group", "9" * 5000),
    ],
    ids=lambda words: f"{words[0]} {words[-2]}",
)
def test_options_of_many_digits(words: tuple[str, ...]) -> None:
    result = run_cli(*words)
    assert result.code in (1, 2)
    assert len(result.err) < 2000


@pytest.mark.parametrize("pp", ["9" * 5000, "9" * 4000, "1," + "9" * 5000])
def test_a_partition_of_many_digits(pp: str, tmp_path: Path) -> None:
    source = bf16_moe().write(tmp_path / "source")
    result = run_cli("split", source, tmp_path / "out", "--pp", pp, "--for", "vllm")
    assert result.code in (1, 2)
    assert len(result.err) < 2000


@pytest.mark.parametrize("name", [b"n\xff.txt", b"sub/\x80\n.json"])
def test_a_side_file_whose_name_is_no_text(name: bytes, tmp_path: Path) -> None:
    source = bf16_moe().write(tmp_path / "source")
    file = os.fsencode(source) + b"/" + name
    os.makedirs(os.path.dirname(file), exist_ok=True)  # noqa: PTH120 - bytes
    with open(file, "wb"):
        pass
    for words in (("inspect", source), ("run", "copy", source, tmp_path / "out")):
        result = run_cli(*words)
        assert result.code == 1
        assert "is not valid UTF-8" in result.err
        assert result.err.count("\n") == 1
    with pytest.raises(CheckpointError, match="not valid UTF-8"):
        Checkpoint.open(source)


# --- The last line -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MemoryError, RecursionError])
def test_what_runs_out_is_one_sentence(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any) -> None:
        raise kind("x")

    monkeypatch.setattr(click.Group, "invoke", fail)
    result = run_cli("inspect", tmp_path)
    assert result.code == 1
    assert result.err.startswith("qconvert: error: inspect: ran out of ")
    assert result.err.count("\n") == 1


def test_a_bug_still_shows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(click.Group, "invoke", fail)
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["inspect", "x"])
