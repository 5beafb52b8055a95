"""Finished folders with one thing wrong in them, whatever code would have made it so: each is found by
the rule that is named, with `validate --level full --against`. No decoder sees any of these: scales of
activations and of the KV cache, lists of modules, what rules left out, files beside the weights, and
formats that the config states for other tensors. Receipts are left out, so that no hash tells.

Mutants of code: test_mutants.py. A new number in the manifest or config that a tensor must equal gets a
mutant here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gdn_models
import models
import pytest
from broken_repos import sealed_again
from checkpoints import (
    INDEX,
    Model,
    Tensor,
    copied,
    edit_json,
    read_tensors,
    run_cli,
    tensor,
    write_shard,
)
from encoded_models import encoded, gpt_oss
from encoded_models import nvfp4 as one_nvfp4
from input_stats import write_stats
from mutants import found_wrong
from sampled import sampled

from qconvert.validation.runner import Request, validate_folder

Tensors = dict[str, Tensor]
Json = dict[str, Any]
E0, E1 = "model.layers.0.mlp.experts.0", "model.layers.0.mlp.experts.1"
Q, K = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj"
STALE = "dequant: activation scales and shapes beside quantized weights"


# --- Folders -------------------------------------------------------------------------------------


def _moe(experts: int = 4) -> Model:
    model = models.qwen3_moe(hidden=128, intermediate=256, experts=experts)
    for name, value in model.tensors.items():
        model.tensors[name] = gdn_models.plain(name, *value.shape)[name]
    return model


def _biased() -> Model:
    """Block FP8 with biases of attention, and input scales."""
    model = models.qwen3_moe("fp8", hidden=128, intermediate=256, experts=2)
    model.config["attention_bias"] = True
    model.config["quantization_config"] = {
        **model.config["quantization_config"], "activation_scheme": "static",
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
    }  # fmt: skip
    for name, value in [*model.tensors.items()]:
        module = name.removesuffix(".weight")
        if value.dtype == "F8_E4M3":
            model.tensors[f"{module}.input_scale"] = f32(0.25)
        if module.endswith(("q_proj", "k_proj", "v_proj")):
            model.tensors |= gdn_models.plain(f"{module}.bias", value.shape[0])
    return model


def _tied() -> Model:
    model = _moe(2)
    model.config["tie_word_embeddings"] = True
    del model.tensors["lm_head.weight"]
    return model


class Made(NamedTuple):
    """A sound folder: a source, and the command that makes it of that; "": the source itself."""

    source: Callable[[], Model]
    command: str = ""


FOLDERS: Mapping[str, Made] = {
    "constant": Made(_moe, "fp8 --tensor --input-scale 0.01 --kv-scale 0.375"),
    "statistics": Made(_moe, "nvfp4 --dialect modelopt --stats STATS"),
    "divisors": Made(_moe, "nvfp4 --dialect compressed-tensors --stats STATS"),
    "fp8 statistics": Made(_moe, "fp8 --tensor --targets experts --stats STATS"),
    "relabelled": Made(
        lambda: one_nvfp4("modelopt", inputs=True), "relabel --to compressed-tensors --nearest"
    ),
    "dequantized": Made(_biased, "dequant"),
    "static": Made(_biased),
    "rows": Made(_moe, "fp8 --channel --kv-scale 0.5"),
    "int8": Made(_moe, "int8"),
    "blocks": Made(_moe, "fp8"),
    "packed": Made(_moe, "w4a16 --rtn --group-size 32 --targets Linear"),
    "gptq": Made(_moe, "w4a16 --rtn --group-size 32 --packing gptq"),
    "modelopt": Made(_moe, "nvfp4 --dialect modelopt --targets Linear --kv-scale 2"),
    "tied": Made(_tied, "fp8 --channel"),
    "tied blocks": Made(_tied, "fp8"),
    "awq": Made(lambda: encoded("qwen3_moe", "awq")[0]),
    "gpt-oss": Made(lambda: gpt_oss()[0]),
    "bf16": Made(_moe),
}


def sound(name: str, room: Path) -> tuple[Path, Path | None]:
    """The folder, without a receipt, and its source, None where it is one; made once in `room`."""
    made = FOLDERS[name]
    source, out = room / f"{name} source", room / name
    if not source.exists():
        made.source().write(source)
    if not made.command:
        return source, None
    if not out.exists():
        command, *more = made.command.split()
        stats = room / "stats"
        if "STATS" in more and not stats.exists():
            write_stats(stats, [0, 1], experts=4)
        words = [str(stats) if word == "STATS" else word for word in more]
        done = run_cli(command, source, out, *words, "--jobs", "1", "-q")
        assert done.code == 0, done.err
        (out / "qconvert.receipt.jsonl").unlink()
    return out, source


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


# --- What is wrong -------------------------------------------------------------------------------


def f32(value: float, *shape: int) -> Tensor:
    return Tensor("F32", shape, struct.pack("<f", value))


class Mutant(NamedTuple):
    """In `folder`, what `edit` does; found by an error of `rule`."""

    name: str
    folder: str
    rule: str
    edit: Callable[[Path], object]


def tensors(change: Callable[[Tensors], object]) -> Callable[[Path], object]:
    """Write all tensors again, in one file."""

    def edit(folder: Path) -> None:
        found = read_tensors(folder)
        change(found)
        for file in (*folder.glob("*.safetensors"), folder / INDEX):
            file.unlink(missing_ok=True)
        write_shard(folder / "model.safetensors", found)

    return edit


def config(change: Callable[[Json], object]) -> Callable[[Path], object]:
    """Change the quantization block, in both files that modelopt has it in."""

    def edit(folder: Path) -> None:
        edit_json(
            folder / "config.json", lambda whole: (change(whole["quantization_config"]), None)[1]
        )
        (folder / "hf_quant_config.json").unlink(missing_ok=True)

    return edit


def manifest(change: Callable[[Json], object]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        edit_json(folder / "qconvert.json", lambda whole: (change(whole), None)[1])
        sealed_again(folder)

    return edit


def scaled(
    end: str, factor: float, only: str = "", *, inverted: bool = False
) -> Callable[[Path], object]:
    """Scales of that end times a factor, or their reciprocals."""

    def change(found: Tensors) -> None:
        names = [name for name in found if name.endswith(end) and only in name]
        assert names
        for name in names:
            (value,) = struct.unpack("<f", found[name].data)
            found[name] = f32(1 / value if inverted else value * factor, *found[name].shape)

    return tensors(change)


def lost(*ends: str, only: str = "") -> Callable[[Path], object]:
    def change(found: Tensors) -> None:
        names = [name for name in found if name.endswith(ends) and only in name]
        assert names
        for name in names:
            del found[name]

    return tensors(change)


def exchanged(one: str, other: str) -> Callable[[Path], object]:
    def change(found: Tensors) -> None:
        assert found[one] != found[other]
        found[one], found[other] = found[other], found[one]

    return tensors(change)


def unlisted(*names: str) -> Callable[[Path], object]:
    def change(block: Json) -> None:
        key = next(k for k in ("ignore", "modules_to_not_convert") if k in block)
        assert {*names} <= {*block[key]}
        block[key] = [name for name in block[key] if name not in names]

    return config(change)


def group(**inside: Any) -> Callable[[Path], object]:
    """Change compressed-tensors' first group, or with `weights` what it says of those."""

    def change(block: Json) -> None:
        first = next(iter(block["config_groups"].values()))
        first["weights"].update(inside.pop("weights", {}))
        block["format"] = first["format"] = inside.pop("format", first["format"])
        first.update(inside)

    return config(change)


def block(**said: Any) -> Callable[[Path], object]:
    return config(lambda found: found.update(said))


def stated(**said: Any) -> Callable[[Path], object]:
    """Another block, which leaves out the same modules."""

    def change(found: Json) -> None:
        left = found.get("modules_to_not_convert", [])
        found.clear()
        found.update(said, ignore=left)

    return config(change)


def _static(kind: str) -> Json:
    return {"num_bits": 8, "type": kind, "strategy": "tensor", "dynamic": False}


def weights_named(folder: Path) -> None:
    other = {"transformers_weights": "other.safetensors"}
    edit_json(folder / "config.json", lambda whole: whole.update(other))


def dropped(rule: str, *ends: str) -> Callable[[Path], object]:
    """Tensors of these ends go, under a rule that is there for others."""

    def edit(folder: Path) -> None:
        names = [name for name in read_tensors(folder) if name.endswith(ends)]
        assert names
        lost(*ends)(folder)
        manifest(lambda found: found["dropped"].setdefault(rule, []).extend(names))(folder)

    return edit


def beside(name: str, held: str = "x") -> Callable[[Path], object]:
    """One more file of weights in the folder, whose weights have an index."""

    def edit(folder: Path) -> None:
        if not (folder / INDEX).exists():
            (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
            of = dict.fromkeys(read_tensors(folder), "model-00001-of-00001.safetensors")
            (folder / INDEX).write_text(json.dumps({"weight_map": of}))
        (folder / name).parent.mkdir(exist_ok=True)
        write_shard(folder / name, {held: tensor("BF16", 4)})

    return edit


def texts(name: str, value: Json) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(json.dumps(value))


def recast(end: str, dtype: str, only: str = "") -> Callable[[Path], object]:
    def change(found: Tensors) -> None:
        names = [name for name in found if name.endswith(end) and only in name]
        assert names
        for name in names:
            found[name] = Tensor(dtype, found[name].shape, found[name].data)

    return tensors(change)


def _own_pickle(folder: Path) -> None:
    """Shards without an index, which transformers does not look for, and a pickle that it does."""
    (folder / INDEX).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"PK")


def _rows_of_blocks(found: Tensors) -> None:
    for name in [name for name in found if name.endswith(".weight_scale_inv")]:
        rows = found[name.removesuffix("_scale_inv")].shape[0]
        found[name] = Tensor("F32", (rows, 1), struct.pack("<f", 0.01) * rows)


MUTANTS = (
    # --- scales of activations
    Mutant("a constant inverted", "constant", "QC112", scaled(".input_scale", 1, inverted=True)),
    Mutant("a constant of one expert", "constant", "QC112", scaled(".input_scale", 1000, only=E1)),
    Mutant("a constant of one layer", "constant", "QC112", scaled(".input_scale", 2, only="layers.1.")),
    Mutant(
        "a constant stated otherwise", "constant", "QC112",
        manifest(lambda m: m.update(input_scale=0.02)),
    ),
    Mutant("a constant one ulp off", "constant", "QC112", scaled(".input_scale", 1 + 2**-22, only=Q)),
    Mutant("a scale below 0", "constant", "QC068", scaled(".input_scale", -1, only=Q)),
    Mutant("an infinite scale", "constant", "QC068", scaled(".input_scale", float("inf"), only=Q)),
    Mutant("statistics inverted", "statistics", "QC112", scaled(".input_scale", 1, inverted=True)),
    Mutant(
        "statistics x1000 for an expert", "statistics", "QC112",
        scaled(".input_scale", 1000, only=E1),
    ),
    Mutant(
        "statistics of one layer doubled", "statistics", "QC112",
        scaled(".input_scale", 2, only="layers.0."),
    ),
    Mutant(
        "statistics of two experts exchanged", "statistics", "QC112",
        exchanged(f"{E0}.up_proj.input_scale", f"{E1}.up_proj.input_scale"),
    ),
    Mutant(
        "statistics of up for down", "statistics", "QC112",
        exchanged(f"{E0}.up_proj.input_scale", f"{E0}.down_proj.input_scale"),
    ),
    Mutant("statistics divided by FP8's largest", "statistics", "QC112", scaled(".input_scale", 6)),
    Mutant(
        "a divisor that multiplies", "divisors", "QC112",
        scaled(".input_global_scale", 1, inverted=True),
    ),
    Mutant(
        "a divisor of one layer halved", "divisors", "QC112",
        scaled(".input_global_scale", 0.5, only="layers.1."),
    ),
    Mutant("FP8 scales by NVFP4's range", "fp8 statistics", "QC112", scaled(".input_scale", 1 / 6)),
    Mutant("FP8 scales of one expert", "fp8 statistics", "QC112", scaled(".input_scale", 3, only=E0)),
    Mutant(
        "relabelled and not inverted", "relabelled", "QC112",
        scaled(".input_global_scale", 1, inverted=True),
    ),
    Mutant(
        "relabelled, one twice as large", "relabelled", "QC112",
        scaled(".input_global_scale", 2, only=f"{E1}.down"),
    ),
    # --- activations as the config states them
    Mutant("no scales of a constant", "constant", "QC101", lost(".input_scale")),
    Mutant("no scale of one expert", "constant", "QC101", lost(".input_scale", only=E1)),
    Mutant(
        "no scales of FP8 by statistics", "fp8 statistics", "QC101",
        lost(".input_scale", only=".down_proj"),
    ),
    Mutant("FP8 rows said static", "rows", "QC101", group(input_activations=_static("float"))),
    Mutant("INT8 said static", "int8", "QC101", group(input_activations=_static("int"))),
    Mutant("FP8 blocks said static", "blocks", "QC101", block(activation_scheme="static")),
    Mutant("a static source without one scale", "static", "QC101", lost(".input_scale", only=Q)),
    # --- the KV cache
    Mutant("keys' scale inverted", "constant", "QC112", scaled(".k_scale", 1, inverted=True)),
    Mutant("values of one layer doubled", "rows", "QC112", scaled(".v_scale", 2, only="layers.1.")),
    Mutant("a scale stated otherwise", "rows", "QC112", manifest(lambda m: m.update(kv_scale=0.25))),
    Mutant("one layer without scales", "rows", "QC111", lost(".k_scale", ".v_scale", only="layers.1.")),
    Mutant("no layer with scales", "rows", "QC111", lost(".k_scale", ".v_scale")),
    Mutant("keys' scales halved", "modelopt", "QC112", scaled(".k_scale", 0.5)),
    Mutant(
        "one layer's scales lost, modelopt", "modelopt", "QC111",
        lost(".k_scale", ".v_scale", only="layers.0."),
    ),
    # --- lists
    Mutant("a head off the list, INT8", "int8", "QC035", unlisted("lm_head")),
    Mutant("a head off the list, FP8 rows", "rows", "QC035", unlisted("lm_head")),
    Mutant("a head off the list, W4A16", "packed", "QC035", unlisted("lm_head")),
    Mutant("a head off the list, blocks", "blocks", "QC035", unlisted("lm_head")),
    Mutant("a head off the list, modelopt", "modelopt", "QC035", unlisted("lm_head")),
    Mutant("a tied head off the list", "tied", "QC035", unlisted("lm_head")),
    Mutant("a tied head off the list, blocks", "tied blocks", "QC035", unlisted("lm_head")),
    # --- rules that leave tensors out
    Mutant("biases as scales", "dequantized", "QC099", dropped(STALE, ".bias")),
    Mutant("norms of queries as scales", "dequantized", "QC099", dropped(STALE, ".q_norm.weight")),
    Mutant(
        "a router as of a draft", "dequantized", "QC099",
        dropped("drop: what=mtp", "layers.1.mlp.gate.weight"),
    ),
    Mutant(
        "a norm under no pass's rule", "dequantized", "QC099",
        dropped("text_only: of a tower, or of what joins one to the text model", "model.norm.weight"),
    ),
    # --- another format than the config states
    Mutant("INT8 said of FP8", "rows", "QC096", group(format="int-quantized", weights={"type": "int"})),
    Mutant(
        "FP8 said of INT8", "int8", "QC096",
        group(format="float-quantized", weights={"type": "float"}),
    ),
    Mutant(
        "INT8 said of packed codes", "packed", "QC096",
        group(format="int-quantized", weights={"num_bits": 8}),
    ),
    Mutant("FP8 codes of the other type", "blocks", "QC096", recast(".weight", "F8_E5M2", only=Q)),
    Mutant("rows' scales where blocks are stated", "blocks", "QC096", tensors(_rows_of_blocks)),
    Mutant(
        "NVFP4 said of FP8", "constant", "QC096",
        stated(quant_method="modelopt", quant_algo="NVFP4"),
    ),
    Mutant("NVFP4 said of FP8 experts", "blocks", "QC096", block(moe_quant_algo="NVFP4")),
    Mutant("GPTQ said of FP8", "blocks", "QC096", stated(quant_method="gptq", bits=4, group_size=128)),
    Mutant("AWQ said of GPTQ", "gptq", "QC089", stated(quant_method="awq", bits=4, group_size=32)),
    # --- formats that nothing judges
    *(
        Mutant(f"said to be of {method}", "blocks", rule, block(quant_method=method))
        for method, rule in (
            ("bitsandbytes", "QC096"), ("quark", "QC035"), ("auto-round", "QC097"), ("hqq", "QC097"),
            ("torchao", "QC097"),
        )
    ),
    Mutant("a sparse format", "packed", "QC097", group(format="marlin-24")),
    Mutant("three bits", "packed", "QC026", group(weights={"num_bits": 3})),
    Mutant("an algorithm of nobody's", "modelopt", "QC097", block(quant_algo="W4A8_AWQ")),
    Mutant("codes of no format", "bf16", "QC097", recast(".weight", "U16", only=Q)),
    Mutant("an AWQ scale lost", "awq", "QC088", lost(".scales", only=f"{E0}.up_proj")),
    Mutant(
        "AWQ zero points cut", "awq", "QC089",
        tensors(lambda t: t.update({f"{E0}.up_proj.qzeros": tensor("I32", 1, 1)})),
    ),
    Mutant("AWQ of another group size", "awq", "QC089", block(group_size=16)),
    Mutant("AWQ words of another type", "awq", "QC097", recast(".qweight", "F32", only=E0)),
    Mutant("AWQ's kernel version", "awq", "QC097", block(version="gemv")),
    # --- files that are read first
    Mutant("one file beside the index", "bf16", "QC098", beside("model.safetensors")),
    Mutant("Mistral's names", "bf16", "QC098", beside("consolidated-00001-of-00002.safetensors")),
    Mutant("tensors again in a loose shard", "bf16", "QC098", beside("more.safetensors", f"{Q}.weight")),
    Mutant("an adapter", "bf16", "QC098", texts("adapter_config.json", {"peft_type": "LORA"})),
    Mutant("a pickle that is found first", "bf16", "QC098", _own_pickle),
    Mutant("weights named by the config", "bf16", "QC098", weights_named),
)  # fmt: skip


@pytest.mark.parametrize("name", sampled(FOLDERS, 3))
def test_a_sound_folder_has_no_error(name: str, room: Path) -> None:
    out, source = sound(name, room)
    report = validate_folder(out, str(source) if source else None, request=Request("full", jobs=1))
    assert found_wrong(report.findings) == []
    if name in ("constant", "statistics", "divisors", "fp8 statistics", "relabelled", "rows"):
        wanted = (
            "scales of activations and of the KV cache are those of the source or of qconvert.json"
        )
        assert wanted in report.proved


@pytest.mark.parametrize("mutant", sampled(MUTANTS, 3, name=lambda mutant: mutant.name))
def test_what_is_wrong_is_found(mutant: Mutant, room: Path, tmp_path: Path) -> None:
    out, source = sound(mutant.folder, room)
    wrong = copied(out, tmp_path / "wrong")
    mutant.edit(wrong)
    request = Request("full" if mutant.rule in ("QC068", "QC112") else "headers", jobs=1)
    findings = validate_folder(wrong, str(source) if source else None, request=request).findings
    assert mutant.rule in {finding.rule for finding in found_wrong(findings)}, findings
