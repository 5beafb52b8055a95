"""BF16 -> msmodelslim's W8A8_DYNAMIC: the codes of compressed-tensors' INT8 under that project's names.

Format source: msmodelslim 26.1, `modelslim_v1/save/ascendv1.py` (`on_w8a8_dynamic_per_channel`), as
vllm-ascend reads it (`quantization/methods/w8a8_dynamic.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qconvert.checkpoint.checkpoint import ASCEND
from qconvert.core.dtypes import TensorType
from qconvert.core.graph import Buffer
from qconvert.core.int_scheme import IntScheme
from qconvert.core.parameter_names import ASCEND as PARTS
from qconvert.formats.int_packed.packers import INT8_ROWS, KeepInt8

if TYPE_CHECKING:
    from qconvert.core.int_scheme import Codes

WRITTEN = PARTS[:3]
BLOCK: Mapping[str, Any] = {
    "quant_method": ASCEND, "model_quant_type": "W8A8_DYNAMIC", "version": "1.0.0", "group_size": 0,
    "metadata": {}, "optional": {},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class KeepAscend:
    """weight I8 [N, K], weight_scale and weight_offset BF16 [N, 1], those of INT8 and zeros. msmodelslim
    has them in F32, of which vllm-ascend makes the model's dtype at load: codes rounded with a scale
    that is bf16 already keep it."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        return WRITTEN

    @property
    def row_step(self) -> int:
        return 1

    def scheme_of(self, columns: int) -> IntScheme:
        return INT8_ROWS

    def infer(self, weight: TensorType) -> tuple[TensorType, ...]:
        codes, scale = KeepInt8().infer(weight)
        return codes, scale, scale

    def loss(self, weight: TensorType) -> str:
        return KeepInt8().loss(weight)

    def pack(self, codes: Codes, outs: Sequence[Buffer]) -> None:
        KeepInt8().pack(codes, outs[:2])
        outs[2].data[:] = bytes(outs[2].type.nbytes)


def description(names: Iterable[str]) -> str:
    """quant_model_description.json of tensors by name: those of a module with offsets are W8A8_DYNAMIC,
    its bias apart."""
    every = list(names)
    coded = {name.removesuffix(f".{PARTS[2]}") for name in every if name.endswith(f".{PARTS[2]}")}
    kinds = {}
    for name in every:
        module, _, part = name.rpartition(".")
        is_coded = module in coded and part in WRITTEN
        kinds[name] = BLOCK["model_quant_type"] if is_coded else "FLOAT"
    stated = {key: value for key, value in BLOCK.items() if key != "quant_method"}
    return json.dumps({**kinds, **stated}, indent=2) + "\n"
