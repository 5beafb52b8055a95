"""Plans as text for people (one screen) and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.prepared import own_role
from qconvert.core.dtypes import TypesOf
from qconvert.core.graph import Apply, Output, Source
from qconvert.core.names import is_scale, parse, split_parameter
from qconvert.core.shown import count, exact_size, format_size, one_of
from qconvert.formats.base import FolderTensors
from qconvert.formats.registry import OF_CODES, label
from qconvert.plan.plan import ROWS_OUT, Plan
from qconvert.run.folder.prepare import Prepared, side_bytes
from qconvert.validation.findings import NO_FINDINGS, Verdict
from qconvert.validators.headers.structure import in_no_form

if TYPE_CHECKING:
    from qconvert.run.dry_run import DryRun

MOST_ROWS = 14
_FEW = 4  # tokens of a calibration are few below this part of what is asked for
_MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured bytes per second of this machine; None if not measured."""

    read: float | None
    write: float | None


@dataclass(slots=True)
class _Row:
    tensors: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


def plan_lines(
    ready: Prepared,
    out: str | None,
    rates: Rates,
    verdict: Verdict = NO_FINDINGS,
    *,
    every: bool = False,
    columns: int | None = None,
) -> list[str]:
    """The plan as text, at most a screen; with `every` row and name. `columns` is the width that its
    table has to fit, None for any."""
    plan, checkpoint = ready.plan, ready.plan.checkpoint
    lines = [
        checkpoint.model_line,
        (
            f"source  {checkpoint.name}{checkpoint.added}: {count(len(checkpoint.shards), 'file')}, "
            f"{count(len(checkpoint), 'tensor')}, "
            f"{format_size(plan.bytes_in)}"
        ),
        (
            f"output  {out or '(no folder given)'}: {count(len(ready.layout.files), 'file')}, "
            f"{count(len(plan.tensors), 'tensor')}, {format_size(plan.bytes_out)}"
        ),
        "",
        *_table(plan, None if every else MOST_ROWS, columns),
        "",
    ]
    for entry in plan.log:
        wanted = "" if entry.expected is None else f"of {entry.expected} expected "
        what = one_of(entry.matched if entry.expected is None else entry.expected, entry.what)
        notes = "".join(f", {note}" for note in entry.notes)
        lines.append(f"pass    {entry.name}: matched {entry.matched} {wanted}{what}{notes}")
    if not plan.log:
        lines.append("pass    none: copied unchanged")
    lines += _calibration_lines(plan)
    lines += drop_lines(plan, every=every)
    lines += loss_lines(plan)
    unknown = [name for name in unknown_names(checkpoint) if name in plan.tensors]
    if unknown:
        names = some(unknown, every=every)
        lines.append(f"unknown {count(len(unknown), 'tensor')} of unknown role, copied: {names}")
    if checkpoint.family.name == "generic":
        lines.append(
            f"unknown model_type {checkpoint.config.get('model_type')!r}: layers are not counted"
        )
    absent = in_no_form(checkpoint, checkpoint.absent())
    if absent:
        lines.append(
            f"warning {count(len(absent), 'tensor')} of family {checkpoint.family.name} missing: "
            f"{some(absent, every=every)}"
        )
    warnings = (*checkpoint.warnings, *verdict.lines(), *_unmet(plan))
    lines += [f"warning {text}" for text in warnings]
    lines += [f"loads   {text}" for text in verdict.loads]
    if any(text.endswith(" ...") for text in verdict.loads):
        lines.append("        the whole reason: qconvert validate OUT --for NAME==VERSION --tp N")
    if checkpoint.denied_files:
        lines.append(f"left    not copied: {some(checkpoint.denied_files, every=every)}")
    lines += [
        (
            f"bytes   {plan.bytes_in} in = {plan.bytes_in - plan.bytes_dropped} used + "
            f"{plan.bytes_dropped} dropped; {plan.bytes_out} out"
        ),
        (
            f"needs   {_memory(ready)}, {format_size(_disk(ready))} disk{_budget(ready)}"
            f"{_time(plan, rates)}{', beside the calibration' if plan.calibration else ''}"
        ),
    ]
    if ready.room is not None:
        lines.append(
            f"sends   {count(len(ready.layout.files), 'shard')} while others are made, "
            f"{format_size(ready.layout.nbytes)}, then what makes them a checkpoint, in one commit"
        )
    return lines


def _disk(ready: Prepared) -> int:
    """Bytes on this machine's disk."""
    if ready.room is not None:
        return ready.room.takes
    return ready.layout.nbytes + side_bytes(ready.plan)


def _memory(ready: Prepared) -> str:
    share = ready.share
    if ready.options.engine == "local":
        return f"{format_size(share.total)} memory with {count(share.jobs, 'job')}"
    workers = f"each of {count(share.jobs, 'worker')}" if share.jobs else "each worker"
    return (
        f"{format_size(share.total)} memory here, {format_size(share.worker)} for {workers} on Ray"
    )


def _budget(ready: Prepared) -> str:
    given = ready.options.disk_budget
    return "" if given is None else f" of --disk-budget {exact_size(given)}"


def unknown_names(checkpoint: Checkpoint) -> list[str]:
    """Tensors without a role in the family or among qconvert's own."""
    return [name for name in checkpoint.role_index.unknown if own_role(name) is None]


def held(*, verified: bool) -> str:
    """Verdict on a folder that a run has nothing to do for."""
    how = "every byte was hashed" if verified else "headers and sizes; --verify hashes every byte"
    return f"already holds this result ({how}); nothing to do"


def dry_run_lines(look: DryRun | None) -> list[str]:
    """Return what the output folder already holds of the result; nothing for a new one."""
    if look is None or look.state in (None, "new"):
        return []
    if look.damaged:
        files = count(len(look.damaged), "damaged file")
        return [f"exists  {look.name} holds this result with {files}; a run repairs it"]
    if look.state == "finished":
        return [f"exists  {look.name} {held(verified=False)}"]
    return [
        f"exists  {look.name} has {look.done} of {count(look.units, 'unit')}; a run continues there"
    ]


def dry_run_json(look: DryRun | None) -> dict[str, Any]:
    """`out`: the folder, its state (`new`, `unfinished`, `finished`; null if the run refuses the folder)
    and units; `refusals`: why the run would not start."""
    if look is None:
        return {"out": None, "refusals": []}
    out = {
        "folder": look.name,
        "state": look.state,
        "units": look.units,
        "done": look.done,
        "damaged": list(look.damaged),
    }
    return {"out": out, "refusals": list(look.refusals)}


def _unmet(plan: Plan) -> tuple[str, ...]:
    """Return what a plan's calibration lacks on this machine."""
    if plan.calibration is None:
        return ()
    from qconvert.calibrate.backend import unmet

    return unmet(plan)


def _calibration_lines(plan: Plan) -> list[str]:
    if plan.calibration is None:
        return []
    from qconvert.calibrate.backend import work_dir_bytes
    from qconvert.samples.data import amount
    from qconvert.samples.request import FACT

    request = plan.calibration.request
    data = "random tokens" if request.synthetic else f"data {plan.facts[FACT]['data'][:12]}"
    tokens = "its own tokens" if request.experts == "routed" else "all tokens"
    sparse = plan.calibration.model.role_index.dims.num_experts
    what = f"each expert calibrated on {tokens}" if sparse else "each linear on all tokens"
    disk = format_size(work_dir_bytes(plan.calibration))
    there = amount(request)
    samples = count(request.samples, "sample")
    if there is not None and there[0] < request.samples:
        samples = f"about {there[0]} of {samples}"
    line = (
        f"gptq    {samples} of up to {request.length} tokens ({data}), "
        f"{what}; needs {disk} more disk while it runs, and memory as --memory "
        f"says, or half of what is free"
    )
    if there is None or there[1] >= request.samples * request.length // _FEW:
        return [line]
    few = (
        f"warning {request.data} has about {there[1]:,} tokens, few of the {request.samples} x "
        f"{request.length} asked for: add samples, or longer ones"
    )
    return [line, few]


def _table(plan: Plan, most: int | None, columns: int | None) -> list[str]:
    rows = sorted(_rows(plan).items(), key=lambda item: -item[1].bytes_out)
    shown, rest = rows[:most], rows[len(rows) if most is None else most :]
    if rest:
        other = _Row()
        for _, row in rest:
            other.tensors += row.tensors
            other.bytes_in += row.bytes_in
            other.bytes_out += row.bytes_out
        shown.append(((count(len(rest), "smaller row"), ""), other))
    width = max(4, *(len(what) for (what, _), _ in shown))
    kind_width = max(7, *(len(kind) for (_, kind), _ in shown))
    head = f"{'becomes':<{kind_width}}  {'tensors':>7}  {'in':>9} -> {'out':>9}"
    # Where both words are too much for a line, roles have lines of their own.
    apart = columns is not None and width + 2 + len(head) > columns
    lines = [("role", head)]
    for (what, kind), row in shown:
        sizes = f"{format_size(row.bytes_in):>9} -> {format_size(row.bytes_out):>9}"
        lines.append((what, f"{kind:<{kind_width}}  {row.tensors:>7}  {sizes}"))
    if apart:
        return [part for what, rest in lines for part in (what, f"  {rest}")]
    return [f"{what:<{width}}  {rest}" for what, rest in lines]


def _rows(plan: Plan) -> dict[tuple[str, str], _Row]:
    """Outputs grouped by role and by what becomes of them."""
    places = plan.role_index.places
    first = _first_ports(plan)
    read: dict[int, int] = {}
    rows: dict[tuple[str, str], _Row] = {}
    becomes = _Becomes.of(plan)
    for name, output in plan.tensors.items():
        place = places.get(name)
        if place is not None:
            role = place.role.name
        else:
            role = own_role(name) or split_parameter(parse(name).template)[0]
        if place is not None:  # attn.q_proj and attn.k_proj are one row, attn
            role = role.rpartition(".")[0] or role
        if is_scale(name):
            role += " scales"
        key = role, becomes(name, output)
        row = rows.get(key)
        if row is None:
            row = rows[key] = _Row()
        row.tensors += 1
        row.bytes_in += _bytes_in(output, first, read)
        row.bytes_out += output.type.nbytes
    return rows


@dataclass(frozen=True, slots=True)
class _Becomes:
    """Description of what a tensor becomes: its formats before and after. `by_kind` remembers what kinds
    of nodes read, by the identity of their types, where no name decides."""

    stored: FolderTensors
    planned: FolderTensors
    by_kind: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan) -> _Becomes:
        then = replace(plan.checkpoint, config=plan.config)
        return cls(
            FolderTensors.of(plan.checkpoint),
            FolderTensors(TypesOf(plan.tensors), then, plan.facts),
        )

    def __call__(self, name: str, output: Output) -> str:
        made = label(self.planned, name, output.type.dtype)
        node = output.node  # as that of most
        if node is None and len(results := output.results) == 1 and not output.sources:
            node = results[0][0]
        if node is not None:
            before = self.by_kind.get(id(node.types))
            if before is None and node.args:
                before = self._read(node.args[0])
                if node.args[0].type.dtype not in OF_CODES:
                    self.by_kind[id(node.types)] = before
            return f"{before} -> {made}" if before is not None else f"{made} made here"
        origins = [piece.origin for piece in output.pieces]
        if all(isinstance(origin, Source) for origin in origins):
            whole = len(origins) == 1 and output.pieces[0].nbytes == origins[0].type.nbytes
            return f"{made} {'as it is' if whole else 'rows moved'}"
        firsts = {
            self._read(arg)
            for origin in origins
            if not isinstance(origin, Source)
            for arg in origin.node.args[:1]
        }
        if not firsts:
            return f"{made} made here"
        return f"{'/'.join(sorted(firsts))} -> {made}"

    def _read(self, arg: Output) -> str:
        """The format of an argument read from a source tensor, else its dtype."""
        dtype = arg.type.dtype
        if dtype in OF_CODES:
            first = arg.sources[:1]
            if first and first[0][0].type.dtype == dtype:
                return label(self.stored, first[0][0].name, dtype)
        return dtype


def _first_ports(plan: Plan) -> dict[int, int]:
    """The first used result of each node: the bytes that the node reads are counted there."""
    first: dict[int, int] = {}
    for output in plan.tensors.values():
        whole = output.result  # as most are
        if whole is not None:
            found = id(whole[0])
            if first.get(found, whole[1]) >= whole[1]:
                first[found] = whole[1]
            continue
        for node, port, _, _ in output.results:
            if first.get(id(node), port) >= port:
                first[id(node)] = port
    return first


def _bytes_in(output: Output, first: Mapping[int, int], read: dict[int, int]) -> int:
    """Bytes that an output is made of, where it is the `first` of its node. `read` remembers what a kind
    of node reads."""
    if (whole := output.result) is not None:  # as most are
        node, port = whole
        counts = port == first[id(node)] and output.type.nbytes
        return _read_by(node, read) if counts else 0
    total = sum([stop - start for _, start, stop in output.sources])
    for node, port, start, stop in output.results:
        if port == first[id(node)]:
            size = _read_by(node, read)
            total += size * (stop - start) // max(1, node.types[port].nbytes)
    return total


def _read_by(node: Apply, read: dict[int, int]) -> int:
    """Bytes of a node's arguments, which all nodes of its kind have."""
    size = read.get(id(node.types))
    if size is None:
        size = read[id(node.types)] = sum(arg.type.nbytes for arg in node.args)
    return size


def loss_lines(plan: Plan) -> list[str]:
    """The lossy steps of the plan, with the number of times."""
    losses = plan.losses()
    return [
        f"lossy   {count(len(losses), 'step')}{':' if losses else ''}",
        *(f"        {what} ({count(number, 'time')})" for what, number in losses.items()),
    ]


def drop_lines(plan: Plan, *, every: bool = False) -> list[str]:
    """Dropped tensors and files, with the rule."""
    rules: dict[str, list[str]] = {}
    for name, rule in plan.dropped.items():
        rules.setdefault(rule, []).append(name)
    lines = []
    for rule, names in rules.items():
        if rule == ROWS_OUT:  # the rest of each tensor stays
            what = f"rows of {count(len(names), 'tensor')}"
            lines.append(f"drops   {what}, by {rule!r}: {some(names, every=every)}")
            continue
        size = sum(plan.checkpoint[name].type.nbytes for name in names)
        lines.append(
            f"drops   {count(len(names), 'tensor')}, {format_size(size)}, by {rule!r}: "
            f"{some(names, every=every)}"
        )
    lines += [f"drops   file {name}, by {rule!r}" for name, rule in plan.dropped_files.items()]
    return lines or ["drops   nothing"]


def some(names: tuple[str, ...] | list[str], *, every: bool = False) -> str:
    more = 0 if every else len(names) - _MOST_NAMES
    shown = names[:_MOST_NAMES] if more > 0 else names
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _time(plan: Plan, rates: Rates) -> str:
    if rates.read is None:
        return ""
    seconds = plan.bytes_in / rates.read
    if rates.write is None:
        return f", {format_time(seconds)} to read at {format_size(rates.read)}/s measured here"
    seconds += plan.bytes_out / rates.write
    return (
        f", about {format_time(seconds)} at {format_size(rates.read)}/s read and "
        f"{format_size(rates.write)}/s write measured here"
    )


def format_time(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 05 min`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def plan_json(ready: Prepared, rates: Rates, verdict: Verdict = NO_FINDINGS) -> dict[str, Any]:
    """Everything in `plan_lines`, and an entry for every tensor."""
    plan, checkpoint = ready.plan, ready.plan.checkpoint
    dims = checkpoint.role_index.dims
    becomes = _Becomes.of(plan)
    return {
        "model_type": checkpoint.config.get("model_type"),
        "family": checkpoint.family.name,
        "layers": dims.num_layers,
        "experts": dims.num_experts,
        "mtp_layers": dims.mtp_layers,
        "source": checkpoint.name,
        "fingerprint": ready.fingerprint,
        "passes": [
            {
                "name": e.name,
                "options": e.options,
                "matched": e.matched,
                "expected": e.expected,
                "notes": list(e.notes),
            }
            for e in plan.log
        ],
        "bytes": {"in": plan.bytes_in, "out": plan.bytes_out, "dropped": plan.bytes_dropped},
        "dropped": dict(plan.dropped),
        "dropped_files": dict(plan.dropped_files),
        "denied_files": list(checkpoint.denied_files),
        "side_files": list(plan.side_files),
        "lossy_steps": plan.losses(),
        "unknown": unknown_names(checkpoint),
        "warnings": [*checkpoint.warnings, *_unmet(plan)],
        "findings": verdict.as_json(),
        "loads": list(verdict.loads),
        "memory": ready.share.total,
        "jobs": ready.share.jobs,
        "engine": ready.options.engine,
        "worker_memory": ready.share.worker,
        "disk": _disk(ready),
        "disk_budget": ready.options.disk_budget,
        "rates": {"read": rates.read, "write": rates.write},
        "files": [{"name": file.name, "nbytes": file.size} for file in ready.layout.files],
        "tensors": {
            name: {
                "dtype": output.type.dtype,
                "shape": list(output.type.shape),
                "from": becomes(name, output),
            }
            for name, output in plan.tensors.items()
        },
    }


def dump(plan: Plan) -> Iterator[str]:
    """Every output with its expression, one per line."""
    for name, output in plan.tensors.items():
        yield f"{name}: {output.type} = {expression(output)}"


def expression(output: Output) -> str:
    """`cat(a[0:4096], DequantFp8(block=(128, 128))(w, s))`: byte ranges where not whole."""
    terms = []
    for origin, start, stop in output.pieces:
        if isinstance(origin, Source):
            term, size = origin.name, origin.type.nbytes
        else:
            args = ", ".join(expression(arg) for arg in origin.node.args)
            term, size = f"{origin.node.op!r}({args})", origin.type.nbytes
            if len(origin.node.types) > 1:
                term += f".{origin.port}"
        terms.append(term if (start, stop) == (0, size) else f"{term}[{start}:{stop}]")
    return terms[0] if len(terms) == 1 else f"cat({', '.join(terms)})"
