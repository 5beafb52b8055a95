"""A model as transformers' class for it computes it, one layer in memory at a time.

The class is built without weights (on the meta device); a layer is filled from the checkpoint by what
transformers' own conversion makes of the published names. What a layer is called with (rotary embedding,
mask, positions) comes from the class's own forward, run over layers that only record their calls
(`layouts/derived/running.py`). A layer is run twice: in the first run its routed experts only keep what
the class's router gives them, in the second they answer. Classes: transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from qconvert.calibrate.kernel_choice import forward_of
from qconvert.calibrate.reading import Weights
from qconvert.core.errors import PlanError, RunError
from qconvert.core.extras import failed_import
from qconvert.core.family import text_config, without_quantization
from qconvert.core.names import KV_SCALES, split_parameter
from qconvert.core.versions import TRANSFORMERS
from qconvert.formats.fp8.decode import WEIGHT_DTYPES
from qconvert.formats.registry import read_matrix
from qconvert.layouts.derived.running import (
    Call,
    CannotRun,
    Decoder,
    around_layers,
    calls,
    decoder_of,
    experts_in,
    settled,
    tapped,
    why_not_run,
)
from qconvert.layouts.derived.transformers_class import (
    CannotBuild,
    Class,
    build,
    read_class,
    untagged,
)
from qconvert.models.experts import STALE
from qconvert.plan.plan import Plan

if TYPE_CHECKING:
    import numpy as np
    import torch

    Tokens = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

# Names of the language model within multi-modal checkpoints, and what it is called alone.
_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))
# Text models that transformers knows by another name, with the same settings and tensors.
_CLASSES = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
}
# Of multi-modal configs' roots; and what would make transformers ask for code from elsewhere.
_NOT_TEXT = ("text_config", "vision_config", "auto_map", "architectures", "dtype", "torch_dtype")
# Stored by some, computed by all.
_COMPUTED = "rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class Routed:
    """Inputs of a layer's routed experts: inputs [T, H], experts [T, k] and weights [T, k]."""

    inputs: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Layer:
    """One decoder layer with its weights but those of routed experts; `experts` is the module of those,
    None in a dense layer."""

    number: int
    module: Any
    experts: Any

    @property
    def sparse(self) -> bool:
        return self.experts is not None

    def forward(self, hidden: torch.Tensor, call: Call) -> torch.Tensor:
        """A dense layer's result [B, T, H]."""
        with forward_of(hidden):
            found: torch.Tensor = call.of(self.module, hidden)
        return found

    def routed(self, hidden: torch.Tensor, call: Call) -> Routed:
        """Return what the layer gives its routed experts. Raises RunError for a class that does not call
        them once."""
        import torch

        caught: list[Routed] = []

        def keep(*given: torch.Tensor) -> torch.Tensor:
            caught.append(Routed(*given))
            return torch.zeros_like(given[0])

        with tapped(self.experts, keep):
            self.forward(hidden, call)
        if len(caught) != 1 or caught[0].inputs.shape[0] != hidden.shape[0] * hidden.shape[1]:
            raise RunError(
                f"layer {self.number}: {type(self.module).__name__} does not give every token to its "
                f"routed experts once; calibrate with {TRANSFORMERS}"
            )
        return caught[0]

    def joined(self, hidden: torch.Tensor, call: Call, answer: torch.Tensor) -> torch.Tensor:
        """The layer's result [B, T, H], given what its routed experts answer [T, H]."""
        with tapped(self.experts, lambda *_: answer):
            return self.forward(hidden, call)

    def middle(self, device: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what the class makes of an expert's gate and up [T, 2I] before down: [T, I]."""
        apply: Callable[[torch.Tensor], torch.Tensor] = (
            copy.deepcopy(self.experts).to(device)._apply_gate
        )
        return apply

    def check(self, made: torch.Tensor, rows: torch.Tensor, gate_up: torch.Tensor,
              down: torch.Tensor) -> None:  # fmt: skip
        """Raise RunError where the class's own experts answer another thing than `made` to `rows`
        [T, H], given one expert's weights [2I, H] and [H, I]."""
        import torch

        alone = copy.deepcopy(self.experts)
        alone.config = copy.deepcopy(alone.config)
        alone.config._experts_implementation = "eager"
        alone.num_experts = 1
        for name, weight in (("gate_up_proj", gate_up), ("down_proj", down)):
            stack = (weight.t() if alone.is_transposed else weight)[None].contiguous()
            setattr(alone, name, torch.nn.Parameter(stack, False))
        zeros = torch.zeros(rows.shape[0], 1, dtype=torch.int64, device=rows.device)
        with forward_of(rows):
            theirs = alone(rows, zeros, torch.ones_like(zeros, dtype=rows.dtype))
        wrong = float((made.float() - theirs.float()).norm())
        if not wrong <= 0.01 * float(theirs.float().norm()):
            raise RunError(
                f"layer {self.number}: {type(self.experts).__name__} does not compute its experts as "
                f"down(act(gate, up)), as classes of {TRANSFORMERS} do; calibrate with that version"
            )


class Model:
    """The text model of a plan's source, which computes in `dtype` of torch. Vision towers and draft
    (MTP) layers are left out.

    Raises PlanError for a model_type that transformers has no class for, and for a class whose layers
    cannot be run one by one.
    """

    def __init__(self, plan: Plan, attention: str, dtype: str = "bfloat16") -> None:
        import torch

        self._plan = plan
        self.dtype: torch.dtype = getattr(torch, dtype)
        whole, alone = _class(plan, attention)
        try:
            self._class: Class = read_class(whole.eval())
        except CannotBuild as error:
            raise PlanError(f"{error}, so it cannot be run a layer at a time") from error
        self._full = getattr(whole, "_keep_in_fp32_modules_strict", None) or ()
        self.config = whole.config.get_text_config()
        if why := why_not_run(whole, dense=True):
            raise PlanError(f"{type(whole).__name__} cannot be run a layer at a time: {why}")
        self._decoder: Decoder = decoder_of(whole)
        self.layers = len(self._decoder.layers)
        self._meta = list(self._decoder.layers)
        self._names = _text_names(plan, _PREFIXES if alone else ())
        self._sources = self._read_names()
        self._around: str | None = None
        self._calls: tuple[object, list[Call]] | None = None

    def embed(self, tokens: Tokens, weights: Weights) -> torch.Tensor:
        """Return what goes into the first layer [T, H]. Only rows of the embedding that are asked
        for are read."""
        return self.embedder([tokens], weights, "cpu")(tokens[None])

    def embedder(
        self, tokens: Sequence[Tokens], weights: Weights, device: str
    ) -> Callable[[Tokens], torch.Tensor]:
        """Return what gives for samples [B, T] of these tokens what goes into the first layer [B T, H].
        Only rows of the embedding that are asked for are read, neighbours in one piece."""
        import numpy as np
        import torch

        inputs = copy.copy(self._decoder.module.get_input_embeddings())
        name, _ = self._stored(self._decoder.name + self._name_of(inputs))
        table = self._plan.tensors[name]
        unique = np.unique(np.concatenate(tokens))
        if unique[0] < 0 or unique[-1] >= table.type.shape[0]:
            raise RunError(
                f"token id {unique[0] if unique[0] < 0 else unique[-1]} is outside the vocabulary of "
                f"{table.type.shape[0]}; tokenize with the model's own tokenizer"
            )
        runs = np.split(unique, np.flatnonzero(np.diff(unique) > 1) + 1)
        rows = [weights.tensor(name, table.rows(int(r[0]), int(r[-1]) + 1)) for r in runs]
        held = torch.cat(rows).to(device, self.dtype)
        inputs._parameters = {"weight": torch.nn.Parameter(held, False)}
        inputs.padding_idx = None
        # Gemma's multiply by a number that is kept as a buffer.
        inputs._buffers = dict(inputs._buffers)
        settled(self._decoder, [inputs])
        for key, buffer in inputs._buffers.items():
            inputs._buffers[key] = None if buffer is None else buffer.to(device)
        self._fill_around_layers(device, weights)

        def embed(samples: Tokens) -> torch.Tensor:
            places = torch.from_numpy(np.searchsorted(unique, samples)).to(device)
            with torch.no_grad():
                states, _ = self._called(inputs(places), first=True)
            found: torch.Tensor = states.flatten(0, 1)
            return found

        return embed

    def calls(self, batch: int, length: int, device: str, weights: Weights) -> list[Call]:
        """Return what the class calls each layer with for `batch` samples of `length` tokens."""
        import torch

        key = batch, length, device
        if self._calls is None or self._calls[0] != key:
            self._calls = None  # masks are large: two are never held
            self._fill_around_layers(device, weights)
            states = torch.zeros(
                batch, length, self.config.hidden_size, dtype=self.dtype, device=device
            )
            self._calls = key, self._called(states)[1]
        return self._calls[1]

    def _called(self, states: torch.Tensor, *, first: bool = False) -> tuple[Any, list[Call]]:
        try:
            return calls(self._decoder, states, first=first)
        except (CannotRun, RuntimeError) as error:
            raise PlanError(f"{error}, so it cannot be run a layer at a time") from error

    def _name_of(self, inputs: Any) -> str:
        """The name of the embedding's weight in the decoder."""
        wanted = inputs.weight
        named = self._decoder.module.named_parameters()
        return next(str(n) for n, p in named if p is wanted)

    def _fill_around_layers(self, device: str, weights: Weights) -> None:
        """Fill what is around the layers, and bring it to a device."""
        if self._around is None:
            modules = around_layers(self._decoder)
            for name, module in modules:
                own = {key for key, _ in module.named_parameters(recurse=False)}
                own |= {key for key, _ in module.named_buffers(recurse=False)}
                for key in sorted(own):
                    full = f"{self._decoder.name}{name}.{key}" if name else self._decoder.name + key
                    if full in self._class.state:
                        held = module._parameters if key in module._parameters else module._buffers
                        held[key] = self._loaded(full, held[key], weights)[0]
            settled(self._decoder, (module for _, module in modules))
        if self._around != device:
            for _, module in around_layers(self._decoder):
                for held in (module._parameters, module._buffers):
                    for key, tensor in held.items():
                        held[key] = None if tensor is None else tensor.to(device)
            self._around = device

    def layer(self, number: int, weights: Weights, device: str) -> Layer:
        """A layer with its weights but those of routed experts. Raises PlanError where a parameter is
        missing or of another shape, or where the layer has a tensor that the class does not take."""
        module = copy.deepcopy(self._meta[number])
        try:
            experts = experts_in(module)
        except CannotRun as error:
            raise PlanError(
                f"layer {number}: {error}, so it cannot be run a layer at a time"
            ) from error
        if experts is not None:
            _check_form(experts, number)
            experts._parameters.clear()
        at = self._decoder.at(number)
        used: set[str] = set()
        state: dict[str, torch.Tensor] = {}
        for name, wanted in module.state_dict(keep_vars=True).items():
            value, names = self._loaded(at + name, wanted, weights)
            state[name] = value.to(device)
            used.update(names)
        self._check_all_used(at, used)
        module.load_state_dict(state, assign=True)
        # What is left is computed by the class, and stored by nobody.
        settled(
            self._decoder, [m for m in module.modules() if any(b.is_meta for b in m.buffers(False))]
        )
        return Layer(number, module.to(device).eval().requires_grad_(False), experts)

    def inside(self, number: int, module: str) -> str:
        """The name within a layer of the class's linear that a module of the checkpoint is. Raises
        PlanError where the class has no such linear."""
        at = self._decoder.at(number)
        for target in self._by_module.get(module, ()):
            inside, parameter = split_parameter(target.removeprefix(at))
            if target.startswith(at) and parameter == "weight":
                held = self._meta[number].get_submodule(inside)
                if _is_linear(held):
                    return inside
        raise PlanError(
            f"{module}: transformers' {type(self._class.model).__name__} has no linear of its own for "
            f"it in layer {number}, so what goes into it is not seen: ignore it, or round it to nearest"
        )

    def linears(self, number: int) -> Iterator[tuple[str, str]]:
        """Linears of the class in a layer, by their name within it, and of each a published module that
        it is, or that is a part of it."""
        at = self._decoder.at(number)
        for name, held in self._meta[number].named_modules():
            if _is_linear(held) and (sources := self._sources.get(f"{at}{name}.weight")):
                yield name, split_parameter(self._names[sources[0][0]])[0]

    @cached_property
    def _by_module(self) -> Mapping[str, list[str]]:
        """Parameters of the class by the published module that alone becomes each."""
        found: dict[str, list[str]] = {}
        for target, sources in self._sources.items():
            for plain, converter, _ in sources:
                if converter is None:
                    found.setdefault(split_parameter(self._names[plain])[0], []).append(target)
        return found

    def _read_names(self) -> Mapping[str, list[tuple[str, Any, str]]]:
        """The published tensors that become each parameter of the class: the name without a prefix, the
        converter (None: it is the parameter) and the converter's pattern for it."""
        found: dict[str, list[tuple[str, Any, str]]] = {}
        for plain in sorted(self._names):
            module, parameter = split_parameter(plain)
            canonical = f"{module}.weight" if parameter == "weight_packed" else plain
            target, converter, source = self._class.read(canonical)
            pattern = "" if converter is None else converter.source_patterns[source]
            found.setdefault(target, []).append((plain, converter, pattern))
            if converter is not None and len(converter.target_patterns) > 1:
                first, *others = converter.target_patterns
                for other in others:
                    found.setdefault(target.replace(first, other), []).append(
                        (plain, converter, pattern)
                    )
        return found

    def _loaded(
        self, name: str, wanted: torch.Tensor, weights: Weights
    ) -> tuple[torch.Tensor, set[str]]:
        """A parameter of the class, and the stored tensors that it was made from. Raises PlanError where
        it is missing or of another shape."""
        import torch

        value, used = self._made(name, weights)
        if value.shape != wanted.shape:
            raise PlanError(
                f"{name}: expected {list(wanted.shape)} as transformers' "
                f"{type(self._class.model).__name__} has it, found {list(value.shape)}"
            )
        # Some classes make a router in float32, whatever the model's dtype.
        full = wanted.dtype == torch.float32 or any(part in name for part in self._full)
        return value.to(torch.float32 if full else self.dtype), used

    def _made(self, name: str, weights: Weights) -> tuple[torch.Tensor, set[str]]:
        sources = self._sources.get(name, [])
        if not sources:
            self._stored(name)
        used: set[str] = set()
        if sources[0][1] is None:
            value, names = self._read(sources[0][0], weights)
            return value, {*names}
        converter = copy.deepcopy(sources[0][1])
        for plain, _, pattern in sources:
            value, names = self._read(plain, weights)
            used.update(names)
            converter.add_tensor(name, plain, pattern, value)
        try:
            made = converter.convert(name, model=self._class.model, config=self.config)
        except (ValueError, KeyError, RuntimeError) as error:
            raise PlanError(
                f"{name}: transformers does not make it of what is there: {error}"
            ) from error
        found = made.get(name)
        if found is None:
            raise PlanError(
                f"{name}: transformers makes only {', '.join(sorted(made))} of its tensors"
            )
        return found[0] if isinstance(found, list) else found, used

    def _stored(self, name: str) -> tuple[str, str]:
        """The stored tensor that is a parameter of the class, and its module. Raises PlanError."""
        for plain, converter, _ in self._sources.get(name, []):
            if converter is None:
                return self._names[plain], split_parameter(self._names[plain])[0]
        raise PlanError(
            f"{name!r} is missing: transformers' {type(self._class.model).__name__} has that parameter; "
            "calibrate the model as it was published"
        )

    def _read(self, plain: str, weights: Weights) -> tuple[torch.Tensor, tuple[str, ...]]:
        name = self._names[plain]
        output, (module, parameter) = self._plan.tensors[name], split_parameter(name)
        if parameter == "weight_packed" or output.type.dtype in WEIGHT_DTYPES:
            stored, taken = read_matrix(self._plan, module)
            return weights.matrix(module, stored)[0], tuple(taken)
        return weights.tensor(name, output), (name,)

    def _check_all_used(self, at: str, used: set[str]) -> None:
        for target, sources in self._sources.items():
            if not target.startswith(at):
                continue
            for plain, _, _ in sources:
                name = self._names[plain]
                if name not in used and not plain.endswith((_COMPUTED, *STALE, *KV_SCALES)):
                    raise PlanError(
                        f"{name!r}: unexpected tensor: transformers' "
                        f"{type(self._class.model).__name__} has no parameter for it; calibrate the "
                        "model as it was published"
                    )


def _class(plan: Plan, attention: str) -> tuple[Any, bool]:
    """The class of the text model where transformers has one alone (true), else that of the whole model;
    on the meta device."""
    import torch
    import transformers

    hf: Any = transformers  # its auto classes are typed for humans
    settings = class_config(plan)
    kind = settings.pop("model_type", None)
    mapping = hf.models.auto.configuration_auto.CONFIG_MAPPING
    if kind not in mapping:
        raise PlanError(
            f"transformers {hf.__version__} has no class for model_type {kind!r}, so it cannot be run; "
            "round its experts to nearest instead"
        )
    # A class of the whole model says what its published names become.
    root = plan.config.get("model_type")
    alone = "text_config" not in plan.config or root in _CLASSES or root not in mapping
    try:
        config = mapping[kind].from_dict(untagged(settings))
        if alone and type(config) in hf.MODEL_FOR_CAUSAL_LM_MAPPING:
            with torch.device("meta"):
                made = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            return _attending(made, attention), True
    except Exception as error:  # whatever a class raises for settings that are no settings of it
        failed = failed_import(error)
        if failed is not None:
            raise PlanError(
                f"transformers {hf.__version__} cannot import its class for model_type {kind!r} here "
                f"({failed}); mend or remove the package that fails"
            ) from error
        said = str(error).strip().replace("\n", " ")
        raise PlanError(
            f"config.json: transformers {hf.__version__} builds no {kind!r} of it: {said}; restore the "
            "file as it was published"
        ) from error
    try:
        whole = build(plan.config)
    except CannotBuild as error:
        raise PlanError(
            f"transformers {hf.__version__} cannot build model_type {kind!r} ({error}), so it cannot be "
            "run; round its experts to nearest instead"
        ) from error
    return _attending(whole, attention), False


def _attending(whole: Any, attention: str) -> Any:
    """The class with an implementation of attention, eager where it has no other."""
    decoder = whole.get_decoder()
    decoder.set_attn_implementation(attention if decoder._supports_sdpa else "eager")
    return whole


def class_config(plan: Plan) -> dict[str, Any]:
    """The language model's settings for its class in transformers."""
    found = without_quantization(text_config(plan.config))
    for key in _NOT_TEXT:
        found.pop(key, None)
    kind = found.get("model_type")
    found["model_type"] = _CLASSES.get(str(kind), kind)
    return found


def _text_names(plan: Plan, prefixes: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Names in the checkpoint of the text model's tensors but those of routed experts, by what the class
    calls them: a text model alone leaves out `prefixes`."""
    index, dims = plan.role_index, plan.role_index.dims
    found: dict[str, str] = {}
    for name in plan.tensors:
        place = index.places.get(name)
        if plan.family.is_mtp(name, dims) or (place and place.role.vision):
            continue
        if index.kind(name).routed:
            continue
        plain = name
        for old, new in prefixes:
            if name.startswith(old):
                plain = new + name.removeprefix(old)
                break
        found[plain] = name
    return found


def _is_linear(module: Any) -> bool:
    import torch

    return isinstance(module, torch.nn.Linear)


def _check_form(experts: Any, number: int) -> None:
    """Raise PlanError for routed experts that are not down(act(gate, up)) without biases."""
    form = [getattr(experts, name, None) for name in ("has_gate", "has_bias", "is_concatenated")]
    if form != [True, False, True] or not hasattr(experts, "_apply_gate"):
        raise PlanError(
            f"layer {number}: {type(experts).__name__} is not computed as down(act(gate, up)) without "
            "biases, which alone is calibrated here"
        )
