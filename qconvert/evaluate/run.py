"""An evaluation from what a user names to its result: both models opened, found comparable, and run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qconvert.calibrate.backend import silence_transformers
from qconvert.calibrate.devices import check_devices, found_devices
from qconvert.calibrate.model import class_config
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import CheckpointError, DataError, UsageError
from qconvert.core.extras import require
from qconvert.core.family import text_config
from qconvert.core.links import read_regular
from qconvert.evaluate.result import WEIGHTS_ONLY, Evaluation
from qconvert.evaluate.side import Side, side_of
from qconvert.run.work.events import Events, NoEvents
from qconvert.samples.data import digest, load_tokens
from qconvert.samples.request import DataSpec
from qconvert.samples.tokenizer import MOST_TOKENIZER, tokenizer_files

if TYPE_CHECKING:
    from qconvert.evaluate.engine import Tokens

# What the language models of both sides must have in common: sizes of what is compared.
_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")


def evaluate(
    repo: Checkpoint,
    source: Checkpoint,
    data: DataSpec,
    *,
    pair: Checkpoint | None = None,
    layers: int | None = None,
    memory: int | None = None,
    devices: Sequence[str] = (),
    events: Events | None = None,
    notice: Callable[[str], None] | None = None,
) -> Evaluation:
    """Run both models on the same samples. `pair` holds the layers beside the CPU experts in `repo`, if
    those are not the source's. `layers`: only so many, and no logits. `memory` is in bytes (None: three
    quarters of the machine), `devices` are torch's names (none: all GPUs, else the CPU). `notice`
    is told what a user must know of the data.

    Raises UsageError for options that do not fit, CheckpointError for models that cannot be compared,
    PlanError for those that cannot be run and where torch or transformers is missing, DataError for the
    data, RunError for too little memory or disk."""
    what = "eval runs models as transformers computes them"
    require("calibrate", what, "torch", "transformers")
    if pair is not None and "amx" not in (repo.manifest or {}):
        raise UsageError(
            f"{repo.root}: --pair needs the folder of the CPU's experts, and this is not one; exchange "
            "the two, or omit --pair"
        )
    if "amx" in (source.manifest or {}):
        raise CheckpointError(
            f"{source.root}: holds CPU experts alone; name the checkpoint that they were made from"
        )
    rest = (pair or source) if "amx" in (repo.manifest or {}) else None
    _check_comparable(source, rest or repo)
    check_devices(devices)
    silence_transformers()
    notes: list[str] = []

    def remark(text: str) -> None:
        notes.append(text)
        if notice is not None:
            notice(text)

    told = digest(data, source.root)
    tokens = load_tokens(data, source.root, remark)
    _check_tokenizers(tokens, data, source, rest or repo)
    if layers is None and max(sample.size for sample in tokens) < 2:
        raise DataError(
            f"{data.data}: no sample has 2 tokens, so none is predicted; give longer text, or evaluate "
            "hidden states alone (--first-layers N)"
        )
    theirs, ours = side_of(source), side_of(repo, rest)
    _check_layers(layers, theirs, ours)

    from qconvert.evaluate.engine import compare

    found = compare(
        theirs, ours, tokens, layers=layers, memory=memory,
        devices=tuple(dict.fromkeys(devices)) or found_devices(), events=events or NoEvents(),
    )  # fmt: skip
    if layers is not None:
        notes.append(
            f"the first {layers} of {theirs.model.layers} layers: no perplexity, no KL, no agreement"
        )
    return Evaluation(
        folder=repo.name, against=source.name, model=(rest or repo).model_line,
        data="random tokens" if data.data is None else Path(data.data).name, digest=told,
        samples=len(tokens), length=data.length, seed=data.seed,
        tokens=sum(sample.size for sample in tokens), of_layers=theirs.model.layers,
        hidden=found.hidden, logits=found.logits, notes=(*notes, WEIGHTS_ONLY),
    )  # fmt: skip


def _check_comparable(source: Checkpoint, repo: Checkpoint) -> None:
    """Raise CheckpointError for models whose hidden states or predictions have nothing in common."""
    kinds = [_kind(one) for one in (source, repo)]
    if kinds[0] != kinds[1]:
        raise CheckpointError(
            f"{repo.root}: is model_type {kinds[1]!r}, and {source.root} is {kinds[0]!r}: models of "
            "different architectures are not compared; name the checkpoint that it was made from"
        )
    for key in _SIZES:
        there, here = (text_config(one.config).get(key) for one in (source, repo))
        if there != here:
            raise CheckpointError(
                f"{repo.root}: config.json: {key} is {here!r}, and {there!r} in {source.root}: "
                "what they compute cannot be compared; name the checkpoint that it was made from"
            )


def _kind(checkpoint: Checkpoint) -> object:
    from qconvert.plan.plan import Plan

    return class_config(Plan.identity(checkpoint)).get("model_type")


def _check_tokenizers(
    tokens: Sequence[Tokens], data: DataSpec, source: Checkpoint, repo: Checkpoint
) -> None:
    """Raise DataError where the folder's own tokenizer makes other ids of the data. Where its files are
    the source's, or it has none, or the data are ids, nothing is to be compared."""
    if data.kind in ("tokens", "synthetic") or source.root == repo.root:
        return
    here, there = (
        {
            file.name: read_regular(file, MOST_TOKENIZER, error=DataError)
            for file in tokenizer_files(one.root)
        }
        for one in (repo, source)
    )
    if not here or here == there:
        return
    own = load_tokens(data, repo.root, lambda _: None)
    same = len(own) == len(tokens) and all(
        a.shape == b.shape and bool((a == b).all()) for a, b in zip(own, tokens, strict=True)
    )
    if not same:
        raise DataError(
            f"{repo.root}: its tokenizer makes other ids of {data.data} than that of {source.root}, so "
            "their predictions cannot be compared; copy the tokenizer's files from there"
        )


def _check_layers(layers: int | None, source: Side, repo: Side) -> None:
    if layers is not None and layers > source.model.layers:
        raise UsageError(
            f"--first-layers {layers}: {source.name} has {source.model.layers} layers; give at most "
            "that, or omit --first-layers for perplexity and KL as well"
        )
    if not source.model.layers or repo.model.layers != source.model.layers:
        raise CheckpointError(
            f"{repo.name}: has {repo.model.layers} decoder layers, and {source.name} "
            f"{source.model.layers}; name the checkpoint that it was made from"
        )
