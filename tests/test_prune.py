"""prune: bytes of the experts that stay under their new numbers, what is refused, and what validators
and simulators say of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Model, Tensor, edit_json, read_tensors, run_cli
from encoded_models import gpt_oss
from gdn_models import model as gdn_model
from loaders.published import published
from models import deepseek_v3, kimi, nvfp4_moe, qwen3_moe, stacked
from simulated_folders import in_any_form

from qconvert import api
from qconvert.core.dtypes import TensorType
from qconvert.core.roles import EXPERT_COUNTS
from qconvert.passes.prune import Prune
from qconvert.plan.plan import Plan, run_passes
from qconvert.recipe.recipe import Recipe, parse_recipe

Lists = Mapping[str, list[int]]


def pruned(model: Model, lists: Lists, room: Path, *words: str) -> tuple[Path, Path]:
    """The source and what the command makes of it."""
    source, out, file = model.write(room / "source"), room / "out", room / "keep.json"
    file.write_text(json.dumps({"layers": lists}))
    done = run_cli("prune", source, out, "--keep", file, *words, "--jobs", "1")
    assert done.code == 0, done.err
    return source, out


def planned(model: Model, step: Prune, room: Path) -> Plan:
    checkpoint = api.open_checkpoint(str(model.write(room / "source")))
    return run_passes(Plan.identity(checkpoint), [step])


def expected(model: Model, lists: Lists, own_layers: int) -> dict[str, Tensor]:
    """Tensors that should be left, by slicing bytes."""
    kept_of = {int(layer): numbers for layer, numbers in lists.items()}
    text = {**model.config, **model.config.get("text_config", {})}
    count = next(text[key] for key in EXPERT_COUNTS if key in text)
    found: dict[str, Tensor] = {}
    for name, (dtype, shape, data) in model.tensors.items():
        match = re.search(r"layers\.(\d+)\.mlp\.(.*)", name)
        layer = None if match is None else int(match[1]) + own_layers * name.startswith("mtp.")
        if match is None or layer not in kept_of:
            found[name] = model.tensors[name]
            continue
        kept = kept_of[layer]
        one = re.match(r"experts\.(\d+)\.", match[2])
        if one is not None:
            if int(one[1]) in kept:
                new = name.replace(f".experts.{one[1]}.", f".experts.{kept.index(int(one[1]))}.")
                found[new] = model.tensors[name]
        elif match[2].startswith(("gate.", "router.", "experts.")):
            size = len(data) // count
            rows = b"".join(data[n * size : (n + 1) * size] for n in kept)
            changed = (len(kept), *shape[1:]) if shape[0] == count else (1, len(kept))
            found[name] = Tensor(dtype, changed, rows)
        else:
            found[name] = model.tensors[name]
    return found


def _biased() -> Model:
    """A router with a bias, and a correction term [1, E], as ERNIE has it."""
    model = qwen3_moe(layers=1, experts=4)
    at = "model.layers.0.mlp.gate"
    model.tensors[f"{at}.bias"] = Tensor("BF16", (4,), bytes(range(8)))
    correction = Tensor("F32", (1, 4), bytes(range(16)))
    model.tensors[f"{at}.moe_statics.e_score_correction_bias"] = correction
    return model


MODELS: Mapping[str, tuple[Callable[[], Model], Lists, int]] = {
    "bf16": (lambda: qwen3_moe(experts=4), {"0": [0, 3], "1": [1, 2]}, 2),
    "fp8, with a draft": (deepseek_v3, {"1": [1], "2": [0]}, 2),
    "stacks": (stacked, {"0": [1]}, 1),
    "packed": (kimi, {"0": [1]}, 1),
    "nvfp4": (nvfp4_moe, {"0": [0, 2], "1": [1, 2]}, 2),
    "tower and draft": (gdn_model, {}, 0),
    "gpt-oss": (lambda: gpt_oss()[0], {}, 0),
    "biases": (_biased, {"0": [1, 2, 3]}, 1),
}


@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_experts_that_stay_are_moved(name: str, tmp_path: Path) -> None:
    make, lists, layers = MODELS[name]
    model = make()
    if not lists:
        dims = api.open_checkpoint(str(model.write(tmp_path / "seen"))).role_index.dims
        layers = dims.num_layers
        lists = {str(n): [0, 2] for n in range(layers + dims.mtp_layers)}
    source, out = pruned(model, lists, tmp_path)
    assert read_tensors(out) == expected(model, lists, layers)
    losses = json.loads((out / "qconvert.json").read_bytes())["lossy_steps"]
    before, kept = model_experts(source), len(next(iter(lists.values())))
    assert losses == {f"leaves out {before - kept} of a layer's {before} experts": len(lists)}
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "lossy steps: none" not in card
    assert re.search(r"- dropped: rows of \d+ tensors?, by the rule `prune: rows", card)
    report = run_cli("validate", out, "--against", source, "--level", "full", "--jobs", "1")
    own = run_cli("validate", source, "--level", "full", "--jobs", "1")
    assert _errors(report.out) <= _errors(own.out), report.out
    assert "every source byte was used, or dropped by a named rule" in report.out


def model_experts(folder: Path) -> int:
    return api.open_checkpoint(folder).role_index.dims.num_experts


def _errors(text: str) -> set[str]:
    return set(re.findall(r"^error +(QC\d+)", text, re.MULTILINE))


def _set(**values: Any) -> Callable[[Model], None]:
    return lambda model: model.config.update(values)


def _add(name: str, dtype: str, *shape: int) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        data = bytes(TensorType(dtype, shape).nbytes)
        model.tensors[f"model.layers.0.mlp.{name}"] = Tensor(dtype, shape, data)

    return change


def _without_router(model: Model) -> None:
    del model.tensors["model.layers.0.mlp.gate.weight"]


def _listed(entry: str) -> Callable[[Model], None]:
    block = {"quant_method": "fp8", "modules_to_not_convert": [entry]}
    return _set(quantization_config=block)


_GROUPS = {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
REFUSED: Mapping[str, tuple[Callable[[Model], None], Lists, str]] = {
    "all": (_set(), {"0": [0, 1, 2, 3]}, "fewer than the model's 4"),
    "none": (_set(), {"0": []}, "fewer than the model's 4"),
    "a layer without a list": (_set(), {"1": [0, 1]}, "no list for layer 0"),
    "a layer too many": (_set(), {"0": [0, 1], "1": [0, 1]}, "a list for layer 1"),
    "twice the same": (_set(), {"0": [1, 1]}, "2 different experts, found 1"),
    "an expert beyond": (_set(), {"0": [1, 4]}, "from 0 to 3, found 4"),
    "fewer than a token has": (_set(num_experts_per_tok=3), {"0": [0, 1]}, "a token has 3"),
    "one of each group": (_set(**_GROUPS), {"0": [0, 2]}, "2 or more for each"),
    "no multiple of groups": (_set(**_GROUPS), {"0": [0, 1, 2]}, "a multiple of 2"),
    "another count": (_set(num_fine_experts=4), {"0": [0]}, "num_fine_experts is 4"),
    "a count by layer": (_set(experts_of_each=[4]), {"0": [0]}, "experts_of_each is [4]"),
    "tokens by expert": (_add("gate.tid2eid", "I64", 8, 2), {"0": [0]}, "by their numbers"),
    "a packed router": (_add("gate.qweight", "I32", 16, 4), {"0": [0]}, "is quantized"),
    "rows beside": (_add("other", "F32", 4, 2), {"0": [0]}, "which part of it belongs to which"),
    "no router": (_without_router, {"0": [0]}, "no router [4 experts, ...]"),
    "a pattern of numbers": (
        _listed(r"re:.*experts\.3\.down_proj"), {"0": [0]}, "names experts by numbers",
    ),
    "a layer unknown": (_listed("x.experts.3.down_proj"), {"0": [0]}, "of which layer is not known"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    change, lists, why = REFUSED[name]
    model = qwen3_moe(layers=1, experts=4)
    change(model)
    step = Prune(keep={int(layer): tuple(numbers) for layer, numbers in lists.items()})
    with pytest.raises(api.PlanError, match=re.escape(why)):
        planned(model, step, tmp_path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "found {'layers': None}"),
        ('{"layers": {"a": [0]}}', "found {'a': [0]}"),
        ('{"layers": {"0": [0.5]}}', "found {'0': [0.5]}"),
        ("[", "not valid JSON"),
    ],
)
def test_a_broken_file_of_lists(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "keep.json"
    file.write_text(text)
    with pytest.raises(api.DataError, match=re.escape(why)):
        planned(qwen3_moe(), Prune(keep=str(file)), tmp_path)


def test_experts_in_lists_of_modules_have_their_new_numbers(tmp_path: Path) -> None:
    model = qwen3_moe("fp8", experts=3)
    at = "model.layers.{}.mlp.experts.{}.down_proj".format
    names = ["lm_head", at(0, 0), at(0, 2), at(1, 2)]
    model.config["quantization_config"] = {
        **model.config["quantization_config"], "modules_to_not_convert": names,
    }  # fmt: skip
    block = {
        "quantization": {"exclude_modules": names, "quantized_layers": {at(0, 2): {}, at(1, 0): {}}}
    }
    model.side_files["hf_quant_config.json"] = json.dumps(block).encode()
    out = pruned(model, {"0": [1, 2], "1": [0, 1]}, tmp_path)[1]
    kept = ["lm_head", at(0, 1)]
    config = json.loads((out / "config.json").read_bytes())
    assert config["quantization_config"]["modules_to_not_convert"] == kept
    beside = json.loads((out / "hf_quant_config.json").read_bytes())["quantization"]
    assert beside == {"exclude_modules": kept, "quantized_layers": {at(0, 1): {}, at(1, 0): {}}}


def test_a_recipe_holds_the_lists_and_needs_the_checkpoint_for_some(tmp_path: Path) -> None:
    """A calibration runs it, and CPU experts are served beside its other layers."""
    step = Prune(keep={0: (0, 1), 1: (2, 3)})
    again = parse_recipe(Recipe("prune", (step,)).to_yaml(), "again")
    plan = planned(qwen3_moe(experts=4), step, tmp_path)
    source = Plan.identity(plan.checkpoint)
    assert plan.log[0].options["keep"] == {"0": [0, 1], "1": [2, 3]}
    assert plan.fingerprint() == run_passes(source, again.passes).fingerprint()
    for more in ("w4a16: {calibrate: {synthetic: true}}", "amx: {method: int8, numa: 1}"):
        with pytest.raises(api.PlanError, match="keeps 2 of 4 experts, and this one needs"):
            run_passes(source, parse_recipe(f"{again.to_yaml()}- {more}\n", "more").passes)
    twice = Prune(keep={0: (1,), 1: (0,)})
    assert (
        run_passes(source, [step, twice]).tensors
        == run_passes(source, [Prune(keep={0: (1,), 1: (2,)})]).tensors
    )


def test_what_is_dropped_is_whole(tmp_path: Path) -> None:
    """All that an expert has, as many experts in each layer, and of what is shared a part."""
    plan = planned(qwen3_moe(experts=4), Prune(keep={0: (0, 1), 1: (2, 3)}), tmp_path)
    own, at = Plan.identity(plan.checkpoint).tensors, "model.layers.0.mlp"
    names = [f"{at}.experts.2.{part}_proj.weight" for part in ("gate", "up", "down")]
    for back, why in (
        (names[:1], "the parts of expert 2 of model.layers.0.mlp are kept or dropped whole"),
        (names, "drops another number of experts in some layers"),
        ([f"{at}.gate.weight"], "which is used as a whole"),
    ):
        tensors = {**plan.tensors, **{name: own[name] for name in back}}
        gone = {*plan.dropped} - {name for name in back if name in names}
        dropped = {name: plan.dropped[name] for name in gone}
        with pytest.raises(api.PlanError, match=why):
            replace(plan, tensors=tensors, dropped=dropped).check()


@pytest.mark.parametrize("steps", ["unstack, prune", "prune, unstack", "prune, fp8"])
def test_validators_follow_it_beside_other_passes(steps: str, tmp_path: Path) -> None:
    model = stacked() if "stack" in steps else qwen3_moe(layers=1)
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    recipe = f"passes: [{steps}]".replace("prune", "{prune: {keep: {0: [1]}}}")
    (tmp_path / "r.yaml").write_text(recipe)
    assert run_cli("run", tmp_path / "r.yaml", source, out, "--jobs", "1").code == 0
    said = run_cli("validate", out, "--against", source, "--level", "full", "--jobs", "1").out
    assert "0 errors" in said, said


@pytest.mark.parametrize("runtime", ["sglang", "vllm"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_runtimes_load_what_is_left(family: str, runtime: str, tmp_path: Path) -> None:
    """With the model's own count of experts, or one of a part of it, tensors would be left over or
    missing."""
    model = published(family, experts=8, inner=128)
    groups = {"n_group": 2, "topk_group": 1} if family == "deepseek_v3" else {}
    model.config.update(groups)
    dims = api.open_checkpoint(str(model.write(tmp_path / "source"))).role_index.dims
    layers = [*dims.groups["moe"], *dims.groups.get("mtp_moe", ())]
    step = Prune(keep=dict.fromkeys(layers, (0, 3, 4, 7)))
    plan = planned(model, step, tmp_path)
    tensors = {name: output.type for name, output in plan.tensors.items()}
    simulate = in_any_form(runtime)
    for draft in (False, True) if dims.mtp_layers else (False,):
        found = simulate(dict(plan.config), tensors, draft=draft)
        assert (found.refused, [*found.missing], dict(found.misread)) == (None, [], {})
        assert not [name for name in found.ignored if ".experts." in name] or draft
        key = "n_routed_experts" if groups or family == "glm4_moe" else "num_experts"
        wrong = simulate({**plan.config, key: 8}, tensors, draft=draft)
        assert wrong.refused or wrong.missing or wrong.misread


def test_a_wrong_result_is_found(tmp_path: Path) -> None:
    """A count that is not that of the lists, and lists that are not those of the weights."""
    source, out = pruned(qwen3_moe(experts=4), {"0": [0, 3], "1": [1, 2]}, tmp_path)
    words = ("validate", out, "--against", source, "--jobs", "1")
    edit_json(out / "config.json", lambda config: config.update(num_experts=3))
    assert "num_experts is 3, the source's is 2" in run_cli(*words).out.replace("\n", " ")
    edit_json(out / "config.json", lambda config: config.update(num_experts=2))
    edit_json(
        out / "qconvert.json",
        lambda manifest: manifest["passes"][0]["options"]["keep"].update({"0": [0, 2]}),
    )
    said = run_cli(*words, "--level", "full").out
    assert {"QC030", "QC060", "QC099"} <= _errors(said)
