"""Plans of calibrated linears beside routed experts: which matrices are solved, what names them, and
what is refused before anything is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import run_cli
from families import tiny
from loaders.published import published
from models import qwen3_moe

from qconvert.calibrate.backend import backend_for, work_dir_bytes
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.open import open_source
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Value, nodes
from qconvert.core.int_scheme import IntScheme
from qconvert.core.names import split_parameter
from qconvert.formats.base import Stored
from qconvert.formats.registry import read_matrix
from qconvert.models.calibrated import Calibrated, calibrated_op
from qconvert.models.linears import calibrated_linear
from qconvert.passes.amx import ExpertsToAmx
from qconvert.passes.pair import pair_plans
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.pass_options import EXPERTS
from qconvert.plan.plan import Plan, run_passes
from qconvert.recipe.recipe import parse_recipe
from qconvert.samples.request import Calibration

REQUEST = Calibration(synthetic=True, samples=2, length=8, devices=("cpu",))
LINEAR = ExpertsToW4A16(group_size=32, targets=("Linear",), calibrate=REQUEST)
ATTENTION = replace(LINEAR, targets=(r"re:.*\.self_attn\..*",))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.saved("llama", tmp_path_factory.mktemp("dense") / "llama", {})


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published("glm4_moe").write(tmp_path_factory.mktemp("sparse") / "glm4_moe")


def planned(folder: Path, *steps: Any) -> Plan:
    return run_passes(Plan.identity(open_source(folder)), steps)


def solved(plan: Plan) -> list[Calibrated]:
    found = [calibrated_op(node) for node in nodes(plan.tensors.values())]
    return [op for op in found if op is not None]


def packed(plan: Plan) -> set[str]:
    return {split_parameter(name)[0] for name in plan.tensors if name.endswith("weight_packed")}


def test_a_dense_model_is_calibrated_as_it_is_rounded(dense: Path) -> None:
    """The same modules, types, shapes and config as rounded; each solved in its layer."""
    plan, nearest = planned(dense, LINEAR), planned(dense, replace(LINEAR, calibrate=None))
    assert plan.config == nearest.config
    assert {n: o.type for n, o in plan.tensors.items()} == {
        n: o.type for n, o in nearest.tensors.items()
    }
    ops = solved(plan)
    assert {op.kind for op in ops} == packed(nearest)
    assert all(op.expert is None for op in ops)
    assert all(f".layers.{op.layer}." in op.kind for op in ops)
    assert plan.calibration is not None
    assert plan.calibration.linears
    plan.check()


def test_experts_alone_are_named_as_before(sparse: Path) -> None:
    """What a fingerprint has of them."""
    plan = planned(sparse, replace(LINEAR, targets=(EXPERTS,)))
    (first,) = (op for op in solved(plan) if (op.layer, op.expert, op.kind) == (1, 0, "gate_proj"))
    assert repr(first).startswith("Calibrated(decoder=")
    assert ", layer=1, expert=0, kind='gate_proj', request='" in repr(first)
    assert plan.calibration is not None
    assert not plan.calibration.linears


def test_linears_and_experts_of_one_model(sparse: Path) -> None:
    """Attention, the dense layer's MLP and shared experts are solved with the routed ones. The draft
    layer's are rounded, its shared ones too, as with --rtn: sglang would fuse them."""
    plan, nearest = planned(sparse, LINEAR), planned(sparse, replace(LINEAR, calibrate=None))
    assert packed(plan) == packed(nearest)
    ops = solved(plan)
    linears = {op.kind for op in ops if op.expert is None}
    drafts = {m for m in packed(plan) if plan.family.is_mtp(f"{m}.x", plan.role_index.dims)}
    experts = {m for m in packed(plan) if ".mlp.experts." in m}
    assert drafts
    assert linears == packed(plan) - drafts - experts
    assert {"model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj",
            "model.layers.1.mlp.shared_experts.up_proj"} <= linears  # fmt: skip
    assert len([op for op in ops if op.expert is not None]) == len(experts - drafts)


def test_attention_alone_leaves_experts(sparse: Path) -> None:
    plan = planned(sparse, ATTENTION)
    assert all(".self_attn." in op.kind for op in solved(plan))
    assert not any(".experts." in module for module in packed(plan))
    backend = backend_for([plan])
    assert backend is not None
    assert not backend.packers
    assert backend.needs().memory > 0


def test_what_a_run_needs_is_counted(dense: Path, sparse: Path) -> None:
    """Memory of the widest matrix; disk for what experts get twice, where both are solved."""
    backend = backend_for([planned(dense, LINEAR)])
    assert backend is not None
    widest = max(one.columns for one in backend._stored.values())
    assert backend.needs().memory > 4 * widest * widest
    request = replace(REQUEST, propagated_error="ignore")  # as it is where linears are solved
    experts = replace(LINEAR, targets=(EXPERTS,), calibrate=request)
    both, alone = (planned(sparse, one) for one in (LINEAR, experts))
    assert both.calibration is not None
    assert both.calibration.request == request
    sizes = [work_dir_bytes(plan.calibration) for plan in (both, alone) if plan.calibration]
    hidden = both.role_index.dims.hidden_size
    assert sizes[0] - sizes[1] == 2 * 8 * (2 * hidden + 16 * 8)


def test_the_calibration_is_in_the_identity(dense: Path) -> None:
    prints = {
        planned(dense, step).check().fingerprint()
        for step in (
            LINEAR, replace(LINEAR, calibrate=None),
            replace(LINEAR, calibrate=replace(REQUEST, solver="llmcompressor")),
        )
    }  # fmt: skip
    assert len(prints) == 3


def test_statistics_need_experts(dense: Path, sparse: Path) -> None:
    step = replace(LINEAR, calibrate=replace(REQUEST, save_stats="stats"))
    with pytest.raises(
        PlanError, match="statistics are of routed experts, and this model has none"
    ):
        planned(dense, step)
    one, other = (
        backend_for([planned(sparse, s)]) for s in (step, replace(step, ignore=("o_proj",)))
    )
    assert one is not None
    assert other is not None
    assert one._about() != other._about()


def test_a_pass_before_it(sparse: Path) -> None:
    """Names may change: the matrix is the checkpoint's. A part of its rows is not one of its own."""
    plan, module = Plan.identity(Checkpoint.open(sparse)), "model.layers.1.self_attn.q_proj"
    stored, used = read_matrix(plan, module)

    def made(name: str, weight: Stored, names: Sequence[str]) -> Calibrated:
        ((codes, _),) = calibrated_linear(plan, name, weight, names, (LINEAR.packer(),), "digest")
        assert codes.type == TensorType("I32", (weight.rows, weight.columns // 8))
        (piece,) = codes.pieces
        assert isinstance(piece.origin, Value)
        op = calibrated_op(piece.origin.node)
        assert op is not None
        return op

    assert made("renamed.by_a_pass", stored, used).kind == module
    with pytest.raises(PlanError, match="q_proj is cut or joined by an earlier pass from"):
        made(module, stored.cut(0, 32), used)
    with pytest.raises(PlanError, match="lm_head is in no decoder layer"):
        made("lm_head", *read_matrix(plan, "lm_head"))


def test_a_pair_calibrates_experts_alone(tmp_path: Path) -> None:
    source = qwen3_moe("bf16", hidden=128, intermediate=256).write(tmp_path / "source")
    cpu = ExpertsToAmx("int4", 1, calibrate=REQUEST)
    start = Plan.identity(Checkpoint.open(source))
    with pytest.raises(PlanError, match="the calibration of a pair solves routed experts"):
        pair_plans(start, cpu, replace(LINEAR, calibrate=None))


RECIPE = """
quant_stage:
  quant_modifiers:
    GPTQModifier:
      targets: [Linear]
      ignore: [lm_head, "re:.*down_proj$"]
      config_groups:
        group_0:
          targets: [Linear]
          weights: {num_bits: 4, group_size: 32, strategy: group, symmetric: true}
"""


def test_a_recipe_of_llm_compressor(dense: Path, tmp_path: Path) -> None:
    """As it is there: its solver, its order, and what it ignores stays."""
    data = {"synthetic": True, "samples": 2, "length": 8}
    (step,) = parse_recipe(RECIPE, "r", data).passes
    plan = planned(dense, step)
    ops = solved(plan)
    assert ops
    assert not any(op.kind.endswith("down_proj") for op in ops)
    schemes = [op.packers[0].scheme_of(64) for op in ops]
    assert {isinstance(s, IntScheme) and s.actorder for s in schemes} == {"static"}
    assert plan.calibration is not None
    assert plan.calibration.request.solver == "llmcompressor"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    shown = run_cli("run", recipe, dense, tmp_path / "out", "--dry-run", "--synthetic",
                    "--samples", "2", "--length", "8")  # fmt: skip
    assert shown.code == 0, shown.err
    assert "each linear on all tokens" in shown.out
