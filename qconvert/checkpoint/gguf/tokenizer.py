"""A process of its own: the tokenizer of a GGUF file, as transformers makes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qconvert.core.json_text import parse_object
from qconvert.core.links import read_regular

# Words, numbers and spaces: what tokenizers cut in different places.
_PROBE = "The 3 quick  foxes,\n  don't jump: 12345.678 \u00e9\u4e2d"


def write_tokenizer(folder: str) -> None:
    """Write the tokenizer of `model.gguf` into its folder, where it reads texts as transformers reads
    them with the file. Raises what transformers does."""
    from transformers import AutoTokenizer

    made: Any = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
    made.save_pretrained(folder)
    file = Path(folder, "tokenizer_config.json")
    config = parse_object(read_regular(file), file)
    config.pop("local_files_only", None)  # of this process, which asks no hub
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    texts = [_PROBE, made.decode(list(range(0, len(made), 1 + len(made) // 1000)))]
    if not _is_same(folder, made, texts):
        # Some classes build their own model of the vocabulary and leave that of tokenizer.json.
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        if not _is_same(folder, made, texts):
            raise ValueError("what it saves reads texts otherwise")


def _is_same(folder: str, made: Any, texts: Iterable[str]) -> bool:
    from transformers import AutoTokenizer

    saved = AutoTokenizer.from_pretrained(folder)
    return all(saved.encode(text) == made.encode(text) for text in texts)


if __name__ == "__main__":
    write_tokenizer(sys.argv[1])
