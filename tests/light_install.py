"""An environment as `pip install qconvert` makes it: the core requirements and what they require, and
nothing of what the extras bring."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tomllib
import venv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from qconvert.cli.demo import write_sample

ROOT = Path(__file__).parent.parent

# Run by that environment's Python: command lines from stdin, each as its exit code, output and errors.
_COMMANDS = """
import contextlib, io, json, sys
from qconvert.cli.main import main
found = []
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
            code = 0
        except SystemExit as end:
            code = end.code or 0
    found.append([code, out.getvalue(), err.getvalue()])
json.dump([found, sorted({name.partition(".")[0] for name in sys.modules})], sys.stdout)
"""


EXTRAS_PACKAGES = {
    "torch",
    "transformers",
    "llmcompressor",
    "triton",
    "numba",
    "ray",
    "s3fs",
    "datasets",
}
CALIBRATE = (
    "torch, transformers and llmcompressor are not installed: pip install 'qconvert[calibrate]'"
)
EVAL = "torch and transformers are not installed: pip install 'qconvert[calibrate]'"
KERNELS = "torch and triton are not installed: pip install 'qconvert[kernels]'"

# Name: a command line in a folder that holds `fp8`, the sample; after it, what earlier ones made.
RUNS: dict[str, str] = {
    "inspect": "inspect fp8",
    "report": "report fp8",
    "plan": "plan dequant-fp8 fp8",
    "header rules": "validate fp8 --level headers",
    "validate": "validate fp8 --level full -v",
    "fuse": "fuse fp8 fused --for sglang --validate full",
    "dequant": "dequant fp8 bf16 --validate full",
    "plan a calibration": "plan gptq.yaml bf16",
    "amx": "amx fp8 amx --method int4 --numa 1 --validate full",
    "w4a16": "w4a16 fp8 w4 --rtn --validate full",
    "nvfp4": "nvfp4 fp8 nvfp4 --dialect compressed-tensors --validate full",
    "fp8": "fp8 bf16 fp8-again --validate full",
    "int8": "int8 bf16 int8 --validate full",
    "mx": "mx bf16 mx --validate full",
    "kt": "kt fp8 --cpu-out kt --cpu int4 --numa 1",
    "split": "split fp8 stages --pp 2 --for sglang",
    "upload": "upload bf16 me/model --dry-run",
    "advise": "advise fp8 --for sglang --gpus 1",
    "diff": "diff fp8 fp8",
    "repair": "repair bf16 --dry-run",
    "kernels": "validate bf16 --against fp8 --kernels -v",
}
# What each needs, and the words it ends with.
REFUSED: dict[str, str] = {
    "w4a16 bf16 out --gptq --data data.txt": CALIBRATE,
    "w4a16 bf16 out --gptq --data data.txt --dry-run": CALIBRATE,
    "w4a16 bf16 out --gptq --targets Linear --data data.txt --dry-run": CALIBRATE,
    "amx bf16 out --method int4 --numa 1 --gptq --data data.txt --dry-run": CALIBRATE,
    "nvfp4 bf16 out --dialect modelopt --gptq --data data.txt --dry-run": CALIBRATE,
    "kt bf16 --cpu-out out --cpu int4 --numa 1 --gptq --data data.txt --dry-run": CALIBRATE,
    "run gptq.yaml bf16 out": CALIBRATE,
    "eval w4 --against bf16 --data data.txt": EVAL,
    "w4a16 unknown out --rtn": (
        "its class cannot be read without transformers (pip install 'qconvert[calibrate]')"
    ),
    "dequant fp8 out --engine ray": "ray is not installed: pip install 'qconvert[ray]'",
    "dequant s3://bucket/model out": "s3:// is missing: pip install 'qconvert[s3]'",
    "demo": "torch is not installed: pip install 'qconvert[all]'",
}


@dataclass(frozen=True)
class Said:
    """What one command line gave."""

    code: int
    out: str
    err: str


def project() -> Mapping[str, Any]:
    """pyproject.toml's table of the project."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        table: Mapping[str, Any] = tomllib.load(file)["project"]
    return table


def closure(requirements: Iterable[str]) -> set[str]:
    """Names of the installed distributions that requirements lead to, with what those require."""
    found: set[str] = set()
    left = [Requirement(text) for text in requirements]
    while left:
        wanted = left.pop()
        name = canonicalize_name(wanted.name)
        if name in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        left += [Requirement(text) for text in metadata.requires(name) or ()]
    return found


def light_python(folder: Path, *extras: str) -> Path:
    """The Python of a new environment that sees the checkout, and of what is installed here only what
    the core requirements, and some extras', lead to: by links, so nothing is fetched or copied."""
    extra = [text for name in extras for text in project()["optional-dependencies"][name]]
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in closure([*project()["dependencies"], *extra]):
        dist = metadata.distribution(name)
        for top in {file.parts[0] for file in dist.files or ()}:
            target = Path(str(dist.locate_file(top))).resolve()
            if top not in ("..", "__pycache__") and target.exists():
                (site / top).symlink_to(target)
    (site / "qconvert-checkout.pth").write_text(f"{ROOT}\n")
    return folder / "bin" / "python"


def commands(
    python: Path, lines: Sequence[Sequence[str]], folder: Path, **environment: str
) -> tuple[list[Said], set[str]]:
    """What command lines give, one after another in one process that starts in `folder`, and what it
    imported."""
    done = subprocess.run(
        [python, "-P", "-c", _COMMANDS],
        input=json.dumps([*map(list, lines)]), cwd=folder,
        capture_output=True, text=True, check=False, env=clean(**environment),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said, imported = json.loads(done.stdout)
    return [Said(*one) for one in said], set(imported)


def clean(**more: str) -> dict[str, str]:
    """The environment without what would lead a Python to other packages."""
    other = ("PYTHONPATH", "PYTHONPYCACHEPREFIX", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in other}
    return kept | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"} | more


@dataclass(frozen=True)
class Light:
    """What each of RUNS and REFUSED gave, by name or line, in `folder`, and what they imported."""

    folder: Path
    said: Mapping[str, Said]
    imported: frozenset[str]


def light(python: Path, folder: Path) -> Light:
    """Run RUNS and REFUSED with an environment's Python, in a folder that holds what they read."""
    sample = folder / "fp8"
    write_sample(sample)
    (folder / "data.txt").write_text("What a calibration reads.\n" * 100)
    (folder / "gptq.yaml").write_text("passes:\n  - w4a16: {calibrate: {data: data.txt}}\n")
    # A checkpoint of a class that no file describes.
    unknown = shutil.copytree(sample, folder / "unknown") / "config.json"
    config = json.loads(unknown.read_text())
    config |= {"model_type": "my_moe", "architectures": ["MyMoeForCausalLM"]}
    unknown.write_text(json.dumps(config))
    said, imported = commands(python, [line.split() for line in (*RUNS.values(), *REFUSED)], folder)
    return Light(folder, dict(zip((*RUNS, *REFUSED), said, strict=True)), frozenset(imported))
