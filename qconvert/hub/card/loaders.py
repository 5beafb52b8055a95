"""Runtimes that load a folder, and their launch lines: as runtimes/serving.py says, for the
class and the version. A runtime that is known to load it whole at some size is started as it does at the
smallest; of one whose loader nobody simulated for the class, the line is there to try. KTransformers'
line: runtimes/ktransformers.py."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from qconvert.runtimes.consumers import CHECKED, RUNTIMES, consumer_in
from qconvert.runtimes.pipeline import VARIABLE
from qconvert.runtimes.serving import Loading, Verdict, launch
from qconvert.runtimes.shared_experts import NO_FUSION, loses_shared

# --- Facts that cards need from a manifest and a config -------------------------------------------


def amx_of(manifest: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The manifest's entry on AMX experts, None if the folder has none."""
    return (manifest or {}).get("amx")


def consumer_of(manifest: Mapping[str, Any]) -> str | None:
    """The runtime that a step was told to convert for."""
    found = consumer_in(manifest)
    return None if found is None else found.name


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The config's quantization block, or that of its text model."""
    text = config.get("text_config")
    for level in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(level.get(key), Mapping):
                block: Mapping[str, Any] = level[key]
                return block
    return None


def has_signed_scales(manifest: Mapping[str, Any]) -> bool:
    """Return whether scales of its INT4 weights were searched for below 0, too."""
    for step in manifest["passes"]:
        options = step["options"]
        searched = options.get("calibrate") or options
        signed = (searched.get("scales"), searched.get("signs")) == ("search", "both")
        codes = options.get("bits"), options.get("symmetric")
        if step["name"] == "w4a16" and signed and codes == (4, True):
            return True
    return False


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
