"""A user's policy class that fails whenever it can, in every way, and always the same way."""

import math

from loadwise.policy.base import Choice
from loadwise.policy.fixed import Random


class Moody(Random):
    """By the number of its decision it chooses, raises, or answers one kind of nonsense."""

    name = "moody"

    def __init__(self, mood=0):
        self.mood = mood
        self.n_seen = 0

    def _fail(self, number):
        self.n_seen += 1  # a failure that leaves traces behind
        if (number + self.mood) % 3 == 0:
            raise (RuntimeError, KeyError, ZeroDivisionError)[number % 3](f"mood {number}")

    def choose(self, context, candidates, rng):
        context.x[:] = math.nan  # what it was given is its own
        n = len(candidates)
        choices = [
            lambda: super(Moody, self).choose(context, candidates, rng),
            lambda: Choice(chosen=n),
            lambda: Choice(chosen=-1, propensities=(1.0,) * n),
            lambda: Choice(chosen=0, propensities=(math.nan,) * n),
            lambda: Choice(chosen=0, propensities=(1.0,) * (n + 1)),
            lambda: Choice(chosen=0, scores=(math.inf,) * n),
            lambda: Choice(chosen="0"),
            lambda: None,
            lambda: Choice(chosen=0),
            lambda: 1 / 0,
        ]
        return choices[(context.decision_id + self.mood) % len(choices)]()

    def propensities(self, choice, rng):
        return [(math.nan,), (0.0, 1.0), "?", None][self.mood % 4]

    def observe(self, decision_id, candidate, x):
        x[:] = math.inf
        self._fail(decision_id)

    def learn(self, feedback):
        self._fail(feedback.decision_id)

    def undo(self, decision_id, candidate, x):
        self._fail(decision_id)

    def dump(self):
        return b"%d" % self.n_seen

    def load(self, state):
        self.n_seen = int(state)


class Mute(Moody):
    """One that cannot even say what it knows."""

    name = "mute"

    def dump(self):
        raise OSError("no words")


CLASS_BY_PATH = {"users:Moody": Moody, "users:Mute": Mute}
