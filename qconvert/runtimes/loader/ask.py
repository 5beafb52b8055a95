"""A runtime's own loader in place of its simulator (`--loader PYTHON`): the same question, a folder's
config and headers at one rank, and the same answer, a SimulatedLoad.

The runtime reads a folder with config.json, the small files beside it, and a file of weights that is all
header and no data.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import LoaderError
from qconvert.core.family import draft_algorithm, text_config
from qconvert.core.shown import shortened
from qconvert.core.versions import is_release
from qconvert.runtimes.consumers import RUNTIMES, Consumer, takers_of_gdn
from qconvert.runtimes.loader.process import DEFAULT, Limits, opened, versions_in
from qconvert.runtimes.loading.config_groups import block_of
from qconvert.runtimes.loading.load_weights import SimulatedLoad
from qconvert.runtimes.loading.setting import LoadRefused, NotSimulated, Setting
from qconvert.runtimes.pipeline import VARIABLE

Config = Mapping[str, Any]
# Beside config.json, what the runtimes' classes of configs and quantizations read.
FILES = ("generation_config.json", "hf_quant_config.json", "params.json", "preprocessor_config.json",
         "processor_config.json", "quant_config.json", "quantize_config.json",
         "video_preprocessor_config.json")  # fmt: skip
_DTYPES = {
    "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "int8": "I8",
    "uint8": "U8", "int16": "I16", "int32": "I32", "int64": "I64", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
# Modules that vLLM's wrappers hold a second time, and its attention's scales, which have defaults.
_TWICE = (
    ".self_decoder.", ".experts.gate.", "._shared_experts.", ".expert_gate.", ".mla_attn.",
    ".routed_experts.e_score_correction_bias.", "._k_scale.", "._v_scale.", "._q_scale.",
    "._prob_scale.", "._expert_map.", ".experts.routed_input_transform.",
    ".experts.routed_output_transform.",
)  # fmt: skip
# Parameters that no kernel reads, or that the runtime fills after the load.
_NOT_READ = ("weight_shape", "_blockscale_swizzled", "qzeros")
_OF_ACTIVATIONS = ("input_scale", "input_global_scale")
# What a class computes itself, whatever the folder has.
_COMPUTED = (".inv_freq", ".cos_cached", ".sin_cached")
# What some classes build in every pipeline stage, and compute with in the last.
_BUILT_EVERYWHERE = frozenset(("lm_head.weight", "model.norm.weight"))
# What a draft takes from its model (sglang, `set_embed_and_head` of its classes).
_OF_ITS_MODEL = ("embed_tokens.weight", "lm_head.weight", "shared_head.head.weight")
_DRAFT = re.compile(r"(?:^|\.)(?:mtp|nextn)(?:_\w+)?\.|(?:^|\.)layers\.(\d{1,6})\.")
# The steps of a load (server/) before the runtime has a class for the folder.
_BEFORE_BUILD = ("arguments", "config", "groups")
# An operation whose result depends on values that nobody has.
_ASKS_VALUES = ("meta tensor", "Meta tensor", "'meta' backend", "meta device", "data-dependent")


@dataclass(frozen=True)
class RuntimeLoader:
    """A runtime in an interpreter."""

    python: Path
    runtime: str
    version: str
    limits: Limits = DEFAULT
    _written: list[tuple[Any, ...]] = field(default_factory=list, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.runtime} {self.version}, its own loader in {self.python}"

    def load(
        self,
        config: Config,
        tensors: Mapping[str, TensorType],
        setting: Setting | None = None,
        *,
        files: Mapping[str, bytes] | None = None,
        groups: int | None = None,
        draft: bool = False,
    ) -> SimulatedLoad:
        """Return what the runtime does with a folder on one rank, as its simulator would say it; `files`
        are those of FILES that the folder has. Raises NotSimulated where it loads nothing without the
        model's own code or without values, LoaderError where it cannot be asked."""
        at = setting or Setting()
        process = opened(self.python, self.runtime, at.capability, self.limits)
        folder = self._folder(process.folder, config, tensors, files or {})
        said = process.asked({
            "folder": str(folder), "tp": at.tp, "rank": at.rank, "pp": at.pp, "stage": at.stage,
            "draft": draft, "flags": self._flags(at), "environment": self._environment(at),
            "headers": True,
        })  # fmt: skip
        error = said["error"]
        if error is not None:
            self._check_asked(str(error), said)
        return self._as_simulated(said, config, tensors, at, groups, draft=draft)

    def check_version(self, consumer: Consumer) -> None:
        """Raise LoaderError for another version than `--for` names."""
        wanted = consumer.version
        if wanted is not None and wanted != self.version and not is_release(self.version, wanted):
            raise LoaderError(
                f"{self.python} has {self.runtime} {self.version}, and --for names {wanted}: name the "
                f"interpreter of that version, or --for {self.runtime}"
            )

    def draft_of(self, config: Config, tensors: Mapping[str, TensorType]) -> frozenset[str]:
        """Tensors of the draft in a folder, by their names; of one that stands alone, all but its tables
        of tokens, which no parameter holds."""
        if draft_algorithm(config):
            return frozenset(tensors) - {"d2t", "t2d"}
        layers = text_config(config).get("num_hidden_layers")
        found = []
        for name in tensors:
            match = _DRAFT.search(name)
            if match is None:
                continue
            number = match.group(1)
            if number is None or (isinstance(layers, int) and int(number) >= layers):
                found.append(name)
        return frozenset(found)

    def _folder(
        self,
        beside: Path,
        config: Config,
        tensors: Mapping[str, TensorType],
        files: Mapping[str, bytes],
    ) -> Path:
        """A folder of headers, written once for all ranks."""
        for path, *known in self._written:
            if known[0] is config and known[1] is tensors and path.parent == beside:
                return Path(path)
        folder = beside / f"model{len(self._written)}"
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)
        (folder / "config.json").write_text(json.dumps(config))
        write_headers(folder / "model.safetensors", tensors)
        # Some classes look in it for what the folder has: published models have one.
        placed = dict.fromkeys(tensors, "model.safetensors")
        index = {"metadata": {}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        self._written.append((folder, config, tensors))
        return folder

    def _flags(self, at: Setting) -> dict[str, Any]:
        """The runtime's own options."""
        if self.runtime == "vllm":
            if at.ep not in (1, at.tp):
                raise NotSimulated(f"ep {at.ep} at tp {at.tp}: its groups are as many as its ranks")
            return {"enable_expert_parallel": True} if at.ep > 1 else {}
        flags: dict[str, Any] = {}
        if at.ep > 1:
            flags["ep_size"] = at.ep
        if at.disable_shared_experts_fusion:
            flags["disable_shared_experts_fusion"] = True
        return flags

    def _environment(self, at: Setting) -> dict[str, str]:
        if at.partition is None or at.pp == 1:
            return {}
        return {VARIABLE[self.runtime]: ",".join(map(str, at.partition))}

    def _check_asked(self, error: str, said: Mapping[str, Any]) -> None:
        """Raise where an error says nothing about the folder."""
        inside = ", ".join(said.get("at", ()))
        if "trust_remote_code" in error or "trust-remote-code" in error:
            raise NotSimulated(
                "it needs the model's own code (trust_remote_code), which is never run"
            )
        if any(text in error for text in _ASKS_VALUES):
            why = f"its class asks for values of weights: {shortened(error, 200)} ({inside})"
            raise NotSimulated(why)
        if error.startswith(("ModuleNotFoundError", "ImportError", "AttributeError: module")):
            raise LoaderError(
                f"{self.python}: {self.runtime} {self.version} does not load with what is prepared for "
                f"other versions: {shortened(error, 300)} (at {inside}); leave --loader out"
            )

    def _as_simulated(
        self,
        said: Mapping[str, Any],
        config: Config,
        tensors: Mapping[str, TensorType],
        at: Setting,
        groups: int | None,
        *,
        draft: bool,
    ) -> SimulatedLoad:
        drafts = self.draft_of(config, tensors)
        fused = self.runtime == "sglang" and not at.disable_shared_experts_fusion
        fused = fused and any(".shared_expert" in name for name in tensors)
        refused = _refusal(said)
        if refused is not None:
            return SimulatedLoad(at, refused, shared_fused=fused)
        unread = tuple(said["unused"])
        passed = {*_without_use(unread, config), *_passed_over(unread, config, draft=draft)}
        ignored = [name for name in unread if (name in drafts) is draft and name not in passed]
        unwritten = {name: share for name, share in said["shares"].items() if not is_twice(name)}
        spare = {*said.get("dropped", ()), *_without_use(unwritten, config)}
        spare |= {
            name
            for name, share in unwritten.items()
            if share < 1 and _is_padded(said["schemes"].get(name.rpartition(".")[0], ""))
        }
        if not at.last:
            spare |= _BUILT_EVERYWHERE
        if draft and self.runtime == "sglang":
            ends = _OF_ITS_MODEL[: 1 if _has_own_tokens(config) else None]
            spare |= {name for name in unwritten if name.endswith(ends)}
        misread = _in_another_order(self.runtime, config, tensors, groups)
        return SimulatedLoad(
            at, None, unwritten,
            tuple(name for name in unwritten if name not in spare),
            unread, tuple(ignored), misread,
            tuple(name for name in said["empty"] if not is_twice(name)),
            {name: one for name, one in said["schemes"].items() if not is_twice(name)},
            {
                name: TensorType(_DTYPES.get(dtype, dtype), tuple(shape))
                for name, (dtype, shape) in said["parameters"].items()
                if not is_twice(name)
            },
            said["nbytes"], fused,
        )  # fmt: skip


def loaders_in(python: str | Path, limits: Limits | None = None) -> dict[str, RuntimeLoader]:
    """The runtimes of an interpreter, by name. Raises LoaderError for one that has none, or that does
    not start."""
    # A link stays one: an environment's interpreter is known by its place.
    at = Path(python).expanduser().absolute()
    limits = limits or DEFAULT
    key = at, limits
    if key not in _KNOWN:
        found = {
            name: RuntimeLoader(at, name, version, limits)
            for name, version in versions_in(at, limits).items()
        }
        if not found:
            raise LoaderError(
                f"{at}: has neither sglang nor vllm; name the Python of the environment that serves"
            )
        _KNOWN[key] = found
    return _KNOWN[key]


def loader_of(python: str | Path, consumer: Consumer) -> RuntimeLoader:
    """The loader that an interpreter has of a runtime. Raises LoaderError where it has none of it, or
    another version."""
    found = loaders_in(python)
    if consumer.name not in found:
        has = ", ".join(f"{one.runtime} {one.version}" for one in found.values())
        known = " and ".join(name for name in RUNTIMES if name != "transformers")
        raise LoaderError(f"{python}: has no {consumer.name}, only {has}; --loader asks {known}")
    found[consumer.name].check_version(consumer)
    return found[consumer.name]


def loaders_for(python: str | Path, consumer: Consumer | None) -> dict[str, RuntimeLoader]:
    """The loaders that are asked about a folder: that of the runtime that it is made for, or all that an
    interpreter has. Raises LoaderError as `loader_of` does."""
    if consumer is None or consumer.name not in VARIABLE:
        return loaders_in(python)
    return {consumer.name: loader_of(python, consumer)}


_KNOWN: dict[tuple[Path, Limits], dict[str, RuntimeLoader]] = {}


def write_headers(file: Path, tensors: Mapping[str, TensorType]) -> None:
    """Write a safetensors file of these tensors without their bytes: a hole, which takes no disk."""
    table: dict[str, Any] = {}
    end = 0
    for name, kind in tensors.items():
        begin, end = end, end + kind.nbytes
        table[name] = {"dtype": kind.dtype, "shape": list(kind.shape), "data_offsets": [begin, end]}
    data = json.dumps(table).encode()
    data += b" " * (-len(data) % 8)
    with file.open("wb") as opened_file:
        opened_file.write(struct.pack("<Q", len(data)) + data)
        opened_file.truncate(8 + len(data) + end)


def _refusal(said: Mapping[str, Any]) -> LoadRefused | None:
    """The error with which a load ended."""
    if said["error"] is None:
        return None
    kind, _, text = str(said["error"]).partition(": ")
    where = "" if said["step"] in (*_BEFORE_BUILD, "build") else str(said.get("last", ""))
    inside = said.get("at", ())
    at = f" ({inside[-1]})" if inside else ""
    return LoadRefused(kind, text, where, f"{kind}: {shortened(text, 300)}{at}")


def _has_own_tokens(config: Config) -> bool:
    """Tell whether a draft has a vocabulary of its own, whose head is not the model's."""
    settings = text_config(config)
    return settings.get("draft_vocab_size") not in (None, settings.get("vocab_size"))


def _is_padded(scheme: str) -> bool:
    """Tell whether a method of experts makes room for whole tiles of its kernels, filled as it should
    be where no tensor comes."""
    return scheme.endswith("Mxfp4MoEMethod")


def is_twice(name: str) -> bool:
    """Tell whether a parameter is one that vLLM's wrappers hold twice, or a scale of attention."""
    return any(part in f".{name}." for part in _TWICE)


def _passed_over(names: Iterable[str], config: Config, *, draft: bool) -> Iterator[str]:
    """Tensors that a class leaves by rule: what it computes itself, a head that is tied, and, for a
    draft, embeddings and head that it has from its model."""
    tied = bool(text_config(config).get("tie_word_embeddings"))
    for name in names:
        shared = (tied and name == "lm_head.weight") or (draft and name.endswith(_OF_ITS_MODEL))
        if shared or name.endswith(_COMPUTED):
            yield name


def _without_use(names: Iterable[str], config: Config) -> Iterator[str]:
    """Parameters, or tensors for them, that the runtime does not compute with under this config."""
    block = block_of(config) or {}
    ordered = bool(block.get("desc_act")) or any(
        isinstance(group, Mapping) and (group.get("weights") or {}).get("actorder")
        for group in (block.get("config_groups") or {}).values()
    )
    weights_only = not _quantizes_activations(block)
    for name in names:
        if name.endswith(("g_idx", "g_idx_sort_indices")):
            if not ordered:
                yield name
        elif name.endswith(_NOT_READ) or (weights_only and name.endswith(_OF_ACTIVATIONS)):
            yield name


def _quantizes_activations(block: Mapping[str, Any]) -> bool:
    """Tell whether a quantization block states scales of activations that are stored."""
    groups = block.get("config_groups")
    if isinstance(groups, Mapping):
        given = [g.get("input_activations") for g in groups.values() if isinstance(g, Mapping)]
        return any(isinstance(one, Mapping) and one.get("dynamic") is not True for one in given)
    algorithm = str(block.get("quant_algo") or block.get("quant_method"))
    return "A16" not in algorithm and block.get("activation_scheme") != "dynamic"


def _in_another_order(
    runtime: str, config: Config, tensors: Mapping[str, TensorType], groups: int | None
) -> dict[str, str]:
    """Fused rows of linear attention in an order that the runtime does not take: they load in silence,
    and no header shows it."""
    settings = text_config(config)
    family = "qwen3_next" if settings.get("model_type") == "qwen3_next" else "qwen3_5"
    heads = settings.get("linear_num_key_heads")
    if groups is None or not isinstance(heads, int):
        return {}
    if runtime in takers_of_gdn(family, groups, heads):
        return {}
    why = "linear-attention projections are in an order that it does not take"
    return dict.fromkeys([name for name in tensors if ".in_proj_" in name], why)
