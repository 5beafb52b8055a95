"""A process of its own: the tokenizer of a GGUF file, as transformers makes it."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def write_tokenizer(folder: str) -> None:
    """Write the tokenizer of `model.gguf` into its folder. Raises what transformers does."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf").save_pretrained(folder)
    file = Path(folder, "tokenizer_config.json")
    config = json.loads(file.read_bytes())
    config.pop("local_files_only", None)  # of this process, which asks no hub
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write_tokenizer(sys.argv[1])
