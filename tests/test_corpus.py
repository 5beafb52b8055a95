"""The corpus of broken repos: each is found by its rule and no other, and sound ones by none."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import broken_contents
import broken_headers
import broken_ints
import broken_nvfp4
import golden
import pytest
from broken_repos import CORPUS, SOUND, Bench, Broken
from sampled import sampled

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import CheckpointError
from qconvert.validation.findings import Finding
from qconvert.validation.runner import (
    _KINDS,
    Folder,
    NotChecked,
    Request,
    rules,
    validate_folder,
    validators,
)

# Rules of work that is only done on request, on random numbers or by running layers; their own tests
# break them: kt-kernel's client, and from QC070 to QC086 kernels, logits, attribution and others.
OF_STAGE_SETS = {"QC120", "QC121", "QC122"}  # see test_stage_set.py
OF_RUNTIMES = {f"QC{number}" for number in range(130, 135)}  # see test_simulator_sglang.py
CLIENT, NVFP4_KERNEL, ON_REQUEST = "QC045", "QC110", ("QC070", "QC086")
assert broken_headers
assert broken_contents
assert broken_ints
assert broken_nvfp4


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sound")


@pytest.fixture
def bench(shared: Path, tmp_path: Path) -> Bench:
    return Bench(shared, tmp_path)


@pytest.fixture(autouse=True)
def without_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """kt-kernel's client takes seconds, where it is installed; its rule is QC045."""
    find = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> Any:
        return None if name == "kt_kernel" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", found)


@pytest.mark.parametrize("rule", sorted({entry.rule for entry in CORPUS}))
def test_a_rule_finds_its_broken_repos(rule: str, shared: Path, tmp_path: Path) -> None:
    """Each of them by this rule and no other, as gravely as it is."""
    wrong = {}
    for number, entry in enumerate(e for e in CORPUS if e.rule == rule):
        room = tmp_path / str(number)
        room.mkdir()
        said = _otherwise(entry, Bench(shared, room))
        if said:
            wrong[entry.name] = said
    assert wrong == {}


def _otherwise(entry: Broken, bench: Bench) -> list[str]:
    """What of a broken repo's report is not as its entry says."""
    repo = entry.make(bench)
    report = validate_folder(
        repo.folder,
        None if repo.against is None else str(repo.against),
        request=Request(entry.level, jobs=1),
        pair=None if repo.pair is None else str(repo.pair),
    )
    wrong = []
    if {finding.rule for finding in report.findings} != {entry.rule} | entry.beside:
        wrong.append(f"expected {sorted({entry.rule} | entry.beside)}, found {report.findings}")
    ours = [finding for finding in report.findings if finding.rule == entry.rule]
    gravest = "error" if any(f.severity == "error" for f in ours) else "warning"
    if gravest != entry.severity:
        wrong.append(f"expected the severity {entry.severity}, found {gravest}")
    if not all(finding.where and finding.message for finding in report.findings):
        wrong.append("a finding without a place or a message")
    golden.same("findings.txt", f"{entry.rule} {entry.name}", _said(report.findings, bench))
    _foreign(repo.folder)
    return wrong


def _said(findings: Iterable[Finding], bench: Bench) -> list[str]:
    """Of several messages that differ in numbers and names of projections alone, the first."""
    said: dict[str, list[str]] = {}
    for found in findings:
        line = f"{found.rule} {found.severity} {found.where}: {found.message}"
        line = golden.shown(line, bench.scratch, bench.shared)
        kind = re.sub(r"\d+|\w+_proj", "N", f"{found.rule} {found.message}")
        said.setdefault(kind, []).append(re.sub("[0-9a-f]{32}", "HASH", line))
    return [f"{some[0]}{f' ({len(some)} times)' if some[1:] else ''}" for some in said.values()]


# Validators of every kind of folder, contrib's too, as far as headers tell.
_OF_HEADERS = [v for v in validators() if v.needs <= set(_KINDS) - {"runtime"}]


def _foreign(folder: Path) -> None:
    """Asks every validator about a broken folder, whether or not it is of its kind: they may find
    anything, and raise nothing."""
    try:
        broken = Folder(Checkpoint.open(folder))
        assert broken.checkpoint.quantization_configs is not None
        assert broken.checkpoint.manifest != {}
    except CheckpointError:
        return  # QC001
    for validator in _OF_HEADERS:
        with suppress(NotChecked):
            list(validator(broken))


@pytest.mark.parametrize("name", sampled(SOUND))
def test_sound_repos_have_no_finding(name: str, bench: Bench) -> None:
    folder, source = bench.sound(name), SOUND[name].source
    against = None if source is None else str(bench.sound(source))
    for one in sorted(folder.glob("stage-*")) or [folder]:
        for level in ("headers", "sample", "full"):
            report = validate_folder(one, against, request=Request(level, jobs=1))
            assert report.findings == [], level


def test_every_rule_has_a_broken_repo() -> None:
    first, last = ON_REQUEST
    others = {CLIENT, NVFP4_KERNEL, *OF_STAGE_SETS, *OF_RUNTIMES}
    asked = {rule for rule in rules() if not first <= rule <= last} - others
    assert {entry.rule for entry in CORPUS} == asked


def test_names_are_said_once() -> None:
    names = [(entry.rule, entry.name) for entry in CORPUS]
    assert len(names) == len(set(names)) >= 110
    assert set(golden.sections("findings.txt")) == {" ".join(name) for name in names}
