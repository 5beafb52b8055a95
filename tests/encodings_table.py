"""The table of docs/encodings.md: what commands make of small models in each published encoding, each
judged by `validate --level full` against its source.

    PYTHONPATH=tests python tests/encodings_table.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ascend_models
import bitsandbytes_models
import encoded_models
import gguf_files
import layer_models
import mlx_models
import test_torchao
from checkpoints import Model, run_cli
from int_models import INTEGERS
from test_module_rules import SOURCES

# What a command is asked for, by column.
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "BF16": ("dequant",),
    "relabelled": ("relabel", "--to", "compressed-tensors"),
    "`w4a16`": ("w4a16", "--rtn", "--group-size", "channel", "--targets", "Linear"),
    "AMX": ("amx", "--method", "int8", "--numa", "1"),
}


@dataclass(frozen=True)
class Encoding:
    """One row: how a small model in it is written to a folder, or to the file that is returned; with what
    its decoder was compared, and the command that writes it."""

    write: Callable[[Path], Path]
    compared: str
    written: str = ""


def _model(model: Callable[[], tuple[Model, object]]) -> Callable[[Path], Path]:
    return lambda folder: model()[0].write(folder)


def _experts(encoding: str | encoded_models.Encoding) -> Callable[[Path], Path]:
    """Routed experts alone; a block of compressed-tensors leaves attention out."""

    def write(folder: Path) -> Path:
        model, _ = encoded_models.encoded("qwen3_moe", encoding)
        block = model.config["quantization_config"]
        if block["quant_method"] == "compressed-tensors":
            block["ignore"] = [*block.get("ignore", ()), "re:.*self_attn.*"]
        return model.write(folder)

    return write


def _gguf(kind: str) -> Callable[[Path], Path]:
    return lambda folder: gguf_files.model("qwen3moe", kind).write(folder.with_suffix(".gguf"))


def _rows() -> dict[str, Encoding]:
    hand = "definition by hand"
    tensors, auto_round = "compressed-tensors 0.19", "auto-round 0.15"
    gptq, modelopt = "`w4a16 --packing gptq`", "`nvfp4 --dialect modelopt`"
    rows = {
        "MXFP4, compressed-tensors": Encoding(_experts("mxfp4"), tensors, "`mx`"),
        "MXFP8, compressed-tensors": Encoding(_experts("mxfp8"), tensors, "`mx --bits 8`"),
        "INT8, compressed-tensors": Encoding(_experts("int8"), tensors, "`int8`"),
        "AutoAWQ": Encoding(_experts("awq"), tensors, "`w4a16 --packing awq`"),
        **{
            f"packed integers of {bits} bits": Encoding(_experts(INTEGERS[f"packed, {bits} bits"]), tensors)
            for bits in (2, 3, 5, 6)
        },
        "GPTQ of 2 bits": Encoding(_experts(INTEGERS["gptq, 2 bits"]), auto_round),
        "GPTQ of 3 bits": Encoding(_experts(INTEGERS["gptq, 3 bits"]), auto_round),
        "GPTQ, `dynamic`": Encoding(_model(SOURCES["dynamic"]), hand, gptq),
        "AutoRound, `auto_gptq`": Encoding(_experts(INTEGERS["auto_gptq"]), auto_round),
        "AutoRound, own form of 3 bits": Encoding(_experts(INTEGERS["auto_round, 3 bits"]), auto_round),
        "AutoRound, `extra_config`": Encoding(_model(SOURCES["extra_config"]), auto_round),
    }
    for name, beside in (("FP8", ""), ("FP8_PB_WO", ""), ("MXFP8", ""), ("NVFP4", modelopt),
                         ("W4A16_NVFP4", modelopt)):  # fmt: skip
        made = _model(lambda name=name: layer_models.mixed(name, "FP8"))  # type: ignore[misc]
        rows[f"modelopt MIXED_PRECISION, {name}"] = Encoding(made, hand, beside)
    for name, command in (("FP8 a tensor", ""), ("INT4", ""), ("MXFP4", "`mx --dialect quark`")):
        made = _model(lambda name=name: layer_models.quark(name))  # type: ignore[misc]
        rows[f"Quark, {name}"] = Encoding(made, hand, command)
    for scheme in mlx_models.SCHEMES:
        made = _model(lambda scheme=scheme: mlx_models.mlx_model(scheme))  # type: ignore[misc]
        rows[f"MLX, {scheme.mode} of {scheme.bits} bits"] = Encoding(made, "mlx 0.32")
    for bnb in bitsandbytes_models.SCHEMES:
        made = _model(lambda bnb=bnb: bitsandbytes_models.bnb_model(bnb))  # type: ignore[misc]
        named = f"{bnb.kind.upper()}{', double quantization' if bnb.nested else ''}"
        rows[f"bitsandbytes, {named}"] = Encoding(made, "bitsandbytes 0.50")
    for kind in ascend_models.KINDS:
        made = _model(lambda kind=kind: ascend_models.ascend_model(kind))  # type: ignore[misc]
        rows[f"msmodelslim, {kind}"] = Encoding(made, hand)
    for form in test_torchao.FORMS:
        torchao = lambda folder, form=form: test_torchao.written(folder, form)  # noqa: E731
        rows[f"torchao, {form}"] = Encoding(torchao, "torchao 0.18")
    for kind in gguf_files.WRITTEN:
        rows[f"GGUF, {kind}"] = Encoding(_gguf(kind), "gguf 0.19")
    return rows


ENCODINGS: Mapping[str, Encoding] = _rows()


def cell(source: Path, out: Path, words: tuple[str, ...]) -> str:
    """What a command makes of a source: `yes` where the folder is judged sound beside it, else what it
    says. Raises AssertionError for a folder that is not sound."""
    command, *more = words
    done = run_cli(command, source, out, *more, "--jobs", "1")
    if done.code:
        assert "Traceback" not in done.err
        print(words, done.err.strip()[-200:], file=sys.stderr); return "refused"
    judged = run_cli("validate", out, "--level", "full", "--against", source, "--json")
    report = json.loads(judged.out)
    errors = [one for one in report["findings"] if one["severity"] == "error"]
    assert judged.code == 0, (words, errors)
    return "yes"


def row(name: str, folder: Path) -> list[str]:
    """The cells of one encoding. The source alone is judged, too."""
    one = ENCODINGS[name]
    source = one.write(folder / "source")
    if source.is_dir():  # a GGUF file is no result
        judged = run_cli("validate", source, "--level", "full", "--json")
        errors = [f for f in json.loads(judged.out)["findings"] if f["severity"] == "error"]
        assert not errors, errors
    cells = [cell(source, folder / f"out{at}", words) for at, words in enumerate(COMMANDS.values())]
    return [name, "yes", *cells, one.written, one.compared]


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def head() -> str:
    names = ["encoding", "judged", *COMMANDS, "written by", "compared with"]
    return line(names) + "|---" * len(names) + "|\n"


def main() -> None:
    sys.stdout.write(head())
    for name in ENCODINGS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                said = row(name, Path(folder))
            except (AssertionError, TypeError) as reason:
                said = [name, f"WRONG {reason}"[:300]]
            sys.stdout.write(line(said))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
