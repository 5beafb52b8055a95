"""sglang's own ModelRunner, in this process: one folder's answers, and what its modules computed.

Written for sglang 0.5.23 (`benchmark/one_batch.py`, `srt/layers/`), attention of Triton, eager mode.
`python tests/served/sglang_engine.py check` says what this machine has of it, and tries its kernels;
`build` compiles what takes minutes.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import time
from array import array
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":  # a file that is run: `served` lies beside its folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
from torch import Tensor

from qconvert.runtimes.loader.server import stubs
from served import sglang_stand_ins
from served.reference import Answer, Watched

# A process serves one folder: what sglang publishes of an engine is never taken back whole.
FOLDERS = 1
# As Marlin takes it: `layers/quantization/marlin_utils_fp4.py`.
ROUNDS_GLOBAL_SCALE = True
# Imported, and not used by what is asked of the runner here; "sgl_kernel" where it does not load.
_NOT_NEEDED = frozenset((
    "IPython", "anthropic", "blobfile", "boto3", "botocore", "cuda", "cupy", "cutlass",
    "cutlass_library", "deep_ep", "deep_gemm", "easydict", "flash_attn", "flash_attn_interface",
    "flash_mla", "flashinfer", "flashinfer_cubin", "humming", "kernels", "numba", "nvshmem", "nvtx",
    "py_spy", "quack", "sentencepiece", "sgl_deep_gemm", "smg_grpc_servicer", "soundfile",
    "tilelang", "torch_memory_saver", "torchvision", "traitlets", "watchfiles",
))  # fmt: skip
_VERSIONS = (
    "flashinfer-python", "flashinfer_python", "flashinfer-cubin", "sgl-kernel", "sgl_kernel",
    "sglang-kernel",
)  # fmt: skip
_SETTINGS = {
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "SGLANG_HOST_IP": "127.0.0.1",
    "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0", "SGLANG_DISABLE_CUDNN_CHECK": "1",
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1", "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
}  # fmt: skip
# Set where the check of this machine found that its sgl_kernel does not compute (`__main__` below).
STAND_INS = "SERVED_STAND_INS"
_FLAGS: Mapping[str, Any] = {
    "skip_tokenizer_init": True, "attention_backend": "triton", "sampling_backend": "pytorch",
    "disable_cuda_graph": True, "disable_decode_cuda_graph": True, "disable_prefill_cuda_graph": True,
    "mem_fraction_static": 0.3, "max_total_tokens": 4096, "max_running_requests": 8,
    "context_length": 512, "dtype": "bfloat16", "disable_radix_cache": True, "random_seed": 0,
    "disable_shared_experts_fusion": True, "disable_custom_all_reduce": True, "log_level": "warning",
}  # fmt: skip


def prepare() -> str:
    """Import sglang; which sgl_kernel serves. Packages that servers or other kernels need may be absent:
    a call of such a one raises, so that no kernel is left out in silence."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    importlib.import_module("transformers.processing_utils")
    if PathFinder.find_spec("torchvision") is None:
        stubs.transformers_without_torchvision()
    importlib.import_module("compressed_tensors")
    chosen = _kernels()  # before flashinfer is a stub, which sgl_kernel would take for the package
    stubs.install({name for name in _NOT_NEEDED if PathFinder.find_spec(name) is None})
    inert: Any = stubs._Inert
    inert.__call__ = _called
    torch.backends.cuda.matmul.allow_tf32 = False
    metadata: Any = importlib.metadata
    real = metadata.version
    metadata.version = lambda name: "99.0.0" if name in _VERSIONS else real(name)
    one_batch = _imported("sglang.benchmark.one_batch")
    one_batch.get_tokenizer = lambda *args, **kwargs: None
    return chosen


def _imported(name: str) -> Any:
    """A module of sglang. A package that it imports and that is absent becomes a stub, and is named."""
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            package = (error.name or "sglang").partition(".")[0]
            if package == "sglang" or PathFinder.find_spec(package) is not None:
                raise
            print(f"{package} is not installed: a stub stands for it", flush=True)
            stubs.install({package})


def _called(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of a stub: a module that is being imported makes an object of it, or decorates; elsewhere
    it raises, for it would be a kernel that does nothing."""
    decorates = len(args) == 1 and not kwargs and stubs._is_code(args[0])
    name = sys._getframe(1).f_code.co_name
    if decorates or name == "<module>" or name[:1].isupper():
        return type.__call__(cls, *args, **kwargs)
    raise NotImplementedError(f"{cls.__qualname__} is a stub and was called")


def _kernels() -> str:
    """Which package of kernels serves: sglang's, or torch's definitions of what is no quantized
    arithmetic."""
    if not os.environ.get(STAND_INS):
        package: Any = importlib.import_module("sgl_kernel")
        return f"sgl_kernel {package.__version__}"
    # Its types of scalars are Python alone.
    found = PathFinder.find_spec("sgl_kernel")
    stubs.install({"sgl_kernel"})
    package = importlib.import_module("sgl_kernel")
    for function in sglang_stand_ins.FUNCTIONS:
        setattr(package, function.__name__, function)
    pdl: Any = importlib.import_module("sgl_kernel.utils")
    pdl.is_arch_support_pdl = lambda: False
    if found is not None and found.submodule_search_locations:
        path = Path(found.submodule_search_locations[0]) / "scalar_type.py"
        spec = importlib.util.spec_from_file_location("sgl_kernel.scalar_type", path)
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = package.scalar_type = module
        spec.loader.exec_module(module)
    return "stand-ins for sgl_kernel"


def serve(
    folder: Path, config: Mapping[str, Any], prompts: Tensor, new: int, **engine: Any
) -> Answer:
    """Load a folder and answer prompts [prompts, length] of tokens with `new` tokens each. The
    log-probabilities [prompts, new, vocabulary] are of these."""
    from sglang.benchmark import one_batch
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import PortArgs, ServerArgs

    args = ServerArgs(model_path=str(folder), **{**_FLAGS, **engine})
    ranks = one_batch.SpawnRanks(world_rank=0, gpu_id=0)
    one_batch.publish(args, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    runner, _ = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
    watched = Watched(prompts.shape[0], prompts.numel())
    kernels: dict[str, str] = {}
    hooks = _watch(runner.torch_runner.model, watched, kernels)
    requests = []
    for number, row in enumerate(prompts.tolist()):
        request = one_batch.Req(
            rid=str(number), origin_input_text="", origin_input_ids=array("q", row),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=new, ignore_eos=True),
        )  # fmt: skip
        request.full_untruncated_fill_ids = request.origin_input_ids
        request.logprob_start_len = -1
        request.extend_end = len(row)
        requests.append(request)
    _, logits, batch = runner.extend(requests)
    steps = [logits]
    for _ in range(new - 1):
        _, logits = runner.decode(steps[-1].argmax(-1), batch)
        steps.append(logits)
    for hook in hooks:
        hook.remove()
    found = torch.stack(steps, 1)[..., : int(config["vocab_size"])].float()
    seen = list(watched.found.values())
    return Answer(found.argmax(-1).cpu(), torch.log_softmax(found, -1), seen, kernels)


def _watch(model: torch.nn.Module, watched: Watched, kernels: dict[str, str]) -> list[Any]:
    """Hooks that keep what each linear module and each block of experts computes, which has the shared
    ones in it, and note its kernel."""
    linear: Any = importlib.import_module("sglang.srt.layers.linear").LinearBase
    experts: Any = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.layer").FusedMoE
    modules = dict(model.named_modules())
    hooks: list[Any] = []
    for name, module in modules.items():
        if isinstance(module, linear):
            kernels[f"linear {_kernel(module)}"] = name
            hooks += _kept(module, watched, name, "linear")
        elif isinstance(module, experts):
            kernels[f"experts {_kernel(module)}"] = name
            hooks += _kept(modules[name.rpartition(".")[0]], watched, name, "experts")
    return hooks


def _kernel(module: Any) -> str:
    """The quantization method of a module, and the class of its scheme or runner where it has one."""
    method = module.quant_method
    for owner, name in ((module, "scheme"), (method, "scheme"), (method, "runner")):
        found = getattr(owner, name, None)
        if found is not None:
            backend = getattr(getattr(found, "runner_backend", None), "value", "")
            return f"{type(method).__name__} {type(found).__name__}{backend and f':{backend}'}"
    return f"{type(method).__name__} {type(method).__name__}"


def _kept(
    module: Any, watched: Watched, name: str, kind: Literal["linear", "experts"]
) -> tuple[Any, Any]:
    """Hooks that keep a module's input, as it was before the module ran, and its output."""
    before: list[Any] = []

    def enter(module: Any, args: Any, named: Any) -> None:
        given = args[0] if args else named.get("hidden_states", named.get("x"))
        before[:] = [given.detach().clone() if isinstance(given, Tensor) else None]

    def leave(module: Any, args: Any, named: Any, result: Any) -> None:
        made = result[0] if isinstance(result, tuple) else result
        watched.keep(name, kind, before[0], made)

    return (
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, with_kwargs=True),
    )


def _build() -> None:
    """Compile modules that take nvcc minutes, all at once: of Marlin for linear layers and experts, with
    what brings weights into its order and sorts slots for it."""
    os.environ.setdefault("NVCC_APPEND_FLAGS", "--split-compile=0")  # on all cores
    prepare()
    at = "sglang.kernels.ops"
    compile_all: Any = importlib.import_module("sglang.kernels.jit.utils").parallel_compile
    linear: Any = importlib.import_module(f"{at}.gemm.gptq_marlin")
    experts: Any = importlib.import_module(f"{at}.moe.moe_wna16_marlin")
    repack: Any = importlib.import_module(f"{at}.quantization.gptq_marlin_repack")
    align: Any = importlib.import_module(f"{at}.moe.moe_align")
    began = time.time()

    def timed(name: str, built: Callable[[], Any]) -> Callable[[], None]:
        def build() -> None:
            built()
            print(f"{name} after {time.time() - began:.0f} s", flush=True)

        return build

    dtype = torch.bfloat16
    compile_all((
        timed("repack", repack._jit_gptq_marlin_repack_module),
        timed("align", lambda: align._jit_moe_align_module(torch.int32, True)),
        timed("linear", lambda: linear._jit_gptq_marlin_module(dtype)),
        # As fused_marlin_moe.py asks for them: sorted experts, of this rank alone.
        timed("up", lambda: experts._jit_moe_wna16_marlin_module(
            dtype, False, False, True, False, True)),
        timed("down", lambda: experts._jit_moe_wna16_marlin_module(
            dtype, False, False, True, True, True)),
    ))  # fmt: skip


def _check() -> int:
    """Print versions and what sgl_kernel's functions lose against their definitions; 1 where one is
    wrong."""
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}")
    print(prepare(), flush=True)
    wrong = sglang_stand_ins.differences(importlib.import_module("sgl_kernel"))
    print("; ".join(wrong) or "sgl_kernel computes what is defined")
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["build"]:
        _build()
    else:
        sys.exit(_check())
