"""Deliberately broken repos, made by code: one for every rule of validation, and one for every way in
which converters are known to have left a wrong repo behind.

`CORPUS` lists them, `SOUND` the repos they are broken from, which must have no finding. To add one,
write a function here that takes a `Bench`, breaks a copy of a sound repo and returns a `Repo`, and note
it with `broken(RULE, ...)`. A thread is the public report of users who were hit (`project#number`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import gdn_models
import numpy as np
import xxhash
from checkpoints import (
    INDEX,
    Model,
    Tensor,
    bf16_moe,
    convert,
    copied,
    edit_json,
    fp8_moe,
    read_shard,
    read_tensors,
    run_cli,
    tensor,
    without,
)

from qconvert.validation.runner import Level

CONFIG, MANIFEST, RECEIPT = "config.json", "qconvert.json", "qconvert.receipt.jsonl"
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
GDN = "model.language_model.layers.0.linear_attn"
_PROCESSOR = {"preprocessor_config.json": b"{}\n"}


@dataclass(frozen=True, slots=True)
class Repo:
    """A folder, and what it is validated against and with."""

    folder: Path
    against: Path | None = None
    pair: Path | None = None


@dataclass
class Bench:
    """Where repos are made. `shared` keeps the sound ones, which are made once; `scratch` is one
    entry's own."""

    shared: Path
    scratch: Path

    def sound(self, name: str) -> Path:
        """A sound repo, to be read only."""
        folder = self.shared / name
        if not folder.exists():
            SOUND[name].make(self, folder)
        return folder

    def copy(self, name: str) -> Path:
        """A sound repo to break."""
        return copied(self.sound(name), self.scratch / name)

    def write(self, model: Model, shards: int = 2) -> Repo:
        return Repo(model.write(self.scratch / "repo", shards))


@dataclass(frozen=True, slots=True)
class Sound:
    """A sound repo, and the name of the one it was made from."""

    make: Callable[[Bench, Path], object]
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Broken:
    """A broken repo: the one rule that finds it, how gravely, and how closely it must look."""

    rule: str
    name: str
    make: Callable[[Bench], Repo]
    severity: Literal["error", "warning"]
    level: Level
    thread: str
    beside: frozenset[str] = field(default=frozenset())


SOUND: dict[str, Sound] = {}
CORPUS: list[Broken] = []
Make = Callable[[Bench], Repo]
MakeSound = Callable[[Bench, Path], object]


def broken(
    rule: str,
    thread: str = "",
    *,
    severity: Literal["error", "warning"] = "error",
    level: Level = "headers",
    beside: Iterable[str] = (),
) -> Callable[[Make], Make]:
    """Note a broken repo. `beside` are rules that see the same fault from another side."""

    def note(make: Make) -> Make:
        name = make.__name__.strip("_")
        CORPUS.append(Broken(rule, name, make, severity, level, thread, frozenset(beside)))
        return make

    return note


def sound(source: str | None = None) -> Callable[[MakeSound], MakeSound]:
    def note(make: MakeSound) -> MakeSound:
        SOUND[make.__name__.strip("_")] = Sound(make, source)
        return make

    return note


# --- Sound repos ---------------------------------------------------------------------------------


def gdn_model(kind: str = "qwen3_5_moe", scale: str | None = None, **more: Any) -> Model:
    """Qwen3.5 with vision tower, or another class of it, as published: with processor files, and with
    lists that hold all names of a set."""
    model = gdn_models.model(kind, scale=scale, **more)
    model.side_files |= _PROCESSOR
    listed = model.config.get("quantization_config", {}).get("modules_to_not_convert", [])
    listed += [
        f"{name.removesuffix('in_proj_b')}in_proj_ba"
        for name in listed
        if name.endswith(".in_proj_b")
    ]
    return model


def packed_moe(**group: Any) -> Model:
    """bf16 but for its routed experts, which are packed INT4 as Kimi-K2 publishes them."""
    model = bf16_moe()
    weights = {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "symmetric": True, **group,
    }  # fmt: skip
    model.config["moe_intermediate_size"] = 16
    model.config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*self_attn.*"],
    }
    tensors: dict[str, Tensor] = {}
    for name, value in model.tensors.items():
        if ".experts." not in name:
            tensors[name] = value
            continue
        module = name.removesuffix(".weight")
        rows, columns = (8, 16) if module.endswith("down_proj") else (16, 8)
        tensors[f"{module}.weight_packed"] = tensor("I32", rows, columns // 8)
        tensors[f"{module}.weight_scale"] = bf16_ones(rows, columns // 8)
        shape = np.array([rows, columns], np.int64).tobytes()
        tensors[f"{module}.weight_shape"] = Tensor("I64", (2,), shape)
    model.tensors = tensors
    return model


def bf16_ones(*shape: int) -> Tensor:
    return Tensor("BF16", shape, np.full(shape, 0x3F80, "<u2").tobytes())


@sound()
def _moe_fp8(bench: Bench, out: Path) -> None:
    fp8_moe().write(out)


@sound()
def _moe_bf16(bench: Bench, out: Path) -> None:
    bf16_moe().write(out)


@sound()
def _moe_int4(bench: Bench, out: Path) -> None:
    packed_moe().write(out)


@sound("moe_fp8")
def _moe_dequantized(bench: Bench, out: Path) -> None:
    convert("dequant", bench.sound("moe_fp8"), out, "--max-shard-size", "1KB")


@sound("moe_fp8")
def _moe_copied(bench: Bench, out: Path) -> None:
    convert("copy", bench.sound("moe_fp8"), out)


@sound()
def _qwen35(bench: Bench, out: Path) -> None:
    gdn_model().write(out)


@sound()
def _qwen35_fp8(bench: Bench, out: Path) -> None:
    gdn_model(scale="F32").write(out)


@sound()
def _qwen35_ue8m0(bench: Bench, out: Path) -> None:
    gdn_model(scale="U8").write(out)


@sound()
def _qwen35_stacked(bench: Bench, out: Path) -> None:
    gdn_model(stacked=True).write(out)


@sound()
def _qwen35_text_tied(bench: Bench, out: Path) -> None:
    model = gdn_model("qwen3_5_moe_text")
    model.config["tie_word_embeddings"] = True
    model.tensors = without(model.tensors, [HEAD])
    model.write(out)


@sound()
def _qwen3_next(bench: Bench, out: Path) -> None:
    gdn_model("qwen3_next", "F32").write(out)


def recipe(bench: Bench, passes: str, source: str, out: Path) -> None:
    file = out.with_suffix(".yaml")
    file.write_text(f"passes:\n{passes}")
    convert(str(file), bench.sound(source), out)


@sound("qwen35_fp8")
def _fused_for_sglang(bench: Bench, out: Path) -> None:
    recipe(bench, "- fuse: {consumer: sglang}\n", "qwen35_fp8", out)


@sound("qwen35_fp8")
def _dequantized_and_fused(bench: Bench, out: Path) -> None:
    recipe(bench, "- dequant\n- fuse: {consumer: sglang}\n", "qwen35_fp8", out)


@sound("qwen35_ue8m0")
def _dequantized_ue8m0(bench: Bench, out: Path) -> None:
    recipe(bench, "- dequant\n", "qwen35_ue8m0", out)


@sound("qwen35_fp8")
def _as_qwen3_next(bench: Bench, out: Path) -> None:
    passes = "- fuse: {consumer: qwen3-next}\n- as_class: {to: qwen3_next}\n"
    recipe(bench, passes, "qwen35_fp8", out)


@sound("qwen3_next")
def _as_qwen35(bench: Bench, out: Path) -> None:
    recipe(bench, "- unfuse\n- as_class: {to: qwen3_5_text}\n", "qwen3_next", out)


@sound("qwen35_fp8")
def _without_drafts(bench: Bench, out: Path) -> None:
    recipe(bench, "- drop: {what: mtp}\n- dequant\n", "qwen35_fp8", out)


@sound("qwen35_stacked")
def _unstacked(bench: Bench, out: Path) -> None:
    recipe(bench, "- unstack\n", "qwen35_stacked", out)


@sound("qwen35")
def _stacked(bench: Bench, out: Path) -> None:
    recipe(bench, "- stack\n", "qwen35", out)


def experts_model() -> Model:
    """Sizes that the CPU's kernels and groups of 128 take, ordinary numbers."""
    model = bf16_moe(hidden_size=128, moe_intermediate_size=256, hidden_act="silu")
    sizes = {8: 128, 6: 256}
    for name, value in model.tensors.items():
        if name.endswith("_norm.weight") and "layernorm" not in name:
            continue
        shape = tuple(sizes.get(n, n) for n in value.shape)
        model.tensors[name] = gdn_models.bf16(gdn_models.numbers(name, *shape))
    return model


@sound()
def _experts(bench: Bench, out: Path) -> None:
    experts_model().write(out)


@sound("experts")
def _cpu(bench: Bench, out: Path) -> None:
    made = run_cli(
        "kt", bench.sound("experts"), "--cpu-out", out, "--cpu", "int4", "--numa", "2",
        "--gpu", "w4a16", "--gpu-out", out.with_name("gpu"), "--jobs", "1",
    )  # fmt: skip
    assert made.code == 0, made.err


@sound("experts")
def _gpu(bench: Bench, out: Path) -> None:
    bench.sound("cpu")


@sound("qwen35")
def _stages(bench: Bench, out: Path) -> None:
    made = run_cli("split", bench.sound("qwen35"), out, "--pp", "2,2", "--for", "sglang")
    assert made.code == 0, made.err


# --- Breaking ------------------------------------------------------------------------------------


def home(folder: Path, name: str) -> Path:
    """The shard a tensor is in."""
    for file in sorted(folder.glob("*.safetensors")):
        if name in read_shard(file)[0]:
            return file
    raise AssertionError(f"{name} is in no shard of {folder}")


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
    """Write a plain repo's tensors again after a change, in two shards with an index. Receipt and
    manifest, if any, go: another tool knows neither."""
    tensors = read_tensors(folder)
    edit(tensors)
    config = json.loads((folder / CONFIG).read_bytes())
    keep = {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if file.suffix != ".safetensors" and file.name not in (CONFIG, INDEX, MANIFEST, RECEIPT)
    }
    shutil.rmtree(folder)
    return Model(config, tensors, keep).write(folder)


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Change config.json, as a tool or a user would, and take our notes of it along: the receipt's line
    on it is for QC021 and QC022."""
    edit_json(folder / CONFIG, lambda config: (edit(config), None)[1])
    resized(folder, CONFIG)
    return folder


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Change the manifest and seal it again: a broken seal is another rule's."""
    edit_json(folder / MANIFEST, lambda manifest: (edit(manifest), None)[1])
    sealed_again(folder)
    resized(folder, MANIFEST)
    return folder


def sealed_again(folder: Path) -> None:
    """The seals that the manifest and receipt have now, made anew from their bytes."""
    file = folder / MANIFEST
    manifest = json.loads(file.read_bytes())
    if manifest.pop("seal", None) is not None:
        body = json.dumps(manifest, indent=2).removesuffix("\n}").encode() + b",\n"
        seal = f'  "seal": "{xxhash.xxh3_128(body).hexdigest()}"\n}}\n'
        file.write_bytes(body + seal.encode())
    file = folder / RECEIPT
    if file.is_file():
        lines = file.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if not line.startswith(b'{"receipt"')]
        if kept != lines:
            file.write_bytes(b"".join(kept) + _seal_of(kept))


def _seal_of(lines: list[bytes]) -> bytes:
    digest = xxhash.xxh3_128(b"".join(lines)).hexdigest()
    return f'{{"receipt":{{"lines":{len(lines)},"xxh3":"{digest}"}}}}\n'.encode()


def edit_receipt(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change every line; those for which `edit` returns False go. It is sealed again."""
    file = folder / RECEIPT
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [line for line in lines if "receipt" in line or edit(line) is not False]
    file.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in kept))
    sealed_again(folder)


def resized(folder: Path, name: str) -> None:
    if (folder / RECEIPT).is_file():

        def size(line: dict[str, Any]) -> None:
            if "name" not in line and line["file"] == name:
                line["nbytes"] = (folder / name).stat().st_size

        edit_receipt(folder, size)


def overwrite(folder: Path, name: str, data: bytes, start: int = 0) -> Path:
    """Other bytes in place of a tensor's, from `start` on."""
    file = home(folder, name)
    table, _ = read_shard(file)
    raw = bytearray(file.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    at = 8 + length + table[name]["data_offsets"][0] + start
    raw[at : at + len(data)] = data
    file.write_bytes(raw)
    return folder
