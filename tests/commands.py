"""Every command that makes a folder, or changes one: with a small source, what it is told, and what it
makes. Tests that ask the same of all of them walk this table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import gdn_models
from adapters import lora
from checkpoints import copied, edit_json, run_cli, tree
from draft_tables import eagle3, write_draft
from loaders.published import published
from models import nvfp4_moe, qwen3_moe
from rank_files import RankFiles

from qconvert.core.errors import QConvertError


class Refused(QConvertError):
    """A command that ended with another code than 0; its text is what it said."""


def told(*words: str | Path) -> None:
    """Run a command in this process. Raises Refused."""
    done = run_cli(*words)
    if done.code:
        raise Refused(done.err)


# --- Sources ---------------------------------------------------------------------------------------


def _published(family: str) -> Callable[[Path], object]:
    return lambda folder: published(family, experts=2, inner=128).write(folder)


def _fp8(folder: Path) -> None:
    model = qwen3_moe("fp8", layers=2)
    model.config["vocab_size"] = 8
    model.write(folder)


def _made(source: str, *words: str) -> Callable[[Path], None]:
    """Of another source, which lies beside it, by a command."""

    def make(folder: Path) -> None:
        at = written(source, folder.parent)
        told(*words, at, folder, "--jobs", "1")

    return make


def _mislabelled(folder: Path) -> None:
    """A conversion whose list of unquantized modules was lost."""
    _made("moe", "w4a16", "--rtn")(folder)
    edit_json(folder / "config.json", lambda c: c["quantization_config"].update(ignore=[]))


def _delta(folder: Path) -> None:
    """Of `moe` and the same with the last bytes of a shard changed."""
    old, new = written("moe", folder.parent), folder.with_name("delta new")
    copied(old, new)
    file = max(new.glob("*.safetensors"))
    data = file.read_bytes()
    file.write_bytes(data[:-2] + bytes([data[-2] ^ 1, data[-1]]))
    told("delta", old, new, folder)


def _kept(file: Path) -> None:
    """Experts of two layers that stay, for `nvfp4`."""
    file.write_text('{"layers": {"0": [0, 2], "1": [1, 2]}}')


SOURCES: Mapping[str, Callable[[Path], object]] = {
    "moe": _published("qwen3_moe"),
    "fp8": _fp8,
    "draft": _published("glm4_moe"),
    "eagle3": lambda folder: write_draft(folder, *eagle3()),
    "no draft": _made("draft", "mtp", "drop"),
    "gdn": lambda folder: gdn_models.model("qwen3_5_moe_text").write(folder),
    "fused": _made("gdn", "fuse", "--for", "sglang"),
    "tower": lambda folder: gdn_models.model("qwen3_5_moe").write(folder),
    "stacked": _made("moe", "experts", "stack"),
    "gptq": _made("moe", "w4a16", "--rtn", "--packing", "gptq"),
    "packed": _made("moe", "w4a16", "--rtn"),
    "nvfp4": lambda folder: nvfp4_moe().write(folder),
    "kept": _kept,
    "delta": _delta,
    "prepared": _made("nvfp4", "prepare", "trtllm-gen"),
    "adapter": lambda folder: lora(
        written("moe", folder.parent), folder, r".*layers\.\d\.self_attn\.[qv]_proj", use_dora=True
    ),
    "stages": _made("moe", "split", "--pp", "1,1", "--for", "vllm"),
    "ranks": RankFiles().write,
    "tiles": _made("fp8", "amx", "--method", "int8", "--numa", "2"),
    "mislabelled": _mislabelled,
}


def written(name: str, room: Path) -> Path:
    """A source by name, which is made in the room once."""
    folder = room / name
    if not folder.exists():
        SOURCES[name](folder)
    return folder


# --- Commands --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A command line and the name of its source. `words` has SRC and OUT for them, and other names of
    sources in brackets. It makes the folders `made` in a room of its own; `inside`: it changes OUT, a
    copy of the source, or calls what a command calls (`call`)."""

    words: str
    source: str
    made: Sequence[str] = ("out",)
    inside: bool = False
    call: Callable[[Path], object] | None = None

    @property
    def name(self) -> str:
        """What it is called in the table of commands: the first words."""
        return self.words.partition(" SRC")[0].partition(" OUT")[0]

    def begin(self, sources: Path, room: Path) -> None:
        """Make what the command needs."""
        room.mkdir(parents=True, exist_ok=True)
        source = written(self.source, sources)
        if self.inside:
            copied(source, room / "out")

    def run(self, sources: Path, room: Path) -> None:
        """Run it to its end. Raises Refused, or what the call raises."""
        if self.call is not None:
            self.call(room / "out")
            return
        places = {"SRC": written(self.source, sources), "OUT": room / "out"}
        words: list[str | Path] = []
        for word in self.words.split():
            if word.startswith("OUT/"):
                words.append(room / "out" / word[4:])
            elif word.startswith("["):
                words.append(written(word[1:-1].replace("_", " "), sources))
            else:
                words.append(places.get(word, word))
        jobs = [] if self.words.startswith("repair") else ["--jobs", "1"]
        told(*words, *jobs)

    def result(self, room: Path) -> dict[str, bytes | str | None]:
        return tree(room / "out")


def _evaluated(folder: Path) -> None:
    """What `eval --write` does beside evaluating, which takes torch."""
    from qconvert.evaluate.result import Evaluation, Logits

    found = Evaluation(
        str(folder), "/src", "Qwen3-MoE", "wiki.txt", "ab" * 16, 4, 16, 0, 64, 2, (0.1, 0.2),
        Logits(60, 9.5, 9.75, 0.02, 0.001, 0.9),
    )  # fmt: skip
    with mock.patch("qconvert.evaluate.engine.evaluate", return_value=found):
        told("eval", folder, "--against", folder, "--data", "wiki.txt", "--write")


def _shards(folder: Path) -> None:
    """Two shards, and the command that publishes what they did."""
    source = written("moe", folder.parent.parent / "sources")
    words = ("mx", source, folder, "--jobs", "1")
    try:
        for number in range(2):
            told(*words, "--shard", f"{number}/2")
    except Refused as error:
        if "or of `qconvert finish`" not in str(error):
            raise  # one that had begun goes on alone, as the refusal says
    told("finish", folder)


def _fitted(folder: Path) -> None:
    """Do all of `fit` but the measuring, which takes torch: each format costs what it leaves out."""
    from qconvert.fit.fitting import Fitting
    from qconvert.fit.measure import Measured

    def measured(self: Fitting, events: object = None) -> Measured:
        sizes = [
            dict(zip(*one, strict=True))
            for one in zip(self.choices.forms, self.choices.nbytes, strict=True)
        ]
        costs = tuple({form: 1 / size for form, size in one.items()} for one in sizes)
        return Measured(costs, costs)

    source = written("moe", folder.parent.parent / "sources")
    with (
        mock.patch.object(Fitting, "measured", measured),
        mock.patch.object(Fitting, "mixture_kl", return_value=0.5),
    ):
        words = ("--rtn", "--bits", "6", "--formats", "fp8-channel", "--formats", "w4a16-g32")
        told("fit", source, folder, *words, "--jobs", "1")


COMMANDS: tuple[Command, ...] = (
    Command("run copy SRC OUT", "fp8"),
    Command("dequant SRC OUT --max-shard-size 300KB", "fp8"),
    Command("fp8 SRC OUT", "moe"),
    Command("fp8 SRC OUT --channel", "moe"),
    Command("int8 SRC OUT", "moe"),
    Command("mx SRC OUT", "moe"),
    Command("quantize SRC OUT --format mxfp8 --targets Linear", "moe"),
    Command("nvfp4 SRC OUT --dialect modelopt --max-shard-size 200KB", "moe"),
    Command("w4a16 SRC OUT --rtn", "moe"),
    Command("w4a16 SRC OUT --rtn --packing gptq --targets Linear", "moe"),
    Command("amx SRC OUT --method int8 --numa 2", "fp8", made=("out",)),
    Command(
        "kt SRC --cpu-out OUT/cpu --cpu int8 --numa 1 --gpu w4a16 --gpu-out OUT/gpu", "moe",
        made=("out/cpu", "out/gpu"),
    ),
    Command("relabel SRC OUT --to compressed-tensors", "gptq"),
    Command("relabel SRC OUT --to gptq-v2", "gptq"),
    Command("relabel SRC OUT --to speculators --verifier ORG/NAME", "eagle3"),
    Command("fuse SRC OUT --for sglang", "gdn"),
    Command("unfuse SRC OUT", "fused"),
    Command("experts stack SRC OUT", "moe"),
    Command("experts unstack SRC OUT", "stacked"),
    Command("prune SRC OUT --keep [kept]", "nvfp4"),
    Command("mtp extract SRC OUT", "draft"),
    Command("mtp drop SRC OUT", "draft"),
    Command("mtp graft SRC [draft] OUT", "no draft"),
    Command("merge SRC [adapter] OUT", "moe"),
    Command("apply SRC [delta] OUT", "moe"),
    Command("text SRC OUT", "tower"),
    Command(
        "split SRC OUT --pp 1,1 --for vllm", "moe",
        made=("out/stage-00-of-02", "out/stage-01-of-02"),
    ),
    Command("join SRC OUT", "stages"),
    Command("join SRC OUT --max-shard-size 900KB", "ranks"),
    Command("split SRC OUT --numa 1", "tiles"),
    Command("split SRC OUT --tp 2", "moe", made=("out/rank-0-of-2", "out/rank-1-of-2")),
    Command("prepare trtllm-gen SRC OUT", "nvfp4"),
    Command("unprepare SRC OUT", "prepared"),
    Command("finish OUT", "moe", call=_shards),
    Command("fit SRC OUT", "moe", call=_fitted),
    Command("eval OUT --write", "packed", inside=True, call=_evaluated),
    Command("repair OUT", "mislabelled", inside=True),
)  # fmt: skip

# Commands that make no folder of a model, or one that others have made (`demo`), or send one that
# `validate` has judged (`upload`), or add a file that is another each time (`sign`).
OTHERS = frozenset({
    "inspect", "validate", "diff", "advise", "plan", "status", "upload", "recipes", "clean", "demo",
    "report", "delta", "ask", "sign", "verify",
})  # fmt: skip
