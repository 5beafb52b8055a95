"""What a runtime's class is, told by building it and loading numbered tensors: its modules with the
runtime's kinds of layers and sizes, which rows of which tensor each parameter holds, in which order, and
what its loader does with names that lead nowhere."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
# Modules that a runtime puts where another pipeline stage has the real one.
_ABSENT = ("PPMissingLayer", "StageMissingLayer")
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
# in it, also after a norm's + 1 and after -exp.
_STEP = 2.0**-16
_OFF = 0.25
# How far from an element's place its number may be: as it was, and after an exp in single precision.
_EXACT, _ROUGH = 1e-3, 0.4

Array = np.ndarray[Any, np.dtype[Any]]
Shapes = Mapping[str, tuple[int, ...]]


def spy(base: type, linear: Any) -> Any:
    """A quantization config of the runtime that notes what is asked of it, and quantizes nothing.
    `linear` makes the runtime's method for a layer, None for its own default."""

    def get_quant_method(self: Any, layer: torch.nn.Module, prefix: str = "") -> Any:
        self.asked[id(layer)] = prefix
        self.held.append(layer)  # another layer would get a freed one's id
        return linear(layer)

    def note_renames(self: Any, mapper: Any) -> None:
        self.mappers.append(mapper)

    body = {
        "get_name": lambda self: "recorded",
        "get_supported_act_dtypes": lambda self: [torch.bfloat16, torch.float32],
        "get_min_capability": classmethod(lambda cls: 0),
        "get_config_filenames": staticmethod(lambda: []),
        "from_config": classmethod(lambda cls, config: cls()),
        "get_scaled_act_names": lambda self: [],
        "get_quant_method": get_quant_method,
        "apply_vllm_mapper": note_renames,
        "apply_weight_name_mapper": note_renames,
    }  # fmt: skip
    made = type("RecordingConfig", (base,), body)()
    made.asked, made.held, made.mappers = {}, [], []
    return made


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
    """Whether its first matrix holds gate and up."""
    first, second = module.w13_weight.shape, module.w2_weight.shape
    return 2 * sorted(second[1:])[0] in first[1:] and first.numel() == 2 * second.numel()


def modules(model: torch.nn.Module, asked: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """Layers of a kind that the runtime names, and lists of modules; what is left are parameters."""
    for name, module in model.named_modules():
        kind = _kind(module)
        if type(module).__name__ in _ABSENT:
            yield {"name": name, "kind": "absent"}
        elif isinstance(module, torch.nn.ModuleList):
            yield {"name": name, "kind": "list", "length": len(module)}
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
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as at:
            header = json.loads(at.read(int.from_bytes(at.read(8), "little")))
        header.pop("__metadata__", None)
        found |= {name: tuple(entry["shape"]) for name, entry in header.items()}
    return found


def _numbers(number: int, shape: tuple[int, ...]) -> Array:
    """Elements that tell that they are of tensor `number`, counted from 1, and their place in it."""
    count = max(1, math.prod(shape))
    made: Array = (number + (np.arange(count) + _OFF) / count) * _STEP
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
    tensor = np.nan_to_num(undone / _STEP).astype(np.int64)
    tensor[(tensor < 1) | (tensor > last) | np.isnan(values)] = 0
    return _Held(values, undone, tensor)


def _box(mask: Array) -> list[list[int]]:
    """First and last + 1 of a mask in each dimension."""
    box = []
    for axis in range(mask.ndim):
        at = mask.any(axis=tuple(other for other in range(mask.ndim) if other != axis)).nonzero()[0]
        box.append([int(at[0]), int(at[-1]) + 1])
    return box


def _slices(box: list[list[int]]) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in box)


def _piece(held: _Held, number: int, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """What a parameter holds of one tensor."""
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
    real = (held.undone[inside].reshape(-1) / _STEP - number) * count - _OFF
    places = np.rint(real).astype(np.int64)
    if (np.abs(real - places) > (_ROUGH if first < 0 else _EXACT)).any():
        return piece | {"order": "computed"}
    out, left = list[list[int]](), places
    for size in reversed(shape):
        index = left % size
        out.insert(0, [int(index.min()), int(index.max()) + 1])
        left = left // size
    grid = np.arange(count).reshape(shape)[_slices(out)]
    return piece | {"out": out, "order": _order(places, grid)}


def _order(places: Array, grid: Array) -> str:
    """How the elements `grid` of a tensor lie in a parameter."""
    if grid.size != places.size:
        return "moved"
    if (grid.reshape(-1) == places).all():
        return "same"
    if grid.ndim >= 2 and (grid.swapaxes(-1, -2).reshape(-1) == places).all():
        return "transposed"
    return "moved"


def pieces(value: Array, names: list[str], shapes: Shapes) -> list[dict[str, Any]]:
    """What a parameter holds, tensor by tensor; with what of it is no tensor's."""
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


def probe(model: Any, name: str, shape: tuple[int, ...]) -> str:
    """What a loader does with one more tensor: "error", "warning" or "silence"."""
    watch = _Warned()
    logging.getLogger().addHandler(watch)
    try:
        done = model.load_weights(iter([(name, torch.ones(shape, dtype=torch.float64))]))
        if done is not None and not isinstance(done, set | list | tuple | bool):
            for _ in done:
                pass
    except Exception as error:  # what a loader raises is the answer
        return f"error {type(error).__name__}: {str(error)[:160]}"
    finally:
        logging.getLogger().removeHandler(watch)
    return f"warning {watch.lines[0][:160]}" if watch.lines else "silence"


def _renames(mapper: Any) -> dict[str, Any]:
    """Tables of a mapper of names."""
    found = {}
    for key, table in vars(mapper).items():
        if key.startswith("orig_to_new") and table:
            pairs = [[getattr(old, "pattern", old), new] for old, new in table.items()]
            found[key.removeprefix("orig_to_new_")] = pairs
    return found


def record(model: Any, config: Any, job: Mapping[str, Any], told: Told) -> None:
    """Tell all of a built model; `config` is the spy that it was built with."""
    torch.set_num_threads(1)
    shapes = stored(Path(job["folder"]))
    import time
    T=[("built",time.process_time())]
    told("modules", [*modules(model, config.asked)])
    told("asked", sorted(set(config.asked.values())))
    told("renames", [_renames(mapper) for mapper in config.mappers])
    told("packed", {key: list(value) for key, value in _packed(model, config).items()})
    told("dtypes", _dtypes(model))
    same: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        same.setdefault(id(parameter), []).append(name)
    told("aliases", [names for names in same.values() if len(names) > 1])
    _widen(model)
    told("step", "load")
    names = list(shapes)
    T.append(("load",time.process_time()))
    model.load_weights(numbered(shapes))
    told("step", "read")
    T.append(("read",time.process_time()))
    told("T",T)
    parameters, read = {}, set()
    for name, parameter in model.named_parameters():
        found = pieces(parameter.data.numpy(), names, shapes)
        read |= {piece["tensor"] for piece in found}
        parameters[name] = {"shape": list(parameter.shape), "pieces": found}
    told("parameters", parameters)
    told("unread", [name for name in names if name not in read])
    told("step", "probe")
    T.append(("probe",time.process_time()))
    told("T",T)
    told("probes", {name: probe(model, name, tuple(shape)) for name, shape in job["probes"]})
    told("step", "done")
    T.append(("done",time.process_time()))
    told("T",T)


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
