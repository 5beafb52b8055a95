"""Every qconvert line of the pages is run, in the order of its page, on small checkpoints of the same
families under the names that the page uses. What needs a Hub, a store, a cluster or hours is run dry, or
listed with the reason."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import golden
import pytest
from adapters import lora
from calibrate_models import llama, qwen3, saved
from checkpoints import Model, Tensor, run_cli
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from draft_tables import Config, Tensors, dflash, eagle3
from encoded_models import encoded, gpt_oss, nvfp4
from hub_client import hub_and_client
from loaders.published import published
from made_once import made_once
from rank_files import RankFiles

_ROOT = Path(__file__).parent.parent
PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]


def small(family: str, **more: bool) -> Model:
    """With experts of half the width that loaders' tests give them: four ranks have a group of 64."""
    return published(family, inner=256, **more)


def drafted(make: Callable[..., tuple[Tensors, Config]], form: str) -> Model:
    """A draft of sizes that blocks and groups of all formats divide."""
    tensors, config = make(form, hidden=256)
    return Model(config, tensors, {})


def a_step_later(model: Model) -> Model:
    """The model, with another last element in each query projection."""
    for name, (dtype, shape, data) in model.tensors.items():
        if name.endswith("q_proj.weight"):
            model.tensors[name] = Tensor(dtype, shape, data[:-1] + bytes([data[-1] ^ 1]))
    return model


# Checkpoints by the names that pages give them.
MODELS: dict[str, Callable[[], Model | RankFiles]] = {
    "DeepSeek-V3": lambda: small("deepseek_v3", fp8=True),
    "GLM-4.5": lambda: small("glm4_moe"),
    "GLM-4.5-Air": lambda: small("glm4_moe"),
    "Qwen/Qwen3-30B-A3B": lambda: small("qwen3_moe"),
    "Qwen/Qwen3-30B-A3B-FP8": lambda: small("qwen3_moe", fp8=True),
    "Qwen/Qwen3-235B-A22B": lambda: small("qwen3_moe"),
    "Qwen/Qwen3.5-35B-A3B": lambda: small("qwen3_5_moe", stacked=True),
    "Qwen/Qwen3.5-35B-A3B-FP8": lambda: small("qwen3_5_moe", fp8=True),
    "google/gemma-3-27b-it": lambda: small("qwen3_5_moe"),  # multi-modal too
    "Qwen3.5": lambda: small("qwen3_5_moe"),
    "Qwen3-Next-80B": lambda: small("qwen3_next"),
    "Qwen2.5-72B-AWQ": lambda: encoded("qwen3_moe", "awq")[0],
    "gpt-oss-120b": lambda: gpt_oss()[0],
    "nvfp4": lambda: nvfp4("modelopt"),
    "xai-org/grok-2": RankFiles,
    "Llama-3.1-8B-speculator.eagle3": lambda: drafted(eagle3, "speculators"),
    "EAGLE3-LLaMA3.1-Instruct-8B": lambda: drafted(eagle3, "sglang"),
    "Qwen3-8B-DFlash": lambda: drafted(dflash, "sglang"),
    "step-100": lambda: small("qwen3_moe"),
    "step-200": lambda: a_step_later(small("qwen3_moe")),
}
DENSE = {"Qwen/Qwen3-32B": qwen3, "Llama-3.3-70B": llama}  # their columns: whole groups of 128
ADAPTERS = {"my-lora": 7, "other-lora": 8}
# What a line takes to be there and its page does not make: the line that makes it.
BEFORE = {
    "Qwen3.5-fused": "qconvert fuse Qwen/Qwen3.5-35B-A3B-FP8 Qwen3.5-fused --for sglang",
    "Qwen3.5-split": "qconvert unfuse Qwen3.5-fused Qwen3.5-split",
    "fused": "qconvert fuse Qwen/Qwen3.5-35B-A3B-FP8 fused --for sglang",
    "GLM-4.5-w4a16": "qconvert mtp drop GLM-4.5 GLM-4.5-w4a16",
    "V3-cpu": "qconvert amx DeepSeek-V3 V3-cpu --method int4 --numa 2",
    "out": "qconvert dequant DeepSeek-V3 out",
    "ORG/NAME": "qconvert dequant DeepSeek-V3 ORG/NAME",
    "stages": "qconvert split DeepSeek-V3 stages --pp 2 --for sglang",
    "V3-bf16": "qconvert dequant DeepSeek-V3 V3-bf16",
    "a": "qconvert run copy Qwen/Qwen3-30B-A3B a",
    "b": "qconvert run copy Qwen/Qwen3-30B-A3B b",
    "int4": "qconvert w4a16 GLM-4.5-Air int4 --rtn --group-size 32 --tp 4",
    "next-int4": "qconvert w4a16 Qwen3-Next-80B next-int4 --rtn",  # --gptq is run dry
    "small": "qconvert w4a16 Qwen3-30B-A3B small --rtn",
}
# Pages whose lines are examples of different models, each by itself: OUT is always the same.
LISTS = ("commands.md", "tasks.md", "validation.md", "upload.md")
# What is not run, by a pattern that finds it in the line, and why.
NOT_RUN = {
    r"s3://": "needs a store: tests/test_store.py has one",
    r"--engine ray": "needs a cluster: tests/test_engine_ray.py starts one",
    r" /models/": "a folder of a cluster",
    r"^qconvert experts stats": "needs a tokenizer of the model: tests/test_expert_choice.py",
    r"^qconvert ask": "needs a server: tests/test_ask.py has one",
    r"^qconvert eval": "needs a tokenizer of the model: tests/test_eval_cli.py",
    r"--shard|^qconvert (status|finish)": "several machines: tests/test_shards.py",
    r"--loader ": "needs a runtime: tests/loaders/test_loader_option.py",
    r"RECIPE SRC OUT|--against SRC ": "placeholders",
    r"--stats ": "of a calibration that is not run here: tests/test_nvfp4.py",
}
# As far as planning: a Hub, a calibration of hours.
DRY = r"^qconvert upload|--gptq|calibrated"
# Sizes of published models, and those of these: three layers, and four heads in blocks of 128.
_SIZES = {"--pp 15,15,15,16": "--pp 1,1,1", "--pp 4": "--pp 2", "--tp 8": "--tp 2"}
_READ = ("validate", "sign", "verify", "ask", "upload", "repair", "eval", "clean", "advise", "inspect",
         "diff",
         "report")  # fmt: skip


def lines(page: Path) -> list[str]:
    """Lines of a page's shell blocks that run qconvert or download a model, without comments; of the
    table of tasks its last column."""
    text = page.read_text(encoding="utf-8")
    if page.name == "tasks.md":
        return re.findall(r"`(qconvert [^`]+)` \|$", text, re.MULTILINE)
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    found = [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in found if line.startswith(("qconvert ", "hf download "))]


@pytest.fixture
def models() -> Path:
    """All of MODELS and DENSE, and data, in one folder of this process's: `split` makes hard links of
    them, which another that reads them would take for a change."""
    return made_once(f"docs-models-{os.environ.get('PYTEST_XDIST_WORKER', '')}", _write_models)


def _write_models(root: Path) -> None:
    root.mkdir()
    for name, make in MODELS.items():
        make().write(root / name)
    for name, seed in ADAPTERS.items():
        lora(root / "Qwen/Qwen3-30B-A3B", root / name, r".*\.(q_proj|down_proj)", seed=seed)
    for name, config in DENSE.items():
        saved(config(hidden_size=256, intermediate_size=512, head_dim=64), root / name)


def _placed(models: Path, at: Path) -> None:
    """Links to the models under their names."""
    for name in (*MODELS, *DENSE, *ADAPTERS):
        (at / name).parent.mkdir(exist_ok=True)
        (at / name).symlink_to(models / name)
    (at / "chats.jsonl").write_text('{"text": "What a calibration reads."}\n' * 600)
    (at / "wiki.txt").write_text("What an evaluation reads.\n" * 600)
    private = ec.generate_private_key(ec.SECP256R1())
    (at / "key.pem").write_bytes(
        private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    (at / "key.pub").write_bytes(
        private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )


def _made(words: list[str]) -> str:
    """The folder that a conversion writes: the last word before the options, or of `kt` an option."""
    if "--cpu-out" in words:
        return words[words.index("--cpu-out") + 1]
    options = [at for at, word in enumerate(words) if word.startswith("-")]
    return words[min(options, default=len(words)) - 1]


def _compare(line: str, made: str, words: list[str], page: str) -> None:
    """The tensors of the folders that a page's line made, with those that it made before."""
    if not page or not made or "--dry-run" in words:
        return
    names = [made, *(words[n + 1] for n, word in enumerate(words) if word == "--gpu-out")]
    folders = [Path(name) for name in names]
    if all(folder.is_dir() and not folder.is_symlink() for folder in folders):
        golden.same_tensors(f"{page}: {line}", *folders, exact=not set(DENSE) & set(words))


def _run(line: str, page: str) -> str:
    """Why the line failed, "" if it did not. On pages of LISTS an OUT of an earlier line goes first."""
    told, alone = line, page in LISTS
    for published_size, size in _SIZES.items():
        line = line.replace(published_size, size)
    words = shlex.split(line)[1:]
    if line.startswith("hf download"):
        target = Path(words[-1])
        if not target.exists():
            (source,) = [
                name for name in (*MODELS, *DENSE) if name.endswith(words[1].split("/")[-1])
            ]
            target.symlink_to(Path(source).resolve())
        return ""
    made = "" if words[0] in _READ else _made(words)
    for word in words[1:]:
        if alone and word in ("out", "stages"):
            shutil.rmtree(word, ignore_errors=True)
        missing = word in BEFORE and word != made and not Path(word).exists()
        if missing and (failed := _run(BEFORE[word], "")):
            return failed
    if re.search(DRY, line) and "--dry-run" not in words:
        words.append("--dry-run")
    if "--gptq" in words or "calibrated" in words:  # a tokenizer is what these models lack
        at = words.index("--data")
        words[at : at + 2] = ["--synthetic"]
    done = run_cli(*words)
    if done.code == 0:
        _compare(told, made, words, page)
        return ""
    return f"{line}: {done.code}: {done.err[-700:]}{done.out[-700:] if done.code == 3 else ''}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_lines_of_a_page_run(
    page: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    _placed(models, tmp_path)
    run = [line for line in lines(page) if not any(re.search(each, line) for each in NOT_RUN)]
    sends = any("hf://ORG/" in line for line in run)
    with hub_and_client(tmp_path / ".hub") if sends else nullcontext():
        failed = [_run(line, page.name) for line in run]
    assert "\n\n".join(why for why in failed if why) == ""


def test_what_is_not_run_is_little() -> None:
    every = [line for page in PAGES for line in lines(page)]
    left = [line for line in every if any(re.search(pattern, line) for pattern in NOT_RUN)]
    assert len(every) > 100
    compared = {name for name in golden.sections("outputs.txt") if ".md: " in name}
    assert compared <= {f"{page.name}: {line}" for page in PAGES for line in lines(page)}
    assert len(left) < len(every) / 4
    for pattern in NOT_RUN:
        assert any(re.search(pattern, line) for line in every), pattern


def test_the_python_of_the_pages_runs(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of a page one after another, as in one program."""
    monkeypatch.chdir(tmp_path)
    _placed(models, tmp_path)
    ran = 0
    for page in PAGES:
        names: dict[str, object] = {}
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            exec(compile(block, page.name, "exec"), names)
            ran += 1
    assert ran >= 1
