"""Linear layers beside the routed experts of one decoder layer: attention, shared experts, dense MLPs.

Hessians are of the layer as it was before any of its matrices was quantized, as in llm-compressor's
sequential pipeline: a hook on each linear sees what goes into it while the layer runs. Linears that are
given the same tensor share one Hessian; which do is found by running the layer, so that no family has to
say it. Where not all Hessians fit in memory, the layer runs several times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qconvert.calibrate.experts import InputStats, input_stats
from qconvert.calibrate.memory import Budget, rounds, trim
from qconvert.calibrate.model import Layer, Model
from qconvert.calibrate.progress import Clock
from qconvert.calibrate.reading import Weights
from qconvert.calibrate.settings import Matrix, Settings
from qconvert.calibrate.solve import Quantized, rounded, solved
from qconvert.core.errors import PlanError, RunError
from qconvert.core.int_scheme import IntScheme
from qconvert.core.shown import count
from qconvert.formats.base import Stored
from qconvert.formats.registry import read_matrix
from qconvert.plan.plan import Plan
from qconvert.run.work.backend import Remark

if TYPE_CHECKING:
    import torch

_SHOWN = 16  # modules that a remark names


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear to solve: its module in the checkpoint, its name within its layer of the class, how its
    weight is stored, and a scheme for each target."""

    module: str
    inside: str
    weight: Stored
    schemes: tuple[IntScheme, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.rows, self.weight.columns


Linears = Mapping[int, Sequence[Linear]]


def linears_of(
    source: Plan, model: Model, asked: Mapping[str, Sequence[IntScheme]]
) -> dict[int, list[Linear]]:
    """Linears by layer. `asked` are schemes for modules of the checkpoint. Raises PlanError for a module
    that is in no layer, that the class has no linear for, or whose columns are not whole groups."""
    layers = {}
    for name, place in source.role_index.places.items():
        module = name.rpartition(".")[0]
        if module in asked and place.layer is not None:
            layers[module] = place.layer
    found: dict[int, list[Linear]] = {}
    for module, schemes in asked.items():
        if module not in layers:
            raise PlanError(f"{module}: is in no decoder layer of the checkpoint, so it is not run")
        weight, _ = read_matrix(source, module)
        for scheme in schemes:
            try:
                scheme.groups(weight.columns)
            except PlanError as error:
                raise PlanError(f"{module}: {error}") from error
        inside = model.inside(layers[module], module)
        one = Linear(module, inside, weight, tuple(schemes))
        found.setdefault(layers[module], []).append(one)
    return found


@contextlib.contextmanager
def _watched(
    layer: Layer, linears: Sequence[Linear], see: Callable[[Linear, torch.Tensor], None]
) -> Iterator[None]:
    """Let `see` have what goes into each linear while the layer runs."""

    def hook(one: Linear) -> Callable[[Any, tuple[Any, ...]], None]:
        return lambda _, given: see(one, given[0])

    handles = []
    try:
        for one in linears:
            module = layer.module.get_submodule(one.inside)
            handles.append(module.register_forward_pre_hook(hook(one)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensor(rows: torch.Tensor) -> tuple[int, ...]:
    """Return what tells a tensor from all others alive: where it lies, its size, and how often it was
    changed."""
    return rows.data_ptr(), rows.shape[-1], rows.numel(), rows._version


def sets_of(layer: Layer, linears: Sequence[Linear], run: Callable[[], None]) -> list[list[Linear]]:
    """Linears that are given the same tensor, in the order in which they are called; `run` runs the
    layer on some tokens. Raises RunError where one is not called exactly once."""
    found: dict[tuple[int, ...], list[Linear]] = {}
    alive: list[torch.Tensor] = []  # so that no two inputs have one place

    def see(one: Linear, rows: torch.Tensor) -> None:
        alive.append(rows)
        found.setdefault(_tensor(rows), []).append(one)

    with _watched(layer, linears, see):
        run()
    called = [one.module for some in found.values() for one in some]
    for one in linears:
        if (times := called.count(one.module)) != 1:
            shown = count(times, "time")
            raise RunError(
                f"{one.module}: {type(layer.module).__name__} calls it {shown}, expected once; "
                "ignore it, or round it to nearest"
            )
    return list(found.values())


def inputs_counted(
    layer: Layer, sets: Sequence[Sequence[Linear]], run: Callable[[], None], *,
    tokens: int, device: str,
) -> list[InputStats]:  # fmt: skip
    """Sums over what goes into each set while `run` runs the layer on all tokens. Raises RunError where
    linears of a set are given different tensors after all, or other than all tokens."""
    found = [input_stats(some[0].weight.columns, device) for some in sets]
    number_of = {one.module: number for number, some in enumerate(sets) for one in some}
    last: dict[int, tuple[int, ...]] = {}

    def see(one: Linear, rows: torch.Tensor) -> None:
        number = number_of[one.module]
        if one.module == sets[number][0].module:
            last[number] = _tensor(rows)
            found[number].add(rows.flatten(0, -2))
        elif last.get(number) != _tensor(rows):
            raise RunError(
                f"{one.module}: {type(layer.module).__name__} gives it another input than "
                f"{sets[number][0].module} in some samples; ignore it, or round it to nearest"
            )

    with _watched(layer, [one for some in sets for one in some], see):
        run()
    for some, inputs in zip(sets, found, strict=True):
        if inputs.tokens != tokens:
            raise RunError(
                f"{some[0].module}: {type(layer.module).__name__} gave it {inputs.tokens} tokens, "
                f"expected {tokens}, each once; ignore it, or round it to nearest"
            )
    return found


@dataclass(eq=False)
class LinearRemarks:
    """Remarks on a layer's linears, by module."""

    rounded: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    dead: dict[str, int] = field(default_factory=dict)

    def remarks(self, layer: int, settings: Settings) -> Iterator[str]:
        if self.rounded:
            yield (
                f"layer {layer}: what goes into {_listed(self.rounded)} was zero throughout; rounded to "
                "nearest"
            )
        if self.dead:
            best = settings.solver == "best"
            what = "rounded their weights to nearest" if best else "zeroed their weights"
            each = [f"{number} of {module}" for module, number in self.dead.items()]
            yield f"layer {layer}: input columns that were zero throughout; {what}: {_listed(each)}"
        if self.fallbacks:
            yield (
                f"layer {layer}: {count(len(self.fallbacks), 'linear')} rounded to nearest, because the "
                f"Hessian cannot be factorized: {_listed(self.fallbacks)}"
            )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


@dataclass(frozen=True)
class LinearQuantizer:
    """Place where the linears of a layer are solved: a device, which the layer is on. `samples` is what
    llm-compressor divides Hessians by, `tokens` how many all samples have, `chunk` how many run through
    the layer together at the most."""

    layer: Layer
    device: str
    budget: Budget
    settings: Settings
    reader: Weights
    clock: Clock
    samples: int
    tokens: int
    chunk: int

    def quantize(
        self, linears: Sequence[Linear], probe: Callable[[], None], run: Callable[[], None]
    ) -> Iterator[Matrix | Remark]:
        """Solve for the codes of a layer's linears, and put what those of the first target mean in the
        place of the weights once all are solved. `run` runs the layer on all samples, `probe` on
        some."""
        sets = sets_of(self.layer, linears, probe)
        groups = rounds(
            self.budget, self.device, [[one.shape for one in some] for some in sets],
            schemes=len(linears[0].schemes), solver=self.settings.solver, chunk=self.chunk,
            keeps=self.layer.sparse,
            layer_bytes=sum(p.nbytes for p in self.layer.module.parameters()),
        )  # fmt: skip
        noted = LinearRemarks()
        meant: dict[str, torch.Tensor] = {}
        for group in groups:
            some = [sets[number] for number in group]
            with self.clock("hessian", self.device):
                counted = inputs_counted(
                    self.layer, some, run, tokens=self.tokens, device=self.device
                )
            for members in some:
                yield from self._solve(members, counted.pop(0), meant, noted)
            trim()
        for inside, weight in meant.items():
            held = self.layer.module.get_submodule(inside).weight
            held.data = weight.to(held.dtype)
        yield from map(Remark, noted.remarks(self.layer.number, self.settings))

    def _solve(
        self,
        members: Sequence[Linear],
        inputs: InputStats,
        meant: dict[str, torch.Tensor],
        noted: LinearRemarks,
    ) -> Iterator[Matrix]:
        """Linears that share an input, one after the other: their rows do not depend on one another, and
        this is what llm-compressor does."""
        import torch

        silent = not bool(inputs.absmax.any())
        dead = int((inputs.hessian.diagonal() == 0).sum())
        for one in members:
            with self.clock("read", self.device):
                weight, sources = self._weight(one)
            made: list[Quantized] = []
            with self.clock("solve", self.device), torch.no_grad():
                for scheme in one.schemes:
                    if silent:  # a matrix of zeros to llm-compressor's solver, which says nothing
                        made.append(rounded(weight, scheme, self.settings))
                        continue
                    hessian = inputs.hessian.div(self.samples)[None]
                    results, failed = solved([weight], hessian, scheme, self.settings)
                    made += results
                    if failed[0]:
                        noted.fallbacks.append(one.module)
            if silent:
                noted.rounded.append(one.module)
            elif dead:
                noted.dead[one.module] = dead
            meant[one.inside] = made[0].weight
            codes = [part.numpy() for part in made]
            yield Matrix(self.layer.number, None, one.module, codes, sources)

    def _weight(self, one: Linear) -> tuple[torch.Tensor, Sequence[Mapping[str, Any]]]:
        """The matrix as the checkpoint has it, BF16, which must be the one that the layer ran with."""
        import torch

        matrix, sources = self.reader.matrix(one.module, one.weight)
        weight = matrix.to(self.device)
        if not torch.equal(
            weight, self.layer.module.get_submodule(one.inside).weight.to(weight.dtype)
        ):
            raise RunError(
                f"{one.module}: {type(self.layer.module).__name__} computes with another matrix than "
                "the checkpoint stores under that name; ignore it, or round it to nearest"
            )
        return weight, sources
