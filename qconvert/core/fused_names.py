"""Names that runtimes give to modules they fuse of several, at load.

A runtime looks a module up in a quantization config under its own name. Classes with a
`packed_modules_mapping` find the parts' names too, others do not (read in sglang and vLLM).
"""

from __future__ import annotations

from collections.abc import Iterable

_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj_with_mqa",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj_with_mqa",
    "in_proj_qkv": "in_proj_qkvz",
    "in_proj_z": "in_proj_qkvz",
    "in_proj_b": "in_proj_ba",
    "in_proj_a": "in_proj_ba",
}


def with_fused_names(modules: Iterable[str]) -> list[str]:
    """The modules in their order, each followed by the name of what it is fused to, once."""
    found: dict[str, None] = {}
    for module in modules:
        parent, dot, last = module.rpartition(".")
        found[module] = None
        if last in _FUSED:
            found[f"{parent}{dot}{_FUSED[last]}"] = None
    return list(found)


def with_vllms_name(modules: Iterable[str]) -> list[str]:
    """The modules, and behind each q_a_proj what vLLM calls it with kv_a_proj_with_mqa: its
    DeepSeek class finds the parts' names, its draft class, which has no mapping, the whole's alone."""
    found: dict[str, None] = {}
    for module in modules:
        found[module] = None
        if module.endswith(".q_a_proj"):
            found[f"{module.removesuffix('q_a_proj')}fused_qkv_a_proj"] = None
    return list(found)
