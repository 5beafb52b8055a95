"""Next-token log-probabilities asked of a running server, vLLM's or sglang's.

vLLM answers POST /v1/completions: `prompt_logprobs` of a choice has, for each token of the prompt but
the first, log-probabilities by token id: of the likeliest, and of the token itself. Its `logprobs` have
those of new tokens under texts (`token_id:7`, by return_tokens_as_token_ids). sglang answers POST
/generate: `input_token_logprobs` and `input_top_logprobs` of its `meta_info` have [log-probability, id,
text] of the prompt's tokens and of the likeliest, `output_...` of new tokens. Both take ids in place of
a text. Read in vLLM's `entrypoints/openai/completion/protocol.py` and `serving.py`, and sglang's
`srt/managers/io_struct.py` and `tokenizer_manager.py`. A number that JSON cannot hold (NaN) is null.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any, Literal
from urllib.parse import urlsplit

from qconvert.client.retries import library, without_userinfo
from qconvert.core.errors import RunError, UsageError
from qconvert.core.json_text import parse_json
from qconvert.core.shown import shortened

Runtime = Literal["sglang", "vllm"]
TOP = 20  # of the likeliest: the most that vLLM gives by default (--max-logprobs)
KEY = "QCONVERT_SERVER_KEY"  # the variable with the server's key, if it wants one
# Seconds without a byte. Kernels are compiled, and weights read from a disk, at a first request.
_TIMEOUT, _CONNECT = 600.0, 10.0
_MOST_ANSWER = 64 << 20  # 20 log-probabilities of 4,096 tokens take 6 MB
_AS_ID = "token_id:"


@dataclass(frozen=True, slots=True)
class Predicted:
    """Log-probabilities (nats, by token id) that a server gave at a place of a text: of the likeliest
    tokens, and of the one that stands there."""

    token: int
    logprobs: Mapping[int, float]


@dataclass(frozen=True)
class Answer:
    """Predictions of a prompt's tokens but the first, and of the new tokens that were likeliest, one
    after another."""

    prompt: tuple[Predicted, ...]
    new: tuple[Predicted, ...]


def parse_server(text: str) -> str:
    """The address of a server: http://HOST:PORT, with or without /v1. Raises UsageError."""
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError as error:
        raise UsageError(f"{shortened(text, 200)!r} is no address: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(f"{shortened(text, 200)!r} is no address; write http://HOST:PORT")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass(frozen=True)
class Server:
    """A server that answers: its runtime and version (None: it does not say), the name of its model and
    the longest text in tokens that it takes (None: it does not say)."""

    url: str
    runtime: Runtime
    version: str | None
    model: str
    longest: int | None

    @classmethod
    def at(cls, url: str) -> Server:
        """Raises RunError where nothing answers, or another server than vLLM's or sglang's."""
        address = parse_server(url)
        said = _asked(address, "/v1/models")
        cards = said.get("data") if isinstance(said, Mapping) else None
        card = cards[0] if isinstance(cards, list) and cards else None
        owner, name = (
            card.get(key) if isinstance(card, Mapping) else None for key in ("owned_by", "id")
        )
        if owner not in ("sglang", "vllm") or not isinstance(name, str):
            raise RunError(
                f"{_shown(address)}: expected vLLM or sglang to list its model at /v1/models, found "
                f"{shortened(repr(said), 200)}; name the server itself, not a proxy before it"
            )
        longest = card.get("max_model_len") if isinstance(card, Mapping) else None
        stated = _asked(address, "/version" if owner == "vllm" else "/server_info", needed=False)
        version = stated.get("version") if isinstance(stated, Mapping) else None
        return cls(
            address, owner, version if isinstance(version, str) else None, name,
            longest if type(longest) is int else None,
        )  # fmt: skip

    def ask(self, ids: Sequence[int], new: int) -> Answer:
        """Log-probabilities of a prompt's tokens, and of `new` more that the server chooses greedily.
        Raises RunError for a request that fails, and for an answer about other tokens."""
        if self.longest is not None and len(ids) + new > self.longest:
            raise RunError(
                f"{_shown(self.url)}: takes texts of {self.longest} tokens, and one of {len(ids)} with "
                f"{new} more is asked; give a smaller --length"
            )
        path, body = _request(self, ids, new)
        said = _asked(self.url, path, body)
        try:
            found = _of_vllm(said, ids) if self.runtime == "vllm" else _of_sglang(said, ids)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise RunError(
                f"{_shown(self.url)}: {path} answers without the log-probabilities that were asked for "
                f"({type(error).__name__}: {shortened(str(error), 80)}): {shortened(repr(said), 300)}"
            ) from error
        if [one.token for one in found.prompt] != list(ids[1:]) or len(found.new) != new:
            raise RunError(
                f"{_shown(self.url)}: expected log-probabilities of {len(ids) - 1} tokens as they were "
                f"sent and of {new} new ones, found those of {len(found.prompt)} and {len(found.new)}"
            )
        return found


def _request(server: Server, ids: Sequence[int], new: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a request; the end of a text does not end an answer."""
    if server.runtime == "vllm":
        return "/v1/completions", {
            "model": server.model, "prompt": list(ids), "max_tokens": new, "temperature": 0,
            "prompt_logprobs": TOP, "logprobs": TOP, "return_tokens_as_token_ids": True,
            "ignore_eos": True,
        }  # fmt: skip
    return "/generate", {
        "input_ids": list(ids), "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": TOP,
        "sampling_params": {"max_new_tokens": new, "temperature": 0, "ignore_eos": True},
    }  # fmt: skip


def _of_vllm(said: Any, ids: Sequence[int]) -> Answer:
    (choice,) = said["choices"]
    prompt = tuple(
        Predicted(token, {int(id): _number(one["logprob"]) for id, one in place.items()})
        for token, place in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)
    )
    bad = next((one.token for one in prompt if one.token not in one.logprobs), None)
    if bad is not None:
        raise ValueError(f"token {bad} has none")
    made = choice["logprobs"]
    new = tuple(
        _predicted(_id(token), logprob, ((value, _id(name)) for name, value in top.items()))
        for token, logprob, top in zip(
            made["tokens"], made["token_logprobs"], made["top_logprobs"], strict=True
        )
    )
    return Answer(prompt, new)


def _of_sglang(said: Any, ids: Sequence[int]) -> Answer:
    about = said["meta_info"]
    parts = []
    for side, first in (("input", 1), ("output", 0)):
        tokens, tops = about[f"{side}_token_logprobs"], about[f"{side}_top_logprobs"]
        parts.append(
            tuple(
                _predicted(token, logprob, ((value, id) for value, id, _ in top))
                for (logprob, token, _), top in zip(tokens[first:], tops[first:], strict=True)
            )
        )
    return Answer(*parts)


def _predicted(token: int, logprob: Any, top: Any) -> Predicted:
    return Predicted(token, {token: _number(logprob), **{id: _number(value) for value, id in top}})


def _id(text: str) -> int:
    if not text.startswith(_AS_ID):
        raise ValueError(f"expected token_id:N, found {text!r}")
    return int(text.removeprefix(_AS_ID))


def _number(value: Any) -> float:
    return nan if value is None else float(value)


def _asked(
    address: str, path: str, body: Mapping[str, Any] | None = None, *, needed: bool = True
) -> Any:
    """The JSON that a server answers; None for a refusal of what is not `needed`."""
    http, where = library(), f"{_shown(address)}{path}"
    key = os.environ.get(KEY)
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = bytearray()
    try:
        with http.stream(
            "GET" if body is None else "POST", address + path, json=body, headers=headers,
            timeout=http.Timeout(_TIMEOUT, connect=_CONNECT), follow_redirects=False,
        ) as answer:  # fmt: skip
            for chunk in answer.iter_raw():
                data += chunk
                if len(data) > _MOST_ANSWER:
                    raise RunError(f"{where}: expected at most {_MOST_ANSWER} bytes, found more")
            status = int(answer.status_code)
    except (http.HTTPError, http.InvalidURL, http.StreamError) as error:
        said = without_userinfo(str(error)) or type(error).__name__
        raise RunError(
            f"{where}: {shortened(said, 200)}; start the server there, and ask when it has loaded the "
            "model"
        ) from error
    if status == 200:
        return parse_json(bytes(data), where, error=RunError)
    if not needed:
        return None
    what = {
        401: f"set {KEY} to its key", 403: f"set {KEY} to its key",
        404: "name the server itself, of vLLM or sglang", 503: "ask when it has loaded the model",
    }.get(status, "see the server's log")  # fmt: skip
    told = shortened(bytes(data).decode("utf-8", "replace"), 300)
    raise RunError(f"{where}: status {status}: {told}; {what}")


def _shown(url: str) -> str:
    return without_userinfo(url)
