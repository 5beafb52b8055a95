"""Tables of a runtime's class: what is read back of numbered tensors, and how sizes, names and settings
become patterns and expressions (tests/loaders/test_recorded_classes.py makes real ones)."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from families.headers_only import as_published, write
from families.tiny import config_of
from loaders.recorded_tables import (
    Expressions,
    Patterns,
    Recorded,
    _in_form,
    count_key,
    has_gaps,
    patterns_of,
    says,
    starred,
    table,
    under_settings,
    written,
)

from qconvert.runtimes.classes.expressions import Sizes
from qconvert.runtimes.classes.record import record_of
from qconvert.runtimes.loader.server.record import (
    Shapes,
    code_of,
    numbered,
    pieces,
    probe,
    stored,
)

_CONFIGS = (
    {"hidden_size": 8, "num_attention_heads": 4, "head_dim": 6, "num_hidden_layers": 2},
    {"hidden_size": 12, "num_attention_heads": 2, "head_dim": 10, "num_hidden_layers": 2},
    {"hidden_size": 20, "num_attention_heads": 5, "head_dim": 14, "num_hidden_layers": 2},
)


def _held(shapes: Shapes, value: torch.Tensor) -> list[dict[str, Any]]:
    return pieces(value.numpy(), list(shapes), shapes)


def test_a_parameter_tells_its_tensors_and_their_rows() -> None:
    shapes = {"q": (4, 3), "k": (2, 3), "norm": (5,)}
    tensors = dict(numbered(shapes))
    first, second = _held(shapes, torch.cat([tensors["q"], tensors["k"][1:]]))
    assert (first["tensor"], first["into"], first["order"]) == ("q", [[0, 4], [0, 3]], "same")
    assert (second["tensor"], second["out"]) == ("k", [[1, 2], [0, 3]])
    (norm,) = _held(shapes, tensors["norm"] + 1)
    assert (norm["computed"], norm["order"]) == ("plus one", "same")
    (decay,) = _held(shapes, -torch.exp(tensors["norm"].float()).double())
    assert (decay["tensor"], decay["computed"], decay["order"]) == ("norm", "minus exp", "same")
    large = {"A_log": (512, 64), "norm": (5,)}  # as long as single precision tells no rows
    exp = -torch.exp(dict(numbered(large))["A_log"].float()).double()
    assert {one["tensor"] for one in _held(large, exp)} == {"A_log"}


def test_moved_rows_and_changed_sides_are_told() -> None:
    shapes = {"w": (4, 3)}
    ((_, w),) = numbered(shapes)
    (moved,) = _held(shapes, w[[0, 2, 1, 3]].contiguous())
    assert (moved["order"], moved["runs"]) == ("moved", [[0, 1], [2, 3], [1, 2], [3, 4]])
    (turned,) = _held(shapes, w.T.contiguous())
    assert turned["order"] == "transposed"
    (unknown,) = _held(shapes, w * 3.7 + 2)
    assert unknown == {"tensor": None, "into": [[0, 4], [0, 3]], "order": "computed"}
    stacked = torch.stack([w, torch.zeros_like(w)])
    (expert,) = _held(shapes, stacked)
    assert expert["into"] == [[0, 1], [0, 4], [0, 3]]


def test_what_a_loader_does_with_one_more_name() -> None:
    class Strict(torch.nn.Module):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, _ in weights:
                if not name.endswith(".bias"):
                    raise KeyError(name)

    assert probe(Strict(), "a.bias", (1,)) == "silent"
    assert probe(Strict(), "a.scale", (1,)).startswith("error KeyError")


def test_warnings_that_come_with_any_tensor_say_nothing() -> None:
    """Some classes say of each load what it lacks."""

    class Talking(torch.nn.Module):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, _ in weights:
                if name == "unknown":
                    logging.warning("unknown is not found")
            logging.warning("some are not initialized")

    usual = ("some are not initialized",)
    assert probe(Talking(), "a", (1,), usual=usual) == "silent"
    assert probe(Talking(), "unknown", (1,), usual=usual) == "warn unknown is not found"
    assert probe(Talking(), "a", (1,)) == "warn some are not initialized"


def test_sizes_become_expressions() -> None:
    keys = [{k: v for k, v in config.items() if k != "num_hidden_layers"} for config in _CONFIGS]
    find = Expressions(keys).find
    assert find((8, 12, 20)) == "hidden_size"
    assert find((24, 20, 70)) == "num_attention_heads*head_dim"
    assert find((2, 6, 4)) == "hidden_size//num_attention_heads"
    assert find((16, 24, 40)) == "2*hidden_size"
    assert find((32, 32, 90)) == "hidden_size+num_attention_heads*head_dim"
    assert find((1, 1, 1)) == 1
    assert find((17, 3, 1)) == ""
    assert find((12, 60, 56)) == "hidden_size*head_dim//num_attention_heads"
    assert Expressions(keys).split((14, 22, 34), (8, 6)) == ["hidden_size", "head_dim"]


def test_parts_of_a_size_become_expressions() -> None:
    found = Expressions(_CONFIGS)
    total = [2 * config["hidden_size"] + config["head_dim"] for config in _CONFIGS]
    assert found.split(total, [8, 6, 8]) == ["hidden_size", "head_dim", "hidden_size"]
    assert found.split(total, [8, 14]) == ["hidden_size", "hidden_size+head_dim"]
    assert found.split(total, [8, 7, 7]) == found.split(total, []) == []


def test_numbers_of_lists_become_stars() -> None:
    patterns = Patterns({"model.layers": 4, "model.layers.0.mixers": 2})
    assert patterns.of("model.layers.3.mlp.0.weight") == ("model.layers.*.mlp.0.weight", (3,))
    assert patterns.of("model.layers.0.mixers.1.w") == ("model.layers.*.mixers.*.w", (0, 1))
    assert starred("lm.layers.3.experts.3.w1", (3,)) == "lm.layers.*.experts.3.w1"


def test_steps_of_one_computation_are_no_layers() -> None:
    steps = [{"name": f"merger.{at}", "kind": kind} for at, kind in ((0, "column"), (2, "row"))]
    alike = [{"name": f"heads.{at}", "kind": "column"} for at in (0, 1)]
    lists = [{"name": name, "kind": "list", "length": 3} for name in ("merger", "heads")]
    assert patterns_of({"modules": [*lists, *steps, *alike]}).lists == {"heads": 3}


def test_layers_of_a_tower_up_to_the_one_that_is_used() -> None:
    config = {"vision_config": {"num_hidden_layers": 4}, "num_hidden_layers": 2}
    key, cut = "vision_config.num_hidden_layers", {**config, "vision_feature_layer": -2}
    assert count_key("vision_tower.layers", 4, cut) == key
    found = count_key("vision_tower.layers", 3, cut)
    assert found == f"{key}+1+vision_feature_layer"
    assert Sizes({**cut, "vision_feature_layer": -3}, {}).of(found) == 2
    assert count_key("vision_tower.layers", 3, config) == 3


def test_a_tensor_that_is_computed_with_reaches_a_parameter() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FLOW], capture_output=True, text=True, check=True, timeout=120
    )  # in its own process: torch is changed for good
    assert done.stdout.split() == ["left"]


_FLOW = """
import torch
from qconvert.runtimes.loader.server.flow import Flow
flow, held = Flow(), torch.empty(2)
flow.install()
for name, tensor in flow.handed([("A_log", torch.ones(4)), ("left", torch.ones(4))]):
    if name == "A_log":
        held.copy_((-torch.exp(tensor.float())).data.split(2)[1])
print(*flow.unused)
"""


def test_words_for_the_numbers_of_a_list() -> None:
    """A name without a number goes to the module that it says in words."""
    norms = {"kind": "list", "name": "norms", "length": 2}
    all_of = {"into": [[0, 4]], "out": [[0, 4]], "order": "same"}
    facts: dict[str, Any] = {
        "modules": [norms], "stored": [], "error": None, "unread": [],
        "parameters": {
            f"norms.{number}.weight": {
                "shape": [4],
                "pieces": [{"tensor": f"{word}.weight", **all_of}],
            }
            for number, word in enumerate(("low", "mid"))
        },
    }  # fmt: skip
    names, _, _ = _in_form(facts, [], {**facts, "stored": []}, [])
    assert {one["from"]: one["to"] for one in names} == {
        "low.weight": "norms.*.weight", "mid.weight": "norms.1.weight",
    }  # fmt: skip


@pytest.mark.parametrize(("text", "says_so"), [("width", True), ("hidden_size", False)])
def test_a_table_says_what_is_built_without_a_key(text: str, says_so: bool) -> None:
    """The sizes that follow from a key, and some must."""
    shape = ["count*width", "hidden_size"]
    found = {"modules": [{"name": "fc.weight", "shape": shape}]}
    facts = {
        "modules": [],
        "dtypes": {},
        "parameters": {"fc.weight": {"shape": [15, 4], "pieces": []}},
    }
    sizes = Sizes({"count": 3, "hidden_size": 8}, {}, {}, {"width": (5,)})
    assert says(found, facts, sizes, text) is says_so
    assert not says(found, facts, sizes, "other")


def test_stacks_of_experts_under_other_names_have_another_form(tmp_path: Path) -> None:
    at, sizes = "model.layers.0.block_sparse_moe", {"hidden_size": 64, "intermediate_size": 32}
    made = config_of("granitemoe", {}, sizes)
    shapes = stored(write(made, tmp_path / "one", {}, otherwise=True))
    assert shapes[f"{at}.experts.1.up_proj.weight"] == (32, 64)
    assert shapes[f"{at}.experts.1.down_proj.weight"] == (64, 32)
    assert f"{at}.input_linear.weight" not in shapes


def _facts(config: Mapping[str, Any], *, bias: bool = False) -> dict[str, Any]:
    """A class of two layers, each with a linear, and a norm before and a head behind them."""
    hidden, rows = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    modules: list[dict[str, Any]] = [{"name": "layers", "kind": "list", "length": 2}]
    parameters: dict[str, Any] = {
        "norm.weight": {"shape": [hidden], "pieces": [
            {"tensor": "norm.weight", "into": [[0, hidden]], "out": [[0, 1], [0, hidden]],
             "order": "same"}]},
    }  # fmt: skip
    for layer in range(2):
        name = f"layers.{layer}.proj"
        shapes = {"weight": [rows, hidden], **({"bias": [rows]} if bias else {})}
        modules.append({
            "name": name, "kind": "column", "asked": name, "inputs": hidden, "outputs": rows,
            "bias": bias, "shapes": shapes,
        })  # fmt: skip
        for leaf, shape in {**shapes, "score_bias": [rows]}.items():
            parameters[f"{name}.{leaf}"] = {"shape": shape, "pieces": [{
                "tensor": f"{name}.{leaf}", "into": [[0, size] for size in shape], "order": "same",
                "out": [[0, size] for size in shape],
            }]}  # fmt: skip
    return {
        "modules": modules, "parameters": parameters, "dtypes": {}, "aliases": [], "unread": [],
        "packed": {}, "renames": [], "fuses_shared": False, "passes_on": True, "error": None,
        "probes": {
            "top": {"": "error KeyError: 'x'"},
            "linear": {"bias": "silent", "a": "warn b", "c": "warn d"},
        },
    }  # fmt: skip


def test_a_table_has_an_entry_for_each_kind_of_module() -> None:
    sets = [(config, _facts(config)) for config in _CONFIGS]
    found = table(Recorded(sets, _facts(_CONFIGS[0]), []))
    linear, norm, score = found["modules"]
    assert (score["name"], score["kind"]) == ("layers.*.proj.score_bias", "parameter")
    assert linear["name"] == linear["asked"] == "layers.*.proj"
    assert (linear["inputs"], linear["outputs"]) == (
        "hidden_size",
        ["num_attention_heads*head_dim"],
    )
    assert (norm["kind"], norm["shape"], norm["cut"]) == ("parameter", ["hidden_size"], None)
    assert {"from": "layers.*.proj", "to": "layers.*.proj"} in found["names"]
    own = "layers.*.proj.score_bias"
    assert {"from": own, "to": own, "parameter": True} in found["names"]
    squeezed = {"from": "norm.weight", "to": "norm.weight", "parameter": True, "rows": "squeezed"}
    assert squeezed in found["names"]
    assert found["layers"] == {"layers": "num_hidden_layers"}
    assert found["unknown"] == {"top": {"": "error"}, "linear": {"": "warn", "bias": "silent"}}
    assert json.loads(written(found)) == found


def test_a_size_of_each_layer_is_a_list_of_the_config() -> None:
    """Of what the layers have in it, whatever else the list holds."""
    configs: list[dict[str, Any]] = [
        {**config, "ratios": [at, 9, 0]} for at, config in zip((5, 7, 3), _CONFIGS, strict=True)
    ]
    sets = []
    for config in configs:
        facts = _facts(config)
        facts["parameters"]["layers.0.ape"] = {"shape": [config["ratios"][0]], "pieces": []}
        sets.append((config, facts))
    found = table(Recorded(sets, None, []))["modules"]
    assert [one["shape"] for one in found if one["name"].endswith("ape")] == [["ratios[layer]"]]
    assert Sizes(configs[1], {}).of("ratios[layer]", 0) == 7


def test_a_parameter_larger_than_its_tensor_is_padded() -> None:
    """Of heads that two ranks divide, each in a parameter of 64."""
    sets, halves = list[Any](), list[Any]()
    for config in _CONFIGS:
        heads, facts = config["num_attention_heads"], _facts(config)
        facts["stored"] = {"sink": [heads]}
        for count, kept in ((heads, sets), (heads // 2, halves)):
            piece = {"tensor": "sink", "into": [[0, count]], "out": [[0, count]], "order": "same"}
            own = {"shape": [64], "pieces": [piece]}
            kept.append((config, {**facts, "parameters": {**facts["parameters"], "sink": own}}))
    sink = table(Recorded(sets, halves[0][1], []))["modules"][-1]
    assert (sink["name"], sink["shape"], sink["padded"]) == ("sink", ["num_attention_heads"], 64)
    assert sink["cut"] == 0
    assert table(Recorded(sets, sets[0][1], []))["modules"][-1]["cut"] is None


def test_patterns_of_names_are_those_of_a_setting() -> None:
    """A class may have others for a word of its config; a name that has none stays."""
    plain, other = ([[r"\.scale$", f".{leaf}"]] for leaf in ("weight_scale", "weight_scale_inv"))
    base = Recorded([(c, {**_facts(c), "patterns": plain}) for c in _CONFIGS], None, [])
    under = Recorded([(_CONFIGS[0], {**_facts(_CONFIGS[0]), "patterns": other})], None, [])
    found = under_settings(table(base), [({"dtype": "fp8"}, table(under))], {"dtype": "fp4"})
    assert found["patterns"] == plain
    assert found["otherwise"] == {'dtype="fp8"': {"patterns": other}}
    about = {"runtime": "vllm", "version": "1", "architecture": "A", "model_type": "a"}
    record = record_of({**about, **found, "defaults": {"dtype": None}})
    assert record.under(Sizes({"dtype": "fp4"}, {})).leaf("a.scale") == "weight_scale"
    assert record.under(Sizes({"dtype": "fp8"}, {})).leaf("a.scale") == "weight_scale_inv"
    assert record.leaf("a.scales") == "scales"


def test_what_a_setting_changes_says_when() -> None:
    base = Recorded([(config, _facts(config)) for config in _CONFIGS], None, [])
    other = Recorded([(_CONFIGS[0], _facts(_CONFIGS[0], bias=True))], None, [])
    changed = {"attention_bias": True}
    found = under_settings(table(base), [(changed, table(other))], {"attention_bias": False})
    linears = [entry for entry in found["modules"] if entry["kind"] == "column"]
    assert [(entry["bias"], entry["when"]) for entry in linears] == [
        (False, {"attention_bias": False}), (True, {"attention_bias": True}),
    ]  # fmt: skip
    assert [entry["inputs"] for entry in linears] == ["hidden_size", "hidden_size"]
    assert not has_gaps(table(other), table(base))
    assert found["flags"] == ["attention_bias"]


def test_two_stages_that_are_refused_for_a_tied_head_say_so() -> None:
    stages = [_facts(_CONFIGS[0]), _facts(_CONFIGS[0])]
    base = Recorded([(config, _facts(config)) for config in _CONFIGS], None, stages, untied=True)
    tied = {"tie_word_embeddings": True}
    found = under_settings(table(base), [], tied, untied=base.untied)
    assert found["otherwise"] == {"tie_word_embeddings=true": {"stages": "one"}}
    assert "otherwise" not in under_settings(table(base), [], tied)


def test_a_class_that_takes_nothing_from_the_stage_before_runs_in_one() -> None:
    for passes_on, stages in ((True, "many"), (False, "one")):
        sets = [(config, _facts(config) | {"passes_on": passes_on}) for config in _CONFIGS]
        halves = [_facts(_CONFIGS[0]) | {"parameters": {}} for _ in range(2)]
        assert table(Recorded(sets, None, halves))["stages"] == stages


def test_what_a_loader_adds_nothing_to_is_its_ancestors_code() -> None:
    class Model:
        def load_weights(self) -> None:
            """As a runtime's class has it."""

    class Renamed(Model):
        """The same under another name."""

    class Changed(Renamed):
        packed = ("q", "k")

    assert code_of(Renamed) == code_of(Model) == f"{__name__}.{Model.__qualname__}"
    assert code_of(Changed) != code_of(Model)


def test_a_config_as_published() -> None:
    config: dict[str, Any] = {
        "hidden_size": 64, "num_attention_heads": 4, "moe_intermediate_size": 32, "layer_types": ["a"],
        "vision_config": {"depth": 2},
    }  # fmt: skip
    more = {
        "layer_types": None, "head_dim": 99, "block_dim": "=hidden_size", "moe_intermediate_size": 7,
        "vision_config.in_chans": 3, "linear_attn_config": {"size": "=hidden_size", "kernel": 4},
    }  # fmt: skip
    as_published(config, more)
    assert config == {
        "hidden_size": 64, "num_attention_heads": 4, "moe_intermediate_size": 32, "head_dim": 16,
        "block_dim": 64, "vision_config": {"depth": 2, "in_chans": 3},
        "linear_attn_config": {"size": 64, "kernel": 4},
    }  # fmt: skip
    nested = {"text_config": dict(config)}
    as_published(nested, {"block_dim": None, "in_text": 1})
    assert "block_dim" not in nested["text_config"]
    assert nested["text_config"]["in_text"] == 1
