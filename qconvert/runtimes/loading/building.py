"""Product of a class on one rank: its parameters by the runtime's names, in order, and the scheme of
each module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qconvert.core.shown import count
from qconvert.runtimes.loading.parameters import (
    Kind,
    Layout,
    Linear,
    Parameter,
    Vocabulary,
    Whole,
    Wrapped,
)
from qconvert.runtimes.loading.schemes import Moe, Named, Quantization, Scheme
from qconvert.runtimes.loading.setting import LoadRefused, NotSimulated, Setting

_CLASSES: dict[Kind, str] = {
    "replicated": "ReplicatedLinear", "column": "ColumnParallelLinear",
    "merged": "MergedColumnParallelLinear", "qkv": "QKVParallelLinear", "row": "RowParallelLinear",
}  # fmt: skip


_MOST = 1 << 31
_MOST_LAYERS = 4096
_LAYERS = ("num_hidden_layers", "depth")
# Numbers that may be 0; a model with none of the others is no model.
_ZERO = (
    "first_k_dense_replace", "n_shared_experts", "shared_expert_intermediate_size", "num_experts",
    "qk_rope_head_dim",
)  # fmt: skip

# What a config may say in place of a key: transformers' classes, which both runtimes read configs with,
# take either (`attribute_map`), and save the first.
_OF_QWEN = {"num_local_experts": "num_experts"}
_OF_DEEPSEEK = {
    "num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers",
}  # fmt: skip
SPELLINGS: Mapping[str, Mapping[str, str]] = {
    "qwen3_moe": _OF_QWEN, "qwen3_vl_moe_text": _OF_QWEN, "glm4_moe": _OF_DEEPSEEK,
    "deepseek_v3": _OF_DEEPSEEK,
}  # fmt: skip


def spelled(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """A text config under the keys that runtimes ask for."""
    also = SPELLINGS.get(str(text.get("model_type")), {})
    found = {key: text[other] for other, key in also.items() if text.get(other) is not None}
    return {**text, **found} if found else text


class Config:
    """Numbers of a config. Raises NotSimulated for one that is missing, of another type, or larger than
    a model's."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def number(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key)
        value = default if value is None else value
        most = _MOST_LAYERS if key in _LAYERS else _MOST
        if type(value) is not int or not int(key not in _ZERO) <= value <= most:
            raise NotSimulated(f"config.json states no {key} that a model has")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        return bool(self._values.get(key, default))

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def numbers(self, key: str) -> list[int]:
        value = self._values.get(key)
        return [n for n in value if type(n) is int] if isinstance(value, list) else []

    @property
    def values(self) -> Mapping[str, Any]:
        return self._values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    @property
    def dtype(self) -> str:
        """The model's type, in the spelling of safetensors."""
        stated = str(self.get("dtype") or self.get("torch_dtype") or "bfloat16")
        types = {"bfloat16": "BF16", "float16": "F16", "float32": "BF16"}
        return types.get(stated.removeprefix("torch."), "BF16")


def text_config(config: Mapping[str, Any]) -> Config:
    """The numbers of the language model: a config of text and images nests them."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return Config(spelled(config))
    tied = config.get("tie_word_embeddings")
    whole = {**spelled(text), "vision_config": config.get("vision_config")}
    return Config(whole if tied is None else {**whole, "tie_word_embeddings": tied})


def divided(size: int, by: int, where: str) -> int:
    """The runtime's `divide`, which asserts that nothing is left."""
    if size % by:
        raise LoadRefused(
            "AssertionError", f"{size} is not divisible by {by}", where,
            f"{size} cannot be divided among {by} ranks",
        )  # fmt: skip
    return size // by


def check_stages(setting: Setting, layers: Iterable[int], *, one: bool) -> None:
    """Raise LoadRefused for more stages than layers of the first list, for a stated partition of another
    count, and for several of a class that runs in `one`."""
    number = next(iter(layers), 1)
    if setting.pp > 1 and one:
        why = "the class runs in one pipeline stage only"
        raise LoadRefused("AssertionError", "", "model", why)
    if setting.pp > number:
        why = f"{count(setting.pp, 'stage')} for {count(number, 'layer')}"
        raise LoadRefused("AssertionError", "", "model.layers", why)
    if setting.partition is not None and sum(setting.partition) != number:
        raise LoadRefused(
            "ValueError", "does not match num_hidden_layers", "model.layers",
            f"the partition {list(setting.partition)} is not of {number} layers",
        )  # fmt: skip


@dataclass
class RankBuild:
    """A rank's parameters while its class is built. `aliases`: names under which a parameter is held a
    second time."""

    setting: Setting
    quantization: Quantization
    dtype: str
    parameters: dict[str, Parameter] = field(default_factory=dict)
    schemes: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    borrowed: frozenset[str] = frozenset()

    def vocabulary(
        self,
        module: str,
        rows: int,
        columns: int,
        scheme: Scheme | None = None,
        *,
        dtype: str = "",
        bias: bool = False,
    ) -> None:
        """An embedding, or a head. `dtype`: of one that is not the model's, unless it has a scheme."""
        tp = self.setting.tp
        padding = 64 if -(-rows // 64) * 64 % tp == 0 else 64 * tp
        here = -(-rows // padding) * padding // tp
        slot = Vocabulary(rows, tp, self.setting.rank)
        self.schemes[module] = "UnquantizedEmbeddingMethod"
        if bias:
            self.parameters[f"{module}.bias"] = Parameter(dtype or self.dtype, (here,), slot)
        if scheme is None:
            weight = Parameter(dtype or self.dtype, (here, columns), slot)
            self.parameters[f"{module}.weight"] = weight
            return
        self.schemes[module] = scheme.linear_name
        layout = Layout("column", columns, (here * tp,), tp, self.setting.rank)
        for name, made in scheme.linear(layout, ""):
            by_rows = len(made.shape) == 2 and made.shape[0] == here
            made.slot = slot if by_rows else Whole(scalar=True)
            self.parameters[f"{module}.{name}"] = made

    def linear(
        self,
        module: str,
        kind: Kind,
        inputs: int,
        *outputs: int,
        asked: str = "",
        scheme: Scheme | None = None,
        bias: bool = False,
        wrapped: Wrapped = "",
        replicas: int = 1,
        whole: bool = False,
    ) -> Scheme:
        """A linear. `asked`: the name under which the runtime looks for its scheme, if another; `whole`:
        every rank has all of it."""
        alone = kind == "replicated" or whole
        tp = 1 if alone else self.setting.tp
        rank = 0 if alone else self.setting.rank
        for size in (inputs,) if kind == "row" else outputs if kind != "replicated" else ():
            divided(size, tp, module)
        if scheme is None:
            scheme = self.quantization.linear(asked or module, _CLASSES[kind])
        layout = Layout(kind, inputs, outputs, tp, rank, replicas)
        self.schemes[module] = scheme.linear_name
        self._add(module, scheme.linear(layout, wrapped))
        if bias:
            made = Parameter(self.dtype, (layout.rows,), Linear(layout, "bias"))
            self._add(module, iter((("bias", made),)))
        return scheme

    def qkv(
        self,
        module: str,
        hidden: int,
        heads: int,
        kv_heads: int,
        size: int,
        *,
        asked: str = "",
        scheme: Scheme | None = None,
        bias: bool = False,
        value: int = 0,
    ) -> None:
        """The fused projection of queries, keys and values, in heads of `size` numbers, of values of
        `value`; ranks share a key-value head where there are more of them."""
        tp = self.setting.tp
        divided(heads, tp, module)
        if kv_heads > tp:
            divided(kv_heads, tp, module)
        else:
            divided(tp, kv_heads, module)
        here = max(1, kv_heads // tp)
        replicas = max(1, tp // kv_heads)
        outputs = heads * size, here * size * tp, here * (value or size) * tp
        self.linear(
            module, "qkv", hidden, *outputs, asked=asked, scheme=scheme, bias=bias,
            replicas=replicas,
        )  # fmt: skip

    def experts(
        self,
        module: str,
        routed: int,
        fused: int,
        hidden: int,
        inner: int,
        *,
        asked: str = "",
        scheme: Scheme | None = None,
        gated: bool = True,
    ) -> None:
        """All experts of a layer, `fused` shared ones behind the routed."""
        setting = self.setting
        divided(routed, setting.ep, module)
        divided(inner, setting.moe_tp, module)
        if scheme is None:
            scheme = self.quantization.experts(asked or module)
        moe = Moe(
            routed,
            fused,
            hidden,
            inner,
            setting.ep,
            setting.ep_rank,
            setting.moe_tp,
            gated,
            setting.rank % setting.moe_tp,
        )
        self.schemes[module] = scheme.experts_name
        self._add(module, scheme.experts(moe))

    def cache_scales(self, module: str, *, latent: bool = False) -> None:
        """Scales of the cache, of latent attention if `latent`, 1 unless given."""
        if self.quantization.cache:
            for name in ("k_scale", "v_scale"):
                made = Parameter("F32", (), Whole(), needed=False, default=True)
                self.parameters[f"{module}.{name}"] = made

    def _add(self, module: str, named: Named) -> None:
        try:
            for name, parameter in named:
                self.parameters[f"{module}.{name}"] = parameter
        except LoadRefused as refused:
            raise LoadRefused(refused.kind, refused.says, module, refused.why) from None
