"""Runtimes of the releases before: each answers for itself, by tables that state what differs."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import run_cli
from hypothesis import given
from hypothesis import strategies as st
from loaders.published import published
from loaders.record_classes import Outcome, keep, shortened, still_agreed
from loaders.recorded_tables import written
from simulated_folders import folder

from qconvert.core.versions import RELEASES
from qconvert.runtimes.classes import record as records
from qconvert.runtimes.classes.record import class_record, recorded, what_differs, whole
from qconvert.runtimes.consumers import Consumer
from qconvert.runtimes.loading.setting import BLACKWELL, NotSimulated, Setting
from qconvert.runtimes.serving import Answer, Offered, asked, loads
from qconvert.runtimes.sglang import simulator as sglang
from qconvert.runtimes.vllm import simulator as vllm

_ROOT = Path(__file__).parent.parent
_TABLES = Path(records.__file__).parent
_BY_TABLE = {"sglang": sglang.by_table, "vllm": vllm.by_table}
EARLIER = [(name, RELEASES[name].earlier[-1]) for name in ("sglang", "vllm")]


def _made_for(runtime: str, version: str) -> dict[str, Any]:
    """A manifest of a folder that was made for a runtime."""
    return {"passes": [{"name": "fuse", "options": {"consumer": f"{runtime}=={version}"}}]}


def test_tables_are_of_the_releases_that_are_known() -> None:
    """And so is what `make older` installs to make them."""
    known = {
        f"{name}-{version}"
        for name in ("sglang", "vllm")
        for version in (RELEASES[name].version, *RELEASES[name].earlier)
    }
    assert {path.parent.name for path in _TABLES.glob("*/*.json")} == known
    text = "\n".join(path.read_text() for path in _ROOT.glob("requirements-older*.txt"))
    assert sorted(re.findall(r"^(\w+)==(\S+)", text, re.MULTILINE)) == EARLIER


@pytest.mark.parametrize(("runtime", "version"), EARLIER)
def test_every_table_of_an_earlier_release_is_read(runtime: str, version: str) -> None:
    """It takes no agreement of loaders from the newest, and what it has of its own is not the same."""
    files = [f for f in (_TABLES / f"{runtime}-{version}").glob("*.json") if f.stem[:4] != "not_"]
    assert len(files) > 90
    for file in files:
        found = recorded(
            runtime, file.stem.removesuffix(".draft"), version, draft=".draft" in file.name
        )
        assert found is not None, file.name
        assert (found.runtime, found.version) == (runtime, version)
        table, own = whole(file), json.loads(file.read_bytes())
        assert table.get("agrees") == own.get("agrees")
        if "as_in" in own:
            newest = whole(_TABLES / f"{runtime}-{own['as_in']}" / file.name)
            assert own == what_differs(table, newest, own["as_in"])


_TABLE = st.dictionaries(
    st.sampled_from(["agrees", "asks", "draft", "modules", "names", "stages"]), st.integers(0, 3)
)


@given(_TABLE, _TABLE)
def test_what_differs_is_all_that_a_table_needs(earlier: Any, newest: Any) -> None:
    earlier |= {"runtime": "vllm", "version": "1"}
    stored = what_differs(earlier, newest, "2")
    at = Path("vllm-1") / "A.json"
    with pytest.MonkeyPatch.context() as patch:
        held = {"vllm-1": stored, "vllm-2": newest}
        patch.setattr(Path, "exists", lambda path: True)
        patch.setattr(Path, "read_bytes", lambda path: json.dumps(held[path.parent.name]))
        assert whole(at) == earlier
    same = {key for key in earlier.keys() & newest.keys() if earlier[key] == newest[key]}
    assert not stored.keys() & (same - {"agrees", "draft"})


def test_a_table_that_is_made_anew_leaves_those_of_earlier_releases(tmp_path: Path) -> None:
    newest, earlier = (tmp_path / f"vllm-{version}" / "A.json" for version in ("0.33.0", "0.32.0"))
    common = {"runtime": "vllm", "architecture": "A", "model_type": "a"}
    of_earlier = {**common, "version": "0.32.0", "names": [2], "agrees": {"unquantized": [1]}}
    of_newest = {**common, "version": "0.33.0", "names": [2], "asks": [3]}
    for one in (newest, earlier):
        one.parent.mkdir()
    newest.write_text(written(of_newest))
    earlier.write_text(shortened(written(of_earlier), newest))
    assert json.loads(earlier.read_bytes()).keys() >= {"as_in", "lacks"}
    assert "names" not in json.loads(earlier.read_bytes())
    for changed in ({**of_newest, "names": [7]}, of_newest, None):
        text = None if changed is None else written(changed)
        keep(Outcome("vllm", "a", "A", text, "does not build"), tmp_path)
        assert newest.exists() == (changed is not None)
        assert whole(earlier) == of_earlier


def test_forms_that_agree_stay_with_a_table_that_is_made_anew() -> None:
    """Answers to names that lead nowhere may change; what is built, and which scales of a cache it
    takes, may not."""
    cached = "int4 of linears with scales of a cache"
    before = {
        "names": [1], "unknown": {"module": {"": "error"}},
        "otherwise": {"tied=true": {"unknown": {}, "tied": [1]}},
        "agrees": {"unquantized": [1, 2], cached: [1]},
    }  # fmt: skip
    more = {"unknown": {"head": {"": "tied"}}, "stages": "unwritten"}
    now = {**before, **more, "otherwise": {"tied=true": {"tied": [1], **more}, "bias=true": more}}
    now = {key: value for key, value in now.items() if key not in ("agrees", "stages")}
    assert still_agreed(before, now) == {"agrees": before["agrees"]}
    assert still_agreed(before, {**now, "caches": False}) == {"agrees": {"unquantized": [1, 2]}}
    for built in ({"names": [2]}, {"stages": "one"}, {"otherwise": {"tied=true": {"tied": [2]}}}):
        assert still_agreed(before, {**now, **built}) == {}
    assert still_agreed({**before, "agrees": {}}, now) == {}


@pytest.mark.parametrize(("runtime", "version"), EARLIER)
def test_a_folder_is_answered_for_the_release_that_is_named(
    runtime: str, version: str, tmp_path: Path
) -> None:
    where = published("qwen3_moe").write(tmp_path / "sound")
    done = run_cli("validate", where, "--for", f"{runtime}=={version}")
    assert done.code == 0, done.out
    assert f"{runtime} {version} loads the folder whole: " in done.out
    assert RELEASES[runtime].version not in done.out
    for spelled in (f"v{version}", f"{version}+cu128"):
        assert run_cli("validate", where, "--for", f"{runtime}=={spelled}").code == 0


@pytest.mark.parametrize(("runtime", "version"), EARLIER)
def test_a_plan_says_what_the_release_does_that_it_is_for(runtime: str, version: str) -> None:
    config, tensors = folder("qwen3_moe")
    said = loads(config, tensors, _made_for(runtime, version))
    newest = loads(config, tensors, {})
    assert said[runtime].version == version
    assert newest[runtime].version == RELEASES[runtime].version
    assert (said[runtime].verdict, newest[runtime].verdict) == ("loads", "loads")
    other = next(name for name in ("sglang", "vllm") if name != runtime)
    assert said[other] == newest[other]
    unknown = loads(config, tensors, _made_for(runtime, "0.1"))[runtime]
    assert (unknown.version, unknown.verdict) == ("0.1", "not known")
    assert f"not known for {runtime} 0.1" in unknown.unknown


@pytest.mark.parametrize(("runtime", "version"), EARLIER)
def test_only_forms_that_its_own_loader_was_seen_with(
    runtime: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agreement with the newest loader says nothing of another."""
    config, tensors = folder("qwen3_moe")
    name = f"Qwen3MoeForCausalLM of {version}"
    found = asked(Consumer(runtime, version), Offered(config, tensors), Setting())
    assert isinstance(found, Answer), name
    own = class_record(runtime, "Qwen3MoeForCausalLM", version)
    monkeypatch.setattr(records, "_read", lambda path: replace(own, agrees={}))
    with pytest.raises(NotSimulated, match="not tried with unquantized"):
        {"sglang": sglang, "vllm": vllm}[runtime].simulate(config, tensors, version=version)


def test_a_class_that_came_with_a_release_is_not_known_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, release = "Qwen3MoeForCausalLM", RELEASES["sglang"]
    for version in (release.version, *release.earlier):
        (tmp_path / f"sglang-{version}").mkdir()
    held = f"sglang-{release.version}/{name}.json"
    shutil.copy(records._TABLES / held, tmp_path / held)
    monkeypatch.setattr(records, "_TABLES", tmp_path)
    assert recorded("sglang", name) is not None
    assert recorded("sglang", name, release.earlier[-1]) is None


@pytest.mark.parametrize(("runtime", "version"), EARLIER)
@pytest.mark.parametrize("key", ["ignore", "exclude_modules"])
def test_a_list_of_modelopt_that_came_with_a_release(runtime: str, version: str, key: str) -> None:
    """The release before reads `ignore` alone, and takes what the other list names for codes."""
    config, tensors = folder("qwen3_moe")
    block = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    config["quantization_config"] = {**block, key: ["model*", "lm_head"]}

    def loaded(of: str | None) -> bool:
        record = class_record(runtime, "Qwen3MoeForCausalLM", of)
        return _BY_TABLE[runtime](record, config, tensors, Setting()).whole

    assert loaded(None)
    assert loaded(version) == (key == "ignore")


def test_blocks_of_latent_attention_in_a_mixture() -> None:
    """DeepSeek's class looked for the block in the config, which states one for each module."""
    config, tensors = folder("deepseek_v3")
    _, blocks = folder("deepseek_v3", fp8=True)
    tensors |= {name: kind for name, kind in blocks.items() if ".kv_b_proj." in name}
    latent = {name.removesuffix(".weight") for name in tensors if name.endswith("kv_b_proj.weight")}
    block = {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None,
        "quantized_layers": {
            **{name: {"quant_algo": "FP8_PB_WO"} for name in latent},
            "model.layers.9.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        },
    }  # fmt: skip
    config["quantization_config"] = block

    def refused(version: str | None) -> str:
        record = class_record("sglang", "DeepseekV3ForCausalLM", version)
        return str(sglang.by_table(record, config, tensors, Setting()).refused)

    assert refused(None) == "None"
    assert refused("0.5.22").startswith(
        "model.layers.0.self_attn.kv_b_proj: the class looks for one"
    )


def test_an_earlier_release_on_another_gpu_is_not_known() -> None:
    """Its choice of runners there was not read."""
    config, tensors = folder("qwen3_moe")
    at = Setting(capability=BLACKWELL)
    earlier, newest = (class_record("sglang", "Qwen3MoeForCausalLM", v) for v in ("0.5.22", None))
    assert sglang.by_table(newest, config, tensors, at).refused is None
    with pytest.raises(NotSimulated, match=r"sglang 0\.5\.22 on another GPU"):
        sglang.by_table(earlier, config, tensors, at)
