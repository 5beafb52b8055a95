"""Linears that a target names and that stay: the reason is said before anything is read, and it is what
the simulators of the runtimes answer where such a linear is packed all the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from checkpoints import run_cli
from loaders.published import published

from qconvert.calibrate.backend import backend_for
from qconvert.checkpoint.open import open_source
from qconvert.core import roles
from qconvert.core.errors import PlanError
from qconvert.core.graph import nodes
from qconvert.core.names import split_parameter
from qconvert.core.roles import Kind
from qconvert.models.calibrated import calibrated_op
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.plan import Plan, run_passes
from qconvert.runtimes.classes.modules import taken_quantized
from qconvert.samples.request import Calibration

REQUEST = Calibration(synthetic=True, samples=2, length=8, devices=("cpu",))
_MLA = ("kv_b_proj", "q_a_proj", "kv_a_proj_with_mqa")


def planned(folder: Path, step: ExpertsToW4A16) -> Plan:
    return run_passes(Plan.identity(open_source(folder)), [step])


@pytest.mark.parametrize(
    ("family", "target", "says"),
    [
        ("deepseek_v3", "kv_b_proj", r"layers\.0\.self_attn\.kv_b_proj: sglang .* takes its `weight`"),
        ("deepseek_v3", "q_a_proj", r"q_a_proj: sglang 0\.5\.23 joins q_a_proj and kv_a_proj"),
        ("deepseek_v3", "kv_a_proj_with_mqa", "kv_a_proj_with_mqa: sglang .* their weight_shape too"),
        ("deepseek_v3", "re:.*mlp.gate$", "mlp.gate: no runtime loads such a matrix quantized"),
        ("deepseek_v3", "lm_head", "lm_head: no runtime loads such a matrix quantized"),
        ("deepseek_v3", r"re:model\.layers\.3\.self_attn\..*", "a draft layer's linears stay"),
        ("qwen3_next", "in_proj_qkvz", "in_proj_qkvz: sglang 0.5.23 asks Qwen3-Next's fused inputs"),
        ("qwen3_5_moe", r"re:model\.visual\..*", "visual.* a vision tower, which sglang .* unquant"),
    ],
)  # fmt: skip
def test_a_target_that_stays_says_why(family: str, target: str, says: str, tmp_path: Path) -> None:
    """Rounded or calibrated; of a vision tower a calibration says too that it sees no image."""
    folder = published(family).write(tmp_path / "source")
    for request in (None, REQUEST):
        step = ExpertsToW4A16(group_size=32, targets=("Linear", target), calibrate=request)
        with pytest.raises(PlanError, match=says) as error:
            planned(folder, step)
        unseen = "samples hold no images: nothing goes through it" in str(error.value)
        assert unseen == (request is not None and "visual" in target)
        assert str(error.value).endswith("leave this target out")


def test_a_target_of_nothing_gives_no_reason(tmp_path: Path) -> None:
    folder = published("glm4_moe").write(tmp_path / "source")
    with pytest.raises(PlanError, match=r"matches no weight that can be quantized$"):
        planned(folder, ExpertsToW4A16(targets=("no_such_module",)))


@pytest.mark.parametrize(
    ("family", "kinds", "says"),
    [
        ("deepseek_v3", {Kind.KV_UP}, "kv_b_proj: the class reads its `weight`"),
        ("deepseek_v3", {Kind.QUERY_DOWN, Kind.KV_DOWN}, "q_a_proj.weight_shape: the shapes differ:"),
    ],
)  # fmt: skip
def test_packed_all_the_same_sglang_does_not_load_it(
    family: str, kinds: set[Kind], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's classes of MLA would, so this is what to look at again with a new version of sglang."""
    folder = published(family).write(tmp_path / "source")
    line = ("w4a16", folder, tmp_path / "out", "--rtn", "--group-size", "32", "--targets", "Linear",
            "--leave-bf16", "--dry-run")  # fmt: skip
    before = run_cli(*line)
    assert "loads   sglang 0.5.23 (H200) at tp 1" in before.out, before.err
    monkeypatch.setattr(roles, "_QUANTIZABLE", roles._QUANTIZABLE | kinds)
    after = run_cli(*line)
    (refused,) = (r for r in after.out.splitlines() if "sglang 0.5.23 (H200) not at any tp:" in r)
    assert says in refused
    assert "loads   vllm 0.33.0 (H200) at tp 1" in after.out


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "qwen3_5_moe"])
def test_a_calibration_solves_what_rounding_packs(family: str, tmp_path: Path) -> None:
    """Every module of the text model: MLA's and linear attention's as `--rtn --targets Linear` takes
    them. Draft layers, which no class of transformers runs, are rounded."""
    folder = published(family).write(tmp_path / "source")
    step = ExpertsToW4A16(group_size=32, targets=("Linear",), leave_bf16=True)
    nearest = planned(folder, step)
    plan = planned(
        folder, ExpertsToW4A16(32, targets=("Linear",), leave_bf16=True, calibrate=REQUEST)
    )
    packed = {
        split_parameter(name)[0] for name in nearest.tensors if name.endswith("weight_packed")
    }
    assert {split_parameter(n)[0] for n in plan.tensors if n.endswith("weight_packed")} == packed
    found = [calibrated_op(node) for node in nodes(plan.tensors.values())]
    ops = [op for op in found if op is not None]
    drafts = {m for m in packed if plan.family.is_mtp(f"{m}.weight", plan.role_index.dims)}
    experts = {m for m in packed - drafts if ".mlp.experts." in m}
    assert {op.kind for op in ops if op.expert is None} == packed - drafts - experts
    assert len([op for op in ops if op.expert is not None]) == len(experts)
    tails = {module.rpartition(".")[2] for module in packed - experts - drafts}
    assert not tails & {*_MLA, "in_proj_qkvz" if family == "qwen3_next" else ""}
    own = {"deepseek_v3": {"q_b_proj", "o_proj"}, "qwen3_next": {"out_proj", "q_proj"},
           "qwen3_5_moe": {"in_proj_qkv", "in_proj_z", "out_proj"}}  # fmt: skip
    assert own[family] <= tails
    backend = backend_for([plan])
    assert backend is not None
    assert set(backend.linears) == packed - drafts - experts


@pytest.mark.parametrize(
    ("family", "modules", "why"),
    [
        ("deepseek_v3", ["kv_b_proj"], r"each since sglang .* takes its `weight` apart"),
        ("deepseek_v3", ["q_a_proj", "kv_a_proj_with_mqa"], r"each since sglang .* joins q_a_proj"),
        ("deepseek_v3", ["self_attn.o_proj", "eh_proj"], "each since a draft layer's linears stay"),
        ("qwen3_5_moe", ["in_proj_a", "in_proj_b"], "each since it has one row a head"),
        ("qwen3_5_moe", ["attn.qkv", "mlp.linear_fc1"], "each since it is of a vision tower"),
    ],
)  # fmt: skip
def test_a_plan_of_all_linears_names_what_stays(
    family: str, modules: list[str], why: str, tmp_path: Path
) -> None:
    """With the reason, a note each; experts alone, or a linear that is ignored, need none."""
    folder = published(family).write(tmp_path / "source")
    made = planned(folder, ExpertsToW4A16(group_size=32, targets=("Linear",)))
    notes = [note for note in made.log[-1].notes if re.search(why, note)]
    assert len(notes) == 1
    assert re.match(r"[\d,]+ linears? left as they are \(", notes[0])
    for module in modules:
        assert re.search(rf"[(., ]{module}[,)]", notes[0]), notes[0]
    assert not any("embed_tokens" in n or "mlp.gate," in n for n in made.log[-1].notes)
    named = tuple(f"re:.*{module}$" for module in modules)
    for step in (ExpertsToW4A16(group_size=32),
                 ExpertsToW4A16(group_size=32, targets=("Linear",), ignore=named)):  # fmt: skip
        notes = [note for note in planned(folder, step).log[-1].notes if re.search(why, note)]
        assert not any(
            re.search(rf"[(., ]{module}[,)]", note) for note in notes for module in modules
        )


@pytest.mark.parametrize(
    ("architecture", "module", "found"),
    [
        ("Lfm2MoeForCausalLM", "conv.in_proj", Kind.MIXER_IN),
        ("Lfm2MoeForCausalLM", "conv.out_proj", Kind.MIXER_OUT),
        ("AfmoeForCausalLM", "self_attn.gate_proj", Kind.MIXER_IN),
        ("KimiLinearForCausalLM", "self_attn.o_proj", Kind.MIXER_OUT),
        ("KimiLinearForCausalLM", "self_attn.v_proj", "vLLM 0.33 makes one layer of it and b_proj,"),
        ("GraniteMoeHybridForCausalLM", "mamba.in_proj", "vLLM 0.33 cuts it into parts of several"),
        ("JambaForCausalLM", "mamba.out_proj", "vLLM 0.33 builds it unquantized"),
        ("JambaForCausalLM", "mamba.no_proj", "no runtime is known"),
        ("OddMoeForCausalLM", "conv.in_proj", "no runtime is known"),
    ],
)  # fmt: skip
def test_other_linears_are_as_the_runtimes_tables_have_them(
    architecture: str, module: str, found: Kind | str
) -> None:
    said = taken_quantized(architecture, f"model.layers.7.{module}")
    assert said is found if isinstance(found, Kind) else str(said).startswith(found)
