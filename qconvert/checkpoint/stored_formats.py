"""Stored format of a tensor, if its dtype does not say: a matrix of 4-bit codes in I32 words or U8 bytes
is shown by its format, with its stored bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.integer_config import gptq_form, packed_scheme
from qconvert.checkpoint.prepared import DERIVED, QUANT_METHOD
from qconvert.core.dtypes import TensorType, TypesOf
from qconvert.core.errors import PlanError
from qconvert.core.int_scheme import IntScheme
from qconvert.core.names import split_parameter

# Dtypes that do not say what is stored.
OF_CODES = ("I8", "U8", "I32")
_AMX = re.compile(r"blk\.\d+\.ffn_(gate|up|down)_exps\.\d+\.numa\.\d+\.(?:weight|scale)")
_FUSED = re.compile(r".*\.experts\.(w13|w2)_([a-z0-9_]+)")


@dataclass(frozen=True)
class Formats:
    """The formats of a folder's tensors, stored or planned: their types by name, the checkpoint whose
    config describes them, and the facts of its manifest."""

    tensors: Mapping[str, TensorType]
    checkpoint: Checkpoint
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Formats:
        """The formats of a checkpoint. Raises CheckpointError for a broken manifest."""
        return cls(TypesOf(checkpoint.sources), checkpoint, checkpoint.manifest or {})

    def label(self, name: str, dtype: str) -> str:
        """`INT4 g128 (packed)`, `NVFP4`, `AMXINT4`; the dtype of every tensor that its dtype fully
        describes."""
        return dtype if dtype not in OF_CODES else self._packed(name, dtype) or dtype

    def _packed(self, name: str, dtype: str) -> str | None:
        """The format of a matrix of codes, None for any other tensor. If the config does not say how
        they are packed, it is `packed integers`."""
        if dtype == "I8" and name.endswith(".weight") and _AMX.fullmatch(name):
            return self._amx
        fused = _FUSED.fullmatch(name)
        if fused is not None and dtype == "U8" and fused[2] in ("weight", "weight_packed"):
            return "NVFP4 (trtllm-gen)" if self._is_prepared() else None
        module, parameter = split_parameter(name)
        if dtype == "I32":
            return self._words(module, parameter)
        if dtype == "I8":
            return (
                "INT8"
                if parameter == "weight" and f"{module}.weight_scale" in self.tensors
                else None
            )
        return self._bytes(name, module, parameter)

    @cached_property
    def _amx(self) -> str | None:
        fact = self.facts.get("amx")
        method = fact.get("method") if isinstance(fact, Mapping) else None
        return method if isinstance(method, str) else None

    def _is_prepared(self) -> bool:
        block = self.checkpoint.config.get("quantization_config")
        return isinstance(block, Mapping) and block.get("quant_method") == QUANT_METHOD

    def _words(self, module: str, parameter: str) -> str | None:
        if parameter == "weight_packed":
            return self._one_scheme or _spelled("", lambda: packed_scheme(self.checkpoint, module))
        if parameter in ("qzeros", "weight_zero_point"):
            return "zero points (packed)"
        if parameter != "qweight":
            return None
        blocks = self.checkpoint.quantization_configs
        awq = next((found.block for found in blocks if found.method == "awq"), None)
        if awq is not None:
            return f"AWQ INT{awq.get('bits', awq.get('w_bit', '?'))} g{awq.get('group_size', '?')}"
        return _spelled("GPTQ ", lambda: gptq_form(self.checkpoint, module).scheme)

    @cached_property
    def _one_scheme(self) -> str | None:
        """The label of all packed matrices if the config has one scheme; None if it has several
        and names decide."""
        try:
            scheme = packed_scheme(self.checkpoint, "")
        except PlanError:
            return None
        return _spelled("", lambda: scheme)

    def _bytes(self, name: str, module: str, parameter: str) -> str | None:
        there = self.tensors
        if name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in there:
            return "MXFP4"
        if parameter not in ("weight", "weight_packed"):
            return None
        if f"{module}.weight_scale_2" in there or f"{module}.weight_global_scale" in there:
            return "NVFP4"
        scale = there.get(f"{module}.weight_scale")
        return "MXFP4" if scale is not None and scale.dtype in ("U8", "F8_E8M0") else None


def _spelled(kind: str, read: Callable[[], IntScheme]) -> str:
    try:
        scheme = read()
    except PlanError:
        return f"{kind}packed integers"
    group = "per channel" if scheme.group is None else f"g{scheme.group}"
    zeros = "" if scheme.symmetric else ", zero points"
    return f"{kind}INT{scheme.bits} {group}{zeros}{'' if kind else ' (packed)'}"


def own_role(name: str) -> str | None:
    """The role of a tensor under a name that qconvert gave it and no family knows: experts in AMX tiles,
    experts prepared for trtllm-gen. None for any other."""
    amx = _AMX.fullmatch(name)
    if amx is not None:
        return f"experts.{amx[1]}_proj"
    fused = _FUSED.fullmatch(name)
    if fused is not None:
        return f"experts.{fused[1]}"
    module, _, last = name.rpartition(".")
    return "experts.scalars" if last in DERIVED and module.endswith(".experts") else None
