"""The safetensors header: exact bytes, nothing lost on the way, and the library agrees."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from checkpoints import BITS, edit_header, edit_header_text, read_shard, tensor, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st

from qconvert.checkpoint.safetensors import DATA_ALIGNMENT, build_header, header_places, read_header
from qconvert.core.dtypes import DTYPE_BITS, TensorType
from qconvert.core.errors import CheckpointError


def test_the_dtypes_and_their_sizes() -> None:
    assert DTYPE_BITS == BITS


def test_golden_header() -> None:
    """Three tensors of 2 x 3 x 2 = 12, 4 and 5 x 4 / 8 x 2 = 5 bytes, so the offsets are 0, 12, 16
    and 21. The JSON has 32 + 71 + 59 + 61 = 223 bytes: with the length's 8 they are 231, and
    4096 - 231 = 3865 spaces fill the first block. The length says 223 + 3865 = 4088 = 0x0FF8."""
    text = (
        b'{"__metadata__":{"format":"pt"},'
        b'"model.\xc3\xa4.weight":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},'
        b'"scalar":{"dtype":"F32","shape":[],"data_offsets":[12,16]},'
        b'"packed":{"dtype":"F4","shape":[5,2],"data_offsets":[16,21]}}'
    )
    assert len(text) == 223
    raw, offsets = build_header(
        [
            ("model.ä.weight", TensorType("BF16", (2, 3))),
            ("scalar", TensorType("F32", ())),
            ("packed", TensorType("F4", (5, 2))),
        ],
        {"format": "pt"},
    )
    assert raw == b"\xf8\x0f\0\0\0\0\0\0" + text + b" " * 3865
    assert offsets == (4096, 4108, 4112)


def test_golden_header_of_nothing() -> None:
    """`{"__metadata__":{}}` has 19 bytes; 4096 - 8 - 19 = 4069 spaces follow."""
    raw, offsets = build_header([], {})
    assert raw == struct.pack("<Q", 4088) + b'{"__metadata__":{}}' + b" " * 4069
    assert offsets == ()


@pytest.mark.parametrize("spare", [0, 1, 4095])
def test_data_starts_at_a_whole_block(spare: int) -> None:
    """A name that makes the header end `spare` bytes before a block does."""
    bare = len(build_header([("", TensorType("U8", (0,)))], {})[0].rstrip(b" "))
    name = "n" * (2 * DATA_ALIGNMENT - bare - spare)
    raw, offsets = build_header([(name, TensorType("U8", (0,)))], {})
    assert len(raw.rstrip(b" ")) == 2 * DATA_ALIGNMENT - spare
    assert len(raw) == 2 * DATA_ALIGNMENT
    assert offsets == (2 * DATA_ALIGNMENT,)
    assert header_places([(name, TensorType("U8", (0,)))], {}) == (len(raw), offsets)


@st.composite
def tensor_types(draw: st.DrawFn) -> TensorType:
    """Any dtype with up to four dimensions, scalars and empty tensors among them; sub-byte rows are
    made long enough to fill whole bytes."""
    dtype = draw(st.sampled_from(sorted(BITS)))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    if prod(shape) * BITS[dtype] % 8:
        shape.append(8)
    return TensorType(dtype, tuple(shape))


def _as_json(tensors: dict[str, TensorType], metadata: dict[str, str]) -> bytes:
    """A header's text as `json` writes it."""
    table: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, kind in tensors.items():
        spans = [at, at + kind.nbytes]
        table[name] = {"dtype": kind.dtype, "shape": list(kind.shape), "data_offsets": spans}
        at += kind.nbytes
    return json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()


# Half surrogates are no text; everything else may stand in a name.
names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)


@settings(max_examples=150)
@given(
    tensors=st.dictionaries(names.filter(lambda name: name != "__metadata__"), tensor_types()),
    metadata=st.dictionaries(names, names, max_size=3),
)
def test_what_is_built_is_read_back(
    tensors: dict[str, TensorType], metadata: dict[str, str]
) -> None:
    raw, offsets = build_header(list(tensors.items()), metadata)
    assert raw[8:].rstrip(b" ") == _as_json(tensors, metadata)
    assert header_places(list(tensors.items()), metadata) == (len(raw), offsets)
    body = sum(kind.nbytes for kind in tensors.values())
    with TemporaryDirectory() as folder:
        file = Path(folder, "x.safetensors")
        file.write_bytes(raw + b"\1" * body)
        header = read_header(file)
    assert header.metadata == metadata
    assert header.raw == raw
    assert (header.data_start, header.file_size) == (len(raw), len(raw) + body)
    found = {entry.name: (entry.type, entry.offset) for entry in header.entries}
    assert found == {
        name: (kind, at) for (name, kind), at in zip(tensors.items(), offsets, strict=True)
    }
    assert [entry.offset for entry in header.entries] == sorted(offsets)


@settings(max_examples=300)
@given(data=st.data())
def test_a_damaged_header_is_refused_or_says_the_same(data: st.DataObject) -> None:
    """Any byte of the header changed: an error of ours, never another, and never an entry that lies
    outside of the file."""
    raw, _ = build_header(
        [("a.weight", TensorType("BF16", (2, 3))), ("b", TensorType("F4", (4,)))], {"format": "pt"}
    )
    end = len(raw.rstrip(b" "))
    at = data.draw(st.integers(0, end))
    damaged = bytearray(raw + b"\1" * 14)
    damaged[at] = data.draw(st.integers(0, 255))
    with TemporaryDirectory() as folder:
        file = Path(folder, "x.safetensors")
        file.write_bytes(damaged)
        refusal, header = "", None
        try:
            header = read_header(file)
        except CheckpointError as error:
            refusal = str(error)
    if header is None:
        assert refusal.startswith(str(file))
        return
    assert sum(entry.type.nbytes for entry in header.entries) == 14
    assert all(
        header.data_start <= entry.offset <= header.file_size - entry.type.nbytes
        for entry in header.entries
    )


def test_an_empty_tensor_may_stand_anywhere(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    empty = tensor("BF16", 0, 4)
    write_shard(
        file, {"a": empty, "b": tensor("U8", 3), "c": empty, "d": tensor("U8", 1), "e": empty}
    )
    header = read_header(file)
    start = header.data_start
    assert {entry.name: entry.offset - start for entry in header.entries} == {
        "a": 0, "b": 0, "c": 3, "d": 3, "e": 4,
    }  # fmt: skip


def test_metadata_may_be_missing(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    write_shard(file, {"a": tensor("U8", 3)})
    edit_header_text(
        file, lambda text: json.dumps({"a": json.loads(text)["a"]}, separators=(",", ":")).encode()
    )
    assert read_header(file).metadata == {}


# --- The library ---------------------------------------------------------------------------------

# safetensors' name of a dtype, and torch's.
TORCH_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F16": "float16", "BF16": "bfloat16",
    "I16": "int16", "F32": "float32", "I32": "int32", "F64": "float64", "I64": "int64",
    "C64": "complex64",
}  # fmt: skip
SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (), "empty": (0, 3), "matrix": (2, 3), "cube": (2, 1, 2),
}  # fmt: skip


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open

    file = tmp_path / "x.safetensors"
    tensors = {
        f"{dtype}.{label}": TensorType(dtype, shape)
        for dtype in TORCH_DTYPES
        for label, shape in SHAPES.items()
    }
    raw, offsets = build_header(list(tensors.items()), {"format": "pt", "note": "ä"})
    # Zeros and ones only, which every dtype, booleans too, can hold.
    body = bytes(i % 3 % 2 for i in range(sum(kind.nbytes for kind in tensors.values())))
    file.write_bytes(raw + body)
    with safe_open(file, framework="pt") as opened:
        assert set(opened.keys()) == set(tensors)
        assert opened.metadata() == {"format": "pt", "note": "ä"}
        for (name, kind), at in zip(tensors.items(), offsets, strict=True):
            value: torch.Tensor = opened.get_tensor(name)
            assert value.dtype == getattr(torch, TORCH_DTYPES[kind.dtype])
            assert tuple(value.shape) == kind.shape
            start = at - len(raw)
            assert _bytes(value) == body[start : start + kind.nbytes], name


def test_the_library_reads_packed_four_bit_tensors(tmp_path: Path) -> None:
    from safetensors import safe_open

    file = tmp_path / "x.safetensors"
    raw, _ = build_header([("packed", TensorType("F4", (2, 4)))], {})
    file.write_bytes(raw + bytes([1, 2, 3, 4]))
    with safe_open(file, framework="pt") as opened:
        found = opened.get_slice("packed")
        assert found.get_dtype() == "F4"
        assert list(found.get_shape()) == [2, 4]


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    file = tmp_path / "x.safetensors"
    generator = torch.Generator().manual_seed(0)
    values = {
        f"{dtype}.{label}": _random(shape, getattr(torch, torch_name), generator)
        for dtype, torch_name in TORCH_DTYPES.items()
        for label, shape in SHAPES.items()
    }
    save_file(values, file, {"format": "pt"})
    header = read_header(file)
    assert header.metadata == {"format": "pt"}
    raw = file.read_bytes()
    found = {entry.name: entry for entry in header.entries}
    assert set(found) == set(values)
    for name, value in values.items():
        entry = found[name]
        dtype, _, label = name.partition(".")
        assert entry.type == TensorType(dtype, SHAPES[label])
        assert raw[entry.offset : entry.offset + entry.type.nbytes] == _bytes(value), name


def test_the_library_refuses_what_we_refuse(tmp_path: Path) -> None:
    """A hole, an overlap, bytes at the end: if the format came to allow them, this would say so."""
    from safetensors import SafetensorError, safe_open

    file = tmp_path / "x.safetensors"
    changes: list[dict[str, Any]] = [
        {"data_offsets": [1, 4]}, {"data_offsets": [0, 2]}, {"shape": [4]},
    ]  # fmt: skip
    for change in changes:
        write_shard(file, {"a": tensor("U8", 3)})
        edit_header(file, partial(_change, change=change))
        with pytest.raises(SafetensorError):
            safe_open(file, framework="np")
        with pytest.raises(CheckpointError):
            read_header(file)
    write_shard(file, {"a": tensor("U8", 3)})
    with file.open("ab") as stream:
        stream.write(b"\0")
    with pytest.raises(SafetensorError):
        safe_open(file, framework="np")
    with pytest.raises(CheckpointError):
        read_header(file)


def _change(table: dict[str, Any], change: Mapping[str, Any]) -> None:
    table["a"].update(change)


def test_the_test_writer_is_sound(tmp_path: Path) -> None:
    """The writer all other tests rest on, against the library."""
    from safetensors import safe_open

    values = {"a": tensor("U8", 2, 2), "b": tensor("F32", 3), "c": tensor("I64")}
    write_shard(tmp_path / "x.safetensors", values)
    with safe_open(tmp_path / "x.safetensors", framework="np") as opened:
        for name, value in values.items():
            assert opened.get_tensor(name).tobytes() == value.data
    table, data = read_shard(tmp_path / "x.safetensors")
    assert set(table) == {"__metadata__", *values}
    assert data == b"".join(value.data for value in values.values())


def _random(shape: tuple[int, ...], dtype: Any, generator: Any) -> Any:
    """Random values of a dtype, made of float32 where torch has no generator for it."""
    import torch

    return (torch.rand(shape, generator=generator) * 4).to(dtype)


def _bytes(value: Any) -> bytes:
    import torch

    found: bytes = value.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    return found
