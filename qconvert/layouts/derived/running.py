"""Calls of decoder layers by a class of transformers, and these their routed experts.

A calibration has one layer in memory at a time, and must know this to run them. It is found on the
built class, by running its own forward over layers that only record their calls (transformers).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class CannotRun(Exception):
    """The layers of a class cannot be run one by one."""


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of a layer, but for the hidden states, which come first."""

    rest: tuple[Any, ...]
    named: Mapping[str, Any]

    def of(self, layer: Any, hidden: Any) -> Any:
        """The layer's result [B, T, H]."""
        made = layer(hidden, *self.rest, **self.named)
        return made[0] if isinstance(made, tuple) else made


@dataclass(frozen=True)
class Decoder:
    """The language model of a class without its head: `name` is its own in the class ("" or with a dot
    at the end), `list_name` that of the list of its layers."""

    module: Any
    name: str
    list_name: str

    @property
    def layers(self) -> Any:
        return self.module.get_submodule(self.list_name)

    def at(self, layer: int) -> str:
        """Return what names of a layer's parameters begin with in the class."""
        return f"{self.name}{self.list_name}.{layer}."


def is_marked(module: Any) -> bool:
    """Return whether it holds stacks of experts and says how: transformers'
    `use_experts_implementation`."""
    return hasattr(module, "is_concatenated") and hasattr(module, "has_gate")


def experts_in(layer: Any) -> Any | None:
    """The routed experts of a layer, None in a dense one. Raises CannotRun for several."""
    found = [module for module in layer.modules() if is_marked(module)]
    if len(found) > 1:
        raise CannotRun(f"{type(layer).__name__} has {len(found)} blocks of routed experts")
    return found[0] if found else None


def decoder_of(model: Any) -> Decoder:
    """Find the decoder and its layers: the list that holds the experts, or, in a dense model, the only
    one of as many modules as the config counts layers. Raises CannotRun."""
    from torch.nn import ModuleList

    module = model.get_decoder()
    name = next(name for name, other in model.named_modules() if other is module)
    for path, held in module.named_modules():
        if not is_marked(held):
            continue
        parts = path.split(".")
        for n in range(1, len(parts)):
            if isinstance(module.get_submodule(".".join(parts[:n])), ModuleList):
                return Decoder(module, f"{name}." if name else "", ".".join(parts[:n]))
    count = model.config.get_text_config().num_hidden_layers
    lists = [
        path for path, held in module.named_modules()
        if isinstance(held, ModuleList) and len(held) == count
    ]  # fmt: skip
    if len(lists) == 1:
        return Decoder(module, f"{name}." if name else "", lists[0])
    raise CannotRun(
        f"{type(module).__name__} holds no list of layers with routed experts, and {len(lists)} of "
        f"{count} modules"
    )


def settled(decoder: Decoder, modules: Iterable[Any]) -> None:
    """Give modules on the meta device what no checkpoint holds, as the class makes it on a CPU: rotary
    frequencies. Parameters that are there already stay; others get any values."""
    import torch

    for module in modules:
        meta = False
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    empty = torch.empty_like(tensor, device="cpu")
                    held[name] = (
                        torch.nn.Parameter(empty, False) if held is module._parameters else empty
                    )
                    meta = True
                elif tensor is not None:
                    tensor._is_hf_initialized = (
                        True  # which transformers' initialization leaves alone
                    )
        if meta:
            with torch.no_grad():
                decoder.module._init_weights(module)


def around_layers(decoder: Decoder) -> list[tuple[str, Any]]:
    """The decoder's modules, by name, but for its layers and the embedding of tokens."""
    own = f"{decoder.list_name}."
    inputs = decoder.module.get_input_embeddings()
    return [
        (name, module) for name, module in decoder.module.named_modules()
        if not name.startswith(own) and module is not inputs
    ]  # fmt: skip


class _Stop(Exception):
    """The layers that were asked for have been called."""


@contextlib.contextmanager
def _forwards(modules: Sequence[Any], made: Callable[[int], Any]) -> Iterator[None]:
    """Modules that compute something else for a while: `made` gives the forward of each."""
    for number, module in enumerate(modules):
        module.forward = made(number)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def replaced(module: Any, forward: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """A module that computes something else for a while."""
    return _forwards([module], lambda _: forward)


def calls(decoder: Decoder, states: Any, *, first: bool = False) -> tuple[Any, list[Call]]:
    """Return what the first layer is given for inputs [B, T, H], and what else every layer (the first
    alone, if so asked) is called with. Raises CannotRun where layers are not called in turn, each with
    what the one before it returns."""
    import torch

    layers = list(decoder.layers)
    given: list[Any] = []
    found: list[Call] = []

    def made(number: int) -> Any:
        def forward(*args: Any, **named: Any) -> Any:
            if args:
                hidden, *rest = args
            else:
                hidden, rest = named.pop("hidden_states"), []
            if number != len(found) or (number and hidden is not given[-1]):
                raise CannotRun(_not_in_turn(decoder))
            given.append(hidden)
            found.append(Call(tuple(rest), named))
            if first or number == len(layers) - 1:
                raise _Stop
            # A class takes its layers' results as they are, or the first of several.
            return (hidden,) if returns_tuple else hidden

        return forward

    for returns_tuple in (False, True):
        given.clear()
        found.clear()
        try:
            with _forwards(layers, made), torch.set_grad_enabled(states.requires_grad):
                decoder.module(inputs_embeds=states, use_cache=False)
        except _Stop:
            return given[0], found
        except CannotRun:
            if returns_tuple:
                raise
        except (TypeError, ValueError, IndexError, AttributeError) as error:
            if returns_tuple:  # whatever a class raises for a result that is not its layers'
                raise CannotRun(f"{_not_in_turn(decoder)} ({error})") from error
    raise CannotRun(_not_in_turn(decoder))


def finished(decoder: Decoder, states: Any) -> Any:
    """Return what the decoder makes of its last layer's result [B, T, H]: [B, T, H] after the final
    norm. Raises CannotRun where the class does something else with it."""
    import torch

    layers = list(decoder.layers)
    for returns_tuple in (False, True):
        result = (states,) if returns_tuple else states
        try:
            with _forwards(layers, lambda _: lambda *_, **__: result), torch.no_grad():  # noqa: B023
                made = decoder.module(inputs_embeds=torch.zeros_like(states), use_cache=False)
        except (TypeError, ValueError, IndexError, AttributeError) as error:
            if returns_tuple:  # whatever a class raises for a result that is not its layers'
                raise CannotRun(f"{_not_in_turn(decoder)} ({error})") from error
            continue
        if made.last_hidden_state.shape == states.shape:
            return made.last_hidden_state
    raise CannotRun(_not_in_turn(decoder))


def _not_in_turn(decoder: Decoder) -> str:
    return (
        f"{type(decoder.module).__name__} does not call its layers in turn on hidden states alone"
    )


@contextlib.contextmanager
def tapped(experts: Any, answer: Callable[[Any, Any, Any], Any]) -> Iterator[None]:
    """Routed experts that answer with `answer(hidden [T, H], experts [T, k], weights [T, k])`."""

    def forward(hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        rows = hidden_states.flatten(0, -2)
        made = answer(rows, top_k_index.flatten(0, -2), top_k_weights.flatten(0, -2))
        return made.reshape(hidden_states.shape)

    with _forwards([experts], lambda _: forward):
        yield


def why_not_run(model: Any, *, dense: bool = False) -> str:
    """Why a calibration cannot run the layers of a class one by one, "" if it can, or has no routed
    experts, unless `dense` models are asked about too. The model is on the meta device, and stays there
    but for what is around its layers."""
    import torch

    try:
        if not dense and not any(is_marked(module) for module in model.modules()):
            return ""
        decoder = decoder_of(model)
        width = model.config.get_text_config().hidden_size
        settled(decoder, (module for _, module in around_layers(decoder)))
        states = torch.zeros(1, 8, width, dtype=torch.bfloat16, requires_grad=True)
        given, found = calls(decoder, states)
        if given.shape != states.shape:
            return f"its layers have hidden states of {given.dim()} dimensions, not 3"
        for layer, call in zip(decoder.layers, found, strict=True):
            experts_in(layer)
            for name, value in _values((call.rest, call.named)):
                if torch.is_tensor(value) and value.requires_grad:
                    return f"its layers are called with {name} of the tokens beside hidden states"
                if hasattr(value, "update") and hasattr(value, "get_seq_length"):
                    return "its layers keep a cache between calls"
    except CannotRun as reason:
        return str(reason)
    except RuntimeError:
        return ""  # sizes of a config's defaults need not fit together; a real one's run says more
    return ""


def _values(value: Any, name: str = "more") -> Iterator[tuple[str, Any]]:
    """Values within tuples, lists and dicts, each with the name that it is given by."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _values(inner, str(key))
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _values(inner, name)
    else:
        yield name, value
