"""Layouts against transformers' own classes: the same logits under another class or order, and byte
for byte back again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import ran, run_cli
from families.loading import logits
from layout_models import families, hf, make, saved
from safetensors.torch import load_file

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.cli.demo import write_sample
from qconvert.passes.experts import Stack
from qconvert.passes.fuse import Fuse, Unfuse
from qconvert.plan.plan import Pass, Plan, run_passes
from qconvert.recipe.recipe import load_recipe
from qconvert.run.executor import execute
from qconvert.run.work.options import RunOptions

pytestmark = pytest.mark.peer

Tensors = dict[str, torch.Tensor]


def run(source: Path, out: Path, *passes: Pass) -> Path:
    execute(run_passes(Plan.identity(Checkpoint.open(source)), passes), out, RunOptions(jobs=1))
    return out


def tensors(folder: Path) -> Tensors:
    found: Tensors = {}
    for file in folder.glob("*.safetensors"):
        found.update(load_file(file))
    return found


def equal(a: Path, b: Path) -> bool:
    ours, theirs = tensors(a), tensors(b)
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("r", [2, 3])
@pytest.mark.parametrize("kind", ["dense", "moe", "moe-vl"])
def test_qwen3_5_computes_the_same_as_qwen3_next(kind: str, r: int, tmp_path: Path) -> None:
    source = saved(make(kind, r), tmp_path / "source")
    recipe = load_recipe("qwen3.5-to-qwen3-next")
    out = run(source, tmp_path / "next", *recipe.passes)
    assert type(hf.AutoConfig.from_pretrained(out)).__name__ == "Qwen3NextConfig"
    assert torch.equal(logits(out), logits(source))
    back = run(out, tmp_path / "back", *load_recipe("qwen3-next-to-qwen3.5").passes)
    assert torch.equal(logits(back), logits(out))
    if kind != "moe-vl":  # names and all: the text-only class is where it came from
        assert equal(back, source)


def test_the_contiguous_order_under_qwen3_next_babbles(tmp_path: Path) -> None:
    """The reason for all this: the wrong order loads without a word and computes something else."""
    source = saved(make("next", 2), tmp_path / "source")
    out = run(source, tmp_path / "wrong", Fuse(groups=1))
    assert not torch.allclose(logits(out).float(), logits(source).float(), atol=0.1)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_split_fused_unfused_is_where_it_began(kind: str, tmp_path: Path) -> None:
    source = saved(make(kind, 3), tmp_path / "source")
    fused = run(source, tmp_path / "fused", Fuse(consumer="sglang"))
    assert any("in_proj_qkvz" in name for name in tensors(fused))
    assert equal(run(fused, tmp_path / "back", Unfuse()), source)
    assert torch.equal(logits(tmp_path / "back"), logits(source))


def test_qwen3_next_begins_with_unfuse(tmp_path: Path) -> None:
    source = saved(make("next", 2), tmp_path / "source")
    split = run(source, tmp_path / "split", Unfuse())
    assert equal(run(split, tmp_path / "back", Fuse(consumer="transformers")), source)


def test_stacked_experts_load_and_come_back(tmp_path: Path) -> None:
    source = saved(make("moe", 2), tmp_path / "source")
    stacked = run(source, tmp_path / "stacked", Stack())
    assert tensors(stacked)["model.layers.0.mlp.experts.gate_up_proj"].shape == (6, 96, 128)
    assert torch.equal(logits(stacked), logits(source))
    back = run(stacked, tmp_path / "back", *load_recipe("qwen3.5-unstack-experts").passes)
    assert equal(back, source)


# ---- pipeline stages

# Named here, because configs take seconds to make, and only these tests need them.
FAMILIES = (
    "deepseek_v3", "qwen3_5 dense", "qwen3_5 moe", "qwen3_5 tied", "qwen3_5 vl", "qwen3_moe",
    "qwen3_next",
)  # fmt: skip


@pytest.mark.parametrize("runtime", ["sglang", "vllm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_split_and_join_is_byte_identical(family: str, runtime: str, tmp_path: Path) -> None:
    assert tuple(sorted(families())) == FAMILIES
    source = saved(families()[family], tmp_path / "source")
    (source / "tokenizer.json").write_text('{"version": "1.0"}')
    stages, out = tmp_path / "stages", tmp_path / "out"
    done = run_cli("split", source, stages, "--pp", "1,2,1", "--for", runtime)
    if family == "qwen3_next" and runtime == "sglang":
        assert done.code == 1
        assert "runs in one pipeline stage only in sglang" in done.err
        return
    assert done.code == 0, done.err
    variable = {"sglang": "SGLANG", "vllm": "VLLM"}[runtime]
    assert f"set {variable}_PP_LAYER_PARTITION=1,2,1" in done.out
    for number in range(3):
        folder = stages / f"stage-{number:02d}-of-03"
        checked = run_cli("validate", folder, "--against", source, "--level", "full")
        assert checked.code == 0, checked.out
        assert (folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
        manifest = json.loads((folder / "qconvert.json").read_text())["stage"]
        assert manifest["partition"] == [1, 2, 1]
        headless = family == "qwen3_5 tied" and runtime == "sglang" and number == 2
        same = (folder / "config.json").read_bytes() == (source / "config.json").read_bytes()
        assert same is not headless
    assert run_cli("join", stages, out).code == 0
    assert equal(out, source)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (out / name).exists() == (source / name).exists()
        if (source / name).exists():
            assert (out / name).read_bytes() == (source / name).read_bytes()


def test_whole_shards_are_linked_and_a_copy_is_not(tmp_path: Path) -> None:
    write_sample(tmp_path / "source", shards=8)
    for name, more in (("linked", []), ("copied", ["--copy"])):
        ran("split", tmp_path / "source", tmp_path / name, "--pp", "2", "--for", "vllm", *more)
    inodes = {file.stat().st_ino for file in (tmp_path / "source").glob("*.safetensors")}

    def shared(name: str) -> int:
        files = (tmp_path / name).glob("*/*.safetensors")
        return sum(file.stat().st_ino in inodes for file in files)

    assert shared("linked") >= 4
    assert shared("copied") == 0
    for name in ("linked", "copied"):
        assert run_cli("join", tmp_path / name, tmp_path / f"{name}-again").code == 0
        assert run_cli("diff", tmp_path / "source", tmp_path / f"{name}-again").code == 0


def test_stages_compose_with_other_passes(tmp_path: Path) -> None:
    """Dequantized, then cut: the stages together are the dequantized checkpoint."""
    source = tmp_path / "source"
    write_sample(source)
    ran(
        "split", source, tmp_path / "s", "--pp", "1,3", "--for", "sglang", "--recipe",
        "qwen3.5-fp8-to-bf16-fused",
    )  # fmt: skip
    assert run_cli("join", tmp_path / "s", tmp_path / "joined").code == 0
    ran("run", "qwen3.5-fp8-to-bf16-fused", source, tmp_path / "whole")
    assert run_cli("diff", tmp_path / "whole", tmp_path / "joined").code == 0
    manifest = json.loads((tmp_path / "joined" / "qconvert.json").read_text())
    assert manifest["gdn_groups"] == 1


def test_a_missing_or_foreign_stage_is_refused(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_sample(tmp_path / f"source{seed}", seed=seed)
        pp = ["2,2", "1,3"][seed]
        assert (
            run_cli("split", tmp_path / f"source{seed}", tmp_path / f"s{seed}", "--pp", pp).code
            == 0
        )
    lost = tmp_path / "s0" / "stage-01-of-02"
    lost.rename(tmp_path / "elsewhere")
    done = run_cli("join", tmp_path / "s0", tmp_path / "out")
    assert (done.code, "stage 1 of 2 is missing" in done.err) == (1, True)
    (tmp_path / "s1" / "stage-01-of-02").rename(lost)
    done = run_cli("join", tmp_path / "s0", tmp_path / "out")
    assert (done.code, "belongs to another split" in done.err) == (1, True)


def test_wrong_partitions_and_runtimes_are_refused(tmp_path: Path) -> None:
    write_sample(tmp_path / "s")
    for arguments, code, said in (
        (["--pp", "2,1"], 1, "is 3, it must equal num_hidden_layers = 4"),
        (["--pp", "2"], 2, "add --for sglang or --for vllm"),
        (["--pp", "two", "--for", "vllm"], 2, "'two' is not a valid partition"),
        (["--pp", "9", "--for", "vllm"], 1, "4 layers cannot be cut into 9 stages"),
        (["--pp", "2,2", "--for", "transformers"], 2, "is not one of sglang, vllm"),
    ):
        done = run_cli("split", tmp_path / "s", tmp_path / "out", *arguments)
        assert (done.code, said in done.err) == (code, True), done.err
        assert not (tmp_path / "out").exists()
