"""Plans of `nvfp4 --gptq`: the tensors and config of `nvfp4`; a calibration finds experts' codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gdn_models
import numpy as np
import pytest
from calibrated_plans import SYNTHETIC
from checkpoints import Model
from models import MODELS, kimi, qwen3_moe
from test_nvfp4_pass import mxfp4_moe

from qconvert.calibrate.backend import backend_for
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Buffer, Value, nodes
from qconvert.core.int_scheme import Codes
from qconvert.core.parameter_names import NVFP4, Dialect
from qconvert.formats.nvfp4.encode import PackNvfp4Codes
from qconvert.models.calibrated import Calibrated, calibrated_op
from qconvert.passes.nvfp4 import ToNvfp4
from qconvert.plan.pass_options import options_of
from qconvert.plan.plan import Plan, run_passes

DIALECTS: list[Dialect] = ["compressed-tensors", "modelopt"]
both = pytest.mark.parametrize("dialect", DIALECTS)


def planned(source: Path, step: ToNvfp4) -> Plan:
    plan = run_passes(Plan.identity(Checkpoint.open(source)), (step,))
    plan.check()
    return plan


def written(model: Model, folder: Path) -> Path:
    """With the size of a vocabulary, against which ids are checked."""
    model.config["vocab_size"] = 8
    return model.write(folder)


def solved(plan: Plan) -> list[Calibrated]:
    found = (calibrated_op(node) for node in nodes(plan.tensors.values()))
    return [op for op in found if op is not None]


def is_calibrated(plan: Plan, name: str) -> bool:
    origin = plan.tensors[name].pieces[0].origin
    return isinstance(origin, Value) and isinstance(origin.node.op, Calibrated)


SOURCES: dict[str, Callable[[], Model]] = {
    **MODELS, "int4": kimi, "next": lambda: gdn_models.model("qwen3_next"),
}  # fmt: skip


@both
@pytest.mark.parametrize("kind", SOURCES)
def test_tensors_and_config_are_those_of_rounding(
    kind: str, dialect: Dialect, tmp_path: Path
) -> None:
    source = written(SOURCES[kind](), tmp_path / "source")
    step = ToNvfp4(dialect, shared_experts="keep")
    plain, plan = planned(source, step), planned(source, replace(step, calibrate=SYNTHETIC))
    assert plan.config == plain.config
    assert {n: out.type for n, out in plan.tensors.items()} == {
        n: out.type for n, out in plain.tensors.items()
    }
    assert plan.dropped == plain.dropped
    assert plain.calibration is None
    assert plan.calibration is not None
    assert plan.facts["calibration"]["solver"] == "best"
    matrices = solved(plan)
    dims = plan.role_index.dims
    experts = dims.num_experts * 3 * len(dims.groups["moe"])
    assert len(matrices) == experts > 0
    assert {op.packers for op in matrices} == {(PackNvfp4Codes(dialect),)}
    backend = backend_for([plan])
    assert backend is not None
    packed = [name for name in plan.tensors if name.endswith(f".{NVFP4[dialect].global_scale}")]
    assert len(packed) >= experts
    for name in packed:  # those of draft layers are rounded, where there are any
        assert is_calibrated(plan, name) != plan.family.is_mtp(name, dims), name


def test_the_options_name_the_data_by_its_digest(tmp_path: Path) -> None:
    source = written(qwen3_moe("bf16"), tmp_path / "source")
    plain = planned(source, ToNvfp4("modelopt"))
    assert plain.log[0].options == options_of(ToNvfp4("modelopt"))
    asked = [
        planned(source, ToNvfp4("modelopt", calibrate=request)).log[0].options["calibrate"]
        for request in (SYNTHETIC, replace(SYNTHETIC, samples=3), replace(SYNTHETIC, descent=4))
    ]
    assert len({one["data"] for one in asked}) == 3
    assert [one["samples"] for one in asked[1:]] == [3, SYNTHETIC.samples]
    places = replace(SYNTHETIC, devices=("cpu",), save_stats=str(tmp_path / "stats"))
    found = planned(source, ToNvfp4("modelopt", calibrate=places)).log[0].options
    assert found["calibrate"] == asked[0]


def test_what_cannot_be_calibrated_is_refused(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"scales": "search"}, "a calibration.s stand in"),
        ({"targets": ("Linear",)}, "solves routed experts alone, and all other layers"),
        ({"shared_experts": "quantize"}, "and quantized shared experts would be rounded"),
        ({"calibrate": replace(SYNTHETIC, solver="llmcompressor")}, "only integers are solved so"),
    ]
    for options, says in cases:
        with pytest.raises(PlanError, match=says):
            ToNvfp4(**{"calibrate": SYNTHETIC, **options})
    source = written(mxfp4_moe(), tmp_path / "source")
    with pytest.raises(PlanError, match="nothing to calibrate"):
        planned(source, ToNvfp4("modelopt", calibrate=SYNTHETIC))
    ragged = written(qwen3_moe("bf16", hidden=128, intermediate=200), tmp_path / "ragged")
    with pytest.raises(PlanError, match=r"down_proj: .* 16\b.*, found 200"):
        planned(ragged, ToNvfp4("modelopt", calibrate=SYNTHETIC))


@both
def test_codes_are_packed_as_they_are_read(dialect: Dialect) -> None:
    """Every code and every scale; values by hand."""
    codes = np.arange(-12, 13).astype(np.int8)
    known = {0, 1, 2, 3, 4, 6, 8, 12}
    numbers = np.array([c for c in codes if abs(c) in known] + [0] * 17, np.int8).reshape(1, 32)
    packer = PackNvfp4Codes(dialect)
    kinds = packer.infer(TensorType("BF16", (1, 32)))
    assert kinds[2] == TensorType("F32", NVFP4[dialect].scalar)
    outs = [Buffer(kind, memoryview(bytearray(kind.nbytes))) for kind in kinds]
    scale = np.array([[448.0, 2.0**-9]], np.float32)
    packer.pack(Codes(numbers, scale, global_scale=0.25), outs)
    halves = [half for byte in bytes(outs[0].data) for half in (byte & 15, byte >> 4)]
    assert halves[:15] == [15, 14, 13, 12, 11, 10, 9, 0, 1, 2, 3, 4, 5, 6, 7]
    assert halves[15:] == [0] * 17
    assert bytes(outs[1].data) == bytes([0x7E, 1])
    assert np.frombuffer(outs[2].data, np.float32).tolist() == [0.25]
