"""Published models, as headers over holes, through every command that plans.

`published/` holds a file a model: where its config and its names are from, and a line for each kind of
tensor. Each command must plan, or be refused for the cause in `refused.yaml`. With few experts by
default; `QCONVERT_ALL=1 pytest -m big tests/families/test_full_size.py` plans all of them, up to 208,550
tensors, and `QCONVERT_TABLE=FILE` notes for each command wall seconds, CPU seconds, those for 10,000
tensors, peak MB and the exit status.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import headers
import pytest
import yaml
from headers import HeaderSet

from qconvert import api
from qconvert.core.family import role_index
from qconvert.core.roles import Kind
from qconvert.layouts.derived.find import family_for

_FOLDER = Path(__file__).parent
_ALL = bool(os.environ.get("QCONVERT_ALL"))
MODELS = sorted(file.stem for file in (_FOLDER / "published").glob("*.yaml"))
COMMANDS = {
    "dequant": ("dequant",),
    "stack": ("experts", "stack"),
    "unstack": ("experts", "unstack"),
    "w4a16 experts": ("w4a16", "--rtn", "--group-size", "32"),
    "w4a16 Linear": ("w4a16", "--rtn", "--group-size", "32", "--targets", "Linear"),
    "nvfp4 experts": ("nvfp4", "--dialect", "modelopt"),
    "nvfp4 all": ("nvfp4", "--dialect", "compressed-tensors", "--targets", "Linear"),
    "amx": ("amx", "--method", "int4", "--numa", "1"),
    "split": ("split", "--pp", "2", "--for", "vllm"),
    "validate": ("validate", "--level", "headers"),
}
# Of each published model, the names that belong to a draft: all that its runtime loads as one.
DRAFTS = {
    "deepseek-v3.2": ("model.layers.61.",), "deepseek-v4-flash": ("mtp.0.",),
    "ernie-4.5-300b": ("model.mtp_",), "glm-4.7-flash": ("model.layers.47.",),
    "glm-4.7-fp8": ("model.layers.92.",), "glm-5": ("model.layers.78.",),
    "glm-5-fp8": ("model.layers.78.",), "nemotron-3-super-120b": ("mtp.",),
    "qwen3.5-397b": ("mtp.",),
}  # fmt: skip


@cache
def published(model: str) -> HeaderSet:
    found = headers.read(_FOLDER / "published" / f"{model}.yaml")
    return found if _ALL else headers.with_few(found)


@cache
def refused() -> Mapping[str, Mapping[str, str]]:
    """Causes by model and command, as regular expressions."""
    found: Mapping[str, Mapping[str, str]] = yaml.safe_load(
        (_FOLDER / "refused.yaml").read_text(encoding="utf-8")
    )
    return found


@pytest.mark.big
@pytest.mark.parametrize("model", MODELS)
def test_every_name_has_a_role(model: str) -> None:
    found = published(model)
    family = family_for(found.config, found.tensors)
    taken = role_index(family, found.config, found.tensors)
    assert taken.unknown == ()
    assert taken.absent() == []
    draft = [name for name in found.tensors if family.is_mtp(name, taken.dims)]
    assert draft == [n for n in found.tensors if n.startswith(DRAFTS.get(model, ("no draft",)))]
    assert draft == [n for n, place in taken.places.items() if place.role.name.startswith("mtp.")]
    for name, place in taken.places.items():
        if name.endswith(("router.weight", ".gate.weight", ".gate.wg.weight")):
            assert place.role.kind is Kind.ROUTER, name


@pytest.mark.big
@pytest.mark.parametrize("model", MODELS)
def test_validate_has_no_error_on_it(model: str, tmp_path: Path) -> None:
    """The models of tests/headers: test_header_rules.py; tiny families: test_commands.py."""
    headers.write_sparse(published(model), tmp_path)
    report = api.validate(tmp_path, level="headers")
    assert [finding for finding in report.findings if finding.severity == "error"] == []


# The command line, on a disk that holds any model.
_ROOMY = """
import os, types
os.statvfs = lambda path: types.SimpleNamespace(f_bavail=1 << 40, f_frsize=4096)
if peak := os.environ.get("QCONVERT_PEAK"):
    # Not getrusage: there a child begins with the memory of the process that started it.
    import atexit, shutil
    atexit.register(shutil.copy, "/proc/self/status", peak)
from qconvert.__main__ import main
main()
"""


@pytest.mark.big
@pytest.mark.parametrize("model", MODELS[:: 1 if _ALL else 12])
def test_every_command(model: str, tmp_path: Path) -> None:
    found, source = published(model), tmp_path / "source"
    source.mkdir()
    headers.write_sparse(found, source)
    causes = refused().get(model, {})
    for name, (command, *options) in COMMANDS.items():
        out = [] if command == "validate" else [tmp_path / "out"]
        first = options[:1] if command == "experts" else []
        rest = [*options[len(first) :], *(["--dry-run"] if out else [])]
        code, text = _ran([command, *first, source, *out, *rest], model, name, len(found.tensors))
        cause = causes.get(name, "")
        assert (code == 0) == (not cause), (name, text)
        assert re.search(cause, text), (name, text)
    assert causes.keys() <= COMMANDS.keys()


def _ran(words: list[str | Path], model: str, name: str, tensors: int) -> tuple[int, str]:
    """The exit status and what was said. In a process of its own: its peak memory is the command's."""
    table = os.environ.get("QCONVERT_TABLE")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as status:
        if table:
            env["QCONVERT_PEAK"] = status.name
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", _ROOMY, *map(str, words)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, check=False,
        )  # fmt: skip
        wall, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
        if table:
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            peak = re.search(r"VmHWM:\s+(\d+) kB", status.read())
            assert peak, (name, done.stdout)
            line = (
                f"{model} | {tensors:,} | {name} | {wall:.1f} | {cpu:.1f} | "
                f"{cpu / tensors * 10_000:.1f} | {int(peak[1]) / 1024:.0f} | {done.returncode}\n"
            )
            with Path(table).open("a", encoding="utf-8") as file:
                file.write(line)
    return done.returncode, done.stdout


# The models that are published in 4 bits, in BF16, FP8 and NVFP4. Kimi-K3 has no public config that was
# found, and is not here.
FOUR_BITS = {
    "gpt-oss-120b": {"bf16": "dequant: {}"},
    "deepseek-v4-flash": {
        "bf16": "dequant: {}",
        "fp8": "relabel: {to: fp8}",
        "nvfp4": "relabel: {to: nvfp4, dialect: modelopt, input_scale: 1.0}",
        "nvfp4 of all": "dequant: {}\n- nvfp4: {dialect: modelopt}",
    },
    "kimi-k2.5": {
        "bf16": "dequant: {}",
        "fp8": "fp8: {}",
        "nvfp4": "nvfp4: {dialect: compressed-tensors, targets: [Linear]}",
    },
}


@pytest.mark.parametrize("command", ["fp8", "nvfp4 --dialect modelopt"])
def test_deepseek_v4_is_refused_with_the_way(command: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    headers.write_sparse(headers.with_few(published("deepseek-v4-flash")), tmp_path / "source")
    words: list[str | Path] = [*command.split(), tmp_path / "source", tmp_path / "out", "--dry-run"]
    code, text = _ran(words, "deepseek-v4-flash", command, 1)
    assert code == 1
    assert "qconvert relabel --to fp8" in text


@pytest.mark.big
@pytest.mark.parametrize("model", FOUR_BITS)
def test_what_is_published_in_four_bits_is_planned(model: str, tmp_path: Path) -> None:
    found, source = published(model), tmp_path / "source"
    source.mkdir()
    headers.write_sparse(found, source)
    for form, passes in FOUR_BITS[model].items():
        recipe = tmp_path / f"{form}.yaml"
        recipe.write_text(f"passes:\n- {passes}\n")
        words: list[str | Path] = ["run", recipe, source, tmp_path / "out", "--dry-run"]
        code, text = _ran(words, model, f"to {form}", len(found.tensors))
        assert code == 0, (form, text)
