"""Loads against presets on a pool of two models: admission, forecast and divert, and their peers, in one world.

A cell is a whole run of the stack in virtual time: a closed loop of N programs in flight, waiting ones included, until
108 are over; or an open stream that brings N programs an hour whatever becomes of them. Every preset meets the same
programs (their shapes follow from seed and number), the same engines, and the same luck (whether a model solves a
program follows from seed, program and model). The selector is the same, too: it knows each model's success by kind of
task. Kinds are bins of the success gap between the two models, which is drawn from a normal distribution such that a
given share of programs does better on the dear one.

Definitions: programs/h are those that submit within their budget, per hour of makespan; resolved are those among them
whose model would solve them; a program out of budget is killed and counts for neither. The budget starts at admission,
or at arrival. The hit ratio is the prefix tokens found on the dear backend.
"""

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, Literal

from loadwise.kernel.commands import Command, Dispatch, EndTurn, RecordDecision
from loadwise.kernel.errors import ConfigError
from loadwise.kernel.events import AttemptEnded, Event, TurnArrived
from loadwise.kernel.fact import Fact
from loadwise.kernel.ids import BackendId
from loadwise.kernel.work import AttemptOutcome
from loadwise.router.machine import Router
from loadwise.settings import open_stack, preset_names
from loadwise.sim.hardware import GIB
from loadwise.sim.report import mean, percentile
from loadwise.sim.scenario import Scenario, block_bytes_of, convert_scenario
from loadwise.sim.vllm_engine import VllmEngineSpec
from loadwise.sim.world import World

from .disc_forecast import Wait
from .disc_world import apart, gap_of, with_capacity
from .disc_world import read_world as read_world
from .disc_world import world_names as world_names

LOADS = (8, 16, 32, 48, 64, 96, 128)
PRESETS = (
    "vllm_alone",
    "static_cap",
    "thunderagent",
    "thunderagent_state",
    "admission_only",
    "oracle",
    "fast",
    "quality",
    "loadwise",
)
Arrivals = Literal["closed", "open"]
N_BINS = 16
"""Kinds of task: enough that a bin's gap is the program's."""
MAX_LOAD, MAX_PROGRAMS = 100_000, 1_000_000


class Settings(Fact, frozen=True, kw_only=True):
    """What differs from the world's file."""

    n_programs: int | None = None
    prefers: float | None = None
    """Share of programs that do better on the dear model."""
    spread: float | None = None
    """Standard deviation of the success gap."""
    budget_starts: str | None = None
    beta: float | None = None
    seconds_per_point: float | None = None
    """How long one percentage point of success is worth waiting for, instead of the preset's price."""
    arrivals: Arrivals = "closed"
    selector: dict[str, Any] | None = None
    """A policy as a pool file names it, instead of the one that knows the successes."""
    kv_gib: float | None = None
    """KV memory of the dear model's engines, instead of what the world gives them."""
    router: dict[str, Any] = {}
    """Keys of a pool file's `router:` that win over preset and world."""


class Cell(Fact, frozen=True, kw_only=True):
    """One run."""

    world: str
    """By name, or the path of its file."""
    preset: str
    load: int
    """Programs in flight; of an open stream programs that arrive an hour."""
    seed: int
    settings: Settings = Settings()


class CellResult(Fact, frozen=True, kw_only=True):
    """What became of it; seconds are virtual."""

    programs_per_h: float
    resolved: float
    """Programs."""
    resolved_per_h: float
    hit_ratio: float
    call_mean_s: float
    call_p95_s: float
    wait_mean_s: float
    """From a program's arrival to its first dispatch."""
    wait_p50_s: float
    wait_p95_s: float
    output_tokens_per_h: float
    elapsed_s: float
    diverts: float
    preemptions: float
    killed: float
    dear_share: float
    """Of programs that ran, those on the dear model."""
    routed_dear_share: float
    """Of programs, those that the selector gave to the dear model; a divert may have sent them elsewhere."""
    admitted_dear: float
    """Mean number of programs on the dear backend while somebody waited for it; 0 if nobody did."""
    admitted_cheap: float
    overhead_tokens: float
    """Allowance of the dear backend at the end."""
    overhead_mean_tokens: float
    """The same on average over time, until the last program has come: afterwards every pool is calm."""
    forecast_n: float
    """Waits that had been forecast and came to be."""
    forecast_covered: float
    """Those among them within the 80 % interval."""
    forecast_within_2: float
    """Those with four departures ahead or more whose point was within a factor of two, over `forecast_n_far`."""
    forecast_n_far: float


def check_cell(cell: Cell) -> None:
    """Refuse what could not run, before anything does."""
    if cell.preset not in preset_names():
        raise ConfigError(f"preset {cell.preset!r} is unknown; known: {', '.join(preset_names())}")
    if not 1 <= cell.load <= MAX_LOAD:
        raise ConfigError(f"load is {cell.load!r}; it must be in 1..{MAX_LOAD}")
    settings = cell.settings
    if settings.beta is not None and settings.seconds_per_point is not None:
        raise ConfigError("beta and seconds_per_point are two words for one price; give one of them")
    if settings.kv_gib is not None and not 0.0 < settings.kv_gib <= 10_000.0:
        raise ConfigError(f"kv_gib is {settings.kv_gib!r}; it must be in (0, 10000]")
    if settings.n_programs is not None and not 1 <= settings.n_programs <= MAX_PROGRAMS:
        raise ConfigError(f"programs is {settings.n_programs!r}; it must be in 1..{MAX_PROGRAMS}")
    if settings.prefers is not None and not 0.0 < settings.prefers < 1.0:
        raise ConfigError(f"prefers is {settings.prefers!r}; it must be in (0, 1)")
    if settings.spread is not None and not 0.0 < settings.spread <= 1.0:
        raise ConfigError(f"spread is {settings.spread!r}; it must be in (0, 1]")


def success_table(
    dear: str, cheap: str, *, middle: float, prefers: float, spread: float
) -> dict[str, dict[str, float]]:
    """Success by model and kind: bins of equal weight of a normal gap, around a common middle.

    >>> table = success_table("d", "c", middle=0.57, prefers=0.99, spread=0.1)
    >>> sum(table["d"].values()) / 16 - sum(table["c"].values()) / 16 > 0.2
    True
    """
    gap = NormalDist(NormalDist().inv_cdf(prefers) * spread, spread)
    table: dict[str, dict[str, float]] = {dear: {}, cheap: {}}
    for i in range(N_BINS):
        half = gap.inv_cdf((i + 0.5) / N_BINS) / 2.0
        for model, p in ((dear, middle + half), (cheap, middle - half)):
            table[model][f"gap{i:02d}"] = min(max(round(p, 4), 0.0), 1.0)
    return table


def scenario_of(cell: Cell) -> Scenario:
    """The world of a cell, under its preset."""
    check_cell(cell)
    document, settings = read_world(cell.world), cell.settings
    gap = gap_of(document, cell.world)
    caps, state_tokens = document.pop("caps"), document.pop("state_tokens")
    document.pop("gap")
    prefers = gap.prefers if settings.prefers is None else settings.prefers
    spread = gap.spread if settings.spread is None else settings.spread
    table = success_table(gap.dear, gap.cheap, middle=gap.middle, prefers=prefers, spread=spread)
    pool, workload = document["pool"], document["workload"]
    pool["backends"].sort(key=lambda backend: backend["model"] != gap.dear)
    router: dict[str, Any] = pool.setdefault("router", {})
    router["policy"] = settings.selector or {"name": "known", "success": table}
    if cell.preset == "static_cap":
        router["admission"] = {**router.get("admission", {}), "programs_max_by_model": caps}
    if cell.preset == "thunderagent_state":
        router["admission"] = {**router.get("admission", {}), "pause": {"state_tokens": state_tokens}}
    for name in ("budget_starts", "beta", "seconds_per_point"):
        if getattr(settings, name) is not None:
            router[name] = getattr(settings, name)
    for key, value in settings.router.items():
        router[key] = {**router.get(key, {}), **value} if isinstance(value, dict) else value
    pool["preset"] = cell.preset
    pool["task_types"] = {name: {} for name in table[gap.dear]}
    workload["task_types"] = dict.fromkeys(table[gap.dear], 1)
    workload["arrivals"] = arrivals_of(cell)
    document["truth"]["success"] = table
    document["n_programs"] = document["n_programs"] if settings.n_programs is None else settings.n_programs
    if settings.kv_gib is not None:
        _limit_kv(document, cell.world, gap.dear, settings.kv_gib)
    return with_capacity(document, cell.world)


def arrivals_of(cell: Cell) -> dict[str, Any]:
    """A scenario's `arrivals:`.

    >>> arrivals_of(Cell(world="w", preset="fast", load=180, seed=1, settings=Settings(arrivals="open")))
    {'kind': 'poisson', 'programs_per_s': 0.05}
    """
    if cell.settings.arrivals == "open":
        return {"kind": "poisson", "programs_per_s": cell.load / 3600.0}
    return {"kind": "closed", "n_agents": cell.load}


def _limit_kv(document: dict[str, Any], world: str, dear: str, kv_gib: float) -> None:
    """Give the dear model's engines so much KV memory."""
    if document.get("gpus"):
        raise ConfigError(f"world {world}: kv_gib is {kv_gib!r}, but its GPUs are shared; gpus.*.kv_gib says it there")
    scenario = convert_scenario(apart(document), world)
    for backend in document["pool"]["backends"]:
        spec = scenario.engine_spec(backend["name"])
        if backend["model"] != dear:
            continue
        if not isinstance(spec, VllmEngineSpec) or spec.hardware is None:
            raise ConfigError(f"world {world}: kv_gib is {kv_gib!r}, but {backend['name']!r} has no hardware")
        document["engines"][backend["name"]]["num_gpu_blocks"] = int(kv_gib * GIB) // block_bytes_of(spec)


class Observer:
    """Sees what a journal would: every event and its commands."""

    def __init__(self, router: Router, backends: Sequence[str]) -> None:
        self._router = router
        self._backends = backends
        self._began_at_s: dict[tuple[int, int], float] = {}
        self._arrived_at_s: dict[str, float] = {}
        self._started: set[str] = set()
        self._interval: dict[str, tuple[float, float, float, int]] = {}
        self.calls_s: list[float] = []
        self.waits_s: list[float] = []
        self.forecasts: list[tuple[float, float, float, int, float]] = []
        """(point, low, high, departures ahead, realised) of waits that came to be."""
        self.n_killed = 0
        self.routed: dict[str, str] = {}
        """By program the model that its first decision would have."""
        self._admitted: dict[str, list[float]] = {name: [0.0, 0.0] for name in backends}
        self._seen_at_s = 0.0
        self._overhead = [0.0, 0.0]
        self._overhead_when_full = [0.0, 0.0]

    def append(self, event: Event, commands: list[Command]) -> None:
        """Take one event in."""
        self._count_admitted(event.at_s)
        if isinstance(event, TurnArrived) and event.program_id not in self._started:
            self._arrived_at_s.setdefault(event.program_id, event.at_s)
            self._overhead_when_full = list(self._overhead)
        elif isinstance(event, AttemptEnded):
            began_at_s = self._began_at_s.pop((event.turn_id, event.attempt), None)
            if began_at_s is not None and event.outcome is AttemptOutcome.COMPLETED:
                self.calls_s.append(event.at_s - began_at_s)
        for command in commands:
            if isinstance(command, Dispatch):
                self._dispatched(command, event.at_s)
            elif isinstance(command, RecordDecision):
                self._decided(command)
            elif isinstance(command, EndTurn) and command.code == "budget_exceeded":
                self.n_killed += 1

    def flush(self) -> None:
        """Nothing is written anywhere."""

    def mean_admitted(self, backend: str) -> float:
        """Programs that held a place there, averaged over the time in which somebody waited for its model."""
        total, seconds = self._admitted[backend]
        return total / seconds if seconds > 0 else 0.0

    @property
    def overhead_mean_tokens(self) -> float:
        """The dear backend's allowance on average until the last program came; of the run where all came at once."""
        total, seconds = self._overhead_when_full if self._overhead_when_full[1] > 0.0 else self._overhead
        return total / seconds if seconds > 0.0 else 0.0

    def _count_admitted(self, at_s: float) -> None:
        seconds, self._seen_at_s = at_s - self._seen_at_s, at_s
        if seconds <= 0.0:
            return
        admission = self._router.admission
        self._overhead[0] += seconds * admission.books.overhead_tokens(BackendId(self._backends[0]))
        self._overhead[1] += seconds
        for name in self._backends:
            state = self._router.backends.by_id[name]  # type: ignore[index]
            if len(admission.order_by_model[state.spec.model]):  # type: ignore[index]
                kept = self._admitted[name]
                kept[0] += seconds * len(admission.ledger.account_by_backend[name].amount_by_key)
                kept[1] += seconds

    def _decided(self, decision: RecordDecision) -> None:
        self.routed.setdefault(decision.program_id, decision.routed or decision.chosen)
        view = next(view for view in decision.candidates if view.candidate == decision.chosen)
        if view.wait_s and view.wait_low_s is not None and view.wait_high_s is not None:
            self._interval[decision.program_id] = (view.wait_s, view.wait_low_s, view.wait_high_s, view.n_held)
        else:
            self._interval.pop(decision.program_id, None)

    def _dispatched(self, command: Dispatch, at_s: float) -> None:
        self._began_at_s[command.turn_id, command.attempt] = at_s
        if command.program_id in self._started:
            return
        self._started.add(command.program_id)
        arrived_at_s = self._arrived_at_s.pop(command.program_id)
        self.waits_s.append(at_s - arrived_at_s)
        forecast = self._interval.pop(command.program_id, None)
        if forecast is not None:
            self.forecasts.append((*forecast, at_s - arrived_at_s))


def run_cell(cell: Cell, forecasts: list[Wait] | None = None) -> CellResult:
    """Run one cell to its end, laws checked.

    Args:
        forecasts: takes every wait that had been forecast and came to be.
    """
    scenario = scenario_of(cell)
    stack = open_stack(scenario.config, cell.seed)
    router = stack.machine_by_name["router"]
    assert isinstance(router, Router)
    model = scenario.pool["backends"][0]["model"]
    dear = [backend["name"] for backend in scenario.pool["backends"] if backend["model"] == model]
    cheap = [backend["name"] for backend in scenario.pool["backends"] if backend["model"] != model]
    observer = Observer(router, (*dear, *cheap))
    hold_limit_s = scenario.config.router.hold_max_s
    world = World(scenario, stack, cell.seed, journal=observer, hold_limit_s=hold_limit_s, is_compiled=True)
    report = world.run()
    signals = {name: backend.signals(world.calendar.now_s) for name, backend in world.fleet.backends.items()}
    hits, queries = (sum(signals[name][f"prefix_{what}_tokens"] for name in dear) for what in ("hits", "queries"))
    per_h = 3600.0 / report.elapsed_s if report.elapsed_s > 0 else 0.0
    n_resolved = world.tally.n_solved
    waits = [forecast for forecast in observer.forecasts if forecast[0] > 0.0]
    far = [forecast for forecast in waits if forecast[3] >= 4]
    if forecasts is not None:
        forecasts.extend(Wait(*forecast) for forecast in waits)
    return CellResult(
        programs_per_h=report.programs_per_h,
        resolved=float(n_resolved),
        resolved_per_h=n_resolved * per_h,
        hit_ratio=hits / max(queries, 1.0),
        call_mean_s=mean(observer.calls_s) or 0.0,
        call_p95_s=percentile(observer.calls_s, 0.95) or 0.0,
        wait_mean_s=mean(observer.waits_s) or 0.0,
        wait_p50_s=percentile(observer.waits_s, 0.5) or 0.0,
        wait_p95_s=percentile(observer.waits_s, 0.95) or 0.0,
        output_tokens_per_h=report.completion_tokens * per_h,
        elapsed_s=report.elapsed_s,
        diverts=float(router.counts.diverts),
        preemptions=sum(values["n_preemptions"] for values in signals.values()),
        killed=float(scenario.n_programs or 0) - report.programs.get("finished", 0),
        dear_share=report.share.get(model, 0.0),
        routed_dear_share=mean([float(routed == model) for routed in observer.routed.values()]) or 0.0,
        admitted_dear=sum(observer.mean_admitted(name) for name in dear),
        admitted_cheap=sum(observer.mean_admitted(name) for name in cheap),
        overhead_tokens=float(router.admission.books.overhead_tokens(dear[0])),
        overhead_mean_tokens=observer.overhead_mean_tokens,
        forecast_n=float(len(waits)),
        forecast_covered=float(sum(low <= real <= high for _, low, high, _, real in waits)),
        forecast_within_2=float(sum(point / 2 <= real <= 2 * point for point, _, _, _, real in far)),
        forecast_n_far=float(len(far)),
    )
