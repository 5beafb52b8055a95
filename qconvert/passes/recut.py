"""recut: a folder of AMX tiles for another number of NUMA nodes, without the model it was made from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, apply, concat
from qconvert.formats.amx.format import BITS, RUNTIME_NAME, Method, check_dims
from qconvert.formats.amx.recut import Recut
from qconvert.passes.amx import FACT
from qconvert.plan.pass_options import options_of
from qconvert.plan.plan import LogEntry, Plan
from qconvert.runtimes.ktransformers import readme

_NAME = re.compile(
    r"blk\.(0|[1-9]\d{0,5})\.ffn_(gate|up|down)_exps\.(0|[1-9]\d{0,5})\.numa\.(0|[1-9]\d{0,3})\."
    r"(weight|scale)"
)
_KINDS = ("gate", "up", "down")
# Facts that hold of the codes, however they are cut.
_KEPT = ("pair", "calibration")
_README = {"README.md": "recut: replaced by how to serve this folder"}


@dataclass(frozen=True, slots=True)
class Tiles:
    """Routed experts in a folder of tiles, by the types of its tensors."""

    method: Method
    numa: int
    hidden: int
    intermediate: int
    experts: int
    layers: tuple[int, ...]

    def types(self, kind: str) -> tuple[TensorType, TensorType]:
        """Codes and scales of a NUMA shard."""
        part = self.intermediate // self.numa
        rows, columns = (self.hidden, part) if kind == "down" else (part, self.hidden)
        codes = rows * columns * BITS[self.method] // 8
        return TensorType("I8", (codes,)), TensorType("F32", (rows,))


@dataclass(frozen=True, slots=True)
class RecutTiles:
    """Cut AMX tiles for another number of NUMA nodes.

    The folder is one that the pass amx made, or kt-kernel's own converter; `numa` is the number. Codes
    move, and are rounded again only in down_proj for fewer nodes than before, or a number that is no
    multiple (formats/amx/recut.py).

    Raises PlanError for a folder that is not one of tiles alone, for a tensor that is missing or of
    another type than the others, and for sizes that the kernels cannot hold.
    """

    name: ClassVar[str] = "recut"

    numa: int

    def __call__(self, plan: Plan) -> Plan:
        found = tiles_of(plan)
        if self.numa == found.numa:
            raise PlanError(
                f"its tiles are cut for {found.numa} NUMA nodes already: use it as it is"
            )
        check_dims(found.method, found.hidden, found.intermediate, self.numa)
        tensors: dict[str, Output] = {}
        for layer in found.layers:
            for kind in _KINDS:
                for expert in range(found.experts):
                    base = f"blk.{layer}.ffn_{kind}_exps.{expert}"
                    shards = list(_shards(plan, found, base, kind))
                    for number, (scale, codes) in enumerate(self._cut(found, kind, shards)):
                        tensors[f"{base}.numa.{number}.scale"] = scale
                        tensors[f"{base}.numa.{number}.weight"] = codes
        if rest := sorted(plan.tensors.keys() - _names(found)):
            raise PlanError(
                f"{rest[0]!r}: expected the tiles of experts alone; leave it out (`drop`)"
            )
        fact = {
            "method": RUNTIME_NAME[found.method],
            "numa": self.numa,
            "rounding": "reference",
            "hidden_size": found.hidden,
            "intermediate_size": found.intermediate,
            "experts": found.experts,
            "layers": list(found.layers),
            **_stated(plan.checkpoint, found),
        }
        matrices = len(found.layers) * found.experts * len(_KINDS)
        entry = LogEntry(
            self.name, options_of(self), matrices, matrices,
            (f"{found.numa} NUMA nodes before",), "expert matrices",
        )  # fmt: skip
        manifest = plan.checkpoint.manifest or {}
        kept = {key: manifest[key] for key in _KEPT if key in manifest}
        dropped = {name: rule for name, rule in _README.items() if name in plan.side_files}
        gpu = "the one that the folder before had"
        return plan.logged(
            entry,
            tensors=tensors,
            side_files=tuple(name for name in plan.side_files if name not in dropped),
            dropped_files={**plan.dropped_files, **dropped},
            new_files={**plan.new_files, "README.md": readme(fact, gpu)},
            facts={**plan.facts, **kept, FACT: fact},
        )

    def _cut(
        self, found: Tiles, kind: str, shards: list[tuple[Output, Output]]
    ) -> list[tuple[Output, Output]]:
        """Scale and codes of each new shard."""
        if kind == "down":
            args = [part for scale, codes in shards for part in (codes, scale)]
            made = apply(Recut(found.method, found.numa, self.numa), *args)
            return list(zip(made[1::2], made[::2], strict=True))
        # Whole blocks of rows, one after another: their bytes are those of the matrix.
        scale, codes = (concat([shard[part] for shard in shards]) for part in range(2))
        return [
            (_part(scale, number, self.numa), _part(codes, number, self.numa))
            for number in range(self.numa)
        ]


def tiles_of(plan: Plan) -> Tiles:
    """Tiles of a folder, by the names and types of its tensors. Raises PlanError for one that has none,
    and where its manifest says something else."""
    places = [match.groups() for name in plan.tensors if (match := _NAME.fullmatch(name))]
    first = next((int(layer) for layer, *_ in places), None)
    names = [f"blk.{first}.ffn_{kind}_exps.0.numa.0.{end}" for kind, end in _ENDS]
    if first is None or any(name not in plan.tensors for name in names):
        raise PlanError(
            "expected a folder of AMX tiles (blk.N.ffn_gate_exps.N.numa.N.weight); of a model, "
            "`qconvert amx` makes them for any NUMA count"
        )
    part, hidden, codes = (plan.tensors[name].type.numel for name in names)
    numa, experts = (1 + max(int(place[at]) for place in places) for at in (3, 2))
    method: Method = "int4" if codes * 2 == part * hidden else "int8"
    layers = tuple(sorted({int(layer) for layer, *_ in places}))
    found = Tiles(method, numa, hidden, part * numa, experts, layers)
    _check_stated(plan.checkpoint, found)
    return found


_ENDS = (("gate", "scale"), ("down", "scale"), ("gate", "weight"))


def _check_stated(checkpoint: Checkpoint, found: Tiles) -> None:
    """Raise PlanError where the manifest does not say what the tensors do."""
    stated = (checkpoint.manifest or {}).get(FACT)
    if stated is None:
        return
    for key, here in (
        ("method", RUNTIME_NAME[found.method]), ("numa", found.numa), ("hidden_size", found.hidden),
        ("intermediate_size", found.intermediate), ("experts", found.experts),
        ("layers", list(found.layers)),
    ):  # fmt: skip
        if stated[key] != here:
            raise PlanError(
                f"qconvert.json: expected {key} to be {here}, as the tensors are, found {stated[key]}; "
                "make the folder again"
            )


def _stated(checkpoint: Checkpoint, found: Tiles) -> Mapping[str, Any]:
    """Facts that stay or are added: the rounding, the NUMA counts before, and the first source."""
    manifest = checkpoint.manifest or {}
    stated, identity = manifest.get(FACT, {}), manifest.get("identity", {})
    before = stated.get("cut_from", {})
    made_from = {key: identity[key] for key in ("source", "source_sample") if key in identity}
    known = {"rounding": stated["rounding"]} if "rounding" in stated else {}
    cut = {**made_from, **before, "numa": [*before.get("numa", ()), found.numa]}
    return {**known, "cut_from": cut}


def _shards(plan: Plan, found: Tiles, base: str, kind: str) -> Iterator[tuple[Output, Output]]:
    """Scale and codes of each NUMA shard of a matrix. Raises PlanError for one that is missing, or of
    another type than it should be."""
    codes, scale = found.types(kind)
    for number in range(found.numa):
        parts = []
        for end, kind_of in (("scale", scale), ("weight", codes)):
            name = f"{base}.numa.{number}.{end}"
            output = plan.tensors.get(name)
            if output is None or output.type != kind_of:
                there = "none" if output is None else str(output.type)
                raise PlanError(
                    f"{name!r}: expected {kind_of} ({RUNTIME_NAME[found.method]}, {found.numa} NUMA "
                    f"nodes, as the first expert has them), found {there}; copy the folder again"
                )
            parts.append(output)
        yield parts[0], parts[1]


def _names(found: Tiles) -> set[str]:
    return {
        f"blk.{layer}.ffn_{kind}_exps.{expert}.numa.{number}.{end}"
        for layer in found.layers
        for kind in _KINDS
        for expert in range(found.experts)
        for number in range(found.numa)
        for end in ("scale", "weight")
    }


def _part(output: Output, number: int, of: int) -> Output:
    size = output.type.shape[0] // of
    return output.rows(number * size, (number + 1) * size)


PASSES = (RecutTiles,)
