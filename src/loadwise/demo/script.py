"""What the emulated models say: right or plausibly wrong, as the success table has it.

Theory of operation. A request names its model, and its first known user message names the task (prompts are
unique). Whether the model solves the task is drawn under (seed, task id, model) and nothing else, so a task
meets the same luck in every row of the comparison, under every policy and in any order. The turn's index is
the number of assistant messages after it, hence the whole conversation is a pure function of the requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import date, timedelta
from fractions import Fraction
from typing import Any

import msgspec

from loadwise.demo.calculator import CalculatorError, evaluate, show
from loadwise.demo.grade import grade
from loadwise.demo.luck import Luck
from loadwise.demo.table import EmulatedModel, SuccessTable
from loadwise.demo.task import Task
from loadwise.emulator.script import Reply, Script, ToolCall
from loadwise.kernel.errors import ConfigError

CALCULATOR = "calculator"
"""Name of the tool that scripts call and the agent offers."""
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_WRONG_DRAWS_MAX = 50
_SHRUG = Reply(text="I only know the problems of the demo.\nAnswer: unknown", output_tokens=12)


def solves(task: Task, model: str, table: SuccessTable, seed: int) -> bool:
    """Draw whether a model solves a task: by seed, task id and model only."""
    probability = table.models[model].success[task.family][task.difficulty - 1]
    return Luck(seed, "solves", task.task_id, model).unit() < probability


def reply(task: Task, model: str, table: SuccessTable, seed: int, turn_index: int, *, offers_tool: bool) -> Reply:
    """Say what an emulated model says in one turn of a task.

    With the tool on offer the model takes one calculator step a turn and then answers; a turn beyond the last
    repeats the answer. A failing model errs in its last step or in reading the result.
    """
    luck = Luck(seed, "words", task.task_id, model)
    wrong = None if solves(task, model, table, seed) else wrong_answer(task, luck)
    steps = _steps(task, wrong, luck) if offers_tool and task.uses_tool else ()
    n_turns = len(steps) + 1
    tokens = _turn_tokens(table.models[model], task, luck, n_turns)
    if turn_index < len(steps):
        call = ToolCall(
            call_id=f"call_{turn_index}",
            name=CALCULATOR,
            arguments=msgspec.json.encode({"expression": steps[turn_index]}).decode(),
        )
        return Reply(text="", tool_calls=(call,), output_tokens=tokens)
    lead = luck.pick(("Working it out step by step.", "Let me see.", "This takes a short calculation."))
    return Reply(text=f"{lead}\nAnswer: {wrong or right_answer(task)}", output_tokens=tokens)


def right_answer(task: Task) -> str:
    """Write the task's answer as its prompt asks: rounded where a tolerance allows it, with its unit."""
    if task.kind != "number":
        return task.answer
    value = Fraction(task.answer)
    number = show(Fraction(round(value * 100), 100)) if task.tolerance else show(value)
    return f"{number} {task.units[0]}" if task.units else number


def wrong_answer(task: Task, luck: Luck) -> str:
    """Write a plausible answer that the grader refuses."""
    for _ in range(_WRONG_DRAWS_MAX):
        answer = _slip(task, luck)
        if grade(task, f"Answer: {answer}").verdict == "fail":
            return answer
    return "unknown"


def scripted(tasks: Iterable[Task], table: SuccessTable, seed: int, model: str | None = None) -> Script:
    """Build the script of an emulated pool.

    Args:
        tasks: the stream that may be asked about; anything else gets a shrug that no grader passes.
        table: the success table.
        seed: the seed of the luck.
        model: answer as this model whatever the request says (an engine that serves one model under another
            name).

    Raises:
        ConfigError: `model` is not in the table.
    """
    if model is not None and model not in table.models:
        raise ConfigError(f"model {model!r} is not in the success table: it has {', '.join(table.models)}")
    task_by_prompt = {task.prompt.strip(): task for task in tasks}

    def script(body: Mapping[str, Any]) -> Reply:
        speaker = model if model is not None else body.get("model")
        messages = body.get("messages")
        if not isinstance(messages, list):
            return _SHRUG
        task, place = _task_of(messages, task_by_prompt)
        if task is None or not isinstance(speaker, str) or speaker not in table.models:
            return _SHRUG
        since = messages[place:]
        turn_index = sum(isinstance(m, Mapping) and m.get("role") == "assistant" for m in since)
        return reply(task, speaker, table, seed, turn_index, offers_tool=_offers_calculator(body))

    return script


def _task_of(messages: list[Any], task_by_prompt: Mapping[str, Task]) -> tuple[Task | None, int]:
    """Find the first known prompt and the place of its message."""
    for place, message in enumerate(messages):
        if isinstance(message, Mapping) and message.get("role") == "user":
            task = task_by_prompt.get(_text_of(message.get("content")).strip())
            if task is not None:
                return task, place
    return None, len(messages)


def _text_of(content: object) -> str:
    """Read a message's text, which the API allows as a string or as a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = (part.get("text") for part in content if isinstance(part, Mapping))
    return "".join(text for text in parts if isinstance(text, str))


def _offers_calculator(body: Mapping[str, Any]) -> bool:
    tools = body.get("tools")
    if not isinstance(tools, list) or body.get("tool_choice") == "none":
        return False
    functions = (tool.get("function") for tool in tools if isinstance(tool, Mapping))
    return any(isinstance(f, Mapping) and f.get("name") == CALCULATOR for f in functions)


def _turn_tokens(model: EmulatedModel, task: Task, luck: Luck, n_turns: int) -> int:
    """Split the program's tokens over its turns; a program varies by ±40 % around its model's mean."""
    whole = model.output_tokens[task.family] * (0.6 + 0.8 * luck.unit())
    return max(1, round(whole / n_turns))


def _steps(task: Task, wrong: str | None, luck: Luck) -> tuple[str, ...]:
    """List the expressions a model sends to the calculator; one that fails may mistype the last."""
    if wrong is None or luck.unit() < 0.5:
        return task.steps
    return (*task.steps[:-1], _mistyped(task.steps[-1], luck))


def _mistyped(expression: str, luck: Luck) -> str:
    """Change one digit of an expression, if it stays one that the calculator accepts."""
    places = [match.start() for match in re.finditer(r"[0-9]", expression)]
    at = luck.pick(places)
    digit = str((int(expression[at]) + luck.integer(1, 8)) % 10)
    changed = expression[:at] + digit + expression[at + 1 :]
    try:
        evaluate(changed)
    except CalculatorError:
        return expression
    return changed


def _slip(task: Task, luck: Luck) -> str:
    if task.kind == "date":
        return (date.fromisoformat(task.answer) + timedelta(days=luck.pick((-7, -3, -2, -1, 1, 2, 3, 7)))).isoformat()
    if task.kind == "text":
        return _text_slip(task.answer, luck)
    value = Fraction(right_answer(task).split()[0])
    near = (value + luck.integer(-9, 9), value * 10, value / 10, value + 10, value * Fraction(11, 10), -value)
    number = show(Fraction(round(luck.pick(near) * 100), 100))
    return f"{number} {task.units[0]}" if task.units else number


def _text_slip(answer: str, luck: Luck) -> str:
    if answer in _WEEKDAYS:
        return luck.pick(_WEEKDAYS)
    if len(answer) == 1:
        return luck.pick("abcdefghijklmnopqrstuvwxyz")
    at = luck.integer(0, len(answer) - 2)
    swapped = answer[:at] + answer[at + 1] + answer[at] + answer[at + 2 :]
    return luck.pick((swapped, answer[:at] + answer[at + 1 :], answer[::-1]))
