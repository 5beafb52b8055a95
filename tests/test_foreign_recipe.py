"""llm-compressor's recipes: what each resolves to, here and by llm-compressor's own parser; and what is
refused, with its line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import ran, read_tensors
from loaders.published import published

from qconvert.checkpoint.open import open_source
from qconvert.cli.demo import write_sample
from qconvert.core.errors import PlanError, RecipeError
from qconvert.core.int_scheme import Actorder, IntScheme
from qconvert.core.yaml_lines import compose
from qconvert.models.linears import matches
from qconvert.passes.fp8 import ToFp8
from qconvert.passes.nvfp4 import ToNvfp4
from qconvert.passes.quantize import ToInt8
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.plan import Pass, Plan, run_passes
from qconvert.recipe.llmcompressor import Foreign, Group, is_foreign, parse_foreign, pattern_of
from qconvert.recipe.recipe import parse_recipe
from qconvert.samples.request import Calibration


def parse(text: str) -> Foreign:
    node = compose(text, "r")
    assert is_foreign(node)
    (found,) = parse_foreign(node, "r")
    return found


def below(modifier: str, options: str) -> str:
    """A recipe with these options, each line of which is one; the first stands in line 4."""
    lines = "".join(f"      {line}\n" for line in options.splitlines())
    return f"quant_stage:\n  quant_modifiers:\n    {modifier}:\n{lines}"


def packed(group: Group) -> IntScheme:
    assert isinstance(group.scheme, IntScheme)
    return group.scheme


@dataclass(frozen=True)
class Case:
    """A recipe, and its groups as (bits, group, symmetric, actorder, targets)."""

    text: str
    groups: tuple[tuple[int, int | None, bool, str | None, tuple[str, ...]], ...]
    ignore: tuple[str, ...] = ()
    kind: str = "gptq"


_SAVED = """\
default_stage:
  default_modifiers:
    GPTQModifier:
      config_groups:
        group_0:
          targets: [Linear]
          weights:
            num_bits: 4
            type: int
            symmetric: true
            group_size: 32
            strategy: group
            block_structure: null
            dynamic: false
            actorder: null
            scale_dtype: null
            zp_dtype: torch.int8
            observer: memoryless_minmax
            observer_kwargs: {}
          input_activations: null
          output_activations: null
          format: null
      targets: [Linear]
      ignore: [lm_head, 're:.*mlp.gate$']
      bypass_divisibility_checks: false
      requires_calibration_data: true
      block_size: 64
      dampening_frac: 0.001
      actorder: static
      batched_quantization: auto
"""


def gptq(options: str) -> str:
    return below("GPTQModifier", options)


def rtn(options: str) -> str:
    return below("QuantizationModifier", options)


LINEAR = ("Linear",)
_GROUP = "config_groups:\n  g:\n    targets: [Linear]\n    weights: "  # weights in line 7
CASES = {
    "preset": Case(
        gptq("targets: Linear\nscheme: W4A16\nignore: [lm_head]"),
        ((4, 128, True, "static", LINEAR),), ("lm_head",),
    ),
    "preset without targets": Case(gptq("scheme: w8a16"), ((8, 128, True, "static", LINEAR),)),
    "asymmetric, no order": Case(
        gptq("scheme: W4A16_ASYM\nactorder: null"), ((4, 128, False, None, LINEAR),)
    ),
    "patterns": Case(
        gptq(
            "targets: ['re:.*mlp[.]experts[.].*', model.layers.0.mlp.down_proj]\nscheme: W4A16\n"
            "ignore: ['re:.*gate$', lm_head]\nactorder: weight"
        ),
        ((4, 128, True, "static", ("re:.*mlp[.]experts[.].*", "model.layers.0.mlp.down_proj")),),
        ("re:.*gate$", "lm_head"),
    ),
    "presets by targets": Case(
        gptq("scheme: {W4A16: ['re:.*experts.*'], W8A16: 're:.*self_attn.*'}"),
        (
            (4, 128, True, "static", ("re:.*experts.*",)),
            (8, 128, True, "static", ("re:.*self_attn.*",)),
        ),
    ),
    "as llm-compressor saves it": Case(
        _SAVED, ((4, 32, True, "static", LINEAR),), ("lm_head", "re:.*mlp.gate$")
    ),
    "channel": Case(
        gptq(_GROUP + "{num_bits: 8, strategy: channel, symmetric: true}"),
        ((8, None, True, "static", LINEAR),),
    ),
    "channel by its size": Case(
        gptq(_GROUP + "{group_size: -1}"), ((8, None, True, "static", LINEAR),)
    ),
    "strategy left out, order within": Case(
        gptq(_GROUP + "{num_bits: 4, group_size: 64, actorder: static}\nactorder: static"),
        ((4, 64, True, "static", LINEAR),),
    ),
    "order false within": Case(
        gptq(_GROUP + "{num_bits: 4, group_size: 64, actorder: false}\nactorder: null"),
        ((4, 64, True, None, LINEAR),),
    ),
    "two groups": Case(
        gptq(
            "config_groups:\n"
            "  first: {targets: ['re:.*up_proj'], weights: {num_bits: 4, group_size: 128}}\n"
            "  second: {targets: ['re:.*down_proj'], weights: {num_bits: 8, group_size: 64}}\n"
        ),
        ((4, 128, True, "static", ("re:.*up_proj",)), (8, 64, True, "static", ("re:.*down_proj",))),
    ),
    "to nearest": Case(
        rtn("scheme: W4A16\nignore: [lm_head]"), ((4, 128, True, None, LINEAR),), ("lm_head",), "rtn",
    ),
    "to nearest, asymmetric, in the format's name": Case(
        rtn(
            _GROUP + "{num_bits: 4, group_size: 32, symmetric: false, type: INT}\n"
            "    format: pack-quantized\nweight_observer: minmax"
        ),
        ((4, 32, False, None, LINEAR),), (), "rtn",
    ),
    "JSON": Case(
        '{"x_stage": {"y_modifiers": {"QuantizationModifier": {"scheme": "W8A16"}}}}',
        ((8, 128, True, None, LINEAR),), (), "rtn",
    ),
}  # fmt: skip
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@each_case
def test_recipes(case: Case) -> None:
    found = parse(case.text)
    assert found.kind == case.kind
    assert found.ignore == case.ignore
    resolved = [(packed(one), one.targets) for one in found.groups]
    assert [(s.bits, s.group, s.symmetric, s.actorder, t) for s, t in resolved] == list(case.groups)


@pytest.mark.peer
@each_case
def test_llm_compressor_resolves_them_alike(case: Case) -> None:
    from llmcompressor.recipe import Recipe

    modifiers: list[Any] = list(Recipe.create_instance(case.text).modifiers)
    (modifier,) = modifiers
    ours = parse(case.text)
    assert (
        type(modifier).__name__
        == {"gptq": "GPTQModifier", "rtn": "QuantizationModifier"}[ours.kind]
    )
    theirs: Any = modifier.resolved_config
    groups = []
    for scheme in theirs.config_groups.values():
        args = scheme.weights
        assert scheme.input_activations is None
        assert scheme.output_activations is None
        assert args.type == "int"
        assert not args.dynamic
        group = {"group": args.group_size, "channel": None}[args.strategy]
        order: Actorder | None = None if args.actorder is None else "static"
        assert args.actorder in (None, "static", "weight")
        scheme_ = IntScheme(args.num_bits, group, args.symmetric, order)
        groups.append((scheme_, tuple(scheme.targets)))
    assert groups == [(g.scheme, g.targets) for g in ours.groups]
    assert tuple(theirs.ignore) == ours.ignore
    if ours.kind == "gptq":
        assert modifier.dampening_frac == ours.dampening_frac
        assert modifier.block_size == ours.block_size
        assert modifier.requires_calibration_data


def test_every_field_of_a_recipe() -> None:
    assert parse(_SAVED) == Foreign(
        kind="gptq",
        groups=(Group(IntScheme(4, 32, True, "static"), ("Linear",), 5),),
        ignore=("lm_head", "re:.*mlp.gate$"),
        dampening_frac=0.001,
        block_size=64,
        line=4,
    )


def test_defaults_are_llm_compressors() -> None:
    found = parse(gptq("scheme: W4A16"))
    assert (found.dampening_frac, found.block_size) == (0.01, 128)


def test_recipes_of_older_releases() -> None:
    """Order by group, and words about memory, which 0.14 takes no more."""
    options = "scheme: W4A16\nactorder: group\nsequential_update: true\noffload_hessians: true"
    (group,) = parse(gptq(options)).groups
    assert packed(group).actorder == "group"
    (group,) = parse(gptq("scheme: W4A16\nactorder: dynamic")).groups
    assert packed(group).actorder == "group"


@pytest.mark.parametrize(
    ("text", "foreign"),
    [
        ("quant_stage: {}\n", True),
        ("quant_modifiers: {}\n", True),
        ("GPTQModifier: {}\n", True),
        ("passes: []\nquant_stage: {}\n", False),
        ("passes: []\n", False),
        ("stage: {}\n", False),
        ("? [a]\n: 1\n", False),
    ],
)
def test_which_recipes_are_llm_compressors(text: str, foreign: bool) -> None:
    assert is_foreign(compose(text, "r")) == foreign


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("scheme: FP8", [":4:", "scheme", "W4A16, W8A16", "'FP8'", "llm-compressor"]),
        ("scheme: W4A18", [":4:", "did you mean 'W4A16'?"]),
        ("scheme: W2A16", [":4:", "'W2A16'"]),
        ("scheme: FP8_DYNAMIC", [":4:", "FP8_DYNAMIC", "in a QuantizationModifier"]),
        ("scheme: {W4A16: Linear, NVFP4: Linear}", [":4:", "scheme.NVFP4", "'NVFP4'"]),
        ("scheme: W4A16\nignroe: [lm_head]", [":5:", "ignroe", "did you mean 'ignore'?"]),
        ("scheme: W4A16\npercdamp: 0.1", [":5:", "percdamp", "unknown option"]),
        ("scheme: W4A16\nsequential_targets: [X]", [":5:", "unknown option"]),
        ("scheme: W4A16\nsequential_update: false", [":5:", "sequential_update", "found False"]),
        ("targets: Linear", [":4:", "no scheme", "scheme: W4A16"]),
        ("config_groups: {}", [":4:", "no scheme"]),
        ("scheme: W4A16\n" + _GROUP + "{group_size: 32}", [":5:", "config_groups", "already"]),
        ("scheme: W4A16\nkv_cache_scheme: {num_bits: 8}", [":5:", "kv_cache_scheme", "cache's type"]),
        ("scheme: W4A16\nstart: 0", [":5:", "start", "schedule"]),
        ("scheme: W4A16\nweight_observer: mse", [":5:", "weight_observer", "'mse'", "minmax"]),
        ("scheme: W4A16\nobserver: {weights: mse}", [":5:", "observer.weights", "'mse'"]),
        ("scheme: W4A16\ntargets: []", [":5:", "has no targets"]),
        ("scheme: W4A16\ntargets:\n- Linear\n- Embedding", [":7:", "targets.1", "'Embedding'"]),
        ("scheme: W4A16\nignore:\n- lm_head\n- MLP", [":7:", "ignore.1", "'MLP'", "class"]),
        ("scheme: W4A16\nignore: [Linear]", [":5:", "ignore.0", "'Linear'"]),
        ("scheme: W4A16\ntargets: ['re:[']", [":5:", "targets.0", "not a valid regular expression"]),
        ("scheme: W4A16\ntargets: 5", [":5:", "targets", "found 5"]),
        ("scheme: W4A16\nignore: lm_head", [":5:", "ignore", "found 'lm_head'"]),
        ("scheme: W4A16\nactorder: statik", [":5:", "actorder", "found 'statik'"]),
        ("scheme: W4A16\nactorder: true", [":5:", "actorder", "found True"]),
        ("scheme: W4A16\ndampening_frac: 1.5", [":5:", "dampening_frac", "between 0 and 1"]),
        ("scheme: W4A16\ndampening_frac: null", [":5:", "dampening_frac", "found None"]),
        ("scheme: W4A16\nblock_size: 0", [":5:", "block_size", "at least 1"]),
        ("scheme: W4A16\nblock_size: many", [":5:", "block_size", "'many'"]),
        ("scheme: W4A16\nscheme: W8A16", [":5:", "'scheme' is given twice"]),
        ("scheme: !!python/name:os.system x", [":4", "not valid YAML"]),
        ("scheme: &a {W4A16: *a}", [":4:", "alias"]),
        (_GROUP + "null", [":7:", "weights", "under ignore"]),
        (_GROUP + "{num_bits: 3, group_size: 128}", [":7:", "num_bits", "4 or 8 bits, found 3"]),
        (_GROUP + "{type: float, group_size: 32}", [":7:", "weights.type", "'float'"]),
        (_GROUP + "{num_bits: 4}", [":7:", "strategy", "group (with group_size) or channel", "tensor"]),
        (_GROUP + "{strategy: block, block_structure: [128, 128]}", [":7:", "strategy", "block"]),
        (_GROUP + "{strategy: group}", [":7:", "group_size", "found None"]),
        (_GROUP + "{group_size: 0}", [":7:", "group_size", "found 0"]),
        (_GROUP + "{group_size: 32, strategy: channel}", [":7:", "group_size", "strategy: group"]),
        (_GROUP + "{group_size: 32, dynamic: true}", [":7:", "dynamic"]),
        (_GROUP + "{group_size: 32, scale_dtype: torch.float32}", [":7:", "scale_dtype"]),
        (_GROUP + "{group_size: 32, observer: mse}", [":7:", "weights.observer", "'mse'"]),
        (_GROUP + "{group_size: 32, observer_kwargs: {maxshrink: 0.2}}", [":7:", "observer_kwargs"]),
        (_GROUP + "{group_sise: 32}", [":7:", "group_sise", "did you mean 'group_size'?"]),
        (_GROUP + "{group_size: x}", [":7:", "weights.group_size", "found 'x'"]),
        (_GROUP + "{strategy: channel, actorder: group}", [":7:", "weights", "actorder group"]),
        (
            "actorder: null\n" + _GROUP + "{group_size: 32, actorder: static}",
            [":8:", "weights.actorder", "the modifier's own actorder is None"],
        ),
        (
            _GROUP + "{group_size: 32}\n    input_activations: {num_bits: 8}",
            [":8:", "input_activations", "only weights can be quantized"],
        ),
        (
            _GROUP + "{group_size: 32}\n    output_activations: {num_bits: 8}",
            [":8:", "output_activations"],
        ),
        (
            _GROUP + "{group_size: 32}\n    format: int-quantized",
            [":8:", "format", "pack-quantized", "'int-quantized'"],
        ),
        (_GROUP + "{group_size: 32}\n    target: x", [":8:", "target", "did you mean 'targets'?"]),
        ("config_groups:\n  g:\n    weights: {group_size: 32}", [":5:", "config_groups.g", "required"]),
    ],
)  # fmt: skip
def test_what_qconvert_does_not_do_is_refused(options: str, says: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(gptq(options))
    message = str(caught.value)
    assert message.startswith("r:")
    assert "\n" not in message
    for part in says:
        assert part in message


_Y = "x_stage:\n  y_modifiers:\n    "


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "GPTQModifier: {scheme: W4A16}\n",
            ["r:1", "ends in _stage", "quant_stage: quant_modifiers:"],
        ),
        ("quant_modifiers:\n  GPTQModifier: {scheme: W4A16}\n", ["r:1", "'quant_modifiers'"]),
        ("x_stage:\n  run_type: oneshot\n  y_modifiers: {}\n", ["r:2", "'run_type'", "_modifiers"]),
        ("args: {a: 1}\nx_stage: {}\n", ["r:1", "'args'"]),
        ("x_stage: {}\n", ["r:1", "no modifier"]),
        ("x_stage: {y_modifiers: {}}\n", ["r:1", "no modifier"]),
        ("x_stage: 5\n", ["r:1", "expected a mapping"]),
        ("x_stage:\n  y_modifiers: [GPTQModifier]\n", ["r:2", "expected a mapping"]),
        (_Y + "GPTQModifier:\n", ["r:3", "expected a mapping"]),
        (
            _Y + "SmoothQuantModifier: {}\n    GPTQModifier: {}\n",
            ["r:3", "'SmoothQuantModifier'", "run this recipe with llm-compressor"],
        ),
        (_Y + "AWQModifier: {}\n", ["r:3", "'AWQModifier'"]),
        (_Y + "GPTQModifer: {}\n", ["r:3", "did you mean 'GPTQModifier'?"]),
        ("x_stage: {}\nx_stage: {}\n", ["r:2", "'x_stage' is given twice"]),
        (
            _Y + "QuantizationModifier:\n      block_size: 128\n",
            ["r:4", "QuantizationModifier.block_size", "unknown option"],
        ),
        (_Y + "QuantizationModifier:\n      yes: 128\n", ["r:4", "QuantizationModifier"]),
    ],
)
def test_recipes_of_another_shape_are_refused(text: str, says: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(text)
    assert "\n" not in str(caught.value)
    for part in says:
        assert part in str(caught.value)


@pytest.mark.peer
@pytest.mark.parametrize(
    "options",
    [
        "scheme: W4A18",
        "scheme: W4A16\nignroe: [lm_head]",
        "scheme: W4A16\nignore: lm_head",
        "scheme: W4A16\ntargets: 5",
        "scheme: W4A16\nblock_size: many",
        _GROUP + "{strategy: group}",
        _GROUP + "{group_size: 32, strategy: channel}",
        _GROUP + "{group_sise: 32}",
        "actorder: null\n" + _GROUP + "{group_size: 32, actorder: static}",
        "scheme: W4A16\n" + _GROUP + "{group_size: 32}",
    ],
)
def test_what_llm_compressor_refuses_is_refused(options: str) -> None:
    from llmcompressor.recipe import Recipe

    text = gptq(options)

    def theirs() -> Any:
        (modifier,) = list[Any](Recipe.create_instance(text).modifiers)
        return modifier.resolved_config

    with pytest.raises(ValueError, match=r"."):
        theirs()
    with pytest.raises(RecipeError):
        parse(text)


# --- As a recipe of ours -------------------------------------------------------------------------

_EXPERTS = "re:.*[.]mlp[.]experts[.].*"


def test_rounding_becomes_the_pass() -> None:
    text = below(
        "QuantizationModifier", f"targets: ['{_EXPERTS}', a.b]\nscheme: W8A16\nignore: [c.d]"
    )
    assert parse_recipe(text, "r").passes == (
        ExpertsToW4A16(
            bits=8, group_size=128, symmetric=True, actorder=None,
            targets=(_EXPERTS, r"re:a\.b$"), ignore=(r"re:c\.d$",), shared_experts="named",
        ),
    )  # fmt: skip


def test_gptq_becomes_a_calibrated_pass() -> None:
    options = f"targets: ['{_EXPERTS}']\nscheme: W4A16\ndampening_frac: 0.02\nblock_size: 64"
    given = {"data": "x.txt", "samples": 3, "experts": "all"}
    asked = Calibration("x.txt", samples=3, experts="all", dampening_frac=0.02, block_size=64,
                        solver="llmcompressor")  # fmt: skip
    step = ExpertsToW4A16(bits=4, group_size=128, symmetric=True, actorder="static",
                          targets=(_EXPERTS,), calibrate=asked, shared_experts="named")  # fmt: skip
    assert parse_recipe(gptq(options), "r", given).passes == (step,)
    # What is said on the command line is said last.
    given = {**given, "block_size": 32}
    step = replace(step, calibrate=replace(asked, block_size=32))
    assert parse_recipe(gptq(options), "r", given).passes == (step,)


def test_groups_of_one_scheme_are_one() -> None:
    text = below("QuantizationModifier", "scheme: {W4A16: ['re:.*up_proj']}\nignore: [x]")
    two = text.replace("['re:.*up_proj']", "['re:.*up_proj'], w4a16: ['re:.*down_proj']")
    assert two != text
    (step,) = parse_recipe(two, "r").passes
    assert isinstance(step, ExpertsToW4A16)
    assert step.targets == ("re:.*up_proj", "re:.*down_proj")


_SCHEMES: Mapping[str, Pass] = {
    "FP8_DYNAMIC": ToFp8("compressed-tensors", None),
    "FP8_BLOCK": ToFp8("compressed-tensors", 128),
    "W8A8": ToInt8(),
    "INT8": ToInt8(),
    "NVFP4A16": ToNvfp4("compressed-tensors", weight_only=True),
}


@pytest.mark.parametrize("scheme", _SCHEMES)
def test_schemes_of_other_passes(scheme: str) -> None:
    asked: Any = _SCHEMES[scheme]
    given = {"targets": ("re:.*attn.*",), "ignore": (r"re:lm_head$",), "shared_experts": "named"}
    options = f"targets: ['re:.*attn.*']\nignore: [lm_head]\nscheme: {scheme}"
    assert parse_recipe(rtn(options), "r").passes == (replace(asked, **given),)


@pytest.mark.peer
@pytest.mark.parametrize("scheme", _SCHEMES)
def test_schemes_as_compressed_tensors_states_them(scheme: str) -> None:
    """A preset, written out as llm-compressor saves it, is the same pass."""
    from compressed_tensors.quantization import preset_name_to_scheme

    stated = preset_name_to_scheme(scheme, ["re:.*attn.*"]).model_dump(mode="json")
    whole = json.dumps({"config_groups": {"group_0": stated}, "ignore": ["lm_head"]})
    by_name = rtn(f"targets: ['re:.*attn.*']\nignore: [lm_head]\nscheme: {scheme}")
    text = f'{{"x_stage": {{"y_modifiers": {{"QuantizationModifier": {whole}}}}}}}'
    assert parse_recipe(text, "r").passes == parse_recipe(by_name, "r").passes


def test_a_mixture_is_a_pass_for_each_scheme() -> None:
    """Of one modifier, and of two, of which the calibrated one comes first."""
    rounded = rtn(
        "ignore: [lm_head]\nscheme: {FP8_DYNAMIC: ['re:.*attn.*'], W4A16: ['re:.*mlp.*']}"
    )
    first, second = parse_recipe(rounded, "r").passes
    assert isinstance(first, ToFp8)
    assert isinstance(second, ExpertsToW4A16)
    assert (first.targets, second.targets) == (("re:.*attn.*",), ("re:.*mlp.*",))
    two = (
        "x_stage:\n  y_modifiers:\n"
        "    QuantizationModifier: {scheme: FP8_DYNAMIC, targets: ['re:.*attn.*']}\n"
        "    GPTQModifier: {scheme: W4A16, targets: ['re:.*mlp.*']}\n"
    )
    passes = parse_recipe(two, "r", {"data": "x.txt"}).passes
    assert [type(step) for step in passes] == [ExpertsToW4A16, ToFp8]


def test_a_name_is_that_module_alone() -> None:
    """Ours take the end of a name as well; llm-compressor and compressed-tensors do not."""
    names = [
        "model.layers.1.mlp.gate",
        "model.layers.11.mlp.gate",
        "gate",
        "model.layersX1.mlp.gate",
    ]
    for name in names:
        assert [n for n in names if matches(n, (pattern_of(name),))] == [name]
    assert pattern_of("Linear") == "Linear"
    assert pattern_of("re:a") == "re:a"


_ALL = "scheme: W4A16\nignore: [lm_head]"


@pytest.mark.parametrize(
    ("text", "data", "says"),
    [
        (rtn("scheme: W4A16"), None, ["r:4", "lm_head", "ignore: [lm_head]"]),
        (rtn("scheme: {W4A16: 're:lm'}"), None, ["r:4", "lm_head"]),
        (rtn("scheme: {W4A16: lm_head}"), None, ["r:4", "lm_head"]),
        (gptq(_ALL), None, ["r:4", "--data FILE"]),
        (gptq(_ALL), {}, ["r:4", "--data FILE"]),
        (rtn(_ALL), {"data": "x.txt"}, ["r:4", "needs no data"]),
        (gptq(_ALL), {"data": "x.bin"}, ["r:4", "x.bin: expected a name that ends in"]),
    ],
)  # fmt: skip
def test_recipes_that_are_no_pass(text: str, data: dict[str, Any] | None, says: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, "r", data)
    assert "\n" not in str(caught.value)
    for part in says:
        assert part in str(caught.value)


def test_data_belongs_to_recipes_that_want_it() -> None:
    with pytest.raises(RecipeError, match="option of the pass"):
        parse_recipe("passes: []\n", "r", {"data": "x.txt"})


def test_a_recipe_runs_as_it_is(tmp_path: Path) -> None:
    """256 columns are whole groups of 64; attention and shared experts stay FP8."""
    write_sample(tmp_path / "source")
    text = below(
        "QuantizationModifier",
        f"config_groups:\n  g:\n    targets: ['{_EXPERTS}']\n"
        "    weights: {num_bits: 4, group_size: 64, strategy: group, symmetric: true}\n"
        "ignore: ['re:.*gate$']",
    )
    (tmp_path / "recipe.yaml").write_text(text)
    ran("run", tmp_path / "recipe.yaml", tmp_path / "source", tmp_path / "a")
    flags = ("--rtn", "--group-size", "64")
    ran("w4a16", tmp_path / "source", tmp_path / "b", *flags)
    made = read_tensors(tmp_path / "a")
    assert made == read_tensors(tmp_path / "b")
    assert (tmp_path / "a" / "config.json").read_bytes() == (
        tmp_path / "b" / "config.json"
    ).read_bytes()
    packed = made["model.layers.0.mlp.experts.0.down_proj.weight_packed"]
    assert packed.shape == (256, 256 // 8)


# --- Shared experts -------------------------------------------------------------------------------

_SHARED = "re:.*shared_experts?[.].*proj$"


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
@pytest.mark.parametrize(
    ("targets", "ignore", "taken"),
    [
        (["Linear"], [], True),
        ([_EXPERTS, _SHARED], [], True),
        (["re:.*(down|gate|up)_proj$"], ["re:.*self_attn.*"], True),
        (["Linear"], [_SHARED], False),
        ([_EXPERTS], [], False),
    ],
)
def test_shared_experts_are_quantized_as_the_recipe_names_them(
    family: str, targets: list[str], ignore: list[str], taken: bool, tmp_path: Path
) -> None:
    """All of the model's own where a target matches them and no entry of ignore does, else none, as in
    llm-compressor: it knows nothing of runtimes that fuse them."""
    source = published(family).write(tmp_path / "source")
    left = ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$", *ignore]
    options = f"targets: {json.dumps(targets)}\nscheme: W4A16\nignore: {json.dumps(left)}"
    recipe = parse_recipe(rtn(options), "r")
    plan = Plan.identity(open_source(source))
    shared = {
        name.removesuffix(".weight")
        for name in plan.tensors
        if re.search(r"shared_experts?\..*proj\.weight$", name)
        and not plan.family.is_mtp(name, plan.role_index.dims)
    }
    assert shared
    made = run_passes(plan, recipe.passes)
    packed = {name for name in shared if f"{name}.weight_packed" in made.tensors}
    assert packed == (shared if taken else set())
    left_out = tuple(made.config["quantization_config"]["ignore"])
    assert not any(matches(name, left_out) for name in packed)


def test_kept_shared_experts_are_refused_with_the_reason(tmp_path: Path) -> None:
    source = published("glm4_moe").write(tmp_path / "source")
    step = ExpertsToW4A16(targets=(_EXPERTS, _SHARED), shared_experts="keep")
    with pytest.raises(PlanError, match="shared_experts says keep: leave this target out"):
        run_passes(Plan.identity(open_source(source)), [step])
