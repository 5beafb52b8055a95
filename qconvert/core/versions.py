"""Versions of other projects that facts here were read in or tried with, and versions as text.

`RELEASES` is the only place that states them. A docstring that cites a file of one of these projects
("sglang, `layers/linear.py`") means the release that stands here; where a fact holds for another one, or
came with one, its number stands beside the fact.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Release:
    """A release of a project: its name in texts, and the version as its package states it; `earlier`:
    releases before it of which answers are known, too."""

    name: str
    version: str
    earlier: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {self.series}"

    @property
    def series(self) -> str:
        """The version without a patch number of 0: what holds for 0.33.0 is said of 0.33."""
        return self.version.removesuffix(".0")

    def known(self, version: str) -> str | None:
        """The one of these releases that a version is, None for another."""
        return next(
            (one for one in (self.version, *self.earlier) if is_release(version, one)), None
        )


RELEASES = {
    "sglang": Release("sglang", "0.5.23", ("0.5.22",)),
    "vllm": Release("vLLM", "0.33.0", ("0.32.0",)),
    "transformers": Release("transformers", "5.17"),
    "compressed-tensors": Release("compressed-tensors", "0.19.0"),
    "llmcompressor": Release("llm-compressor", "0.14"),
    "nvidia-modelopt": Release("modelopt", "0.47.0"),
    "kt-kernel": Release("kt-kernel", "0.7.2"),
    "model-signing": Release("model-signing", "1.1.1"),
    "huggingface_hub": Release("huggingface_hub", "1.33"),
}
SGLANG, VLLM, TRANSFORMERS = (RELEASES[name] for name in ("sglang", "vllm", "transformers"))
KT_KERNEL, COMPRESSED_TENSORS = RELEASES["kt-kernel"], RELEASES["compressed-tensors"]
LLM_COMPRESSOR, MODELOPT = RELEASES["llmcompressor"], RELEASES["nvidia-modelopt"]

# Versions as packages have them (PEP 440): 0.5.23, 0.5.23rc1, 5.17.0.dev0, 0.33.0+cpu.
_VERSION = re.compile(
    r"v?(?P<release>\d{1,9}(?:\.\d{1,9}){0,5})(?P<rest>(?:\.?(?:a|b|rc|post|dev)\d{0,9})*)"
    r"(?:\+[a-z0-9]+(?:[._-][a-z0-9]+)*)?",
    re.IGNORECASE | re.ASCII,
)


def is_version(text: str) -> bool:
    """Tell whether a text is a version of a package."""
    return _VERSION.fullmatch(text) is not None


def is_release(version: str, known: str) -> bool:
    """Tell whether a version is a release itself, however many zeros it is written with, or a build of
    it; what came before or after it, a post-release too, is another program."""
    match = _VERSION.fullmatch(version)
    if match is None or match["rest"]:
        return False
    stated, wanted = (_numbers(text) for text in (match["release"], known))
    return stated == wanted


def is_of_series(version: str, series: str) -> bool:
    """Tell whether a version is of a series, to as many places as that one states. Candidates and
    development versions before a release are not that release."""
    match = _VERSION.fullmatch(version)
    if match is None or re.search(r"a|b|rc|dev", match["rest"], re.IGNORECASE):
        return False
    wanted = [int(part) for part in series.split(".")]
    stated = [int(part) for part in match["release"].split(".")]
    stated += [0] * (len(wanted) - len(stated))
    return stated[: len(wanted)] == wanted


def comes_before(version: str, release: str) -> bool:
    """Tell whether a release comes before another, by their numbers."""
    return _numbers(version) < _numbers(release)


def _numbers(release: str) -> list[int]:
    numbers = [int(part) for part in release.split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers
