"""The simulator of sglang's loader against that loader: equal sets of unwritten parameters and unread
tensors, equal parameters and schemes, and refusals whose message the simulator foresaw. Skips itself
without the loader's environment (`make loaders`)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from checkpoints import edit_json, run_cli, unjudged, write_shard

from loaders.agreement import disagreements, headers, setting, simulated
from loaders.by_hand import FROM, Form, exponents, renamed
from loaders.client import PYTHON, Rank, Server
from loaders.published import FAMILIES, INNER, published
from qconvert.runtimes.loading.load_weights import SimulatedLoad
from qconvert.runtimes.loading.setting import BLACKWELL, HOPPER, NotSimulated

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs sglang's loader: make loaders"),
]

RANKS = (Rank(), Rank(2, 1), Rank(4, 3))
STAGES = (Rank(1, 0, 2, 0), Rank(1, 0, 2, 1), Rank(2, 1, 2, 1), Rank(1, 0, 3, 2))
NO_FUSION = {"disable_shared_experts_fusion": True}
SPLIT = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
SPARSE = tuple(name for name in FAMILIES if name not in ("qwen3_5", "qwen3_5_text"))
STACKED = ("qwen3_5_moe", "qwen3_5_moe_text")
EXPERTS = r"re:.*\.mlp\.experts\..*"
SHARED = r"re:.*\.shared_experts?\.(gate|up|down)_proj.*"
# What users do most first. `Linear` is not tried where the command refuses it.
QUANTIZED: dict[str, tuple[str, ...]] = {
    "groups of 32": ("w4a16", "--rtn", "--group-size", "32"),
    "groups of 128": ("w4a16", "--rtn"),
    "rows": ("w4a16", "--rtn", "--group-size", "channel"),
    "8 bits": ("w4a16", "--rtn", "--bits", "8"),
    "zero points": ("w4a16", "--rtn", "--asymmetric"),
    "linears": ("w4a16", "--rtn", "--targets", "Linear"),
    "shared too": ("w4a16", "--rtn", "--group-size", "32", "--targets", EXPERTS, "--targets", SHARED),
    "shared kept": ("w4a16", "--rtn", "--group-size", "32", "--shared-experts", "keep"),
    "fp8": ("fp8",),
    "fp8 exponents": ("fp8", "--ue8m0"),
    "fp8 experts": ("fp8", "--targets", "experts"),
    "fp8 packed": ("fp8", "--dialect", "compressed-tensors"),
    "fp8 packed experts": ("fp8", "--dialect", "compressed-tensors", "--targets", "experts"),
    "fp8 rows": ("fp8", "--channel"),
    "fp8 rows, linears": ("fp8", "--channel", "--targets", "Linear"),
    "fp8 and cache": ("fp8", "--kv-scale", "1"),
    "fp8 rows and cache": ("fp8", "--channel", "--kv-scale", "1"),
    "modelopt and cache": ("nvfp4", "--dialect", "modelopt", "--kv-scale", "1"),
    "gptq": ("w4a16", "--rtn", "--packing", "gptq"),
    "gptq linears": ("w4a16", "--rtn", "--packing", "gptq", "--targets", "Linear"),
    "nvfp4": ("nvfp4", "--dialect", "compressed-tensors"),
    "nvfp4 linears": ("nvfp4", "--dialect", "compressed-tensors", "--targets", "Linear"),
    "modelopt": ("nvfp4", "--dialect", "modelopt"),
    "modelopt linears": ("nvfp4", "--dialect", "modelopt", "--targets", "Linear"),
}  # fmt: skip


def source(
    folders: Path,
    family: str,
    *,
    fp8: bool = False,
    stacked: bool = False,
    experts: int = 4,
    inner: int = INNER,
) -> Path:
    """A published checkpoint, written once."""
    form = "fp8" if fp8 else "bf16"
    folder = folders / f"{family} {form} {'stacked' * stacked} {experts} {inner}"
    if folder.is_dir():
        return folder
    made = published(family, fp8=fp8, stacked=stacked, experts=experts, inner=inner)
    return made.write(folder)


def converted(folders: Path, origin: Path, *command: str) -> Path:
    """A conversion, made once. Skips the test where the command refuses it."""
    out = folders / f"{origin.name} {' '.join(command)}".replace("/", "-").replace("*", "+")
    refused = out.with_suffix(".refused")
    if not out.is_dir() and not refused.exists():
        words = 2 if command[0] == "experts" else 1
        done = run_cli(*command[:words], origin, out, *command[words:], "--jobs", "1")
        if done.code:
            shutil.rmtree(out, ignore_errors=True)
            refused.write_text(done.err)
    if refused.exists():
        pytest.skip(refused.read_text()[-300:])
    return out


def edited(folder: Path, name: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a folder with another config."""
    out = folder.with_name(f"{folder.name}, {name}")
    if not out.is_dir():
        shutil.copytree(folder, out)
        edit_json(out / "config.json", change)
    return out


def agree(
    folder: Path,
    server: Server,
    ranks: Iterable[Rank] = RANKS,
    *,
    capability: tuple[int, int] = HOPPER,
    flags: Mapping[str, Any] | None = None,
    draft: bool = False,
) -> list[SimulatedLoad]:
    """What the simulator says at each rank, after the loader has said the same."""
    answers, wrong = [], []
    for rank in ranks:
        answer = simulated(folder, setting(rank, capability, **(flags or {})), draft=draft)
        real = server.load(folder, rank, flags=flags, draft=draft)
        wrong += [f"{rank} {flags or ''}: {text}" for text in disagreements(answer, real)]
        answers.append(answer)
    assert wrong == []
    return answers


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_published(family: str, fp8: bool, hopper: Server, folders: Path) -> None:
    folder = source(folders, family, fp8=fp8)
    first, *_ = agree(folder, hopper, (*RANKS, *STAGES))
    assert first.whole
    agree(folder, hopper, (Rank(),), flags=NO_FUSION)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", SPARSE)
def test_experts_divided(family: str, fp8: bool, hopper: Server, folders: Path) -> None:
    """Expert parallelism, alone and with tensor parallelism within an expert."""
    folder = source(folders, family, fp8=fp8)
    agree(folder, hopper, (Rank(2, 0), Rank(2, 1), Rank(4, 2)), flags={"ep_size": 2})
    agree(folder, hopper, (Rank(4, 3),), flags={"ep_size": 4})


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_on_blackwell(family: str, fp8: bool, blackwell: Server, folders: Path) -> None:
    """Another GPU chooses other runners, and with them whether shared experts are fused."""
    agree(source(folders, family, fp8=fp8), blackwell, capability=BLACKWELL)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", SPLIT)
def test_fused(family: str, fp8: bool, hopper: Server, folders: Path) -> None:
    origin = source(folders, family, fp8=fp8)
    folder = converted(folders, origin, "fuse", "--for", "sglang")
    assert all(answer.whole for answer in agree(folder, hopper, (*RANKS, *STAGES)))


@pytest.mark.parametrize("family", FAMILIES)
def test_dequantized(family: str, hopper: Server, folders: Path) -> None:
    folder = converted(folders, source(folders, family, fp8=True), "dequant")
    assert all(answer.whole for answer in agree(folder, hopper))


@pytest.mark.parametrize("family", STACKED)
def test_stacked_and_apart(family: str, hopper: Server, folders: Path) -> None:
    origin = source(folders, family, stacked=True)
    agree(origin, hopper, (*RANKS, Rank(1, 0, 2, 1)))
    agree(origin, hopper, (Rank(4, 2),), flags={"ep_size": 2})
    agree(converted(folders, origin, "experts", "unstack"), hopper)


@pytest.mark.parametrize("made", QUANTIZED)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantized(family: str, fp8: bool, made: str, hopper: Server, folders: Path) -> None:
    folder = converted(folders, source(folders, family, fp8=fp8), *QUANTIZED[made])
    agree(folder, hopper)
    agree(folder, hopper, (Rank(), Rank(4, 3)), flags=NO_FUSION)


@pytest.mark.parametrize("targets", [(), ("--targets", "Linear")], ids=["experts", "linears"])
@pytest.mark.parametrize("form", FROM)
@pytest.mark.parametrize("family", FAMILIES)
def test_eight_bits_and_mx(
    family: str, form: Form, targets: tuple[str, ...], hopper: Server, folders: Path
) -> None:
    """INT8 of weights and activations, MXFP4 and MXFP8, in compressed-tensors' forms: it takes INT8 in
    models without experts alone."""
    made = converted(folders, source(folders, family), *FROM[form].split(), *targets)
    first, *_ = agree(renamed(made, form), hopper)
    assert first.whole is (form == "int8" and family not in SPARSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_that_are_exponents(family: str, hopper: Server, folders: Path) -> None:
    """A copy of F8_E8M0 into F32 is the number; one of its byte is not, and nothing says so."""
    folder = converted(folders, source(folders, family), "fp8", "--ue8m0", "--targets", "Linear")
    right = hopper.load(folder)
    (answer,) = agree(exponents(folder, "F8_E8M0"), hopper, (Rank(),))
    assert answer.misread == {}
    assert hopper.load(exponents(folder, "F8_E8M0")).parameters == right.parameters
    (answer,) = agree(exponents(folder, "U8"), hopper, (Rank(),))
    wrong = hopper.load(exponents(folder, "U8"))
    if answer.refused is None:
        assert {
            name for name in wrong.parameters if wrong.parameters[name] != right.parameters[name]
        }
        assert answer.misread


@pytest.mark.parametrize(
    "made", ["groups of 32", "rows", "nvfp4", "nvfp4 linears", "modelopt", "modelopt linears"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_on_blackwell(family: str, made: str, blackwell: Server, folders: Path) -> None:
    folder = converted(folders, source(folders, family), *QUANTIZED[made])
    agree(folder, blackwell, (Rank(), Rank(2, 1)), capability=BLACKWELL)


@pytest.mark.parametrize("made", ["", "groups of 32", "shared too", "shared kept", "modelopt"])
def test_deepseek_of_256_experts(made: str, hopper: Server, folders: Path) -> None:
    """The count for which the class loads the shared expert as one more routed expert."""
    folder = source(folders, "deepseek_v3", experts=256, inner=128)  # the bytes of 256 experts
    if made:
        folder = converted(folders, folder, *QUANTIZED[made])
    (answer,) = agree(folder, hopper, (Rank(2, 1),))
    if made not in ("modelopt", "shared too"):  # these keep it apart, as the loader agreed
        assert answer.refused or answer.shared_fused
    agree(folder, hopper, (Rank(),), flags=NO_FUSION)


def _as_kimi_k2(config: dict[str, Any]) -> None:
    """The names that Kimi K2 Thinking's config leaves unquantized, and the class of all linears."""
    block = config["quantization_config"]
    block["config_groups"]["group_0"]["targets"] = ["Linear"]
    block["ignore"] = [
        "lm_head", r"re:.*self_attn.*", r"re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ]  # fmt: skip
    config |= {"model_type": "kimi_k2", "num_nextn_predict_layers": 0, "n_group": 1}


def test_kimi_k2_as_published(hopper: Server, blackwell: Server, folders: Path) -> None:
    """DeepSeek's class, INT4 experts beside shared ones in bf16, which it keeps apart."""
    origin = folders / "kimi"
    if not origin.is_dir():
        model = published("deepseek_v3")
        for name in [name for name in model.tensors if ".layers.3." in name]:
            del model.tensors[name]  # it has no draft
        model.config["num_nextn_predict_layers"] = 0
        model.write(origin)
    folder = edited(converted(folders, origin, *QUANTIZED["shared kept"]), "kimi", _as_kimi_k2)
    assert all(answer.whole for answer in agree(folder, hopper))
    agree(folder, blackwell, (Rank(), Rank(4, 3)), capability=BLACKWELL)  # MxInt4


FUSED_NAMES = ("qkv_proj", "gate_up_proj", "fused_qkv_a_proj_with_mqa")


def _without_fused_names(config: dict[str, Any]) -> None:
    block = config["quantization_config"]
    block["ignore"] = [
        entry for entry in block["ignore"] if not any(name in entry for name in FUSED_NAMES)
    ]


@pytest.mark.parametrize("made", ["groups of 32", "nvfp4"])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen3_moe"])
def test_an_ignore_list_without_fused_names(
    family: str, made: str, hopper: Server, folders: Path
) -> None:
    folder = converted(folders, source(folders, family), *QUANTIZED[made])
    (answer,) = agree(edited(folder, "stripped", _without_fused_names), hopper, (Rank(),))
    if family == "glm4_moe":
        assert answer.refused is not None
        assert "Unable to find matching target" in answer.refused.says


def test_shared_experts_kept_beside_integers(hopper: Server, folders: Path) -> None:
    """Not read at all, without an error: the loss that no message shows."""
    origin = source(folders, "glm4_moe")
    folder = converted(folders, origin, *QUANTIZED["shared kept"])

    def named(config: dict[str, Any]) -> None:
        config["quantization_config"]["ignore"] += [
            r"re:.*self_attn\.qkv_proj$", r"re:.*\.mlp\.(shared_experts\.)?gate_up_proj$",
        ]  # fmt: skip

    (answer,) = agree(edited(folder, "named", named), hopper, (Rank(),))
    assert answer.refused is None
    assert not answer.whole
    lost = {name for name in answer.unread if ".shared_experts." in name and ".3." not in name}
    assert len(lost) == 6
    (kept,) = agree(edited(folder, "named", named), hopper, (Rank(),), flags=NO_FUSION)
    assert kept.whole


@pytest.mark.parametrize("rank", [Rank(2, 1), Rank(4, 3)], ids=str)
def test_groups_that_ranks_cut(rank: Rank, hopper: Server, folders: Path) -> None:
    """384 rows in groups of 128: two ranks read the wrong scales, four have none."""
    origin = folders / "narrow"
    if not origin.is_dir():
        published("qwen3_moe", inner=384).write(origin)
    folder = converted(folders, origin, *QUANTIZED["groups of 128"])
    (answer,) = agree(folder, hopper, (rank,))
    assert answer.refused is None
    assert not answer.whole
    assert answer.empty if rank.tp == 4 else answer.misread


def test_interleaved_rows(hopper: Server, folders: Path) -> None:
    """The negative control. Names and shapes cannot show it; what the folder states of its order can."""
    out = folders / "interleaved"
    unjudged("passes: [fuse: {groups: 4}]", source(folders, "qwen3_5_moe_text"), out)
    (answer,) = agree(out, hopper, (Rank(),))
    assert answer.whole
    stated = json.loads((out / "qconvert.json").read_bytes())["gdn_groups"]
    told = simulated(out, setting(Rank()), stated)
    assert not told.whole
    assert len(told.misread) == 6


def _lost(name: str) -> Callable[[dict[str, Any]], None]:
    def lose(tensors: dict[str, Any]) -> None:
        del tensors[name]

    return lose


def _renamed(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def rename(tensors: dict[str, Any]) -> None:
        tensors[new] = tensors.pop(old)

    return rename


DAMAGE: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "no norm": ("glm4_moe", _lost("model.layers.1.input_layernorm.weight")),
    "no expert": ("qwen3_moe", _lost("model.layers.1.mlp.experts.2.up_proj.weight")),
    "no q": ("qwen3_next", _lost("model.layers.3.self_attn.q_proj.weight")),
    "half of the first projection": (
        "deepseek_v3", _lost("model.layers.1.self_attn.q_a_proj.weight"),
    ),
    "no head": ("qwen3_5_text", _lost("lm_head.weight")),
    "no bias": ("glm4_moe", _lost("model.layers.0.self_attn.k_proj.bias")),
    "unknown to a strict class": (
        "qwen3_next", _renamed("model.layers.0.linear_attn.norm.weight", "model.layers.0.other"),
    ),
    "an unknown expert": (
        "deepseek_v3",
        _renamed(
            "model.layers.1.mlp.experts.3.up_proj.weight",
            "model.layers.1.mlp.experts.9.up_proj.weight",
        ),
    ),
    "a shape": ("qwen3_moe", lambda t: t.update({"model.norm.weight": t["lm_head.weight"]})),
    "embeddings of another size": (
        "glm4_moe", lambda t: t.update({"lm_head.weight": t["model.layers.1.mlp.gate.weight"]}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged(damage: str, hopper: Server, tmp_path: Path) -> None:
    family, change = DAMAGE[damage]
    model = published(family)
    change(model.tensors)
    folder = model.write(tmp_path / "damaged")
    for answer in agree(folder, hopper, (Rank(), Rank(2, 1))):
        assert not answer.whole or answer.unread


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_moe"])
def test_a_name_that_no_class_was_recorded_with(family: str, tmp_path: Path) -> None:
    model = published(family)
    _renamed("model.norm.weight", "model.other.weight")(model.tensors)
    folder = model.write(tmp_path / "renamed")
    with pytest.raises(NotSimulated, match="not among the names that its class was recorded with"):
        simulated(folder, setting(Rank()))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe_text", "deepseek_v3"])
def test_a_tied_head(family: str, hopper: Server, tmp_path: Path) -> None:
    model = published(family)
    model.config["tie_word_embeddings"] = True
    model.config.get("text_config", {})["tie_word_embeddings"] = True
    agree(model.write(tmp_path / "both"), hopper, (Rank(), Rank(2, 1)))
    del model.tensors["lm_head.weight"]
    tied = model.write(tmp_path / "tied")
    agree(tied, hopper, (Rank(),))
    if family != "qwen3_5":  # in others no tensor comes to the head of the last stage
        assert hopper.load(tied, Rank(1, 0, 2, 1)).unwritten == ("lm_head.weight",)
        with pytest.raises(NotSimulated, match="tied embeddings in pipeline stages"):
            simulated(tied, setting(Rank(1, 0, 2, 1)))


def test_split_projections_in_a_class_of_fused_ones(hopper: Server, tmp_path: Path) -> None:
    model = published("qwen3_next")
    model.tensors = published("qwen3_5_moe_text").tensors
    (answer,) = agree(model.write(tmp_path / "split"), hopper, (Rank(),))
    assert answer.refused is not None


def test_a_list_of_unquantized_modules_that_lacks_one(hopper: Server, tmp_path: Path) -> None:
    for family, lost in (("qwen3_next", "in_proj_ba"), ("qwen3_5_text", "in_proj_a")):
        model = published(family, fp8=True)
        block = model.config["quantization_config"]
        block["modules_to_not_convert"] = [
            name for name in block["modules_to_not_convert"] if not name.endswith(lost)
        ]
        (answer,) = agree(model.write(tmp_path / family), hopper, (Rank(),))
        assert answer.refused is not None


def test_headers_are_read_in_order(tmp_path: Path) -> None:
    model = published("qwen3_moe")
    write_shard(tmp_path / "model.safetensors", model.tensors)
    assert list(headers(tmp_path)) == list(model.tensors)
