"""vLLM's own loader over what qconvert makes, as on an H200 (vllm_loader.py). Skips itself without its
environment (`make loaders`). A sample of the matrix, or with QCONVERT_ALL=1 the whole: 8 families, bf16
and FP8, every form that a command writes, ranks of 1, 2 and 4, and the draft's class."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoints import run_cli, unjudged

from loaders.client import PYTHON, Rank, Server
from loaders.folders import assert_whole, converted, is_draft, source
from loaders.published import FAMILIES

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(
        not (PYTHON.parent.parent / "vllm").is_dir(), reason="needs vLLM's loader: make loaders"
    ),
]

ALL = os.environ.get("QCONVERT_ALL") == "1"
FIRST, MIDDLE, LAST = Rank(), Rank(2, 1), Rank(4, 3)
SPLIT = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
DENSE = ("qwen3_5", "qwen3_5_text")
WITHOUT_DRAFT = ("qwen3_moe",)
# Heads of 192 rows, which four ranks do not share in whole blocks; its real size is 128 heads.
_CUT = "output_partition_size = 192 is not divisible by weight quantization block_n = 128"


@dataclass(frozen=True)
class Form:
    """What a command writes. `unread` and `unwritten`: ends of names that vLLM leaves by design."""

    command: str
    unread: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()

    @property
    def linear(self) -> bool:
        return "--targets Linear" in self.command


# GPTQ's group indices are read for act-order only, and a bias that no tensor has is dropped after the
# load (vLLM 0.33, layers/quantization/auto_gptq.py).
_GPTQ = {"unread": (".g_idx",), "unwritten": (".w13_bias", ".w2_bias")}
# Weight-only NVFP4 has no input scales; those of experts are handed to no kernel, those of linears are
# dropped (vLLM 0.33, compressed_tensors_moe_w4a4_nvfp4.py: use_a16; modelopt.py: _DropInputScale).
_NVFP4 = {"unwritten": ("_input_global_scale", "input_scale")}
FORMS = {
    "g128": Form("w4a16 --rtn"),
    "g32": Form("w4a16 --rtn --group-size 32"),
    "channel": Form("w4a16 --rtn --group-size channel"),
    "asymmetric": Form("w4a16 --rtn --asymmetric"),
    "w8": Form("w4a16 --rtn --bits 8"),
    "linear": Form("w4a16 --rtn --targets Linear"),
    "linear-w8": Form("w4a16 --rtn --bits 8 --group-size channel --targets Linear"),
    "gptq": Form("w4a16 --rtn --packing gptq", **_GPTQ),
    "gptq-v2": Form("w4a16 --rtn --packing gptq-v2", **_GPTQ),
    "gptq-linear": Form("w4a16 --rtn --packing gptq --targets Linear", **_GPTQ),
    "nvfp4": Form("nvfp4 --dialect compressed-tensors --weight-only", **_NVFP4),
    "nvfp4-linear": Form(
        "nvfp4 --dialect compressed-tensors --weight-only --targets Linear", **_NVFP4
    ),
    "fp8-tensor": Form("fp8 --tensor --targets Linear"),
    "fp8-static": Form("fp8 --tensor --input-scale 2.5 --targets Linear"),
    "fp8-packed-static": Form(
        "fp8 --tensor --dialect compressed-tensors --input-scale 2.5 --targets Linear"
    ),
    "int8": Form("int8 --targets Linear"),
    "mxfp4": Form("mx"),
    "mxfp4-linear": Form("mx --targets Linear"),
    "mxfp8-linear": Form("mx --bits 8 --targets Linear"),
    "modelopt": Form("nvfp4 --dialect modelopt --weight-only", **_NVFP4),
    "modelopt-linear": Form("nvfp4 --dialect modelopt --weight-only --targets Linear", **_NVFP4),
}
# One cell of every kind for CI.
SAMPLE = (
    ("deepseek_v3", "bf16", "g128"), ("deepseek_v3", "fp8", "g128"), ("deepseek_v3", "fp8", "linear"),
    ("deepseek_v3", "bf16", "gptq"), ("deepseek_v3", "bf16", "linear"), ("glm4_moe", "fp8", "g32"),
    ("glm4_moe", "bf16", "gptq"), ("qwen3_moe", "fp8", "asymmetric"), ("glm4_moe", "bf16", "linear"),
    ("glm4_moe", "fp8", "nvfp4"), ("glm4_moe", "fp8", "modelopt"), ("qwen3_5", "bf16", "linear"),
    ("qwen3_5_moe", "bf16", "asymmetric"), ("qwen3_5_moe_text", "bf16", "gptq-linear"),
    ("qwen3_5_moe_text", "fp8", "linear-w8"), ("qwen3_moe", "bf16", "channel"),
    ("qwen3_moe", "fp8", "gptq"), ("qwen3_next", "fp8", "g32"), ("qwen3_next", "bf16", "modelopt"),
    ("qwen3_next", "bf16", "linear"), ("qwen3_moe", "bf16", "fp8-tensor"),
    ("qwen3_moe", "bf16", "fp8-static"), ("glm4_moe", "bf16", "fp8-packed-static"),
    ("qwen3_5", "bf16", "fp8-static"), ("deepseek_v3", "fp8", "fp8-static"),
    ("qwen3_moe", "bf16", "int8"), ("qwen3_5", "bf16", "int8"),
    ("qwen3_moe", "bf16", "mxfp4"), ("qwen3_5", "bf16", "mxfp4-linear"),
    ("qwen3_moe", "bf16", "mxfp8-linear"), ("glm4_moe", "bf16", "int8"),
)  # fmt: skip


def _cells() -> list[tuple[str, str, str]]:
    """Family, type of the source, form. A dense model has no experts to quantize."""
    every = [
        (family, kind, form)
        for family in FAMILIES
        for kind in ("bf16", "fp8")
        for form in FORMS
        if FORMS[form].linear or family not in DENSE
    ]
    assert set(SAMPLE) <= set(every)
    return every if ALL else list(SAMPLE)


def _plan_refuses(family: str, kind: str, form: str) -> str | None:
    """What the plan says before anything is read, where it refuses."""
    some_stay = family in WITHOUT_DRAFT  # else the draft's linears stay as they are
    if kind == "fp8" and form in ("gptq", "gptq-v2"):
        return "is FP8, and GPTQ's form has no place for it"
    if kind == "fp8" and form == "gptq-linear" and not some_stay:
        return "is FP8, and GPTQ's form has no place for it"
    if kind == "fp8" and form == "modelopt-linear" and not some_stay:
        return "is FP8 and would stay so beside other layers in NVFP4"
    return None


def _model_refuses(family: str, kind: str, form: str) -> str | None:
    """What vLLM's class of the model raises, where it refuses."""
    if kind == "fp8" and form == "modelopt":
        # vLLM's MIXED_PRECISION takes scales of FP8 linears as [N/128, 1, K/128, 1] under weight_scale.
        return r"weight_scale|has no attribute 'data'"
    return None


def _draft_refuses(family: str, kind: str, form: str) -> str | None:
    """What vLLM's class of the draft raises, where it refuses."""
    if (refused := _model_refuses(family, kind, form)) is not None:
        return refused
    if family == "glm4_moe" and form.startswith("gptq"):
        # The class fuses gate and up without a mapping, so it does not find that they are quantized.
        return r"shared_experts\.gate_up_proj\.qweight"
    return None


@pytest.mark.parametrize(
    ("family", "kind", "form"), [pytest.param(*cell, id="-".join(cell)) for cell in _cells()]
)
def test_quantized_checkpoints_load(
    family: str, kind: str, form: str, vllm: Server, folders: Path
) -> None:
    """Each loads whole, as the model and as its draft, or is refused as the tables above say."""
    origin, of = source(folders, family, fp8=kind == "fp8"), FORMS[form]
    command, *options = of.command.split()
    if (reason := _plan_refuses(family, kind, form)) is not None:
        refused = run_cli(command, origin, folders / "refused", *options)
        assert refused.code == 1
        assert reason in refused.err
        return
    out = converted(folders, command, origin, *options)
    reason = _model_refuses(family, kind, form)
    for rank in (FIRST, MIDDLE, LAST) if ALL else (FIRST, LAST):
        loaded = vllm.load(out, rank)
        if family == "deepseek_v3" and kind == "fp8" and rank == LAST and _CUT in str(loaded.error):
            assert not of.linear
            continue
        if reason is None:
            assert_whole(loaded, family, unread=of.unread, unwritten=of.unwritten)
        else:
            assert re.search(reason, str(loaded.error)), (loaded.error, loaded.at)
    if family in WITHOUT_DRAFT:
        return
    draft = vllm.load(out, draft=True)
    if (reason := _draft_refuses(family, kind, form)) is None:
        assert_whole(draft, family, draft=True, unread=of.unread, unwritten=of.unwritten)
    else:
        assert re.search(reason, str(draft.error)), (draft.error, draft.at)


@pytest.mark.parametrize(
    "fp8", [False, True] if ALL else [True], ids=lambda fp8: "fp8" if fp8 else "bf16"
)
@pytest.mark.parametrize("family", FAMILIES)
def test_published_checkpoints_load(family: str, fp8: bool, vllm: Server, folders: Path) -> None:
    """The harness itself: what the runtime serves must load, or no answer of it counts."""
    folder = source(folders, family, fp8=fp8)
    assert_whole(vllm.load(folder), family)
    if family not in WITHOUT_DRAFT:
        assert_whole(vllm.load(folder, draft=True), family, draft=True)
    at_four = vllm.load(folder, LAST)
    if family == "deepseek_v3" and fp8:
        assert _CUT in str(at_four.error)
    else:
        assert_whole(at_four, family)


@pytest.mark.parametrize("rank", (FIRST, MIDDLE, LAST) if ALL else (LAST,), ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_dequantized_checkpoints_load(family: str, rank: Rank, vllm: Server, folders: Path) -> None:
    out = converted(folders, "dequant", source(folders, family, fp8=True))
    assert_whole(vllm.load(out, rank), family)
    if family not in WITHOUT_DRAFT and ALL:
        assert_whole(vllm.load(out, rank, draft=True), family, draft=True)


@pytest.mark.parametrize("rank", (FIRST, MIDDLE, LAST) if ALL else (LAST,), ids=str)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", SPLIT if ALL else SPLIT[1:3])
def test_unfused_is_split_in_memory(
    family: str, fp8: bool, rank: Rank, vllm: Server, folders: Path
) -> None:
    """vLLM's class fuses split projections itself; fused for sglang it refuses them, and its plan says
    so; unfused again they are the ones of the source."""
    origin = source(folders, family, fp8=fp8)
    refused = run_cli("fuse", origin, folders / "refused", "--for", "vllm")
    assert refused.code == 1
    assert "the projections are split already" in refused.err
    fused = converted(folders, "fuse", origin, "--for", "sglang")
    assert "in_proj_qkvz" in str(vllm.load(fused, rank).error)
    unfused = vllm.load(converted(folders, "unfuse", fused), rank)
    split = vllm.load(origin, rank)
    assert_whole(unfused, family)
    assert unfused.parameters == split.parameters
    assert unfused.schemes == split.schemes


def test_rows_in_another_order_are_seen(vllm: Server, folders: Path) -> None:
    """The negative control: contiguous rows load into Qwen3-Next's class in silence, wrong."""
    origin = source(folders, "qwen3_next")
    right = vllm.load(origin)
    out = folders / "contiguous"
    unjudged("passes: [fuse: {groups: 1, source_groups: 4}]", origin, out)
    wrong = vllm.load(out)
    assert_whole(wrong, "qwen3_next")
    differ = {name for name in right.parameters if right.parameters[name] != wrong.parameters[name]}
    assert len(differ) == 6
    assert all(name.endswith(("in_proj_qkvz.weight", "in_proj_ba.weight")) for name in differ)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_qwen35_becomes_qwen3_next(fp8: bool, vllm: Server, folders: Path) -> None:
    out = converted(
        folders, "fuse", source(folders, "qwen3_5_moe_text", fp8=fp8), "--for", "qwen3-next"
    )
    loaded = vllm.load(out, LAST)
    assert loaded.architecture == "Qwen3NextForCausalLM"
    assert_whole(loaded, "qwen3_next")
    assert_whole(vllm.load(out, draft=True), "qwen3_next", draft=True)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5_moe_text"])
def test_experts_unstacked_are_experts_stacked(family: str, vllm: Server, folders: Path) -> None:
    origin = source(folders, family, stacked=True)
    stacked, apart = vllm.load(origin), vllm.load(converted(folders, "experts unstack", origin))
    assert_whole(apart, family)
    assert apart.parameters == stacked.parameters


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", FAMILIES if ALL else ("qwen3_5_moe", "deepseek_v3", "qwen3_moe"))
def test_a_stage_is_that_part_of_the_whole(
    family: str, fp8: bool, vllm: Server, folders: Path
) -> None:
    """A stage's folder holds in memory what the whole folder holds at that stage."""
    origin = source(folders, family, fp8=fp8)
    stages = converted(folders, "split", origin, "--pp", "2", "--for", "vllm")
    for stage, folder in enumerate(sorted(path for path in stages.iterdir() if path.is_dir())):
        rank = Rank(1, 0, 2, stage)
        apart, whole = vllm.load(folder, rank), vllm.load(origin, rank)
        # Built on every stage, used on the last: the head of two classes. Stored on every stage,
        # built on the first: the tower. Stored on the last for the draft: embeddings.
        heads = ("qwen3_moe", "qwen3_next")
        spare = ("lm_head.weight",) if stage == 0 and family in heads else ()
        left = [name for name in apart.unused if not is_draft(name, family)]
        assert apart.error is None
        assert apart.unwritten == spare
        assert all("visual." in name or name.endswith("embed_tokens.weight") for name in left)
        assert not left or stage == 1
        differ = {n for n, value in whole.parameters.items() if apart.parameters[n] != value}
        assert differ == set(spare)
        assert apart.parameters.keys() == whole.parameters.keys()
