"""What the router can be told; every default of the router stands here and nowhere else."""

import math
from typing import Literal

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.policy.context import ContextSpec
from loadwise.policy.ladder import LadderOptions
from loadwise.policy.purse import USD_MAX
from loadwise.policy.registry import PolicySpec
from loadwise.policy.reward import RewardSpec

COUNT_MAX = 10**9
MODELS_MAX = 256
"""Models of a pool; a learner remembers no more."""

ATTEMPTS_MAX = 8
"""Attempts that a program may have."""

FeedbackArm = Literal["delayed", "batch_sync", "per_slot", "sequential"]


def _positive(where: str, **value_by_name: float) -> None:
    for name, value in value_by_name.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{where}.{name} is {value!r}; it must be a finite number > 0")


class FeedbackConfig(Fact, frozen=True, kw_only=True):
    """When new programs may start with respect to verdicts still out (ORACLE, section 3.2 and appendix E.9)."""

    arm: FeedbackArm = "delayed"
    size: int = 1
    """Batch size of `batch_sync`, number of learners of `per_slot`."""

    def __post_init__(self) -> None:
        if not 1 <= self.size <= 4096:
            raise ConfigError(f"router.feedback.size is {self.size!r}; it must be 1 to 4096")


class SelectorConfig(Fact, frozen=True, kw_only=True):
    """A user's selector behind HTTP: asked once a program, with a time limit; the router's policy is the fallback."""

    url: str
    timeout_s: float = 0.5

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"router.selector.url is {self.url!r}; it must start with http:// or https://")
        _positive("router.selector", timeout_s=self.timeout_s)


class TradeConfig(Fact, frozen=True, kw_only=True):
    """The one trade of the three papers: seconds of waiting against success.

    `seconds_per_point` says how many seconds one percentage point of success is worth; the papers' own knobs follow
    from it unless they are given.
    """

    seconds_per_point: float = 6.0
    wait_reference_s: float = 600.0
    """ORACLE's w0."""
    beta: float | None = None
    """ORACLE's weight of waiting: beta = w0 / (w0 + 100 seconds_per_point)."""
    backpressure: float | None = None
    """DEALS' V: queued tasks that one unit of success is worth, C (1-beta) w0 / (beta S)."""
    multiplier: float | None = None
    """InfraMind's starting lambda for a time budget: budget_s / (100 seconds_per_point)."""

    def __post_init__(self) -> None:
        _positive("router", seconds_per_point=self.seconds_per_point, wait_reference_s=self.wait_reference_s)
        if self.beta is not None and not (math.isfinite(self.beta) and 0.0 <= self.beta <= 1.0):
            raise ConfigError(f"router.beta is {self.beta!r}; it must be in [0, 1]")
        for name in ("backpressure", "multiplier"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"router.{name} is {value!r}; it must be a finite number >= 0")

    @property
    def wait_weight(self) -> float:
        """ORACLE's beta, given or derived.

        >>> TradeConfig().wait_weight
        0.5
        """
        if self.beta is not None:
            return self.beta
        return self.wait_reference_s / (self.wait_reference_s + 100.0 * self.seconds_per_point)

    def backpressure_weight(self, *, slots: int, service_s: float) -> float:
        """DEALS' V, given or derived, for an agent with `slots` slots and `service_s` mean seconds a task.

        >>> TradeConfig().backpressure_weight(slots=4, service_s=30.0)
        80.0
        """
        if self.backpressure is not None:
            return self.backpressure
        beta = self.wait_weight
        if beta == 0.0:
            return math.inf
        return slots * (1.0 - beta) * self.wait_reference_s / (beta * service_s)

    def start_multiplier(self, *, budget_s: float) -> float:
        """InfraMind's lambda at the start of training, given or derived, for a time budget.

        >>> TradeConfig().start_multiplier(budget_s=120.0)
        0.2
        """
        if self.multiplier is not None:
            return self.multiplier
        return budget_s / (100.0 * self.seconds_per_point)


class PauseConfig(Fact, frozen=True, kw_only=True):
    """How ThunderAgent's released proxy pauses and resumes programs (`router/pausing.py`)."""

    tick_s: float = 5.0
    acting_weight: float = 1.0
    """What a program between two calls counts, where something is to be paused."""
    has_decay: bool = True
    """Where something is to be resumed, a program between two calls counts tokens * 2^(-seconds since its answer)."""
    buffer_tokens: int = 100
    wait_max_s: float = 1800.0
    """After so long a program is resumed whatever the room."""
    state_tokens: int = 0
    """State blocks of a running request, which the released proxy does not count; 0 is the released one."""
    headroom_ratio: float = 0.0
    """Share of the capacity that is left alone; 0 is the released one."""

    def __post_init__(self) -> None:
        _positive("router.admission.pause", tick_s=self.tick_s, wait_max_s=self.wait_max_s)
        if not (math.isfinite(self.acting_weight) and 0.0 <= self.acting_weight <= 10.0):
            raise ConfigError(f"router.admission.pause.acting_weight is {self.acting_weight!r}; it must be in [0, 10]")
        if not (math.isfinite(self.headroom_ratio) and 0.0 <= self.headroom_ratio < 1.0):
            raise ConfigError(f"router.admission.pause.headroom_ratio is {self.headroom_ratio!r}; it must be in [0, 1)")
        for name in ("buffer_tokens", "state_tokens"):
            if not 0 <= getattr(self, name) <= COUNT_MAX:
                raise ConfigError(f"router.admission.pause.{name} is {getattr(self, name)!r}; it must be >= 0")


AdmissionKind = Literal["ledger", "footprint", "cap", "pause", "none"]


class AdmissionConfig(Fact, frozen=True, kw_only=True):
    """When a program may start on a backend counted in KV tokens (other units are hard limits under every kind)."""

    kind: AdmissionKind = "ledger"
    """`ledger`: a peak is reserved for each (ORACLE). `footprint`: all together must fit at their largest. `cap`: so
    many programs. `pause`: ThunderAgent. `none`: at once."""
    footprint_ratio: float = 0.76
    """Of `footprint`: share of the capacity that living contexts may fill, before anything has been learned of it."""
    learns_footprint: bool = True
    """Of `footprint`: whether that share follows where contexts begin to be lost."""
    reserves: bool = False
    """Of `footprint`: where others wait, a peak must be reserved for each besides, as under `ledger`."""
    heeds_budget: bool = True
    """Of `footprint`: no program starts where, for it, more would run out of their time budgets than it is worth."""
    programs_max: int = 32
    """Of `cap`: programs on one backend."""
    programs_max_by_model: dict[str, int] = {}
    call_ratio: float | None = None
    """A call of an admitted program waits while the calls in flight would fill more than this share (ORACLE's 95 %)."""
    overhead_tokens: int = 0
    """What a running request holds besides its tokens, to begin with (ORACLE's delta)."""
    learns_overhead: bool = False
    """Learn it from the engine's usage. Under `pause` it then counts beside `pause.state_tokens`."""
    learns_saturated: bool = False
    """Learn it from a full cache as well, where it cannot be told: ORACLE's negative control (B.2)."""
    capacity: Literal["declared", "engine", "calibrated"] = "engine"
    """Where a backend's KV tokens are taken from if the pool file does not say: nowhere (slots are assumed), the
    engine's word, or its usage under our calls. `calibrated` also corrects what the file says."""
    shares_prompts: bool = False
    """Count a prompt that all programs of a backend begin with once."""
    pause: PauseConfig = PauseConfig()

    def __post_init__(self) -> None:
        for name in ("footprint_ratio", "call_ratio"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and 0.0 < value <= 1.0):
                raise ConfigError(f"router.admission.{name} is {value!r}; it must be in (0, 1]")
        for cap in (self.programs_max, *self.programs_max_by_model.values()):
            if not 1 <= cap <= COUNT_MAX:
                raise ConfigError(f"router.admission.programs_max is {cap!r}; it must be >= 1 and <= {COUNT_MAX:g}")
        if not 0 <= self.overhead_tokens <= COUNT_MAX:
            raise ConfigError(f"router.admission.overhead_tokens is {self.overhead_tokens!r}; it must be >= 0")


class DivertConfig(Fact, frozen=True, kw_only=True):
    """When a program runs on another model than the selector's, because it would start sooner there."""

    when: Literal["never", "arrival", "held"] = "never"
    """`arrival`: once, at its first turn (ORACLE). `held`: also while it is held, for nothing of it is cached yet."""
    saturation: Literal["clip", "soft", "none"] = "clip"
    """What a wait w counts against w0: min(w/w0, 1) (ORACLE: two waits beyond w0 look alike), w/(w+w0), or w/w0."""
    forecast: Literal["mean", "elapsed"] = "mean"
    """From mean run times (ORACLE), or from how long each program has run already."""
    prices_run: bool = False
    """Count a model's expected run time with the wait."""
    counts_overdue: bool = False
    """Count of a model's success only what ends within the budget."""
    heeds_waste: bool = False
    """Nobody is diverted to a model where more runs out of time than the success that is left there is worth."""
    forgoes_max_ratio: float | None = None
    """At most so much of the success that was expected of late is given up by all diverts together."""
    rebinds: bool = False
    """Move a started program when no backend of its model takes turns any more; its context is read anew there."""

    def __post_init__(self) -> None:
        most = self.forgoes_max_ratio
        if most is not None and not (math.isfinite(most) and 0.0 <= most <= 1.0):
            raise ConfigError(f"router.divert.forgoes_max_ratio is {most!r}; it must be in [0, 1]")

    @property
    def is_on(self) -> bool:
        """Whether anything is ever diverted."""
        return self.when != "never"


class OrderConfig(Fact, frozen=True, kw_only=True):
    """Who of the held turns of a model is next."""

    kind: Literal["fifo", "fair"] = "fifo"
    """`fair`: who has waited `age_s`, longest first; then the tenant that has had least for its weight; of one tenant
    the earliest deadline that can be met, then the rest in order of arrival."""
    age_s: float = 300.0
    weights: dict[str, float] = {}
    """Of tenants; 1 where absent."""

    def __post_init__(self) -> None:
        _positive("router.order", age_s=self.age_s)
        for tenant, weight in self.weights.items():
            if not (math.isfinite(weight) and 1e-6 <= weight <= 1e6):
                raise ConfigError(f"router.order.weights: {tenant!r} has {weight!r}; it must be in [1e-06, 1e+06]")


class EscalationConfig(Fact, frozen=True, kw_only=True):
    """Whether a program whose attempt failed may run again on another model, and how often; see `router.escalation`."""

    attempts_max: int = 2
    """Attempts of a program, the first included."""
    cost_max_usd: float | None = None
    """No attempt begins that is expected to bring the program's cost to this or beyond."""
    false_pass: float | None = None
    """How often the verifier passes what is wrong; None where unknown. A task type's own rates go before."""
    false_fail: float | None = None
    """How often it fails what is right."""
    audited: bool = False
    """Whether persons judge a random sample of programs, right ones too: each of their verdicts on a program that a
    verifier has judged then tells how often verifiers are wrong."""
    optimism: float = 0.3
    """How many widths of uncertainty are added to what an attempt after a failure may bring."""
    turns_max: int | None = None
    """Turns of an attempt after which it is taken to be stuck; None leaves that to the verifier."""
    failed_turns_max: int | None = None
    """Failed turns of an attempt after which it is taken to be stuck."""
    stall_s: float | None = None
    """Seconds of an attempt after which it is taken to be stuck."""

    def __post_init__(self) -> None:
        if not 2 <= self.attempts_max <= ATTEMPTS_MAX:
            raise ConfigError(
                f"router.escalation.attempts_max is {self.attempts_max!r}; it must be 2 to {ATTEMPTS_MAX}"
            )
        for name in ("cost_max_usd", "turns_max", "failed_turns_max", "stall_s"):
            value = getattr(self, name)
            if value is not None:
                _positive("router.escalation", **{name: value})
        try:
            self.ladder(1, "")
        except ConfigError as error:
            raise ConfigError(f"router.escalation.{error.message}") from error

    def ladder(self, n_features: int, context_version: str) -> LadderOptions:
        """How its ladder is made."""
        return LadderOptions(
            false_pass=self.false_pass,
            false_fail=self.false_fail,
            optimism=self.optimism,
            n_features=n_features,
            context_version=context_version,
        )


class RouterConfig(Fact, frozen=True, kw_only=True):
    """Everything under `router:`, after presets have been laid below it."""

    policy: PolicySpec = PolicySpec(name="linucb")
    replica_policy: PolicySpec = PolicySpec(name="resident")
    """How a backend is chosen among those that serve the chosen model."""
    context: ContextSpec = ContextSpec()
    feedback: FeedbackConfig = FeedbackConfig()
    selector: SelectorConfig | None = None
    escalation: EscalationConfig | None = None
    """Further attempts after a failed one; None: every program has one."""
    reward: RewardSpec = RewardSpec()
    trade: TradeConfig = TradeConfig()
    admission_ratio: float = 0.85
    """Share of a backend's KV tokens at which admission stops (ORACLE, B.2)."""
    admission: AdmissionConfig = AdmissionConfig()
    divert: DivertConfig = DivertConfig()
    order: OrderConfig = OrderConfig()
    expected_tokens: int = 8000
    """Prior of a program's peak context (ORACLE's c0)."""
    expected_run_s: float = 300.0
    """Prior of a program's run time (ORACLE's D0)."""
    hold_max_s: float = 60.0
    held_max: int = 10_000
    """Turns held at once over all models."""
    attempts_max: int = 3
    """Attempts of a turn on one model."""
    fallbacks_max: int = 2
    """Other models that a program may be moved to before its first answer."""
    idle_s: float = 900.0
    """A program without a turn for so long has ended."""
    park_s: float = 120.0
    """An idle program gives its reservation back after so long; its next turn is admitted anew."""
    verdict_max_s: float = 3600.0
    """A verdict that has not come after so long is lost: the decision is undone."""
    budget_s: float | None = None
    """Default time budget of a program."""
    budget_starts: Literal["arrival", "admission"] = "arrival"
    """Whether waiting to be admitted counts against the budget."""
    budget_usd_per_h: float | None = None
    """Dollars that all turns of any rolling hour may cost; None: no limit. See `router.spending`."""
    budget_output_tokens: int = 4096
    """How long the answer to a turn may get whose client names no limit, as far as money is promised for it."""
    budget_credit: Literal["fail", "censor"] = "censor"
    """What a program out of budget teaches: `fail` credits 0 (ORACLE), `censor` teaches nothing."""
    turns_max: int = 100_000
    """Turns open at once, running or waiting."""
    programs_max: int = 100_000
    """Open programs; at the limit the one that is idle longest is ended."""
    verifying_max: int = 50_000
    """Ended programs that wait for a verdict; at the limit the oldest is censored."""
    closed_max: int = 10_000
    closed_s: float = 3600.0
    """How many closed programs stay in memory, and how long."""
    signal_max_age_s: float = 5.0

    def __post_init__(self) -> None:
        _positive(
            "router",
            hold_max_s=self.hold_max_s,
            idle_s=self.idle_s,
            park_s=self.park_s,
            verdict_max_s=self.verdict_max_s,
            closed_s=self.closed_s,
            signal_max_age_s=self.signal_max_age_s,
            expected_run_s=self.expected_run_s,
        )
        if self.budget_s is not None:
            _positive("router", budget_s=self.budget_s)
        if self.budget_usd_per_h is not None and not 0.0 <= self.budget_usd_per_h <= USD_MAX:
            text = f"it must be a finite number >= 0 and <= {USD_MAX:g}"
            raise ConfigError(f"router.budget_usd_per_h is {self.budget_usd_per_h!r}; {text}")
        if not (math.isfinite(self.admission_ratio) and 0.0 < self.admission_ratio <= 1.0):
            raise ConfigError(f"router.admission_ratio is {self.admission_ratio!r}; it must be in (0, 1]")
        if not 0 <= self.fallbacks_max <= MODELS_MAX:
            raise ConfigError(f"router.fallbacks_max is {self.fallbacks_max!r}; it must be >= 0 and <= {MODELS_MAX}")
        for name in (
            "expected_tokens",
            "budget_output_tokens",
            "held_max",
            "attempts_max",
            "turns_max",
            "programs_max",
            "verifying_max",
            "closed_max",
        ):
            if not 1 <= getattr(self, name) <= COUNT_MAX:
                raise ConfigError(f"router.{name} is {getattr(self, name)!r}; it must be >= 1 and <= {COUNT_MAX:g}")
