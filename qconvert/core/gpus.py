"""The NVIDIA GPUs of this machine as a process sees them, without torch, whose import takes seconds."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

_NODES = Path("/dev")
_NODE = re.compile(r"nvidia[0-9]+")
_VARIABLE = "CUDA_VISIBLE_DEVICES"


def count_gpus() -> int:
    """How many GPUs torch will probably find: 0 where that is not known."""
    named = _named()
    if named is not None:
        return len(named)
    try:
        return sum(1 for path in _NODES.iterdir() if _NODE.fullmatch(path.name))
    except OSError:
        return 0


def _named() -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES names, if it is set."""
    asked = os.environ.get(_VARIABLE)
    return None if asked is None else [part.strip() for part in asked.split(",") if part.strip()]


class _Memory(ctypes.Structure):
    """nvmlMemory_t of nvml.h, bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def free_bytes(number: int) -> int | None:
    """Memory that is free on cuda:N now, as the driver's library (NVML) says. None where it does not:
    it is not there, or knows no such GPU."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    named = _named()
    if named is not None and number >= len(named):
        return None
    name = str(number) if named is None else named[number]
    if nvml.nvmlInit_v2():
        return None
    try:
        device, memory = ctypes.c_void_p(), _Memory()
        failed = (
            nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(device))
            if name.isdigit()
            else nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device))
        )
        if failed or nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
            return None
        return int(memory.free)
    finally:
        nvml.nvmlShutdown()
