"""One agent program: the OpenAI SDK, one problem, and a calculator where the problem is made for it.

The agent is an ordinary client. It knows an address, a model name and a program id, and it must finish
whatever the model does: call a tool that does not exist, send arguments that are no JSON, ignore the tools
(SmolLM2-135M does), or fail. Errors are values in the `Transcript`, never exceptions, so one bad program does
not end a stream of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from loadwise.demo.calculator import CalculatorError, evaluate, show
from loadwise.demo.script import CALCULATOR
from loadwise.demo.task import Kind, Task
from loadwise.demo.tasks import asked
from loadwise.kernel.fact import Fact

if TYPE_CHECKING:
    from openai import OpenAI

TURNS_MAX = 6
"""Model calls of one program; the last is made without tools, so that it has to answer."""
TOOL_CALLS_MAX = 8
"""Tool calls that are executed in one turn; the rest are refused."""
OUTPUT_MAX_TOKENS = 320
"""Bound on one turn: several times what a short working takes, so that a model that babbles is cut off."""
_RESULT_MAX_CHARACTERS = 200
_NO_TOOLS_STATUS = (400, 404, 415, 422, 500, 501)
"""What engines without tool support answer to a request that has tools."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": CALCULATOR,
            "description": "Evaluate an arithmetic expression with + - * / ^ and parentheses, exactly.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


_SHOTS = (
    ("What is 7 + 5?", "number", "7 + 5 = 12\nAnswer: 12"),
    ('What is the last letter of the word "apple"?', "text", 'The word "apple" ends with e.\nAnswer: e'),
    ("Convert 3 feet to inches (a foot has 12 inches).", "number", "3 * 12 = 36\nAnswer: 36"),
    ("Which date is one day after 1951-02-02?", "date", "2 + 1 = 3\nAnswer: 1951-02-03"),
)


def opening() -> list[dict[str, Any]]:
    """Begin every conversation alike: the rules and one worked problem per family.

    Without the examples a model of 135 million parameters ends no reply with an answer line, with them nearly all.
    """
    system = 'You solve small problems. Work briefly and end with a line that begins with "Answer:".'
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    for statement, kind, reply in _SHOTS:
        messages.append({"role": "user", "content": asked(statement, cast(Kind, kind))})
        messages.append({"role": "assistant", "content": reply})
    return messages


class Transcript(Fact, frozen=True, kw_only=True):
    """What one program did."""

    program_id: str
    task_id: str
    model: str
    """Model that answered last, as the gateway (or else the engine) names it; empty if none did."""
    answer_text: str
    """Text of the last turn; empty if there was none or the program broke off."""
    n_turns: int
    n_tool_calls: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    wait_s: float
    """Sum over turns of the time that the gateway says the turn was held."""
    errors: tuple[str, ...]


def open_client(base_url: str, api_key: str = "unused", timeout_s: float = 60.0) -> OpenAI:
    """Open an OpenAI client for a gateway at `base_url` (ending in /v1); thread-safe, close it after use.

    Raises:
        ModuleNotFoundError: the SDK is missing; says which extra brings it.
    """
    try:
        from openai import OpenAI
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the demo needs the OpenAI SDK: pip install 'loadwise[demo]'") from error
    return OpenAI(base_url=base_url, api_key=api_key, timeout=timeout_s, max_retries=2)


def run_program(
    client: OpenAI,
    task: Task,
    model: str,
    program_id: str,
    metadata: Mapping[str, str] | None = None,
    turns_max: int = TURNS_MAX,
    output_max_tokens: int = OUTPUT_MAX_TOKENS,
) -> Transcript:
    """Work on one task until the model answers in words, a turn fails for good, or turns run out.

    Args:
        client: the SDK's client; shared between threads.
        task: the problem.
        model: what to ask for: "auto" (routed) or a model's name (pinned).
        program_id: sent as X-Session-ID with every turn.
        metadata: sent as the body's `metadata`, where routers look for the kind of task.
        turns_max: bound on model calls.
        output_max_tokens: bound on each reply.
    """
    program = _Program(client, task, model, program_id, metadata, output_max_tokens)
    for turn in range(turns_max):
        calls = program.take_turn(with_tools=task.uses_tool and turn < turns_max - 1)
        if not calls:
            break
        program.answer_calls(calls)
    return program.transcript()


def finish_program(client: OpenAI, program_id: str) -> str | None:
    """Tell the gateway that a program is over; returns what went wrong, None if nothing did."""
    return _post(client, program_id, "finish", {})


def report_verdict(client: OpenAI, program_id: str, verdict: str) -> str | None:
    """Report pass, fail or abstain; idempotent by its id. Returns what went wrong, None if nothing did."""
    body = {"verdict": verdict, "verifier": "demo-answer", "version": "1", "id": f"{program_id}-answer"}
    return _post(client, program_id, "verdict", body)


def _post(client: OpenAI, program_id: str, verb: str, body: dict[str, str]) -> str | None:
    from openai import OpenAIError

    try:
        client.post(f"/programs/{quote(program_id, safe='')}/{verb}", body=body, cast_to=object)
    except OpenAIError as error:
        return f"{verb}: {_explained(error)}"
    return None


def _explained(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


class _Program:
    """The state of one running program."""

    def __init__(
        self,
        client: OpenAI,
        task: Task,
        model: str,
        program_id: str,
        metadata: Mapping[str, str] | None,
        output_max_tokens: int,
    ) -> None:
        self._output_max_tokens = output_max_tokens
        self._client = client
        self._task = task
        self._model = model
        self._program_id = program_id
        self._extra = {"metadata": dict(metadata)} if metadata else {}
        self._messages: list[dict[str, Any]] = [*opening(), {"role": "user", "content": task.prompt}]
        self._errors: list[str] = []
        self._served_by = self._answer_text = ""
        self._n_turns = self._n_tool_calls = 0
        self._input_tokens = self._output_tokens = self._cached_tokens = 0
        self._wait_s = 0.0
        self._tools_work = True

    def take_turn(self, *, with_tools: bool) -> list[Any]:
        """Make one model call; returns the tool calls it asks for, none when the program is over."""
        from openai import APIStatusError, OpenAIError

        tools = TOOLS if with_tools and self._tools_work else None
        try:
            return self._read(self._create(tools))
        except APIStatusError as error:
            self._errors.append(_explained(error))
            if tools is None or error.status_code not in _NO_TOOLS_STATUS:
                return self._broken_off()
        except OpenAIError as error:
            self._errors.append(_explained(error))
            return self._broken_off()
        self._tools_work = False
        return self.take_turn(with_tools=False)

    def _broken_off(self) -> list[Any]:
        """End the program without an answer: what was said beside a tool call is none."""
        self._answer_text = ""
        return []

    def _create(self, tools: list[dict[str, Any]] | None) -> Any:
        create: Any = self._client.chat.completions.with_raw_response.create
        return create(
            model=self._model,
            messages=self._messages,
            temperature=0.0,
            max_tokens=self._output_max_tokens,
            extra_headers={"X-Session-ID": self._program_id},
            extra_body=self._extra,
            **({"tools": tools} if tools else {}),
        )

    def _read(self, raw: Any) -> list[Any]:
        """Account for a response and keep it in the conversation."""
        completion = raw.parse()
        self._n_turns += 1
        self._wait_s += _wait_s(raw.headers)
        self._served_by = raw.headers.get("x-loadwise-model") or getattr(completion, "model", None) or ""
        self._count(getattr(completion, "usage", None))
        choices = getattr(completion, "choices", None)
        if not choices:
            self._errors.append("the response has no choices")
            return []
        message = choices[0].message
        self._answer_text = message.content or ""
        calls = list(message.tool_calls or [])
        kept: dict[str, Any] = {"role": "assistant", "content": message.content}
        if calls:
            kept["tool_calls"] = [call.model_dump(exclude_none=True) for call in calls]
        self._messages.append(kept)
        return calls

    def _count(self, usage: Any) -> None:
        if usage is None:
            self._errors.append("the response has no usage")
            return
        self._input_tokens += usage.prompt_tokens or 0
        self._output_tokens += usage.completion_tokens or 0
        self._cached_tokens += getattr(usage.prompt_tokens_details, "cached_tokens", None) or 0

    def answer_calls(self, calls: list[Any]) -> None:
        """Execute tool calls and append a result for each, as the API demands."""
        for place, call in enumerate(calls):
            self._n_tool_calls += 1
            content = _tool_result(call) if place < TOOL_CALLS_MAX else "error: too many tool calls in one turn"
            self._messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    def transcript(self) -> Transcript:
        return Transcript(
            program_id=self._program_id,
            task_id=self._task.task_id,
            model=self._served_by,
            answer_text=self._answer_text,
            n_turns=self._n_turns,
            n_tool_calls=self._n_tool_calls,
            input_tokens=self._input_tokens,
            output_tokens=self._output_tokens,
            cached_tokens=self._cached_tokens,
            wait_s=self._wait_s,
            errors=tuple(self._errors),
        )


def _wait_s(headers: Mapping[str, str]) -> float:
    try:
        wait_s = float(headers.get("x-loadwise-wait-ms") or 0.0) / 1000.0
    except ValueError:
        return 0.0
    return wait_s if 0.0 <= wait_s < 1e6 else 0.0


def _tool_result(call: Any) -> str:
    """Run one tool call; whatever is wrong with it is told to the model."""
    function = getattr(call, "function", None)
    if function is None or function.name != CALCULATOR:
        return f"error: unknown tool {getattr(function, 'name', None)!r}; there is only {CALCULATOR!r}"[:200]
    try:
        arguments = json.loads(function.arguments)
        expression = arguments["expression"] if isinstance(arguments, dict) else None
        if not isinstance(expression, str):
            return "error: arguments must be an object with the text 'expression'"
        return show(evaluate(expression))[:_RESULT_MAX_CHARACTERS]
    except CalculatorError as error:
        return f"error: {error}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "error: arguments must be JSON with the text 'expression'"
