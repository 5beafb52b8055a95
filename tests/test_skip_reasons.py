"""A refusal says the true cause: what the model is, not what qconvert could not tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import Model, run_cli
from models import nvfp4_moe, qwen3_moe


def dense(kind: str) -> Model:
    model = qwen3_moe(layers=1)
    for key in ("num_experts", "moe_intermediate_size", "decoder_sparse_step"):
        del model.config[key]
    model.config["model_type"] = kind
    model.tensors = {name: value for name, value in model.tensors.items() if ".mlp." not in name}
    return model


def unknown() -> Model:
    model = qwen3_moe(layers=1)
    model.config["model_type"] = "foo_moe"
    return model


_NO_EXPERTS = "this model has no experts: the config of model_type 'qwen3' counts none"
_UNKNOWN = "model_type 'foo_moe' is not known: it has experts, and no file in layouts/ says how"
_NO_GDN = "this model has no linear-attention layers"
_EXPERTS = {
    "amx": "amx S O --method int4 --numa 1",
    "w4a16": "w4a16 S O --rtn",
    "nvfp4": "nvfp4 S O --dialect modelopt",
    "stack": "experts stack S O",
    "unstack": "experts unstack S O",
    "kt": "kt S --cpu-out O --cpu int4 --numa 1",
    "kt w4a16": "kt S --cpu-out O --cpu int4 --numa 1 --gpu w4a16 --gpu-out G",
    "prepare": "prepare trtllm-gen S O",
}


def refusal(source: Path, tmp_path: Path, line: str) -> str:
    names = {"S": str(source), "O": str(tmp_path / "out"), "G": str(tmp_path / "gpu")}
    result = run_cli(*(names.get(word, word) for word in line.split()))
    assert result.code == 1, result.out
    assert not (tmp_path / "out").exists()
    return result.err


@pytest.mark.parametrize("line", _EXPERTS.values(), ids=_EXPERTS)
def test_a_dense_model_has_no_experts(line: str, tmp_path: Path) -> None:
    said = refusal(dense("qwen3").write(tmp_path / "s"), tmp_path, line)
    assert _NO_EXPERTS in said
    assert "cannot be told" not in said


@pytest.mark.parametrize("line", _EXPERTS.values(), ids=_EXPERTS)
def test_experts_that_nobody_described(line: str, tmp_path: Path) -> None:
    """A model that has experts is not said to have none; what helps with remote code is."""
    said = refusal(unknown().write(tmp_path / "s"), tmp_path, line)
    assert line.startswith("prepare") or "(--architecture), or describe the family" in said
    assert "no experts" not in said
    assert _UNKNOWN in said or "quantize the experts first" in said


@pytest.mark.parametrize("line", ["fuse S O --for sglang", "fuse S O --groups 2", "unfuse S O"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_model_without_linear_attention(line: str, kind: str, tmp_path: Path) -> None:
    model = dense(kind) if kind == "qwen3" else qwen3_moe(layers=1)
    assert _NO_GDN in refusal(model.write(tmp_path / "s"), tmp_path, line)


def packed() -> Model:
    return nvfp4_moe()


def mxfp4() -> Model:
    """No global scale says that it is NVFP4."""
    model = nvfp4_moe("compressed-tensors", inputs=False)
    for name in [name for name in model.tensors if name.endswith("_global_scale")]:
        del model.tensors[name]
    return model


@pytest.mark.parametrize(
    ("model", "line", "says"),
    [
        (
            lambda: dense("qwen3"),
            "dequant S O",
            "all tensors are BF16, so there is nothing to dequantize",
        ),
        (mxfp4, "dequant S O", "the config states no MXFP4: qconvert does not guess"),
        (packed, "dequant S O --drop-mtp", "no tensor is known as one of an MTP (draft) layer"),
        (packed, "unprepare S O", "found a plain checkpoint"),
    ],
)
def test_other_causes(model: Callable[[], Model], line: str, says: str, tmp_path: Path) -> None:
    assert says in refusal(model().write(tmp_path / "s"), tmp_path, line)


def test_a_prepared_folder_is_known_for_one(tmp_path: Path) -> None:
    source = nvfp4_moe().write(tmp_path / "source")
    prepared, back = tmp_path / "prepared", tmp_path / "back"
    assert run_cli("prepare", "trtllm-gen", source, prepared, "--jobs", "1").code == 0
    for line in ("w4a16 S O --rtn", "experts stack S O", "nvfp4 S O --dialect modelopt",
                 "split S O --pp 1,1", "prepare trtllm-gen S O"):  # fmt: skip
        said = refusal(prepared, tmp_path, line)
        assert "prepared" in said, line
        assert "qconvert unprepare" in said, line
    plan = run_cli("unprepare", prepared, back, "--dry-run")
    assert "unknown" not in plan.out
    assert "NVFP4 (trtllm-gen) -> NVFP4" in plan.out
    assert run_cli("unprepare", prepared, back, "--jobs", "1").code == 0
    assert "already restored by unprepare" in refusal(back, tmp_path, "unprepare S O")
