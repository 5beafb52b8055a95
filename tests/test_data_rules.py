"""Every conversion's sound output breaks no rule on tensor data at level full against its source, and
is measured."""

from __future__ import annotations

from pathlib import Path

import gdn_models
import numpy as np
import pytest
from checkpoints import copied, edit_json, fp8_moe, run_cli
from data_folders import CONVERSIONS, OURS, Made, lines, maker, rules, store, validated
from sampled import sampled

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.graph import Source
from qconvert.run.work.reader import Reader
from qconvert.validation.runner import Request, validate_folder

SCALE = "model.language_model.layers.0.mlp.experts.1.up_proj.weight_scale"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return maker(tmp_path_factory.mktemp("made"))


@pytest.mark.parametrize("name", sampled(sorted(CONVERSIONS)))
def test_what_is_sound_breaks_no_rule(name: str, made: Made) -> None:
    source, out = made(name)
    report = validated(out, source)
    assert [finding for finding in report.findings if finding.rule in OURS] == []
    assert not [text for text in report.not_checked if "weight" in text]
    proved = " ".join(report.proved)
    for phrase in (
        "every weight is the source's",
        "linear-attention rows are",
        "no tensor holds NaN",
    ):
        assert phrase in proved
    lossy = {"w4a16"} if "w4a16" in name else set()
    for measure in report.measures:
        if measure.format in lossy:
            assert 0.02 < measure.rms < 0.2, measure
            assert 0.97 < measure.cosine < 1
        else:
            assert (measure.rms, measure.worst) == (0, 0), measure
    assert {m.format for m in report.measures} >= lossy | {"bf16"}


def test_every_matrix_is_measured_once(made: Made) -> None:
    """By role, layer and expert, however they are stored."""
    report = validated(made("stack")[1], made("stack")[0])
    experts = [m for m in report.measures if m.expert is not None]
    assert len({(m.tensor, m.role, m.layer, m.expert) for m in experts}) == len(experts)
    # Three projections of each expert in four layers and the draft layer.
    assert len(experts) == 3 * gdn_models.EXPERTS * 5
    gate = [m for m in experts if m.role == "gate_proj"]
    assert [(m.layer, m.expert) for m in gate if m.layer is not None][:3] == [
        (0, 0),
        (0, 1),
        (0, 2),
    ]
    assert {m.tensor.rpartition(".")[2] for m in gate} == {"gate_up_proj"}
    assert all(m.weights == gdn_models.INTERMEDIATE * gdn_models.HIDDEN for m in gate)
    segments = {m.role for m in report.measures if m.role.startswith("in_proj_")}
    assert segments == {f"in_proj_{s}" for s in "qkvzba"}


def test_a_sample_looks_at_less(made: Made) -> None:
    source, out = made("dequant")
    full, sample = validated(out, source), validated(out, source, "sample")
    assert 0 < len(sample.measures) < len(full.measures)
    assert {m.role for m in sample.measures} == {m.role for m in full.measures}
    assert rules(sample) == set()
    assert not validated(out, source, "headers").measures


def test_stages_are_compared_as_far_as_they_go(made: Made, tmp_path: Path) -> None:
    source, _ = made("fuse bf16")
    result = run_cli("split", source, tmp_path / "s", "--pp", "1,3", "--jobs", "1")
    assert result.code == 0, result.err
    counts = []
    for stage in sorted((tmp_path / "s").glob("stage-*")):
        report = validated(stage, source)
        assert rules(report) == set()
        counts.append(len(report.measures))
    assert 0 < counts[0] < counts[1]
    assert rules(validated(made("dequant")[1], source)) == {"QC060", "QC064"}


def test_workers_find_the_same(made: Made, tmp_path: Path) -> None:
    source, sound = made("w4a16 of fp8")
    out = copied(sound, tmp_path / "out")
    store(out, SCALE, lines(out, SCALE) ^ np.uint8(0x80))
    reports = [
        validate_folder(out, str(source), request=Request("full", jobs=jobs)) for jobs in (1, 2)
    ]
    assert reports[0].findings == reports[1].findings != []
    assert repr(reports[0].measures) == repr(reports[1].measures)


def test_a_byte_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a matrix that is compared, hashed here and there, and asked for its numbers."""
    source = fp8_moe().write(tmp_path / "source")
    out = tmp_path / "out"
    assert run_cli("dequant", source, out, "--jobs", "1").code == 0
    read = Reader.read
    found: dict[tuple[Path, str], int] = {}

    def counted(self: Reader, tensor: Source, start: int, into: memoryview) -> None:
        key = self._shards[tensor.shard].path.parent, tensor.name
        found[key] = found.get(key, 0) + into.nbytes
        read(self, tensor, start, into)

    monkeypatch.setattr(Reader, "read", counted)
    report = validated(out, source)
    assert report.findings == []
    phrases = " ".join(report.proved)
    for phrase in ("every byte has the hash", "the source's bytes are", "every weight is", "NaN"):
        assert phrase in phrases
    for folder in (out, source):
        for name, tensor in Checkpoint.open(folder).items():
            assert found.pop((folder.resolve(), name)) == tensor.type.nbytes, name
    assert found == {}


def test_the_order_of_rows_that_cannot_be_read_is_not_checked(made: Made, tmp_path: Path) -> None:
    """Of the source or of the folder; what is BF16 still is looked at."""
    source, out = made("fuse")

    def other_blocks(folder: Path) -> Path:
        wrong = copied(folder, tmp_path / folder.name)
        block = {"weight_block_size": [7, 7]}
        edit_json(wrong / "config.json", lambda c: c["quantization_config"].update(block))
        return wrong

    for ours, theirs, of in (
        (other_blocks(out), source, ""), (out, other_blocks(source), " of the source"),
    ):  # fmt: skip
        report = validated(ours, theirs)
        (said,) = [text for text in report.not_checked if "order of linear attention's" in text]
        assert f"{of}: a scale" in said
        assert "in_proj_qkv" in said
        assert "and 2 more" in said
