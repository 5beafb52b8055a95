"""Adapters by the definition of LoRA, without the code that merges them: what is added to which rows
of which matrix.

peft 0.21, `tuners/lora/layer.py`: W + alpha / r * B A, by alpha / sqrt(r) with use_rslora, and a bias of
B (lora_bias) times the same; transposed of a weight [in, out]; of a parameter of E experts, expert e has
rows [e r, (e + 1) r) of A and every E-th column of B from e on. `tuners/lora/dora.py`: m * V / |V|,
V = W + alpha / r * B A, by rows.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qconvert.checkpoint.adapter import Adapted, Adapter
from qconvert.core.dtypes import DTYPE_BITS
from qconvert.core.graph import Source
from qconvert.core.manifest_keys import MERGED
from qconvert.core.names import parse, split_parameter
from qconvert.validators.reading.decode import floats
from qconvert.validators.reading.matrices import (
    SEGMENTS,
    Matrix,
    Runs,
    gdn_groups,
    plain_name,
    segment_rows,
    segment_runs,
)

if TYPE_CHECKING:
    import numpy as np

    from qconvert.validation.runner import Folder
    from qconvert.validation.workers import Reads

    Doubles = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

_NESTED = re.compile(r"\.(base_layer|modules_to_save|default)(?=\.|$)")
_MARK = re.compile(r"\.(lora_(?:embedding_)?[AB]|lora_magnitude_vector)(\.weight|\.bias)?$")
_OF_EXPERT = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_DENSE = {"gate_up_proj": ("gate_proj", "up_proj"), "qkv_proj": ("q_proj", "k_proj", "v_proj")}


@dataclass(frozen=True, slots=True)
class Added:
    """Addition of one adapter to rows `at` of a matrix, which are rows `of` of its target's. `parts` are
    tensors by the marks in their names, "" of one that is added whole or (`replaces`) takes its
    place."""

    parts: tuple[tuple[str, Source], ...]
    factor: float
    at: Runs
    of: Runs
    rank: int = 0
    expert: int | None = None
    turned: bool = False
    replaces: bool = False

    def apply(self, reader: Reads, values: Doubles, start: int) -> None:
        """Change rows of a matrix, from `start` on."""
        import numpy as np

        lines = _numbers(self.at)
        here = (lines >= start) & (lines < start + values.shape[0])
        mine, theirs = lines[here] - start, _numbers(self.of)[here]
        if not mine.size:
            return
        parts = {mark: _read(reader, source) for mark, source in self.parts}
        if "" in parts:
            whole = parts[""].reshape(-1, values.shape[1])
            values[mine] = whole[theirs] if self.replaces else (
                values[mine] + self.factor * whole[theirs]
            )  # fmt: skip
            return
        a = parts["lora_embedding_A" if "lora_embedding_A" in parts else "lora_A"]
        b = parts["lora_embedding_B" if "lora_embedding_B" in parts else "lora_B"]
        if a.ndim == 3:
            a, b = (one[min(self.expert or 0, len(one) - 1)] for one in (a, b))
        elif self.expert is not None and len(a) > self.rank:
            b = b[:, self.expert :: len(a) // self.rank]
            a = a[self.expert * self.rank : (self.expert + 1) * self.rank]
        product = a.T[theirs] @ b.T if self.turned else b[theirs] @ a
        sums = values[mine] + self.factor * product
        if "lora_magnitude_vector" in parts:
            norm = np.sqrt((sums * sums).sum(axis=1, keepdims=True))
            sums = parts["lora_magnitude_vector"].reshape(-1, 1)[theirs] * sums / norm
        values[mine] = sums


def _numbers(runs: Runs) -> np.ndarray[Any, Any]:
    import numpy as np

    return np.concatenate([np.arange(start, stop) for start, stop in runs])


def _read(reader: Reads, source: Source) -> Doubles:
    import numpy as np

    data = np.empty(source.type.nbytes, np.uint8)
    reader.read(source, 0, data.data)
    found: Doubles = floats(data, source.type.dtype).astype(np.float64).reshape(source.type.shape)
    return found


@dataclass(frozen=True)
class _Target:
    """One module of an adapter, by its plain name, or one tensor of it."""

    module: str
    adapter: Adapter
    scale: float
    parts: Mapping[str, Source]
    parameter: str

    def factor(self, last: str = "") -> tuple[int, float]:
        """Rank and factor, by the patterns of the config."""
        config = self.adapter.config
        name = f"{self.module}.{last}" if last else self.module
        rank = _by_pattern(config.get("rank_pattern"), name) or config.get("r", 8)
        alpha = _by_pattern(config.get("alpha_pattern"), name)
        alpha = config.get("lora_alpha", 8) if alpha is None else alpha
        return rank, self.scale * alpha / (rank**0.5 if config.get("use_rslora") else rank)

    @property
    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs."""
        of = {mark[-1]: source.type.shape for mark, source in self.parts.items() if mark}
        return of["B"][-2], of["A"][-1]

    def added(
        self, at: Runs, of: Runs, *, expert: int | None = None, last: str = "", rows: int = 0
    ) -> Added:
        marks = tuple(self.parts.items())
        if "" in self.parts:
            plain = not self.adapter.config
            return Added(marks, self.scale if plain else 1.0, at, of, replaces=not plain)
        rank, factor = self.factor(last)
        if self.parameter == "bias":  # of B: a part of what is multiplied by the factor
            return Added((("", self.parts["lora_B"]),), factor, at, of)
        fan = bool(self.adapter.config.get("fan_in_fan_out")) or "lora_embedding_A" in self.parts
        return Added(
            marks, factor, at, of, rank, expert, fan or bool(rows and self.sizes[0] != rows)
        )


def _by_pattern(patterns: Any, name: str) -> Any:
    for pattern, value in (patterns or {}).items():
        if re.search(rf"(^|\.)({pattern})$", name):
            return value
    return None


def plain_own(name: str) -> str:
    """The name of a tensor of an adapter without what peft puts into it."""
    return bare(_NESTED.sub("", name.removeprefix("base_model.model.")))


def bare(name: str) -> str:
    """The same below the model that holds it, under whatever prefix."""
    return plain_name(name).removeprefix("model.")


@dataclass(frozen=True)
class Additions:
    """All that adapters add, by module."""

    source: Adapted
    targets: Mapping[str, tuple[_Target, ...]]

    @classmethod
    def of(cls, source: Adapted, manifest: Mapping[str, Any]) -> Additions:
        """Those of a source's adapters, with the scales that the manifest states."""
        records = manifest.get(MERGED, ())
        found: dict[str, list[_Target]] = defaultdict(list)
        class_names = source.family.class_names
        published = {bare(own): bare(name) for name, own in class_names.items()}
        for number, adapter in enumerate(source.adapters):
            scale = float(records[number]["scale"]) if number < len(records) else 1.0
            # Wholes come before products, as peft loads them.
            modules: dict[tuple[str, str, int], dict[str, Source]] = defaultdict(dict)
            for name, tensor in adapter.tensors.items():
                mark, own = _MARK.search(name), plain_own(name)
                if mark is None:
                    modules[(*split_parameter(own), -1)][""] = tensor
                elif mark[2] == ".bias":
                    modules[(plain_own(name[: mark.start()]), "bias", 0)][mark[1]] = tensor
                else:
                    module = name[: mark.start()]
                    key = plain_own(module), "weight", module.count(".base_layer")
                    modules[key][mark[1]] = tensor
            for (module, parameter, _), parts in sorted(modules.items(), key=lambda one: one[0][2]):
                parsed = parse(module)
                if (other := published.get(parsed.template)) is not None:
                    other = other.replace("{E}", str(parsed.expert))
                    module = other.replace("{L}", str(parsed.layer))
                found[module].append(_Target(module, adapter, scale, parts, parameter))
        return cls(source, {name: tuple(each) for name, each in found.items()})

    def to(self, matrix: Matrix) -> tuple[Added, ...]:
        """Return what is added to a matrix, in order."""
        found = list(self._to(matrix))
        order = {id(one): n for n, one in enumerate(self.source.adapters)}
        return tuple(one for _, one in sorted(found, key=lambda each: order[each[0]]))

    def _to(self, matrix: Matrix) -> Iterator[tuple[int, Added]]:
        module, parameter = split_parameter(bare(matrix.tensor))
        every: Runs = ((0, matrix.rows),)
        kind = "bias" if parameter == "bias" else "weight"
        if matrix.expert is not None:
            yield from self._to_expert(matrix, every)
            return
        for one in self.targets.get(module, ()):
            if one.parameter in (kind, ""):
                yield id(one.adapter), one.added(every, matrix.runs)
        parent, _, last = module.rpartition(".")
        for name, parts in (*_DENSE.items(), *SEGMENTS.items()):
            segment = matrix.role.rpartition("in_proj_")[2]
            if name != last and (last in parts or segment in parts):
                for one in self.targets.get(f"{parent}.{name}", ()):
                    yield id(one.adapter), one.added(every, self._rows(name, parts, matrix, last))
        for part in _DENSE.get(last, ()):
            for one in self.targets.get(f"{parent}.{part}", ()):
                rows = self._inside(last, part, matrix)
                yield id(one.adapter), one.added(rows, ((0, rows[0][1] - rows[0][0]),))

    def _rows(self, name: str, parts: tuple[str, ...], matrix: Matrix, last: str) -> Runs:
        """Rows of a fused target that a matrix is."""
        if name in SEGMENTS:
            sizes = segment_rows(self.source.role_index.dims)
            segment = matrix.role.rpartition("in_proj_")[2]
            fused = name in ("in_proj_qkvz", "in_proj_ba")
            groups = (gdn_groups(self.source) or 1) if fused else 1
            return segment_runs([sizes[one] for one in parts], groups)[parts.index(segment)]
        heads = self._heads(name)
        unit = matrix.rows // heads[parts.index(last)]
        first = unit * sum(heads[: parts.index(last)])
        return ((first, first + matrix.rows),)

    def _inside(self, name: str, part: str, matrix: Matrix) -> Runs:
        """Rows of a fused matrix that a target is."""
        heads, at = self._heads(name), _DENSE[name].index(part)
        unit = matrix.rows // sum(heads)
        return ((unit * sum(heads[:at]), unit * sum(heads[: at + 1])),)

    def _heads(self, name: str) -> tuple[int, ...]:
        """Shares of rows of a fused projection's parts."""
        if name == "gate_up_proj":
            return 1, 1
        config = self.source.config.get("text_config") or self.source.config
        queries = int(config.get("num_attention_heads", 1))
        keys = int(config.get("num_key_value_heads", queries))
        return queries, keys, keys

    def _to_expert(self, matrix: Matrix, every: Runs) -> Iterator[tuple[int, Added]]:
        last = matrix.role.rpartition(".")[2]
        at = bare(matrix.tensor).partition("experts")[0]
        block = re.match(r"(?:.*\.)?layers\.\d+\.", at)
        prefix = block[0] if block is not None else at
        for module, targets in self.targets.items():
            where, mark, below = module.partition("experts")
            if not mark or not where.startswith(prefix):
                continue
            found = re.fullmatch(r"\.(\d+)\.(\w+)", below)
            for one in targets:
                if found is not None:
                    if (
                        int(found[1]) == matrix.expert
                        and _OF_EXPERT.get(found[2], found[2]) == last
                    ):
                        yield id(one.adapter), one.added(every, every)
                    continue
                yield from self._of_all(one, matrix, every, last)

    def _of_all(
        self, one: _Target, matrix: Matrix, every: Runs, last: str
    ) -> Iterator[tuple[int, Added]]:
        """Additions of a parameter of all experts to a matrix: which parameter, sizes tell."""
        named = [t.rpartition(".")[2] for t in one.adapter.config.get("target_parameters") or ()]
        rows, columns = matrix.rows, matrix.form.columns
        whole = {"gate_proj": 2 * rows, "up_proj": 2 * rows}.get(last, rows)
        parameter = "gate_up_proj" if last in ("gate_proj", "up_proj") else last
        if parameter not in named or set(one.sizes) != {whole, columns}:
            return
        of = ((rows, 2 * rows),) if last == "up_proj" else every
        made = one.added(every, of, expert=matrix.expert, last=parameter, rows=whole)
        yield id(one.adapter), made


def additions_to(folder: Folder) -> Additions | None:
    """Those of a folder's source, None where no adapter is named."""
    if not isinstance(folder.source, Adapted):
        return None
    return Additions.of(folder.source, folder.checkpoint.manifest or {})


def nbytes(added: Added) -> int:
    """Memory that its factors take."""
    return sum(8 * s.type.nbytes * 8 // DTYPE_BITS[s.type.dtype] for _, s in added.parts)
