"""sglang's plug-in for prepared folders, against a tree of modules built like sglang's."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import Model, run_cli
from fake_sglang import fake_sglang, module
from models import nvfp4_moe
from safetensors.torch import load_file

from qconvert.checkpoint import prepared
from qconvert.contrib.trtllm_gen import sglang_plugin as plugin

_ROOT = Path(__file__).parent.parent
_AT = "model.layers.{}.mlp.experts"
_METHODS = {
    "modelopt": ("modelopt_quant", "ModelOptNvFp4FusedMoEMethod"),
    "compressed-tensors": ("compressed_tensors_w4a4_nvfp4_moe", "CompressedTensorsW4A4Nvfp4MoE"),
}

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plugin._State, "marked", False)
    with fake_sglang():
        yield


class Layer(torch.nn.Module):
    """What FusedMoE holds of one rank's experts, unfilled."""

    def __init__(
        self, dialect: str, rank: int = 0, tp: int = 1, ep: int = 1, inputs: bool = True
    ) -> None:
        super().__init__()
        self.num_experts, self.num_local_experts, self.is_gated = 4, 4 // ep, True
        self.moe_tp_rank, self.moe_tp_size = rank % tp, tp
        self.moe_ep_rank = rank // tp
        file, name = _METHODS[dialect]
        self.quant_method = getattr(module(file), name)()
        local, inter, packed = (
            self.num_local_experts,
            128 // tp,
            "_packed" * (dialect != "modelopt"),
        )
        self.take(f"w13_weight{packed}", torch.uint8, local, 2 * inter, 64)
        self.take(f"w2_weight{packed}", torch.uint8, local, 128, inter // 2)
        self.take("w13_weight_scale", torch.float8_e4m3fn, local, 2 * inter, 8)
        self.take("w2_weight_scale", torch.float8_e4m3fn, local, 128, inter // 16)
        per_tensor = ("weight_scale_2", "input_scale")
        if dialect != "modelopt":
            per_tensor = ("weight_global_scale", "input_global_scale")
        for name in per_tensor[: 1 + (inputs or dialect == "modelopt")]:
            experts = 4 if name == "input_scale" else local
            self.take(f"w13_{name}", torch.float32, experts, 2)
            self.take(f"w2_{name}", torch.float32, experts)

    def take(self, name: str, dtype: torch.dtype, *shape: int) -> None:
        value = torch.zeros(shape, dtype=torch.uint8 if dtype != torch.float32 else dtype)
        parameter = torch.nn.Parameter(
            value if dtype == torch.float32 else value.view(dtype), requires_grad=False
        )
        self.register_parameter(name, parameter)


class Block(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = torch.nn.Module()
        self.mlp.experts = layer


class Served(torch.nn.Module):
    """A model of two layers; `others` are the weights it was left to load itself."""

    def __init__(self, dialect: str, layers: int = 2, **settings: Any) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        blocks = [Block(Layer(dialect, **settings)) for _ in range(layers)]
        self.model.layers = torch.nn.ModuleList(blocks)
        self.others: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.others += [name for name, _ in weights]

    def experts(self, layer: int) -> Any:
        return self.get_submodule(_AT.format(layer))


def source(dialect: str, **settings: Any) -> Model:
    return nvfp4_moe(dialect, hidden=128, intermediate=128, experts=4, **settings)


def folder(dialect: str, path: Path, **settings: Any) -> tuple[Any, Tensors]:
    """A prepared folder's config, as sglang holds one with the plug-in, and its tensors."""
    plugin.install()
    model = source(dialect, **settings)
    at = model.write(path / "source")
    assert run_cli("prepare", "trtllm-gen", at, path / "out", "--jobs", "1").code == 0
    tensors: Tensors = {}
    for file in sorted((path / "out").glob("*.safetensors")):
        tensors.update(load_file(file))
    return SimpleNamespace(**json.loads((path / "out/config.json").read_bytes())), tensors


def serve(model: Served, config: Any, tensors: Tensors) -> Any:
    """The calls of a server's start, in their order."""
    opened = module("model_loader.loader").get_config(config)
    loader = module("model_loader.loader").DefaultModelLoader
    loader.load_weights_and_postprocess(model, iter(tensors.items()), "cpu")
    return opened


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


@pytest.mark.parametrize("dialect", list(_METHODS))
def test_a_prepared_folder_is_served_as_it_is(dialect: str, tmp_path: Path) -> None:
    """All parameters hold the file's bytes after post-processing: neither shuffled nor swapped. The
    config is the source's again."""
    config, tensors = folder(dialect, tmp_path)
    model = Served(dialect)
    opened = serve(model, config, tensors)
    assert opened.quantization_config == source(dialect).config["quantization_config"]
    for number in range(2):
        layer = model.experts(number)
        at = _AT.format(number)
        for name in ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale"):
            stored = tensors.get(f"{at}.{name}", tensors.get(f"{at}.{name}_packed"))
            assert stored is not None
            assert torch.equal(raw(getattr(layer, name)), raw(stored)), name
        for name in ("w13_weight_scale_2", "w2_input_scale", "w13_input_global_scale"):
            if hasattr(layer, name):
                assert torch.equal(getattr(layer, name), tensors[f"{at}.{name}"])
    assert sorted(model.others) == sorted(name for name in tensors if ".experts." not in name)


@pytest.mark.parametrize("dialect", list(_METHODS))
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_hold_their_ranges(dialect: str, tp: int, ep: int, tmp_path: Path) -> None:
    """Put side by side again, the ranks' parameters are the files' tensors."""
    config, tensors = folder(dialect, tmp_path)
    served = []
    for rank in range(tp * ep):
        model = Served(dialect, rank=rank, tp=tp, ep=ep)
        module("model_loader.loader").get_config(config)
        serve(model, SimpleNamespace(), tensors)
        served.append(model.experts(1))
    for name in ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale"):
        at = _AT.format(1)
        stored = tensors.get(f"{at}.{name}", tensors.get(f"{at}.{name}_packed"))
        assert stored is not None
        groups = []
        for group in range(ep):
            shares = [raw(getattr(served[group * tp + n], name)) for n in range(tp)]
            if name == "w2_weight_scale":  # tiles of 512 bytes: [E, H / 128, I / 64, 512]
                grids = [share.reshape(4 // ep, 1, -1, 512) for share in shares]
                groups.append(torch.cat(grids, 2).reshape(4 // ep, 128, 8))
            else:
                groups.append(torch.cat(shares, 1 if name.startswith("w13") else 2))
        assert torch.equal(torch.cat(groups), raw(stored)), name


@pytest.mark.parametrize("dialect", list(_METHODS))
def test_other_models_are_prepared_as_ever(dialect: str) -> None:
    """Also in a process that has a prepared one open."""
    plugin.install()
    plugin._State.marked = True
    model = Served(dialect, layers=1)
    serve(model, SimpleNamespace(quantization_config={"quant_method": "modelopt"}), {})
    assert (raw(model.experts(0).w2_weight) == 255).all()


def test_the_third_caller(tmp_path: Path) -> None:
    """It imports both functions when it is called."""
    config, tensors = folder("modelopt", tmp_path)
    model = Served("modelopt")
    method = module("muse_spark_nvfp4_moe").MuseSparkMethod()
    for number in range(2):
        model.experts(number).quant_method = method
    serve(model, config, tensors)
    stored = tensors[_AT.format(0) + ".w13_weight"]
    assert torch.equal(raw(model.experts(0).w13_weight), raw(stored))


def test_what_a_file_says_alone_comes_back(tmp_path: Path) -> None:
    """hf_quant_config.json, where config.json had no block."""
    model = source("modelopt")
    del model.config["quantization_config"]
    text = b'{"producer": {}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}'
    model.side_files["hf_quant_config.json"] = text
    at = model.write(tmp_path / "source")
    assert run_cli("prepare", "trtllm-gen", at, tmp_path / "out", "--jobs", "1").code == 0
    plugin.install()
    config = SimpleNamespace(**json.loads((tmp_path / "out/config.json").read_bytes()))
    opened = module("hf_transformers_utils").get_config(config)
    assert opened.quantization_config == {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
    }  # fmt: skip


def test_nested_blocks_come_back(tmp_path: Path) -> None:
    config, _ = folder("modelopt", tmp_path)
    block = config.quantization_config["replaced"][0]["block"]
    config.quantization_config["replaced"] = [
        {"at": ["text_config", "quantization_config"], "block": block}
    ]
    config.text_config = SimpleNamespace()
    opened = module("hf_transformers_utils").get_config(config)
    assert not hasattr(opened, "quantization_config")
    assert opened.text_config.quantization_config == block


def test_layers_of_other_ranks_are_the_models(tmp_path: Path) -> None:
    """A pipeline stage, or a draft model, holds some layers; the model passes over the others."""
    config, tensors = folder("modelopt", tmp_path)
    model = Served("modelopt", layers=1)
    serve(model, config, tensors)
    assert f"{_AT.format(1)}.w13_weight" in model.others
    assert f"{_AT.format(0)}.w13_weight" not in model.others


def _another_backend(model: Served, tensors: Tensors) -> None:
    """It would take prepared weights for plain ones."""
    del model.experts(1).quant_method


def _other_sizes(model: Served, tensors: Tensors) -> None:
    model.experts(0).w13_weight.data = torch.zeros(4, 512, 64, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda model, tensors: tensors.pop(_AT.format(1) + ".w2_weight_scale"),
            r"layers.1.mlp.experts: \['w2_weight_scale'\] are missing from the folder",
        ),
        (_another_backend, r"1 of 2 prepared layers .* flashinfer_trtllm"),
        (
            lambda model, tensors: setattr(model.experts(0).quant_method, "pad", 128),
            r"were padded to \[4, 384, 64\]",
        ),
        (
            lambda model, tensors: setattr(model.experts(0), "num_experts", 5),
            "expected 5 experts, found 4; start with --disable-shared",
        ),
        (_other_sizes, r"expected torch.uint8 \[4, 512, 64\] for this rank, found"),
    ],
    ids=["a missing tensor", "another backend", "padding", "experts beside the routed", "sizes"],
)
def test_what_does_not_fit_is_refused(
    change: Callable[[Served, Tensors], object], says: str, tmp_path: Path
) -> None:
    config, tensors = folder("modelopt", tmp_path)
    model = Served("modelopt")
    change(model, tensors)
    with pytest.raises((ValueError, RuntimeError), match=says):
        serve(model, config, tensors)
    assert plugin._State.shapes is None


def test_another_version_is_refused(tmp_path: Path) -> None:
    config, _ = folder("modelopt", tmp_path)
    config.quantization_config["layout"]["version"] = 2
    with pytest.raises(ValueError, match="expected layout version 1"):
        module("hf_transformers_utils").get_config(config)


def test_an_sglang_of_another_build_is_left_alone() -> None:
    """All or nothing: half a plug-in would let a server start and shuffle twice."""
    loader, utils = module("model_loader.loader"), module("quantization.utils")
    kept = loader.DefaultModelLoader.postprocess_weights
    del loader.DefaultModelLoader.postprocess_weights
    before = loader.get_config, utils.prepare_static_weights_for_trtllm_fp4_moe
    with pytest.raises(AttributeError):
        plugin.install()
    assert (loader.get_config, utils.prepare_static_weights_for_trtllm_fp4_moe) == before
    loader.DefaultModelLoader.postprocess_weights = kept
    utils.prepare_static_weights_for_trtllm_fp4_moe = lambda w13, s13, w2, s2: None
    with pytest.raises(AttributeError, match="expected arguments"):
        plugin.install()
    assert loader.get_config is before[0]


def test_installed_twice_is_installed_once(tmp_path: Path) -> None:
    plugin.install()
    first = module("quantization.utils").prepare_static_weights_for_trtllm_fp4_moe
    plugin.install()
    assert module("quantization.utils").prepare_static_weights_for_trtllm_fp4_moe is first


def test_both_sides_speak_of_the_same() -> None:
    assert plugin.QUANT_METHOD == prepared.QUANT_METHOD
    assert plugin.VERSION == prepared.VERSION
    assert set(prepared.DERIVED) == plugin._DERIVED
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = project["entry-points"]["sglang.srt.plugins"]
    assert points == {"qconvert_prepared": f"{plugin.__name__}:{plugin.install.__name__}"}


def test_it_imports_nothing_of_qconvert() -> None:
    """A server's environment has other versions of what qconvert needs."""
    code = (
        "import sys; import qconvert.contrib.trtllm_gen.sglang_plugin;"
        "print([m for m in sys.modules if m.startswith('qconvert.') and 'contrib' not in m]"
        " + [m for m in ('torch', 'numpy', 'click') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
