"""Where an output's error comes from: each column of the table moves with its own cause, planted here,
and with no other."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from math import sqrt
from pathlib import Path
from typing import Any

import amx_rows
import numpy as np
import pytest
import torch
from checkpoints import Model, Tensor, copied, run_cli, write_json
from kt_pair import kt
from models import MODELS
from safetensors.torch import load_file, save_file

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.cli.demo_checkpoint import write_sample
from qconvert.validation.findings import Finding, Table
from qconvert.validation.runner import Folder, NotChecked, Request
from qconvert.validators.model.attribution import Attribution
from qconvert.validators.model.causes import Rounding, block_outputs, route
from qconvert.validators.model.served import output_model, reading, source_model

HIDDEN, INTERMEDIATE, LAYERS, EXPERTS = 128, 256, 4, 8
Edit = Callable[[str, torch.Tensor], torch.Tensor]


def moe(**config: Any) -> Model:
    """A Qwen3-MoE without attention, in BF16, heavy-tailed."""
    random = np.random.default_rng(3)

    def matrix(*shape: int) -> Tensor:
        values = random.standard_t(4, shape) / shape[-1] ** 0.5
        return Tensor("BF16", shape, amx_rows.bf16(values).tobytes())

    tensors = {"model.embed_tokens.weight": matrix(32, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        norm = amx_rows.bf16(np.ones(HIDDEN)).tobytes()
        tensors[f"{at}.post_attention_layernorm.weight"] = Tensor("BF16", (HIDDEN,), norm)
        tensors[f"{at}.mlp.gate.weight"] = matrix(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            module = f"{at}.mlp.experts.{expert}"
            tensors[f"{module}.gate_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
            tensors[f"{module}.up_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
            tensors[f"{module}.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
    settings = {
        "model_type": "qwen3_moe", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INTERMEDIATE,
        "norm_topk_prob": True, **config,
    }  # fmt: skip
    return Model(settings, tensors)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moe().write(tmp_path_factory.mktemp("attribution") / "source")


@pytest.fixture(scope="module")
def cpu(source: Path) -> dict[str, Path]:
    made = {}
    for name, more in (("int4", ["1"]), ("int8", ["1"]), ("numa", ["2"]), ("search", ["1"])):
        method = "int8" if name == "int8" else "int4"
        words = ["--method", method, "--numa", *more, "--jobs", "1"]
        words += ["--rounding", "search"] if name == "search" else []
        made[name] = source.parent / name
        result = run_cli("amx", source, made[name], *words)
        assert result.code == 0, result.err
    return made


@cache
def attributed(
    out: Path, source: Path, **request: Any
) -> tuple[list[dict[str, str]], list[Finding]]:
    """The table's lines by column, and the findings."""
    wanted = Request("sample", attribute=True, **request)
    found = list(Attribution()(Folder(Checkpoint.open(out), Checkpoint.open(source), None, wanted)))
    (table,) = [item for item in found if isinstance(item, Table)]
    assert all(len(row) == len(table.columns) for row in table.rows)
    lines = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    return lines, [item for item in found if isinstance(item, Finding)]


def shares(line: dict[str, str]) -> tuple[float, float, float, float]:
    """Codes, int8, linears, together."""
    names = ("expert codes", "int8 activations", "FP8 linears", "together")
    codes, int8, linears, together = (float(line[name]) for name in names)
    return codes, int8, linears, together


def edited(folder: Path, to: Path, change: Edit) -> Path:
    """A copy with tensors changed."""
    copied(folder, to)
    for file in to.glob("*.safetensors"):
        made = {name: change(name, value) for name, value in load_file(file).items()}
        save_file(made, file, metadata={"format": "pt"})
    return to


# --- Sound folders -------------------------------------------------------------------------------


def test_a_copy_has_no_error(source: Path, tmp_path: Path) -> None:
    assert run_cli("run", "copy", source, tmp_path / "out", "--jobs", "1").code == 0
    lines, findings = attributed(tmp_path / "out", source)
    assert findings == []
    assert [line["layer"] for line in lines] == ["0", "2", "3"]  # the first, the middle, the last
    assert all(shares(line) == (0, 0, 0, 0) and line["stored as"] == "bf16" for line in lines)


def test_causes_of_amx_add_up(cpu: dict[str, Path], source: Path) -> None:
    for name in ("int4", "int8"):
        lines, findings = attributed(cpu[name], source)
        assert findings == []
        for line in lines:
            codes, int8, linears, together = shares(line)
            assert linears == 0
            assert 0.005 < int8 < 0.04
            assert (0.2 if name == "int4" else 0.005) < codes < (0.6 if name == "int4" else 0.04)
            assert sqrt(codes**2 + int8**2) == pytest.approx(together, rel=0.2)
            assert line["stored as"] == f"amx{name}"


def test_better_codes_show_in_their_column_alone(cpu: dict[str, Path], source: Path) -> None:
    peer, search = (attributed(cpu[name], source)[0] for name in ("int4", "search"))
    for before, after in zip(peer, search, strict=True):
        assert shares(after)[0] < 0.95 * shares(before)[0]
        assert after["int8 activations"] == before["int8 activations"]


def test_int8_activations_are_the_kernel_s_not_the_codes(
    cpu: dict[str, Path], source: Path
) -> None:
    """Whatever the codes, and otherwise where each of two NUMA nodes rounds its own part."""
    columns = {
        name: [line["int8 activations"] for line in attributed(folder, source)[0]]
        for name, folder in cpu.items()
    }
    assert columns["int4"] == columns["int8"]
    assert columns["int4"] != columns["numa"]


def test_w4a16_has_codes_alone(source: Path, tmp_path: Path) -> None:
    words = ["--cpu", "int8", "--numa", "1", "--gpu", "w4a16", "--jobs", "1"]
    folders = ["--cpu-out", str(tmp_path / "cpu"), "--gpu-out", str(tmp_path / "gpu")]
    done = run_cli("kt", source, *words, *folders)
    assert done.code == 0, done.err
    for line in attributed(tmp_path / "gpu", source)[0]:
        codes, int8, linears, together = shares(line)
        assert (int8, linears, line["stored as"]) == (0, 0, "int4")
        assert 0.1 < codes == together < 0.5


def test_layers_may_be_asked_for(cpu: dict[str, Path], source: Path) -> None:
    assert [x["layer"] for x in attributed(cpu["int8"], source, layers=(1, 9))[0]] == ["1"]
    with pytest.raises(NotChecked, match="none of the layers asked for"):
        attributed(cpu["int8"], source, layers=(9,))


# --- Planted errors ------------------------------------------------------------------------------


def test_worse_codes_raise_their_column_alone(
    cpu: dict[str, Path], source: Path, tmp_path: Path
) -> None:
    def change(name: str, value: torch.Tensor) -> torch.Tensor:
        return value * 1.1 if name.startswith("blk.2.") and name.endswith(".scale") else value

    before = attributed(cpu["int8"], source)[0]
    after, findings = attributed(edited(cpu["int8"], tmp_path / "out", change), source)
    assert findings == []
    for old, new in zip(before, after, strict=True):
        if new["layer"] != "2":
            assert new == old
            continue
        assert 0.2 < shares(new)[0] < 0.5
        assert new["int8 activations"] == old["int8 activations"]


def test_qc082_an_exchanged_expert(cpu: dict[str, Path], source: Path, tmp_path: Path) -> None:
    """Every expert holds the next one's weights: every scale and code is a sound one."""
    kept = load_file(next(cpu["int8"].glob("*.safetensors")))

    def change(name: str, value: torch.Tensor) -> torch.Tensor:
        head, _, rest = name.partition("_exps.")
        expert, _, part = rest.partition(".")
        return kept[f"{head}_exps.{(int(expert) + 1) % EXPERTS}.{part}"]

    lines, findings = attributed(edited(cpu["int8"], tmp_path / "out", change), source)
    assert [(f.rule, f.where) for f in findings] == [("QC082", f"layer {n}") for n in (0, 2, 3)]
    assert "expert codes" in findings[0].message
    assert all(1.2 < shares(line)[0] < 1.6 and shares(line)[1] < 0.04 for line in lines)


def test_qc082_a_wrong_scale(cpu: dict[str, Path], source: Path, tmp_path: Path) -> None:
    """The step of int8 codes where int4's is meant: 16 times too much."""

    def change(name: str, value: torch.Tensor) -> torch.Tensor:
        return value * 16 if "_down_" in name and name.endswith(".scale") else value

    findings = attributed(edited(cpu["int8"], tmp_path / "out", change), source)[1]
    assert [finding.rule for finding in findings] == ["QC082"] * 3


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The FP8 sample, fused and still FP8, and dequantized."""
    root = tmp_path_factory.mktemp("fp8")
    write_sample(root / "source")
    made = {"source": root / "source"}
    for name in ("qwen3.5-fp8-fused-sglang", "qwen3.5-fp8-to-bf16-fused"):
        made[name.rpartition("-")[0]] = root / name
        done = run_cli("run", name, root / "source", root / name, "--jobs", "1")
        assert done.code == 0, done.err
    return made


def test_fp8_rounds_activations_until_dequantized(fp8: dict[str, Path]) -> None:
    for line in attributed(fp8["qwen3.5-fp8-fused"], fp8["source"])[0]:
        codes, int8, linears, together = shares(line)
        assert (codes, int8, line["stored as"]) == (0, 0, "fp8")
        assert 0.01 < linears == together < 0.05
        assert 0 < float(line["attention's linears"]) < 0.05
    for line in attributed(fp8["qwen3.5-fp8-to-bf16"], fp8["source"])[0]:
        assert shares(line) == (0, 0, 0, 0)
        assert line["attention's linears"] == "0"


@pytest.mark.parametrize(
    ("part", "column"), [(".mlp.shared_expert.up", 2), (".mlp.experts.", 0), (".out_proj", None)]
)
def test_other_weights_show_where_they_are(
    part: str, column: int | None, fp8: dict[str, Path], tmp_path: Path
) -> None:
    def change(name: str, value: torch.Tensor) -> torch.Tensor:
        return (
            value * 1.25
            if f"layers.0{part}" in name or f"layers.0.linear_attn{part}" in name
            else value
        )

    out = edited(fp8["qwen3.5-fp8-to-bf16"], tmp_path / "out", change)
    first, *others = attributed(out, fp8["source"])[0]
    found = shares(first)[:3]
    assert [number for number in range(3) if found[number] > 0] == (
        [] if column is None else [column]
    )
    assert (float(first["attention's linears"]) > 0.05) is (column is None)
    assert all(shares(line) == (0, 0, 0, 0) for line in others)


@pytest.mark.parametrize("kind", ["mixed", "deepseek"])
def test_fp8_linears_beside_packed_experts(kind: str, tmp_path: Path) -> None:
    """In either form that a GPU folder's config says so; and beside the CPU's experts."""
    source, cpu, gpu = MODELS[kind]().write(tmp_path / "source"), tmp_path / "cpu", tmp_path / "gpu"
    done = kt(source, cpu, gpu, numa=1)
    assert done.code == 0, done.err
    for out in (cpu, gpu):
        for line in attributed(out, source)[0]:
            assert 0.005 < float(line["attention's linears"]) < 0.05
            assert (float(line["FP8 linears"]) > 0.01) is (kind == "deepseek")  # a shared expert
            assert float(line["expert codes"]) > 0.01


def test_a_source_that_is_not_finite_is_nobody_s_error(tmp_path: Path) -> None:
    source = MODELS["bf16"]().write(tmp_path / "source")
    assert run_cli("run", "copy", source, tmp_path / "out", "--jobs", "1").code == 0
    with pytest.raises(NotChecked, match="the source's own weights give no finite output"):
        attributed(tmp_path / "out", source)


# --- The pieces ----------------------------------------------------------------------------------


def test_rounding_by_hand() -> None:
    """int8: the largest of a run becomes 127 steps. E4M3: three bits after the first, so 17 of 448 / 448
    is halfway between 16 and 18 and goes to the even 16."""
    x = torch.tensor([[127.0, 3.4, -0.6, 254.0, 3.4, 5.0]])
    assert Rounding("int8", 6, 3)(x, down=True).tolist() == [[127, 3, -1, 254, 4, 4]]
    assert Rounding("int8", 6, 3)(x, down=False).tolist() == [[128, 4, 0, 254, 4, 4]]
    y = torch.tensor([[448.0, 17.0, -1.0625, 0.0]])
    assert Rounding("fp8", 4, 4)(y, down=False).tolist() == [[448, 16, -1, 0]]


def test_without_a_router_experts_are_spread_evenly(tmp_path: Path) -> None:
    model = moe()
    model.tensors = {n: t for n, t in model.tensors.items() if not n.endswith("mlp.gate.weight")}
    checkpoint = Checkpoint.open(model.write(tmp_path / "source"))
    with reading(source_model(Folder(checkpoint, checkpoint))) as weights:
        ids, given = route(torch.zeros(8, HIDDEN), weights, 0)
    assert sorted(ids.flatten().tolist()) == sorted([*range(EXPERTS)] * 2)
    assert torch.equal(given, torch.full((8, 2), 0.5))


def test_what_cannot_be_looked_at_is_said(source: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, str], dict[str, int], str]] = [
        ({"model_type": "nobody_s"}, {}, "'nobody_s' is not known"),
        ({"hidden_act": "gelu"}, {}, "'gelu'"),
        ({}, {"memory": 1000}, "give --memory"),
    ]
    for number, (config, request, said) in enumerate(cases):
        out = copied(source, tmp_path / str(number))
        write_json(out / "config.json", {**moe().config, **config})
        with pytest.raises(NotChecked, match=said):
            attributed(out, source, **request)


def test_the_memory_that_is_asked_for_is_enough(source: Path) -> None:
    with pytest.raises(NotChecked, match="torch included") as refused:
        attributed(source, source, memory=1000)
    need = int(re.findall(r"--memory (\d+)MiB", str(refused.value))[0])
    assert attributed(source, source, memory=need << 20)[0]
    with pytest.raises(NotChecked, match="give --memory"):
        attributed(source, source, memory=(need - 1) << 20)


@pytest.mark.peer
@pytest.mark.parametrize(
    "family", ["qwen3_moe", "qwen3_next", "qwen3_5_moe", "deepseek_v3", "glm4_moe"]
)
def test_a_block_is_what_transformers_computes(family: str, tmp_path: Path) -> None:
    """Routers, shares, shared experts and their gate, in float32."""
    import hf_models
    import transformers

    hf: Any = transformers
    config = getattr(hf_models, family)()
    folder = hf_models.saved(config, tmp_path / "source")
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    x = torch.randn(16, config.hidden_size, generator=torch.Generator().manual_seed(0))
    checkpoint = Checkpoint.open(folder)
    both = Folder(checkpoint, checkpoint)
    for layer in range(2):
        with (
            reading(source_model(both)) as theirs,
            reading(output_model(both)) as ours,
            torch.no_grad(),
        ):
            _, right, wrong = block_outputs(theirs, ours, layer, x)
            expected = model.model.layers[layer].mlp(x[None])[0]
        torch.testing.assert_close(right, expected, rtol=1e-4, atol=1e-4)
        assert all(torch.equal(right, found) for found in wrong.values())
