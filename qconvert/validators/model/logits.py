"""The first layers of source and output through transformers, on the same tokens.

QC080 the output computes something else than the source, beyond the rounding of its formats.
QC081 transformers finds a tensor of the output missing, unexpected or of another shape.

Both are first written to a temporary checkpoint each, in the form of transformers' class: FP8,
packed INT4 and AMX codes decoded to BF16, experts one matrix each, fused linear attention split by
the order that the folder states or that its class fixes. So the class's own loader proves the names,
and a folder that states a wrong order computes nonsense. Only weights are compared: how runtimes round
activations is left to --attribute. One expert exchanged with another among hundreds can hide below the
noise of four bits; --level sample looks at weights one by one.

Layers 0 to N-1, embeddings, last norm and head are read, none of the others. One model is held at a
time, in BF16, and once more on disk (in TMPDIR, deleted after; mapped while it loads): a layer of
DeepSeek-V3 with experts is 23 GB, one of Qwen3.5-35B-A3B 1.6 GB, and its embeddings and head 2 GB.
"""

from __future__ import annotations

import gc
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from qconvert.checkpoint.safetensors import build_header
from qconvert.core.errors import PlanError
from qconvert.core.extras import lacking
from qconvert.validation.findings import Finding, Rule
from qconvert.validation.runner import Folder, Need, NotChecked, Yield
from qconvert.validators.model.plain import Plain, nbytes, plain_config, plain_tensors
from qconvert.validators.model.runs import Block, Digest, Run, compare
from qconvert.validators.model.served import Model, output_model, reading, source_model

if TYPE_CHECKING:
    import torch

RULES = (
    Rule(
        "QC080",
        "the output computes something else than the source",
        "Rows fused in another order than the folder states, experts or scales exchanged, a wrong "
        "scale, a stale shard: all of the right shape, so loaders take them silently.",
        "Check the first layer whose figures are too large; bisect the conversion's passes with "
        "--dump-after, and convert again.",
    ),
    Rule(
        "QC081",
        "transformers finds tensors missing, unexpected or of another shape",
        "Names or shapes are not those of the class that config.json states.",
        "Convert again for that class, or fix config.json's model_type and sizes.",
    ),
)

_TOKENS, _SEED = 32, 20
_FILE = "model.safetensors"
_MISSING, _UNEXPECTED = "is missing", "is not a tensor of this class"
# torch and transformers, hidden states, hooks and logits: 460 MiB are used before any tensor.
_BESIDE = 512 << 20
_DECODED = 16  # bytes an element while a matrix is decoded: codes, float32 twice, BF16 twice
_SPARE = 1.05  # a file system needs some space of its own


@dataclass(frozen=True)
class Logits:
    """Both models in turn, each as transformers loads it."""

    name: str = "logits"
    proves: str = "its first layers compute what the source's do (transformers, the same tokens)"
    needs: frozenset[Need] = frozenset({"logits", "source"})

    def __call__(self, folder: Folder) -> Iterator[Yield]:
        if missing := lacking("calibrate", "torch", "transformers"):
            raise NotChecked(missing)
        try:
            source, output = source_model(folder), output_model(folder)
            count = min(folder.request.logits, source.layers, output.layers)
            theirs, ours = _prepared(source, count), _prepared(output, count)
        except PlanError as error:
            raise NotChecked(str(error)) from error
        for tensors in (theirs, ours):
            _check_memory(folder, tensors)
        tokens = _tokens(source)
        expected, faults = run(source, theirs, count, tokens)
        if expected is None:
            name, what = next(iter(faults.items()))
            raise NotChecked(f"transformers does not load the source: {name} {what}")
        if not expected.finite:
            raise NotChecked("the source's own logits are not finite")
        found, own = run(output, ours, count, tokens, expected.inputs)
        for name, what in own.items():
            if faults.get(name) != what:
                yield Finding("QC081", "error", name, f"{what}, says transformers' loader")
        if found is None:
            return
        comparison = compare(expected, found)
        yield from comparison.tables(
            f"the first {count} of {source.layers} layers ({comparison.kind}, {_TOKENS} random tokens)"
        )
        fault = comparison.fault()
        if fault is not None:
            yield Finding("QC080", "error", str(folder.checkpoint.root), fault)


def _prepared(model: Model, layers: int) -> list[Plain]:
    if model.checkpoint.family.name == "generic":
        kind = model.checkpoint.config.get("model_type")
        raise PlanError(f"model_type {kind!r} is not known, so its weights cannot be read")
    if not layers:
        raise PlanError("its config counts no layers")
    return list(plain_tensors(model, layers))


def _check_memory(folder: Folder, tensors: Sequence[Plain]) -> None:
    """Raises NotChecked if one model takes more memory than granted."""
    memory = folder.request.memory
    largest = max((plain.type.numel for plain in tensors), default=0)
    # A layer's experts are held twice while transformers stacks gate and up of all into one tensor.
    merged: dict[int, int] = {}
    for plain in tensors:
        if plain.expert is not None and plain.expert[1] != "down":
            layer = plain.expert[0]
            merged[layer] = merged.get(layer, 0) + 2 * plain.type.numel
    need = _BESIDE + nbytes(tensors) + max(merged.values(), default=0) + _DECODED * largest
    if memory is not None and need > memory:
        raise NotChecked(
            f"these layers take {need >> 20} MiB in BF16, transformers included, more than the memory "
            f"granted; give --memory {-(-need >> 20)}MiB, or ask for fewer layers"
        )


def _tokens(model: Model) -> list[int]:
    """Fixed random ids of the vocabulary."""
    import numpy as np

    size = model.config.get("vocab_size")
    if type(size) is not int or size < 2:
        raise NotChecked(f"config.json: expected a vocab_size, found {size!r}")
    return [int(n) for n in np.random.default_rng(_SEED).integers(0, size, _TOKENS)]


def run(
    model: Model,
    tensors: Sequence[Plain],
    layers: int,
    tokens: Sequence[int],
    given: Mapping[Block, torch.Tensor] | None = None,
) -> tuple[Run | None, Mapping[str, str]]:
    """What a model's first layers make of tokens, None where it cannot be loaded whole; and what
    transformers finds wrong, by tensor. Blocks' outputs are of the inputs `given`, where some are.
    Raises NotChecked where transformers has no class for it, or the disk has no space."""
    import torch
    import transformers

    hf: Any = transformers  # its auto classes are not typed strictly
    with tempfile.TemporaryDirectory(prefix="qconvert-logits-") as where, _quiet(hf):
        work_dir = Path(where)
        config = plain_config(model, layers)
        (work_dir / "config.json").write_text(json.dumps(config), encoding="utf-8")
        kind = _class_of(hf, work_dir)
        digests = _write(model, tensors, work_dir)
        loaded, told = hf.AutoModelForCausalLM.from_pretrained(
            work_dir, dtype=torch.bfloat16, output_loading_info=True, ignore_mismatched_sizes=True,
            local_files_only=True,
        )  # fmt: skip
        faults = _faults(told)
        if any(what != _UNEXPECTED for what in faults.values()):
            return None, faults
        loaded.eval()
        ids = torch.tensor([list(tokens)])
        logits, hooks = _forward(loaded, ids, None)
        hidden = tuple(hooks.hidden)
        if given is not None:
            _, hooks = _forward(loaded, ids, given)
        del loaded
        gc.collect()  # a model holds itself in cycles, and the next one needs its memory
    return Run(kind, logits, hidden, hooks.inputs, hooks.outputs, digests), faults


def _faults(told: Mapping[str, Any]) -> dict[str, str]:
    found = dict.fromkeys(sorted(told["missing_keys"]), _MISSING)
    found.update(dict.fromkeys(sorted(told["unexpected_keys"]), _UNEXPECTED))
    for name, here, wanted in told["mismatched_keys"]:
        found[name] = f"is {list(here)}, expected {list(wanted)}"
    return found


def _class_of(hf: Any, work_dir: Path) -> str:
    """The class that transformers has for a config. Raises NotChecked if there is none."""
    try:
        config = hf.AutoConfig.from_pretrained(work_dir, local_files_only=True)
        return str(hf.AutoModelForCausalLM._model_mapping[type(config)].__name__)
    except (KeyError, ValueError) as error:
        text = " ".join(str(error).split())[:200]
        raise NotChecked(f"transformers {hf.__version__} has no class for it: {text}") from error


def _write(model: Model, tensors: Sequence[Plain], work_dir: Path) -> dict[str, Digest]:
    """One safetensors file, a tensor at a time. Returns what was written, by name."""
    header, _ = build_header([(p.name, p.type) for p in tensors], {"format": "pt"})
    size = len(header) + sum(plain.type.nbytes for plain in tensors)
    free = shutil.disk_usage(work_dir).free
    if free < _SPARE * size:
        raise NotChecked(
            f"{work_dir.parent} has {free >> 20} MiB free, and so many layers take {size >> 20}; set "
            "TMPDIR to a larger disk, or ask for fewer layers"
        )
    digests = {}
    with reading(model) as weights, (work_dir / _FILE).open("wb") as stream:
        stream.write(header)
        for plain in tensors:
            digest = xxhash.xxh3_128()
            for chunk in plain.read(weights):
                digest.update(chunk)
                stream.write(chunk)
            digests[plain.name] = Digest(str(plain.type), plain.format, digest.hexdigest())
    return digests


@dataclass
class _Hooks:
    """Keeps what each layer makes, and what goes into and comes out of its blocks; feeds blocks
    `given` inputs instead of their own."""

    given: Mapping[Block, torch.Tensor] | None
    hidden: list[torch.Tensor] = field(default_factory=list)
    inputs: dict[Block, torch.Tensor] = field(default_factory=dict)
    outputs: dict[Block, torch.Tensor] = field(default_factory=dict)

    def attach(self, layers: Any) -> list[Any]:
        """Returns handles that remove the hooks again."""
        handles = []
        for number, layer in enumerate(layers):
            handles.append(layer.register_forward_hook(self._layer))
            mixer = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
            blocks = {"attention": mixer, "mlp": layer.mlp}
            if hasattr(layer.mlp, "experts"):
                blocks["experts"] = layer.mlp.experts
            for part, block in blocks.items():
                where = Block(number, part)
                before = partial(self._before, where)
                handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(block.register_forward_hook(partial(self._after, where)))
        return handles

    def _layer(self, module: Any, arguments: Any, result: Any) -> None:
        self.hidden.append(_states(result))

    def _before(self, where: Block, module: Any, arguments: Any, named: Any) -> Any:
        self.inputs[where] = arguments[0] if arguments else named["hidden_states"]
        if self.given is None:
            return None
        if arguments:
            return (self.given[where], *arguments[1:]), named
        return arguments, {**named, "hidden_states": self.given[where]}

    def _after(self, where: Block, module: Any, arguments: Any, result: Any) -> None:
        self.outputs[where] = _states(result)


def _states(result: Any) -> torch.Tensor:
    """Hidden states [T, H] of a module's result, float32."""
    states: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return states.reshape(-1, states.shape[-1]).float()


def _forward(
    model: Any, tokens: torch.Tensor, given: Mapping[Block, torch.Tensor] | None
) -> tuple[torch.Tensor, _Hooks]:
    """Logits [T, V] in float32, and what the hooks kept."""
    import torch

    hooks = _Hooks(given)
    handles = hooks.attach(model.model.layers)
    with torch.no_grad():
        logits: torch.Tensor = model(tokens, use_cache=False).logits[0].float()
    for handle in handles:
        handle.remove()
    return logits, hooks


@contextmanager
def _quiet(hf: Any) -> Iterator[None]:
    """Without transformers' progress bars and remarks; its return value has what matters."""
    logging = hf.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


VALIDATOR = Logits()
