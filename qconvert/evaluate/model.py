"""A model that is run to its logits: calibration's, with the final norm and the head.

The head is a matrix of its own or the embeddings' (tied). It is read some rows at a time, in whatever
form it is stored, so that neither it nor a row of logits is ever whole in memory.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from qconvert.calibrate.model import Model
from qconvert.calibrate.reading import Weights
from qconvert.core.errors import PlanError
from qconvert.formats.base import Stored
from qconvert.formats.registry import read_matrix
from qconvert.layouts.derived.running import CannotRun, experts_in, finished, replaced
from qconvert.plan.plan import Plan

if TYPE_CHECKING:
    import torch


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


class Whole(Model):
    """The text model of `plan`, whose weights but those of routed experts are numbers, made from
    `stored`, which has them as they are stored. Raises PlanError as Model does."""

    def __init__(self, plan: Plan, stored: Plan) -> None:
        super().__init__(plan, "sdpa")
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
        self._settle(str(states.device), weights)
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
