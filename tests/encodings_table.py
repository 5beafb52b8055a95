"""The table of docs/encodings.md: what commands make of small models in each published encoding, each
judged by `validate --level full` against its source.

    PYTHONPATH=tests python tests/encodings_table.py docs/encodings.md
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ascend_models
import bitsandbytes_models
import encoded_models
import gguf_files
import layer_models
import mlx_models
import test_torchao
from checkpoints import Model, run_cli
from dequantized import errors
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
    """One row: how a small model in it is written to a folder, or to the file that is returned; with
    what its decoder was compared, and the command that writes it."""

    write: Callable[[Path], Path]
    compared: str
    written: str = ""


def _model(model: Callable[[], tuple[Model, object]]) -> Callable[[Path], Path]:
    return lambda folder: _near(model()[0]).write(folder)


def _experts(encoding: str | encoded_models.Encoding) -> Callable[[Path], Path]:
    """Routed experts alone; a block of compressed-tensors leaves attention out."""

    def write(folder: Path) -> Path:
        model, _ = encoded_models.encoded("qwen3_moe", encoding)
        block = model.config["quantization_config"]
        if block["quant_method"] == "compressed-tensors":
            block["ignore"] = [*block.get("ignore", ()), "re:.*self_attn.*"]
        return _near(model).write(folder)

    return write


def _gguf(kind: str) -> Callable[[Path], Path]:
    return lambda folder: gguf_files.model("qwen3moe", kind).write(folder.with_suffix(".gguf"))


def _near(model: Model) -> Model:
    """The model with exponents of MXFP4 for which products of whole layers are finite."""
    for name, one in model.tensors.items():
        if one.dtype == "U8" and name.endswith("weight_scale"):
            model.tensors[name] = one._replace(data=bytes(110 + byte % 8 for byte in one.data))
    return model


def _rows() -> dict[str, Encoding]:
    tensors, auto_round, hand = "compressed-tensors", "auto-round", "its definition, by hand"
    gptq, modelopt = "`w4a16 --packing gptq`", "`nvfp4 --dialect modelopt`"
    rows = {
        "compressed-tensors, MXFP4": Encoding(_experts("mxfp4"), tensors, "`mx`"),
        "compressed-tensors, MXFP8": Encoding(_experts("mxfp8"), tensors, "`mx --bits 8`"),
        "compressed-tensors, INT8": Encoding(_experts("int8"), tensors, "`int8`"),
        **{
            f"compressed-tensors, packed, {bits} bits": Encoding(
                _experts(INTEGERS[f"packed, {bits} bits"]), tensors
            )
            for bits in (2, 3, 5, 6)
        },
        "AutoAWQ": Encoding(_experts("awq"), tensors, "`w4a16 --packing awq`"),
        "GPTQ, 2 bits": Encoding(_experts(INTEGERS["gptq, 2 bits"]), auto_round),
        "GPTQ, 3 bits": Encoding(_experts(INTEGERS["gptq, 3 bits"]), auto_round),
        "GPTQ, `dynamic`": Encoding(_model(SOURCES["dynamic"]), hand, gptq),
        "AutoRound, `auto_gptq`": Encoding(_experts(INTEGERS["auto_gptq"]), auto_round),
        "AutoRound, own form, 3 bits": Encoding(
            _experts(INTEGERS["auto_round, 3 bits"]), auto_round
        ),
        "AutoRound, `extra_config`": Encoding(_model(SOURCES["extra_config"]), auto_round),
    }
    for name in ("FP8", "FP8_PB_WO", "MXFP8", "NVFP4", "W4A16_NVFP4"):
        made = _model(partial(layer_models.mixed, name, "FP8"))
        written = modelopt if "NVFP4" in name else ""
        rows[f"modelopt, mixed, {name}"] = Encoding(made, hand, written)
    for name in layer_models.QUARK:
        made = _model(partial(layer_models.quark, name))
        written = "`mx --dialect quark`" if name == "MXFP4" else ""
        rows[f"Quark, {name}"] = Encoding(made, "amd-quark" if "4" in name else hand, written)
    for scheme in mlx_models.SCHEMES:
        made = _model(partial(mlx_models.mlx_model, scheme))
        name = f"MLX, {scheme.mode} of {scheme.bits} bits, {scheme.group}, {scheme.dtype}"
        rows[name] = Encoding(made, "mlx")
    for bnb in bitsandbytes_models.SCHEMES:
        made = _model(partial(bitsandbytes_models.bnb_model, bnb))
        named = f"{bnb.kind.upper()} of {bnb.block}{', double' if bnb.nested else ''}"
        rows[f"bitsandbytes, {named}"] = Encoding(made, "bitsandbytes")
    for kind in ascend_models.KINDS:
        made = _model(partial(ascend_models.ascend_model, kind))
        written = "`int8 --dialect msmodelslim`" if kind == "W8A8_DYNAMIC" else ""
        rows[f"msmodelslim, {kind}"] = Encoding(made, hand, written)
    for form in test_torchao.FORMS:
        rows[f"torchao, {form}"] = Encoding(partial(_torchao, form), "torchao")
    for kind in gguf_files.WRITTEN:
        rows[f"GGUF, {kind}"] = Encoding(_gguf(kind), "gguf")
    return rows


def _torchao(form: str, folder: Path) -> Path:
    return test_torchao.written(folder, form)


ENCODINGS: Mapping[str, Encoding] = _rows()


def cell(source: Path, out: Path, words: tuple[str, ...]) -> str:
    """The outcome of a command on a source: `yes` where its folder is judged sound beside it, `no` where
    the command refuses. Raises AssertionError for a folder that is not sound."""
    command, *more = words
    done = run_cli(command, source, out, *more, "--jobs", "1")
    if done.code:
        assert "Traceback" not in done.err
        return "no"
    # In full an AMX folder is run by kt-kernel, 3 s a row; whose codes it has is compared anyway.
    found = errors(out, "--against", source, level="sample" if command == "amx" else "full")
    assert not found, (words, found)
    return "yes"


def row(name: str, folder: Path) -> list[str]:
    """The cells of one encoding. The source alone is judged, too."""
    one = ENCODINGS[name]
    source = one.write(folder / "source")
    # A GGUF file is judged as a source alone.
    assert not source.is_dir() or errors(source) == []
    cells = [cell(source, folder / f"out{at}", words) for at, words in enumerate(COMMANDS.values())]
    return [name, "yes", *cells, one.written, one.compared]


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def head() -> str:
    names = ["encoding", "judged", *COMMANDS, "written by", "compared with"]
    return line(names) + "|---" * len(names) + "|\n"


def main() -> None:
    """Write the table into a page, behind its text."""
    page = Path(sys.argv[1])
    text = page.read_text(encoding="utf-8").partition(head())[0]
    rows = []
    for name in ENCODINGS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(line(row(name, Path(folder))))
    page.write_text(text + head() + "".join(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
