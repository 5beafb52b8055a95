"""One of the two models that are compared: its plan, its layers, and its routed experts, in whatever
form they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from qconvert.calibrate.layers import Layers
from qconvert.calibrate.memory import Budget as CalibrationBudget
from qconvert.calibrate.model import Model
from qconvert.calibrate.progress import Clock
from qconvert.calibrate.reading import Weights
from qconvert.calibrate.settings import Settings
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import CheckpointError, PlanError
from qconvert.formats.base import Stored
from qconvert.formats.fp8.decode import WEIGHT_DTYPES
from qconvert.formats.mx.format import stacks
from qconvert.formats.registry import encoded, read_matrix
from qconvert.layouts.derived.running import CannotRun, experts_in, finished, replaced
from qconvert.models.experts import Projection, check_described, routed_experts
from qconvert.passes.dequant import Dequant
from qconvert.plan.plan import Plan, run_passes
from qconvert.run.work.files import Files
from qconvert.run.work.reader import Reader
from qconvert.validation.runner import NotChecked
from qconvert.validators.amx.reading import Block, sound_block
from qconvert.validators.amx.reading import weights as amx_weights
from qconvert.validators.reading.experts import Kind

if TYPE_CHECKING:
    import torch


# A model that is run to its logits: calibration's, with the final norm and the head. The head is a
# matrix of its own or the embeddings' (tied). It is read some rows at a time, in whatever form it is
# stored, so that neither it nor a row of logits is ever whole in memory.


@dataclass(frozen=True)
class Head:
    """The matrix [vocabulary, H] that makes logits of hidden states, and the module that it is stored
    as."""

    module: str
    stored: Stored

    @property
    def rows(self) -> int:
        return self.stored.rows

    def slice(self, start: int, stop: int, weights: Weights, device: str) -> torch.Tensor:
        """Rows [start, stop), float32."""
        part = self.stored.cut(start, stop)
        return weights.matrix(self.module, part)[0].to(device).float()


class _Outputs:
    """Result of a model without its head: hidden states, and nothing else that anybody asks for."""

    def __init__(self, states: torch.Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, number: int) -> torch.Tensor:
        return (self.last_hidden_state,)[number]

    def __getattr__(self, name: str) -> None:
        return None


class TextModel(Model):
    """The text model of `plan`, whose weights but those of routed experts are numbers, made from
    `stored`, which has them as they are stored; it computes in `dtype` of torch. Raises PlanError as
    Model does."""

    def __init__(self, plan: Plan, stored: Plan, dtype: str = "bfloat16") -> None:
        super().__init__(plan, "sdpa", dtype)
        self._as_stored = stored

    def layer_bytes(self) -> tuple[int, int]:
        """Of the largest layer without routed experts, in memory; and of its largest parameter."""
        sizes = []
        for layer in self._meta:
            experts = experts_in(layer)
            routed = set() if experts is None else {id(p) for p in experts.parameters()}
            sizes.append([p.nbytes for p in layer.parameters() if id(p) not in routed])
        return max(map(sum, sizes)), max(max(one, default=0) for one in sizes)

    def widest(self) -> int:
        """Outputs of the widest linear layer outside routed experts."""
        return max(
            int(p.shape[0]) for layer in self._meta for p in layer.parameters() if p.dim() == 2
        )

    def finished(self, states: torch.Tensor, weights: Weights) -> torch.Tensor:
        """Return what goes into the head [B, T, H], of the last layer's result. Raises PlanError for a
        class that does more than a norm of each token."""
        self._fill_around_layers(str(states.device), weights)
        try:
            found: torch.Tensor = finished(self._decoder, states)
        except (CannotRun, RuntimeError) as error:
            raise PlanError(
                f"{error}, so its logits cannot be computed; evaluate hidden states alone "
                "(--first-layers N)"
            ) from error
        return found

    @cached_property
    def head(self) -> Head:
        """Raises PlanError for a class without one, or with one that is no matrix alone."""
        import torch

        whole = self._class.model
        made = whole.get_output_embeddings()
        if not isinstance(made, torch.nn.Linear) or made.bias is not None:
            raise PlanError(
                f"{type(whole).__name__}: expected a head that is a matrix without bias, found "
                f"{type(made).__name__}; evaluate hidden states alone (--first-layers N)"
            )
        name = next(n for n, p in whole.named_parameters() if p is made.weight)
        if name not in self._sources and self._ties(whole):
            inputs = self._decoder.module.get_input_embeddings()
            name = self._decoder.name + self._name_of(inputs)
        _, module = self._stored(name)
        stored, _ = read_matrix(self._as_stored, module)
        if stored.columns != self.config.hidden_size:
            raise PlanError(
                f"{module}: expected {self.config.hidden_size} columns by the config's hidden_size, "
                f"found {stored.columns}"
            )
        return Head(module, stored)

    def _ties(self, whole: Any) -> bool:
        return bool(
            getattr(whole.config, "tie_word_embeddings", False)
            or getattr(self.config, "tie_word_embeddings", False)
        )

    def shaped(self, logits: torch.Tensor) -> torch.Tensor:
        """Return what the class makes of its head's result [T, V]: a scale or a cap, in some; itself, in
        most."""
        import torch

        whole = self._class.model
        base = getattr(whole, whole.base_model_prefix)
        states = torch.zeros(1, logits.shape[0], self.config.hidden_size, device=logits.device)
        with ExitStack() as stack:
            stack.enter_context(replaced(base, lambda *_, **__: _Outputs(states)))
            stack.enter_context(
                replaced(whole.get_output_embeddings(), lambda *_, **__: logits[None])
            )
            stack.enter_context(torch.no_grad())
            made: torch.Tensor = whole(inputs_embeds=states, use_cache=False).logits[0]
        return made

    @cached_property
    def shapes(self) -> bool:
        """Return whether `shaped` does anything. Raises PlanError where it is not done to each logit
        alone."""
        import torch

        probe = torch.linspace(-60, 60, 128).reshape(2, 64)
        try:
            made = self.shaped(probe)
            parts = torch.cat([self.shaped(probe[:, :10]), self.shaped(probe[:, 10:])], 1)
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            # Whatever a class raises where its parts are not called as everywhere else.
            raise PlanError(
                f"{type(self._class.model).__name__} does not make logits of hidden states alone "
                f"({error}); evaluate hidden states (--first-layers N)"
            ) from error
        if made.shape != probe.shape or not torch.equal(made, parts):
            raise PlanError(
                f"{type(self._class.model).__name__} makes logits that depend on one another; evaluate "
                "hidden states alone (--first-layers N)"
            )
        return not torch.equal(made, probe)


# Rows [T, N] as a runtime that quantizes activations sees them.
Rounds = Callable[["torch.Tensor"], "torch.Tensor"]


READING = 8  # threads that read and decode experts, at most


class Experts(Protocol):
    """Routed experts of a model. `threads`: as many may ask at once."""

    @property
    def threads(self) -> int: ...

    def matrix(self, layer: int, expert: int, kind: str) -> torch.Tensor:
        """One of PROJECTIONS, BF16 [rows, columns]."""


@dataclass(frozen=True)
class StoredExperts:
    """Those of a checkpoint, decoded as every conversion decodes them."""

    found: Mapping[tuple[int, int, str], Projection]
    weights: Weights

    threads = READING

    def matrix(self, layer: int, expert: int, kind: str) -> torch.Tensor:
        one = self.found[layer, expert, kind]
        with self.weights.lent() as weights:
            return weights.matrix(one.module, one.weight)[0]


@dataclass(frozen=True)
class AmxExperts:
    """Those of a folder for CPU kernels, read as the validators read them: no conversion starts there.
    Their float32 products are rounded to BF16."""

    block: Block
    checkpoint: Checkpoint
    reader: Reader
    threads = 1

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
    model: TextModel

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @property
    def is_sparse(self) -> bool:
        return bool(self.stored.role_index.dims.num_experts)

    @contextmanager
    def opened(
        self, lengths: Sequence[int], folder: Path, devices: Sequence[str]
    ) -> Iterator[LoadedSide]:
        """The model with its files open, and a folder for hidden states."""
        weights = Weights(self.stored)
        amx = None if self.amx is None else Reader(self.checkpoint.shards)
        found: dict[tuple[int, int, str], Projection] = {}
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
                model=self.model, matrices={}, lengths=lengths, targets={}, settings=Settings(),
                folder=folder, budget=CalibrationBudget(0, 0, {}, 0), device=devices[0],
                files=Files(), reader=weights, clock=Clock(),
                experts=self.stored.role_index.dims.num_experts,
            )  # fmt: skip
            yield LoadedSide(self, layers, experts, weights, devices, found)
        finally:
            weights.close()
            if amx is not None:
                amx.close()


@dataclass(frozen=True)
class LoadedSide:
    """A side at work, on devices of which the first does all but experts. `projections` are the matrices
    of its routed experts by layer, expert and kind, where a checkpoint of its own has them; `rounds` is
    what a runtime makes of rows before it multiplies them with experts (None: nothing)."""

    side: Side
    layers: Layers
    experts: Experts | None
    weights: Weights
    devices: Sequence[str]
    projections: Mapping[tuple[int, int, str], Projection] = field(default_factory=dict)
    rounds: Rounds | None = None


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
    return Side(checkpoint, here, block, stored, TextModel(plain_plan(stored), stored))


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
