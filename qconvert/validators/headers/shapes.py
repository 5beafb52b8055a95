"""Types and shapes: of each role by the config's sizes, and of each format by its definition.

QC026 a tensor's shape is not the one that the config gives.
QC027 codes are of another type than modelopt's table of layers states.
QC047 there is linear attention, but the config does not state its sizes.
QC088 zero points or group indices (g_idx) belong to no weight.
QC091 routed experts of one layer are stored in more than one format.

What is wrong with the parts of one format stands in validators/formats. Linear attention: transformers,
models/qwen3_next/ and models/qwen3_5/.
"""

from __future__ import annotations

from collections.abc import Iterator

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.family import first_int, text_config
from qconvert.core.names import is_scale, split_parameter
from qconvert.core.roles import Kind
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, validator
from qconvert.validators.formats.packed import ints_of
from qconvert.validators.formats.qweight import qweight_ints
from qconvert.validators.reading.decode import FP8
from qconvert.validators.reading.forms import coded_weights, specs
from qconvert.validators.reading.model import (
    ANY,
    Shape,
    expected_shapes,
    known_family,
    readable_quantization,
)
from qconvert.validators.reading.quantization import scheme_of
from qconvert.validators.reading.quantization_tensors import lost
from qconvert.validators.reading.stated_schemes import layer_table

_GDN_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
)  # fmt: skip
# Types that hold several codes, or are checked with their format's own parameters.
_CODES = ("U8", "I8", "I32", "F4")


@validator("shapes follow the config's sizes; types and shapes follow their formats", "model")
def shapes(folder: Folder) -> Iterator[Finding]:
    """Headers against config and formats."""
    checkpoint = folder.checkpoint
    yield from _sizes(checkpoint)
    yield from _roles(checkpoint)
    yield from _of_table(checkpoint)
    for name, spec in coded_weights(checkpoint).items():
        yield from spec.faults(checkpoint, name)
    yield from _lost(checkpoint)
    yield from _experts(checkpoint)
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
    wanted, coded = expected_shapes(checkpoint), coded_weights(checkpoint)
    either = role_index.family.stacked_transposed
    for name, place in role_index.places.items():
        shape = wanted.get(place.role.name.removeprefix("mtp."))
        if shape is None:
            continue
        kind = checkpoint[name].type
        if not place.parameter and place.role.kind in (Kind.EMBEDDING, Kind.HEAD):
            continue  # one of several of a class's own: Molmo2's new words, Dory's scales of logits
        if (spec := coded.get(name)) is not None:
            shape = spec.shape(checkpoint, name, shape)
        elif place.parameter == "bias":
            shape = shape[:1]
        elif place.parameter not in ("", "weight") or kind.dtype in _CODES:
            continue
        if shape is None:
            continue
        if not _fits(kind.shape, shape) and not (
            either and len(shape) == 3 and _fits(kind.shape, (shape[0], shape[2], shape[1]))
        ):
            found = [size if size >= 0 else "any" for size in shape]
            message = f"expected {found} by the config, found {kind}".replace("'", "")
            yield Finding("QC026", "error", name, message)


def _fits(found: Shape, wanted: Shape) -> bool:
    return len(found) == len(wanted) and all(
        w in (ANY, f) for f, w in zip(found, wanted, strict=True)
    )


# --- Expected by the formats ---------------------------------------------------------------------


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
        if stated is None or stated.get("type") is None:
            continue  # QC097
        wanted = [d for spec in specs() if spec.states(stated) for d in spec.dtypes]
        if wanted and dtype not in wanted:
            message = (
                f"quantized_layers states {stated['num_bits']}-bit floats for {module!r}: expected "
                f"{' or '.join(wanted)}, found {source.type}"
            )
            yield Finding("QC027", "error", name, message)


# --- Parts of quantized weights ------------------------------------------------------------------


def _lost(checkpoint: Checkpoint) -> Iterator[Finding]:
    for name in lost(checkpoint):
        module, parameter = split_parameter(name)
        if parameter in ("weight_zero_point", "weight_g_idx"):
            message = f"belongs to no weight ({module}.weight_packed)"
            yield Finding("QC088", "error", name, message)


_MATRICES = ("weight", "weight_packed", "qweight")


def _experts(checkpoint: Checkpoint) -> Iterator[Finding]:
    """For layers with any packed expert: how each matrix is stored, and in which scheme by the
    config."""
    layers: dict[tuple[bool, int | None], dict[tuple[object, ...], str]] = {}
    if checkpoint.ends.isdisjoint((".weight_packed", ".qweight")):
        return
    for name, place in checkpoint.role_index.places.items():
        role = place.role.name
        base = role.removeprefix("mtp.")
        if place.expert is None or not base.startswith("experts."):
            continue
        if place.parameter not in _MATRICES:
            continue
        module = split_parameter(name)[0]
        scheme: object = None
        if place.parameter == "weight_packed":
            scheme = ints_of(checkpoint, module)
        elif place.parameter == "qweight":
            scheme = qweight_ints(checkpoint, module)
        form = place.parameter, checkpoint[name].type.dtype, scheme
        layers.setdefault((role != base, place.layer), {}).setdefault(form, name)
    for (draft, layer), forms in layers.items():
        if len(forms) < 2 or all(form[0] == "weight" for form in forms):
            continue
        which = f"{'draft layer' if draft else 'layer'} {layer}"
        first, *others = forms.values()
        message = f"{which}: its experts are stored in {len(forms)} formats; {first} is in another"
        for name in others:
            yield Finding("QC091", "error", name, message)
