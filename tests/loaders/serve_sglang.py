"""sglang's own loader as a server: imported once; then each line of stdin is a folder to load, in a
child that is forked for it, and each line of stdout says what happened.

Run in the loaders' environment, in tests/: python -m loaders.serve_sglang --capability 9.0

Checked with sglang 0.5.23. What is patched: torch's answers about devices (pretend_cuda.py), packages
of kernels (stubs.py), versions of two of them, and the process group, which is torch's fake one.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0"}
import torch

from loaders import stubs
from loaders.flow import Flow
from loaders.pretend_cuda import OnCpu, pretend

# Of sglang 0.5.23's imports, those that have no build without a GPU, or are the server's.
_STUBBED = frozenset((
    "cuda", "cupy", "cutlass", "cutlass_library", "deep_ep", "deep_gemm", "flash_attn",
    "flash_attn_interface", "flash_mla", "flashinfer", "flashinfer_cubin", "humming", "numba",
    "nvshmem", "quack", "sentencepiece", "sgl_deep_gemm", "sgl_kernel", "tilelang",
    "torch_memory_saver", "torchvision", "traitlets", "tvm_ffi",
))  # fmt: skip
_KERNELS = ("flashinfer-python", "flashinfer_python", "sgl-kernel", "sgl_kernel", "sglang-kernel")
# Every byte of a parameter before the load. A value that keeps it was never written: bytes of FP8 hit it
# by chance once in 256, wider types never.
_SENTINEL = 0xA5
_BY_CHANCE = {1: 0.05}
_NEVER = 0.0005
# Filled by the class itself, not by the checkpoint.
_COMPUTED = ("rotary", "cos_sin")
# Scales of a cache in FP8, which few checkpoints have; what is not given counts as 1.
_WITH_DEFAULTS = (".k_scale", ".v_scale")


def _import_all(capability: tuple[int, int]) -> None:
    importlib.import_module("transformers")
    _without_torchvision()
    importlib.import_module("compressed_tensors")
    stubs.install(_STUBBED)
    pretend(capability)
    metadata: Any = importlib.metadata
    real = metadata.version
    metadata.version = lambda name: "99.0.0" if name in _KERNELS else real(name)
    for module in (
        "models.registry", "model_loader.loader", "layers.quantization.modelopt_quant",
        "layers.quantization.compressed_tensors.compressed_tensors",
    ):  # fmt: skip
        importlib.import_module(f"sglang.srt.{module}")


def _without_torchvision() -> None:
    """Classes of transformers that need torchvision take the registrations that sglang makes."""
    found = importlib.import_module("transformers.utils.import_utils")

    def attribute(cls: Any, key: str) -> Any:
        if (key.startswith("_") and key != "_from_config") or key in ("is_dummy", "mro", "call"):
            return type.__getattribute__(cls, key)
        return lambda *args, **kwargs: None

    found.DummyObject.__getattribute__ = attribute


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.lines[record.getMessage()[:300]] = None


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.data for n, p in model.named_parameters(remove_duplicate=False) if p.numel()}


def _mark(model: torch.nn.Module) -> None:
    for _, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.numel():
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
            parameter.data.reshape(-1).view(torch.uint8).fill_(_SENTINEL)


def _unwritten(model: torch.nn.Module, before: Iterable[str]) -> list[str]:
    """Parameters of which more elements are as they were marked than chance explains."""
    found, now = [], _parameters(model)
    for name in before:
        if name in now and not name.endswith(_WITH_DEFAULTS):
            size = now[name].element_size()
            same = (_bytes_of(now[name]).view(-1, size) == _SENTINEL).all(1).float().mean().item()
            if same > _BY_CHANCE.get(size, _NEVER):
                found.append(name)
    return found


def _hashes(model: torch.nn.Module) -> dict[str, list[Any]]:
    """Type, shape and digest of every parameter and buffer."""
    held = {**_parameters(model), **dict(model.named_buffers())}
    return {
        name: [
            str(value.dtype).removeprefix("torch."),
            list(value.shape),
            hashlib.sha256(_bytes_of(value).numpy().tobytes()).hexdigest()[:16],
        ]
        for name, value in held.items()
        if value.numel() and not any(word in name for word in _COMPUTED)
    }


def _empty(model: torch.nn.Module) -> list[str]:
    """Parameters without an element: a rank whose share of a group of scales is none has such."""
    named = model.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if not parameter.numel()]


def _schemes(model: torch.nn.Module) -> dict[str, str]:
    """What each module loads its weights with."""
    found = {}
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        scheme: Any = getattr(module, "scheme", None)
        if method is not None:
            own = f"[{type(scheme).__name__}]" if scheme is not None else ""
            found[name] = type(method).__name__ + own
    return found


def _become(job: dict[str, Any]) -> None:
    """sglang's state of one rank, in torch's fake process group."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs
    from torch.testing._internal.distributed.fake_pg import FakeStore

    tp, pp = job["tp"], job["pp"]
    args = ServerArgs(model_path=job["folder"], tp_size=tp, pp_size=pp, **job["flags"])
    world, rank = tp * pp, job["stage"] * tp + job["rank"]
    publish(args, role="test", ranks=SpawnRanks(world_rank=rank))
    fake: Any = torch.distributed
    fake.init_process_group(backend="fake", rank=rank, world_size=world, store=FakeStore())
    fake.broadcast_object_list = lambda *args, **kwargs: None  # there is nobody to hear from
    new_group = fake.new_group
    fake.new_group = lambda ranks=None, *a, **k: new_group(ranks, backend="fake")
    parallel_state.init_distributed_environment(
        world_size=world, rank=rank, local_rank=rank, backend="fake"
    )
    parallel_state.initialize_model_parallel(backend="fake")
    initialize_moe_config()
    initialize_dp_attention(args)


def load(job: dict[str, Any], told: Callable[[str, Any], None]) -> None:
    """Load a folder as a rank would; `told` hears of each fact as soon as it is known."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader

    told("step", "arguments")
    _become(job)
    told("step", "config")
    config = ModelConfig(job["folder"], is_draft_model=job["draft"])
    config._verify_quantization()
    told("quantization", config.quantization)
    told("architecture", config.hf_config.architectures[0])
    told("step", "build")
    flow = Flow()

    class Loader(DefaultModelLoader):  # type: ignore[misc]
        @staticmethod
        def load_weights_and_postprocess(model: Any, weights: Any, target: Any) -> None:
            told("schemes", _schemes(model))
            told("empty", _empty(model))
            before = list(_parameters(model))
            _mark(model)
            flow.install()
            told("step", "load")
            DefaultModelLoader.load_weights_only(model, flow.handed(weights), target)
            told("unwritten", _unwritten(model, before))
            told("unused", flow.unused)
            told("parameters", _hashes(model))

    loader = Loader(LoadConfig(load_format="auto"))
    loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))
    told("step", "done")


def _answer(line: str) -> dict[str, Any]:
    """What a child reports of one folder."""
    said: dict[str, Any] = {"error": None}
    job = json.loads(line)
    os.environ |= job["environment"]
    watch = _Warnings()
    logging.getLogger().addHandler(watch)
    for name in list(logging.root.manager.loggerDict):
        logging.getLogger(name).propagate = True
    try:
        with OnCpu():
            load(job, said.__setitem__)
    except Exception as error:  # what a loader raises is the answer
        frames = traceback.extract_tb(error.__traceback__)
        inside = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames]
        said |= {"error": f"{type(error).__name__}: {str(error)[:500]}", "at": inside[-4:]}
    said["warnings"] = list(watch.lines)[:60]
    return said


def _in_child(line: str) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.dup2(2, 1)  # what a loader prints is no answer
        with os.fdopen(writer, "w") as out:
            out.write(json.dumps(_answer(line), default=str))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    return text or json.dumps({"error": f"the process ended with {status}", "step": "died"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", default="9.0")
    major, _, minor = parser.parse_args().capability.partition(".")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import_all((int(major), int(minor)))
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(_in_child(line) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
