"""`qconvert eval` as a command: its text, its JSON, its page, and what it writes into a folder."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import calibrate_models as models
import pytest
import yaml
from checkpoints import Result, edit_json, ran, run_cli, tree

from qconvert import api
from qconvert.cli import evaluation_report as report
from qconvert.core.errors import CheckpointError
from qconvert.core.manifest_keys import parse_manifest
from qconvert.evaluate.result import Evaluation, Logits
from qconvert.hub.card import split_front_matter

W4A16 = ("--rtn", "--group-size", "32", "--jobs", "1")


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its conversion, and data."""
    folder = tmp_path_factory.mktemp("eval")
    models.saved(models.qwen3_moe(), folder / "src")
    assert run_cli("w4a16", folder / "src", folder / "made", *W4A16).code == 0
    rows = [json.dumps({"input_ids": ids.tolist()}) for ids in models.samples(3, 20)]
    (folder / "ids.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture
def made(room: Path, tmp_path: Path) -> Path:
    return shutil.copytree(room / "made", tmp_path / "made")


def evaluated(room: Path, repo: Path, *more: str | Path) -> Result:
    return ran(
        "eval", repo, "--against", room / "src", "--data", room / "ids.jsonl", "--device", "cpu",
        "--samples", "3", *more,
    )  # fmt: skip


FOUND = Evaluation(
    "/some/where/" + "long-name-" * 8 + "w4a16", "/src", "Qwen3-MoE", "wiki.txt", "ab" * 16, 64, 2048, 0,
    131072, 94, tuple(0.01 * (1 + n % 7) for n in range(94)),
    Logits(131008, 123456.789, 6.789, 0.0123456, 0.00012, 0.98765),
    ("a note that is long enough for several lines of sixty columns, with \x1b[31m in it",),
)  # fmt: skip


# --- What is shown ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "found",
    [
        FOUND,
        replace(FOUND, hidden=(0.0,), logits=None, of_layers=61),
        replace(FOUND, logits=Logits(5, 1e300, 1e-300, 1e-9, None, 0.0)),
    ],
)
def test_the_table_fits_60_columns(found: Evaluation) -> None:
    lines = report.as_text(found).splitlines()
    assert max(map(len, lines)) <= 60
    assert all(line.isprintable() for line in lines)


def test_the_table_of_a_deep_model_has_its_first_and_last_layer() -> None:
    shown = report.layers_shown(94)
    assert (shown[0], shown[-1], len(shown)) == (0, 93, 24)
    assert report.layers_shown(5) == [0, 1, 2, 3, 4]


def test_text_and_json_say_the_same(room: Path) -> None:
    told = json.loads(evaluated(room, room / "made", "--json").out)
    text = evaluated(room, room / "made").out
    logits = told["logits"]
    assert f"{logits['perplexity']:.5g}" in text
    assert f"{logits['kl']:.4g} nats a token" in text
    assert f"{logits['agreement']:.3%}" in text
    assert (told["samples"], told["tokens"], logits["predicted"]) == (3, 60, 57)
    assert (told["layers"], told["of_layers"], len(told["hidden"])) == (4, 4, 4)
    assert logits["kl"] > 0
    assert told["data"] == "ids.jsonl"


def test_the_first_layers_need_no_data(room: Path) -> None:
    words = ("--against", room / "src", "--synthetic", "--first-layers", "2", "--device", "cpu")
    done = run_cli("eval", room / "made", *words, "--samples", "1", "--length", "16", "--json")
    told = json.loads(done.out)
    assert (told["data"], told["samples"], told["tokens"]) == ("random tokens", 1, 16)
    assert (told["layers"], told["logits"]) == (2, None)
    assert min(told["hidden"]) > 0
    assert "tokens are random" in done.err


def test_the_command_is_the_api(room: Path) -> None:
    counted: list[tuple[int, int]] = []
    found = api.evaluate(
        room / "made", room / "src", room / "ids.jsonl", samples=3, devices=["cpu"], memory="64GiB",
        events=lambda done, total: counted.append((done, total)),
    )  # fmt: skip
    assert json.loads(json.dumps(found.as_object())) == json.loads(
        evaluated(room, room / "made", "--json").out
    )
    assert counted[-1] == (24, 24)


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "line"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page(room: Path, tmp_path: Path) -> None:
    """Well formed, with every layer, and nothing that runs or is fetched."""
    page, text, values = (tmp_path / name for name in ("page.html", "p.txt", "p.json"))
    out = evaluated(room, room / "made", "--report", page, "--report", text, "--report", values).out
    parsed = _Page(page.read_text())
    assert parsed.open == []
    assert parsed.tags.count("rect") == 4
    assert "script" not in parsed.tags
    assert "default-src 'none'; style-src 'sha256-" in page.read_text()
    assert text.read_text().strip() == out.strip()
    assert json.loads(values.read_text())["hidden"]


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((25, 100), "4.0 x</b><span>smaller than the source"),
        ((150, 100), "1.5 x</b><span>larger than the source"),
    ],
    ids=["smaller", "larger"],
)
def test_the_page_begins_with_large_figures(sizes: tuple[int, int], says: str) -> None:
    """Those that people quote; bytes where they are known."""
    here, there = sizes
    top = report.as_html(replace(FOUND, nbytes=here, source_nbytes=there)).partition("<dl>")[0]
    assert "long-name-w4a16</h1>" in top
    assert "98.77%</b><span>same first choice" in top
    assert "0.0123</b><span>KL divergence, nats" in top
    assert says in top
    assert "than the source" not in report.as_html(FOUND)
    layers = report.as_html(replace(FOUND, logits=None, of_layers=95)).partition("<dl>")[0]
    assert "0.03</b><span>hidden states, relative error" in layers


def test_a_name_is_no_markup() -> None:
    page = report.as_html(replace(FOUND, folder="/x/<script>alert(1)</script>", data="a##[b]"))
    assert "<script" not in page
    assert "##[" not in page


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (
            "--first-layers 2 --write",
            2,
            "--write notes perplexity and KL, which --first-layers leaves out",
        ),
        ("--report x.doc", 2, "expected a name that ends in .html, .json, .txt"),
        ("--report gone/x.html", 1, "folder gone does not exist"),
        ("--memory 1MiB", 1, "give --memory"),
        ("--first-layers 9", 2, "has 4 layers"),
        ("--device cuda:0", 1, "device 'cuda:0': expected one that torch"),
        ("--column text", 1, "expected column 'text', found input_ids"),
        ("--pair {src}", 2, "--pair needs the folder of the CPU's experts"),
    ],
)
def test_refused(words: str, code: int, says: str, room: Path) -> None:
    done = run_cli(
        "eval", room / "made", "--against", room / "src", "--data", room / "ids.jsonl",
        *words.format(src=room / "src").split(),
    )  # fmt: skip
    assert done.code == code
    assert says in " ".join((done.out + done.err).split())


@pytest.mark.parametrize("lacks", ["--against", "--data"])
def test_source_and_data_are_needed(lacks: str) -> None:
    given = {"--against": "src", "--data": "x.txt"}
    words = [word for name, value in given.items() if name != lacks for word in (name, value)]
    done = run_cli("eval", "repo", *words)
    says = {"--against": "Missing option '--against'", "--data": "give --data FILE or --task FILE"}
    assert (done.code, says[lacks] in done.err) == (2, True)


# --- What is written -------------------------------------------------------------------------------


def manifest_of(folder: Path) -> dict[str, Any]:
    return parse_manifest((folder / "qconvert.json").read_bytes(), folder)


def front_of(folder: Path) -> dict[str, Any]:
    return split_front_matter((folder / "README.md").read_text())[0]


def test_nothing_is_written_unless_asked(room: Path, made: Path) -> None:
    before = tree(made)
    evaluated(room, made)
    assert tree(made) == before


def test_manifest_and_card(room: Path, made: Path) -> None:
    """The folder validates as before, another run is its own result, and nothing is to be repaired."""
    before = tree(made)
    told = json.loads(evaluated(room, made, "--write", "--json").out)
    after = tree(made)
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {"README.md", "qconvert.json", "qconvert.receipt.jsonl"}
    assert before.keys() == after.keys()
    noted = manifest_of(made)["evaluation"]
    assert noted["logits"] == told["logits"]
    assert noted["hidden"] == told["hidden"]
    assert str(room) not in json.dumps(noted)

    (entry,) = front_of(made)["model-index"]
    (result,) = entry["results"]
    assert result["task"] == {"type": "text-generation"}
    assert result["dataset"]["name"] == "ids.jsonl"
    values = [metric["value"] for metric in result["metrics"]]
    logits = told["logits"]
    assert values == [logits[key] for key in ("perplexity", "source_perplexity", "kl", "agreement")]
    text = (made / "README.md").read_text()
    assert "## What the conversion cost" in text
    assert text.index("## How to serve it") < text.index("## What the conversion cost")
    assert text.index("## What the conversion cost") < text.index("## What was checked")

    done = run_cli("validate", made, "--against", room / "src", "--level", "full", "--json")
    report = json.loads(done.out)
    assert (done.code, report["findings"]) == (0, [])
    assert "no difference" not in run_cli("repair", made, "--dry-run").err
    assert [found.changes for found in api.repair(made, dry_run=True)] == [()]
    again = run_cli("w4a16", room / "src", made, *W4A16)
    assert (again.code, tree(made)) == (0, after)


def test_the_hub_reads_the_card(room: Path, made: Path) -> None:
    """By its own client's parser of `model-index`."""
    from huggingface_hub import ModelCard

    evaluated(room, made, "--write")
    card: Any = ModelCard((made / "README.md").read_text()).data
    read = card.eval_results
    kinds = [one.metric_type for one in read]
    assert kinds == ["perplexity", "perplexity", "kl_divergence", "top1_agreement"]
    assert read[2].metric_value == manifest_of(made)["evaluation"]["logits"]["kl"]


def test_a_second_evaluation_takes_the_place_of_the_first(room: Path, made: Path) -> None:
    """Results of others stay, and so does what people wrote."""
    readme = made / "README.md"
    front, body = split_front_matter(readme.read_text())
    others = [{"name": "theirs", "results": [{"task": {"type": "x"}, "metrics": []}]}]
    text = yaml.safe_dump({**front, "model-index": others}, sort_keys=False)
    readme.write_text(f"---\n{text}---\n{body}\nA word of mine.\n")
    evaluated(room, made, "--write")
    once = tree(made)
    evaluated(room, made, "--write")
    assert tree(made) == once
    evaluated(room, made, "--write", "--samples", "2")
    assert manifest_of(made)["evaluation"]["samples"] == 2
    theirs, ours = front_of(made)["model-index"]
    assert [theirs] == others
    assert ours["results"][0]["dataset"]["args"]["samples"] == 2
    assert "A word of mine." in readme.read_text()
    assert readme.read_text().count("## What the conversion cost") == 1


def test_an_upload_keeps_it(room: Path, made: Path) -> None:
    from qconvert.hub.readme import new_card
    from qconvert.validation.runner import validate_folder

    evaluated(room, made, "--write")
    front, body = split_front_matter(new_card(made, validate_folder(made), "org/Base"))
    assert front["model-index"][0]["results"] == front_of(made)["model-index"][0]["results"]
    assert "## What the conversion cost" in body
    assert "at level headers" in body


def test_experts_for_cpu_kernels_are_noted_too(room: Path, tmp_path: Path) -> None:
    cpu = tmp_path / "cpu"
    words = ("--method", "int8", "--numa", "1", "--jobs", "1")
    assert run_cli("amx", room / "src", cpu, *words).code == 0
    evaluated(room, cpu, "--write")
    assert manifest_of(cpu)["evaluation"]["logits"]["kl"] > 0
    done = run_cli("validate", cpu, "--against", room / "src", "--level", "full")
    assert done.code == 0, done.out


def test_a_folder_of_others_is_not_written_to(room: Path) -> None:
    before = tree(room / "src")
    done = run_cli(
        "eval", room / "src", "--against", room / "src", "--data", room / "ids.jsonl", "--write"
    )
    assert (done.code, tree(room / "src")) == (1, before)
    assert "has no qconvert.json" in done.err


def test_links_are_not_written_to(room: Path, made: Path) -> None:
    (made / "README.md").rename(made / "other.md")
    (made / "README.md").symlink_to("other.md")
    with pytest.raises(api.OutputError, match=r"README\.md: is a link .* omit --write"):
        api.evaluate(made, room / "src", room / "ids.jsonl", devices=["cpu"], write=True)


@pytest.mark.parametrize("key", ["logits", "digest", "hidden"])
def test_a_broken_entry_is_refused(key: str, room: Path, made: Path) -> None:
    evaluated(room, made, "--write")
    edit_json(made / "qconvert.json", lambda found: found["evaluation"].update({key: ["x"]}))
    with pytest.raises(CheckpointError, match="expected 'evaluation' to be an object with data"):
        manifest_of(made)
