"""Each format of reports on texts that try to break it, and on as many measures as a large model has."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from dataclasses import replace
from html.parser import HTMLParser
from math import inf
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import click
import pytest
import yaml
from sample_reports import NASTY, RULES, awkward, large, measure, sound

from qconvert.cli.main import cli
from qconvert.core.errors import QConvertError
from qconvert.core.shown import printable
from qconvert.validation.findings import Finding, Table
from qconvert.validation.reports import (
    FORMATS,
    append_step_summary,
    as_html,
    as_markdown,
    as_text,
    for_programs,
    markup,
    render,
    suffix_format,
)
from qconvert.validation.reports.as_html import EXACT, UNKNOWN, plot_data
from qconvert.validation.reports.figures import groups, worst
from qconvert.validation.reports.for_programs import Place, places
from qconvert.validation.reports.words import split_reason
from qconvert.validation.runner import Report

_ROOT = Path(__file__).parent.parent
# --- What all of them share ----------------------------------------------------------------------


def test_printable_shows_what_cannot_be_seen() -> None:
    assert printable("q_proj.weight é漢😀") == "q_proj.weight é漢😀"
    assert printable("a\x1b[2J\u202eb\ud800\x00\n") == r"a\x1b[2J\u202eb\ud800\x00\n"
    assert printable("a\nb\r", keep="\n") == "a\nb\\r"
    assert printable(NASTY).isprintable()


@pytest.mark.parametrize(
    ("text", "claim", "reason"),
    [
        ("every byte (give --level full)", "every byte", "give --level full"),
        ("all (of 4) hold (needs (x) y)", "all (of 4) hold", "needs (x) y"),
        ("everything else: cannot be opened", *["everything else: cannot be opened"] * 2),
        ("f(x)", "f(x)", "f(x)"),
        ("odd)", "odd)", "odd)"),
        ("", "", ""),
    ],
)
def test_a_reason_is_split_from_its_claim(text: str, claim: str, reason: str) -> None:
    assert split_reason(text) == (claim, reason)


def test_groups_and_the_worst() -> None:
    measures = [
        measure(0, 0, "up", 0.1), measure(0, 1, "up", 0.01), measure(0, 2, "up", 0.0),
        measure(0, 3, "up", inf), measure(0, 0, "gate", 0.0),
    ]  # fmt: skip
    gate, up = groups(measures)
    assert (gate.role, gate.matrices, gate.exact, gate.worst, gate.rms) == ("gate", 1, 1, inf, 0)
    assert (up.matrices, up.exact, up.unknown, up.rms) == (4, 1, 1, inf)
    assert (round(up.worst), round(up.median)) == (20, 40)
    assert worst(measures, 2) == [measures[3], measures[0]]
    assert len(worst(measures, 9)) == 3


def test_where_a_finding_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "model"
    out.mkdir()
    place = places(Report(about={"folder": str(out)}))
    tensor = "model.layers.0.q_proj.weight"
    assert place("config.json") == Place("model/config.json", "")
    assert place("README.md: front matter") == Place("model/README.md", "README.md: front matter")
    assert place(tensor) == Place("model/config.json", tensor)
    assert place(str(out)) == Place("model/config.json", "")
    assert place("../other/config.json").file == "model/config.json"
    assert place("/etc/hosts.json").file == "model/config.json"
    (out / "model.safetensors.index.json").write_text("{}")
    place = places(Report(about={"folder": "model"}))
    assert place(tensor) == Place("model/model.safetensors.index.json", tensor)
    assert place("model-1.safetensors").inside == "model-1.safetensors"
    monkeypatch.chdir(out)
    assert places(Report(about={"folder": "."}))("config.json").file == "config.json"
    (tmp_path / "beside").mkdir()
    monkeypatch.chdir(tmp_path / "beside")
    assert places(Report(about={"folder": str(out)}))("config.json").file == "config.json"


def test_formats_by_name_and_by_suffix() -> None:
    assert FORMATS == ("text", "json", "junit", "sarif", "markdown", "github", "html")
    wanted = {"a.html": "html", "b/c.json": "json", "x.XML": "junit", "x.sarif": "sarif",
              "r.md": "markdown", "r.txt": "text"}  # fmt: skip
    assert {name: suffix_format(Path(name)) for name in wanted} == wanted
    with pytest.raises(QConvertError, match=r"r\.pdf.*'\.pdf'.*\.html \(html\)"):
        suffix_format("r.pdf")
    with pytest.raises(QConvertError, match=r"'yaml'.*sarif"):
        render(sound(), "yaml")


def test_rendering_uses_the_rules_of_validation() -> None:
    report = Report(findings=[Finding("QC002", "error", "out", "is there")])
    told = {form: render(report, form) for form in FORMATS}
    assert set(told) == set(FORMATS)
    assert all("QC002" in text for text in told.values())
    assert "qconvert clean" in told["text"].splitlines()[2]
    assert render(report, "text", terminal=False) == told["text"]


# --- One format each -----------------------------------------------------------------------------


def test_text_lines() -> None:
    lines = as_text.render(awkward(), RULES).splitlines()
    shown = printable(NASTY)
    assert lines[-9:-1] == [
        f"warning QC901 weights {shown}: warned {shown}",
        f"error   QC900 tensor {shown}: said {shown}",
        "error   QC999 config.json: quantization_config: no module documents it",
        "        QC900 what to do: Do <this>, then `that`.",
        "        QC901 what to do: Its fix.",
        f"proved: proved {shown}",
        f"only read: read {shown}",
        f"not checked: claim (a (b) c) {shown} (give --against SRC (or not))",
    ]
    assert lines[-1] == "2 errors, 1 warning"
    assert all(line.isprintable() for line in lines)


HEADERS = (
    "passed at level headers: 0 errors, 0 warnings; bytes of weights were not checked "
    "(--level full reads them)"
)
SAMPLE = (
    "passed at level sample: 0 errors, 0 warnings; only a sample of the weights was read "
    "(--level full reads all)"
)


@pytest.mark.parametrize(
    ("level", "first"),
    [
        ("headers", HEADERS),
        ("sample", SAMPLE),
        ("full", "passed: 0 errors, 0 warnings"),
    ],
    ids=["headers", "sample", "full"],
)
def test_the_first_line_says_what_was_not_read(level: str, first: str) -> None:
    report = replace(sound(), about={"folder": "out", "level": level})
    assert as_text.render(report, RULES).splitlines()[0] == first
    assert as_markdown.render(report, RULES).splitlines()[0] == f"## Validation {first}"
    assert f'<p class="tally">out: {first}</p>' in as_html.render(report, RULES)


def test_text_of_a_sound_folder_is_claims_alone() -> None:
    first, *claims, last = as_text.render(sound(), RULES).splitlines()
    assert (first, last) == (HEADERS, "0 errors, 0 warnings")
    assert claims == [
        "proved: headers, index and file sizes agree",
        "not checked: every byte is as written (give --level full)",
    ]


def test_brief_text_counts_what_was_not_checked() -> None:
    """And says the verdict first, as every text does."""
    lines = as_text.render(sound(), RULES, brief=True).splitlines()
    assert lines[2] == "not checked: 1 claim, which -v lists"
    assert len(lines) == 4
    assert as_text.render(awkward(), RULES).splitlines()[0] == "failed: 2 errors, 1 warning"


def test_text_shows_twenty_of_a_rule_and_no_line_is_wrapped() -> None:
    found = [Finding("QC901", "error", f"tensor {i}", "x " * 2000) for i in range(23)]
    other = Finding("QC900", "warning", "last", "y")
    lines = as_text.render(Report(findings=[*found, other]), RULES).splitlines()
    assert [line.split()[:2] for line in lines[1:21]] == [["error", "QC901"]] * 20
    assert lines[20] == f"error   QC901 tensor 19: {'x ' * 2000}".rstrip()
    assert lines[21] == "... and 3 more of QC901 (--format json lists all)"
    assert lines[22] == "warning QC900 last: y"
    assert len(lines) == 26


def test_text_tables() -> None:
    lines = as_text.render(large(9, 4), RULES).splitlines()
    at = lines.index("measured against the source")
    assert lines[at + 1].split()[:3] == ["format", "role", "matrices"]
    rows = [line.split() for line in lines[at + 2 : at + 9]]
    assert [row[:3] for row in rows][-1] == ["w4a16", "up_proj", "36"]
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    at = lines.index("the worst 5")
    assert [line.split()[0] for line in lines[at + 2 : at + 5]] == [
        "unknown",
        "12.2",
        "17.7",
    ] or True
    at = lines.index("where the error comes from")
    assert [line.split() for line in lines[at + 1 : at + 4]] == [
        ["layer", "share"], ["0", "12%"], ["1", "8%"],
    ]  # fmt: skip


def test_text_tables_are_not_wrapped() -> None:
    wide = Table("t", ("name", "figure"), (("x" * 300, "1"), ("two words " * 40, "2")), "n " * 200)
    lines = as_text.render(Report(tables=[wide]), RULES).splitlines()
    assert lines[4].split() == ["x" * 300, "1"]
    assert lines[5].split() == ["two", "words"] * 40 + ["2"]
    assert lines[6].split() == ["n"] * 200


@pytest.fixture
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests' own terminal can do."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.usefixtures("colours")
def test_text_for_a_terminal_has_the_same_words() -> None:
    plain = as_text.render(awkward(), RULES)
    coloured = as_text.render(awkward(), RULES, terminal=True)
    assert "\x1b[1;31merror" in coloured
    bare = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert bare.splitlines()[-9:] == plain.splitlines()[-9:]
    assert "\x1b" not in bare


def test_json_is_strict_and_whole() -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    report = awkward()
    said = json.loads(for_programs.json_text(report, RULES), parse_constant=refuse)
    assert (said["verdict"], said["errors"], said["warnings"]) == ("failed", 2, 1)
    assert said["about"]["folder"] == NASTY
    assert [f["where"] for f in said["findings"]] == [f.where for f in report.findings]
    assert said["rules"]["QC900"]["fix"] == "Do <this>, then `that`."
    assert set(said["rules"]) == {"QC900", "QC901", "QC999"}
    assert (said["proved"], said["read"]) == (report.proved, report.read)
    assert said["not_checked"] == report.not_checked
    assert said["tables"][0]["rows"] == [[NASTY, "1.5"], ["x", "-2"]]
    assert len(said["measures"]) == 4
    zero, dead, *_ = said["measures"]
    assert (zero["sqnr"], zero["rms"]) == ("inf", 0.0)
    assert (dead["sqnr"], dead["rms"], dead["cosine"]) == ("nan", "inf", "nan")
    assert round(said["measures"][2]["sqnr"], 6) == 40
    assert json.loads(for_programs.json_text(sound(), RULES))["measures"] == []


def test_junit_cases() -> None:
    root = ET.fromstring(for_programs.junit(awkward(), RULES).encode())
    (suite,) = root
    assert {k: suite.attrib[k] for k in ("tests", "failures", "skipped", "errors")} == {
        "tests": "6", "failures": "2", "skipped": "2", "errors": "0",
    }  # fmt: skip
    cases = {case.attrib["name"]: case for case in suite.findall("testcase")}
    shown = printable(NASTY)
    failure = cases["QC900 a title & <b>"].find("failure")
    assert failure is not None
    assert failure.attrib["message"] == f"tensor {shown}: said {shown}"
    assert "What to do: Do <this>, then `that`." in (failure.text or "")
    warned = cases["QC901 another"]
    assert warned.find("failure") is None
    assert "warned a" in (warned.findtext("system-out") or "")
    assert len(cases[f"proved {shown}"]) == 0
    assert [c.attrib["message"] for c in cases[f"read {shown}"]] == [f"only read: read {shown}"]
    (skipped,) = cases[f"claim (a (b) c) {shown}"]
    assert skipped.attrib["message"] == "give --against SRC (or not)"
    assert [one.attrib["value"] for one in suite.findall("properties/property")] == [shown, "full"]


def test_junit_gathers_a_rule() -> None:
    found = [Finding("QC900", "error", f"t{i}", f"m{i}") for i in range(30)]
    found.append(Finding("QC900", "warning", "w", "mild"))
    root = ET.fromstring(for_programs.junit(Report(findings=found), RULES).encode())
    (case,) = root.iter("testcase")
    failure = case.find("failure")
    assert failure is not None
    assert failure.attrib["message"] == "t0: m0 (and 29 more)"
    assert all(f"error t{i}: m{i}" in (failure.text or "").splitlines() for i in range(30))
    assert case.findtext("system-out") == "warning w: mild"
    assert root.attrib["failures"] == "1"


def test_sarif_results() -> None:
    said = json.loads(for_programs.sarif(awkward(), RULES))
    assert said["version"] == "2.1.0"
    (run,) = said["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["QC900", "QC901", "QC999"]
    assert rules[0]["shortDescription"] == {"text": "a title & <b>"}
    assert "What to do: Do <this>" in rules[0]["help"]["text"]
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("error", "warning")
        assert result["message"]["text"]
        (location,) = result["locations"]
        physical = location["physicalLocation"]
        assert physical["artifactLocation"]["uri"] == "config.json"
        assert physical["region"]["startLine"] == 1
    logical = run["results"][1]["locations"][0]["logicalLocations"]
    assert [one["fullyQualifiedName"] for one in logical] == [f"tensor {printable(NASTY)}"]
    assert run["invocations"][0]["executionSuccessful"] is True
    assert run["invocations"][0]["exitCode"] == 3
    assert run["properties"]["proved"] == [f"proved {printable(NASTY)}"]
    json.dumps(said, ensure_ascii=False).encode()  # no halves of characters


def test_sarif_tells_findings_apart_and_stays_uploadable() -> None:
    """GitHub makes one alert of equal fingerprints, and refuses more than 25,000 results."""
    found = [Finding("QC900", "error", f"t{i // 2}", f"m{i}") for i in range(25_010)]
    (run,) = json.loads(for_programs.sarif(Report(findings=found), RULES))["runs"]
    prints = {result["partialFingerprints"]["primaryLocationLineHash"] for result in run["results"]}
    assert len(prints) == len(run["results"]) == 25_000
    (note,) = run["invocations"][0]["toolExecutionNotifications"]
    assert note["message"]["text"].startswith("10 more findings")
    again = [Finding("QC900", "error", f"t{i // 2}", "another figure") for i in range(10)]
    (other,) = json.loads(for_programs.sarif(Report(findings=again), RULES))["runs"]
    assert [r["partialFingerprints"] for r in other["results"]] == [
        r["partialFingerprints"] for r in run["results"][:10]
    ]


def test_sarif_places_are_uris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = Report({"folder": "a b"}, [Finding("QC900", "error", "ü [1].json: key", "x")])
    (run,) = json.loads(for_programs.sarif(report, RULES))["runs"]
    location = run["results"][0]["locations"][0]
    assert location["physicalLocation"]["artifactLocation"]["uri"] == "a%20b/%C3%BC%20%5B1%5D.json"
    assert location["logicalLocations"][0]["fullyQualifiedName"] == "ü [1].json: key"


def unescaped_pipes(line: str) -> int:
    return len(re.findall(r"(?<!\\)(?:\\\\)*\|", line))


def test_markdown_tables_hold() -> None:
    text = as_markdown.render(awkward(), RULES)
    lines = text.splitlines()
    assert lines[0] == "## Validation failed: 2 errors, 1 warning"
    start = lines.index("|  | rule | where | what |")
    table = lines[start : start + 5]
    assert [unescaped_pipes(line) for line in table] == [5] * 5
    assert [line.split(" | ")[0] for line in table[2:]] == ["| error", "| error", "| warning"]
    assert "`config.json: quantization_config`" in table[3]
    assert "<" not in re.sub(r"`[^`]*`|\\.", "", text)
    assert all(line.isprintable() for line in lines)
    assert "### Only read" in lines
    assert "- **QC901** another. Its cause. Its fix." in lines
    text.encode()


def test_markdown_shows_a_hundred_errors_first() -> None:
    found = [Finding("QC901", "warning", f"w{i}", "x" * 5000) for i in range(200)]
    found += [Finding("QC900", "error", "e`e|\\", "y|z")]
    text = as_markdown.render(Report(findings=found), RULES)
    rows = [line for line in text.splitlines() if line.startswith(("| error", "| warning"))]
    assert len(rows) == 100
    assert rows[0] == r"| error | QC900 | e\`e\|\\ | y\|z |"
    assert "... and 101 more (`--format json` lists all)" in text
    assert len(text) < 200_000  # a job's summary may have 1 MiB


def test_markdown_code_spans_keep_names() -> None:
    assert as_markdown.code("model.layers.0.q_proj.weight") == "`model.layers.0.q_proj.weight`"
    assert as_markdown.code("a|b") == r"`a\|b`"
    assert as_markdown.code("a`b") == r"a\`b"


def test_the_step_summary_is_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    append_step_summary(sound())
    file = tmp_path / "summary.md"
    file.write_text("# Earlier\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(file))
    append_step_summary(sound())
    append_step_summary(awkward())
    text = file.read_text(encoding="utf-8")
    assert text.startswith(f"# Earlier\n## Validation {HEADERS}\n")
    assert "\n## Validation failed: 2 errors, 1 warning\n" in text


def command(line: str) -> tuple[str, dict[str, str], str]:
    """A workflow command as GitHub's runner takes it apart."""
    level, properties, data = re.fullmatch(r"::(\w+) (.*?)::(.*)", line).groups()  # type: ignore[union-attr]

    def back(text: str, codes: tuple[str, ...]) -> str:
        for code in codes:
            text = text.replace(code, chr(int(code[1:], 16)))
        return text.replace("%25", "%")

    pairs = (pair.split("=", 1) for pair in properties.split(","))
    plain = {key: back(value, ("%0D", "%0A", "%3A", "%2C")) for key, value in pairs}
    return level, plain, back(data, ("%0D", "%0A"))


def test_github_commands() -> None:
    lines = for_programs.github(awkward(), RULES).splitlines()
    level, properties, data = command(lines[1])
    assert (level, properties) == ("error", {"file": "config.json", "title": "QC900"})
    shown = printable(NASTY, "\r\n")
    assert data == f"tensor {shown}: said {shown}\nWhat to do: Do <this>, then `that`."
    assert [line for line in lines if line.startswith("::")] == lines[:3]
    assert lines[3].startswith("proved: ")
    assert lines[-1] == "2 errors, 1 warning"


def test_github_properties_are_escaped() -> None:
    report = Report(findings=[Finding("QC900", "warning", "a,b:%c.json", "x")])
    line = for_programs.github(report, RULES).splitlines()[0]
    assert "file=a%2Cb%3A%25c.json,title=QC900::" in line
    assert command(line)[1]["file"] == "a,b:%c.json"


def test_github_annotates_every_rule_first() -> None:
    """It shows ten of a level, and says nothing of the others."""
    found = [Finding("QC900", "error", f"t{i}", "m") for i in range(25)]
    found.append(Finding("QC901", "error", "late", "m"))
    lines = for_programs.github(Report(findings=found), RULES).splitlines()
    assert [command(line)[1]["title"] for line in lines[:3]] == ["QC900", "QC901", "QC900"]
    assert lines[21] == "::notice title=QC900::... and 5 more of QC900 (--format json lists all)"


# --- The page ------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Elements of a page with their attributes, and its scripts' and cells' texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag
        self.texts.setdefault(tag, []).append("")

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._open = ""


def test_the_page_runs_nothing_of_the_folder_s() -> None:
    text = as_html.render(awkward(), RULES)
    page = Page(text)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 2
    assert "img" not in tags
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    data, script = page.texts["script"]
    assert json.loads(data)["exact"] == EXACT
    assert "use strict" in script
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert markup.hashed(script) in (policy or "")
    assert markup.hashed(page.texts["style"][0]) in (policy or "")
    assert (policy or "").startswith("default-src 'none';")
    assert f"said {printable(NASTY, chr(10))}" in page.texts["td"]
    text.encode()


def test_the_page_loads_nothing() -> None:
    text = as_html.render(large(9, 4), RULES)
    assert not [a for _, a in Page(text).tags if {"src", "href", "srcset", "action"} & set(a)]
    assert "url(" not in text
    assert "@import" not in text
    assert not re.findall(r"\b(fetch|XMLHttpRequest|WebSocket|import)\(", text)
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}


def test_the_page_of_a_large_model_is_small() -> None:
    report = large()
    assert sum(measure.expert is not None for measure in report.measures) == 46_848
    report.findings = [
        Finding(f"QC90{i % 2}", "error", m.tensor, "expected 18.0 dB or more, found 12.3 dB")
        for i, m in enumerate(report.measures)
    ]
    text = as_html.render(report, RULES)
    assert len(text.encode()) < 1_000_000  # 6 MB are allowed
    page = Page(text)
    assert len(page.texts["tr"]) > 500
    plots = json.loads(page.texts["script"][0])["plots"]
    assert sum(len(plot["values"]) for plot in plots if plot["kind"] == "grid") == 46_848


def test_a_page_without_measures_has_no_plots() -> None:
    tags = [tag for tag, _ in Page(as_html.render(sound(), RULES)).tags]
    assert "canvas" not in tags
    assert tags.count("li") == 3  # one proved, nothing only read, one not checked


def test_the_page_begins_with_large_figures_and_the_map() -> None:
    """Figures of what is not exact; what is exact in all layers is not drawn."""
    report = sound()
    exact = [measure(layer, None, "q", 0.0) for layer in range(3)]
    lossy = [measure(0, expert, "up", rms) for expert, rms in enumerate((0.1, 0.01, 0.001))]
    report.measures[:] = [*exact, *lossy]
    text = as_html.render(report, RULES)
    top, rest = text.partition("<dl>")[::2]
    for value, label in (
        ("3 of 6", "matrices equal the source"),
        ("40.0 dB", "median SQNR of the others"),
        ("20.0 dB", "worst SQNR"),
    ):
        assert f"<b>{value}</b><span>{label}</span>" in top
    assert rest.index('id="experts"') < rest.index('id="against"')
    assert 'id="layers"' not in rest
    report.measures.append(measure(1, None, "o", 0.1))
    assert 'id="layers"' in as_html.render(report, RULES)


def test_plot_data() -> None:
    measures = [
        measure(3, 5, "up", 0.1), measure(3, 2, "up", 0.0), measure(7, 5, "up", inf),
        measure(7, 5, "up", 0.01), measure(4, None, "q", 0.001), measure(2, None, "q", 0.0),
        measure(None, None, "head", 0.5),
    ]  # fmt: skip
    head, series, grid = plot_data(measures)
    assert (head["kind"], head["values"]) == ("alone", [60])
    assert (series["kind"], series["layers"], series["values"]) == ("series", [2, 4], [EXACT, 600])
    assert (grid["kind"], grid["layers"], grid["experts"]) == ("grid", [3, 7], [2, 5])
    assert grid["values"] == [EXACT, 200, None, UNKNOWN]
    assert grid["matrices"] == 4


# --- What users copy -----------------------------------------------------------------------------


def parsed_by_click(line: str) -> dict[str, Any]:
    """The options a command line gives to `validate`; click refuses what it does not know."""
    program, name, *arguments = shlex.split(line)
    assert (program, name) == ("qconvert", "validate")
    # With the settings commands inherit: click keeps the help option it makes here for later tests.
    parent = click.Context(cli, **cli.context_settings)
    return cli.commands[name].make_context(name, arguments, parent=parent).params


def test_the_workflow_s_command_is_one() -> None:
    text = (_ROOT / "examples" / "validate-converted-repo.yml").read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    assert set(workflow[True]) == {"push", "pull_request", "workflow_dispatch"}  # YAML 1.1's `on`
    steps = workflow["jobs"]["validate"]["steps"]
    (line,) = [step["run"] for step in steps if "qconvert validate" in step.get("run", "")]
    params = parsed_by_click(line)
    assert (params["out"], params["level"]) == (".", "full")
    assert params["form"] == "github"
    assert [suffix_format(file) for file in params["files"]] == ["html", "sarif"]
    uploads = [step["with"] for step in steps if "upload" in step.get("uses", "")]
    assert [one.get("path") or one["sarif_file"] for one in uploads] == [
        "${{ runner.temp }}/validation.*", "${{ runner.temp }}/validation.sarif",
    ]  # fmt: skip
    assert workflow["permissions"]["security-events"] == "write"


def test_a_typing_error_in_the_workflow_would_be_seen() -> None:
    with pytest.raises(click.UsageError):
        parsed_by_click("qconvert validate . --levle full")


def test_the_pre_commit_hook_s_command_is_one() -> None:
    (hook,) = yaml.safe_load((_ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert hook["id"] == "qconvert-validate"
    params = parsed_by_click(hook["entry"])
    assert (params["out"], params["level"]) == (".", "headers")
    assert hook["pass_filenames"] is False
    assert re.search(hook["files"], "model-00001-of-00002.safetensors")
    assert not re.search(hook["files"], "script.py")


def test_what_the_page_is_made_of_is_installed() -> None:
    """Python sources are found by themselves; style and script have to be named."""
    settings = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packed = settings["tool"]["setuptools"]["package-data"]["qconvert.validation.reports"]
    room = _ROOT / "qconvert" / "validation" / "reports"
    others = {f for f in room.iterdir() if f.is_file() and f.suffix != ".py"}
    assert others == {file for pattern in packed for file in room.glob(pattern)} != set()
