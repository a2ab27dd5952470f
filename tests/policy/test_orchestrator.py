"""The language model as a chooser: prompt, parse, memory, and answers recorded before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.streams import Streams
from loadwise.policy.base import Candidate, Context, Feedback
from loadwise.policy.checks import Check, check_policy
from loadwise.policy.nearest import NearestOptions
from loadwise.policy.orchestrator import REQUEST_MAX_CHARS, Orchestrator, Recorded, make_prompt, parse_answer

POOL = [Candidate(name="large", price_usd=3.0), Candidate(name="small", price_usd=0.1)]
NAMES = [candidate.name for candidate in POOL]


def reads_its_memory(prompt: str) -> str:
    """A stand-in that takes the model with the best mean among the outcomes shown, or one not shown yet."""
    shown: dict[str, list[float]] = {}
    models = []
    for line in prompt.splitlines():
        if line.startswith("- ") and ": " in line:
            shown.setdefault(line[2 : line.index(":")], []).append(float(line.split()[2]))
        elif line.startswith("- "):
            models.append(line[2 : line.rindex(" (")])
    best = max(models, key=lambda model: sum(shown[model]) / len(shown[model]) if model in shown else 0.51)
    return f'Reasons first. {{"model": "{best}"}}'


def make() -> Orchestrator:
    return Orchestrator(reads_its_memory, lambda context: "A task.", NearestOptions(capacity=256))


@pytest.mark.parametrize("check", [pytest.param(check, id=check.name) for check in check_policy(make)])
def test_contract(check: Check) -> None:
    """With a chooser that reads what it is shown it keeps the contract of every policy, and beats chance."""
    check.run()


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ('{"model": "small"}', "small"),
        ('```json\n{"model": "small", "why": "easy"}\n```', "small"),
        ('{"model": "small"} no: {"model": "large"}', "large"),
        ('{"model": "large"} {"model": "gpt-9"}', "large"),
        ('{"think": {"model": "small"}}', "small"),
        ('{"model": ["small"]}', None),
        ('{"model": "Small"}', None),
        ('{"model": small}', None),
        ("small", None),
        ("{" * 50, None),
        ("", None),
        ('{"model": "small"}' + "." * 5000, None),
        ("{" * 100_000 + '"model": "large"}', "large"),
    ],
)
def test_an_answer_names_a_model_or_none(answer: str, named: str | None) -> None:
    """The last JSON object that names a permitted model counts; nothing is guessed."""
    assert parse_answer(answer, NAMES) == named


@given(st.text(alphabet='{}":, modelsagr\\', max_size=60))
def test_no_answer_breaks_the_parser(answer: str) -> None:
    """Whatever a model writes, the result is a permitted model or none."""
    assert parse_answer(answer, NAMES) in (*NAMES, None)


def test_where_the_answer_names_none_the_cheapest_is_taken() -> None:
    """A model that rambles costs nothing extra."""
    policy = Orchestrator(lambda prompt: "It depends.", lambda context: "A task.")
    choice = policy.choose(Context(decision_id=1, x=np.ones(2)), POOL, Streams(0).at("t", 0))
    assert (POOL[choice.chosen].name, choice.propensities) == ("small", (0.0, 1.0))


def test_the_prompt_shows_prices_neighbours_and_the_task() -> None:
    """Cheap models first, the nearest outcomes first, of permitted models only, and no endless request."""
    prompts: list[str] = []

    def ask(prompt: str) -> str:
        prompts.append(prompt)
        return ""

    policy = Orchestrator(ask, lambda context: "x" * (REQUEST_MAX_CHARS + 500), NearestOptions(n_neighbours=2))
    for name, x, reward in (
        ("large", [1.0, 0.0], 1.0),
        ("gone", [1.0, 0.1], 1.0),
        ("small", [1.0, 0.5], 0.25),
        ("small", [-1.0, 0.0], 1.0),
    ):
        policy.learn(Feedback(decision_id=1, candidate=name, x=np.array(x), reward=reward))
    policy.choose(Context(decision_id=2, x=np.array([1.0, 0.1])), POOL, Streams(0).at("t", 0))
    lines = prompts[0].splitlines()
    at = lines.index("Models, from cheap to dear:")
    assert lines[at + 1 : at + 3] == ["- small (0.1)", "- large (3)"]
    at = lines.index("Earlier outcomes on similar tasks:")
    assert lines[at + 1 : at + 4] == ["- large: 1.00 (similarity 1.00)", "- small: 0.25 (similarity 0.93)", ""]
    assert lines[-1] == "x" * REQUEST_MAX_CHARS


def test_recorded_answers_are_found_by_their_prompt() -> None:
    """The same prompt gets the same answer; one that was never asked is an error, not a guess."""
    prompt = make_prompt("Sort.", POOL, ())
    policy = Orchestrator(Recorded({Recorded.key(prompt): '{"model": "large"}'}), lambda context: "Sort.")
    context = Context(decision_id=1, x=np.ones(1))
    assert POOL[policy.choose(context, POOL, Streams(0).at("t", 0)).chosen].name == "large"
    with pytest.raises(ConfigError, match="no answer is recorded"):
        Recorded({})(prompt)
