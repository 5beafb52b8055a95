"""The source of a folder from which experts were left out, as the folder should have it: by the lists of
qconvert.json, computed again from names and shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.names import experts_module, parse, split_parameter
from qconvert.core.roles import EXPERT_COUNTS, Kind
from qconvert.validators.reading.matrices import Key, Matrix, plain_name

EXPERTS_RULE = "prune: of experts that are left out"
ROWS_RULE = "prune: rows of experts that are left out"
# Beside experts, what may have a number for each of them.
_MAY_CHOOSE = (Kind.ROUTER, Kind.BUFFER, Kind.UNKNOWN)


@dataclass(frozen=True, eq=False)
class Pruned:
    """The source, and the experts of each layer that stay, draft layers numbered on."""

    source: Checkpoint
    kept: Mapping[int, tuple[int, ...]]
    modules: frozenset[str]  # those that hold experts, with the source's names

    def name(self, name: str) -> str | None:
        """Name of a source tensor in the folder, None for an expert's that goes."""
        expert, kept = parse(name).expert, self._kept(name)
        if expert is None or kept is None or not self.source.role_index.kind(name).routed:
            return name
        if expert not in kept:
            return None
        before, after = name.split(f".experts.{expert}.", 1)
        return f"{before}.experts.{kept.index(expert)}.{after}"

    def rows(self, name: str) -> tuple[int, ...] | None:
        """Entries that stay of a source tensor with one for each expert, None for any other tensor."""
        kept, index = self._kept(name), self.source.role_index
        shape, kind = self.source[name].type.shape, index.kind(name)
        of_each = shape[:1] == (index.dims.num_experts,) or shape == (1, index.dims.num_experts)
        if kept is None or not of_each or parse(name).expert is not None:
            return None
        inside = any(name.startswith(f"{module}.") for module in self.modules)
        chooses = kind in _MAY_CHOOSE or (
            kind is Kind.LINEAR and ("router" in name or "bias" in name)
        )
        return kept if kind.routed or (inside and chooses and "share" not in name) else None

    def matrices(self, found: Mapping[Key, Matrix]) -> dict[Key, Matrix]:
        """The source's matrices under their keys in the folder, those that go left out, and rows of
        routers as they stay."""
        made: dict[Key, Matrix] = {}
        for key, matrix in found.items():
            kept = self._kept(matrix.tensor)
            role, layer, expert, parameter = key
            if kept is None:
                made[key] = matrix
            elif expert is not None:
                if expert in kept:
                    new = kept.index(expert)
                    key = role, layer, new, parameter
                    made[key] = replace(matrix, key=key, expert=new)
            elif (name := self.name(matrix.tensor)) is None:
                continue
            elif name != matrix.tensor:  # of a model that no family describes
                key = plain_name(split_parameter(name)[0]), layer, None, parameter
                made[key] = replace(matrix, key=key)
            elif (rows := self.rows(matrix.tensor)) is None:
                made[key] = matrix
            else:
                made[key] = _cut(matrix, rows, self.source.role_index.dims.num_experts)
        return made

    def setting(self, name: str, value: Any) -> Any:
        """Value that the folder's config should have where the source's has this one."""
        before = self.source.role_index.dims.num_experts
        if name in EXPERT_COUNTS and value == before:
            return len(next(iter(self.kept.values())))
        return value

    def _kept(self, name: str) -> tuple[int, ...] | None:
        layer, dims = parse(name).layer, self.source.role_index.dims
        if layer is None:
            return None
        draft = self.source.family.is_mtp(name, dims) and layer < dims.num_layers
        return self.kept.get(layer + dims.num_layers if draft else layer)


def of_each(matrix: Matrix, experts: int) -> Matrix:
    """A vector [1, experts] as a column, as other vectors are read."""
    if matrix.form.weight.type.shape != (1, experts) or matrix.form.columns == 1:
        return matrix
    return replace(matrix, form=replace(matrix.form, rows=experts, columns=1), runs=((0, experts),))


def _cut(matrix: Matrix, rows: tuple[int, ...], experts: int) -> Matrix:
    matrix = of_each(matrix, experts)
    each = matrix.form.rows // experts
    return replace(matrix, runs=tuple((row * each, (row + 1) * each) for row in rows))


@lru_cache(maxsize=2)  # several validators need it
def pruned(checkpoint: Checkpoint, source: Checkpoint) -> Pruned | None:
    """The source as a folder should have it, None for a folder with all experts, or whose lists say
    nothing."""
    kept: dict[int, tuple[int, ...]] = {}
    for step in (checkpoint.manifest or {}).get("passes", ()):
        options = step.get("options") if step.get("name") == "prune" else None
        lists = options.get("keep") if isinstance(options, Mapping) else None
        for layer, numbers in lists.items() if isinstance(lists, Mapping) else ():
            if not (layer.isdecimal() and isinstance(numbers, list)) or not numbers:
                return None
            before = kept.get(int(layer), tuple(range(source.role_index.dims.num_experts)))
            if any(type(n) is not int or not 0 <= n < len(before) for n in numbers):
                return None
            kept[int(layer)] = tuple(before[n] for n in numbers)
    if not kept:
        return None
    routed = (name for name in source if source.role_index.kind(name).routed)
    found = frozenset(_around(name) for name in routed)
    return Pruned(source, kept, found)


def _around(name: str) -> str:
    """The module that holds a layer's experts and its router."""
    at = experts_module(name) or split_parameter(name)[0]
    return at.rpartition(".")[0]
