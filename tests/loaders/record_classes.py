"""Write tables of the runtimes' classes, made by building each class in its own runtime:

    make classes                                      # all
    PYTHONPATH=tests python tests/loaders/record_classes.py --runtime vllm llama mixtral

Needs the loaders (make loaders). Without names it records every class of transformers that generates
text and that the runtime has, and those of the runtime's own that read configs and names of one of
these; what cannot be recorded stands in not_recorded.json with its cause.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import re
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from checkpoints import edit_json
from families.classes import model_types
from families.headers_only import COUNT, sized, write
from huggingface_hub.errors import StrictDataclassError

from loaders.client import PYTHON, Rank, Server
from loaders.recorded_tables import (
    UNTIED,
    Recorded,
    has_gaps,
    table,
    under_settings,
    unknown_of,
    with_other_experts,
    written,
)
from loaders.small_models import AS_PUBLISHED, GIVEN, LIKE, NAMES, PUBLISHED, SIZES

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
_NEXT = "num_nextn_predict_layers"


class NotRecorded(Exception):
    """A class that could not be recorded, and why."""


@dataclass(frozen=True)
class Writer:
    """Folders of headers of one model_type, each written once. `head_dim`: configs state one also where
    the class of transformers has no such key; `architecture`: another class that reads them."""

    room: Path
    model_type: str
    head_dim: bool = True
    architecture: str = ""

    def folder(
        self,
        number: int,
        fixed: frozenset[str],
        changed: Mapping[str, Any] = MappingProxyType({}),
        *,
        otherwise: bool = False,
    ) -> Path:
        """The checkpoint at a set of sizes, with settings of its config changed; `otherwise`: with its
        experts in the other form."""
        what = [number, sorted(fixed), dict(changed), self.head_dim, otherwise]
        name = json.dumps(what).replace("/", "-")
        folder = self.room / (self.architecture or self.model_type) / name
        if folder.is_dir():
            return folder
        given = dict(GIVEN.get(self.model_type, {}))
        sizes = SIZES.get(self.model_type, {})
        config = sized(self.model_type, given, sizes, number, fixed, head_dim=self.head_dim)
        if changed:
            config = _changed(config, changed)
        keys = {**PUBLISHED.get(self.model_type, {}), **PUBLISHED.get(self.architecture, {})}
        names = {**NAMES.get(self.model_type, {}), **NAMES.get(self.architecture, {})}
        turned = self.model_type in _TURNED
        changed_to = AS_PUBLISHED.get(self.model_type)
        write(config, folder, keys, names, changed_to, turned=turned, otherwise=otherwise)
        if self.architecture:
            edit_json(folder / "config.json", lambda c: c.update(architectures=[self.architecture]))
        return folder


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
    if first.get("class", "").startswith("Transformers"):
        raise NotRecorded(f"the runtime has no class of its own, it takes {first['class']}")
    if first["error"]:
        raise NotRecorded(_said(first))
    sets: list[tuple[Mapping[str, Any], Any]] = [(config_of(start), first)]
    for number in range(1, COUNT):
        sets.append(_with_sizes(writer, server, runtime, number))
    two = asked(server, runtime, start, Rank(2, 0))
    stages = _stages(server, runtime, start)
    if first["aliases"] and all(stage["error"] for stage in stages):  # perhaps for a tied head
        stages = _stages(server, runtime, writer.folder(0, frozenset(), UNTIED))
        return Recorded(sets, two, stages, not any(stage["error"] for stage in stages))
    return Recorded(sets, two, stages)


def _stages(server: Server, runtime: str, folder: Path) -> list[Any]:
    ranks = (Rank(1, 0, 2, stage) for stage in (0, 1))
    return [asked(server, runtime, folder, rank, load=False) for rank in ranks]


def _with_sizes(
    writer: Writer,
    server: Server,
    runtime: str,
    number: int,
    changed: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Mapping[str, Any], Any]:
    said = ""
    for fixed in _FIXED:
        try:
            folder = writer.folder(number, fixed, changed)
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


def _under(
    changed: Mapping[str, Any],
    writer: Writer,
    server: Server,
    runtime: str,
    facts: Mapping[str, Any],
    base: Mapping[str, Any],
) -> dict[str, Any] | None:
    """The table of a class under another setting, None where it changes nothing."""
    try:
        folder = writer.folder(0, frozenset(), changed)
    except Exception as error:  # a combination that transformers refuses is none
        raise NotRecorded(f"transformers: {type(error).__name__}") from error
    other = asked(server, runtime, folder, Rank())
    if other["error"]:
        raise NotRecorded(f"{other['step']}: {other['error']}")
    if _built(other) == _built(facts):
        return None
    new = set(other["parameters"]) - set(facts["parameters"])
    plain = any(not name.endswith(".bias") for name in new)
    two = asked(server, runtime, folder, Rank(2, 0)) if plain else None
    sets: list[tuple[Mapping[str, Any], Any]] = [(config_of(folder), {**other, "probes": {}})]
    made = table(Recorded(sets, two, []))
    if has_gaps(made, base):
        for number in range(1, COUNT):
            sets.append(_with_sizes(writer, server, runtime, number, changed))
        made = table(Recorded(sets, two, []))
    return made


_ALL = ("code", "modules", "parameters", "unread", "aliases", "probes", "renames", "packed")


def same_as(writer: Writer, server: Server, runtime: str) -> str:
    """The architecture of a model_type's own class where the runtime has the same code for the writer's
    and makes the same of it, "" where it is another."""
    own = replace(writer, architecture="")
    said = [
        asked(server, runtime, one.folder(0, frozenset()), Rank(), probes=True)
        for one in (own, writer)
    ]
    same = all(said[0].get(key) == said[1].get(key) for key in _ALL)
    return architecture_of(own) if same and not said[0]["error"] else ""


def architecture_of(writer: Writer) -> str:
    """The architecture that a writer's configs name."""
    named: str = config_of(writer.folder(0, frozenset()))["architectures"][0]
    return named


def record_of(writer: Writer, server: Server, runtime: str) -> dict[str, Any]:
    """The table of a class; raises NotRecorded."""
    same = same_as(writer, server, runtime) if writer.architecture else ""
    if same:
        return {
            "runtime": runtime, "version": VERSIONS[runtime], "architecture": writer.architecture,
            "model_type": writer.model_type, "same_as": same,
        }  # fmt: skip
    try:
        base = recorded(writer, server, runtime)
    except NotRecorded:
        writer = replace(writer, head_dim=False)
        base = recorded(writer, server, runtime)
    config, facts = base.sets[0]
    found, others, unbuilt = table(base), [], dict[str, str]()
    for changed in settings(config):
        try:
            made = _under(changed, writer, server, runtime, facts, found)
        except NotRecorded as why:
            unbuilt[next(iter(changed))] = str(why).replace(f"{writer.room}/", "")[:160]
        else:
            if made is not None:
                others.append((changed, made))
    values = {**config.get("text_config", config), **config}
    found = under_settings(found, others, values, untied=base.untied)
    found |= _of_other_experts(writer, server, runtime, found)
    found |= _of_next_layers(writer, server, runtime, found, config)
    return {
        "runtime": runtime, "version": VERSIONS[runtime],
        "architecture": config["architectures"][0], "model_type": config["model_type"],
        "settings_unbuilt": unbuilt, **found,
        "defaults": defaults(writer.model_type, found), "keys": keys_of_all(config),
        "attribute_map": other_names(writer.model_type),
    }  # fmt: skip


def _of_other_experts(
    writer: Writer, server: Server, runtime: str, found: Mapping[str, Any]
) -> dict[str, Any]:
    """Names of a table with those of experts in the other form than the class's checkpoints have, and
    names of that form that the class refuses or does not read."""
    try:
        folder = writer.folder(0, frozenset(), otherwise=True)
    except ValueError:
        return {}
    return with_other_experts(found, asked(server, runtime, folder, Rank()), names_in(folder))


def _of_next_layers(
    writer: Writer,
    server: Server,
    runtime: str,
    found: Mapping[str, Any],
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """Answers of a table's class to names that lead nowhere where its config counts draft layers."""
    if config.get("text_config", config).get(_NEXT) != 0:
        return {}
    folder = writer.folder(0, frozenset(), {_NEXT: 1})
    facts = asked(server, runtime, folder, Rank(), probes=True)
    unknown = {} if facts["error"] else unknown_of(facts)
    if facts["error"] or unknown == found["unknown"]:
        return {}
    otherwise = {**found.get("otherwise", {}), f"{_NEXT}=1": {"unknown": unknown}}
    return {"otherwise": otherwise, "flags": sorted({*found["flags"], _NEXT})}


def names_in(folder: Path) -> list[str]:
    """Names of the tensors of a folder of headers."""
    with (folder / "model.safetensors").open("rb") as file:
        return [*json.loads(file.read(int.from_bytes(file.read(8), "little")))]


def defaults(model_type: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Values that the class of a config takes for keys of a table that config.json leaves out; null
    where it follows from other keys."""
    import transformers

    hf: Any = transformers
    given = GIVEN.get(model_type, {})  # as in a small model
    sizes = {"hidden_size": 6144, "num_attention_heads": 48}  # of no default
    try:
        first, other = (
            hf.AutoConfig.for_model(model_type, **{**given, **more}).to_dict()
            for more in ({}, {"text_config": sizes} if "text_config" in given else sizes)
        )
    except StrictDataclassError:  # of sizes that must fit others: a config states all that it uses
        return {}
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


@dataclass(frozen=True)
class Outcome:
    """Outcome for a class: its table, or why there is none. `name`: the architecture, or what was
    `given` where transformers makes no small model."""

    runtime: str
    given: str
    name: str
    text: str | None
    cause: str


def outcome(writer: Writer, server: Server, runtime: str) -> Outcome:
    """The table of a model_type's class, or why there is none."""
    given = writer.architecture or writer.model_type
    try:
        architecture = architecture_of(replace(writer, head_dim=False))
    except Exception as error:  # what transformers raises for a config is the cause
        cause = f"no small model: {type(error).__name__}: {str(error)[:200]}"
        return Outcome(runtime, given, given, None, cause)
    made = partial(Outcome, runtime, given, architecture)
    try:
        return made(written(record_of(writer, server, runtime)), "")
    except NotRecorded as why:
        return made(None, str(why).replace(f"{writer.room}/", ""))
    except Exception as error:  # of one class of two hundred: listed, and the others go on
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(at.filename).name}, {at.name}"
        cause = f"no table: {type(error).__name__}: {str(error)[:200]} in {where}"
        return made(None, cause)


@dataclass(frozen=True)
class Job:
    """A model_type, or a class that reads one (`LIKE`), to record in each of some runtimes, whose
    servers are in `servers`."""

    name: str
    runtimes: Sequence[str]
    servers: Path
    room: Path


def writer_of(room: Path, name: str) -> Writer:
    """The writer of a model_type, or of a class that reads one."""
    return Writer(room, LIKE[name], architecture=name) if name in LIKE else Writer(room, name)


def done(job: Job) -> list[Outcome]:
    """Outcomes of a job, in a process of its own."""
    writer, found = writer_of(job.room / job.name, job.name), []
    for runtime in job.runtimes:
        began = time.monotonic()
        server = Server(PYTHON, job.servers, runtime)
        found.append(outcome(writer, server, runtime))
        server.close()
        seconds = f"{time.monotonic() - began:.0f} s"
        print(runtime, job.name, found[-1].name, found[-1].cause or seconds, flush=True)
    shutil.rmtree(writer.room, ignore_errors=True)
    return found


def keep(outcome: Outcome, tables: Path) -> None:
    """Write a table, or note its cause. What loaders were seen to agree on (agree_classes.py) stays with
    a table that is the same."""
    out = folder_of(outcome.runtime, tables)
    out.mkdir(parents=True, exist_ok=True)
    file, listed = out / f"{outcome.name}.json", out / "not_recorded.json"
    causes = json.loads(listed.read_bytes()) if listed.exists() else {}
    for name in (outcome.given, outcome.name):
        causes.pop(name, None)
    if outcome.text is None:
        causes[outcome.name] = outcome.cause
        file.unlink(missing_ok=True)
    else:
        before = json.loads(file.read_bytes()) if file.exists() else {}
        agrees = {key: before.pop(key) for key in ("agrees",) if key in before}
        same = bool(agrees) and written(before) == outcome.text
        file.write_text(written({**before, **agrees}) if same else outcome.text)
    listed.write_text(json.dumps(causes, indent=1, sort_keys=True) + "\n")


def main() -> None:
    """Record what the command line names."""
    takes = argparse.ArgumentParser(description=__doc__)
    takes.add_argument("--runtime", choices=sorted(VERSIONS), action="append")
    takes.add_argument("--tables", type=Path, default=TABLES)
    takes.add_argument("--room", type=Path, help="where servers of loaders listen")
    takes.add_argument("--jobs", type=int, default=2, help="model_types at a time")
    takes.add_argument("name", nargs="*", help="a model_type, or a class that reads one")
    given = takes.parse_args()
    names = given.name or [*model_types(), *LIKE]
    runtimes = given.runtime or sorted(VERSIONS)
    importlib.import_module("transformers.modeling_utils")  # once, before processes are forked
    with tempfile.TemporaryDirectory() as made:
        servers = given.room or Path(made)
        held = [Server(PYTHON, servers, runtime) for runtime in runtimes]
        jobs = [Job(name, runtimes, servers, Path(made) / "folders") for name in names]
        with multiprocessing.get_context("fork").Pool(given.jobs) as pool:
            for outcomes in pool.imap_unordered(done, jobs):
                for one in outcomes:
                    keep(one, given.tables)
        for server in held:
            server.close()


if __name__ == "__main__":
    main()
