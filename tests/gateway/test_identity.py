"""Which program a request belongs to, over HTTP: names in every place, ids of every kind, conversations without one."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import quote

import pytest
from engines import Call, Engine, fails, hangs, message, says, tool_call
from sites import Answer, Site, on_loop, site, until

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "x"}


def program_of(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    return answer.headers["x-loadwise-program"]


NAMES = [
    ({"X-Session-ID": "head"}, {"program_id": "body", "metadata": {"program_id": "meta", "session_id": "s"}}, "head"),
    ({"X-Claude-Code-Session-Id": "cc"}, {"program_id": "body", "metadata": {"program_id": "meta"}}, "body"),
    ({"X-Claude-Code-Session-Id": "cc"}, {"metadata": {"program_id": "meta", "session_id": "s"}}, "meta"),
    ({"X-Claude-Code-Session-Id": "cc"}, {"metadata": {"session_id": "s"}}, "s"),
    ({"X-Claude-Code-Session-Id": "cc", "X-Dynamo-Session-ID": "d"}, {"metadata": {"session_id": ""}}, "cc"),
    ({"X-Dynamo-Session-ID": "d", "x-litellm-session-id": "l"}, {"program_id": None}, "d"),
    ({"x-litellm-session-id": "l", "x-bf-session-id": "b"}, {}, "l"),
    ({"x-bf-session-id": "b", "x-opencode-session": "o"}, {}, "b"),
    ({"x-opencode-session": "o", "session_id": "i"}, {}, "o"),
    ({"session_id": "i"}, {"metadata": {}}, "i"),
]


@on_loop
async def test_the_first_name_counts() -> None:
    """Header, body, metadata, harness headers: in this order."""
    async with site(Engine()) as s:
        for headers, more, expected in NAMES:
            answer = await s.ask("POST", CHAT, {"messages": [USER], **more}, headers)
            assert program_of(answer) == expected
        unnamed = [program_of(await s.ask("POST", CHAT, {"messages": [USER]}, {"session_id": ""})) for _ in range(3)]
        assert len(set(unnamed)) == 3, "there is no shared default"


GOOD_IDS = [
    "p",
    "turn:1",
    "lw-0-1",
    "a/b",
    "a?b=c",
    "a#b",
    "100%",
    "%2F",
    "a b",
    "..",
    "ünïcödé-日本",
    "\U0001f600",
    "x" * 256,
    "é" * 256,
    "a+b&c;d,e\"f'",
    "<script>",
    "null",
]


@on_loop
async def test_ids_of_every_kind_work_everywhere() -> None:
    """What can be printed is an id: in the header, in the body and percent-encoded in a path it means the same."""
    async with site(Engine()) as s:
        for program_id in GOOD_IDS:
            first = await s.ask("POST", CHAT, {"messages": [USER]}, {"X-Session-ID": program_id.encode()})
            second = await s.ask("POST", CHAT, {"messages": [USER], "program_id": program_id})
            assert first.headers["x-loadwise-decision"] == second.headers["x-loadwise-decision"]
            path = quote(program_id, safe="")
            shown = await s.ask("GET", f"/v1/programs/{path}")
            assert (shown.json["program_id"], shown.json["n_turns"]) == (program_id, 2)
            assert (await s.finish(path)).json["program"] == program_id
            assert (await s.verdict(path)).json["credited"] is True
        assert len(s.router.table.by_id) == len(GOOD_IDS)
        assert s.reserved() == 0


BAD_IDS = ["x" * 257, "x" * 10_240, "a\u0000", "a\nb", "\u007f", "\u200b\u2028", "\ue000", "\x1fturn:1"]


@on_loop
async def test_ids_that_cannot_be_printed_are_refused() -> None:
    """Too long or unprintable: 400 wherever the id stands, and nothing is remembered."""
    async with site(Engine()) as s:
        for program_id in BAD_IDS:
            answer = await s.ask("POST", CHAT, {"messages": [USER], "program_id": program_id})
            assert (answer.status, answer.error["param"]) == (400, "program_id")
            for verb in ("finish", "verdict"):
                path = f"/v1/programs/{quote(program_id, safe='')}/{verb}"
                assert (await s.ask("POST", path, {"verdict": "pass"})).status in (400, 414)
        for raw in (b"\xff\xfe", b"caf\xe9", b"x" * 10_240, b"", b"\xc2\x80"):
            answer = await s.ask("POST", CHAT, {"messages": [USER]}, {"X-Session-ID": raw})
            assert (answer.status, answer.error["param"]) == (400, "X-Session-ID"), raw
        for raw in (b"a\x01b", b"a\x7fb", b"a\rb"):
            assert (await s.ask("POST", CHAT, {"messages": [USER]}, {"X-Session-ID": raw})).status == 400
        for segment in ("%FF", "%00", "", "%"):
            assert (await s.ask("GET", f"/v1/programs/{segment}")).status in (400, 404)
        assert not s.router.table.by_id and not s.engine.calls


@on_loop
async def test_nobody_elses_name_is_taken_for_a_nameless_program() -> None:
    """A client that names its program as we would name the next one keeps it to itself."""
    async with site(Engine()) as s:
        first = program_of(await s.ask("POST", CHAT, {"messages": [USER]}))
        stem, _, number = first.rpartition("-")
        taken = f"{stem}-{int(number) + 1}"
        await s.chat(taken)
        assert program_of(await s.ask("POST", CHAT, {"messages": [USER]})) not in (first, taken)


class Talk:
    """An agent without a name: it appends to its conversation, as it chooses to write it."""

    def __init__(self, s: Site, key: str = "k", *, stream: bool = False) -> None:
        self.site, self.key, self.stream = s, key, stream
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}]

    async def say(self, text: str) -> str:
        """One turn; the program that it was taken for."""
        self.messages.append({"role": "user", "content": text})
        body = {"messages": self.messages, "stream": self.stream}
        return program_of(await self.site.ask("POST", CHAT, body, {"Authorization": f"Bearer {self.key}"}))

    def hear(self, reply: dict[str, Any]) -> None:
        self.messages.append(reply)


CALL = tool_call("add", '{"b": 1, "a": [1.0, 2e3]}')
REWRITTEN = [
    (message(" hi \n"), {"role": "assistant", "content": [{"type": "text", "text": "hi"}]}),
    (message("hi"), {"role": "assistant", "content": "hi\n", "reasoning_content": "so", "refusal": None, "id": "7"}),
    (message(None, tool_calls=[CALL]), message("", tool_calls=[tool_call("add", '{"a":[1,2000],"b":1}', "other")])),
    (message("", tool_calls=[CALL]), {"role": "assistant", "tool_calls": [CALL]}),
    (message("<think>hm</think>\nfour"), message("four")),
]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_is_continued_however_it_is_rewritten(stream: bool) -> None:
    """Whole and streamed replies are recognised when they come back in other words for the same."""

    @on_loop
    async def run() -> None:
        for said, heard in REWRITTEN:
            async with site(Engine(says(said))) as s:
                talk = Talk(s, stream=stream)
                first = await talk.say("a")
                talk.hear(heard)
                assert await talk.say("b") == first
                talk.hear(heard)
                assert await talk.say("c") == first
                program = s.program(first)
                assert program is not None and program.n_turns == 3 and program.is_implicit
                assert s.reserved() == 0, "a nameless program holds nothing between its turns"

    run()


@on_loop
async def test_forks_twins_and_other_keys_are_programs_of_their_own() -> None:
    """Whatever does not extend the whole list of exactly one program starts a new one."""
    async with site(Engine(says(message("r")))) as s:
        one, two = Talk(s), Talk(s)
        first, second = await one.say("a"), await two.say("a")
        assert first != second
        for talk in (one, two):
            talk.hear(message("r"))
        assert await one.say("b") not in (first, second), "equal twins are ambiguous"
        other = Talk(s, "other key")
        other.messages = [*two.messages]
        assert await other.say("x") not in (first, second), "another key"
        alone = Talk(s)
        third = await alone.say("alone")
        alone.hear(message("not what we said"))
        assert await alone.say("b") != third
        assert s.gateway.server and s.host.router.counts.completed == 6
        page = (await s.ask("GET", "/metrics")).body.decode()
        assert 'loadwise_prefix_total{result="ambiguous"} 1.0' in page
        assert 'loadwise_prefix_total{result="unmatched"} 2.0' in page


@on_loop
async def test_parallel_requests_of_one_conversation_do_not_merge() -> None:
    """While a turn is open its conversation is continued by nobody; afterwards by the one that extends the reply."""
    engine = Engine(says(message("r")))
    async with site(engine) as s:
        talk = Talk(s)
        first = await talk.say("a")
        talk.hear(message("r"))
        engine.script = [hangs]
        running = [{**USER, "content": "b"}]
        task = asyncio.ensure_future(
            s.ask("POST", CHAT, {"messages": [*talk.messages, *running]}, {"Authorization": "Bearer k"})
        )
        await until(lambda: len(engine.calls) == 2)
        assert await talk.say("c") != first
        task.cancel()
        await until(lambda: s.counts.cancelled == 1)
        talk.messages.pop()
        assert await talk.say("d") == first, "the turn that failed left the conversation where it stood"


@on_loop
async def test_a_retry_after_a_failure_is_the_same_program() -> None:
    """A turn without an answer changes nothing: the same request again continues the same program."""
    engine = Engine(says(message("r")))
    async with site(engine, router={"attempts_max": 1}) as s:
        talk = Talk(s)
        first = await talk.say("a")
        talk.hear(message("r"))
        engine.script = [fails(400)]
        again = {"messages": [*talk.messages, USER]}
        assert (await s.ask("POST", CHAT, again, {"Authorization": "Bearer k"})).status == 400
        assert program_of(await s.ask("POST", CHAT, again, {"Authorization": "Bearer k"})) == first


@on_loop
async def test_a_reply_that_cannot_be_followed_is_continued_by_nobody() -> None:
    """The program has moved on by a reply that we could not read: its old list must not match any more."""

    async def odd(call: Call) -> None:
        await call.respond({"choices": "odd", "usage": None})

    engine = Engine(says(message("r")))
    async with site(engine) as s:
        talk = Talk(s)
        first = await talk.say("a")
        talk.hear(message("r"))
        engine.script = [odd]
        assert await talk.say("b") == first
        talk.messages.pop()
        assert await talk.say("c") != first


@on_loop
async def test_each_of_several_choices_may_be_continued() -> None:
    """With n > 1 the client may go on from any choice, equal ones included."""
    for stream in (False, True):
        async with site(Engine(says(message("r"), message("s"), message("r")))) as s:
            talk = Talk(s, stream=stream)
            first = await talk.say("a")
            talk.hear(message("s"))
            assert await talk.say("b") == first
            talk.hear(message("r"))
            assert await talk.say("c") == first


@on_loop
async def test_a_nameless_program_may_be_named_later() -> None:
    """The name that we gave it works in the header and in paths; then its messages alone do not tell any more."""
    async with site(Engine(says(message("r")))) as s:
        talk = Talk(s)
        first = await talk.say("a")
        talk.hear(message("r"))
        assert program_of(await s.chat(first)) == first
        assert await talk.say("b") != first
        assert (await s.finish(first)).json["end_reason"] == "finish"


@on_loop
async def test_a_finished_conversation_starts_anew() -> None:
    """A program that has ended is not continued by its messages, nor refused: the client never named it."""
    async with site(Engine(says(message("r")))) as s:
        talk = Talk(s)
        first = await talk.say("a")
        talk.hear(message("r"))
        await s.finish(first)
        assert await talk.say("b") != first


@on_loop
async def test_a_compacted_history_is_a_new_program_and_counted() -> None:
    """Agents that shorten their history start anew unless they send a name."""
    async with site(Engine(says(message("r")))) as s:
        talk = Talk(s)
        first = await talk.say("a")
        talk.messages = [{"role": "system", "content": "summary"}, message("r")]
        assert await talk.say("b") != first
        page = (await s.ask("GET", "/metrics")).body.decode()
        assert 'loadwise_prefix_total{result="unmatched"} 1.0' in page


@on_loop
async def test_messages_that_nobody_can_compare_are_served() -> None:
    """Numbers and texts beyond what we can read are no reason to refuse a request without a name."""
    odd = [
        b'[{"role":"user","content":"x","n":1e400}]',
        b'[{"role":"user","content":"\\ud800"}]',
        b'[{"role":"user","content":%b}]' % (b"9" * 6000),
        b'[1,null,"x",[]]',
        b'[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":%b}}]},{"role":"user"}]'
        % json.dumps("[" * 50_000).encode(),
        b'[{"role":{"odd":1},"content":{"odd":[1]}}]',
    ]
    async with site(Engine()) as s:
        for messages in odd:
            for _ in range(2):
                answer = await s.ask("POST", CHAT, b'{"messages":%b}' % messages)
                assert answer.status == 200, (messages[:60], answer.body)
        assert len(s.router.table.by_id) == 2 * len(odd)
