"""Folders of experts for KTransformers' CPU kernels: every rule of theirs is broken in turn and says so,
and what the real client computes with them is what they mean.

Without kt-kernel: `pytest tests/test_amx_validate.py`. With it: `-m peer`, about two minutes.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import amx_rows
import numpy as np
import pytest
from broken_repos import sealed_again
from checkpoints import Model, Tensor, copied, edit_header, edit_json, ran
from checkpoints import tensor as any_tensor
from kt_experts import gaussian, made, moe, student
from kt_machine import needs_avx512
from sampled import thinned

import qconvert.validation.workers
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, NotChecked, Report, Request, validate_folder
from qconvert.validators.amx import amx_client, amx_weights
from qconvert.validators.amx.reading import matching_source, read_block

MANIFEST = "qconvert.json"
FILE = "model.safetensors"
METHODS = ["int4", "int8"]
GATE, UP, DOWN = (f"blk.1.ffn_{kind}_exps.2.numa.0" for kind in ("gate", "up", "down"))

Form = Callable[[str, Tensor], dict[str, Tensor]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moe().write(tmp_path_factory.mktemp("amx") / "source")


@pytest.fixture(scope="module")
def masters(source: Path) -> dict[str, Path]:
    return {method: made(source, source.parent / method, method) for method in METHODS}


@pytest.fixture
def out(masters: dict[str, Path], tmp_path: Path) -> Path:
    """A sound int8 folder to break."""
    return copied(masters["int8"], tmp_path / "out")


@pytest.fixture
def without_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether kt-kernel is installed here or not, it is not found."""
    find = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> Any:
        return None if name == "kt_kernel" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", found)


alone = pytest.mark.usefixtures("without_client")


def found_in(out: Path, against: Path | None = None, *, full: bool = True) -> list[Finding]:
    """What the rules of these folders find. The receipt's, which notice every edit, are left out."""
    report = validate_folder(
        out,
        None if against is None else str(against),
        request=Request("full" if full else "headers"),
    )
    ours = re.compile(r"QC04\d|QC01\d|QC00\d")
    return [finding for finding in report.findings if ours.match(finding.rule)]


def rules(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.rule, finding.where) for finding in findings]


def skipped(report: Report) -> list[str]:
    """What was not looked at, but for what no test here asks for: the folder on the GPU side, options
    that cost more."""
    others = ("--pair", "--kernels")
    return [text for text in report.not_checked if not any(option in text for option in others)]


# --- Editing folders -----------------------------------------------------------------------------


def span(out: Path, name: str) -> tuple[int, int]:
    """Where a tensor's bytes begin in the file, and how many there are."""
    raw = (out / FILE).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    start, stop = json.loads(raw[8 : 8 + length])[name]["data_offsets"]
    return 8 + length + start, stop - start


def read(out: Path, name: str) -> bytes:
    at, size = span(out, name)
    return (out / FILE).read_bytes()[at : at + size]


def overwrite(out: Path, name: str, data: bytes, start: int = 0) -> None:
    at, size = span(out, name)
    assert start + len(data) <= size
    with (out / FILE).open("r+b") as stream:
        stream.seek(at + start)
        stream.write(data)


def swap(out: Path, one: str, other: str) -> None:
    first, second = read(out, one), read(out, other)
    overwrite(out, one, second)
    overwrite(out, other, first)


def swap_matrices(out: Path, one: str, other: str) -> None:
    for part in ("weight", "scale"):
        swap(out, f"{one}.{part}", f"{other}.{part}")


def state(out: Path, **facts: Any) -> None:
    edit_json(out / MANIFEST, lambda manifest: manifest["amx"].update(facts))
    sealed_again(out)


# --- Sound folders -------------------------------------------------------------------------------


@alone
@pytest.mark.parametrize("rounding", ["reference", "search"])
@pytest.mark.parametrize("numa", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_a_sound_folder_has_no_finding(
    method: str, numa: int, rounding: str, tmp_path: Path
) -> None:
    source = moe(intermediate=256, draw=student).write(tmp_path / "source")
    out = made(source, tmp_path / "out", method, "--rounding", rounding, numa=numa)
    headers = validate_folder(out)
    assert headers.findings == []
    report = validate_folder(out, str(source), request=Request("full"))
    assert report.findings == []
    assert len(skipped(report)) == 1
    for text in (
        "method, NUMA count",
        "in the format's range",
        "format's rounding",
        "are the source's",
    ):
        assert any(text in line for line in report.proved), text


@alone
@pytest.mark.parametrize("mtp", ["keep", "drop"])
@pytest.mark.parametrize("stacked", [False, True])
def test_stacks_and_draft_layers(stacked: bool, mtp: str, tmp_path: Path) -> None:
    source = moe(stacked=stacked, drafts=1).write(tmp_path / "source")
    out = made(source, tmp_path / "out", "int4", "--mtp", mtp)
    assert validate_folder(out, str(source), request=Request("full")).findings == []
    layers = json.loads((out / MANIFEST).read_bytes())["amx"]["layers"]
    assert layers == ([0, 1, 2] if mtp == "keep" else [0, 1])


def in_float32(name: str, value: Tensor) -> dict[str, Tensor]:
    wide = np.frombuffer(value.data, np.uint16).astype(np.uint32) << 16
    return {name: Tensor("F32", value.shape, wide.tobytes())}


def in_fp8(name: str, value: Tensor) -> dict[str, Tensor]:
    rows, columns = value.shape
    codes = any_tensor("F8_E4M3", rows, columns, seed=len(name))
    grid = any_tensor("F32", rows // 64, columns // 64, seed=3)
    return {name: codes, f"{name}_scale_inv": grid}


def in_int4(name: str, value: Tensor) -> dict[str, Tensor]:
    rows, columns = value.shape
    module = name.removesuffix(".weight")
    words = np.random.default_rng(len(name)).integers(0, 256, rows * columns // 2, np.uint8)
    scales = amx_rows.bf16(np.linspace(0.5, 2, rows * columns // 32))
    return {
        f"{module}.weight_packed": Tensor("I32", (rows, columns // 8), words.tobytes()),
        f"{module}.weight_scale": Tensor("BF16", (rows, columns // 32), scales.tobytes()),
        f"{module}.weight_shape": Tensor("I32", (2,), struct.pack("<2i", rows, columns)),
    }


_IN_BLOCKS = {"quant_method": "fp8", "weight_block_size": [64, 64]}
_SCHEME = {
    "type": "int", "num_bits": 4, "strategy": "group", "symmetric": True, "group_size": 32
}  # fmt: skip
_IN_GROUPS = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _SCHEME}},
}  # fmt: skip


@alone
@pytest.mark.parametrize(
    ("form", "config"),
    [
        (in_float32, {}), (in_fp8, {"quantization_config": _IN_BLOCKS}),
        (in_int4, {"quantization_config": _IN_GROUPS}),
    ],
    ids=["float32", "fp8", "int4"],
)  # fmt: skip
@pytest.mark.parametrize("method", METHODS)
def test_sources_in_every_form(
    method: str, form: Form, config: dict[str, Any], tmp_path: Path
) -> None:
    model = moe()
    for name, value in [*model.tensors.items()]:
        if ".experts." in name:
            del model.tensors[name]
            model.tensors.update(form(name, value))
    model.config.update(config)
    source = model.write(tmp_path / "source")
    out = made(source, tmp_path / "out", method)
    assert validate_folder(out, str(source), request=Request("full")).findings == []
    a_changed_scale(out)
    assert rules(found_in(out, source)) == [("QC042", f"{UP}.weight")]


@alone
def test_stacks_that_lie_across(tmp_path: Path) -> None:
    """[E, H, 2I] and [E, I, H], as Qwen3-VL publishes them."""
    model = moe(stacked=True)
    for name, (dtype, shape, data) in [*model.tensors.items()]:
        if ".experts." in name:
            bits = np.frombuffer(data, np.uint16).reshape(shape).transpose(0, 2, 1)
            model.tensors[name] = Tensor(dtype, bits.shape, bits.tobytes())
    text = {**model.config, "model_type": "qwen3_vl_moe_text"}
    model.config = {"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": {}}
    model.tensors = {
        name.replace("model.", "model.language_model."): value
        for name, value in model.tensors.items()
    }
    source = model.write(tmp_path / "source")
    out = made(source, tmp_path / "out", "int8")
    assert validate_folder(out, str(source), request=Request("full")).findings == []


@alone
def test_rows_of_all_kinds(tmp_path: Path) -> None:
    """Denormals, zeros, ties, the largest there are: all within the format's rounding."""
    model = moe(512, 256, layers=1, experts=1)
    for seed, (name, value) in enumerate(model.tensors.items()):
        if ".experts." in name:
            rows, columns = value.shape
            data = amx_rows.matrix(rows, columns, seed).tobytes()
            model.tensors[name] = Tensor("BF16", value.shape, data)
    source = model.write(tmp_path / "source")
    for method in METHODS:
        for rounding in ("reference", "search"):
            out = tmp_path / f"{method}-{rounding}"
            made(source, out, method, "--rounding", rounding, numa=2)
            assert validate_folder(out, str(source), request=Request("full")).findings == []


@alone
def test_it_is_said_that_the_client_was_not_asked(out: Path, source: Path) -> None:
    (text,) = skipped(validate_folder(out, str(source), request=Request("full")))
    assert "kt-kernel is not installed: pip install --no-deps kt-kernel" in text


def test_other_folders_hear_nothing_of_it(source: Path) -> None:
    report = validate_folder(source, str(source), request=Request("full"))
    assert not [text for text in [*report.proved, *report.not_checked] if "xpert" in text]


# --- One rule each -------------------------------------------------------------------------------


def rename(out: Path, old: str, new: str) -> None:
    edit_header(out / FILE, lambda table: table.update({new: table.pop(old)}))


def retype(out: Path, name: str, **entry: Any) -> None:
    edit_header(out / FILE, lambda table: table[name].update(entry))


@alone
def test_qc040_missing_and_superfluous(out: Path) -> None:
    rename(out, f"{UP}.weight", f"{UP}.weights")
    findings = found_in(out, full=False)
    assert ("QC040", f"{UP}.weight") in rules(findings)
    assert ("QC040", f"{UP}.weights") in rules(findings)
    assert {f.rule for f in findings} <= {"QC040", "QC011"}  # a scale that stands alone


@alone
@pytest.mark.parametrize("name", [f"{GATE}.weight", f"{DOWN}.scale"])
def test_qc040_another_type(name: str, out: Path) -> None:
    size = span(out, name)[1]
    retype(out, name, dtype="U8", shape=[1, size])
    findings = found_in(out, full=False)
    assert rules(findings) == [("QC040", name)]
    assert "found U8" in findings[0].message
    report = validate_folder(
        out, request=Request("full")
    )  # what rests on headers is not guessed at
    assert [text for text in report.not_checked if "QC040" in text and "every code" in text]


@alone
@pytest.mark.parametrize(
    "facts",
    [
        {"method": "AMXINT4"}, {"numa": 2}, {"experts": 3}, {"experts": 5}, {"layers": [0]},
        {"layers": [0, 1, 2]}, {"hidden_size": 256}, {"intermediate_size": 64},
    ],
    ids=str,
)  # fmt: skip
def test_qc040_tensors_that_another_manifest_leads_to(facts: dict[str, Any], out: Path) -> None:
    state(out, **facts)
    findings = found_in(out, full=False)
    assert {finding.rule for finding in findings} == {"QC040"}
    assert all(finding.where.startswith("blk.") for finding in findings)


@alone
@pytest.mark.parametrize(
    "facts",
    [
        {"method": "AMXINT2"}, {"rounding": "up"}, {"numa": 0}, {"numa": 3}, {"hidden_size": 100},
        {"layers": [1, 0]}, {"layers": [0, 0]},
    ],
    ids=str,
)  # fmt: skip
def test_qc040_a_manifest_that_cannot_be_meant(
    facts: dict[str, Any], out: Path, source: Path
) -> None:
    state(out, **facts)
    report = validate_folder(out, str(source), request=Request("full"))
    assert ("QC040", MANIFEST) in rules(report.findings)
    assert len([text for text in report.not_checked if "QC040" in text]) == 3


@alone
@pytest.mark.parametrize(
    "facts",
    [
        {"method": []}, {"rounding": None}, {"numa": True}, {"experts": "4"}, {"layers": []},
        {"layers": ["0"]}, {"layers": 2}, {"layers": [-1]}, {"intermediate_size": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_manifest_whose_block_is_of_another_kind_is_none(
    facts: dict[str, Any], out: Path
) -> None:
    state(out, **facts)
    assert rules(found_in(out)) == [("QC001", str(out))]


@alone
def test_a_manifest_whose_block_is_no_object_is_none(out: Path) -> None:
    edit_json(out / MANIFEST, lambda manifest: manifest.update(amx=5))
    assert rules(found_in(out)) == [("QC001", str(out))]


@alone
@pytest.mark.parametrize(("method", "byte"), [("int8", 0x80), ("int4", 0x80), ("int4", 0x08)])
def test_qc041_a_code_out_of_range(
    method: str, byte: int, masters: dict[str, Path], tmp_path: Path
) -> None:
    out = copied(masters[method], tmp_path / "out")
    overwrite(out, f"{UP}.weight", bytes([byte]), 77)
    findings = found_in(out)
    assert rules(findings) == [("QC041", f"{UP}.weight")]
    assert "byte 77" in findings[0].message


@alone
@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf"), float("-inf")], ids=str)
def test_qc041_a_scale_that_is_none(scale: float, out: Path) -> None:
    overwrite(out, f"{DOWN}.scale", struct.pack("<f", scale), 4 * 5)
    findings = found_in(out)
    assert rules(findings) == [("QC041", f"{DOWN}.scale")]
    assert "row 5" in findings[0].message


@alone
def test_qc041_in_any_chunk(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qconvert.validation.workers, "CHUNK", 64)
    overwrite(out, f"{UP}.weight", b"\x80", 77)
    overwrite(out, f"{DOWN}.scale", struct.pack("<f", -1.0), 4 * 99)
    by_tensor = {finding.where: finding.message for finding in found_in(out)}
    assert "byte 77" in by_tensor[f"{UP}.weight"]
    assert "row 99" in by_tensor[f"{DOWN}.scale"]


def swapped_experts(out: Path) -> None:
    swap_matrices(out, UP, UP.replace("exps.2", "exps.3"))


def swapped_projections(out: Path) -> None:
    swap_matrices(out, GATE, UP)


def every_gate_for_up(out: Path) -> None:
    for name in {name.rpartition(".")[0] for name in Checkpoint.open(out) if "_gate_" in name}:
        swap_matrices(out, name, name.replace("_gate_", "_up_"))


def swapped_layers(out: Path) -> None:
    swap_matrices(out, DOWN, DOWN.replace("blk.1", "blk.0"))


def a_changed_scale(out: Path) -> None:
    (scale,) = struct.unpack("<f", read(out, f"{UP}.scale")[:4])
    overwrite(out, f"{UP}.scale", struct.pack("<f", scale * 1.05))


def swapped_rows(out: Path) -> None:
    """Two words of the first tile: the codes of rows 0 and 1 in a few columns."""
    data = read(out, f"{UP}.weight")
    overwrite(out, f"{UP}.weight", data[4:8] + data[0:4])


def a_flipped_sign(out: Path) -> None:
    """Of a code of int8, or of two of int4, none of which becomes one that int4 has not."""
    data = read(out, f"{DOWN}.weight")
    at = next(i for i, byte in enumerate(data) if 1 <= byte >> 4 <= 6 and 1 <= byte & 15 <= 7)
    overwrite(out, f"{DOWN}.weight", bytes([256 - data[at]]), at)


def all_coarse(out: Path) -> None:
    """Every weight lies within half of a step that is thousands of times too large."""
    size = len(read(out, f"{UP}.weight"))
    scales = np.frombuffer(read(out, f"{UP}.scale"), np.float32)
    overwrite(out, f"{UP}.weight", bytes(size))
    overwrite(out, f"{UP}.scale", (5000 * scales).tobytes())


@alone
@pytest.mark.parametrize("rounding", ["reference", "search"])
@pytest.mark.parametrize("method", METHODS)
def test_qc042_steps_that_round_everything_away(
    method: str, rounding: str, source: Path, tmp_path: Path
) -> None:
    out = made(source, tmp_path / "out", method, "--rounding", rounding)
    all_coarse(out)
    (finding,) = found_in(out, source)
    assert finding.rule == "QC042"
    assert "row 0: a step of" in finding.message


@alone
@pytest.mark.parametrize("method", METHODS)
def test_qc042_steps_so_small_that_all_is_cut_off(
    method: str, source: Path, tmp_path: Path
) -> None:
    """Where steps are searched for, the largest code stands for what lies beyond it: not for all."""
    out = made(source, tmp_path / "out", method, "--rounding", "search")
    scales = np.frombuffer(read(out, f"{UP}.scale"), np.float32)
    overwrite(out, f"{UP}.scale", (scales / 100).tobytes())
    assert {finding.rule for finding in found_in(out, source)} == {"QC042"}


CHANGES = [
    swapped_experts, swapped_projections, every_gate_for_up, swapped_layers, a_changed_scale,
    swapped_rows, a_flipped_sign,
]  # fmt: skip


@alone
@pytest.mark.parametrize("rounding", ["reference", "search"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_qc042_other_weights(
    change: Callable[[Path], None], method: str, rounding: str, source: Path, tmp_path: Path
) -> None:
    out = made(source, tmp_path / "out", method, "--rounding", rounding)
    change(out)
    assert found_in(out, full=False) == []
    assert found_in(out, source, full=False) == []
    findings = found_in(out, source)
    assert {finding.rule for finding in findings} == {"QC042"}
    assert findings[0].where.startswith("blk.")
    assert re.search(r"expert \d, row \d+, column \d+: expected .* found", findings[0].message)


@alone
def test_qc042_names_the_place(tmp_path: Path) -> None:
    """Row and column of the whole matrix, in the second of two shards."""
    source = moe(intermediate=256).write(tmp_path / "source")
    out = made(source, tmp_path / "out", "int8", numa=2)
    down, up = (f"blk.0.ffn_{kind}_exps.3.numa.1" for kind in ("down", "up"))
    for base in (down, up):
        scale = read(out, f"{base}.scale")[8:12]
        overwrite(out, f"{base}.scale", struct.pack("<f", struct.unpack("<f", scale)[0] * 2), 8)
    by_tensor = {finding.where: finding for finding in found_in(out, source)}
    assert set(by_tensor) == {f"{down}.weight", f"{up}.weight"}
    assert "expert 3, row 130, column " in by_tensor[f"{up}.weight"].message
    message = by_tensor[f"{down}.weight"].message
    found = re.search(r"expert 3, row 2, column (\d+)", message)
    assert found is not None
    assert 128 <= int(found.group(1)) < 256


@alone
@pytest.mark.parametrize("method", METHODS)
def test_qc042_a_code_two_steps_off(method: str, source: Path, tmp_path: Path) -> None:
    """Every weight of a sampled matrix is looked at."""
    out = made(source, tmp_path / "out", method)
    data = read(out, f"{GATE}.weight")
    at = next(i for i, byte in enumerate(data) if 2 <= byte & 0x0F <= 5 and byte < 0x78)
    overwrite(out, f"{GATE}.weight", bytes([data[at] + 2]), at)
    findings = found_in(out, source)
    assert rules(findings) == [("QC042", f"{GATE}.weight")]


def test_the_sample_is_spread() -> None:
    assert amx_weights.sampled(1) == [0]
    assert amx_weights.sampled(2) == [0, 1]
    assert amx_weights.sampled(4) == [0, 1, 2, 3]
    assert amx_weights.sampled(256) == [0, 85, 170, 255]


@alone
@pytest.mark.parametrize(
    ("other", "what"),
    [
        (moe(experts=8), "number of experts"), (moe(hidden=256), "hidden size"),
        (moe(intermediate=256), "intermediate size"), (moe(layers=3), "layers"),
        (moe(layers=1), "layers"),
    ],
    ids=["experts", "hidden", "intermediate", "more layers", "fewer layers"],
)  # fmt: skip
def test_qc043_another_source(other: Model, what: str, out: Path, tmp_path: Path) -> None:
    folder = other.write(tmp_path / "other")
    findings = found_in(out, folder, full=False)
    assert rules(findings) == [("QC043", MANIFEST)]
    assert what in findings[0].message
    report = validate_folder(out, str(folder), request=Request("full"))
    assert [text for text in report.not_checked if "QC043" in text and "rounding" in text]


@alone
def test_qc043_a_source_without_experts(out: Path, tmp_path: Path) -> None:
    model = moe()
    model.tensors = {name: t for name, t in model.tensors.items() if ".experts." not in name}
    folder = model.write(tmp_path / "other", shards=1)
    assert rules(found_in(out, folder)) == [("QC043", str(folder))]


# --- The client, without kt-kernel ---------------------------------------------------------------


class Child:
    """What stands in for the process that runs kt-kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: object())

    def runs(self, code: str) -> None:
        """Have Python code run instead; `job` is what it was asked."""
        program = f"import json, os, sys; job = json.load(open(sys.argv[-1])); {code}"
        run = subprocess.run

        def instead(args: list[str], **options: Any) -> Any:
            return run([args[0], "-c", program, args[-1]], **options)

        self.patch.setattr(subprocess, "run", instead)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Child:
    return Child(monkeypatch)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("os.kill(os.getpid(), 11)", "exit code -11 (SIGSEGV)"),
        (
            "sys.exit('expert 3 lacks its scale')",
            "exit code 1; it said last: expert 3 lacks its scale",
        ),
        ("sys.exit(75)", "exit code 75"),
    ],
)
def test_qc045_a_client_that_dies(
    code: str, told: str, child: Child, out: Path, source: Path
) -> None:
    child.runs(code)
    findings = found_in(out, source)
    assert rules(findings) == [("QC045", "blk.0"), ("QC045", "blk.1")]
    assert "layer 0" in findings[0].message
    assert told in findings[0].message


def test_qc045_a_client_that_never_answers(
    child: Child, out: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amx_client, "_PATIENCE_S", 0.2)
    child.runs("import time; time.sleep(60)")
    findings = found_in(out, source)
    assert rules(findings) == [("QC045", "blk.0"), ("QC045", "blk.1")]
    assert "had not answered" in findings[0].message


def test_a_client_that_cannot_run_here_is_no_finding(child: Child, out: Path, source: Path) -> None:
    child.runs("open(job['reason'], 'w').write('no AVX512 on this CPU'); sys.exit(75)")
    report = validate_folder(out, str(source), request=Request("full"))
    assert found_in(out, source) == []
    assert any("kt-kernel cannot run here: no AVX512 on this CPU" in t for t in report.not_checked)


def test_a_client_is_not_asked_beyond_the_memory(child: Child, out: Path, source: Path) -> None:
    """At a mebibyte less than it says it needs it does not run; with that it does."""
    child.runs("sys.exit('it ran')")

    def asked(memory: int) -> list[Finding]:
        request = Request("full", memory=memory)
        folder = Folder(Checkpoint.open(out), Checkpoint.open(source), None, request)
        found = amx_client.amx_client(folder)
        return [one for one in found if isinstance(one, Finding)]

    with pytest.raises(NotChecked, match=r"give --memory \d+MiB") as refused:
        asked(100 << 20)
    need = int(re.findall(r"--memory (\d+)MiB", str(refused.value))[0])
    assert need == 513  # layers here are small
    with pytest.raises(NotChecked):
        asked((need - 1) << 20)
    assert rules(asked(need << 20)) == [("QC045", "blk.0"), ("QC045", "blk.1")]


@pytest.mark.parametrize(
    "value", ["0.0", "1.0", "float('nan')"], ids=["zeros", "ones", "not a number"]
)
def test_qc045_a_client_that_computes_something_else(
    value: str, child: Child, out: Path, source: Path
) -> None:
    child.runs(
        "import numpy; shape = numpy.load(job['inputs'])['hidden'].shape; "
        f"numpy.save(job['output'], numpy.full(shape, {value}, 'f4'))"
    )
    findings = found_in(out, source)
    assert rules(findings) == [("QC045", "blk.0"), ("QC045", "blk.1")]
    assert "expected at most 0.01" in findings[0].message


@pytest.mark.parametrize(
    ("ours", "source", "rounding", "fit"),
    [
        (0.004, 0.04, 0.02, True), (0.004, 0.07, 0.02, False), (0.02, 0.04, 0.02, False),
        (0.004, 0.3, 0.22, True), (0.02, 0.3, 0.22, False), (float("nan"), 0.0, 0.02, False),
        (0.004, float("nan"), 0.02, False), (0.004, 0.04, float("nan"), False),
    ],
)  # fmt: skip
def test_what_errors_fit(ours: float, source: float, rounding: float, fit: bool) -> None:
    assert amx_client.Errors(ours, source, rounding).fit == fit


def test_draft_layers_are_not_asked_for(child: Child, tmp_path: Path) -> None:
    source = moe(layers=2, drafts=1).write(tmp_path / "source")
    out = made(source, tmp_path / "out", "int8")
    child.runs("open('/dev/stderr', 'w').write(str(job['layer'])); sys.exit(1)")
    assert rules(found_in(out, source)) == [("QC045", "blk.0"), ("QC045", "blk.1")]


# --- The client itself ---------------------------------------------------------------------------


def errors(out: Path, source: Path) -> list[amx_client.Errors]:
    """Of the layers that the validator looks at."""
    folder = Folder(Checkpoint.open(out), Checkpoint.open(source))
    block = read_block(folder.checkpoint)
    sources = matching_source(block, folder)
    layers = sorted({block.layers[0], block.layers[-1]})
    return [amx_client.compare_layer(folder, block, sources, layer) for layer in layers]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """Sources of hidden size 512 and intermediate size 256, gaussian and with heavy tails, apart and
    stacked."""
    root = tmp_path_factory.mktemp("originals")
    return {
        (draw.__name__, stacked): moe(512, 256, experts=8, draw=draw, stacked=stacked).write(
            root / f"{draw.__name__}-{stacked}"
        )
        for draw in (gaussian, student)
        for stacked in (False, True)
    }


@needs_avx512
@pytest.mark.peer
@pytest.mark.parametrize(
    ("method", "numa", "draw", "stacked"),
    thinned(itertools.product(METHODS, [1, 2], ["gaussian", "student"], [False, True]), 5),
)
def test_kt_kernel_computes_what_the_folder_means(
    method: str,
    numa: int,
    draw: str,
    stacked: bool,
    originals: dict[tuple[str, bool], Path],
    tmp_path: Path,
) -> None:
    source = originals[draw, stacked]
    out = made(source, tmp_path / "out", method, numa=numa)
    for error in errors(out, source):
        print(method, numa, draw, stacked, error)
        assert error.ours < 0.006
        assert error.source < {"int8": 0.04, "int4": 0.6}[method]
        assert error.fit
    report = validate_folder(out, str(source), request=Request("full"))
    assert report.findings == []
    assert skipped(report) == []
    assert any("kt-kernel loads the experts" in text for text in report.proved)


@pytest.mark.peer
@pytest.mark.parametrize("method", METHODS)
def test_kt_kernel_computes_with_searched_steps(
    method: str, originals: dict[tuple[str, bool], Path], tmp_path: Path
) -> None:
    source = originals["student", False]
    out = made(source, tmp_path / "out", method, "--rounding", "search", numa=2)
    assert validate_folder(out, str(source), request=Request("full")).findings == []


@pytest.mark.peer
def test_kt_kernel_serves_the_model_s_own_layers(tmp_path: Path) -> None:
    source = moe(stacked=True, drafts=1).write(tmp_path / "source")
    out = made(source, tmp_path / "out", "int8")
    assert validate_folder(out, str(source), request=Request("full")).findings == []


@needs_avx512
@pytest.mark.peer
@pytest.mark.parametrize(
    ("change", "method"),
    thinned(
        itertools.product([swapped_experts, every_gate_for_up, swapped_layers], METHODS), 2,
        name=lambda case: f"{case[0].__name__}-{case[1]}",
    ),
)  # fmt: skip
def test_qc045_kt_kernel_with_other_weights(
    change: Callable[[Path], None],
    method: str,
    originals: dict[tuple[str, bool], Path],
    tmp_path: Path,
) -> None:
    """The client computes what the folder says, so only the source tells that it is the wrong
    thing."""
    source = originals["gaussian", False]
    out = made(source, tmp_path / "out", method)
    change(out)
    findings = found_in(out, source)
    assert ("QC045", "blk.1") in rules(findings)
    assert "from what the source's give" in findings[0].message


@needs_avx512
@pytest.mark.peer
@pytest.mark.parametrize("stated", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_another_numa_count_is_found_out(
    stated: int, method: str, originals: dict[tuple[str, bool], Path], tmp_path: Path
) -> None:
    """Converted for two nodes and stated to be for one, and the other way round."""
    source = originals["gaussian", False]
    out = made(source, tmp_path / "out", method, numa=3 - stated)
    state(out, numa=stated)
    report = validate_folder(out, str(source), request=Request("full"))
    found = {finding.rule for finding in report.findings}
    assert {"QC040", "QC045"} <= found
    (first, *_) = [f for f in report.findings if f.rule == "QC045"]
    print(first.message)
    assert first.where == "blk.0"
    assert "layer 0" in first.message


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("int4", "--rounding", "search"), True), (("int4",), False),
        (("int8", "--rounding", "search"), False),
    ],
)  # fmt: skip
def test_a_plan_says_that_searched_scales_were_measured_worse(
    words: tuple[str, ...], told: bool, tmp_path: Path
) -> None:
    source = moe().write(tmp_path / "source")
    method, *more = words
    said = ran(
        "amx", source, tmp_path / "out", "--method", method, "--numa", "1", *more, "--dry-run"
    )
    assert ("measured worse than the reference's" in said.out) is told
