"""How long one full-size layer takes to calibrate, and where the time goes.

    python benchmarks/calibrate.py [--samples 512] [--length 2048] [--experts 256] [--devices cuda:0]
    python benchmarks/calibrate.py --samples 2 --length 128 --experts 8 --top-k 2 --devices cpu

One linear-attention layer of Qwen3.5-35B-A3B (hidden 2048, experts of 512, 8 of 256 a token),
heavy-tailed weights made on the spot, tokens at random, W4A16 in groups of 128. The whole engine runs,
files and all; only what it yields is thrown away. `--amx` solves for AMXINT4 rows beside it.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from qconvert.calibrate.clock import Clock
from qconvert.calibrate.engine import calibrate
from qconvert.calibrate.settings import ExpertSchemes, LayerDone, Matrix, Settings
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.safetensors import build_header
from qconvert.cli.demo_checkpoint import heavy_tailed
from qconvert.core.dtypes import TensorType
from qconvert.core.int_scheme import IntScheme
from qconvert.plan.plan import Plan
from qconvert.run.backend import Phase

HIDDEN, MIDDLE, VOCAB = 2048, 512, 4096
KEY_HEADS, VALUE_HEADS, HEAD_DIM = 16, 32, 128
_DIFFERENT = 8  # experts with their own numbers; the others are these with their rows rotated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--devices", default="cuda:0")
    parser.add_argument("--all", action="store_true", help="every expert sees every token")
    parser.add_argument("--amx", action="store_true", help="AMXINT4 rows too")
    parser.add_argument("--together", type=int, default=32)
    parser.add_argument("--gather", type=int, default=None)
    asked = parser.parse_args()
    import numpy as np
    import torch

    devices = asked.devices.split(",")
    on_gpu = devices[0] != "cpu"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("no GPU found; give --devices cpu with small --samples and --experts")
    print(torch.cuda.get_device_name(0) if on_gpu else "cpu", f"torch {torch.__version__}")
    schemes: list[IntScheme | ExpertSchemes] = [IntScheme()]
    if asked.amx:
        row = IntScheme(4, None, scale_dtype="F32", narrow=True)
        schemes.append(ExpertSchemes(row, row))
    settings = Settings(
        experts="all" if asked.all else "routed", together=asked.together, gather=asked.gather
    )
    with tempfile.TemporaryDirectory(prefix="qconvert-bench-") as where:
        folder = Path(where) / "model"
        size = write_layer(folder, asked.experts, asked.top_k)
        plan = Plan.identity(Checkpoint.open(folder))
        generator = np.random.default_rng(0)
        tokens = [generator.integers(0, VOCAB, asked.length) for _ in range(asked.samples)]
        matrices, stats, clock = 0, None, Clock()
        start = time.monotonic()
        for event in calibrate(
            plan, tokens, schemes, settings, work_dir=Path(where) / "work", memory=None,
            devices=devices, key="bench", clock=clock,
        ):  # fmt: skip
            match event:
                case Matrix():
                    matrices += 1
                case LayerDone():
                    stats = event.stats
                case Phase():
                    print(event.text, flush=True)
            del event
        took = time.monotonic() - start
    assert stats is not None
    print(
        f"{asked.experts} experts, {asked.samples} x {asked.length} tokens, layer of "
        f"{size / 1e9:.2f} GB, {matrices} matrices: {took:.1f} s"
    )
    for what, seconds in sorted(clock.seconds.items(), key=lambda item: -item[1]):
        print(f"  {what:<8} {seconds:8.2f} s  {100 * seconds / took:5.1f} %")
    rest = took - sum(clock.seconds.values())
    print(f"  {'rest':<8} {rest:8.2f} s  {100 * rest / took:5.1f} %  (imports and states' files)")
    counts = stats.counts
    print(f"tokens an expert: {counts.min()} to {counts.max()}, mean {counts.mean():.0f}")
    print(f"fallbacks {len(stats.fallbacks)}, too few tokens {len(stats.few)}")
    print(f"host peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB", end="")
    if on_gpu:
        peaks = [torch.cuda.max_memory_allocated(device) / 1e9 for device in devices]
        print(f", device peak {peaks}", end=" GB")
    print()


def write_layer(folder: Path, experts: int, top_k: int) -> int:
    """A checkpoint of one layer. Returns the layer's bytes."""
    import torch

    keys, values = KEY_HEADS * HEAD_DIM, VALUE_HEADS * HEAD_DIM
    at, moe = "model.layers.0.linear_attn", "model.layers.0.mlp"
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        f"{at}.A_log": (VALUE_HEADS,),
        f"{at}.dt_bias": (VALUE_HEADS,),
        f"{at}.conv1d.weight": (2 * keys + values, 1, 4),
        f"{at}.norm.weight": (HEAD_DIM,),
        f"{at}.in_proj_qkv.weight": (2 * keys + values, HIDDEN),
        f"{at}.in_proj_z.weight": (values, HIDDEN),
        f"{at}.in_proj_b.weight": (VALUE_HEADS, HIDDEN),
        f"{at}.in_proj_a.weight": (VALUE_HEADS, HIDDEN),
        f"{at}.out_proj.weight": (HIDDEN, values),
        f"{moe}.gate.weight": (experts, HIDDEN),
        f"{moe}.shared_expert_gate.weight": (1, HIDDEN),
        f"{moe}.shared_expert.gate_proj.weight": (MIDDLE, HIDDEN),
        f"{moe}.shared_expert.up_proj.weight": (MIDDLE, HIDDEN),
        f"{moe}.shared_expert.down_proj.weight": (HIDDEN, MIDDLE),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    stacks = {
        f"{moe}.experts.gate_up_proj": (experts, 2 * MIDDLE, HIDDEN),
        f"{moe}.experts.down_proj": (experts, HIDDEN, MIDDLE),
    }
    generator = torch.Generator().manual_seed(0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_config(experts, top_k)), encoding="utf-8")
    names = {**shapes, **stacks}
    kinds = {name: TensorType("BF16", shape) for name, shape in names.items()}
    header, _ = build_header(list(kinds.items()), {"format": "pt"})
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(header)
        for shape in shapes.values():
            ones = len(shape) == 1
            stream.write(_bytes(torch.zeros(shape) if ones else heavy_tailed(shape, generator)))
        for count, rows, columns in stacks.values():
            some = [heavy_tailed((rows, columns), generator) for _ in range(min(count, _DIFFERENT))]
            for expert in range(count):
                stream.write(_bytes(some[expert % len(some)].roll(expert, 0)))
    layer = [kind.nbytes for name, kind in kinds.items() if ".layers." in name]
    return sum(layer)


def _bytes(values: Any) -> bytes:
    import torch

    found: bytes = values.bfloat16().contiguous().view(torch.uint8).numpy().tobytes()
    return found


def _config(experts: int, top_k: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text",
        "dtype": "bfloat16", "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 1,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "layer_types": ["linear_attention"], "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS, "linear_key_head_dim": HEAD_DIM,
        "linear_value_head_dim": HEAD_DIM, "linear_conv_kernel_dim": 4,
        "moe_intermediate_size": MIDDLE, "shared_expert_intermediate_size": MIDDLE,
        "num_experts": experts, "num_experts_per_tok": top_k, "tie_word_embeddings": False,
    }  # fmt: skip


if __name__ == "__main__":
    main()
