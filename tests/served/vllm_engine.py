"""vLLM's own engine, in this process: one folder's answers, and what its quantized modules computed.

Written for vLLM 0.33 (`v1/engine`, `model_executor/layers/`), Triton's attention, eager mode.
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from qconvert.runtimes.loader.server import stubs
from served.reference import Answer, Watched

FOLDERS = 0  # a process may serve any number
ROUNDS_GLOBAL_SCALE = False
# Imported, and not used by what is asked of the engine here.
_NOT_NEEDED = frozenset(("xgrammar", "llguidance", "soxr", "torchcodec", "traitlets"))
_SETTINGS = {
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_HOST_IP": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "GLOO_SOCKET_IFNAME": "lo", "VLLM_USE_DEEP_GEMM": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0",
}  # fmt: skip


def prepare() -> None:
    """Import vLLM. Packages that it imports for servers alone need not be installed."""
    os.environ |= _SETTINGS
    os.environ.setdefault("VLLM_CACHE_ROOT", "/tmp/vllm-cache")
    importlib.import_module("transformers.processing_utils")
    stubs.install({name for name in _NOT_NEEDED if PathFinder.find_spec(name) is None})
    torch.backends.cuda.matmul.allow_tf32 = False
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda asked: asked()
    importlib.import_module("vllm")


def serve(
    folder: Path, config: Mapping[str, Any], prompts: Tensor, new: int, **engine: Any
) -> Answer:
    """Load a folder and answer prompts [prompts, length] of tokens with `new` tokens each. The
    log-probabilities are of all tokens but the first."""
    from vllm import LLM, SamplingParams

    arguments: dict[str, Any] = {"enforce_eager": True, **engine}
    # What is compiled runs no hook, and the modules of several ranks are in their processes.
    watches = arguments["enforce_eager"] and arguments.get("tensor_parallel_size", 1) == 1
    if config.get("linear_num_value_heads"):
        arguments["additional_config"] = {"gdn_prefill_backend": "triton"}
    if not config.get("kv_lora_rank"):
        arguments.setdefault("attention_backend", "TRITON_ATTN")
    llm: Any = LLM(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16",
        max_model_len=256, max_num_seqs=8, max_num_batched_tokens=512, gpu_memory_utilization=0.02,
        kv_cache_memory_bytes=512 << 20, max_logprobs=-1, disable_log_stats=True, seed=0,
        enable_prefix_caching=False, use_tqdm_on_load=False, **arguments,
    )  # fmt: skip
    try:
        watched = Watched(prompts.shape[0], prompts.numel())
        kernels: dict[str, str] = {}
        hooks = _watch(_model(llm), watched, kernels) if watches else []
        asked = SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=-1,
            prompt_logprobs=-1,
        )  # fmt: skip
        given = [{"prompt_token_ids": row.tolist()} for row in prompts]
        answers = llm.generate(given, asked, use_tqdm=False)
        for hook in hooks:
            hook.remove()
        tokens, found = _collected(answers, prompts, new, int(config["vocab_size"]))
        return Answer(tokens, found, list(watched.found.values()), kernels)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
        gc.collect()
        torch.cuda.empty_cache()


def _model(llm: Any) -> torch.nn.Module:
    """The model of the only rank, in this process."""
    core = llm.llm_engine.engine_core
    core = getattr(core, "engine_core", core)
    worker = core.model_executor.driver_worker
    model: torch.nn.Module = getattr(worker, "worker", worker).model_runner.model
    return model


def _watch(model: torch.nn.Module, watched: Watched, kernels: dict[str, str]) -> list[Any]:
    """Hooks that keep what each quantized module computes, and note its kernel."""
    linear: Any = importlib.import_module("vllm.model_executor.layers.linear").LinearBase
    experts: Any = importlib.import_module(
        "vllm.model_executor.layers.fused_moe.runner.moe_runner_interface"
    ).MoERunnerInterface
    hooks = []
    for name, module in model.named_modules():
        kind: Literal["linear", "experts"]
        if isinstance(module, linear):
            kind = "linear"
            method: Any = module.quant_method
            scheme = getattr(module, "scheme", None) or method
            kernel = getattr(scheme, "kernel", None) or getattr(scheme, "fp8_linear", None)
        elif isinstance(module, experts):
            kind = "experts"
            method = getattr(module, "quant_method", None)
            method = method or getattr(
                getattr(module, "routed_experts", None), "quant_method", None
            )
            kernel = getattr(method, "moe_kernel", None)
            kernel = getattr(kernel, "fused_experts", None) or getattr(
                getattr(kernel, "impl", None), "fused_experts", None
            )
        else:
            continue
        kernels[f"{kind} {type(method).__name__} {type(kernel).__name__}"] = name

        def keep(
            module: Any, args: Any, named: Any, result: Any, name: str = name,
            kind: Literal["linear", "experts"] = kind,
        ) -> None:  # fmt: skip
            given = (
                args[0] if args else named.get("hidden_states", named.get("input_", named.get("x")))
            )
            watched.keep(name, kind, given, result[0] if isinstance(result, tuple) else result)

        hooks.append(module.register_forward_hook(keep, with_kwargs=True))
    return hooks


def _collected(answers: Any, prompts: Tensor, new: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    count, length = prompts.shape
    found = torch.full((count, length + new - 1, vocabulary), float("nan"))
    tokens = []
    for row, answer in enumerate(answers):
        steps = [*answer.prompt_logprobs[1:], *answer.outputs[0].logprobs]
        for at, step in enumerate(steps):
            found[row, at, list(step)] = torch.tensor([one.logprob for one in step.values()])
        tokens.append(list(answer.outputs[0].token_ids))
    return torch.tensor(tokens), found.cuda()
