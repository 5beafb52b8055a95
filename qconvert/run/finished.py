"""A finished folder is checked: is it still what the plan makes, and what must be made again?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from qconvert.checkpoint.checkpoint import MANIFEST, RECEIPT, file_size
from qconvert.checkpoint.receipt import digest, read_receipt, sealed_manifest
from qconvert.core.errors import OutputError, QConvertError
from qconvert.core.manifest_keys import EVALUATION, parse_manifest
from qconvert.core.regular import SMALL, read_regular
from qconvert.run.staging import (
    EDITED,
    hash_of,
    lost_shards,
    made_texts,
    manifest_of,
    planned_places,
)
from qconvert.run.verify import differing, header_of, planned_record

if TYPE_CHECKING:
    from qconvert.run.prepare import Prepared


@dataclass(frozen=True)
class State:
    """State of a folder. `faults` are files that are not as they were made, with what is wrong; of those
    shards are in `lost`. `records` are the receipt's lines of tensors, `wrong` the tensors that are not
    as these say; `edited` are files that people have changed, which is their right."""

    faults: Mapping[str, str]
    lost: frozenset[str]
    records: Mapping[str, str]
    wrong: frozenset[str]
    edited: frozenset[str]


def look_over(ready: Prepared, out: Path, *, verify: bool) -> State:
    """Sizes and headers of all shards, hashes of all other files, and with `verify` those of all
    tensors, against the plan and the receipt."""
    lost = lost_shards(ready, out)
    faults = dict(lost)
    edited = set()
    texts = _wanted_texts(ready, out)
    wanted = {**ready.plan.checkpoint.side_digests, **{n: digest(d) for n, d in texts.items()}}
    source = ready.plan.checkpoint
    sizes = {name: file_size(source.real(name)) for name in source.side_files}
    sizes |= {name: len(data) for name, data in texts.items()}
    for name in [*ready.plan.side_files, *texts]:
        fault = _fault(out / name, wanted[name], sizes[name])
        if name in EDITED and fault == _OTHER_BYTES:
            edited.add(name)
        elif fault is not None:
            faults[name] = fault
    records, fault = _receipt(ready, out, wanted)
    if fault is not None:
        faults[RECEIPT] = fault
    places = planned_places(ready.layout.files)
    wrong = {name for name, (file, _) in places.items() if file in lost}
    if verify:
        for name in _other_bytes(ready, out, records, wrong):
            faults[places[name][0]] = f"tensor {name!r} {_OTHER_BYTES}"
            wrong.add(name)
    return State(faults, frozenset(lost), records, frozenset(wrong), frozenset(edited))


_OTHER_BYTES = "has bytes that differ from those written"


def _wanted_texts(ready: Prepared, out: Path) -> dict[str, bytes]:
    """Texts of the plan; the manifest without a seal where the folder was made before there were
    seals, and with what an evaluation noted in it since."""
    texts = made_texts(ready)
    unsealed = (json.dumps(manifest_of(ready), indent=2) + "\n").encode()
    assert sealed_manifest(manifest_of(ready)) == texts[MANIFEST]
    if _fault(out / MANIFEST, digest(unsealed), len(unsealed)) is None:
        texts[MANIFEST] = unsealed
    noted = _noted(ready, out / MANIFEST)
    if noted is not None:
        texts[MANIFEST] = noted
    return texts


def _noted(ready: Prepared, manifest: Path) -> bytes | None:
    """The manifest with the evaluation that the folder's own holds, if it holds one."""
    try:
        found = parse_manifest(read_regular(manifest, 4 * SMALL, follow=False), manifest)
    except (FileNotFoundError, QConvertError):
        return None  # what is wrong with it is said where it is compared
    if EVALUATION not in found:
        return None
    return sealed_manifest({**manifest_of(ready), EVALUATION: found[EVALUATION]})


def _fault(path: Path, wanted: str, size: int) -> str | None:
    if path.is_symlink():
        return "is a symbolic link"
    if not path.is_file():
        return "is missing"
    if path.stat().st_size != size:  # before gigabytes of what is not ours are hashed
        return _OTHER_BYTES
    return None if hash_of(path, xxhash.xxh3_128()) == wanted else _OTHER_BYTES


def _receipt(
    ready: Prepared, out: Path, wanted: Mapping[str, str]
) -> tuple[dict[str, str], str | None]:
    """Lines of the receipt by tensor, as text, and what is wrong with it."""
    try:
        found = read_receipt(
            out / RECEIPT,
            max(len(ready.plan.tensors), len(ready.plan.checkpoint)),
            error=OutputError,
        )
    except QConvertError as error:
        return {}, str(error)
    if found is None:
        return {}, "is missing"
    if found.seal == "broken":
        return {}, _OTHER_BYTES
    places = planned_places(ready.layout.files)
    records = {}
    for line in found.lines:
        name = line.get("name")
        if name not in places:
            continue
        if planned_record(line, name, ready.plan.tensors[name], *places[name]) is not None:
            records[name] = json.dumps(line, separators=(",", ":"))
    if records.keys() != places.keys():
        return records, "lacks lines of some tensors"
    return records, _wrong_file_lines(ready, out, found.lines, wanted)


def _wrong_file_lines(
    ready: Prepared, out: Path, lines: Sequence[Mapping[str, Any]], wanted: Mapping[str, str]
) -> str | None:
    """Return whether the receipt's lines of files are those of this result."""
    said = {line["file"]: line for line in lines if "name" not in line}
    for file in ready.layout.files:
        line = said.get(file.name, {})
        same = line.get("nbytes") == file.size
        if "header_xxh3" in line:  # older receipts have none
            same = same and line["header_xxh3"] == digest(header_of(file))
        if not same:
            return f"has a wrong line, or none, of {file.name}"
    for name, xxh3 in wanted.items():
        line = said.get(name, {})
        if line.get("xxh3") != xxh3 and name not in EDITED:
            return f"has a wrong line, or none, of {name}"
    return None


def _other_bytes(
    ready: Prepared, out: Path, records: Mapping[str, str], lost: Set[str]
) -> list[str]:
    """Tensors whose bytes have another hash than their line, of those that are not lost."""
    places = planned_places(ready.layout.files)
    paths = {file.name: out / file.name for file in ready.layout.files}
    return sorted(
        differing(
            (
                name,
                (paths[places[name][0]], places[name][1], ready.plan.tensors[name].type.nbytes),
                json.loads(records[name])["xxh3"],
            )
            for name in sorted(records.keys() - lost, key=places.__getitem__)
        ),
        key=places.__getitem__,
    )
