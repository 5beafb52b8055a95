"""The group of compressed-tensors' config for MXFP4 and MXFP8."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from qconvert.formats.mxfp4.limits import MX_BLOCK

Format = Literal["mxfp4", "mxfp8"]

FORMATS: Mapping[Format, str] = {"mxfp4": "mxfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}


def mx_group_config(form: Format, targets: Iterable[str]) -> dict[str, Any]:
    """An entry of compressed-tensors' `config_groups` (0.19, `quantization/quant_scheme.py`: MXFP4A16
    and MXFP8). Runtimes decide for themselves how they compute with MXFP4 weights; with MXFP8 ones vLLM
    0.33 (`schemes/compressed_tensors_w8a8_mxfp8.py`) scales activations alike."""
    common = {
        "num_bits": 4 if form == "mxfp4" else 8, "type": "float", "symmetric": True,
        "strategy": "group", "group_size": MX_BLOCK, "scale_dtype": "torch.uint8",
        "zp_dtype": "torch.uint8",
    }  # fmt: skip
    return {
        "targets": list(targets),
        "format": FORMATS[form],
        "weights": {**common, "dynamic": False},
        "input_activations": None if form == "mxfp4" else {**common, "dynamic": True},
        "output_activations": None,
    }
