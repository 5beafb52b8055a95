"""A plan judged by the header rules of `qconvert validate`, before a byte of the source is read, and its
folder once more, before it is published.

The folder that a plan would make is known to the last header while planning: names, types, places,
config, manifest. It is shown to the validators as if it existed. What they would call an error is
refused, so no conversion ends in a folder that its own validation rejects. An error that the source
already has, and that the plan carries along, is a warning: a source need not be valid to be converted.
Only what a draft's folder is made for must be sound. When all files are written they are judged as they
are, those beside the weights too, which no plan shows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from qconvert import __version__
from qconvert.checkpoint.checkpoint import (
    ASCEND,
    DESCRIPTION,
    HF_QUANT_CONFIG,
    RECEIPT,
    Checkpoint,
    QuantConfig,
    Shard,
    quantization_in,
)
from qconvert.checkpoint.delta import Patched
from qconvert.checkpoint.prepared import layout_of
from qconvert.checkpoint.receipt import read_receipt
from qconvert.core.dtypes import TypesOf
from qconvert.core.errors import CheckpointError, OutputError, PlanError
from qconvert.core.family import RoleIndex, role_index
from qconvert.core.graph import Output, Source, Value
from qconvert.core.json_text import parse_object
from qconvert.core.links import SMALL, open_regular, read_regular
from qconvert.core.profiling import phase
from qconvert.plan.plan import Plan, described
from qconvert.run.folder.prepare import Prepared
from qconvert.run.folder.staging import Staged
from qconvert.runtimes.consumers import consumer_in
from qconvert.runtimes.loader.ask import FILES, loaders_for
from qconvert.runtimes.serving import MISREAD, SIMULATED, Failure, Loading, loads
from qconvert.validation.findings import Finding, Verdict
from qconvert.validation.runner import Folder, judge_headers, rules

_Key = tuple[str, str, str]  # rule, severity, place
_LANGUAGE, _PLAIN = "model.language_model.", "model."


@dataclass(frozen=True, eq=False)
class PlannedCheckpoint(Checkpoint):
    """The folder that a prepared plan would make, which is not on disk yet: its headers, config and
    manifest can be read, its data and files cannot."""

    ready: Prepared | None = None

    @property
    def plan(self) -> Plan:
        assert self.ready is not None
        return self.ready.plan

    def read(self, name: str, limit: int = 0) -> None:
        """None: no file exists yet, whatever is at that path."""

    def there(self, name: str) -> None:
        """None: no file exists yet."""

    def read_shape(self, source: Source) -> None:
        """None: no data exists yet."""

    @cached_property
    def manifest(self) -> dict[str, Any] | None:
        assert self.ready is not None
        return {"identity": _identity(self.ready), **described(self.plan)}

    @cached_property
    def quantization_configs(self) -> tuple[QuantConfig, ...]:
        found = quantization_in(self.config, _modelopt_of(self.plan), self.root / HF_QUANT_CONFIG)
        if (text := self.plan.new_files.get(f"{DESCRIPTION}.json")) is not None:
            stated = {"quant_method": ASCEND, **json.loads(text)}
            return (*found, QuantConfig(f"{DESCRIPTION}.json", stated))
        kept = self.plan.checkpoint.quantization_configs
        return (
            *found,
            *(one for one in kept if one.method == ASCEND and one.where in self.side_files),
        )

    @cached_property
    def role_index(self) -> RoleIndex:
        """The plan's, which has been computed already, unless the family is another."""
        if self.family is self.plan.family:
            return self.plan.role_index
        return role_index(self.family, self.config, self.sources)


@dataclass(frozen=True, eq=False)
class StagedCheckpoint(Checkpoint):
    """A folder whose files are all made and not in sight yet. Its headers are the planned ones, which
    those of its shards have been compared with (run/folder/staging.py); other files are read."""

    staged: Staged | None = None

    def read_shape(self, source: Source) -> None:
        """None: headers alone are judged."""

    def there(self, name: str) -> os.stat_result | None:
        assert self.staged is not None
        file = self.staged.file(name)
        return None if file is None else file.stat()

    def open_file(self, name: str) -> BinaryIO:
        assert self.staged is not None
        file = self.staged.file(name)
        if file is None:
            raise CheckpointError(f"{self.root / name}: was not made")
        return os.fdopen(open_regular(file, follow=False), "rb")

    def read(self, name: str, limit: int = SMALL) -> bytes | None:
        assert self.staged is not None
        file = self.staged.file(name)
        return None if file is None else read_regular(file, limit, follow=False)


@phase("judge")
def judge_staged(folders: Sequence[Staged]) -> None:
    """Raise OutputError, naming the rule, for the first folder of a run whose files have an error that
    its source does not have: nothing of the run is published."""
    source = folders[0].ready.plan.checkpoint
    if isinstance(source, Patched):
        _check_patched(folders[0], source)
    made = [_staged_checkpoint(each) for each in folders]
    known: frozenset[_Key] | None = None
    for one, here in zip(folders, made, strict=True):
        partner = next(
            (o for other, o in zip(folders, made, strict=True) if _are_a_pair(one, other)), None
        )
        found = _errors(Folder(here, source, partner, staged=True), str(one.space.out))
        found = [finding for finding in found if finding.where not in one.edited]
        if found and known is None:
            of_source = _errors(Folder(source, staged=True), "the source")
            known = frozenset(_key(finding, finding.where) for finding in of_source)
        added = [f for f in found if not _is_carried(f, one.ready.plan, known or frozenset())]
        if added:
            raise OutputError(
                f"{one.space.out}: the result fails validation, so nothing is published: "
                f"{_named(added)}. This is a fault of qconvert, or of what wrote to "
                f"{one.space.stage} meanwhile: see qconvert report; qconvert clean removes the work"
            )


def _check_patched(one: Staged, source: Patched) -> None:
    """Raise OutputError for a tensor that a delta did not make what it says: the old checkpoint is not
    the one that was compared, where nothing changed either."""
    file = one.file(RECEIPT)
    receipt = None if file is None else read_receipt(file, len(one.ready.plan.tensors))
    for line in () if receipt is None else receipt.lines:
        made = source.delta.tensors.get(str(line.get("name")))
        if made is not None and line["xxh3"] != made.xxh3:
            raise OutputError(
                f"{line['name']!r}: expected bytes with the hash {made.xxh3}, found {line['xxh3']}: "
                f"{source.name} is not the checkpoint that the delta was made of, so nothing is "
                "published"
            )


@phase("judge")
def judged(parts: Sequence[Prepared], source: Checkpoint, *, serving: bool = True) -> list[Verdict]:
    """A verdict on each folder that is planned from `source`, with what runtimes say of it unless not
    `serving`. Raises PlanError, naming the rule, for the first that would have an error which the source
    does not have."""
    folders = [planned_checkpoint(ready) for ready in parts]
    known: frozenset[_Key] | None = None
    verdicts = []
    for ready, here in zip(parts, folders, strict=True):
        partner = next(
            (o for other, o in zip(parts, folders, strict=True) if _are_a_pair(ready, other)), None
        )
        found = _findings(Folder(here, source, partner, planned=True), "what is planned")
        if found and known is None:
            of_source = _findings(Folder(source, planned=True), "the source")
            known = frozenset(_key(finding, finding.where) for finding in of_source)
        carried, added = list[Finding](), list[Finding]()
        for finding in found:
            is_old = known is not None and _is_carried(finding, ready.plan, known)
            (carried if is_old else added).append(finding)
        errors = [finding for finding in added if finding.severity == "error"]
        if errors:
            raise PlanError(
                f"the result would fail validation, so nothing is read: {_named(errors)}. "
                f"{rules()[errors[0].rule].fix}"
            )
        unfit = [f for f in carried if f.severity == "error" and _is_made_for(f.where, ready.plan)]
        if unfit:
            raise PlanError(
                f"the draft (MTP) layers are not sound: {_named(unfit)}. Take a draft, and a model, of "
                "one release"
            )
        lines: tuple[str, ...] = ()
        if serving:
            # At which sizes runtimes whose loaders are simulated, or asked themselves, load the folder.
            manifest, loader = here.manifest or {}, ready.options.loader
            loaders = {} if loader is None else loaders_for(loader, consumer_in(manifest))
            files = read_by_runtimes(ready.plan) if loaders else {}
            answers = loads(here.config, TypesOf(here.sources), manifest, loaders, files)
            said = [answers[name] for name in SIMULATED if name in answers]
            lines = tuple(line for loading in said for line in loading.lines())
            asked_of = [loading for loading in said if loading.asked]
            added += (*_unread(here, asked_of), *_not_served(ready.plan, asked_of))
        verdicts.append(Verdict(tuple(added), tuple(carried), lines))
    return verdicts


def _not_served(plan: Plan, said: Sequence[Loading]) -> Iterator[Finding]:
    """Runtimes that do not load the result at the size that a step was asked for; all of them, where
    none loads it at any."""
    asked = [tp for entry in plan.log if (tp := entry.options.get("tp")) is not None]
    nowhere = said and all(one.verdict == "does not load" for one in said)
    for one in said:
        at = next((tp for tp in asked if one.at(tp) == "does not load"), None)
        found = one.failures.get(at or min(one.failures, default=0), Failure("QC130", one.fails))
        if at is not None and not nowhere:
            how = "loads it wrong" if found.rule == MISREAD else "does not load it"
            text = f"{how} at --tp {at}: {found.why}"
        else:
            text = one.fails
        if nowhere or at is not None:
            who = f"{one.runtime} {one.version}"
            yield Finding(found.rule, "warning", "config.json", f"{who} {text}")


def _unread(here: PlannedCheckpoint, said: Sequence[Loading]) -> Iterator[Finding]:
    """Tensors of unknown role that none of the simulated runtimes reads, or for which one refuses the
    folder: nobody knows what they are for. Frequencies of positions are computed by all."""
    if not said:
        return
    who = " and ".join(f"{one.runtime} {one.version}" for one in said)
    for name in here.role_index.unknown:
        if all(name in one.unread for one in said) and not name.endswith(".inv_freq"):
            message = f"a tensor of unknown role, as it is in the source, which {who} read nowhere"
            yield Finding("QC132", "warning", name, message)


def planned_checkpoint(ready: Prepared) -> PlannedCheckpoint:
    """The folder that a prepared plan would make, as its headers will describe it."""
    plan, layout = ready.plan, ready.layout
    sources = {source.name: source for file in layout.files for source in file.tensors}
    root = Path("OUT")  # a name for messages: nothing is opened
    return PlannedCheckpoint(
        root,
        tuple(Shard(root / file.name, file.size, 0) for file in layout.files),
        sources,
        plan.config,
        b"",
        tuple(sorted({*plan.side_files, *plan.new_files})),
        (),
        "",
        len(layout.files) > 1,
        {"format": plan.checkpoint.metadata.get("format", "pt"), **plan.metadata},
        asked=plan.checkpoint.reading,
        ready=ready,
    )


def _staged_checkpoint(staged: Staged) -> StagedCheckpoint:
    """The folder as its files are. Raises CheckpointError for one that is missing or broken."""
    planned, root = planned_checkpoint(staged.ready), staged.space.out
    here = StagedCheckpoint(
        root, planned.shards, planned.sources, {}, b"", planned.side_files, (), "",
        planned.indexed, planned.metadata, asked=planned.asked, staged=staged,
    )  # fmt: skip
    data = here.read("config.json")
    if data is None:
        raise CheckpointError(f"{root / 'config.json'}: was not made")
    return replace(here, config=parse_object(data, root / "config.json"), config_bytes=data)


def _identity(ready: Prepared) -> dict[str, Any]:
    """The part of the manifest's identity that is known without reading data."""
    return {
        "qconvert": __version__,
        "fingerprint": ready.fingerprint,
        "source": ready.plan.checkpoint.header_digest,
        "passes": [{"name": entry.name, "options": entry.options} for entry in ready.plan.log],
    }


def read_by_runtimes(plan: Plan) -> dict[str, bytes]:
    """Small files beside config.json that a runtime's loader reads, made here or copied."""
    found = {}
    for name in FILES:
        text = plan.new_files.get(name)
        data = None if text is None else text.encode()
        if data is None and name in plan.side_files:
            data = plan.checkpoint.read(name)
        if data is not None:
            found[name] = data
    return found


def _modelopt_of(plan: Plan) -> Mapping[str, Any] | None:
    """hf_quant_config.json, made here or copied."""
    text = plan.new_files.get(HF_QUANT_CONFIG)
    if text is not None:
        found = json.loads(text)
        return found if isinstance(found, dict) else None
    if HF_QUANT_CONFIG not in plan.side_files:
        return None
    blocks = plan.checkpoint.quantization_configs
    return next((config.block for config in blocks if config.where == HF_QUANT_CONFIG), None)


def _are_a_pair(here: Prepared | Staged, other: Prepared | Staged) -> bool:
    """Tell whether `other` is the GPU side of the CPU folder `here`."""
    facts, others = (
        (one if isinstance(one, Prepared) else one.ready).plan.facts for one in (here, other)
    )
    return other is not here and "amx" in facts and "pair" in facts and "pair" in others


def _findings(folder: Folder, what: str) -> list[Finding]:
    try:
        return judge_headers(folder)
    except CheckpointError as error:
        return [Finding("QC001", "error", what, str(error))]


def _errors(folder: Folder, what: str) -> list[Finding]:
    return [finding for finding in _findings(folder, what) if finding.severity == "error"]


def _key(finding: Finding, where: str) -> _Key:
    """The identity of a finding: whether the class has a text model inside another or is one, its
    tensors are the same."""
    plain = _PLAIN + where.removeprefix(_LANGUAGE) if where.startswith(_LANGUAGE) else where
    return finding.rule, finding.severity, plain


def _is_carried(finding: Finding, plan: Plan, known: frozenset[_Key]) -> bool:
    """Tell whether the source has the same finding, for the same tensor or file or for one that this one
    is made of."""
    if _key(finding, finding.where) in known:
        return True
    if finding.rule == "QC037" and finding.where in _put_back(plan):
        return True
    output = plan.tensors.get(finding.where)
    origins = () if output is None else _origins(output)
    return any(_key(finding, name) in known for name in origins)


def _put_back(plan: Plan) -> frozenset[str]:
    """Places of quantization blocks that `unprepare` puts back where they stood before: that runtimes do
    not look there, or find another block first, is as old as they are."""
    config = plan.checkpoint.config
    if layout_of(config) is None or all(entry.name != "unprepare" for entry in plan.log):
        return frozenset()
    replaced = config["quantization_config"]["replaced"]
    return frozenset(": ".join(("config.json", *entry["at"])) for entry in replaced)


def _origins(output: Output) -> Iterator[str]:
    """Names of the source's tensors that an output is made of."""
    for origin in dict.fromkeys(piece.origin for piece in output.pieces):
        if isinstance(origin, Value):
            for arg in origin.node.args:
                yield from _origins(arg)
        else:
            yield origin.name


def _is_made_for(name: str, plan: Plan) -> bool:
    """Tell whether a tensor is what a command made the folder for: the draft that it took out of a
    model, or put into one."""
    drafts = {"extract_draft", "graft_draft"} & {entry.name for entry in plan.log}
    return bool(drafts) and plan.family.is_mtp(name, plan.role_index.dims)


def _named(errors: Sequence[Finding]) -> str:
    first = errors[0]
    more = f" ({len(errors) - 1} more errors like it)" if len(errors) > 1 else ""
    return f"{first.rule}: {first.where}: {first.message}{more}"
