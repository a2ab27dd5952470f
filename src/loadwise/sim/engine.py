"""What an engine is to its host: work in, tokens out, and no clock of its own.

Theory of operation. An engine is a state machine over instants that its driver names. `step(now_s)` does all that was
due up to `now_s`, begins what comes next, and says in how many seconds it will next have something to say. The
virtual host (`sim.world`) wakes it at exactly that instant; the emulator sleeps for that long in (scaled) real time.
One rule binds every driver: bring the engine to the present with `step(now_s)` before `submit`, `cancel` or
`set_speed`, and call `step(now_s)` again after it, because the engine's own plan may have become shorter. A driver may
also call early at any time (to stream tokens more finely); the engine then says how much is done, and nothing about
the outcome changes.
"""

import math
from typing import Protocol

import msgspec

from loadwise.kernel.errors import CallerError

MAX_WAITING_DEFAULT = 10_000
PREFIX_ID_TOKENS = 512
"""Tokens of a block that a trace names, as in Mooncake's."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One model call as the engine sees it; the true output length is known to the engine alone."""

    request_id: int
    program_id: str
    """Whose prefix cache it may use."""
    prompt_tokens: int
    output_tokens: int
    """How many tokens the model will say, >= 1."""
    prefix_tokens: int | None = None
    """Leading prompt tokens that repeat the program's last context; None where the whole of it is repeated."""
    prefix_ids: tuple[int, ...] = ()
    """Names of the prompt's blocks of `PREFIX_ID_TOKENS`, each for everything up to its end (a trace's hashes); they
    replace what the program is known to have said."""
    line: tuple[tuple[int, int], ...] = ()
    """Where the prompt's tokens come from: (first token, origin) of each run, rising, the answer belonging to the last.
    Two prompts are equal up to a token exactly if their runs are; given, it replaces all other hints."""
    shared_tokens: int = 0
    """Leading prompt tokens that every request of the same `shared_key` begins with: a common system prompt."""
    shared_key: str = ""
    priority: int = 0
    """Lower is served first, by engines that schedule by priority."""
    luck: int = 0
    """Index of this request's randomness, so that equal work meets equal chance under every policy."""


class Output(msgspec.Struct, frozen=True, gc=False):
    """What one request received in a step."""

    request_id: int
    n_new_tokens: int
    is_first: bool = False
    """Its first token is among them."""
    is_finished: bool = False
    cached_tokens: int = 0
    """Part of its prompt that was found in the prefix cache."""


class Step(msgspec.Struct, frozen=True, gc=False):
    """What an engine says when it is brought to an instant."""

    seconds: float
    """Time until it next has something to say, if left alone; 0 when it is idle."""
    outputs: tuple[Output, ...] = ()


def wake_at_s(now_s: float, seconds: float) -> float:
    """When to call an engine again that has something to say in so many seconds: later than now, if only by a bit.

    Late in a long run a short step, or what rounding left of one, is less than the clock's last bit.

    >>> wake_at_s(1.0, 0.5), wake_at_s(2e6, 1e-12) > 2e6
    (1.5, True)
    """
    return max(now_s + seconds, math.nextafter(now_s, math.inf))


class ContextTooLong(CallerError):
    """The request can never fit this engine."""

    code = "context_length_exceeded"


class Engine(Protocol):
    """A serving engine in somebody else's time."""

    def submit(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            ContextTooLong: it can never fit, whatever else runs.
            Overloaded: the queue is at its limit.
        """
        ...

    def cancel(self, request_id: int) -> bool:
        """Forget a request and free what it holds, at once. False where it is unknown or already finished."""
        ...

    def set_speed(self, ratio: float) -> None:
        """1 is healthy; 0.25 makes every step (or service) that begins from now on four times as long."""
        ...

    def step(self, now_s: float) -> Step:
        """Do what was due up to `now_s` (never falling), and begin what comes next."""
        ...

    def signals(self, now_s: float) -> dict[str, float]:
        """The readings that a live engine exports, under vLLM's names without prefix; counters are totals."""
        ...

    def check(self) -> None:
        """Raise `LawBroken` where the engine's books do not balance."""
        ...
