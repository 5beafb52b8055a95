"""vLLM's and sglang's servers on the loopback, as far as `qconvert ask` speaks to them: a model of
transformers computes, and answers have the schema of the runtime's own.

`as_vllm` and `as_sglang` were written by vLLM 0.33's `entrypoints/openai/completion/protocol.py` and
sglang 0.5.23's `srt/managers/tokenizer_manager.py`; tests/loaders/test_servers.py holds them to both.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Row = Mapping[int, float]  # log-probabilities by id, the likeliest first


@dataclass(frozen=True)
class Computed:
    """Ids of a text, the last `new` of which were added, and log-probabilities of each but the first."""

    ids: Sequence[int]
    new: int
    rows: Sequence[Row]

    def parts(
        self, top: int
    ) -> Iterator[tuple[list[tuple[int, float, list[tuple[int, float]]]], bool]]:
        """Of the prompt and of what was added: id, its log-probability, and the likeliest."""
        at = len(self.rows) - self.new
        for start, stop, added in ((0, at, False), (at, len(self.rows), True)):
            found = []
            for token, row in zip(
                self.ids[1 + start : 1 + stop], self.rows[start:stop], strict=True
            ):
                found.append((token, row[token], list(row.items())[:top]))
            yield found, added


def as_vllm(computed: Computed, request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of POST /v1/completions."""
    (prompt, _), (new, _) = computed.parts(int(request["prompt_logprobs"]))
    listed: list[dict[str, Any] | None] = [None]
    for token, logprob, top in prompt:
        each = {token: logprob, **dict(top)}
        listed.append({
            str(id): {"logprob": value, "rank": 1, "decoded_token": "x"} for id, value in each.items()
        })  # fmt: skip
    logprobs = {
        "text_offset": [0] * len(new),
        "tokens": [f"token_id:{token}" for token, _, _ in new],
        "token_logprobs": [logprob for _, logprob, _ in new],
        "top_logprobs": [{f"token_id:{id}": value for id, value in top} for _, _, top in new],
    }
    choice = {
        "index": 0, "text": "x", "logprobs": logprobs, "finish_reason": "length", "stop_reason": None,
        "prompt_logprobs": listed,
    }  # fmt: skip
    count = len(computed.ids) - computed.new
    return {
        "id": "cmpl-1", "object": "text_completion", "created": 1, "model": request["model"],
        "choices": [choice],
        "usage": {
            "prompt_tokens": count, "total_tokens": count + len(new), "completion_tokens": len(new),
        },
    }  # fmt: skip


def as_sglang(computed: Computed, request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of POST /generate."""
    about: dict[str, Any] = {"id": "1", "finish_reason": {"type": "length", "length": computed.new}}
    for part, added in computed.parts(int(request["top_logprobs_num"])):
        side = "output" if added else "input"
        first = [] if added else [[None, computed.ids[0], None]]
        about[f"{side}_token_logprobs"] = [*first, *([lp, token, None] for token, lp, _ in part)]
        about[f"{side}_top_logprobs"] = [
            *([] if added else [None]), *([[lp, id, None] for id, lp in top] for _, _, top in part)
        ]  # fmt: skip
    return {"text": "x", "output_ids": list(computed.ids[-computed.new :]), "meta_info": about}


def greedy(model: Any, ids: Sequence[int], new: int) -> Computed:
    """A model of transformers, run whole, that adds what is likeliest."""
    import torch

    every = list(ids)
    with torch.no_grad():
        for step in range(new + 1):
            logits = model(input_ids=torch.tensor([every]), use_cache=False).logits[0].float()
            if step < new:
                every.append(int(logits[-1].argmax()))
    rows = []
    for row in logits[:-1].log_softmax(1):
        values, order = row.sort(descending=True)
        rows.append(dict(zip(order.tolist(), values.tolist(), strict=True)))
    return Computed(every, new, rows)


@dataclass
class ModelServer:
    """`compute` answers ids and a number of new tokens. `change` may break an answer, `status` refuse a
    path; `asked` are the requests: path, body and the key that came with it."""

    runtime: str
    compute: Callable[[Sequence[int], int], Computed]
    version: str | None = "0.33.0"
    owner: str = ""
    longest: int | None = 4096
    change: Callable[[dict[str, Any]], Any] = lambda answer: answer
    status: Mapping[str, int] = field(default_factory=dict)
    asked: list[tuple[str, Any, str | None]] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str, body: Any) -> Any:
        """None where there is no such path."""
        if path == "/v1/models":
            card = {"id": "served", "object": "model", "owned_by": self.owner or self.runtime}
            return {"object": "list", "data": [{**card, "max_model_len": self.longest}]}
        if path == ("/version" if self.runtime == "vllm" else "/server_info") and self.version:
            return {"version": self.version}
        if (self.runtime, path) == ("vllm", "/v1/completions"):
            made = self.compute(body["prompt"], body["max_tokens"])
            return self.change(as_vllm(made, body))
        if (self.runtime, path) == ("sglang", "/generate"):
            made = self.compute(body["input_ids"], body["sampling_params"]["max_new_tokens"])
            return self.change(as_sglang(made, body))
        return None


@contextmanager
def serving(server: ModelServer) -> Iterator[ModelServer]:
    """The server at its `url`, until the end."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, body: Any) -> None:
            server.asked.append((self.path, body, self.headers.get("Authorization")))
            status = server.status.get(self.path, 200)
            found = {"error": "no"} if status != 200 else server.answer(self.path, body)
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(404 if found is None else status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{listening.server_address[1]}"
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()
