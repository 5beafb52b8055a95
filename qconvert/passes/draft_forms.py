"""relabel_draft: a draft that stands alone (EAGLE3, DFlash) in the other of the two forms in which such
are published: that of speculators, which vLLM reads, or that of their authors, which sglang and vLLM
read. Bytes stay; names of tensors and config.json change. What the other form cannot say is refused.

Read in sglang (models/llama_eagle3.py, models/dflash.py, speculative/dflash_utils.py), vLLM
(transformers_utils/configs/speculators, models/llama_eagle3.py, models/qwen3_dflash.py), speculators
0.9.0 (models/eagle3, models/dflash, convert). Which layers of the target a draft takes hidden states of
is said in two ways: speculators and vLLM name how many layers come before, the lists that sglang and
DFlash read the last of these, one less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from qconvert.checkpoint.quantization_config import renamed_modules
from qconvert.core.errors import PlanError
from qconvert.core.family import DRAFT_LAYERS, draft_algorithm
from qconvert.core.names import parse, split_parameter
from qconvert.core.versions import SGLANG, VLLM
from qconvert.plan.pass_options import options_of
from qconvert.plan.plan import LogEntry, Plan

DraftForm = Literal["speculators", "sglang"]
Config = Mapping[str, Any]
Ids = tuple[int, ...]
_ALGORITHM, _SPECULATORS = "speculators_model_type", "speculators_config"
_EAGLE, _DFLASH, _TIED = "eagle_config", "dflash_config", "tie_word_embeddings"
_IDS, _OF_DFLASH = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"
_SIZE, _BEFORE, _COUNT = "draft_vocab_size", "norm_before_residual", "num_aux_hidden_states"
# Keys beside a draft's layers in speculators' form, with what it takes for granted.
_SAID: Mapping[str, Mapping[str, Any]] = {
    "eagle3": {
        _BEFORE: False, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
        "target_hidden_size": None, "embed_requires_grad": False,
    },
    "dflash": {
        "block_size": None, "mask_token_id": None, "sample_from_anchor": False,
        "target_hidden_size": None, "sliding_window_non_causal": False,
    },
}  # fmt: skip
# Those that the other form says in dflash_config or beside it.
_OF_BLOCK = ("block_size", "mask_token_id", "sample_from_anchor")
# Beside them, and of no effect on what a draft computes.
_IDLE = frozenset((
    "architectures", "speculators_version", "transformers_version", "auto_map", "model_type",
    "has_no_defaults_at_init", _TIED, _ALGORITHM, _SPECULATORS, DRAFT_LAYERS,
))  # fmt: skip
_OF_ROOT = ("dtype", "torch_dtype", "quantization_config")  # true of the layers too
# What vLLM reads of speculators' form, where the class of the layers gives no default.
_NEEDED = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "hidden_act",
    "rms_norm_eps", "vocab_size", "max_position_embeddings",
)  # fmt: skip
# sglang's older classes, and sglang-kt 0.7.2's, know the one layer of EAGLE3 by this name alone.
_MID, _FIRST = "midlayer.", "layers.0."
_RENAMED = {
    _MID: _FIRST, "aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}  # fmt: skip
_LAYER = frozenset((
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
    "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
))  # fmt: skip
_QK_NORMS = frozenset(("self_attn.q_norm", "self_attn.k_norm"))


@dataclass(frozen=True, slots=True)
class Draft:
    """Statements of a config about a draft, in any form. `layers` is the config of its layers; `ids` say
    before which layers of the target hidden states are taken, None: where a runtime takes them by
    default; `size` is that of its own vocabulary, None for the target's; `said` are other keys, as
    speculators names them, and `is_causal`."""

    algorithm: Literal["eagle3", "dflash"]
    layers: Config
    ids: Ids | None
    size: int | None
    said: Config

    @property
    def windows(self) -> list[bool]:
        """Tell which layers attend to a window alone; [] where no list of them is stated."""
        return [one == "sliding_attention" for one in self.layers.get("layer_types") or ()]

    @property
    def width(self) -> Any:
        """The size of the target's hidden states."""
        return self.said.get("target_hidden_size") or self.layers.get("hidden_size")


@dataclass(frozen=True, slots=True)
class RelabelDraft:
    """Write a draft in another project's form.

    `to` is the form. `verifier` is the repo of its target, which speculators' form names, and
    `tokens` how many are drafted at once (null: 3 for EAGLE3, for DFlash its block less one, as in
    speculators' own conversion).

    Raises PlanError for another folder, one in the form already, and what the form cannot say.
    """

    name: ClassVar[str] = "relabel_draft"

    to: DraftForm
    verifier: str | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.to == "speculators") != (self.verifier is not None):
            raise PlanError("to speculators and a verifier go together: give both, or neither")
        if self.tokens is not None and (self.to != "speculators" or self.tokens < 1):
            raise PlanError("tokens are a number above 0, and of speculators' form: leave them out")

    def __call__(self, plan: Plan) -> Plan:
        own = "sglang" if plan.config.get(_ALGORITHM) is None else "speculators"
        draft = _of_plain(plan.config) if own == "sglang" else _of_speculators(plan.config)
        if own == self.to:
            raise PlanError(f"the draft is in form {self.to} already: use it as it is")
        _check_sizes(draft)
        _check_tensors(plan, draft, self.to)
        if self.to == "sglang":
            config, renames = _plain(draft), {_FIRST: _MID} if draft.algorithm == "eagle3" else {}
        else:
            config, renames = _speculators(draft, str(self.verifier), self.tokens), _RENAMED
        _check_inputs(plan, draft)
        for old, new in renames.items():
            config = renamed_modules(config, old, new)
        tensors = {_renamed(name, renames): output for name, output in plan.tensors.items()}
        ids = ", ".join(map(str, draft.ids or ()))
        notes = (f"hidden states taken before layers {ids} of the target",) if ids else ()
        entry = LogEntry(self.name, options_of(self), len(tensors), None, notes)
        return plan.logged(entry, tensors=tensors, config=config)


# --- The form of speculators ---------------------------------------------------------------------


def _of_speculators(config: Config) -> Draft:
    algorithm, layers = config[_ALGORITHM], config.get(DRAFT_LAYERS)
    if algorithm not in ("eagle3", "dflash"):
        raise PlanError(
            f"config.json: {_ALGORITHM} is {algorithm!r}; drafts of eagle3 and dflash are relabelled"
        )
    if not isinstance(layers, Mapping):
        raise PlanError(f"config.json: expected {DRAFT_LAYERS} to be an object, found {layers!r}")
    keys = _SAID[algorithm]
    key_of_ids = _IDS if algorithm == "eagle3" else _OF_DFLASH
    for key, value in config.items():
        if key not in (*keys, _SIZE, key_of_ids, *_OF_ROOT, *_IDLE) and value:
            raise PlanError(
                f"config.json: {key} is {value!r}, and what that is in the other form is not known: "
                "take it out if it has no effect"
            )
    if algorithm == "eagle3" and not isinstance(config.get(_BEFORE), bool):
        raise PlanError(
            f"config.json: expected {_BEFORE} to be true or false, found {config.get(_BEFORE)!r}; where "
            f"it is missing, {VLLM} takes true and speculators false: state what it was trained with"
        )
    said = {key: config.get(key, usual) for key, usual in keys.items()}
    root = {key: config[key] for key in _OF_ROOT if config.get(key) is not None}
    ids = _ids(config, key_of_ids)
    return Draft(algorithm, {**root, **layers}, ids, _own_size(config, layers), said)


def _speculators(draft: Draft, verifier: str, tokens: int | None) -> dict[str, Any]:
    """config.json in speculators' form, once it is clear that this says all."""
    eagle = draft.algorithm == "eagle3"
    layers = {"model_type": "llama" if eagle else "qwen3", **draft.layers}
    missing = next((key for key in _NEEDED if layers.get(key) is None), None)
    if missing is not None:
        raise PlanError(
            f"config.json states no {missing}, for which {VLLM} has no default in speculators' form: "
            f"add the one that the class of {layers['model_type']} takes"
        )
    said = {key: draft.said.get(key, usual) for key, usual in _SAID[draft.algorithm].items()}
    if eagle and layers["model_type"] not in ("llama", "qwen3"):
        raise PlanError(
            f"config.json: model_type is {layers['model_type']!r}; in speculators' form {VLLM} reads "
            "drafts of llama and qwen3"
        )
    if not eagle:
        said["sliding_window_non_causal"] = _sees_behind(draft)
        said[_OF_DFLASH] = list(draft.ids or ())
    elif draft.ids is not None:
        said[_IDS] = list(draft.ids)
        layers |= _counted(draft.ids)
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens or (3 if eagle else said["block_size"] - 1),
    }
    return {
        "architectures": ["Eagle3Speculator" if eagle else "DFlashSpeculator"],
        **{key: layers.pop(key) for key in _OF_ROOT if key in layers},
        _ALGORITHM: draft.algorithm, _SIZE: draft.size or layers["vocab_size"],
        **{key: value for key, value in said.items() if value is not None},
        DRAFT_LAYERS: layers,
        _SPECULATORS: {
            "algorithm": draft.algorithm, "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
    }  # fmt: skip


def _sees_behind(draft: Draft) -> bool:
    """Tell whether layers with a window see the tokens behind them, which those without always do.
    `is_causal` is the other form's word for all layers, and by default a window hides what is behind.
    vLLM applies the flag to layers without a window too: where there is none, it is true."""
    causal, windows = draft.said.get("is_causal"), draft.windows or [False]
    if (causal and not all(windows)) or (causal is None and any(windows) and not all(windows)):
        raise PlanError(
            "config.json: some layers without a window do not see the tokens behind them, or those with "
            f"one do not: {VLLM} reads one flag of speculators' form for all layers"
        )
    return not (causal or (causal is None and any(windows)))


# --- The form that sglang reads ------------------------------------------------------------------


def _of_plain(config: Config) -> Draft:
    algorithm = draft_algorithm(config)
    if not algorithm:
        raise PlanError(
            f"config.json: architectures is {config.get('architectures')!r}; drafts of EAGLE3 "
            "(LlamaForCausalLMEagle3) and DFlash (DFlashDraftModel) are relabelled"
        )
    return _of_plain_eagle3(config) if algorithm == "eagle3" else _of_plain_dflash(config)


def _of_plain_eagle3(config: Config) -> Draft:
    inner = _object(config, _EAGLE)
    if config.get(_TIED) or inner.get("use_aux_hidden_state") is False:
        what = (
            f"{_TIED} is true" if config.get(_TIED) else f"{_EAGLE}.use_aux_hidden_state is false"
        )
        raise PlanError(f"config.json: {what}, for which speculators' form has no place")
    stated, nested = _ids(config, _IDS), _ids(inner, _IDS)
    of_sglang = None if nested is None else tuple(one + 1 for one in nested)
    if stated and of_sglang and stated != of_sglang:
        raise PlanError(
            f"config.json: {_IDS} {list(stated)} counts layers, as vLLM reads it, and {_EAGLE}.{_IDS} "
            f"{list(nested or ())} names the last of them, as sglang does, so that they contradict each "
            "other: take out the one that the draft was not trained with"
        )
    said = {key: config[key] for key in _SAID["eagle3"] if config.get(key) is not None}
    said["norm_before_fc"] = bool(inner.get("norm_before_fc", config.get("norm_before_fc")))
    said["fc_norm"] = bool(config.get("fc_norm") or config.get("use_aux_norm"))
    own = {*said, *_IDLE, _EAGLE, _IDS, _SIZE, "use_aux_norm"} - {"model_type"}
    layers = {key: value for key, value in config.items() if key not in own}
    return Draft("eagle3", layers, stated or of_sglang, _own_size(config, config), said)


def _of_plain_dflash(config: Config) -> Draft:
    inner = _object(config, _DFLASH)
    known = (*_OF_BLOCK, "target_layer_ids", "num_target_layers")
    other = next((key for key, value in inner.items() if key not in known and value), None)
    if other is not None:
        raise PlanError(
            f"config.json: {_DFLASH}.{other} is {inner[other]!r}, for which speculators' form has no "
            "place"
        )
    both = {key: inner.get(key, config.get(key)) for key in known}
    for key in ("mask_token_id", "block_size", "target_layer_ids"):
        if both[key] is None:
            raise PlanError(f"config.json states no {key}, which speculators' form needs: add it")
    said = {key: both[key] for key in _OF_BLOCK if both[key] is not None}
    said |= {key: config.get(key) for key in ("is_causal", "target_hidden_size")}
    ids = tuple(one + 1 for one in _ids(both, "target_layer_ids") or ())
    own = {*known, *said, *_IDLE, _DFLASH, _SIZE} - {"model_type"}
    layers = {key: value for key, value in config.items() if key not in own}
    return Draft("dflash", layers, ids, _own_size(config, config), said)


def _plain(draft: Draft) -> dict[str, Any]:
    """config.json as sglang's classes read it, once it is clear that they compute what it says."""
    for why in _not_in_sglang(draft):
        raise PlanError(f"config.json: {why}")
    said = {key: value for key, value in draft.said.items() if value not in (None, False)}
    layers = {
        key: value for key, value in draft.layers.items() if key not in ("architectures", _TIED)
    }
    last = [one - 1 for one in draft.ids or ()]
    if draft.algorithm == "dflash":
        hidden = any(draft.windows) and said.get("sliding_window_non_causal")
        return {
            "architectures": ["DFlashDraftModel"], "model_type": "qwen3", **layers,
            **({"is_causal": False} if hidden else {}), "block_size": said["block_size"],
            _DFLASH: {"mask_token_id": draft.said["mask_token_id"], "target_layer_ids": last},
        }  # fmt: skip
    both: dict[str, Any] = {}
    if draft.ids is not None:  # vLLM reads the first, sglang the other
        both = {_IDS: [*draft.ids], _EAGLE: {_IDS: last, "use_aux_hidden_state": True}}
        both |= _counted(draft.ids)
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **layers,
        **{key: value for key, value in said.items() if key != "embed_requires_grad"}, **both,
        **({} if draft.size is None else {_SIZE: draft.size}), _TIED: False,
    }  # fmt: skip


def _not_in_sglang(draft: Draft) -> Iterator[str]:
    """Reasons for which sglang's class would not compute what the draft was trained to."""
    said, layers, size = draft.said, draft.layers, draft.layers["hidden_size"]
    if 0 in (draft.ids or ()):
        yield f"hidden states before layer 0 are the embeddings, and {SGLANG} takes those of layers"
    wide = draft.width != size
    if draft.algorithm == "dflash":
        stated = {**said, _OF_DFLASH: draft.ids}
        for key in ("mask_token_id", "block_size", _OF_DFLASH):
            if stated[key] is None:
                yield f"states no {key}, without which no runtime drafts by DFlash"
        checks = [
            (draft.size, f"{_SIZE} is {draft.size}, and {SGLANG} takes the target's head for it"),
            (said["sample_from_anchor"], f"sample_from_anchor is true, which {SGLANG} does not do"),
            (wide, f"target_hidden_size is {draft.width}, and {SGLANG} takes hidden_size, {size}"),
        ]  # fmt: skip
    else:
        count, kind = layers["num_hidden_layers"], layers.get("model_type", "llama")
        own = f"so that its embeddings are its own, and {SGLANG} takes the target's for them"
        other = (
            f"{SGLANG} adds what was before hidden_norm: others than it learned would be drafted"
        )
        checks = [
            (said[_BEFORE], f"{_BEFORE} is true, and {other}"),
            (kind != "llama", f"model_type is {kind!r}, and {SGLANG} has EAGLE3 of llama alone"),
            (count != 1, f"num_hidden_layers is {count}, and {SGLANG} computes a second one otherwise"),
            (any(draft.windows), f"layer_types states a window, which {SGLANG} does not read of EAGLE3"),
            (said["embed_requires_grad"] and not wide, f"embed_requires_grad is true, {own}"),
        ]  # fmt: skip
    yield from (f"{why}; serve it with vLLM as it is" for found, why in checks if found)


# --- Both ----------------------------------------------------------------------------------------


def _object(config: Config, key: str) -> Config:
    found = config.get(key)
    if found is not None and not isinstance(found, Mapping):
        raise PlanError(f"config.json: expected {key} to be an object, found {found!r}")
    return found or {}


def _ids(config: Config, key: str) -> Ids | None:
    """A list of layers; None where it is missing or empty, as runtimes take it."""
    found = config.get(key) or None
    numbers = found if isinstance(found, Sequence) else ["none"]
    if found is not None and any(type(one) is not int or one < 0 for one in numbers):
        raise PlanError(f"config.json: expected {key} to be numbers of layers, found {found!r}")
    return None if found is None else tuple(found)


def _own_size(config: Config, layers: Config) -> int | None:
    found = config.get(_SIZE)
    return None if found == layers.get("vocab_size") else found


def _counted(ids: Ids) -> dict[str, int]:
    """Both runtimes' classes take three hidden states, whatever a list says, unless they are counted."""
    return {_COUNT: len(ids)} if len(ids) != 3 else {}


def _renamed(name: str, renames: Mapping[str, str]) -> str:
    old = next((old for old in renames if name.startswith(old)), "")
    return renames[old] + name.removeprefix(old) if old else name


def _check_sizes(draft: Draft) -> None:
    """Numbers must be numbers, and the lists of layers lists."""
    own = {**draft.layers, **draft.said, _SIZE: draft.size}
    for key in ("num_hidden_layers", "hidden_size", *_SIZES):
        value = own.get(key)
        if type(value) is not int and (value is not None or key not in _SIZES):
            raise PlanError(f"config.json: expected a number for {key}, found {value!r}")
    types = draft.layers.get("layer_types")
    if types is not None and not isinstance(types, list):
        raise PlanError(f"config.json: expected a list for layer_types, found {types!r}")
    if not 0 < draft.layers["num_hidden_layers"] < 1024:
        raise PlanError(
            f"config.json: expected some num_hidden_layers, found {draft.layers['num_hidden_layers']}"
        )


# Those that may be left out.
_SIZES = ("vocab_size", "target_hidden_size", "block_size", "mask_token_id", _COUNT, _SIZE)


def _check_tensors(plan: Plan, draft: Draft, to: DraftForm) -> None:
    """Every tensor must have a place in the class that reads the form, and every layer be complete."""
    count, eagle = draft.layers["num_hidden_layers"], draft.algorithm == "eagle3"
    normed = not eagle or draft.layers.get("model_type") == "qwen3"
    layer = _LAYER | _QK_NORMS if normed else _LAYER
    wanted = {f"layers.{number}.{part}" for number in range(count) for part in layer}
    wanted |= {"fc", "norm", f"{_FIRST}hidden_norm" if eagle else "hidden_norm"}
    more = {"lm_head", "d2t", "t2d"} if eagle or draft.size is not None else set[str]()
    if eagle:
        more |= {"embed_tokens", "input_norm" if draft.said["norm_before_fc"] else "embed_tokens"}
        more |= {"fc_norm.{L}"} if draft.said["fc_norm"] else set()
    found = dict[str, str]()
    for name in plan.tensors:
        module, parameter = split_parameter(_renamed(name, _RENAMED))
        if parameter == "bias" or not (module in wanted or parse(module).template in more):
            reader = "speculators' form" if to == "speculators" else f"{SGLANG}'s class"
            raise PlanError(f"{name!r} has no place in {reader}, which would leave it out")
        if found.setdefault(f"{module}.{parameter}", name) != name:
            raise PlanError(f"{name!r} and {found[f'{module}.{parameter}']!r} are the same tensor")
    have = {split_parameter(name)[0] for name in found}
    lost = next((module for module in sorted(wanted - have)), None)
    if lost is not None:
        raise PlanError(f"{lost}.weight is missing, which every draft of {draft.algorithm} has")


def _check_inputs(plan: Plan, draft: Draft) -> None:
    """`fc` must join as many hidden states as the config says."""
    kind = plan.tensors["fc.weight"].type if "fc.weight" in plan.tensors else None
    count = len(draft.ids) if draft.ids else draft.layers.get(_COUNT) or 3
    if kind is not None and kind.shape[1:] != (count * draft.width,):
        raise PlanError(
            f"'fc.weight' is {kind}: expected {count * draft.width} columns, for the {count} hidden "
            f"states of {draft.width} numbers that config.json states"
        )


PASSES = (RelabelDraft,)
