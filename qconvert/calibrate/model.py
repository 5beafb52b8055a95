"""A model as transformers' class for it computes it, one layer in memory at a time.

The class is built without weights (on the meta device); a layer is filled from the checkpoint by the
names of its parameters. What a layer is called with (rotary embedding, mask, positions) comes from the
class's own forward, run over layers that only record their arguments. Routed experts are left out: a
`Tap` in their place keeps their input and returns what it is given. Classes: transformers 5.17.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qconvert.calibrate.reading import Weights
from qconvert.checkpoint.checkpoint import without_quantization
from qconvert.checkpoint.family import text_config
from qconvert.core.errors import PlanError, RunError
from qconvert.core.names import split_parameter
from qconvert.matrices.stored import read_matrix
from qconvert.ops.fp8 import WEIGHT_DTYPES
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
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
}
# Of multi-modal configs' roots; and what would make transformers ask for code from elsewhere.
_NOT_TEXT = ("text_config", "vision_config", "auto_map", "architectures", "dtype", "torch_dtype")
# Stored by some, computed by all.
_COMPUTED = "rotary_emb.inv_freq"
# Stored next to weights and not computed with: shapes of packed weights, scales of activations.
_STALE = (".weight_shape", ".input_scale")


@dataclass(frozen=True, slots=True)
class Routed:
    """What goes into a layer's routed experts: inputs [T, H], experts [T, k] and weights [T, k]."""

    inputs: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor


def _tap(answer: torch.Tensor | None = None) -> Any:
    """A module in place of routed experts: keeps what it is called with in `caught`, and returns
    `answer` [T, H], or zeros where that is None."""
    import torch

    class Tap(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.answer = answer
            self.caught: Routed | None = None

        def forward(
            self, hidden_states: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
        ) -> torch.Tensor:
            self.caught = Routed(hidden_states, experts, weights)
            return torch.zeros_like(hidden_states) if self.answer is None else self.answer

    return Tap()


@dataclass(frozen=True, slots=True)
class Around:
    """What a layer with routed experts computes without them: the sum that the block of experts is
    added to, that block's input (both [B, T, H]), and what the router says of it."""

    residual: torch.Tensor
    block_input: torch.Tensor
    routed: Routed


@dataclass(frozen=True)
class Layer:
    """One decoder layer with its weights. `act` is the experts' activation, None in a dense layer."""

    number: int
    module: Any
    act: Any

    @property
    def sparse(self) -> bool:
        return self.act is not None

    def forward(self, hidden: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
        """A dense layer's result [B, T, H]."""
        import torch

        with torch.no_grad():
            return _states(self.module(hidden, **arguments))

    def around(self, hidden: torch.Tensor, arguments: Mapping[str, Any], *, prove: bool) -> Around:
        """What there is beside the routed experts. Where asked to `prove` it, raises RunError for a
        class whose layer is not `sum + block(norm(sum))`."""
        import torch

        caught: dict[str, torch.Tensor] = {}

        def keep(name: str) -> Any:
            def hook(module: Any, args: Any, kwargs: Any) -> None:
                caught[name] = args[0] if args else kwargs["hidden_states"]

            return hook

        hooks = [
            self.module.post_attention_layernorm.register_forward_pre_hook(
                keep("residual"), with_kwargs=True
            ),
            self.module.mlp.register_forward_pre_hook(keep("block_input"), with_kwargs=True),
        ]
        tap = self.module.mlp.experts
        tap.answer, tap.caught = None, None
        with torch.no_grad():
            whole = _states(self.module(hidden, **arguments))
            for hook in hooks:
                hook.remove()
        found = Around(caught["residual"], caught["block_input"], tap.caught)
        tap.caught = None
        if prove:
            self._prove(whole, found)
        return found

    def _prove(self, whole: torch.Tensor, found: Around) -> None:
        """That the parts make the whole, without routed experts in either."""
        import torch

        inputs = found.routed.inputs
        again = self.joined(found.residual, found.block_input, torch.zeros_like(inputs))
        same_input = torch.equal(inputs.reshape(found.block_input.shape), found.block_input)
        if not torch.equal(whole, again) or not same_input:
            raise RunError(
                f"layer {self.number}: {type(self.module).__name__} is not the sum of its attention and "
                "its experts as transformers 5.17 computes it; calibrate with that version"
            )

    def joined(
        self, residual: torch.Tensor, block_input: torch.Tensor, answer: torch.Tensor
    ) -> torch.Tensor:
        """The layer's result [B, T, H], given what its routed experts answer [T, H]."""
        import torch

        tap = self.module.mlp.experts
        tap.answer = answer
        with torch.no_grad():
            result = residual + _states(self.module.mlp(block_input))
        tap.answer = tap.caught = None
        return result


def _states(result: Any) -> torch.Tensor:
    found: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return found


def _notes() -> Any:
    import torch

    class Notes(torch.nn.Module):
        """A layer that changes nothing and keeps what it is called with."""

        def __init__(self) -> None:
            super().__init__()
            self.arguments: dict[str, Any] = {}

        def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
            self.arguments = arguments
            return hidden_states

    return Notes()


class Model:
    """The text model of a plan's source. Vision towers and draft (MTP) layers are left out.

    Raises PlanError for a model_type that transformers has no class for.
    """

    def __init__(self, plan: Plan, attention: str) -> None:
        import torch
        import transformers

        self._plan = plan
        hf: Any = transformers  # its auto classes are typed for humans
        config = class_config(plan)
        kind = config.pop("model_type", None)
        mapping = hf.models.auto.configuration_auto.CONFIG_MAPPING
        if kind not in mapping:
            raise PlanError(
                f"transformers {hf.__version__} has no class for model_type {kind!r}, so it cannot be "
                "run; round its experts to nearest instead"
            )
        self.config = mapping[kind].from_dict(config)
        with torch.device("meta"):
            whole = hf.AutoModelForCausalLM.from_config(
                self.config, dtype=torch.bfloat16, attn_implementation=attention
            )
        self._inner = whole.model.eval()
        self._full = getattr(whole, "_keep_in_fp32_modules_strict", None) or ()
        self.layers = len(self._inner.layers)
        self._meta = list(self._inner.layers)
        self._inner.layers = torch.nn.ModuleList([_notes() for _ in self._meta])
        self._inner.norm = torch.nn.Identity()
        self._rotary = type(self._inner.rotary_emb)
        self._names = _text_names(plan)
        self._arguments: tuple[object, list[dict[str, Any]]] | None = None

    def embed(self, tokens: Tokens, weights: Weights) -> torch.Tensor:
        """Rows of the embedding [T, H], BF16. Only those that are asked for are read."""
        import numpy as np
        import torch

        name, _ = self._parameter("model.embed_tokens.weight")
        table = self._plan.tensors[name]
        unique, places = np.unique(tokens, return_inverse=True)
        if unique[0] < 0 or unique[-1] >= table.type.shape[0]:
            raise RunError(
                f"token id {unique[0] if unique[0] < 0 else unique[-1]} is outside the vocabulary of "
                f"{table.type.shape[0]}; tokenize with the model's own tokenizer"
            )
        rows = [weights.tensor(name, table.rows(int(i), int(i) + 1)) for i in unique]
        return torch.cat(rows).to(torch.bfloat16)[torch.from_numpy(places.reshape(-1))]

    def arguments(self, batch: int, length: int, device: str) -> list[dict[str, Any]]:
        """What the class calls each layer with for `batch` samples of `length` tokens."""
        import torch

        key = batch, length, device
        if self._arguments is None or self._arguments[0] != key:
            self._arguments = None  # masks are large: two are never held
            self._inner.rotary_emb = self._rotary(self.config).to(device)
            states = torch.zeros(
                batch, length, self.config.hidden_size, dtype=torch.bfloat16, device=device
            )
            with torch.no_grad():
                self._inner(inputs_embeds=states, use_cache=False)
            noted = [layer.arguments for layer in self._inner.layers]
            for layer in self._inner.layers:
                layer.arguments = {}
            self._arguments = key, noted
        return self._arguments[1]

    def layer(self, number: int, weights: Weights, device: str) -> Layer:
        """A layer with its weights but those of routed experts. Raises PlanError where a parameter is
        missing or of another shape, or where the layer has a tensor that the class does not take."""
        import torch

        module = copy.deepcopy(self._meta[number])
        act = None
        if hasattr(module.mlp, "experts"):
            act = _activation(module.mlp.experts, number)
            module.mlp.experts = _tap()
        at = f"model.layers.{number}."
        used: set[str] = set()
        state: dict[str, torch.Tensor] = {}
        for name, wanted in module.state_dict(keep_vars=True).items():
            value, names = self._read(at + name, weights)
            if value.shape != wanted.shape:
                raise PlanError(
                    f"{at + name}: expected {list(wanted.shape)} as transformers' "
                    f"{type(module).__name__} has it, found {list(value.shape)}"
                )
            full = any(part in name for part in self._full)
            state[name] = value.to(device, torch.float32 if full else torch.bfloat16)
            used.update(names)
        self._check_all_used(at, used)
        module.load_state_dict(state, assign=True)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.is_meta:
                raise PlanError(
                    f"{at}{name}: expected it in the checkpoint, found no tensor of that name"
                )
        return Layer(number, module.eval().requires_grad_(False), act)

    def _parameter(self, name: str) -> tuple[str, str]:
        """A parameter's name in the checkpoint, and its module's. Raises PlanError."""
        module, parameter = split_parameter(name)
        tried = [name, f"{module}.weight_packed"] if parameter == "weight" else [name]
        for plain in tried:
            if plain in self._names:
                return self._names[plain], split_parameter(self._names[plain])[0]
        raise PlanError(
            f"{name!r} is missing: transformers' {type(self._inner).__name__} has that parameter; "
            "calibrate the model as it was published"
        )

    def _read(self, name: str, weights: Weights) -> tuple[torch.Tensor, Sequence[str]]:
        stored_name, module = self._parameter(name)
        output = self._plan.tensors[stored_name]
        packed = stored_name.endswith(".weight_packed")
        if packed or output.type.dtype in WEIGHT_DTYPES:
            stored, taken = read_matrix(self._plan, module)
            return weights.matrix(module, stored)[0], taken
        return weights.tensor(stored_name, output), (stored_name,)

    def _check_all_used(self, at: str, used: set[str]) -> None:
        for plain, name in self._names.items():
            if not plain.startswith(at) or name in used or ".mlp.experts." in plain:
                continue
            if not plain.endswith((_COMPUTED, *_STALE)):
                raise PlanError(
                    f"{name!r}: unexpected tensor: transformers' {type(self._inner).__name__} has no "
                    "parameter for it; calibrate the model as it was published"
                )


def class_config(plan: Plan) -> dict[str, Any]:
    """The language model's settings for its class in transformers."""
    found = without_quantization(text_config(plan.config))
    for key in _NOT_TEXT:
        found.pop(key, None)
    kind = found.get("model_type")
    found["model_type"] = _CLASSES.get(str(kind), kind)
    return found


def _text_names(plan: Plan) -> dict[str, str]:
    """Names in the checkpoint of the text model's tensors, by what the text model alone calls them."""
    dims = plan.role_index.dims
    found: dict[str, str] = {}
    for name in plan.tensors:
        place = plan.role_index.places.get(name)
        if plan.family.is_mtp(name, dims) or (place and place.role.name.startswith("vision.")):
            continue
        plain = name
        for old, new in _PREFIXES:
            if name.startswith(old):
                plain = new + name.removeprefix(old)
                break
        found[plain] = name
    return found


def _activation(experts: Any, number: int) -> Any:
    """The activation of a class's routed experts. Raises PlanError where they are not
    down(act(gate(x)) * up(x)) without biases."""
    form = [getattr(experts, name, None) for name in ("has_gate", "has_bias", "is_transposed")]
    if form != [True, False, False] or not experts.is_concatenated:
        raise PlanError(
            f"layer {number}: {type(experts).__name__} is not computed as down(act(gate) * up) without "
            "biases, which alone is calibrated here"
        )
    return copy.deepcopy(experts.act_fn)
