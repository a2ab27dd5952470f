"""A language model chooses the model: the prompt, the memory behind it, and what is made of the answer.

This room may not call anything, so whoever builds the policy hands it `ask`, which sends a prompt somewhere and returns
the answer, and `describe`, which says what a context's program asked for. `Recorded` gives answers that were given
before, for tests and for replays that cost nothing twice.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.kernel.streams import Generator

from .base import Candidate, Choice, Context
from .nearest import Nearest, NearestOptions
from .picking import best_index, certain

REQUEST_MAX_CHARS = 4000
"""Of a program's first request, what the prompt shows."""
ANSWER_MAX_CHARS = 4000
"""Of an answer, what is read: its end, where the decision stands."""

Ask = Callable[[str], str]


class Neighbour(Fact, frozen=True, kw_only=True):
    """A past outcome that the prompt shows."""

    model: str
    reward: float
    similarity_ratio: float


def make_prompt(
    request: str,
    candidates: Sequence[Candidate],
    neighbours: Sequence[Neighbour],
    points_per_usd: float | None = None,
    complexity: str | None = None,
) -> str:
    """What the orchestrator is asked.

    Args:
        points_per_usd: what a dollar takes from a run's success in [0, 1], said where it is given.
        complexity: how hard a rule finds the request, said where it is given.

    >>> print(make_prompt("Sort a list.", [Candidate(name="small", price_usd=0.1)], ()))
    Choose the model that should do a task. Answer with one JSON object: {"model": NAME}.
    <BLANKLINE>
    Models, from cheap to dear:
    - small (0.1)
    <BLANKLINE>
    Earlier outcomes on similar tasks:
    none
    <BLANKLINE>
    Task:
    Sort a list.
    """
    by_price = sorted(candidates, key=lambda candidate: (candidate.price_usd, candidate.name))
    models = [f"- {candidate.name} ({candidate.price_usd:.4g})" for candidate in by_price]
    earlier = [f"- {one.model}: {one.reward:.2f} (similarity {one.similarity_ratio:.2f})" for one in neighbours]
    told = []
    if points_per_usd is not None:
        told.append(f"A run is worth its success, 0 to 1, minus {points_per_usd:g} for every dollar it costs.")
    if complexity is not None:
        told.append(f"The task looks {complexity}.")
    return "\n".join(
        (
            'Choose the model that should do a task. Answer with one JSON object: {"model": NAME}.',
            *told,
            "",
            "Models, from cheap to dear:",
            *models,
            "",
            "Earlier outcomes on similar tasks:",
            *(earlier or ["none"]),
            "",
            "Task:",
            request[:REQUEST_MAX_CHARS],
        )
    )


def parse_answer(answer: str, names: Sequence[str]) -> str | None:
    """The model that an answer names: in its last JSON object that names one of `names`; None where none does.

    >>> parse_answer('I think {"model": "nope"} or rather ```{"model": "small"}```', ["small", "large"])
    'small'
    >>> parse_answer("small, of course", ["small", "large"])
    """
    answer = answer[-ANSWER_MAX_CHARS:]
    found = None
    at = answer.find("{")
    while at >= 0:
        end = answer.find("}", at)
        if end < 0:
            break
        try:
            said = msgspec.json.decode(answer[at : end + 1])
        except (msgspec.DecodeError, UnicodeError):
            said = None
        if isinstance(said, dict) and said.get("model") in names:
            found = str(said["model"])
        at = answer.find("{", at + 1)
    return found


class Recorded:
    """Answers that were given before, by the SHA-256 of their prompt.

    >>> Recorded({Recorded.key("prompt"): "answer"})("prompt")
    'answer'

    Raises:
        ConfigError: from a call with a prompt that was never answered.
    """

    def __init__(self, answer_by_key: Mapping[str, str]) -> None:
        self._answer_by_key = dict(answer_by_key)

    @staticmethod
    def key(prompt: str) -> str:
        """What an answer is kept under: a prompt holds a user's words, its hash does not."""
        return hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()

    def __call__(self, prompt: str) -> str:
        answer = self._answer_by_key.get(self.key(prompt))
        if answer is None:
            raise ConfigError(f"no answer is recorded for prompt {self.key(prompt)[:12]!r} ({len(prompt)} characters)")
        return answer


class Orchestrator(Nearest):
    """Asks a language model, showing it the nearest past outcomes of any candidate.

        a = the candidate that the answer names; where it names none, the cheapest

    The memory is that of `Nearest`: at most `n_neighbours` outcomes with cosine >= `similarity_min`, the nearest first.

    Reads:
        price_usd.

    Assumes:
        `ask` gives the same answer to the same prompt (temperature zero): the choice is reported as certain.

    References:
        ACRouter (Zhou et al., arXiv:2606.22902); as ORACLE runs it, appendix E.6. The words of the prompt are ours.

    >>> import numpy as np
    >>> pool = [Candidate(name="small", price_usd=0.1), Candidate(name="large", price_usd=3.0)]
    >>> policy = Orchestrator(lambda prompt: '{"model": "large"}', lambda context: "Prove it.")
    >>> policy.choose(Context(decision_id=1, x=np.ones(2)), pool, np.random.default_rng(0)).chosen
    1
    """

    name = "orchestrator"

    def __init__(
        self,
        ask: Ask,
        describe: Callable[[Context], str],
        options: NearestOptions = NearestOptions(),  # noqa: B008 - frozen
        points_per_usd: float | None = None,
        judge_complexity: Callable[[str], str] | None = None,
    ) -> None:
        super().__init__(options)
        self.is_deterministic = True
        self._ask, self._describe = ask, describe
        self._points_per_usd, self._judge_complexity = points_per_usd, judge_complexity

    def choose(self, context: Context, candidates: Sequence[Candidate], rng: Generator) -> Choice:
        """The candidate that the answer names."""
        request = self._describe(context)
        complexity = None if self._judge_complexity is None else self._judge_complexity(request)
        neighbours = self.neighbours(context.x, candidates)
        prompt = make_prompt(request, candidates, neighbours, self._points_per_usd, complexity)
        named = parse_answer(self._ask(prompt), [candidate.name for candidate in candidates])
        chosen = best_index([1.0 if candidate.name == named else 0.0 for candidate in candidates], candidates)
        return Choice(chosen=chosen, propensities=certain(chosen, len(candidates)))

    def neighbours(self, x: Any, candidates: Sequence[Candidate]) -> list[Neighbour]:
        """The nearest past outcomes of candidates that are permitted now."""
        unit = self._unit(x)
        names = tuple(self._row_by_name)
        permitted = {candidate.name for candidate in candidates}
        found: list[Neighbour] = []
        for place in self._nearest(unit).tolist():
            model = names[self._owners[place]]
            if model in permitted and len(found) < self._options.n_neighbours:
                ratio = round(float(self._units[place] @ unit), 9)
                found.append(Neighbour(model=model, reward=float(self._rewards[place]), similarity_ratio=ratio))
        return found
