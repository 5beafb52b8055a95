"""Versions of runtimes that load a sound folder and serve it wrong: no rule about a folder finds these.

Each row has its source. `since` and `before` bound the versions by release, empty where there is no
bound; a commit between two releases is said in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qconvert.runtimes.consumers import Consumer
from qconvert.runtimes.shared_experts import architecture_of


@dataclass(frozen=True, slots=True)
class Advisory:
    """An error of a runtime, and for which folders: `concerns` is asked with the config. `unreleased`:
    only builds between releases have it. `setting`: it is so with this environment variable alone."""

    runtime: str
    since: str
    before: str
    what: str
    source: str
    concerns: Callable[[Mapping[str, Any]], bool]
    unreleased: bool = False
    setting: str = ""


def _linear_attention(config: Mapping[str, Any]) -> bool:
    return architecture_of(config).startswith("Qwen3_5")


def _has_experts(config: Mapping[str, Any]) -> bool:
    texts = (config, config.get("text_config"))
    return any(text.get(key) for text in texts if isinstance(text, Mapping) for key in _COUNTS)


def _nvfp4_weights_alone(config: Mapping[str, Any]) -> bool:
    """Tell whether experts may be NVFP4 of compressed-tensors, whose activations stay."""
    if not _has_experts(config):
        return False
    block = config.get("quantization_config")
    groups = block.get("config_groups") if isinstance(block, Mapping) else None
    return any(
        isinstance(group, Mapping)
        and (group.get("weights") or {}).get("type") == "float"
        and (group.get("weights") or {}).get("num_bits") == 4
        and not group.get("input_activations")
        for group in (groups.values() if isinstance(groups, Mapping) else ())
    )


def _int4_experts(config: Mapping[str, Any]) -> bool:
    """Tell whether experts may be INT4 of compressed-tensors, GPTQ or AWQ: a config with experts and
    codes of four bits."""
    block = config.get("quantization_config")
    if not _has_experts(config) or not isinstance(block, Mapping):
        return False
    groups = block.get("config_groups")
    each = groups.values() if isinstance(groups, Mapping) else ()
    weights = [group.get("weights") for group in each if isinstance(group, Mapping)]
    return block.get("bits", block.get("w_bit")) == 4 or any(
        isinstance(one, Mapping) and (one.get("type", "int"), one.get("num_bits")) == ("int", 4)
        for one in weights
    )


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")

ADVISORIES: tuple[Advisory, ...] = (
    Advisory(
        "sglang", "", "",
        "builds of the main branch between the commits of pull requests 22311 and 22312 take in_proj_b "
        "and in_proj_a of Qwen3.5 in the other order",
        "https://github.com/sgl-project/sglang/pull/22312", _linear_attention, unreleased=True,
    ),
    Advisory(
        "vllm", "", "0.33",
        "versions before 0.33 compute weight-only NVFP4 experts wrong: use 0.33 or newer",
        "https://github.com/vllm-project/vllm/issues/54189", _nvfp4_weights_alone,
    ),
    Advisory(
        "vllm", "", "",
        "Marlin's kernels for experts then compute garbage of INT4, whatever the signs of its scales; "
        "leave it unset",
        "0.33 on an H100: experts of W4A16 with scales above 0 alone, and of both signs", _int4_experts,
        setting="VLLM_MARLIN_INPUT_DTYPE=int8",
    ),
)  # fmt: skip


def advisories(consumer: Consumer, config: Mapping[str, Any]) -> tuple[Advisory, ...]:
    """Those that concern a folder and a runtime; of its version, where one is given."""
    return tuple(
        row
        for row in ADVISORIES
        if row.runtime == consumer.name and row.concerns(config) and _in(row, consumer.version)
    )


def _in(row: Advisory, version: str | None) -> bool:
    if version is None:
        return True
    if row.unreleased and re.fullmatch(r"v?[0-9.]+(?:post[0-9]+)?", version):
        return False
    here = _release(version)
    return (not row.since or here >= _release(row.since)) and (
        not row.before or here < _release(row.before)
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))
