"""Scales of activations of FP8 and INT8 weights against the block that states how they are quantized.

QC101 the config says that activations have stored scales, and a matrix has none.
QC102 a matrix has a scale of its activations, and the config says that there is none.

`activation_scheme: static` (quant_method fp8; transformers calls them activation_scale, vLLM
and sglang input_scale), `dynamic: false` of compressed-tensors' input_activations, and modelopt's
quant_algo FP8: runtimes build a parameter for each of these scales, and multiply by what memory held
where the checkpoint has none.

Of NVFP4 matrices, whose input scales are QC101's and QC102's too:

QC103 the config states no NVFP4, or another dialect than the tensors' (by names; by numbers in
      shared_scales).

Dialects as sglang (`modelopt_quant.py`) and compressed-tensors (`nvfp4-pack-quantized`)
have them.

Scales of a KV cache that is kept in FP8.

QC111 a scale of the KV cache is one that runtimes do not take: of another type, without its partner, or
      beside a config that states no KV cache; or a layer of attention has none where others do, or where
      qconvert.json says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from qconvert.checkpoint.checkpoint import MANIFEST, Checkpoint, QuantConfig
from qconvert.core.names import KV_SCALES, is_scale, split_parameter
from qconvert.core.roles import Kind
from qconvert.core.shown import count
from qconvert.validation.findings import Finding
from qconvert.validation.runner import KV_STATED, Folder, validator
from qconvert.validators.formats.nvfp4 import Parts, Stated, all_parts, speaks_of_nvfp4, stated
from qconvert.validators.reading.decode import FP8
from qconvert.validators.reading.quantization import group_of, judged, scheme_of
from qconvert.validators.reading.quantization_tensors import ACTIVATIONS, of_cache
from qconvert.validators.reading.stated_schemes import layer_table

K, V = KV_SCALES
_FLOATS = ("F32", "BF16", "F16")
# What makes keys and values, in a layer.
_MAKERS = (Kind.KEY, Kind.QKV, Kind.KV_UP)


@validator("scales of the KV cache are as runtimes take them", "kv-cache", "model")
def kv_cache(folder: Folder) -> Iterator[Finding]:
    """Names, types and shapes; values: `values` (QC068)."""
    checkpoint = folder.checkpoint
    scales = [n for n in checkpoint if n.endswith(KV_SCALES) and of_cache(checkpoint, n)]
    layers: dict[str, set[str]] = {}
    for name in scales:
        kind = checkpoint[name].type
        if kind.dtype not in _FLOATS or kind.numel != 1:
            message = f"expected one number of F32, found {kind}"
            yield Finding("QC111", "error", name, message)
        end = name[-len(K) :]
        module = name.removesuffix(end).removesuffix(f".{end[1]}_proj")
        layers.setdefault(module, set()).add(end)
    for module, ends in layers.items():
        if len(ends) == 1:
            (only,) = ends
            message = f"it has {only[1:]} and no {(V if only == K else K)[1:]}"
            yield Finding("QC111", "warning" if only == K else "error", module, message)
    yield from _layers_without(checkpoint, layers)
    for config in checkpoint.quantization_configs:
        blocks = [config.block]
        if layer_table(config) is not None:
            # sglang (`weight_utils.py`) reads modelopt's file too where this says nothing.
            blocks += [one.block for one in checkpoint.quantization_configs]
        silent = not any(block.get(key) for block in blocks for key in KV_STATED)
        if not (scales or silent) and _is_static(config):
            message = "states a scaled KV cache, and no scale of one is stored: runtimes use 1"
            yield Finding("QC111", "warning", config.where, message)
        if scales and silent and config.method in ("compressed-tensors", "modelopt"):
            message = (
                f"there are {count(len(scales), 'scale')} of the KV cache, and {config.where} "
                f"states neither {' nor '.join(KV_STATED)}: sglang reads none of them"
            )
            yield Finding("QC111", "warning", scales[0], message)


def _layers_without(checkpoint: Checkpoint, having: Collection[str]) -> Iterator[Finding]:
    """Layers of attention that lack the scales which others have, or all are said to have."""
    stated = (checkpoint.manifest or {}).get("kv_scale")
    if not having and stated is None:
        return
    index = checkpoint.role_index
    with_scales = {_place_of(module) for module in having}
    lacking: dict[str, None] = {}
    for name, place in index.places.items():
        draft = index.family.is_mtp(name, index.dims)
        tower = place.role.vision
        if place.role.kind in _MAKERS and place.layer is not None and not (draft or tower):
            module = split_parameter(name)[0].rpartition(".")[0]
            if _place_of(module) not in with_scales:
                lacking[module] = None
    if lacking:
        first = next(iter(lacking))
        why = f"{MANIFEST} says that keys and values have the scale {stated}"
        if stated is None:
            why = f"{count(len(having), 'other layer')} of attention have some"
        message = (
            f"{count(len(lacking), 'layer')} of attention have no scales of the KV cache: {why}"
        )
        yield Finding("QC111", "error", first, message)


def _is_static(config: QuantConfig) -> bool:
    scheme = config.block.get("kv_cache_scheme")
    return not (isinstance(scheme, Mapping) and scheme.get("dynamic"))


def _place_of(module: str) -> str:
    """Name before a module's layer, and the layer: runtimes hang scales at attention, at what is in
    it, or at its projections."""
    before, layers, rest = module.partition(".layers.")
    return f"{before}{layers}{rest.partition('.')[0]}"


@validator(
    "NVFP4 matrices are in the config's dialect, with the scales of activations it states",
    "model",
    "nvfp4",
)
def nvfp4_headers(folder: Folder) -> Iterator[Finding]:
    found = list(all_parts(folder.checkpoint))
    block = judged(folder.checkpoint.quantization_configs)
    if block is not None and found and not speaks_of_nvfp4(block):
        message = (
            f"{len(found)} matrices are NVFP4, but {block.where} states none: expected a quant_algo "
            "of NVFP4, or in compressed-tensors a group of 4-bit floats with strategy tensor_group"
        )
        yield Finding("QC103", "error", found[0].weight.name, message)
    said = None if block is None else stated(block)
    if said is None:
        return  # QC012, QC037, or a form of config that is not read here
    others = [parts for parts in found if parts.dialect is not said.dialect]
    if others:
        first = others[0]
        message = (
            f"{said.where} states {said.dialect.name}, whose codes are *.{said.dialect.weight} with "
            f"*.{said.dialect.global_scale}; found those of {first.dialect.name} in {len(others)} "
            f"of {len(found)} matrices"
        )
        yield Finding("QC103", "error", first.weight.name, message)
        return
    yield from _inputs(folder.checkpoint, said, found)


def _inputs(checkpoint: Checkpoint, said: Stated, found: Sequence[Parts]) -> Iterator[Finding]:
    """One finding for all matrices: the block is wrong. modelopt's table says it of each."""
    end = said.dialect.input
    asked = [
        (scheme_of(checkpoint, parts.module) or {}).get("inputs", said.inputs) for parts in found
    ]
    lacking = [p for p, inputs in zip(found, asked, strict=True) if inputs and p.input is None]
    if lacking:
        message = (
            f"{said.where} says that activations are quantized; {len(lacking)} of {len(found)} "
            f"matrices have no {end}"
        )
        yield Finding("QC101", "error", lacking[0].weight.name, message)
    given = [
        p.input.name
        for p, inputs in zip(found, asked, strict=True)
        if not inputs and p.input is not None
    ]
    if given:
        message = (
            f"{said.where} says weights only; {len(given)} of {len(found)} matrices have {end}"
        )
        yield Finding("QC102", "warning", given[0], message)


_NAMES = tuple(
    f"{mark}{end}"
    for end in ACTIVATIONS
    for mark in "._"
    if not end.startswith("output") and not end.endswith(("zero_point", "g_idx"))
)


@validator("activations of FP8 and INT8 weights have the scales that the config states", "model")
def activations(folder: Folder) -> Iterator[Finding]:
    checkpoint = folder.checkpoint
    config = judged(checkpoint.quantization_configs)
    static = None if config is None else _static(checkpoint, config)
    if config is None or static is None:
        return  # QC012, QC037
    lacking: list[str] = []
    given: list[str] = []
    coded = 0
    ends = [end for end in _NAMES if any(e.endswith(end) for e in checkpoint.ends)]
    for name, source in checkpoint.items():
        is_coded = source.type.dtype in (*FP8, "I8") and not is_scale(name)
        if not is_coded or f"{name.removesuffix('.weight')}.weight_scale_2" in checkpoint:
            continue
        coded += 1
        module = name.removesuffix(".weight")
        scale = next((s for end in ends if (s := f"{module}{end}") in checkpoint), None)
        stated = static(module)
        if stated and scale is None:
            lacking.append(name)
        elif stated is False and scale is not None:
            given.append(scale)
    if lacking:
        message = (
            f"{config.where} says that activations have stored scales; {len(lacking)} of {coded} "
            "matrices have no input_scale"
        )
        yield Finding("QC101", "error", lacking[0], message)
    if given:
        message = (
            f"{config.where} says that activations have no stored scales; {len(given)} of {coded} "
            "matrices have one"
        )
        yield Finding("QC102", "warning", given[0], message)


def _static(checkpoint: Checkpoint, config: QuantConfig) -> Callable[[str], bool | None] | None:
    """Tell whether a module's activations have a stored scale, by the block; None where it does not
    say."""
    if config.method in ("fp8", "fbgemm_fp8"):
        scheme = config.block.get("activation_scheme")
        said = None if scheme is None else scheme == "static"
        return lambda module: said
    if config.method == "quark":
        return lambda module: (scheme_of(checkpoint, module) or {}).get("inputs")
    if config.method == "modelopt":
        algorithm = config.block.get("quant_algo")
        return (lambda module: True) if algorithm == "FP8" else None

    def of_group(module: str) -> bool | None:
        group = group_of(checkpoint, module)
        if group is None:
            return None
        inputs = group.get("input_activations")
        return isinstance(inputs, Mapping) and inputs.get("dynamic", False) is False

    return of_group if config.method == "compressed-tensors" else None
