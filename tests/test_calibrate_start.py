"""What a calibration imports: llm-compressor, and what that brings along, for its own codes alone; what
transformers takes for other uses, in other processes than the command's alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from calibrate_models import VOCAB, qwen3_moe, saved
from faults import differing, tree
from safetensors.numpy import save_file

from qconvert.calibrate import devices

SLOW = {"llmcompressor", "compressed_tensors", "datasets", "pandas", "pyarrow", "loguru"}

# transformers imports these for training, images and several devices.
UNUSED = {"accelerate", "scipy", "sklearn", "torchvision"}

_CHILD = """
import json, sys
from qconvert.MODULE import main
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        main(words)
    except SystemExit as end:
        assert not end.code, end.code
names = sorted({name.partition(".")[0] for name in sys.modules})
print("\\nIMPORTED", json.dumps(names), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, with tokens beside it."""
    folder = tmp_path_factory.mktemp("start")
    saved(qwen3_moe(num_hidden_layers=1), folder / "model")
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 24))
    save_file({"input_ids": tokens}, folder / "tokens.safetensors")
    return folder


def imported(source: Path, *commands: str, module: str = "cli.main", then: str = "") -> set[str]:
    """Packages that a process has imported at the end of its calibrations, each of which writes to the
    folder that it names first. As the module `__main__` it is a process of one command alone."""
    data = ("--data", str(source / "tokens.safetensors"), "--samples", "2", "--length", "24")
    lines = []
    for line in commands:
        out, command, *options = line.split()
        folders = (str(source / "model"), str(source / out))
        lines.append([command, *folders, *data, "--device", "cpu", "-q", *options])
    child = _CHILD.replace("MODULE", module) + then
    done = subprocess.run(
        [sys.executable, "-c", child, json.dumps(lines)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = re.findall(r"^IMPORTED (.*)$", done.stderr, re.MULTILINE)
    return set(json.loads(line))


@pytest.fixture(scope="module")
def plain(source: Path) -> tuple[Path, set[str]]:
    """What a process writes that may be more than the command's, and what it has imported, also for
    NVFP4."""
    found = imported(source, "plain w4a16 --gptq", "nvfp4 nvfp4 --dialect modelopt --gptq")
    return source / "plain", found


_TRANSFORMERS_ALONE = """
import sys
import transformers.models.qwen3_moe.modeling_qwen3_moe
import transformers.generation.utils
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_the_best_solver_takes_no_llm_compressor(plain: tuple[Path, set[str]]) -> None:
    """Nor what comes with it, but for what transformers imports by itself, where that is installed."""
    assert {"torch", "transformers"} <= plain[1]
    assert "llmcompressor" not in plain[1]
    if found := plain[1] & SLOW:
        words = [sys.executable, "-c", _TRANSFORMERS_ALONE]
        alone = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
        assert found - set(alone) == set()


_AFTERWARDS = """
import os
from loguru import logger
logger.log("METRIC", "as llm-compressor's modifiers do")
assert "LLM_COMPRESSOR_LOG_DISABLED" not in os.environ
import llmcompressor
llmcompressor.configure_logger()
logger.log("METRIC", "with its own levels")
"""


def test_its_own_codes_do(source: Path) -> None:
    """llm-compressor can be used afterwards: `oneshot` in a process that had solved with it through the
    API ended in ValueError: no level METRIC."""
    found = imported(source, "theirs w4a16 --gptq --solver llmcompressor", then=_AFTERWARDS)
    assert {"llmcompressor", "compressed_tensors"} <= found


def test_a_command_takes_nothing_that_it_does_not_use(
    plain: tuple[Path, set[str]], source: Path
) -> None:
    """The result is that of a process in which transformers finds all that is installed."""
    found = imported(source, "own w4a16 --gptq", module="__main__")
    assert not found & UNUSED
    assert differing(tree(source / "own"), tree(plain[0])) == []


_SHARED = """
import sys
from qconvert.calibrate.library import load_shared
from qconvert.core import own_process
load_shared()
assert "transformers.modeling_utils" not in sys.modules
own_process.declare()
load_shared()
assert "transformers.modeling_utils" in sys.modules
assert not {"accelerate", "scipy", "sklearn", "torchvision"} & sys.modules.keys()
from importlib.util import find_spec
from transformers.utils import import_utils
for name in ("accelerate", "scipy", "sklearn"):
    answer = getattr(import_utils, f"is_{name}_available")()
    assert answer == (find_spec(name) is not None), name
assert import_utils._is_package_available("torch", return_version=True)[0]
"""


_LISTED = """
from pathlib import Path
import transformers
from qconvert.calibrate.library import _listed_once
from transformers.utils import import_utils
file = str(Path(transformers.__file__).parent / "models" / "__init__.py")
own = import_utils.define_import_structure
before = own.cache_info()
with _listed_once():
    made = import_utils.define_import_structure(file)
after = own.cache_info()
assert (after.hits, after.misses) == (before.hits + 1, before.misses), (before, after)
assert import_utils.define_import_structure is own
assert made == own(file)
"""


def test_transformers_finds_all_again_once_it_is_imported() -> None:
    """A process that is not the command's is left as it is; what transformers has listed is not read
    again, and comes to what its models list."""
    subprocess.run([sys.executable, "-c", _SHARED + _LISTED], check=True)


def test_gpus_get_ready_beside() -> None:
    """A CPU needs nothing; what fails is left to who computes there next."""
    assert devices.get_ready("cpu") is None
    made = devices.get_ready("no such device")
    assert made is not None
    made.join(60)
    assert not made.is_alive()
    devices._begin_on("cpu")
