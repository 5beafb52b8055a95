"""`qconvert report`: what others need to help, and no path, token, repo or weight."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from checkpoints import (
    bf16_moe,
    convert,
    edit_header,
    ran,
    run_cli,
    shard_name,
    tree,
    watched_reads,
)
from checkpoints import edit_json as edited
from loopback_hub import TOKEN

from qconvert import __version__
from qconvert.cli.report import without_paths

_ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that qconvert made of a source whose card names its repo."""
    folder = tmp_path_factory.mktemp("SECRET-user")
    source = bf16_moe().write(folder / "source")
    (source / "README.md").write_text("---\nbase_model: secret-org/secret-name\n---\n# x\n")
    convert("copy", source, folder / "made", "--base-model", "secret-org/secret-name")
    return folder / "made"


def test_without_a_folder() -> None:
    done = ran("report")
    assert f"qconvert {__version__}, CPython " in done.out
    assert re.search(r"\bnumpy \d", done.out)
    assert "GB of memory" in done.out


def test_of_a_folder(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = watched_reads(monkeypatch)
    done = run_cli("report", made)
    assert (done.code, done.err) == (0, "")
    for text in ("state: finished", "2 layers, 2 experts", "made by qconvert", "no finding"):
        assert text in done.out, done.out
    assert sizes == []


def test_nothing_of_the_user_is_in_it(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("QCONVERT_KERNELS", "numpy")
    monkeypatch.setenv("QCONVERT_X", "/home/SECRET-user")
    before = tree(made)
    for more in ([], ["--json"]):
        said = run_cli("report", made, *more).out
        for text in (TOKEN, "SECRET-user", str(made), "secret-org", str(Path.home()) + "/"):
            assert text not in said, text
        assert "QCONVERT_X" in said  # the name alone
    assert tree(made) == before
    assert "secret-org/secret-name" in run_cli("report", made, "--paths").out
    assert run_cli("report", made, "--paths").out.count(str(made)) == 1


def test_findings_are_counted_by_rule(made: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(made, tmp_path / "SECRET-broken")
    edited(broken / "config.json", lambda config: config.update(num_hidden_layers=5))
    found = json.loads(run_cli("report", broken, "--json").out)["folder"]["findings"]
    expected = json.loads(run_cli("validate", broken, "--json").out)["findings"]
    assert expected
    assert {one["rule"] for one in found} == {one["rule"] for one in expected}
    assert sum(one["count"] for one in found) == len(expected)
    assert all("SECRET" not in one["first"] for one in found)
    code, text, _ = run_cli("report", broken)
    assert code == 3
    assert f"error {found[0]['rule']}, " in text or f"warning {found[0]['rule']}, " in text


def test_a_folder_that_cannot_be_opened_is_reported(made: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(made, tmp_path / "SECRET-broken")
    for file in broken.glob("*.safetensors"):
        file.write_bytes(b"\xff" * 64)
    done = run_cli("report", broken)
    assert done.code == 3
    assert "cannot be opened: FOLDER/" in done.out
    assert "SECRET" not in done.out
    assert json.loads(run_cli("report", broken, "--json").out)["folder"]["refused"]


def test_no_such_folder_is_an_error() -> None:
    done = run_cli("report", "nosuch")
    assert (done.code, done.err) == (1, "qconvert: error: nosuch: no such file or folder\n")


def test_a_shape_that_does_not_fit_is_shown_by_its_place(made: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(made, tmp_path / "broken")
    first = next(broken.glob("*.safetensors"))

    def change(table: dict[str, object]) -> None:
        table["__metadata__"] = {"format": "pt", "qconvert": "other"}

    edit_header(first, change)
    assert "first: " in run_cli("report", broken).out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("/home/me/x: no", "PATH: no"),
        ("here/model/config.json is missing", "FOLDER/config.json is missing"),
        ("s3://bucket/x.y is gone", "PATH is gone"),
        ("~/models/a", "PATH"),
        ("blocks of 128/128, 3/4 of it", "blocks of 128/128, 3/4 of it"),
        ("re:.*\\.mlp\\.experts", "re:.*\\.mlp\\.experts"),
    ],
)
def test_paths_are_taken_out(text: str, said: str) -> None:
    assert without_paths(text, "here/model") == said


def test_it_is_light(made: Path) -> None:
    import subprocess

    code = (
        "import sys; from qconvert.cli.main import main\n"
        "try: main(['report', sys.argv[1]])\nexcept SystemExit: pass\n"
        "print([n for n in ('torch', 'transformers', 'numba') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(made)],
        capture_output=True, text=True, check=True, env=dict(os.environ),
    )  # fmt: skip
    assert done.stdout.endswith("\n[]\n")


def test_issue_templates_ask_for_it() -> None:
    import yaml

    forms = sorted((_ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) >= 3
    asked = 0
    for form in forms:
        read = yaml.safe_load(form.read_text(encoding="utf-8"))
        if form.name == "config.yml":
            continue
        assert {"name", "description", "body"} <= set(read)
        ids = [field["id"] for field in read["body"] if "id" in field]
        assert len(ids) == len(set(ids))
        for field in read["body"]:
            assert field["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
            assert "label" in field["attributes"] or field["type"] == "markdown"
        asked += "qconvert report" in form.read_text(encoding="utf-8")
    assert asked >= 2


def test_the_first_shard_is_there(made: Path) -> None:
    """What the tests above break."""
    assert (made / shard_name(1)).is_file() or (made / "model.safetensors").is_file()
