"""A tree of modules with the names, imports and calls that sglang 0.5.23 has around prepared experts.

Who imports what by name, and when, is what a plug-in must cope with: `flashinfer_trtllm` and
`muse_spark` import the shuffle when they are called, the compressed-tensors scheme when it is imported.
The layer keeps what the real one keeps; the shuffle inverts bytes, so that a call of it shows.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SOURCES = {
    "sglang.srt.utils.hf_transformers.config": """
def get_config(model, **kwargs):
    return model
""",
    "sglang.srt.utils.hf_transformers_utils": """
from sglang.srt.utils.hf_transformers.config import get_config
""",
    "sglang.srt.layers.quantization.utils": """
def prepare_static_weights_for_trtllm_fp4_moe(
    gemm1_weights, gemm2_weights, gemm1_scales_linear_fp4_bytes, gemm2_scales_linear_fp4_bytes,
    hidden_size, intermediate_size, num_experts, is_gated=True,
):
    import torch
    given = (
        gemm1_weights, gemm1_scales_linear_fp4_bytes, gemm2_weights, gemm2_scales_linear_fp4_bytes
    )
    flipped = [~weight.view(torch.uint8) for weight in given]
    return tuple(new.view(old.dtype) for new, old in zip(flipped, given))

def reorder_w1w3_to_w3w1(weight, scale, dim=-2):
    return weight.flip(dim), scale.flip(dim)
""",
    "sglang.srt.layers.moe.moe_runner.flashinfer_trtllm": """
def align_fp4_moe_weights_for_flashinfer_trtllm(layer, pad=0):
    import torch
    from sglang.srt.layers.quantization.utils import prepare_static_weights_for_trtllm_fp4_moe
    w13, s13 = layer.w13_weight, layer.w13_weight_scale
    w2, s2 = layer.w2_weight, layer.w2_weight_scale
    if pad:
        w13 = torch.nn.functional.pad(w13, (0, 0, 0, pad))
    made = prepare_static_weights_for_trtllm_fp4_moe(
        w13, w2, s13, s2, w2.size(-2), w2.size(-1) * 2, w13.size(0), is_gated=layer.is_gated
    )
    names = "w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"
    for name, value in zip(names, made):
        getattr(layer, name).data = value
""",
    "sglang.srt.layers.quantization.modelopt_quant": """
class ModelOptNvFp4FusedMoEMethod:
    pad = 0
    def process_weights_after_loading(self, layer):
        from sglang.srt.layers.moe.moe_runner.flashinfer_trtllm import (
            align_fp4_moe_weights_for_flashinfer_trtllm,
        )
        align_fp4_moe_weights_for_flashinfer_trtllm(layer, self.pad)
""",
    "sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4_moe": """
from sglang.srt.layers.quantization.utils import (
    prepare_static_weights_for_trtllm_fp4_moe,
    reorder_w1w3_to_w3w1,
)
class CompressedTensorsW4A4Nvfp4MoE:
    def process_weights_after_loading(self, layer):
        import torch
        layer.w13_weight = torch.nn.Parameter(layer.w13_weight_packed.data, requires_grad=False)
        layer.w2_weight = torch.nn.Parameter(layer.w2_weight_packed.data, requires_grad=False)
        del layer.w13_weight_packed, layer.w2_weight_packed
        w, s = reorder_w1w3_to_w3w1(layer.w13_weight.data, layer.w13_weight_scale.data, dim=-2)
        layer.w13_weight = torch.nn.Parameter(w, requires_grad=False)
        layer.w13_weight_scale = torch.nn.Parameter(s, requires_grad=False)
        made = prepare_static_weights_for_trtllm_fp4_moe(
            layer.w13_weight, layer.w2_weight, layer.w13_weight_scale, layer.w2_weight_scale,
            layer.w2_weight.size(-2), layer.w13_weight.size(-2) // 2, layer.w13_weight.size(0),
        )
        names = "w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"
        for name, value in zip(names, made):
            getattr(layer, name).data = value
""",
    "sglang.srt.layers.muse_spark.muse_spark_nvfp4_moe": """
class MuseSparkMethod:
    def process_weights_after_loading(self, layer):
        from sglang.srt.layers.quantization.utils import (
            prepare_static_weights_for_trtllm_fp4_moe,
            reorder_w1w3_to_w3w1,
        )
        w13, s13 = reorder_w1w3_to_w3w1(layer.w13_weight.data, layer.w13_weight_scale.data)
        made = prepare_static_weights_for_trtllm_fp4_moe(
            w13, layer.w2_weight.data, s13, layer.w2_weight_scale.data, 0, 0, 0, is_gated=True
        )
        names = "w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"
        for name, value in zip(names, made):
            getattr(layer, name).data = value
""",
    "sglang.srt.model_loader.loader": """
from sglang.srt.utils.hf_transformers_utils import get_config

class DefaultModelLoader:
    @staticmethod
    def load_weights_and_postprocess(model, weights, target_device):
        DefaultModelLoader.load_weights_only(model, weights, target_device)
        DefaultModelLoader.postprocess_weights(model, target_device)

    @staticmethod
    def load_weights_only(model, weights, target_device):
        model.load_weights(weights)

    @staticmethod
    def postprocess_weights(model, target_device):
        for _, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(module)
""",
}


@contextmanager
def fake_sglang() -> Iterator[None]:
    """The tree in sys.modules, and gone afterwards."""
    assert "sglang" not in sys.modules, "the real one would be broken for good"
    try:
        for name in _SOURCES:
            parts = name.split(".")
            for depth in range(1, len(parts)):
                parent = ".".join(parts[:depth])
                if parent not in sys.modules:
                    package = types.ModuleType(parent)
                    package.__path__ = []
                    sys.modules[parent] = package
        for name, source in _SOURCES.items():
            module = types.ModuleType(name)
            sys.modules[name] = module
            exec(compile(source, name, "exec"), vars(module))
        yield
    finally:
        for name in [n for n in sys.modules if n == "sglang" or n.startswith("sglang.")]:
            del sys.modules[name]


def module(name: str) -> Any:
    """A module of the tree by the end of its name."""
    (found,) = (
        value for key, value in sys.modules.items() if key.endswith(name) and key in _SOURCES
    )
    return found
