"""A small client for SGLang's ``/generate``: token ids, logprobs and the time each token arrived."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import requests

TIMEOUT_S = 180.0


@dataclass
class Answer:
    """What came back for one request."""

    rid: str
    sent: float
    """Unix time at which the request was sent."""
    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    arrivals: list[float] = field(default_factory=list)
    """Unix time at which each token arrived."""
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft(self) -> float:
        """Seconds from sending the request to its first token."""
        return self.arrivals[0] - self.sent

    def take(self, reply: dict[str, Any]) -> None:
        """Take in one reply, which holds the whole answer so far."""
        self.ids = list(reply["output_ids"])
        self.text = reply["text"]
        self.meta = reply["meta_info"]
        self.finish = self.meta["finish_reason"]
        self.logprobs = [entry[0] for entry in self.meta.get("output_token_logprobs") or []]
        self.arrivals += [time.time()] * (len(self.ids) - len(self.arrivals))


def generate(
    url: str,
    prompt: str,
    max_new_tokens: int,
    stream: bool = True,
    logprobs: bool = True,
    rid: str | None = None,
    on_reply: Callable[[Answer], bool | None] | None = None,
    place: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> Answer:
    """Ask for a greedy completion. ``on_reply`` sees the answer grow; returning False hangs up.

    Args:
        place: what a router would add, to ask a decode server directly: ``bootstrap_host``, ``_port`` and ``_room``.

    Raises:
        requests.HTTPError: the server answered with an error.
        RuntimeError: the error came in the middle of a stream.
    """
    answer = Answer(rid or uuid.uuid4().hex, time.time())
    body: dict[str, Any] = {
        "rid": answer.rid,
        "text": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, **sampling},
        "return_logprob": logprobs,
        "stream": stream,
        **(place or {}),
    }
    with requests.post(f"{url}/generate", json=body, stream=stream, timeout=TIMEOUT_S) as response:
        if not response.ok:
            raise requests.HTTPError(f"{response.status_code}: {response.text[:500]}", response=response)
        if not stream:
            answer.take(response.json())
            return answer
        for line in response.iter_lines(chunk_size=1 << 16):
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            reply = json.loads(line[len(b"data: ") :])
            if "error" in reply:
                raise RuntimeError(f"the stream ended with an error: {reply['error']}")
            answer.take(reply)
            if on_reply is not None and on_reply(answer) is False:
                break
    return answer
