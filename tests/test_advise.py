"""`qconvert advise`: the first conversion, in the order of what is lost, that loads and fits."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import click
import headers
import pytest
from checkpoints import ran, run_cli
from loaders.published import published

from qconvert import api
from qconvert.advise.advice import Hybrid, as_json, fit_line, lines_of, with_names
from qconvert.advise.options import (
    FOR_WEIGHTS,
    Choice,
    candidates,
    considered,
    cpu_candidates,
    few_experts,
)
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.cli.main import cli
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, UsageError
from qconvert.core.names import parse
from qconvert.runtimes.consumers import Consumer

GB = 10**9


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Headers of published models with eight experts, sparse files without weights."""
    root = tmp_path_factory.mktemp("advise")
    for name in ("deepseek-v3", "qwen3-30b-a3b-fp8", "qwen3.5-27b-fp8"):
        (root / name).mkdir()
        headers.write_sparse(headers.few(name, 8), root / name)
    return root


def _choice(found: api.Advice) -> Choice:
    assert isinstance(found.best, Choice)
    return found.best


def test_nothing_is_an_answer(models: Path) -> None:
    found = api.advise(models / "qwen3-30b-a3b-fp8", "sglang==0.5.23")
    assert _choice(found).candidate.command == ""
    # 768 rows of an expert are six blocks of 128: four ranks would cut one.
    assert (_choice(found).loads_at, found.tp) == ((1, 2), 2)
    assert found.lines[0].startswith("python -m sglang.launch_server --model-path ")
    assert f"--tp-size {found.tp}" in found.lines[0]


def test_sizes_above_the_one_that_is_advised_are_asked_of_others_too(models: Path) -> None:
    """A format that loads on all GPUs is seen beside one that loads on two of them."""
    found = api.advise(models / "qwen3-30b-a3b-fp8", "sglang==0.5.23")
    others = {one.candidate.command: one for one in found.others if isinstance(one, Choice)}
    assert others["dequant SRC OUT"].loads_at == (2, 4, 8)
    assert "  2 of 8 GPUs are used: it does not load on more" in list(lines_of(found))


def test_a_misreading_at_some_sizes_leaves_the_others(models: Path, tmp_path: Path) -> None:
    """At four ranks vLLM would put scales of one group into another order; at two it does not."""
    made = tmp_path / "int4"
    whole = headers.few("qwen3-30b-a3b-fp8", 8)
    config = {k: v for k, v in whole.config.items() if k != "quantization_config"}
    config |= {"moe_intermediate_size": 512, "num_hidden_layers": 1}
    tensors = {
        name: TensorType("BF16", tuple(512 if size == 768 else size for size in kind.shape))
        for name, kind in whole.tensors.items()
        if not name.endswith("_scale_inv") and (parse(name).layer or 0) < 1
    }
    (tmp_path / "bf16").mkdir()
    headers.write_sparse(headers.HeaderSet(config, tensors, 1, whole.files), tmp_path / "bf16")
    line = ("w4a16", tmp_path / "bf16", made, "--rtn", "--group-size", "128")
    for tp, warned in (("2", False), ("4", True)):
        told = run_cli(*line, "--tp", tp, "--dry-run").out
        assert ("QC133 of the result: config.json: vllm 0.33.0 loads it wrong" in told) is warned, (
            told
        )
    ran(*line)
    found = api.advise(made, "vllm==0.33.0", api.Machine(8))
    assert (_choice(found).candidate.command, _choice(found).loads_at, found.tp) == ("", (1, 2), 2)
    others = [one.candidate.command for one in found.others if isinstance(one, Choice)]
    assert others[0] == "dequant SRC OUT"  # before what rounds to four bits once more
    assert "read" in next(
        line for line in lines_of(found) if line.startswith("  tp 4: does not load")
    )


def test_a_key_that_the_config_lacks_comes_first(tmp_path: Path) -> None:
    """Whatever is done to the weights, sglang's class asks for it."""
    few = headers.few("qwen3-next-80b-a3b", 8)
    config = {k: v for k, v in few.config.items() if k != "full_attention_interval"}
    headers.write_sparse(headers.HeaderSet(config, few.tensors, 1, few.files), tmp_path)
    _, verdict, cause, *_ = lines_of(api.advise(tmp_path, "sglang==0.5.23", api.Machine(2)))
    assert verdict == "nothing that was considered loads and fits"
    assert cause.startswith(
        "  config.json: states no full_attention_interval, which the class asks for"
    )


def test_experts_in_fp8_need_fp8_units(models: Path) -> None:
    machine = api.Machine(8, capability=(8, 0))
    found = api.advise(models / "deepseek-v3", "sglang==0.5.23", machine)
    (as_it_is,) = (
        one for one in found.others if isinstance(one, Choice) and not one.candidate.command
    )
    assert as_it_is.loads_at == ()
    said = "\n".join(lines_of(found))
    assert "kernels that need FP8 units, which a GPU of capability 8.0 has not" in said


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-30b-a3b-fp8", "kimi-k2-thinking"])
def test_few_experts_stand_for_all(name: str, tmp_path: Path) -> None:
    """Answers, bytes and counts of two small models are those of the whole one, whose shared expert
    sglang loads as a routed one for 256 experts alone."""
    whole = headers.load(name)
    first = 1 + whole.config.get("first_k_dense_replace", 0)
    config = {**whole.config, "num_hidden_layers": first, "num_nextn_predict_layers": 0}
    tensors = {
        name: kind for name, kind in whole.tensors.items()
        if (parse(name).layer or 0) < first and not name.startswith("mtp.")
    }  # fmt: skip
    headers.write_sparse(headers.HeaderSet(config, tensors, 1, whole.files), tmp_path)
    checkpoint, machine = Checkpoint.open(tmp_path), api.Machine(gpus=2)
    few = few_experts(checkpoint)
    assert few is not None
    assert len(few.more) < len(checkpoint) / 6
    for one in (*candidates(checkpoint, machine), *cpu_candidates(2)):
        sizes = () if one.command.startswith("amx") else (2, 1)
        found, all_of_it = (considered(c, one, sizes, machine) for c in (few, checkpoint))
        ranks = [
            [(r.nbytes, r.whole) for a in c.answers.values() for r in a.ranks]
            for c in (found, all_of_it)
        ]
        assert ranks[0] == ranks[1]
        assert replace(found, answers={}, written=0) == replace(all_of_it, answers={}, written=0)
        # A header grows with the digits of its offsets too.
        assert found.written == pytest.approx(all_of_it.written, rel=1e-3)


def test_what_does_not_fit_is_converted(models: Path) -> None:
    """A GPU that holds the INT4 form and not the FP8 one."""
    source = models / "deepseek-v3"
    as_it_is = _choice(api.advise(source, "sglang", api.Machine(gpus=1)))
    held = as_it_is.answers[1].nbytes
    small = api.Machine(gpus=1, gpu_memory=int(held / FOR_WEIGHTS) - GB)
    found = api.advise(source, "sglang", small)
    best = _choice(found)
    assert best.candidate.command.startswith("w4a16 SRC OUT --rtn")
    assert best.answers[1].nbytes <= small.for_weights < held
    assert best.loses
    first = found.others[0]
    assert isinstance(first, Choice)
    assert first.candidate.command == ""
    assert first.fits_at(small) == ()
    # What fits in groups of 32 is not considered in larger ones.
    everyone = [one.candidate.command for one in (best, *found.others) if isinstance(one, Choice)]
    assert len([command for command in everyone if command.startswith("w4a16")]) == 1
    assert found.lines == (
        "python -m sglang.launch_server --model-path deepseek-v3-w4a16 --tp-size 1"
        + (f" {best.answers[1].required_flag}" if best.answers[1].required_flag else ""),
    )


@pytest.mark.parametrize(
    ("data", "how"), [(None, "--rtn"), ("my chats.jsonl", "--gptq --data 'my chats.jsonl'")]
)
def test_commands_can_be_pasted(data: str | None, how: str) -> None:
    """Names of source and result, the ranks, and a calibration where there is data."""
    command = "w4a16 SRC OUT --rtn --group-size 32"
    made = with_names(command, "Org/A Model@main", 4, data)
    assert made == f"w4a16 'Org/A Model@main' 'A Model-w4a16' {how} --group-size 32 --tp 4"
    name, *words = shlex.split(made)
    parent = click.Context(cli, **cli.context_settings)
    cli.commands[name].make_context(name, words, parent=parent)
    assert with_names("fuse SRC OUT --for sglang", "m", 4) == "fuse m m-fuse --for sglang"
    assert with_names("", "m", 4) == ""


def test_no_advice_is_said(models: Path) -> None:
    result = run_cli(
        "advise", models / "deepseek-v3", "--for", "sglang", "--gpus", "1", "--gpu-memory", "1GB"
    )
    assert result.code == 3
    assert "nothing that was considered loads and fits" in result.out
    assert "too much for this GPU" in result.out


@pytest.mark.parametrize(
    ("model", "runtime", "capability"),
    [
        ("deepseek-v3", "sglang", (9, 0)), ("qwen3-30b-a3b-fp8", "sglang", (10, 0)),
        ("qwen3-30b-a3b-fp8", "vllm", (9, 0)), ("qwen3.5-27b-fp8", "vllm", (10, 0)),
    ],
)  # fmt: skip
def test_every_command_that_is_considered_parses(
    runtime: str, capability: tuple[int, int], model: str, models: Path
) -> None:
    """With all that the command line asks for, and to the same passes."""
    machine = api.Machine(8, capability=capability)
    found = candidates(api.open_checkpoint(models / model), machine, runtime)
    assert [one.command for one in found if "nvfp4" in one.command] or capability < (10, 0)
    for one in [*found, *cpu_candidates(2)]:
        if one.command:
            name, *words = one.command.split()
            command = cli.commands[name]
            command.make_context(name, words, parent=click.Context(cli, **cli.context_settings))


@pytest.mark.parametrize("runtime", ["sglang", "vllm"])
def test_nvfp4_beside_fp8_is_in_the_names_that_the_runtime_reads(
    runtime: str, models: Path
) -> None:
    """Asked of the simulators for Hopper: vLLM's has no rules for Blackwell."""
    source = api.open_checkpoint(models / "qwen3-30b-a3b-fp8")
    (one,) = (
        one
        for one in candidates(source, api.Machine(2, capability=(10, 0)), runtime)
        if "nvfp4" in one.command
    )
    assert one.command.endswith("modelopt" if runtime == "sglang" else "compressed-tensors")
    assert considered(source, one, (2,), api.Machine(2), Consumer(runtime)).loads_at == (2,)


def test_what_is_not_simulated_is_not_called_too_large(models: Path) -> None:
    machine = api.Machine(2, capability=(10, 0))
    found = api.advise(models / "qwen3-30b-a3b-fp8", "vllm", machine)
    assert found.best is None
    said = list(lines_of(found))
    assert said[1].startswith("not known for Qwen3MoeForCausalLM: another GPU than an H200")
    assert "nothing that was considered" not in "\n".join(said)


@pytest.mark.big
def test_every_role_has_a_line(models: Path) -> None:
    found = api.advise(models / "deepseek-v3", "sglang", disaggregated=True)
    roles = [line.rpartition("--disaggregation-mode ")[2] for line in found.lines]
    assert roles == ["prefill", "decode"]


@pytest.mark.big
def test_json_and_text_say_the_same(models: Path) -> None:
    result = ran("advise", models / "qwen3.5-27b-fp8", "--for", "sglang", "--json")
    said = json.loads(result.out)
    found = api.advise(models / "qwen3.5-27b-fp8", "sglang")
    assert said == json.loads(json.dumps(as_json(found)))
    text = list(lines_of(found))
    assert said["assumed"] in text
    assert all(any(line in shown for shown in text) for line in said["lines"])


def test_experts_on_the_cpu(models: Path) -> None:
    """Main memory decides which form, the GPU how many experts of a layer it holds."""
    source = models / "deepseek-v3"
    roomy = api.advise(
        source, "ktransformers", api.Machine(gpus=1, gpu_memory=48 * GB, cpu_memory=768 * GB)
    )
    assert isinstance(roomy.best, Hybrid)
    assert (roomy.best.command, roomy.best.method) == ("", "FP8")
    (line,) = roomy.lines
    assert f"--kt-num-gpu-experts {roomy.best.gpu_experts} " in line
    assert "<experts>" not in line
    # Another expert of each layer would not fit.
    each = (roomy.best.cpu_bytes) // 8
    room = roomy.machine.for_weights
    if roomy.best.gpu_experts < 8:
        assert roomy.best.gpu_bytes <= room < roomy.best.gpu_bytes + each

    methods = {one.method: one for one in (roomy.best, *roomy.others) if isinstance(one, Hybrid)}
    assert methods["AMXINT4"].cpu_bytes < methods["AMXINT8"].cpu_bytes
    tight = api.Machine(
        gpus=1, gpu_memory=48 * GB, cpu_memory=int(methods["AMXINT4"].cpu_bytes / 0.9) + GB // 10
    )
    found = api.advise(source, "ktransformers", tight, hotness="hot.pt")
    assert isinstance(found.best, Hybrid)
    assert found.best.method == "AMXINT4"
    assert found.best.command == "amx SRC OUT --method int4 --numa 2"
    assert found.lines[0].endswith("--init-expert-location hot.pt")


def test_what_cannot_be_advised_is_refused(models: Path) -> None:
    with pytest.raises(UsageError, match="not simulated"):
        api.advise(models / "deepseek-v3", "transformers")
    with pytest.raises(UsageError, match="--cpu-memory"):
        api.advise(models / "deepseek-v3", "ktransformers")
    with pytest.raises(PlanError, match="has no routed experts"):
        api.advise(models / "qwen3.5-27b-fp8", "ktransformers", api.Machine(cpu_memory=100 * GB))


def test_a_line_fits_what_the_advice_is_of(tmp_path: Path) -> None:
    """The command that chooses formats for the same machine: one that the command line takes."""
    source = published("qwen3_moe", inner=256).write(tmp_path / "a model")
    for data in (None, "my chats.jsonl"):
        machine = api.Machine(gpus=2, gpu_memory=80_000_000_000)
        found = api.advise(source, "vllm", machine, data=data)
        words = shlex.split(fit_line(replace(found, tp=2)))
        assert words[0] == "qconvert"
        context = cli.commands["fit"].make_context(
            "fit", words[2:], parent=click.Context(cli, **cli.context_settings)
        )
        assert context.params["gpus"] == 2
        assert context.params["gpu_memory"] == 80_000_000_000
        assert context.params["source"] == str(source)
        assert (context.params["data"], context.params["rtn"]) == (data, data is None)
