"""What emulated models say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadwise.demo.agent import TOOLS, opening
from loadwise.demo.calculator import evaluate, show
from loadwise.demo.grade import grade
from loadwise.demo.luck import Luck
from loadwise.demo.script import reply, scripted, solves, wrong_answer
from loadwise.demo.table import packaged_table
from loadwise.demo.task import FAMILIES, LEVELS, Task
from loadwise.demo.tasks import generate_tasks
from loadwise.emulator.script import Reply
from loadwise.kernel.errors import ConfigError

TABLE = packaged_table()
STREAM = generate_tasks(2_000, 4)
MODELS = list(TABLE.models)
WITH_TOOL = [task for task in STREAM if task.uses_tool]


def talk(task: Task, model: str, seed: int, tools: list[dict[str, Any]] | None) -> list[Reply]:
    """Hold the conversation that an agent with a working calculator holds."""
    script = scripted(STREAM, TABLE, seed)
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": task.prompt}]}
    if tools:
        body["tools"] = tools
    said = []
    for _ in range(10):
        said.append(script(body))
        body["messages"].append({"role": "assistant", "content": said[-1].text})
        if not said[-1].tool_calls:
            return said
        for call in said[-1].tool_calls:
            value = show(evaluate(json.loads(call.arguments)["expression"]))
            body["messages"].append({"role": "tool", "tool_call_id": call.call_id, "content": value})
    raise AssertionError("the model never answered in words")


@given(st.sampled_from(STREAM), st.sampled_from(MODELS), st.integers())
def test_the_last_words_are_right_exactly_when_luck_has_it(task: Task, model: str, seed: int) -> None:
    """The grader passes a conversation's end if and only if the draw of (seed, task, model) says so."""
    for tools in (None, TOOLS):
        said = talk(task, model, seed, tools)
        passed = grade(task, said[-1].text).verdict == "pass"
        assert passed == solves(task, model, TABLE, seed)
        assert len(said) == 1 + (len(task.steps) if tools else 0)
        assert all((turn.output_tokens or 0) >= 1 for turn in said)


@given(st.sampled_from(STREAM), st.integers())
def test_no_wrong_answer_passes(task: Task, seed: int) -> None:
    """A scripted slip is always refused by the grader."""
    assert grade(task, f"Answer: {wrong_answer(task, Luck(seed))}").verdict == "fail"


def test_wrong_answers_are_plausible() -> None:
    """A slip is of the answer's kind, not a refusal to answer."""
    assert all(wrong_answer(task, Luck(task.task_id)) != "unknown" for task in STREAM)


def test_success_follows_the_table() -> None:
    """Over many tasks each model's rate in each cell lies within four standard errors of the table's."""
    for model in MODELS:
        for family in FAMILIES:
            for level in range(1, LEVELS + 1):
                cell = [t for t in STREAM if t.family == family and t.difficulty == level]
                hits = sum(solves(t, model, TABLE, seed) for t in cell for seed in range(10))
                n, p = 10 * len(cell), TABLE.models[model].success[family][level - 1]
                assert abs(hits - n * p) <= 4 * (n * p * (1 - p)) ** 0.5 + 1


def test_luck_does_not_depend_on_order_or_company() -> None:
    """A task's reply is the same in a stream of one and in a long one, whoever was asked before."""
    task = WITH_TOOL[0]
    body = {"model": "medium", "messages": [{"role": "user", "content": task.prompt}], "tools": TOOLS}
    alone, crowded = scripted([task], TABLE, 9), scripted(STREAM, TABLE, 9)
    for other in STREAM[:50]:
        crowded({"model": "large", "messages": [{"role": "user", "content": other.prompt}]})
    assert alone(body) == crowded(body) == reply(task, "medium", TABLE, 9, 0, offers_tool=True)


def test_models_and_seeds_have_their_own_luck() -> None:
    """Two seeds disagree on some tasks, and a weak model sometimes solves what a strong one does not."""
    assert any(solves(t, "small", TABLE, 1) != solves(t, "small", TABLE, 2) for t in STREAM)
    assert any(solves(t, "small", TABLE, 1) and not solves(t, "large", TABLE, 1) for t in STREAM)


def test_a_model_sometimes_mistypes_and_sometimes_misreads() -> None:
    """Both kinds of failing programs occur: a wrong expression, and a right one with a wrong answer."""
    failing = [t for t in WITH_TOOL if not solves(t, "small", TABLE, 0)]
    last = [json.loads(talk(t, "small", 0, TOOLS)[-2].tool_calls[0].arguments)["expression"] for t in failing]
    mistyped = sum(said != t.steps[-1] for said, t in zip(last, failing, strict=True))
    assert 0 < mistyped < len(failing)


def test_tokens_follow_the_table() -> None:
    """The mean length of a whole program lies within 5 % of the table's."""
    for model in MODELS:
        for family in FAMILIES:
            tasks = [t for t in STREAM if t.family == family]
            mean = sum(r.output_tokens or 0 for t in tasks for r in talk(t, model, 0, TOOLS)) / len(tasks)
            assert mean == pytest.approx(TABLE.models[model].output_tokens[family], rel=0.05)


def test_the_task_is_found_behind_an_opening_and_in_parts() -> None:
    """Examples before it, content parts and surrounding space do not hide the task or shift its turns."""
    task = STREAM[0]
    script = scripted(STREAM, TABLE, 0)
    plain = script({"model": "large", "messages": [{"role": "user", "content": task.prompt}]})
    parts = [{"type": "text", "text": f" {task.prompt}\n"}]
    messages = [*opening(), {"role": "user", "content": parts}]
    assert script({"model": "large", "messages": messages}) == plain


def test_an_engine_may_serve_a_model_under_another_name() -> None:
    """A script bound to a model ignores the name in the request; an unknown model is refused at once."""
    messages = [{"role": "user", "content": STREAM[0].prompt}]
    bound = scripted(STREAM, TABLE, 0, model="small")
    assert bound({"model": "x", "messages": messages}) == scripted(STREAM, TABLE, 0)(
        {"model": "small", "messages": messages}
    )
    with pytest.raises(ConfigError, match="model 'tiny' is not in the success table"):
        scripted(STREAM, TABLE, 0, model="tiny")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
messages_like = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]) | json_values, "content": json_values})
)


@given(st.dictionaries(st.sampled_from(["model", "messages", "tools"]), json_values | messages_like))
def test_any_other_request_gets_a_shrug(body: dict[str, Any]) -> None:
    """Unknown prompts, unknown models and malformed bodies get an answer that passes nowhere."""
    said = scripted(STREAM, TABLE, 0)(body)
    assert not said.tool_calls
    assert all(grade(task, said.text).verdict == "fail" for task in STREAM[:20])
