"""Configs and headers of small checkpoints for the simulators of loaders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import strategies as st
from loaders.published import published

from qconvert.core.dtypes import TensorType
from qconvert.runtimes.classes.record import architecture_of, class_record
from qconvert.runtimes.loading.load_weights import SimulatedLoad
from qconvert.runtimes.loading.setting import Setting
from qconvert.runtimes.sglang import simulator as sglang
from qconvert.runtimes.vllm import simulator as vllm

Config = dict[str, Any]
Tensors = dict[str, TensorType]


def in_any_form(runtime: str) -> Callable[..., SimulatedLoad]:
    """The simulator of a runtime, also in forms that were not compared with its loader."""
    by_table = {"sglang": sglang.by_table, "vllm": vllm.by_table}[runtime]

    def simulate(
        config: Config,
        tensors: Mapping[str, TensorType],
        setting: Setting | None = None,
        *,
        groups: int | None = None,
        draft: bool = False,
    ) -> SimulatedLoad:
        record = class_record(runtime, architecture_of(config), draft=draft)
        return by_table(record, config, tensors, setting or Setting(), groups)

    return simulate


def folder(family: str, **how: Any) -> tuple[Config, Tensors]:
    """Config and headers of a published checkpoint."""
    config, tensors = _folder(family, *sorted(how.items()))
    return deepcopy(config), dict(tensors)


@cache
def _folder(family: str, *how: tuple[str, Any]) -> tuple[Config, Tensors]:
    model = published(family, **dict(how))
    return model.config, {n: TensorType(t.dtype, t.shape) for n, t in model.tensors.items()}


def integers(
    config: Config, tensors: Mapping[str, TensorType], where: str, group: int, **block: Any
) -> tuple[Config, Tensors]:
    """The folder with modules whose names contain `where` packed in 4 bits, as compressed-tensors
    has them."""
    made: Tensors = {}
    for name, kind in tensors.items():
        if where not in name or not name.endswith("_proj.weight"):
            made[name] = kind
            continue
        rows, columns = kind.shape
        stem = name.removesuffix("weight")
        made[f"{stem}weight_packed"] = TensorType("I32", (rows, columns // 8))
        made[f"{stem}weight_scale"] = TensorType("BF16", (rows, columns // group))
        made[f"{stem}weight_shape"] = TensorType("I64", (2,))
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
               "group_size": group}  # fmt: skip
    groups = {"group_0": {"targets": [rf"re:.*{where}.*"], "weights": weights}}
    stated = {"quant_method": "compressed-tensors", "format": "pack-quantized",
              "config_groups": groups, **block}  # fmt: skip
    return {**config, "quantization_config": stated}, made


def mixed(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """A folder in block FP8 whose experts are stated as modelopt's NVFP4; its tensors stay."""
    experts = {n.partition(".experts.")[0] + ".experts" for n in tensors if ".experts." in n}
    linears = {n.removesuffix(".weight") for n, kind in tensors.items() if kind.dtype == "F8_E4M3"}
    layers = {name: {"quant_algo": "NVFP4", "group_size": 16} for name in experts}
    layers |= {n: {"quant_algo": "FP8_PB_WO"} for n in linears if ".experts." not in n}
    block = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["lm_head"],
             "kv_cache_quant_algo": None, "quantized_layers": layers}  # fmt: skip
    return {**config, "quantization_config": block}, tensors


LINEARS = [r"re:.*self_attn\..*", r"re:.*\.mlp\.(shared_experts\.)?(gate_up|gate|up|down)_proj$"]


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 3), st.just(10**12), st.floats(), st.just("re:("),
    st.lists(st.just("re:("), max_size=1), st.just([]), st.just({}), st.just({"a": 1}),
)  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key of a config, nested ones too."""
    items = value.items() if isinstance(value, dict) else []
    return [place for key, inner in items for place in ((*at, key), *places(inner, (*at, key)))]


def large() -> tuple[Config, Tensors]:
    """DeepSeek-V3's counts in FP8: 58 layers of 256 experts."""
    config, small = folder("deepseek_v3", fp8=True)
    config = {
        **config,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
    }
    made = {n: kind for n, kind in small.items() if ".layers." not in n}
    sparse = {n: k for n, k in small.items() if ".layers.1." in n and ".experts." not in n}
    expert = {n: k for n, k in small.items() if ".layers.1.mlp.experts.0." in n}
    dense = {n: k for n, k in small.items() if ".layers.0." in n}
    for layer in range(61):
        for name, kind in (dense if layer < 3 else sparse).items():
            first = name.split(".")[2]
            wide = replace(kind, shape=(256, *kind.shape[1:])) if ".mlp.gate." in name else kind
            made[name.replace(f".layers.{first}.", f".layers.{layer}.")] = wide
        for number in range(256 if layer >= 3 else 0):
            for name, kind in expert.items():
                stem = name.replace(".layers.1.", f".layers.{layer}.")
                made[stem.replace(".experts.0.", f".experts.{number}.")] = kind
    return config, made
