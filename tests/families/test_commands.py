"""Every family that a user may bring, tiny, through every command: what is only moved loads in
transformers with the same logits, W4A16 is near its source and loads decompressed, and what cannot be
done is refused with the cause that `REFUSED` states. Of NVFP4 and AMX the command's own judgement is all
that is asked here, of stages their number.

`QCONVERT_ALL=1 pytest -m peer tests/families/test_commands.py` runs all families, else one in twelve.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import run_cli
from compressed_peer import Tensors, decompressed, tensors
from safetensors.torch import save_file

from families.classes import config
from families.loading import loaded, logits
from families.tiny import saved
from qconvert import api

pytestmark = pytest.mark.peer

FAMILIES = [
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "gpt_oss",
    "minimax",
    "minimax_m2",
    "minimax_m3_vl",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm4v",
    "glm4v_moe",
    "glm_moe_dsa",
    "glm5_next",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "kimi_linear",
    "kimi_k25",
    "ernie4_5",
    "ernie4_5_moe",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "hy_v4",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "flex_olmo",
    "olmo_hybrid",
    "phi3",
    "phimoe",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "granitemoehybrid",
    "nemotron",
    "nemotron_h",
    "llama4",
    "llama4_text",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma4",
    "gemma4_text",
    "step3p7",
    "longcat_flash",
    "dots1",
    "jamba",
    "bamba",
    "falcon_h1",
    "seed_oss",
    "lfm2_moe",
    "mimo_v2_flash",
    "solar_open",
    "exaone4",
    "exaone_moe",
    "cohere2_moe",
    "afmoe",
    "axk1",
    "laguna",
    "mistral3",
    "mistral4",
    "ministral3",
    "smollm3",
    "arcee",
    "apertus",
    "jetmoe",
    "zaya",
    "mellum",
    "starcoder2",
    "internvl",
    "gpt2",
    "falcon",
]

# The sizes of tests/families/tiny.py do not fit together in these: they are built, and not run.
NOT_RUN = frozenset(
    (
        "axk1", "deepseek_v2", "deepseek_v32", "dots1", "glm4v_moe", "glm_moe_dsa", "kimi_k25",
        "qwen2_5_vl",
    )
)  # fmt: skip
NOT_BUILT = frozenset(("gemma4", "gemma4_text", "glm5_next", "step3p7"))
# What does not hold for these, and why.
NOT_YET = {
    "deepseek_v4": "transformers saves hc_head and others under names that it does not resolve itself",
    "longcat_flash": "two attentions and two MLPs a layer are no roles: they are copied, never packed",
    "nemotron_h": "its config counts layers otherwise than its tensors are numbered",
}

COMMANDS = {
    "stack": ("experts", "stack"),
    "unstack": ("experts", "unstack"),
    "experts w4a16": ("w4a16", "--rtn", "--group-size", "32"),
    "linears w4a16": ("w4a16", "--rtn", "--group-size", "32", "--target", "Linear"),
    "experts nvfp4": ("nvfp4", "--dialect", "modelopt"),
    "linears nvfp4": ("nvfp4", "--dialect", "compressed-tensors", "--targets", "all"),
    "amx": ("amx", "--method", "int4", "--numa", "1"),
    "split": ("split", "--pp", "2", "--for", "vllm"),
}
MOVED = ("stack", "unstack")

_DENSE = "this model has no experts"
_CLASS = "does not read its experts as"
_UNREAD = "so they are neither quantized nor stacked"
# Causes by command; any model may be refused for these, and for no other.
REFUSED = {
    "stack": rf"{_DENSE}|{_UNREAD}|already stacked|not byte ranges|{_CLASS}",
    "unstack": rf"{_DENSE}|{_UNREAD}|already matrices|not byte ranges|{_CLASS}",
    "experts w4a16": rf"{_DENSE}|{_UNREAD}",
    "linears w4a16": rf"{_UNREAD}|matches no weight that can be quantized",
    "experts nvfp4": rf"{_DENSE}|{_UNREAD}",
    "linears nvfp4": rf"{_UNREAD}|no linear",
    "amx": rf"{_DENSE}|{_UNREAD}|kt-kernel's AMX kernels compute",
    "split": "no stage is known",
}


def near(source: Tensors, rounded: Tensors) -> int:
    """How many of the source's matrices were rounded, each within a tenth of its size; all else must be
    equal."""
    changed = 0
    for name, weight in rounded.items():
        of = source[name] if name in source else _of_stack(source, name)
        if not torch.equal(weight, of):
            changed += 1
            assert (weight - of).norm() < 0.2 * of.norm(), name
    return changed


def _of_stack(source: Tensors, name: str) -> torch.Tensor:
    """The matrix of an expert in its stack, gate rows first."""
    base, expert, module, _ = name.rsplit(".", 3)
    if module == "down_proj":
        return source[f"{base}.down_proj"][int(expert)]
    gate, up = source[f"{base}.gate_up_proj"][int(expert)].chunk(2)
    return gate if module == "gate_proj" else up


def as_bf16(source: Path, packed: Path, folder: Path) -> Path:
    """The source with its packed weights decompressed: the same config, all weights bf16."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(decompressed(packed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("family", FAMILIES[:: 1 if os.environ.get("QCONVERT_ALL") else 12])
def test_every_command(family: str, tmp_path: Path) -> None:
    if family in NOT_BUILT:
        pytest.skip("not built at these sizes")
    if family in NOT_YET:
        pytest.skip(NOT_YET[family])
    given = {key: value for key, value in config(family).items() if key != "model_type"}
    source = saved(family, tmp_path / "source", given)
    checkpoint = api.open_checkpoint(source)
    assert checkpoint.role_index.unknown == ()
    assert checkpoint.absent() == []
    sound = run_cli("validate", source, "--level", "headers")
    assert sound.code == 0, sound.out
    before = None if family in NOT_RUN else logits(source)
    for name, (command, *options) in COMMANDS.items():
        out = tmp_path / name
        words: list[str | Path] = (
            [command, *options[:1], source, out]
            if command == "experts"
            else [command, source, out, *options]
        )
        done = run_cli(*words)
        if done.code:
            assert done.code == 1, (name, done.err)
            assert re.search(REFUSED[name], done.err), (name, done.err)
            continue
        if name in MOVED:
            if before is None:
                loaded(out)
            else:
                assert torch.equal(logits(out), before), name
        elif "w4a16" in name:
            assert near(tensors(source), decompressed(out)) > 0
            if before is None:
                loaded(as_bf16(source, out, tmp_path / f"{name} in bf16"))
            elif tensors(source).keys() == decompressed(out).keys():
                rounded = logits(as_bf16(source, out, tmp_path / f"{name} in bf16"))
                assert not torch.equal(rounded, before), name
            else:  # the class reads stacks of experts alone, and packed ones are a matrix each
                assert any(value.ndim == 3 for value in tensors(source).values())
        elif name == "split":
            held = [
                json.loads((part / "config.json").read_bytes()) for part in sorted(out.iterdir())
            ]
            assert len(held) == 2
        shutil.rmtree(out)
