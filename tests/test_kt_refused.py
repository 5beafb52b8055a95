"""`qconvert kt`: what is refused before anything is read, and what kt-kernel reads as it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Model, Tensor, read_tensors, run_cli, tree, watched_reads
from kt_pair import kt, quantization
from models import (
    EXPERTS,
    FP8_BLOCK,
    HIDDEN,
    INTERMEDIATE,
    blocks,
    cast,
    deepseek_v3,
    kimi,
    mlp,
    nvfp4_moe,
    per_channel,
    per_tensor,
    qwen3_moe,
    stacked,
)

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.runtimes.ktransformers import reads_as_it_is


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small bf16 source, for what does not depend on how weights are stored."""
    return qwen3_moe(layers=1).write(tmp_path_factory.mktemp("plain") / "source")


# --- what is refused --------------------------------------------------------------------------


def test_a_gpu_folder_and_its_format_come_together(plain: Path, tmp_path: Path) -> None:
    base = ["kt", str(plain), "--cpu-out", str(tmp_path / "cpu"), "--cpu", "int4", "--numa", "1"]
    for more in (
        ["--gpu", "w4a16"],
        ["--gpu-out", str(tmp_path / "gpu")],
        ["--gpu", "source", "--gpu-out", str(tmp_path / "gpu")],
    ):
        done = run_cli(*base, *more)
        assert done.code == 2
        assert "--gpu w4a16 needs --gpu-out, and only it takes one" in done.err
    assert os.listdir(tmp_path) == []


def test_an_empty_folder_name_is_refused(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unset shell variable must not mean the current folder."""
    monkeypatch.chdir(tmp_path)
    common = ["--cpu", "int4", "--numa", "1", "--jobs", "1"]
    for more in (
        ["--cpu-out", ""],
        ["--cpu-out", "cpu", "--gpu", "w4a16", "--gpu-out", ""],
    ):
        assert run_cli("kt", plain, *common, *more).code == 2
        assert os.listdir(tmp_path) == []


FOLDERS: dict[str, tuple[str, str]] = {
    "the same": ("out", "out"),
    "GPU in CPU": ("out", "out/gpu"),
    "CPU in GPU": ("out/cpu", "out"),
    "CPU in the source": ("source/cpu", "gpu"),
    "GPU in the source": ("cpu", "source/gpu"),
    "GPU is the source": ("cpu", "source"),
    "around the source": (".", "gpu"),
}


@pytest.mark.parametrize(("cpu", "gpu"), FOLDERS.values(), ids=FOLDERS)
def test_folders_in_one_another_are_refused(
    cpu: str, gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = qwen3_moe(layers=1).write(tmp_path / "source")
    before = tree(tmp_path)
    reads = watched_reads(monkeypatch)
    done = kt(source, tmp_path / cpu, tmp_path / gpu)
    assert done.code == 1
    assert "must lie apart from" in done.err
    assert reads == []
    assert tree(tmp_path) == before


@pytest.mark.parametrize("busy", ["cpu", "gpu"])
def test_a_folder_that_is_not_empty_is_refused_before_anything_is_read(
    busy: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / busy).mkdir()
    (tmp_path / busy / "letter.txt").write_text("dear")
    before = tree(tmp_path)
    reads = watched_reads(monkeypatch)
    done = kt(plain, tmp_path / "cpu", tmp_path / "gpu")
    assert done.code == 1
    assert f"{tmp_path / busy} is not empty (letter.txt)" in done.err
    assert reads == []
    # The other folder may have been made before this one was looked at; nothing may lie in it.
    left = {name: data for name, data in tree(tmp_path).items() if data is not None}
    assert left == {name: data for name, data in before.items() if data is not None}


def test_numa_counts_that_do_not_fit_are_refused_while_planning(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = watched_reads(monkeypatch)
    for gpu in (tmp_path / "gpu", None):
        done = kt(plain, tmp_path / "cpu", gpu, numa=3)
        assert done.code == 1
        assert f"size {INTERMEDIATE} cannot be cut for 3 NUMA nodes" in done.err
        assert "supported counts: 1, 2" in done.err
    assert reads == []
    assert os.listdir(tmp_path) == []


# --- what kt-kernel reads as it is ------------------------------------------------------------


READ: dict[str, tuple[Callable[[], Model], str | None]] = {
    "bf16": (qwen3_moe, "BF16"),
    "deepseek": (deepseek_v3, "FP8"),
    "blocks of 128": (lambda: blocks(128, 128), "FP8"),
    "blocks of 64": (lambda: blocks(64, 64), None),
    "blocks of 128 x 64": (lambda: blocks(128, 64), None),
    # kt_kernel 0.7.2 tells blocks from channels by the scale's shape, not by its name.
    "blocks of 128, compressed-tensors": (lambda: blocks(128, 128, "weight_scale"), "FP8"),
    "blocks of 64, compressed-tensors": (lambda: blocks(64, 64, "weight_scale"), None),
    "a scale a row": (per_channel, "FP8_PERCHANNEL"),
    "a scale a tensor": (per_tensor, None),
    "packed int4": (kimi, "RAWINT4"),
    "packed int4 without scales": (lambda: kimi(scales=False), None),
    "NVFP4": (nvfp4_moe, "NVFP4"),
    "NVFP4, compressed-tensors": (lambda: nvfp4_moe("compressed-tensors"), None),
    "stacks": (stacked, None),
    "fp16": (lambda: cast("F16"), None),
    "fp32": (lambda: cast("F32"), None),
}


@pytest.mark.parametrize(("make", "known"), READ.values(), ids=READ)
def test_what_kt_kernel_reads_without_conversion(
    make: Callable[[], Model], known: str | None, tmp_path: Path
) -> None:
    assert reads_as_it_is(Checkpoint.open(make().write(tmp_path / "source"))) == known


def test_the_second_lossy_step_of_int4_is_named(tmp_path: Path) -> None:
    source = kimi().write(tmp_path / "source")
    done = kt(source, tmp_path / "cpu", None)
    assert done.code == 0, done.err
    assert "--kt-method RAWINT4" in done.out
    assert "INT4 to AMX is a second lossy step" in done.out


# --- models that are refused -------------------------------------------------------------------


def ints(**weights: Any) -> Model:
    """Packed INT4 experts of which the config says this."""
    model = kimi()
    groups = model.config["quantization_config"]["config_groups"]
    groups["group_0"]["weights"] |= weights
    return model


def transformed(key: str) -> Model:
    model = kimi()
    model.config["quantization_config"][key] = {"config_groups": {"r1": {}}}
    return model


def with_zero_points() -> Model:
    model = kimi()
    name = next(n for n in model.tensors if n.endswith(".weight_packed"))
    model.tensors[name.replace("weight_packed", "weight_zero_point")] = Tensor(
        "I32", (1, 1), bytes(4)
    )
    return model


def static_fp8() -> Model:
    model = deepseek_v3()
    model.config["quantization_config"] = FP8_BLOCK | {"activation_scheme": "static"}
    return model


def without(model: Model, beginning: str) -> Model:
    left = {name: t for name, t in model.tensors.items() if not name.startswith(beginning)}
    assert len(left) < len(model.tensors)
    model.tensors = left
    return model


def with_another_expert() -> Model:
    model = qwen3_moe()
    model.tensors |= mlp(f"model.layers.0.mlp.experts.{EXPERTS}", HIDDEN, INTERMEDIATE, "bf16")
    return model


ALONE: list[tuple[Callable[[], Model], str]] = [
    (lambda: ints(symmetric=False), "weight_zero_point' is missing"),
    (lambda: ints(actorder="group"), "weight_g_idx' is missing"),
    (lambda: ints(actorder="sorted"), "expected actorder static, weight or group, found 'sorted'"),
    (lambda: ints(group_size=64), "expected scales"),
    (lambda: ints(group_size=0), "expected a group_size, found 0"),
    (lambda: ints(num_bits=8), "expected scales"),
    (lambda: ints(num_bits=9), "2 to 8 bits"),
    (lambda: ints(strategy="tensor"), "found strategy 'tensor'"),
    (lambda: transformed("transform_config"), "transform_config"),
    (lambda: transformed("sparsity_config"), "sparsity_config"),
    (with_zero_points, "weight_zero_point"),
    (
        lambda: without(deepseek_v3(), "model.layers.2.mlp.experts."),
        "MTP layer 2: its experts are missing",
    ),
    (with_another_expert, f"experts.{EXPERTS}."),
]
BESIDE: list[tuple[Callable[[], Model], str]] = [
    (kimi, "is packed integers already; packed again it would only lose"),
    (static_fp8, "activation_scheme static"),
    (
        lambda: without(qwen3_moe(layers=1), "model.layers.0.mlp.experts.1.up_proj"),
        "layer 0: up_proj of expert 1 is missing",
    ),
]


@pytest.mark.parametrize(("make", "says"), ALONE, ids=[says for _, says in ALONE])
def test_experts_that_the_cpu_folder_cannot_hold(
    make: Callable[[], Model], says: str, tmp_path: Path
) -> None:
    done = kt(make().write(tmp_path / "source"), tmp_path / "cpu", None)
    assert done.code == 1
    assert says in done.err


@pytest.mark.parametrize(("make", "says"), BESIDE, ids=[says for _, says in BESIDE])
def test_models_that_the_gpu_folder_cannot_hold(
    make: Callable[[], Model], says: str, tmp_path: Path
) -> None:
    done = kt(make().write(tmp_path / "source"), tmp_path / "cpu", tmp_path / "gpu")
    assert done.code == 1
    assert says in done.err


def test_a_scale_format_that_the_source_states_is_taken(tmp_path: Path) -> None:
    model = deepseek_v3()
    model.config["quantization_config"] = FP8_BLOCK | {"scale_fmt": "ue8m0"}
    done = kt(model.write(tmp_path / "source"), tmp_path / "cpu", tmp_path / "gpu")
    assert done.code == 0, done.err
    group = quantization(tmp_path / "gpu")["config_groups"]["group_1"]
    assert group["weights"]["block_structure"] == FP8_BLOCK["weight_block_size"]


def test_attention_in_fp8_by_row_stays_beside_experts(tmp_path: Path) -> None:
    done = kt(per_channel().write(tmp_path / "source"), tmp_path / "cpu", tmp_path / "gpu")
    assert done.code == 0, done.err
    groups = quantization(tmp_path / "gpu")["config_groups"].values()
    assert [group["format"] for group in groups] == ["pack-quantized", "float-quantized"]


def test_stacked_experts_make_the_same_pair_as_experts_apart(tmp_path: Path) -> None:
    apart = qwen3_moe(layers=1).write(tmp_path / "apart")
    stacks = stacked().write(tmp_path / "stacks")
    for name, source in (("a", apart), ("s", stacks)):
        done = kt(source, tmp_path / f"{name}-cpu", tmp_path / f"{name}-gpu")
        assert done.code == 0, done.err
    for side in ("cpu", "gpu"):
        assert read_tensors(tmp_path / f"a-{side}") == read_tensors(tmp_path / f"s-{side}")
