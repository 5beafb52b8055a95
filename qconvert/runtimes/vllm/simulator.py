"""Simulator of vLLM's loader: `simulate` builds the rank's parameters from the config, offers
every tensor of the headers to them, and says what is written, read, refused or misread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qconvert.core.dtypes import TensorType
from qconvert.core.shown import count
from qconvert.runtimes.loading.building import Build, text_config
from qconvert.runtimes.loading.offering import Simulated, Tensors, offered
from qconvert.runtimes.loading.refusal import LoadRefused, NotSimulated
from qconvert.runtimes.loading.schemes import Unquantized
from qconvert.runtimes.loading.setting import HOPPER, Setting
from qconvert.runtimes.vllm.building import Rank
from qconvert.runtimes.vllm.classes import CLASSES
from qconvert.runtimes.vllm.drafts import DRAFTS, draft_tensors
from qconvert.runtimes.vllm.quantization import Stated, quantization_of, refuse_forms


def architecture_of(config: Mapping[str, Any]) -> str:
    """The class that a config names. Raises NotSimulated for one that the simulator does not know."""
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if name not in CLASSES:
        raise NotSimulated("its class is not simulated")
    return str(name)


def of_draft(config: Mapping[str, Any], tensors: Mapping[str, TensorType]) -> dict[str, TensorType]:
    """Tensors that the class of a folder's draft may read; none for a folder without one. Raises
    NotSimulated for an unknown class."""
    return draft_tensors(architecture_of(config), text_config(config), tensors)


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
    simulator has no rule for, a class among it, unless vLLM refuses the quantization of any."""
    asked = setting or Setting()
    try:
        refuse_forms(config, tensors)
    except LoadRefused as refused:
        return Simulated(asked, refused)
    name = architecture_of(config)
    kind = CLASSES[name]
    numbers = text_config(config)
    if draft:
        if name not in DRAFTS:
            raise NotSimulated(f"a draft of {name}")
        if asked.pp > 1:
            raise NotSimulated("a draft in pipeline stages")
        kind = DRAFTS[name]
    if asked.capability != HOPPER or asked.a2a != "none" or asked.moe_runner != "auto":
        raise NotSimulated("another GPU than an H200, or other options")
    if asked.ep not in (1, asked.tp):
        raise NotSimulated(f"ep {asked.ep}: vLLM divides all experts among its {asked.tp} ranks")
    try:
        at = _in_stages(asked, numbers.number("num_hidden_layers"))
        fused, plain = kind.fused(numbers), Unquantized(numbers.dtype)
        quantization = quantization_of(config, Stated(fused, kind.renames, plain, tensors))
        rank = Rank(at, quantization, numbers.dtype)
        kind.build(rank, numbers)
    except LoadRefused as refused:
        return Simulated(asked, refused)
    finder = kind.names(rank, numbers, bool(quantization.name))

    def after(build: Build, tensors: Mapping[str, TensorType]) -> None:
        if kind.after is not None:
            kind.after(build, tensors)
        if not quantization.name:
            _all_written(build, tensors)

    # The loader reads the names of a file sorted.
    done = offered(rank, finder, Tensors.of(tensors).by_name, asked, after=after)
    wanted = kind.groups(numbers) if kind.groups is not None and groups else None
    if not wanted or groups == wanted:
        return done
    order = f"rows in {count(groups or 0, 'group')}, and the class takes {count(wanted, 'group')}"
    unread = frozenset(done.unread)
    wrong = {
        name: order
        for name in tensors
        if name not in unread and (".in_proj_qkvz." in name or ".in_proj_ba." in name)
    }
    return replace(done, misread={**done.misread, **wrong})


def _in_stages(setting: Setting, layers: int) -> Setting:
    """The setting with the partition that vLLM makes where none is stated: the stages counted backwards
    from the second-last own one layer more (distributed/utils.py, get_pp_indices)."""
    if setting.pp == 1:
        return setting
    if setting.partition is not None:
        if sum(setting.partition) != layers:
            raise LoadRefused(
                "ValueError", "does not match", "model.layers",
                f"the partition {list(setting.partition)} is not of {layers} layers",
            )  # fmt: skip
        return setting
    share, rest = divmod(layers, setting.pp)
    sizes = [share] * setting.pp
    for number in range(2, rest + 2):
        sizes[-number] += 1
    return replace(setting, partition=tuple(sizes))


def _all_written(build: Build, tensors: Mapping[str, TensorType]) -> None:
    """The loader's own check, of unquantized models alone: norms and the like that no tensor came to.
    Linears, experts and embeddings are not looked at (default_loader.py, track_weights_loading)."""
    empty = [
        name
        for name, parameter in build.parameters.items()
        if not parameter.parts and not _is_exempt(name, build)
    ]
    if empty:
        raise LoadRefused(
            "ValueError", "Following weights were not initialized from checkpoint", empty[0],
            f"{count(len(empty), 'parameter')} have no tensor in the folder",
        )  # fmt: skip


def _is_exempt(name: str, build: Build) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:number]) in build.schemes for number in range(1, len(parts)))
