"""torch as on a machine with GPUs, on one without: what asks about devices is answered, and what is put
on one lies on the CPU. Loaders choose schemes and layouts by the answers; no kernel runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

GPUS = 8
_MEMORY = 140 << 30


class _Stream:
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Of any device."""

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: object) -> None:
        """Nothing waits for it."""

    def wait_stream(self, *args: object) -> None:
        """Nothing runs on it."""

    synchronize = wait_stream


@dataclass(frozen=True)
class _Properties:
    major: int
    minor: int
    name: str = "NVIDIA H200"
    total_memory: int = _MEMORY
    multi_processor_count: int = 132
    warp_size: int = 32
    shared_memory_per_block_optin: int = 228 << 10
    L2_cache_size: int = 50 << 20
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 65536
    uuid: str = "0"
    gcnArchName: str = ""
    is_integrated: int = 0


def _answer(value: object) -> Callable[..., object]:
    return lambda *args, **kwargs: value


def pretend(capability: tuple[int, int]) -> None:
    """Answer as `GPUS` GPUs of a compute capability would. For good: there is no way back."""
    cuda: Any = torch.cuda
    version: Any = torch.version
    version.cuda = "12.9"
    answers = {
        "is_available": True, "is_initialized": False, "device_count": GPUS, "current_device": 0,
        "get_device_capability": capability, "get_device_properties": _Properties(*capability),
        "get_device_name": _Properties.name, "set_device": None, "synchronize": None,
        "empty_cache": None, "init": None, "_lazy_init": None, "max_memory_allocated": 0,
        "memory_allocated": 0, "memory_reserved": 0, "mem_get_info": (_MEMORY, _MEMORY),
        "current_stream": _Stream(), "default_stream": _Stream(),
    }  # fmt: skip
    for name, value in answers.items():
        setattr(cuda, name, _answer(value))
    cuda.Stream = cuda.Event = _Stream
    module: Any = torch
    module.accelerator.empty_cache = module.accelerator.synchronize = _answer(None)
    real = torch.get_device_module
    module.get_device_module = lambda device=None: (
        cuda if device in (None, "cuda") else real(device)
    )


class OnCpu(TorchFunctionMode):
    """While it is entered, tensors of a GPU are made on the CPU."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if not kwargs and func is not torch.Tensor.to:
            return func(*args)  # nearly all: a load asks for millions of shapes and views
        named = dict(kwargs or {})
        if "device" in named:
            named["device"] = _cpu(named["device"])
        if named.get("pin_memory"):
            named["pin_memory"] = False
        if func is torch.Tensor.to:
            args = tuple(arg if type(arg) is int else _cpu(arg) for arg in args)
        return func(*args, **named)


def _cpu(device: Any) -> Any:
    if type(device) is int or (isinstance(device, str) and device.startswith("cuda")):
        return "cpu"
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return device
