"""vLLM's own loader as a server (serving.py).

What is patched: torch's answers about devices (pretend_cuda.py), packages of
kernels and vLLM's own compiled modules (stubs.py), what those say about the GPU, and the process group,
which is torch's fake one. The platform is vLLM's class for CUDA, so schemes are chosen as on a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CONFIGURE_LOGGING": "0",
}  # fmt: skip
os.environ.setdefault("VLLM_CACHE_ROOT", f"{sys.prefix}/vllm/cache")
import torch

from . import held, stubs
from .pretend_cuda import OnCpu, pretend
from .serving import Told, Watch, serve

# Of vLLM's imports, those that have no build without a GPU, or are the server's.
_STUBBED = frozenset((
    "cuda", "cutlass", "cv2", "deep_gemm", "fastsafetensors", "flash_attn", "flashinfer",
    "llguidance", "mistral_common", "numba", "quack", "sentencepiece", "soxr", "tilelang", "torchaudio",
    "torchcodec", "torchvision", "traitlets", "tvm_ffi", "uvloop", "xgrammar",
))  # fmt: skip
_COMPILED = r"vllm\.(.*\.)?_\w*C(_\w+)?"
# Groups of ranks without a device to talk over.
_NO_COMMUNICATOR = (
    "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
)
_OPERATORS = ("_C", "_moe_C", "_C_cache_ops", "_C_custom_ar", "_qutlass_C")
_CLASSES = ("deepseek_v2", "deepseek_mtp", "glm4_moe", "glm4_moe_mtp", "qwen3_5", "qwen3_5_mtp",
            "qwen3_moe", "qwen3_next", "qwen3_next_mtp")  # fmt: skip
_BY_LOADS = (
    "compilation.passes.fusion.allreduce_rms_fusion", "model_executor.models.config",
    "v1.attention.backends.flash_attn", "v1.executor.multiproc_executor",
    "model_executor.kernels.linear.cute_dsl.ll_bf16", "model_executor.kernels.linear.cute_dsl.ll_fp32w",
    "model_executor.models.adapters", "model_executor.models.expert_substitution",
    "plugins.lora_resolvers.filesystem_resolver", "plugins.lora_resolvers.hf_hub_resolver",
    "v1.attention.backends.flashinfer", "v1.attention.backends.flex_attention",
    "v1.attention.backends.mla.flashattn_mla", "v1.attention.backends.mla.flashattn_mla_sparse",
    "v1.attention.backends.mla.flashinfer_mla", "v1.attention.backends.mla.flashinfer_mla_sparse",
    "v1.attention.backends.mla.flashinfer_mla_sparse_sm90", "v1.attention.backends.mla.flashmla",
    "v1.attention.backends.mla.flashmla_sparse", "v1.attention.backends.mla.prefill.flash_attn",
    "v1.attention.backends.mla.triton_mla", "v1.attention.backends.triton_attn",
    "v1.attention.backends.turboquant_attn",
)  # fmt: skip


class _Operator:
    """An operator of a compiled module, and its overloads."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, overload: str) -> _Operator:
        if overload.startswith("__"):
            raise AttributeError(overload)
        return _Operator(f"{self._name}.{overload}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name} is compiled and was called")


def _pretend_operators(capability: tuple[int, int]) -> None:
    """Operators of vLLM's compiled modules: there, to be called by none. What they are asked about the
    GPU is answered by its capability: kernels of FP8 blocks need 9.0, those of FP4 10.0."""
    answers = {
        "_C.cutlass_scaled_mm_supports_fp8": True,
        "_C.cutlass_scaled_mm_supports_block_fp8": capability >= (9, 0),
        "_C.cutlass_group_gemm_supported": (9, 0) <= capability < (12, 0),
        "_C.cutlass_scaled_mm_supports_fp4": capability >= (10, 0),
        "_C.mxfp4_experts_quant_supported": capability >= (10, 0),
    }
    namespace: Any = type(torch.ops._C)
    real = namespace.__getattr__

    def found(self: Any, name: str) -> Any:
        if self.name not in _OPERATORS or name.startswith("__"):
            return real(self, name)
        try:
            return real(self, name)
        except AttributeError:
            full = f"{self.name}.{name}"
            return (lambda *args: answers[full]) if full in answers else _Operator(full)

    namespace.__getattr__ = found
    library: Any = torch.library
    register = library.register_fake

    def register_fake(op: Any, func: Any = None, /, **kwargs: Any) -> Any:
        if str(op).partition("::")[0] in _OPERATORS:
            return func or (lambda func: func)
        return register(op, func, **kwargs)

    library.register_fake = register_fake


class _Driver:
    """Answers of Triton's driver about a GPU."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._major, self._minor = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * self._major + self._minor, 32)


def _import_all(capability: tuple[int, int]) -> None:
    # Apart from the other runtime, which would find it and act otherwise.
    sys.path.insert(0, str(Path(sys.prefix) / "vllm"))
    # It asks for versions of packages that it finds, and a stub has none.
    importlib.import_module("transformers.processing_utils")
    stubs.transformers_without_torchvision()
    stubs.install(_STUBBED, _COMPILED)
    pretend(capability)
    importlib.import_module("triton").runtime.driver.set_active(_Driver(capability))
    _pretend_operators(capability)
    platforms: Any = importlib.import_module("vllm.platforms")
    cuda = importlib.import_module("vllm.platforms.cuda")
    cuda.NonNvmlCudaPlatform.get_device_communicator_cls = staticmethod(lambda: _NO_COMMUNICATOR)
    platforms._current_platform = cuda.NonNvmlCudaPlatform()
    with OnCpu():
        stubs.import_ahead(*(f"vllm.model_executor.models.{name}" for name in _CLASSES))
        registry: Any = importlib.import_module("vllm.model_executor.models.registry")
        registry._run_in_subprocess = lambda asked: asked()
        for module in ("engine.arg_utils", "model_executor.model_loader.default_loader",
                       "model_executor.model_loader.sharded_state_loader"):  # fmt: skip
            importlib.import_module(f"vllm.{module}")
        # One method imports those of all.
        quantization = importlib.import_module("vllm.model_executor.layers.quantization")
        quantization.get_quantization_config("fp8")
        # What else a load imports, so that no child does: it took most of its time.
        stubs.import_ahead("ray", *(f"vllm.{module}" for module in _BY_LOADS))


def _parser() -> argparse.ArgumentParser:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    made: argparse.ArgumentParser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return made


def _arguments(job: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    given: dict[str, Any] = {
        "model": job["folder"], "skip_tokenizer_init": True, "enforce_eager": True,
        "dtype": "bfloat16", "max_model_len": 512, "tensor_parallel_size": job["tp"],
        "pipeline_parallel_size": job["pp"], "disable_log_stats": True,
        "use_tqdm_on_load": False, **job["flags"],
    }  # fmt: skip
    if job["tp"] * job["pp"] > 1:
        given["distributed_executor_backend"] = "mp"
    if job["draft"]:
        own = {"method": "mtp", "num_speculative_tokens": 1, "model": job["folder"]}
        given.setdefault("speculative_config", own)  # else flags name a draft of another folder
    return EngineArgs(**given).create_engine_config()


def _become(job: dict[str, Any]) -> None:
    """vLLM's state of one rank, in torch's fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.v1.worker import workspace

    world, rank = job["tp"] * job["pp"], job["stage"] * job["tp"] + job["rank"]
    fake: Any = torch.distributed
    fake.init_process_group(backend="fake", rank=rank, world_size=world, store=FakeStore())
    new_group = fake.new_group
    fake.new_group = lambda ranks=None, *a, **k: new_group(ranks, backend="fake")
    parallel_state.in_the_same_node_as = lambda *args, **kwargs: [True] * world
    # There is nobody to hear from.
    shm_broadcast.MessageQueue.create_from_process_group = staticmethod(lambda *a, **k: None)
    parallel_state.init_distributed_environment(
        world_size=world, rank=rank, local_rank=job["rank"], backend="fake",
        distributed_init_method="fake://",
    )  # fmt: skip
    parallel_state.initialize_model_parallel(job["tp"], job["pp"], backend="fake")
    workspace.init_workspace_manager(torch.device("cpu"))  # as a worker does


def _dropped(model: torch.nn.Module) -> Iterator[str]:
    """Biases of experts that GPTQ's method builds for every class and takes away after the load where
    none came, but for classes that compute with them."""
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        if type(method).__name__ == "AutoGPTQMoEMethod" and not method.moe.has_bias:
            came: Any = module._loaded_expert_biases
            yield from (f"{name}.{leaf}" for leaf in ("w13_bias", "w2_bias") if leaf not in came)


def _of_any_size(name: str, says: str) -> None:
    """Let a class be built whose constructor, last of all, refuses sizes that no kernel takes."""
    module, _, own = name.rpartition(".")
    try:
        kind: Any = getattr(importlib.import_module(module), own)
    except ImportError:  # of an earlier release
        return
    build = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            build(self, *args, **kwargs)
        except ValueError as error:
            if says not in str(error):
                raise

    kind.__init__ = init


def _spy(job: dict[str, Any]) -> Any:
    """A quantization config that notes what the class asks (record.py). Kernels of latent attention
    take few sizes, and a recording needs several: none runs."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.v1.attention.backends.mla.prefill.flash_attn import FlashAttnPrefillBackend

    FlashAttnPrefillBackend.supports_mla_dimensions = classmethod(lambda cls, sizes: True)
    _of_any_size("vllm.models.deepseek_v4.compressor.DeepseekCompressor", "Unsupported head_dim")

    from . import record

    return record.spy(
        QuantizationConfig,
        lambda layer: UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None,
        job,
        AutoGPTQConfig if job["method"] == "auto_gptq" else None,
    )


def load(job: dict[str, Any], told: Told, watch: Watch) -> None:
    """Load a folder as a rank would; `told` hears of each fact as soon as it is known."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    told("step", "arguments")
    whole = _arguments(job)
    config = whole.speculative_config.draft_model_config if job["draft"] else whole.model_config
    told("quantization", config.quantization)
    told("architecture", config.architectures[0])

    class Loader(DefaultModelLoader):  # type: ignore[misc]
        def get_all_weights(self, *args: Any, **kwargs: Any) -> Any:
            return watch.handed(super().get_all_weights(*args, **kwargs))

    with set_current_vllm_config(whole):
        told("step", "groups")
        _become(job)
        told("step", "build")
        recording = "probes" in job
        if recording:
            whole.quant_config = _spy(job)
        with set_default_torch_dtype(config.dtype), torch.device("cpu"):
            model = initialize_model(whole, model_config=config)
        if recording:
            from . import record

            record.record(model, whole.quant_config, job, told)
            return
        told("schemes", held.schemes(model))
        told("empty", held.empty(model))
        watch.begin(model)
        told("step", "load")
        sharded = whole.load_config.load_format == "sharded_state"
        try:
            (ShardedStateLoader if sharded else Loader)(whole.load_config).load_weights(
                model, config
            )
        finally:
            watch.tell(model, told)
            told("dropped", [*_dropped(model)])
    told("step", "done")


def main() -> None:
    """Answer until nobody is connected."""
    serve(_import_all, load, _parser)
