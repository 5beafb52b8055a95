"""Logits of every encoding that is read: what `dequant` makes, loaded as it is, against the encoded
folder loaded by the library that defines the encoding; equal to the last bit.

Where transformers 5.17 loads a folder on a CPU, its own loading is the other side: compressed-tensors'
decompression, and its quantizers of FP8 blocks and of gpt-oss, which dequantize there. Otherwise the
library's decoder makes the weights, and transformers loads those:

- NVFP4 of modelopt: transformers loads no such checkpoint (`quantizer_nvfp4.py`: "not supported yet").
- FP8 a matrix: its quantizers leave `weight_scale` unread (none, but for blocks and rows).
- AutoAWQ and GPTQ: it asks for GPTQModel, which is built for a GPU; AutoAWQ by compressed-tensors'
  converter, whose products are F16, and GPTQ by AutoGPTQ's formula, in float64 (int_forms.py).
- DeepSeek-V4's MXFP4: its FP8 quantizer has FP4 kernels for a GPU alone; compressed-tensors' loading of
  the same codes.
- Experts in INT8, MXFP8, NVFP4 and asymmetric INT4: its `DecompressExperts` fails; dense families stand
  for them, since an expert is read as any matrix is.

Weights alone are compared: `input_activations`, by which compressed-tensors rounds activations too, are
taken out of the config. Marked `peer`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import hf_models
import int_forms
import numpy as np
import pytest
import torch
from checkpoints import Model, Tensor, ran, read_tensors
from dequantized import as_torch
from encoded_models import awq, mxfp4, stored
from families import tiny
from families.loading import logits
from models import FP8_BLOCK
from safetensors.torch import save_file
from sampled import sampled

from qconvert.formats.nvfp4.format import group_config

pytestmark = pytest.mark.peer

Decoder = Callable[[dict[str, torch.Tensor]], torch.Tensor]
DENSE, MOE = ("llama", "qwen3"), ("qwen3_moe", "glm4_moe")
ALL = "--targets Linear"
# What makes the encoding, and the families in which transformers loads it.
COMMANDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "FP8 block": ("fp8", (*DENSE, "qwen3_moe")),
    "FP8 block, ue8m0": ("fp8 --ue8m0", DENSE),
    "FP8 rows": ("fp8 --channel", (*DENSE, *MOE, "deepseek_v3")),
    "NVFP4 compressed-tensors": (f"nvfp4 --dialect compressed-tensors {ALL}", DENSE),
    "MXFP4": (f"mx {ALL}", (*DENSE, *MOE, "deepseek_v3")),
    "MXFP8": (f"mx --bits 8 {ALL}", DENSE),
    "INT8 rows": ("int8", DENSE),
    "INT4": (f"w4a16 --rtn --group-size 32 {ALL}", (*DENSE, *MOE)),
    "INT4 asymmetric": (f"w4a16 --rtn --asymmetric --group-size 32 {ALL}", DENSE),
    "INT4 rows": (f"w4a16 --rtn --group-size channel {ALL}", DENSE),
    "INT8 packed": (f"w4a16 --rtn --bits 8 --group-size 32 {ALL}", (*DENSE, *MOE)),
}
# Calibrated codes: experts of NVFP4 by the dialect's library, INT4 loaded by transformers.
GPTQ = "--gptq --synthetic --samples 8 --length 48 --device cpu"
CALIBRATED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "INT4": (f"w4a16 {GPTQ} --group-size 32 {ALL}", ("llama", "qwen3", *MOE, "qwen3_next")),
    "INT4 rows": (f"w4a16 {GPTQ} --group-size channel {ALL}", ("deepseek_v3",)),
    "NVFP4 modelopt": (f"nvfp4 --dialect modelopt {GPTQ}", MOE),
    "NVFP4-packed": (f"nvfp4 --dialect compressed-tensors {GPTQ}", MOE),
}
SOLVED = [(name, family) for name, (_, families) in CALIBRATED.items() for family in families]
LOADED = [(name, family) for name, (_, families) in COMMANDS.items() for family in families]
# What makes the encoding, and whose decoder stands in for a loader.
DECODED: Mapping[str, str] = {
    "NVFP4 modelopt": f"nvfp4 --dialect modelopt {ALL}",
    "FP8 matrix": "fp8 --tensor",
    "FP8 matrix, compressed-tensors": "fp8 --tensor --dialect compressed-tensors",
    "GPTQ": f"w4a16 --rtn --packing gptq {ALL}",
    "GPTQ v2": f"w4a16 --rtn --packing gptq-v2 {ALL}",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def saved(family: str, folders: Path) -> Path:
    """A tiny model in BF16, made once."""
    folder = folders / family
    if not folder.exists():
        if hasattr(hf_models, family):
            hf_models.saved(getattr(hf_models, family)(), folder)
        else:
            tiny.saved(family, folder, {})
    return folder


def made(command: str, source: Path, out: Path) -> Path:
    name, *options = command.split()
    ran(name, source, out, *options, "--jobs", "1")
    return out


def dequantized(source: Path, *options: str) -> Path:
    return made(" ".join(("dequant", *options)), source, source.parent / f"{source.name}-plain")


def differs(source: Path, other: Path, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether encoding changed the logits: equal ones on both sides would prove nothing."""
    return not torch.equal(logits(source, dtype), logits(other, dtype))


def to_be_decoded(folder: Path) -> None:
    """Ask the library to dequantize the folder's weights as it loads, and to let activations be."""
    file = folder / "config.json"
    config = json.loads(file.read_bytes())
    block = config["quantization_config"]
    for group in block.get("config_groups", {}).values():
        group["input_activations"] = None
    block["dequantize"] = True
    file.unlink()
    file.write_text(json.dumps(config))


@pytest.mark.parametrize(("name", "family"), [pytest.param(*one.values[0], id=one.id, marks=one.marks)
    for one in sampled(LOADED, name=" of ".join)])  # fmt: skip
def test_logits_are_those_of_the_library_s_own_loading(
    name: str, family: str, folders: Path, tmp_path: Path
) -> None:
    source = saved(family, folders)
    encoded = made(COMMANDS[name][0], source, tmp_path / "encoded")
    plain = dequantized(encoded)
    to_be_decoded(encoded)
    assert torch.equal(logits(plain), logits(encoded))
    assert differs(source, plain)


@pytest.mark.parametrize(("name", "family"), [pytest.param(*one.values[0], id=one.id, marks=one.marks)
    for one in sampled(SOLVED, name=" of ".join)])  # fmt: skip
def test_logits_of_calibrated_codes(name: str, family: str, folders: Path, tmp_path: Path) -> None:
    source = saved(family, folders)
    encoded = made(CALIBRATED[name][0], source, tmp_path / "encoded")
    plain = dequantized(encoded)
    if name.startswith("NVFP4"):
        theirs = library(encoded, name, tmp_path / "theirs")
    else:
        to_be_decoded(encoded)
        theirs = encoded
    assert torch.equal(logits(plain), logits(theirs))
    assert differs(source, plain)


@pytest.mark.parametrize("family", sampled(DENSE))
@pytest.mark.parametrize("name", DECODED)
def test_logits_are_those_of_the_library_s_weights(
    name: str, family: str, folders: Path, tmp_path: Path
) -> None:
    source = saved(family, folders)
    encoded = made(DECODED[name], source, tmp_path / "encoded")
    plain = dequantized(encoded)
    theirs = library(encoded, name, tmp_path / "theirs")
    assert torch.equal(logits(plain), logits(theirs))
    assert differs(source, plain)


def library(folder: Path, name: str, out: Path) -> Path:
    """The folder with every weight as the library decodes it."""
    found = {n: as_torch(value) for n, value in read_tensors(folder).items()}
    config = json.loads((folder / "config.json").read_bytes())
    block = config.pop("quantization_config")
    decoders: dict[str, Decoder] = {
        "NVFP4": _modelopt, "NVFP4-packed": _compressed, "FP8": _fp8, "GPTQ": partial(_gptq, block),
    }  # fmt: skip
    decode = decoders[name.split()[0]]
    codes = {n.rpartition(".")[0] for n in found if n.endswith(("weight_scale", "scales"))}
    assert codes
    plain = {n: value for n, value in found.items() if n.rpartition(".")[0] not in codes}
    for module in codes:
        parts = {
            n.rpartition(".")[2]: v for n, v in found.items() if n.rpartition(".")[0] == module
        }
        plain[f"{module}.weight"] = decode(parts)
    return written(plain, config, out)


def written(tensors: dict[str, torch.Tensor], config: dict[str, Any], out: Path) -> Path:
    out.mkdir()
    save_file({n: value.contiguous() for n, value in tensors.items()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config))
    return out


def _modelopt(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    rows, half = parts["weight"].shape
    made = NVFP4QTensor(torch.Size((rows, 2 * half)), torch.bfloat16, parts["weight"])
    scales = {"scale": parts["weight_scale"], "double_scale": parts["weight_scale_2"]}
    found: torch.Tensor = made.dequantize(torch.float32, **scales, block_sizes={-1: 16})
    return found.bfloat16()


def _compressed(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme.model_validate(group_config(["Linear"], inputs=False))
    found: torch.Tensor = NVFP4PackedCompressor.decompress(parts, scheme)["weight"]
    return found


def _fp8(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """modelopt's own format of a scale a matrix."""
    from modelopt.torch.quantization.qtensor.fp8_tensor import FP8QTensor

    weight = parts["weight"]
    made = FP8QTensor(weight.shape, torch.float32, weight)
    found: torch.Tensor = made.dequantize(torch.float32, scale=parts["weight_scale"].reshape(()))
    return found.bfloat16()


def _gptq(block: Mapping[str, Any], parts: dict[str, torch.Tensor]) -> torch.Tensor:
    arrays = {name: value.numpy() for name, value in parts.items()}
    version = 2 if block.get("checkpoint_format") == "gptq_v2" else 1
    values = int_forms.from_gptq(arrays, block["bits"], version)
    return torch.from_numpy(np.ascontiguousarray(values, np.float32)).bfloat16()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_logits_of_mxfp4_as_deepseek_has_it(family: str, folders: Path, tmp_path: Path) -> None:
    """The same codes under its names and types."""
    encoded = made(f"mx {ALL}", saved(family, folders), tmp_path / "encoded")
    tensors = {}
    for name, value in read_tensors(encoded).items():
        module, _, parameter = name.rpartition(".")
        if parameter == "weight_packed":
            tensors[f"{module}.weight"] = Tensor("I8", value.shape, value.data)
        elif parameter == "weight_scale":
            tensors[f"{module}.scale"] = Tensor("F8_E8M0", value.shape, value.data)
        else:
            tensors[name] = value
    config = json.loads((encoded / "config.json").read_bytes())
    config["quantization_config"] = {**FP8_BLOCK, "scale_fmt": "ue8m0"}
    source = Model({**config, "expert_dtype": "fp4"}, tensors).write(tmp_path / "beside")
    plain = dequantized(source)
    to_be_decoded(encoded)
    assert torch.equal(logits(plain), logits(encoded))


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("zero_point", [True, False])
def test_logits_of_autoawq(family: str, zero_point: bool, folders: Path, tmp_path: Path) -> None:
    """In F16, the dtype of its scales, on both sides."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    source = saved(family, folders)
    config = json.loads((source / "config.json").read_bytes())
    tensors: dict[str, Tensor] = {}
    for name, value in read_tensors(source).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = value
            continue
        random = np.random.default_rng(zlib.crc32(name.encode()))
        parts, _ = awq(zero_point, 64)(random, *value.shape)
        tensors |= {f"{name.removesuffix('.weight')}.{part}": one for part, one in parts.items()}
    block = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": zero_point,
             "version": "gemm", "modules_to_not_convert": None}  # fmt: skip
    encoded = Model({**config, "quantization_config": block}, tensors).write(tmp_path / "awq")
    plain = dequantized(encoded, "--dtype", "f16")

    converter = AutoAWQConverter.from_autoawq_config(dict(block))
    theirs = converter.process({name: as_torch(value) for name, value in tensors.items()})
    scheme = next(iter(converter.update_config(None).config_groups.values()))
    found = {name: v for name, v in theirs.items() if not name.partition("_proj.weight_")[1]}
    for name in theirs:
        if name.endswith(".weight_packed"):
            module = name.removesuffix(".weight_packed")
            at = len(module) + 1
            state = {n[at:]: v for n, v in theirs.items() if n.startswith(f"{module}.weight")}
            weight = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
            assert weight.dtype == torch.float16
            found[f"{module}.weight"] = weight
    out = written(found, config, tmp_path / "theirs")
    assert torch.equal(logits(plain, torch.float16), logits(out, torch.float16))
    assert differs(source, plain, torch.float16)


def test_logits_of_gpt_oss(folders: Path, tmp_path: Path) -> None:
    """The only family whose stacks are MXFP4: transformers' own quantizer, dequantizing."""
    source = saved("gpt_oss", folders)
    config = json.loads((source / "config.json").read_bytes())
    tensors: dict[str, Tensor] = {}
    for name, value in read_tensors(source).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = value
            continue
        experts, columns, rows = value.shape
        random = np.random.default_rng(zlib.crc32(name.encode()))
        make = mxfp4(("codes", "scales"), ("U8", "U8"))
        codes = b"".join(make(random, rows, columns)[0]["codes"].data for _ in range(experts))
        grid = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = Tensor("U8", (*grid, 16), codes)
        tensors[f"{name}_scales"] = stored("U8", random.integers(115, 124, grid, np.uint8))
    block = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn",
             "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}  # fmt: skip
    encoded = Model({**config, "quantization_config": block}, tensors).write(tmp_path / "encoded")
    plain = dequantized(encoded)
    to_be_decoded(encoded)
    assert torch.equal(logits(plain), logits(encoded))
    assert differs(source, plain)
