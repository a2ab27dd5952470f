"""What an engine finds of a prompt: the longest beginning that any earlier prompt or answer had, and nothing more."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadwise.emulator.conversation import Conversations, prompt_parts
from loadwise.emulator.script import Reply, Script
from loadwise.sim.content import Contents, block_name
from loadwise.sim.engine import EngineRequest
from loadwise.sim.vllm_engine import VllmEngineSpec

from .loopback import Answer, Client, chat, on_loop, running

VLLM = VllmEngineSpec(num_gpu_blocks=400)
LONG = "s" * 1600
"""About 400 tokens."""


async def cached(client: Client, messages: list[tuple[str, str]], **fields: Any) -> int:
    """Tokens that a chat's prompt had in the cache."""
    body = {"model": "m", "messages": [{"role": role, "content": text} for role, text in messages]}
    answer: Answer = await client.ask(body | {"max_tokens": 8} | fields)
    assert answer.status == 200
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])


@on_loop
async def test_strangers_share_a_system_prompt() -> None:
    """Conversations that begin with the same system message hit its whole blocks, and only those."""
    async with running(engine=VLLM) as client:
        assert await cached(client, [("system", LONG), ("user", "a" * 400)]) == 0
        assert await cached(client, [("system", LONG), ("user", "b" * 400)]) == 400
        assert await cached(client, [("system", LONG + "!"), ("user", "b" * 400)]) == 0


@on_loop
async def test_branches_of_a_conversation_do_not_mix() -> None:
    """Two continuations of one history hit the history, and later their own branch but not the other's."""
    said: Script = lambda body: Reply(text="r" * 256)  # noqa: E731
    async with running(said, engine=VLLM) as client:
        history = [("user", LONG), ("assistant", "r" * 256)]
        await cached(client, history[:1], max_tokens=64)
        branches = [[*history, ("user", name * 640), ("assistant", "r" * 256)] for name in "xy"]
        for branch in branches:
            assert 448 <= await cached(client, branch[:3], max_tokens=64) <= 480
        for branch in branches:
            assert 640 <= await cached(client, [*branch, ("user", "more" * 100)]) <= 704
        mixed = [*branches[0][:3], ("assistant", "another" * 40), ("user", "more" * 100)]
        assert await cached(client, mixed) < 640


@on_loop
async def test_what_was_not_shown_cannot_be_found() -> None:
    """An answer of 200 tokens of which 10 are text: the next turn finds the prompt, as reasoning is not sent back."""
    hidden: Script = lambda body: Reply(text="f" * 40, output_tokens=200)  # noqa: E731
    async with running(hidden, engine=VLLM) as client:
        await cached(client, [("user", LONG)], max_tokens=500)
        turns = [("user", LONG), ("assistant", "f" * 40), ("user", "g" * 1200)]
        assert await cached(client, turns, max_tokens=500) == 400


@on_loop
async def test_a_shared_prompt_is_found_while_its_first_reader_still_runs() -> None:
    """Blocks are shared as soon as they are computed, not when somebody is done."""
    async with running(engine=VLLM, scale=50.0) as client:
        first = client.send(chat(LONG, "a", "b", max_tokens=4000, ignore_eos=True, stream=True))
        await first.begun
        assert await cached(client, [("user", LONG), ("assistant", "a"), ("user", "c")]) == 400
        assert first.attempt is not None and not first.over.done()
        first.attempt.cancel()


@on_loop
@pytest.mark.parametrize("fields", [{"ignore_eos": True, "max_tokens": 37}, {"min_tokens": 37, "max_tokens": 37}])
async def test_exact_lengths_can_be_asked_for(fields: dict[str, Any]) -> None:
    """`ignore_eos` with `max_tokens`, or both limits alike, give exactly that many tokens of four characters."""
    async with running(lambda body: Reply(text="short"), engine=VLLM) as client:
        answer = await client.ask({"model": "m", "prompt": "p" * 100} | fields, path=b"/completions")
        assert answer.json["usage"]["completion_tokens"] == 37
        assert len(answer.json["choices"][0]["text"]) == 148
        assert answer.json["choices"][0]["finish_reason"] == "length"


@on_loop
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": True}, "min_tokens"),
        ({"priority": 0.5}, "priority"),
        ({"priority": 2**40}, "priority"),
        ({"ignore_eos": 1}, "ignore_eos"),
    ],
)
async def test_wrong_lengths_and_priorities_are_refused(fields: dict[str, Any], param: str) -> None:
    """A 400 that names the field."""
    async with running(engine=VLLM) as client:
        answer = await client.ask(chat("hello", max_tokens=8) | fields)
        assert answer.status == 400
        assert answer.json["error"]["param"] == param
        assert param in answer.json["error"]["message"]


@on_loop
async def test_priority_decides_who_is_served_first() -> None:
    """With one place and scheduling by priority, the urgent request overtakes one that came before it."""
    spec = VllmEngineSpec(num_gpu_blocks=400, max_num_seqs=1, scheduling_policy="priority")
    async with running(engine=spec, scale=20.0) as client:
        order: list[str] = []
        answers = []
        for name, priority in (("first", 0), ("patient", 5), ("urgent", 1)):
            answer = client.send(chat(name, max_tokens=100, ignore_eos=True, priority=priority))
            answer.over.add_done_callback(lambda _, name=name: order.append(name))
            answers.append(answer)
            await client.get("/health")  # so that they arrive in this order
        for answer in answers:
            await answer.over
        assert order == ["first", "urgent", "patient"]


BLOCK = 4
texts = st.lists(st.text(alphabet="ab", min_size=1, max_size=40), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(grown=texts, branch=st.lists(st.integers(0, 11), min_size=1, max_size=12))
def test_blocks_have_one_name_exactly_if_their_text_is_one(grown: list[str], branch: list[int]) -> None:
    """Prompts that extend, fork and repeat each other: equal names mean equal text up to the block's end, and back."""
    conversations, contents = Conversations(), Contents(BLOCK, 1000)
    prompts, text_by_name = [""], dict[int, str]()
    for i, piece in enumerate(grown):
        prompt = (prompts[branch[i % len(branch)] % len(prompts)] + piece * 3)[: 4 * BLOCK * 20]
        prompts.append(prompt)
        place = conversations.find(prompt_parts(prompt, BLOCK))
        request = EngineRequest(
            request_id=i, program_id=place.key, prompt_tokens=place.prompt_tokens, output_tokens=1, line=place.line
        )
        line = contents.open(request)
        for block in range(len(prompt) // (4 * BLOCK)):
            text = prompt[: (block + 1) * 4 * BLOCK]
            name = block_name(line, block)
            assert text_by_name.setdefault(name, text) == text
            assert [other for other, known in text_by_name.items() if known == text] == [name]


def test_what_is_remembered_is_bounded() -> None:
    """Beyond the limit the beginnings used longest ago are forgotten, and a system prompt in use is not."""
    conversations = Conversations(limit=40)
    for i in range(100):
        place = conversations.find(["system", f"user {i}", "more"])
        assert (place.line[0] == (0, 1)) or i == 0
    assert len(conversations._known) <= 40
    assert conversations.find(["system", "user 0"]).line != place.line
