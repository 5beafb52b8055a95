"""One validation by several machines: each does a part of the work on tensor data and leaves a file, and
from all files comes the report that one machine would have made.

Tasks are divided by bytes in the order of the layers, into runs: results of the parts, one after
another, are those of one machine in its order. The part of shard 0 also holds what is found before that
work: in headers, and by what is not divided (kt-kernel's client).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from qconvert import __version__
from qconvert.checkpoint.checkpoint import RECEIPT, Checkpoint
from qconvert.core.errors import CheckpointError, OutputError
from qconvert.core.json_text import parse_object
from qconvert.core.regular import read_regular
from qconvert.core.shown import count
from qconvert.run.division import MOST_SHARDS, Shard
from qconvert.validation.findings import Finding, Measure, OnlyRead, Table
from qconvert.validation.runner import Begun, Level, Ran, Report, Request, begin, rules, validators
from qconvert.validation.workers import Numbered, Progress, Result, grouped

# A measure has about 200 bytes: a million of them.
MOST_BYTES = 256 << 20
_FORMAT = 1
# Levels that read weights, and so have something to divide.
DIVIDED: Mapping[str, Level] = {"sample": "sample", "full": "full"}
_SHOWN = 8
_MOST = 1 << 60  # of tasks, and of bytes
_KINDS: Mapping[str, type[Result]] = {"finding": Finding, "measure": Measure, "read": OnlyRead}
# What parts of one validation have in common, and what is said where they do not.
_SAME = {
    "folder": "the folder was another one, or in another state",
    "against": "the source was another one",
    "beside": "--pair or --draft was another one",
    "level": "another --level was given",
    "request": "other options were given",
    "tasks": "the checks were others (packages with validators differ)",
}

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """What one of several machines found. `identity` is what all of them have in common; `tasks` of
    `of_tasks` and `nbytes` of `of_bytes` were its share. `results` are those of its tasks, each with
    the number of its validator; `begun`, of shard 0 alone, is what was found before."""

    shard: Shard
    identity: Mapping[str, str]
    tasks: int
    of_tasks: int
    nbytes: int
    of_bytes: int
    results: tuple[tuple[int, Result], ...]
    begun: Mapping[str, Any] | None

    @property
    def file_name(self) -> str:
        return f"part-{self.shard.index}-of-{self.shard.count}.json"

    @property
    def errors(self) -> int:
        """Errors in the data that this part read."""
        found = [item for _, item in self.results if isinstance(item, Finding)]
        return sum(finding.severity == "error" for finding in found)


def validate_part(
    out: Path,
    against: str | None = None,
    *,
    shard: Shard,
    request: Request,
    pair: str | None = None,
    draft: str | None = None,
    progress: Progress | None = None,
    follow_links: bool = False,
    said: Callable[[str], str] = str,
) -> Part:
    """As `validate_folder`, of one part of the tasks. `said` makes of a text about a folder that stands
    for another (headers of a store) one about that."""
    begun = begin(
        out, against, request=request, pair=pair, draft=draft, follow_links=follow_links,
        leads=shard.index == 0,
    )  # fmt: skip
    tasks = begun.tasks
    groups = grouped(tasks)
    mine = [numbered for group in _share(groups, shard) for numbered in group]
    # Before the work: it changes the report.
    before = _begun_json(begun, said) if shard.index == 0 else None
    identity = _identity(begun, groups)
    results = tuple((n, _renamed(item, said)) for n, item in begun.work(mine, progress))
    own, every = (sum(task.nbytes for _, task in some) for some in (mine, tasks))
    if begun.folder is not None and _state(begun.folder.checkpoint) != identity["folder"]:
        raise CheckpointError(f"{out} changed while it was validated; start all parts again")
    return Part(shard, identity, len(mine), len(tasks), own, every, results, before)


def _renamed(item: Result, said: Callable[[str], str]) -> Result:
    if isinstance(item, Finding):
        return replace(item, where=said(item.where), message=said(item.message))
    return OnlyRead(said(item.text)) if isinstance(item, OnlyRead) else item


def _share(groups: Sequence[tuple[Numbered, ...]], shard: Shard) -> list[tuple[Numbered, ...]]:
    """The groups of one shard: a run of them, of about the same bytes for each shard."""
    costs = [max(1, sum(task.nbytes for _, task in group)) for group in groups]
    total, before = sum(costs), 0
    mine = []
    for group, cost in zip(groups, costs, strict=True):
        if min((2 * before + cost) * shard.count // (2 * total), shard.count - 1) == shard.index:
            mine.append(group)
        before += cost
    return mine


def _identity(begun: Begun, groups: Sequence[tuple[Numbered, ...]]) -> dict[str, str]:
    folder, request = begun.folder, begun.request
    names = [run.validator.name for run in begun.ran]
    tasks = sha256(json.dumps(names).encode())
    for group in groups:
        for number, task in group:
            tasks.update(f"{number} {type(task).__name__} {task.where} {task.nbytes}\n".encode())
    source = None if folder is None else folder.source
    draft = getattr(source, "draft", None)
    beside = [None if folder is None else folder.partner, draft]
    return {
        "folder": "" if folder is None else _state(folder.checkpoint),
        "against": "" if source is None else _content(source),
        "beside": " ".join("" if one is None else _content(one) for one in beside),
        "level": request.level,
        "request": repr((request.layers, request.serving)),
        "tasks": tasks.hexdigest(),
    }


def _content(checkpoint: Checkpoint) -> str:
    """What a folder holds, as far as it can be told from its headers, samples of its data and its other
    files; a copy on another machine has the same."""
    own = [checkpoint.header_digest.encode(), checkpoint.config_bytes]
    own += [checkpoint.manifest_bytes or b"", checkpoint.sample_digest.encode()]
    return sha256(b"".join(sha256(part).digest() for part in own)).hexdigest()


def _state(checkpoint: Checkpoint) -> str:
    """A shared folder at a time: its content, and when its shards were last written."""
    receipt = checkpoint.read(RECEIPT, checkpoint.receipt_limit) or b""
    times = [(shard.path.name, shard.stat) for shard in checkpoint.look_again()]
    return sha256(json.dumps([_content(checkpoint), times]).encode() + receipt).hexdigest()


# --- Files of parts -------------------------------------------------------------------------------


def write_part(part: Part, folder: Path) -> Path:
    """Write a part into a folder, whole or not at all; one of the same shard is replaced."""
    path = folder / part.file_name
    results = [[number, *_listed(item)] for number, item in part.results]
    head = {
        "qconvert": __version__, "format": _FORMAT, "shard": str(part.shard),
        "identity": dict(part.identity), "tasks": [part.tasks, part.of_tasks],
        "bytes": [part.nbytes, part.of_bytes], "begun": part.begun,
    }  # fmt: skip
    text = json.dumps(head, allow_nan=False).removesuffix("}")
    lines = ",\n".join(json.dumps(result, allow_nan=False) for result in results)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_text(f'{text}, "results": [\n{lines}\n]}}\n', encoding="utf-8")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error
    return path


def _listed(item: Result) -> list[Any]:
    """A result as its kind and fields; numbers that JSON does not have are texts."""
    (kind,) = (kind for kind, known in _KINDS.items() if isinstance(item, known))
    values = astuple(item)
    return [kind, *(str(v) if isinstance(v, float) and not isfinite(v) else v for v in values)]


def _begun_json(begun: Begun, said: Callable[[str], str]) -> dict[str, Any]:
    report = begun.report

    def findings(found: Sequence[Finding]) -> list[list[Any]]:
        return [_listed(_renamed(finding, said)) for finding in found]

    return {
        "about": {name: said(text) for name, text in report.about.items()},
        "findings": findings(report.findings),
        "proved": [said(text) for text in report.proved],
        "read": [said(text) for text in report.read],
        "not_checked": [said(text) for text in report.not_checked],
        "measures": [_listed(measure) for measure in report.measures],
        "tables": [
            [table.title, list(table.columns), [list(row) for row in table.rows], table.note]
            for table in report.tables
        ],
        "ran": [
            [
                run.validator.name, findings(run.findings),
                [said(text) for text in run.proved], len(run.tasks), said(run.stopped),
            ]
            for run in begun.ran
        ],
    }  # fmt: skip


class _Fields:
    """A part's JSON, read with what is expected in each place."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def wrong(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: is not a part of a validation ({what}); run its shard again"
        )

    def a(self, kind: type[T], value: Any, what: str) -> T:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.wrong(f"{what}: expected {kind.__name__}, found {type(value).__name__}")
        return value

    def texts(self, value: Any, what: str) -> list[str]:
        return [self.a(str, each, what) for each in self.a(list, value, what)]

    def count(self, value: Any, what: str) -> int:
        if not 0 <= self.a(int, value, what) <= _MOST:
            raise self.wrong(f"{what}: expected 0 to {_MOST}")
        return int(value)

    def pair(self, value: Any, what: str) -> tuple[int, int]:
        """A share and the whole."""
        numbers = [self.count(each, what) for each in self.a(list, value, what)]
        if len(numbers) != 2 or numbers[0] > numbers[1]:
            raise self.wrong(f"{what}: expected a share and the whole")
        return numbers[0], numbers[1]

    def item(self, value: Any, what: str, *kinds: str) -> Any:
        """A result of one of these kinds."""
        kind, *values = self.a(list, value, what) or [""]
        if kind not in kinds:
            raise self.wrong(f"{what}: unknown kind of result")
        cls = _KINDS[kind]
        names = fields(cls)
        if len(values) != len(names):
            raise self.wrong(f"{what}: expected {len(names)} values, found {len(values)}")
        made = [
            self._value(str(f.type), each, f"{what}: {f.name}")
            for f, each in zip(names, values, strict=True)
        ]
        found = cls(*made)
        if isinstance(found, Finding) and found.severity not in ("error", "warning"):
            raise self.wrong(f"{what}: unknown severity")
        return found

    def _value(self, kind: str, value: Any, what: str) -> Any:
        if kind == "float":
            if value in ("inf", "-inf", "nan"):
                return float(value)
            return float(value) if isinstance(value, int) else self.a(float, value, what)
        if kind == "int | None" and value is None:
            return None
        return self.a(int if kind.startswith("int") else str, value, what)


def read_part(path: Path) -> Part:
    """A part as `write_part` left it. Raises CheckpointError, naming the file, for one of another
    version, and for what is not a part."""
    check = _Fields(path)
    try:
        data = read_regular(path, MOST_BYTES)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    found = parse_object(data, path)
    made_by = check.a(str, found.get("qconvert"), "qconvert")
    if (made_by, found.get("format")) != (__version__, _FORMAT):
        raise CheckpointError(
            f"{path}: was made by qconvert {made_by}, this is {__version__}; run all shards with one "
            "version"
        )
    stated = check.a(dict, found.get("identity"), "identity")
    identity = {name: check.a(str, stated.get(name), f"identity: {name}") for name in _SAME}
    if identity["level"] not in DIVIDED:
        raise check.wrong("identity: unknown level")
    index, slash, number = check.a(str, found.get("shard"), "shard").partition("/")
    if not (slash and _is_small(index) and _is_small(number) and int(index) < int(number)):
        raise check.wrong("shard: expected I/N")
    shard = Shard(int(index), int(number))
    tasks, of_tasks = check.pair(found.get("tasks"), "tasks")
    nbytes, of_bytes = check.pair(found.get("bytes"), "bytes")
    results = []
    for each in check.a(list, found.get("results"), "results"):
        values = check.a(list, each, "results") or [None]
        validator = check.count(values[0], "results: validator")
        results.append((validator, check.item(values[1:], "results", *_KINDS)))
    begun = found.get("begun")
    if (shard.index == 0) != (begun is not None):
        raise check.wrong("begun: expected in the part of shard 0 alone")
    if begun is not None:
        check.a(dict, begun, "begun")
        _restored(begun, check)
    return Part(shard, identity, tasks, of_tasks, nbytes, of_bytes, tuple(results), begun)


def _is_small(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 9 and int(text) <= MOST_SHARDS


def _restored(begun: Mapping[str, Any], check: _Fields) -> tuple[Report, list[Ran]]:
    """Report and validators' runs as they were before the work on data."""
    about = check.a(dict, begun.get("about"), "about")
    report = Report(
        about={str(name): check.a(str, text, "about") for name, text in about.items()},
        proved=check.texts(begun.get("proved"), "proved"),
        read=check.texts(begun.get("read"), "read"),
        not_checked=check.texts(begun.get("not_checked"), "not_checked"),
    )
    for each in check.a(list, begun.get("findings"), "findings"):
        report.findings.append(check.item(each, "findings", "finding"))
    for each in check.a(list, begun.get("measures"), "measures"):
        report.measures.append(check.item(each, "measures", "measure"))
    for each in check.a(list, begun.get("tables"), "tables"):
        table = check.a(list, each, "tables")
        if len(table) != 4:
            raise check.wrong("tables: expected title, columns, rows and note")
        columns = tuple(check.texts(table[1], "tables"))
        rows = tuple(tuple(check.texts(row, "tables")) for row in check.a(list, table[2], "tables"))
        if any(len(row) != len(columns) for row in rows):
            raise check.wrong("tables: expected as many texts in a row as columns")
        title, note = (check.a(str, table[n], "tables") for n in (0, 3))
        report.tables.append(Table(title, columns, rows, note))
    known = {validator.name: validator for validator in validators()}
    ran = []
    for each in check.a(list, begun.get("ran"), "ran"):
        values = check.a(list, each, "ran")
        if len(values) != 5 or values[0] not in known:
            raise check.wrong("ran: expected a validator of this installation")
        found = [check.item(item, "ran", "finding") for item in check.a(list, values[1], "ran")]
        ran.append(
            Ran(
                known[values[0]], found, check.texts(values[2], "ran"),
                elsewhere=check.count(values[3], "ran"), stopped=check.a(str, values[4], "ran"),
            )
        )  # fmt: skip
    return report, ran


# --- The whole ------------------------------------------------------------------------------------


def parts_in(places: Sequence[Path]) -> list[Path]:
    """Files of parts: those named, and those in folders that are. Raises CheckpointError for a folder
    without any."""
    found: list[Path] = []
    for place in places:
        if not place.is_dir():
            found.append(place)
            continue
        inside = sorted(place.glob("part-*-of-*.json"))
        if not inside:
            raise CheckpointError(f"{place}: holds no part of a validation (part-I-of-N.json)")
        found += inside
    return found


def merged(places: Sequence[Path]) -> Report:
    """The report of all parts together, equal to that of one machine. Raises CheckpointError, naming
    files, where parts are of different validations, one is missing, or two of one shard differ."""
    paths = parts_in(places)
    parts: dict[Shard, tuple[Path, Part]] = {}
    for path in paths:
        part = read_part(path)
        if parts:
            _check_same(*next(iter(parts.values())), path, part)
        other = parts.setdefault(part.shard, (path, part))
        if not _equal(other[1], part):
            raise CheckpointError(
                f"{path}: is of shard {part.shard}, as {other[0]} is, and differs from it; run that "
                "shard again and keep one"
            )
    number = next(iter(parts)).count
    missing = [Shard(n, number) for n in range(number) if Shard(n, number) not in parts]
    if missing:
        named = ", ".join(map(str, missing[:_SHOWN]))
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise CheckpointError(
            f"{count(len(missing), 'part')} of {number} missing: {named}{more}; run the same command "
            f"with --shard {missing[0]}"
        )
    first, lead = parts[Shard(0, number)]
    assert lead.begun is not None, "checked when it was read"
    check = _Fields(first)
    report, ran = _restored(lead.begun, check)
    known = rules()
    for _, (path, part) in sorted(parts.items()):
        for validator, item in part.results:
            if validator >= len(ran):
                raise _Fields(path).wrong("results: expected the number of a validator")
            ran[validator].keep(item, report)
    tasks = sum(part.tasks for _, part in parts.values())
    nbytes = sum(part.nbytes for _, part in parts.values())
    expected = sum(run.elsewhere for run in ran)
    if not (tasks == lead.of_tasks == expected and nbytes == lead.of_bytes):
        raise CheckpointError(
            f"{first}: the parts have {tasks} of {count(expected, 'task')} and {nbytes} of "
            f"{lead.of_bytes} bytes; run all shards again"
        )
    level = DIVIDED[lead.identity["level"]]
    whole = Begun(report, ran, Request(level), None).conclude()
    for finding in whole.findings:
        if finding.rule not in known:
            raise check.wrong("findings: unknown rule")
    return whole


def _check_same(path: Path, part: Part, other_path: Path, other: Part) -> None:
    if part.shard.count != other.shard.count:
        raise CheckpointError(
            f"{other_path}: is one of {other.shard.count} parts, {path} one of {part.shard.count}; "
            "remove those of the other division"
        )
    for name, what in _SAME.items():
        if part.identity[name] != other.identity[name]:
            raise CheckpointError(
                f"{other_path}: is of another validation than {path}: {what}; run all shards again "
                "with one command"
            )


def _equal(one: Part, other: Part) -> bool:
    """repr, since nan is not equal to itself."""
    return one is other or repr(one) == repr(other)
