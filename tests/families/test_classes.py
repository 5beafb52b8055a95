"""The descriptions that the package carries are what transformers' classes say: those of the newest
release, and of the oldest supported one but for those in `CHANGED`. Written anew with
`QCONVERT_UPDATE_CLASSES=1 pytest tests/families/test_classes.py` under the newest; all, not one in
25, are compared with QCONVERT_ALL=1."""

from __future__ import annotations

import json
import os
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from families.classes import config, model_types
from qconvert.layouts.derived.transformers_class import CannotBuild, described

FOLDER = Path(str(resources.files("qconvert.layouts.derived"))) / "classes"
ALL = bool(os.environ.get("QCONVERT_ALL"))
UPDATE = os.environ.get("QCONVERT_UPDATE_CLASSES") == "1"
# Of the default sizes alone, names that the class saves and does not read, and what wrote it.
_NOT_KEPT = ("layers", "sizes", "unread", "transformers")
# The release of the kept descriptions, and the classes that an earlier one describes otherwise or
# cannot build.
NEWEST = (5, 24)
CHANGED = frozenset(
    [
        "aria", "aria_text", "gemma4_unified_assistant", "idefics3", "inkling_mm_model",
        "inkling_text", "minimax_m3_vl", "qianfan_ocr", "qwen2_5_omni_thinker",
        "qwen3_omni_moe_thinker", "smolvlm", "t5gemma2", "vision-encoder-decoder",
    ]
)  # fmt: skip

# Classes that the defaults of their config cannot build, or that are no language models with a size for
# all layers; a checkpoint of one is described from its own config.
NOT_BUILT = frozenset(
    [
        "aya_vision", "blt", "chameleon", "cohere_compass", "cohere_compass_text", "dbrx",
        "deepseek_ocr2", "diffusion_gemma", "emu3", "evolla", "fast_vlm", "gemma3n",
        "gemma4_assistant", "granite4_vision", "hunyuan_vl",
        "musicgen", "musicgen_melody", "perception_lm", "pi0", "pp_formulanet", "qwen4_exp",
        "qwen4_exp_text", "reformer",
    ]
)  # fmt: skip

# Of these, those that can be built where timm is.
NEED_TIMM = frozenset(["fast_vlm", "gemma3n"])


def text_of(answer: dict[str, Any]) -> str:
    kept = {key: value for key, value in answer.items() if key not in _NOT_KEPT}
    return json.dumps(kept, indent=1, sort_keys=True) + "\n"


def _is_newest() -> bool:
    import transformers

    return tuple(map(int, str(transformers.__version__).split(".")[:2])) == NEWEST


@pytest.mark.parametrize("model_type", model_types()[:: 1 if UPDATE or ALL else 25])
def test_description(model_type: str) -> None:
    file = FOLDER / f"{model_type}.json"
    if model_type in CHANGED and not _is_newest():
        pytest.skip("an earlier release describes it otherwise, or cannot build it")
    if model_type in NEED_TIMM and find_spec("timm") is not None:
        pytest.skip(
            "timm is installed, which no file of requirements names: the class can be built"
        )
    if model_type in NOT_BUILT:
        assert not file.exists()
        with pytest.raises(CannotBuild):
            described(config(model_type), None)
        return
    text = text_of(described(config(model_type), None))
    if UPDATE:
        file.write_text(text)
    assert file.read_text() == text


def test_no_file_is_left_over() -> None:
    stated, known = {file.stem for file in FOLDER.iterdir()}, set(model_types()) - NOT_BUILT
    assert stated == known if _is_newest() else stated > known - CHANGED


def test_spellings_of_keys_are_transformers_own() -> None:
    """What the simulators of loaders take for another key is what its config class does."""
    import transformers

    from qconvert.runtimes.loading.building import SPELLINGS

    hf: Any = transformers
    for model_type, keys in SPELLINGS.items():
        kind = type(hf.AutoConfig.for_model(model_type))
        for other, key in keys.items():
            assert getattr(kind(**{other: 7}), key) == 7
            assert getattr(kind(**{key: 7}), other) == 7
