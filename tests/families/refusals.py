"""Converting commands that any class is taken through, and what each may be refused for: a word, and
what is said. A model is refused for no other cause."""

from __future__ import annotations

import re
from collections.abc import Mapping

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "stack": ("experts", "stack"),
    "unstack": ("experts", "unstack"),
    "w4a16 experts": ("w4a16", "--rtn", "--group-size", "32"),
    "w4a16 Linear": ("w4a16", "--rtn", "--group-size", "32", "--targets", "Linear"),
    "fp8": ("fp8",),
    "nvfp4 experts": ("nvfp4", "--dialect", "modelopt"),
    "nvfp4 all": ("nvfp4", "--dialect", "compressed-tensors", "--targets", "Linear"),
    "amx": ("amx", "--method", "int4", "--numa", "1"),
    "split": ("split", "--pp", "2", "--for", "vllm"),
    "text": ("text",),
}
_EXPERTS = {
    "no experts": "this model has no experts",
    "unread experts": "so they are neither quantized nor stacked",
}
_NO_LINEAR = {"no linear": "no linear|matches no weight that can be quantized"}
_FORM = {
    "done": "already stacked|already matrices",
    "no ranges": "not byte ranges",
    "no gate": "have no gate projection",
    "other form": "does not read its experts as",
}
CAUSES: Mapping[str, Mapping[str, str]] = {
    "dequant": {"nothing": "no quantized weight found"},
    "stack": {**_EXPERTS, **_FORM},
    "unstack": {**_EXPERTS, **_FORM},
    "w4a16 experts": _EXPERTS,
    "w4a16 Linear": {
        "unread experts": _EXPERTS["unread experts"],
        **_NO_LINEAR,
    },
    "fp8": {
        "unread experts": _EXPERTS["unread experts"],
        **_NO_LINEAR,
    },
    "nvfp4 experts": _EXPERTS,
    "nvfp4 all": {"unread experts": _EXPERTS["unread experts"], **_NO_LINEAR},
    "amx": {**_EXPERTS, "other arithmetic": "kt-kernel's AMX kernels compute"},
    # vLLM's Ernie 4.5 MoE with tied embeddings: its last rank has none.
    "split": {"one stage": "runs in one pipeline stage only"},
    "text": {
        "no class": "has no class for a text model", "text alone": "has no text_config",
        "no tower": "no tensor is known as one of a vision or audio tower",
        "other order": "takes stacks of experts the other way round",
        "other names": "has no parameter of that name",
    },
}  # fmt: skip


def cause(command: str, said: str) -> str:
    """Why a command of `CAUSES` was refused, in a word; "" for no cause that there may be."""
    return next((word for word, text in CAUSES[command].items() if re.search(text, said)), "")
