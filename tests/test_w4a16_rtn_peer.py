"""`qconvert w4a16 --rtn` against llm-compressor's `model_free_ptq`: the same tensors, byte for byte, and
the same scheme in the config. Installed by `make peers`; run with
`pytest -m peer tests/test_w4a16_rtn_peer.py`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import read_tensors, run_cli
from compressed_peer import decompressed, parsed
from hf_models import qwen3_moe, saved
from models import deepseek_v3
from models import qwen3_moe as small_qwen3_moe
from ops_harness import buffer, run_op
from safetensors.torch import load_file, save_file

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.formats.registry import read_matrix
from qconvert.plan.plan import Plan

pytestmark = pytest.mark.peer

# By names alone it takes these for linear layers too.
LEFT = ["lm_head", "model.embed_tokens", "re:.*mlp.gate$"]
EXPERTS = [r"re:.*\.mlp\.experts\..*"]
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "W4 g128": ({"num_bits": 4, "strategy": "group", "group_size": 128}, []),
    "W4 g32": ({"num_bits": 4, "strategy": "group", "group_size": 32}, ["--group-size", "32"]),
    "W4 channel": ({"num_bits": 4, "strategy": "channel"}, ["--group-size", "channel"]),
    "W8 channel": (
        {"num_bits": 8, "strategy": "channel"}, ["--bits", "8", "--group-size", "channel"],
    ),
    "W8 g64": (
        {"num_bits": 8, "strategy": "group", "group_size": 64},
        ["--bits", "8", "--group-size", "64"],
    ),
    "W4 g128 asymmetric": (
        {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": False},
        ["--asymmetric"],
    ),
    "W8 channel asymmetric": (
        {"num_bits": 8, "strategy": "channel", "symmetric": False},
        ["--bits", "8", "--group-size", "channel", "--asymmetric"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heavy tails, and in one expert the rows that are hard: zeros, numbers of one sign, denormals, and
    all sizes there are."""
    folder = saved(qwen3_moe(), tmp_path_factory.mktemp("model") / "source")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    weight = tensors["model.layers.0.mlp.experts.1.gate_proj.weight"]
    generator = torch.Generator().manual_seed(5)
    weight[0] = 0
    weight[1] = weight[1].abs() + 1e-3
    weight[2] = -weight[2].abs() - 1e-3
    weight[3] = (torch.rand(weight.shape[1], generator=generator) * 1e-38).to(weight.dtype)
    weight[4] = 3e38
    weight[5, ::2], weight[5, 1::2] = -1e38, 1e38
    weight[6] = -0.0
    weight[7] = torch.exp2(torch.rand(weight.shape[1], generator=generator) * 200 - 100)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def representable(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, held to what a power of two can scale, with every finite bf16 below in one expert, and
    sizes at and about 1.75 times a power of two, where the scale changes, in another."""
    folder = tmp_path_factory.mktemp("model") / "representable"
    shutil.copytree(source, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for weight in tensors.values():
        weight.clamp_(-2.9e38, 2.9e38)
    every = tensors["model.layers.0.mlp.experts.2.up_proj.weight"].view(torch.int16).view(-1)
    bits = torch.arange(every.numel(), dtype=torch.int32) * 0x7F5A // every.numel()
    every.copy_((bits | (torch.arange(every.numel()) % 3 == 0).int() << 15).to(torch.int16))
    near = tensors["model.layers.0.mlp.experts.3.gate_proj.weight"]
    rows = torch.arange(near.shape[0])[:, None]
    powers = torch.exp2(rows % 250 - 126.0)
    draw = torch.randn(near.shape, generator=torch.Generator().manual_seed(6))
    near.copy_((draw / 9).clamp(-1, 1) * powers)
    near[:, ::32] = (powers * (1.75 + (rows % 3 - 1) / 64)).to(near.dtype)
    near[:, 1::32] = -1e-38
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def by_scheme(source: Path, out: Path, scheme: Any, left: list[str] = LEFT) -> Path:
    from llmcompressor.entrypoints.model_free import model_free_ptq

    model_free_ptq(source, out, scheme=scheme, ignore=left, device="cpu")
    return out


def theirs(
    source: Path,
    out: Path,
    weights: dict[str, Any],
    targets: list[str],
    *,
    form: str = "pack-quantized",
    inputs: dict[str, Any] | None = None,
) -> Path:
    from compressed_tensors.quantization import QuantizationConfig
    from llmcompressor.entrypoints.model_free import model_free_ptq

    config = QuantizationConfig.model_validate(
        {
            "config_groups": {
                "group_0": {
                    "targets": targets,
                    "weights": {"type": "int", "symmetric": True, **weights},
                    "input_activations": inputs,
                }
            },
            "format": form,
            "ignore": LEFT,
        }
    )
    model_free_ptq(source, out, config=config, device="cpu")
    return out


@pytest.mark.parametrize("targets", [EXPERTS, ["Linear"]], ids=["experts", "linears"])
@pytest.mark.parametrize("case", CASES)
def test_rounding_is_llm_compressors(
    case: str, targets: list[str], source: Path, tmp_path: Path
) -> None:
    weights, options = CASES[case]
    words = [word for target in targets for word in ("--targets", target)]
    done = run_cli("w4a16", source, tmp_path / "ours", "--rtn", *options, *words, "--jobs", "1")
    assert done.code == 0, done.err
    expected = read_tensors(theirs(source, tmp_path / "theirs", weights, targets))
    ours = read_tensors(tmp_path / "ours")
    assert ours.keys() == expected.keys()
    packed = [name for name in ours if name.endswith(".weight_packed")]
    assert len(packed) == 24 + (8 if targets == ["Linear"] else 0)
    assert [name for name in ours if ours[name] != expected[name]] == []
    ours_config, theirs_config = parsed(tmp_path / "ours"), parsed(tmp_path / "theirs")
    mine, other = (c.config_groups["group_0"].weights for c in (ours_config, theirs_config))
    for field in ("num_bits", "type", "symmetric", "strategy", "group_size"):
        assert getattr(mine, field) == getattr(other, field)
    assert mine.actorder is None


@pytest.mark.parametrize(
    ("scheme", "options"),
    [("FP8_BLOCK", ["--dialect", "compressed-tensors"]), ("FP8_DYNAMIC", ["--channel"])],
)
def test_fp8_is_llm_compressors(
    scheme: str, options: list[str], source: Path, tmp_path: Path
) -> None:
    done = run_cli("fp8", source, tmp_path / "ours", *options, "--jobs", "1")
    assert done.code == 0, done.err
    ours = read_tensors(tmp_path / "ours")
    expected = read_tensors(by_scheme(source, tmp_path / "theirs", scheme))
    assert ours.keys() == expected.keys()
    assert len([name for name in ours if name.endswith(".weight_scale")]) == 32
    assert [name for name in ours if ours[name] != expected[name]] == []
    mine, other = (parsed(tmp_path / of).config_groups for of in ("ours", "theirs"))
    ((ours_group,), (theirs_group,)) = mine.values(), other.values()
    for side in ("weights", "input_activations"):
        for field in ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic"):
            assert getattr(getattr(ours_group, side), field) == getattr(
                getattr(theirs_group, side), field
            )
    assert ours_group.weights.block_structure == theirs_group.weights.block_structure


FUSED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("o_proj",), ("down_proj",)


def test_fp8_a_matrix_is_compressed_tensors(source: Path, tmp_path: Path) -> None:
    """It has a scale of its own for q, k and v. Ours is that of the largest weight of the three: whose
    it is has its bytes, and what runtimes fuse with nothing."""
    done = run_cli("fp8", source, tmp_path / "ours", "--tensor", "--dialect", "compressed-tensors")
    assert done.code == 0, done.err
    ours = read_tensors(tmp_path / "ours")
    number = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    expected = read_tensors(
        theirs(source, tmp_path / "theirs", number, ["Linear"], form="float-quantized",
               inputs={**number, "symmetric": True, "dynamic": True})
    )  # fmt: skip
    assert ours.keys() == expected.keys()
    scales = {n.removesuffix(".weight_scale") for n in ours if n.endswith(".weight_scale")}
    assert len(scales) == 32
    same = {m for m in scales if all(ours[n] == expected[n] for n in parts(m))}
    for module in scales:
        above, _, last = module.rpartition(".")
        (kinds,) = (kinds for kinds in FUSED if last in kinds)
        assert any(f"{above}.{kind}" in same for kind in kinds), module
        shared = {ours[f"{above}.{kind}.weight_scale"].data for kind in kinds}
        largest = {expected[f"{above}.{kind}.weight_scale"].data for kind in kinds}
        assert len(shared) == 1
        assert shared <= largest
    rest = [n for n in ours if n.removesuffix("_scale").removesuffix(".weight") not in scales]
    assert [name for name in rest if ours[name] != expected[name]] == []


def parts(module: str) -> tuple[str, str]:
    return f"{module}.weight", f"{module}.weight_scale"


@pytest.mark.parametrize("targets", ["experts", "Linear"])
@pytest.mark.parametrize("scheme", ["MXFP4A16", "MXFP8", "INT8"])
def test_rows_are_llm_compressors(
    scheme: str, targets: str, representable: Path, tmp_path: Path
) -> None:
    """MXFP4, MXFP8 and INT8: every tensor, and what the config says of them."""
    command = {"MXFP4A16": "mx", "MXFP8": "mx --bits 8", "INT8": "int8"}[scheme]
    head, *rest = command.split()
    more = "--targets", targets, "--jobs", "1"
    done = run_cli(head, representable, tmp_path / "ours", *rest, *more)
    assert done.code == 0, done.err
    ours = read_tensors(tmp_path / "ours")
    left = LEFT if targets == "Linear" else [*LEFT, "re:.*self_attn.*"]
    expected = read_tensors(by_scheme(representable, tmp_path / "theirs", scheme, left))
    assert ours.keys() == expected.keys()
    scales = [name for name in ours if name.endswith(".weight_scale")]
    assert len(scales) == 24 + (8 if targets == "Linear" else 0)
    assert [name for name in ours if ours[name] != expected[name]] == []
    groups = [parsed(tmp_path / of).config_groups for of in ("ours", "theirs")]
    (mine,), (other,) = (one.values() for one in groups)
    for side in ("weights", "input_activations"):
        own, its = getattr(mine, side), getattr(other, side)
        assert (own is None) == (its is None)
        for field in (
            "num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "scale_dtype",
        ):  # fmt: skip
            assert getattr(own, field, None) == getattr(its, field, None)
    assert mine.format == other.format


def read_by_us(folder: Path, module: str) -> bytes:
    """A matrix as `read_matrix` says it is to be read, from the folder's own bytes."""
    plan, tensors = Plan.identity(Checkpoint.open(folder)), read_tensors(folder)
    stored, names = read_matrix(plan, module)
    assert stored.decoder is not None
    args = [name for name in names if not name.endswith(".weight_shape")]
    given = [buffer(plan.tensors[name].type, tensors[name].data) for name in args]
    (data,), _ = run_op(stored.decoder, given, 10_000)
    return data


def check_reading(folder: Path, count: int) -> None:
    """Every packed matrix is read as compressed-tensors decompresses it."""
    expected = decompressed(folder)
    packed = [n for n in read_tensors(folder) if n.endswith(".weight_packed")]
    assert len(packed) == count
    for name in packed:
        module = name.removesuffix(".weight_packed")
        weight = expected[f"{module}.weight"]
        assert weight.dtype == torch.bfloat16
        assert read_by_us(folder, module) == weight.view(torch.int16).numpy().tobytes()


@pytest.mark.parametrize("case", CASES)
def test_reading_is_compressed_tensors_own(case: str, tmp_path: Path) -> None:
    source = saved(qwen3_moe(), tmp_path / "source")
    out = tmp_path / "out"
    done = run_cli("w4a16", source, out, "--rtn", *CASES[case][1], "--jobs", "1")
    assert done.code == 0, done.err
    check_reading(out, 24)


@pytest.mark.parametrize(
    "options", [[], ["--asymmetric", "--group-size", "32"], ["--scales", "search"]]
)
def test_reading_beside_fp8_linears(options: list[str], tmp_path: Path) -> None:
    """All linears of a model, and all but one."""
    two_groups = small_qwen3_moe("fp8", bf16_modules=("1.self_attn.o_proj",))
    for number, (model, count) in enumerate(((deepseek_v3(), 12), (two_groups, 12))):
        out = tmp_path / f"out-{number}"
        source = model.write(tmp_path / f"source-{number}")
        done = run_cli("w4a16", source, out, "--rtn", *options, "--jobs", "1")
        assert done.code == 0, done.err
        check_reading(out, count)
