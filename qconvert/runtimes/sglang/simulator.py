"""Simulator of sglang's loader: `simulate` builds the rank's parameters from the config, offers
every tensor of the headers to them, and says what is written, read, refused or misread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qconvert.core.dtypes import TensorType
from qconvert.core.shown import count
from qconvert.runtimes.loading.building import Build, text_config
from qconvert.runtimes.loading.offering import Simulated, offered
from qconvert.runtimes.loading.refusal import LoadRefused, NotSimulated
from qconvert.runtimes.loading.setting import Setting
from qconvert.runtimes.sglang.classes import (
    CLASSES,
    runner_of,
)
from qconvert.runtimes.sglang.drafts import DRAFTS, layer_of
from qconvert.runtimes.sglang.quantization import quantization_of


def architecture_of(config: Mapping[str, Any]) -> str:
    """The class that a config names. Raises NotSimulated for one that the simulator does not know."""
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if name not in CLASSES:
        raise NotSimulated("its class is not simulated")
    return str(name)


def of_draft(config: Mapping[str, Any], tensors: Mapping[str, TensorType]) -> dict[str, TensorType]:
    """Tensors of the draft model in a folder, and embeddings, which its class may read, too; none for a
    folder without one. Raises NotSimulated for an unknown class."""
    kind = architecture_of(config)
    if kind not in DRAFTS:
        return {}
    layer = layer_of(kind, text_config(config))
    if not any(name.startswith(layer) for name in tensors):
        return {}
    beside = "embed_tokens"
    return {n: one for n, one in tensors.items() if n.startswith(layer) or beside in n}


def simulate(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorType],
    setting: Setting | None = None,
    *,
    groups: int | None = None,
    draft: bool = False,
) -> Simulated:
    """Load a folder on one rank: its config.json and the headers of its tensors, in the order of its
    files. `groups`: in how many groups the rows of its fused linear-attention projections are, 0 for
    split ones, as its manifest states; headers cannot show it, and without it any order is taken for
    right. `draft`: load the draft model that the folder holds. Raises NotSimulated for what the
    simulator has no rule for."""
    asked = setting or Setting()
    name = architecture_of(config)
    kind = CLASSES[name]
    setting = replace(asked, moe_runner=runner_of(kind, config, asked))
    if draft:
        if name not in DRAFTS:
            raise NotSimulated(f"a draft of {name}")
        if setting.pp > 1:
            raise NotSimulated("a draft in pipeline stages")
        kind = DRAFTS[name]
    if setting.tp % setting.ep:
        raise NotSimulated(f"tp {setting.tp} that ep {setting.ep} does not divide")
    numbers = text_config(config)
    fused = 0
    try:
        quantization = quantization_of(
            config, kind.fused(numbers), setting, numbers.dtype, kind.renames
        )
        build = Build(setting, quantization, numbers.dtype)
        fused = kind.shared(numbers, quantization, setting)
        kind.build(build, numbers, fused)
    except LoadRefused as refused:
        return Simulated(asked, refused, shared_fused=fused > 0)
    finder = kind.names(build, numbers, fused)
    done = offered(build, finder, tensors, asked, shared_fused=fused > 0, after=kind.after)
    wanted = kind.groups(numbers) if kind.groups is not None and groups else None
    if wanted is None or groups == wanted:
        return done
    order = f"rows in {count(groups or 0, 'group')}, and the class takes {count(wanted, 'group')}"
    unread = frozenset(done.unread)
    wrong = {
        name: order
        for name in tensors
        if name not in unread and (".in_proj_qkvz." in name or ".in_proj_ba." in name)
    }
    return replace(done, misread={**done.misread, **wrong})
