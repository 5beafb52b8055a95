"""A folder under a runtime: what `--for NAME==VERSION --tp N` asks, and the simulator's answer for all
ranks together. The loaders of sglang and vLLM are simulated.

`asked` is the one place that says whether a runtime loads a folder: it does, it does not, or that is not
known for the class or the version. Every plan, card, advice and validation goes through it; `launch` is
the one place that writes a line which starts a server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any, Literal

from qconvert.core.dtypes import TensorType
from qconvert.core.family import draft_algorithm
from qconvert.core.manifest_keys import RANK
from qconvert.core.names import KV_SCALES
from qconvert.core.shown import count
from qconvert.core.versions import RELEASES, SGLANG, VLLM
from qconvert.runtimes.classes.names import of_draft
from qconvert.runtimes.classes.record import architecture_of, recorded
from qconvert.runtimes.consumers import RUNTIMES, Consumer, consumer_in, refused_form
from qconvert.runtimes.loader.ask import RuntimeLoader
from qconvert.runtimes.loading.building import text_config
from qconvert.runtimes.loading.load_weights import SimulatedLoad, Tensors
from qconvert.runtimes.loading.setting import LoadRefused, NotSimulated, Setting
from qconvert.runtimes.misreadings import (
    fp8_experts,
    group_columns,
    integer_groups,
    misread,
    misread_of_ranks,
    refused_by_gpu,
)
from qconvert.runtimes.pipeline import one_stage
from qconvert.runtimes.sglang import simulator as sglang
from qconvert.runtimes.vllm import simulator as vllm

_SGLANG = Consumer("sglang")
SIMULATED = {"sglang": SGLANG.version, "vllm": VLLM.version}
_SIMULATE = {"sglang": sglang.simulate, "vllm": vllm.simulate}
NO_FUSION = "--disable-shared-experts-fusion"
MISREAD = "QC133"  # the rule of what a runtime reads wrong, without an error
# What a statement about a runtime, a folder and a number of ranks can be.
Verdict = Literal["loads", "does not load", "not known"]


@dataclass(frozen=True, slots=True)
class ServingSetup:
    """A runtime and how many ranks serve a folder: `tp` of tensor parallelism and `ep` groups of experts
    among them; `stages` are the layers of each pipeline stage, or their number alone; `loader`, the
    runtime itself, is asked in place of its simulator."""

    consumer: Consumer
    tp: int = 1
    stages: tuple[int, ...] = (1,)
    ep: int = 1
    loader: RuntimeLoader | None = None

    @property
    def setting(self) -> Setting:
        if len(self.stages) == 1:
            return Setting(tp=self.tp, pp=self.stages[0], ep=self.ep)
        return Setting(tp=self.tp, pp=len(self.stages), ep=self.ep, partition=self.stages)

    def __str__(self) -> str:
        version = f" {self.consumer.version}" if self.consumer.version else ""
        return f"{self.consumer.name}{version}"

    @property
    def answering(self) -> Consumer:
        """The runtime with the version that answers."""
        return Consumer(self.consumer.name, _version_of(self.consumer, self.loader))

    @property
    def who(self) -> str:
        """The runtime and version that answers."""
        return f"{self.answering.name} {self.answering.version}"


@dataclass(frozen=True, slots=True)
class Offered:
    """A folder as a runtime gets it: config and headers; in how many groups its fused rows are; the
    pipeline stage that it holds alone, and the layers of each; whether it is a draft without its
    model; small files beside the config, which the runtime's own loader reads (loader/ask.py)."""

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorType]
    groups: int | None = None
    place: tuple[int, tuple[int, ...]] | None = None
    alone: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def stage(self) -> int | None:
        return None if self.place is None else self.place[0]

    def digest(self) -> bytes:
        found = blake2b(json.dumps(self.config, sort_keys=True).encode())
        for name, kind in self.tensors.items():
            found.update(f"{name} {kind.dtype} {kind.shape}\n".encode())
        found.update(f"{self.groups} {self.place} {self.alone}".encode())
        return found.digest()


@dataclass(frozen=True)
class Answer:
    """Answer of all ranks of a server together. `ignored` are tensors that no rank reads though one
    looked for their parameter, and `of_cache` the scales of a KV cache among all that none reads: it is
    served with a scale of 1 then; `unread`, all of those; `nbytes` is what the fullest rank holds;
    `required_flag` is an option with which the folder loads whole, where it does not without; `cure` is
    what to do about a folder that the class is known to misread (runtimes/misreadings.py), of which
    nothing else is said."""

    ranks: tuple[SimulatedLoad, ...]
    ignored: tuple[str, ...]
    required_flag: str = ""
    of_cache: tuple[str, ...] = ()
    cure: str = ""
    unread: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        return all(rank.whole for rank in self.ranks) and not self.ignored

    @property
    def verdict(self) -> Verdict:
        return "loads" if self.whole or self.required_flag else "does not load"

    @property
    def refused(self) -> SimulatedLoad | None:
        return next((rank for rank in self.ranks if rank.refused is not None), None)

    @property
    def rule(self) -> str:
        """The rule of validation that finds what goes wrong first, "" where nothing does."""
        if self.refused is not None:
            return "QC130"
        for rank in self.ranks:
            if rank.missing or rank.empty:
                return "QC131"
            if rank.misread:
                return MISREAD
        return "QC132" if self.ignored else ""

    @property
    def nbytes(self) -> int:
        return max(rank.nbytes for rank in self.ranks)

    @property
    def setting(self) -> Setting:
        return self.ranks[0].setting


@dataclass(frozen=True, slots=True)
class NotKnown:
    """No answer: nobody has held a simulator to this runtime's loader for the class, version or setting.
    `subject` is what nothing is known for."""

    subject: str
    why: str
    verdict: Verdict = "not known"

    def __str__(self) -> str:
        return f"not known for {self.subject}: {self.why}"


def asked(
    consumer: Consumer,
    folder: Offered,
    setting: Setting,
    *,
    every: bool = True,
    loader: RuntimeLoader | None = None,
) -> Answer | NotKnown:
    """Tell whether a runtime loads a folder; one of a stage as it was cut. With a `loader` the runtime
    itself says so, of any class and version."""
    if loader is None and (unknown := version_not_known(consumer)) is not None:
        return unknown
    if consumer.name not in SIMULATED:
        return NotKnown(consumer.name, "its loader is not simulated")
    if folder.place is not None:
        setting = replace(setting, pp=len(folder.place[1]), partition=folder.place[1])
    try:
        answer = draft_alone if folder.alone else served
        return answer(folder, setting, consumer, every=every, loader=loader)
    except NotSimulated as reason:
        return NotKnown(class_of(folder.config), str(reason))


def version_not_known(consumer: Consumer) -> NotKnown | None:
    """The answer for a version of which nothing was recorded, None for a known one and where none is
    named."""
    if consumer.name not in SIMULATED or consumer.version is None:
        return None
    release = RELEASES[consumer.name]
    if release.known(consumer.version) is not None:
        return None
    known = " and ".join((*release.earlier, release.version))
    which = f"{consumer.name} {consumer.version}"
    return NotKnown(which, f"this version is not known; known are {consumer.name} {known}")


def _version_of(consumer: Consumer, loader: RuntimeLoader | None) -> str:
    """The version of a runtime that answers, as its package states it; what is asked for where that is
    not known."""
    if loader is not None:
        return loader.version
    release, asked = RELEASES[consumer.name], consumer.version
    return release.version if asked is None else release.known(asked) or asked


def class_of(config: Mapping[str, Any]) -> str:
    """The class that a config names, for messages."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    return str(first or config.get("model_type") or "a config without a class")


def launch(runtime: str, folder: str, tp: int = 0, stages: int = 1, option: str = "") -> str:
    """The line that starts a runtime on a folder. Who prints it for a folder that the runtime is not
    known to load says so beside it."""
    if runtime not in SIMULATED:
        return f'AutoModelForCausalLM.from_pretrained("{folder}")'
    start, ranks, parts = {
        "sglang": ("python -m sglang.launch_server --model-path", "--tp-size", "--pp-size"),
        "vllm": ("vllm serve", "--tensor-parallel-size", "--pipeline-parallel-size"),
    }[runtime]
    words = [start, folder, *([ranks, str(tp)] if tp else [])]
    return " ".join(
        [*words, *([parts, str(stages)] if stages > 1 else []), *([option] * bool(option))]
    )


def launch_ranks(folders: str, tp: int, ep: int = 1) -> str:
    """The line that starts vLLM on the folders of ranks that lie in `folders` (vllm/rank_state.py)."""
    pattern = f"../rank-{{rank}}-of-{tp}/model{{part}}.safetensors"
    options = ["--load-format sharded_state", *(["--enable-expert-parallel"] if ep > 1 else [])]
    options.append(f'--model-loader-extra-config \'{{"pattern": "{pattern}"}}\'')
    return launch("vllm", f"{folders}/rank-0-of-{tp}", tp, option=" ".join(options))


def ranks_of(setting: Setting, only: int | None = None) -> Iterator[Setting]:
    """The ranks that differ in what they build or read: of each stage, or of one, the first and the
    last, and one of each group of experts."""
    for stage in range(setting.pp) if only is None else (only,):
        numbers = {0, setting.tp - 1, *range(0, setting.tp, setting.moe_tp)}
        for rank in sorted(numbers):
            yield replace(setting, stage=stage, rank=rank)


def served(
    folder: Offered,
    setting: Setting,
    consumer: Consumer = _SGLANG,
    *,
    every: bool = True,
    draft: bool = False,
    loader: RuntimeLoader | None = None,
) -> Answer:
    """Ask a runtime's simulator, or its own loader, for every kind of rank, or for the last alone; where
    the folder does not load whole, also with shared experts kept apart. `draft`: as the draft model that
    the folder holds. Raises NotSimulated."""
    runtime, version = consumer.name, consumer.version
    if setting.tp % setting.ep:
        raise NotSimulated(f"tp {setting.tp} that ep {setting.ep} does not divide")
    if loader is None and setting.pp > 1 and one_stage(runtime, folder.config, version):
        refused = LoadRefused("", "", class_of(folder.config), "it runs in one pipeline stage only")
        return Answer((SimulatedLoad(setting, refused),), ())
    folder = replace(folder, tensors=(named := Tensors.of(folder.tensors)))
    known = None
    if loader is None or RELEASES[runtime].known(loader.version):
        known = named.once(f"misread {runtime}", folder.config, partial(misread, runtime))
        if not known:
            of_groups = partial(integer_groups, runtime)
            groups = named.once(f"groups {runtime}", folder.config, of_groups)
            at = groups.get(setting.moe_tp)
            columns = group_columns(folder.tensors, at[0]) if at else 0
            known = misread_of_ranks(runtime, groups, setting.moe_tp, columns=columns)
    experts = named.once("fp8 experts", folder.config, fp8_experts)
    if (refusal := refused_by_gpu(runtime, experts, setting.capability)) is not None:
        return Answer(
            (SimulatedLoad(setting, refusal),), (), cure="dequantize them (qconvert dequant)"
        )
    if known:
        end = None
        if known.refused:
            end = LoadRefused("", "", known.first, known.wrong[known.first])
        wrong = {} if known.refused else known.wrong
        ranks = (SimulatedLoad(setting, end, misread=wrong),)
        return Answer(ranks, known.unread, cure=known.cure)
    simulate = partial(_SIMULATE[runtime], groups=folder.groups, draft=draft, version=version)
    if loader is not None:
        simulate = partial(loader.load, groups=folder.groups, draft=draft, files=folder.files)
    answer = _served(simulate, folder, setting, every=every)
    if answer.whole or setting.disable_shared_experts_fusion:
        return answer
    if not any(rank.shared_fused for rank in answer.ranks):
        return answer
    split = replace(setting, disable_shared_experts_fusion=True)
    apart = _served(simulate, folder, split, every=every)
    return replace(answer, required_flag=NO_FUSION) if apart.whole else answer


def drafted(
    folder: Offered,
    model: Answer,
    consumer: Consumer,
    *,
    every: bool = True,
    loader: RuntimeLoader | None = None,
) -> Answer | None:
    """The same for the draft model in the folder, started as its model is, whose answer is `model`: with
    the option that mends it. None where there is none. Raises NotSimulated, also for one in pipeline
    stages."""
    setting = model.setting
    answered = bool(model.cure) or model.refused is not None
    own: Mapping[str, TensorType] = {}
    if not answered:
        named = Tensors.of(folder.tensors)
        if loader is None:
            of = partial(_draft, consumer)
            own = named.once(f"draft {consumer}", folder.config, of)
        elif loader.draft_of(folder.config, named):
            own = named
    if not own:
        return None
    if setting.pp > 1:
        raise NotSimulated("a draft in pipeline stages")
    if model.required_flag == NO_FUSION:
        setting = replace(setting, disable_shared_experts_fusion=True)
    draft = Offered(folder.config, own, folder.groups, files=folder.files)
    return served(draft, setting, consumer, every=every, draft=True, loader=loader)


def _draft(consumer: Consumer, config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    record = recorded(consumer.name, architecture_of(config), consumer.version, draft=True)
    return Tensors.of(of_draft(record, text_config(config), tensors))


def draft_alone(
    folder: Offered,
    setting: Setting,
    consumer: Consumer,
    *,
    every: bool = True,
    loader: RuntimeLoader | None = None,
) -> Answer:
    """The same for a folder that holds a draft and not its model. Raises NotSimulated, also under vLLM,
    for which drafts are not simulated, and for a class without a draft."""
    if own := draft_algorithm(folder.config):
        beside = consumer.name == "vllm"  # its loader would need the model, too
        try:
            return served(
                folder,
                setting,
                consumer,
                every=every,
                draft=True,
                loader=None if beside else loader,
            )
        except NotSimulated as reason:
            why = f"a draft of {own}, which is loaded beside its model" if beside else reason
            raise NotSimulated(str(why)) from None
    if loader is not None:
        return served(folder, setting, consumer, every=every, draft=True, loader=loader)
    if consumer.name != "sglang":
        raise NotSimulated(f"a draft under {consumer.name}")
    if setting.pp > 1:
        raise NotSimulated("a draft in pipeline stages")
    found = _draft(consumer, folder.config, Tensors.of(folder.tensors))
    if not found:
        raise NotSimulated("a draft of its class")
    return served(Offered(folder.config, found), setting, consumer, every=every, draft=True)


def _served(
    simulate: Callable[..., SimulatedLoad], folder: Offered, setting: Setting, *, every: bool
) -> Answer:
    config, tensors, stage = folder.config, folder.tensors, folder.stage
    ranks: list[SimulatedLoad] = []
    asked = list(ranks_of(setting, stage))
    for rank in asked if every else asked[-1:]:
        ranks.append(simulate(config, tensors, rank))
        if ranks[-1].refused is not None:
            break
    looked = {name for rank in ranks for name in rank.ignored}
    if looked and stage is not None and ranks[-1].refused is None:
        # A stage's folder may hold what another stage builds: the last one's, a draft's embeddings.
        for end in {0, setting.pp - 1} - {stage}:
            at = replace(ranks[-1].setting, stage=end)
            looked -= set(tensors) - set(simulate(config, tensors, at).unread)
    unread = set.intersection(*(set(rank.unread) for rank in ranks))
    left = [name for name in tensors if name in unread]
    cache = tuple(name for name in left if name.endswith(KV_SCALES))
    return Answer(
        tuple(ranks),
        tuple(name for name in left if name in looked and name not in cache),
        of_cache=cache,
        unread=tuple(left),
    )


_SIZES = (1, 2, 4, 8)
# Letters of a reason in a plan's line: it may hold names of a folder that is not trusted.
_MOST_WHY = 300


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a size does not load: the rule of validation that finds it
    (validators/headers/for_runtime.py), and the reason in words."""

    rule: str
    why: str


@dataclass(frozen=True, slots=True)
class Loading:
    """At which tensor-parallel sizes a runtime of this version loads a folder whole. `sizes` are by the
    option with which it does ("" for none), with the bytes of weights that a rank then holds; `cache`:
    what it leaves of the KV cache's scales there. `failed`: the first at which it does not, and why;
    `failures`, all; `draft`: why it does not load the draft in the folder; `unknown`: why nothing is
    said of its other sizes, or of any. `asked` are the sizes that the simulator was asked of;
    `unread`: tensors that it reads nowhere at the first, or the one for which it refuses the folder;
    `seen`: its own loader was asked, not its simulator."""

    runtime: str
    version: str
    sizes: Mapping[str, Mapping[int, int]]
    failed: str = ""
    draft: str = ""
    unknown: str = ""
    cache: str = ""
    asked: tuple[int, ...] = ()
    unread: frozenset[str] = frozenset()
    seen: bool = False
    failures: Mapping[int, Failure] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """Tell whether it loads the folder at any size."""
        return "loads" if self.sizes else "does not load" if self.failed else "not known"

    @property
    def fails(self) -> str:
        """`failed` as a predicate."""
        first = next(iter(self.failures.values()), None)
        how = "loads it wrong " if first and first.rule == MISREAD else "does not load it "
        return self.failed.replace("not ", how, 1) if self.failed[:4] == "not " else self.failed

    def at(self, tp: int) -> Verdict:
        """Tell whether it does at one."""
        if any(tp in held for held in self.sizes.values()):
            return "loads"
        by_form = bool(self.failed) and not self.asked
        return "does not load" if by_form or tp in self.asked else "not known"

    @property
    def least(self) -> tuple[int, str]:
        """The smallest size, and the option with which it loads there; without options first."""
        option = "" if "" in self.sizes else next(iter(self.sizes))
        return min(self.sizes[option]), option

    def lines(self) -> tuple[str, ...]:
        """For a plan."""
        who = f"{self.runtime} {self.version} ({'H200, its own loader' if self.seen else 'H200'})"
        found = [
            f"{who} at tp {', '.join(map(str, numbers))}" + (f" with {option}" if option else "")
            for option, numbers in self.sizes.items()
        ]
        found += [f"{who} {text}" for text in (self.cache, self.failed, self.draft) if text]
        return (*found, *([f"{who}: {self.unknown}"] if self.unknown else []))


def loads(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorType],
    facts: Mapping[str, Any],
    loaders: Mapping[str, RuntimeLoader] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> dict[str, Loading]:
    """Tell whether each runtime loads a folder, by the runtime's name. `facts` are its manifest's: the
    order of fused rows, which pipeline stage it is, and the form of its experts. `loaders` are those of
    runtimes that are asked themselves, with the small `files` that they read. Where no simulator
    knows the class, a form that no class of the runtime reads is said not to load. Nothing for folders
    of experts for CPUs or for kernels, which no server loads by themselves."""
    if facts.get("amx") is not None or RANK in facts or facts.get("trtllm_gen") is not None:
        return {}
    groups, stage = facts.get("gdn_groups"), facts.get("stage")
    place = None
    if stage is not None:
        place = _place(stage)
        if place is None:
            return {}
    order = groups if type(groups) is int else None
    # Sorted, so that what is said first does not depend on where the headers come from.
    alone = facts.get("draft") is not None or bool(draft_algorithm(config))
    folder = Offered(config, Tensors.of(tensors).by_name, order, place, alone)
    digest, made_for = folder.digest(), consumer_in(facts)
    consumers = {name: Consumer(name) for name in RUNTIMES}
    if made_for is not None and made_for.name in SIMULATED:
        consumers[made_for.name] = made_for  # of its version
    said = {}
    for name, consumer in consumers.items():
        key = digest, consumer
        if key not in _SAID:
            if len(_SAID) >= _MOST_SAID:
                _SAID.clear()
            _SAID[key] = _loading(consumer, folder)
        said[name] = _of_form(_SAID[key], consumer, config, facts)
    whole = replace(folder, files=files or {})
    asked_too = {
        name: _loading(Consumer(name), whole, one) for name, one in (loaders or {}).items()
    }
    return said | asked_too


def _of_form(
    one: Loading, consumer: Consumer, config: Mapping[str, Any], facts: Mapping[str, Any]
) -> Loading:
    """The same; or that the runtime reads no such form, where nothing else is known of a known
    version."""
    if one.verdict != "not known" or version_not_known(consumer) is not None:
        return one
    why = refused_form(one.runtime, config, facts)
    return replace(one, failed=f"not at any tp: {why}", unknown="") if why else one


# What was said of a folder: a plan is asked for its card and again when it is judged, 2 s for
# 92,000 tensors. A plan of stages has a folder for each.
_SAID: dict[tuple[bytes, Consumer], Loading] = {}
_MOST_SAID = 192


def _place(stage: object) -> tuple[int, tuple[int, ...]] | None:
    """A stage's number and partition."""
    if not isinstance(stage, Mapping):
        return None
    number, partition = stage.get("number"), stage.get("partition")
    if type(number) is not int or not isinstance(partition, Sequence):
        return None
    layers = tuple(size for size in partition if type(size) is int and size > 0)
    return (number, layers) if 0 <= number < len(layers) == len(partition) else None


_NOT_AT = "not at tp "


def _loading(consumer: Consumer, folder: Offered, loader: RuntimeLoader | None = None) -> Loading:
    whole: dict[str, dict[int, int]] = {}
    failed = draft = unknown = cache = ""
    unread: frozenset[str] | None = None
    failures: dict[int, Failure] = {}
    sizes: list[int] = []
    for tp in _SIZES:
        beside = None
        at = Setting(tp=tp, rank=tp - 1)
        answer = asked(consumer, folder, at, every=False, loader=loader)
        if isinstance(answer, NotKnown):
            which = f"at tp {tp} " if sizes else ""
            unknown = f"{which}{_short(str(answer))}"
            break
        sizes.append(tp)
        if unread is None:
            end = answer.refused.refused if answer.refused is not None else None
            unread = frozenset(answer.unread if end is None else (end.where,))
        try:
            if not folder.alone:
                beside = drafted(folder, answer, consumer, every=False, loader=loader)
        except NotSimulated as reason:
            draft = draft or f"is not known to load its draft, which is not simulated: {reason}"
        if answer.verdict == "loads":
            whole.setdefault(answer.required_flag, {})[tp] = answer.nbytes
            if answer.of_cache and not cache:
                cache = (
                    f"does not read {count(len(answer.of_cache), 'scale')} of the KV cache, such as "
                    f"{answer.of_cache[0]}, and takes 1"
                )
            if beside is not None and not beside.whole and not draft:
                option = f", but with {beside.required_flag}" if beside.required_flag else ""
                draft = f"does not load its draft at tp {tp}{option}: {_why(beside)}"
            continue
        why = f"{_why(answer)}; {answer.cure}" if answer.cure else _why(answer)
        failures[tp] = Failure(answer.rule, why)
        if answer.cure and not whole and not failed:
            right = "" if answer.refused else " right"
            failed = f"does not load it{right}: {why}"
            failures = dict.fromkeys(_SIZES, failures[tp])
            sizes = list(_SIZES)
            break
        failed = failed or f"{_NOT_AT}{tp}: {why}"
    if failed.startswith(_NOT_AT) and not (whole or unknown):
        failed = f"not at any tp: {failed.partition(': ')[2]}"
    which, seen = _version_of(consumer, loader), loader is not None
    left = unread or frozenset()
    return Loading(
        consumer.name,
        which,
        whole,
        failed,
        draft,
        unknown,
        cache,
        tuple(sizes),
        left,
        seen,
        failures,
    )


def _why(answer: Answer) -> str:
    """The first thing that goes wrong, in a few words."""
    rank = answer.refused
    if rank is not None and rank.refused is not None:
        text = f"{rank.refused.where}: {rank.refused.why}"
    else:
        last = answer.ranks[-1]
        missing = (*last.missing, *last.empty)
        if missing:
            text = f"{missing[0]} stays unwritten"
        elif last.misread:
            name, why = next(iter(last.misread.items()))
            text = f"{name} is read wrong: {why}"
        else:
            text = f"{answer.ignored[0]} is not read"
    return _short(text)


def _short(text: str) -> str:
    return text if len(text) <= _MOST_WHY else f"{text[: _MOST_WHY - 4]} ..."
