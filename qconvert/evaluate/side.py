"""One of the two models that are compared: its plan, its layers, and its routed experts, in whatever
form they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from qconvert.calibrate.clock import Clock
from qconvert.calibrate.layers import Layers
from qconvert.calibrate.memory import Budget as CalibrationBudget
from qconvert.calibrate.reading import Weights
from qconvert.calibrate.settings import Settings
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import CheckpointError
from qconvert.evaluate.model import Whole
from qconvert.formats.fp8.decode import WEIGHT_DTYPES
from qconvert.formats.mx.format import stacks
from qconvert.formats.registry import encoded
from qconvert.models.experts import Projection, check_described, routed_experts
from qconvert.passes.dequant import Dequant
from qconvert.plan.plan import Plan, run_passes
from qconvert.run.files import Files
from qconvert.run.reader import Reader
from qconvert.validation.runner import NotChecked
from qconvert.validators.amx.reading import Block, sound_block
from qconvert.validators.amx.reading import weights as amx_weights
from qconvert.validators.reading.experts import Kind

if TYPE_CHECKING:
    import torch


class Experts(Protocol):
    """Routed experts of a model."""

    def matrix(self, layer: int, expert: int, kind: str) -> torch.Tensor:
        """One of PROJECTIONS, BF16 [rows, columns]."""


@dataclass(frozen=True)
class StoredExperts:
    """Those of a checkpoint, decoded as every conversion decodes them."""

    found: Mapping[tuple[int, int, str], Projection]
    weights: Weights

    def matrix(self, layer: int, expert: int, kind: str) -> torch.Tensor:
        one = self.found[layer, expert, kind]
        return self.weights.matrix(one.module, one.weight)[0]


@dataclass(frozen=True)
class AmxExperts:
    """Those of a folder for CPU kernels, read as the validators read them: no conversion starts there.
    Their float32 products are rounded to BF16."""

    block: Block
    checkpoint: Checkpoint
    reader: Reader

    def matrix(self, layer: int, expert: int, kind: str) -> torch.Tensor:
        import torch

        name = cast(Kind, kind.removesuffix("_proj"))
        found, _ = amx_weights(self.block, self.checkpoint, self.reader, layer, name, expert)
        return torch.from_numpy(found).to(torch.bfloat16)


@dataclass(frozen=True)
class Side:
    """A model to be run: `checkpoint` is what was named; `rest` holds all but routed experts, and is the
    same unless those are in a folder of their own (`amx`)."""

    checkpoint: Checkpoint
    rest: Checkpoint
    amx: Block | None
    stored: Plan
    model: Whole

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @property
    def is_sparse(self) -> bool:
        return bool(self.stored.role_index.dims.num_experts)

    @contextmanager
    def opened(
        self, lengths: Sequence[int], folder: Path, devices: Sequence[str]
    ) -> Iterator[Opened]:
        """The model with its files open, and a folder for hidden states."""
        weights = Weights(self.stored)
        amx = None if self.amx is None else Reader(self.checkpoint.shards)
        try:
            experts: Experts | None = None
            if amx is not None and self.amx is not None:
                experts = AmxExperts(self.amx, self.checkpoint, amx)
            elif self.is_sparse:
                found = {
                    (p.layer, p.expert, p.kind): p
                    for p in routed_experts(self.stored).projections
                    if not p.draft
                }
                experts = StoredExperts(found, weights)
            layers = Layers(
                model=self.model, matrices={}, lengths=lengths, targets=(), settings=Settings(),
                folder=folder, budget=CalibrationBudget(0, 0, {}, 0), device=devices[0],
                files=Files(), reader=weights, clock=Clock(),
                experts=self.stored.role_index.dims.num_experts,
            )  # fmt: skip
            yield Opened(self, layers, experts, weights, devices)
        finally:
            weights.close()
            if amx is not None:
                amx.close()


@dataclass(frozen=True)
class Opened:
    """A side at work, on devices of which the first does all but experts."""

    side: Side
    layers: Layers
    experts: Experts | None
    weights: Weights
    devices: Sequence[str]


def side_of(
    checkpoint: Checkpoint, rest: Checkpoint | None = None, *, option: str = "--pair GPU"
) -> Side:
    """The model that a checkpoint holds; `rest` has the layers of one that holds CPU experts alone.

    Raises CheckpointError for a folder of CPU experts without `rest`, or that does not fit it; PlanError
    for a model that cannot be run.
    """
    manifest = checkpoint.manifest or {}
    if "stage" in manifest and len({shard.path.parent for shard in checkpoint.shards}) == 1:
        raise CheckpointError(
            f"{checkpoint.root}: is one pipeline stage: evaluate the folder of all stages, or the "
            "result of join"
        )
    for fact, what in (
        ("draft", "a draft without its model: evaluate the model that it is grafted to"),
        ("trtllm_gen", "prepared for kernels: evaluate what qconvert unprepare makes of it"),
    ):
        if fact in manifest:
            raise CheckpointError(f"{checkpoint.root}: is {what}")
    block = None
    if "amx" in manifest:
        if rest is None:
            raise CheckpointError(
                f"{checkpoint.root}: holds routed experts alone; name the folder with all other layers "
                f"({option})"
            )
        try:
            block = sound_block(checkpoint)
        except NotChecked as error:
            raise CheckpointError(f"{checkpoint.root}: {error}; convert again") from error
    here = rest if rest is not None and block is not None else checkpoint
    stored = Plan.identity(here)
    check_described(stored)
    if block is not None:
        _check_fits(block, stored, checkpoint)
    return Side(checkpoint, here, block, stored, Whole(plain_plan(stored), stored))


def _check_fits(block: Block, rest: Plan, folder: Checkpoint) -> None:
    """Raise CheckpointError where experts cannot belong to a model."""
    dims = rest.role_index.dims
    there = {"experts": dims.num_experts, "hidden size": dims.hidden_size,
             "intermediate size": dims.moe_intermediate_size}  # fmt: skip
    here = {"experts": block.experts, "hidden size": block.hidden,
            "intermediate size": block.intermediate}  # fmt: skip
    for what, wanted in there.items():
        if here[what] != wanted:
            raise CheckpointError(
                f"{folder.root}: {what} is {here[what]}, and {wanted} in {rest.checkpoint.root}; name "
                "the folder that it is served with"
            )
    missing = sorted(set(dims.groups.get("moe", ())) - set(block.layers))
    if missing:
        raise CheckpointError(
            f"{folder.root}: experts of layer {missing[0]} are missing, and {rest.checkpoint.root} has "
            "that layer; name the folder that it is served with"
        )


def plain_plan(stored: Plan) -> Plan:
    """The plan with every encoded weight decoded to BF16, by the ops that `dequant` has."""
    coded = any(one.decoder is not None for _, (one, _) in encoded(stored))
    fp8 = any(output.type.dtype in WEIGHT_DTYPES for output in stored.tensors.values())
    if not coded and not fp8 and not stacks(stored):
        return stored
    return run_passes(stored, (Dequant(),))
