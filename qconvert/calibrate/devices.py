"""Devices that a calibration computes on, by torch's names."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from qconvert.core.errors import RunError

# --- NVIDIA GPUs of this machine, without torch ---------------------------------------------------


_NODES = Path("/dev")
_NODE = re.compile(r"nvidia[0-9]+")
_VARIABLE = "CUDA_VISIBLE_DEVICES"


def count_gpus() -> int:
    """Return how many GPUs torch will probably find: 0 where that is not known."""
    named = _named()
    if named is not None:
        return len(named)
    try:
        return sum(1 for path in _NODES.iterdir() if _NODE.fullmatch(path.name))
    except OSError:
        return 0


def _named() -> list[str] | None:
    """Return what CUDA_VISIBLE_DEVICES names, if it is set."""
    asked = os.environ.get(_VARIABLE)
    return None if asked is None else [part.strip() for part in asked.split(",") if part.strip()]


@dataclass(frozen=True, slots=True)
class Machine:
    """Result of asking a torch: its version, and how many GPUs."""

    torch: str
    gpus: int

    @property
    def devices(self) -> tuple[str, ...]:
        """Every GPU, or the CPU."""
        return _gpus(self.gpus) or ("cpu",)

    def check(self, names: Sequence[str]) -> None:
        """Raise RunError for a name that is neither `cpu` nor a GPU of this machine."""
        known = ["cpu", *(["cuda"] if self.gpus else []), *_gpus(self.gpus)]
        for name in names:
            if name not in known:
                raise RunError(
                    f"device {name!r}: expected one that torch {self.torch} finds here "
                    f"({', '.join(known)}); omit --device, or give one of these"
                )


def this_machine() -> Machine:
    import torch

    return Machine(str(torch.__version__), torch.cuda.device_count())


def found_devices() -> tuple[str, ...]:
    """Every GPU that torch sees, or the CPU."""
    return this_machine().devices


def check_devices(names: Sequence[str]) -> None:
    """As `Machine.check`; of a CPU alone without torch, whose import is slow."""
    if any(name != "cpu" for name in names):
        this_machine().check(names)


def use_device(name: str) -> None:
    """Make a device the one that this thread launches kernels on: Triton's go nowhere else."""
    if name != "cpu":
        import torch

        torch.cuda.set_device(name)


def guessed_devices() -> tuple[str, ...]:
    """The GPUs that torch will probably find, without its import: none where that is not known."""
    return _gpus(count_gpus())


def each_once(names: Sequence[str]) -> tuple[str, ...]:
    """Devices as they are used: a GPU once, by its number. Raises RunError for a CPU beside GPUs, whose
    sums differ in the last bits."""
    if kind_of(names) == "cpu":
        return tuple(names)
    if "cpu" in names:
        raise RunError("--device cpu beside GPUs: codes of both do not mix; give one kind")
    return tuple(dict.fromkeys("cuda:0" if name == "cuda" else name for name in names))


def get_ready(name: str) -> Thread | None:
    """Let a GPU make its context and cuBLAS's handle, up to a second, in a thread, which is returned:
    torch lets go of Python's lock meanwhile, and classes of models are imported."""
    if name == "cpu":
        return None
    import torch  # noqa: F401  (not in the thread: another import of it may be on its way)

    made = Thread(target=_begin_on, args=(name,), name="get a device ready")
    made.start()
    return made


def _begin_on(name: str) -> None:
    import torch

    try:
        some = torch.ones((16, 16), dtype=torch.bfloat16, device=name)
        torch.mm(some, some)
    except (RuntimeError, AssertionError):  # of a torch without CUDA
        return  # what computes there next fails too, where it can be told


def kind_of(names: Sequence[str]) -> str:
    """cpu or cuda: their sums differ in the last bits, so codes of both do not mix."""
    return "cpu" if all(name == "cpu" for name in names) else "cuda"


def _gpus(count: int) -> tuple[str, ...]:
    return tuple(f"cuda:{n}" for n in range(count))
