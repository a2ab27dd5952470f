"""The agent: the real SDK against a server that behaves well or badly."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from demo_gateway import fake_gateway

from loadwise.demo.agent import (
    TOOL_CALLS_MAX,
    TURNS_MAX,
    Transcript,
    finish_program,
    open_client,
    opening,
    report_verdict,
    run_program,
)
from loadwise.demo.grade import grade
from loadwise.demo.script import scripted, solves
from loadwise.demo.table import packaged_table
from loadwise.demo.tasks import generate_tasks
from loadwise.emulator.script import Reply, Script, ToolCall

STREAM = generate_tasks(200, 8)
TABLE = packaged_table()
TOOL_TASK = next(task for task in STREAM if len(task.steps) == 2)
PLAIN_TASK = next(task for task in STREAM if not task.uses_tool)


def say(text: str, *calls: ToolCall) -> Reply:
    return Reply(text=text, tool_calls=calls, output_tokens=7)


def call(arguments: str, name: str = "calculator", call_id: str = "c1") -> ToolCall:
    return ToolCall(call_id=call_id, name=name, arguments=arguments)


def work(
    script: Script, task: Any = TOOL_TASK, refuse: Callable[[Any], int | None] | None = None
) -> tuple[Transcript, list[dict[str, Any]]]:
    """Run one program; returns what it did and the bodies it sent."""
    with fake_gateway(script) as server:
        server.refuse = refuse or server.refuse
        with open_client(server.base_url) as client:
            transcript = run_program(client, task, "auto", "p-1", {"task_type": task.family})
        return transcript, server.bodies


@pytest.mark.parametrize("model", list(TABLE.models))
def test_the_calculator_is_used_to_the_end(model: str) -> None:
    """A tool task takes a turn per step and one for the answer, and counts tokens, waits and the model."""
    gateway = fake_gateway(scripted(STREAM, TABLE, 0), lambda body, program_id: model)
    with gateway as server, open_client(server.base_url) as client:
        transcript = run_program(client, TOOL_TASK, "auto", "p-1")
    assert (transcript.n_turns, transcript.n_tool_calls, transcript.errors) == (3, 2, ())
    assert transcript.model == model
    assert transcript.input_tokens == 40 * (3 * len(opening()) + 1 + 3 + 5)
    assert transcript.wait_s == pytest.approx(3 * 0.0125)
    passed = grade(TOOL_TASK, transcript.answer_text).verdict == "pass"
    assert passed == solves(TOOL_TASK, model, TABLE, 0)


def test_a_model_that_ignores_tools_still_answers() -> None:
    """Small models answer in words at once: one turn, graded as it is."""
    transcript, bodies = work(lambda body: say(f"Answer: {TOOL_TASK.answer}"))
    assert transcript.n_turns == 1 and "tools" in bodies[0]
    assert grade(TOOL_TASK, transcript.answer_text).verdict == "pass"


def test_tools_are_offered_only_where_the_task_has_them() -> None:
    """A plain task sends no tools, and the metadata tells its kind."""
    _, bodies = work(lambda body: say("Answer: 1"), PLAIN_TASK)
    assert "tools" not in bodies[0]
    assert bodies[0]["metadata"] == {"task_type": PLAIN_TASK.family}


@pytest.mark.parametrize("status", [400, 422, 500, 501])
def test_an_engine_without_tool_support_is_asked_again_without(status: int) -> None:
    """A refusal of tools costs one error and no answer; no later turn offers tools again."""
    transcript, bodies = work(lambda body: say("Answer: 1"), refuse=lambda body: status if "tools" in body else None)
    assert transcript.answer_text == "Answer: 1"
    assert len(transcript.errors) == 1 and str(status) in transcript.errors[0]
    assert ["tools" in body for body in bodies] == [True, False]


@pytest.mark.parametrize("status", [401, 409, 429, 503])
def test_any_other_refusal_ends_the_program(status: int) -> None:
    """An overloaded or unwilling gateway is an error in the transcript, not an exception."""
    transcript, _ = work(lambda body: say("unused"), refuse=lambda body: status)
    assert (transcript.n_turns, transcript.answer_text, transcript.model) == (0, "", "")
    assert len(transcript.errors) == 1


def test_a_failure_after_a_tool_call_leaves_no_answer() -> None:
    """Words beside a tool call are not taken for the answer when the next turn fails."""
    transcript, _ = work(
        lambda body: say("Answer: 5", call('{"expression": "2+3"}')),
        refuse=lambda body: 503 if body["messages"][-1]["role"] == "tool" else None,
    )
    assert transcript.answer_text == "" and transcript.n_turns == 1 and transcript.errors


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ('{"expression": "2^10 + 0.5"}', "1024.5"),
        ('{"expression": "1/0"}', "error: division by zero"),
        ("{not json", "error: arguments must be JSON"),
        ("[1]", "error: arguments must be an object"),
        ('{"expression": 5}', "error: arguments must be an object"),
        ('{"other": "1"}', "error: arguments must be JSON"),
        ("[" * 50_000, "error: arguments must be JSON"),
    ],
)
def test_the_model_is_told_what_its_call_gave(arguments: str, result: str) -> None:
    """Good and bad arguments are answered in the tool message, under the call's id."""

    def script(body: Any) -> Reply:
        return say("Answer: 1") if body["messages"][-1]["role"] == "tool" else say("", call(arguments))

    transcript, bodies = work(script)
    told = bodies[-1]["messages"][-1]
    assert (told["role"], told["tool_call_id"]) == ("tool", "c1")
    assert told["content"].startswith(result)
    assert transcript.answer_text == "Answer: 1"


def test_unknown_tools_and_floods_of_calls_are_answered() -> None:
    """Each call gets a result: a wrong name is refused, and so is what exceeds the limit."""

    def script(body: Any) -> Reply:
        calls = [call('{"expression": "1"}', call_id=f"c{i}") for i in range(TOOL_CALLS_MAX + 2)]
        flood = say("", call("{}", name="rm_rf", call_id="x"), *calls)
        return say("Answer: 1") if body["messages"][-1]["role"] == "tool" else flood

    _, bodies = work(script)
    results = [message["content"] for message in bodies[-1]["messages"] if message["role"] == "tool"]
    assert len(results) == TOOL_CALLS_MAX + 3
    assert "unknown tool 'rm_rf'" in results[0]
    assert results[1:TOOL_CALLS_MAX] == ["1"] * (TOOL_CALLS_MAX - 1)
    assert all("too many" in result for result in results[TOOL_CALLS_MAX:])


def test_turns_are_bounded() -> None:
    """A model that only calls tools is stopped, and its last turn is not offered any."""
    transcript, bodies = work(lambda body: say("", call('{"expression": "1"}')))
    assert transcript.n_turns == len(bodies) == TURNS_MAX
    assert "tools" in bodies[-2] and "tools" not in bodies[-1]


def test_nobody_at_the_address_is_an_error_in_the_transcript() -> None:
    """A refused connection ends the program with the reason."""
    with fake_gateway(lambda body: say("x")) as server:
        base_url = server.base_url
    with open_client(base_url).with_options(max_retries=0) as client:
        transcript = run_program(client, PLAIN_TASK, "auto", "p-1")
        assert finish_program(client, "p-1") is not None
    assert transcript.n_turns == 0 and "Connection" in transcript.errors[0]


def test_the_end_and_the_verdict_are_posted() -> None:
    """Finish and verdict go to the program's own address, its id escaped, with an id that makes it idempotent."""
    with fake_gateway(lambda body: say("x")) as server, open_client(server.base_url) as client:
        assert finish_program(client, "a/b c") is None
        assert report_verdict(client, "a/b c", "pass") is None
    assert [path for path, _ in server.posts] == [
        "/v1/programs/a%2Fb%20c/finish",
        "/v1/programs/a%2Fb%20c/verdict",
    ]
    body = server.posts[1][1]
    assert body == {"verdict": "pass", "verifier": "demo-answer", "version": "1", "id": "a/b c-answer"}


@pytest.mark.parametrize(("header", "wait_s"), [("250", 0.25), ("nan", 0.0), ("-5", 0.0), ("soon", 0.0)])
def test_a_strange_wait_header_counts_as_no_wait(header: str, wait_s: float) -> None:
    """Only a finite, non-negative wait enters the sum."""
    with fake_gateway(lambda body: say("Answer: 1")) as server, open_client(server.base_url) as client:
        server.wait_ms = header
        assert run_program(client, PLAIN_TASK, "auto", "p-1").wait_s == wait_s


def test_one_client_serves_many_threads() -> None:
    """Programs in parallel keep their own conversations and ids."""
    tasks = [task for task in STREAM if task.uses_tool][:12]
    transcripts: dict[str, Transcript] = {}
    with fake_gateway(scripted(STREAM, TABLE, 0)) as server, open_client(server.base_url) as client:

        def one(task: Any) -> None:
            transcripts[task.task_id] = run_program(client, task, "auto", f"p-{task.task_id}")

        threads = [threading.Thread(target=one, args=(task,)) for task in tasks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for task in tasks:
        passed = grade(task, transcripts[task.task_id].answer_text).verdict == "pass"
        assert passed == solves(task, "large", TABLE, 0)
