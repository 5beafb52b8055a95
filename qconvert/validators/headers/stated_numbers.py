"""Numbers of a quantization block against the shapes of the tensors that it describes.

QC135 a block leaves out a number that its readers require, or take another for.

compressed-tensors (`quantization/quant_args.py`): integers of 8 bits, symmetric, and one scale a
tensor unless a group says otherwise; a strategy `group` without `group_size` is refused. sglang
and vLLM ask GPTQ's own block for bits, group_size, desc_act and sym, AutoAWQ's for bits, group_size
and zero_point, modelopt's NVFP4 for group_size. Each follows from shapes, where those leave one value
open, or from what qconvert.json says was asked for; `repair` writes it.

Used by quantization_config.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qconvert.checkpoint.checkpoint import Checkpoint, QuantConfig
from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.family import MTP_COUNTS, first_int, text_config
from qconvert.core.names import is_scale, layer_in, split_parameter
from qconvert.core.shown import count
from qconvert.validation.findings import Finding
from qconvert.validators.reading.decode import FP8
from qconvert.validators.reading.model import expected_shapes
from qconvert.validators.reading.quantization import HF_QUANT_CONFIG, group_names

_SIZES = tuple(1 << power for power in range(4, 11))  # groups and blocks that exist
_DEFAULTS: Mapping[str, Any] = {"type": "int", "num_bits": 8, "symmetric": True}
_BITS = (2, 3, 4, 5, 6, 7, 8)
_NO_GROUP = ("channel", "tensor", "block", "token", "attn_head")


@dataclass(frozen=True, slots=True)
class Number:
    """A value of config.json, by the keys that lead to it: what is stated (None: nothing), what it has
    to be, and the proof of that; without one it cannot be told, for the reason `untold`."""

    path: tuple[str, ...]
    stated: Any
    value: Any
    proof: str
    untold: str = "shapes do not tell it"

    @property
    def name(self) -> str:
        return self.path[-1]


@dataclass(frozen=True, slots=True)
class _Form:
    """A matrix as stored, as far as its shapes tell: its columns and how many scales a row of it has
    (0: one for all), and what a block has to state of it."""

    columns: int
    scales: int
    stated: Mapping[str, Any]
    format: str = ""  # as compressed-tensors calls it


def missing_numbers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Only what a block leaves out: other rules judge what it states."""
    for number in wrong_numbers(checkpoint):
        if number.stated is not None or number.name in ("symmetric", *MTP_COUNTS):
            continue  # QC088, QC019, QC023
        known = f"{number.value!r} ({number.proof})" if number.proof else f"({number.untold})"
        message = f"expected {number.name} {known}, found none"
        yield Finding("QC135", "error", "config.json: " + ": ".join(number.path[:-1]), message)


def wrong_numbers(checkpoint: Checkpoint) -> list[Number]:
    """Numbers that config.json states otherwise than the tensors have it, or leaves out."""
    found: list[Number] = []
    for config in checkpoint.quantization_configs:
        if config.where == HF_QUANT_CONFIG or not config.where.startswith("config.json: "):
            continue
        path = tuple(config.where.split(": ")[1:])
        read = {
            "compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq, "fp8": _fp8,
            "modelopt": _modelopt,
        }.get(config.method)  # fmt: skip
        found += read(checkpoint, config, path) if read is not None else ()
    return [*found, *_drafts(checkpoint)]


# --- compressed-tensors --------------------------------------------------------------------------


def _compressed(
    checkpoint: Checkpoint, config: QuantConfig, path: tuple[str, ...]
) -> Iterator[Number]:
    groups = config.block.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        return
    if not groups:
        yield from _without_groups(checkpoint, config, path)
        return
    members: dict[str, list[_Form | None]] = {}
    of_module = group_names(config)
    for module, form in _forms(checkpoint, groups).items():
        name = of_module(module)
        if name is not None:
            members.setdefault(name, []).append(form)
    formats = {None if f is None else f.format for forms in members.values() for f in forms}
    if config.block.get("format") is None and formats and None not in formats:
        one = min(map(str, formats)) if len(formats) == 1 else "mixed-precision"
        yield Number((*path, "format"), None, one, "the tensors' names say so")
    for name, forms in members.items():
        group = groups[name]
        whole = [form for form in forms if form is not None]
        if not isinstance(group, Mapping) or len(whole) < len(forms):
            continue  # of a form that is not read here
        inside = (*path, "config_groups", name)
        yield from _of_group(checkpoint, group, inside, whole)


def _without_groups(
    checkpoint: Checkpoint, config: QuantConfig, path: tuple[str, ...]
) -> Iterator[Number]:
    """One group for all linears, where all quantized matrices have one form; the ignore list names the
    others."""
    forms = list(_forms(checkpoint, {}).values())
    whole = [form for form in forms if form is not None]
    if not forms:
        return
    where = (*path, "config_groups")
    if len(whole) < len(forms) or any(
        (form.stated, form.format) != (whole[0].stated, whole[0].format) for form in whole
    ):
        yield Number(where, None, None, "", "the matrices have several forms, or FP8 blocks")
        return
    ends = _parameters(checkpoint)
    if whole[0].format in ("int-quantized", "float-quantized") or "input_global_scale" in ends:
        yield Number(where, None, None, "", "shapes do not tell how activations are quantized")
        return
    wanted, by = _grouping(checkpoint, {}, whole)
    if by not in ("shapes", "qconvert.json"):
        yield Number(where, None, None, "", "shapes leave the size of groups open")
        return
    group = {
        "targets": ["Linear"], "weights": {**whole[0].stated, **wanted}, "input_activations": None,
        "output_activations": None,
    }  # fmt: skip
    said = f"the shapes of {count(len(whole), 'matrix', 'matrices')}"
    said += " and qconvert.json say so" if by == "qconvert.json" else " say so"
    yield Number(where, None, {"group_0": group}, said)
    if config.block.get("format") is None:
        yield Number((*path, "format"), None, whole[0].format, "the tensors' names say so")


def _of_group(
    checkpoint: Checkpoint, group: Mapping[str, Any], path: tuple[str, ...], forms: list[_Form]
) -> Iterator[Number]:
    """Numbers of a group all of whose matrices have one form."""
    weights = group.get("weights")
    if not isinstance(weights, Mapping) or any(f.stated != forms[0].stated for f in forms):
        return
    proof = f"the shapes of {count(len(forms), 'matrix', 'matrices')} say so"
    inside = (*path, "weights")
    for key, value in forms[0].stated.items():
        if key not in ("strategy", "group_size") and weights.get(key, _DEFAULTS.get(key)) != value:
            yield Number((*inside, key), weights.get(key), value, proof)
    wanted, by = _grouping(checkpoint, weights, forms)
    for key, value in wanted.items():
        if key == "strategy" and value == _strategy(weights):
            continue
        if key == "group_size" and value == weights.get(key) and by != "open":
            continue
        stated = weights.get(key)
        if key == "strategy" and stated == "group" and not _is_size(weights.get("group_size")):
            stated = None  # refused as it stands
        said = {"shapes": proof, "qconvert.json": "qconvert.json says so", "open": ""}[by]
        yield Number((*inside, key), stated, value, said)
    inputs = group.get("input_activations")
    if isinstance(inputs, Mapping) and inputs.get("strategy") in ("group", "tensor_group"):
        size = wanted.get("group_size", weights.get("group_size"))
        if not _is_size(inputs.get("group_size")):
            yield Number(
                (*path, "input_activations", "group_size"), inputs.get("group_size"), size,
                "as the weights" if _is_size(size) else "",
            )  # fmt: skip


def _strategy(weights: Mapping[str, Any]) -> Any:
    """As compressed-tensors infers it."""
    size = weights.get("group_size")
    if weights.get("strategy") is not None:
        return weights["strategy"]
    return "tensor" if size is None else "group" if _is_size(size) else "channel"


def _grouping(
    checkpoint: Checkpoint, weights: Mapping[str, Any], forms: list[_Form]
) -> tuple[dict[str, Any], str]:
    """Strategy and group size, where what is stated does not fit all matrices, and by what."""
    strategy, size = _strategy(weights), weights.get("group_size")
    fixed = forms[0].stated.get("strategy")
    if fixed is not None:  # a form that has one
        wanted = {"strategy": fixed}
        if "group_size" in forms[0].stated:
            wanted["group_size"] = forms[0].stated["group_size"]
        return wanted, "shapes"
    rows = all(form.scales == 1 for form in forms)
    if rows and strategy == "channel":
        return {}, ""
    if strategy == "group" and _is_size(size) and size in _group_sizes(forms, (int(size or 0),)):
        return {}, ""
    asked = _asked_group(checkpoint)
    fitting = _group_sizes(forms)
    if asked is not None and (asked in _group_sizes(forms, (asked,)) if asked > 0 else rows):
        return _as_group(asked if asked > 0 else None), "qconvert.json"
    if rows:
        return _as_group(None), "shapes"
    if len(fitting) == 1:
        return _as_group(fitting[0]), "shapes"
    if strategy in _NO_GROUP or _is_size(size):
        return {}, ""  # stated, and wrong: what is right cannot be told
    return {"group_size": None}, "open"


def _as_group(size: int | None) -> dict[str, Any]:
    return {"strategy": "channel" if size is None else "group", "group_size": size}


def _group_sizes(forms: Iterable[_Form], sizes: Iterable[int] = _SIZES) -> list[int]:
    """Those that give all matrices the scales that they have."""
    pairs = {(form.columns, form.scales) for form in forms}
    return [size for size in sizes if all(ceil_div(c, size) == scales for c, scales in pairs)]


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _forms(checkpoint: Checkpoint, groups: Mapping[str, Any]) -> dict[str, _Form | None]:
    """Every quantized matrix of compressed-tensors' forms; None for one that is not read here."""
    index = checkpoint.role_index
    wanted = expected_shapes(checkpoint)
    bits = {
        group.get("weights", {}).get("num_bits")
        for group in groups.values()
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)
    }
    stated_bits = next(iter(bits)) if len(bits) == 1 else None
    found: dict[str, _Form | None] = {}
    for name, source in checkpoint.items():
        module, parameter = split_parameter(name)
        scale = checkpoint.get(f"{module}.weight_scale")
        if scale is None or len(source.type.shape) != 2:
            continue
        if parameter == "weight_packed":
            place = index.places.get(name)
            shape = None if place is None else wanted.get(place.role.name.removeprefix("mtp."))
            columns = shape[-1] if shape is not None else -1
            found[module] = _packed(
                checkpoint, module, source.type, scale.type, columns, stated_bits
            )
        elif parameter == "weight" and source.type.dtype in ("I8", *FP8) and not is_scale(name):
            found[module] = _bytes(source.type, scale.type)
    return found


def _packed(
    checkpoint: Checkpoint,
    module: str,
    words: TensorType,
    scale: TensorType,
    columns: int,
    bits: Any,
) -> _Form | None:
    if words.dtype == "U8":
        if f"{module}.weight_global_scale" in checkpoint:
            return _float(words.shape[1] * 2, scale, 4, "tensor_group", 16)
        return _float(words.shape[1] * 2, scale, 4, "group", 32) if scale.dtype == "U8" else None
    if words.dtype != "I32" or len(scale.shape) != 2:
        return None
    if columns > 0:
        fits = [b for b in _BITS if ceil_div(columns * b, 32) == words.shape[1]]
        bits = fits[0] if len(fits) == 1 else bits
    if bits not in _BITS:
        return None
    zeros = f"{module}.weight_zero_point" in checkpoint
    stated = {"type": "int", "num_bits": bits, "symmetric": not zeros}
    return _Form(words.shape[1] * 32 // bits, scale.shape[1], stated, "pack-quantized")


def _float(columns: int, scale: TensorType, bits: int, strategy: str, size: int) -> _Form | None:
    if len(scale.shape) != 2 or ceil_div(columns, size) != scale.shape[1]:
        return None
    stated = {
        "type": "float", "num_bits": bits, "symmetric": True, "strategy": strategy, "group_size": size,
    }  # fmt: skip
    if bits == 8:
        stated["scale_dtype"] = "torch.uint8"
        return _Form(columns, scale.shape[1], stated, "mxfp8-quantized")
    name = "nvfp4-pack-quantized" if strategy == "tensor_group" else "mxfp4-pack-quantized"
    return _Form(columns, scale.shape[1], stated, name)


def _bytes(weight: TensorType, scale: TensorType) -> _Form | None:
    """A code a byte: MXFP8, FP8 or INT8 with a scale for a tensor or a row."""
    rows, columns = weight.shape
    if scale.dtype == "U8":
        return _float(columns, scale, 8, "group", 32)
    kind = "int" if weight.dtype == "I8" else "float"
    if scale.numel == 1 and rows > 1:
        strategy = "tensor"
    elif scale.shape in ((rows, 1), (rows,)):
        strategy = "channel"
    else:
        return None  # blocks: QC015
    stated = {"type": kind, "num_bits": 8, "symmetric": True, "strategy": strategy}
    return _Form(columns, 1, stated, f"{kind}-quantized")


# --- Other methods -------------------------------------------------------------------------------


def _gptq(checkpoint: Checkpoint, config: QuantConfig, path: tuple[str, ...]) -> Iterator[Number]:
    """GPTQ's own: qweight [K * bits / 32, N], qzeros [groups, N * bits / 32], scales [groups, N]."""
    if config.block.get("dynamic") and _has_own_numbers(config.block["dynamic"]):
        return
    yield from _words(
        checkpoint, config, path, {"bits": ("bits",), "group_size": ("group_size",)}, turned=False
    )
    meanings: tuple[tuple[str, str, dict[Hashable, bool]], ...] = (
        ("sym", "symmetric", {True: True, False: False}),
        ("desc_act", "actorder", {"group": True, None: False, "static": False}),
    )
    for key, field, values in meanings:
        if config.block.get(key) is None:
            asked = _asked(checkpoint, field)
            value = values.get(asked[0]) if asked else None
            yield Number(
                (*path, key), None, value,
                "" if value is None else "qconvert.json says so",
            )  # fmt: skip


def _has_own_numbers(dynamic: Any) -> bool:
    return isinstance(dynamic, Mapping) and any(bool(value) for value in dynamic.values())


def _awq(checkpoint: Checkpoint, config: QuantConfig, path: tuple[str, ...]) -> Iterator[Number]:
    """AutoAWQ's: qweight [K, N * bits / 32], which is turned."""
    keys = {"bits": ("bits", "w_bit"), "group_size": ("group_size", "q_group_size")}
    yield from _words(checkpoint, config, path, keys, turned=True)
    if config.block.get("zero_point") is None and "qzeros" in _parameters(checkpoint):
        yield Number((*path, "zero_point"), None, True, "there are zero points")


def _parameters(checkpoint: Checkpoint) -> set[str]:
    return {split_parameter(name)[1] for name in checkpoint}


def _words(
    checkpoint: Checkpoint,
    config: QuantConfig,
    path: tuple[str, ...],
    keys: Mapping[str, tuple[str, ...]],
    *,
    turned: bool,
) -> Iterator[Number]:
    """Bits and group size, by the words of weights and zero points."""
    bits, pairs, matrices = set(), set(), 0
    for name, source in checkpoint.items():
        module, parameter = split_parameter(name)
        if parameter != "qweight":
            continue
        scales, zeros = (checkpoint.get(f"{module}.{part}") for part in ("scales", "qzeros"))
        kinds = [one.type for one in (source, scales, zeros) if one is not None]
        if len(kinds) < 3 or any(len(kind.shape) != 2 for kind in kinds):
            return
        words, scale, zero = (kind.shape for kind in kinds)
        if not scale[1] or (32 * zero[1]) % scale[1]:
            return
        width = 32 * zero[1] // scale[1]
        bits.add(width)
        pairs.add((words[0] if turned else words[0] * 32 // max(width, 1), scale[0]))
        matrices += 1
    if len(bits) != 1 or not bits <= set(_BITS):
        return
    forms = [_Form(columns, scales, {}) for columns, scales in pairs]
    proof = f"the shapes of {count(matrices, 'matrix', 'matrices')} say so"
    stated = {key: next((config.block[k] for k in names if k in config.block), None)
              for key, names in keys.items()}  # fmt: skip
    written = {
        key: next((k for k in names if k in config.block), key) for key, names in keys.items()
    }
    if stated["bits"] != min(bits):
        yield Number((*path, written["bits"]), stated["bits"], min(bits), proof)
    size, rows = stated["group_size"], all(form.scales == 1 for form in forms)
    if (size == -1 and rows) or (_is_size(size) and _group_sizes(forms, (int(size or 0),))):
        return
    asked, fitting = _asked_group(checkpoint), _group_sizes(forms)
    if asked is not None and (rows if asked < 1 else bool(_group_sizes(forms, (asked,)))):
        yield Number((*path, written["group_size"]), size, asked, "qconvert.json says so")
    elif rows or len(fitting) == 1:
        yield Number((*path, written["group_size"]), size, -1 if rows else fitting[0], proof)


def _fp8(checkpoint: Checkpoint, config: QuantConfig, path: tuple[str, ...]) -> Iterator[Number]:
    """Block FP8: the one size that fits every grid of scales."""
    sizes: list[set[int]] = [set(_SIZES), set(_SIZES)]
    matrices = 0
    stated = config.block.get("weight_block_size")
    fits_stated = isinstance(stated, list) and len(stated) == 2 and all(map(_is_size, stated))
    for name, source in checkpoint.items():
        scale = checkpoint.get(f"{name}_scale_inv")
        if scale is None or source.type.dtype not in FP8:
            continue
        if len(scale.type.shape) != len(source.type.shape) or len(scale.type.shape) < 2:
            return
        matrices += 1
        for axis in (0, 1):
            length, blocks = source.type.shape[axis - 2], scale.type.shape[axis - 2]
            sizes[axis] = {size for size in sizes[axis] if ceil_div(length, size) == blocks}
            if fits_stated and stated is not None and ceil_div(length, stated[axis]) != blocks:
                fits_stated = False
    if matrices and not fits_stated and all(len(fitting) == 1 for fitting in sizes):
        value = [min(fitting) for fitting in sizes]
        proof = f"the shapes of {count(matrices, 'matrix', 'matrices')} say so"
        yield Number((*path, "weight_block_size"), stated, value, proof)


def _modelopt(
    checkpoint: Checkpoint, config: QuantConfig, path: tuple[str, ...]
) -> Iterator[Number]:
    """NVFP4's groups, which are of 16 columns, and its name where nothing else is stored."""
    ends = _parameters(checkpoint)
    if config.block.get("quantized_layers") or "weight_scale_2" not in ends:
        return
    if config.block.get("quant_algo") is None:
        algorithm = "NVFP4" if "input_scale" in ends else "W4A16_NVFP4"
        yield Number((*path, "quant_algo"), None, algorithm, "weight_scale_2 says so")
    groups = config.block.get("config_groups")
    in_groups = isinstance(groups, Mapping) and any(
        isinstance(g, Mapping)
        and isinstance(g.get("weights"), Mapping)
        and _is_size(g["weights"].get("group_size"))
        for g in groups.values()
    )
    stated = config.block.get("group_size")
    if stated == 16 or (stated is None and in_groups):
        return
    pairs = {
        (2 * source.type.shape[-1], scale.type.shape[-1])
        for name, source in checkpoint.items()
        if source.type.dtype == "U8"
        and f"{name}_scale_2" in checkpoint
        and (scale := checkpoint.get(f"{name}_scale")) is not None
        and scale.type.shape
    }
    if pairs and all(16 * scales == columns for columns, scales in pairs):
        yield Number((*path, "group_size"), stated, 16, "the shapes of block scales say so")


# --- Draft layers --------------------------------------------------------------------------------


def _drafts(checkpoint: Checkpoint) -> Iterator[Number]:
    """Number of draft (MTP) layers that are counted, against those that are there: behind the model's
    last layer, or below names of their own."""
    manifest = checkpoint.manifest or {}
    if "stage" in manifest or "amx" in manifest or checkpoint.role_index.family.name == "generic":
        return
    text, dims, family = (
        text_config(checkpoint.config),
        checkpoint.role_index.dims,
        checkpoint.family,
    )
    keys = [key for key in MTP_COUNTS if key in text]
    stated = first_int(text, *MTP_COUNTS) or 0
    own = family.mtp
    layers: set[int] = set()
    for name in checkpoint:
        layer = layer_in(name)
        if own and name.startswith(own):
            layers.add(0 if layer is None else layer)
        elif not own and layer is not None and ".layers." in name and layer >= dims.num_layers:
            layers.add(layer - dims.num_layers)
    if layers != set(range(len(layers))) or len(layers) == stated:
        return
    if not layers and (not any(r.name.startswith("mtp.") for r in family.roles) or not stated):
        return
    key = keys[0] if keys else ("mtp_num_hidden_layers" if own else "num_nextn_predict_layers")
    nested = checkpoint.config.get("text_config")
    inside = () if not isinstance(nested, Mapping) or key in checkpoint.config else ("text_config",)
    yield Number(
        (*inside, key),
        text.get(key),
        len(layers),
        "the names of draft (MTP) layers say so" if layers else "no name is of a draft (MTP) layer",
    )


# --- What was asked for --------------------------------------------------------------------------


def _asked(checkpoint: Checkpoint, option: str) -> tuple[Hashable] | None:
    """An option of the last pass that has it, None where qconvert.json has none of such a type."""
    for step in reversed((checkpoint.manifest or {}).get("passes", [])):
        if option in step["options"]:
            value = step["options"][option]
            return (value,) if isinstance(value, Hashable) else None
    return None


def _asked_group(checkpoint: Checkpoint) -> int | None:
    """The group size that was asked for, -1 for a whole row, None where qconvert.json says none."""
    match _asked(checkpoint, "group_size"):
        case (None,):
            return -1
        case (int(size),):
            return size
    return None
