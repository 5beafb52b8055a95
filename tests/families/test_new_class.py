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
from checkpoints import read_tensors
from light_install import commands

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
LOAD = """
import sys, json, torch, transformers
logits = []
for folder in sys.argv[1:]:
    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"], said
    with torch.no_grad():
        logits.append(model(torch.arange(16)[None]).logits)
# The last is rounded.
assert all(torch.equal(logits[0], other) for other in logits[:-1])
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
    path = os.pathsep.join([str(site), str(ROOT)])
    cache = tmp_path / "cache"
    names = read_tensors(source)
    assert "model.layers.1.bank.experts.7.into_b.weight" in names, sorted(names)[:8]
    made = ("stacked", "w4", "fp4", "fp8", "amx", "stages")
    lines = [
        "inspect SRC", "experts stack SRC stacked", "run copy SRC copy", "w4a16 SRC w4 --rtn",
        "nvfp4 SRC fp4 --dialect modelopt", "fp8 SRC fp8", "dequant fp8 bf16",
        "amx SRC amx --method int8 --numa 1", "split SRC stages --pp 1,1",
        *(f"validate {one} --against SRC --level full" for one in made),
        "validate bf16 --against fp8 --level full",
    ]  # fmt: skip
    words = [line.replace("SRC", str(source)).split() for line in lines]
    words = [line if line[0] == "inspect" else [*line, "--jobs", "1"] for line in words]
    # In one process, which finds the package: an import of transformers takes seconds.
    done, _ = commands(
        Path(sys.executable), words, tmp_path, PYTHONPATH=path, XDG_CACHE_HOME=str(cache)
    )
    for line, said in zip(lines, done, strict=True):
        assert said.code == 0, line + said.out + said.err
    assert "2 layers, 8 experts" in done[0].out
    stack = read_tensors(tmp_path / "stacked")["model.layers.1.bank.experts.gate_up_proj"]
    # Gate rows first, as the class's own conversion concatenates them.
    gate = names["model.layers.1.bank.experts.0.into_a.weight"].data
    assert (stack.shape, stack.data[: len(gate)]) == ((8, 512, 256), gate)
    packed = [n for n in read_tensors(tmp_path / "w4") if n.endswith("weight_packed")]
    assert len(packed) == 2 * 8 * 3
    back = read_tensors(tmp_path / "bf16")
    assert {name: tensor.shape for name, tensor in back.items()} == {
        name: tensor.shape for name, tensor in names.items()
    }
    _python(site, LOAD, source, *(tmp_path / one for one in ("stacked", "copy", "bf16")))
    # An answer for each set of names: experts apart, stacked, by stage.
    kept = [*(cache / "qconvert" / "families").iterdir()]
    assert 1 <= len(kept) <= 6
    assert {json.loads(file.read_text())["class"] for file in kept} == {"OddMoeForCausalLM"}
