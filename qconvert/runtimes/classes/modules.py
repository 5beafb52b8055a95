"""Modules of a checkpoint as the runtimes' classes have them, by the tables of these."""

from __future__ import annotations

from functools import lru_cache

from qconvert.core.names import split_parameter
from qconvert.core.roles import Kind
from qconvert.core.versions import RELEASES
from qconvert.runtimes.classes.build import pattern_of
from qconvert.runtimes.classes.record import Module, Name, Record, recorded

_RUNTIMES = ("vllm", "sglang")
NOT_KNOWN = "no runtime is known to load it quantized"
# Of a linear that ranks divide by inputs, by outputs, or not at all.
_KINDS = {
    "row": Kind.MIXER_OUT, "column": Kind.MIXER_IN, "merged": Kind.MIXER_IN,
    "replicated": Kind.LINEAR,
}  # fmt: skip


def modules_of(record: Record, *names_of_it: str) -> list[tuple[Name, Module]]:
    """The modules of a class that a checkpoint's module, or a tensor of it, is loaded into: one, unless
    layers of several kinds have it."""
    patterns = {pattern_of(name) for name in names_of_it}
    names = [one for one in record.names if one.source in patterns]
    return [(n, m) for n in names for m in record.modules if m.name == n.to]


def stage_of(architecture: str, runtime: str, tensor: str) -> str:
    """The stage of a pipeline that a class builds a tensor's module in ("first", "last"), "" where that
    is all of them or not known."""
    record = recorded(runtime, architecture) if runtime else None
    module, _ = split_parameter(tensor)
    found = (
        {m.stage for _, m in modules_of(record, tensor, module)} if record is not None else set()
    )
    return found.pop() if len(found) == 1 and found <= {"first", "last"} else ""


def taken_quantized(architecture: str, module: str) -> Kind | str:
    """The kind of a linear that every runtime with a table of the class builds from its quantization
    config, as a layer of its own; else why not."""
    return _taken(architecture, pattern_of(module))


@lru_cache(maxsize=4096)
def _taken(architecture: str, pattern: str) -> Kind | str:
    kinds: set[Kind] = set()
    for runtime in _RUNTIMES:
        record = recorded(runtime, architecture)
        if record is None:
            continue
        built = modules_of(record, pattern)
        if not built:
            return NOT_KNOWN
        for name, module in built:
            why = _refusal(record, name, module)
            if why:
                return f"{RELEASES[runtime]} {why}"
            kinds.add(_KINDS[module.kind])
    return kinds.pop() if len(kinds) == 1 else NOT_KNOWN


def _refusal(record: Record, name: Name, module: Module) -> str:
    """Why a module cannot be quantized by itself, "" if it can."""
    if module.asked is None or module.unquantized or module.reads:
        return "builds it unquantized"
    joined = dict.fromkeys(
        one.source.rpartition(".")[2]
        for one in record.names
        if one.to == module.name and one.source != name.source
    )
    if joined:
        return f"makes one layer of it and {', '.join(joined)}"
    if module.kind not in _KINDS:
        return f"builds it as {module.kind}"
    _, *outputs = module.sizes
    if len(set(outputs)) > 1:
        return "cuts it into parts of several sizes"
    return ""
