"""Kinds of parameters of a transformers class, by the module that owns it and, for the projections of
one block, by the names that transformers' classes share.

The owner decides whether a parameter may be quantized at all: `nn.Linear` may, an embedding, the head, a
norm, a convolution or a router may not, whatever they are called. Names only tell linears apart. A
linear that no rule names is LINEAR: converted with care, never quantized by default.
"""

from __future__ import annotations

from dataclasses import dataclass

from qconvert.core.roles import Kind


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a class: its name there, its shape, the classes of the modules that own it (its own
    module last), and what transformers says about that module. `language` is false for towers and what
    joins them to the language model; `num_experts` is 0 for a model without any."""

    name: str
    shape: tuple[int, ...]
    owners: tuple[str, ...]
    linear: bool = False
    convolution: bool = False
    embedding: bool = False
    is_input: bool = False
    is_head: bool = False
    language: bool = True
    num_experts: int = 0

    @property
    def parts(self) -> list[str]:
        """The components of its module's name, with its own name if it is a bare parameter."""
        parts = self.name.split(".")
        return parts[:-1] if parts[-1] in ("weight", "bias") else parts


_QUERY, _KEY, _VALUE = ("q_proj", "query", "wq"), ("k_proj", "key", "wk"), ("v_proj", "value", "wv")
_OUTPUT = ("o_proj", "out_proj", "wo", "dense", "c_proj")
_QKV = ("qkv_proj", "query_key_value", "Wqkv", "wqkv", "qkv")
_LATENT = {
    "q_a_proj": Kind.QUERY_DOWN, "q_b_proj": Kind.QUERY_UP, "kv_b_proj": Kind.KV_UP,
    "kv_a_proj_with_mqa": Kind.KV_DOWN,
}  # fmt: skip
_GATE, _UP, _DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
_GATE_UP = ("gate_up_proj",)
# Linear attention, state spaces and choices of tokens: their inputs are no queries, keys and values.
_NOT_ATTENTION = ("Linear", "Delta", "Mamba", "Mixer", "Lightning", "Indexer", "Conv", "Recurrent")


def kind_of(parameter: Parameter) -> Kind:
    """The kind of a parameter that is stored as the class has it."""
    owner, last = parameter.owners[-1], parameter.parts[-1]
    if parameter.is_head:
        return Kind.HEAD
    if parameter.is_input:
        return Kind.EMBEDDING
    if parameter.embedding:
        return Kind.POSITION
    if parameter.convolution:
        return Kind.CONV
    if "Norm" in owner:
        return Kind.NORM
    if not parameter.language and len(parameter.shape) > 1:
        # Whatever a tower calls its matrices, and those of its experts.
        matrix = parameter.linear or "experts" in parameter.parts[:-1]
        return Kind.VISION if matrix else Kind.BUFFER
    if "experts" in parameter.parts[:-1] and (
        len(parameter.shape) == 3 or parameter.num_experts == parameter.shape[0]
    ):
        return _stack(parameter, last)
    if len(parameter.shape) < 2:
        # Gates of one row, and biases, are what their module is; anything else small is a buffer.
        return _linear(parameter) if parameter.linear else Kind.BUFFER
    if _routes(parameter):
        return Kind.ROUTER
    return _linear(parameter) if parameter.linear else Kind.UNKNOWN


def _stack(parameter: Parameter, last: str) -> Kind:
    # LongCat's gate_up_proj has room for the experts that compute nothing, and no checkpoint holds.
    if len(parameter.shape) != 3 or parameter.shape[0] < parameter.num_experts:
        return Kind.EXPERT_UNKNOWN  # biases, and stacks of another order
    kinds = {"gate_up_proj": Kind.STACKED_GATE_UP, "down_proj": Kind.STACKED_DOWN}
    return kinds.get(last, Kind.EXPERT_UNKNOWN)


def _routes(parameter: Parameter) -> bool:
    """One row for each expert, in a module that chooses them: other matrices may have as many rows."""
    if not parameter.num_experts or parameter.shape[0] < parameter.num_experts:
        return False
    parts = parameter.parts
    named = parts[-1] in ("gate", "router", "classifier") or parts[-2:] == ["gate", "wg"]
    return named or any("Router" in owner for owner in parameter.owners[-2:])


def _linear(parameter: Parameter) -> Kind:
    if not parameter.language:
        return Kind.VISION
    if _routes(parameter):
        return Kind.ROUTER
    parts, last = parameter.parts, parameter.parts[-1]
    if any("shared" in part for part in parts):
        return _shared(parameter, last)
    if "experts" in parts[:-1]:
        return _expert(parts, last)
    if "indexer" in parts:
        return Kind.INDEXER_WEIGHTS if last == "weights_proj" else Kind.INDEXER
    if last in _LATENT:
        return _LATENT[last]  # whatever its family is called: KimiLinearMLAAttention
    block = parameter.owners[-2] if len(parameter.owners) > 1 else ""
    if ("Attention" in block or block.endswith("MLA")) and not any(
        word in block for word in _NOT_ATTENTION
    ):
        return _attention(last)
    return _mlp(last) if "MLP" in block or "Mlp" in block or "FeedForward" in block else Kind.LINEAR


def _shared(parameter: Parameter, last: str) -> Kind:
    if len(parameter.shape) == 2 and parameter.shape[0] == 1:
        return Kind.SHARED_WEIGHT
    kinds = {Kind.GATE: Kind.SHARED_GATE, Kind.UP: Kind.SHARED_UP, Kind.DOWN: Kind.SHARED_DOWN}
    return kinds.get(_mlp(last), Kind.LINEAR)


def _expert(parts: list[str], last: str) -> Kind:
    if not parts[parts.index("experts") + 1].isdecimal():
        return Kind.EXPERT_UNKNOWN
    kinds = {Kind.GATE: Kind.EXPERT_GATE, Kind.UP: Kind.EXPERT_UP, Kind.DOWN: Kind.EXPERT_DOWN}
    return kinds.get(_mlp(last), Kind.EXPERT_UNKNOWN)


def _attention(last: str) -> Kind:
    for names, kind in (
        (_QUERY, Kind.QUERY), (_KEY, Kind.KEY), (_VALUE, Kind.VALUE), (_OUTPUT, Kind.OUTPUT),
        (_QKV, Kind.QKV),
    ):  # fmt: skip
        if last in names:
            return kind
    return Kind.LINEAR


def _mlp(last: str) -> Kind:
    for names, kind in (
        (_GATE, Kind.GATE), (_UP, Kind.UP), (_DOWN, Kind.DOWN), (_GATE_UP, Kind.GATE_UP),
    ):  # fmt: skip
        if last in names:
            return kind
    return Kind.LINEAR
