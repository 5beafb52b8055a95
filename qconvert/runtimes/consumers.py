"""Layouts that each consumer's loader takes. `--for NAME[==VERSION]` names a consumer.

Checked against the loaders of the releases in core/versions.py. Wrong orders have the
right shape and load silently, so an order that is not in this table is refused, and a version that the
table was not checked with is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from qconvert.core.errors import PlanError
from qconvert.core.family import Dims, text_config
from qconvert.core.versions import RELEASES, is_of_series, is_version
from qconvert.runtimes.loading.config_groups import block_of

# The versions that the rules here and in the validators were checked with.
CHECKED = {name: RELEASES[name].series for name in ("sglang", "vllm", "transformers")}
RUNTIMES = tuple(CHECKED)
# Model classes, whichever program runs them: name, and the `to` of the pass as_class.
CLASSES = {"qwen3-next": "qwen3_next", "qwen3.5": "qwen3_5_text"}
NAMES = (*RUNTIMES, *CLASSES)

Order = Literal["split", "contiguous", "interleaved"]
# Orders of the linear-attention projections that a consumer takes of a family, the one to make for it
# first: fused in one group, fused in as many as there are key heads, or apart.
_GDN: dict[str, dict[str, tuple[Order, ...]]] = {
    "sglang": {"qwen3_5": ("contiguous", "split"), "qwen3_next": ("interleaved",)},
    "vllm": {"qwen3_5": ("split",), "qwen3_next": ("interleaved",)},
    "transformers": {"qwen3_5": ("split",), "qwen3_next": ("interleaved",)},
    "qwen3-next": {"qwen3_5": ("interleaved",), "qwen3_next": ("interleaved",)},
    "qwen3.5": {"qwen3_5": ("split",), "qwen3_next": ("split",)},
}


@dataclass(frozen=True, slots=True)
class Consumer:
    """A consumer and, where given, the version the user runs."""

    name: str
    version: str | None = None

    def gdn_groups(self, family: str, dims: Dims) -> int:
        """Groups of the fused linear-attention projections to make for it, 0 if it wants them split.
        Raises PlanError for a family without them."""
        return _groups(self._orders(family, dims)[0], dims)

    def takes_gdn(self, groups: int, family: str, dims: Dims) -> bool:
        """Tell whether it takes projections fused in that many groups, or split (0). Raises PlanError
        for a family without them."""
        return any(groups == _groups(order, dims) for order in self._orders(family, dims))

    def _orders(self, family: str, dims: Dims) -> tuple[Order, ...]:
        if dims.gdn is None or family not in _GDN[self.name]:
            raise PlanError(
                f"{family} has no linear-attention projections that {self.name} wants fused or split"
            )
        return _GDN[self.name][family]

    @property
    def unchecked(self) -> str | None:
        """A warning for a version that the rules were not checked with, None for a checked one
        and if none is given."""
        if self.version is None or RELEASES[self.name].known(self.version):
            return None
        known = CHECKED[self.name]
        if is_of_series(self.version, known):
            return None
        return f"the rules were checked with {self.name} {known}; {self.version} was not checked"


def _groups(order: Order, dims: Dims) -> int:
    heads = dims.gdn[0] if dims.gdn else 0
    return {"split": 0, "contiguous": 1, "interleaved": heads}[order]


def consumer_in(manifest: Mapping[str, Any]) -> Consumer | None:
    """The runtime that a step of a folder's manifest was told to convert for."""
    for step in manifest.get("passes", ()):
        stated = step["options"].get("consumer")
        if isinstance(stated, str):
            name, _, version = stated.partition("==")
            return Consumer(name, version or None)
    return None


def takers_of_gdn(family: str, groups: int, heads: int) -> tuple[str, ...]:
    """The runtimes that take a family's projections fused in that many groups (0: split);
    `heads` groups are interleaved by key head. All of them for a family without such projections."""
    counts = {"split": 0, "contiguous": 1, "interleaved": heads}
    return tuple(
        name
        for name in RUNTIMES
        if family not in _GDN[name] or groups in [counts[order] for order in _GDN[name][family]]
    )


def parse_consumer(text: str) -> Consumer:
    """`sglang` or `sglang==VERSION`. Raises PlanError for an unknown name, for an invalid version, and
    for a version of a model class."""
    name, equals, version = text.partition("==")
    if name not in NAMES:
        raise PlanError(f"unknown consumer {name!r}; known: {', '.join(NAMES)} (NAME[==VERSION])")
    if not equals:
        return Consumer(name)
    if name in CLASSES:
        raise PlanError(f"{name} is a model class and has no version; leave out =={version}")
    if not is_version(version):
        raise PlanError(
            f"{version!r} is not a version of {name}; write {name}=={CHECKED[name]}, or {name} alone"
        )
    return Consumer(name, version)


def refused_form(runtime: str, config: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Why no class of a runtime reads the form that a folder's metadata states: the order of its fused
    projections, or its quantization; "" where some class may. `facts` are its manifest's."""
    groups = facts.get("gdn_groups")
    if isinstance(groups, int) and not isinstance(groups, bool):
        heads = text_config(config).get("linear_num_key_heads")
        if runtime not in takers_of_gdn(str(facts.get("family")), groups, heads or 0):
            return "it takes linear-attention projections in another order"
    block = block_of(config)
    if block is None:
        return ""
    experts = bool(facts.get("experts"))
    if runtime == "transformers":
        reads = _transformers_reads(block, experts=experts)
        return "" if reads else "it has no class for this quantization"
    if runtime == "sglang" and _sglang_refuses(block, experts=experts):
        return "it has no class for weights, or experts, in this form"
    return "it has no parameters for experts in this form" if _vllm_refuses(runtime, block) else ""


def _sglang_refuses(block: Mapping[str, Any], *, experts: bool) -> bool:
    """Forms that sglang has no class for: experts with zero points, or in INT8 with activations
    (on NPUs alone); MXFP8; and MXFP4, which its classes of Kimi-K3 and DeepSeek-V4 alone read under
    compressed-tensors' names (`models/kimi_k3.py`: others leave `weight_packed` unread, silently)."""
    groups = _weights_of(block)
    if any(one.get("scale_dtype") == "torch.uint8" for one, _ in groups):
        return True
    int8 = any(one.get("type") == "int" and inputs for one, inputs in groups)
    return experts and (int8 or any(one.get("symmetric") is False for one, _ in groups))


def _vllm_refuses(runtime: str, block: Mapping[str, Any]) -> bool:
    """Experts beside block FP8 in forms that vLLM has no parameters for: it does not read
    `linear_fp8_config`, and in MIXED_PRECISION it takes other names and shapes of scales."""
    layers = block.get("quantized_layers")
    named = layers.values() if isinstance(layers, Mapping) else ()
    blocks = any(isinstance(one, Mapping) and one.get("quant_algo") == "FP8_PB_WO" for one in named)
    return runtime == "vllm" and (blocks or "linear_fp8_config" in block)


def _transformers_reads(block: Mapping[str, Any], *, experts: bool) -> bool:
    """Tell whether transformers loads what quantization steps write. It does not support modelopt,
    sglang's linear_fp8_config, experts in GPTQ's packing, and experts of compressed-tensors with zero
    points, group indices, global scales or exponents."""
    method = str(block.get("quant_method"))
    if method != "compressed-tensors":
        return method != "modelopt" and not (experts and method == "gptq")
    if "linear_fp8_config" in block:
        return False
    return not experts or all(
        one.get("symmetric") is not False
        and not one.get("actorder")
        and (one.get("type"), one.get("num_bits")) != ("float", 4)
        and one.get("scale_dtype") != "torch.uint8"
        for one, _ in _weights_of(block)
    )


def _weights_of(block: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], bool]]:
    """Statements of compressed-tensors' groups about weights, and whether activations are quantized
    too."""
    groups = block.get("config_groups")
    found = groups.values() if isinstance(groups, Mapping) else ()
    each = [
        (g.get("weights"), bool(g.get("input_activations")))
        for g in found
        if isinstance(g, Mapping)
    ]
    return [(weights, inputs) for weights, inputs in each if isinstance(weights, Mapping)]
