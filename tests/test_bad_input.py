"""Whatever is wrong with a source or an output folder: one sentence that names it, nothing
published, the source untouched."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checkpoints import (
    INDEX,
    Model,
    Tensor,
    bf16_moe,
    edit_header,
    edit_header_text,
    edit_json,
    fp8_moe,
    published,
    read_shard,
    run_cli,
    shard_name,
    tensor,
    tree,
    without,
    write_json,
    write_shard,
)

from qconvert.run.folder import prepare as preparing

FIRST, SECOND = shard_name(1), shard_name(2)
EMBED = "model.embed_tokens.weight"
Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.1.mlp.experts.1.up_proj"


def refused(source: Path, out: Path, *says: str, at_run_time: bool = False) -> str:
    """Dequantize, which must be refused in one sentence saying all of `says`; returns it."""
    before = tree(source) if source.is_dir() else {}
    result = run_cli("dequant", source, out, "--jobs", "1")
    lines = result.err.splitlines()
    assert result.code == 1, result
    assert result.out == ""
    assert [line.startswith("qconvert: error: ") for line in lines].count(True) == 1, result.err
    assert lines[-1].startswith("qconvert: error: ")
    assert at_run_time or len(lines) == 1, "more than the one sentence"
    assert "Traceback" not in result.err
    for text in says:
        assert text in lines[-1]
    assert published(out) == []
    if source.is_dir():
        assert tree(source) == before
    return lines[-1]


class FileCase(NamedTuple):
    """`change` breaks a folder of the good sample; `says` is what the sentence must name."""

    name: str
    change: Callable[[Path], object]
    says: tuple[str, ...]


def _entry(**values: Any) -> Callable[[Path], None]:
    """Change the header entry of the embeddings, the first tensor of the first shard."""

    def change(folder: Path) -> None:
        edit_header(folder / FIRST, lambda table: table[EMBED].update(values))

    return change


def _text(old: bytes, new: bytes) -> Callable[[Path], None]:
    def replace(text: bytes) -> bytes:
        assert old in text
        return text.replace(old, new, 1)

    return lambda folder: edit_header_text(folder / FIRST, replace)


def _length(value: int) -> Callable[[Path], None]:
    """Let the first eight bytes claim a header of another length."""

    def change(folder: Path) -> None:
        raw = (folder / FIRST).read_bytes()
        (folder / FIRST).write_bytes(struct.pack("<Q", value) + raw[8:])

    return change


def _cut(size: int) -> Callable[[Path], None]:
    """Keep `size` bytes of the first shard, or take that many off where negative."""

    def change(folder: Path) -> None:
        raw = (folder / FIRST).read_bytes()
        (folder / FIRST).write_bytes(raw[:size])

    return change


def _shift(by: int) -> Callable[[Path], None]:
    """Move the second tensor of the first shard and all behind it, and the data with them."""

    def change(folder: Path) -> None:
        table, data = read_shard(folder / FIRST)
        names = sorted(set(table) - {"__metadata__"}, key=lambda n: table[n]["data_offsets"][0])
        start = table[names[1]]["data_offsets"][0]
        for name in names[1:]:
            table[name]["data_offsets"] = [n + by for n in table[name]["data_offsets"]]
        body = data[:start] + b"\0" * by + data[start + max(0, -by) :]
        text = json.dumps(table).encode()
        (folder / FIRST).write_bytes(struct.pack("<Q", len(text)) + text + body)

    return change


def _index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / INDEX, lambda v: void(change(v["weight_map"])))


def void(_value: object) -> None:
    """For lambdas whose value nobody wants."""


def _config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", lambda v: void(change(v)))


def _quantization(**values: Any) -> Callable[[Path], None]:
    return _config(lambda config: config["quantization_config"].update(values))


def _without_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / SECOND).unlink()
    shutil.copy(folder / FIRST, folder / "model-00003-of-00003.safetensors")


def _twice(folder: Path) -> None:
    """The embeddings in the second shard too."""
    edit_json(folder / INDEX, lambda value: void(value["weight_map"].pop(EMBED)))
    table, data = read_shard(folder / FIRST)
    start, stop = table[EMBED]["data_offsets"]
    _append(folder / SECOND, EMBED, Tensor("BF16", tuple(table[EMBED]["shape"]), data[start:stop]))


def _append(file: Path, name: str, value: Tensor) -> None:
    table, data = read_shard(file)
    offsets = [len(data), len(data) + len(value.data)]
    table[name] = {"dtype": value.dtype, "shape": list(value.shape), "data_offsets": offsets}
    text = json.dumps(table).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data + value.data)


def _both_shards(folder: Path) -> None:
    """No index, and a tensor in both shards."""
    _twice(folder)
    (folder / INDEX).unlink()


def _only_pickles(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def _broken_link(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("gone")

    return change


def _fifo(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def _folder(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def _raw(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


BLOCK_SIZES: list[Any] = [[4], [4, 4, 4], [4, 0], [4, -4], [4, 4.0], [True, 4], 4, "4", {}]
BROKEN_FILES = [
    FileCase("empty shard", _cut(0), (FIRST, "too short")),
    FileCase("cut off in the length", _cut(7), (FIRST, "too short")),
    FileCase("cut off in the header", _cut(40), (FIRST, "truncated inside its header")),
    FileCase("cut off in the data", _cut(-1), (FIRST, "is truncated")),
    FileCase("header beyond the file", _length(1 << 20), (FIRST, "truncated inside its header")),
    FileCase("header over the limit", _length(100_000_001), (FIRST, "100000001", "100000000")),
    FileCase("header of 2^63 bytes", _length(1 << 63), (FIRST, "not a safetensors file")),
    FileCase("header shorter than its JSON", _length(40), (FIRST, "not JSON")),
    FileCase("header longer than its JSON", _text(b"}}", b"}}\0"), (FIRST, "not JSON")),
    FileCase("header not UTF-8", _text(b"pt", b"p\xff"), (FIRST, "not JSON")),
    FileCase("header in UTF-16", lambda folder: edit_header_text(
        folder / FIRST, lambda text: text.decode().encode("utf-16")), (FIRST, "not JSON")),
    FileCase("byte order mark", _text(b"{", b"\xef\xbb\xbf{"), (FIRST, "not JSON")),
    FileCase("half a surrogate", _text(EMBED.encode(), b"\\ud800"), (FIRST, "ud800")),
    FileCase("header a list", lambda folder: edit_header_text(
        folder / FIRST, lambda text: b"[]"), (FIRST, "not a JSON object")),
    FileCase("header nested deeply", lambda folder: edit_header_text(
        folder / FIRST, lambda text: b"[" * 200_000), (FIRST, "not a JSON object")),
    FileCase("tensor twice in a header", _text(
        b"{", f'{{"{EMBED}": {{"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}, '.encode()),
        (FIRST, EMBED, "twice")),
    FileCase("dtype twice", _text(b'"dtype"', b'"dtype": "F32", "dtype"'), (FIRST, "twice")),
    FileCase("metadata not strings", lambda folder: edit_header(
        folder / FIRST, lambda table: table["__metadata__"].update(format=1)),
        (FIRST, "__metadata__")),
    FileCase("overlap", _shift(-1), (FIRST, "overlaps")),
    FileCase("hole", _shift(1), (FIRST, "hole")),
    FileCase("hole at the start", lambda folder: edit_header_text(
        folder / FIRST, lambda text: b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}'),
        (FIRST, "'a'", "hole")),
    FileCase("bytes at the end", lambda folder: (folder / FIRST).open("ab").write(b"\0"),
             (FIRST, "belong to no tensor")),
    FileCase("range too short", _entry(shape=[11, 8]), (FIRST, EMBED, "176", "160")),
    FileCase("range backwards", _entry(data_offsets=[160, 0]), (FIRST, EMBED, "data_offsets")),
    FileCase("range of three", _entry(data_offsets=[0, 80, 160]), (FIRST, EMBED, "data_offsets")),
    FileCase("range negative", _entry(data_offsets=[-160, 0]), (FIRST, EMBED, "data_offsets")),
    FileCase("range no list", _entry(data_offsets=160), (FIRST, EMBED, "data_offsets")),
    FileCase("shape negative", _entry(shape=[-10, -8]), (FIRST, EMBED, "shape")),
    FileCase("shape float", _entry(shape=[10.0, 8]), (FIRST, EMBED, "shape")),
    FileCase("shape bool", _entry(shape=[True, 80]), (FIRST, EMBED, "shape")),
    FileCase("shape null", _entry(shape=None), (FIRST, EMBED, "shape")),
    FileCase("shape huge", _entry(shape=[1 << 62, 1 << 62]), (FIRST, EMBED, "takes")),
    FileCase("dtype unknown", _entry(dtype="BF17"), (FIRST, EMBED, "BF17")),
    FileCase("dtype a list", _entry(dtype=["BF16"]), (FIRST, EMBED, "BF16")),
    FileCase("dtype null", _entry(dtype=None), (FIRST, EMBED, "None")),
    FileCase("half a byte", _entry(dtype="F4", shape=[319]), (FIRST, EMBED, "whole bytes")),
    FileCase("entry with more keys", _entry(strides=[8, 1]), (FIRST, EMBED, "exactly")),
    FileCase("entry no object", lambda folder: edit_header(
        folder / FIRST, lambda table: table.update({EMBED: 1})), (FIRST, EMBED, "exactly")),
    FileCase("shard a folder", _folder(FIRST), (FIRST, INDEX)),
    FileCase("shard a pipe", _fifo(FIRST), (FIRST, INDEX)),
    FileCase("config a folder", _folder("config.json"), ("config.json", "directory")),
    FileCase("shard a broken link", _broken_link(FIRST), (FIRST, INDEX, "missing")),
    FileCase("side file a broken link", _broken_link("tokenizer.json"),
             ("tokenizer.json", "cannot be read")),
    FileCase("index names a missing file", _index(
        lambda m: m.update(extra="model-00003-of-00003.safetensors")),
        (INDEX, "model-00003-of-00003.safetensors", "missing")),
    FileCase("index points out of the folder", _index(lambda m: m.update(extra="../x.safetensors")),
             (INDEX, "extra", "../x.safetensors")),
    FileCase("index points down and out", _index(
        lambda m: m.update(extra="a/../../x.safetensors")), (INDEX, "extra", "../x.safetensors")),
    FileCase("index absolute", _index(lambda m: m.update(extra="/x.safetensors")),
             (INDEX, "extra", "/x.safetensors")),
    FileCase("index with a backslash", _index(lambda m: m.update(extra="..\\x.safetensors")),
             (INDEX, "extra", "x.safetensors")),
    FileCase("index names a pickle", _index(lambda m: m.update(extra="pytorch_model.bin")),
             (INDEX, "extra", "pytorch_model.bin", "pickle")),
    FileCase("index names a number", _index(lambda m: m.update(extra=1)), (INDEX, "extra")),
    FileCase("index names a list", _index(lambda m: m.update(extra=[])), (INDEX, "extra")),
    FileCase("index names nothing", _index(lambda m: m.update(extra="")), (INDEX, "extra")),
    FileCase("index without weight_map", lambda folder: write_json(folder / INDEX, {}),
             (INDEX, "weight_map")),
    FileCase("index with an empty weight_map", _index(lambda m: m.clear()), (INDEX, "weight_map")),
    FileCase("index with a list", lambda folder: write_json(folder / INDEX, {"weight_map": []}),
             (INDEX, "weight_map")),
    FileCase("index not JSON", _raw(INDEX, b"{"), (INDEX, "JSON")),
    FileCase("index a list", _raw(INDEX, b"[]"), (INDEX, "list")),
    FileCase("index knows too little", _index(lambda m: m.pop(EMBED)), (FIRST, EMBED, "name it")),
    FileCase("index knows too much", _index(lambda m: m.update(ghost=FIRST)),
             (INDEX, "ghost", FIRST)),
    FileCase("index has the wrong file", _index(lambda m: m.update({EMBED: SECOND})),
             (FIRST, SECOND, EMBED)),
    FileCase("tensor in two shards", _both_shards, (FIRST, SECOND, EMBED)),
    FileCase("no index, half a set", _without_index, (INDEX, "complete")),
    FileCase("only pickles", _only_pickles, ("source", "pickle", "safetensors")),
    FileCase("config missing", lambda folder: (folder / "config.json").unlink(),
             ("config.json", "missing")),
    FileCase("config broken", _raw("config.json", b'{"a": '), ("config.json", "JSON")),
    FileCase("config not UTF-8", _raw("config.json", b'{"a": "\xff"}'), ("config.json", "JSON")),
    FileCase("config a list", _raw("config.json", b"[1]"), ("config.json", "list")),
    FileCase("config a broken link", _broken_link("config.json"), ("config.json", "missing")),
    FileCase("no quantization block", _config(lambda c: c.pop("quantization_config")),
             ("config.json", "quantization_config")),
    FileCase("quantization block null", _config(lambda c: c.update(quantization_config=None)),
             ("config.json", "quantization_config")),
    FileCase("4-bit method", _quantization(quant_method="gptq", bits=4), ("config.json", "gptq")),
    FileCase("method missing", _config(lambda c: c["quantization_config"].pop("quant_method")),
             ("config.json", "quant_method")),
    FileCase("modelopt 4-bit", _quantization(quant_method="modelopt", quant_algo="NVFP4"),
             ("config.json", "NVFP4")),
    FileCase("two blocks that disagree", _config(lambda c: c.update(
        text_config={"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}})),
        ("config.json: quantization_config", "text_config", "(4, 4)", "(8, 8)")),
    FileCase("hf_quant_config disagrees", lambda folder: write_json(
        folder / "hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}),
        ("config.json", "hf_quant_config.json", "disagree")),
    FileCase("hf_quant_config broken", _raw("hf_quant_config.json", b"{"),
             ("hf_quant_config.json", "JSON")),
    FileCase("hf_quant_config odd", lambda folder: write_json(
        folder / "hf_quant_config.json", {"quantization": []}),
        ("hf_quant_config.json", "quantization")),
    *(
        FileCase(f"weight_block_size {size!r}", _quantization(weight_block_size=size),
                 ("config.json", "block"))
        for size in BLOCK_SIZES
    ),
    FileCase("too many layers in the config", _config(lambda c: c.update(num_hidden_layers=3)),
             ("model.layers.2.", "3 layers")),
    FileCase("too many experts in the config", _config(lambda c: c.update(num_experts=3)),
             (".experts.2.", "3 experts")),
]  # fmt: skip


@pytest.mark.parametrize("case", BROKEN_FILES, ids=lambda case: case.name.replace(" ", "-"))
def test_a_broken_file_is_refused(case: FileCase, tmp_path: Path) -> None:
    source = fp8_moe().write(tmp_path / "source")
    case.change(source)
    refused(source, tmp_path / "out", *case.says)


def test_the_sample_itself_is_sound(tmp_path: Path) -> None:
    """Else all of the above would prove nothing."""
    source = fp8_moe().write(tmp_path / "source")
    before = tree(source)
    result = run_cli("dequant", source, tmp_path / "out", "--jobs", "1")
    assert result.code == 0, result.err
    assert tree(source) == before
    assert "config.json" in published(tmp_path / "out")


class TensorCase(NamedTuple):
    """`change` breaks the sample's tensors or config before it is written."""

    name: str
    change: Callable[[Model], object]
    says: tuple[str, ...]


def _put(**values: Tensor) -> Callable[[Model], None]:
    """Replace the first query projection's `weight` or `scale`."""
    names = {"weight": f"{Q}.weight", "scale": f"{Q}.weight_scale_inv"}
    return lambda model: model.tensors.update({names[key]: v for key, v in values.items()})


def _take(*names: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        model.tensors = without(model.tensors, names)

    return change


def _unblocked(scale: Tensor) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        model.config["quantization_config"]["weight_block_size"] = None
        _put(scale=scale)(model)

    return change


def _replace_all(model: Model) -> None:
    model.tensors, model.config = bf16_moe().tensors, bf16_moe().config


BROKEN_TENSORS = [
    TensorCase("grid transposed", _put(
        weight=tensor("F8_E4M3", 8, 4), scale=tensor("F32", 1, 2)),
        (f"{Q}.weight'", f"{Q}.weight_scale_inv'", "[2, 1]", "[1, 2]")),
    TensorCase("grid too short", _put(scale=tensor("F32", 1, 2)), (f"{Q}.weight", "[2, 2]")),
    TensorCase("grid flat", _put(scale=tensor("F32", 4)), (f"{Q}.weight", "[4]")),
    TensorCase("grid scalar", _put(scale=tensor("F32")), (f"{Q}.weight", "[]")),
    TensorCase("scale an integer", _put(scale=tensor("I32", 2, 2)),
               (f"{Q}.weight_scale_inv", "I32")),
    TensorCase("scale FP8", _put(scale=tensor("F8_E4M3", 2, 2)),
               (f"{Q}.weight_scale_inv", "F8_E4M3")),
    TensorCase("scale U8 unexplained", _put(scale=tensor("U8", 2, 2)),
               (f"{Q}.weight_scale_inv", "ue8m0", "config.json")),
    TensorCase("weight one-dimensional", _put(weight=tensor("F8_E4M3", 64)),
               (f"{Q}.weight", "[64]")),
    TensorCase("channel scale of the wrong length", _unblocked(tensor("F32", 7, 1)),
               ("model.layers.0.", "no block size", "[8, 1]")),
    TensorCase("weight without scale", _take(f"{Q}.weight_scale_inv"),
               (f"{Q}.weight", "no scale", f"{Q}.weight_scale_inv")),
    TensorCase("scale without weight", _take(f"{UP}.weight"), (f"{UP}.weight",)),
    TensorCase("scale without any weight of its kind", lambda model: model.tensors.update(
        {"model.stray.weight_scale_inv": tensor("F32", 1, 1)}),
        ("model.stray.weight_scale_inv", "model.stray.weight")),
    TensorCase("two scales", lambda model: model.tensors.update(
        {f"{Q}.weight_scale": tensor("F32", 2, 2)}), (f"{Q}.weight", "2 scales")),
    TensorCase("a layer short", _take(
        *(name for name in fp8_moe().tensors if name.startswith("model.layers.1.self_attn."))),
        ("model.layers.1.self_attn.", "2 layers")),
    TensorCase("an expert short", _take(f"{UP}.weight", f"{UP}.weight_scale_inv"),
               (f"{UP}.weight", "2 experts")),
    TensorCase("nothing to do", _replace_all, ("dequant", "no quantized weight")),
]  # fmt: skip


@pytest.mark.parametrize("case", BROKEN_TENSORS, ids=lambda case: case.name.replace(" ", "-"))
def test_tensors_that_do_not_fit_are_refused(case: TensorCase, tmp_path: Path) -> None:
    model = fp8_moe()
    case.change(model)
    refused(model.write(tmp_path / "source"), tmp_path / "out", *case.says)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_scale_that_is_no_number_stops_the_run(value: float, tmp_path: Path) -> None:
    model = fp8_moe()
    good = model.tensors[f"{UP}.weight_scale_inv"]
    data = good.data[:-4] + struct.pack("<f", value)
    model.tensors[f"{UP}.weight_scale_inv"] = good._replace(data=data)
    source = model.write(tmp_path / "source")
    says = (f"{UP}.weight_scale_inv", "NaN or infinite")
    refused(source, tmp_path / "out", *says, at_run_time=True)
    assert os.listdir(tmp_path / "out") == [".qconvert"]


def test_an_exponent_that_is_nan_stops_the_run(tmp_path: Path) -> None:
    """E8M0 255 is NaN."""
    model = fp8_moe()
    model.config["quantization_config"]["scale_fmt"] = "ue8m0"
    model.tensors[f"{Q}.weight_scale_inv"] = Tensor("U8", (2, 2), bytes([127, 127, 255, 127]))
    source = model.write(tmp_path / "source")
    refused(source, tmp_path / "out", f"{Q}.weight_scale_inv", "NaN", at_run_time=True)


def test_a_source_that_changes_under_the_plan_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = fp8_moe().write(tmp_path / "source")
    prepare = preparing.prepare_together

    def touched(*arguments: Any) -> Any:
        ready = prepare(*arguments)
        os.utime(source / SECOND, ns=(1, 1))
        return ready

    monkeypatch.setattr("qconvert.service.converting.prepare_together", touched)
    refused(source, tmp_path / "out", SECOND, "changed", at_run_time=True)


# --- The output folder ---------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return fp8_moe().write(tmp_path / "source")


def untouched(source: Path, out: Path, *says: str) -> None:
    """Refused, and `out` as it was, whatever it held."""
    before = tree(out) if out.is_dir() else None
    source_before = tree(source)
    result = run_cli("dequant", source, out, "--jobs", "1")
    lines = result.err.splitlines()
    assert result.code == 1, result
    assert [line for line in lines if line.startswith("qconvert: error: ")] == [lines[-1]]
    assert "Traceback" not in result.err
    for text in says:
        assert text in lines[-1]
    assert (tree(out) if out.is_dir() else None) == before
    assert tree(source) == source_before


def test_a_foreign_folder_is_left_alone(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("three years of work")
    untouched(source, out, str(out), "thesis.txt")


def test_a_folder_of_other_weights_is_left_alone(source: Path, tmp_path: Path) -> None:
    untouched(source, bf16_moe().write(tmp_path / "out"), str(tmp_path / "out"), "not empty")


def test_the_result_of_another_plan_is_left_alone(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run_cli("run", "copy", source, out).code == 0
    untouched(source, out, str(out), "another plan")


def test_output_below_a_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    untouched(source, tmp_path / "file" / "out", str(tmp_path / "file" / "out"), "Not a directory")


def test_output_is_a_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    untouched(source, tmp_path / "out", str(tmp_path / "out"))
    assert (tmp_path / "out").read_text() == "mine"


def test_output_where_nobody_may_write(source: Path) -> None:
    """/proc takes no folder, from root neither, and has no room."""
    untouched(source, Path("/proc/qconvert-out"), "/proc/qconvert-out")
    assert not Path("/proc/qconvert-out").exists()


@pytest.mark.parametrize("place", ["source", "source/inside", "source/in/side", "."])
def test_output_on_in_or_around_the_source(place: str, tmp_path: Path) -> None:
    source = fp8_moe().write(tmp_path / "source")
    untouched(source, tmp_path / place, str(tmp_path / place), "apart from the source")


@pytest.mark.parametrize("place", ["link", "link/inside"])
def test_output_on_or_in_the_source_through_a_link(place: str, tmp_path: Path) -> None:
    source = fp8_moe().write(tmp_path / "source")
    (tmp_path / "link").symlink_to(source)
    untouched(source, tmp_path / place, "apart from the source")


def test_source_through_a_link_and_output_on_it(tmp_path: Path) -> None:
    source = fp8_moe().write(tmp_path / "source")
    (tmp_path / "link").symlink_to(source)
    untouched(tmp_path / "link", source, "apart from the source")


# --- What is no checkpoint at all ----------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["gone", "no/such", "../gone", "./gone", "a/b/c", "--/x", "x" * 300]
)
def test_a_source_that_is_not_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`no/such` could be a repo of the Hub; nothing is fetched either way."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    result = run_cli("inspect", "--", name)
    assert result.code == 1
    assert result.err.startswith("qconvert: error: ")
    assert result.err.count("\n") == 1
    assert str(Path(name)) in result.err


def test_a_source_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unset shell variable is not the current folder."""
    monkeypatch.chdir(fp8_moe().write(tmp_path / "source"))
    result = run_cli("inspect", "")
    assert result.code == 2
    assert "empty" in result.err
    assert run_cli("inspect", ".").code == 0


def test_a_source_that_is_a_pickle(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    refused(tmp_path / "pytorch_model.bin", tmp_path / "out", "pytorch_model.bin", "never opened")


@pytest.mark.parametrize("change", [_fifo("model.safetensors"), _folder("model.safetensors")])
def test_a_shard_without_index_that_is_no_file(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    """Opening a pipe would wait for ever."""
    source = fp8_moe().write(tmp_path / "source", shards=1)
    change(source)
    refused(source, tmp_path / "out", "model.safetensors", "regular file")


def test_shards_without_a_tensor(tmp_path: Path) -> None:
    source = tmp_path / "source"
    fp8_moe().write(source, shards=1)
    write_shard(source / "model.safetensors", {})
    refused(source, tmp_path / "out", str(source), "no tensor")


# --- Nothing of a source is ever run -------------------------------------------------------------


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def _armed(folder: Path, marker: Path) -> Path:
    """The sample with pickles and remote code that leave a marker when opened or imported."""
    model = fp8_moe(auto_map={"AutoModelForCausalLM": "modeling_x.XForCausalLM"})
    code = f"import os\nos.mkdir({str(marker)!r})\n".encode()
    model.side_files.update({"modeling_x.py": code, "configuration_x.py": code})
    for name in ("pytorch_model.bin", "training_args.pt", "optimizer.pkl", "rng_state.pth"):
        model.side_files[name] = pickle.dumps(Bomb(marker))
    return model.write(folder)


def test_pickles_and_remote_code_are_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    source, out = _armed(tmp_path / "source", marker), tmp_path / "out"
    # Two jobs: workers are fresh interpreters, and must not import from the source either.
    for arguments in (
        ("inspect", source),
        ("plan", "dequant-fp8", source),
        ("dequant", source, out, "--jobs", "2"),
        ("validate", out, "--against", source, "--level", "full"),
        ("diff", source, out),
    ):
        assert run_cli(*arguments).code in (0, 3)
    assert not marker.exists()
    assert (out / "modeling_x.py").read_bytes() == (source / "modeling_x.py").read_bytes()
    assert not {"pytorch_model.bin", "training_args.pt", "optimizer.pkl"} & set(published(out))
    pickle.loads((source / "pytorch_model.bin").read_bytes())
    assert marker.exists(), "the bombs were live"


# --- The same through a real process -------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"), [(_cut(-1), FIRST), (_quantization(weight_block_size=[4]), "config.json")]
)
def test_a_process_says_one_sentence(
    change: Callable[[Path], object], says: str, tmp_path: Path
) -> None:
    source = fp8_moe().write(tmp_path / "source")
    change(source)
    before = tree(source)
    command = [sys.executable, "-m", "qconvert", "dequant", str(source), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("qconvert: error: ")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr
    assert not (tmp_path / "out").exists()
    assert tree(source) == before
