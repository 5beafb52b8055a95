"""A class that a newer transformers has and nobody here ever saw: Mixtral's code with names of its own,
put where transformers keeps its models. It works without a file, in every command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from checkpoints import Result, read_tensors
from other_package import run_beside

pytestmark = pytest.mark.peer
HERE = Path(str(transformers.__file__)).parent
ROOT = Path(__file__).parents[2]
# What the class calls its modules.
OWN = {
    r"Mixtral": "OddMoe", r"mixtral": "oddmoe", r"\.mlp\b": ".bank", r"self\.gate\b": "self.chooser",
    r"self_attn\b": "mixer", r"input_layernorm": "pre_norm", r"post_attention_layernorm": "post_norm",
    r"num_local_experts": "n_choices", r"\bw1\b": "into_a", r"\bw3\b": "into_b", r"\bw2\b": "outof",
}  # fmt: skip
CONVERSION = """        "oddmoe": [
            WeightConverter(
                source_patterns=[".experts.*.into_a.weight", ".experts.*.into_b.weight"],
                target_patterns=".experts.gate_up_proj",
                operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
            ),
            WeightConverter(
                source_patterns=[".experts.*.outof.weight"],
                target_patterns=".experts.down_proj",
                operations=[MergeModulelist(dim=0)],
            ),
        ],
"""
SAVE = """
import sys, torch, transformers
config = transformers.AutoConfig.for_model(
    "oddmoe", vocab_size=512, hidden_size=256, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, n_choices=8, tie_word_embeddings=False,
)
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.save_pretrained(sys.argv[1])
"""
READ = """
import sys, transformers
_, said = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not said["missing_keys"] and not said["unexpected_keys"], said
"""
LOAD = """
import sys, json, torch, transformers
logits = []
for folder in sys.argv[1:]:
    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"], said
    with torch.no_grad():
        logits.append(model(torch.arange(16)[None]).logits)
assert all(torch.equal(logits[0], other) for other in logits)
"""


def _linked(here: Path, to: Path) -> None:
    to.mkdir()
    for one in here.iterdir():
        if one.name != "__pycache__":
            (to / one.name).symlink_to(one)


def _written(file: Path, text: str) -> None:
    file.unlink(missing_ok=True)
    file.write_text(text)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """transformers with one model more."""
    site = tmp_path_factory.mktemp("site")
    newer = site / "transformers"
    _linked(HERE, newer)
    for folder in ("models", "models/auto"):
        (newer / folder).unlink()
        _linked(HERE / folder, newer / folder)
    own = newer / "models" / "oddmoe"
    own.mkdir()
    for file in (HERE / "models" / "mixtral").glob("*.py"):
        text = file.read_text()
        for word, instead in OWN.items():
            text = re.sub(word, instead, text)
        _written(own / file.name.replace("mixtral", "oddmoe"), text)
    for table in ("auto_mappings.py", "modeling_auto.py"):
        text = (HERE / "models" / "auto" / table).read_text()
        lines = [
            line + re.sub("mixtral", "oddmoe", line).replace("Mixtral", "OddMoe")
            if line.strip().startswith('("mixtral", ') else line
            for line in text.splitlines(keepends=True)
        ]  # fmt: skip
        _written(newer / "models" / "auto" / table, "".join(lines))
    conversion = (HERE / "conversion_mapping.py").read_text()
    start = conversion.index('        "mixtral": [\n')
    _written(newer / "conversion_mapping.py", conversion[:start] + CONVERSION + conversion[start:])
    return site


@pytest.fixture(scope="module")
def source(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "oddmoe"
    _python(site, SAVE, folder)
    return folder


def _python(site: Path, text: str, *words: Path) -> None:
    path = os.pathsep.join([str(site), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", text, *map(str, words)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_new_class_needs_no_file(site: Path, source: Path, tmp_path: Path) -> None:
    def sound(*words: str | Path) -> Result:
        result = run_beside(site, *words, XDG_CACHE_HOME=str(tmp_path / "cache"))
        assert result.code == 0, result.out + result.err
        return result

    names = read_tensors(source)
    assert "model.layers.1.bank.experts.7.into_b.weight" in names, sorted(names)[:8]
    assert "2 layers, 8 experts" in sound("inspect", source).out
    jobs = ("--jobs", "1")
    sound("experts", "stack", source, tmp_path / "stacked", *jobs)
    stack = read_tensors(tmp_path / "stacked")["model.layers.1.bank.experts.gate_up_proj"]
    # Gate rows first, as the class's own conversion concatenates them.
    gate = names["model.layers.1.bank.experts.0.into_a.weight"].data
    assert (stack.shape, stack.data[: len(gate)]) == ((8, 512, 256), gate)
    sound("run", "copy", source, tmp_path / "copy", *jobs)
    _python(site, LOAD, source, tmp_path / "stacked", tmp_path / "copy")
    sound("w4a16", source, tmp_path / "w4", "--rtn", *jobs)
    packed = [n for n in read_tensors(tmp_path / "w4") if n.endswith("weight_packed")]
    assert len(packed) == 2 * 8 * 3
    sound("nvfp4", source, tmp_path / "fp4", "--dialect", "modelopt", *jobs)
    sound("fp8", source, tmp_path / "fp8", *jobs)
    sound("dequant", tmp_path / "fp8", tmp_path / "bf16", *jobs)
    back = read_tensors(tmp_path / "bf16")
    assert {name: tensor.shape for name, tensor in back.items()} == {
        name: tensor.shape for name, tensor in names.items()
    }
    _python(site, READ, tmp_path / "bf16")
    sound("amx", source, tmp_path / "amx", "--method", "int8", "--numa", "1", *jobs)
    sound("split", source, tmp_path / "stages", "--pp", "1,1", *jobs)
    for made in ("stacked", "w4", "fp4", "fp8", "amx", "stages"):
        sound("validate", tmp_path / made, "--against", source, "--level", "full", *jobs)
    sound("validate", tmp_path / "bf16", "--against", tmp_path / "fp8", "--level", "full", *jobs)
    # An answer for each set of names: experts apart, stacked, by stage.
    kept = [*(tmp_path / "cache" / "qconvert" / "families").iterdir()]
    assert 1 <= len(kept) <= 6
    assert {json.loads(file.read_text())["class"] for file in kept} == {"OddMoeForCausalLM"}
