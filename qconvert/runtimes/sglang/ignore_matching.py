"""Rules by which sglang decides whether a module is quantized, by its name: three dialects, three ways
to match.

Read in sglang: `layers/quantization/compressed_tensors/utils.py` (should_ignore_layer,
find_matched_target), `layers/quantization/utils.py` (is_layer_skipped) and
`layers/quantization/modelopt_quant.py` (is_layer_excluded). A name is the runtime's own, so a projection
that it fuses is asked for under the fused name, unless its class maps that name to its parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from qconvert.core.patterns import compiled
from qconvert.runtimes.loading.setting import LoadRefused

Fused = Mapping[str, Sequence[str]]
# Names of parts that is_layer_skipped knows if the class maps nothing.
_ALWAYS_FUSED: Fused = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_PARTS_BY_TAIL = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


def _parts(name: str, fused: Fused, key: str = "") -> list[str]:
    """Names of a fused module's parts; `key` is its own last name. Raises LoadRefused for a class whose
    mapping is not of names."""
    key = key or name.rsplit(".", 1)[-1]
    if not all(isinstance(part, str) for part in fused[key]):
        raise LoadRefused(
            "TypeError", "replace() argument 2 must be str", name,
            "its class maps fused modules to pairs of a name and a place (models/solar.py), which the "
            "runtime takes for names as soon as a config says that anything is quantized",
        )  # fmt: skip
    return [name.replace(key, part) for part in fused[key]]


class Compressed:
    """compressed-tensors: `ignore` by whole name, suffix or `re:`; targets by whole name, `re:` or the
    name of the module's class."""

    def __init__(self, ignore: Sequence[str], targets: Iterable[str], fused: Fused) -> None:
        # Raises re.error for a pattern that is none.
        self._plain = frozenset(entry for entry in ignore if not entry.startswith("re:"))
        self._patterns = [compiled(entry[3:]) for entry in ignore if entry.startswith("re:")]
        self.targets = list(targets)
        for target in self.targets:
            if target.startswith("re:"):
                compiled(target[3:])  # an invalid one is found here
        self._fused = fused

    def ignored(self, name: str) -> bool:
        """Tell whether a module is left unquantized. Raises LoadRefused where parts of one differ."""
        last = name.rsplit(".", 1)[-1]
        if last not in self._fused or name in self._plain:
            return self._in_ignore(name)
        found = {self._in_ignore(part) for part in _parts(name, self._fused)}
        if len(found) > 1:
            raise LoadRefused(
                "ValueError", "Found different quantization schemes for", name,
                f"the ignore list names some of {', '.join(self._fused[last])}, which are loaded as "
                "one module, and not the others",
            )  # fmt: skip
        return found.pop()

    def target(self, name: str, kind: str) -> str:
        """The first target that matches a module of a class `kind`. Raises LoadRefused if none does."""
        for value, by_class in ((name, False), (kind, True)):
            for target in self.targets:
                if _matches(value, target, by_class=by_class):
                    return target
        found = self._of_parts(name)
        if found is None:
            raise LoadRefused(
                "ValueError", "Unable to find matching target for", name,
                "neither `ignore` nor a target names this module; the runtime asks for it under this "
                "name, fused from the checkpoint's",
            )  # fmt: skip
        return found

    def _in_ignore(self, name: str) -> bool:
        if any(pattern.match(name) for pattern in self._patterns):
            return True
        return any(tail in self._plain for tail in _tails(name))

    def _of_parts(self, name: str) -> str | None:
        key = next((key for key in self._fused if name.endswith(key)), None)
        if key is None:
            return None
        found = [
            next((t for t in self.targets if _matches(part, t)), None)
            for part in _parts(name, self._fused, key)
        ]
        return found[0] if all(found) else None


def _tails(name: str) -> Iterable[str]:
    """The name, and what follows each of its dots."""
    yield name
    at = name.find(".")
    while at >= 0:
        yield name[at + 1 :]
        at = name.find(".", at + 1)


def _matches(value: str, target: str, *, by_class: bool = False) -> bool:
    if target.startswith("re:"):
        return compiled(target[3:]).match(value) is not None
    return target.lower() in value.lower() if by_class else target == value


class SkipList:
    """FP8's and modelopt's list of unquantized modules: an entry is a run of whole parts of a name."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._runs = frozenset(entry.rstrip(".") for entry in entries)
        self._experts = [entry for entry in entries if "experts" in entry]

    def covers(self, name: str) -> bool:
        # Looked up by the runs of the name, some 20: a list of 500 entries is asked for 500 modules.
        return not self._runs.isdisjoint(_runs(name))

    def covers_experts(self, name: str) -> bool:
        return any(name in entry for entry in self._experts)


def _runs(name: str) -> Iterator[str]:
    parts = name.rstrip(".").split(".")
    for first in range(len(parts)):
        for last in range(first + 1, len(parts) + 1):
            yield ".".join(parts[first:last])


def is_layer_skipped(name: str, ignored: SkipList, fused: Fused) -> bool:
    """Tell whether the list leaves a module unquantized. Raises LoadRefused where parts of a fused
    module differ."""
    last = name.rsplit(".", 1)[-1]
    known = fused if last in fused else _ALWAYS_FUSED
    if last in known:
        found = {ignored.covers(part) for part in _parts(name, known)}
        if len(found) > 1:
            raise LoadRefused(
                "ValueError", f"Detected some but not all shards of {name}", name,
                f"the list of unquantized modules names some of {', '.join(known[last])}, which are "
                "loaded as one module, and not the others",
            )  # fmt: skip
        return found.pop()
    if ignored.covers(name):
        return True
    return "experts" in name and "gate_up_proj" not in name and ignored.covers_experts(name)


def is_layer_excluded(name: str, excluded: Sequence[str]) -> bool:
    """modelopt's second look: an entry may hold `*`, and may be one part of the name."""
    tries = [name]
    if name.startswith("language_model."):
        tries.append(name.removeprefix("language_model."))
    for entry in excluded:
        pattern = _glob(entry)
        if any(pattern.fullmatch(part) for whole in tries for part in (whole, *whole.split("."))):
            return True
        tail = entry.rsplit(".", 1)[-1]
        if tail in _PARTS_BY_TAIL and any(tail in whole.rsplit(".", 1)[-1] for whole in tries):
            return True
    return False


@lru_cache(maxsize=8192)
def _glob(entry: str) -> re.Pattern[str]:
    return compiled(entry.replace(".", r"\.").replace("*", ".*"))
