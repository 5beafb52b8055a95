"""A process of its own: the tokenizer of the GGUF file in a folder, written beside it by transformers."""

from __future__ import annotations

import sys


def write_tokenizer(folder: str) -> None:
    """Write the files of the tokenizer of `model.gguf` into its folder. Raises what transformers does."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf").save_pretrained(folder)


if __name__ == "__main__":
    write_tokenizer(sys.argv[1])
