"""Write tables of the runtimes' classes, made by building each class in its own runtime:

    make classes                                      # all
    PYTHONPATH=tests python -m loaders.record_classes --runtime vllm llama mixtral

Needs the loaders (make loaders). Without names it records every class of transformers that generates
text and that the runtime has; what cannot be recorded stands in not_recorded.json with its cause.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from families.classes import model_types
from families.headers_only import COUNT, sized, write

from loaders.client import PYTHON, Rank, Server
from loaders.recorded_tables import Recorded, table, under_settings, written
from loaders.small_models import GIVEN, PUBLISHED, SIZES

TABLES = Path(__file__).parent.parent.parent / "qconvert" / "runtimes" / "classes"
VERSIONS = {"sglang": "0.5.23", "vllm": "0.33.0"}
_FLAGS = {"sglang": {"disable_shared_experts_fusion": True}, "vllm": {}}
# Keys that keep the value of the first set where a class does not build with those of the others: sizes
# of heads that must fit a rotary embedding, then all heads, then what kernels know a few values of.
_HEADS = frozenset({"num_attention_heads", "num_key_value_heads", "head_dim", "n_head"})
_LATENT = frozenset({"kv_lora_rank", "qk_rope_head_dim"})
_FIXED = (
    frozenset[str](), frozenset({"head_dim"}), _LATENT, _HEADS,
    _HEADS | _LATENT | {
        "qk_nope_head_dim", "v_head_dim", "q_lora_rank", "index_head_dim", "index_n_heads",
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
    },
)  # fmt: skip
# Booleans that change nothing of what is built.
_IDLE = frozenset({
    "use_cache", "output_attentions", "output_hidden_states", "return_dict", "is_encoder_decoder",
    "output_router_logits", "is_decoder", "add_cross_attention", "torchscript", "use_bfloat16",
    "tie_encoder_decoder", "do_sample", "use_mamba_kernels", "is_causal",
})  # fmt: skip
# Model types whose stacks of experts are published with rows and columns changed from what
# transformers 5 saves.
_TURNED = frozenset({"qwen3_vl_moe"})
_NULLABLE = ("q_lora_rank",)


# Folders are made by transformers, in one thread.
_ONE_AT_A_TIME = threading.RLock()


class NotRecorded(Exception):
    """A class that could not be recorded, and why."""


@dataclass(frozen=True)
class Writer:
    """Folders of headers of one model_type, each written once. `head_dim`: configs state one also where
    the class of transformers has no such key."""

    room: Path
    model_type: str
    head_dim: bool = True

    def folder(
        self,
        number: int,
        fixed: frozenset[str],
        changed: Mapping[str, Any] = MappingProxyType({}),
    ) -> Path:
        """The checkpoint at a set of sizes, with settings of its config changed."""
        name = json.dumps([number, sorted(fixed), dict(changed), self.head_dim]).replace("/", "-")
        folder = self.room / self.model_type / name
        with _ONE_AT_A_TIME:
            return folder if folder.is_dir() else self._written(folder, number, fixed, changed)

    def _written(
        self, folder: Path, number: int, fixed: frozenset[str], changed: Mapping[str, Any]
    ) -> Path:
        given = dict(GIVEN.get(self.model_type, {}))
        sizes = SIZES.get(self.model_type, {})
        config = sized(self.model_type, given, sizes, number, fixed, head_dim=self.head_dim)
        if changed:
            config = _changed(config, changed)
        keys = PUBLISHED.get(self.model_type, {})
        return write(config, folder, keys, turned=self.model_type in _TURNED)


def _changed(config: Any, changed: Mapping[str, Any]) -> Any:
    import transformers

    hf: Any = transformers
    values = config.to_dict()
    model_type = values.pop("model_type")
    for at in (values, values.get("text_config", {})):
        at.update({key: value for key, value in changed.items() if key in at})
    return hf.AutoConfig.for_model(model_type, **values)


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    return found


def asked(
    server: Server,
    runtime: str,
    folder: Path,
    rank: Rank,
    *,
    load: bool = True,
    probes: bool = False,
) -> Any:
    return server.recorded(folder, rank, load=load, probes=probes, flags=_FLAGS[runtime])


def _said(facts: Mapping[str, Any]) -> str:
    return f"{facts['step']}: {facts['error']} at {facts.get('at', [])[-2:]}"


def recorded(writer: Writer, server: Server, runtime: str) -> Recorded:
    """All builds of a class with the settings that it has."""
    try:
        start = writer.folder(0, frozenset())
    except Exception as error:  # what transformers raises for a config is the cause
        raise NotRecorded(f"no small model: {type(error).__name__}: {str(error)[:200]}") from error
    first = asked(server, runtime, start, Rank(), probes=True)
    if first["error"]:
        raise NotRecorded(_said(first))
    if first["class"].startswith("Transformers"):
        raise NotRecorded(f"the runtime has no class of its own, it takes {first['class']}")
    sets = [(config_of(start), first)]
    for number in range(1, COUNT):
        sets.append(_with_sizes(writer, server, runtime, number))
    two = asked(server, runtime, start, Rank(2, 0))
    stages = [asked(server, runtime, start, Rank(1, 0, 2, stage), load=False) for stage in (0, 1)]
    return Recorded(sets, two, stages)


def _with_sizes(
    writer: Writer, server: Server, runtime: str, number: int
) -> tuple[Mapping[str, Any], Any]:
    said = ""
    for fixed in _FIXED:
        try:
            folder = writer.folder(number, fixed)
        except Exception as error:  # transformers refuses sizes in many ways; the next may do
            said = said or f"transformers: {type(error).__name__}: {str(error)[:200]}"
            continue
        facts = asked(server, runtime, folder, Rank(), load=False)
        if not facts["error"]:
            return config_of(folder), facts
        said = said or _said(facts)
    raise NotRecorded(f"not with other sizes: {said}")


def settings(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Settings to try beside those of a config: each boolean the other way, what may be null as null."""
    text = config.get("text_config", config)
    for key, value in {**text, **config}.items():
        if isinstance(value, bool) and key not in _IDLE:
            yield {key: not value}
    for key in _NULLABLE:
        if isinstance(text.get(key), int):
            yield {key: None}


def record_of(writer: Writer, server: Server, runtime: str) -> dict[str, Any]:
    """The table of a class; raises NotRecorded."""
    try:
        base = recorded(writer, server, runtime)
    except NotRecorded:
        writer = replace(writer, head_dim=False)
        base = recorded(writer, server, runtime)
    config, facts = base.sets[0]
    found, others = table(base), []
    unbuilt = {}
    for changed in settings(config):
        (key,) = changed
        try:
            folder = writer.folder(0, frozenset(), changed)
        except Exception as error:  # a combination that transformers refuses is none
            unbuilt[key] = f"transformers: {type(error).__name__}"
            continue
        other = asked(server, runtime, folder, Rank())
        if other["error"]:
            unbuilt[key] = f"{other['step']}: {other['error'][:120]}"
        elif _built(other) != _built(facts):
            new = set(other["parameters"]) - set(facts["parameters"])
            plain = any(not name.endswith(".bias") for name in new)
            two = asked(server, runtime, folder, Rank(2, 0)) if plain else None
            there = Recorded([(config_of(folder), {**other, "probes": {}})], two, [])
            others.append((changed, table(there, base)))
    values = {**config.get("text_config", config), **config}
    found = under_settings(found, others, values)
    return {
        "runtime": runtime, "version": VERSIONS[runtime],
        "architecture": config["architectures"][0], "model_type": config["model_type"],
        "settings_unbuilt": unbuilt, **found,
        "defaults": defaults(writer.model_type, found), "keys": keys_of_all(config),
        "attribute_map": other_names(writer.model_type),
    }  # fmt: skip


def defaults(model_type: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """What the class of a config takes where config.json does not state a key that a table uses; null
    where it follows from other keys."""
    import transformers

    hf: Any = transformers
    given = GIVEN.get(model_type, {})  # as in a small model
    sizes = {"hidden_size": 6144, "num_attention_heads": 48}  # of no default
    first, other = (
        hf.AutoConfig.for_model(model_type, **{**given, **more}).to_dict()
        for more in ({}, {"text_config": sizes} if "text_config" in given else sizes)
    )
    words = json.dumps([found["modules"], found["names"], found["layers"]])
    used = {*found["flags"], *re.findall(r"[a-z_]+[a-z0-9_]*(?:\.[a-z0-9_]+)?", words)}
    return {key: value if _at(other, key) == value else None for key in sorted(used)
            if key not in sizes and (value := _at(first, key)) is not _ABSENT
            and (value is None or isinstance(value, int | str))}  # fmt: skip


def keys_of_all(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Keys of a config.json, those of its text model plain, of other parts with a prefix."""
    found: set[str] = set()
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("_config"):
            found |= {*keys_of_all(value, "" if key == "text_config" else f"{prefix}{key}.")}
        else:
            found.add(f"{prefix}{key}")
    return sorted(found)


def other_names(model_type: str) -> dict[str, str]:
    """Names of keys that the config's class takes for others."""
    import transformers

    hf: Any = transformers
    config = hf.AutoConfig.for_model(model_type, **GIVEN.get(model_type, {}))
    return {**type(config).attribute_map, **type(config.get_text_config()).attribute_map}


_ABSENT = object()


def _at(config: Mapping[str, Any], key: str) -> Any:
    """A key of a config, of its text model or with a prefix."""
    outer, _, inner = key.rpartition(".")
    places = [config.get(outer)] if outer else [config.get("text_config"), config]
    return next((at[inner] for at in places if isinstance(at, dict) and inner in at), _ABSENT)


def _built(facts: Mapping[str, Any]) -> str:
    parts = {key: facts[key] for key in ("modules", "parameters", "unread", "aliases")}
    return json.dumps(parts, sort_keys=True)


def folder_of(runtime: str, tables: Path = TABLES) -> Path:
    return tables / f"{runtime}-{VERSIONS[runtime]}"


class Tables:
    """The folder of a runtime's tables, which several threads write."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._out, self._listed, self._lock = out, out / "not_recorded.json", threading.Lock()
        self._causes: dict[str, str] = {}
        if self._listed.exists():
            self._causes = json.loads(self._listed.read_bytes())

    def put(self, architecture: str, text: str) -> None:
        """Write a table, or, if there is none, the cause."""
        with self._lock:
            self._causes.pop(architecture, None)
            (self._out / f"{architecture}.json").write_text(text)
            self._note()

    def miss(self, architecture: str, cause: str) -> None:
        with self._lock:
            self._causes[architecture] = cause
            (self._out / f"{architecture}.json").unlink(missing_ok=True)
            self._note()

    def _note(self) -> None:
        self._listed.write_text(json.dumps(self._causes, indent=1, sort_keys=True) + "\n")


def record_one(name: str, runtime: str, server: Server, room: Path, tables: Tables) -> str:
    """Write the table of a model_type's class, or why there is none; what became of it."""
    began, writer = time.monotonic(), Writer(room, name)
    try:
        plain = replace(writer, head_dim=False)
        architecture = str(config_of(plain.folder(0, frozenset()))["architectures"][0])
    except Exception as error:  # what transformers raises for a config is the cause
        tables.miss(name, f"no small model: {type(error).__name__}: {str(error)[:200]}")
        return "no small model"
    try:
        tables.put(architecture, written(record_of(writer, server, runtime)))
    except NotRecorded as why:
        tables.miss(architecture, str(why).replace(f"{room}/", ""))
        return f"not recorded: {why}"
    except Exception as error:  # of one class of two hundred: listed, and the others go on
        at = traceback.extract_tb(error.__traceback__)[-1]
        cause = (
            f"no table: {type(error).__name__}: {str(error)[:200]} in {at.name}, line {at.lineno}"
        )
        tables.miss(architecture, cause)
        return cause
    finally:
        shutil.rmtree(room / name, ignore_errors=True)
    return f"{time.monotonic() - began:.0f} s"


def main() -> None:
    """Record what the command line names."""
    takes = argparse.ArgumentParser(description=__doc__)
    takes.add_argument("--runtime", choices=sorted(VERSIONS), action="append")
    takes.add_argument("--tables", type=Path, default=TABLES)
    takes.add_argument("--room", type=Path, help="where servers of loaders listen")
    takes.add_argument("--jobs", type=int, default=2, help="classes at a time")
    takes.add_argument("model_type", nargs="*")
    given = takes.parse_args()
    names = given.model_type or model_types()
    runtimes = given.runtime or sorted(VERSIONS)
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(given.jobs) as pool:
        room = Path(made)
        tables = {runtime: Tables(folder_of(runtime, given.tables)) for runtime in runtimes}

        def record(job: tuple[str, str]) -> None:
            name, runtime = job
            server = Server(PYTHON, given.room or room, runtime)
            said = record_one(name, runtime, server, room / runtime, tables[runtime])
            server.close()
            print(runtime, name, said, flush=True)

        held = [Server(PYTHON, given.room or room, runtime) for runtime in runtimes]
        for _ in pool.map(record, [(name, runtime) for name in names for runtime in runtimes]):
            pass
        for server in held:
            server.close()


if __name__ == "__main__":
    main()
