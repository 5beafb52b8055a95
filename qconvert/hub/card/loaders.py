"""Runtimes that load a folder, and their launch lines: as runtimes/serving.py says, for the
class and the version. A runtime that is known to load it whole at some size is started as it does at the
smallest; of one whose loader nobody simulated for the class, the line is there to try. KTransformers'
line: runtimes/ktransformers.py."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from qconvert.hub.card.facts import amx_of, consumer_of, quantization_of
from qconvert.runtimes.consumers import CHECKED, RUNTIMES
from qconvert.runtimes.pipeline import VARIABLE
from qconvert.runtimes.serving import Loading, Verdict, launch
from qconvert.runtimes.shared_experts import NO_FUSION, loses_shared

TRANSFORMERS, KTRANSFORMERS = "transformers", "ktransformers"

Loads = Mapping[str, Loading]
NOT_ASKED: Loads = MappingProxyType({})


def takers(
    manifest: Mapping[str, Any], said: Loads = NOT_ASKED, verdict: Verdict = "loads"
) -> tuple[str, ...]:
    """Released runtimes of which it is said that they load the folder, or that this is not known; the
    one that it was made for first. `said`: what is said of each."""
    if amx_of(manifest) is not None:
        return (KTRANSFORMERS,) if verdict == "not known" else ()
    if manifest.get("trtllm_gen") is not None or manifest.get("draft") is not None:
        return ()  # no server loads either by itself
    found = [name for name in RUNTIMES if said_of(name, said).verdict == verdict]
    stage = manifest.get("stage")
    if stage is not None:  # transformers would initialize the missing layers at random
        found = [name for name in found if VARIABLE.get(name) in stage.get("environment", ())]
    made_for = consumer_of(manifest)
    return tuple(sorted(found, key=lambda name: name != made_for))


def said_of(runtime: str, said: Loads) -> Loading:
    """Return what is said of a runtime, or that nobody asked."""
    nobody = "not known: its headers were not read"
    return said.get(runtime) or Loading(runtime, CHECKED[runtime], {}, unknown=nobody)


def library(manifest: Mapping[str, Any], said: Loads = NOT_ASKED) -> str | None:
    """The Hub's library_name: transformers unless it is known not to load the folder, else a runtime
    that does, or may."""
    found = [name for verdict in _MAY for name in takers(manifest, said, verdict)]
    return TRANSFORMERS if TRANSFORMERS in found else next(iter(found), None)


_MAY: tuple[Verdict, ...] = ("loads", "not known")


def command(
    runtime: str, manifest: Mapping[str, Any], config: Mapping[str, Any], said: Loads = NOT_ASKED
) -> str:
    """The command that starts a runtime on the folder REPO."""
    stages = manifest["stage"]["of"] if manifest.get("stage") is not None else 1
    one = said_of(runtime, said)
    tp, option = one.least if one.sizes else (0, "")
    if runtime == "sglang" and not tp and loses_shared(config, quantization_of(config)):
        # sglang would fuse the shared expert into the routed experts, with their scheme, and skip its
        # weights if they are stored in another format.
        option = NO_FUSION
    return launch(runtime, "REPO", tp, stages, option)
