"""What a client writes reaches the engine as it is, and what cannot be read is refused with a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engines import Engine
from hypothesis import given
from hypothesis import strategies as st
from sites import on_loop, site

from loadwise.gateway.openai import ModelRequest
from loadwise.kernel.errors import CallerError

CHAT = "/v1/chat/completions"
EXACT = [
    b'"seed":123456789012345678901234567890',
    b'"a":1e400',
    b'"b":-0.0',
    b'"c":1.10',
    b'"d":"\\u00e9\\/\\ud83d\\ude00"',
    b'"e":{"x" : [1 ,\t2, {"y":null}] }',
    b'"f":"\xc3\xa9"',
    b'"g":' + b"1" * 5000,
    b'"h":"\\ud800 half a pair"',
    b'"logit_bias":{"1":1E2}',
]


@on_loop
async def test_unknown_fields_reach_the_engine_byte_for_byte() -> None:
    """Numbers of any size, escapes, nesting and white space are not touched."""
    body = b'{"messages": [{"role":"user","content":"x","z":1e999}],%b}' % b",".join(EXACT)
    async with site(Engine()) as s:
        for headers in ({}, {"X-Session-ID": "p"}):
            answer = await s.ask("POST", CHAT, body, headers)
            assert answer.status == 200, answer.body
            sent = s.engine.calls[-1].body
            for field in [*EXACT, b'"messages":[{"role":"user","content":"x","z":1e999}]']:
                assert field in sent, field
            assert sent.endswith(b',"model":"m"}')


@on_loop
async def test_of_a_field_written_twice_the_last_counts() -> None:
    """The engine sees each field once, so that nobody can say one thing to us and another to the engine."""
    body = b'{"model":"zzz","model":"m","messages":[],"messages":[{"role":"user","content":"x"}],"n":1,"n":2}'
    async with site(Engine()) as s:
        assert (await s.ask("POST", CHAT, body)).status == 200
        sent = s.engine.calls[0].body
        assert sent == b'{"model":"m","messages":[{"role":"user","content":"x"}],"n":2}'


@on_loop
async def test_the_engine_hears_its_own_model_name_and_not_our_fields() -> None:
    """`model` is what the engine calls it; `program_id` stays with us."""
    async with site(Engine(), backend_0={"served_model": "org/Ünï-7b"}) as s:
        await s.ask("POST", CHAT, {"model": "m", "program_id": "p", "messages": [{"role": "user", "content": "x"}]})
        assert s.engine.calls[0].json == {"model": "org/Ünï-7b", "messages": [{"role": "user", "content": "x"}]}
        assert s.program("p") is not None


MALFORMED = [
    b"",
    b"{",
    b"nul",
    b'{"messages":[{"role":"user","content":"x"}],}',
    b'{"messages":[{"role":"user","content":"x"}]} trailing',
    b'{"messages":[{"role":"user","content":"x"}],"t":NaN}',
    b'{"messages":[{"role":"user","content":"x"}],"t":01}',
    b'{"messages":[{"role":"user","content":"\xff"}]}',
    b'{"messages":[{"role":"user","content":"a\nb"}]}',
    b'{"messages":[{"role":"user","content":"\\ud800"}],"t":NaN}',
    b'{"messages":[{"role":"user","content":"\\ud800"}],"\\ud800":1}',
    b'{"messages":[{"role":"user","content":"\\ud800"}] "t":1}',
    b'{"messages":[{"role":"user","content":"\\ud800"}]',
    b'{"messages":[{"role":"user","content":"\\ud800"}],}',
    b'{"messages":[{"role":"user","content":"\\ud800"}]} x',
    b'["\\ud800"]',
    b"[1]",
    b'"text"',
    b"7",
    b"null",
    b'{"messages":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    b'{"x":' + b'{"a":' * 200_000 + b"1" + b"}" * 200_000 + b"}",
    "{}".encode("utf-16"),
]


@on_loop
async def test_what_is_not_a_json_object_is_a_400() -> None:
    """Malformed bodies are refused with a reason; none becomes a turn, none harms the next request."""
    async with site(Engine()) as s:
        for path in (CHAT, "/v1/completions"):
            for body in MALFORMED:
                answer = await s.ask("POST", path, body)
                assert (answer.status, answer.error["code"]) == (400, "invalid_json"), body[:80]
        assert s.counts.arrived == 0 and not s.engine.calls
        assert (await s.chat("p")).status == 200


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": "hi"}, "messages"),
    ({"messages": {}}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"model": 7}, "model"),
    ({"model": None}, "model"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream": True, "stream_options": 3}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_completion_tokens": [1]}, "max_completion_tokens"),
    ({"metadata": "x"}, "metadata"),
    ({"metadata": {"task_type": 3}}, "metadata"),
    ({"program_id": 5}, "program_id"),
    ({"program_id": ""}, "program_id"),
    ({"program_id": "a\u0007"}, "program_id"),
    ({"program_id": "x" * 10_240}, "program_id"),
    ({"metadata": {"task_type": "x" * 129}}, "x-loadwise-task-type"),
]


@on_loop
async def test_wrong_types_name_the_field() -> None:
    """Each is a 400 whose `param` says where; nothing is left behind."""
    good = {"messages": [{"role": "user", "content": "x"}]}
    async with site(Engine()) as s:
        for wrong, param in WRONG:
            answer = await s.ask("POST", CHAT, {**good, **wrong})
            assert (answer.status, answer.error["param"]) == (400, param), wrong
        missing = await s.ask("POST", CHAT, {"model": "m"})
        assert (missing.status, missing.error["code"], missing.error["param"]) == (400, "missing_field", "messages")
        prompt = await s.ask("POST", "/v1/completions", {"prompt": 3})
        assert (prompt.status, prompt.error["param"]) == (400, "prompt")
        assert not s.engine.calls and not s.router.table.by_id


@on_loop
async def test_headers_that_cannot_be_used_leave_nothing_behind() -> None:
    """A refused header costs no turn, no relay and no place in a known conversation."""
    async with site(Engine()) as s:
        talk = [{"role": "user", "content": "x"}]
        await s.ask("POST", CHAT, {"messages": talk})
        talk += [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "y"}]
        for name, value in (
            ("X-Loadwise-Budget-S", "-1"),
            ("X-Loadwise-Budget-S", "inf"),
            ("X-Loadwise-Priority", "high"),
            ("X-Loadwise-Priority", "1" * 5000),
            ("X-Loadwise-Domain", "x" * 200),
        ):
            answer = await s.ask("POST", CHAT, {"messages": talk}, {name: value})
            assert answer.status in (400, 422), (name, value)
        assert not s.host.relay_by_turn
        assert (await s.ask("POST", CHAT, {"messages": talk})).status == 200
        assert len(s.router.table.by_id) == 1 and s.counts.arrived == 2


@on_loop
async def test_an_unknown_model_names_the_known_ones() -> None:
    """404 with the models of the pool; a name of megabytes is neither repeated nor journaled."""
    async with site(Engine(), Engine(), models={"small": {}, "large": {}}) as s:
        for name in ("gpt", "", "x" * 3_000_000, "auto ", "a\u0000b"):
            answer = await s.chat("p", model=name)
            assert (answer.status, answer.error["code"]) == (404, "model_not_found")
            assert "auto, small, large" in answer.error["message"] and len(answer.body) < 1000
        assert s.program("p") is None


@on_loop
async def test_numbers_beyond_all_bounds_are_bounded_where_we_keep_them() -> None:
    """A limit of 10^30 tokens is the client's own business; the journal still takes the turn."""
    async with site(Engine()) as s:
        for limit in (10**30, -1, 0):
            assert (await s.chat("p", max_tokens=limit)).status == 200
            assert s.engine.calls[-1].json["max_tokens"] == limit


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
spaces = st.sampled_from(["", " ", "\n", "\t  "])
OURS = {
    "model",
    "messages",
    "program_id",
    "stream",
    "stream_options",
    "metadata",
    "max_tokens",
    "max_completion_tokens",
}


@given(st.dictionaries(st.text().filter(lambda k: k not in OURS), values, max_size=6), st.booleans(), spaces)
def test_any_object_survives(fields: dict[str, Any], ascii_only: bool, space: str) -> None:
    """Whatever the unknown fields are, and however they are written, the engine reads the same and the same bytes."""
    written = {name: json.dumps(value, ensure_ascii=ascii_only) for name, value in fields.items()}
    try:
        members = [f"{space}{json.dumps(k)}{space}:{space}{v}{space}" for k, v in written.items()]
        body = "{" + ",".join([*members, '"messages":[1]']) + "}"
        raw = body.encode()
        list(map(str.encode, fields))
    except UnicodeEncodeError:
        return
    sent = ModelRequest(raw, prompt_field="messages").encode("m")
    assert json.loads(sent) == {**json.loads(raw), "model": "m"}
    assert all(value.encode() in sent for value in written.values())


@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:\\u d8001e9.-truefalsn', max_size=60).map(str.encode))
def test_no_bytes_raise_anything_but_a_refusal(body: bytes) -> None:
    """The splitter either takes a body that Python's own parser takes too, or refuses it as the caller's fault."""
    try:
        ModelRequest(body, prompt_field="messages")
    except CallerError as error:
        assert error.status == 400
    else:
        assert isinstance(json.loads(body), dict)


@pytest.mark.parametrize("text", ["\\ud800", "\\udc00 \\ud83d\\ude00", "x\\ud83d"])
def test_half_a_surrogate_pair_passes(text: str) -> None:
    """Clients that cut a text in the middle of an emoji send one; it is JSON, so it goes through as it is."""
    body = b' {"messages" : [{"role":"user","content":"%b"}] , "k" : "%b"} ' % (text.encode(), text.encode())
    request = ModelRequest(body, prompt_field="messages")
    assert request.encode("m") == (
        b'{"messages":[{"role":"user","content":"%b"}],"k":"%b","model":"m"}' % (text.encode(), text.encode())
    )
    assert request.messages()[0]["role"] == "user"
