"""What tests of rules on tensor data share: conversions of small checkpoints, made once, and their
tensors as arrays, read and written without qconvert."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gdn_models
import numpy as np
import xxhash
from checkpoints import Tensor, edit_json, read_shard, run_cli, unjudged, write_shard

from qconvert.checkpoint.checkpoint import MANIFEST, RECEIPT, Checkpoint
from qconvert.run.work.reader import Reader
from qconvert.validation.runner import Report, Request, validate_folder
from qconvert.validators.reading.matrices import matrices
from qconvert.validators.reading.rows import rows

Array = np.ndarray[Any, Any]
Made = Callable[[str], tuple[Path, Path]]
OURS = tuple(f"QC{number:03}" for number in range(60, 70))
W4A16 = "passes:\n- w4a16: {group_size: 16}\n"

SOURCES: Mapping[str, Mapping[str, Any]] = {
    "fp8": {"scale": "F32"},
    "fp8 text": {"kind": "qwen3_5_moe_text", "scale": "BF16"},
    "exponents": {"scale": "U8"},
    "bf16": {},
    "stacked": {"stacked": True},
    "next": {"kind": "qwen3_next", "scale": "F32"},
    "next bf16": {"kind": "qwen3_next"},
}
# By name: what it is made from, the command (or a recipe), and how its weights are stored.
CONVERSIONS: Mapping[str, tuple[str, str, str]] = {
    "copy": ("fp8", "run copy", ""),
    "dequant": ("fp8", "dequant", ""),
    "dequant exponents": ("exponents", "dequant", ""),
    "fuse": ("fp8", "fuse", "--for sglang"),
    "fuse text": ("fp8 text", "fuse", "--for sglang"),
    "fuse bf16": ("bf16", "fuse", "--for sglang"),
    "fuse from interleaved": ("next", "passes: [{fuse: {groups: 1}}]", ""),
    "as qwen3-next": ("stacked", "fuse", "--for qwen3-next"),
    "ranks": ("bf16", "fuse", "--groups 2"),
    "unfuse": ("next", "passes: [unfuse]", ""),
    "unfuse bf16": ("next bf16", "passes: [unfuse]", ""),
    "as qwen3.5": ("next bf16", "run qwen3-next-to-qwen3.5", ""),
    "stack": ("bf16", "experts stack", ""),
    "stack fp8": ("fp8", "experts stack", ""),
    "unstack": ("stacked", "experts unstack", ""),
    "w4a16": ("bf16", "run W4A16", ""),
    "w4a16 of stacks": ("stacked", "run W4A16", ""),
    "w4a16 of fp8": ("fp8", "run W4A16", ""),
    "dequant and fuse": ("fp8", "run qwen3.5-fp8-to-bf16-fused", ""),
}  # fmt: skip


def maker(folder: Path) -> Made:
    """Makes a conversion by its name, once, below a folder; gives its source and output."""
    (folder / "w4a16.yaml").write_text(W4A16)

    def source(name: str) -> Path:
        where = folder / f"source {name}"
        if not where.is_dir():
            gdn_models.model(**SOURCES[name]).write(where)
        return where

    def make(name: str) -> tuple[Path, Path]:
        of, command, flags = CONVERSIONS[name]
        words = command.replace("W4A16", str(folder / "w4a16.yaml")).split()
        out = folder / name
        if not out.is_dir() and command.startswith("passes:"):
            unjudged(command, source(of), out)  # steps, which no loader takes
        elif not out.is_dir():
            result = run_cli(*words, source(of), out, *flags.split(), "--jobs", "1")
            assert result.code == 0, result.err
        return source(of), out

    return make


def validated(out: Path, source: Path | None, level: Any = "full") -> Report:
    against = None if source is None else str(source)
    return validate_folder(out, against, request=Request(level, jobs=1))


def rules(report: Report) -> set[str]:
    """Rules of this file's subject that are broken."""
    return {finding.rule for finding in report.findings if finding.rule in OURS}


# --- Tensors in place -----------------------------------------------------------------------------


def home(folder: Path, name: str) -> tuple[Path, Tensor, int]:
    """The file of a tensor, the tensor, and where its bytes begin."""
    for file in sorted(folder.glob("*.safetensors")):
        table, data = read_shard(file)
        if name in table:
            start, stop = table[name]["data_offsets"]
            kind = table[name]["dtype"], tuple(table[name]["shape"])
            begin = file.stat().st_size - len(data) + start
            return file, Tensor(*kind, data[start:stop]), begin
    raise AssertionError(f"{name} is in no shard of {folder}")


def lines(folder: Path, name: str) -> Array:
    """A tensor's rows as bytes, [rows, bytes]; a copy."""
    value = home(folder, name)[1]
    rows = int(np.prod(value.shape[:-1])) if len(value.shape) > 1 else 1
    return np.frombuffer(value.data, np.uint8).reshape(rows, -1).copy()


def store(folder: Path, name: str, data: Array) -> None:
    file, value, begin = home(folder, name)
    raw = bytearray(file.read_bytes())
    assert data.nbytes == len(value.data)
    raw[begin : begin + data.nbytes] = data.tobytes()
    file.write_bytes(raw)


def without(folder: Path, name: str) -> None:
    """Take a tensor out of a folder that has an index."""
    file = home(folder, name)[0]
    table, data = read_shard(file)
    table.pop("__metadata__", None)
    kept = {
        n: Tensor(e["dtype"], tuple(e["shape"]), data[slice(*e["data_offsets"])])
        for n, e in table.items()
        if n != name
    }
    write_shard(file, kept)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        edit_json(index, lambda found: found["weight_map"].pop(name))


def floats(data: Array) -> Array:
    """bf16 bytes as float32."""
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


def halves(values: Array) -> Array:
    """float32 cut to bf16 bytes."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16
    return bits.astype("<u2").view(np.uint8)


def unsealed(folder: Path) -> None:
    """As version e869213 wrote receipt and manifest."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    del manifest["seal"]
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    *lines, _ = [json.loads(line) for line in (folder / RECEIPT).read_bytes().splitlines()]
    for line in lines:
        line.pop("header_xxh3", None)
        if line["file"] == MANIFEST:
            data = (folder / MANIFEST).read_bytes()
            line |= {"nbytes": len(data), "xxh3": xxhash.xxh3_128(data).hexdigest()}
    texts = [json.dumps(line, separators=(",", ":")) + "\n" for line in lines]
    (folder / RECEIPT).write_text("".join(texts))


def read_matrix(
    folder: Path, tensor: str, role: str | None = None, expert: int | None = None
) -> Array:
    """A matrix as the validators read it, in pieces of three rows."""
    checkpoint = Checkpoint.open(folder)
    (matrix,) = (
        m
        for m in matrices(checkpoint).values()
        if m.tensor == tensor and role in (None, m.role) and expert in (None, m.expert)
    )
    reader = Reader(checkpoint.shards)
    stops = range(0, matrix.rows, 3)
    parts = [rows(reader, matrix, at, min(at + 3, matrix.rows)) for at in stops]
    reader.close()
    return np.concatenate(parts)
