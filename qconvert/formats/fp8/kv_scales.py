"""Scales of a KV cache in FP8, from the largest key and value that a calibration saw.

The largest becomes E4M3's largest number: what llm-compressor's observer computes (compressed-tensors,
`quantization/utils/helpers.py`, calculate_qparams). sglang and vLLM divide by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Buffer
from qconvert.core.int_scheme import Codes, Scheme

MAXIMA = TensorType("F32", (2, 1))  # the largest key, and the largest value
_MOST = 448.0  # of E4M3


@dataclass(frozen=True, slots=True)
class KvScales:
    """The largest key and value, `scale` F32 [2, 1] of what a calibration finds -> `k_scale` and
    `v_scale`, F32 []; 1 where there are only zeros. A CodePacker."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        return "k_proj.k_scale", "v_proj.v_scale"

    @property
    def row_step(self) -> int:
        return 0

    def scheme_of(self, columns: int) -> Scheme:
        raise PlanError("scales of a KV cache are of no matrix")

    def loss(self, weight: TensorType) -> str:
        return "none"

    def infer(self, weight: TensorType) -> tuple[TensorType, ...]:
        return TensorType("F32", ()), TensorType("F32", ())

    def pack(self, codes: Codes, outs: Sequence[Buffer]) -> None:
        import numpy as np

        for largest, out in zip(codes.scale.ravel(), outs, strict=True):
            scale = largest / np.float32(_MOST) if largest else 1.0
            np.frombuffer(out.data, "<f4")[:] = scale
