"""What each consumer's loader takes, as far as layouts go. `--for NAME[==VERSION]` names one.

Checked against the loaders of sglang 0.5.23, vLLM 0.33 and transformers 5.17. Wrong orders have the
right shape and load in silence, so what is not in this table is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from qconvert.checkpoint.family import Dims
from qconvert.core.errors import PlanError

NAMES = ("sglang", "vllm", "transformers", "qwen3-next")

# Order of the fused linear-attention projections a consumer takes: groups, or how many there are of
# something. "split" means it wants them apart.
_GDN: dict[str, dict[str, str]] = {
    "sglang": {"qwen3_5": "contiguous", "qwen3_next": "interleaved"},
    "vllm": {"qwen3_5": "split", "qwen3_next": "interleaved"},
    "transformers": {"qwen3_5": "split", "qwen3_next": "interleaved"},
    # Not a program but the Qwen3-Next model class, wherever it runs.
    "qwen3-next": {"qwen3_5": "interleaved", "qwen3_next": "interleaved"},
}


@dataclass(frozen=True, slots=True)
class Consumer:
    """A consumer and, where given, the version the user runs."""

    name: str
    version: str | None = None

    def gdn_groups(self, family: str, dims: Dims) -> int:
        """Groups of the fused linear-attention projections, 0 where it wants them split. Raises
        PlanError for a family that has none."""
        if dims.gdn is None or family not in _GDN[self.name]:
            raise PlanError(
                f"{family} has no linear-attention projections that {self.name} wants fused or split"
            )
        order = _GDN[self.name][family]
        return {"split": 0, "contiguous": 1, "interleaved": dims.gdn[0]}[order]


def parse_consumer(text: str) -> Consumer:
    """`sglang` or `sglang==0.5.23`. Raises PlanError for an unknown name."""
    match = re.fullmatch(r"([a-z0-9-]+)(?:==([\w.+-]+))?", text)
    if match is None or match[1] not in NAMES:
        raise PlanError(
            f"unknown consumer {text!r}; known are {', '.join(NAMES)} (NAME[==VERSION])"
        )
    return Consumer(match[1], match[2])
