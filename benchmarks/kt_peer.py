"""kt-kernel's converter, driven as its convert_cpu_weights.py drives it: a layer's experts are stacked
and passed in, the files it writes are found by name, read back, and everything is saved at the end.

    python kt_peer.py SOURCE OUT AMXINT4|AMXINT8 NUMA
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from kt_convert import convert_layer

from qconvert.validators.amx.kt_forward import ignore_pinning

_TENSORS_A_FILE = 3000


def _read_back(out: Path, layer: int, numa: int, experts: int) -> dict[str, torch.Tensor]:
    found = {}
    for shard in range(numa):
        folder = out / f"_layer_{layer}" / f"_numa_{shard}"
        for expert in range(experts):
            for name in ("down", "gate", "up"):
                at = f"blk.{layer}.ffn_{name}_exps.{expert}.numa.{shard}"
                (quant,) = folder.glob(f"*_{name}_{expert}_*Byte_quant_.kt")
                (scale,) = folder.glob(f"*_{name}_{expert}_*Byte_scale_.kt")
                found[f"{at}.weight"] = torch.from_numpy(np.fromfile(quant, np.int8))
                found[f"{at}.scale"] = torch.from_numpy(np.fromfile(scale, np.float32))
    shutil.rmtree(out / f"_layer_{layer}")
    return found


def main(source: Path, out: Path, method: str, numa: int) -> None:
    os.environ["KT_FORCE_SYNC_SUBMIT"] = "1"
    ignore_pinning()
    config = json.loads((source / "config.json").read_bytes())
    index = json.loads((source / "model.safetensors.index.json").read_bytes())["weight_map"]
    opened: dict[str, Any] = {
        file: safe_open(source / file, framework="pt") for file in set(index.values())
    }
    experts = int(config["num_experts"])
    out.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(int(config["num_hidden_layers"])):
        stacks = []
        for name in ("gate", "up", "down"):
            at = f"model.layers.{layer}.mlp.experts"
            names = [f"{at}.{expert}.{name}_proj.weight" for expert in range(experts)]
            stacks.append(torch.stack([opened[index[n]].get_tensor(n) for n in names]).contiguous())
        convert_layer(layer, method, numa, out, *stacks)
        del stacks
        tensors.update(_read_back(out, layer, numa, experts))
    items = list(tensors.items())
    for number, start in enumerate(range(0, len(items), _TENSORS_A_FILE), 1):
        part = dict(items[start : start + _TENSORS_A_FILE])
        save_file(part, out / f"model-{number:05d}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
