"""`--loader PYTHON` with sglang and vLLM themselves: equal to their simulators, from headers alone, in
validations, repairs, advice and plans. Skips itself without their environment (`make loaders`)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from threading import Event, Thread

import headers as published_headers
import pytest
from checkpoints import edit_json, read_tensors, run_cli, write_shard

from loaders.agreement import config_of, headers
from loaders.client import PYTHON
from loaders.folders import converted, source
from qconvert.runtimes.loader.ask import RuntimeLoader, is_twice, loaders_in
from qconvert.runtimes.loader.process import close_all, opened
from qconvert.runtimes.loading.load_weights import SimulatedLoad, Tensors
from qconvert.runtimes.loading.setting import HOPPER, Setting
from qconvert.runtimes.sglang import simulator as sglang
from qconvert.runtimes.vllm import simulator as vllm

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(
        not (PYTHON.parent.parent / "vllm").is_dir(), reason="needs the loaders: make loaders"
    ),
]
SIMULATE = {"sglang": sglang.simulate, "vllm": vllm.simulate}
RUNTIMES = tuple(SIMULATE)
FORMS = (
    "", "dequant", "w4a16 --rtn --group-size 32", "w4a16 --rtn --packing gptq",
    "nvfp4 --dialect modelopt --weight-only",
)  # fmt: skip
SETTINGS = (Setting(), Setting(tp=2, rank=1), Setting(tp=2, rank=0, ep=2), Setting(pp=2, stage=1))
# Modules that hold scales of a cache alone, and a buffer that a norm computes.
_CACHES = (".attn", ".attn_mqa", ".attn_mha")
# Of --loader: seconds of one load beside the import, and bytes of memory.
_MOST_SECONDS, _MOST_MEMORY = 90, 4 << 30


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    """One import of each runtime for the whole file."""
    yield
    close_all()


def loader(runtime: str) -> RuntimeLoader:
    return loaders_in(PYTHON)[runtime]


def facts(load: SimulatedLoad) -> dict[str, object]:
    """What both answer of a load. What other ranks read is told from what none reads when all have
    answered (serving.py)."""
    if load.refused is not None:
        return {"refused": load.refused.kind}
    alone = load.setting.ep == load.setting.pp == 1
    named = ("unread", "missing", "empty", *(["ignored"] if alone else []))
    found: dict[str, object] = {
        field.name: set(getattr(load, field.name))
        for field in fields(load) if field.name in named
    }  # fmt: skip
    found["unwritten"] = {f"{name} {share:.4f}" for name, share in load.unwritten.items()}
    found["parameters"] = {
        f"{name} {kind}" for name, kind in load.parameters.items()
        if not name.endswith(".gemma_weight") and 0 not in kind.shape
        and not is_twice(name)
    }  # fmt: skip
    found["schemes"] = {(n, s) for n, s in load.schemes.items() if not n.endswith(_CACHES)}
    return found


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "qwen3_5_moe"])
def test_equal_to_the_simulator(family: str, form: str, runtime: str, folders: Path) -> None:
    folder = source(folders, family, fp8=form == "dequant")
    if form:
        folder = converted(folders, form.split()[0], folder, *form.split()[1:])
    config, tensors = config_of(folder), Tensors.of(headers(folder))
    for at in SETTINGS:
        seen = facts(loader(runtime).load(config, tensors, at))
        assert seen == facts(SIMULATE[runtime](config, tensors, at)), at


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_loads_incompletely_or_is_refused(runtime: str, folders: Path) -> None:
    origin = source(folders, "qwen3_moe")
    asked = ("--for", runtime, "--loader", PYTHON)
    done = run_cli("validate", origin, *asked, "--tp", "2")
    assert done.code == 0, done.err or done.out
    assert f"headers given to {loader(runtime)}" in done.out
    assert f"{runtime} {loader(runtime).version} loads the folder whole" in done.out

    lacking = folders / f"lacking {runtime}"
    tensors = read_tensors(origin)
    lost = "model.layers.0.input_layernorm.weight"
    del tensors[lost]
    tensors["model.layers.0.self_attn.o_proj.weight"] = tensors["model.norm.weight"]
    lacking.mkdir()
    write_shard(lacking / "model.safetensors", tensors)
    (lacking / "config.json").write_bytes((origin / "config.json").read_bytes())
    done = run_cli("validate", lacking, *asked, "--json")
    (refused,) = (f for f in json.loads(done.out)["findings"] if f["rule"] == "QC130")
    assert done.code == 3
    assert refused["where"] == "model.layers.0.self_attn.o_proj.weight"

    tensors["model.layers.0.self_attn.o_proj.weight"] = read_tensors(origin)[
        "model.layers.0.self_attn.o_proj.weight"
    ]
    write_shard(lacking / "model.safetensors", tensors)
    done = run_cli("validate", lacking, *asked, "--json")
    # vLLM asks for every parameter of an unquantized model itself, when it has read all.
    rule, where = {"sglang": ("QC131", lost), "vllm": ("QC130", "config.json")}[runtime]
    (unwritten,) = (f for f in json.loads(done.out)["findings"] if f["rule"] == rule)
    assert unwritten["where"] == where
    assert lost in unwritten["message"]


def test_a_class_that_is_not_simulated_is_answered(folders: Path) -> None:
    """Mixtral, which no simulator knows: its tensors under the names of another class do not load."""
    origin = source(folders, "qwen3_moe")
    other = folders / "mixtral"
    other.mkdir()
    for file in origin.iterdir():
        (other / file.name).write_bytes(file.read_bytes())

    def relabel(config: dict[str, object]) -> None:
        config |= {
            "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
            "num_local_experts": config["num_experts"],
            "intermediate_size": config["moe_intermediate_size"],
        }  # fmt: skip

    edit_json(other / "config.json", relabel)
    assert run_cli("validate", other, "--for", "vllm").code == 5
    done = run_cli("validate", other, "--for", "vllm", "--loader", PYTHON)
    assert done.code == 3, done.out


def test_plans_advice_and_repairs_ask_it(folders: Path) -> None:
    origin = source(folders, "qwen3_moe")
    done = run_cli(
        "w4a16", origin, folders / "planned", "--rtn", "--dry-run", "--loader", PYTHON
    )  # fmt: skip
    assert done.code == 0, done.err
    for runtime in RUNTIMES:
        version = loader(runtime).version
        assert f"{runtime} {version} (H200, its own loader) at tp 1, 2" in done.out
    assert not (folders / "planned").exists()
    done = run_cli("advise", origin, "--for", "sglang", "--gpus", "1", "--loader", PYTHON)
    assert done.code == 0, done.err
    assert f"for sglang ({loader('sglang')})" in done.out
    done = run_cli("repair", origin, "--for", "sglang", "--dry-run", "--loader", PYTHON)
    assert (done.code, "nothing to repair" in done.out) == (0, True), done.err


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_model_of_published_size(runtime: str) -> None:
    """DeepSeek-V3 at TP 8: 91,991 tensors, 671 GB that nobody has. Seconds are of the processor: others
    may use it, too."""
    model, one = published_headers.load("deepseek-v3"), loader(runtime)
    tensors = Tensors.of(model.tensors)
    assert len(tensors) == 91_991
    server = opened(one.python, runtime, HOPPER, one.limits)
    with used_by(server.pid) as used:
        load = one.load(model.config, tensors, Setting(tp=8, rank=7))
    assert load.whole, (load.refused, load.missing, load.ignored)
    assert all(name.startswith("model.layers.61.") for name in load.unread)
    assert load.nbytes > 75 << 30
    assert 5 < used["seconds"] < _MOST_SECONDS
    assert 100 << 20 < used["bytes"] < _MOST_MEMORY


@contextmanager
def used_by(group: int) -> Iterator[dict[str, float]]:
    """The most that a process of a group uses meanwhile, of those that start then: seconds of the
    processor, and bytes."""
    before = set(os.listdir("/proc"))
    used = {"seconds": 0.0, "bytes": 0.0}
    done = Event()

    def look() -> None:
        while not done.wait(0.2):
            for name in set(os.listdir("/proc")) - before:
                with suppress(OSError):  # it has ended
                    stat = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                    if name.isdigit() and int(stat[2]) == group:
                        ticks = int(stat[11]) + int(stat[12])
                        used["seconds"] = max(used["seconds"], ticks / os.sysconf("SC_CLK_TCK"))
                        pages = int(stat[21]) * os.sysconf("SC_PAGE_SIZE")
                        used["bytes"] = max(used["bytes"], pages)

    watching = Thread(target=look)
    watching.start()
    try:
        yield used
    finally:
        done.set()
        watching.join()
