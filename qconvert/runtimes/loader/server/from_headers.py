"""A load from headers alone: no weights are read, and tensors that are large have a shape and no memory.

torch's dispatch shows every operation. Large tensors are made on torch's meta device, small ones
(scales, norms) on the CPU, because loaders compare and read their values. Which tensor of the folder a
storage is made of, and which bytes of a parameter were written, is noted as operations pass.
"""

from __future__ import annotations

import concurrent.futures
import json
import math
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import held

# Elements of a tensor that still has memory: a scale for each row of a large matrix has fewer.
_SMALL = 1 << 16
# Runs of bytes of one write that are still laid out one by one.
_MOST_RUNS = 1 << 22
# torch's names of the types of safetensors.
DTYPES = {
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "I8": "int8",
    "U8": "uint8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32", "I64": "int64",
    "U64": "uint64", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip

_Region = tuple[int, tuple[int, ...], tuple[int, ...], int]


@dataclass(frozen=True)
class _Kind:
    """Effects of an operation: `view` shares the storage of its argument, `made` has no tensor among its
    arguments, `reads` hands a value to Python; `writes` are the arguments that it writes to."""

    view: bool
    made: bool
    reads: bool
    writes: tuple[int | str, ...]


def _kind_of(func: Any) -> _Kind:
    schema = func._schema
    writes: list[int | str] = []
    for at, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.append(argument.name if argument.kwarg_only else at)
    aliased = [value.alias_info is not None for value in schema.returns]
    takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
    reads = func in (
        torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default,
        torch.ops.aten.is_nonzero.default,
    )  # fmt: skip
    return _Kind(bool(aliased) and all(aliased) and not writes, not takes, reads, tuple(writes))


def _storage(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, which its views share; also on meta, where all addresses are
    0."""
    found: int = tensor.untyped_storage()._cdata
    return found


def _tensors(args: Iterable[Any], named: Mapping[str, Any]) -> list[torch.Tensor]:
    """Tensors among the arguments of an operation, also in lists."""
    found: list[torch.Tensor] = []
    for value in (*args, *named.values()) if named else args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [one for one in value if isinstance(one, torch.Tensor)]
    return found


def _without_memory(
    args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments, each tensor on meta; but for numbers, which stand beside any."""

    def moved(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(moved, value))
        if isinstance(value, torch.Tensor) and not value.is_meta and value.dim():
            size, stride = value.shape, value.stride()
            return torch.empty_strided(size, stride, dtype=value.dtype, device="meta")
        return value

    return tuple(map(moved, args)), {name: moved(value) for name, value in named.items()}


class FromHeaders(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A load of a folder of headers. `seen` are the tensors that were handed to the loader, `used` those
    that were written somewhere or whose value was read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []
        self.used: set[str] = set()
        self._at = ""  # the tensor that the loader was handed last, unless it has had all
        self._kinds: dict[Any, _Kind] = {}
        self._names: dict[int, frozenset[str]] = {}
        self._held: list[torch.Tensor] = []  # a freed storage's identity would be another's
        self._writes: dict[int, set[_Region]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave this class as it is: what torch wraps around it takes longer than most operations."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind_of(func)
        if kind.view:
            return func(*args, **(kwargs or {}))
        named = dict(kwargs or {})
        if named.get("pin_memory"):
            named["pin_memory"] = False
        if kind.made:
            return _make(func, args, named)
        if kind.reads:
            return self._read(func, args)
        if kind.writes:
            return self._write(func, kind, args, named)
        tensors = _tensors(args, named)
        if any(t.is_meta or t.numel() > _SMALL for t in tensors):
            args, named = _without_memory(args, named)
            if "device" in named:
                named["device"] = torch.device("meta")
        elif "device" in named:
            named["device"] = torch.device("cpu")
        result = func(*args, **named)
        names = self._of(tensors)
        if names:
            for value in _tensors((result,), {}):
                self._carry(value, names)
        return result

    def _of(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        """Tensors of the folder that these are made of."""
        found: frozenset[str] = frozenset()
        for tensor in tensors:
            own = self._names.get(_storage(tensor))
            if own:
                found = found | own if found else own
        return found

    def _carry(self, tensor: torch.Tensor, names: frozenset[str]) -> None:
        at = _storage(tensor)
        if at not in self._names:
            self._held.append(tensor)
        self._names[at] = self._names.get(at, frozenset()) | names

    def _read(self, func: Any, args: tuple[Any, ...]) -> Any:
        """A value that Python asks for: of what has none it is what all have, 1, and no comparison
        holds."""
        tensors = _tensors(args, {})
        if tensors[0].dtype is not torch.bool:
            self.used |= self._of(tensors)
        if not any(tensor.is_meta for tensor in tensors):
            return func(*args)
        if func is torch.ops.aten.equal.default:
            return tensors[0].shape == tensors[1].shape
        if tensors[0].dtype is torch.bool or func is torch.ops.aten.is_nonzero.default:
            return False
        return 1.0 if tensors[0].dtype.is_floating_point else 1

    def _write(self, func: Any, kind: _Kind, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        every = _tensors(args, named)
        taken = (args[at] if isinstance(at, int) else named.get(at) for at in kind.writes)
        into = [value for value in taken if isinstance(value, torch.Tensor)]
        if any(value.is_meta for value in every) and not all(value.is_meta for value in every):
            # Shapes are compared, and nothing moves.
            shown, named = _without_memory(args, named)
            func(*shown, **named)
            result: Any = into[0] if len(into) == 1 else tuple(into)
        else:
            result = func(*args, **named)
        for value in every:
            if value is not into[0]:
                self.used |= self._names.get(_storage(value), frozenset())
        for value in into:
            noted = self._writes.get(_storage(value))
            if noted is not None:
                size = value.element_size()
                noted.add(
                    (int(value.storage_offset()) * size, tuple(value.shape), value.stride(), size)
                )
        return result

    # --- What the loader is handed, and what became of it -------------------------------------------

    def begin(self, model: torch.nn.Module) -> None:
        """Note writes to a model's parameters from now on."""
        for tensor in held.parameters(model).values():
            self._held.append(tensor)
            self._writes[_storage(tensor)] = set()

    def handed(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as a loader takes them."""
        for name, tensor in weights:
            self._carry(tensor, frozenset({name}))
            self.seen.append(name)
            self._at = name
            yield name, tensor
        self._at = ""

    def tell(self, model: torch.nn.Module, told: Callable[[str, Any], None]) -> None:
        """Tell what was written, and what was read of the folder."""
        held_now = held.parameters(model)
        for tensor in held_now.values():
            if _storage(tensor) not in self._writes:  # another tensor took its place
                self.used |= self._of([tensor])
        shares = {
            name: self._unwritten(tensor)
            for name, tensor in held_now.items()
            if not held.has_default(name)
        }
        told("shares", {name: share for name, share in shares.items() if share})
        told("unwritten", [name for name, share in shares.items() if share])
        told("unused", [name for name in self.seen if name not in self.used])
        told("last", self._at)
        told("parameters", {
            name: [str(value.dtype).removeprefix("torch."), list(value.shape)]
            for name, value in held.stored(model).items()
        })  # fmt: skip
        sizes = {_storage(t): t.untyped_storage().nbytes() for t in held_now.values()}
        told("nbytes", sum(sizes.values()))

    def _unwritten(self, tensor: torch.Tensor) -> float:
        """The share of a parameter's bytes that nothing was written to."""
        regions = self._writes.get(_storage(tensor))
        if regions is None:
            return 0.0
        first = int(tensor.storage_offset()) * tensor.element_size()
        nbytes = tensor.numel() * tensor.element_size()
        return 1 - _covered(regions, first, first + nbytes) / nbytes


def _make(func: Any, args: Any, named: dict[str, Any]) -> Any:
    """A new tensor: on the CPU where it is small, with zeros where nobody says what it holds."""
    made = func(*args, **{**named, "device": torch.device("meta")})
    if not isinstance(made, torch.Tensor) or made.numel() > _SMALL:
        return made
    small = func(*args, **{**named, "device": torch.device("cpu")})
    return small.zero_() if "empty" in str(func) else small


def _covered(regions: Iterable[_Region], first: int, end: int) -> int:
    """Bytes between two places that lie in some region."""
    starts: list[Any] = []
    ends: list[Any] = []
    for offset, sizes, strides, width in regions:
        begin, run = _runs(offset, sizes, strides, width)
        starts.append(begin)
        ends.append(begin + run)
    if not starts:
        return 0
    low = np.clip(np.concatenate(starts), first, end)
    high = np.clip(np.concatenate(ends), first, end)
    order = np.argsort(low, kind="stable")
    low, high = low[order], np.maximum.accumulate(high[order])
    before = np.concatenate(([first], high[:-1]))
    return int(np.maximum(high - np.maximum(low, before), 0).sum())


def _runs(
    offset: int, sizes: tuple[int, ...], strides: tuple[int, ...], width: int
) -> tuple[Any, int]:
    """A strided region as runs of bytes: where each starts, and their length. Of a region in very many
    runs (every second column of a large matrix) the first of that size stands for all."""
    if 0 in sizes:
        return np.zeros(0, np.int64), 0
    dims = sorted(
        ((stride * width, size) for size, stride in zip(sizes, strides, strict=True)
         if size > 1 and stride), reverse=True,
    )  # fmt: skip
    run = width
    while dims and dims[-1][0] == run:
        run *= dims.pop()[1]
    if math.prod(size for _, size in dims) > _MOST_RUNS:
        return np.array([offset], np.int64), math.prod(sizes) * width
    starts = np.array([offset], np.int64)
    for stride, size in dims:
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts, run


# --- Files of headers -----------------------------------------------------------------------------


class HeaderFile:
    """safetensors' safe_open for a file of which only the header counts."""

    def __init__(self, filename: Any, framework: str = "pt", device: Any = "cpu", **_: Any) -> None:
        with open(filename, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            table = json.loads(file.read(size))
        self._metadata = table.pop("__metadata__", None)
        self._table = table

    def __enter__(self) -> HeaderFile:
        return self

    def __exit__(self, *args: object) -> None:
        """Nothing is open."""

    def keys(self) -> list[str]:
        return sorted(self._table)

    offset_keys = keys

    def metadata(self) -> Any:
        return self._metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor of 1s, or one without memory."""
        entry = self._table[name]
        dtype, shape = getattr(torch, DTYPES[entry["dtype"]]), tuple(entry["shape"])
        if math.prod(shape) > _SMALL:
            return torch.empty(shape, dtype=dtype, device="meta")
        return torch.ones(shape, device="cpu").to(dtype)

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self.get_tensor(name), self._table[name]["dtype"])


class _Slice:
    """safetensors' view of a tensor that is read in parts."""

    def __init__(self, tensor: torch.Tensor, dtype: str) -> None:
        self._tensor, self._dtype = tensor, dtype

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return self._dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]


def read_headers_alone() -> None:
    """Have files opened as HeaderFile by all that is imported, and work of threads done where it is
    asked for: torch's modes hold for one thread. For good: it is called in a process that loads one
    folder."""
    real = sys.modules["safetensors"].safe_open
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("safe_open") is real:
            module.safe_open = HeaderFile  # type: ignore[attr-defined]

    def submit(self: Any, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:  # who asks for the result is told
            future.set_exception(error)
        return future

    concurrent.futures.ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
