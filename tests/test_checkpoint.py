"""Opening a checkpoint: what belongs to it, what travels along, and where it may lie."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from checkpoints import (
    INDEX,
    Model,
    bf16_moe,
    convert,
    edit_json,
    fp8_moe,
    read_tensors,
    run_cli,
    shard_name,
    tensor,
    tree,
    write_json,
    write_shard,
)

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import CheckpointError
from qconvert.core.family import without_quantization

FIRST, SECOND = shard_name(1), shard_name(2)


def test_tensors_config_and_shards(tmp_path: Path) -> None:
    model = fp8_moe()
    found = Checkpoint.open(model.write(tmp_path / "source"))
    assert {name: (s.type.dtype, s.type.shape) for name, s in found.items()} == {
        name: (value.dtype, value.shape) for name, value in model.tensors.items()
    }
    assert [shard.path.name for shard in found.shards] == [FIRST, SECOND]
    for name, source in found.items():
        raw = found.shards[source.shard].path.read_bytes()
        assert raw[source.offset : source.offset + source.type.nbytes] == model.tensors[name].data
    assert found.config == model.config
    assert found.config_bytes == (tmp_path / "source" / "config.json").read_bytes()
    assert found.nbytes == sum(len(value.data) for value in model.tensors.values())
    assert found.indexed
    assert found.warnings == ()


@pytest.mark.parametrize("shards", [1, 3])
def test_no_index_is_needed_for_a_complete_set(shards: int, tmp_path: Path) -> None:
    source = fp8_moe().write(tmp_path / "source", shards=shards)
    (source / INDEX).unlink(missing_ok=True)
    found = Checkpoint.open(source)
    assert set(found) == set(fp8_moe().tensors)
    assert not found.indexed
    assert len(found.warnings) == (shards > 1)
    assert all(INDEX in text for text in found.warnings)


def test_one_file_by_name(tmp_path: Path) -> None:
    """The rest of the folder, its index too, does not count."""
    source = fp8_moe().write(tmp_path / "source")
    found = Checkpoint.open(source / FIRST)
    assert [shard.path.name for shard in found.shards] == [FIRST]
    assert 0 < len(found) < len(fp8_moe().tensors)
    assert found.warnings == ()
    assert SECOND in found.denied_files


def test_a_shard_in_a_subfolder(tmp_path: Path) -> None:
    model = fp8_moe()
    source = model.write(tmp_path / "source")
    (source / "weights").mkdir()
    (source / FIRST).rename(source / "weights" / FIRST)

    def moved(index: dict[str, Any]) -> None:
        weight_map = index["weight_map"]
        index["weight_map"] = {
            name: f"weights/{FIRST}" if file == FIRST else file for name, file in weight_map.items()
        }

    edit_json(source / INDEX, moved)
    out = tmp_path / "out"
    convert("copy", source, out)
    assert read_tensors(out) == model.tensors
    assert not (out / "weights").exists()


@pytest.mark.parametrize(
    ("metadata", "warned"),
    [
        (None, False), ([], False), ({}, False), ({"total_size": None}, False), ("text", False),
        ({"total_size": 1904.0}, False),  # some writers state it so
        ({"total_size": 7}, True), ({"total_size": "7"}, True), ({"total_size": True}, True),
        ({"total_size": float("nan")}, True), ({"total_size": float("inf")}, True),
        ({"total_size": []}, True),
    ],
    ids=str,
)  # fmt: skip
def test_a_total_size_may_be_missing_and_a_wrong_one_is_a_warning(
    metadata: Any, warned: bool, tmp_path: Path
) -> None:
    model = fp8_moe()
    source = model.write(tmp_path / "source")
    assert sum(len(value.data) for value in model.tensors.values()) == 1904
    edit_json(source / INDEX, lambda index: index.update(metadata=metadata))
    warnings = Checkpoint.open(source).warnings
    assert len(warnings) == warned
    if warned:
        assert f"total_size {metadata['total_size']}" in warnings[0]
        assert "1904" in warnings[0]
        convert("dequant", source, tmp_path / "out")


# --- The Hub's cache -----------------------------------------------------------------------------


def _snapshot(cache: Path, model: Model, repo: str = "org/name") -> Path:
    """The layout huggingface_hub 1.x downloads into: files are links into ../../blobs."""
    home = cache / f"models--{repo.replace('/', '--')}"
    plain = model.write(cache / "plain")
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = home / "snapshots" / commit
    (home / "blobs").mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    for number, file in enumerate(sorted(path for path in plain.rglob("*") if path.is_file())):
        blob = home / "blobs" / f"{number:064x}"
        shutil.move(file, blob)
        link = snapshot / file.relative_to(plain)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    shutil.rmtree(plain)
    return snapshot


def _with_nested(model: Model) -> Model:
    model.side_files["assets/vocab.txt"] = b"a\nb\n"
    return model


def test_a_hub_snapshot_is_an_ordinary_source(tmp_path: Path) -> None:
    """The same bytes come out as from a plain folder, and as files, not links. Its path has the id of
    the repo that the card is to name."""
    plain = _with_nested(fp8_moe()).write(tmp_path / "plain")
    snapshot = _snapshot(tmp_path / "cache", _with_nested(fp8_moe()))
    before = tree(tmp_path / "cache")
    convert("dequant", plain, tmp_path / "from-plain", "--base-model", "org/name")
    convert("dequant", snapshot, tmp_path / "from-snapshot")
    assert tree(tmp_path / "from-snapshot") == tree(tmp_path / "from-plain")
    assert not any(path.is_symlink() for path in (tmp_path / "from-snapshot").rglob("*"))
    assert (tmp_path / "from-snapshot" / "assets" / "vocab.txt").read_bytes() == b"a\nb\n"
    assert tree(tmp_path / "cache") == before


def test_a_snapshot_by_its_repo_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = _snapshot(tmp_path / "cache", fp8_moe())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert Checkpoint.open("org/name").root.resolve() == snapshot.resolve()


def test_a_snapshot_whose_blob_is_gone(tmp_path: Path) -> None:
    """A download that was interrupted, or a cache that was cleaned."""
    snapshot = _snapshot(tmp_path / "cache", fp8_moe())
    (snapshot / FIRST).resolve().unlink()
    result = run_cli("dequant", snapshot, tmp_path / "out")
    assert result.code == 1
    assert FIRST in result.err
    assert "missing" in result.err


# --- Side files ----------------------------------------------------------------------------------

KEPT = {
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer.model": b"\x00\xff\xfe",
    "preprocessor_config.json": b"{}\r\n",
    "chat_template.jinja": b"{{ x }}",
    "merges.txt": b"",
    "LICENSE": b"free",
    "README.md": b"# Name\n",
    "modeling_x.py": b"raise SystemExit\n",
    "something.nobody.thought.of": b"?",
    "1_Pooling/config.json": b'{"pooling": "mean"}',
    "encoding/deep/er/table.csv": b"1;2\n",
    "inference/qconvert.json": b"{}",
    "binary": b"\x80\x04.",
    "sub/.hidden": b".",
}
DENIED = {
    "pytorch_model.bin": b"\x80\x04.",
    "pytorch_model.bin.index.json": b"{}",
    "adapter.safetensors": b"",
    "original/consolidated.00.pth": b"\x80",
    "model.Q4_K_M.gguf": b"GGUF",
    "TF_MODEL.H5": b"\x89HDF",
    "flax_model.msgpack": b"",
    "onnx/model.onnx": b"",
    "onnx/model.onnx_data": b"",
    "optimizer.pt": b"",
    "state.PKL": b"",
    "model.safetensors.incomplete": b"",
    ".gitattributes": b"*.bin lfs",
    "qconvert.receipt.jsonl": b"",
}
SHUT = {
    "b/.git": b"gitdir: x",
    ".qconvert": b"a file",
    ".qconvert-repair/commit.json": b"{}",
    "sub/.QConvert-later/a": b"another name of ours, on a file system without cases",
    ".git/config": b"[core]",
    ".cache/huggingface/x.lock": b"",
    "a/__pycache__/m.pyc": b"",
}


def test_side_files_by_deny_list(tmp_path: Path) -> None:
    """What nobody has denied is kept, byte for byte; what stays behind is named."""
    model = fp8_moe()
    model.side_files = {**KEPT, **DENIED, **SHUT}
    source = model.write(tmp_path / "source")
    found = Checkpoint.open(source)
    assert set(found.side_files) == set(KEPT)
    assert set(found.denied_files) == set(DENIED) | {
        "b/.git", ".qconvert", ".git/", ".cache/", "a/__pycache__/", ".qconvert-repair/",
        "sub/.QConvert-later/",
    }  # fmt: skip
    convert("dequant", source, tmp_path / "out")
    made = tree(tmp_path / "out")
    card = made.pop("README.md")
    assert isinstance(card, bytes)
    assert b"## How it was made" in card, "the source's own is about another folder"
    kept = {name: data for name, data in KEPT.items() if name != "README.md"}
    assert {name: made[name] for name in kept} == kept
    files = {name for name, data in made.items() if data is not None}
    assert files == {
        *kept, "config.json", "model.safetensors", "qconvert.json", "qconvert.receipt.jsonl",
    }  # fmt: skip


def test_a_stale_index_is_not_carried_along(tmp_path: Path) -> None:
    """One output file needs no index, and the source's would name files that are not there."""
    source = fp8_moe().write(tmp_path / "source", shards=3)
    convert("copy", source, tmp_path / "out")
    assert not (tmp_path / "out" / INDEX).exists()


def test_a_linked_folder_is_named_and_not_walked(tmp_path: Path) -> None:
    """It may lead anywhere, to itself too."""
    source = fp8_moe().write(tmp_path / "source")
    (source / "loop").symlink_to(".")
    found = Checkpoint.open(source)
    assert "loop/" in found.denied_files
    assert not any(name.startswith("loop") for name in found.side_files)


def test_a_pipe_is_not_a_side_file(tmp_path: Path) -> None:
    """Reading it would wait for ever."""
    source = fp8_moe().write(tmp_path / "source")
    os.mkfifo(source / "pipe")
    assert "pipe" in Checkpoint.open(source).denied_files
    convert("copy", source, tmp_path / "out")
    assert not (tmp_path / "out" / "pipe").exists()


# --- Quantization blocks -------------------------------------------------------------------------

BLOCK: Mapping[str, Any] = {"quant_method": "fp8"}


def _where(config: Mapping[str, Any], tmp_path: Path) -> list[str]:
    model = bf16_moe()
    model.config = {**model.config, **config}
    found = Checkpoint.open(model.write(tmp_path / "source"))
    return [block.where for block in found.quantization_configs]


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({}, []),
        ({"quantization_config": None}, []),
        ({"quantization_config": BLOCK}, ["config.json: quantization_config"]),
        ({"compression_config": BLOCK}, ["config.json: compression_config"]),
        (
            {"quantization_config": BLOCK, "text_config": {"quantization_config": BLOCK}},
            ["config.json: quantization_config", "config.json: text_config: quantization_config"],
        ),
        (
            {"a_config": {"b_config": {"quantization_config": BLOCK}}},
            ["config.json: a_config: b_config: quantization_config"],
        ),
    ],
)
def test_every_quantization_block_is_found_and_taken_out(
    config: Mapping[str, Any], where: list[str], tmp_path: Path
) -> None:
    assert _where(config, tmp_path) == where
    left = without_quantization({"hidden_size": 8, **config})
    assert BLOCK not in _values(left)
    assert left["hidden_size"] == 8
    assert _where(left, tmp_path / "again") == []


def _values(table: Mapping[str, Any]) -> list[Any]:
    found: list[Any] = []
    for value in table.values():
        found.append(value)
        if isinstance(value, Mapping):
            found += _values(value)
    return found


def test_modelopt_keeps_its_block_in_a_file(tmp_path: Path) -> None:
    source = bf16_moe().write(tmp_path / "source")
    write_json(source / "hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}})
    (block,) = Checkpoint.open(source).quantization_configs
    assert (block.where, block.method) == ("hf_quant_config.json", "modelopt")


# --- Changes under our feet ----------------------------------------------------------------------


def test_a_changed_shard_is_noticed(tmp_path: Path) -> None:
    source = fp8_moe().write(tmp_path / "source")
    found = Checkpoint.open(source)
    found.check_unchanged()
    os.utime(source / SECOND, ns=(1, 1))
    with pytest.raises(CheckpointError, match=SECOND):
        found.check_unchanged()
    (source / SECOND).unlink()
    with pytest.raises(CheckpointError, match=SECOND):
        found.check_unchanged()


def test_two_files_that_are_no_set(tmp_path: Path) -> None:
    """Two models in a folder: nobody can say which is meant."""
    source = fp8_moe().write(tmp_path / "source", shards=1)
    write_shard(source / "other.safetensors", {"a": tensor("U8", 1)})
    with pytest.raises(CheckpointError, match="name one file"):
        Checkpoint.open(source)
    assert set(Checkpoint.open(source / "other.safetensors")) == {"a"}
