"""The HTML report in a real browser: its plots are drawn, and a click sorts its table.

Chromium is driven over a pipe with its DevTools protocol (messages of JSON that end in a zero byte),
so no driver is needed.
"""

from __future__ import annotations

import base64
import fcntl
import io
import itertools
import json
import os
import re
import select
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sample_reports import RULES, awkward, large, measure, sound

from qconvert.validation.reports import as_html
from qconvert.validation.runner import Report

pytestmark = pytest.mark.browser

_PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
# Far beyond what a browser takes: a hang is to fail, not to last.
_PATIENCE = 120
_LAYERS, _EXPERTS = 61, 256


class Browser:
    """One tab of a headless Chromium. `events` are all it has told of unasked."""

    def __init__(self, profile: Path) -> None:
        assert _PROGRAM is not None
        hear, commands = os.pipe()
        answers, speak = os.pipe()
        # The browser reads descriptor 3 and writes 4; neither may be in the way of the other.
        inner = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (hear, speak)]
        os.close(hear)
        os.close(speak)

        def place() -> None:
            os.dup2(inner[0], 3)
            os.dup2(inner[1], 4)

        self._process = subprocess.Popen(
            [
                _PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--no-first-run", "--disable-background-networking", "--window-size=1300,1000",
                f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank",
            ],
            pass_fds=(3, 4), preexec_fn=place, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in inner:
            os.close(end)
        self._commands, self._answers = commands, answers
        self._held = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._answers], [], [], _PATIENCE)
            assert ready, "the browser does not answer"
            more = os.read(self._answers, 1 << 20)
            assert more, "the browser has gone"
            self._held += more
        message, self._held = self._held.split(b"\0", 1)
        said: dict[str, Any] = json.loads(message)
        return said

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            said = self._read()
            if said.get("id") == self._number:
                assert "result" in said, said
                result: dict[str, Any] = said["result"]
                return result
            self.events.append(said)

    def open(self, page: Path) -> None:
        """Load a page. What the browser told of an earlier one is forgotten."""
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def value(self, script: str) -> Any:
        """What an expression in the page's own world is."""
        said = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of an element."""
        x, y = self.value(
            f"""(() => {{
                const found = document.querySelector({json.dumps(selector)});
                found.scrollIntoView({{ block: "center", inline: "center" }});
                const box = found.getBoundingClientRect();
                return [box.x + box.width / 2, box.y + box.height / 2];
            }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )  # fmt: skip

    def complaints(self) -> list[Any]:
        """Exceptions of scripts, and whatever the browser logs as an error, as of its policy."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        return [event["params"] for event in self.events if event.get("method") in kinds]

    def requests(self) -> list[str]:
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        self._session = None
        self.call("Browser.close")
        self._process.wait(_PATIENCE)
        os.close(self._commands)
        os.close(self._answers)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if _PROGRAM is None:
        pytest.skip("no chromium here; on Debian: apt-get install chromium")
    found = Browser(tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def report() -> Report:
    return large(_LAYERS, _EXPERTS)


@pytest.fixture(scope="module")
def page(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(as_html.render(report, RULES), encoding="utf-8")
    return file


def choose(browser: Browser, select: str, option: int) -> None:
    browser.value(
        f"""(() => {{
            const select = document.getElementById({json.dumps(select)});
            select.selectedIndex = {option};
            select.dispatchEvent(new Event("change"));
        }})()"""
    )


def pixels(browser: Browser) -> dict[str, int]:
    """Colours of the heat map's plane and how many pixels have each."""
    counts: dict[str, int] = browser.value(
        """(() => {
            const canvas = document.getElementById("heat");
            const { width, height } = canvas;
            const { data } = canvas.getContext("2d").getImageData(60, 10, width - 70, height - 52);
            const found = {};
            for (let i = 0; i < data.length; i += 4) {
              const key = data[i] + "," + data[i + 1] + "," + data[i + 2] + "," + data[i + 3];
              found[key] = (found[key] || 0) + 1;
            }
            return found;
        })()"""
    )
    return counts


def test_the_page_loads_without_network_or_complaint(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.requests() == [page.as_uri()]
    assert browser.complaints() == []
    assert browser.value("document.querySelector('h1').textContent") == "Validation failed"


def test_the_heat_map_is_drawn(browser: Browser, page: Path) -> None:
    """A cell for each expert of each layer, in many colours, over the whole plane."""
    browser.open(page)
    drawn = browser.value("document.getElementById('heat').dataset.drawn")
    assert int(drawn) == _LAYERS * _EXPERTS
    counts = pixels(browser)
    assert len(counts) > 200
    assert "0,0,0,0" not in counts  # nothing is left blank
    assert counts["255,255,255,255"] > 9 * 8  # nine exact cells
    assert counts["224,36,94,255"] > 4  # an unknown one
    assert "layer 20, expert 128, 12.2 dB" in browser.value(
        "document.getElementById('heat-note').textContent"
    )
    legend = browser.value("document.getElementById('heat-legend').textContent")
    assert "exact: 9" in legend
    assert "unknown: 1" in legend
    assert re.search(r"worse: ≤ \d\d\.\d dB≥ \d\d\.\d dB: better", legend)


def test_another_projection_is_another_picture(browser: Browser, page: Path) -> None:
    browser.open(page)
    options = browser.value("[...document.getElementById('heat-role').options].map((o) => o.text)")
    assert options[1:] == ["down_proj (w4a16)", "gate_proj (w4a16)", "up_proj (w4a16)"]
    seen = []
    for option in range(4):
        choose(browser, "heat-role", option)
        assert int(browser.value("document.getElementById('heat').dataset.drawn")) == 61 * 256
        seen.append(json.dumps(pixels(browser), sort_keys=True))
    assert len(set(seen)) == 4
    choose(browser, "heat-role", 2)
    note = browser.value("document.getElementById('heat-note').textContent")
    assert "layer 20, expert 128" not in note  # that one is bad in down_proj alone


def test_the_mouse_names_a_cell(browser: Browser, page: Path, report: Report) -> None:
    browser.open(page)
    choose(browser, "heat-role", 2)
    x, y = browser.value(
        """(() => {
            const canvas = document.getElementById("heat");
            canvas.scrollIntoView({ block: "center" });
            const box = canvas.getBoundingClientRect();
            return [box.x + 58 + 0.5, box.y + 8 + 0.5];
        })()"""
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    first = next(m for m in report.measures if m.role == "gate_proj")
    assert (first.layer, first.expert) == (0, 0)
    tip = browser.value("document.getElementById('heat-tip').textContent")
    assert tip == f"layer 0, expert 0: {first.sqnr:.1f} dB"
    assert browser.value("document.getElementById('heat-tip').hidden") is False


def bars(browser: Browser) -> list[tuple[float, float]]:
    """Of each bar of the histogram how many matrices it stands for, and how high it is drawn."""
    found = browser.value(
        """[...document.querySelectorAll("#histogram rect")].map((bar) => [
            Number(bar.querySelector("title").textContent.split(": ")[1].replaceAll(",", "")),
            bar.getBoundingClientRect().height])"""
    )
    return [(count, height) for count, height in found]


def test_the_histogram_counts_every_matrix(browser: Browser, page: Path, report: Report) -> None:
    browser.open(page)
    finite = [m for m in report.measures if 0 < m.rms < float("inf")]
    drawn = bars(browser)
    assert sum(count for count, _ in drawn) == len(finite)
    assert len(drawn) == int(browser.value("document.getElementById('histogram').dataset.drawn"))
    assert [height for _, height in sorted(drawn)] == sorted(height for _, height in drawn)
    assert min(height for _, height in drawn) > 3  # one matrix of 47,000 can be seen
    note = browser.value("document.getElementById('histogram-note').textContent")
    assert note == "In addition: 27 exact, 3 unknown."
    choose(browser, "histogram-role", 2)
    assert sum(count for count, _ in bars(browser)) == 61 * 256 - 10


def test_roles_outside_the_experts_are_drawn(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert int(browser.value("document.getElementById('series').dataset.drawn")) == 4 * _LAYERS
    panels = browser.value(
        """[...document.querySelectorAll("#series svg")].map((one) => [
            one.querySelector(".name").textContent, one.querySelectorAll("circle.mark").length,
            one.querySelector("polyline").getBoundingClientRect().width > 100])"""
    )
    roles = ("kv_a_proj", "o_proj", "q_a_proj", "q_b_proj")
    assert panels == [[f"{role} (fp8)", _LAYERS, True] for role in roles]


def column(browser: Browser, at: int) -> list[str]:
    texts: list[str] = browser.value(
        f"[...document.querySelectorAll('#worst tbody tr')].map((r) => r.cells[{at}].textContent)"
    )
    return texts


def arrow(browser: Browser, key: str) -> str:
    script = f"document.querySelector('#worst th[data-key={key}]').getAttribute('aria-sort')"
    return str(browser.value(script))


def test_a_click_sorts_the_table(browser: Browser, page: Path) -> None:
    browser.open(page)
    rows = browser.value("document.querySelectorAll('#worst tbody tr').length")
    assert rows == 500
    levels = column(browser, 5)
    assert levels[:4] == ["unknown", "unknown", "unknown", "12.2"]
    figures = [float(level) for level in levels[3:]]
    assert figures == sorted(figures)

    browser.click("#worst th[data-key=sqnr] button")
    assert arrow(browser, "sqnr") == "descending"
    assert column(browser, 5) == levels[:2:-1] + ["unknown"] * 3
    assert browser.value("document.getElementById('worst').dataset.sorted") == "sqnr:descending"

    browser.click("#worst th[data-key=expert] button")
    experts = [int(text) for text in column(browser, 3) if text]
    assert experts == sorted(experts)
    assert experts != sorted(experts, key=str)
    assert (arrow(browser, "expert"), arrow(browser, "sqnr")) == ("ascending", "None")

    browser.click("#worst th[data-key=tensor] button")
    names = column(browser, 0)
    layers = [int(name.split(".")[2]) for name in names]
    assert layers == sorted(layers)
    assert sorted(column(browser, 5)) == sorted(levels)
    assert browser.complaints() == []


def test_what_has_no_figure_sorts_last(browser: Browser, tmp_path: Path) -> None:
    measures = [
        measure(None, None, "lm_head", 0.3), measure(5, None, "q", 0.2), measure(2, 1, "up", 0.1),
        measure(3, 9, "up", float("inf"), cosine=float("nan")),
    ]  # fmt: skip
    file = tmp_path / "page.html"
    file.write_text(as_html.render(Report(measures=measures), RULES), encoding="utf-8")
    browser.open(file)
    browser.click("#worst th[data-key=layer] button")
    assert column(browser, 2) == ["2", "3", "5", ""]
    browser.click("#worst th[data-key=layer] button")
    assert column(browser, 2) == ["5", "3", "2", ""]
    browser.click("#worst th[data-key=rms] button")
    assert column(browser, 6) == ["0.1", "0.2", "0.3", "inf"]
    browser.click("#worst th[data-key=cosine] button")
    assert column(browser, 8)[-1] == "nan"
    # Where nothing was measured the plane shows hatching, not a colour.
    assert browser.value("document.getElementById('heat').dataset.drawn") == "2"
    legend = browser.value("document.getElementById('heat-legend').textContent")
    assert "not measured: 2" in legend


def test_awkward_names_are_shown_and_not_run(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(as_html.render(awkward(), RULES), encoding="utf-8")
    browser.open(file)
    assert browser.complaints() == []
    assert browser.requests() == [file.as_uri()]
    assert not [e for e in browser.events if e.get("method") == "Page.javascriptDialogOpening"]
    assert "</script><img src=x onerror=alert(1)>" in browser.value(
        "document.querySelector('#findings code').textContent"
    )
    assert browser.value("document.getElementById('heat').dataset.drawn") == "2"
    assert browser.value("document.images.length") == 0


def test_the_policy_stops_a_script_of_the_folder_s(browser: Browser, tmp_path: Path) -> None:
    """As if escaping had failed: the second line of defence."""
    text = as_html.render(sound(), RULES)
    file = tmp_path / "page.html"
    bad = "<script>document.title = 'taken'</script><img src='https://example.org/x.png'></main>"
    file.write_text(text.replace("</main>", bad), encoding="utf-8")
    browser.open(file)
    assert browser.value("document.title") == "Validation passed: out"
    assert browser.complaints()
    stopped = [e["params"] for e in browser.events if e.get("method") == "Network.loadingFailed"]
    assert [one["blockedReason"] for one in stopped] == ["csp"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_are_readable_in_either_scheme(scheme: str, browser: Browser, page: Path) -> None:
    """Contrast as WCAG 2.1 reckons it, at least its 4.5 to 1 for every text colour on its ground."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.call("Emulation.setEmulatedMedia", features=[feature])
    browser.open(page)
    names = ("page", "card", "ink", "quiet", "good", "bad", "warn")
    style = "getComputedStyle(document.documentElement)"
    colours = {name: browser.value(f"{style}.getPropertyValue('--{name}')") for name in names}

    def luminance(colour: str) -> float:
        parts = [int(colour.strip()[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (
            c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for ground in ("page", "card"):
        for text in ("ink", "quiet", "good", "bad", "warn"):
            two = sorted((luminance(colours[ground]), luminance(colours[text])))
            assert (two[1] + 0.05) / (two[0] + 0.05) >= 4.5, (ground, text)
    shown = base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"])
    assert shown.startswith(b"\x89PNG")
    background = browser.value("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 22, 28)"}[scheme]


# --- Layout --------------------------------------------------------------------------------------

Colour = tuple[int, int, int]


def sized(browser: Browser, width: int) -> None:
    browser.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
        mobile=True,  # scroll bars take no room
    )  # fmt: skip
    feature = {"name": "prefers-color-scheme", "value": "light"}
    browser.call("Emulation.setEmulatedMedia", features=[feature])


def screenshot(browser: Browser) -> np.ndarray[Any, Any]:
    """The whole page, [height, width, 3]."""
    shown = browser.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
    with Image.open(io.BytesIO(base64.b64decode(shown["data"]))) as image:
        return np.asarray(image.convert("RGB"))


_BOXES = """[...document.querySelectorAll("header, .rule, .box, .plot")].map((one) => {
    const box = one.getBoundingClientRect(), style = getComputedStyle(one);
    return { name: one.tagName + "." + one.className, x: box.x, y: box.y + scrollY, width: box.width,
      height: box.height, left: style.borderLeftWidth, edge: style.borderLeftColor,
      top: style.borderTopWidth, crest: style.borderTopColor, ground: style.backgroundColor };
})"""


def colour(style: str) -> Colour | None:
    """None: what is behind is seen."""
    found = [float(part) for part in re.findall(r"[0-9.]+", style)]
    return (
        None if len(found) == 4 and found[3] == 0 else (int(found[0]), int(found[1]), int(found[2]))
    )


@pytest.fixture
def two(browser: Browser, tmp_path: Path) -> Iterator[Path]:
    """A page of two folders, not as long as that of a large model."""
    small = large(3, 8)
    file = tmp_path / "two.html"
    shown = replace(small, beside=sound(), findings=small.findings[:2])
    file.write_text(as_html.render(shown, RULES), encoding="utf-8")
    yield file
    browser.call("Emulation.clearDeviceMetricsOverride")


@pytest.mark.parametrize("width", [1100, 400])
def test_boxes_are_painted_where_they_lie(width: int, browser: Browser, two: Path) -> None:
    """In a screenshot each box has its colours at its edges and corners, and the page's around."""
    sized(browser, width)
    browser.open(two)
    boxes = browser.value(_BOXES)
    page = colour(browser.value("getComputedStyle(document.body).backgroundColor"))
    shown = screenshot(browser)
    assert page is not None
    assert shown.shape[1] == width

    def at(y: int, x: int) -> Colour:
        red, green, blue = shown[y, x].tolist()
        return red, green, blue

    assert {box["name"] for box in boxes} >= {
        "HEADER.failed", "DETAILS.rule error", "DETAILS.rule warning", "DIV.box failed",
        "DIV.box passed", "DIV.plot",
    }  # fmt: skip
    for box in boxes:
        x, y = round(box["x"]), round(box["y"])
        right, bottom = round(box["x"] + box["width"]), round(box["y"] + box["height"])
        middle, across = (y + bottom) // 2, (x + right) // 2
        edge, crest = float(box["left"][:-2]), float(box["top"][:-2])
        ground = colour(box["ground"]) or page
        where = box["name"], x, y
        assert 0 <= x < right <= width, where
        assert at(middle, max(0, x - 3)) == page, where  # beside it
        assert at(middle, x + int(edge) // 2) == (colour(box["edge"]) if edge else ground), where
        assert at(y + int(crest) // 2, across) == (colour(box["crest"]) if crest else ground), where
        assert at(bottom - 4, right - 14) == ground, where


def test_a_telephone_shows_all_of_the_page(browser: Browser, two: Path) -> None:
    """At 400 px nothing but tables and plots goes beyond the edge, and those scroll by themselves; texts
    are no smaller than 12 px, and nothing covers anything."""
    sized(browser, 400)
    browser.open(two)
    beyond = browser.value(
        """[...document.querySelectorAll("body *")].filter((one) => {
            const box = one.getBoundingClientRect();
            return box.width && box.right > 400 && !one.closest(".wide, .plot");
        }).map((one) => one.outerHTML.slice(0, 80))"""
    )
    assert beyond == []
    assert browser.value("document.documentElement.scrollWidth") == 400
    small = browser.value(
        """[...document.querySelectorAll("main *")].filter((one) =>
            [...one.childNodes].some((text) => text.nodeType === 3 && text.textContent.trim())
            && parseFloat(getComputedStyle(one).fontSize) < 12
        ).map((one) => one.outerHTML.slice(0, 80))"""
    )
    assert small == []
    tops = browser.value(
        """[...document.querySelectorAll("main > *")].map((one) => {
            const box = one.getBoundingClientRect();
            return [box.top, box.bottom];
        })"""
    )
    assert all(bottom <= top for (_, bottom), (top, _) in itertools.pairwise(tops)), tops


def test_exact_rows_unfold_by_a_click(browser: Browser, two: Path) -> None:
    browser.open(two)
    exact = replace(large(3, 4), measures=[measure(0, None, "norm", 0.0), measure(0, 0, "up", 0.1)])
    two.write_text(as_html.render(exact, RULES), encoding="utf-8")
    browser.open(two)
    seen = "document.querySelector('.exact table').checkVisibility({ contentVisibilityAuto: true })"
    assert browser.value(seen) is False
    browser.click(".exact summary")
    assert browser.value(seen) is True
