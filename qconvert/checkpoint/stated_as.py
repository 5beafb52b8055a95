"""Encoding that a user states for a folder whose config lost its quantization block (`--as SCHEME`).

The scheme becomes the block that config.json would have, once, where the folder is opened, and is held
against names, types and shapes of the tensors: what comes after reads it as any other block. Folders
that qconvert made (a result beside such a source) say themselves how they are stored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from qconvert.core.dtypes import FP8_DTYPES, TensorType, ceil_div
from qconvert.core.errors import CheckpointError, UsageError
from qconvert.core.names import scale_candidates, with_fused_names

if TYPE_CHECKING:
    from qconvert.checkpoint.checkpoint import Checkpoint

FACT = "stated_as"  # of the manifest
_FLOATS = ("BF16", "F16", "F32")
_EXPONENTS = ("U8", "F8_E8M0")
_GLOBAL = (".weight_scale_2", ".weight_global_scale")
_SIDES = re.compile(r"[1-9]\d{0,5}x[1-9]\d{0,5}")
_GROUP = re.compile(r"-1|[1-9]\d{0,5}")
Types = Mapping[str, TensorType]
Block = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Scheme:
    """`arguments`: a pattern for each behind the name; `spelled`: as messages have it; `stored`: ends of
    the names of codes and their dtypes; `block`: the config's, for the tensors, the arguments, and the
    modules that are not quantized."""

    arguments: tuple[re.Pattern[str], ...]
    spelled: str
    stored: tuple[tuple[str, tuple[str, ...]], ...]
    block: Callable[[Types, tuple[str, ...], list[str]], Block]


_STATED: ContextVar[str | None] = ContextVar("stated_as", default=None)


@contextmanager
def stating(scheme: str) -> Iterator[None]:
    """Checkpoints that are opened within, and state no quantization, are read as stored in `scheme`.
    Raises UsageError for a scheme that is not known."""
    _parsed(scheme)
    token = _STATED.set(scheme)
    try:
        yield
    finally:
        _STATED.reset(token)


def as_stated(checkpoint: Checkpoint, scheme: str | None = None) -> Checkpoint:
    """The checkpoint with the block of the scheme (None: of what `stating` states here) in its config,
    unless qconvert made it. Raises CheckpointError where its config states a quantization, and where its
    tensors are not stored so."""
    text = scheme or _STATED.get()
    if text is None or checkpoint.manifest is not None:
        return checkpoint
    if checkpoint.quantization_configs:
        found = checkpoint.quantization_configs[0]
        raise CheckpointError(
            f"{checkpoint.root}: {found.where} states quant_method {found.method!r}, and --as {text} is "
            "for folders whose config states none: leave --as out, or mend the block"
        )
    kind, arguments = _parsed(text)
    types = {name: source.type for name, source in checkpoint.items()}
    if not any(_holds(kind, name, one) for name, one in types.items()):
        wanted = " or ".join(f"*{end} in {' or '.join(kinds)}" for end, kinds in kind.stored)
        raise CheckpointError(
            f"{checkpoint.root}: --as {text} is of tensors {wanted}, and there are none: found "
            f"{_coded(types) or 'no quantized tensor'}"
        )
    block = kind.block(types, arguments, with_fused_names(_plain(types)))
    config = {**checkpoint.config, "quantization_config": block}
    data = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    return replace(checkpoint, config=config, config_bytes=data, stated_as=text)


def _parsed(text: str) -> tuple[_Scheme, tuple[str, ...]]:
    name, *arguments = text.split(":")
    kind = _SCHEMES.get(name)
    fits = kind is not None and len(arguments) == len(kind.arguments)
    if kind is None or not fits or not all(map(re.Pattern.fullmatch, kind.arguments, arguments)):
        known = ", ".join(one.spelled for one in _SCHEMES.values())
        raise UsageError(f"--as {text!r} is no scheme; schemes are {known}")
    return kind, tuple(arguments)


def _holds(kind: _Scheme, name: str, type_: TensorType) -> bool:
    return any(name.endswith(end) and type_.dtype in kinds for end, kinds in kind.stored)


def _coded(types: Types) -> str:
    """The first tensor that is no float."""
    return next((f"{name!r} {one}" for name, one in types.items() if one.dtype not in _FLOATS), "")


def _plain(types: Types) -> Iterator[str]:
    """Modules with a matrix of floats that is no embedding."""
    for name, kind in types.items():
        module = name.removesuffix(".weight")
        if (
            module != name
            and kind.dtype in _FLOATS
            and len(kind.shape) == 2
            and "embed" not in name
        ):
            yield module


# --- Blocks --------------------------------------------------------------------------------------


def _compressed(form: str, weights: Block, inputs: Block | None, left: list[str]) -> Block:
    group = {"targets": ["Linear"], "weights": {**weights, "dynamic": False}, "format": form}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "input_activations": inputs}},
        "ignore": left,
    }


def _has(types: Types, *ends: str) -> bool:
    return any(name.endswith(ends) for name in types)


def _scales(types: Types) -> Iterator[tuple[str, TensorType, str, TensorType]]:
    """Each FP8 weight and its scale, and their types."""
    for name, kind in types.items():
        scale = next((one for one in scale_candidates(name) if one in types), None)
        if kind.dtype in FP8_DTYPES and scale is not None and len(kind.shape) > 1:
            yield name, kind, scale, types[scale]


def _fp8(
    types: Types, wanted: Callable[[TensorType], Iterable[tuple[int, ...]]], what: str
) -> tuple[str, str]:
    """Format of the codes and name of the scales. Raises CheckpointError for a scale that does not
    fit."""
    fmt, end = "", ""
    for name, kind, scale, found in _scales(types):
        fmt, end = kind.dtype.removeprefix("F8_").lower(), scale.rpartition(".")[2]
        shapes = list(wanted(kind))
        if found.shape not in shapes:
            raise CheckpointError(
                f"{scale!r}: --as {what} is of scales {list(shapes[0])} for {name!r} {kind}, found "
                f"{found}"
            )
    return fmt, end


def _own_fp8(types: Types, fmt: str, left: list[str], size: list[int] | None) -> Block:
    static = _has(types, "input_scale", "activation_scale")
    exponents = any(scale.dtype in _EXPONENTS for *_, scale in _scales(types))
    return {
        "quant_method": "fp8",
        "fmt": fmt,
        "activation_scheme": "static" if static else "dynamic",
        **({} if size is None else {"weight_block_size": size}),
        **({"scale_fmt": "ue8m0"} if exponents else {}),
        "modules_to_not_convert": left,
    }


_8_BITS = {"num_bits": 8, "type": "float", "symmetric": True}


def _fp8_tensor(types: Types, arguments: tuple[str, ...], left: list[str]) -> Block:
    fmt, _ = _fp8(
        types,
        lambda kind: ((), (1,), (1, 1), kind.shape[:-2], (*kind.shape[:-2], 1, 1)),
        "fp8-tensor",
    )
    return _own_fp8(types, fmt, left, None)


def _fp8_channel(types: Types, arguments: tuple[str, ...], left: list[str]) -> Block:
    _fp8(types, lambda kind: ((*kind.shape[:-1], 1), kind.shape[:-1]), "fp8-channel")
    inputs = {**_8_BITS, "strategy": "token", "dynamic": True}
    return _compressed("float-quantized", {**_8_BITS, "strategy": "channel"}, inputs, left)


def _fp8_block(types: Types, arguments: tuple[str, ...], left: list[str]) -> Block:
    high, wide = map(int, arguments[0].split("x"))

    def grid(kind: TensorType) -> Iterator[tuple[int, ...]]:
        *lead, rows, columns = kind.shape
        yield (*lead, ceil_div(rows, high), ceil_div(columns, wide))

    fmt, end = _fp8(types, grid, f"fp8-block:{arguments[0]}")
    if end != "weight_scale":
        return _own_fp8(types, fmt, left, [high, wide])
    weights = {**_8_BITS, "strategy": "block", "block_structure": [high, wide]}
    inputs = {**_8_BITS, "strategy": "group", "group_size": wide, "dynamic": True}
    return _compressed("float-quantized", weights, inputs, left)


def _mx(bits: int) -> Block:
    return {
        "num_bits": bits, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32,
        "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8",
    }  # fmt: skip


def _mxfp4(types: Types, arguments: tuple[str, ...], left: list[str]) -> Block:
    other = next((name for name in types if name.endswith(_GLOBAL)), None)
    if other is not None:
        raise CheckpointError(f"{other!r} says that it is NVFP4, and --as mxfp4 that it is MXFP4")
    if _has(types, "_blocks"):
        return {"quant_method": "mxfp4", "modules_to_not_convert": left}
    if _has(types, ".weight_packed"):
        return _compressed("mxfp4-pack-quantized", _mx(4), None, left)
    weight = {
        "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0",
        "is_dynamic": False, "symmetric": None,
    }  # fmt: skip
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": None},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": left,
        "export": {"kv_cache_group": [], "pack_method": "reorder"},
    }


def _mxfp8(types: Types, arguments: tuple[str, ...], left: list[str]) -> Block:
    _fp8(types, lambda kind: ((*kind.shape[:-1], ceil_div(kind.shape[-1], 32)),), "mxfp8")
    inputs = {**_mx(8), "dynamic": True}
    return _compressed("mxfp8-quantized", _mx(8), inputs, left)


def _nvfp4(types: Types, arguments: tuple[str, ...], left: list[str]) -> Block:
    if _has(types, _GLOBAL[0]):
        inputs = _has(types, ".input_scale")
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4" if inputs else "W4A16_NVFP4",
            "group_size": 16,
            "ignore": left,
        }
    weights = {
        "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn",
    }  # fmt: skip
    given = {**weights, "dynamic": "local"} if _has(types, ".input_global_scale") else None
    return _compressed("nvfp4-pack-quantized", weights, given, left)


def _ints(types: Types, bits: int, group: str) -> Block:
    size = int(group)
    return {
        "num_bits": bits, "type": "int", "symmetric": not _has(types, ".weight_zero_point"),
        "strategy": "channel" if size == -1 else "group", "group_size": None if size == -1 else size,
        "actorder": "group" if _has(types, ".weight_g_idx") else None,
    }  # fmt: skip


def _packed(bits: int, types: Types, arguments: tuple[str, ...], left: list[str]) -> Block:
    weights = _ints(types, bits, arguments[0])
    if _has(types, ".weight_packed"):
        return _compressed("pack-quantized", weights, None, left)
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return _compressed("int-quantized", weights, inputs, left)


def _gptq(types: Types, arguments: tuple[str, ...], left: list[str]) -> Block:
    bits, group = map(int, arguments)
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True,
        "lm_head": False, "checkpoint_format": "gptq",
        "dynamic": {f"-:^{re.escape(module)}$": {} for module in left},
    }  # fmt: skip


def _awq(types: Types, arguments: tuple[str, ...], left: list[str]) -> Block:
    bits, group = map(int, arguments)
    return {
        "quant_method": "awq", "bits": bits, "group_size": group, "version": "gemm",
        "zero_point": _has(types, ".qzeros"), "modules_to_not_convert": left,
    }  # fmt: skip


_FP8 = ((".weight", FP8_DTYPES), ("_proj", FP8_DTYPES))
_INTS = ((".weight_packed", ("I32",)),)
_BITS, _FOUR = re.compile("[2-8]"), re.compile("4")
_SCHEMES: Mapping[str, _Scheme] = {
    "fp8-tensor": _Scheme((), "fp8-tensor", _FP8, _fp8_tensor),
    "fp8-channel": _Scheme((), "fp8-channel", _FP8, _fp8_channel),
    "fp8-block": _Scheme((_SIDES,), "fp8-block:128x128", _FP8, _fp8_block),
    "mxfp4": _Scheme(
        (),
        "mxfp4",
        ((".weight_packed", ("U8",)), (".weight", ("U8",)), ("_blocks", ("U8",))),
        _mxfp4,
    ),
    "mxfp8": _Scheme((), "mxfp8", _FP8, _mxfp8),
    "nvfp4": _Scheme((), "nvfp4", tuple((end, ("F32",)) for end in _GLOBAL), _nvfp4),
    "gptq": _Scheme((_BITS, _GROUP), "gptq:4:128", ((".qweight", ("I32",)),), _gptq),
    "awq": _Scheme((_FOUR, _GROUP), "awq:4:128", ((".qweight", ("I32",)),), _awq),
    **{
        f"int{bits}": _Scheme((_GROUP,), f"int{bits}:128", _INTS, partial(_packed, bits))
        for bits in (2, 3, 4, 5, 6)
    },
    "int8": _Scheme((_GROUP,), "int8:-1", (*_INTS, (".weight", ("I8",))), partial(_packed, 8)),
}
