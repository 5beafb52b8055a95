"""Model cards: what the Hub reads of them, what they say, and what they leave alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import headers
import pytest
import xxhash
from checkpoints import bf16_moe, copied, fp8_moe, run_cli, tree
from hypothesis import given
from hypothesis import strategies as st
from loaders.published import published
from loopback_hub import judged
from sampled import sampled

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import CheckpointError
from qconvert.hub.card import card, front, split_front_matter
from qconvert.hub.card.front import base_of
from qconvert.hub.readme import account_for_readme, new_card, with_card
from qconvert.passes.draft_forms import RelabelDraft
from qconvert.passes.stages import split_plan
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.pass_options import options_of, options_with
from qconvert.plan.plan import Plan, described, run_passes
from qconvert.recipe.recipe import builtin_recipes, load_recipe
from qconvert.run.executor import execute
from qconvert.run.folder.prepare import prepare
from qconvert.run.folder.staging import manifest_of
from qconvert.run.work.options import RunOptions
from qconvert.runtimes.serving import Loading
from qconvert.samples.request import Calibration
from qconvert.validation import judgement
from qconvert.validation.findings import Finding, Measure
from qconvert.validation.runner import Report, validate_folder

BASE = "org/Model-8B"
SOURCE: dict[str, Any] = {
    "license": "other",
    "license_name": "deepseek",
    "license_link": "https://example.org/license",
    "language": ["en", "zh"],
    "pipeline_tag": "text-generation",
    "library_name": "transformers",
    "base_model": "org/Model-8B-Base",
    "tags": ["conversational", "fp8"],
    "model-index": [{"name": "its own results"}],
}
# The published model that each recipe is tried on; any other recipe gets the first.
_MODELS = {
    "dequant-fp8": "qwen3-30b-a3b-fp8",
    "dequant-fp8-no-mtp": "qwen3.5-35b-a3b-fp8",
    "kimi-k2-amxint4": "kimi-k2-thinking",
    "glm-4.5-amxint8": "glm-4.5-air",
    "glm-4.5-air-gptq": "glm-4.5-air",
    "glm-4.5-air-w4a16-tp4": "glm-4.5-air",
    "qwen3-next-amxint8": "qwen3-next-80b-a3b",
    "qwen3-next-w4a16": "qwen3-next-80b-a3b",
    "qwen3-next-w8a16": "qwen3-next-80b-a3b",
    "qwen3-next-to-qwen3.5": "qwen3-next-80b-a3b",
    "qwen3.5-fp8-fused-sglang": "qwen3.5-27b-fp8",
    "qwen3.5-fp8-to-bf16-fused": "qwen3.5-27b-fp8",
}


def front_of(text: str) -> dict[str, Any]:
    return split_front_matter(text)[0]


def manifest(**changes: Any) -> dict[str, Any]:
    return {
        "identity": {"qconvert": "0.1.0"},
        "passes": [{"name": "dequant", "options": {}, "matched": 20, "expected": 20}],
        "lossy_steps": {"rounds fp8 x scale to bf16": 20},
        "dropped": {},
        "dropped_files": {},
        "bytes": {"in": 1_904, "out": 2_672, "dropped": 0},
        **changes,
    }


AMX: dict[str, Any] = {
    "method": "AMXINT4", "numa": 2, "rounding": "peer", "hidden_size": 4096, "experts": 128,
    "intermediate_size": 1408, "layers": [1, 2, 45],
}  # fmt: skip
FP8 = {"model_type": "qwen3_moe", "quantization_config": {"quant_method": "fp8"}}
BF16 = {"model_type": "qwen3_moe"}


# --- Every recipe ---------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", sampled(sorted(builtin_recipes()), 5))
def test_the_card_of_every_recipe(recipe: str, tmp_path: Path) -> None:
    """Without a warning from the client that reads it, and with the base model's name."""
    from huggingface_hub import ModelCard

    drafts = recipe.startswith("draft")
    model = headers.few(_MODELS.get(recipe, "qwen3.5-35b-a3b"))
    if drafts:
        model = headers.form("eagle3-llama-3.1-8b")
    headers.write_sparse(model, tmp_path, shards=1)
    readme = "---\nlicense: apache-2.0\nlanguage:\n- en\n---\n# The model\n"
    (tmp_path / "README.md").write_text(readme)
    steps = load_recipe(recipe).passes
    if recipe.startswith("prepare"):  # its sources are what another recipe makes
        steps = (*load_recipe("qwen3.5-moe-nvfp4").passes, *steps)
    if recipe == "amx-4-numa":
        steps = (*load_recipe("qwen3.5-moe-amxint4").passes, *steps)
    if drafts:
        steps = (RelabelDraft("speculators", BASE), *steps)
    plan = run_passes(Plan.identity(Checkpoint.open(tmp_path)), steps)
    made = with_card(plan, BASE)
    verdict = judgement.judged([prepare(made, RunOptions(jobs=1))], plan.checkpoint)
    assert [finding for one in verdict for finding in one.added] == []
    text = made.new_files["README.md"]
    assert judged(text) == ([], [])
    read = ModelCard(text, ignore_metadata_errors=False)
    data: dict[str, Any] = read.data.to_dict()  # type: ignore[no-untyped-call]
    assert data["base_model"] == BASE
    assert data["license"] == "apache-2.0"
    quantized = "amx" in made.facts or "quantization_config" in made.config
    assert data.get("base_model_relation") == ("quantized" if quantized else None)
    assert f"https://huggingface.co/{BASE}" in text
    assert data["pipeline_tag"] in ("text-generation", "image-text-to-text")
    assert text.count("<!-- qconvert:") == 6
    for step in plan.log:
        assert f"| `{step.name}` | " in text
    assert len(text) < 20_000
    assert str(tmp_path) not in text
    assert "README.md" not in made.side_files


def test_the_manifest_is_what_the_executor_writes(tmp_path: Path) -> None:
    plan = run_passes(
        Plan.identity(Checkpoint.open(fp8_moe().write(tmp_path / "source"))),
        load_recipe("dequant-fp8").passes,
    )
    found = manifest_of(prepare(plan, RunOptions(jobs=1)))
    found.pop("identity")
    assert found == described(plan)


# --- Front matter ---------------------------------------------------------------------------------


def test_what_is_the_sources_and_still_holds() -> None:
    front = front_of(card(manifest(), BF16, SOURCE, base_model=BASE))
    assert front == {
        "base_model": BASE,
        "license": "other",
        "license_name": "deepseek",
        "license_link": "https://example.org/license",
        "language": ["en", "zh"],
        "pipeline_tag": "text-generation",
        "library_name": "transformers",
        "tags": ["conversational", "qconvert"],
    }


@pytest.mark.parametrize(
    ("changes", "config", "relation", "tags", "library"),
    [
        ({}, BF16, None, ["qconvert"], "transformers"),
        ({}, FP8, "quantized", ["qconvert", "fp8"], "transformers"),
        ({}, {"text_config": FP8}, "quantized", ["qconvert", "fp8"], "transformers"),
        ({"amx": AMX}, BF16, "quantized", ["qconvert", "ktransformers", "amxint4"], "ktransformers"),
        (
            {"passes": [{"name": "fuse", "options": {"consumer": "sglang==0.5.23"},
                         "matched": 3, "expected": 3}]},
            FP8, "quantized", ["qconvert", "fp8"], "transformers",
        ),
    ],
)  # fmt: skip
def test_what_the_hub_lists_it_as(
    changes: dict[str, Any],
    config: dict[str, Any],
    relation: str | None,
    tags: list[str],
    library: str,
) -> None:
    text = card(manifest(**changes), config, {"library_name": "transformers"}, base_model=BASE)
    front = front_of(text)
    assert front.get("base_model_relation") == relation
    assert front["tags"] == tags
    assert front["library_name"] == library
    assert judged(text) == ([], [])


def test_a_vision_tower_takes_images() -> None:
    config = {**BF16, "vision_config": {"depth": 2}}
    assert front_of(card(manifest(), config, {}))["pipeline_tag"] == "image-text-to-text"
    assert front_of(card(manifest(), BF16, {}))["pipeline_tag"] == "text-generation"


def test_without_a_base_model_none_is_made_up() -> None:
    text = card(manifest(), FP8, {"base_model": "/data/models/mine"})
    assert not {"base_model", "base_model_relation"} & front_of(text).keys()
    assert "a checkpoint without a known repo" in text
    assert judged(text) == ([], [])


@pytest.mark.parametrize("value", [12, None, {"a": 1}, [1, 2], [], ""])
def test_front_matter_of_the_source_that_is_no_text(value: Any) -> None:
    source = dict.fromkeys(("license", "language", "tags", "pipeline_tag"), value)
    assert judged(card(manifest(), BF16, source, base_model=BASE)) == ([], [])


SNAPSHOT = Path("/hub/models--org--A/snapshots/0")


@pytest.mark.parametrize(
    ("root", "front", "base"),
    [
        (SNAPSHOT, {"base_model": "org/B"}, "org/A"),
        (Path("/data"), {"base_model": "org/B"}, "org/B"),
        (Path("/data"), {"base_model": ["org/B", "org/D"]}, "org/B"),
        (Path("/data"), {"base_model": "/data/B"}, None),
        (Path("/data"), {"base_model": "../B"}, None),
        (Path("/data"), {"base_model": "a/b/c"}, None),
        (Path("/data/org/A"), {}, None),
        (Path("/data"), {"base_model": 7}, None),
    ],
)
def test_the_base_model_is_never_a_path(
    root: Path, front: dict[str, Any], base: str | None
) -> None:
    assert base_of(root, front) == base


def test_a_config_that_names_a_local_path_names_no_base_model(tmp_path: Path) -> None:
    """`checkpoints/final` could be a repo's id, and is where somebody's training wrote."""
    model = bf16_moe()
    model.config["_name_or_path"] = "checkpoints/final"
    made = with_card(Plan.identity(Checkpoint.open(model.write(tmp_path / "source"))))
    text = made.new_files["README.md"]
    assert "base_model" not in front_of(text)
    assert "checkpoints/final" not in text


@pytest.mark.parametrize("word", ["no", "NO", "off", "yes", "on", "n", "y"])
def test_a_word_that_yaml_1_1_takes_for_a_bool_stays_a_word(word: str) -> None:
    for spelled, value in ((word, word), (f"[en, {word}]", ["en", word])):
        source = front_of(f"---\nlicense: mit\nlanguage: {spelled}\n---\n")
        text = card(manifest(), BF16, source, base_model=BASE)
        assert front_of(text)["language"] == value
        assert judged(text) == ([], [])  # PyYAML's own reader, of YAML 1.1
        assert card(manifest(), BF16, {}, None, text, base_model=BASE) == text


def test_true_and_false_are_bools() -> None:
    text = "---\na: true\nb: False\nc: truer\nd: 'true'\n---\n"
    assert front_of(text) == {"a": True, "b": False, "c": "truer", "d": "true"}


def test_a_language_that_is_none_is_judged_an_error() -> None:
    assert judged("---\nlanguage: no\n---\n")[0] == [
        '"language" must be a string or a list of strings'
    ]


def test_one_tag_without_a_list_is_kept() -> None:
    first = "---\ntags: handmade\n---\n# Mine\n"
    tags = front_of(card(manifest(), BF16, {"tags": "theirs"}, None, first))["tags"]
    assert tags[:2] == ["handmade", "theirs"]


# --- What is kept ---------------------------------------------------------------------------------


def test_what_is_written_by_hand_is_kept() -> None:
    first = card(manifest(), BF16, SOURCE, base_model=BASE)
    front, body = split_front_matter(first)
    front["license"], front["mine"] = "mit", {"a": [1]}
    front["tags"].append("my-tag")
    import yaml

    before, after = "Before all of it.\n\n", "\n## Mine\n\nAfter *all* of it.\n"
    between = "\nin between\n"
    body = body.replace("<!-- qconvert:serve begin", f"{between}\n<!-- qconvert:serve begin")
    edited = f"---\n{yaml.safe_dump(front)}---\n{before}{body}{after}"
    report = Report(about={"level": "full", "against": "x"}, proved=["a thing"])
    second = card(manifest(lossy_steps={}), BF16, {}, report, edited)
    for text in (before.strip(), between.strip(), after.strip()):
        assert text in second
    assert front_of(second) == {**front, "tags": front["tags"]}
    assert "- lossy steps: none" in second
    assert "rounds fp8" not in second
    assert "- a thing" in second
    assert second.index("in between") < second.index("How to serve it")
    assert second.count("<!-- qconvert:") == 6
    assert card(manifest(lossy_steps={}), BF16, {}, report, second) == second


def test_a_base_model_that_is_said_goes_first() -> None:
    first = card(manifest(), BF16, SOURCE, base_model=BASE)
    assert front_of(card(manifest(), BF16, {}, None, first))["base_model"] == BASE
    other = card(manifest(), BF16, {}, None, first, base_model="org/Other")
    assert front_of(other)["base_model"] == "org/Other"
    assert (
        f"{BASE}"
        not in split_front_matter(other)[1]
        .partition("qconvert:serve")[0]
        .partition("qconvert:made")[2]
    )


def test_a_readme_without_a_card_gets_one_below_its_heading() -> None:
    text = card(manifest(), BF16, {}, None, "# My model\n\nIts story.\n", base_model=BASE)
    body = split_front_matter(text)[1]
    assert body.startswith("# My model\n\n<!-- qconvert:made begin -->")
    assert body.rstrip().endswith("Its story.")


MARKS = [f"<!-- qconvert:{n} {w} -->" for n in ("made", "serve", "proof") for w in ("begin", "end")]
LINES = st.one_of(
    st.text(st.characters(exclude_characters="\x00\r\n", exclude_categories=["Cs"]), max_size=20),
    st.sampled_from([*MARKS, "# Heading", "", "---"]),
)


@given(st.lists(LINES, max_size=12).map("\n".join))
def test_any_text_is_kept_and_cards_do_not_grow(text: str) -> None:
    """Lines keep their order, whatever stands in them, but for what stands between a pair of marks;
    blank lines at the seams may go."""
    if re.match(r"\ufeff?---[ \t]*\n", text):
        return
    first = card(manifest(), BF16, {}, None, text, base_model=BASE)
    assert card(manifest(), BF16, {}, None, first, base_model=BASE) == first
    kept = text
    for name in ("made", "serve", "proof"):
        begin, end = (re.escape(f"<!-- qconvert:{name} {which} -->") for which in ("begin", "end"))
        inside = r"(?:(?!<!-- qconvert:)(?s:.))*"
        kept = re.sub(f"{begin}{inside}{end}", "", kept, count=1)
    found = iter(split_front_matter(first)[1].split("\n"))
    lines = [line for line in kept.strip("\n").split("\n") if line.strip()]
    assert all(any(line in there for there in found) for line in lines)


@pytest.mark.parametrize(
    "text", ["---\nlicense: [mit\n---\n# A\n", "---\n- a\n- b\n---\n", "---\nx: 2020-13-45\n---\n"]
)
def test_front_matter_that_cannot_be_read(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"README\.md: its front matter"):
        card(manifest(), BF16, {}, None, text)


# --- What it says ---------------------------------------------------------------------------------


def report_of(**changes: Any) -> Report:
    return replace(Report(about={"folder": "/data/x", "level": "full"}), **changes)


def test_what_was_proved_and_what_was_not() -> None:
    measures = [
        Measure("a", "up_proj", 0, 0, "amxint4", 10, 0.1, 0.2, 1.0),
        Measure("b", "up_proj", 0, 1, "amxint4", 10, 0.01, 0.2, 1.0),
        Measure("c", "q_proj", 0, None, "bf16", 10, 0.0, 0.0, 1.0),
        Measure("d", "q_proj", 0, None, "fp8", 10, 0.1, 0.0, 1.0),
        Measure("e", "q_proj", 0, None, "fp8", 10, float("inf"), 1.0, 0.0),
    ]
    report = report_of(
        findings=[Finding("QC063", "warning", "/data/x/t.weight", "is `far` off")],
        proved=["kt-kernel computes the same"],
        read=["fused in 1 group, says qconvert.json", "from /data/source/a"],
        not_checked=["kernels (give --kernels)"], measures=measures,
    )  # fmt: skip
    report.about["against"] = "/data/source"
    text = card(manifest(amx=AMX), BF16, {}, report, base_model=BASE)
    for line in (
        "`qconvert validate` at level full, with its source: 0 errors, 1 warning.",
        "- warning QC063: DIR/t.weight: is \\`far\\` off",
        "- kt-kernel computes the same",
        "- fused in 1 group, says qconvert.json",
        "- kernels (give --kernels)",
        "- amxint4: 2 matrices, 20.0 dB SQNR or more",
        "- bf16: 1 matrix, all equal",
        "- fp8: 2 matrices, some without anything to compare",
        "- from SRC/a",
    ):
        assert line in text, line
    assert "/data" not in text
    assert "although" not in text


def test_many_findings_are_counted_and_errors_come_first() -> None:
    many = [Finding("QC001", "warning", f"w{n}", "odd") for n in range(30)]
    report = report_of(findings=[*many, Finding("QC002", "error", "e", "bad")])
    text = card(manifest(), BF16, {}, report, forced=True)
    listed = [line for line in text.splitlines() if line.startswith(("- warning", "- error"))]
    assert listed[0] == "- error QC002: e: bad"
    assert len(listed) == 20
    assert "... and 11 more findings." in text
    assert "**Uploaded although it failed validation.**" in text


def test_nothing_checked_is_said_so() -> None:
    assert "Nothing is noted here before an upload: `qconvert validate DIR" in card(
        manifest(), BF16, {}
    )


@pytest.mark.parametrize(
    ("changes", "config", "said"),
    [
        ({"amx": AMX}, BF16, ["--kt-method AMXINT4", "--kt-threadpool-count 2", "layers 1 to 45",
                              "the repo this was made from", "sglang-kt"]),
        ({"amx": AMX, "pair": {"id": "0", "side": "cpu"}}, BF16,
         ["the folder made together with this one"]),
        ({"pair": {"id": "0", "side": "gpu"}}, FP8, ["This is the GPU side"]),
        ({"passes": [{"name": "fuse", "options": {"consumer": "sglang"}, "matched": 1,
                      "expected": None}]}, FP8,
         ["It was made for sglang.", "whether sglang 0.5.23",
          "python -m sglang.launch_server --model-path REPO", "| any |"]),
        ({"passes": [{"name": "fuse", "options": {"consumer": "vllm"}, "matched": 1,
                      "expected": 1}]}, FP8, ["    vllm serve REPO"]),
        ({"passes": [{"name": "fuse", "options": {"consumer": "transformers"}, "matched": 1,
                      "expected": 1}]}, FP8, ['from_pretrained("REPO")']),
        ({"passes": []}, BF16, ["All tensors are unchanged.", "## How to serve it"]),
        ({"dropped": {"drop: what=mtp": ["a", "b"]}, "dropped_files": {"x.json": "amx: stale"}}, BF16,
         ["dropped: 2 tensors, by the rule `drop: what=mtp`", "the file `x.json`"]),
        ({"stage": {"number": 1, "of": 4, "layers": [15, 30],
                    "environment": {"SGLANG_PP_LAYER_PARTITION": "15,15,15,16"}}}, BF16,
         ["pipeline stage 1 of 4, counted from 0, layers 15 to 29",
          "`SGLANG_PP_LAYER_PARTITION=15,15,15,16`"]),
        ({"calibration": {"data": "0f", "samples": 8, "length": 64, "solver": "best"}}, FP8,
         ["- calibrated by solver best on at most 8 samples of text, each of up to 64 tokens (xxh3-12"]),
        ({"calibration": {"synthetic": True}}, FP8, ["samples of random token ids"]),
        ({"tp_sizes": []}, FP8, ["whole groups, or blocks, of its quantized weights at no size."]),
        ({"passes": [{"name": "w4a16", "matched": 1, "expected": 1,
                      "options": options_of(ExpertsToW4A16(scales="search"))}]}, BF16,
         ["- some scales are negative. transformers, compressed-tensors, kt-kernel, and vLLM"]),
    ],
)  # fmt: skip
def test_how_it_was_made_and_is_served(
    changes: dict[str, Any], config: Mapping[str, Any], said: list[str]
) -> None:
    text = card(manifest(**changes), config, {}, base_model=BASE)
    for words in said:
        assert words in text, words


@pytest.mark.parametrize(
    ("step", "signed"),
    [
        (ExpertsToW4A16(scales="search"), True),
        (ExpertsToW4A16(scales="search", packing="gptq"), True),
        (ExpertsToW4A16(scales="search", signs="positive"), False),
        (ExpertsToW4A16(scales="search", symmetric=False), False),
        (ExpertsToW4A16(scales="search", bits=8), False),
        (ExpertsToW4A16(), False),
        (ExpertsToW4A16(calibrate=Calibration(synthetic=True)), True),
        (ExpertsToW4A16(calibrate=Calibration(synthetic=True), symmetric=False), False),
        (ExpertsToW4A16(calibrate=Calibration(synthetic=True, signs="positive")), False),
        (ExpertsToW4A16(calibrate=Calibration(synthetic=True, scales="amax")), False),
        (ExpertsToW4A16(calibrate=Calibration(synthetic=True, solver="llmcompressor")), False),
    ],
)
def test_which_folders_may_hold_scales_below_0(step: ExpertsToW4A16, signed: bool) -> None:
    options = options_with(step, None if step.calibrate is None else "0f")
    made = {"name": "w4a16", "options": options, "matched": 1, "expected": 1}
    text = card(manifest(passes=[made]), BF16, {}, base_model=BASE)
    assert ("- some scales are negative. " in text) == signed


@pytest.mark.parametrize(
    ("family", "inner", "words", "line", "said"),
    [
        ("glm4_moe", 512, ["w4a16", "--rtn", "--shared-experts", "keep"],
         "--model-path REPO --tp-size 1 --disable-shared-experts-fusion",
         r"loads it whole with `--disable-shared-experts-fusion` at tensor parallel 1 \(\d"),
        ("qwen3_moe", 256, ["w4a16", "--rtn", "--group-size", "128"], "--model-path REPO --tp-size 1",
         r"at tensor parallel 1 \(\S+ MB a rank\), 2 \(\S+ MB a rank\), as simulated"),
        ("qwen3_next", 512, ["w4a16", "--rtn", "--asymmetric"], "",
         r"sglang 0.5.23 does not load it at any tp: .*weight\\_zero\\_point"),
    ],
)  # fmt: skip
def test_a_simulated_runtime_is_listed_as_it_loads(
    family: str, inner: int, words: list[str], line: str, said: str, tmp_path: Path
) -> None:
    """The card says of sglang what the simulator of its loader says, and no more."""
    source, out = published(family, inner=inner).write(tmp_path / "source"), tmp_path / "out"
    assert run_cli(words[0], source, out, *words[1:], "--jobs", "1").code == 0
    text = (out / "README.md").read_text()
    assert re.search(said, text)
    lines = [found for found in text.splitlines() if "sglang.launch_server" in found]
    wanted = [f"    python -m sglang.launch_server {line}"] if line else []
    assert lines == wanted
    # An upload asks again, of the finished folder, and says the same.
    assert run_cli("validate", out).code == 0
    report = validate_folder(out)
    again = new_card(out, report, None)
    assert [found for found in again.splitlines() if "sglang.launch_server" in found] == wanted
    assert re.search(said, again)


def test_the_smallest_size_is_in_the_launch_line() -> None:
    said = {
        "sglang": Loading(
            "sglang", "0.5.23", {"": {4: 5_000_000, 8: 2_500_000}}, "not at tp 1: why"
        )
    }
    text = card(manifest(passes=[]), BF16, {}, said=said)
    assert "--model-path REPO --tp-size 4\n" in text
    assert "at tensor parallel 4 (5.0 MB a rank), 8 (2.5 MB a rank), as simulated" in text
    assert "sglang 0.5.23 does not load it at tp 1: why." in text
    none = {"sglang": replace(said["sglang"], sizes={}, draft="does not load its draft at tp 1: x")}
    text = card(manifest(passes=[]), BF16, {}, said=none)
    assert "launch_server" not in text
    assert text.index("Not known for ") < text.index("vllm serve REPO")
    assert "sglang 0.5.23 does not load its draft at tp 1: x." in text


def test_a_stage_that_holds_what_another_builds_is_served(tmp_path: Path) -> None:
    """The last stage of GLM keeps embeddings, for the draft."""
    source = published("glm4_moe").write(tmp_path / "source")
    done = run_cli(
        "split", source, tmp_path / "out", "--pp", "2,1", "--for", "sglang", "--jobs", "1"
    )
    assert done.code == 0, done.err
    for number in range(2):
        text = (tmp_path / "out" / f"stage-0{number}-of-02" / "README.md").read_text()
        line = (
            "sglang.launch_server --model-path REPO --tp-size 1 --pp-size 2 --nnodes 2 --node-rank"
        )
        assert f"=2,1 python -m {line} {number} --dist-init-addr FIRST:5000\n" in text
        assert "loads it whole at tensor parallel 1 (" in text
        assert "It was made for sglang, with REPO as" in text
        assert "vllm" not in text.partition("## How to serve it")[2].partition("<!--")[0]
    said = [line for line in done.err.splitlines() if line.startswith("loads ")]
    assert said, done.err
    assert all("sglang 0.5.23 (H200)" in line for line in said), said


def test_a_stage_is_served_by_vllm_on_a_machine_of_its_own(tmp_path: Path) -> None:
    """The first one answers requests."""
    source = published("qwen3_moe").write(tmp_path / "source")
    words = ("--pp", "1,1", "--for", "vllm", "--jobs", "1")
    assert run_cli("split", source, tmp_path / "out", *words).code == 0
    for number, last in enumerate(("", " --headless")):
        text = (tmp_path / "out" / f"stage-0{number}-of-02" / "README.md").read_text()
        line = "vllm serve REPO --tensor-parallel-size 1 --pipeline-parallel-size 2 --nnodes 2"
        assert f"=1,1 {line} --node-rank {number} --master-addr FIRST{last}\n" in text
        assert "FIRST is the name of the first machine." in text


def test_a_server_is_started_at_the_size_that_was_asked() -> None:
    """Where the runtime loads that; a manifest may be anyone's."""
    said = {"vllm": Loading("vllm", "0.33.0", {"": {1: 9, 4: 3}})}
    for tp, size in ((4, 4), (8, 1), ([4], 1), (None, 1), ("4", 1)):
        manifest = {"passes": [{"name": "fp8", "options": {"tp": tp}}]}
        line = front.command("vllm", manifest, {}, said)
        assert line == f"vllm serve REPO --tensor-parallel-size {size}"


def test_no_name_ends_a_section(tmp_path: Path) -> None:
    """Names come from folders that may be anyone's."""
    evil = "<!-- qconvert:proof end --> | `x` *y* \n# Heading"
    dropped = {f"rule {evil}": [evil]}
    report = report_of(findings=[Finding("QC001", "error", evil, evil)], proved=[evil])
    text = card(manifest(dropped=dropped), {"model_type": evil}, {}, report, base_model=BASE)
    assert text.count("<!-- qconvert:proof end -->") == 1
    assert "\n# Heading" not in text
    assert card(manifest(dropped=dropped), {"model_type": evil}, {}, report, text) == text


# --- Within a conversion --------------------------------------------------------------------------


def carded(source: Path, base: str | None = None) -> Plan:
    plan = Plan.identity(Checkpoint.open(source))
    return with_card(run_passes(plan, load_recipe("dequant-fp8").passes), base)


def test_a_conversion_writes_its_card(tmp_path: Path) -> None:
    model = fp8_moe()
    model.side_files["README.md"] = b"---\nlicense: mit\nbase_model: org/Base\n---\n# Theirs\n"
    source = model.write(tmp_path / "source")
    out = tmp_path / "out"
    execute(carded(source), out, RunOptions(jobs=1))
    text = (out / "README.md").read_text()
    assert front_of(text)["license"] == "mit"
    assert front_of(text)["base_model"] == "org/Base"
    assert "Theirs" not in text
    report = validate_folder(out, str(source))
    assert report.findings == []
    # Of the same bytes elsewhere the same is made; and what is made of it again names the same base.
    other = copied(source, tmp_path / "elsewhere" / "source")
    execute(carded(other), tmp_path / "again", RunOptions(jobs=1))
    assert tree(tmp_path / "again") == tree(out)
    execute(with_card(Plan.identity(Checkpoint.open(out))), tmp_path / "third", RunOptions(jobs=1))
    assert front_of((tmp_path / "third" / "README.md").read_text())["base_model"] == "org/Base"
    # Another base model is another result.
    assert carded(source, "org/X").fingerprint() != carded(source).fingerprint()


def test_a_broken_readme_is_no_reason_not_to_convert(tmp_path: Path) -> None:
    model = bf16_moe()
    model.side_files["README.md"] = b"---\nlicense: [mit\n---\n\xff# Theirs\n"
    source = Checkpoint.open(model.write(tmp_path / "source"))
    text = with_card(Plan.identity(source), BASE).new_files["README.md"]
    assert judged(text) == ([], [])
    assert "license" not in front_of(text)


def test_each_stage_says_which_it_is(tmp_path: Path) -> None:
    whole = Plan.identity(Checkpoint.open(bf16_moe().write(tmp_path / "source")))
    texts = [
        with_card(stage, BASE).new_files["README.md"] for stage in split_plan(whole, (1, 1), "vllm")
    ]
    assert "pipeline stage 0 of 2, counted from 0, layer 0" in texts[0]
    assert "pipeline stage 1 of 2, counted from 0, layer 1" in texts[1]
    assert ", stage 1 of 0 to 1 alone, not a whole model" in texts[1]


# --- The receipt ----------------------------------------------------------------------------------


def said_of_readme(folder: Path) -> list[Any]:
    """What the receipt says of README.md: sizes and hashes."""
    lines = map(json.loads, (folder / "qconvert.receipt.jsonl").read_bytes().splitlines())
    found = [line for line in lines if line.get("file") == "README.md" and "name" not in line]
    return [(line["nbytes"], line["xxh3"]) for line in found]


def true_of_readme(folder: Path) -> list[Any]:
    data = (folder / "README.md").read_bytes()
    return [(len(data), xxhash.xxh3_128(data).hexdigest())]


@pytest.mark.parametrize("sha256", [False, True])
def test_the_receipt_is_made_true_of_the_readme_alone(tmp_path: Path, sha256: bool) -> None:
    source = fp8_moe().write(tmp_path / "source")
    out = tmp_path / "out"
    execute(carded(source), out, RunOptions(jobs=1, sha256=sha256))
    receipt = out / "qconvert.receipt.jsonl"
    before = receipt.read_bytes()
    assert not account_for_readme(out)
    assert receipt.read_bytes() == before
    with (out / "README.md").open("a") as stream:
        stream.write("\nMine.\n")
    assert said_of_readme(out) != true_of_readme(out)
    assert account_for_readme(out)
    assert said_of_readme(out) == true_of_readme(out)
    assert validate_folder(out).findings == []
    changed = [
        (a, b)
        for a, b in zip(before.splitlines(), receipt.read_bytes().splitlines(), strict=True)
        if a != b
    ]
    assert [b'{"receipt"' in line for _, line in changed] == [False, True]
    assert b'"file":"README.md"' in changed[0][1]
    assert (b'"sha256"' in changed[0][1]) == sha256
    (out / "README.md").write_bytes(b"")
    assert account_for_readme(out)
    assert not account_for_readme(out)


def test_a_readme_that_came_later_is_added(tmp_path: Path) -> None:
    source = fp8_moe().write(tmp_path / "source")
    plan = run_passes(Plan.identity(Checkpoint.open(source)), load_recipe("dequant-fp8").passes)
    execute(plan, tmp_path / "out", RunOptions(jobs=1))
    (tmp_path / "out" / "README.md").write_text("# Mine\n")
    assert said_of_readme(tmp_path / "out") == []
    assert account_for_readme(tmp_path / "out")
    assert said_of_readme(tmp_path / "out") == true_of_readme(tmp_path / "out")
    assert validate_folder(tmp_path / "out").findings == []
    (source / "README.md").write_text("# No receipt here\n")
    assert not account_for_readme(source)
