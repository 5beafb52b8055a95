"""sglang's plug-in for folders made by `qconvert prepare trtllm-gen`. Experimental.

Written against sglang 0.5.23 (`srt/plugins`, entry point group `sglang.srt.plugins`), and tested
against a tree of modules with the same structure; no Blackwell server has run it. It makes sglang

  read      the quantization block that the marker in config.json replaced,
  load      a rank's ranges of the fused expert tensors straight into the layer's parameters,
  prepare   nothing: `prepare_static_weights_for_trtllm_fp4_moe`, and the swap of halves that one of its
            callers does before, return their arguments while a prepared model is post-processed.

Either all of it is installed or nothing: without it a stock server refuses the folder. Other models are
loaded as before. Imports the standard library, and torch and sglang inside functions.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

QUANT_METHOD = "qconvert-trtllm-gen"
VERSION = 1

_CONFIG = "sglang.srt.utils.hf_transformers.config"
_LOADER = "sglang.srt.model_loader.loader"
_UTILS = "sglang.srt.layers.quantization.utils"
_SHUFFLE, _SWAP = "prepare_static_weights_for_trtllm_fp4_moe", "reorder_w1w3_to_w3w1"
_SHUFFLE_ARGS = (
    "gemm1_weights", "gemm2_weights", "gemm1_scales_linear_fp4_bytes", "gemm2_scales_linear_fp4_bytes",
)  # fmt: skip
_PARAMETERS = (
    "weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale",
    "input_scale", "input_global_scale",
)  # fmt: skip
_LOADED = frozenset(f"{w}_{parameter}" for w in ("w13", "w2") for parameter in _PARAMETERS)
# sglang computes these itself, from the scales next to them.
_DERIVED = frozenset(
    ("g1_alphas", "g2_alphas", "g1_scale_c", "w13_input_scale_quant", "w2_input_scale_quant")
)

_FILLED = frozenset(("w13_input_scale", "w2_input_scale"))

Weights = Iterable[tuple[str, "torch.Tensor"]]
# Shapes of a layer's prepared parameters, by the layer's name.
Loaded = dict[str, dict[str, tuple[int, ...]]]


class _State:
    """State of this process: whether a marked config was opened, the shapes of the prepared parameters
    that are being post-processed (None outside of that), and how many layers have been."""

    marked = False
    shapes: set[tuple[int, ...]] | None = None
    passed = 0


def install() -> None:
    """Install the plug-in; a second call does nothing. Raises ImportError or AttributeError if sglang
    differs from 0.5.23: nothing is changed then."""
    utils, config = import_module(_UTILS), import_module(_CONFIG)
    loader = import_module(_LOADER).DefaultModelLoader
    if getattr(utils, _SHUFFLE).__module__ == __name__:
        return
    found = tuple(inspect.signature(getattr(utils, _SHUFFLE)).parameters)[: len(_SHUFFLE_ARGS)]
    if found != _SHUFFLE_ARGS:
        raise AttributeError(
            f"{_UTILS}.{_SHUFFLE}: expected arguments {_SHUFFLE_ARGS}, found {found}; this plug-in "
            "was written for sglang 0.5.23 (experimental)"
        )
    functions = (
        (config, "get_config", _reading),
        (utils, _SHUFFLE, _unshuffled),
        (utils, _SWAP, _unswapped),
    )
    methods = (("load_weights_only", _loading), ("postprocess_weights", _postprocessing))
    made = [(module, name, getattr(module, name), wrap) for module, name, wrap in functions]
    kept = [(name, getattr(loader, name), wrap) for name, wrap in methods]
    for name, original, wrap in kept:
        setattr(loader, name, staticmethod(wrap(original)))
    for module, name, original, wrap in made:
        _replace(module, name, original, wrap(original))


def _replace(module: Any, name: str, original: Any, new: Any) -> None:
    """In the module that defines it, and in every module that has imported it by name."""
    setattr(module, name, new)
    for loaded in list(sys.modules.values()):
        if getattr(loaded, "__name__", "").startswith("sglang."):
            for key, value in list(vars(loaded).items()):
                if value is original:
                    setattr(loaded, key, new)


def _ours(original: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As functools.wraps, but marked as the plug-in's by its module."""

    def mark(new: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = wraps(original)(new)
        wrapped.__module__ = __name__
        return wrapped

    return mark


def _reading(original: Callable[..., Any]) -> Callable[..., Any]:
    @_ours(original)
    def get_config(*args: Any, **kwargs: Any) -> Any:
        config = original(*args, **kwargs)
        block = getattr(config, "quantization_config", None)
        if isinstance(block, dict) and block.get("quant_method") == QUANT_METHOD:
            if block["layout"].get("version") != VERSION:
                raise ValueError(f"expected layout version {VERSION}, found {block['layout']}")
            _restore(config, block)
            _State.marked = True
        return config

    return get_config


def _restore(config: Any, block: Mapping[str, Any]) -> None:
    """The source's quantization blocks, in the places that the marker states."""
    import json

    del config.quantization_config
    for entry in block["replaced"]:
        inner = config
        for key in entry["at"][:-1]:
            inner = inner[key] if isinstance(inner, dict) else getattr(inner, key)
        key = entry["at"][-1]
        if isinstance(inner, dict):
            inner[key] = entry["block"]
        else:
            setattr(inner, key, entry["block"])
    text = block.get("files", {}).get("hf_quant_config.json")
    if not block["replaced"] and text is not None:
        found = json.loads(text)
        config.quantization_config = {
            "quant_method": "modelopt",
            **found.get("quantization", found),
        }


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    @_ours(original)
    def load_weights_only(model: Any, weights: Weights, target_device: Any) -> Any:
        if not _State.marked:
            return original(model, weights, target_device)
        modules = dict(model.named_modules())
        loaded: Loaded = {}
        result = original(model, _without_prepared(weights, modules, loaded), target_device)
        for base, found in loaded.items():
            # modelopt's class fills input scales if a folder has none.
            wanted = {name for name in _LOADED if hasattr(modules[base], name)} - _FILLED
            if wanted - found.keys():
                raise ValueError(
                    f"{base}: {sorted(wanted - found.keys())} are missing from the folder"
                )
        if loaded:
            model.qconvert_prepared = loaded
        return result

    return load_weights_only


def _without_prepared(
    weights: Weights, modules: Mapping[str, Any], loaded: Loaded
) -> Iterator[tuple[str, torch.Tensor]]:
    """The names the model loads itself. Layers that this rank does not hold are left to the model
    too."""
    for name, tensor in weights:
        base, _, last = name.rpartition(".")
        layer = modules.get(base)
        if layer is None or last not in _LOADED | _DERIVED:
            yield name, tensor
        elif last in _LOADED:
            parameter = getattr(layer, last, None)
            if parameter is None:
                raise ValueError(
                    f"{name}: the layer has no such parameter; its backend is another one"
                )
            _fill(name, layer, last, parameter, tensor)
            loaded.setdefault(base, {})[last] = tuple(parameter.shape)


def _fill(name: str, layer: Any, last: str, parameter: Any, tensor: torch.Tensor) -> None:
    """Copy a rank's share. Raises ValueError if it has not the parameter's shape or dtype."""
    target = parameter.data
    if tensor.shape[0] != layer.num_experts:
        raise ValueError(
            f"{name}: expected {layer.num_experts} experts, found {tensor.shape[0]}; start with "
            "--disable-shared-experts-fusion and without redundant experts"
        )
    if target.shape[0] != tensor.shape[0]:  # input scales are held for all experts
        first = layer.moe_ep_rank * layer.num_local_experts
        tensor = tensor[first : first + layer.num_local_experts]
    share = tp_slice(last, tensor, layer.moe_tp_rank, layer.moe_tp_size)
    if share.shape != target.shape or share.dtype != target.dtype:
        raise ValueError(
            f"{name}: expected {target.dtype} {list(target.shape)} for this rank, found "
            f"{share.dtype} {list(share.shape)}; sizes that are padded cannot be prepared ahead"
        )
    target.copy_(share)


def tp_slice(name: str, tensor: Any, rank: int, size: int) -> Any:
    """A tensor-parallel rank's share of a prepared tensor (of torch or numpy), [experts, ...]: rows of
    w13, columns of w2, whole tiles of w2's scales; per-tensor scales are every rank's. Raises
    ValueError if tiles would be cut."""
    if name in ("w13_weight", "w13_weight_packed", "w13_weight_scale"):
        height = tensor.shape[1] // size
        if tensor.shape[1] % (128 * size):
            raise ValueError(
                f"{name}: {tensor.shape[1]} rows are not whole tiles of 128 for {size} ranks"
            )
        return tensor[:, rank * height : (rank + 1) * height]
    if name in ("w2_weight", "w2_weight_packed"):
        width = tensor.shape[2] // size
        if tensor.shape[2] % (32 * size):
            raise ValueError(
                f"{name}: {tensor.shape[2]} bytes a row are not whole tiles for {size} ranks"
            )
        return tensor[:, :, rank * width : (rank + 1) * width]
    if name == "w2_weight_scale":
        experts, rows, columns = tensor.shape
        if columns % (4 * size):
            raise ValueError(f"{name}: {columns} columns are not whole tiles of 4 for {size} ranks")
        tiles = columns // 4 // size
        grid = tensor.reshape(experts, rows // 128, columns // 4, 512)
        share = grid[:, :, rank * tiles : (rank + 1) * tiles]
        return share.reshape(experts, rows, columns // size)
    return tensor


def _postprocessing(original: Callable[..., Any]) -> Callable[..., Any]:
    @_ours(original)
    def postprocess_weights(model: Any, target_device: Any) -> Any:
        layers: Loaded | None = getattr(model, "qconvert_prepared", None)
        if layers is None:
            return original(model, target_device)
        _State.shapes = {shape for layer in layers.values() for shape in layer.values()}
        _State.passed = 0
        try:
            result = original(model, target_device)
            if len(layers) != _State.passed:
                raise RuntimeError(
                    f"{_State.passed} of {len(layers)} prepared layers came to the TensorRT-LLM "
                    "kernels; start with --moe-runner-backend flashinfer_trtllm"
                )
        finally:
            _State.shapes = None
        return result

    return postprocess_weights


def _unshuffled(original: Callable[..., Any]) -> Callable[..., Any]:
    @_ours(original)
    def prepare(
        gemm1_weights: torch.Tensor,
        gemm2_weights: torch.Tensor,
        gemm1_scales_linear_fp4_bytes: torch.Tensor,
        gemm2_scales_linear_fp4_bytes: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        given = (
            gemm1_weights,
            gemm2_weights,
            gemm1_scales_linear_fp4_bytes,
            gemm2_scales_linear_fp4_bytes,
        )
        if _State.shapes is None:
            return original(*given, *args, **kwargs)
        import torch

        for weight in given:
            if tuple(weight.shape) not in _State.shapes:
                raise RuntimeError(
                    f"prepared weights were padded to {list(weight.shape)}: this backend needs sizes "
                    "that the folder was not prepared for; serve its source"
                )
        _State.passed += 1
        w13, w2, s13, s2 = given
        return (
            w13.view(torch.uint8),
            s13.view(torch.float8_e4m3fn),
            w2.view(torch.uint8),
            s2.view(torch.float8_e4m3fn),
        )

    return prepare


def _unswapped(original: Callable[..., Any]) -> Callable[..., Any]:
    @_ours(original)
    def swap(weight: torch.Tensor, scale: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _State.shapes is None:
            return original(weight, scale, *args, **kwargs)
        return weight, scale

    return swap
