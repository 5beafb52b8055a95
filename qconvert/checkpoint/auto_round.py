"""AutoRound's own block (`quant_method: auto-round`): what it states for a module.

Format source: auto-round 0.15 (`export/export_to_autoround/`, `inference/convert_model.py`), as vLLM
(`quantization/inc/`) and sglang (`auto_round.py`) read it. `extra_config` has changes for modules: by
name, by the end of a name, then by patterns, of which the first that is found anywhere in a name
applies; 16 bits leave a module as it is, and so does a name outside of `block_name_to_quantize`. What
`packing_format` says decides how integers are stored: GPTQ's form with zero points less one
(auto_gptq), as they are (gptqmodel, or nothing more), or AutoAWQ's (auto_awq).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from qconvert.checkpoint.checkpoint import Checkpoint, QuantConfig
from qconvert.core.errors import PlanError
from qconvert.core.patterns import compiled

METHOD = "auto-round"
_KEPT = 16  # bits from which on a module is not quantized
_SPECIAL = frozenset("*+?^$()[]{}|\\")
_ALIKE = ("bits", "group_size", "sym", "data_type")
# Prefixes under which classes and folders name the language model's modules.
_PREFIXES = ("model.language_model.", "language_model.model.", "model.")


@dataclass(frozen=True, slots=True)
class AutoRound:
    """One block: changes by name and by pattern, and prefixes of what is quantized at all (none: all
    but the head)."""

    config: QuantConfig
    names: Mapping[str, Mapping[str, Any]]
    patterns: tuple[tuple[re.Pattern[str], Mapping[str, Any]], ...]
    blocks: tuple[str, ...]

    @property
    def form(self) -> Literal["gptq", "gptq_v2", "awq"]:
        """The form of its integers. Raises PlanError for another than is read here."""
        packing = str(self.config.block.get("packing_format", "auto_round:auto_gptq"))
        kind, _, backend = packing.partition(":")
        if kind == "auto_round" and "awq" in backend:
            return "awq"
        if kind == "auto_round" and "gptq" in backend and "gptqmodel" not in backend:
            return "gptq"
        if packing in ("auto_round", "auto_round:gptqmodel"):
            return "gptq_v2"
        raise PlanError(
            f"{self.config.where}: expected packing_format auto_round:auto_gptq, auto_round:gptqmodel, "
            f"auto_round:auto_awq or auto_round for integer weights, found {packing!r}"
        )

    def of(self, module: str) -> Mapping[str, Any] | None:
        """`bits`, `group_size`, `sym` and `data_type` of a module's weight; None where it is left as it
        is."""
        block = self.config.block
        found = next((self.names[n] for n in _ends(module) if n in self.names), None)
        inside = found is not None or not module.endswith("lm_head")
        if found is None:
            found = next((c for p, c in self.patterns if p.search(module)), {})
            if self.blocks:
                inside = any(name.startswith(self.blocks) for name in _spelled(module))
        bits = found.get("bits", block.get("bits") if inside else _KEPT)
        if _is_kept(bits):
            return None
        stated = {key: found.get(key, block.get(key)) for key in _ALIKE}
        return {**stated, "bits": bits, "data_type": str(stated["data_type"] or "int")}

    def weights(self, module: str) -> Mapping[str, Any] | None:
        """Return what the block states about a module's weight in the words of compressed-tensors; None
        where it leaves the module as it is."""
        stated = self.of(module)
        return None if stated is None else _weights(stated)

    @property
    def every(self) -> tuple[Mapping[str, Any], ...]:
        """All that the block states about weights, once each."""
        block = self.config.block
        own = {key: block.get(key) for key in _ALIKE}
        changed = [own | {k: v for k, v in c.items() if k in _ALIKE} for c in self.names.values()]
        quantized = [one for one in (own, *changed) if not _is_kept(one["bits"])]
        return tuple({repr(one): one for one in map(_weights, quantized)}.values())


def _is_kept(bits: Any) -> bool:
    return type(bits) is int and bits >= _KEPT


def _weights(stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """AutoRound's words in those of compressed-tensors (`schemes.py`: MXFP4, MXFP8, NVFP4, FP8_BLOCK,
    FP8_STATIC; integers). What is not known has no type."""
    kind, bits, size = str(stated["data_type"] or "int"), stated["bits"], stated["group_size"]
    if kind == "int":
        strategy = "channel" if size == -1 else "group"
        symmetric = stated["sym"] is not False
        found: dict[str, Any] = {"strategy": strategy, "group_size": size, "symmetric": symmetric}
        return {"type": "int", "num_bits": bits, **found}
    if "mx_fp" in kind and bits in (4, 8):
        exponents = {"group_size": 32, "scale_dtype": "torch.uint8"}
        return {"type": "float", "num_bits": bits, "strategy": "group", **exponents}
    if "nv_fp" in kind and bits == 4:
        return {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    if "fp" in kind and bits == 8 and isinstance(size, list | tuple):
        return {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": list(size)}
    if "fp" in kind and bits == 8:
        return {"type": "float", "num_bits": 8, "strategy": "channel" if size == -1 else "tensor"}
    return {"algorithm": f"{bits} bits of data_type {kind}"}


def _spelled(module: str) -> Iterator[str]:
    yield module
    own = next((one for one in _PREFIXES if module.startswith(one)), None)
    if own is not None:
        yield from (one + module.removeprefix(own) for one in _PREFIXES if one != own)


def _ends(module: str) -> Iterator[str]:
    """A module's names, then each without its first parts."""
    yield from _spelled(module)
    while module:
        module = module.partition(".")[2]
        yield module


@lru_cache(maxsize=8)  # asked for each matrix
def auto_round(checkpoint: Checkpoint) -> AutoRound | None:
    """The block of AutoRound's own method, None without one. Raises PlanError for an invalid entry."""
    found = next((c for c in checkpoint.quantization_configs if c.method == METHOD), None)
    return None if found is None else auto_round_block(found)


def auto_round_block(config: QuantConfig) -> AutoRound:
    """The block, by module. Raises PlanError for an invalid entry."""
    extra = config.block.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(c, Mapping) for c in extra.values()):
        raise PlanError(f"{config.where}: expected extra_config with an object for each module")
    patterns = []
    for name, change in extra.items():
        if _SPECIAL & set(name):
            try:
                patterns.append((compiled(name), change))
            except re.error as error:
                raise PlanError(
                    f"{config.where}: extra_config {name!r} is not a valid regular expression: {error}"
                ) from error
    keys = ("block_name_to_quantize", "to_quant_block_names")
    blocks = tuple(_texts(next((config.block[k] for k in keys if config.block.get(k)), [])))
    return AutoRound(config, extra, tuple(patterns), blocks)


def _texts(value: Any) -> Iterator[str]:
    """Names in a text between commas, or in lists of lists."""
    if isinstance(value, str):
        yield from (name.strip() for name in value.split(",") if name.strip())
    for one in value if isinstance(value, list) else ():
        yield from _texts(one)
