"""The GPU folder of a pair against transformers and compressed-tensors: it loads, and computes what
compressed-tensors' own decompression of it computes; every quantization block is one they parse.

What transformers loads here has bf16 linears. Installed by `make peers`; run with
`pytest -m peer tests/test_w4a16_peer.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import run_cli
from compressed_peer import decompressed, parsed, tensors
from hf_models import FAMILIES, glm4_moe, hf, saved
from kt_pair import kt
from models import MODELS
from safetensors.torch import save_file

from qconvert.core.int_scheme import DEFAULT_GROUP

pytestmark = pytest.mark.peer


def logits(folder: Path) -> torch.Tensor:
    """For fixed tokens; every key must be there and none unexpected."""
    model, told = hf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(24).view(2, 12) * 7 % 300).logits
    assert torch.isfinite(found).all()
    return found


def reference(source: Path, gpu: Path, folder: Path) -> Path:
    """The source as it would be with its experts rounded: the same config, all weights bf16."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(decompressed(gpu), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
def test_transformers_computes_what_the_packed_experts_mean(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    source, cpu, gpu = saved(make(), tmp_path / "source"), tmp_path / "cpu", tmp_path / "gpu"
    done = kt(source, cpu, gpu, method="int8", numa=2)
    assert done.code == 0, done.err
    rounded = reference(source, gpu, tmp_path / "reference")
    before, after = tensors(source), tensors(rounded)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".mlp.experts." in name}
    ours = logits(gpu)
    assert torch.equal(ours, logits(rounded))
    assert not torch.equal(ours, logits(source))


ROUNDED = {
    "W4 g32": ["--group-size", "32"],
    "W4 g32 searched": ["--group-size", "32", "--scales", "search"],
    "W8 channel": ["--bits", "8", "--group-size", "channel"],
    "W4 g32 linears": ["--group-size", "32", "--targets", "Linear", "--leave-bf16"],
}


@pytest.mark.parametrize("case", ROUNDED)
@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
def test_transformers_computes_what_packed_weights_mean(
    make: Callable[[], Any], case: str, tmp_path: Path
) -> None:
    source, out = saved(make(), tmp_path / "source"), tmp_path / "out"
    done = run_cli("w4a16", source, out, "--rtn", *ROUNDED[case], "--jobs", "1")
    assert done.code == 0, done.err
    rounded = reference(source, out, tmp_path / "reference")
    if "searched" in case:
        scales = [one for name, one in tensors(out).items() if name.endswith(".weight_scale")]
        assert all(0.2 < float((one < 0).float().mean()) < 0.8 for one in scales)
    before, after = tensors(source), tensors(rounded)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    experts = {name for name in before if ".mlp.experts." in name}
    assert experts <= changed
    others = changed - experts
    if "linears" in case:
        assert any("_attn." in name for name in others)
    else:
        # sglang reads GLM's shared experts from the stack of the routed ones, so they are rounded too.
        shared = {name for name in before if ".shared_experts." in name}
        assert others == (shared if make is glm4_moe else set())
    ours = logits(out)
    assert torch.equal(ours, logits(rounded))
    assert not torch.equal(ours, logits(source))


@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
def test_the_cpu_folder_leaves_nothing_for_transformers(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    """Whoever loads it by mistake is told: none of a model's names is in it."""
    source = saved(make(), tmp_path / "source")
    assert kt(source, tmp_path / "cpu", None, method="int8", numa=2).code == 0
    assert not tensors(tmp_path / "cpu").keys() & tensors(source).keys()


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_compressed_tensors_parses_every_block(kind: str, tmp_path: Path) -> None:
    done = kt(MODELS[kind]().write(tmp_path / "source"), tmp_path / "cpu", tmp_path / "gpu")
    assert done.code == 0, done.err
    found = parsed(tmp_path / "gpu")
    assert found.format == "pack-quantized"
    assert found.quantization_status == "compressed"
    weights = found.config_groups["group_0"].weights
    assert (weights.num_bits, weights.type, weights.group_size) == (4, "int", DEFAULT_GROUP)
    assert (weights.symmetric, weights.strategy) == (True, "group")
    assert set(found.config_groups) == {"group_0"} | (set() if kind == "bf16" else {"group_1"})
    if kind == "mixed":
        second = found.config_groups["group_1"]
        assert (second.weights.strategy, second.weights.block_structure) == ("block", [128, 128])
        assert second.input_activations.dynamic is True


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_compressed_tensors_finds_the_same_modules(kind: str, tmp_path: Path) -> None:
    """Its own matching of targets and ignored names: experts go to the first group, FP8 linears to the
    second where there is one, and bf16 linears to none."""
    from compressed_tensors.utils.match import is_match

    model = MODELS[kind]()
    source = model.write(tmp_path / "source")
    assert kt(source, tmp_path / "cpu", tmp_path / "gpu").code == 0
    config = parsed(tmp_path / "gpu")
    first = config.config_groups["group_0"]
    for name, value in model.tensors.items():
        module, _, parameter = name.rpartition(".")
        if parameter != "weight" or len(value.shape) != 2:
            continue
        linear = torch.nn.Linear(1, 1)
        matched = is_match(module, linear, first.targets, config.ignore)
        assert matched == (".mlp.experts." in module), module
        if "group_1" in config.config_groups and not matched:
            targets = config.config_groups["group_1"].targets
            assert is_match(module, linear, targets, config.ignore) == (value.dtype != "BF16")
