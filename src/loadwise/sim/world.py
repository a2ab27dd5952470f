"""The virtual host: it owns clock, chance and engines, and carries out a machine's commands as the live host does.

Theory of operation. A calendar of (instant, rank, serial) is worked off. Its actions bring engines to an instant, let
agents ask, and feed events to the machine; the machine's commands are journalled and then carried out, and whatever
they cause is put on the calendar, never fed from inside (a machine is not re-entered). Agents, truth and verdicts live
here and reach the machine only as the live world would let them: as turns, usage, signals and verdicts (law L8).

Checked while it runs and at its end, of every run: a turn has one outcome (L2), dispatches go to what exists and is
open (L5), turns and tokens are conserved (L1), the machine hears nothing but the kernel's events, each at its instant
and none of the future (L8), nothing waits without end, engines balance, the number of events is bounded (L15).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol, get_args

from loadwise.kernel.commands import AskSelector, CancelAttempt, Command, Dispatch, EndTurn, SetTimer, Verify
from loadwise.kernel.errors import LawBroken
from loadwise.kernel.events import (
    AttemptEnded,
    Event,
    SelectorAnswered,
    SignalsObserved,
    TimerFired,
    TurnArrived,
    VerdictArrived,
)
from loadwise.kernel.ids import ModelId, ProgramId, TurnId
from loadwise.kernel.machine import Machine
from loadwise.kernel.pool import price_usd
from loadwise.kernel.streams import Streams
from loadwise.kernel.work import AttemptOutcome, TurnOutcome

from .agents import Agent, Agents, OpenTurn
from .backend import Attempt, AttemptOver
from .calendar import Calendar, Rank
from .draw import sample_seconds
from .engine import EngineRequest
from .fleet import Fleet
from .report import Report, Tally
from .scenario import OpenEngine, Scenario
from .scenario import open_engine as open_scenario_engine
from .truth import Truth
from .verdicts import DueVerdict, judge
from .workload import MAX_TURNS, Closed, Workload

_EVENTS = frozenset(get_args(Event))
MOST_AT_ONCE = 50_000
"""Events at one instant, and 64 more for each program that may begin at it."""


class WorldJournal(Protocol):
    """What a world needs of a journal."""

    def append(self, event: Event, commands: list[Command]) -> Any:
        """Write one handled event down, before its commands are carried out."""
        ...

    def flush(self) -> Any:
        """Everything appended is safe."""
        ...


def limit_of(said: int | None, there: int | None) -> int | None:
    """The smaller of two limits, either of which may be absent."""
    return min((n for n in (said, there) if n is not None), default=None)


class World:
    """One run of one scenario under one machine."""

    def __init__(
        self,
        scenario: Scenario,
        machine: Machine,
        seed: int,
        *,
        journal: WorldJournal | None = None,
        hold_limit_s: float = math.inf,
        is_compiled: bool = False,
        open_engine: OpenEngine | None = None,
    ) -> None:
        """
        Args:
            hold_limit_s: No turn may wait for longer without an attempt in flight; the pool's own limit.
            is_compiled: Take compiled engines where there are any; results are the same.
            open_engine: Opens a fresh engine of a backend, at the start and after a crash; one somewhere else, perhaps.
        """
        self.scenario = scenario
        self.machine = machine
        self.seed = seed
        self.hold_limit_s = hold_limit_s
        self.calendar = Calendar()
        self.tally = Tally()
        self._journal = journal
        self._streams = Streams(seed)
        self._truth = Truth(scenario.truth, self._streams)
        self._models = scenario.models
        if open_engine is None:
            open_engine = functools.partial(open_scenario_engine, is_compiled=is_compiled)
        self.fleet = Fleet(scenario, self._streams, self.calendar, self.feed, self._attempt_over, open_engine)
        terse = min(scenario.truth.output_ratio.values(), default=1.0)
        workload = Workload(scenario.workload, self._streams, scenario.most_tokens, terse)
        self.agents = Agents(
            workload,
            self._truth,
            sorted(self._models),
            limit_of(scenario.n_programs, workload.n_programs),
            self.calendar,
            self.tally,
            self.feed,
            self,
        )
        self._n_events = 0
        self._n_requests = 0
        self._timers: dict[str, object] = {}
        self._unjudged: dict[ProgramId, tuple[Agent, bool]] = {}
        self._asked: dict[ProgramId, str] = {}
        self._moved_at_s = 0.0
        self._instant_s = -1.0
        self._first_at_instant = 0
        arrivals = scenario.workload.arrivals
        n_at_once = arrivals.n_agents if isinstance(arrivals, Closed) else 0
        # Where programs are counted the run ends by itself.
        n_at_once = max(n_at_once, limit_of(scenario.n_programs, workload.n_programs) or 0)
        self._most_at_once = MOST_AT_ONCE + 64 * n_at_once
        self._do: dict[type, Callable[[Any], None]] = {
            Dispatch: self._dispatch,
            CancelAttempt: self._cancel_attempt,
            EndTurn: self._end_turn,
            SetTimer: self._set_timer,
            AskSelector: self._ask_selector,
            Verify: self._verify,
        }

    def run(self) -> Report:
        """Work the calendar off and report.

        Raises:
            LawBroken: a law does not hold, or the run needs more events than the scenario permits.
        """
        self.fleet.begin()
        self.agents.begin()
        until_s = math.inf if self.scenario.until_s is None else self.scenario.until_s
        while len(self.calendar) and self.calendar.next_at_s <= until_s and not self._is_over:
            action, is_background = self.calendar.pop()
            self._n_events += 1
            if self._n_events > self.scenario.max_events:
                raise LawBroken("L15", f"the run needs more than max_events = {self.scenario.max_events} events")
            self._check_clock()
            if not is_background:
                self._moved_at_s = self.calendar.now_s
            action()
            self._check_stall()
        if self._journal is not None:
            self._journal.flush()
        self.check()
        return self.tally.report(self.scenario.name, self.seed, self._n_events)

    def check(self) -> None:
        """Raise `LawBroken` where a law of the machine, the engines or the world does not hold."""
        self.machine.check()
        self.fleet.check()
        n_open = len(self.agents.open_turns)
        n_over = sum(self.tally.turns.values())
        if self.tally.n_turns != n_over + n_open:
            raise LawBroken("L1", f"{self.tally.n_turns} turns arrived, {n_over} are over and {n_open} open")
        for turn in self.agents.open_turns.values():
            self._check_hold(turn)
            if turn.attempt is None and not len(self.calendar):
                raise LawBroken("L9", f"turn {turn.turn_id} waits and nothing will ever happen")

    def feed(self, event: Event) -> None:
        """Tell the machine, write it down, do what it says."""
        self._check_boundary(event)
        commands = self.machine.handle(event)
        if self._journal is not None:
            self._journal.append(event, commands)
        for command in commands:
            do = self._do.get(type(command))
            if do is not None:
                do(command)

    def program_over(self, agent: Agent, is_solved: bool) -> None:
        """An agent's work is over; whoever reports about it may now do so."""
        source = self.scenario.verdicts.source
        asked = self._asked.pop(agent.program_id, None)
        if source == "agent":
            self._judge(agent, is_solved, "agent")
        elif source == "verifier" and asked is not None:
            self._judge(agent, is_solved, asked)
        elif source == "verifier":
            self._unjudged[agent.program_id] = (agent, is_solved)

    # ---- what the machine asks ----

    def _dispatch(self, command: Dispatch) -> None:
        turn = self.agents.open_turns.get(command.turn_id)
        backend = self.fleet.backends.get(command.backend_id)
        if turn is None or turn.attempt is not None:
            state = "over or unknown" if turn is None else "in flight"
            raise LawBroken("L5", f"turn {command.turn_id} is dispatched while it is {state}")
        if backend is None or backend.spec.model != command.model:
            raise LawBroken("L5", f"dispatch of {command.model!r} to {command.backend_id!r}, which does not serve it")
        now_s = self._move()
        self._check_hold(turn)
        if turn.n_tried == 0:
            self.tally.holds_s.append(now_s - turn.arrived_at_s)
        turn.n_tried += 1
        turn.agent.model = command.model
        attempt = Attempt(turn.turn_id, command.attempt, command.backend_id, command.model, self._request(turn))
        turn.attempt = attempt
        self.tally.n_attempts += 1
        self.fleet.start(attempt)

    def _request(self, turn: OpenTurn) -> EngineRequest:
        agent = turn.agent
        self._n_requests += 1
        limit_tokens = self.scenario.workload.max_output_tokens
        return EngineRequest(
            request_id=self._n_requests,
            program_id=agent.program_id,
            prompt_tokens=agent.context_tokens,
            prefix_tokens=turn.shape.prefix_tokens,
            prefix_ids=turn.shape.prefix_ids,
            shared_tokens=self.scenario.workload.shared_tokens,
            output_tokens=self._truth.output_tokens(agent.model or "", turn.shape.output_tokens, limit_tokens),
            luck=agent.shape.number * MAX_TURNS + agent.i_turn,
        )

    def _cancel_attempt(self, command: CancelAttempt) -> None:
        if self.fleet.take_back(command.turn_id, command.attempt):
            self._move()

    def _end_turn(self, command: EndTurn) -> None:
        turn = self.agents.open_turns.get(command.turn_id)
        if turn is None:
            raise LawBroken("L2", f"turn {command.turn_id} is ended while it is over or unknown")
        if command.outcome is TurnOutcome.COMPLETED:
            raise LawBroken("L2", f"turn {command.turn_id} is called completed without an answer")
        self._move()
        self._check_hold(turn)
        self.agents.turn_over(turn, command.outcome)

    def _set_timer(self, command: SetTimer) -> None:
        token = object()
        self._timers[command.timer] = token
        self.calendar.put(command.fires_at_s, Rank.TIMER, lambda: self._fire(command.timer, token), is_background=True)

    def _fire(self, timer: str, token: object) -> None:
        if self._timers.get(timer) is token:
            del self._timers[timer]
            self.feed(TimerFired(at_s=self.calendar.now_s, timer=timer))

    def _ask_selector(self, command: AskSelector) -> None:
        spec = self.scenario.selector
        if spec.answers == "nothing":
            return
        rng = self._streams.at("selector", command.decision_id)
        after_s = sample_seconds(spec.delay_s, rng)
        model = None
        if spec.answers == "uniform":
            model = ModelId(command.candidates[int(rng.integers(len(command.candidates)))])

        def answer() -> None:
            self.feed(
                SelectorAnswered(
                    at_s=self.calendar.now_s,
                    decision_id=command.decision_id,
                    model=model,
                    propensity=None if model is None else 1.0 / len(command.candidates),
                    detail="the selector failed" if model is None else "",
                )
            )

        self.calendar.put(self.calendar.now_s + after_s, Rank.SELECTOR, answer)

    def _verify(self, command: Verify) -> None:
        agent, is_solved = self._unjudged.pop(command.program_id, (None, False))
        if agent is not None:
            self._judge(agent, is_solved, command.verifier)
        elif self.scenario.verdicts.source == "verifier":
            # Asked in the very batch of commands that ends the program's last turn.
            self._asked[command.program_id] = command.verifier

    # ---- what the world does ----

    def _judge(self, agent: Agent, is_solved: bool, verifier: str) -> None:
        due = judge(self.scenario.verdicts, self._streams, agent.shape.number, is_solved, verifier)
        if not due:
            self.tally.count(self.tally.verdicts, "lost")
        for one in due:
            self._put_verdict(agent.program_id, one)

    def _put_verdict(self, program_id: ProgramId, due: DueVerdict) -> None:
        def tell() -> None:
            self.tally.count(self.tally.verdicts, due.verdict.verdict.value)
            self.feed(VerdictArrived(at_s=self.calendar.now_s, program_id=program_id, verdict=due.verdict))

        self.calendar.put(self.calendar.now_s + due.after_s, Rank.VERDICT, tell)

    def _attempt_over(self, over: AttemptOver) -> None:
        attempt, now_s = over.attempt, self.calendar.now_s
        usage = attempt.usage
        self._count_usage(attempt)
        turn = self.agents.open_turns.get(TurnId(attempt.turn_id))
        if turn is not None and turn.attempt is attempt:
            turn.attempt = None
            turn.waits_since_s = now_s
            if attempt.first_byte_at_s is not None:
                self.tally.first_tokens_s.append(attempt.first_byte_at_s - turn.arrived_at_s)
            if over.outcome is AttemptOutcome.COMPLETED:
                self.agents.turn_over(turn, TurnOutcome.COMPLETED, usage.completion_tokens)
        self.feed(
            AttemptEnded(
                at_s=now_s,
                turn_id=TurnId(attempt.turn_id),
                attempt=attempt.n,
                outcome=over.outcome,
                usage=usage,
                status=over.status,
                first_byte_at_s=attempt.first_byte_at_s,
                detail=over.detail,
                retry_after_s=over.retry_after_s,
            )
        )

    def _count_usage(self, attempt: Attempt) -> None:
        usage, tally = attempt.usage, self.tally
        price = self._models[attempt.model].usd_per_million
        tally.cost_usd += price_usd(price, usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        tally.prompt_tokens += usage.prompt_tokens
        tally.cached_tokens += usage.cached_tokens
        tally.completion_tokens += usage.completion_tokens

    # ---- is it over, is it stuck ----

    def _move(self) -> float:
        self._moved_at_s = self.calendar.now_s
        return self._moved_at_s

    @property
    def _is_over(self) -> bool:
        if self.calendar.n_foreground or self.agents.n_open or not self.agents.is_exhausted:
            return False
        waits_for_idle_end = self.scenario.workload.ends == "idle" and self._unjudged
        return not waits_for_idle_end or self._is_still

    @property
    def _is_still(self) -> bool:
        return not self.calendar.n_foreground and self.calendar.now_s - self._moved_at_s > self.scenario.stall_limit_s

    def _check_boundary(self, event: Event) -> None:
        """What a machine hears is an event that a live host could have made, now."""
        now_s = self.calendar.now_s
        if type(event) not in _EVENTS:
            raise LawBroken("L8", f"{type(event).__name__} is no event of the kernel")
        if event.at_s != now_s:
            raise LawBroken("L8", f"{type(event).__name__} of {event.at_s} s is told at {now_s} s")
        if isinstance(event, SignalsObserved) and event.observed_at_s > now_s:
            raise LawBroken("L8", f"signals observed at {event.observed_at_s} s are told at {now_s} s")
        if isinstance(event, TurnArrived) and event.max_output_tokens != self.scenario.workload.max_output_tokens:
            raise LawBroken(
                "L8", f"turn {event.turn_id} tells {event.max_output_tokens} tokens, which no client asks for"
            )

    def _check_clock(self) -> None:
        """Much may happen at one instant, but not without end: work that ends as it begins would go on for ever."""
        if self.calendar.now_s > self._instant_s:
            self._instant_s, self._first_at_instant = self.calendar.now_s, self._n_events
        n = self._n_events - self._first_at_instant
        if n > self._most_at_once:
            over = ", ".join(f"{count} {state}" for state, count in sorted(self.tally.programs.items()))
            raise LawBroken("L9", f"{n} events and the clock stands still at {self._instant_s} s; programs: {over}")

    def _check_stall(self) -> None:
        if self.agents.n_open and self._is_still:
            waiting = next(iter(self.agents.open_turns.values()), None)
            story = "no turn is open" if waiting is None else f"turn {waiting.turn_id} of {waiting.agent.program_id!r}"
            raise LawBroken("L9", f"nothing happened to open programs for {self.scenario.stall_limit_s} s: {story}")

    def _check_hold(self, turn: OpenTurn) -> None:
        held_s = 0.0 if turn.attempt is not None else self.calendar.now_s - turn.waits_since_s
        if held_s > self.hold_limit_s + 1e-6:
            raise LawBroken("L9", f"turn {turn.turn_id} was held {held_s:.3f} s; the limit is {self.hold_limit_s} s")
