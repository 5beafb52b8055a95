"""A layer's experts or MLP, computed with one cause of error at a time, and with all.

Not a validator itself: it has no `VALIDATOR`, so discovery skips it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import TYPE_CHECKING, Literal, get_args

from qconvert.core.errors import PlanError
from qconvert.core.names import split_parameter
from qconvert.validators.model.served import Weights, format_of
from qconvert.validators.reading.experts import KINDS, Kind

if TYPE_CHECKING:
    import torch

    Pair = tuple[torch.Tensor, torch.Tensor]

Cause = Literal["codes", "int8", "linears"]
CAUSES: tuple[Cause, ...] = get_args(Cause)

_TOKENS = 8
_CHOICES = 8  # experts per token, if the config does not state it
_FP8_MAX = 448.0
# Families whose norms hold a value that is added to 1.
_NORMS_FROM_ONE = ("qwen3_5", "qwen3_next")
_EPS = 1e-6


@dataclass(frozen=True)
class Shares:
    """Norms of errors over the norm of the right output: of each cause alone, and of all together."""

    of: Mapping[Cause, float]
    together: float

    @property
    def remains(self) -> float:
        """The error that the causes do not explain: unrelated errors add up by their squares. (Error by
        error they do not: one rounding changes what another rounds.)"""
        return sqrt(max(0.0, self.together**2 - sum(share**2 for share in self.of.values())))


@dataclass(frozen=True, slots=True)
class Rounding:
    """Activations [T, K] in a format, a scale for each token and each run of columns: `first` long
    before gate and up, `second` before down."""

    kind: Literal["int8", "fp8"]
    first: int
    second: int

    def __call__(self, x: torch.Tensor, *, down: bool) -> torch.Tensor:
        import torch

        width = self.second if down else self.first
        runs = [self._run(x[:, at : at + width]) for at in range(0, x.shape[1], width)]
        return torch.cat(runs, 1)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        import torch

        largest = x.abs().amax(1, keepdim=True)
        if self.kind == "int8":
            step = (largest / 127).clamp_min(2.0**-126)
            return (x / step).round() * step
        step = (largest / _FP8_MAX).clamp_min(2.0**-126)
        return (x / step).to(torch.float8_e4m3fn).float() * step


@dataclass(frozen=True, slots=True)
class Way:
    """How matrices are multiplied: with the folder's or the source's weights, and how activations are
    rounded."""

    ours: bool = False
    rounding: Rounding | None = None


_EXACT = Way()
Ways = Mapping[Cause | Literal["all"], Way]


def block_shares(theirs: Weights, ours: Weights, layer: int) -> tuple[str, Shares]:
    """How a layer's experts or MLP are stored, and what each cause does to its output. `theirs` are the
    source's weights. Raises PlanError for unsupported forms."""
    x = hidden_states(theirs, layer, "post_attention_layernorm")
    form, right, wrong = block_outputs(theirs, ours, layer, x)
    size = float(right.double().norm())
    if not isfinite(size):
        raise PlanError(f"layer {layer}: the source's own weights give no finite output")

    def share(cause: Cause | Literal["all"]) -> float:
        off = float((wrong[cause] - right).double().norm())
        return 0.0 if off == 0 else off / size if size else float("inf")

    return form, Shares({cause: share(cause) for cause in CAUSES}, share("all"))


def block_outputs(
    theirs: Weights, ours: Weights, layer: int, x: torch.Tensor
) -> tuple[str, torch.Tensor, Mapping[Cause | Literal["all"], torch.Tensor]]:
    """The outputs of a layer's experts or MLP for inputs x [T, H], float32: with the source's weights,
    and with each cause and all. Raises PlanError."""
    import torch

    at, there = (w.model.prefixes[layer] for w in (ours, theirs))
    names: tuple[Cause | Literal["all"], ...] = (*CAUSES, "all")
    right, wrong = torch.zeros_like(x), {name: torch.zeros_like(x) for name in names}

    def add(made: Mapping[Way, torch.Tensor], ways: Ways, rows: torch.Tensor | slice) -> None:
        right[rows] += made[_EXACT]
        for name in names:
            wrong[name][rows] += made[ways.get(name, _EXACT)]

    form = ""
    if layer in ours.model.moe_layers:
        form = ours.model.expert_format(layer)
        ways = _routed_ways(ours, layer)
        ids, shares = route(x, theirs, layer)
        for expert in sorted(set(ids.flatten().tolist())):  # one expert's matrices at a time
            tokens, choices = (ids == expert).nonzero(as_tuple=True)
            made = _mlp(x[tokens], _experts(theirs, ours, layer, expert), list(ways.values()))
            weight = shares[tokens, choices][:, None]
            add({way: weight * y for way, y in made.items()}, ways, tokens)
    for name in ("mlp", "mlp.shared_expert", "mlp.shared_experts"):
        if f"{at}.{name}.gate_proj.weight" not in ours.model.checkpoint:
            continue
        stored = ours.model.matrix(f"{at}.{name}.gate_proj")
        way = Way(True, _fp8_rounding(ours, format_of(stored)))
        made = _mlp(x, _modules(theirs, ours, f"{there}.{name}", f"{at}.{name}"), [way])
        gate = f"{there}.mlp.shared_expert_gate"
        if name == "mlp.shared_expert" and f"{gate}.weight" in theirs.model.checkpoint:
            weight = (x @ torch.from_numpy(theirs.matrix(gate)).T).sigmoid()
            made = {way: weight * y for way, y in made.items()}
        add(made, {"linears": way, "all": way}, slice(None))
        form = form or format_of(stored)
    if not form:
        raise PlanError(
            f"layer {layer}: expected experts or an MLP in a supported form, found none"
        )
    return form, right, wrong


def attention_error(theirs: Weights, ours: Weights, layer: int) -> float | None:
    """Root mean square, over the linear layers of a layer's attention, of how far each one's output is
    from the result of the source's weights. None if they are the source's and none is FP8. A fused one,
    which the source has in parts, is compared with its own weights."""
    import torch

    at, there = (w.model.prefixes[layer] for w in (ours, theirs))
    same = ours.model.checkpoint.root == theirs.model.checkpoint.root
    x = hidden_states(theirs, layer, "input_layernorm")
    errors = []
    for name, tensor in ours.model.checkpoint.items():
        module, parameter = split_parameter(name)
        inside = module.startswith((f"{at}.self_attn.", f"{at}.linear_attn."))
        if not inside or parameter != "weight" or len(tensor.type.shape) != 2:
            continue
        rounding = _fp8_rounding(ours, format_of(ours.model.matrix(module)))
        if rounding is None and same:
            continue
        own = torch.from_numpy(ours.matrix(module))
        twin = there + module.removeprefix(at)
        known = not same and f"{twin}.weight" in theirs.model.checkpoint
        truth = torch.from_numpy(theirs.matrix(twin)) if known else own
        inputs = x if own.shape[1] == x.shape[1] else _gaussian(own.shape[1], layer)
        right = inputs @ truth.T
        found = (inputs if rounding is None else rounding(inputs, down=False)) @ own.T
        size = float(right.double().norm())
        if 0 < size < inf:
            errors.append(float((found - right).double().norm()) / size)
    return sqrt(sum(e * e for e in errors) / len(errors)) if errors else None


def _routed_ways(ours: Weights, layer: int) -> Ways:
    form = ours.model.expert_format(layer)
    if ours.model.amx is not None:
        block = ours.model.amx[0]
        int8 = Rounding("int8", block.hidden, block.intermediate // block.numa)
        return {"codes": Way(True), "int8": Way(False, int8), "all": Way(True, int8)}
    fp8 = _fp8_rounding(ours, form)
    return {"codes": Way(True), "linears": Way(False, fp8), "all": Way(True, fp8)}


def _fp8_rounding(ours: Weights, form: str) -> Rounding | None:
    """What runtimes do to the activations of a linear layer in this form."""
    if form != "fp8":
        return None
    columns = ours.model.fp8_columns or 1 << 30
    return Rounding("fp8", columns, columns)


def _mlp(
    x: torch.Tensor, read: Callable[[Kind], Pair], ways: Sequence[Way]
) -> dict[Way, torch.Tensor]:
    """down(silu(gate(x)) * up(x)) in each of these ways, and exactly. `read` gives a projection's
    matrix as the source and as the folder has it."""
    import torch

    every = dict.fromkeys((_EXACT, *ways))

    def times(kind: Kind, inputs: Mapping[Way, torch.Tensor]) -> dict[Way, torch.Tensor]:
        source, own = read(kind)
        found = {}
        for way, values in inputs.items():
            if way.rounding is not None:
                values = way.rounding(values, down=kind == "down")
            found[way] = values @ (own if way.ours else source).T
        return found

    gate, up = (times(kind, dict.fromkeys(every, x)) for kind in KINDS[:2])
    inner = {way: torch.nn.functional.silu(gate[way]) * up[way] for way in every}
    return times("down", inner)


def _experts(theirs: Weights, ours: Weights, layer: int, expert: int) -> Callable[[Kind], Pair]:
    def read(kind: Kind) -> Pair:
        import torch

        both = (weights.expert(layer, kind, expert) for weights in (theirs, ours))
        source, own = (torch.from_numpy(matrix) for matrix in both)
        return source, own

    return read


def _modules(theirs: Weights, ours: Weights, there: str, here: str) -> Callable[[Kind], Pair]:
    def read(kind: Kind) -> Pair:
        import torch

        source = torch.from_numpy(theirs.matrix(f"{there}.{kind}_proj"))
        return source, torch.from_numpy(ours.matrix(f"{here}.{kind}_proj"))

    return read


def route(x: torch.Tensor, weights: Weights, layer: int) -> Pair:
    """Experts [T, k] of each token and their weights, by the layer's router: softmax (Qwen),
    or sigmoid with a correction and groups (DeepSeek and GLM; transformers 5.17,
    `DeepseekV3TopkRouter`). If there is no readable router, experts are spread evenly."""
    import torch

    config, dims = weights.model.config, weights.model.checkpoint.role_index.dims
    count = min(int(config.get("num_experts_per_tok") or _CHOICES), dims.num_experts)
    module = f"{weights.model.prefixes[layer]}.mlp.gate"
    if f"{module}.weight" not in weights.model.checkpoint:
        first = torch.arange(count) * dims.num_experts // count
        shift = torch.arange(len(x)) * dims.num_experts // (len(x) * count)
        ids = (first[None, :] + shift[:, None]) % dims.num_experts
        return ids, torch.full(ids.shape, 1 / count)
    logits = x @ torch.from_numpy(weights.matrix(module)).T
    bias = f"{module}.e_score_correction_bias"
    if bias not in weights.model.checkpoint:
        shares, ids = logits.softmax(1).topk(count, 1)
        # Qwen3.5 always normalizes; a config that does not state it is one of those that do.
        scale = shares.sum(1, keepdim=True) if config.get("norm_topk_prob", True) else 1.0
        return ids, shares / scale
    scores = logits.sigmoid()
    wanted = scores + torch.from_numpy(weights.plain(bias))
    groups, kept = (int(config.get(key) or 1) for key in ("n_group", "topk_group"))
    if groups > 1:
        by_group = wanted.view(len(x), groups, -1)
        best = by_group.topk(min(2, by_group.shape[2]), 2).values.sum(2).topk(kept, 1).indices
        out = torch.ones(len(x), groups, dtype=torch.bool).scatter(1, best, value=False)
        wanted = by_group.masked_fill(out[:, :, None], float("-inf")).flatten(1)
    ids = wanted.topk(count, 1).indices
    shares = scores.gather(1, ids)
    if config.get("norm_topk_prob", True):
        shares = shares / (shares.sum(1, keepdim=True) + 1e-20)
    return ids, shares * float(config.get("routed_scaling_factor") or 1.0)


def hidden_states(weights: Weights, layer: int, norm: str) -> torch.Tensor:
    """Inputs [T, H] of a layer's part behind a norm: embeddings of random tokens under that norm, or
    gaussian ones where either is stored in a form that is not read here."""
    import numpy as np
    import torch

    model = weights.model
    embeddings = model.checkpoint.role_index.named("embed_tokens")
    if embeddings is None:
        return _gaussian(model.checkpoint.role_index.dims.hidden_size, layer)
    rows = model.checkpoint[embeddings].type.shape[0]
    ids = np.random.default_rng(layer).integers(0, rows, _TOKENS).tolist()
    try:
        states = np.concatenate([weights.plain(embeddings, n, n + 1) for n in ids])
        scale = weights.plain(f"{model.prefixes[layer]}.{norm}.weight")
    except PlanError:
        return _gaussian(model.checkpoint.role_index.dims.hidden_size, layer)
    x = torch.from_numpy(states)
    x = x * (x.square().mean(1, keepdim=True) + _EPS).rsqrt()
    base = 1.0 if model.checkpoint.family.name in _NORMS_FROM_ONE else 0.0
    return x * (torch.from_numpy(scale) + base)


def _gaussian(columns: int, seed: int) -> torch.Tensor:
    import torch

    return torch.randn(_TOKENS, columns, generator=torch.Generator().manual_seed(seed))
