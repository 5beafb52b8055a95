"""Write tables of the runtimes' classes, made by building each class in its own runtime:

    make classes                                      # all; of earlier releases: make older
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
import os
import re
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from checkpoints import edit_json
from families.classes import model_types
from families.headers_only import COUNT, sized, write
from huggingface_hub.errors import StrictDataclassError

from loaders.client import PYTHON, Rank, Server, version_of
from loaders.other_names import (
    ALONE,
    FORMS,
    FUSED_ROWS,
    NAMED,
    OTHER_EXPERTS,
    WITHOUT_ENDS,
    Entries,
    with_draft,
)
from loaders.recorded_tables import (
    UNTIED,
    Recorded,
    has_gaps,
    says,
    table,
    under_settings,
    unknown_of,
    written,
)
from loaders.small_models import AS_PUBLISHED, CHOICES, DRAFTS, GIVEN, LIKE, NAMES, PUBLISHED, SIZES
from qconvert.core.versions import RELEASES
from qconvert.runtimes.classes.expressions import Sizes
from qconvert.runtimes.classes.record import DRAFT_BLOCKS, what_differs, whole
from qconvert.runtimes.loader.server.record import stored

TABLES = Path(__file__).parent.parent.parent / "qconvert" / "runtimes" / "classes"
RUNTIMES = ("sglang", "vllm")
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
# Methods of quantization for which a class may build otherwise, as each runtime calls them.
_METHODS = {
    "sglang": ("fp8", "modelopt_fp4", "modelopt_mixed", "compressed_tensors", "gptq_marlin"),
    "vllm": ("fp8", "modelopt_fp4", "modelopt_mixed", "compressed-tensors", "auto_gptq"),
}  # fmt: skip
_NULLABLE = ("q_lora_rank", "moe_latent_size", "draft_vocab_size")
_NEXT = "num_nextn_predict_layers"
_TIED = "tie_word_embeddings"
_IN_NO_ORDER = " The available parameters"  # from a set


class NotRecorded(Exception):
    """A class that could not be recorded, and why."""


@dataclass(frozen=True)
class Writer:
    """Folders of headers of one model_type, each written once. `head_dim`: configs state one also where
    the class of transformers has no such key; `architecture`: another class that reads them; `draft`:
    folders hold a draft, whose class is meant; one that stands alone where that is such a class's."""

    room: Path
    model_type: str
    head_dim: bool = True
    architecture: str = ""
    draft: bool = False

    def folder(
        self,
        number: int,
        fixed: frozenset[str],
        changed: Mapping[str, Any] = MappingProxyType({}),
        form: str = "",
        without: Sequence[str] = (),
    ) -> Path:
        """The checkpoint at a set of sizes, with settings of its config changed, in another form
        (other_names.py), `without` keys that published configs state."""
        own = [number, sorted(fixed), dict(changed), self.head_dim, form, [*without], self.draft]
        name = json.dumps(own).replace("/", "-")
        folder = self.room / (self.architecture or self.model_type) / name
        if folder.is_dir():
            return folder
        given = dict(GIVEN.get(self.model_type, {}))
        sizes = {**SIZES.get(self.model_type, {}), **self.own}
        config = sized(self.model_type, given, sizes, number, fixed, head_dim=self.head_dim)
        if changed:
            config = _changed(config, changed)
        choices = (_NEXT, *CHOICES.get(self.model_type, ()))
        counted = {key: value for key, value in changed.items() if key in choices}
        keys = {**_published(self), **DRAFTS.get(self.model_type, {}), **counted}
        for key in without:
            keys.pop(key, None)
        names = {**NAMES.get(self.model_type, {}), **NAMES.get(self.architecture, {})}

        def published(entries: Entries, saved: Mapping[str, Any]) -> Entries:
            if self.alone:
                entries = ALONE[self.architecture](entries, saved)
            named = NAMED[form](entries) if form in NAMED else entries
            whole = self.alone or not self.draft
            return named if whole else with_draft(named, saved, ends=form != WITHOUT_ENDS)

        write(
            config, folder, keys, names, AS_PUBLISHED.get(self.model_type), published=published,
            turned=self.model_type in _TURNED, otherwise=form == OTHER_EXPERTS,
        )  # fmt: skip
        if self.architecture:
            edit_json(folder / "config.json", lambda c: c.update(architectures=[self.architecture]))
        edit_json(folder / "config.json", lambda c: _leave_out(c, without, self.own))
        return folder

    @property
    def alone(self) -> bool:
        """Tell whether folders hold a draft without its model."""
        return self.architecture in ALONE

    @property
    def own(self) -> Mapping[str, Any]:
        """Keys and sizes of configs of the class that reads those of the model_type."""
        return SIZES.get(self.architecture, {})


def _leave_out(config: dict[str, Any], keys: Sequence[str], own: Mapping[str, Any]) -> None:
    """Take keys of parts of a config from it, and those of a class's `own`."""
    for key in keys:
        outer, _, inner = key.rpartition(".")
        if outer:
            config[outer].pop(inner, None)
        elif key in own:
            config.pop(key, None)


def _published(writer: Writer) -> dict[str, Any]:
    """Keys that published configs of a writer's class state, None for those that they have not."""
    return {**PUBLISHED.get(writer.model_type, {}), **PUBLISHED.get(writer.architecture, {})}


def _changed(config: Any, changed: Mapping[str, Any]) -> Any:
    import transformers

    hf: Any = transformers
    values = config.to_dict()
    model_type = values.pop("model_type")
    for at in (values, values.get("text_config", {})):
        at.update({key: value for key, value in changed.items() if key in at})
    for key, value in changed.items():
        outer, _, inner = key.rpartition(".")
        if inner in values.get(outer, {}):
            values[outer] = {**values[outer], inner: value}
    return hf.AutoConfig.for_model(model_type, **values)


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    return found


def asked(server: Server, runtime: str, folder: Path, rank: Rank, **how: Any) -> Any:
    return server.recorded(folder, rank, flags=_FLAGS[runtime], **how)


def _said(facts: Mapping[str, Any]) -> str:
    return f"{facts['step']}: {facts['error']} at {facts.get('at', [])[-2:]}"


def recorded(writer: Writer, server: Server, runtime: str) -> Recorded:
    """All builds of a class with the settings that it has."""
    try:
        start = writer.folder(0, frozenset())
    except Exception as error:  # what transformers raises for a config is the cause
        raise NotRecorded(f"no small model: {type(error).__name__}: {str(error)[:200]}") from error
    draft = writer.draft
    first = asked(server, runtime, start, Rank(), probes=True, draft=draft)
    if first.get("class", "").startswith("Transformers"):
        raise NotRecorded(f"the runtime has no class of its own, it takes {first['class']}")
    if first["error"]:
        raise NotRecorded(_said(first))
    sets: list[tuple[Mapping[str, Any], Any]] = [(config_of(start), first)]
    for number in range(1, COUNT):
        sets.append(_with_sizes(writer, server, runtime, number))
    two = asked(server, runtime, start, Rank(2, 0), draft=draft)
    stages, untied = _stages(writer, server, runtime, start, first)
    forms = [
        asked(server, runtime, folder, Rank(), draft=draft)
        for folder in _in_other_forms(writer, start)
    ]
    methods = {
        name: asked(server, runtime, start, Rank(2, 0), load=False, draft=draft, method=name)
        for name in _METHODS[runtime]
    }
    reads, twice = _reads_weights(writer, server, runtime, start, first)
    refuses = None
    sparse = any(one["kind"] == "experts" for one in first["modules"])
    if runtime == "vllm" and sparse and not draft:
        partition = {"VLLM_PP_LAYER_PARTITION": f"{_layers_of(first)},0"}
        none = asked(
            server, runtime, start, Rank(1, 0, 2, 1), load=False, environment=partition
        )  # fmt: skip
        refuses = bool(none["error"])
    beside = draft and not writer.alone
    return Recorded(sets, two, stages, untied, forms, methods, reads, twice, beside, refuses)


def _asked_for(
    writer: Writer, server: Server, runtime: str, facts: Mapping[str, Any]
) -> Iterator[str]:
    """Keys that published configs state, that transformers need not save, and without which the class
    does not build, or builds otherwise."""
    given = GIVEN.get(writer.model_type, {})
    inside = [
        f"{outer}.{key}" for outer, values in given.items() if isinstance(values, Mapping)
        for key in values if outer.endswith("_config")
    ]  # fmt: skip
    stated = [key for key, value in _published(writer).items() if value is not None]
    for key in (*stated, *writer.own, *inside):
        try:
            folder = writer.folder(0, frozenset(), without=(key,))
        except Exception:  # transformers needs it, too: configs without it are none
            continue
        said = asked(server, runtime, folder, Rank(), load=False, draft=writer.draft)
        other = (
            key in inside
            and not said["error"]
            and said["parameters"].keys() != facts["parameters"].keys()
        )
        if other or f"has no attribute '{key}'" in (said["error"] or ""):
            yield key


def _layers_of(facts: Mapping[str, Any]) -> int:
    """The length of the list whose layers have experts."""
    name = next(one["name"] for one in facts["modules"] if one["kind"] == "experts")
    return next(
        int(one["length"]) for one in facts["modules"]
        if one["kind"] == "list" and name.startswith(f"{one['name']}.")
    )  # fmt: skip


def _in_other_forms(writer: Writer, start: Path) -> Iterator[Path]:
    """Folders of the first set in other forms than transformers saves."""
    names = stored(start)
    if writer.alone:
        yield from (writer.folder(0, frozenset(), form=form) for form in FORMS[writer.architecture])
        return
    with suppress(ValueError):  # of experts that have one form
        yield writer.folder(0, frozenset(), form=OTHER_EXPERTS)
    if any(".in_proj_qkv." in name for name in names):
        yield writer.folder(0, frozenset(), form=FUSED_ROWS)
    if any(".enorm." in name for name in names):
        yield writer.folder(0, frozenset(), form=WITHOUT_ENDS)


def _reads_weights(
    writer: Writer, server: Server, runtime: str, folder: Path, facts: Mapping[str, Any]
) -> tuple[dict[str, str], list[list[str]]]:
    """Linears whose `weight` a class reads while it builds, or once all is loaded, which packed ones
    have not: by the name that is asked for, with numbers starred; and names under which it holds packed
    ones a second time."""
    linears = {"qkv", "merged", "merged_replicated", "column", "row", "replicated"}
    names = dict.fromkeys(
        re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", one["asked"])
        for one in facts["modules"] if one["kind"] in linears and one["asked"] is not None
    )  # fmt: skip
    found: dict[str, str] = {}

    def ends(*packed: str) -> Any:
        return asked(server, runtime, folder, Rank(), load=False, draft=writer.draft, packed=packed)

    every = ends("*")
    if every["error"]:
        found |= {name: "build" for name in names if ends(name)["error"]}
        every = ends(*(name for name in names if name not in found))

    def spoils(*hidden: str) -> bool:
        said = asked(server, runtime, folder, Rank(), draft=writer.draft, hidden=hidden)
        return bool(said["error"])

    if spoils("*"):
        found |= {name: "load" for name in names if name not in found and spoils(name)}
    return found, [one for one in every.get("aliases", ()) if one[0].endswith("weight_packed")]


def _stages(
    writer: Writer, server: Server, runtime: str, start: Path, first: Mapping[str, Any]
) -> tuple[list[Any], bool]:
    """Each of two stages, or why there are none; and whether they are of a head that is not tied, for a
    tied one is refused."""

    def of(folder: Path) -> list[Any]:
        ranks = (Rank(1, 0, 2, stage) for stage in (0, 1))
        return [asked(server, runtime, folder, rank, load=False) for rank in ranks]

    stages = [] if writer.draft else of(start)
    if stages and first["aliases"] and all(stage["error"] for stage in stages):
        stages = of(writer.folder(0, frozenset(), UNTIED))
        return stages, not any(stage["error"] for stage in stages)
    return stages, False


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
        facts = asked(server, runtime, folder, Rank(), load=False, draft=writer.draft)
        if not facts["error"]:
            return config_of(folder), facts
        said = said or _said(facts)
    raise NotRecorded(f"not with other sizes: {said}")


def settings(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Settings to try beside those of a config: each boolean the other way, also of a draft's own block,
    what may be null as null, other words."""
    text = config.get("text_config", config)
    for key, value in {**text, **config, **_of_blocks(config)}.items():
        if isinstance(value, bool) and key not in _IDLE:
            yield {key: not value}
    for key in _NULLABLE:
        if isinstance(text.get(key), int):
            yield {key: None}
    for key, others in CHOICES.get(str(config.get("model_type")), {}).items():
        yield from ({key: other} for other in others)


def _of_blocks(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{block}.{key}": value
        for block in DRAFT_BLOCKS for key, value in config.get(block, {}).items()
    }  # fmt: skip


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
    other = asked(server, runtime, folder, Rank(), draft=writer.draft)
    if other["error"]:
        raise NotRecorded(f"{other['step']}: {other['error']}")
    if _built(other) == _built(facts):
        return None
    new = set(other["parameters"]) - set(facts["parameters"])
    plain = any(not name.endswith(".bias") for name in new)
    two = asked(server, runtime, folder, Rank(2, 0), draft=writer.draft) if plain else None
    sets: list[tuple[Mapping[str, Any], Any]] = [(config_of(folder), {**other, "probes": {}})]
    beside = writer.draft and not writer.alone
    made = table(Recorded(sets, two, [], draft=beside))
    if has_gaps(made, base):
        for number in range(1, COUNT):
            sets.append(_with_sizes(writer, server, runtime, number, changed))
        made = table(Recorded(sets, two, [], draft=beside))
    return made


_ALL = (
    "code", "modules", "parameters", "unread", "aliases", "probes", "renames", "patterns", "packed",
)  # fmt: skip


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
    same = same_as(writer, server, runtime) if writer.architecture and not writer.alone else ""
    if same:
        return {
            "runtime": runtime, "version": version_of(runtime), "architecture": writer.architecture,
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
            said = str(why).replace(f"{writer.room}/", "").partition(_IN_NO_ORDER)[0]
            unbuilt[next(iter(changed))] = said[:160]
        else:
            if made is not None:
                others.append((changed, made))
    values = {**config.get("text_config", config), **config, **_of_blocks(config)}
    found = under_settings(found, others, values, untied=base.untied)
    found |= _of_next_layers(writer, server, runtime, found, config)
    found |= _of_a_tied_head(writer, server, runtime, found)
    choices = (_NEXT, *CHOICES.get(writer.model_type, ()))
    return {
        "runtime": runtime, "version": version_of(runtime),
        "architecture": config["architectures"][0], "model_type": config["model_type"],
        **({"draft": True} if writer.draft else {}), **({"alone": True} if writer.alone else {}),
        **_instead(writer, server, runtime, found), "settings_unbuilt": unbuilt,
        "asks": [*_asked_for(writer, server, runtime, facts)], **found,
        "defaults": {
            **{key: None for key in choices if key in found["flags"]},
            **defaults(writer.model_type, found), **DRAFTS.get(writer.model_type, {}),
            **_own_defaults(writer, server, runtime, found, facts),
        },
        "keys": keys_of_all(config),
        "attribute_map": other_names(writer.model_type),
    }  # fmt: skip


def _instead(
    writer: Writer, server: Server, runtime: str, found: Mapping[str, Any]
) -> dict[str, Any]:
    """Sizes that the class of a draft takes in place of keys of its own that a config leaves out: of
    each, expressions of which the first that a config states counts."""
    if not writer.alone:
        return {}
    config = config_of(writer.folder(0, frozenset()))
    stated = {**{key: config[key] for key in writer.own if key in config}, **_of_blocks(config)}
    lists = {f"len({key})": key for key, value in stated.items() if isinstance(value, list)}
    texts, chains = json.dumps([found["modules"], found["layers"]]), {}
    numbers = {key: key for key, value in stated.items() if type(value) is int}
    for text, key in {**lists, **numbers}.items():
        used = re.search(rf"(?<![\w.]){re.escape(text)}(?![\w.])", texts)
        chain, without = list[str | int](), [key]
        while used and (taken := _taken(writer, server, runtime, found, text, without, lists)):
            chain.append(taken)
            if taken not in lists:
                break
            without.append(lists[str(taken)])
        if chain:
            chains[text] = chain
    return {"instead": chains} if chains else {}


def _own_defaults(
    writer: Writer, server: Server, runtime: str, found: Mapping[str, Any], facts: Mapping[str, Any]
) -> dict[str, bool]:
    """Values that a class takes for settings of its own that a config leaves out: those with which it
    builds the same."""
    values: dict[str, bool] = {}
    for key in found["flags"]:
        value = writer.own.get(key)
        if isinstance(value, bool):
            folder = writer.folder(0, frozenset(), without=(key,))
            said = asked(server, runtime, folder, Rank(), load=False, draft=writer.draft)
            same = said["parameters"].keys() == facts["parameters"].keys()
            values |= {} if said["error"] else {key: value == same}
    return values


# What a class may take for a key: another one, or a number.
_TAKEN = ("hidden_size", "vocab_size", *range(1, 9))


def _taken(
    writer: Writer,
    server: Server,
    runtime: str,
    found: Mapping[str, Any],
    text: str,
    without: Sequence[str],
    lists: Mapping[str, str],
) -> str | int | None:
    """The first expression with which a table says what the class builds at each set of sizes where a
    config is `without` some keys, and `text` among its sizes therefore has no value."""
    sets = []
    for number in range(COUNT):
        folder = writer.folder(number, frozenset(), without=without)
        facts = asked(server, runtime, folder, Rank(), load=False, draft=writer.draft)
        if facts["error"]:
            return None
        sets.append((config_of(folder), facts))
    others = (one for one, key in lists.items() if key not in without)
    numbers = () if text in lists else _TAKEN  # a list may be computed from several keys
    return next((
        one for one in (*others, *numbers)
        if all(says(found, facts, Sizes(config, {}, {}, {text: (one,)}), text)
               for config, facts in sets)
    ), None)  # fmt: skip


def _of_next_layers(
    writer: Writer,
    server: Server,
    runtime: str,
    found: Mapping[str, Any],
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """Answers of a table's class to names that lead nowhere where its config counts draft layers."""
    if writer.draft or config.get("text_config", config).get(_NEXT):
        return {}
    folder = writer.folder(0, frozenset(), {_NEXT: 1})
    facts = asked(server, runtime, folder, Rank(), probes=True)
    unknown = {} if facts["error"] else unknown_of(facts)
    if facts["error"] or unknown == found["unknown"]:
        return {}
    otherwise = {**found.get("otherwise", {}), f"{_NEXT}=1": {"unknown": unknown}}
    return {"otherwise": otherwise, "flags": sorted({*found["flags"], _NEXT})}


def _of_a_tied_head(
    writer: Writer, server: Server, runtime: str, found: Mapping[str, Any]
) -> dict[str, Any]:
    """Answer of a table's class to a head beside tied embeddings, where its first config ties none, and
    whether all of its last stage is written then."""
    if writer.draft or "head" in found["unknown"] or _TIED not in found["flags"]:
        return {}
    folder = writer.folder(0, frozenset(), {_TIED: True})
    facts = asked(server, runtime, folder, Rank(), probes=True)
    said = unknown_of(facts) if not facts["error"] else {}
    if "head" not in said:
        return {}
    otherwise, key = {**found.get("otherwise", {})}, f"{_TIED}=true"
    more: dict[str, Any] = {"unknown": {**found["unknown"], "head": said["head"]}}
    if found["stages"] == "many":
        last = asked(server, runtime, folder, Rank(1, 0, 2, 1))
        if last["error"]:
            more["stages"] = "one"
        elif not all(held["pieces"] for held in last["parameters"].values()):
            more["stages"] = "unwritten"
    return {"otherwise": {**otherwise, key: {**otherwise.get(key, {}), **more}}}


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
    parts = {key: facts[key] for key in ("modules", "parameters", "unread", "aliases", "patterns")}
    return json.dumps(parts, sort_keys=True)


def folder_of(runtime: str, tables: Path = TABLES) -> Path:
    return tables / f"{runtime}-{version_of(runtime)}"


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
        architecture = architecture_of(replace(writer, head_dim=False, draft=False))
    except Exception as error:  # what transformers raises for a config is the cause
        cause = f"no small model: {type(error).__name__}: {str(error)[:200]}"
        return Outcome(runtime, given, given, None, cause)
    architecture += ".draft" if writer.draft else ""
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


def writer_of(room: Path, name: str, *, draft: bool = False) -> Writer:
    """The writer of a model_type, or of a class that reads one."""
    if name in LIKE:
        return Writer(room, LIKE[name], architecture=name, draft=name in ALONE)
    return Writer(room, name, draft=draft)


def done(job: Job) -> list[Outcome]:
    """Outcomes of a job, in a process of its own."""
    writer, found = writer_of(job.room / job.name, job.name), []
    for runtime in job.runtimes:
        began = time.monotonic()
        server = Server(PYTHON, job.servers, runtime)
        for draft in (writer.draft, True)[: 1 + (job.name in DRAFTS)]:
            found.append(outcome(replace(writer, draft=draft), server, runtime))
            seconds = f"{time.monotonic() - began:.0f} s"
            print(runtime, job.name, found[-1].name, found[-1].cause or seconds, flush=True)
        server.close()
    shutil.rmtree(writer.room, ignore_errors=True)
    return found


def shortened(text: str, file: Path) -> str:
    """A table as it is stored in the folder of its release, beside the file's: that of an earlier
    release by what differs from the same class's of the newest."""
    table = json.loads(text)
    release = RELEASES[table["runtime"]].version
    later = whole(_of_release(file, table["runtime"], release))
    if table["version"] == release or not later:
        return text
    return written(what_differs(table, later, release))


def _of_release(file: Path, runtime: str, version: str) -> Path:
    """The table of the same class in another release."""
    return file.parent.with_name(f"{runtime}-{version}") / file.name


def earlier_of(file: Path) -> dict[Path, dict[str, Any]]:
    """Tables of earlier releases that state what differs from the one in a file, as they are read."""
    runtime, _, version = file.parent.name.partition("-")
    paths = [_of_release(file, runtime, one) for one in RELEASES[runtime].earlier]
    found = {path: json.loads(path.read_bytes()) for path in paths if path.exists()}
    return {path: whole(path) for path, own in found.items() if own.get("as_in") == version}


def _is_of_another(file: Path, given: str) -> bool:
    """Tell whether there is a table that was made of another model_type, whose configs name the same
    class."""
    return file.exists() and given not in (file.stem, whole(file)["model_type"])


def still_agreed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Forms that loaders were seen to agree on (agree_classes.py) and that a table made anew keeps: all,
    where it is the same but for answers to names that lead nowhere, which no folder has that they were
    asked about; those with scales of a cache if it takes such as before."""
    if _built_alike(before) != _built_alike(now):
        return {}
    kept = {
        form: sizes for form, sizes in before.get("agrees", {}).items()
        if "scales of a cache" not in form or before.get("caches", True) == now.get("caches", True)
    }  # fmt: skip
    return {"agrees": kept} if kept else {}


def _built_alike(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table without what `still_agreed` passes over."""
    left = ("agrees", "unknown", "caches", "otherwise")
    others = {
        setting: {key: value for key, value in facts.items() if key not in ("unknown", "stages")}
        for setting, facts in table.get("otherwise", {}).items()
    }
    return {
        **{key: value for key, value in table.items() if key not in left},
        "otherwise": {setting: facts for setting, facts in others.items() if facts},
    }


def keep(outcome: Outcome, tables: Path) -> None:
    """Write a table, or note its cause."""
    out = folder_of(outcome.runtime, tables)
    out.mkdir(parents=True, exist_ok=True)
    file, listed = out / f"{outcome.name}.json", out / "not_recorded.json"
    causes = json.loads(listed.read_bytes()) if listed.exists() else {}
    for name in (outcome.given, outcome.name):
        causes.pop(name, None)
    if outcome.text is None and _is_of_another(file, outcome.given):
        return
    held = earlier_of(file)
    if outcome.text is None:
        causes[outcome.name] = outcome.cause
        file.unlink(missing_ok=True)
    else:
        before, now = whole(file) if file.exists() else {}, json.loads(outcome.text)
        made = json.loads(shortened(outcome.text, file))
        file.write_text(written({**made, **still_agreed(before, now)}))
    for path, earlier in held.items():  # they stay what they are
        path.write_text(shortened(written(earlier), file))
    listed.write_text(json.dumps(causes, indent=1, sort_keys=True) + "\n")


def main() -> None:
    """Record what the command line names."""
    takes = argparse.ArgumentParser(description=__doc__)
    takes.add_argument("--runtime", choices=RUNTIMES, action="append")
    takes.add_argument("--tables", type=Path, default=TABLES)
    takes.add_argument("--room", type=Path, help="where servers of loaders listen")
    takes.add_argument("--jobs", type=int, default=os.cpu_count(), help="model_types at a time")
    takes.add_argument("name", nargs="*", help="a model_type, or a class that reads one")
    given = takes.parse_args()
    names = given.name or [*model_types(), *LIKE]
    runtimes = given.runtime or RUNTIMES
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
