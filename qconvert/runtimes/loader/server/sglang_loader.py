"""sglang's own loader as a server (serving.py).

What is patched: torch's answers about devices (pretend_cuda.py), packages
of kernels (stubs.py), versions of two of them, and the process group, which is torch's fake one.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import pkgutil
import sys
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1", "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0",
    # Where torch has NCCL, ranks would be connected by it, and there is one.
    "SGLANG_NCCL_SO_PATH": "none",
    # DeepSeek-V4's class compiles these kernels as soon as all is read.
    "SGLANG_OPT_USE_TILELANG_MHC_PRE": "0",
}  # fmt: skip
import torch

from . import held, stubs
from .pretend_cuda import OnCpu, pretend
from .serving import Told, Watch, serve

# Of sglang's imports, those that have no build without a GPU, or are the server's.
_STUBBED = frozenset((
    "cuda", "cupy", "cutlass", "cutlass_library", "deep_ep", "deep_gemm", "flash_attn",
    "flash_attn_interface", "flash_mla", "flashinfer", "flashinfer_cubin", "humming", "numba",
    "nvshmem", "quack", "sentencepiece", "sgl_deep_gemm", "sgl_kernel", "tilelang",
    "torch_memory_saver", "torchvision", "traitlets", "tvm_ffi",
))  # fmt: skip
_BY_LOADS = (
    "pipeline", "resolution_hooks", "boundary_reduction", "custom_all_reduce", "hpu_communicator",
    "pymscclpp", "shm_broadcast", "torch_symm_mem", "xpu_communicator",
)  # fmt: skip
_KERNELS = ("flashinfer-python", "flashinfer_python", "sgl-kernel", "sgl_kernel", "sglang-kernel")


def _import_all(capability: tuple[int, int]) -> None:
    importlib.import_module("transformers")
    stubs.transformers_without_torchvision()
    stubs.import_ahead("compressed_tensors")
    stubs.install(_STUBBED)
    deep_gemm: Any = importlib.import_module("deep_gemm")
    deep_gemm.get_num_sms = lambda: 132  # of an H200
    pretend(capability)
    metadata: Any = importlib.metadata
    real = metadata.version
    metadata.version = lambda name: "99.0.0" if name in _KERNELS else real(name)
    importlib.import_module("sglang.srt.model_loader.loader")
    stubs.import_ahead(
        "sglang.srt.models.registry", "sglang.srt.layers.quantization.modelopt_quant",
        "sglang.srt.layers.quantization.compressed_tensors.compressed_tensors",
    )  # fmt: skip
    # What else a load imports, so that no child does.
    with OnCpu():
        for package in ("arg_groups", "distributed.device_communicators"):
            stubs.import_ahead(f"sglang.srt.{package}")
            folder = getattr(sys.modules.get(f"sglang.srt.{package}"), "__path__", ())
            for found in pkgutil.iter_modules(folder):
                if found.name.endswith("_hook") or found.name in _BY_LOADS:
                    stubs.import_ahead(f"sglang.srt.{package}.{found.name}")
        stubs.import_ahead("sglang.srt.model_loader.expert_pack_config")


def _parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    made = argparse.ArgumentParser()
    ServerArgs.add_cli_args(made)
    return made


def _become(job: dict[str, Any]) -> None:
    """sglang's state of one rank, in torch's fake process group."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs
    from torch.testing._internal.distributed.fake_pg import FakeStore

    tp, pp = job["tp"], job["pp"]
    args = ServerArgs(model_path=job["folder"], tp_size=tp, pp_size=pp, **job["flags"])
    world, rank = tp * pp, job["stage"] * tp + job["rank"]
    publish(args, role="test", ranks=SpawnRanks(world_rank=rank))
    fake: Any = torch.distributed
    fake.init_process_group(backend="fake", rank=rank, world_size=world, store=FakeStore())
    fake.broadcast_object_list = lambda *args, **kwargs: None  # there is nobody to hear from
    new_group = fake.new_group
    fake.new_group = lambda ranks=None, *a, **k: new_group(ranks, backend="fake")
    parallel_state.init_distributed_environment(
        world_size=world, rank=rank, local_rank=rank, backend="fake"
    )
    parallel_state.initialize_model_parallel(backend="fake")
    initialize_moe_config()
    initialize_dp_attention(args)


def _after_its_model(config: Any) -> None:
    """Do what a server's process has done before it loads a draft: DeepSeek's class of the model adds to
    a mapping that the draft's class has from it."""
    from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM

    if getattr(config.hf_config, "q_lora_rank", None) is not None:
        parts = ["q_a_proj", "kv_a_proj_with_mqa"]
        DeepseekV2ForCausalLM.packed_modules_mapping["fused_qkv_a_proj_with_mqa"] = parts


def _record(config: Any, job: dict[str, Any], told: Told) -> None:
    """The class, built with a quantization config that notes what it asks (record.py)."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.base_config import QuantizationConfig
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.model_loader import loader
    from sglang.srt.model_loader.utils import get_model_architecture, set_default_torch_dtype

    from . import record

    asks = record.spy(
        QuantizationConfig,
        lambda layer: UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None,
        job,
    )
    made, _ = get_model_architecture(config)
    asks.packed_modules_mapping = getattr(made, "packed_modules_mapping", {})
    renames = getattr(made, "get_hf_to_sglang_mapper", None)
    mapper = renames(config.hf_config) if renames else getattr(made, "hf_to_sglang_mapper", None)
    if mapper is not None:
        asks.apply_weight_name_mapper(mapper)
    with set_default_torch_dtype(config.dtype), torch.device("cpu"):
        model = loader._initialize_model(config, LoadConfig(load_format="auto"), asks)
    record.record(model, asks, job, told)


def load(job: dict[str, Any], told: Told, watch: Watch) -> None:
    """Load a folder as a rank would; `told` hears of each fact as soon as it is known."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader

    told("step", "arguments")
    _become(job)
    told("step", "config")
    config = ModelConfig(job["folder"], is_draft_model=job["draft"], trust_remote_code=False)
    config._verify_quantization()
    told("quantization", config.quantization)
    told("architecture", config.hf_config.architectures[0])
    if job["draft"]:
        _after_its_model(config)
    told("step", "build")

    class Loader(DefaultModelLoader):  # type: ignore[misc]
        @staticmethod
        def load_weights_and_postprocess(model: Any, weights: Any, target: Any) -> None:
            told("schemes", held.schemes(model))
            told("empty", held.empty(model))
            watch.begin(model)
            told("step", "load")
            try:
                DefaultModelLoader.load_weights_only(model, watch.handed(weights), target)
            finally:
                watch.tell(model, told)

    if "probes" in job:
        _record(config, job, told)
        return
    loader = Loader(LoadConfig(load_format="auto"))
    loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))
    told("step", "done")


def main() -> None:
    """Answer until nobody is connected."""
    serve(_import_all, load, _parser)
