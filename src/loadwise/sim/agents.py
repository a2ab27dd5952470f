"""Agents of the virtual world: each runs one program, turn by turn, and tells its end."""

from collections.abc import Callable
from typing import Protocol

from loadwise.kernel.events import Event, ProgramEnded, TurnAbandoned, TurnArrived
from loadwise.kernel.ids import ProgramId, TurnId
from loadwise.kernel.work import EndReason, TurnOutcome

from .backend import Attempt
from .calendar import Calendar, Rank
from .report import Tally
from .truth import Truth
from .workload import Closed, ProgramShape, TurnShape, Workload

_STATE_BY_OUTCOME = {
    TurnOutcome.COMPLETED: "finished",
    TurnOutcome.FAILED: "failed",
    TurnOutcome.REJECTED: "rejected",
    TurnOutcome.EVICTED: "evicted",
    TurnOutcome.CANCELLED: "cancelled",
}
_REASON_BY_OUTCOME = {TurnOutcome.COMPLETED: EndReason.FINISH, TurnOutcome.CANCELLED: EndReason.CANCELLED}


class OpenTurn:
    """A turn that its client still waits for."""

    __slots__ = ("agent", "arrived_at_s", "attempt", "n_tried", "shape", "turn_id", "waits_since_s")

    def __init__(self, agent: "Agent", turn_id: TurnId, shape: TurnShape, now_s: float) -> None:
        self.agent = agent
        self.turn_id = turn_id
        self.shape = shape
        self.arrived_at_s = now_s
        self.attempt: Attempt | None = None
        """The one in flight."""
        self.n_tried = 0
        self.waits_since_s = now_s
        """Since when no attempt has been in flight."""


class Agent:
    """One program under way."""

    __slots__ = ("arrived_at_s", "context_tokens", "i_turn", "model", "n_turns", "program_id", "shape")

    def __init__(self, shape: ProgramShape, now_s: float) -> None:
        self.shape = shape
        self.program_id = ProgramId(f"p{shape.number:07d}")
        self.arrived_at_s = now_s
        self.i_turn = 0
        self.context_tokens = 0
        self.model: str | None = None
        """The model that ran last."""
        self.n_turns = len(shape.turns)
        """On that model."""

    @property
    def is_at_last_turn(self) -> bool:
        return self.i_turn + 1 >= self.n_turns

    @property
    def turn(self) -> TurnShape:
        """The turn at hand; beyond the workload's turns they come again, the first one aside."""
        turns = self.shape.turns
        return turns[self.i_turn] if self.i_turn < len(turns) else turns[1 + (self.i_turn - 1) % (len(turns) - 1)]


class Judge(Protocol):
    """Who reports about an ended program."""

    def program_over(self, agent: Agent, is_solved: bool) -> None:
        """The agent's work is over."""
        ...


class Agents:
    """Starts programs, asks turns, and ends them. Speaks to the machine only through `feed`."""

    def __init__(
        self,
        workload: Workload,
        truth: Truth,
        models: list[str],
        n_programs: int | None,
        calendar: Calendar,
        tally: Tally,
        feed: Callable[[Event], None],
        judge: Judge,
    ) -> None:
        self.workload = workload
        self.open_turns: dict[TurnId, OpenTurn] = {}
        self._truth = truth
        self._models = models
        self._n_programs = n_programs
        self._calendar = calendar
        self._tally = tally
        self._feed = feed
        self._judge = judge
        self._n_started = 0
        self._n_scheduled = 0
        self._n_turns = 0
        self.n_open = 0

    def begin(self) -> None:
        """Put the first arrivals on the calendar."""
        arrivals = self.workload.spec.arrivals
        if not isinstance(arrivals, Closed):
            self._schedule_open()
        else:
            for _ in range(arrivals.n_agents):
                self._schedule_closed(is_first=True)

    @property
    def is_exhausted(self) -> bool:
        """Whether no program will arrive any more, as far as the calendar is concerned."""
        return self._n_programs is not None and self._n_started >= self._n_programs

    def turn_over(self, turn: OpenTurn, outcome: TurnOutcome, output_tokens: int = 0) -> None:
        """A client has its answer, or has learned that there is none."""
        del self.open_turns[turn.turn_id]
        self._tally.count(self._tally.turns, outcome.value)
        agent = turn.agent
        if outcome is not TurnOutcome.COMPLETED:
            self._end(agent, outcome)
            return
        agent.context_tokens += output_tokens
        if agent.model is not None:
            agent.n_turns = self._truth.n_turns(agent.model, agent.shape)
        if agent.is_at_last_turn or self._is_too_long(agent):
            self._end(agent, outcome)
            return
        agent.i_turn += 1
        gap_s = agent.turn.gap_s
        self._calendar.put(self._calendar.now_s + gap_s, Rank.AGENT, lambda: self._ask(agent))

    def _is_too_long(self, agent: Agent) -> bool:
        """Whether repeated turns have brought the context to its limit."""
        is_beyond = agent.i_turn + 1 >= len(agent.shape.turns)
        return is_beyond and agent.context_tokens >= self.workload.spec.context_limit_tokens

    def _schedule_open(self) -> None:
        if self._n_programs is None or self._n_scheduled < self._n_programs:
            self._n_scheduled += 1
            after_s = self.workload.until_next_s(self._n_scheduled)
            self._calendar.put(self._calendar.now_s + after_s, Rank.AGENT, self._arrive_open)

    def _arrive_open(self) -> None:
        self._schedule_open()
        self._start()

    def _schedule_closed(self, *, is_first: bool) -> None:
        if self._n_programs is None or self._n_scheduled < self._n_programs:
            self._n_scheduled += 1
            after_s = self.workload.think_s(self._n_scheduled, is_first)
            self._calendar.put(self._calendar.now_s + after_s, Rank.AGENT, self._start)

    def _start(self) -> None:
        self._n_started += 1
        self.n_open += 1
        self._tally.n_programs += 1
        self._ask(Agent(self.workload.shape(self._n_started), self._calendar.now_s))

    def _ask(self, agent: Agent) -> None:
        now_s, spec = self._calendar.now_s, self.workload.spec
        shape = agent.turn
        agent.context_tokens += shape.growth_tokens
        self._n_turns += 1
        self._tally.n_turns += 1
        turn = OpenTurn(agent, TurnId(self._n_turns), shape, now_s)
        self.open_turns[turn.turn_id] = turn
        if agent.shape.patience_s is not None:
            leave_at_s = now_s + agent.shape.patience_s
            self._calendar.put(leave_at_s, Rank.AGENT, lambda: self._lose_patience(turn), is_background=True)
        self._feed(
            TurnArrived(
                at_s=now_s,
                turn_id=turn.turn_id,
                program_id=agent.program_id,
                prompt_tokens=agent.context_tokens,
                max_output_tokens=spec.max_output_tokens,
                is_final=spec.ends == "final" and agent.is_at_last_turn,
                task_type=agent.shape.task_type,
                domain=agent.shape.domain,
                budget_s=spec.budget_s if agent.i_turn == 0 else None,
            )
        )

    def _lose_patience(self, turn: OpenTurn) -> None:
        if turn.turn_id not in self.open_turns:
            return
        if turn.attempt is not None and turn.attempt.first_byte_at_s is not None:
            return
        self._feed(TurnAbandoned(at_s=self._calendar.now_s, turn_id=turn.turn_id))
        if turn.turn_id in self.open_turns:
            self.turn_over(turn, TurnOutcome.CANCELLED)

    def _end(self, agent: Agent, outcome: TurnOutcome) -> None:
        self.n_open -= 1
        is_finished = outcome is TurnOutcome.COMPLETED
        is_solved = is_finished and agent.model is not None and self._truth.is_solved(agent.model, agent.shape)
        self._count(agent, outcome, is_solved)
        ends = self.workload.spec.ends
        if ends == "finish" or (ends == "final" and not is_finished):
            self._calendar.put(self._calendar.now_s, Rank.AGENT, lambda: self._say_end(agent, outcome))
        self._judge.program_over(agent, is_solved)
        if isinstance(self.workload.spec.arrivals, Closed):
            self._schedule_closed(is_first=False)

    def _say_end(self, agent: Agent, outcome: TurnOutcome) -> None:
        reason = _REASON_BY_OUTCOME.get(outcome, EndReason.FAILED)
        self._feed(ProgramEnded(at_s=self._calendar.now_s, program_id=agent.program_id, reason=reason))

    def _count(self, agent: Agent, outcome: TurnOutcome, is_solved: bool) -> None:
        tally, now_s = self._tally, self._calendar.now_s
        tally.count(tally.programs, _STATE_BY_OUTCOME[outcome])
        tally.last_end_at_s = now_s
        tally.n_solved += is_solved
        if outcome is TurnOutcome.COMPLETED:
            tally.programs_s.append(now_s - agent.arrived_at_s)
        if agent.model is not None:
            tally.count(tally.n_by_model, agent.model)
        best = max(self._truth.success_probability(model, agent.shape) for model in self._models)
        ran = 0.0 if agent.model is None else self._truth.success_probability(agent.model, agent.shape)
        tally.regret += best - ran
