"""Where the simulator of a runtime's loader and the loader itself answer differently for a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoints import read_shard

from loaders.client import Loaded, Rank, version_of
from qconvert.core.dtypes import TensorType
from qconvert.runtimes.classes.record import architecture_of, class_record
from qconvert.runtimes.loader.ask import is_twice
from qconvert.runtimes.loading.load_weights import SimulatedLoad
from qconvert.runtimes.loading.setting import HOPPER, Setting
from qconvert.runtimes.sglang import simulator as sglang
from qconvert.runtimes.vllm import simulator as vllm

_DTYPES = {
    "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float8_e4m3fn": "F8_E4M3", "int32": "I32",
    "int64": "I64", "uint8": "U8", "int8": "I8", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
# Below these shares the harness takes bytes that no tensor came to for chance (held.py).
_BY_CHANCE = {"F8_E4M3": 0.05, "U8": 0.05, "I8": 0.05}
_NEVER = 0.0005
# Modules that hold scales of a cache alone, and buffers that a class computes.
_CACHES = (".attn", ".attn_mqa", ".attn_mha")
_OF_CACHES = ("KVCacheMethod", "KVCacheMethodFp8")
_COMPUTED = (".gemma_weight", ".normalizer", ".conv_weights")


def headers(folder: Path) -> dict[str, TensorType]:
    """Types of all tensors, in the order of the files."""
    found: dict[str, TensorType] = {}
    for file in sorted(folder.glob("*.safetensors")):
        table, _ = read_shard(file)
        table.pop("__metadata__", None)
        for name, entry in table.items():
            found[name] = TensorType(entry["dtype"], tuple(entry["shape"]))
    return found


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    return config


def setting(rank: Rank, capability: tuple[int, int] = HOPPER, **flags: Any) -> Setting:
    """A rank as the simulator takes it; `flags` are those of the runtime."""
    ep = flags.pop("ep_size", 1)
    return Setting(rank.tp, rank.rank, rank.pp, rank.stage, ep, capability, **flags)


def simulated(
    folder: Path,
    at: Setting,
    groups: int | None = None,
    *,
    draft: bool = False,
    runtime: str = "sglang",
) -> SimulatedLoad:
    """What the table of the class says, in whatever form."""
    by_table = {"sglang": sglang.by_table, "vllm": vllm.by_table}[runtime]
    config = config_of(folder)
    record = class_record(runtime, architecture_of(config), version_of(runtime), draft=draft)
    return by_table(record, config, headers(folder), at, groups)


def disagreements(simulation: SimulatedLoad, real: Loaded) -> Iterator[str]:
    """Every difference of two answers about one folder at one rank."""
    refused = simulation.refused
    if refused is None or real.error is None:
        if refused is not None or real.error is not None:
            yield f"refused: simulated {refused}, real {real.error} at {real.at}"
        else:
            yield from _differences(simulation, real)
    elif refused.kind and not (
        real.error.startswith(f"{refused.kind}:") and refused.says in real.error
    ):  # a table of a class does not state the error
        says = f"{refused.kind}: {refused.says}"
        yield f"reason: simulated {says!r} ({refused}), real {real.error!r}"


def _is_first(name: str) -> bool:
    return not is_twice(name)


def once(real: Loaded) -> Loaded:
    """What vLLM's loader did, each parameter under its first name."""

    return replace(
        real,
        unwritten=tuple(filter(_is_first, real.unwritten)),
        empty=tuple(filter(_is_first, real.empty)),
        parameters={name: value for name, value in real.parameters.items() if _is_first(name)},
        schemes={name: value for name, value in real.schemes.items() if _is_first(name)},
    )


def _differences(simulation: SimulatedLoad, real: Loaded) -> Iterator[str]:
    unwritten = {
        name
        for name, share in simulation.unwritten.items()
        if share > _BY_CHANCE.get(simulation.parameters[name].dtype, _NEVER) and _is_first(name)
    }
    yield from _sets("unwritten", unwritten, set(real.unwritten))
    yield from _sets("unread", set(simulation.unread), set(real.unused))
    yield from _sets("empty", set(simulation.empty), set(real.empty))
    mine = {
        f"{name} {type.dtype} {list(type.shape)}"
        for name, type in simulation.parameters.items()
        if 0 not in type.shape and _is_first(name) and not name.endswith(_COMPUTED)
    }
    theirs = {
        f"{name} {_DTYPES[dtype]} {shape}"
        for name, (dtype, shape, _) in real.parameters.items()
        if not name.endswith(_COMPUTED)
    }
    yield from _sets("parameters", mine, theirs)
    schemes = {f"{name} {scheme}" for name, scheme in simulation.schemes.items()}
    really = {
        f"{name} {scheme}" for name, scheme in real.schemes.items()
        if not name.endswith(_CACHES) and not scheme.endswith(_OF_CACHES)
    }  # fmt: skip
    yield from _sets("schemes", schemes, really)


def _sets(what: str, mine: set[str], theirs: set[str]) -> Iterator[str]:
    for who, names in (("only simulated", mine - theirs), ("only real", theirs - mine)):
        if names:
            yield f"{what}, {who}: {sorted(names)[:8]} ({len(names)})"
