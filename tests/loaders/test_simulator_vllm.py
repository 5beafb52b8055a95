"""The simulator of vLLM's loader against that loader: equal sets of unwritten parameters and unread
tensors, equal parameters and schemes, and refusals whose message the simulator foresaw. Skips itself
without the loader's environment (`make loaders`)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Model, edit_json, run_cli, unjudged

from loaders.agreement import config_of, disagreements, headers, once, setting, simulated
from loaders.by_hand import FROM, Form, exponents, renamed
from loaders.client import PYTHON, Rank, Server
from loaders.folders import source
from loaders.published import FAMILIES, published
from qconvert.runtimes.consumers import Consumer
from qconvert.runtimes.loading.load_weights import SimulatedLoad
from qconvert.runtimes.loading.setting import NotSimulated, Setting
from qconvert.runtimes.serving import Offered, served
from qconvert.runtimes.vllm.simulator import simulate

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(
        not (PYTHON.parent.parent / "vllm").is_dir(), reason="needs vLLM's loader: make loaders"
    ),
]

RANKS = (Rank(), Rank(2, 1), Rank(4, 3))
STAGES = (Rank(1, 0, 2, 0), Rank(1, 0, 2, 1), Rank(2, 1, 3, 2))
SPLIT = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
SPARSE = tuple(name for name in FAMILIES if name not in ("qwen3_5", "qwen3_5_text"))
DRAFTED = tuple(name for name in FAMILIES if name != "qwen3_moe")
_LAYER = {"deepseek_v3": "model.layers.3", "glm4_moe": "model.layers.3"}
STACKED = ("qwen3_5_moe", "qwen3_5_moe_text")
FORMS = (
    "w4a16 --rtn", "w4a16 --rtn --group-size 32", "w4a16 --rtn --group-size channel",
    "w4a16 --rtn --asymmetric", "w4a16 --rtn --bits 8", "w4a16 --rtn --targets Linear",
    "w4a16 --rtn --bits 8 --group-size channel --targets Linear", "w4a16 --rtn --packing gptq",
    "w4a16 --rtn --packing gptq-v2", "w4a16 --rtn --packing gptq --targets Linear",
    "nvfp4 --dialect compressed-tensors --weight-only",
    "nvfp4 --dialect compressed-tensors --weight-only --targets Linear",
    "nvfp4 --dialect modelopt --weight-only", "nvfp4 --dialect modelopt --weight-only --targets Linear",
    "fp8", "fp8 --ue8m0", "fp8 --targets Linear", "fp8 --channel", "fp8 --channel --targets Linear",
    "fp8 --dialect compressed-tensors", "fp8 --dialect compressed-tensors --targets Linear",
    "fp8 --kv-scale 1", "w4a16 --rtn --kv-scale 1",
    "nvfp4 --dialect modelopt --weight-only --kv-scale 1",
)  # fmt: skip


def converted(folders: Path, origin: Path, command: str) -> Path:
    """A conversion, made once. Skips the test where the command refuses it."""
    out = folders / f"{origin.name} {command}"
    refused = out.with_suffix(".refused")
    if not out.is_dir() and not refused.exists():
        words = command.split()
        number = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
        done = run_cli(*words[:number], origin, out, *words[number:], "--jobs", "1")
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


def written(model: Model, folder: Path) -> Path:
    """A model on disk, written once."""
    return folder if folder.is_dir() else model.write(folder)


def agree(
    folder: Path,
    server: Server,
    ranks: Iterable[Rank] = RANKS,
    *,
    flags: Mapping[str, Any] | None = None,
    ep: int = 1,
    draft: bool = False,
) -> list[SimulatedLoad]:
    """What the simulator says at each rank, after the loader has said the same."""
    answers, wrong = [], []
    for rank in ranks:
        answer = simulated(folder, setting(rank, ep_size=ep), runtime="vllm", draft=draft)
        real = server.load(folder, rank, flags=flags, draft=draft)
        wrong += [f"{rank} {flags or ''}: {text}" for text in disagreements(answer, once(real))]
        answers.append(answer)
    assert wrong == []
    return answers


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_published(family: str, fp8: bool, vllm: Server, folders: Path) -> None:
    first, *_ = agree(source(folders, family, fp8=fp8), vllm, (*RANKS, *STAGES))
    assert first.whole


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", SPARSE)
def test_experts_divided(family: str, fp8: bool, vllm: Server, folders: Path) -> None:
    """Expert parallelism: whole experts, a share of them on each rank."""
    flags = {"enable_expert_parallel": True}
    folder = source(folders, family, fp8=fp8)
    agree(folder, vllm, (Rank(2, 0), Rank(2, 1)), flags=flags, ep=2)
    agree(folder, vllm, (Rank(4, 3),), flags=flags, ep=4)


@pytest.mark.parametrize("family", FAMILIES)
def test_dequantized(family: str, vllm: Server, folders: Path) -> None:
    folder = converted(folders, source(folders, family, fp8=True), "dequant")
    assert all(answer.whole for answer in agree(folder, vllm))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantized(family: str, fp8: bool, form: str, vllm: Server, folders: Path) -> None:
    agree(converted(folders, source(folders, family, fp8=fp8), form), vllm)


@pytest.mark.parametrize("targets", ["", " --targets Linear"], ids=["experts", "linears"])
@pytest.mark.parametrize("form", FROM)
@pytest.mark.parametrize("family", FAMILIES)
def test_eight_bits_and_mx(
    family: str, form: Form, targets: str, vllm: Server, folders: Path
) -> None:
    """INT8 of weights and activations, MXFP4 and MXFP8, in compressed-tensors' forms."""
    made = converted(folders, source(folders, family), FROM[form] + targets)
    agree(renamed(made, form), vllm)


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_that_are_exponents(family: str, vllm: Server, folders: Path) -> None:
    """A copy of F8_E8M0 into F32 is the number; one of its byte is not, and nothing says so."""
    folder = converted(folders, source(folders, family), "fp8 --ue8m0 --targets Linear")
    right = vllm.load(folder)
    (answer,) = agree(exponents(folder, "F8_E8M0"), vllm, (Rank(),))
    assert answer.misread == {}
    assert vllm.load(exponents(folder, "F8_E8M0")).parameters == right.parameters
    (answer,) = agree(exponents(folder, "U8"), vllm, (Rank(),))
    wrong = vllm.load(exponents(folder, "U8")).parameters
    assert {name for name in right.parameters if wrong[name] != right.parameters[name]}
    assert answer.misread


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", SPLIT)
def test_fused_for_another_runtime(family: str, fp8: bool, vllm: Server, folders: Path) -> None:
    folder = converted(folders, source(folders, family, fp8=fp8), "fuse --for sglang")
    first, *_ = agree(folder, vllm)
    assert first.refused is not None
    assert "in_proj" in str(first.refused)


@pytest.mark.parametrize("family", STACKED)
def test_stacked_and_apart(family: str, vllm: Server, folders: Path) -> None:
    origin = source(folders, family, stacked=True)
    agree(origin, vllm, (*RANKS, Rank(1, 0, 2, 1)))
    agree(origin, vllm, (Rank(2, 1),), flags={"enable_expert_parallel": True}, ep=2)
    agree(converted(folders, origin, "experts unstack"), vllm)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages(family: str, fp8: bool, vllm: Server, folders: Path) -> None:
    """A stage's folder: what it lacks, the class does not compute with there."""
    stages = converted(folders, source(folders, family, fp8=fp8), "split --pp 2 --for vllm")
    for stage, folder in enumerate(sorted(path for path in stages.iterdir() if path.is_dir())):
        for rank in (Rank(1, 0, 2, stage), Rank(2, 1, 2, stage)):
            (answer,) = agree(folder, vllm, (rank,))
            assert answer.whole, answer.missing


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_lost_and_added(family: str, fp8: bool, vllm: Server, folders: Path) -> None:
    """vLLM looks for norms without tensors in unquantized models alone, and for linears in none; a name
    that leads nowhere ends the load."""
    for lost in ("input_layernorm.weight", "down_proj.weight"):
        model = published(family, fp8=fp8)
        name = next(name for name in model.tensors if name.endswith(lost) and "layers.1." in name)
        del model.tensors[name]
        (answer,) = agree(written(model, folders / f"{family} {fp8} {lost}"), vllm, (Rank(),))
        assert not answer.whole
    model = published(family, fp8=fp8)
    norm = next(name for name in model.tensors if name.endswith("layers.0.input_layernorm.weight"))
    for added in ("other.weight", "other.bias", "mlp.other", "input_layernorm.weight.part"):
        model = published(family, fp8=fp8)
        model.tensors[norm.replace("input_layernorm.weight", added)] = model.tensors[norm]
        agree(written(model, folders / f"{family} {fp8} {added}"), vllm, (Rank(),))
    model = published(family, fp8=fp8)
    model.tensors[norm.replace("input_layernorm.weight", "mlp.bias")] = model.tensors[norm]
    with pytest.raises(NotSimulated, match=r"mlp\.bias: a bias of a module that has none itself"):
        simulated(written(model, folders / f"{family} {fp8} bias"), setting(Rank()), runtime="vllm")


@pytest.mark.parametrize("form", ["", FORMS[0], FORMS[5], FORMS[7], FORMS[11], FORMS[13]])
@pytest.mark.parametrize("family", FAMILIES)
def test_lists_that_name_other_modules(family: str, form: str, vllm: Server, folders: Path) -> None:
    """Without its list of modules, and with one that names a part of what is loaded as one."""
    origin = source(folders, family, fp8=not form)
    folder = converted(folders, origin, form) if form else origin

    def emptied(config: dict[str, Any]) -> None:
        block = config["quantization_config"]
        for key in ("ignore", "modules_to_not_convert", "dynamic"):
            if key in block:
                block[key] = type(block[key])()

    def halved(config: dict[str, Any]) -> None:
        block = config["quantization_config"]
        inner = "model.language_model" if "text_config" in config else "model"
        name = f"{inner}.layers.3.self_attn.q_proj"
        if family in ("qwen3_moe", "glm4_moe", "deepseek_v3"):
            name = f"{inner}.layers.0.mlp.gate_proj"
        key = "ignore" if "ignore" in block else "modules_to_not_convert"
        block[key] = [*block.get(key, []), name]

    agree(edited(folder, "emptied", emptied), vllm, (Rank(), Rank(2, 1)))
    agree(edited(folder, "halved", halved), vllm, (Rank(),))


@pytest.mark.parametrize("inner", [384, 192])
@pytest.mark.parametrize("form", ["", *FORMS[:4], *FORMS[7:8], FORMS[10], FORMS[12]])
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_shares_that_ranks_cut(
    family: str, form: str, inner: int, vllm: Server, folders: Path
) -> None:
    """384 and 192 rows of experts: ranks cut FP8 blocks and groups of 128, some of 32."""
    model = published(family, fp8=not form, inner=inner)
    origin = written(model, folders / f"{family} narrow {inner} {not form}")
    folder = converted(folders, origin, form) if form else origin
    for rank in RANKS:
        try:
            answer = simulated(folder, setting(rank), runtime="vllm")
        except NotSimulated:
            continue  # it says that it has no rule
        real = once(vllm.load(folder, rank))
        if not form and answer.refused is None:
            # Scales of blocks that are taken for smaller ones are repeated: copies, which the harness
            # does not trace to the folder.
            left = (name for name in real.unused if not name.endswith("_scale_inv"))
            real = replace(real, unused=tuple(left))
            mine = (name for name in answer.unread if not name.endswith("_scale_inv"))
            answer = replace(answer, unread=tuple(mine))
        differ = list(disagreements(answer, real))
        assert differ == [], rank


# Forms without a class or a kernel: a conversion, what its block is made to state, how the load ends.
UNSERVED: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "gptq, groups of 16": (FORMS[9], lambda b: b.update(group_size=16), "Marlin does not support"),
    "gptq, groups of 256": (FORMS[9], lambda b: b.update(group_size=256), "Marlin does not support"),
    "gptq of 3 bits": (FORMS[9], lambda b: b.update(bits=3), "Unsupported quantization config"),
    "gptq of ordered columns": (FORMS[9], lambda b: b.update(desc_act=True), "no longer"),
    "ordered columns": (FORMS[5], lambda b: _weights(b).update(actorder="group"), "no longer"),
    "packed, groups of 8": (FORMS[5], lambda b: _weights(b).update(group_size=8), "ValueError"),
    "8 bits with zero points": (
        "w4a16 --rtn --bits 8 --asymmetric", lambda b: None, "No WNA16 MoE backend",
    ),
    "int8 of weights alone": (
        "int8 --targets Linear", lambda b: _group(b).pop("input_activations"), "Assertion failed",
    ),
    "int8 without a format": (
        "int8 --targets Linear", lambda b: (b.pop("format"), _group(b).pop("format", None)),
        "No compressed-tensors compatible scheme",
    ),
    "int8 with zero points": (
        "int8 --targets Linear", lambda b: _weights(b).update(symmetric=False),
        "No compressed-tensors compatible scheme",
    ),
    "nvfp4 beside fp8 inputs": (
        FORMS[11],
        lambda b: _group(b).update(
            input_activations={"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
        ),
        "must also be NVFP4",
    ),
}  # fmt: skip


def _group(block: dict[str, Any]) -> dict[str, Any]:
    group: dict[str, Any] = next(iter(block["config_groups"].values()))
    return group


def _weights(block: dict[str, Any]) -> dict[str, Any]:
    weights: dict[str, Any] = _group(block)["weights"]
    return weights


@pytest.mark.parametrize("name", UNSERVED)
def test_forms_that_nothing_computes(name: str, vllm: Server, folders: Path) -> None:
    command, change, error = UNSERVED[name]
    origin = converted(folders, source(folders, "qwen3_moe"), command)

    def changed(config: dict[str, Any]) -> None:
        change(config["quantization_config"])

    folder = edited(origin, name, changed)
    (answer,) = agree(folder, vllm, (Rank(),))
    assert answer.refused is not None
    assert error in str(vllm.load(folder).error)


def test_rows_in_another_order(vllm: Server, folders: Path) -> None:
    """The negative control: contiguous rows load into Qwen3-Next's class in silence. Names and shapes
    cannot show it; what the folder states of its order can."""
    origin = source(folders, "qwen3_next")
    out = folders / "contiguous"
    unjudged("passes: [fuse: {groups: 1, source_groups: 4}]", origin, out)
    (answer,) = agree(out, vllm, (Rank(),))
    assert answer.whole
    right, wrong = vllm.load(origin), vllm.load(out)
    differ = {name for name in right.parameters if right.parameters[name] != wrong.parameters[name]}
    assert len(differ) == 6
    seen = simulated(out, Setting(), 1, runtime="vllm")
    assert len(seen.misread) == 6
    assert simulated(origin, Setting(), 4, runtime="vllm").whole


def test_qwen35_becomes_qwen3_next(vllm: Server, folders: Path) -> None:
    origin = source(folders, "qwen3_5_moe_text", fp8=True)
    folder = converted(folders, origin, "fuse --for qwen3-next")
    assert all(answer.whole for answer in agree(folder, vllm))


def test_all_ranks_together(folders: Path) -> None:
    """What `validate --for vllm` asks."""
    folder = source(folders, "glm4_moe", fp8=True)
    answer = served(Offered(config_of(folder), headers(folder)), Setting(tp=2), Consumer("vllm"))
    assert answer.whole
    assert answer.nbytes == simulate(config_of(folder), headers(folder), Setting(tp=2)).nbytes


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", DRAFTED)
def test_draft(family: str, fp8: bool, vllm: Server, folders: Path) -> None:
    """The class of the draft, which reads its layers from the same folder."""
    folder = source(folders, family, fp8=fp8)
    first, *_ = agree(folder, vllm, draft=True)
    assert first.whole
    if family in SPARSE:
        agree(folder, vllm, (Rank(2, 1),), flags={"enable_expert_parallel": True}, ep=2, draft=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", DRAFTED)
def test_draft_quantized(family: str, fp8: bool, form: str, vllm: Server, folders: Path) -> None:
    folder = converted(folders, source(folders, family, fp8=fp8), form)
    try:
        simulated(folder, setting(Rank()), runtime="vllm", draft=True)
    except NotSimulated as reason:
        pytest.skip(f"it says that it has no rule: {reason}")
    agree(folder, vllm, (Rank(), Rank(4, 3)), draft=True)


@pytest.mark.parametrize(
    "lost", ["input_layernorm.weight", "down_proj.weight", "mtp", "embed_tokens"]
)
@pytest.mark.parametrize("family", DRAFTED)
def test_draft_without_tensors(family: str, lost: str, vllm: Server, folders: Path) -> None:
    model = published(family)
    own = f"{_LAYER[family]}." if family in _LAYER else "mtp."
    for name in list(model.tensors):
        in_draft = name.startswith(own)
        if (in_draft and (lost == "mtp" or name.endswith(lost))) or (
            lost == "embed_tokens" and lost in name
        ):
            del model.tensors[name]
    agree(written(model, folders / f"{family} draft without {lost}"), vllm, (Rank(),), draft=True)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe_text"])
def test_draft_with_a_tied_head(family: str, vllm: Server, folders: Path) -> None:
    model = published(family)
    model.config["tie_word_embeddings"] = True
    model.config.get("text_config", {})["tie_word_embeddings"] = True
    both = written(model, folders / f"{family} tied")
    answer = simulated(both, setting(Rank(2, 1)), runtime="vllm", draft=True)
    real = vllm.load(both, Rank(2, 1), draft=True)
    # It fills one parameter with either of two tensors, which are equal where a head is tied.
    assert {*disagreements(answer, once(real))} <= {
        "unread, only simulated: ['lm_head.weight'] (1)"
    }
    del model.tensors["lm_head.weight"]
    agree(written(model, folders / f"{family} tied alone"), vllm, (Rank(2, 1),), draft=True)
