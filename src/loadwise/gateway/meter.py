"""What the gateway counts, and its page for Prometheus. Labels are backends, models and outcomes: all bounded."""

from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CollectorRegistry,
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import generate_latest

from loadwise.kernel.pool import BackendHealth
from loadwise.router.machine import Router

if TYPE_CHECKING:
    from .judging import Judging
    from .turns import Turns

OVERHEAD_BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class Histogram:
    """Counts by upper bound; one observation costs a bisection."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        """The histogram as Prometheus reads it."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._sum)


class Meter:
    """Counters of the live host."""

    def __init__(self) -> None:
        self.overhead_s = Histogram(OVERHEAD_BOUNDS_S)
        self.n_refused_by_status: dict[int, int] = {}

    def count_refusal(self, status: int) -> None:
        """A request that never became a turn."""
        self.n_refused_by_status[status] = self.n_refused_by_status.get(status, 0) + 1

    def page(self, turns: "Turns") -> bytes:
        """The whole page in Prometheus' text format."""
        registry = CollectorRegistry()
        registry.register(_Collector(self, turns))
        return generate_latest(registry)


class _Collector:
    def __init__(self, meter: Meter, turns: "Turns") -> None:
        self._meter = meter
        self._turns = turns

    def collect(self) -> Iterator[Metric]:
        router = self._turns.host.router
        yield from _turn_families(router)
        yield from _program_families(router, self._turns)
        yield from _backend_families(router, self._turns.host.now_s())
        yield from _cache_families(router)
        yield from _spending_families(router, self._turns.host.now_s())
        refused = CounterMetricFamily("loadwise_requests_refused", "Requests that became no turn", labels=["status"])
        for status, n in sorted(self._meter.n_refused_by_status.items()):
            refused.add_metric([str(status)], n)
        yield refused
        text = "Seconds between a request and its dispatch, waiting for admission left out"
        yield self._meter.overhead_s.family("loadwise_overhead_seconds", text)
        text = "Questions to the index of archived programs that it could not answer"
        yield CounterMetricFamily("loadwise_index_failures", text, value=self._turns.archive.n_failures)
        if self._turns.judging is not None:
            yield from _verification_families(self._turns.judging)
        is_writable = self._turns.host.failure is None
        yield GaugeMetricFamily("loadwise_journal_writable", "1 while the journal can be written", value=is_writable)


def _verification_families(judging: "Judging") -> Iterator[Metric]:
    tally, verification = judging.verification.tally, judging.verification
    text = "Verdicts of verifiers that are run here, by kind and verdict"
    done = CounterMetricFamily("loadwise_verifications", text, labels=["kind", "verdict"])
    for (kind, verdict), n in sorted(tally.n_by_outcome.items()):
        done.add_metric([kind, verdict], n)
    yield done
    depth = GaugeMetricFamily("loadwise_verifications_open", "Programs to be judged", labels=["kind", "state"])
    for kind, (n_waiting, n_running) in sorted(verification.depth().items()):
        depth.add_metric([kind, "waiting"], n_waiting)
        depth.add_metric([kind, "running"], n_running)
    yield depth
    seconds = SummaryMetricFamily("loadwise_verification_seconds", "Seconds of judging, by kind", labels=["kind"])
    for kind, (n, total_s) in sorted(tally.seconds_by_kind.items()):
        seconds.add_metric([kind], count_value=n, sum_value=total_s)
    yield seconds
    cost = CounterMetricFamily("loadwise_verification_usd", "US dollars that judging has cost", labels=["kind"])
    for kind, cost_usd in sorted(tally.cost_usd_by_kind.items()):
        cost.add_metric([kind], cost_usd)
    yield cost
    yield CounterMetricFamily("loadwise_verification_retries", "Checks that were tried again", value=tally.n_retries)
    trusted = GaugeMetricFamily(
        "loadwise_verifier_trusted", "1 where a verifier has judged its known cases rightly", labels=["task_type"]
    )
    for name, one in sorted(verification.assigned.items()):
        trusted.add_metric([name], float(one.health.is_checked and not one.health.problem))
    yield trusted
    kept = judging.intake.n_bytes
    yield GaugeMetricFamily("loadwise_verification_kept_bytes", "Texts of open programs, in memory", value=kept)
    spooled = 0 if judging.spool is None else judging.spool.n_bytes
    yield GaugeMetricFamily("loadwise_verification_spool_bytes", "What waits to be judged, on disk", value=spooled)


def _turn_families(router: Router) -> Iterator[Metric]:
    counts = router.counts
    ended = CounterMetricFamily("loadwise_turns_ended", "Turns that ended, by outcome", labels=["outcome"])
    for outcome in ("completed", "failed", "rejected", "evicted", "cancelled"):
        ended.add_metric([outcome], getattr(counts, outcome))
    yield ended
    yield CounterMetricFamily("loadwise_turns_arrived", "Turns that arrived", value=counts.arrived)
    yield CounterMetricFamily("loadwise_turns_held", "Turns that had to wait for admission", value=counts.held)
    yield GaugeMetricFamily("loadwise_turns_open", "Turns that are open now", value=len(router.turns))
    yield GaugeMetricFamily(
        "loadwise_turns_waiting", "Turns that wait for admission now", value=router.admission.n_held
    )


def _program_families(router: Router, turns: "Turns") -> Iterator[Metric]:
    table, counts, credit = router.table, router.counts, router.credit
    yield GaugeMetricFamily("loadwise_programs_open", "Programs that take turns", value=table.n_open)
    yield GaugeMetricFamily("loadwise_programs_verifying", "Programs without a verdict", value=len(table.verifying))
    for name, text in (
        ("diverts", "Programs that ran on another model than chosen, because they start sooner there"),
        ("rebinds", "Started programs that were moved because their model's backends were gone"),
        ("pauses", "Places that were taken back from started programs"),
    ):
        yield CounterMetricFamily(f"loadwise_{name}", text, value=getattr(counts, name))
    text = "Share of the success expected of late programs that diverts gave up"
    yield GaugeMetricFamily("loadwise_diverts_forgone_ratio", text, value=router.desk.divert.forgone.ratio)
    yield CounterMetricFamily("loadwise_programs_censored", "Programs whose verdict never came", value=counts.censored)
    yield CounterMetricFamily("loadwise_decisions", "Decisions made", value=router.routing.n_decisions)
    yield GaugeMetricFamily("loadwise_decisions_pending", "Decisions unjudged", value=len(credit.pending_by_decision))
    verdicts = CounterMetricFamily("loadwise_verdicts", "Verdicts by what became of them", labels=["fate"])
    for fate, n in (
        ("credited", credit.n_landed),
        ("abstained", counts.verdicts_abstained),
        ("late", counts.verdicts_late),
        ("corrected", counts.verdicts_corrected),
        ("stale", counts.verdicts_stale),
    ):
        verdicts.add_metric([fate], n)
    yield verdicts
    alarms = CounterMetricFamily(
        "loadwise_policy_alarms", "Times that a model counted as changed, to policy drift", labels=["model"]
    )
    for model, n in sorted(credit.alarms().items()):
        alarms.add_metric([model], n)
    yield alarms
    text = "Times that a user's policy class raised or answered nonsense; the cheapest model was taken"
    yield CounterMetricFamily("loadwise_policy_errors", text, value=counts.policy_errors)
    yield CounterMetricFamily(
        "loadwise_malformed", "Events or usage that could not be believed", value=counts.malformed
    )
    prefixes = CounterMetricFamily("loadwise_prefix", "Requests without an id, by recognition", labels=["result"])
    for result, n in (
        ("matched", turns.prefixes.n_matched),
        ("unmatched", turns.prefixes.n_unmatched),
        ("ambiguous", turns.prefixes.n_ambiguous),
        ("unread", turns.prefixes.n_unread),
    ):
        prefixes.add_metric([result], n)
    yield prefixes
    types = CounterMetricFamily(
        "loadwise_task_types", "First requests, by where their task type is from", labels=["origin"]
    )
    for origin, n in turns.n_types_by_origin.items():
        types.add_metric([origin], n)
    yield types


def _spending_families(router: Router, now_s: float) -> Iterator[Metric]:
    """Money, where a budget of dollars is kept."""
    purse = router.spending.purse
    if purse is None:
        return
    text = "US dollars that all turns of a rolling hour may cost"
    yield GaugeMetricFamily("loadwise_budget_usd_hour", text, value=purse.limit_usd)
    text = "US dollars that attempts cost which ended within the hour"
    yield GaugeMetricFamily("loadwise_spent_usd_hour", text, value=purse.spent_usd(now_s))
    text = "US dollars promised to turns that are open, or whose end is not told yet"
    yield GaugeMetricFamily("loadwise_promised_usd", text, value=purse.promised_usd)
    text = "Turns refused because the hour's dollars were spent or promised"
    yield CounterMetricFamily("loadwise_budget_refusals", text, value=router.counts.over_budget)


def _cache_families(router: Router) -> Iterator[Metric]:
    """KV caches of which it is learned how full they may be, by `backend:NAME` or `pool:NAME`."""
    books = router.admission.books
    shown = {books.cache(b): b for b in router.backends.by_id}
    fill = GaugeMetricFamily("loadwise_cache_fill_ratio", "Contexts of programs over capacity", labels=["cache"])
    bound = GaugeMetricFamily("loadwise_cache_bound_ratio", "How full it may be, as learned", labels=["cache"])
    lost = GaugeMetricFamily("loadwise_cache_lost_ratio", "Late turns that lost their context", labels=["cache"])
    thrashing = GaugeMetricFamily("loadwise_cache_thrashing", "1 while programs are paused for it", labels=["cache"])
    for cache, backend_id in shown.items():
        residency = books.residency_by_cache.get(cache)
        if residency is None:
            continue  # nothing learned yet; what was learned of a cache that nobody uses any more is not shown
        fill.add_metric([cache], books.fill_ratio(backend_id))
        bound.add_metric([cache], residency.bound_ratio)
        lost.add_metric([cache], residency.lost_share)
        thrashing.add_metric([cache], float(residency.is_thrashing))
    yield from (fill, bound, lost, thrashing)


def _backend_families(router: Router, now_s: float) -> Iterator[Metric]:
    labels = ["backend", "model"]
    running = GaugeMetricFamily("loadwise_backend_running", "Turns of ours in flight", labels=labels)
    up = GaugeMetricFamily("loadwise_backend_up", "1 while new programs are sent there", labels=labels)
    reserved = GaugeMetricFamily(
        "loadwise_backend_reserved", "Reserved, in the backend's unit", labels=[*labels, "unit"]
    )
    headroom = GaugeMetricFamily("loadwise_backend_headroom", "Capacity minus reserved", labels=[*labels, "unit"])
    for backend_id, state in router.backends.by_id.items():
        where = [backend_id, state.spec.model]
        account = router.admission.ledger.account_by_backend[backend_id]
        running.add_metric(where, state.n_running)
        up.add_metric(where, float(state.health is BackendHealth.UP))
        reserved.add_metric([*where, account.unit.value], account.reserved)
        headroom.add_metric([*where, account.unit.value], router.admission.ledger.headroom(backend_id, at_s=now_s))
    yield from (running, up, reserved, headroom)
