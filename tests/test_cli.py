"""The command line: help, exit codes, what goes to stdout, and what is not imported."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import golden
import headers
import pytest
from checkpoints import (
    INDEX,
    Model,
    Tensor,
    bf16_moe,
    convert,
    edit_json,
    fp8_moe,
    published,
    run_cli,
    tensor,
    tree,
    without,
)
from sampled import sampled

from qconvert import __version__
from qconvert.cli.convert import uncollected
from qconvert.cli.main import cli
from qconvert.cli.progress import Bar

HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fp8_moe().write(tmp_path_factory.mktemp("cli") / "source")


@pytest.fixture(scope="module")
def master(source: Path) -> Path:
    out = source.parent / "out"
    convert("dequant", source, out)
    return out


def snapshot(path: Sequence[str], command: click.Command, room: Path) -> list[str]:
    """Options and arguments of a command; what it says and returns without them, and with the names of
    folders that are not there."""
    lines, least = [], list[str]()
    for one in command.params:
        kind, name = one.type.name, one.name or ""
        if isinstance(one.type, click.Choice):
            kind, name = "|".join(one.type.choices), one.type.choices[0]
        elif isinstance(one.type, click.IntRange | click.FloatRange):
            kind, name = f"{kind} {one.type._describe_range()}", str(one.type.min or 1)
        told = [" ".join([*one.opts, *one.secondary_opts, kind])]
        told += [word for word in ("required", "multiple") if getattr(one, word)]
        told += ["flag"] if isinstance(one, click.Option) and one.is_flag else []
        if isinstance(one.default, str | int | float | tuple) and one.default is not False:
            told.append(f"default {one.default}")
        lines.append(", ".join(told))
        if one.required:
            least += [name] if isinstance(one, click.Argument) else [one.opts[0], name]
    group = isinstance(command, click.Group)
    for words in ([], least) if least else ([[]] if group else []):
        done = run_cli(*path, *words)
        lines.append(f"$ qconvert {' '.join((*path, *words))}: {done.code}")
        if not group:
            said = golden.shown(done.err, room).splitlines()
            lines += [line for line in said if not line.startswith(("Usage:", "Try "))]
    return lines


@pytest.mark.parametrize("name", cli.commands)
def test_snapshot(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    first = cli.commands[name]
    for path in [(name,), *(commands(first, name) if isinstance(first, click.Group) else ())]:
        found: click.Command = cli
        for word in path:
            assert isinstance(found, click.Group)
            found = found.commands[word]
        golden.same("commands.txt", f"qconvert {' '.join(path)}", snapshot(path, found, tmp_path))


def test_snapshot_of_exit_codes() -> None:
    every = {"qconvert", *(f"qconvert {' '.join(path)}" for path in commands(cli))}
    golden.same("commands.txt", "qconvert", [(cli.help or "").partition("Exit codes: ")[2]])
    assert set(golden.sections("commands.txt")) == every


def commands(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    """Every command's words, groups too."""
    for name, command in group.commands.items():
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)


# --- Help and exit codes -------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), *commands(cli)], ids=" ".join)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_shows_an_example(words: tuple[str, ...], flag: str) -> None:
    result = run_cli(*words, flag)
    assert result.code == 0
    assert result.err == ""
    assert "Example" in result.out
    assert f"qconvert {' '.join(words)}".rstrip() in result.out.partition("Example")[2]
    assert max(map(len, result.out.splitlines())) <= 100


def test_every_option_is_explained() -> None:
    for words in commands(cli):
        command: Any = cli
        for word in words:
            command = command.commands[word]
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.help, f"{' '.join(words)} {option.name}"


def test_exit_codes_are_documented() -> None:
    text = " ".join(run_cli("--help").out.split())
    for code in ("0 ok", "1 refused", "2 usage", "3 findings", "130 interrupted"):
        assert code in text


def test_the_version() -> None:
    result = run_cli("--version")
    assert (result.code, result.out) == (0, f"qconvert, version {__version__}\n")


@pytest.mark.parametrize(
    "words",
    [
        ("convert",),
        ("dequant",),
        ("dequant", "a"),
        ("dequant", "a", "b", "c"),
        ("dequant", "a", "b", "--no-such-flag"),
        ("dequant", "a", "b", "--memory", "lots"),
        ("dequant", "a", "b", "--memory", "0"),
        ("dequant", "a", "b", "--jobs", "0"),
        ("dequant", "a", "b", "--jobs", "-1"),
        ("dequant", "a", "b", "--max-shard-size", "5PB"),
        ("validate", "a", "--level", "some"),
        ("dequant", "a", ""),
        ("validate", ""),
        ("clean", ""),
        ("finish", ""),
        ("status", ""),
        ("dequant", "a", "b", "--shard", "2/2"),
        ("demo", ""),
        ("recipes", "shwo"),
        ("diff", "a"),
    ],
)
def test_usage_errors_are_two(words: tuple[str, ...]) -> None:
    result = run_cli(*words)
    assert result.code == 2
    assert result.out == ""
    assert "Usage: qconvert" in result.err
    assert "Error: " in result.err
    assert "Traceback" not in result.err


def test_choices_of_a_missing_option_stand_in_its_line() -> None:
    result = run_cli("nvfp4", "a", "b")
    assert result.code == 2
    said = "Error: Missing option '--dialect'. Choose from: compressed-tensors, modelopt"
    assert said in result.err.splitlines()


def test_no_command_shows_the_help() -> None:
    result = run_cli()
    assert result.code == 2
    assert "dequant" in result.err + result.out


def test_success_is_zero(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = run_cli("dequant", source, out, "--jobs", "1")
    assert first.code == 0
    assert first.out.startswith(f"wrote {out}: ")
    assert first.out.count("\n") == 1
    again = run_cli("dequant", source, out, "--jobs", "1")
    assert again.code == 0
    how = "headers and sizes; --verify hashes every byte"
    assert again.out == f"{out} already holds this result ({how}); nothing to do\n"


def test_refusals_are_one_and_differences_three(source: Path, master: Path) -> None:
    assert run_cli("inspect", source / "gone").code == 1
    assert run_cli("diff", source, master).code == 3


def test_interrupted_is_130_and_the_same_command_goes_on(
    source: Path, master: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the first write."""
    out = tmp_path / "out"

    def interrupt(_bar: Bar, _nbytes: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Bar, "wrote", interrupt)
        result = run_cli("dequant", source, out, "--jobs", "1")
    assert result.code == 130
    assert result.out == ""
    assert "interrupted" in result.err.splitlines()[-1]
    assert "the same command goes on" in result.err
    assert "Traceback" not in result.err
    assert os.listdir(out) == [".qconvert"]
    assert run_cli("dequant", source, out, "--jobs", "1").code == 0
    assert tree(out) == tree(master)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_signals_to_a_real_process(number: signal.Signals, source: Path, tmp_path: Path) -> None:
    """The process sends the signal to itself when it has written something: no race."""
    out = tmp_path / "out"
    code = (
        "import os, sys; from qconvert.cli.main import main\n"
        "from qconvert.cli.progress import Bar\n"
        f"Bar.wrote = lambda bar, nbytes: os.kill(os.getpid(), {int(number)})\n"
        "main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "dequant", str(source), str(out), "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert "interrupted" in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(out) == [".qconvert"]


def test_clean_drops_what_was_begun(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def interrupt(_bar: Bar, _nbytes: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Bar, "wrote", interrupt)
        assert run_cli("dequant", source, out, "--jobs", "1").code == 130
    # Another plan does not take the folder over, and says which command would.
    refused = run_cli("run", "copy", source, out)
    assert refused.code == 1
    assert "qconvert clean" in refused.err
    assert run_cli("clean", out).out == f"dropped unfinished work in {out}\n"
    assert tree(out) == {}
    assert run_cli("clean", out).out == "nothing to clean\n"
    assert run_cli("run", "copy", source, out).code == 0


def test_clean_leaves_a_result_alone(master: Path) -> None:
    before = tree(master)
    assert run_cli("clean", master).out == "nothing to clean\n"
    assert tree(master) == before


def test_a_reader_that_leaves_is_no_traceback(source: Path) -> None:
    """`qconvert inspect ... | head -0`: the pipe is closed before anything is written."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "qconvert", "inspect", str(source), "--tensors", "*"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.stderr == ""


_CLOSED = {
    "stderr": "2>&-", "stdout": ">&-", "stdin": "<&-", "stdout and stderr": ">&- 2>&-",
    "all": "<&- >&- 2>&-", "a full disk": "2> /dev/full",
}  # fmt: skip


@pytest.mark.parametrize("how", _CLOSED)
def test_a_conversion_does_not_hang_on_who_hears_it(how: str, source: Path, tmp_path: Path) -> None:
    """Without a stream, or with one that nobody can write to, the result is the same, and no file of it
    has the stream's number."""
    out = tmp_path / "out"
    line = f'"$0" -m qconvert run copy "$1" "$2" --jobs 1 {_CLOSED[how]}'
    done = subprocess.run(["bash", "-c", line, sys.executable, source, out], check=False)
    assert done.returncode == 0
    assert run_cli("run", "copy", source, tmp_path / "usual", "--jobs", "1").code == 0
    assert tree(out) == tree(tmp_path / "usual")


def test_a_conversion_goes_on_when_its_log_ends(source: Path, tmp_path: Path) -> None:
    """`2> >(head -0)`"""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "qconvert", "run", "copy", str(source), str(tmp_path / "out")]
    done = subprocess.run([*command, "--log-json", "-"], stderr=writer, check=False)
    os.close(writer)
    assert done.returncode == 0
    assert (tmp_path / "out" / "config.json").exists()


# --- What a plan costs ---------------------------------------------------------------------------

HEAVY = (
    "torch",
    "numpy",
    "transformers",
    "safetensors",
    "huggingface_hub",
    "triton",
    "llmcompressor",
)


@pytest.mark.parametrize("words", [["--help"], ["plan", "dequant-fp8", "SRC"],
                                   ["dequant", "SRC", "OUT", "--dry-run", "--json"],
                                   ["inspect", "SRC"], ["validate", "SRC"],
                                   ["run", "copy", "SRC", "OUT", "--jobs", "1"]],
                         ids=lambda words: words[0])  # fmt: skip
def test_nothing_heavy_is_imported(words: list[str], source: Path, tmp_path: Path) -> None:
    """Planning, and copying too, goes without torch; a help page at once."""
    places = {"SRC": str(source), "OUT": str(tmp_path / "out")}
    arguments = [places.get(word, word) for word in words]
    code = (
        "import sys; from qconvert.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as done: assert done.code == 0, done.code\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


# --- stdout and stderr ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("inspect", "SRC"), 0),
        (("inspect", "MASTER"), 0),
        (("inspect", "SRC", "--tensors", "*.q_proj.*"), 0),
        (("inspect", "SRC", "--tensors", "no such"), 0),
        (("plan", "dequant-fp8", "SRC"), 0),
        (("plan", "copy", "SRC", "OUT"), 0),
        (("plan", "dequant-fp8", "SRC", "--dump-after", "end"), 0),
        (("dequant", "SRC", "OUT", "--dry-run"), 0),
        (("dequant", "SRC", "OUT", "--jobs", "1"), 0),
        (("dequant", "SRC", "OUT", "--jobs", "1", "--sha256"), 0),
        (("run", "copy", "SRC", "OUT", "--jobs", "1"), 0),
        (("validate", "MASTER", "--against", "SRC", "--level", "full"), 0),
        (("diff", "SRC", "SRC"), 0),
        (("diff", "SRC", "MASTER"), 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_json_is_all_there_is_on_stdout(
    words: tuple[str, ...], code: int, source: Path, master: Path, tmp_path: Path
) -> None:
    places = {"SRC": str(source), "MASTER": str(master), "OUT": str(tmp_path / "out")}
    result = run_cli(*(places.get(word, word) for word in words), "--json")
    assert result.code == code, result.err
    json.loads(result.out)
    assert result.err == ""


def test_what_the_json_of_a_run_says(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("dequant", source, out, "--jobs", "1", "--json")
    first, second = (json.loads(run_cli(*words).out) for _ in range(2))
    assert first["out"] == str(out)
    assert sorted(first["files"]) == published(out)
    assert (first["already_done"], second["already_done"]) == (False, True)
    assert first["fingerprint"] == second["fingerprint"]


def test_what_the_json_of_a_plan_says(source: Path) -> None:
    plan = json.loads(run_cli("plan", "dequant-fp8", source, "--json").out)
    tensors = fp8_moe().tensors
    weights = [name for name, value in tensors.items() if value.dtype == "F8_E4M3"]
    assert (plan["model_type"], plan["layers"], plan["experts"]) == ("qwen3_moe", 2, 2)
    assert [(p["name"], p["matched"], p["expected"]) for p in plan["passes"]] == [
        ("dequant", len(weights), len(weights))
    ]
    assert plan["bytes"]["in"] == sum(len(value.data) for value in tensors.values())
    assert set(plan["tensors"]) == {n for n in tensors if not n.endswith("_scale_inv")}
    assert {plan["tensors"][name]["dtype"] for name in weights} == {"BF16"}


def test_a_dry_run_writes_nothing_and_prints_the_plan(source: Path, tmp_path: Path) -> None:
    result = run_cli("dequant", source, tmp_path / "out", "--dry-run")
    assert result.code == 0
    assert result.err == ""
    assert not (tmp_path / "out").exists()
    planned = run_cli("plan", "dequant-fp8", source, tmp_path / "out")
    assert planned.out == result.out


def test_a_run_shows_its_plan_on_stderr_and_no_bar(source: Path, tmp_path: Path) -> None:
    """stderr is no terminal here, so no bar: not a carriage return, not a byte of it."""
    planned = run_cli("plan", "dequant-fp8", source, tmp_path / "out", "--jobs", "1")
    result = run_cli("dequant", source, tmp_path / "out", "--jobs", "1")
    assert result.code == 0
    *plan, then = result.err.splitlines()
    assert plan == planned.out.splitlines()
    assert then.startswith("next    qconvert validate ")
    assert "\r" not in result.err
    assert result.out.startswith("wrote ")


def test_nan_codes_are_remarked_upon(tmp_path: Path) -> None:
    model = fp8_moe()
    name = "model.layers.0.self_attn.q_proj.weight"
    value = model.tensors[name]
    model.tensors[name] = value._replace(data=b"\x7f\xff" + value.data[2:])
    source = model.write(tmp_path / "source")
    result = run_cli("dequant", source, tmp_path / "out", "--jobs", "1")
    assert result.code == 0
    (remark,) = [line for line in result.err.splitlines() if line.startswith("remark  ")]
    assert name in remark
    assert "2 NaN codes" in remark


# --- --dump-after --------------------------------------------------------------------------------


def test_dumps_follow_the_passes(tmp_path: Path, source: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "passes:\n- drop: {match: lm_head.weight, why: base}\n- dequant\n"
    )
    dumps = {}
    for after in ("source", "drop", "dequant", "end"):
        result = run_cli("plan", tmp_path / "r.yaml", source, "--dump-after", after)
        assert result.code == 0
        assert result.err == ""
        dumps[after] = result.out.splitlines()
    tensors = fp8_moe().tensors
    assert len(dumps["source"]) == len(tensors)
    assert len(dumps["drop"]) == len(tensors) - 1
    assert dumps["dequant"] == dumps["end"]
    q = "model.layers.0.self_attn.q_proj.weight"
    assert f"{q}: F8_E4M3 [8, 8] = {q}" in dumps["source"]
    (line,) = [line for line in dumps["end"] if line.startswith(f"{q}: ")]
    assert line == f"{q}: BF16 [8, 8] = DequantFp8(block=(4, 4))({q}, {q}_scale_inv)"
    assert not any("_scale_inv:" in line for line in dumps["end"])


def test_a_dump_after_a_pass_that_is_not_there(source: Path) -> None:
    result = run_cli("plan", "dequant-fp8", source, "--dump-after", "drop")
    assert result.code == 2
    assert "--dump-after drop: " in result.err
    assert "source, dequant, end" in result.err


# --- inspect -------------------------------------------------------------------------------------


def test_inspect_a_source(source: Path) -> None:
    text = run_cli("inspect", source).out
    assert text.startswith("qwen3_moe: 2 layers, 2 experts, no MTP tensors\n")
    assert "config.json: quantization_config: fp8 e4m3, blocks of 4x4" in text
    found = json.loads(run_cli("inspect", source, "--json").out)
    tensors = fp8_moe().tensors
    assert (found["family"], found["layers"], found["experts"]) == ("qwen3_moe", 2, 2)
    assert found["tensors"] == len(tensors)
    assert found["bytes"] == sum(len(value.data) for value in tensors.values())
    assert sum(entry["bytes"] for entry in found["dtypes"].values()) == found["bytes"]
    assert sum(entry["tensors"] for entry in found["roles"].values()) == len(tensors)
    assert (found["unknown"], found["missing"], found["made_by"]) == ([], [], None)


def test_inspect_an_output(master: Path) -> None:
    text = run_cli("inspect", master).out
    assert f"made by qconvert {__version__}, passes: dequant\n" in text
    found = json.loads(run_cli("inspect", master, "--json").out)
    assert set(found["dtypes"]) == {"BF16"}
    assert found["quantization"] == []
    assert found["made_by"]["passes"][0]["name"] == "dequant"


def test_inspect_lists_tensors(source: Path) -> None:
    result = run_cli("inspect", source, "--tensors", "*.0.self_attn.q_proj.*")
    q = "model.layers.0.self_attn.q_proj"
    assert result.out.splitlines() == [
        f"{q}.weight  F8_E4M3 [8, 8]  model-00001-of-00002.safetensors",
        f"{q}.weight_scale_inv  F32 [2, 2]  model-00001-of-00002.safetensors",
    ]


def test_inspect_names_what_is_missing_and_what_is_unknown(tmp_path: Path) -> None:
    model = bf16_moe()
    model.tensors = without(model.tensors, ["model.norm.weight"])
    model.tensors["model.surprise"] = tensor("U8", 3)
    found = json.loads(run_cli("inspect", model.write(tmp_path / "x"), "--json").out)
    assert found["missing"] == ["model.norm.weight"]
    assert found["unknown"] == ["model.surprise"]


def test_inspect_a_family_nobody_has_described(tmp_path: Path) -> None:
    source = bf16_moe(model_type="new_moe").write(tmp_path / "x")
    assert run_cli("inspect", source).out.startswith("new_moe (family generic): 2 layers")


@pytest.mark.parametrize("content", ["{", "[]", '{"identity": {}}', '{"passes": [5]}'])
def test_inspect_a_broken_manifest(content: str, tmp_path: Path) -> None:
    source = bf16_moe().write(tmp_path / "x")
    (source / "qconvert.json").write_text(content)
    result = run_cli("inspect", source)
    assert result.code == 1
    assert result.err.startswith("qconvert: error: ")
    assert "qconvert.json" in result.err


# --- diff ----------------------------------------------------------------------------------------


def differences(a: Path, b: Path, *flags: str) -> list[dict[str, str]]:
    """The differences, which must be told alike as JSON and as text."""
    result = run_cli("diff", a, b, *flags, "--json")
    found: list[dict[str, str]] = json.loads(result.out)
    assert result.code == (3 if found else 0)
    assert all(difference.pop("role") for difference in found)
    lines = run_cli("diff", a, b, *flags, "--all").out.splitlines()
    assert len(lines) == len(found) + 1
    for line, difference in zip(lines, found, strict=False):
        assert line.split()[:2] == [difference["kind"], f"{difference['tensor']}:"]
    assert lines[-1].startswith(f"{len(found)} difference" if found else "no difference")
    return found


def changed(model: Model, name: str, value: Tensor) -> Model:
    model.tensors[name] = value
    return model


def test_diff_equal(source: Path, tmp_path: Path) -> None:
    assert differences(source, fp8_moe().write(tmp_path / "b")) == []


@pytest.mark.parametrize("shards", [1, 5])
def test_diff_equal_in_other_shards(shards: int, source: Path, tmp_path: Path) -> None:
    assert differences(source, fp8_moe().write(tmp_path / "b", shards)) == []


def test_diff_a_copy_into_other_shards(source: Path, tmp_path: Path) -> None:
    convert("copy", source, tmp_path / "b", "--max-shard-size", "200")
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 2
    assert differences(source, tmp_path / "b") == []


@pytest.mark.parametrize("at", [0, 1, 79, 158, 159])
def test_diff_a_byte(at: int, source: Path, tmp_path: Path) -> None:
    model = fp8_moe()
    value = model.tensors[HEAD]
    data = value.data[:at] + bytes([value.data[at] ^ 0x80]) + value.data[at + 1 :]
    other = changed(model, HEAD, value._replace(data=data)).write(tmp_path / "b")
    assert differences(source, other) == [
        {"tensor": HEAD, "kind": "data", "detail": f"first differing byte {at} of 160"}
    ]
    assert differences(source, other, "--headers") == []


@pytest.mark.parametrize("at", [0, (4 << 20) - 1, 4 << 20, (4 << 20) + 9])
def test_diff_a_byte_of_a_large_tensor(at: int, tmp_path: Path) -> None:
    """Tensors are compared in steps of 4 MiB."""
    size = (4 << 20) + 10
    data = bytearray(size)
    model = Model({"model_type": "x"}, {"big": Tensor("U8", (size,), bytes(data))})
    a = model.write(tmp_path / "a", 1)
    data[at] = 1
    data[-1] = 1
    b = changed(model, "big", Tensor("U8", (size,), bytes(data))).write(tmp_path / "b", 1)
    (found,) = differences(a, b)
    assert found["detail"] == f"first differing byte {at} of {size}"


def test_diff_types(source: Path, tmp_path: Path) -> None:
    value = fp8_moe().tensors[HEAD]
    dtype = changed(fp8_moe(), HEAD, value._replace(dtype="F16")).write(tmp_path / "dtype")
    shape = changed(fp8_moe(), HEAD, value._replace(shape=(8, 10))).write(tmp_path / "shape")
    assert differences(source, dtype, "--headers") == [
        {"tensor": HEAD, "kind": "type", "detail": "BF16 [10, 8] and F16 [10, 8]"}
    ]
    assert differences(source, shape) == [
        {"tensor": HEAD, "kind": "type", "detail": "BF16 [10, 8] and BF16 [8, 10]"}
    ]


def test_diff_only_one_has_it(source: Path, tmp_path: Path) -> None:
    model = fp8_moe()
    model.tensors = without(model.tensors, [HEAD])
    less = model.write(tmp_path / "less")
    assert differences(source, less) == [
        {"tensor": HEAD, "kind": "only-a", "detail": "BF16 [10, 8]"}
    ]
    assert [d["kind"] for d in differences(less, source)] == ["only-b"]


def test_diff_in_the_order_a_model_runs_in(source: Path, master: Path) -> None:
    found = [d["tensor"] for d in differences(source, master)]
    q = "self_attn.q_proj.weight"
    assert found.index(f"model.layers.0.{q}") < found.index(f"model.layers.1.{q}")
    assert f"model.layers.0.{q}_scale_inv" in found


def test_diff_that_cannot_open_is_no_difference(source: Path, tmp_path: Path) -> None:
    result = run_cli("diff", source, tmp_path / "gone")
    assert result.code == 1
    assert result.out == ""


# --- The plan on a screen ------------------------------------------------------------------------


@pytest.mark.parametrize("model", sampled(headers.names(), 3))
def test_a_plan_fits_a_screen(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / model).mkdir()
    found = headers.few(model)
    headers.write_sparse(found, tmp_path / model)
    fp8 = any(kind.dtype == "F8_E4M3" for kind in found.tensors.values())
    recipe = "dequant-fp8" if fp8 else "copy"
    result = run_cli("plan", recipe, model)
    assert result.code == 0, result.err
    assert result.err == ""
    lines = result.out.splitlines()
    assert 20 <= len(lines) <= 40
    assert max(map(len, lines)) <= 110
    assert not any("unknown" in line for line in lines)


def test_a_plan_of_a_checkpoint_with_everything_odd(tmp_path: Path) -> None:
    """Warnings, unknown names and files left behind add lines, not pages."""
    model = fp8_moe()
    for number in range(100):
        model.tensors[f"extra.module.{number}.of.no.family"] = tensor("U8", 4)
        model.side_files[f"pytorch_model-{number:05d}.bin"] = b"\x80"
    source = model.write(tmp_path / "source")
    edit_json(source / INDEX, lambda index: index["metadata"].update(total_size=1))
    result = run_cli("plan", "dequant-fp8", source)
    assert result.code == 0
    lines = result.out.splitlines()
    assert len(lines) <= 40
    for text in ("100 tensors of unknown role", "and 97 more", "total_size 1"):
        assert text in result.out


def test_cycles_are_looked_for_again_after_planning() -> None:
    def failing() -> None:
        with uncollected():
            raise KeyError(gc.isenabled())

    with pytest.raises(KeyError, match="False"):
        failing()
    assert gc.isenabled()
    assert gc.get_freeze_count()
    gc.unfreeze()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.unfreeze()
        gc.enable()


def test_a_result_that_others_cannot_read_is_told(tmp_path: Path) -> None:
    """It is no more readable than its source, which safetensors saves for its owner alone."""
    source = fp8_moe().write(tmp_path / "source")
    words = ("dequant", source)
    assert "to read alone" not in run_cli(*words, tmp_path / "open", "--jobs", "1").err
    for shard in source.glob("*.safetensors"):
        shard.chmod(0o600)
    done = run_cli(*words, tmp_path / "private", "--jobs", "1")
    assert "; its owner alone may read it (file mode), as the source" in done.out + done.err
    assert not (tmp_path / "private" / "config.json").stat().st_mode & 0o077
