"""Patterns that others wrote end in bounded time, or are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from checkpoints import bf16_moe, run_cli

from qconvert.checkpoint.quantization_config import Entries
from qconvert.core.errors import PlanError
from qconvert.core.patterns import compiled

NAME = "model.language_model.layers.1000." + "experts." * 8 + "gate_proj"


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.mlp\.experts\..*",
        r"^(?!.*\.mlp\.experts).*$",
        r"model\.layers\.\d+\..*\.experts\.[0-9]+\..*_proj",
        r".*self_attn\.(qkv_proj|fused_qkv_a_proj_with_mqa)$",
        "(?:" + "|".join(f"{c}.*x" for c in "abcdefgh") + ")",
        r"(\d{1,3}\.)+x",
        ".*" * 4 + "!",
    ],
)
def test_patterns_of_names_are_taken(pattern: str) -> None:
    found = compiled(pattern).match(NAME)
    assert (found is None) == (re.match(pattern, NAME) is None)


@pytest.mark.parametrize(
    "pattern",
    [
        "(.*)*x", "(.*)(.*)(.*)(.*)(.*)(.*)(.*)x", "([a-z.0-9_]+)*-", "(" * 3000, "(a|b+)*",
        "((a{1,100}){1,100}){1,100}", "(?=(.*)+)x", "(a+)(?(1)b|c+)*", "a{5000000000}", "x" * 30_000,
    ],
)  # fmt: skip
def test_patterns_without_end_are_refused(pattern: str) -> None:
    with pytest.raises(re.error):
        compiled(pattern)


def test_a_target_without_end_is_a_usage_error(tmp_path: Path) -> None:
    source = bf16_moe().write(tmp_path / "source")
    result = run_cli("w4a16", source, tmp_path / "out", "--rtn", "--targets", "re:(.*)*(.*)*x$")
    assert result.code == 2
    assert "a repeat within a repeat can take unbounded time" in result.err


def test_a_config_that_names_without_end_is_refused() -> None:
    with pytest.raises(PlanError, match=r"re:\(\.\*\)\*x"):
        Entries.of({"re:(.*)*x": None})
