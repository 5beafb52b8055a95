"""Small checkpoints for tests, written with struct and json alone, and the command line in-process.

Nothing here uses qconvert to write files: what reads them must not have written them.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from qconvert.cli.main import main
from qconvert.core.graph import Source
from qconvert.run.work.reader import Reader

INDEX = "model.safetensors.index.json"
BLOCK = 4
HIDDEN, LAYERS, EXPERTS, INTERMEDIATE, VOCAB = 8, 2, 2, 6, 10

# Bits of an element, spelled out again: a wrong entry in qconvert's own table must show.
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "I16": 16, "U16": 16, "F32": 32, "I32": 32, "U32": 32,
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


class Tensor(NamedTuple):
    """A dtype, a shape and the bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def tensor(dtype: str, *shape: int, seed: int = 1) -> Tensor:
    """A tensor of bytes that differ from place to place. None of them is 0x7F or more, so FP8 codes
    are no NaN; float scales are the powers of two 0.5 and 2."""
    size = prod(shape) * BITS[dtype] // 8
    if dtype == "F32":
        period = struct.pack("<3f", *(2.0 if (i + seed) % 3 else 0.5 for i in range(3)))
    else:
        period = bytes((i * 37 + seed * 11) % 0x7F for i in range(0x7F))
    return Tensor(dtype, shape, (period * (size // len(period) + 1))[:size])


def write_shard(
    file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """One safetensors file, tensors in the given order."""
    table: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        offsets = [at, at + len(data)]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        at = offsets[1]
    text = json.dumps(table).encode()
    body = b"".join(data for _, _, data in tensors.values())
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)


def read_shard(file: Path) -> tuple[dict[str, Any], bytes]:
    """A file's header table and tensor data."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    table: dict[str, Any] = json.loads(raw[8 : 8 + length])
    return table, raw[8 + length :]


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's shards."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        table, data = read_shard(file)
        table.pop("__metadata__", None)
        for name, entry in table.items():
            start, stop = entry["data_offsets"]
            found[name] = Tensor(entry["dtype"], tuple(entry["shape"]), data[start:stop])
    return found


def edit_header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a file's header and leave its tensor data alone."""
    table, data = read_shard(file)
    change(table)
    text = json.dumps(table).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def edit_header_text(file: Path, change: Callable[[bytes], bytes]) -> None:
    """As `edit_header`, for what no JSON writer would write."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    text = change(raw[8 : 8 + length])
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def edit_json(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(file.read_bytes())
    change(value)
    write_json(file, value)


@dataclass
class Model:
    """A checkpoint to be: change it, then write it."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    side_files: dict[str, bytes] = field(default_factory=dict)

    def write(self, folder: Path, shards: int = 2) -> Path:
        """Write the folder, with an index where there are several shards. Returns it."""
        folder.mkdir(parents=True, exist_ok=True)
        names = list(self.tensors)
        cuts = [number * len(names) // shards for number in range(shards + 1)]
        weight_map: dict[str, str] = {}
        for number in range(shards):
            part = names[cuts[number] : cuts[number + 1]]
            file = shard_name(number + 1, shards)
            write_shard(folder / file, {name: self.tensors[name] for name in part})
            weight_map.update(dict.fromkeys(part, file))
        if shards > 1:
            total = sum(len(value.data) for value in self.tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_json(folder / INDEX, index)
        write_json(folder / "config.json", self.config)
        for name, data in self.side_files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return folder


def shard_name(number: int, shards: int = 2) -> str:
    if shards == 1:
        return "model.safetensors"
    return f"model-{number:05d}-of-{shards:05d}.safetensors"


def fp8_moe(**config: Any) -> Model:
    """A Qwen3-MoE of two layers and two experts, block FP8; keywords go to its config."""
    settings = {
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS,
        "moe_intermediate_size": INTERMEDIATE,
        "decoder_sparse_step": 1,
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
        **config,
    }
    tensors = {"model.embed_tokens.weight": tensor("BF16", VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        tensors.update(_layer(f"model.layers.{layer}", layer))
    tensors["model.norm.weight"] = tensor("BF16", HIDDEN)
    tensors["lm_head.weight"] = tensor("BF16", VOCAB, HIDDEN, seed=2)
    side = {
        "tokenizer.json": b'{"version": "1.0"}\n',
        "generation_config.json": b'{"do_sample": true}\n',
        "chat_template.jinja": b"{{ messages }}\n",
    }
    return Model(settings, tensors, side)


def wide_moe(vocab_size: int) -> Model:
    """`fp8_moe` with so many embeddings, of 16 bytes each: more bytes than its headers have."""
    model = fp8_moe(vocab_size=vocab_size)
    for seed, name in enumerate(("model.embed_tokens.weight", "lm_head.weight"), 4):
        model.tensors[name] = tensor("BF16", vocab_size, HIDDEN, seed=seed)
    return model


def _layer(at: str, seed: int) -> dict[str, Tensor]:
    found = {
        f"{at}.input_layernorm.weight": tensor("BF16", HIDDEN, seed=seed),
        f"{at}.post_attention_layernorm.weight": tensor("BF16", HIDDEN, seed=seed + 1),
    }
    for number, name in enumerate(("q_proj", "k_proj", "v_proj", "o_proj")):
        found.update(fp8_weight(f"{at}.self_attn.{name}", HIDDEN, HIDDEN, seed + number))
    for name in ("q_norm", "k_norm"):
        found[f"{at}.self_attn.{name}.weight"] = tensor("BF16", 4, seed=seed)
    found[f"{at}.mlp.gate.weight"] = tensor("BF16", EXPERTS, HIDDEN, seed=seed)
    for expert in range(EXPERTS):
        module = f"{at}.mlp.experts.{expert}"
        found.update(fp8_weight(f"{module}.gate_proj", INTERMEDIATE, HIDDEN, seed + expert))
        found.update(fp8_weight(f"{module}.up_proj", INTERMEDIATE, HIDDEN, seed + expert + 1))
        found.update(fp8_weight(f"{module}.down_proj", HIDDEN, INTERMEDIATE, seed + expert + 2))
    return found


def fp8_weight(module: str, rows: int, columns: int, seed: int = 1) -> dict[str, Tensor]:
    """A weight and its grid of block scales."""
    grid = -(-rows // BLOCK), -(-columns // BLOCK)
    return {
        f"{module}.weight": tensor("F8_E4M3", rows, columns, seed=seed),
        f"{module}.weight_scale_inv": tensor("F32", *grid, seed=seed),
    }


def bf16_moe(**config: Any) -> Model:
    """The same model without quantization."""
    model = fp8_moe(**config)
    del model.config["quantization_config"]
    model.tensors = {
        name: tensor("BF16", *value.shape) if value.dtype == "F8_E4M3" else value
        for name, value in model.tensors.items()
        if not name.endswith("_scale_inv")
    }
    return model


def tree(folder: Path) -> dict[str, bytes | str | None]:
    """All that lies in a folder: bytes of files, targets of links, None for folders."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            found[name] = path.read_bytes()
        else:
            found[name] = None
    return found


def published(out: Path) -> list[str]:
    """What a runtime would see of an output folder: everything but qconvert's workroom."""
    return sorted(set(os.listdir(out)) - {".qconvert"}) if out.is_dir() else []


class Result(NamedTuple):
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str


@contextmanager
def _unmeasured() -> Iterator[None]:
    """The plan's speed probe writes 64 MiB, and says something else every time."""
    with ExitStack() as stack:
        for name in ("read_rate", "write_rate"):
            stack.enter_context(mock.patch(f"qconvert.run.work.estimate.{name}", return_value=None))
        yield


def run_cli(*arguments: str | Path) -> Result:
    """A command in this process."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = None
    with _unmeasured(), redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as done:
            code = done.code
    assert isinstance(code, int), "a command ends by exiting with a number"
    return Result(code, out.getvalue(), err.getvalue())


def ran(*arguments: str | Path) -> Result:
    """A command in this process, which must succeed."""
    done = run_cli(*arguments)
    assert done.code == 0, done.err or done.out
    return done


def refused(*arguments: str | Path) -> str:
    """Output of a command in this process that ends with an error."""
    done = run_cli(*arguments)
    assert done.code == 1, done
    return done.err


def convert(command: str, source: Path, out: Path, *more: str) -> Result:
    """A conversion in this process, by `dequant` or a recipe's name, which must succeed."""
    words = ["run", command] if command != "dequant" else [command]
    return ran(*words, source, out, "--jobs", "1", *more)


def unjudged(recipe: str, source: Path, out: Path) -> None:
    """A recipe carried out without the command line's judgement of its plan: what validators shall find
    wrong has to be made somehow."""
    from qconvert.checkpoint.checkpoint import Checkpoint
    from qconvert.hub.readme import with_card
    from qconvert.plan.plan import Plan, run_passes
    from qconvert.recipe.recipe import parse_recipe
    from qconvert.run.executor import execute
    from qconvert.run.work.options import RunOptions

    passes = parse_recipe(recipe, "recipe").passes
    plan = run_passes(Plan.identity(Checkpoint.open(source)), passes)
    execute(with_card(plan), out, RunOptions(jobs=1))


def copied(folder: Path, to: Path) -> Path:
    """A copy to break, links kept as they are."""
    shutil.copytree(folder, to, symlinks=True)
    return to


def without(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """The tensors but for some, each of which must be there."""
    gone = set(names)
    assert gone <= set(tensors), gone - set(tensors)
    return {name: value for name, value in tensors.items() if name not in gone}


def watched_reads(
    monkeypatch: pytest.MonkeyPatch, of_each: Counter[str] | None = None
) -> list[int]:
    """From now on, the sizes of all reads of sources in this process, as they are made, and in `of_each`
    the bytes of each tensor."""
    sizes: list[int] = []
    read = Reader.read

    def watched(self: Reader, source: Source, start: int, into: memoryview) -> None:
        sizes.append(into.nbytes)
        if of_each is not None:
            of_each[source.name] += into.nbytes
        read(self, source, start, into)

    monkeypatch.setattr(Reader, "read", watched)
    return sizes
