"""Folders in forms of compressed-tensors that a conversion's tensors are renamed to: INT8 and MX from
FP8 and NVFP4. Numbers mean nothing in them; names, types and shapes are those of the form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from checkpoints import Tensor, edit_json, read_tensors, tensor, write_shard

Form = Literal["int8", "mxfp4", "mxfp8"]
# Which conversion has tensors of the same sizes.
FROM: Mapping[Form, str] = {
    "int8": "fp8 --channel", "mxfp4": "nvfp4 --dialect compressed-tensors --weight-only",
    "mxfp8": "fp8 --channel",
}  # fmt: skip
_FORMATS = {"int8": "int-quantized", "mxfp4": "mxfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}


def renamed(folder: Path, form: Form) -> Path:
    """The conversion FROM[form] in this form, beside it; made once."""
    out = folder.with_name(f"{folder.name} as {form}")
    if not out.is_dir():
        out.mkdir()
        found = read_tensors(folder)
        write_shard(out / "model.safetensors", dict(_stored(found, form)))
        (out / "config.json").write_bytes((folder / "config.json").read_bytes())
        edit_json(out / "config.json", _stating(form))
    return out


def exponents(folder: Path, dtype: str) -> Path:
    """A folder whose scales are powers of two, with their exponents for scales."""
    out = folder.with_name(f"{folder.name} as {dtype}")
    if not out.is_dir():
        out.mkdir()
        tensors = read_tensors(folder)
        for name, (kind, shape, data) in tensors.items():
            if name.endswith("weight_scale_inv"):
                assert kind == "F32"
                words = memoryview(data).cast("I")
                assert not any(word & 0x7FFFFF for word in words), "no power of two"
                tensors[name] = Tensor(dtype, shape, bytes(word >> 23 for word in words))
        write_shard(out / "model.safetensors", tensors)
        (out / "config.json").write_bytes((folder / "config.json").read_bytes())
    return out


def _stored(tensors: Mapping[str, Tensor], form: Form) -> Mapping[str, Tensor]:
    made: dict[str, Tensor] = {}
    for name, one in tensors.items():
        module, _, last = name.rpartition(".")
        kept = tensors.get(f"{module}.weight_scale") is None
        if kept:
            made[name] = one
        elif last in ("weight", "weight_packed"):
            made[name] = one._replace(dtype="I8") if form == "int8" else one
            if form != "int8":
                rows, columns = one.shape
                columns = columns * 2 if form == "mxfp4" else columns
                made[f"{module}.weight_scale"] = tensor("U8", rows, columns // 32)
        elif last == "weight_scale" and form == "int8":
            made[name] = one
    return made


def _stating(form: Form) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        block = config["quantization_config"]
        block["format"] = _FORMATS[form]
        for group in block["config_groups"].values():
            group["format"] = _FORMATS[form]
            if form == "int8":
                group["weights"]["type"] = group["input_activations"]["type"] = "int"
            else:
                numbers = {
                    "num_bits": int(form[-1]), "type": "float", "symmetric": True,
                    "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8",
                }  # fmt: skip
                group["weights"] = {**numbers, "dynamic": False}
                dynamic = {**numbers, "dynamic": True}
                group["input_activations"] = dynamic if form == "mxfp8" else None

    return change
