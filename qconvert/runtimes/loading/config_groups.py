"""Values of a quantization config that every runtime reads alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Group:
    """One config group of compressed-tensors."""

    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None
    format: str | None

    @property
    def bits(self) -> int:
        return int(self.weights.get("num_bits", 8))

    @property
    def integers(self) -> bool:
        return str(self.weights.get("type", "int")) == "int"

    @property
    def symmetric(self) -> bool:
        return bool(self.weights.get("symmetric", True))

    @property
    def group(self) -> int | None:
        size = self.weights.get("group_size")
        return None if size is None else int(size)

    @property
    def strategy(self) -> str:
        stated = self.weights.get("strategy")
        if stated is not None:
            return str(stated)
        return "tensor" if self.group is None else "group" if self.group > 0 else "channel"

    @property
    def actorder(self) -> str | None:
        value = self.weights.get("actorder")
        if value is True:
            return "group"
        return str(value) if value else None

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns of a block of FP8, for activations quantized as they come."""
        fits = (
            not self.integers and self.bits == 8 and self.symmetric and self.strategy == "block"
            and self.inputs is not None and bool(self.inputs.get("dynamic"))
        )  # fmt: skip
        return pair_of(self.weights.get("block_structure")) if fits else None

    @property
    def rows(self) -> str | None:
        """The type of codes of 8 bits with a scale for each row, with activations quantized token by
        token in the same type."""
        inputs = self.inputs or {}
        kind = self.weights.get("type", "int")
        fits = (
            self.bits == inputs.get("num_bits", 8) == 8 and self.symmetric
            and self.strategy == "channel" and not self.weights.get("dynamic")
            and inputs.get("dynamic") is True and inputs.get("strategy") == "token"
            and inputs.get("type", "int") == kind
        )  # fmt: skip
        return {"int": "I8", "float": "F8_E4M3"}.get(str(kind)) if fits else None

    @property
    def mx(self) -> int | None:
        """The bits of MXFP4 and MXFP8."""
        fits = (
            not self.integers and self.group == 32 and self.symmetric and self.strategy == "group"
            and (self.bits == 4 or self.weights.get("scale_dtype") == "torch.uint8")
        )  # fmt: skip
        return self.bits if fits else None

    @property
    def is_integers(self) -> bool:
        static = not self.weights.get("dynamic")
        return (
            self.integers and self.strategy in ("channel", "group") and static and not self.inputs
        )

    @property
    def is_nvfp4(self) -> bool:
        return (
            not self.integers and self.bits == 4 and self.group == 16 and self.symmetric
            and self.strategy == "tensor_group"
        )  # fmt: skip


def block_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The block of a config: its own, then its text config's, then `compression_config`."""
    text = config.get("text_config")
    for place, key in (
        (config, "quantization_config"), (text, "quantization_config"),
        (config, "compression_config"),
    ):  # fmt: skip
        value = place.get(key) if isinstance(place, Mapping) else None
        if isinstance(value, Mapping):
            return value
    return None


def is_group(group: Mapping[str, Any]) -> bool:
    """Tell whether the values that are read have the types that they must have."""
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping) or not isinstance(inputs, Mapping | None):
        return False
    bits, size = weights.get("num_bits", 8), weights.get("group_size")
    fits = size is None or (type(size) is int and (size > 0 or size == -1))
    return type(bits) is int and bits in (4, 8) and fits


def names_of(value: object) -> Sequence[str]:
    """The names in a list."""
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []


def pair_of(value: object) -> tuple[int, int] | None:
    """Rows and columns of a block."""
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    return None
