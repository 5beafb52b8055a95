"""`qconvert ask`: what a server computes beside a folder's weights. Servers are models of transformers,
run whole, behind the runtimes' schemas (tests/model_server.py); figures are held to those of an oracle
that shares no code with the command."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import calibrate_models as models
import eval_oracle as oracle
import pytest
import torch
from checkpoints import Result, edit_json, ran, run_cli
from model_server import Computed, ModelServer, greedy, serving
from safetensors.torch import load_file, save_file

from qconvert import api
from qconvert.client.served import TOP, Answer, Predicted, Server, parse_server
from qconvert.core.errors import CheckpointError, RunError, UsageError
from qconvert.evaluate import ask
from qconvert.evaluate.activations import Inputs, as_stated, rounding, stated_inputs
from qconvert.evaluate.ask import NEW, Asked, Distance
from qconvert.evaluate.side import side_of

RUNTIMES = ("vllm", "sglang")
IDS = [models.samples(1, length, seed=length)[0] for length in (24, 9)]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, three conversions of it, another one of the same sizes, and data."""
    folder = tmp_path_factory.mktemp("ask")
    models.saved(models.qwen3_moe(num_hidden_layers=2), folder / "src")
    _sure(folder / "src")
    for name, words in {"w4a16": "w4a16 --rtn --group-size 32", "fp8": "fp8"}.items():
        command, *options = words.split()
        ran(command, folder / "src", folder / name, *options, "--jobs", "1")
        ran("dequant", folder / name, folder / f"{name}-bf16", "--jobs", "1")
    oracle.nudged(oracle.whole(folder / "src"), folder / "nudged")
    rows = [json.dumps({"input_ids": ids.tolist()}) for ids in IDS]
    (folder / "ids.jsonl").write_text("\n".join(rows))
    return folder


def _sure(folder: Path) -> None:
    """Have a model prefer some tokens by far, as one that was trained does: eight times the head."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] *= 8
    save_file(tensors, file, metadata={"format": "pt"})


@cache
def whole(folder: Path) -> Any:
    return oracle.whole(folder)


def of(folder: Path) -> Callable[[Sequence[int], int], Computed]:
    """A folder's model as a server computes it."""
    return lambda ids, new: greedy(whole(folder), ids, new)


@pytest.fixture(params=RUNTIMES)
def server(request: pytest.FixtureRequest, room: Path) -> Iterator[ModelServer]:
    """One that serves `w4a16` right."""
    with serving(ModelServer(request.param, of(room / "w4a16-bf16"))) as found:
        yield found


@pytest.fixture
def vllm(room: Path) -> Iterator[ModelServer]:
    with serving(ModelServer("vllm", of(room / "w4a16-bf16"))) as found:
        yield found


def asked(folder: Path, server: ModelServer, room: Path, **more: Any) -> Asked:
    return api.ask(folder, server.url, room / "ids.jsonl", devices=["cpu"], **more)


def told(folder: Path, server: ModelServer, room: Path, *more: str | Path) -> Result:
    words = ("--server", server.url, "--data", room / "ids.jsonl", "--device", "cpu")
    return run_cli("ask", folder, *words, *more)


# --- What is said ----------------------------------------------------------------------------------


def test_what_is_served_right(server: ModelServer, room: Path) -> None:
    done = told(room / "w4a16", server, room)
    assert (done.code, done.out.splitlines()[0]) == (
        0, "served right: as its weights are (2 texts)",
    )  # fmt: skip
    assert max(map(len, done.out.splitlines())) <= 60
    bodies = [body for path, body, _ in server.asked if body]
    assert [body.get("prompt", body.get("input_ids")) for body in bodies] == [
        i.tolist() for i in IDS
    ]
    assert all(body.get("prompt_logprobs", body.get("top_logprobs_num")) == TOP for body in bodies)


def test_as_json(vllm: ModelServer, room: Path) -> None:
    found = json.loads(told(room / "w4a16", vllm, room, "--json").out)
    names = ("verdict", "runtime", "version", "questions", "name", "causes")
    assert [found[one] for one in names] == ["right", "vllm", "0.33.0", 2, "served", []]
    assert set(found["prefill"]) == {
        "tokens", "kl", "median", "high", "noise", "limit", "agreement",
    }  # fmt: skip
    assert found["prefill"]["tokens"] == sum(ids.size - 1 for ids in IDS)
    assert found["decode"]["tokens"] == NEW * len(IDS)
    assert found["prefill"]["agreement"] > 0.9


def test_its_own_texts_by_the_folder_s_tokenizer(
    vllm: ModelServer, room: Path, tmp_path: Path
) -> None:
    """As ids of bytes: what is sent, put together again, are the questions."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    folder = shutil.copytree(room / "w4a16", tmp_path / "made")
    models.hf.PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(folder)
    done = run_cli("ask", folder, "--server", vllm.url, "--device", "cpu")
    assert (done.code, done.out.splitlines()[0]) == (
        0, "served right: as its weights are (6 texts)",
    ), done.out + done.err  # fmt: skip
    sent = [body["prompt"] for _, body, _ in vllm.asked if body]
    assert [plain.decode(ids) for ids in sent] == list(ask.QUESTIONS)
    done = run_cli("ask", room / "w4a16", "--server", vllm.url)
    assert (done.code, "expected a tokenizer (one of tokenizer.json" in done.err) == (1, True), (
        done.err
    )


def expected(served: Path, folder: Path) -> tuple[float, float]:
    """The mean KL(folder || served) over all ids, in float64, of prompts and of new tokens."""
    parts: tuple[list[float], list[float]] = ([], [])
    for ids in IDS:
        every = greedy(whole(served), ids.tolist(), NEW).ids
        rows = []
        for one in (folder, served):
            with torch.no_grad():
                logits = whole(one)(input_ids=torch.tensor([every]), use_cache=False).logits[0]
            rows.append(logits[:-1].double().log_softmax(1))
        kl = (rows[0].exp() * (rows[0] - rows[1])).sum(1).tolist()
        parts[0].extend(kl[: ids.size - 1])
        parts[1].extend(kl[ids.size - 1 :])
    return sum(parts[0]) / len(parts[0]), sum(parts[1]) / len(parts[1])


def test_the_distance_is_the_oracle_s(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server whose weights are 3 % off: the KL is that of the oracle, or less by what the other ids
    hide; but for a router that takes another expert, 3 % on some machines."""
    for top in (300, TOP):
        monkeypatch.setattr("qconvert.client.served.TOP", top)
        with serving(ModelServer("vllm", of(room / "nudged"))) as server:
            found = asked(room / "src", server, room)
        wanted = expected(room / "nudged", room / "src")
        for part, kl in zip((found.prefill, found.decode), wanted, strict=True):
            if top == 300:
                assert part.kl == pytest.approx(kl, rel=0.1)
            else:
                assert 0.2 * kl < part.kl <= kl * 1.1


def test_another_quantization_is_more_error(vllm: ModelServer, room: Path) -> None:
    """INT4 is served, and the folder is its source; and the way back, of which an advisory of the
    version that the server says is a reason."""
    done = told(room / "src", vllm, room)
    assert (done.code, done.out.splitlines()[0]) == (
        3, "served with more error than its weights explain (2 texts)",
    ), done.out  # fmt: skip
    assert "--for vllm==0.33.0 --tp N" in " ".join(done.out.split())
    assert max(map(len, done.out.splitlines())) <= 60
    vllm.compute = of(room / "src")
    found = asked(room / "w4a16", vllm, room)
    said = [cause for cause in found.causes if "VLLM_MARLIN_INPUT_DTYPE=int8" in cause]
    assert (found.verdict, len(said)) == ("more error", 1)
    assert said[0].startswith("vllm: with VLLM_MARLIN_INPUT_DTYPE=int8: Marlin's kernels")
    assert not any("activations" in cause for cause in found.causes)


def test_other_weights_are_garbage(vllm: ModelServer, room: Path) -> None:
    def other(ids: Sequence[int], new: int) -> Computed:
        """As if the rows of the head had been written in another order."""
        found = greedy(whole(room / "w4a16-bf16"), ids, new)
        mixed = [{(7 * id + 1) % 300: value for id, value in row.items()} for row in found.rows]
        return Computed(found.ids, new, mixed)

    vllm.compute = other
    done = told(room / "w4a16", vllm, room)
    assert (done.code, done.out.startswith("garbage: what is served are not these weights")) == (
        3,
        True,
    )


def test_numbers_that_are_none_are_garbage(server: ModelServer, room: Path) -> None:
    """NaN is null in JSON."""

    def broken(answer: dict[str, Any]) -> dict[str, Any]:
        if server.runtime == "vllm":
            top = answer["choices"][0]["logprobs"]["top_logprobs"][-1]
            top[next(iter(top))] = None
        else:
            answer["meta_info"]["output_top_logprobs"][-1][0][0] = None
        return answer

    server.change = broken
    found = asked(room / "w4a16", server, room)
    assert (found.decode.verdict, found.prefill.verdict) == ("garbage", "right")
    assert any(
        cause.startswith("texts are right and added tokens are not") for cause in found.causes
    )


_QUERY = "model.layers.0.self_attn.q_proj"
_GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}


def _packed(inputs: dict[str, Any] | None) -> dict[str, Any]:
    groups = {"group_0": {**_GROUP, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}


@pytest.mark.parametrize(
    ("block", "inputs"),
    [
        (None, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, ("fp8", 64)),
        ({"quant_method": "fp8", "activation_scheme": "static"}, ("fp8", 0)),
        ({"quant_method": "fp8", "modules_to_not_convert": [_QUERY]}, None),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ("fp4", 16)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_A16"}, None),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, ("fp8", 0)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, None),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, None),
        (_packed(None), None),
        (_packed({"num_bits": 8, "type": "float", "strategy": "token"}), ("fp8", 0)),
        (_packed({"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128}),
         ("fp8", 128)),
        (_packed({"num_bits": 8, "type": "int", "strategy": "token"}), ("int8", 0)),
        (_packed({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
         ("fp4", 16)),
        (_packed({"num_bits": 4, "type": "int", "strategy": "token"}), None),
    ],
)  # fmt: skip
def test_activations_that_a_config_states(
    block: dict[str, Any] | None, inputs: Inputs | None, room: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(room / "src", tmp_path / "made")
    if block is not None:
        edit_json(folder / "config.json", lambda c: c.update(quantization_config=block))
    assert stated_inputs(api.open_checkpoint(folder), _QUERY) == inputs


@pytest.mark.parametrize(("kind", "steps"), [("int8", 127), ("fp8", 448), ("fp4", 6)])
def test_rounded_to_codes_of_a_scale_for_some_columns(kind: Any, steps: int) -> None:
    """Each number is the nearest that its codes have, of scales of 16 columns, the last ones fewer."""
    rows = torch.randn(3, 40, generator=torch.Generator().manual_seed(5))
    found = rounding((kind, 16))
    assert found is not None
    codes = {
        "int8": torch.arange(-127.0, 128.0),
        "fp8": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float(),
        "fp4": torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]),
    }[kind]
    codes = torch.cat([codes, -codes])
    codes = codes[codes.isfinite()]
    made = found(rows)
    for at in (slice(0, 16), slice(16, 32), slice(32, 40)):
        scale = rows[:, at].abs().amax(1, keepdim=True) / steps
        near = (rows[:, at, None] / scale[..., None] - codes).abs().argmin(2)
        torch.testing.assert_close(made[:, at], codes[near] * scale)
    whole = rounding((kind, 0))
    assert whole is not None
    assert not torch.equal(whole(rows), made)
    assert rounding(None) is None


def _in_fp8(folder: Path) -> Any:
    """A model of transformers whose linears, and experts, take what vLLM makes of activations for FP8 in
    blocks: codes of a scale for 128 columns. What goes into an expert's down projection stays."""

    def coded(rows: torch.Tensor) -> torch.Tensor:
        found = []
        for part in torch.split(rows.float(), 128, -1):
            scale = part.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
            found.append((part / scale).to(torch.float8_e4m3fn).float() * scale)
        return torch.cat(found, -1).to(rows)

    model = oracle.whole(folder)
    for name, module in model.named_modules():
        is_linear = isinstance(module, torch.nn.Linear) and name != "lm_head"
        if is_linear or name.endswith("experts"):
            module.register_forward_pre_hook(lambda _, given: (coded(given[0]), *given[1:]))
    return model


def test_a_server_that_quantizes_activations_as_the_config_says(
    vllm: ModelServer, room: Path
) -> None:
    """It is right, since the limit is that of a run which does so too, and more error for the same
    weights without the config; other weights are more error with it."""
    rounds = _in_fp8(room / "fp8-bf16")
    vllm.compute = lambda ids, new: greedy(rounds, ids, new)
    found = asked(room / "fp8", vllm, room)
    plain = asked(room / "fp8-bf16", vllm, room)
    assert (found.verdict, plain.verdict) == ("right", "more error")
    for mine, other in ((found.prefill, plain.prefill), (found.decode, plain.decode)):
        assert mine.limit == pytest.approx(4 * mine.noise)
        assert mine.noise > 4 * other.noise
        assert 0.3 < mine.high / mine.noise < 3
    vllm.compute = of(room / "nudged")
    found = asked(room / "fp8", vllm, room)
    assert found.verdict == "more error"
    assert any("quantizes activations to 8 bits" in cause for cause in found.causes)
    assert any("--kv-cache-dtype" in cause for cause in found.causes)


def test_experts_for_cpu_kernels_get_int8(vllm: ModelServer, room: Path, tmp_path: Path) -> None:
    """As kt-kernel gives it to them, a scale for each row, whatever the GPU side states."""
    ran("amx", room / "src", tmp_path / "cpu", "--method", "int4", "--numa", "1", "--jobs", "1")
    model = oracle.whole(room / "src")
    oracle.put_amx_int4(model, tmp_path / "cpu")
    vllm.compute = lambda ids, new: greedy(model, ids, new)
    assert asked(tmp_path / "cpu", vllm, room, pair=room / "src").verdict == "right"
    assert asked(room / "src", vllm, room).verdict == "more error"

    sides = [api.open_checkpoint(folder) for folder in (tmp_path / "cpu", room / "src")]
    (tmp_path / "states").mkdir()
    with side_of(*sides).opened([4], tmp_path / "states", ["cpu"]) as opened:
        layer = opened.layers.model.layer(1, opened.weights, "cpu")
        rows = torch.randn(3, 64)
        scale = rows.abs().amax(1, keepdim=True) / 127
        with as_stated(opened, layer, lambda name: None) as side:
            assert side.rounds is not None
            torch.testing.assert_close(side.rounds(rows), (rows / scale).round() * scale)


def test_experts_alone_are_rounded_where_they_alone_are_quantized(
    room: Path, tmp_path: Path
) -> None:
    ran("fp8", room / "src", tmp_path / "fp8", "--targets", "experts", "--jobs", "1")
    repo = api.open_checkpoint(tmp_path / "fp8")
    (tmp_path / "states").mkdir()
    with side_of(repo).opened([4], tmp_path / "states", ["cpu"]) as opened:
        layer = opened.layers.model.layer(1, opened.weights, "cpu")
        query = layer.module.self_attn.q_proj
        rows = torch.randn(2, query.in_features, dtype=torch.bfloat16)
        before = query(rows)
        with as_stated(opened, layer, lambda name: stated_inputs(repo, name)) as side:
            assert torch.equal(query(rows), before)
            assert side.rounds is not None
            assert not torch.equal(side.rounds(rows), rows)
        with as_stated(opened, layer, lambda name: ("fp8", 128)):
            assert not torch.equal(query(rows), before)
        assert torch.equal(query(rows), before)
        with as_stated(opened, layer, lambda name: None) as side:
            assert side.rounds is None


def test_scales_of_a_kv_cache_are_no_weights(vllm: ModelServer, room: Path, tmp_path: Path) -> None:
    """The model is run as without them, and the limit is 0.1 nats at least."""
    words = ("--rtn", "--group-size", "32", "--targets", "Linear", "--kv-scale", "0.02")
    ran("w4a16", room / "src", tmp_path / "kv", *words, "--jobs", "1")
    ran("w4a16", room / "src", tmp_path / "plain", *words[:-2], "--jobs", "1")
    ran("dequant", tmp_path / "plain", tmp_path / "plain-bf16", "--jobs", "1")
    vllm.compute = of(tmp_path / "plain-bf16")
    found = asked(tmp_path / "kv", vllm, room)
    assert found.verdict == "right"
    assert found.prefill.limit == pytest.approx(0.101, rel=0.2)


def test_a_server_of_flat_predictions_is_garbage(vllm: ModelServer, room: Path) -> None:
    """The ids that it names have next to no probability of either model, so that only the id that the
    folder prefers tells them apart."""

    def flat(ids: Sequence[int], new: int) -> Computed:
        even = dict.fromkeys(range(20), -math.log(30_000))
        every = [*ids, *[5] * new]
        return Computed(every, new, [{**even, id: -math.log(30_000)} for id in every[1:]])

    vllm.compute = flat
    assert asked(room / "w4a16", vllm, room).decode.verdict == "garbage"


def test_verdicts_by_their_figures() -> None:
    def verdict(median: float, high: float, kl: float = 0.1) -> str:
        return Distance(9, kl, median, high, 0.0, 0.1, 1.0).verdict

    assert [verdict(0.0, high) for high in (0.0, 0.1, 0.2, 2.0)] == ["right"] * 2 + [
        "more error"
    ] * 2
    assert [verdict(median, 3.0) for median in (1.0, 1.01)] == ["more error", "garbage"]
    assert [verdict(0.0, 0.0, kl) for kl in (float("nan"), float("inf"))] == ["garbage"] * 2
    fine, bad = (Distance(9, 0.1, 0.0, high, 0.0, 0.1, 1.0) for high in (0.0, 0.5))
    for pair in ((fine, bad), (bad, fine)):
        assert Asked("f", "u", "vllm", None, "m", 1, *pair, ()).verdict == "more error"


def test_each_place_is_compared_with_its_own() -> None:
    """Two texts, of prompts and new tokens in turn; the second run is apart at one place in three."""
    draw = torch.Generator().manual_seed(2)
    rows = torch.randn(7, 5, generator=draw, dtype=torch.float64).log_softmax(1)
    each = [Predicted(0, dict(enumerate(row))) for row in rows.tolist()]
    answers = [Answer(tuple(each[:2]), tuple(each[2:3])), Answer(tuple(each[3:4]), tuple(each[4:]))]
    assert ask._ids(answers) == each
    parts = ask._parts(answers)
    assert [places for _, places in parts] == [[0, 1, 3], [2, 4, 5, 6]]
    other = rows.roll(1, 1)
    for (some, places), apart in zip(parts, (0.0, 1.0), strict=True):
        own = torch.where(torch.tensor(apart) > 0, other, rows), rows.argmax(1), rows.amax(1)
        found = ask.distance(some, own, own, places, 0.1)
        kl = (own[0].exp() * (own[0] - rows)).sum(1)[places]
        assert found.kl == pytest.approx(float(kl.mean()))
        assert found.high == pytest.approx(float(kl.quantile(0.9)))
        assert found.noise == pytest.approx(0)
        assert (found.agreement, found.limit, found.tokens) == (1.0, 0.101, len(places))
        shaken = ask.distance(some, own, (other.roll(1, 1), *own[1:]), places, 0.0)
        gap = (own[0].exp() * (own[0] - other.roll(1, 1))).sum(1)[places].quantile(0.9)
        assert shaken.limit == pytest.approx(4 * float(gap))


def test_divergence_is_a_lower_bound() -> None:
    """Of two distributions over 50 ids, of which some are named: as computed over the classes."""
    draw = torch.Generator().manual_seed(1)
    p, q = (torch.randn(6, 50, generator=draw, dtype=torch.float64).log_softmax(1) for _ in "pq")
    whole = (p.exp() * (p - q)).sum(1)
    every = torch.ones(6, 50, dtype=torch.bool)
    assert torch.allclose(ask.divergence(p, q, every), whole)
    some = torch.arange(50).expand(6, 50) < 20
    classes = [
        torch.cat([one[:, :20].exp(), one[:, 20:].exp().sum(1, keepdim=True)], 1) for one in (p, q)
    ]
    coarse = (classes[0] * (classes[0] / classes[1]).log()).sum(1)
    found = ask.divergence(p, q, some)
    assert torch.allclose(found, coarse)
    assert bool((found < whole).all())


def test_an_id_that_is_not_named_is_counted_as_likely_as_it_may_be() -> None:
    """Of all Q that give the named ids what they have and one more at most `least`, the nearest."""
    draw = torch.Generator().manual_seed(3)
    p, q = (torch.randn(6, 8, generator=draw, dtype=torch.float64).log_softmax(1) for _ in "pq")
    named = torch.arange(8).expand(6, 8) < 3
    for cap in (0.02, 0.9):
        found = ask.divergence(p, q, named, p[:, 5], torch.full((6,), cap).double().log())
        left, right = (1 - one[:, :3].exp().sum(1) for one in (p, q))
        mine = p[:, 5].exp()
        tried = [
            mine * (mine / value).log() + (left - mine) * ((left - mine) / (right - value)).log()
            for share in torch.linspace(1e-4, 1 - 1e-4, 20_000, dtype=torch.float64)
            for value in [right.clamp(max=cap) * share]
        ]
        nearest = torch.stack(tried).amin(0)
        inside = (p[:, :3].exp() * (p - q)[:, :3]).sum(1)
        torch.testing.assert_close(found, inside + nearest, rtol=1e-3, atol=1e-4)
    none = torch.full((6,), -torch.inf, dtype=torch.float64)
    torch.testing.assert_close(
        ask.divergence(p, q, named, none, none + 9), ask.divergence(p, q, named)
    )


def test_the_token_that_stands_there_says_nothing_of_others() -> None:
    assert ask._least(Predicted(7, {7: -9.0, 4: -1.0, 5: -2.0})) == -2.0
    assert ask._least(Predicted(7, {7: -9.0})) == 0.0


# --- What is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/v1/models", 401, "status 401: .* set QCONVERT_SERVER_KEY to its key"),
        ("/v1/models", 503, "status 503: .* ask when it has loaded the model"),
        ("/v1/models", 404, "status 404: .* name the server itself"),
        ("/v1/completions", 400, "/v1/completions: status 400: .*see the server's log"),
        ("/v1/completions", 307, "status 307"),
    ],
)
def test_what_a_server_refuses_is_told(
    path: str, status: int, said: str, vllm: ModelServer, room: Path
) -> None:
    vllm.status = {path: status}
    with pytest.raises(RunError, match=said):
        asked(room / "w4a16", vllm, room)


def test_a_server_that_says_no_version(server: ModelServer, room: Path) -> None:
    server.version = None
    assert Server.at(server.url).version is None


def test_the_key_is_sent_where_it_is_set(
    vllm: ModelServer, room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Server.at(vllm.url)
    monkeypatch.setenv("QCONVERT_SERVER_KEY", "secret")
    Server.at(f"{vllm.url}/v1/")
    assert {key for _, _, key in vllm.asked} == {None, "Bearer secret"}
    monkeypatch.setenv("QCONVERT_SERVER_KEY", "a\nb")
    with pytest.raises(RunError, match="/v1/models: "):
        Server.at(vllm.url)


@pytest.mark.parametrize(
    "answer",
    [{}, [], {"choices": []}, {"choices": [{}]}, {"choices": [{"prompt_logprobs": None}]}, b"<html>",
     b"\xff", {"meta_info": {"input_token_logprobs": [[1]], "input_top_logprobs": [None]}}],
)  # fmt: skip
def test_answers_of_another_form(answer: Any, server: ModelServer, room: Path) -> None:
    server.change = lambda _: answer
    with pytest.raises(RunError, match=r"without the log-probabilities|not valid JSON"):
        asked(room / "w4a16", server, room)


def test_answers_about_other_tokens(server: ModelServer, room: Path) -> None:
    """Fewer than were sent, or others: a server that cuts what it is given."""
    right = server.compute
    server.compute = lambda ids, new: right(ids[1:] if len(ids) > 3 else ids, new)
    with pytest.raises(RunError, match=r"as they were sent|without the log-probabilities"):
        asked(room / "w4a16", server, room)
    server.compute = lambda ids, new: right(ids, new - 1)
    with pytest.raises(RunError, match="expected log-probabilities of 23 tokens"):
        asked(room / "w4a16", server, room)


def test_another_model_by_its_vocabulary(vllm: ModelServer, room: Path) -> None:
    def more(ids: Sequence[int], new: int) -> Computed:
        found = greedy(whole(room / "src"), ids, new)
        return Computed(found.ids, new, [{9999: -0.1, **row} for row in found.rows])

    vllm.compute = more
    with pytest.raises(
        CheckpointError, match="has a token 9999, and the folder's head has 300 rows"
    ):
        asked(room / "w4a16", vllm, room)


def test_a_proxy_and_a_short_context(vllm: ModelServer, room: Path) -> None:
    vllm.longest = 30
    with pytest.raises(RunError, match=r"takes texts of 30 tokens, and one of 24 with 16 more"):
        asked(room / "w4a16", vllm, room)
    vllm.owner = "somebody"
    with pytest.raises(RunError, match="expected vLLM or sglang to list its model"):
        asked(room / "w4a16", vllm, room)


def test_nothing_answers(room: Path) -> None:
    done = run_cli(
        "ask", room / "w4a16", "--server", "http://127.0.0.1:9", "--data", room / "ids.jsonl"
    )
    assert done.code == 1
    assert "start the server there, and ask when it has loaded the model" in done.err


@pytest.mark.parametrize(
    "text", ["", "localhost:8000", "ftp://h", "http://", "http://h:x", "http://h/?a=1", "http://[h"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match="is no address"):
        parse_server(text)
    assert parse_server("http://h:8000/v1/") == "http://h:8000"


def test_options_that_do_not_fit(room: Path, vllm: ModelServer) -> None:
    for words in (("--samples", "3"), ("--column", "text")):
        done = run_cli("ask", room / "src", "--server", vllm.url, *words)
        assert (done.code, "choose of --data: give it" in done.err) == (2, True)
    with pytest.raises(UsageError, match="is no folder of the CPU's experts; omit --pair"):
        asked(room / "src", vllm, room, pair=room / "w4a16")
