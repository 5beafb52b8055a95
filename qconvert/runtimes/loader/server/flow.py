"""Tensors of a checkpoint that reach a parameter, followed through torch's functions while a loader
runs: a tensor that is never copied anywhere was ignored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

# Where bytes of an argument end up in a tensor that is there already, and where they are carried on.
_WRITES = ("copy_", "__setitem__", "fill_")
_CARRIES = (
    "to",
    "contiguous",
    "float",
    "view",
    "reshape",
    "clone",
    "__getitem__",
    "__neg__",
    "item",
)


class Flow:
    """Names of tensors by the storage that holds their bytes. `seen` were handed to the loader, `used`
    were written to some tensor of it."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.used: set[str] = set()
        self._names: dict[int, frozenset[str]] = {}
        self._held: list[torch.Tensor] = []  # a freed storage's address would be another's

    def handed(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as a loader takes them, each with a storage of its own."""
        for name, tensor in weights:
            own = tensor.clone()
            self._held.append(own)
            self._names[own.untyped_storage().data_ptr()] = frozenset({name})
            self.seen.append(name)
            yield name, own

    @property
    def unused(self) -> list[str]:
        return [name for name in self.seen if name not in self.used]

    def install(self) -> None:
        """Follow from now on. For good: it is called in a process that loads one folder."""
        for name in _WRITES:
            setattr(torch.Tensor, name, self._writing(getattr(torch.Tensor, name)))
        for name in _CARRIES:
            real = getattr(torch.Tensor, name)
            setattr(torch.Tensor, name, self._carrying(real, ends=name == "item"))
        joined: Any = torch
        joined.cat = self._carrying(torch.cat, ends=False)
        joined.exp = self._carrying(torch.exp, ends=False)

    def _of(self, value: object) -> frozenset[str]:
        if isinstance(value, list | tuple):
            return frozenset().union(*map(self._of, value))
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return frozenset()
        if value.device.type == "meta":
            return frozenset()
        return self._names.get(value.untyped_storage().data_ptr(), frozenset())

    def _writing(self, real: Any) -> Any:
        def write(this: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            for arg in args:
                self.used |= self._of(arg)
            return real(this, *args, **kwargs)

        return write

    def _carrying(self, real: Any, *, ends: bool) -> Any:
        def carry(first: Any, *args: Any, **kwargs: Any) -> Any:
            result = real(first, *args, **kwargs)
            names = self._of(first)
            if names and ends:
                self.used |= names
            elif names and isinstance(result, torch.Tensor):
                where = result.untyped_storage().data_ptr()
                if where not in self._names:
                    self._held.append(result)
                    self._names[where] = names
            return result

        return carry
