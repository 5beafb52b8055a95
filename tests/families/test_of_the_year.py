"""Models of the year at published sizes (`of_the_year.yaml`) but for the number of their experts, as
headers over holes: every command plans, or is refused for a cause of `refusals.CAUSES`, `validate` finds
no error, and `advise` answers for each runtime.

One in `make test`; all with QCONVERT_ALL=1, and the newest transformers on the path (`make families`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from checkpoints import run_cli

from families.classes import config, model_types
from families.headers_only import write
from families.refusals import COMMANDS, cause
from qconvert.layouts.derived.find import class_of

_ALL = bool(os.environ.get("QCONVERT_ALL"))
_HERE = Path(__file__).parent
MODELS: Mapping[str, str] = yaml.safe_load((_HERE / "of_the_year.yaml").read_text(encoding="utf-8"))
SAMPLE = list(MODELS) if _ALL else ["inceptionai/Jais-2-8B-Chat"]
# Rows that transformers saves for experts that compute nothing, and no published folder has.
NAMES = {"longcat_flash": {r"\.experts\.([4-9]|[0-9]{2,})\.": None}}
FEW = 4  # experts: all of some models, test_full_size.py


def published(model_type: str, text: str, folder: Path) -> Path:
    """`text`: the published model whose config is that of the text model, "" for the defaults."""
    import transformers

    hf: Any = transformers
    own = config(model_type)
    if text:
        published = yaml.safe_load((_HERE / "published" / f"{text}.yaml").read_text("utf-8"))
        own["text_config"] = published["config"]
    found = hf.AutoConfig.for_model(**own)
    described = class_of({"model_type": model_type}, ())
    key = "" if isinstance(described, str) else described.keys.get("num_experts", "")
    if key:
        setattr(found.get_text_config(), key, FEW)
    return write(found, folder, {}, NAMES.get(model_type, {}))


@pytest.mark.parametrize("model", SAMPLE)
def test_every_command(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, _, text = MODELS[model].partition(" ")
    if model_type not in model_types():
        pytest.skip("its class is of a newer transformers")
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_bavail=1 << 40, f_frsize=4096)
    )
    source, out = published(model_type, text, tmp_path / "source"), tmp_path / "out"
    for name, (command, *options) in {"dequant": ("dequant",), **COMMANDS}.items():
        first = options[:1] if command == "experts" else []
        done = run_cli(command, *first, source, out, *options[len(first) :], "--dry-run")
        assert done.code == 0 or (done.code == 1 and cause(name, done.err)), (name, done.err)
    checked = run_cli("validate", source, "--level", "headers")
    assert checked.code == 0, checked.out
    for runtime in ("sglang", "vllm", "ktransformers"):
        memory = ("--cpu-memory", "2TB") if runtime == "ktransformers" else ()
        done = run_cli("advise", source, "--for", runtime, *memory)
        # 3: nothing that was considered is known to load; 5: whether anything does is not known.
        dense = runtime == "ktransformers" and "has no routed experts" in done.err
        assert done.code in (0, 3, 5) or dense, done.err
