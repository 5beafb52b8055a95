"""Facts of runtimes/misreadings.py, each as the runtime's own loader shows it over a tiny model of its
class; and that what is written for a runtime is read. Skips itself without the loaders."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from families.classes import config
from families.tiny import saved
from safetensors.torch import load_file

from loaders.agreement import config_of, headers
from loaders.client import PYTHON, Loaded, Server
from loaders.folders import converted
from qconvert.runtimes.misreadings import misread

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs sglang's loader: make loaders"),
]


def _source(folders: Path, family: str) -> Path:
    folder = folders / family
    given = {key: value for key, value in config(family).items() if key != "model_type"}
    return folder if folder.is_dir() else saved(family, folder, given)


@pytest.mark.parametrize("family", ["llama", "mistral3", "phi3", "ministral3", "mistral"])
def test_scales_of_blocks(family: str, folders: Path, hopper: Server) -> None:
    """What the fact names, and nothing else, is unused; the other forms are read whole."""
    source = _source(folders, family)
    blocks = converted(folders, "fp8", source)
    found = misread("sglang", config_of(blocks), headers(blocks))
    loaded = hopper.load(blocks)
    assert loaded.error is None, loaded.error
    assert set(found.unread) == set(loaded.unused) != set()
    unread = [name for name in loaded.unwritten if name.endswith("weight_scale_inv")]
    assert len(unread) > 4
    for options in (("--for", "sglang"), ("--channel",), ("--tensor",)):
        other = converted(folders, "fp8", source, *options)
        assert not misread("sglang", config_of(other), headers(other))
        loaded = hopper.load(other)
        assert loaded.error is None, loaded.error
        assert loaded.unused == ()
        assert not [name for name in loaded.unwritten if "scale" in name]


def test_experts_of_llama_4s_text_model(folders: Path, hopper: Server) -> None:
    source = _source(folders, "llama4_text")
    loaded = hopper.load(source)
    assert loaded.error is None
    assert set(misread("sglang", config_of(source), headers(source)).unread) == set(loaded.unused)
    assert any(name.endswith("experts.w13_weight") for name in loaded.unwritten)


def _order(folder: Path, loaded: Loaded, leaf: str) -> str:
    """Whether a loader put rows of q and k in another order than they are stored in."""
    tensors = {
        name: one
        for name, one in load_file(folder / "model.safetensors").items()
        if ".layers.0.self_attn." in name and "vision" not in name
    }
    kind, _, held = next(
        value
        for name, value in loaded.parameters.items()
        if name.endswith(f"layers.0.self_attn.qkv_proj.{leaf}") and "vision" not in name
    )
    own = config_of(folder)
    sizes = own.get("text_config", own)
    stored = {
        part: next(t for n, t in tensors.items() if n.endswith(f"{part}_proj.{leaf}"))
        for part in "qkv"
    }
    heads = {"q": sizes["num_attention_heads"], "k": sizes["num_key_value_heads"]}

    def digests(*, moved: bool) -> set[str]:
        parts = []
        for part, one in stored.items():
            rows = (
                one.view(torch.uint8) if one.dtype.itemsize == 1 else one.to(getattr(torch, kind))
            )
            if moved and part in heads:
                count = heads[part]
                rows = rows.reshape(count, rows.shape[0] // count // 2, 2, -1)
                rows = rows.transpose(1, 2).reshape(one.shape[0], -1)
            parts.append(rows)
        whole = torch.cat(parts)
        return {_digest(whole), _digest(whole.T)}

    return (
        "moved"
        if held in digests(moved=True)
        else "stored"
        if held in digests(moved=False)
        else "?"
    )


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


@pytest.mark.parametrize(
    ("command", "options", "leaves"),
    [("fp8", ("--channel",), {"weight": "moved", "weight_scale": "stored"}),
     ("nvfp4", ("--dialect", "compressed-tensors", "--targets", "Linear"),
      {"weight_packed": "stored", "weight_scale": "stored"}),
     ("w4a16", ("--rtn", "--targets", "Linear"), {"weight_packed": "stored", "weight_scale": "stored"})],
)  # fmt: skip
def test_rows_of_q_and_k(
    command: str, options: tuple[str, ...], leaves: dict[str, str],
    folders: Path, hopper: Server, vllm: Server,
) -> None:  # fmt: skip
    """Llama 4's class of sglang moves `weight` alone; vLLM's moves scales and packed codes with it."""
    folder = converted(folders, command, _source(folders, "llama4"), *options)
    loaded = hopper.load(folder)
    assert loaded.error is None, loaded.error
    assert {leaf: _order(folder, loaded, leaf) for leaf in leaves} == leaves
    assert misread("sglang", config_of(folder), headers(folder)).wrong
    loaded = vllm.load(folder)
    assert loaded.error is None, loaded.error
    assert {_order(folder, loaded, leaf) for leaf in leaves} == {"moved"}
    assert not misread("vllm", config_of(folder), headers(folder))
