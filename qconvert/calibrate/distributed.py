"""Processes that calibrate a model together, a device each, on one host or several: what one has to know
of the others.

Each runs attention over its own samples, and lets all experts answer these. What goes into experts is
shared, so that each counts all tokens in for the experts that it solves; then it shares what their codes
mean. Threads of one process, for two GPUs, waited for Python's lock: 2.51 s a layer of Qwen3-30B-A3B for
2.09 of two processes, and they found other codes than one GPU does.

Every process makes the same calls in the same order, or all of them wait for ever: what depends on a
clock, on free memory or on a file is decided by one of them, for all.

Division of a calibration into batches, which process of a team has which of it, and the order in
which each reads experts.

What is computed must not depend on how many processes there are: samples go through attention in the
same batches, and experts are solved in the same ones, each whole in one process.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import re
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from qconvert.calibrate.activation_store import TokenRows
from qconvert.calibrate.devices import kind_of
from qconvert.calibrate.reading import Weights
from qconvert.core.errors import RunError, UsageError
from qconvert.formats.base import Stored
from qconvert.models.experts import PROJECTIONS, Projection

if TYPE_CHECKING:
    import torch


T = TypeVar("T")

_ROWS = 1 << 16  # sent at a time
# A process waits as long as another one solves, or its results are written.
_PATIENCE = timedelta(days=2)
_COMING = timedelta(minutes=15)  # in which processes that a launcher starts together are there


class LostError(RunError):
    """Another process has ended, or the network between has: who started them says which one."""


class Communicator(Protocol):
    """`rank` of `count` processes."""

    @property
    def rank(self) -> int: ...

    @property
    def count(self) -> int: ...

    def send(self, tensor: torch.Tensor, source: int) -> None:
        """Give all what the process `source` has in this tensor, which is contiguous and of one shape
        and dtype everywhere."""

    def gathered(self, value: T) -> list[T]:
        """Return what each process gave here, by rank."""

    def barrier(self) -> None:
        """Wait for all."""

    def background_barrier(self) -> None:
        """Wait for all, in a thread that writes behind the computation."""


class SingleProcess:
    """A process without others."""

    rank, count = 0, 1

    def send(self, tensor: torch.Tensor, source: int) -> None:
        pass

    def gathered(self, value: T) -> list[T]:
        return [value]

    def barrier(self) -> None:
        pass

    def background_barrier(self) -> None:
        pass


SINGLE_PROCESS = SingleProcess()


def broadcast_from_rank0(comm: Communicator, value: T) -> T:
    """Return what the first process says."""
    return comm.gathered(value)[0]


def share(
    comm: Communicator, rows: TokenRows, cuts: Sequence[tuple[int, int]], device: str
) -> None:
    """Give all processes the rows that each has of its own tokens, cuts[rank]."""
    import torch

    for source in range(comm.count if comm.count > 1 else 0):
        first, last = cuts[source]
        for start in range(first, last, _ROWS):
            mine = rows.read(start, min(start + _ROWS, last))
            if source == comm.rank:
                comm.send(mine.to(device).contiguous(), source)
            else:
                there = torch.empty_like(mine, device=device)
                comm.send(there, source)
                rows.write(start, there)


class ProcessGroup:
    """A process of a team by torch.distributed: NCCL between GPUs, Gloo for what lies in host memory.
    They find one another through a store of torch's. Raises LostError where one of them is gone."""

    def __init__(self, rank: int, count: int, device: str, store: Any) -> None:
        import torch
        import torch.distributed as distributed

        self.rank, self.count = rank, count
        group: Any = distributed  # typed in parts
        self._group = group
        gpu = device != "cpu"
        with _lost():
            group.init_process_group(
                "cpu:gloo,cuda:nccl" if gpu else "gloo", store=store, rank=rank, world_size=count,
                timeout=_PATIENCE, device_id=torch.device(device) if gpu else None,
            )  # fmt: skip
            # Threads must not share a group: its calls are told apart by their order.
            self._hosts = group.new_group(backend="gloo", timeout=_PATIENCE)
            self._behind = group.new_group(backend="gloo", timeout=_PATIENCE)

    def send(self, tensor: torch.Tensor, source: int) -> None:
        import torch

        if tensor.numel():  # as bytes: Gloo does not know every dtype
            with _lost():
                self._group.broadcast(tensor.view(torch.uint8), source)

    def gathered(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.count
        with _lost():
            self._group.all_gather_object(found, value, group=self._hosts)
        return found

    def barrier(self) -> None:
        with _lost():
            self._group.barrier(group=self._hosts)

    def background_barrier(self) -> None:
        with _lost():
            self._group.barrier(group=self._behind)


@contextmanager
def _lost() -> Iterator[None]:
    """Around calls of torch.distributed, which raise RuntimeError for all that goes wrong."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        text = str(error).strip().partition("\n")[0]
        raise LostError(
            f"the connection to another process of the calibration is lost ({text}); run the same "
            "command again to go on, with as many processes as there are"
        ) from error


def file_store(folder: str, count: int) -> Any:
    """A store for `count` processes of one host."""
    import torch.distributed as distributed

    group: Any = distributed
    return group.FileStore(f"{folder}/store", count)


# --- processes on several hosts -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launched:
    """This process among `count` that torchrun or Slurm has started together: its number, which of
    `local_count` it is on its host, and the address at which the first one is met."""

    number: int
    count: int
    local: int
    local_count: int
    address: str
    port: int

    @property
    def leads(self) -> bool:
        """Return whether this is the one that plans, writes and publishes."""
        return self.number == 0

    def devices(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return what this process computes on, of the devices of its host: all of them, or one where it
        is not alone there."""
        alone = self.local_count == 1 or len(names) == 1
        return tuple(names) if alone else (names[self.local % len(names)],)


def launched(environment: Mapping[str, str]) -> Launched | None:
    """Return what a launcher says in the environment; None for a process that it has started alone.
    Raises UsageError."""
    found = [
        (rank, size, rest)
        for rank, size, *rest in (
            ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
            ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
        )
        if rank in environment
    ]
    if not found:
        raise UsageError(
            "--distributed: neither RANK with WORLD_SIZE (torchrun) nor SLURM_PROCID with SLURM_NTASKS "
            "(srun) is set; start the command by one of these on each machine, or omit --distributed"
        )
    rank, size, (local, local_size) = found[0]
    number, count = (_number(environment, name) for name in (rank, size))
    if count == 1:
        return None
    if not 0 <= number < count:
        raise UsageError(f"--distributed: {rank} is {number}, and {size} {count}")
    address = environment.get("MASTER_ADDR", "")
    if not address:
        raise UsageError(
            "--distributed: MASTER_ADDR is not set: it is the address of the host with number 0; in a "
            'script of Slurm: export MASTER_ADDR=$(scontrol show hostnames "$SLURM_NODELIST" | head -1)'
        )
    # Slurm writes `2(x3),1`: tasks a node.
    many = re.sub(r"\(x[0-9]+\)", "", environment.get(local_size, "1")).split(",")
    return Launched(
        number, count, _number(environment, local) if local in environment else 0,
        max(int(one) if one.isdigit() else 1 for one in many), address,
        _number(environment, "MASTER_PORT") if "MASTER_PORT" in environment else 29500,
    )  # fmt: skip


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not (0 < len(text) <= 9 and text.isascii() and text.isdigit()):
        raise UsageError(f"--distributed: {name} is {text[:40]!r}, expected a number")
    return int(text)


class Rendezvous:
    """The store in which processes of several hosts find one another: of torchrun where that has one,
    else of the first process. `times` counts the calibrations of one command."""

    def __init__(self, launched: Launched, index: int, times: int) -> None:
        import torch.distributed as distributed

        self._launched, self._index = launched, index
        self.first = 0  # rank of the first one of those that were started with this one
        group: Any = distributed
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = group.TCPStore(
                launched.address, launched.port, timeout=_COMING, wait_for_workers=False,
                is_master=launched.leads and index == 0 and not agent,
            )  # fmt: skip
        except RuntimeError as error:
            raise RunError(
                f"--distributed: cannot meet the others at {launched.address}:{launched.port} "
                f"(MASTER_ADDR, MASTER_PORT): {str(error).partition(chr(10))[0]}"
            ) from error
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = group.PrefixStore(f"qconvert/{attempt}/{times}", store)

    def devices(self, own: Sequence[str]) -> list[tuple[str, str]]:
        """The host and the device of each process, by rank; `own` are those of this process's host that
        were started with it. Raises RunError for CPUs beside GPUs, and for who does not come."""
        number, count = self._launched.number, self._launched.count
        if self._index == 0:
            self.store.set(f"devices/{number}", json.dumps([socket.gethostname(), *own]))
        found: list[tuple[str, str]] = []
        for other in range(count):
            # The first one may write for hours what is not calibrated; the others have come by then.
            host, *names = json.loads(
                self.get(f"devices/{other}", f"process {other}", _COMING if other else _PATIENCE)
            )
            if other == number:
                self.first = len(found)
            found += [(host, name) for name in names]
        kinds = {kind_of([name]): host for host, name in found}
        if len(kinds) > 1:
            raise RunError(
                f"--distributed: {kinds['cpu']} calibrates on its CPU and {kinds['cuda']} on GPUs, "
                "whose codes do not mix; give all the same kind of --device"
            )
        return found

    def get(self, key: str, what: str, within: timedelta = _COMING) -> bytes:
        """Return what a process has set, once it has. Raises RunError."""
        try:
            self.store.wait([key], within)
            found: bytes = self.store.get(key)
        except RuntimeError as error:
            raise LostError(
                f"--distributed: {what} of {self._launched.count} did not come, or the first one is "
                f"gone ({str(error).partition(chr(10))[0]}); run the same command again on all machines"
            ) from error
        return found


def interface_to(address: str) -> str | None:
    """The name of the network interface that leads to a host; None where that is this host's own, or not
    known. Gloo and NCCL would take the one of the host's name, which is often of no use to others."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            here = probe.getsockname()[0]
            if ipaddress.ip_address(here).is_loopback:
                return None
            for _, name in socket.if_nameindex():
                asked = struct.pack("256s", name.encode())
                try:
                    answer = fcntl.ioctl(probe.fileno(), 0x8915, asked)  # SIOCGIFADDR
                except OSError:
                    continue  # it has no address
                if socket.inet_ntoa(answer[20:24]) == here:
                    return name
    except OSError:
        return None
    return None


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens [start, stop) of all, being `count` samples of one length from number `first` on."""

    start: int
    stop: int
    first: int
    count: int


def batches(
    lengths: Sequence[int], most: int | None, parts: Sequence[tuple[int, int]]
) -> Iterator[list[Batch]]:
    """For each part of the tokens samples that go through attention together: one by one, or as many
    neighbours of one length as have no more than `most` tokens."""
    at = 0
    number = 0
    for _, end in parts:
        found = []
        while at < end:
            length, count = lengths[number], 1
            while (
                most is not None
                and at + count * length < end
                and lengths[number + count] == length
                and (count + 1) * length <= most
            ):
                count += 1
            stop = at + count * length
            found.append(Batch(at, stop, number, count))
            at, number = stop, number + count
        yield found


def chunks_of(lengths: Sequence[int], most: int | None) -> list[tuple[int, int]]:
    """Ranges of tokens whose expert inputs are worked on together: a sample each, or whole samples of
    no more than `most` tokens."""
    found: list[tuple[int, int]] = []
    at = 0
    for length in lengths:
        if found and most is not None and at + length - found[-1][0] <= most:
            found[-1] = found[-1][0], at + length
        else:
            found.append((at, at + length))
        at += length
    return found


def shares(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Items in `count` runs of neighbours, as many in each as in the others or one less."""
    cuts = [len(items) * n // count for n in range(count + 1)]
    return [items[start:stop] for start, stop in pairwise(cuts)]


def divided(
    numbers: Sequence[int], sizes: Sequence[int], batch: int = 1
) -> Iterator[list[list[int]]]:
    """Groups of numbers, in their order: of each group a process has as many as its size at the most,
    and no more than the others where there are fewer than all could have. Batches, each of `batch`
    numbers from a multiple of it on, stay whole; of half, a quarter, ... where one has space for less:
    so what is solved together is the same for any number of processes of one size."""
    whole = 1 << (min(batch, *sizes).bit_length() - 1)
    runs = [list(run) for _, run in groupby(numbers, lambda number: number // whole)]
    at = 0
    while at < len(runs):
        group = []
        for place, size in enumerate(sizes):
            fair = -(-(len(runs) - at) // (len(sizes) - place))
            mine = runs[at : at + min(size // whole, fair)]
            at += len(mine)
            if mine:
                group.append([number for run in mine for number in run])
        yield group


# Order in which a process reads experts: what its reader needs to read ahead.


@dataclass(eq=False)
class ExpertReadOrder:
    """Has `reader` read ahead, up to `room` bytes. Which experts a process has is taken from the layer
    before: it changes only where groups do, which depend on which experts see every token. `stop` is
    the end of the layers."""

    matrices: Mapping[int, Mapping[tuple[int, str], Projection]]
    reader: Weights
    room: int
    stop: int
    _experts: list[int] = field(default_factory=list)

    def set_experts(self, layer: int, experts: Sequence[int]) -> None:
        """From this layer on it is these experts, in this order."""
        if list(experts) != self._experts:
            self._experts = list(experts)
            self.reader.expect(self._order(range(layer, self.stop), self._experts), self.room)

    def _order(self, layers: range, experts: Sequence[int]) -> Iterator[tuple[str, Stored]]:
        for layer in layers:
            found = self.matrices.get(layer, {})
            for expert in experts if found else ():
                for kind in PROJECTIONS:
                    one = found[expert, kind]
                    yield one.module, one.weight
