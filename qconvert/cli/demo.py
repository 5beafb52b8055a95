"""A tour on an embedded sample, as the commands print it: what a model needs, a conversion that is
killed and goes on, its validation with a page; and FP8 dequantized, compared with torch's decoding."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.safetensors import build_header
from qconvert.core import own_process
from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.errors import OutputError, RunError
from qconvert.core.extras import require
from qconvert.core.say import say
from qconvert.core.shown import format_size

if TYPE_CHECKING:
    import torch


BLOCK = 128
HIDDEN, LAYERS, EXPERTS, INTERMEDIATE, VOCAB = 256, 4, 4, 256, 512
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
NK, NV, DK, DV = 2, 4, 64, 64
_FP8_MAX = 448.0


def config(intermediate: int = INTERMEDIATE) -> dict[str, Any]:
    """config.json of the sample, loadable by transformers' Qwen3_5MoeForCausalLM once dequantized."""
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "full_attention_interval": LAYERS,
        "linear_num_key_heads": NK,
        "linear_num_value_heads": NV,
        "linear_key_head_dim": DK,
        "linear_value_head_dim": DV,
        "linear_conv_kernel_dim": 4,
        "moe_intermediate_size": intermediate,
        "shared_expert_intermediate_size": intermediate,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "mtp_num_hidden_layers": 1,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head", "model.embed_tokens", "mtp.fc", *_unquantized()],
        },
    }


def _unquantized() -> list[str]:
    """Linear layers too small for FP8 blocks, by every name that a runtime asks for. Only transformers
    asks for shared experts' gates."""
    parts = ("in_proj_b", "in_proj_a", "in_proj_ba")
    linear = range(LAYERS - 1)  # full attention in the last
    homes = *(f"model.layers.{layer}" for layer in range(LAYERS)), "mtp.layers.0"
    gates = [f"{home}.mlp.shared_expert_gate" for home in homes]
    return gates + [
        f"model.layers.{layer}.linear_attn.{part}" for layer in linear for part in parts
    ]


def _attention(at: str) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    # Qwen3.5's query projection carries an output gate of its own size.
    yield f"{at}.q_proj", (2 * HEADS * HEAD_DIM, HIDDEN), True
    yield f"{at}.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN), True
    yield f"{at}.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN), True
    yield f"{at}.o_proj", (HIDDEN, HEADS * HEAD_DIM), True
    yield f"{at}.q_norm", (HEAD_DIM,), False
    yield f"{at}.k_norm", (HEAD_DIM,), False


def _linear_attention(at: str) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    keys, values = NK * DK, NV * DV
    yield f"{at}.in_proj_qkv", (2 * keys + values, HIDDEN), True
    yield f"{at}.in_proj_z", (values, HIDDEN), True
    yield f"{at}.in_proj_b", (NV, HIDDEN), False
    yield f"{at}.in_proj_a", (NV, HIDDEN), False
    yield f"{at}.conv1d", (2 * keys + values, 1, 4), False
    yield f"{at}.norm", (DV,), False
    yield f"{at}.out_proj", (HIDDEN, values), True


def _moe(at: str, size: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    yield f"{at}.gate", (EXPERTS, HIDDEN), False
    yield f"{at}.shared_expert_gate", (1, HIDDEN), False
    for expert in [f"{at}.shared_expert", *(f"{at}.experts.{e}" for e in range(EXPERTS))]:
        yield f"{expert}.gate_proj", (size, HIDDEN), True
        yield f"{expert}.up_proj", (size, HIDDEN), True
        yield f"{expert}.down_proj", (HIDDEN, size), True


def _modules(intermediate: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Module name, shape of its weight, whether it is FP8."""
    yield "model.embed_tokens", (VOCAB, HIDDEN), False
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm", (HIDDEN,), False
        yield f"{at}.post_attention_layernorm", (HIDDEN,), False
        full = (layer + 1) % LAYERS == 0
        yield from _attention(f"{at}.self_attn") if full else _linear_attention(f"{at}.linear_attn")
        yield from _moe(f"{at}.mlp", intermediate)
    yield "model.norm", (HIDDEN,), False
    yield "lm_head", (VOCAB, HIDDEN), False
    yield "mtp.fc", (HIDDEN, 2 * HIDDEN), False
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield f"mtp.{norm}", (HIDDEN,), False
    yield "mtp.layers.0.input_layernorm", (HIDDEN,), False
    yield "mtp.layers.0.post_attention_layernorm", (HIDDEN,), False
    yield from _attention("mtp.layers.0.self_attn")
    yield from _moe("mtp.layers.0.mlp", intermediate)


def heavy_tailed(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Float32 weights of student-t rows (4 degrees of freedom) with one outlier channel in 64, of
    the size that keeps activations near one."""
    import torch

    normal = torch.randn(shape, generator=generator)
    chi = torch.stack([torch.randn(shape, generator=generator) ** 2 for _ in range(4)]).sum(0) / 4
    weight = normal / chi.sqrt() * 0.5 / shape[-1] ** 0.5
    weight[..., ::64] *= 8
    result: torch.Tensor = weight
    return result


def quantize_block_fp8(
    weight: torch.Tensor, block: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float weight [N, K] -> e4m3 [N, K] and float32 multipliers [ceil(N/b), ceil(K/b)], each block
    scaled so that its largest magnitude becomes 448."""
    import torch

    rows, columns = weight.shape
    grid = ceil_div(rows, block), ceil_div(columns, block)
    padded = torch.zeros(grid[0] * block, grid[1] * block)
    padded[:rows, :columns] = weight
    amax = padded.view(grid[0], block, grid[1], block).abs().amax(dim=(1, 3))
    scale = (amax / _FP8_MAX).clamp(min=1e-12)
    spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :columns]
    return (weight / spread).to(torch.float8_e4m3fn), scale


def _tensors(seed: int, intermediate: int) -> Iterator[tuple[str, TensorType, torch.Tensor]]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    for module, shape, fp8 in _modules(intermediate):
        if fp8:
            weight, scale = quantize_block_fp8(heavy_tailed(shape, generator))
            yield f"{module}.weight", TensorType("F8_E4M3", shape), weight
            grid = (scale.shape[0], scale.shape[1])
            yield f"{module}.weight_scale_inv", TensorType("F32", grid), scale
        elif len(shape) == 1:
            plain = 0.1 * torch.randn(shape, generator=generator)
            yield f"{module}.weight", TensorType("BF16", shape), plain.bfloat16()
        else:
            plain = heavy_tailed(shape, generator)
            yield f"{module}.weight", TensorType("BF16", shape), plain.bfloat16()
    for layer in range(LAYERS - 1):
        at = f"model.layers.{layer}.linear_attn"
        for name in ("A_log", "dt_bias"):
            value = torch.rand(NV, generator=generator)
            yield f"{at}.{name}", TensorType("BF16", (NV,)), value.bfloat16()


def write_sample(
    folder: Path, *, shards: int = 2, seed: int = 0, intermediate: int = INTERMEDIATE
) -> None:
    """Write the sample as a sharded checkpoint with an index, a tokenizer stub and a chat template.
    `intermediate` rows of an expert's gate: whole blocks of 128, or no runtime loads it in FP8."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    tensors = list(_tensors(seed, intermediate))
    weight_map: dict[str, str] = {}
    for number in range(shards):
        part = tensors[number * len(tensors) // shards : (number + 1) * len(tensors) // shards]
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        header, _ = build_header([(name, kind) for name, kind, _ in part], {"format": "pt"})
        with (folder / file).open("wb") as stream:
            stream.write(header)
            for name, _, value in part:
                stream.write(value.contiguous().view(torch.uint8).numpy().tobytes())
                weight_map[name] = file
    total = sum(kind.nbytes for _, kind, _ in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    for name, content in (
        ("config.json", config(intermediate)),
        ("model.safetensors.index.json", index),
        ("generation_config.json", {"do_sample": True, "temperature": 0.6}),
        ("tokenizer_config.json", {"model_max_length": 4096}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}\n", encoding="utf-8")


SOURCE, INT4, BF16 = "sample-fp8", "sample-fp8-w4a16", "sample-bf16"
_ADVISE = f"advise {SOURCE} --for sglang --gpus 1 --gpu-memory 7MB"
_QUANTIZE = f"w4a16 {SOURCE} {INT4} --rtn --group-size 32 --jobs 1 -q"
_VALIDATE = f"validate {INT4} --against {SOURCE} --level full --report page.html"
_DEQUANT = f"dequant {SOURCE} {BF16} --jobs 1 -q"
_NEXT = (
    "next    qconvert advise MODEL --for sglang    a folder, or ORG/NAME on the Hub: headers are enough",
    "        qconvert --help                       commands in groups; each has examples",
)
_CELLS = ("SQNR dB",)  # the head of a table
# A process that kills itself once half is noted; each unit is noted as it is done, not each second.
_KILLED = f"""
import os, signal
from qconvert import api
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.run.folder import journal
journal.COMMIT_SECONDS = -1.0
planned = api.plan(ExpertsToW4A16(group_size=32), "{SOURCE}", "{INT4}", jobs=1)
noted, add = [], journal.Committer.add
def up_to_half(committer, number, result):
    add(committer, number, result)
    noted.append(result.written)
    if sum(noted) > planned.nbytes // 2:
        os.kill(os.getpid(), signal.SIGKILL)
journal.Committer.add = up_to_half
api.carry_out(planned)
"""


def run_demo(folder: Path | None) -> None:
    """Make the sample and run the commands on it. Raises QConvertError if anything does not hold.

    The files are kept in `folder`; without it they go to a temporary folder and are removed.
    """
    what = "the demo makes weights with torch, and compares with it"
    require("all", what, "torch", error=RunError)
    if folder is not None:
        if folder.exists() and any(folder.iterdir()):
            raise OutputError(f"{folder} is not empty; choose a new folder for the demo")
        folder.mkdir(parents=True, exist_ok=True)
        _demo(folder.resolve())
        return
    scratch = Path(tempfile.mkdtemp(prefix="qconvert-demo-"))
    try:
        _demo(scratch)
    finally:
        shutil.rmtree(scratch)


def _demo(folder: Path) -> None:
    write_sample(folder / SOURCE)
    with chdir(folder):
        say(*_shortened(_printed(_ADVISE), "also considered", "assumed"), "")
        _killed(folder)
        say(*_printed(_QUANTIZE), "")
        say(*_shortened(_printed(_VALIDATE), "the worst", "proved"), "")
        say(*_printed(_DEQUANT))
    number = _compare_with_torch(folder / SOURCE, folder / BF16)
    say(f"{number} weights equal torch's own decoding, bit for bit", "", *_NEXT)


def _printed(command: str) -> list[str]:
    """A command and what it prints on stdout. Raises RunError where it does not end well."""
    root = click.get_current_context().find_root().command
    with redirect_stdout(StringIO()) as stream:
        code = root.main(shlex.split(command), prog_name="qconvert", standalone_mode=False)
    lines = stream.getvalue().splitlines()
    if code:
        raise RunError(f"`qconvert {command}` ended with exit code {code}: {' '.join(lines[-3:])}")
    return [f"$ qconvert {command}", *lines]


def _killed(folder: Path) -> None:
    """Run the conversion up to its half, where its process is killed."""
    done = subprocess.run(
        **own_process.python("-c", _KILLED), check=False, capture_output=True, cwd=folder
    )
    if done.returncode != -9:
        raise RunError(f"expected a killed process, found {done.stderr.decode()[-400:]}")
    files = (folder / INT4 / ".qconvert").rglob("*.safetensors*")
    kept = format_size(sum(file.stat().st_size for file in files))
    note = f"# by kill -9: no checkpoint yet, and work on {kept} is kept"
    say(f"$ qconvert {_QUANTIZE}", "Killed", note)


def _shortened(lines: list[str], *begin: str) -> list[str]:
    """Lines where those of each paragraph that begins so are counted, and no line stands apart."""
    kept: list[str] = []
    left = 0
    within = False
    for line in filter(None, lines):
        if line.startswith(begin):
            within = True
        elif not line.startswith((" ", "proved", *_CELLS)):
            within = False
        if within:
            left += 1
            continue
        if left:
            kept.append(f"... {left} more lines")
            left = 0
        kept.append(line)
    return [*kept, f"... {left} more lines"] if left else kept


def _compare_with_torch(source: Path, out: Path) -> int:
    """Dequantize every FP8 weight again with torch's cast, and compare. Returns how many."""
    import torch
    from safetensors import safe_open

    original, made = Checkpoint.open(source), Checkpoint.open(out)

    def load(checkpoint: Checkpoint, name: str) -> torch.Tensor:
        file = checkpoint.shards[checkpoint[name].shard].path
        with safe_open(file, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
            return tensor

    weights = [name for name in original if f"{name}_scale_inv" in original]
    for name in weights:
        weight, scale = load(original, name), load(original, f"{name}_scale_inv")
        rows, columns = weight.shape
        spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        if not torch.equal((weight.float() * spread).bfloat16(), load(made, name)):
            raise RunError(f"tensor {name!r} differs from torch's decoding")
    return len(weights)
