"""Folders for the loaders: published checkpoints and conversions of them, each made once a folder."""

from __future__ import annotations

from pathlib import Path

from checkpoints import edit_json, read_tensors, run_cli, tensor, write_shard

from loaders.client import Loaded
from loaders.published import published

# A runtime's class of the model does not read the draft layer, which has a class of its own.
_DRAFTS = {"deepseek_v3": "model.layers.3.", "glm4_moe": "model.layers.3."}
# Parameters that no kernel reads, that others are made into after the load, and scales of activations,
# which weight-only forms do not have.
_NOT_STORED = (
    "_g_idx", "_g_idx_sort_indices", "_blockscale_swizzled", "input_scale", "input_global_scale",
)  # fmt: skip


def source(folders: Path, family: str, *, fp8: bool = False, stacked: bool = False) -> Path:
    """A published checkpoint, written once."""
    folder = folders / f"{family}{' fp8' if fp8 else ''}{' stacked' if stacked else ''}"
    if folder.is_dir():
        return folder
    return published(family, fp8=fp8, stacked=stacked).write(folder)


def converted(folders: Path, command: str, origin: Path, *options: str) -> Path:
    """A conversion, made once."""
    out = folders / f"{origin.name} {command} {' '.join(options)}".strip().replace("/", "-")
    if not out.is_dir():
        done = run_cli(*command.split(), origin, out, *options, "--jobs", "1")
        assert done.code == 0, done.err
    return out


def in_mxfp4(origin: Path) -> Path:
    """gpt-oss with its experts in blocks of MXFP4 codes, as it is published; made once. Numbers mean
    nothing in them."""
    out = origin.with_name(f"{origin.name} in MXFP4")
    if out.is_dir():
        return out
    out.mkdir()
    tensors = read_tensors(origin)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = experts, outputs, inputs // 32
        tensors[f"{name}_blocks"] = tensor("U8", *blocks, 16)
        tensors[f"{name}_scales"] = tensor("U8", *blocks)
    write_shard(out / "model.safetensors", tensors)
    (out / "config.json").write_bytes((origin / "config.json").read_bytes())
    kept = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    block = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    edit_json(out / "config.json", lambda config: config.update(quantization_config=block))
    return out


def is_draft(tensor: str, family: str) -> bool:
    """Whether a tensor is the draft model's."""
    return tensor.startswith(_DRAFTS.get(family, "mtp."))


def assert_whole(
    loaded: Loaded,
    family: str,
    *,
    draft: bool = False,
    unread: tuple[str, ...] = (),
    unwritten: tuple[str, ...] = (),
) -> None:
    """Every parameter was written, and no tensor of the model (or of its draft) was left; but for names
    that end so."""
    assert loaded.error is None, (loaded.step, loaded.error, loaded.at)
    left = [name for name in loaded.unwritten if not name.endswith(unwritten or "-")]
    assert not left, f"unwritten: {left}"
    assert loaded.empty == ()
    left = [name for name in loaded.unused if is_draft(name, family) is draft]
    assert [name for name in left if not name.endswith(unread or "-")] == []


def parts(out: Path) -> list[Path]:
    """The folders that a conversion made: one, or one a stage."""
    return (
        [out] if (out / "config.json").exists() else sorted(p for p in out.iterdir() if p.is_dir())
    )


def wrong(loaded: Loaded, family: str, *, last: bool) -> list[str]:
    """What did not load. Some classes build a head and the norm before it in every stage, and compute
    with the last one's; a stage that is cut for such a class has them for others that do not."""
    if loaded.error is not None:
        return [f"{loaded.step}: {loaded.error}"]
    spare: tuple[str, ...] = () if last else ("lm_head.weight", "model.norm.weight")
    spare += loaded.dropped
    unwritten = [n for n in loaded.unwritten if not n.endswith(_NOT_STORED) and n not in spare]
    unused = [n for n in loaded.unused if not is_draft(n, family) and n not in spare]
    return [*unwritten, *loaded.empty, *unused]
