"""`qconvert repair`: each broken folder becomes one without errors, weights untouched, and stays so."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import INDEX, edit_json, read_tensors, run_cli, tree, write_shard
from commands import written
from hub_client import hub_and_client
from loaders.published import published
from models import qwen3_moe, with_exponents
from sampled import sampled

from qconvert import api
from qconvert.checkpoint.receipt import digest, manifest_seal
from qconvert.cli.demo import write_sample
from qconvert.core.errors import OutputError
from qconvert.hub.compare import local_files

CONFIG, MANIFEST, RECEIPT = "config.json", "qconvert.json", "qconvert.receipt.jsonl"
Break = Callable[[Path], None]
# NVFP4 beside INT4; the draft layer stays.
_MIXTURE = r"""
passes:
  - nvfp4: {dialect: compressed-tensors, targets: ['re:model\.layers\.[01]\..*experts.*']}
  - w4a16: {targets: ['re:model\.layers\.[23]\..*experts.*']}
"""


def _converted(room: Path, name: str, *words: str) -> Path:
    """A sound folder: `name` is the source's form and the command."""
    source = room / f"source {name}"
    if name.startswith("gates "):  # of shared experts, beside a draft layer
        write_sample(source)
        if "numbers" in name:
            api.run("dequant-fp8", source, room / f"bf16 {name}", jobs=1)
            source = room / f"bf16 {name}"
    else:
        # Three blocks of 128: no other size fits their scales.
        model = qwen3_moe("fp8" if name.startswith("fp8 ") else "bf16", hidden=384)
        (with_exponents(model) if name == "fp8 exponents" else model).write(source)
    if not words:
        return source
    done = run_cli(*words, source, room / name, "--max-shard-size", "200KB")
    assert done.code == 0, done.err
    return room / name


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    room = tmp_path_factory.mktemp("sound")
    rtn = ("w4a16", "--rtn", "--group-size", "32")
    mixture = room / "mixture.yaml"
    mixture.write_text(_MIXTURE)
    return {
        "bf16": _converted(room, "fp8 dequant", "dequant"),
        "w4a16": _converted(room, "w4a16", *rtn),
        "fp8 beside": _converted(room, "fp8 w4a16", *rtn),
        "exponents beside": _converted(room, "fp8 exponents", *rtn),
        "modelopt": _converted(room, "modelopt", "nvfp4", "--dialect", "modelopt"),
        "fp8": _converted(room, "fp8 source"),
        "fp8 rows": _converted(room, "fp8r rows", "fp8", "--channel"),
        "fp8 experts": _converted(room, "fp8r experts", "fp8", "--channel", "--targets", "experts"),
        "fp8 blocks packed": _converted(
            room, "fp8r packed", "fp8", "--dialect", "compressed-tensors"
        ),
        "int8": _converted(room, "int8", "int8"),
        "nvfp4": _converted(room, "nvfp4", "nvfp4", "--dialect", "compressed-tensors"),
        "gates fp8": _converted(room, "gates fp8"),
        "gates int8": _converted(room, "gates int8", "int8"),
        "gates numbers int8": _converted(room, "gates numbers int8", "int8"),
        "gates numbers mixture": _converted(room, "gates numbers mixture", "run", str(mixture)),
    }


GONE = object()


def _config(change: Callable[[dict[str, Any]], object]) -> Break:
    return lambda folder: edit_json(folder / CONFIG, lambda config: void(change(config)))


def _at(*path: str) -> Callable[..., Break]:
    """Makes what puts other values below a key of the config, or takes them away."""

    def breaking(**values: Any) -> Break:
        def change(config: dict[str, Any]) -> None:
            for key in path:
                config = config.setdefault(key, {})
            config.update(values)
            for key in [key for key, value in values.items() if value is GONE]:
                del config[key]

        return _config(change)

    return breaking


_root, _text, _block = _at(), _at("text_config"), _at("quantization_config")
_weights = _at("quantization_config", "config_groups", "group_0", "weights")


def _listed(*entries: str) -> Break:
    return _config(lambda config: config["quantization_config"]["ignore"].extend(entries))


def _unlisted(config: dict[str, Any]) -> dict[str, Any]:
    block: dict[str, Any] = config["quantization_config"]
    block["ignore"] = [entry for entry in block["ignore"] if "self_attn" not in entry]
    return block


def _of_linear(config: dict[str, Any]) -> None:
    _unlisted(config)["config_groups"]["group_0"].update(targets=["Linear"])


_STALE = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_nested = _text(quantization_config=_STALE)


def _modelopt(stale: dict[str, Any]) -> Break:
    return lambda folder: void((folder / "hf_quant_config.json").write_text(json.dumps(stale)))


_stale_modelopt = _modelopt(
    {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
)
_other_modelopt = _modelopt(
    {"quantization": {"quant_algo": "NVFP4", "group_size": 32, "exclude_modules": []}}
)


def _weight_map(change: Callable[[dict[str, str]], object]) -> Break:
    return lambda folder: edit_json(folder / INDEX, lambda index: void(change(index["weight_map"])))


# What is broken, how, and a rule that its validation names (None: it is no error, or cannot be opened).
BROKEN: dict[str, tuple[str, Break, str | None]] = {
    "a block of the source stays in text_config": ("w4a16", _nested, "QC037"),
    "a block of the source stays after dequant": (
        "bf16", _root(quantization_config=_STALE), "QC012",
    ),
    "hf_quant_config.json of an earlier quantization": ("w4a16", _stale_modelopt, None),
    "hf_quant_config.json beside bf16": ("bf16", _stale_modelopt, None),
    "hf_quant_config.json says otherwise": ("modelopt", _other_modelopt, None),
    "linears that are not listed": ("w4a16", _config(_unlisted), None),
    "linears that are not listed, targets Linear": ("w4a16", _config(_of_linear), "QC035"),
    "quantized modules are listed": ("w4a16", _listed("re:.*mlp.*"), "QC034"),
    "an expression that cannot be read": ("w4a16", _listed("re:*.gate"), "QC034"),
    "no list at all": ("modelopt", _block(ignore=GONE), "QC035"),
    "no list, of FP8": ("gates fp8", _block(modules_to_not_convert=GONE), "QC035"),
    "an empty list, of INT8": ("gates int8", _block(ignore=[]), "QC035"),
    "the group of FP8 linears is gone": (
        "fp8 beside",
        _config(lambda config: config["quantization_config"]["config_groups"].pop("group_1")),
        None,
    ),
    "linear_fp8_config is gone": ("exponents beside", _block(linear_fp8_config=GONE), None),
    "two lists": (
        "fp8",
        _block(ignored_layers=["lm_head"], modules_to_not_convert=["model.layers.0.mlp.gate"]),
        "QC039",
    ),
    "the index is gone": ("w4a16", lambda folder: (folder / INDEX).unlink(), None),
    "the index is not JSON": (
        "w4a16", lambda folder: void((folder / INDEX).write_text('{"weight_map": {')), "QC001",
    ),
    "the index names another file": (
        "w4a16",
        _weight_map(lambda m: m.update(dict.fromkeys(list(m)[:3], "model-00099.safetensors"))),
        "QC001",
    ),
    "the index lacks a tensor": ("w4a16", _weight_map(lambda m: m.popitem()), "QC001"),
    "the index has a tensor that is nowhere": (
        "w4a16", _weight_map(lambda m: m.update({"model.gone": next(iter(m.values()))})), "QC001",
    ),
    "total_size is wrong": (
        "w4a16",
        lambda folder: edit_json(folder / INDEX, lambda index: index["metadata"].update(total_size=1)),
        None,
    ),
}  # fmt: skip


def void(_: object) -> None:
    pass


def _copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


@pytest.fixture
def folder(sound: dict[str, Path], tmp_path: Path) -> Path:
    """Experts in INT4, to be broken."""
    return _copied(sound["w4a16"], tmp_path / "folder")


def _shards(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


@pytest.mark.parametrize("what", sampled(BROKEN))
def test_a_broken_folder_is_mended(what: str, sound: dict[str, Path], tmp_path: Path) -> None:
    form, broken, rule = BROKEN[what]
    folder = _copied(sound[form], tmp_path / "folder")
    broken(folder)
    before, weights = tree(folder), _shards(folder)
    report = api.validate(folder)
    if rule is not None:
        assert rule in {finding.rule for finding in report.findings}

    (planned,) = api.repair(folder, dry_run=True)
    assert tree(folder) == before
    assert planned.changes
    assert planned.left == ()

    (done,) = api.repair(folder)
    assert [change.file for change in done.changes] == [change.file for change in planned.changes]
    assert _shards(folder) == weights
    after = api.validate(folder)
    assert [f for f in after.findings if f.severity == "error"] == []
    assert not any(f.rule == rule for f in after.findings)
    sealed = folder / MANIFEST
    assert not sealed.exists() or manifest_seal(sealed.read_bytes()) == "sound"

    again = tree(folder)
    assert [one.changes for one in api.repair(folder)] == [()]
    assert tree(folder) == again


@pytest.mark.parametrize(
    "form",
    ["bf16", "w4a16", "fp8 beside", "modelopt", "fp8", "fp8 rows", "fp8 experts",
     "fp8 blocks packed", "int8", "nvfp4", "gates fp8", "gates int8",
     "gates numbers int8", "gates numbers mixture"],
)  # fmt: skip
def test_a_sound_folder_is_left_as_it_is(form: str, sound: dict[str, Path], tmp_path: Path) -> None:
    folder = _copied(sound[form], tmp_path / "folder")
    before = tree(folder)
    result = run_cli("repair", folder)
    assert (result.code, result.out) == (
        0,
        f"{folder}: nothing to repair in its metadata; no weights were read\n",
    )
    assert tree(folder) == before


def test_the_config_of_a_conversion_comes_back(folder: Path) -> None:
    """Names that a conversion lists are found again, in the words of a conversion."""
    wanted = json.loads((folder / CONFIG).read_bytes())["quantization_config"]["ignore"]
    _block(ignore=[])(folder)
    api.repair(folder)
    found = json.loads((folder / CONFIG).read_bytes())["quantization_config"]["ignore"]
    # Embeddings and the head are no fault to leave out: no target names them.
    assert set(found) <= set(wanted)
    assert {name for name in wanted if "_proj" in name} <= set(found)


def test_the_manifest_records_both_hashes(folder: Path) -> None:
    _nested(folder)
    _root(max_position_embeddings=12345)(folder)
    (done,) = api.repair(folder)
    said = json.loads((folder / MANIFEST).read_bytes())["repaired"]
    changed = {change.file for change in done.changes} - {MANIFEST, RECEIPT}
    assert {entry["file"] for entry in said} == changed
    assert CONFIG in changed
    assert all(entry["before"] != entry["after"] for entry in said)


def test_what_is_as_it_was_written_again_is_not_recorded(folder: Path) -> None:
    """The record of the conversion stays true, so that --verify finds no damage."""
    kept = {name: (folder / name).read_bytes() for name in (CONFIG, MANIFEST, RECEIPT)}
    _nested(folder)
    (done,) = api.repair(folder)
    assert [change.file for change in done.changes] == [CONFIG]
    assert {name: (folder / name).read_bytes() for name in kept} == kept


def test_metadata_changed_by_hand_is_recorded_as_it_is(folder: Path) -> None:
    _root(max_position_embeddings=12345)(folder)
    assert "QC021" in {finding.rule for finding in api.validate(folder).findings}
    (done,) = api.repair(folder)
    assert {change.file for change in done.changes} == {MANIFEST, RECEIPT}
    assert "config.json was changed after the conversion" in done.changes[0].why
    assert api.validate(folder).findings == []


def test_a_shard_changed_afterwards_is_not_recorded(folder: Path) -> None:
    _nested(folder)
    shard = sorted(folder.glob("*.safetensors"))[0]
    data = shard.read_bytes()
    shard.write_bytes(data.replace(b'"format":"pt"', b'"format":"tf"', 1))
    assert shard.read_bytes() != data
    assert run_cli("repair", folder).code == 0
    full = api.validate(folder, level="full")
    assert shard.name in {finding.where for finding in full.findings}


def test_a_repo_is_repaired_by_its_headers(folder: Path, tmp_path: Path) -> None:
    """Changed files go into a folder; no weight is fetched, nothing is sent."""
    _nested(folder)
    files = {name: data for name, data in tree(folder).items() if isinstance(data, bytes)}
    with hub_and_client(tmp_path / "home") as (server, waits):
        server.waits = waits
        server.add("org/model", files)
        refused = run_cli("repair", "org/model")
        assert refused.code == 2
        assert "name a folder for the changed files" in refused.err
        result = run_cli("repair", "org/model", "--out", tmp_path / "mended")
        assert result.code == 0, result.err
        assert server.asked("PUT", "") == []
    api.repair(folder)
    for name in os.listdir(tmp_path / "mended"):
        assert (tmp_path / "mended" / name).read_bytes() == (folder / name).read_bytes()
    assert CONFIG in os.listdir(tmp_path / "mended")


def test_what_no_config_describes_is_refused(folder: Path) -> None:
    """INT4 codes without a block that says how: bits and groups are not guessed from shapes."""
    _root(quantization_config=GONE)(folder)
    before = tree(folder)
    result = run_cli("repair", folder)
    assert result.code == 1
    assert "QC012" in result.err
    assert "run the conversion (w4a16) again into this folder with --verify" in result.err
    assert tree(folder) == before
    shown = run_cli("repair", folder, "--dry-run")
    assert shown.code == 3
    assert "left QC012" in shown.out


def test_an_unfinished_conversion_is_refused(folder: Path) -> None:
    (folder / ".qconvert").mkdir()
    result = run_cli("repair", folder)
    assert result.code == 1
    assert "a conversion is unfinished" in result.err


def test_a_broken_receipt_is_not_sealed_again(folder: Path) -> None:
    _nested(folder)
    receipt = folder / RECEIPT
    receipt.write_bytes(receipt.read_bytes().replace(b'"nbytes":', b'"nbytes": ', 1))
    before = tree(folder)
    result = run_cli("repair", folder)
    assert result.code == 1
    assert "does not match its seal" in result.err or "do not match its seal" in result.err
    assert tree(folder) == before


def test_changed_files_go_into_another_folder(folder: Path, tmp_path: Path) -> None:
    _nested(folder)
    before = tree(folder)
    result = run_cli("repair", folder, "--out", tmp_path / "mended", "--json")
    assert result.code == 0, result.err
    assert tree(folder) == before
    (said,) = json.loads(result.out)
    assert {change["file"] for change in said["changes"]} == set(os.listdir(tmp_path / "mended"))
    assert all(change["why"] and change["diff"] for change in said["changes"])


def _staged(folder: Path, files: object, **data: bytes) -> Path:
    """A stage as an attacker, or an interrupted repair, leaves it."""
    stage = folder / ".qconvert-repair"
    stage.mkdir()
    for name, content in data.items():
        (stage / name.replace("__", ".")).write_bytes(content)
    (stage / "commit.json").write_bytes(
        files if isinstance(files, bytes) else json.dumps(files).encode()
    )
    return stage


def _hash(file: Path) -> str:
    return digest(file.read_bytes())


_OTHER = b'{"model_type": "other"}'
# Each makes what `commit.json` says of a folder, in which config.json is staged too.
_PLANTED: dict[str, Callable[[Path], object]] = {
    "of an earlier version": lambda folder: {
        "written": ["config.json"], "removed": [next(folder.glob("*.safetensors")).name],
    },
    "weights, by their true hash": lambda folder: {
        "files": {one.name: [_hash(one), None] for one in folder.glob("*.safetensors")},
    },
    "another config than is here": lambda folder: {"files": {CONFIG: ["0" * 32, digest(_OTHER)]}},
    "another config than is staged": lambda folder: {
        "files": {CONFIG: [_hash(folder / CONFIG), "0" * 32]},
    },
    "one of two files": lambda folder: {
        "files": {
            MANIFEST: [_hash(folder / MANIFEST), None], CONFIG: [None, digest(_OTHER)],
        },
    },
    "a file beside the folder": lambda folder: {"files": {"../victim": [None, digest(_OTHER)]}},
    "no hashes": lambda folder: {"files": {CONFIG: "now"}},
    "torn": lambda folder: b"",
    "half": lambda folder: b'{"files": {"con',
    "no text": lambda folder: b"\xff\x00",
    "a list": lambda folder: [],
    "too large": lambda folder: b"[" * ((16 << 20) + 1),
}  # fmt: skip


@pytest.mark.parametrize("what", _PLANTED)
def test_a_stage_of_another_folder_is_removed(what: str, folder: Path, tmp_path: Path) -> None:
    """It came with the folder, or is torn: nothing is carried out, and nothing is blocked."""
    before = tree(folder)
    _staged(folder, _PLANTED[what](folder), config__json=_OTHER)
    result = run_cli("repair", folder)
    assert result.code == 0, result.err
    assert "is removed, not carried out" in result.err
    assert tree(folder) == before
    assert sorted(os.listdir(tmp_path)) == ["folder"]


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_stands_in_the_way_of_a_stage_is_removed(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "letter").write_text("dear")
    before = tree(folder)
    stage = folder / ".qconvert-repair"
    stage.write_text("") if kind == "file" else stage.symlink_to(tmp_path / "victim")
    assert run_cli("repair", folder).code == 0
    assert tree(folder) == before
    assert (tmp_path / "victim" / "letter").read_text() == "dear"


def test_a_stage_does_not_travel(folder: Path, tmp_path: Path) -> None:
    """Neither by a conversion nor by an upload; until it is dealt with the folder is unfinished."""
    _staged(folder, {"files": {}}, config__json=_OTHER)
    result = run_cli("run", "copy", folder, tmp_path / "out", "--jobs", "1")
    assert result.code == 0, result.err
    assert [name for name in os.listdir(tmp_path / "out") if name.startswith(".")] == []
    assert "QC002" in run_cli("validate", folder, "--level", "headers").out
    with pytest.raises(OutputError, match="its repair is unfinished"):
        local_files(folder)


def test_a_folder_beside_is_written_to_again_after_an_interruption(
    folder: Path, tmp_path: Path
) -> None:
    """`--out`: what lies there of another run of the same command does not block it."""
    _nested(folder)
    (tmp_path / "out").mkdir()
    _staged(tmp_path / "out", b"", config__json=_OTHER)
    result = run_cli("repair", folder, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    assert not (tmp_path / "out" / ".qconvert-repair").exists()
    assert (tmp_path / "out" / CONFIG).exists()


def test_a_runtime_must_load_the_result(tmp_path: Path) -> None:
    """So many ranks would cut the experts' groups of 32 columns: no config mends that."""
    source, folder = published("qwen3_moe").write(tmp_path / "source"), tmp_path / "folder"
    done = run_cli("w4a16", source, folder, "--rtn", "--group-size", "32")
    assert done.code == 0, done.err
    _nested(folder)
    before = tree(folder)
    refused = run_cli("repair", folder, "--for", "sglang==0.5.23", "--tp", "64")
    assert refused.code == 1
    assert "QC13" in refused.err
    assert tree(folder) == before
    mended = run_cli("repair", folder, "--for", "sglang==0.5.23", "--tp", "2")
    assert mended.code == 0, mended.err
    assert run_cli("repair", folder, "--tp", "2").code == 2


# --- Numbers that a block leaves out, or states otherwise than the tensors -------------------------


def _in_text_alone(config: dict[str, Any]) -> None:
    block = config.pop("quantization_config")
    config["text_config"]["quantization_config"] = block


W4A16 = ("w4a16", "--rtn")
NVFP4 = ("nvfp4", "--dialect", "compressed-tensors")
MODELOPT = ("nvfp4", "--dialect", "modelopt")
# The source and the command that make a folder, what is done to its config, the rule that finds it, and
# whether qconvert.json is needed to say what holds (else shapes do, in a folder of anyone).
NUMBERS: dict[str, tuple[str, tuple[str, ...], Break, str, bool]] = {
    "no group_size": ("moe", W4A16, _weights(group_size=GONE), "QC135", False),
    "group_size of null": ("moe", W4A16, _weights(group_size=None), "QC135", False),
    "no num_bits": ("moe", W4A16, _weights(num_bits=GONE), "QC135", False),
    "other num_bits": ("moe", W4A16, _weights(num_bits=8), "QC026", False),
    "other group_size": ("moe", W4A16, _weights(group_size=64), "QC038", False),
    "strategy of rows": ("moe", W4A16, _weights(strategy="channel", group_size=None), "QC038", False),
    "not symmetric": ("moe", W4A16, _weights(symmetric=False), "QC088", False),
    "symmetric": ("moe", (*W4A16, "--asymmetric"), _weights(symmetric=True), "QC088", False),
    "no groups": ("moe", W4A16, _block(config_groups=GONE), "QC135", False),
    "groups of nothing": ("moe", ("mx",), _block(config_groups={}), "QC135", False),
    "no groups and no format": ("moe", NVFP4, _block(config_groups=GONE, format=GONE), "QC135", False),
    "no format": ("moe", W4A16, _block(format=GONE), "QC135", False),
    "rows as a group": (
        "moe", (*W4A16, "--group-size", "channel"), _weights(strategy="group", group_size=None),
        "QC135", False,
    ),
    "nvfp4": ("moe", NVFP4, _weights(group_size=GONE), "QC135", False),
    "modelopt": ("moe", MODELOPT, _block(group_size=GONE), "QC135", False),
    "modelopt's algorithm": ("moe", MODELOPT, _block(quant_algo=GONE), "QC103", False),
    "mxfp4": ("moe", ("mx",), _weights(group_size=GONE), "QC135", False),
    "mxfp8": (
        "moe", ("mx", "--bits", "8", "--targets", "Linear"), _weights(scale_dtype=GONE), "QC135", False,
    ),
    "fp8 rows": ("moe", ("fp8", "--channel"), _weights(strategy=GONE), "QC135", False),
    "fp8 blocks": ("moe", ("fp8",), _block(weight_block_size=GONE), "QC015", False),
    "gptq bits": ("gptq", (), _block(bits=GONE), "QC089", False),
    "gptq group_size": ("gptq", (), _block(group_size=GONE), "QC089", False),
    "gptq sym": ("gptq", (), _block(sym=GONE), "QC135", True),
    "gptq order": ("gptq", (), _block(desc_act=GONE), "QC135", True),
    "no drafts counted": ("draft", (), _root(num_nextn_predict_layers=GONE), "QC019", False),
    "a draft too many": ("draft", (), _root(num_nextn_predict_layers=2), "QC013", False),
    "nested drafts": ("tower", (), _text(mtp_num_hidden_layers=2), "QC013", False),
    "drafts that are gone": ("no draft", (), _root(num_nextn_predict_layers=1), "QC053", False),
}  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("numbers")


@pytest.mark.parametrize("what", NUMBERS)
def test_a_number_is_found_and_mended(what: str, sources: Path, tmp_path: Path) -> None:
    """To the same config, also where no qconvert.json tells it."""
    name, words, change, rule, told = NUMBERS[what]
    source = written(name, sources)
    folder = tmp_path / "folder"
    if words:
        assert run_cli(words[0], source, folder, *words[1:], "--jobs", "1").code == 0
    else:
        shutil.copytree(source, folder)
    whole = json.loads((folder / CONFIG).read_bytes())
    change(folder)
    bare = shutil.copytree(folder, tmp_path / "bare")
    for file in (MANIFEST, RECEIPT, "hf_quant_config.json"):
        (bare / file).unlink(missing_ok=True)
    for broken in (folder, bare):
        if broken == bare and what == "drafts that are gone":
            continue  # a warning there: another tool may count what another folder has
        found = run_cli("validate", broken)
        assert found.code == 3, found.out
        assert f"error   {rule} " in found.out, found.out
        done = run_cli("repair", broken)
        if broken == bare and told:
            assert done.code == 1, done.out
            assert "convert again from the source" in done.err
            continue
        assert done.code == 0, done.err
        mended = json.loads((broken / CONFIG).read_bytes())
        if not any(word in what for word in ("strategy", "drafts", "rows as", "groups")):
            assert mended == whole
        assert "0 errors" in run_cli("validate", broken).out
        assert run_cli("repair", broken).out.endswith(
            "nothing to repair in its metadata; no weights were read\n"
        )


@pytest.mark.parametrize("words", [("int8",), ("fp8", "--channel")], ids=" ".join)
def test_groups_that_shapes_do_not_tell(
    words: tuple[str, ...], sources: Path, tmp_path: Path
) -> None:
    """Nothing is written, and the reason is that of the block, not of its tensors."""
    folder = tmp_path / "folder"
    done = run_cli(words[0], written("moe", sources), folder, *words[1:], "--jobs", "1")
    assert done.code == 0, done.err
    _block(config_groups=GONE)(folder)
    before = tree(folder)
    done = run_cli("repair", folder)
    assert done.code == 1
    assert "expected config_groups (shapes do not tell how activations are quantized)" in done.err
    assert tree(folder) == before


def test_a_size_that_shapes_leave_open_is_not_guessed(sources: Path, tmp_path: Path) -> None:
    """Matrices of one group a row: of any size that is as wide, and no qconvert.json tells it."""
    from qconvert.checkpoint.checkpoint import Checkpoint
    from qconvert.validators.headers.stated_numbers import wrong_numbers

    folder = tmp_path / "folder"
    # Rows of 96 columns in groups of 32 or of 40 have 3 scales each.
    source = published("qwen3_moe", experts=2, inner=96).write(tmp_path / "source")
    done = run_cli("w4a16", source, folder, "--rtn", "--group-size", "32", "--jobs", "1")
    assert done.code == 0, done.err
    _weights(group_size=GONE)(folder)
    (number,) = wrong_numbers(Checkpoint.open(folder))
    assert (number.value, number.proof) == (32, "qconvert.json says so")


def test_a_block_in_text_config_alone(tmp_path: Path) -> None:
    """sglang 0.5.23 does not take the model for quantized (KeyError of its first packed name); a class
    whose config takes the block from there is whole."""
    source, folder = (
        published("qwen3_5_moe", experts=2, inner=128).write(tmp_path / "s"),
        tmp_path / "f",
    )
    done = run_cli("w4a16", source, folder, "--rtn", "--jobs", "1")
    assert done.code == 0, done.err
    _config(_in_text_alone)(folder)
    found = run_cli("validate", folder, "--for", "sglang==0.5.23", "--tp", "1")
    assert found.code == 3
    assert "QC037 config.json: text_config: quantization_config: is the only block" in found.out
    assert "QC13" in found.out
    done = run_cli("repair", folder, "--for", "sglang==0.5.23", "--tp", "1")
    assert done.code == 0, done.err
    mended = json.loads((folder / CONFIG).read_bytes())
    assert "quantization_config" in mended
    assert "quantization_config" not in mended["text_config"]


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("moe", [f"self_attn.{part}_proj" for part in "qkv"]),
        ("draft", [f"mlp.shared_experts.{part}_proj" for part in ("gate", "up")]),
    ],
)
def test_names_that_patterns_do_not_spell_are_listed(
    model: str, parts: list[str], tmp_path: Path
) -> None:
    """modelopt's patterns name q, k and v, which are not quantized beside an o that is; both loaders ask
    for the module that they fuse them to. So do they for gate and up."""
    source, folder = written(model, tmp_path), tmp_path / "folder"
    words = ("--dialect", "modelopt", "--targets", "Linear", "--weight-only", "--jobs", "1")
    done = run_cli("nvfp4", source, folder, *words)
    assert done.code == 0, done.err
    made = read_tensors(source), read_tensors(folder)
    kept = [{n: t for n, t in of.items() if any(f".{p}." in n for p in parts)} for of in made]
    for file in [*folder.glob("*.safetensors*"), *folder.glob("*q*.json*")]:  # its index, and ours
        file.unlink()
    rest = {name: one for name, one in made[1].items() if name not in kept[1]}
    write_shard(folder / "model.safetensors", rest | kept[0])
    names = [f"*.{part}" for part in parts]
    _listed(*names)(folder)
    assert run_cli("validate", folder, "--for", "sglang==0.5.23", "--tp", "1").code == 3
    mended = run_cli("repair", folder, "--for", "sglang==0.5.23", "--tp", "1")
    assert mended.code == 0, mended.err
    assert run_cli("validate", folder, "--for", "sglang==0.5.23", "--tp", "1").code == 0
    assert run_cli("validate", folder, "--for", "vllm==0.33.0", "--tp", "1").code == 0
