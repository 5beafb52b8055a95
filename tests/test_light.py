"""What runs with the core requirements alone, and what says, while planning, which extra it needs.

The environment holds what the core requirements lead to and nothing else (tests/light_install.py), so a
requirement that is used and not declared is found here too. tests/test_wheel.py installs the wheel."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from light_install import Said, commands, light_python

from qconvert.cli.demo_checkpoint import write_sample

_EXTRAS = {"torch", "transformers", "llmcompressor", "triton", "numba", "ray", "s3fs", "datasets"}
_CALIBRATE = (
    "torch, transformers and llmcompressor are not installed: pip install 'qconvert[calibrate]'"
)
_EVAL = "torch and transformers are not installed: pip install 'qconvert[calibrate]'"
_KERNELS = "torch and triton are not installed: pip install 'qconvert[kernels]'"

# Name: a command line in a folder that holds `fp8`, the sample; after it, what earlier ones made.
RUNS: dict[str, str] = {
    "inspect": "inspect fp8",
    "plan": "plan dequant-fp8 fp8",
    "header rules": "validate fp8 --level headers",
    "validate": "validate fp8 --level full",
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
    "kernels": "validate bf16 --against fp8 --kernels",
    "attribute": "validate w4 --against fp8 --attribute",
    "logits": "validate bf16 --against fp8 --logits 2",
}
# What each needs, and the words it ends with.
REFUSED: dict[str, str] = {
    "w4a16 bf16 out --gptq --data data.txt": _CALIBRATE,
    "w4a16 bf16 out --gptq --data data.txt --dry-run": _CALIBRATE,
    "w4a16 bf16 out --gptq --targets Linear --data data.txt --dry-run": _CALIBRATE,
    "amx bf16 out --method int4 --numa 1 --gptq --data data.txt --dry-run": _CALIBRATE,
    "nvfp4 bf16 out --dialect modelopt --gptq --data data.txt --dry-run": _CALIBRATE,
    "kt bf16 --cpu-out out --cpu int4 --numa 1 --gptq --data data.txt --dry-run": _CALIBRATE,
    "run gptq.yaml bf16 out": _CALIBRATE,
    "eval w4 --against bf16 --data data.txt": _EVAL,
    "w4a16 unknown out --rtn": (
        "its class cannot be read without transformers (pip install 'qconvert[calibrate]')"
    ),
    "dequant fp8 out --engine ray": "ray is not installed: pip install 'qconvert[ray]'",
    "dequant s3://bucket/model out": "s3:// is missing: pip install 'qconvert[s3]'",
    "demo": "torch is not installed: pip install 'qconvert[all]'",
}


class Light:
    """What every command gave, in one process of the light environment, and what that imported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_sample(folder / "fp8")
        (folder / "data.txt").write_text("What a calibration reads.\n" * 100)
        (folder / "gptq.yaml").write_text("passes:\n  - w4a16: {calibrate: {data: data.txt}}\n")
        python = light_python(folder / "environment")
        first, early = commands(python, self.lines([*RUNS.values()]), folder)
        self._unknown()
        last, late = commands(python, self.lines([*REFUSED]), folder)
        self.said: dict[str, Said] = dict(zip([*RUNS, *REFUSED], [*first, *last], strict=True))
        self.imported = early | late

    def lines(self, texts: list[str]) -> list[list[str]]:
        return [text.split() for text in texts]

    def _unknown(self) -> None:
        """A checkpoint of a class that no file describes."""
        folder = shutil.copytree(self.folder / "fp8", self.folder / "unknown")
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": "my_moe", "architectures": ["MyMoeForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Light:
    return Light(tmp_path_factory.mktemp("light"))


def test_nothing_of_the_extras_is_there(light: Light) -> None:
    assert not light.imported & _EXTRAS
    assert {"numpy", "click", "huggingface_hub"} <= light.imported


@pytest.mark.parametrize("name", RUNS)
def test_it_runs_with_the_core_alone(name: str, light: Light) -> None:
    said = light.said[name]
    assert said.code == 0, said.out + said.err
    if "full" in RUNS[name]:
        assert "0 errors, 0 warnings" in said.out


def test_the_results_are_those_of_any_install(light: Light, tmp_path: Path) -> None:
    """Byte for byte what this environment makes, with numba, torch and all."""
    from checkpoints import run_cli, tree

    for line in ("dequant fp8 bf16", "w4a16 fp8 w4 --rtn", "amx fp8 amx --method int4 --numa 1"):
        command, source, out, *options = line.split()
        done = run_cli(command, light.folder / source, tmp_path / out, *options)
        assert done.code == 0, done.err
        assert tree(tmp_path / out) == tree(light.folder / out)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("validate", f"Triton kernels against torch (give --kernels; {_KERNELS})"),
        ("validate", f"what transformers computes with both (give --logits N; {_EVAL})"),
        ("validate", "(give --attribute; torch is not installed: pip install 'qconvert[kernels]')"),
        ("kernels", "the w4a16 kernel multiplies with INT4 weights within float32's rounding"),
        ("kernels", f"(its table says which, and on which device) ({_KERNELS})"),
        ("attribute", "rounded (the table says by what) (torch is not installed: pip install "),
        ("logits", f"what the source's do (transformers, the same tokens) ({_EVAL})"),
    ],
)  # fmt: skip
def test_what_was_not_proved_names_its_extra(name: str, said: str, light: Light) -> None:
    lines = light.said[name].out.splitlines()
    assert any(line.startswith("not checked: ") and said in line for line in lines), lines


def test_a_plan_of_a_calibration_warns(light: Light) -> None:
    """It can be planned here and run elsewhere."""
    said = light.said["plan a calibration"]
    assert f"warning calibration runs the model's own class, and {_CALIBRATE}" in said.out


@pytest.mark.parametrize("line", REFUSED)
def test_what_needs_an_extra_is_refused_with_its_command(line: str, light: Light) -> None:
    said = light.said[line]
    assert said.code in (1, 2)
    assert REFUSED[line] in said.err
    assert "Traceback" not in said.err
    assert not (light.folder / "out").exists()
