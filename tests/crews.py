"""A crew in this process: machines that are lost when a test says so."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from qconvert.run.backend import Backend
from qconvert.run.engine import Begun, Work
from qconvert.run.events import Events
from qconvert.run.files import Files
from qconvert.run.local import whole_run
from qconvert.run.nodes import NodeWorker, Returned
from qconvert.run.scheduler import Lost, Node, Ready, run_by_crew
from qconvert.run.target import Target
from qconvert.run.worker import Batch, Setup, Told
from qconvert.run.workspace import Workspace

Happening = tuple[int, Ready | Returned | Lost]


@dataclass
class HereCrew:
    """Workers whose batches this process runs, in an order of chance. `losses` of them are lost, with or
    without having done their batch; a machine never comes back."""

    setup: Setup
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

    def hire(self, node: Node) -> int:
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
            return number, Ready(worker.begin(self.setup))
        lost = self.losses and self.chooser.random() < self.chance
        if lost and self.chooser.random() < 0.5:
            worker.run(self.sent[number][0])  # done, and nobody was told
        if lost:
            self.losses -= 1
            del self.begun[number]
            if len(self.machines) > 1 and self.chooser.random() < 0.5:
                self.machines.remove(self.where[number])
            return number, Lost("it was unplugged")
        return number, worker.run(self.sent[number].popleft())


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
    ) -> Iterator[Begun | None]:
        with whole_run(targets, told, backend) as begun:
            yield begun

    def settle(self, begun: Begun, told: Events) -> Sequence[int]:
        return ()

    def run(self, work: Work) -> Generator[Told]:
        chooser = random.Random(self.seed)
        self.crew = HereCrew(work.setup, list(self.machines), chooser, self.losses, self.chance)
        return run_by_crew(self.crew, list(work.batches), self.most, work)
