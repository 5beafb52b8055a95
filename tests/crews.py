"""A crew in this process: machines that are lost when a test says so."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from qconvert.run.engines.base import ClaimedRun, UnitBatches
from qconvert.run.engines.local import whole_run
from qconvert.run.engines.ray import Node, WorkerLost, WorkerReady, run_on_workers
from qconvert.run.folder.target import Target
from qconvert.run.folder.workspace import Workspace
from qconvert.run.work.backend import Backend
from qconvert.run.work.cluster_node import BatchResult, NodeWorker
from qconvert.run.work.events import Events
from qconvert.run.work.files import Files
from qconvert.run.work.worker import Batch, WorkerEvent, WorkerSetup

Happening = tuple[int, WorkerReady | BatchResult | WorkerLost]


@dataclass
class HereCrew:
    """Workers whose batches this process runs, in an order of chance. `losses` of them are lost, with or
    without having done their batch; a machine never comes back."""

    setup: WorkerSetup
    machines: list[Node]
    chooser: random.Random
    losses: int = 0
    chance: float = 0.3
    sent: dict[int, deque[Batch]] = field(default_factory=dict)
    begun: dict[int, NodeWorker | None] = field(default_factory=dict)
    most_on: Counter[str] = field(default_factory=Counter)
    most_sent: int = 0
    where: dict[int, Node] = field(default_factory=dict)

    def nodes(self) -> Sequence[Node]:
        return self.machines

    def start_worker(self, node: Node) -> int:
        number = len(self.where) + 1
        self.where[number] = node
        self.begun[number] = None
        self.sent[number] = deque()
        now = Counter(self.where[n].key for n in self.begun)
        self.most_on |= now
        return number

    def send(self, worker: int, batch: Batch) -> None:
        self.sent[worker].append(batch)
        self.most_sent = max(self.most_sent, len(self.sent[worker]))

    def next(self, seconds: float) -> Happening | None:
        able = [n for n, worker in self.begun.items() if worker is None or self.sent[n]]
        if not able:
            return None
        number = self.chooser.choice(able)
        worker = self.begun[number]
        if worker is None:
            worker = self.begun[number] = NodeWorker()
            return number, WorkerReady(worker.begin(self.setup))
        lost = self.losses and self.chooser.random() < self.chance
        if lost and self.chooser.random() < 0.5:
            worker.run(self.sent[number][0])  # done, and nobody was told
        if lost:
            self.losses -= 1
            del self.begun[number]
            if len(self.machines) > 1 and self.chooser.random() < 0.5:
                self.machines.remove(self.where[number])
            return number, WorkerLost("it was unplugged")
        return number, worker.run(self.sent[number].popleft())


@dataclass
class Heard:
    """Events of a run; `call` is called once, after so many bytes were written."""

    call: Callable[[], object] | None = None
    after: int = 1
    total: int = 0
    done: int = 0
    phases: list[str] = field(default_factory=list)

    def start(self, total: int, done: int) -> None:
        self.total, self.done = total, done

    def wrote(self, nbytes: int) -> None:
        self.done += nbytes
        if self.call is not None and self.done >= self.after:
            call, self.call = self.call, None
            call()

    def phase(self, text: str) -> None:
        self.phases.append(text)


def interrupt() -> None:
    raise KeyboardInterrupt


@dataclass
class CrewEngine:
    """An engine of a crew in this process."""

    machines: Sequence[Node]
    seed: int = 0
    losses: int = 0
    chance: float = 0.3
    most: int = 100
    crew: HereCrew | None = None
    space = Workspace
    publishes = True

    @contextmanager
    def begin(
        self, targets: Sequence[Target], told: Events, files: Files, backend: Backend | None
    ) -> Iterator[ClaimedRun | None]:
        with whole_run(targets, told, backend) as begun:
            yield begun

    def finish_units(self, begun: ClaimedRun, told: Events) -> Sequence[int]:
        return ()

    def run(self, work: UnitBatches) -> Generator[WorkerEvent]:
        chooser = random.Random(self.seed)
        self.crew = HereCrew(work.setup, list(self.machines), chooser, self.losses, self.chance)
        return run_on_workers(self.crew, list(work.batches), self.most, work)
