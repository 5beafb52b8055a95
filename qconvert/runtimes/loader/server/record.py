"""Record of a runtime's class, made by building it and loading numbered tensors: its modules with the
runtime's kinds of layers and sizes, which rows of which tensor each parameter holds, in which order, and
what its loader does with names that lead nowhere."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .serving import Told

# Kinds of layers by the names of the runtimes' classes, the first of a class's ancestors that is here.
_KINDS = {
    "QKVParallelLinear": "qkv", "MergedColumnParallelLinear": "merged",
    "MergedReplicatedLinear": "merged_replicated", "ColumnParallelLinear": "column",
    "RowParallelLinear": "row", "ReplicatedLinear": "replicated", "FusedMoE": "experts",
    "RoutedExperts": "experts", "ParallelLMHead": "head", "VocabParallelEmbedding": "embedding",
}  # fmt: skip
# vLLM's attention over a latent cache, for which some methods of quantization have no scales of a cache.
_LATENT = "MLAAttention"
# Buffers that a class computes.
_COMPUTED = ("rotary", "cos_sin")
# Modules that a runtime puts where another pipeline stage has the real one.
_ABSENT = ("PPMissingLayer", "StageMissingLayer")
# What the forward pass of a stage takes from the one before, in sglang and in vLLM.
_PASSED_ON = frozenset(("pp_proxy_tensors", "intermediate_tensors"))
# What sglang's classes have that may load a shared expert as one more routed expert.
_FUSES_SHARED = ("shared_experts_fusion_disable_reason", "num_fusable_shared_experts")
_SIZES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "qkv": {
        "inputs": ("hidden_size", "input_size"), "heads": ("total_num_heads",),
        "kv_heads": ("total_num_kv_heads",), "head_size": ("head_size",),
        "v_head_size": ("v_head_size",),
    },
    "experts": {
        "routed": ("global_num_experts", "num_experts"), "hidden": ("hidden_size",),
        "inner": ("intermediate_size_per_partition",),
    },
    "head": {"rows": ("org_vocab_size",), "inputs": ("embedding_dim",)},
    "embedding": {"rows": ("org_vocab_size",), "inputs": ("embedding_dim",)},
    "": {"inputs": ("input_size",), "outputs": ("output_sizes", "output_size")},
}  # fmt: skip
# A tensor's numbers lie between two multiples of this, so that a number tells the tensor and the element
# in it, also after a norm's + 1 and after -exp: in the middle half, so that an exp in single precision
# moves none to the next tensor.
_STEP = 2.0**-16
_FROM, _SHARE = 0.25, 0.5
_OFF = 0.25
# How far from an element's place its number may be: as it was, and after an exp in single precision.
_EXACT, _ROUGH = 1e-3, 0.4
# What a class has that states nothing.
_IN_ANY_CLASS = frozenset(
    {"__module__", "__doc__", "__abstractmethods__", "_abc_impl", "__parameters__"}
)
# Runs of rows that are told one by one.
_MANY = 16

Array = np.ndarray[Any, np.dtype[Any]]
Shapes = Mapping[str, tuple[int, ...]]


def spy(base: Any, linear: Any, job: Mapping[str, Any], own: type | None = None) -> Any:
    """A quantization config of the runtime that notes what is asked of it, and quantizes nothing.
    `linear` makes the runtime's method for a layer, None for its own default. The job's `method` is its
    name, and `own` its class where classes look at that; linears that are asked for by a pattern of
    `packed` hold no `weight`."""

    def get_quant_method(self: Any, layer: torch.nn.Module, prefix: str = "") -> Any:
        self.asked[id(layer)] = prefix
        self.held.append(layer)  # another layer would get a freed one's id
        made = linear(layer)
        if made is not None and _is_among(prefix, job["packed"]):
            return _packing(made)
        return made

    def note_renames(self: Any, mapper: Any) -> None:
        self.mappers.append(mapper)

    body = {
        "get_name": lambda self: job["method"],
        "get_supported_act_dtypes": lambda self: [torch.bfloat16, torch.float32],
        "get_min_capability": classmethod(lambda cls: 0),
        "get_config_filenames": staticmethod(list),
        "from_config": classmethod(lambda cls, config: cls()),
        "get_scaled_act_names": lambda self: [],
        "get_cache_scale": lambda self, name: None,
        "get_quant_method": get_quant_method,
        # What classes ask modelopt's config beside its name.
        "is_checkpoint_nvfp4_serialized": True,
        "quantized_layers": (),
        "apply_vllm_mapper": note_renames,
        "apply_weight_name_mapper": note_renames,
    }  # fmt: skip
    kind: Any = type("RecordingConfig", (own or base,), body)
    made = kind.__new__(kind)
    base.__init__(made)
    made.asked, made.held, made.mappers = {}, [], []
    return made


def _is_among(name: str, patterns: Collection[str]) -> bool:
    """Tell whether a name is of a pattern, with `*` for each number; "*" is every name's."""
    return "*" in patterns or re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", name) in patterns


def _packing(method: Any) -> Any:
    """A linear's method that holds the weight under the name of packed codes, and is not the runtime's
    unquantized one, which classes ask about."""

    def create_weights(self: Any, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        method.create_weights(layer, *args, **kwargs)
        _pack(layer)

    def apply(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    base: Any = type(method).__mro__[1]
    made: Any = type("Packed", (base,), {"create_weights": create_weights, "apply": apply})
    return made.__new__(made)


def _pack(layer: torch.nn.Module) -> None:
    layer.register_parameter("weight_packed", layer._parameters.pop("weight"))


def _read_of(model: torch.nn.Module, config: Any, tensors: Any, hidden: Collection[str]) -> Any:
    """Tensors, behind the last of which linears hold no `weight`, as packed ones: what a class does with
    it once all is read then fails."""
    yield from tensors
    for layer in model.modules():
        if hidden and _is_among(config.asked.get(id(layer)) or "", hidden) and _is_linear(layer):
            _pack(layer)


def _is_linear(layer: torch.nn.Module) -> bool:
    plain = _kind(layer) not in ("", "experts", "head", "embedding")
    return plain and "weight" in layer._parameters


def _kind(module: torch.nn.Module) -> str:
    names = (ancestor.__name__ for ancestor in type(module).__mro__)
    return next((_KINDS[name] for name in names if name in _KINDS), "")


def _sizes(module: Any, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, attributes in _SIZES.get(kind, _SIZES[""]).items():
        values = (getattr(module, attribute, None) for attribute in attributes)
        value = next((value for value in values if value is not None), None)
        if value is not None:
            found[name] = list(value) if isinstance(value, list | tuple) else value
    if kind == "experts":
        found["gated"] = _is_gated(module)
    return found


def _is_gated(module: Any) -> bool:
    """Tell whether its first matrix holds gate and up."""
    own = dict(module.named_parameters(recurse=False))
    first, last = (
        next(one.numel() for name, one in own.items() if name.startswith(f"{which}_weight"))
        for which in ("w13", "w2")
    )
    return bool(first == 2 * last)


def modules(model: torch.nn.Module, asked: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """Layers of a kind that the runtime names, and lists of modules; what is left are parameters."""
    for name, module in model.named_modules():
        kind = _kind(module)
        if type(module).__name__ in _ABSENT:
            yield {"name": name, "kind": "absent"}
        elif isinstance(module, torch.nn.ModuleList):
            yield {"name": name, "kind": "list", "length": len(module)}
        elif isinstance(module, torch.nn.ModuleDict) and all(map(str.isdigit, module)):
            first = min(map(int, module), default=0)
            yield {"name": name, "kind": "list", "length": len(module), "first": first}
        elif not kind and id(module) in asked:
            latent = any(one.__name__ == _LATENT for one in type(module).__mro__)
            attention = "latent_attention" if latent else "attention"
            yield {"name": name, "kind": attention, "class": type(module).__name__,
                   "asked": asked[id(module)]}  # fmt: skip
        elif kind:
            own = dict(module.named_parameters(recurse=False))
            bias = next((own[n] for n in ("bias", "w13_bias") if own.get(n) is not None), None)
            yield {
                "name": name, "kind": kind, "class": type(module).__name__,
                "asked": asked.get(id(module)), **_sizes(module, kind), "bias": bias is not None,
                "shapes": {leaf: list(value.shape) for leaf, value in own.items()},
            }  # fmt: skip


def stored(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a folder."""
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as at:
            header = json.loads(at.read(int.from_bytes(at.read(8), "little")))
        header.pop("__metadata__", None)
        found |= {name: tuple(entry["shape"]) for name, entry in header.items()}
    return found


def _numbers(number: int, shape: tuple[int, ...]) -> Array:
    """Elements that tell that they are of tensor `number`, counted from 1, and their place in it."""
    count = max(1, math.prod(shape))
    made: Array = (number + _FROM + _SHARE * (np.arange(count) + _OFF) / count) * _STEP
    return made.reshape(shape)


def numbered(shapes: Shapes) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors whose elements tell their tensor and their place in it."""
    for number, (name, shape) in enumerate(shapes.items(), 1):
        yield name, torch.from_numpy(_numbers(number, shape))


@dataclass(frozen=True)
class _Held:
    """A parameter's numbers with what was done to them undone, and the tensor of each, 0 for none."""

    values: Array
    undone: Array
    tensor: Array


def _held(values: Array, last: int) -> _Held:
    undone = np.where(values >= 1, values - 1, values)
    negative = values < 0
    if negative.any():
        undone[negative] = np.log(-values[negative])
    tensor = np.clip(np.nan_to_num(undone / _STEP), 0, last + 1).astype(np.int64)
    tensor[(tensor < 1) | (tensor > last) | np.isnan(values)] = 0
    return _Held(values, undone, tensor)


def _box(mask: Array) -> list[list[int]]:
    """First and last + 1 of a mask in each dimension."""
    box = []
    for axis in range(mask.ndim):
        others = tuple(other for other in range(mask.ndim) if other != axis)
        at = np.flatnonzero(mask.any(axis=others))
        box.append([int(at[0]), int(at[-1]) + 1])
    return box


def _slices(box: list[list[int]]) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in box)


def _piece(held: _Held, number: int, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Part of one tensor that a parameter holds."""
    mask = held.tensor == number
    into = _box(mask)
    inside = _slices(into)
    piece: dict[str, Any] = {"tensor": name, "into": into}
    first = held.values[inside].flat[0]
    if first < 0 or first >= 1:
        piece["computed"] = "minus exp" if first < 0 else "plus one"
    if not mask[inside].all():
        return piece | {"order": "scattered"}
    count = max(1, math.prod(shape))
    real = (held.undone[inside].reshape(-1) / _STEP - number - _FROM) * count / _SHARE - _OFF
    places = np.rint(real).astype(np.int64)
    if (np.abs(real - places) > (_ROUGH if first < 0 else _EXACT)).any():
        return piece | {"order": "computed"}
    out, left = list[list[int]](), places
    for size in reversed(shape):
        index = left % size
        out.insert(0, [int(index.min()), int(index.max()) + 1])
        left = left // size
    grid = np.arange(count).reshape(shape)[_slices(out)]
    order = _order(places, grid)
    if order == "moved":
        placed, row = places.reshape(mask[inside].shape), count // max(1, shape[0])
        piece |= {"runs": _runs(placed, row), "within": _within(placed, row)}
    return piece | {"out": out, "order": order}


def _runs(places: Array, row: int) -> list[list[int]]:
    """Rows of a tensor in the order in which a parameter holds them, first and last + 1 of each run;
    none where rows are not whole, or are in many pieces."""
    if places.size % row:
        return []
    whole = places.reshape(-1, row)
    if (whole != whole[:, :1] + np.arange(row)).any():
        return []
    rows = whole[:, 0] // row
    ends = [0, *(np.diff(rows) != 1).nonzero()[0] + 1, len(rows)]
    runs = [[int(rows[a]), int(rows[b - 1]) + 1] for a, b in pairwise(ends)]
    return runs if len(runs) <= _MANY else []


def _within(places: Array, row: int) -> int:
    """Rows in the smallest blocks out of which no row is moved, 0 where rows are not whole."""
    if places.size % row:
        return 0
    whole = places.reshape(-1, row)
    if (whole != whole[:, :1] + np.arange(row)).any():
        return 0
    rows = whole[:, 0] // row - whole.min() // row
    at = np.arange(len(rows))
    sizes = (size for size in range(1, len(rows) + 1) if len(rows) % size == 0)
    return next((size for size in sizes if (rows // size == at // size).all()), 0)


def _order(places: Array, grid: Array) -> str:
    """Place of the elements `grid` of a tensor in a parameter."""
    if places.size == 2 * grid.size and (places.reshape(2, -1) == grid.reshape(-1)).all():
        return "twice"
    if grid.size != places.size:
        return "moved"
    if (grid.reshape(-1) == places).all():
        return "same"
    if grid.ndim >= 2 and (grid.swapaxes(-1, -2).reshape(-1) == places).all():
        return "transposed"
    return "moved"


def pieces(value: Array, names: list[str], shapes: Shapes) -> list[dict[str, Any]]:
    """Parts that a parameter holds, tensor by tensor; with what of it is no tensor's."""
    held = _held(value.reshape(value.shape or (1,)), len(names))
    present = [int(n) for n in np.bincount(held.tensor.reshape(-1)).nonzero()[0] if n]
    found: list[dict[str, Any]] = []
    if held.values.ndim >= 3 and len(present) > 1:  # an expert at a time is much faster
        for at, inner in enumerate(held.values):
            one = _held(inner, len(names))
            for number in np.bincount(one.tensor.reshape(-1)).nonzero()[0]:
                if number:
                    piece = _piece(one, int(number), names[number - 1], shapes[names[number - 1]])
                    found.append(piece | {"into": [[at, at + 1], *piece["into"]]})
    else:
        found += [_piece(held, n, names[n - 1], shapes[names[n - 1]]) for n in present]
    unknown = (held.tensor == 0) & ~np.isnan(held.values) & (held.values != 0)
    if unknown.any():
        found.append({"tensor": None, "into": _box(unknown), "order": "computed"})
    return found


def _widen(model: torch.nn.Module) -> None:
    """Make room for numbers, and mark what no byte comes to."""
    for parameter in model.parameters():
        parameter.data = torch.full(parameter.shape, math.nan, dtype=torch.float64)
    for buffer in model.buffers():
        if buffer.is_floating_point() and buffer.numel():
            buffer.data = buffer.data.to(torch.float64)


class _Warned(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def probe(
    model: Any, name: str, shape: tuple[int, ...], *before: str, usual: Collection[str] = ()
) -> str:
    """Answer of a loader to one more tensor: "error", "warn" or "silent"; `before`: names of tensors of
    the same shape that are offered first, of zeros; `usual`: warnings that come with any tensor."""
    ones, zeros = (make(shape, dtype=torch.float64) for make in (torch.ones, torch.zeros))
    try:
        said = _warned(model, ((name, ones), *((one, zeros) for one in before))[::-1])
    except Exception as error:  # what a loader raises is the answer
        return f"error {type(error).__name__}: {str(error)[:160]}"
    said = [line for line in said if line not in usual]
    return f"warn {said[0][:160]}" if said else "silent"


def _warned(model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Warnings of a loader that is offered these tensors, each once."""
    watch = _Warned()
    logging.getLogger().addHandler(watch)
    try:
        done = model.load_weights(iter(tensors))
        if done is not None and not isinstance(done, set | list | tuple | bool):
            for _ in done:
                pass
    finally:
        logging.getLogger().removeHandler(watch)
    return watch.lines


def _usual(model: Any) -> frozenset[str]:
    """Warnings of a loader that is offered nothing: what it lacks then, it lacks with any one tensor."""
    try:
        return frozenset(_warned(model, ()))
    except Exception:  # it takes no empty folder: what it says of one tensor is then all of it
        return frozenset()


def _probe_head(model: Any, parameters: Mapping[str, Any], shapes: Shapes) -> str | None:
    """Answer of a loader to a head beside embeddings that it has no other parameter for: "tied" where it
    writes it into them; None for a class without embeddings."""
    of = {piece["tensor"]: name for name, facts in parameters.items() for piece in facts["pieces"]}
    stored = next((name for name in of if (name or "").endswith(_EMBEDDINGS)), None)
    if stored is None:
        return None
    said = probe(model, "lm_head.weight", shapes[stored], stored)
    written = bool(model.get_parameter(of[stored]).any())
    return "tied" if written and said == "silent" else said


def _renames(mapper: Any) -> dict[str, Any]:
    """Tables of a mapper of names."""
    found = {}
    for key, table in vars(mapper).items():
        if key.startswith("orig_to_new") and table:
            items = table.items() if isinstance(table, Mapping) else table
            pairs = [[getattr(old, "pattern", old), new] for old, new in filter(_is_pair, items)]
            found[key.removeprefix("orig_to_new_")] = pairs
    return found


def _patterns(model: Any, shapes: Shapes) -> list[list[str]]:
    """Patterns by which a class, or one that renames by a function of its own, rewrites tensors' names;
    of the function, what becomes of the last part `scale`."""
    own = getattr(model, "hf_to_vllm_mapper", None)
    if own is not None:
        found: list[list[str]] = _renames(own).get("regex", [])
        return found
    rename = getattr(model, "remap_weight_name_to_dpsk_hf_format", None)
    matrices = [
        name for name, shape in shapes.items() if len(shape) > 1 and name.endswith(".weight")
    ]
    scales = (f"{name.removesuffix('weight')}scale" for name in matrices if rename)
    leaves = {rename(name).rpartition(".")[2] for name in scales} - {"scale"} if rename else set()
    return [[r"\.scale$", f".{leaf}"] for leaf in sorted(leaves)]


_ATTENTION = re.compile(r"(.*\.(?:self_attn|mixer|attn|attention))\.")
# Names that no class has, offered beside a tensor that it has: parameters of quantized forms, a bias.
_LEAVES = ("weight_scale", "weight_scale_inv", "weight_packed", "weight_shape", "weight_zero_point",
           "input_scale", "bias", "k_scale", "g_idx", "qweight")  # fmt: skip
# Names of embeddings of tokens, in classes of all kinds.
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight",
               "embeddings.weight", "tok_embeddings.weight", "embedding.weight")  # fmt: skip
_PLACES = {"qkv": "fused", "merged": "fused", "merged_replicated": "fused", "experts": "experts"}


def places(kinds: Mapping[str, str], parameters: Mapping[str, Any]) -> dict[str, str]:
    """A module of the checkpoint for each kind of place that its tensors go to."""
    found: dict[str, str] = {}
    for name, facts in parameters.items():
        kind = kinds.get(name.rpartition(".")[0], "")
        for piece in facts["pieces"]:
            base, _, leaf = (piece["tensor"] or "").rpartition(".")
            if leaf == "weight":
                place = _PLACES.get(kind, "linear" if kind else "parameter")
                found.setdefault(place, base)
    return found


def probes(
    model: Any,
    at: Mapping[str, str],
    names: list[str],
    lists: Mapping[str, int],
    head: str | None = None,
    *,
    draft: bool = False,
) -> Any:
    """Answers of a loader to names that lead nowhere, by the place where they stand; those of a `draft`
    stand in its own layer, if it has a model's behind it. `head`: the answer to a head."""
    found: dict[str, dict[str, str]] = {}
    offered = partial(probe, model, shape=(1,), usual=_usual(model))
    for place, base in at.items():
        leaves = (leaf for leaf in _LEAVES if f"{base}.{leaf}" not in names)
        found[place] = {leaf: offered(f"{base}.{leaf}") for leaf in leaves}
    layer: str | None = None
    single = {"top": "nothing.weight", "draft": "mtp.layers.0.nothing.weight"}
    inner = next((name for name in names if ".0." in name and "layers" in name), None)
    own = [name for name in names if name.startswith("mtp.layers.") or ".enorm." in name]
    if draft and own:
        single, layer = {}, re.sub(r"(layers\.[0-9]+)\..*", r"\1", own[0])
    elif inner is not None:
        before, _, after = inner.partition(".0.")
        layer, count = f"{before}.0", max(lists.values(), default=0)
        single |= {
            "next_layer": f"{before}.{count}.{after}", "behind": f"{before}.{count + 1}.{after}",
            "rotary": f"{layer}.self_attn.rotary_emb.inv_freq",
        }  # fmt: skip
    if head is not None:
        found["head"] = {"": head}
    if layer is not None:
        base = f"{layer}.nothing"
        found["module"] = {leaf: offered(f"{base}.{leaf}") for leaf in ("weight", *_LEAVES)}
    return found | {place: {"": offered(name)} for place, name in single.items()}


def _is_pair(item: object) -> bool:
    """Tell whether it is an old name and a new one: classes that wrap one of transformers have such."""
    return isinstance(item, tuple) and len(item) == 2


def code_of(kind: type) -> str:
    """The class whose code a class is: its own, or that of the ancestor that it adds nothing to."""
    found = next(one for one in kind.__mro__ if set(vars(one)) - _IN_ANY_CLASS)
    return f"{found.__module__}.{found.__qualname__}"


def record(model: Any, config: Any, job: Mapping[str, Any], told: Told) -> None:
    """Tell all of a built model; `config` is the spy that it was built with."""
    torch.set_num_threads(1)
    shapes = stored(Path(job["folder"]))
    told("class", type(model).__name__)
    told("code", code_of(type(model)))
    told("fuses_shared", any(hasattr(type(model), name) for name in _FUSES_SHARED))
    told("passes_on", not _PASSED_ON.isdisjoint(signature(model.forward).parameters))
    found = [*modules(model, config.asked)]
    told("modules", found)
    told("stored", shapes)
    told("renames", [_renames(mapper) for mapper in config.mappers])
    told("patterns", _patterns(model, shapes))
    told("packed", {key: list(value) for key, value in _packed(model, config).items()})
    told("dtypes", _dtypes(model))
    same: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        same.setdefault(id(parameter), []).append(name)
    told("aliases", [names for names in same.values() if len(names) > 1])
    names = list(shapes)
    if job["load"]:
        _widen(model)
        told("step", "load")
        model.load_weights(_read_of(model, config, numbered(shapes), job["hidden"]))
    told("step", "read")
    parameters: dict[str, dict[str, Any]] = {}
    read = set()
    for name, parameter in model.named_parameters():
        held = pieces(parameter.data.numpy(), names, shapes) if job["load"] else []
        read |= {piece["tensor"] for piece in held}
        parameters[name] = {"shape": list(parameter.shape), "pieces": held}
    lasting = model.state_dict().keys()
    for name, buffer in model.named_buffers() if job["load"] else ():
        private = name.rpartition(".")[2].startswith("_") or any(o in name for o in _COMPUTED)
        if name in lasting and not private and buffer.numel() and buffer.dtype == torch.float64:
            held = [p for p in pieces(buffer.numpy(), names, shapes) if p["tensor"] is not None]
            read |= {piece["tensor"] for piece in held}
            parameters[name] = {"shape": list(buffer.shape), "pieces": held, "buffer": True}
    told("parameters", parameters)
    told("unread", [name for name in names if name not in read])
    if job["probes"]:
        told("step", "probe")
        kinds = {module["name"]: module["kind"] for module in found}
        lists = {module["name"]: module["length"] for module in found if "length" in module}
        at, headless = places(kinds, parameters), "lm_head.weight" not in names and not job["draft"]
        head = _probe_head(model, parameters, shapes) if headless else None
        told("probes", probes(model, at, names, lists, head, draft=job["draft"]))
        told("caches", _takes_scales(model, found, shapes))
    told("step", "done")


def _takes_scales(model: Any, found: Collection[Mapping[str, Any]], names: Collection[str]) -> bool:
    """Tell whether a class takes a scale of keys that a checkpoint has beside their projection; also of
    one without attention."""
    attention = {one["name"] for one in found if one["kind"].endswith("attention")}
    blocks = dict.fromkeys(match[1] for match in map(_ATTENTION.match, names) if match)
    if not attention or not blocks:
        return True
    for name in attention:
        owner = model.get_submodule(name)
        for leaf in ("k_scale", "v_scale"):
            for held in (vars(owner), owner._buffers, owner._parameters):
                held.pop(leaf, None)
            scale = torch.full((), math.nan, dtype=torch.float64)
            owner.register_parameter(leaf, torch.nn.Parameter(scale, requires_grad=False))
    for block in blocks:
        probe(model, f"{block}.k_proj.k_scale", (1,))
    return any(not model.get_parameter(f"{name}.k_scale").isnan() for name in attention)


def _packed(model: Any, config: Any) -> Mapping[str, Any]:
    own: Any = getattr(config, "packed_modules_mapping", None) or getattr(
        model, "packed_modules_mapping", None
    )
    return own or {}


def _dtypes(model: torch.nn.Module) -> dict[str, str]:
    """Types of parameters that are not the model's own."""
    return {
        name: str(parameter.dtype).removeprefix("torch.")
        for name, parameter in model.named_parameters()
        if parameter.dtype != torch.bfloat16
    }
