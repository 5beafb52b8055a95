"""Devices that a calibration computes on, by torch's names."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Thread

from qconvert.core.errors import RunError


def found_devices() -> tuple[str, ...]:
    """Every GPU that torch sees, or the CPU."""
    import torch

    return tuple(f"cuda:{n}" for n in range(torch.cuda.device_count())) or ("cpu",)


def check_devices(names: Sequence[str]) -> None:
    """Raise RunError for a name that is neither `cpu` nor a GPU of this machine."""
    others = [name for name in names if name != "cpu"]
    if not others:
        return  # without torch, whose import is slow
    import torch

    count = torch.cuda.device_count()
    known = ["cpu", *(["cuda"] if count else []), *(f"cuda:{n}" for n in range(count))]
    for name in others:
        if name not in known:
            raise RunError(
                f"device {name!r}: expected one that torch {torch.__version__} finds here "
                f"({', '.join(known)}); omit --device, or give one of these"
            )


def use_device(name: str) -> None:
    """Make a device the one that this thread launches kernels on: Triton's go nowhere else."""
    if name != "cpu":
        import torch

        torch.cuda.set_device(name)


def get_ready(names: Sequence[str]) -> Thread | None:
    """Let GPUs make their contexts and cuBLAS's handles, up to a second each, in a thread, which is
    returned: torch lets go of Python's lock meanwhile, and classes of models are imported."""
    gpus = [name for name in names if name != "cpu"]
    if not gpus:
        return None
    import torch  # noqa: F401  (not in the thread: another import of it may be on its way)

    made = Thread(target=_begin_on, args=(gpus,), name="get devices ready")
    made.start()
    return made


def _begin_on(names: Sequence[str]) -> None:
    import torch

    for name in names:
        try:
            some = torch.ones((16, 16), dtype=torch.bfloat16, device=name)
            torch.mm(some, some)
        except (RuntimeError, AssertionError):  # of a torch without CUDA
            return  # what computes there next fails too, where it can be told


def kind_of(names: Sequence[str]) -> str:
    """cpu or cuda: their sums differ in the last bits, so codes of both do not mix."""
    return "cpu" if all(name == "cpu" for name in names) else "cuda"
