"""What one client sends costs the others little: bounds on what is read of a request, told without a clock."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engines import Engine, message, says
from sites import on_loop, site

from loadwise.gateway import openai
from loadwise.gateway.openai import (
    BRACKETS_MAX,
    COLONS_MAX,
    COMMAS_MAX,
    MESSAGES_MAX,
    MESSAGES_MAX_BYTES,
    ModelRequest,
)
from loadwise.gateway.replies import CHOICES_MAX, whole_replies
from loadwise.kernel.errors import CallerError

USER = {"role": "user", "content": "hi"}


def request(messages: list[Any] | bytes, **more: Any) -> ModelRequest:
    raw = messages if isinstance(messages, bytes) else json.dumps(messages).encode()
    return ModelRequest(
        b'{"messages":%b,%b' % (raw, json.dumps({"model": "m", **more}).encode()[1:]), prompt_field="messages"
    )


def odd(values: bytes) -> bytes:
    """A message with many values beside its text."""
    return b'[{"role":"user","content":[{"type":"odd","odd":[%b0]},{"type":"text","text":"hi"}]}]' % values


LONG: dict[str, tuple[bytes, bool]] = {
    "as many messages as are read": (json.dumps([USER] * MESSAGES_MAX).encode(), True),
    "one message more": (json.dumps([USER] * (MESSAGES_MAX + 1)).encode(), False),
    "a million messages": (b"[" + b"{}," * 1_000_000 + b"{}]", False),
    "as many bytes as are read": (
        json.dumps([{"role": "user", "content": "x" * (MESSAGES_MAX_BYTES - 40)}]).encode(),
        True,
    ),
    "a few bytes more": (json.dumps([{"role": "user", "content": "x" * MESSAGES_MAX_BYTES}]).encode(), False),
    "many numbers": (odd(b"0," * (COMMAS_MAX + 1)), False),
    "many lists": (odd(b"[]," * (BRACKETS_MAX + 1)), False),
    "many objects": (odd(b"{}," * (BRACKETS_MAX + 1)), False),
    "not too many": (odd(b"{}," * (BRACKETS_MAX // 2)), True),
}


@pytest.mark.parametrize("name", LONG)
def test_only_so_much_of_a_conversation_is_read(name: str) -> None:
    """Up to the bounds it is read whole, beyond any of them not at all, and it is said so."""
    raw, is_read = LONG[name]
    asked = request(raw)
    assert (bool(asked.messages()), asked.is_unread) == (is_read, not is_read)


def test_a_conversation_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Identity and embedding share one reading; afterwards the values are let go."""
    read = []

    def counted(raw: Any, known: Any = openai.read_leniently) -> Any:
        read.append(raw)
        return known(raw)

    monkeypatch.setattr(openai, "read_leniently", counted)
    asked = request([USER, message("a"), {"role": "user", "content": "last"}])
    assert len(asked.messages()) == 3 and asked.prompt_text() == "last" and len(asked.messages()) == 3
    assert len(read) == 1
    asked.forget_messages()
    assert asked.prompt_text() == "last" and len(read) == 2


def test_a_long_question_is_embedded_although_it_is_not_compared() -> None:
    """One long text is cheap to read; a great many values are not."""
    asked = request([{"role": "user", "content": "x" * 2 * MESSAGES_MAX_BYTES + "end"}])
    assert asked.messages() == [] and asked.prompt_text().endswith("end")
    assert request(b"[" + b"{}," * 500_000 + json.dumps(USER).encode() + b"]").prompt_text() == ""
    prompt = ModelRequest(b'{"prompt":[%b0]}' % (b"0," * 1000), prompt_field="prompt")
    assert prompt.prompt_text() == "" and not prompt.is_unread


def test_a_body_of_a_great_many_fields_is_refused() -> None:
    """Before they are told apart; a prompt may have any number of colons, and tools as many as anybody needs."""
    many = b",".join(b'"%d":0' % n for n in range(COLONS_MAX + 10))
    with pytest.raises(CallerError, match=str(COLONS_MAX)):
        ModelRequest(b'{"messages":[1],%b}' % many, prompt_field="messages")
    colons = ":" * 2 * MESSAGES_MAX_BYTES
    assert request([{"role": "user", "content": colons}]).model == "m"
    assert ModelRequest(json.dumps({"prompt": colons}).encode(), prompt_field="prompt").model == "auto"
    tools = [{"type": "function", "function": {"name": f"f{n}", "description": "x" * 2000}} for n in range(1000)]
    assert request([USER], tools=tools).model == "m"


def test_half_a_pair_in_a_great_many_values_is_refused() -> None:
    """The slow way of reading is for bodies that are soon read."""
    with pytest.raises(CallerError, match="not a JSON object"):
        request(b'["\\ud800",%b{}]' % (b"{}," * (BRACKETS_MAX + 1)))
    assert request(b'["\\ud800",%b{}]' % (b"{}," * 100)).model == "m"


def test_only_so_much_of_an_answer_is_followed() -> None:
    """An answer beyond the bounds has no replies to compare, so nothing continues it."""

    def answer(*messages: Any) -> bytes:
        return json.dumps({"choices": [{"message": m, "logprobs": [0] * 10} for m in messages]}).encode()

    assert whole_replies(answer(message("a"))) == [message("a")]
    assert whole_replies(answer(message("x" * MESSAGES_MAX_BYTES))) == []
    assert whole_replies(answer(*[message("a")] * CHOICES_MAX)) != []
    assert whole_replies(answer(*[message("a")] * (CHOICES_MAX + 1))) == []
    assert whole_replies(answer(message("a", odd=[[] for _ in range(BRACKETS_MAX + 1)]))) == []
    assert whole_replies(b'{"choices":[3,%b{"message":{"content":"a"}}]}' % (b"{}," * (BRACKETS_MAX + 1))) == []


@on_loop
async def test_a_conversation_that_is_not_read_is_a_program_of_its_own() -> None:
    """It is served all the same, and counted."""
    engine = Engine(says(message("yes")))
    long = [USER] * MESSAGES_MAX
    async with site(engine) as s:
        first = await s.chat(messages=long)
        again = await s.chat(messages=[*long, message("yes"), USER])
        assert (first.status, again.status) == (200, 200)
        assert first.headers["x-loadwise-program"] != again.headers["x-loadwise-program"]
        assert 'loadwise_prefix_total{result="unread"} 1.0' in (await s.ask("GET", "/metrics")).body.decode()
        short = await s.chat(messages=[USER])
        goes_on = await s.chat(messages=[USER, message("yes"), USER])
        assert short.headers["x-loadwise-program"] == goes_on.headers["x-loadwise-program"]
