"""Whether a gateway hands on the whole answer: the same text as the engine itself gives, chunk by chunk, to the end."""

from __future__ import annotations

import json
import time

import msgspec

from bench.load import PROGRAMS, Connection, Endpoint, LoadFailed, Reply, connections, program_id, request


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one answer said, however it was framed."""

    text: str
    chunks: int
    """Events that carry text; 1 for an answer that is not streamed."""
    ended: bool
    """Whether the end was marked: `[DONE]` last of all in a stream."""


def read_plain(reply: Reply) -> Answer:
    """Read an answer that is not streamed.

    Raises:
        LoadFailed: it is no chat completion.
    """
    try:
        text = json.loads(reply.body)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError) as exc:
        raise LoadFailed(f"no chat completion: {reply.body[:300]!r}") from exc
    return Answer(text=text, chunks=1, ended=True)


def read_stream(reply: Reply) -> Answer:
    """Read a stream of server-sent events.

    Raises:
        LoadFailed: an event is no chunk of a chat completion.
    """
    events = [line[5:].strip() for line in reply.body.splitlines() if line.startswith(b"data:")]
    texts = []
    for event in events:
        if event == b"[DONE]":
            continue
        try:
            texts += [choice["delta"].get("content") or "" for choice in json.loads(event)["choices"]]
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            raise LoadFailed(f"no chunk of a chat completion: {event[:300]!r}") from exc
    texts = [text for text in texts if text]
    ended = events[-1:] == [b"[DONE]"] and events.count(b"[DONE]") == 1
    return Answer(text="".join(texts), chunks=len(texts), ended=ended)


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """What the answers of one endpoint look like; all that were asked for looked alike."""

    plain: Answer
    stream: Answer
    plain_bytes: int
    """The smallest answer, head and framing included."""
    stream_bytes: int
    plain_s: float
    """How long 32 answers took."""
    stream_s: float


def _all(opened: list[Connection], endpoint: Endpoint, prefix: str, *, stream: bool) -> tuple[Answer, int, float]:
    began_at_s = time.monotonic()
    for number, connection in enumerate(opened):
        connection.send(request(endpoint, program_id(prefix, number), stream=stream))
    answers, sizes = set(), set()
    for connection in opened:
        while not (reply := connection.receive()).whole:
            pass
        if reply.status != 200:
            raise LoadFailed(f"{endpoint.name!r} answered {reply.status}: {reply.body[:300]!r}")
        answers.add(read_stream(reply) if stream else read_plain(reply))
        sizes.add(reply.size_bytes)
    took_s = time.monotonic() - began_at_s
    if len({answer.text for answer in answers}) != 1:
        raise LoadFailed(f"{endpoint.name!r} gave {len(answers)} different answers to one question")
    return min(answers, key=lambda answer: (answer.ended, answer.chunks)), min(sizes), took_s


def verify(endpoint: Endpoint, prefix: str, engine: Verified | None = None) -> Verified:
    """Ask 32 programs' turns at once, streamed and not, and read each answer to its end.

    Args:
        endpoint: whom to ask.
        prefix: of the programs' ids.
        engine: what the engine itself answers, once that is known.

    Raises:
        LoadFailed: an answer is broken, is not the engine's, or a stream has no end mark.
    """
    with connections(endpoint.port, PROGRAMS) as opened:
        plain, plain_bytes, plain_s = _all(opened, endpoint, prefix, stream=False)
        stream, stream_bytes, stream_s = _all(opened, endpoint, prefix, stream=True)
    if not stream.ended:
        raise LoadFailed(f"a stream of {endpoint.name!r} does not end with [DONE]")
    if engine is not None:
        for got, said in ((plain, engine.plain), (stream, engine.stream)):
            if got.text != said.text:
                raise LoadFailed(f"{endpoint.name!r} answered {got.text[:200]!r}, the engine {said.text[:200]!r}")
    return Verified(
        plain=plain,
        stream=stream,
        plain_bytes=plain_bytes,
        stream_bytes=stream_bytes,
        plain_s=plain_s,
        stream_s=stream_s,
    )
