"""Wrong lines of what makes calibrated NVFP4: each is found, as in test_mutants.py. A line whose error
the solver notices itself, because it rounds a row that would lose more, makes no wrong output and is no
mutant.

Run with `pytest -m peer tests/test_mutants_calibrated.py`.
"""

from __future__ import annotations

from pathlib import Path

import golden
import pytest
from mutants import CALIBRATED, Bench, Mutant, applied, differ, found_wrong
from sampled import sampled

pytestmark = pytest.mark.peer

_CODES = "formats.nvfp4.encode"
_SOLVER = "calibrate.solver.nvfp4"
MUTANTS = (
    # --- the encoder
    Mutant(
        "calibrated E2M1 without a sign", "nvfp4 gptq", _CODES, "PackNvfp4Codes.pack",
        "code + _SIGN if code else 0", "code",
    ),
    Mutant(
        "calibrated E2M1 one size down", "nvfp4 gptq packed", _CODES, "PackNvfp4Codes.pack",
        "np.take(known, codes.codes[part].astype(np.int16) + middle)",
        "np.take(known, np.maximum(codes.codes[part].astype(np.int16) + middle - 1, 0))",
    ),
    Mutant(
        "calibrated codes of the row below", "nvfp4 gptq", _CODES, "PackNvfp4Codes.pack",
        "np.take(known, codes.codes[part]", "np.take(known, np.roll(codes.codes, 1, 0)[part]",
    ),
    Mutant(
        "calibrated scales of the row below", "nvfp4 gptq packed", _CODES, "PackNvfp4Codes.pack",
        "e4m3(codes.scale[part]", "e4m3(np.roll(codes.scale, 1, 0)[part]",
    ),
    Mutant(
        "calibrated scales of the next block", "nvfp4 gptq", _CODES, "PackNvfp4Codes.pack",
        "e4m3(codes.scale[part]", "e4m3(np.roll(codes.scale, 1, 1)[part]",
    ),
    Mutant(
        "a calibrated matrix's own scale inverted", "nvfp4 gptq packed", _CODES, "PackNvfp4Codes.pack",
        "= codes.global_scale", "= 1 / codes.global_scale",
    ),
    Mutant(
        "a calibrated matrix's own scale twice as large", "nvfp4 gptq", _CODES, "PackNvfp4Codes.pack",
        "= codes.global_scale", "= 2 * codes.global_scale",
    ),
    Mutant(
        "calibrated E2M1 codes exchanged in bytes", "nvfp4 gptq packed", "ops.fp4", "pack",
        "np.bitwise_or(pairs, beside, out=pairs)",
        "np.bitwise_or(pairs << 4, pairs >> 8, out=pairs)",
    ),
    # --- scales of a KV cache
    Mutant(
        "calibrated scales of the KV cache below 0", "calibrated cache", "formats.fp8.kv_scales",
        "KvScales.pack", "scale = largest", "scale = -largest",
    ),
    Mutant(
        "calibrated scales of the KV cache that are 0", "calibrated cache", "formats.fp8.kv_scales",
        "KvScales.pack", "if largest else 1.0", "if not largest else 0.0",
    ),
    Mutant(
        "no calibrated scales of one layer", "calibrated cache", "passes.kv_scale", "KvScale.__call__",
        "in layers.items()", "in [*layers.items()][1:]",
    ),
    # --- the solver
    Mutant(
        "solved columns from the last on", "nvfp4 gptq", _SOLVER, "_found",
        "(2 * one.steps).to", "(2 * one.steps.flip(1)).to",
    ),
    Mutant(
        "solved block scales from the last on", "nvfp4 gptq packed", _SOLVER, "_found",
        "= one.scale.transpose(1, 2)", "= one.scale.flip(1).transpose(1, 2)",
    ),
    Mutant(
        "solved rows from the last on", "nvfp4 gptq", _SOLVER, "_found",
        "(2 * one.steps).to", "(2 * one.steps.flip(2)).to",
    ),
    Mutant(
        "own scales of the other dialect", "nvfp4 gptq packed", _SOLVER, "global_scale_of",
        'if dialect == "modelopt":', 'if dialect != "modelopt":',
    ),
    Mutant(
        "the other way into units", "nvfp4 gptq", _SOLVER, "units",
        'if dialect == "modelopt"', 'if dialect != "modelopt"',
    ),
    # --- which matrix is which
    Mutant(
        "calibrated experts exchanged", "nvfp4 gptq", "calibrate.backend", "GptqBackend._solved",
        "units.get((event.layer, event.expert, event.kind))",
        "units.get((event.layer, event.expert ^ 1, event.kind))",
    ),
    Mutant(
        "calibrated layers exchanged", "nvfp4 gptq packed", "calibrate.backend", "GptqBackend._solved",
        "units.get((event.layer, event.expert, event.kind))",
        "units.get((event.layer ^ 1, event.expert, event.kind))",
    ),
    Mutant(
        "calibrated gate and up exchanged", "nvfp4 gptq", "calibrate.experts", "_kinds",
        "PROJECTIONS[:2]", "PROJECTIONS[1::-1]",
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize("case", CALIBRATED)
def test_right_lines_have_no_finding(case: str, bench: Bench) -> None:
    """But that its tokens were random."""
    golden.same_tensors(f"test_mutants_calibrated.py: {case}", bench.sound(case), exact=False)
    found = bench.findings(case, bench.sound(case))
    assert [(f.rule, f.severity) for f in found] == [("QC093", "warning")]


@pytest.mark.parametrize("mutant", sampled(MUTANTS, 2, name=lambda mutant: mutant.name))
def test_a_wrong_line_is_found(mutant: Mutant, bench: Bench, tmp_path: Path) -> None:
    sound = bench.sound(mutant.case)
    with applied(mutant):
        out = bench.converted(mutant.case, tmp_path / "out")
        findings = bench.findings(mutant.case, out)
    assert differ(out, sound), "it makes the same output: it is no mutant"
    assert found_wrong(findings), "not found, and the report says that the weights are proved"
