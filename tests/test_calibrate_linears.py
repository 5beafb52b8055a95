"""Linears beside routed experts in the calibration engine: what their Hessians are, that what goes on is
the whole model with their codes, that memory and interruptions change no code, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibrate_models import (
    EXPERTS,
    HIDDEN,
    Kept,
    Looking,
    Make,
    Stopped,
    Stopping,
    assert_same,
    calibrated,
    deepseek_v3,
    hf,
    keep_states_in_files,
    llama,
    meant,
    plan_of,
    qwen3,
    qwen3_moe,
    qwen3_next,
    same,
    samples,
    saved,
    whole,
)
from safetensors.torch import load_file, save_file

from qconvert.calibrate import linears
from qconvert.calibrate.engine import disk_bytes
from qconvert.calibrate.linears import Linear
from qconvert.calibrate.memory import Budget, least_linear_bytes, rounds, solver_bytes
from qconvert.calibrate.settings import Settings, Solver
from qconvert.core.errors import PlanError, RunError
from qconvert.core.int_scheme import IntScheme
from qconvert.models.linears import quantizable

G32 = IntScheme(4, 32)
TOKENS = [*samples(4, 40), *samples(1, 23, seed=5)]
ROUTED = Settings(min_tokens=1, propagated_error="ignore")


def linears_in(folder: Path) -> list[str]:
    return [module for module, kind in quantizable(plan_of(folder), ()) if not kind.routed]


def run(folder: Path, room: Path, output: Kept | None = None, **over: Any) -> Kept:
    """All linears and experts, or those asked for."""
    plan = plan_of(folder)
    experts = [G32] if plan.role_index.dims.num_experts else []
    modules = over.pop("modules", linears_in(folder))
    asked = dict.fromkeys(modules, (over.pop("scheme", G32),))
    options: dict[str, Any] = {"schemes": experts, "settings": ROUTED, "linears": asked, **over}
    return calibrated(plan, room, TOKENS, kept=output, **options)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(llama(), tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture(scope="module")
def undisturbed(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return run(dense, tmp_path_factory.mktemp("undisturbed"))


def requantized(folder: Path, kept: Kept) -> None:
    """The model's weights replaced by what the codes mean, each a product in BF16."""
    stored = load_file(folder / "model.safetensors")
    made = {f"{module}.weight": codes for module, (codes,) in kept.linears.items()}
    for (layer, expert, kind), (codes,) in kept.made.items():
        made[f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight"] = codes
    for name, codes in made.items():
        assert stored[name].shape == codes.codes.shape
        stored[name] = meant(codes, G32)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("solver", ["best", "llmcompressor"])
@pytest.mark.parametrize("make", [llama, qwen3_moe, qwen3_next], ids=lambda make: make.__name__)
def test_what_goes_on_is_the_whole_model_with_those_codes(
    make: Make, solver: Solver, tmp_path: Path
) -> None:
    """Bit for bit, after two layers: hidden states are those of a model whose attention, MLPs, shared
    experts and experts are what the codes mean."""
    over = {} if make is not qwen3_next else {"layer_types": ["linear_attention", "full_attention"]}
    folder = saved(make(num_hidden_layers=2, **over), tmp_path / "model")
    kept = run(folder, tmp_path / "room", settings=Settings(min_tokens=1, solver=solver))
    assert len(kept.linears) == {llama: 14, qwen3_moe: 8, qwen3_next: 1 + 4 + 6}[make]
    assert len(kept.made) == (0 if make is llama else 2 * EXPERTS * 3)
    requantized(folder, kept)
    data = (tmp_path / "room" / "hidden.2.0.rows").read_bytes()
    ours = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(-1, HIDDEN)
    assert torch.equal(ours, whole(folder, TOKENS, "sdpa")[-1])


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], torch.Tensor]]:
    """The Hessian of each set, by the modules that share it, as they are counted."""
    seen: list[tuple[list[str], torch.Tensor]] = []
    real = linears.inputs_counted

    def spied(layer: Any, sets: Sequence[Sequence[Linear]], *args: Any, **named: Any) -> Any:
        found = real(layer, sets, *args, **named)
        for some, inputs in zip(sets, found, strict=True):
            seen.append(([one.module for one in some], inputs.hessian.clone()))
        return found

    monkeypatch.setattr(linears, "inputs_counted", spied)
    return seen


def test_hessians_are_those_of_the_whole_model(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first layer, against hooks on transformers' model and a product in float64; q, k and v
    share one, gate and up another."""
    seen = counted(monkeypatch)
    run(dense, tmp_path / "room", last=0)
    at = "model.layers.0."
    assert [[name.removeprefix(at) for name in modules] for modules, _ in seen] == [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"],
    ]  # fmt: skip
    model = hf.AutoModelForCausalLM.from_pretrained(
        dense, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    rows: dict[str, list[torch.Tensor]] = {}

    def hook(name: str) -> Callable[..., None]:
        return lambda _, given: rows.setdefault(name, []).append(given[0][0].double())

    for modules, _ in seen:
        for name in modules:
            model.get_submodule(name).register_forward_pre_hook(hook(name))
    with torch.no_grad():
        for sample in TOKENS:
            model.model(torch.from_numpy(sample)[None], use_cache=False)
    for modules, hessian in seen:
        for name in modules:
            x = torch.cat(rows[name])
            wanted = 2 * x.T @ x
            most = float(wanted.max())
            assert torch.allclose(hessian.double(), wanted, rtol=0, atol=1e-6 * most), name


def test_hessians_of_a_later_layer_see_quantized_ones_before_it(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = counted(monkeypatch)
    run(dense, tmp_path / "all")
    first = [f"model.layers.0.{name}" for name in ("self_attn.o_proj", "mlp.down_proj")]
    run(dense, tmp_path / "some", modules=[*linears_in(dense)[7:], *first])
    (all_of, some_of) = [h for modules, h in seen if "model.layers.1.self_attn.q_proj" in modules]
    assert not torch.equal(all_of, some_of)
    whole_of, alone = [h for modules, h in seen if "model.layers.0.mlp.down_proj" in modules]
    assert torch.equal(whole_of, alone)  # of the layer before any of its matrices was quantized


def test_experts_see_the_layer_before_it_was_quantized(tmp_path: Path) -> None:
    """Codes of the first layer's experts are those of a run that solves experts alone; attention alone
    beside experts that stay is as with them; and the second layer sees both."""
    folder = saved(qwen3_moe(num_hidden_layers=2), tmp_path / "model")
    both = run(folder, tmp_path / "both")
    experts = run(folder, tmp_path / "experts", modules=())
    attention = run(folder, tmp_path / "attention", schemes=[], statistics=False)
    looking = run(folder, tmp_path / "looking", schemes=[])
    assert not attention.made
    assert not attention.stats
    assert set(looking.stats) == {0, 1}
    assert_same(attention, looking)
    for key, (codes,) in both.made.items():
        assert same(codes, experts.made[key][0]) or key[0] == 1, key
    for module, (codes,) in both.linears.items():
        assert same(codes, attention.linears[module][0]) or ".layers.1." in module
    assert any(not same(c[0], experts.made[k][0]) for k, c in both.made.items() if k[0] == 1)
    assert any(not same(c[0], attention.linears[m][0]) for m, c in both.linears.items())


@pytest.mark.parametrize("few", [1, 2])
def test_hessians_that_do_not_fit_together_change_no_code(
    few: int, dense: Path, undisturbed: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apart(budget: Any, device: str, shapes: Sequence[Any], **named: Any) -> list[list[int]]:
        numbers = list(range(len(shapes)))
        return [numbers[at : at + few] for at in range(0, len(numbers), few)]

    monkeypatch.setattr(linears, "rounds", apart)
    assert_same(run(dense, tmp_path / "room"), undisturbed)


@pytest.mark.parametrize("at", ["model.layers.0.mlp.down_proj", "model.layers.1.self_attn.k_proj"])
@pytest.mark.parametrize("solver", ["best", "llmcompressor"])
def test_an_interrupted_run_goes_on_to_the_same_codes(
    solver: Solver, at: str, dense: Path, undisturbed: Kept, tmp_path: Path
) -> None:
    settings = replace(ROUTED, solver=solver)
    whole = undisturbed
    if solver != "best":
        whole = run(dense, tmp_path / "whole", settings=settings)
    first = Stopping(at)
    with pytest.raises(Stopped):
        run(dense, tmp_path / "room", first, settings=settings)
    second = run(dense, tmp_path / "room", settings=settings)
    begun = int(at.split(".")[2])
    assert all(f".layers.{n}." not in m for m in second.linears for n in range(begun))
    both = Kept()
    both.linears = {**first.linears, **second.linears}
    assert_same(both, whole)


def test_several_layers_of_mla_and_a_dense_one(tmp_path: Path) -> None:
    """DeepSeek-V3's first layer has an MLP, the others experts and shared ones."""
    folder = saved(deepseek_v3(num_hidden_layers=2, q_lora_rank=64), tmp_path / "model")
    kept = run(folder, tmp_path / "room")
    assert set(kept.linears) == set(linears_in(folder))
    assert {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.shared_experts.up_proj",
            "model.layers.1.self_attn.q_b_proj"} <= kept.linears.keys()  # fmt: skip
    assert {layer for layer, _, _ in kept.made} == {1}


def test_biases_stay(tmp_path: Path) -> None:
    """A linear's bias changes no Hessian and no code."""
    folder = saved(llama(attention_bias=True, num_hidden_layers=1), tmp_path / "model")
    assert len(run(folder, tmp_path / "room").linears) == 7


@pytest.mark.parametrize("solver", ["best", "llmcompressor"])
def test_dead_columns_and_silent_inputs_are_said(solver: Solver, tmp_path: Path) -> None:
    """A norm with two zero weights kills two columns of q, k and v; one of zeros alone silences gate and
    up, which are rounded, not zeroed."""
    folder = saved(llama(num_hidden_layers=1), tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.0.input_layernorm.weight"][[3, 40]] = 0
    stored["model.layers.0.post_attention_layernorm.weight"][:] = 0
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    kept = run(folder, tmp_path / "room", settings=Settings(solver=solver))
    said = "\n".join(kept.remarks)
    what = "rounded their weights to nearest" if solver == "best" else "zeroed their weights"
    assert f"zero throughout; {what}: 2 of model.layers.0.self_attn.q_proj, 2 of " in said
    assert "what goes into model.layers.0.mlp.gate_proj, model.layers.0.mlp.up_proj, " in said
    codes = kept.linears["model.layers.0.self_attn.v_proj"][0].codes[:, [3, 40]]
    assert codes.any() == (solver == "best")
    assert np.count_nonzero(kept.linears["model.layers.0.mlp.up_proj"][0].codes) > 1000


@pytest.mark.parametrize("make", [llama, qwen3], ids=lambda make: make.__name__)
def test_the_work_dir_holds_no_more_than_it_says(make: Make, tmp_path: Path) -> None:
    folder = saved(make(), tmp_path / "model")
    assert most_in_work_dir(folder, tmp_path) <= disk_bytes(total(), HIDDEN)


def test_the_work_dir_of_experts_and_linears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory for states, what experts get is there twice."""
    folder = saved(qwen3_moe(num_hidden_layers=2), tmp_path / "model")
    keep_states_in_files(monkeypatch)
    most = most_in_work_dir(folder, tmp_path)
    assert disk_bytes(total(), HIDDEN) < most + (1 << 16)
    assert most <= disk_bytes(total(), HIDDEN, linears=True)


def total() -> int:
    return sum(sample.size for sample in TOKENS)


def most_in_work_dir(folder: Path, tmp_path: Path) -> int:
    looking = Looking(tmp_path / "room")
    run(folder, tmp_path / "room", looking)
    return looking.most


def budget(memory: int) -> Budget:
    base = 1 << 30
    return Budget(memory, base, {"cpu": (memory - base) >> 2}, 0)


LLAMA_70B = [
    [(8192, 8192), (1024, 8192), (1024, 8192)], [(8192, 8192)],
    [(28672, 8192), (28672, 8192)], [(8192, 28672)],
]  # fmt: skip


def test_rounds_grow_with_the_budget() -> None:
    """Llama-70B's layer: Hessians of .27 GB and, into down_proj, 3.3 GB."""
    named: dict[str, Any] = {
        "schemes": 1, "solver": "llmcompressor", "layer_bytes": 1_711 << 20, "chunk": 2048,
        "keeps": True,
    }  # fmt: skip
    assert rounds(budget(64 << 30), "cpu", LLAMA_70B, **named) == [[0, 1, 2, 3]]
    few = rounds(budget(34 << 30), "cpu", LLAMA_70B, **named)
    assert [n for some in few for n in some] == [0, 1, 2, 3]
    assert len(few) > 1
    with pytest.raises(RunError, match="one linear layer with its Hessian needs") as told:
        rounds(budget(16 << 30), "cpu", LLAMA_70B, **named)
    enough = int(str(told.value).rpartition(" ")[2].removesuffix("MiB")) << 20
    assert rounds(budget(enough), "cpu", LLAMA_70B, **named)
    assert len(rounds(budget(34 << 30), "cpu", LLAMA_70B, **{**named, "keeps": False})) == 1
    assert rounds(Budget(0, 0, {}, 1), "cuda:0", LLAMA_70B, **named) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("solver", ["best", "llmcompressor"])
def test_solving_is_counted(solver: Solver) -> None:
    one = solver_bytes(8192, 28672, 1, solver, "cpu")
    assert one > 4 * 4 * 28672**2  # the Hessian's copies
    assert least_linear_bytes(8192, 28672, 1, solver) == one + 4 * 28672**2
    assert solver_bytes(8192, 28672, 2, solver, "cpu") == one + 3 * 8192 * 28672


def test_too_little_memory_is_refused_with_what_would_do(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"give --memory (\d+)MiB") as told:
        run(dense, tmp_path / "room", memory=1 << 20)
    enough = int(str(told.value).rpartition(" ")[2].removesuffix("MiB")) << 20
    assert run(dense, tmp_path / "again", memory=enough + (64 << 20)).linears


def test_modules_that_no_layer_runs_are_refused(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="lm_head: is in no decoder layer"):
        run(dense, tmp_path / "room", modules=["lm_head"])
    sparse = saved(qwen3_moe(num_hidden_layers=1), tmp_path / "model")
    with pytest.raises(PlanError, match=r"mlp.gate: .*has no linear of its own for it in layer 0"):
        run(sparse, tmp_path / "room", modules=["model.layers.0.mlp.gate"])
    assert not (tmp_path / "room").exists()


def test_groups_that_do_not_divide_are_refused_before_any_work(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"_proj: .* 48\b.*, found \d"):
        run(dense, tmp_path / "room", scheme=IntScheme(4, 48))
    assert not (tmp_path / "room").exists()


def changed(monkeypatch: pytest.MonkeyPatch, forward: Callable[..., Any]) -> None:
    from transformers.models.llama import modeling_llama

    kind: Any = modeling_llama.LlamaMLP
    monkeypatch.setattr(kind, "forward", forward)


def test_a_class_that_calls_a_linear_otherwise_is_refused(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice a forward; past the module; and with another input than its neighbour in some samples."""

    def twice(self: Any, x: torch.Tensor) -> Any:
        return self.down_proj(self.gate_proj(x) * self.gate_proj(x) * self.up_proj(x))

    def past(self: Any, x: torch.Tensor) -> Any:
        gate = torch.nn.functional.linear(x, self.gate_proj.weight)
        return self.down_proj(gate * self.up_proj(x))

    def apart(self: Any, x: torch.Tensor) -> Any:
        other = x if x.shape[1] == 40 else x * 2
        return self.down_proj(self.gate_proj(x) * self.up_proj(other))

    cases = {
        "calls it 2 times, expected once": twice, "calls it 0 times": past,
        "gives it another input than model.layers.0.mlp.gate_proj in some samples": apart,
    }  # fmt: skip
    for number, (says, forward) in enumerate(cases.items()):
        with monkeypatch.context() as patch:
            changed(patch, forward)
            with pytest.raises(RunError, match=says):
                run(dense, tmp_path / str(number))
