"""Scales of activations of FP8 and INT8 weights against the block that states how they are quantized.
(Those of NVFP4: nvfp4_headers.)

QC101 the config says that activations have stored scales, and a matrix has none.
QC102 a matrix has a scale of its activations, and the config says that there is none.

`activation_scheme: static` (quant_method fp8; transformers calls them activation_scale, vLLM
and sglang input_scale), `dynamic: false` of compressed-tensors' input_activations, and modelopt's
quant_algo FP8: runtimes build a parameter for each of these scales, and multiply by what memory held
where the checkpoint has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from qconvert.checkpoint.checkpoint import Checkpoint, QuantConfig
from qconvert.core.names import is_scale
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, Need
from qconvert.validators.reading.decode import FP8
from qconvert.validators.reading.quantization import group_of, judged, scheme_of
from qconvert.validators.reading.quantization_tensors import ACTIVATIONS

_NAMES = tuple(
    f"{mark}{end}"
    for end in ACTIVATIONS
    for mark in "._"
    if not end.startswith("output") and not end.endswith(("zero_point", "g_idx"))
)


@dataclass(frozen=True)
class Activations:
    """Names alone."""

    name: str = "activations"
    proves: str = "activations of FP8 and INT8 weights have the scales that the config states"
    needs: frozenset[Need] = frozenset({"model"})

    def __call__(self, folder: Folder) -> Iterator[Finding]:
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


VALIDATOR = Activations()
