"""The prefix rule, by itself: a conversation continues a program if and only if it extends its whole list."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadwise.gateway.identity import Conversation, PrefixIndex, normal_form
from loadwise.gateway.replies import StreamedReplies, whole_replies
from loadwise.kernel.ids import ProgramId

Message = dict[str, Any]

texts = st.text(alphabet="ab \n<>{}é\U0001f600", max_size=12)
numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
arguments = st.dictionaries(
    st.text("xyz", min_size=1, max_size=3), numbers | texts | st.lists(numbers, max_size=3), max_size=4
)
calls = st.builds(lambda name, args: (name, args), st.sampled_from(["add", "find"]), arguments)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str | None, *made: tuple[str, Any]) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if made:
        message["tool_calls"] = [
            {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(args)}}
            for i, (name, args) in enumerate(made)
        ]
    return message


asked = st.builds(user, texts) | st.builds(
    lambda text, n: {"role": "tool", "tool_call_id": f"c{n}", "content": text}, texts, st.integers(0, 3)
)
replied = st.builds(lambda text, made: assistant(text, *made), texts, st.lists(calls, max_size=2))


def message_text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else content[0]["text"]


@st.composite
def rewritings(draw: st.DrawFn, message: Message) -> Message:
    """The message as another client would send it back: different bytes, the same message."""
    said = copy.deepcopy(message)
    text = message_text(said)
    said["content"] = draw(st.sampled_from([text, f"  {text}\n", [{"type": "text", "text": text}]]))
    if not text.strip():
        said["content"] = draw(st.sampled_from(["", None, [], "\n", [{"type": "text", "text": " "}]]))
    if said["content"] is None and draw(st.booleans()):
        del said["content"]
    for call in said.get("tool_calls") or ():
        written = call["function"]["arguments"]
        parsed = json.loads(written) if isinstance(written, str) else written
        shuffled = dict(draw(st.permutations(list(parsed.items()))))
        call["function"]["arguments"] = draw(
            st.sampled_from([json.dumps(shuffled), json.dumps(shuffled, indent=1, ensure_ascii=False), shuffled])
        )
        if draw(st.booleans()):
            call["id"] = "other"
        elif draw(st.booleans()):
            call.pop("id", None)
    for name, value in (
        ("reasoning_content", "because"),
        ("refusal", None),
        ("id", "m1"),
        ("cache_control", {"type": "ephemeral"}),
        ("tool_calls", None),
        ("annotations", []),
    ):
        if name not in said and draw(st.booleans()):
            said[name] = value
    return said


@settings(max_examples=200)
@given(st.data(), st.one_of(asked, replied))
def test_a_rewritten_message_is_the_same_message(data: st.DataObject, message: Message) -> None:
    """White space around, order of keys, string or parts, null or absent content, ids and hints change nothing."""
    assert normal_form(data.draw(rewritings(message))) == normal_form(message)


DIFFERENT = [
    user("a"),
    user("b"),
    user("a b"),
    user("a  b"),
    user("A"),
    {"role": "system", "content": "a"},
    {"role": "tool", "content": "a"},
    {"role": "assistant", "content": "a"},
    {"content": "a"},
    {"role": "user", "content": 5},
    {"role": "user", "content": 6},
    {"role": "user", "content": {"type": "text", "text": "x"}},
    {"role": "user", "content": {"type": "text", "text": "y"}},
    {"role": "user", "content": [1]},
    {"role": "user", "content": [2]},
    {"role": "user", "content": [["a"]]},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u1"}}]},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u2"}}]},
    {"role": "user", "content": [{"type": "text", "text": 1}]},
    {"role": "user", "content": [{"type": "text", "text": 2}]},
    {"role": "user", "content": [{"type": ["odd"], "text": "a"}]},
    {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}, {"type": "text", "text": "a"}]},
    assistant(None, ("add", {"a": 1})),
    assistant(None, ("add", {"a": 2})),
    assistant(None, ("add", {"a": "1"})),
    assistant(None, ("add", {"a": 1.5})),
    assistant(None, ("add", {"a": 2**80})),
    assistant(None, ("add", {"a": 2**80 + 1})),
    assistant(None, ("sub", {"a": 1})),
    assistant("a", ("add", {"a": 1})),
    assistant(None, ("add", {"a": 1}), ("add", {"a": 1})),
    assistant(None, ("add", [{}])),
    {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "n", "input": "1"}}]},
    {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "n", "input": "2"}}]},
    {"role": "assistant", "tool_calls": ["odd"]},
    {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "not json"}}]},
    {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "1e400"}}]},
    {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "2e400"}}]},
    {"role": "user", "content": "half \ud800"},
    {"role": "user", "content": "half \ud801"},
    {"role": "user", "content": "?"},
    "a",
    ["a"],
    7,
    None,
]


def test_different_messages_have_different_forms() -> None:
    """Nothing that says something else passes for the same: a wrong merge is the worst mistake."""
    forms = [normal_form(message) for message in DIFFERENT]
    assert len(set(forms)) == len(forms)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (assistant("a"), {"role": "assistant", "content": "<think>so\nso</think>\n\na"}),
        (
            assistant("a"),
            {"role": "assistant", "content": [{"type": "reasoning", "text": "x"}, {"type": "text", "text": "a"}]},
        ),
        (assistant("a"), {"role": "assistant", "content": ["a"]}),
        (assistant("a"), {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]}),
        (assistant(None, ("f", {})), {"role": "assistant", "function_call": {"name": "f", "arguments": ""}}),
        (assistant(None, ("f", {"x": 1.0})), assistant("", ("f", {"x": 1}))),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}, "cache_control": {"t": 1}}]},
            {"role": "user", "content": [{"image_url": {"url": "u"}, "type": "image_url", "id": "i"}]},
        ),
    ],
)
def test_what_clients_are_known_to_rewrite_is_the_same(one: Message, other: Message) -> None:
    """Thoughts cut out, parts for strings, the older name of tool calls, 1 for 1.0."""
    assert normal_form(one) == normal_form(other)


def test_what_cannot_be_compared_is_equal_to_nothing() -> None:
    """A message nested beyond every parser never matches, itself included."""
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    message = {"role": "user", "content": [{"type": "odd", "odd": deep}]}
    assert normal_form(message) != normal_form(message)


class World:
    """Programs as a client would see them, beside the index that must recognise them."""

    def __init__(self) -> None:
        self.open: set[ProgramId] = set()
        self.index = PrefixIndex(self.open.__contains__)
        self.lists: dict[ProgramId, list[list[Message]]] = {}
        """What each program's whole list may be: one for every choice of its last reply."""
        self.key_of: dict[ProgramId, bytes] = {}
        self.busy: dict[ProgramId, tuple[Conversation, list[Message]]] = {}
        self.n = 0

    def expected(self, key: bytes, messages: list[Message]) -> ProgramId | None:
        """By the letter of the rule: the longest known list that is extended, if one open idle program has it."""
        for length in range(len(messages) - 1, 0, -1):
            found = [
                program
                for program, whole in self.lists.items()
                if program in self.open
                and self.key_of[program] == key
                and any(_same(w, messages[:length]) for w in whole)
            ]
            if found:
                return found[0] if len(found) == 1 and found[0] not in self.busy else None
        return None

    def ask(self, key: bytes, messages: list[Message]) -> ProgramId:
        """A request arrives; the index must say what the rule says."""
        conversation = self.index.find(key, messages)
        assert conversation is not None
        assert conversation.program_id == self.expected(key, messages)
        program = conversation.program_id
        if program is None:
            self.n += 1
            program = ProgramId(f"p{self.n}")
            self.open.add(program)
            self.key_of[program] = key
        self.busy[program] = (conversation, messages)
        return program

    def answer(self, program: ProgramId, replies: list[Message] | None) -> None:
        """Its turn ends."""
        conversation, messages = self.busy.pop(program)
        self.index.settle(program, conversation, replies)
        if replies is not None:
            self.lists[program] = [[*messages, reply] for reply in replies]

    def end(self, program: ProgramId) -> None:
        self.open.discard(program)


def _same(one: list[Message], other: list[Message]) -> bool:
    return len(one) == len(other) and all(normal_form(a) == normal_form(b) for a, b in zip(one, other, strict=True))


few_asked = st.sampled_from([user("a"), user("b")])
few_replied = st.sampled_from([assistant("x"), assistant("y"), assistant(None, ("f", {"b": 1, "a": 2}))])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_recognised_if_and_only_if_one_open_program_is_extended(data: st.DataObject) -> None:
    """Against a model that compares whole lists: forks, twins, retries, choices, keys, endings, parallel requests."""
    world = World()
    for _ in range(data.draw(st.integers(1, 25))):
        step = data.draw(st.sampled_from(["new", "continue", "continue", "answer", "answer", "fail", "lose", "end"]))
        known = [w for whole in world.lists.values() for w in whole]
        if step == "new":
            world.ask(data.draw(st.sampled_from([b"", b"k"])), data.draw(st.lists(few_asked, min_size=1, max_size=2)))
        elif step == "continue" and known:
            begin = data.draw(st.sampled_from(known))
            cut = data.draw(st.sampled_from([len(begin), len(begin), len(begin), max(1, len(begin) - 1)]))
            more = data.draw(st.lists(few_asked, max_size=2))
            sent = [data.draw(rewritings(m)) for m in [*begin[:cut], *more]]
            world.ask(data.draw(st.sampled_from([b"", b"k"])), sent)
        elif world.busy and step in ("answer", "fail", "lose"):
            program = data.draw(st.sampled_from(sorted(world.busy)))
            replies = data.draw(st.lists(few_replied, min_size=1, max_size=3))
            world.answer(program, {"answer": replies, "fail": None, "lose": []}[step])
        elif step == "end" and world.open:
            world.end(data.draw(st.sampled_from(sorted(world.open))))
    assert len(world.index) <= len(world.lists)


def test_programs_that_have_ended_do_not_pile_up() -> None:
    """What is remembered follows what is open, and never passes the bound."""
    world = World()
    for n in range(500):
        program = world.ask(b"", [user(f"{n}")])
        world.answer(program, [assistant("x")])
        world.end(program)
    assert len(world.index) <= 2
    bounded = PrefixIndex(lambda program: True, programs_max=10)
    for n in range(50):
        conversation = bounded.find(b"", [user(f"{n}")])
        assert conversation is not None
        bounded.settle(ProgramId(f"p{n}"), conversation, [assistant("x")])
    assert len(bounded) == 10
    assert bounded.find(b"", []) is None


def test_equal_choices_are_one() -> None:
    """Two choices with the same text are forgotten as one, and continued as one."""
    world = World()
    program = world.ask(b"", [user("a")])
    world.answer(program, [assistant("x"), assistant("x"), assistant("y")])
    assert world.ask(b"", [user("a"), assistant("y"), user("b")]) == program
    world.answer(program, [assistant("z")])
    assert world.ask(b"", [user("a"), assistant("x"), user("b")]) != program


@settings(max_examples=100)
@given(st.lists(replied, min_size=1, max_size=3), st.data())
def test_a_streamed_reply_is_the_reply(replies: list[Message], data: st.DataObject) -> None:
    """However the pieces are cut, on the wire and in the events, the reply has the same form as the whole one."""
    events = []
    for index, reply in enumerate(replies):
        for piece in _pieces(reply["content"] or "", data):
            events.append((index, {"content": piece}))
        for n, call in enumerate(reply.get("tool_calls", ())):
            events.append(
                (index, {"tool_calls": [{"index": n, "id": "x", "function": {"name": call["function"]["name"]}}]})
            )
            for piece in _pieces(call["function"]["arguments"], data):
                events.append((index, {"tool_calls": [{"index": n, "function": {"arguments": piece}}]}))
    body = b"".join(
        b"data: %b\r\n\r\n" % json.dumps({"choices": [{"index": i, "delta": d}]}).encode() for i, d in events
    )
    streamed = StreamedReplies()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=6)))
    for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        streamed.feed(body[start:end])
    found = {normal_form(m) for m in streamed.replies()}
    said = {i for i, _ in events}
    assert found == {normal_form(reply) for i, reply in enumerate(replies) if i in said}
    whole = whole_replies(json.dumps({"choices": [{"message": reply} for reply in replies]}).encode())
    assert [normal_form(m) for m in whole] == [normal_form(m) for m in replies]


def _pieces(text: str, data: st.DataObject) -> list[str]:
    cut = data.draw(st.integers(0, len(text)))
    return [piece for piece in (text[:cut], text[cut:]) if piece]


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"choices":3}', b'{"choices":[3]}', b'{"choices":[{"message":"x"}]}', b"[" * 9999, b"\xff"],
)
def test_odd_answers_have_no_replies(body: bytes) -> None:
    """Whatever an engine sends, reading replies from it raises nothing."""
    assert whole_replies(body) == []
    streamed = StreamedReplies()
    streamed.feed(b"data: %b\n\n" % body)
    assert all(reply["content"] == "" for reply in streamed.replies())


@pytest.mark.parametrize(
    "chunk",
    [
        {"choices": [{"index": "0", "delta": {}}]},
        {"choices": [{"index": [1], "delta": {}}]},
        {"choices": [None]},
        {"choices": [{"delta": {"tool_calls": [{"index": "x"}]}}]},
        {"choices": [{"delta": {"tool_calls": [3]}}]},
        {"choices": [{"delta": {"tool_calls": [{"function": {"name": 3}}, {"index": 0, "function": {"name": "x"}}]}}]},
        {"choices": [{"index": n, "delta": {}} for n in range(1000)]},
        {"choices": [{"delta": {"tool_calls": [{"index": n} for n in range(1000)]}}]},
    ],
)
def test_odd_chunks_lose_the_reply_and_nothing_else(chunk: Any) -> None:
    """A stream that cannot be followed has no reply to be recognised by; no bound is passed."""
    streamed = StreamedReplies()
    streamed.feed(b"data: %b\n\n" % json.dumps(chunk).encode())
    assert streamed.replies() == []


def test_streamed_calls_without_numbers_are_calls_one_after_the_other() -> None:
    """Some engines stream whole tool calls and number none of them; others use the older function_call."""
    streamed = StreamedReplies()
    for name in ("f", "g"):
        call = {"function": {"name": name, "arguments": "{}"}}
        streamed.feed(b"data: %b\n\n" % json.dumps({"choices": [{"delta": {"tool_calls": [call]}}]}).encode())
    assert [normal_form(m) for m in streamed.replies()] == [normal_form(assistant(None, ("f", {}), ("g", {})))]
    older = StreamedReplies()
    for piece in ({"name": "f"}, {"arguments": '{"a":'}, {"arguments": "1}"}):
        older.feed(b"data: %b\n\n" % json.dumps({"choices": [{"delta": {"function_call": piece}}]}).encode())
    assert [normal_form(m) for m in older.replies()] == [normal_form(assistant(None, ("f", {"a": 1})))]


def test_text_that_looks_like_the_end_is_text() -> None:
    """`[DONE]` inside a reply belongs to the reply."""
    streamed = StreamedReplies()
    streamed.feed(b'data: {"choices":[{"delta":{"content":"data: [DONE]"}}]}\n\ndata: [DONE]\n\n')
    assert streamed.replies() == [{"role": "assistant", "content": "data: [DONE]"}]
