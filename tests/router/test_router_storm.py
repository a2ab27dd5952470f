"""Random pools, random configurations, random events: the laws hold after each, and a dump continues identically.

`LOADWISE_STORM_EXAMPLES=2000` looks harder; the default keeps the suite quick and repeatable.
"""

import math
import os

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from router_host import MODELS, Host, encoded, make_stack

from loadwise.kernel import events as e
from loadwise.kernel.ids import BackendId
from loadwise.kernel.pool import BackendHealth, BackendSpec, ModelSpec, Price
from loadwise.kernel.work import AttemptOutcome, EndReason, Usage, Verdict, VerdictKind
from loadwise.policy.context import ContextSpec
from loadwise.policy.registry import PolicySpec
from loadwise.router.config import (
    AdmissionConfig,
    DivertConfig,
    EscalationConfig,
    FeedbackConfig,
    OrderConfig,
    PauseConfig,
    SelectorConfig,
)

N_EXAMPLES = int(os.environ.get("LOADWISE_STORM_EXAMPLES", "60"))

POLICIES = [
    PolicySpec(name="linucb"),
    PolicySpec(name="linucb", options={"exploration_floor": 0.3, "gram": "gram_all_mean"}),
    PolicySpec(name="lints"),
    PolicySpec(name="round_robin"),
    PolicySpec(name="power_of_two"),
    PolicySpec(name="mixing", options={"weights": {"small": 0.5, "large": 0.5}}),
    PolicySpec(name="drift", options={"alarm": 0.5, "discount": 0.9}),
    PolicySpec(name="users:Moody"),
    PolicySpec(name="users:Moody", options={"mood": 7}),
]
CAPACITIES = [
    {"kv_tokens": 2000},
    {"kv_tokens": 900},
    {"kv_tokens": 100_000},
    {"slots": 1},
    {"slots": 2},
    {"requests_per_minute": 1},
    {"requests_per_minute": 3},
    {"kv_tokens": 2000, "kv_pool": "gpu"},
    {"kv_tokens": 5000, "kv_pool": "gpu"},
    {},
]
ADMISSIONS = [
    AdmissionConfig(),
    AdmissionConfig(call_ratio=0.95, overhead_tokens=50, learns_overhead=True, shares_prompts=True),
    AdmissionConfig(kind="footprint", footprint_ratio=0.75, call_ratio=0.95, capacity="calibrated"),
    AdmissionConfig(kind="footprint", reserves=True),
    AdmissionConfig(kind="cap", programs_max=2, programs_max_by_model={"small": 1}),
    AdmissionConfig(kind="pause", pause=PauseConfig(tick_s=1.0, wait_max_s=100.0)),
    AdmissionConfig(kind="none"),
]
DIVERTS = [
    DivertConfig(),
    DivertConfig(),
    DivertConfig(when="arrival"),
    DivertConfig(when="held", saturation="none", forecast="elapsed", rebinds=True),
    DivertConfig(when="held", saturation="soft", prices_run=True),
]
ORDERS = [OrderConfig(), OrderConfig(kind="fair", age_s=20.0, weights={"t1": 3.0})]
ARMS = ["delayed", "delayed", "delayed", "sequential", "batch_sync", "per_slot"]
PROGRAMS = ["p0", "p1", "p2", "p3", "p4"]
ODD_PROGRAMS = ["", "\x1fturn:1", "x" * 257, "with space", "ü"]
BACKENDS = ["b0", "b1", "b2", "b3"]
SIGNALS = ["n_running", "n_waiting", "kv_usage_ratio", "kv_tokens", "n_preemptions", "e2e_s"]
STEPS_S = [0.0, 0.0, 0.001, 0.5, 1.0, 5.0, 30.0, 61.0, 200.0, 4000.0]
ODD_FLOATS = [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e308]

specs = st.builds(
    lambda name, model, capacity: BackendSpec(name=name, model=model, **capacity),
    st.sampled_from(BACKENDS),
    st.sampled_from(list(MODELS)),
    st.sampled_from(CAPACITIES),
)
usages = st.builds(
    Usage,
    prompt_tokens=st.sampled_from([0, 10, 300, 5000, -7, 2**62]),
    completion_tokens=st.sampled_from([0, 10, 900, -7]),
    cached_tokens=st.sampled_from([0, 10, 10_000, -7]),
    is_exact=st.booleans(),
)


@st.composite
def configurations(draw):
    """A configuration with limits small enough to be met."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    return {
        "policy": pick(*POLICIES),
        "replica_policy": PolicySpec(name=pick("resident", "round_robin", "power_of_two", "random", "users:Moody")),
        "context": ContextSpec(task_types=("patch",), n_components=2),
        "feedback": FeedbackConfig(arm=pick(*ARMS), size=pick(1, 2, 3)),
        "selector": pick(None, None, None, None, SelectorConfig(url="http://selector", timeout_s=2.0)),
        "escalation": pick(
            None,
            EscalationConfig(),
            EscalationConfig(attempts_max=3, false_pass=0.0, false_fail=0.0, optimism=9.0),
            EscalationConfig(attempts_max=8, optimism=9.0, turns_max=2, failed_turns_max=1, stall_s=50.0),
            EscalationConfig(cost_max_usd=1e-4, optimism=9.0),
        ),
        "expected_tokens": pick(100, 800),
        "hold_max_s": pick(60.0, 300.0, 1.0),
        "held_max": pick(100, 100, 2, 1),
        "attempts_max": pick(5, 5, 3, 2, 1),
        "fallbacks_max": pick(2, 2, 1, 0),
        "idle_s": pick(900.0, 50.0),
        "park_s": pick(120.0, 2.0),
        "verdict_max_s": pick(3600.0, 10.0),
        "budget_s": pick(None, None, None, 40.0),
        "budget_credit": pick("fail", "censor"),
        "budget_starts": pick("arrival", "admission"),
        "admission": pick(*ADMISSIONS),
        "divert": pick(*DIVERTS),
        "order": pick(*ORDERS),
        "budget_usd_per_h": pick(None, None, 10.0, 0.02, 0.003, 0.0),
        "budget_output_tokens": pick(4096, 100),
        "turns_max": pick(100, 100, 100, 3),
        "programs_max": pick(100, 100, 100, 2, 1),
        "verifying_max": pick(100, 100, 1),
        "closed_max": pick(100, 100, 2, 1),
        "closed_s": pick(3600.0, 20.0),
    }


class Storm(RuleBasedStateMachine):
    """Whatever happens, in any order."""

    @initialize(pool=st.lists(specs, min_size=1, max_size=4, unique_by=lambda spec: spec.name), router=configurations())
    def open(self, pool, router):
        self.pool, self.settings = pool, router
        self.host = Host(self._new_stack())
        self.twin = None

    def _new_stack(self):
        return make_stack(*self.pool, verifiers={"patch": "command"}, **self.settings)

    def _send(self, event):
        if self.twin is not None:
            expected = encoded(self.twin.handle(event))
        commands = self.host.send(event)
        if self.twin is not None:
            assert encoded(commands) == expected, "a loaded dump went another way"

    @property
    def now_s(self):
        return self.host.now_s

    @rule(seconds=st.sampled_from(STEPS_S))
    def pass_time(self, seconds):
        """Time passes unheard: the next event finds everything due late."""
        self.host.now_s += seconds

    @rule()
    def wake_on_time(self):
        """The host's timer does what it was told."""
        if self.host.timer_at_s is not None:
            self.host.now_s = max(self.host.now_s, self.host.timer_at_s)
            self._send(e.TimerFired(at_s=self.now_s, timer="router"))

    @rule(timer=st.sampled_from(["router", "router", "other"]))
    def wake_anyhow(self, timer):
        """A timer fires early, late, or was never set."""
        self._send(e.TimerFired(at_s=self.now_s, timer=timer))

    @rule(
        program_id=st.sampled_from([*PROGRAMS, *PROGRAMS, *PROGRAMS, *ODD_PROGRAMS]),
        model=st.sampled_from([e.AUTO, e.AUTO, e.AUTO, "small", "large", "unheard of"]),
        prompt_tokens=st.sampled_from([0, 50, 700, 3000, -3, 2**62]),
        max_output_tokens=st.sampled_from([None, None, 0, 100, 64_000, -3, 2**62]),
        is_implicit=st.booleans(),
        is_final=st.sampled_from([False, False, False, True]),
        task_type=st.sampled_from([None, "patch", "unheard of"]),
        components=st.sampled_from([(), (0.5, -0.5), (0.5,), (1.0, 2.0, 3.0), (math.nan, 1.0), (math.inf,)]),
        budget_s=st.sampled_from([None, None, None, 3.0, *ODD_FLOATS]),
        tenant=st.sampled_from(["", "t1", "t2"]),
        deadline_at_s=st.sampled_from([None, None, 100.0, 500.0, *ODD_FLOATS]),
        n_answers=st.sampled_from([1, 1, 1, 3, 0, -3, 2**62]),
    )
    def arrive(self, **fields):
        """A turn of a new, running, ended or impossible program."""
        self.host.n_turns += 1
        self._send(e.TurnArrived(at_s=self.now_s, turn_id=self.host.n_turns, **fields))

    @precondition(lambda self: self.host.open)
    @rule(data=st.data())
    def arrive_twice(self, data):
        """The number of an open turn comes again."""
        self.wake_anyhow("router")  # what is due may end it
        if self.host.open:
            turn_id = data.draw(st.sampled_from(sorted(self.host.open)))
            self._send(e.TurnArrived(at_s=self.now_s, turn_id=turn_id, program_id="p0"))

    @precondition(lambda self: self.host.running)
    @rule(data=st.data(), usage=usages)
    def complete(self, data, usage):
        """A running attempt answers."""
        turn_id = data.draw(st.sampled_from(sorted(self.host.running)))
        self._end(turn_id, AttemptOutcome.COMPLETED, usage=usage, first_byte_at_s=self.now_s, status=200)

    @precondition(lambda self: self.host.running)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["broken", "refused", "connect_timeout", "first_byte_timeout", "status", "status"]),
        status=st.sampled_from([500, 429, 503]),
        retry_after_s=st.sampled_from([None, 7.0, 90.0]),
    )
    def fail_early(self, data, outcome, status, retry_after_s):
        """A running attempt fails before its first byte, in a way that invites another try."""
        turn_id = data.draw(st.sampled_from(sorted(self.host.running)))
        self._end(turn_id, AttemptOutcome(outcome), status=status, retry_after_s=retry_after_s)

    @precondition(lambda self: len(self.host.open) < 6)
    @rule(data=st.data(), n_turns=st.integers(1, 3), prompt_tokens=st.sampled_from([50, 700, 3000]))
    def begin(self, data, n_turns, prompt_tokens):
        """Plain turns of a program, at once; more than one is an agent with parallel calls."""
        program_id = data.draw(st.sampled_from(PROGRAMS))
        for _ in range(n_turns):
            self.host.n_turns += 1
            self._send(
                e.TurnArrived(
                    at_s=self.now_s, turn_id=self.host.n_turns, program_id=program_id, prompt_tokens=prompt_tokens
                )
            )

    @precondition(lambda self: self.host.running)
    @rule(
        data=st.data(),
        outcome=st.sampled_from([o for o in AttemptOutcome if o is not AttemptOutcome.COMPLETED]),
        status=st.sampled_from([0, 200, 302, 400, 404, 408, 429, 500, 503, 999]),
        has_begun=st.booleans(),
        retry_after_s=st.sampled_from([None, 0.0, 7.0, 500.0, *ODD_FLOATS]),
        usage=usages,
    )
    def fail(self, data, outcome, status, has_begun, retry_after_s, usage):
        """A running attempt ends in any other way, before or after its first byte."""
        turn_id = data.draw(st.sampled_from(sorted(self.host.running)))
        first_byte_at_s = self.now_s if has_begun else None
        self._end(
            turn_id, outcome, status=status, first_byte_at_s=first_byte_at_s, retry_after_s=retry_after_s, usage=usage
        )

    def _end(self, turn_id, outcome, **fields):
        attempt = self.host.running[turn_id].attempt
        self._send(e.AttemptEnded(at_s=self.now_s, turn_id=turn_id, attempt=attempt, outcome=outcome, **fields))

    @rule(turn_id=st.integers(-1, 40), attempt=st.integers(0, 6), outcome=st.sampled_from(list(AttemptOutcome)))
    def end_any_attempt(self, turn_id, attempt, outcome):
        """The end of an attempt that is over, held, or never was."""
        self._send(e.AttemptEnded(at_s=self.now_s, turn_id=turn_id, attempt=attempt, outcome=outcome))

    @rule(turn_id=st.integers(-1, 40))
    def abandon(self, turn_id):
        """A client leaves, or had left."""
        self._send(e.TurnAbandoned(at_s=self.now_s, turn_id=turn_id))

    @rule(program_id=st.sampled_from([*PROGRAMS, "unheard of"]), reason=st.sampled_from(list(EndReason)))
    def finish(self, program_id, reason):
        """A program ends, has ended, or never began."""
        self._send(e.ProgramEnded(at_s=self.now_s, program_id=program_id, reason=reason))

    @rule(
        program_id=st.sampled_from([*PROGRAMS, "unheard of"]),
        verdict=st.sampled_from(list(VerdictKind)),
        score=st.sampled_from([None, 0.0, 0.25, 1.0]),
        verifier=st.sampled_from(["", "code", "human"]),
        is_correction=st.booleans(),
    )
    def judge(self, program_id, verdict, score, verifier, is_correction):
        """A verdict: in time, early, late, again, against an earlier one, or for nobody."""
        said = Verdict(verdict=verdict, score=score, verifier=verifier, is_correction=is_correction)
        self._send(e.VerdictArrived(at_s=self.now_s, program_id=program_id, verdict=said))

    @rule(
        decision_id=st.integers(-1, 12),
        model=st.sampled_from([None, "small", "large", "unheard of"]),
        propensity=st.sampled_from([None, 0.5, 1.0, *ODD_FLOATS]),
    )
    def answer_selector(self, decision_id, model, propensity):
        """The user's selector says something, asked or not."""
        if self.host.asked:
            decision_id = sorted(self.host.asked)[decision_id % len(self.host.asked)]
            self.host.asked.pop(decision_id)
        self._send(e.SelectorAnswered(at_s=self.now_s, decision_id=decision_id, model=model, propensity=propensity))

    @rule(
        backend_id=st.sampled_from([*BACKENDS, "unheard of"]),
        values=st.dictionaries(
            st.sampled_from(SIGNALS),
            st.sampled_from([0.0, 0.3, 3.0, 3000.0, *ODD_FLOATS]),
        ),
        age_s=st.sampled_from([0.0, 1.0, 60.0, -5.0, math.nan, math.inf, -math.inf]),
    )
    def observe(self, backend_id, values, age_s):
        """A reading."""
        self._send(
            e.SignalsObserved(at_s=self.now_s, backend_id=backend_id, values=values, observed_at_s=self.now_s - age_s)
        )

    @rule(backend_id=st.sampled_from([*BACKENDS, "unheard of"]), health=st.sampled_from(list(BackendHealth)))
    def change_health(self, backend_id, health):
        """A probe or an operator speaks."""
        self._send(e.BackendChanged(at_s=self.now_s, backend_id=backend_id, health=health))

    @rule(spec=specs, model=st.sampled_from([None, ModelSpec(usd_per_million=Price(input=2.0, output=2.0))]))
    def add_backend(self, spec, model):
        """A backend joins, joins again, or changes its model or capacity."""
        self._send(e.BackendAdded(at_s=self.now_s, backend=spec, model=model))

    @rule(is_known=st.booleans())
    def add_backend_of_new_model(self, is_known):
        """A backend of a model that the pool lacks; without the model it makes no sense."""
        spec = BackendSpec(name="b9", model="new", slots=1)
        self._send(e.BackendAdded(at_s=self.now_s, backend=spec, model=ModelSpec() if is_known else None))

    @rule(backend_id=st.sampled_from([*BACKENDS, "b9", "unheard of"]))
    def remove_backend(self, backend_id):
        """An operator takes a backend out."""
        self._send(e.BackendRemoved(at_s=self.now_s, backend_id=backend_id))

    @rule(model=st.sampled_from(["small", "large", "unheard of"]))
    def swap_model(self, model):
        """The model behind a name is another one now."""
        self._send(e.ModelForgotten(at_s=self.now_s, model=model))

    @rule()
    def restart(self):
        """The host crashed and came back."""
        self._send(e.HostRestarted(at_s=self.now_s))

    @rule()
    def dump_and_load(self):
        """From here on a second stack, begun from the dump, hears the same events."""
        state = self.host.stack.dump()
        self.twin = self._new_stack()
        self.twin.load(state)
        self.twin.check()
        assert self.twin.dump() == state, "a dump loaded and dumped again differs"

    def teardown(self):
        """After the storm everything ends, by answer or by time, and nothing is left."""
        if not hasattr(self, "host") or self.host.is_broken:
            return
        for turn_id in sorted(self.host.running):
            if turn_id in self.host.running:
                self._end(turn_id, AttemptOutcome.COMPLETED, first_byte_at_s=self.now_s)
        for _ in range(12):
            for turn_id in sorted(self.host.running):
                self._end(turn_id, AttemptOutcome.IDLE_TIMEOUT, first_byte_at_s=self.now_s)
            self.host.now_s += 4000.0
            self._send(e.TimerFired(at_s=self.now_s, timer="router"))
        self.host.assert_at_rest()
        for backend_id in list(self.host.router.backends.by_id):
            self._send(e.BackendRemoved(at_s=self.now_s, backend_id=BackendId(backend_id)))
        assert len(self.host.router.agenda) == 0


Storm.TestCase.settings = settings(
    max_examples=N_EXAMPLES,
    stateful_step_count=60,
    deadline=None,
    derandomize="LOADWISE_STORM_EXAMPLES" not in os.environ,
    database=None,
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
TestStorm = Storm.TestCase
