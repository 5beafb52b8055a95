"""Rules by which vLLM decides whether a module is quantized, by its name.

Read in vLLM: `layers/quantization/utils/config_utils.py` (find_matching_patterns),
`compressed_tensors/utils.py` (should_ignore_layer, find_matched_target), `utils/quant_utils.py`
(is_layer_skipped), `modelopt.py` (is_layer_excluded), `utils/gptq_utils.py`. A name is the runtime's
own; a fused projection is asked for under its own name, then under those of its parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from re import Pattern
from typing import Any

from qconvert.core.patterns import compiled
from qconvert.runtimes.loading.setting import LoadRefused

Fused = Mapping[str, Sequence[str]]


def parts_of(name: str, fused: Fused) -> list[str]:
    """Names of the parts of a fused projection; none if it is not one."""
    last = name.rsplit(".", 1)[-1]
    return [name.replace(last, part) for part in fused.get(last, ())]


def _agreed(found: Iterable[bool], name: str, says: str) -> bool:
    answers = set(found)
    if len(answers) > 1:
        raise LoadRefused(
            "ValueError", says, name,
            "the list of unquantized modules names some of its parts, which are loaded as one module, "
            "and not the others",
        )  # fmt: skip
    return answers.pop()


def _matches(value: str, pattern: str, *, within: bool = False) -> bool:
    if pattern.startswith("re:"):
        return compiled(pattern[3:]).match(value) is not None
    return pattern.lower() in value.lower() if within else pattern == value


def ignored(name: str, entries: Sequence[str], fused: Fused) -> bool:
    """compressed-tensors' list: whole names, or `re:`. Raises LoadRefused where parts of one differ."""
    if any(_matches(name, entry) for entry in entries):
        return True
    parts = parts_of(name, fused) or [name]
    found = [any(_matches(part, entry) for entry in entries) for part in parts]
    return _agreed(found, name, f"Found different quantization schemes for the shards of {name}")


def target(name: str, kind: str, targets: Iterable[str], fused: Fused) -> str | None:
    """The first target of compressed-tensors that matches: the name, all its parts, or its class."""
    targets = list(targets)
    own = next((t for t in targets if _matches(name, t)), None)
    if own is not None:
        return own
    key = next((key for key in fused if name.endswith(key)), None)
    if key is not None:
        names = [name.replace(key, part) for part in fused[key]]
        found = [next((t for t in targets if _matches(part, t)), None) for part in names]
        if all(found):
            return found[0]
    return next((t for t in targets if _matches(kind, t, within=True)), None)


def skipped(name: str, entries: Sequence[str], fused: Fused) -> bool:
    """FP8's list: whole names; the experts of a layer also if an entry begins with their name."""
    last = name.rsplit(".", 1)[-1]
    if last in fused:
        if name in entries:
            return True
        says = f"Detected some but not all shards of {name}"
        return _agreed([part in entries for part in parts_of(name, fused)], name, says)
    if "experts" in name:
        return any(name in entry for entry in entries if "experts" in entry)
    return name in entries


def excluded(name: str, entries: Sequence[str], fused: Fused) -> bool:
    """modelopt's list: whole names, parts of a name, or wildcards."""
    if not entries:
        return False
    if skipped(name, entries, fused):
        return True
    for entry in entries:
        if entry in name and (entry != name or not _has_wildcards(entry)):
            return True
        if _has_wildcards(entry) and _wildcards(entry).match(name) is not None:
            return True
    return False


# A list names every layer, and each linear of a class is held against all of it.
@lru_cache(maxsize=4096)
def _wildcards(entry: str) -> Pattern[str]:
    return compiled(translate(entry))


def _has_wildcards(entry: str) -> bool:
    return "*" in entry or "?" in entry or "[" in entry


def overridden(name: str, dynamic: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """GPTQ's `dynamic`: what the first rule that matches states, None for one that excludes."""
    for pattern, stated in dynamic.items():
        if pattern.startswith("-:"):
            if compiled(pattern[2:]).match(name):
                return None
        elif compiled(pattern.removeprefix("+:")).match(name):
            return stated if isinstance(stated, Mapping) else {}
    return {}


def holds_codes(name: str, quantized: Sequence[str], fused: Fused) -> bool:
    """Tell whether GPTQ's loader finds a module among those whose tensors are not floats."""
    if not quantized:
        return True
    parts = parts_of(name, fused) or [name]
    found = [any(layer in part for layer in quantized) for part in parts]
    return _agreed(found, name, f"Detected some but not all shards of {name}")


@dataclass(frozen=True, slots=True)
class Renames:
    """Replacements of a class's mapper in names: `patterns`, `parts` anywhere, then `starts` and `ends`
    (models/utils.py, WeightsMapper); `then` those of the class inside it."""

    starts: Sequence[tuple[str, str]] = ()
    parts: Sequence[tuple[str, str]] = ()
    ends: Sequence[tuple[str, str]] = ()
    patterns: Sequence[tuple[str, str]] = ()
    then: Renames | None = None

    def of(self, name: str) -> str:
        for old, new in self.patterns:
            name = compiled(old).sub(new, name)
        for old, new in self.parts:
            name = name.replace(old, new, 1)
        for old, new in self.starts:
            if name.startswith(old):
                name = name.replace(old, new, 1)
        for old, new in self.ends:
            if name.endswith(old):
                name = new.join(name.rsplit(old, 1))
        return name if self.then is None else self.then.of(name)


def renamed(entries: Iterable[str], renames: Renames) -> list[str]:
    """Names as a class with a mapper rewrites them."""
    return [renames.of(entry) for entry in entries]


def check_patterns(entries: Iterable[str]) -> None:
    """Raise re.error for a pattern that is none."""
    for entry in entries:
        if entry.startswith("re:"):
            compiled(entry[3:])
