"""Types and shapes: of each role by the config's sizes, and of each format by its definition.

QC026 a tensor's shape is not the one that the config gives.
QC027 a quantized weight, or a part of it, has a type or shape that its format does not allow.
QC038 packed weights have a scale for another number of columns than the config states.
QC047 there is linear attention, but the config does not state its sizes.
QC088, QC089, QC091: see int_parts.

Packed INT4 is compressed-tensors' (0.19, `compressors/pack_quantized/base.py`): `weight_packed` I32
[N, K / 8], `weight_scale` [N, K / group], `weight_shape` [2]. Linear attention: transformers 5.17,
models/qwen3_next/ and models/qwen3_5/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.family import Config, Dims, expert_inputs, first_int, text_config
from qconvert.core.names import is_scale, scale_candidates, split_parameter
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, Need
from qconvert.validators.headers.int_parts import int_parts
from qconvert.validators.reading.int8 import int8_scale
from qconvert.validators.reading.model import FP8, draft_alone, known_family, readable_quantization
from qconvert.validators.reading.quantization import (
    exponents_of,
    fp8_strategy_of,
    packed_ints,
    scheme_of,
)
from qconvert.validators.reading.schemes import layer_table

_GDN_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
)  # fmt: skip
# A size that is not checked.
_ANY = -1
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
# Types that hold several codes, or are checked with their format's own parameters.
_CODES = ("U8", "I8", "I32", "F4")
_INTO_DRAFTS = ("attn.q_proj", "attn.k_proj", "attn.v_proj")
Shape = tuple[int, ...]
Sizes = Callable[..., int]


@dataclass(frozen=True)
class Shapes:
    """Headers against config and formats."""

    name: str = "shapes"
    proves: str = "shapes follow the config's sizes; types and shapes follow their formats"
    needs: frozenset[Need] = frozenset({"model"})

    def __call__(self, folder: Folder) -> Iterator[Finding]:
        checkpoint = folder.checkpoint
        yield from _sizes(checkpoint)
        yield from _roles(checkpoint)
        yield from _of_table(checkpoint)
        yield from _fp8(checkpoint)
        yield from _packed(checkpoint)
        yield from _int8(checkpoint)
        yield from int_parts(checkpoint, expected_shapes(checkpoint))
        known_family(checkpoint)
        readable_quantization(checkpoint)


# --- Expected by the config ----------------------------------------------------------------------


def _sizes(checkpoint: Checkpoint) -> Iterator[Finding]:
    role_index = checkpoint.role_index
    roles = (place.role.name for place in role_index.places.values())
    if role_index.dims.gdn is not None or not any(role.startswith("gdn.") for role in roles):
        return
    text = text_config(checkpoint.config)
    stated = [f"{key} is {text.get(key)!r}" for key in _GDN_SIZES if not first_int(text, key)]
    message = f"expected the sizes of linear attention, found {', '.join(stated)}"
    yield Finding("QC047", "error", "config.json", message)


def _roles(checkpoint: Checkpoint) -> Iterator[Finding]:
    role_index = checkpoint.role_index
    wanted = expected_shapes(checkpoint)
    either, alone = role_index.family.stacked_transposed, draft_alone(checkpoint)
    for name, place in role_index.places.items():
        shape = wanted.get(place.role.name.removeprefix("mtp."))
        if shape is None:
            continue
        kind = checkpoint[name].type
        if place.role.name in _INTO_DRAFTS and kind.shape[-1:] == (2 * shape[-1],) and alone:
            continue  # EAGLE-3: hidden states and embeddings side by side
        if place.parameter == "weight_packed" and kind.dtype == "I32":
            ints = packed_ints(checkpoint, name.removesuffix(".weight_packed"))
            if ints is None:
                continue
            shape = (*shape[:-1], _ANY if shape[-1] < 0 else ceil_div(shape[-1] * ints.bits, 32))
        elif place.parameter == "bias":
            shape = shape[:1]
        elif place.parameter not in ("", "weight") or (
            kind.dtype in _CODES and int8_scale(checkpoint, name) is None
        ):
            continue
        if not _fits(kind.shape, shape) and not (
            either and len(shape) == 3 and _fits(kind.shape, (shape[0], shape[2], shape[1]))
        ):
            found = [size if size >= 0 else "any" for size in shape]
            message = f"expected {found} by the config, found {kind}".replace("'", "")
            yield Finding("QC026", "error", name, message)


def _fits(found: Shape, wanted: Shape) -> bool:
    return len(found) == len(wanted) and all(
        w in (_ANY, f) for f, w in zip(found, wanted, strict=True)
    )


def expected_shapes(checkpoint: Checkpoint) -> dict[str, Shape]:
    """The shape of each role's weight, -1 for a size that the config does not state. Roles of draft
    layers have those of the model's layers; undescribed roles are left out."""
    index, text = checkpoint.role_index, text_config(checkpoint.config)
    dims, family = index.dims, index.family.name

    def size(*keys: str) -> int:
        return first_int(text, *keys) or _ANY

    hidden, each = dims.hidden_size or _ANY, dims.moe_intermediate_size or _ANY
    experts, dense = dims.num_experts or _ANY, size("intermediate_size")
    vocab, twice = size("vocab_size"), _times(2, hidden)
    shared = size("shared_expert_intermediate_size")
    several = _times(first_int(text, "n_shared_experts") or _ANY, each)
    inputs = expert_inputs(index, lambda name: checkpoint[name].type) or _ANY
    found: dict[str, Shape] = {
        **dict.fromkeys(("embed_tokens", "shared_head.head"), (vocab, hidden)),
        # An EAGLE-3 draft answers in a part of the vocabulary.
        "lm_head": (size("draft_vocab_size", "vocab_size"), hidden),
        **dict.fromkeys(_NORMS, (hidden,)),
        **dict.fromkeys(("eh_proj", "fc"), (hidden, twice)),
        "router": (experts, hidden),
        "router.e_score_correction_bias": (experts,),
        "shared_expert_gate": (1, hidden),
        "stacked_experts.gate_up_proj": (experts, _times(2, each), inputs),
        **dict.fromkeys(
            ("stacked_experts.gate_proj", "stacked_experts.up_proj"), (experts, each, inputs)
        ),
        "stacked_experts.down_proj": (experts, inputs, each),
    }
    for prefix, rows, columns in (
        ("mlp.", dense, hidden), ("experts.", each, inputs), ("shared_expert.", shared, hidden),
        ("shared_experts.", several, hidden),
    ):  # fmt: skip
        found |= {f"{prefix}{name}": (rows, columns) for name in ("gate_proj", "up_proj")}
        found[f"{prefix}down_proj"] = (columns, rows)
    attention = _latent(text, hidden) or _grouped(hidden, size, _gates(text, family))
    return found | attention | _linear_attention(dims, hidden, size)


_NORMS = (
    "norm", "input_layernorm", "post_attention_layernorm", "enorm", "hnorm", "shared_head.norm",
    "pre_fc_norm_embedding", "pre_fc_norm_hidden",
)  # fmt: skip


def _times(one: int, other: int) -> int:
    return one * other if one > 0 and other > 0 else _ANY


def _gates(text: Config, family: str) -> int:
    """Rows of q_proj per query row: with an output gate, two."""
    if family not in ("qwen3_5", "qwen3_next"):
        return 1
    # transformers 5.17 has the gate whatever the flag says, other runtimes follow the flag.
    return _ANY if text.get("attn_output_gate") is False else 2


def _grouped(hidden: int, size: Sizes, gates: int) -> dict[str, Shape]:
    """Grouped-query attention (transformers 5.17, models/qwen3_moe/, glm4_moe/, qwen3_next/)."""
    each, heads = size("head_dim"), size("num_attention_heads")
    queries, keys = _times(heads, each), _times(size("num_key_value_heads"), each)
    return {
        "attn.q_proj": (_times(gates, queries), hidden),
        **dict.fromkeys(("attn.k_proj", "attn.v_proj"), (keys, hidden)),
        "attn.o_proj": (hidden, queries),
        **dict.fromkeys(("attn.q_norm", "attn.k_norm"), (each,)),
    }


def _latent(text: Config, hidden: int) -> dict[str, Shape]:
    """Multi-head latent attention (transformers 5.17, models/deepseek_v3/)."""
    low, kv, rope, nope, value, heads = (
        first_int(text, key) or _ANY
        for key in (
            "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
            "num_attention_heads",
        )
    )  # fmt: skip
    if kv < 0:
        return {}
    query = nope + rope if nope > 0 and rope > 0 else _ANY
    both = nope + value if nope > 0 and value > 0 else _ANY
    return {
        "attn.q_a_proj": (low, hidden),
        "attn.q_a_layernorm": (low,),
        "attn.q_b_proj": (_times(heads, query), low),
        "attn.q_proj": (_times(heads, query), hidden),
        "attn.kv_a_proj_with_mqa": (kv + rope if rope > 0 else _ANY, hidden),
        "attn.kv_a_layernorm": (kv,),
        "attn.kv_b_proj": (_times(heads, both), kv),
        "attn.o_proj": (hidden, _times(heads, value)),
    }


def _linear_attention(dims: Dims, hidden: int, size: Sizes) -> dict[str, Shape]:
    """Gated DeltaNet: K = nk * dk, V = nv * dv."""
    if dims.gdn is None:
        return {}
    nk, nv, dk, dv = dims.gdn
    keys, values = nk * dk, nv * dv
    rows = {
        "in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * nv, "in_proj_qkv": 2 * keys + values,
        "in_proj_z": values, "in_proj_b": nv, "in_proj_a": nv,
    }  # fmt: skip
    return {
        **{f"gdn.{name}": (count, hidden) for name, count in rows.items()},
        "gdn.conv1d": (2 * keys + values, 1, size("linear_conv_kernel_dim")),
        "gdn.A_log": (nv,),
        "gdn.dt_bias": (nv,),
        "gdn.norm": (dv,),
        "gdn.out_proj": (hidden, values),
    }


# --- Expected by the formats ---------------------------------------------------------------------


# The dtypes of codes by what is stated of them.
_STATED_CODES = {("float", 8): ("F8_E4M3",), ("float", 4): ("U8",)}


def _of_table(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Codes of another algorithm than their layer's entry in modelopt's table states."""
    if not any(layer_table(config) is not None for config in checkpoint.quantization_configs):
        return
    for name, source in checkpoint.items():
        dtype = source.type.dtype
        if dtype not in (*_CODES, *FP8) or is_scale(name):
            continue
        module, parameter = split_parameter(name)
        stated = scheme_of(checkpoint, module) if parameter in ("", "weight") else None
        wanted = _STATED_CODES.get(
            (str((stated or {}).get("type")), (stated or {}).get("num_bits", 0))
        )
        if stated is not None and wanted is not None and dtype not in wanted:
            message = (
                f"quantized_layers states {stated['num_bits']}-bit floats for {module!r}: expected "
                f"{' or '.join(wanted)}, found {source.type}"
            )
            yield Finding("QC027", "error", name, message)


def _fp8(checkpoint: Checkpoint) -> Iterator[Finding]:
    for name, source in checkpoint.items():
        kind = source.type
        if kind.dtype not in FP8 or is_scale(name):
            continue
        if len(kind.shape) not in (2, 3):
            message = f"expected an FP8 matrix or a stack of matrices, found {kind}"
            yield Finding("QC027", "error", name, message)
        scale = next((s for s in scale_candidates(name) if s in checkpoint), None)
        if scale is None:
            continue
        module, found = split_parameter(name)[0], checkpoint[scale].type
        fault = _scale_fault(
            found,
            exponents=found.dtype != "U8" or exponents_of(checkpoint, module),
            only=fp8_strategy_of(checkpoint, module) == "group",
        )
        if fault is not None:
            yield Finding("QC027", "error", scale, fault)


def _scale_fault(scale: TensorType, *, exponents: bool, only: bool) -> str | None:
    """`only`: MXFP8, whose scales are nothing but exponents."""
    if only and scale.dtype not in ("U8", "F8_E8M0"):
        return f"the config states MXFP8: expected exponents in U8 or F8_E8M0, found {scale}"
    if scale.dtype not in _SCALE_DTYPES:
        return f"expected FP8 scales in {', '.join(_SCALE_DTYPES)}, found {scale}"
    if scale.dtype == "U8" and not exponents:
        return (
            f"{scale}: bytes are exponents only if scale_fmt is ue8m0, and the config states none"
        )
    return None


def _packed(checkpoint: Checkpoint) -> Iterator[Finding]:
    """compressed-tensors' packed integers. Other packed formats have other types."""
    for name, source in checkpoint.items():
        if not name.endswith(".weight_packed") or source.type.dtype != "I32":
            continue
        stem = name.removesuffix("weight_packed")
        parts = {
            part: checkpoint[stem + part].type
            for part in ("weight_scale", "weight_shape")
            if stem + part in checkpoint
        }
        for part, fault in _packed_faults(source.type, parts):
            yield Finding("QC027", "error", stem + part, fault)
        scale, ints = parts.get("weight_scale"), packed_ints(checkpoint, stem.removesuffix("."))
        if ints is None or scale is None or len(scale.shape) != 2 or len(source.type.shape) != 2:
            continue
        columns = source.type.shape[1] * 32 // ints.bits
        wanted = 1 if ints.group is None else ceil_div(columns, ints.group)
        if scale.shape[1] != wanted:
            stated = f"groups of {ints.group}" if ints.group else "one scale a row"
            message = (
                f"the config states {stated}: expected {wanted} scales a row of {columns} columns"
            )
            yield Finding("QC038", "error", f"{stem}weight_scale", f"{message}, found {scale}")


def _int8(checkpoint: Checkpoint) -> Iterator[Finding]:
    """compressed-tensors' INT8 with a scale a row."""
    for name, source in checkpoint.items():
        scale = int8_scale(checkpoint, name)
        if scale is None or len(source.type.shape) != 2:
            continue
        rows = source.type.shape[0]
        if scale.type.dtype not in _SCALE_DTYPES[:3] or scale.type.shape != (rows, 1):
            message = f"expected a scale a row, [{rows}, 1], for {source.type}, found {scale.type}"
            yield Finding("QC027", "error", scale.name, message)


def _packed_faults(
    packed: TensorType, parts: Mapping[str, TensorType]
) -> Iterator[tuple[str, str]]:
    if len(packed.shape) != 2:
        yield "weight_packed", f"expected I32 [N, K / 8], found {packed}"
        return
    scale, shape = parts.get("weight_scale"), parts.get("weight_shape")
    if scale is not None and (
        scale.dtype not in ("BF16", "F16", "F32")
        or len(scale.shape) != 2
        or scale.shape[0] != packed.shape[0]
    ):
        yield "weight_scale", f"expected a scale [{packed.shape[0]}, K / group], found {scale}"
    if shape is not None and (shape.dtype not in ("I64", "I32") or shape.shape != (2,)):
        yield "weight_shape", f"expected I64 or I32 [2], found {shape}"


VALIDATOR = Shapes()
