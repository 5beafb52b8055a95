"""Simulator of sglang's loader: `simulate` builds the rank's parameters from the config and the table of
its class, offers every tensor of the headers to them, and says what is written, read, refused or
misread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qconvert.core.dtypes import TensorType
from qconvert.runtimes.classes.build import after_load, built, in_right_groups
from qconvert.runtimes.classes.names import RecordedNames, of_draft
from qconvert.runtimes.classes.record import Record, architecture_of, check_form, class_record
from qconvert.runtimes.loading.building import RankBuild, check_stages, divided, text_config
from qconvert.runtimes.loading.load_weights import SimulatedLoad, offered
from qconvert.runtimes.loading.setting import LoadRefused, NotSimulated, Setting
from qconvert.runtimes.sglang.quantization import Mixed, Renames, quantization_of, root_block
from qconvert.runtimes.sglang.runners import runner_of
from qconvert.runtimes.shared_experts import fused, has_rule


def simulate(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorType],
    setting: Setting | None = None,
    *,
    groups: int | None = None,
    draft: bool = False,
    version: str | None = None,
) -> SimulatedLoad:
    """Load a folder on one rank: its config.json and the headers of its tensors, in the order of its
    files. `groups`: in how many groups the rows of its fused linear-attention projections are, 0 for
    split ones, as its manifest states; headers cannot show it, and without it any order is taken for
    right. `draft`: load the draft model that the folder holds. `version`: of sglang, whose table of the
    class is asked, in forms that were compared with the loader. Raises NotSimulated for what the
    simulator has no rule for."""
    asked = setting or Setting()
    record = class_record("sglang", architecture_of(config), version, draft=draft)
    own = of_draft(record, text_config(config), tensors) if draft else tensors
    check_form(record, config, own, asked)
    return by_table(record, config, tensors, asked, groups)


def _check_layers(layers: object) -> None:
    if layers not in (None, 1):
        raise LoadRefused(
            "AssertionError", "Only 1 nextn layer is supported", "config.json",
            f"num_nextn_predict_layers is {layers}, and the class takes 1",
        )  # fmt: skip


def by_table(
    record: Record,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorType],
    asked: Setting,
    groups: int | None = None,
) -> SimulatedLoad:
    """Load a folder on one rank by the table of its class, in whatever form."""
    if asked.tp % asked.ep:
        raise NotSimulated(f"tp {asked.tp} that ep {asked.ep} does not divide")
    apart = asked.disable_shared_experts_fusion or not record.fuses_shared
    if not apart and not has_rule(record.architecture):
        raise NotSimulated("its shared experts, which it may load as routed ones")
    if record.draft and asked.pp > 1:
        raise NotSimulated("a draft in pipeline stages")
    setting = replace(asked, moe_runner=runner_of(record.architecture, config, asked))
    numbers = text_config(config)
    sizes = record.sizes({**config, **numbers.values})
    if len(record.mappers) > 1:
        raise NotSimulated("two mappers of names, one after another")
    renames = next((Renames(one.parts, one.starts) for one in record.mappers), Renames())
    shared = 0
    try:
        if record.draft and not record.layers:
            _check_layers(sizes.flag("num_nextn_predict_layers"))
        check_stages(setting, (sizes.of(n) for n in record.layers.values()), one=record.one_stage)
        stated = quantization_of(config, record.packed, setting, numbers.dtype, renames)
        if record.draft and isinstance(stated, Mixed) and stated.names("mtp."):
            # It takes a draft that is not listed for bf16.
            own = tuple(replace(one, unquantized=()) for one in record.modules)
            record = replace(record, modules=own)
        build = RankBuild(setting, stated, numbers.dtype)
        heads = "num_attention_heads"
        if sizes.flag(heads) is not None:  # of linears that ranks share otherwise, too
            divided(sizes.of(heads), setting.tp, heads)
        shared = fused(record.architecture, config, root_block(config), setting)
        made = built(record, build, sizes, tensors, shared)
    except LoadRefused as refused:
        return SimulatedLoad(asked, refused, shared_fused=shared > 0)
    done = offered(
        build, RecordedNames(made), tensors, asked,
        shared_fused=shared > 0, after=lambda build, tensors: after_load(made),
    )  # fmt: skip
    return in_right_groups(record, sizes, done, groups, tensors)
