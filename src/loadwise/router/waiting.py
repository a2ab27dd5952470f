"""How long a program would wait for a model: what is known of line, gate and who runs, put into `ledger.drain`."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from loadwise.kernel.ids import BackendId, ModelId, ProgramId
from loadwise.kernel.pool import CapacityUnit
from loadwise.ledger.demand import PSEUDO_OBSERVATIONS, Demand
from loadwise.ledger.drain import (
    AHEAD_DOUBT,
    PEAKS_DOUBT,
    PRIOR_WEIGHT,
    Crowd,
    Drain,
    Floats,
    Gate,
    Lives,
    Newcomer,
)
from loadwise.ledger.forecast import (
    NO_WAIT,
    Errors,
    Forecast,
    around,
    certain,
    mean_wait_s,
    span_of,
)
from loadwise.ledger.ledger import RATE_WINDOW_S

from .admission import Admission
from .backends import Backends
from .config import RouterConfig
from .gates import FootprintGate
from .program import Program, Turn

PACE_RECENT = 20
"""Ended programs of a model whose pace counts: engines become slower and faster."""
RATE_MIN = 1e-3


class Held(NamedTuple):
    """What is known of one program that has a place."""

    tokens: float
    elapsed_s: float
    left_s: float
    base: float
    slope: float


class Waiting:
    """Forecasts; changes nothing but what it learns of its own errors."""

    def __init__(self, config: RouterConfig, backends: Backends, admission: Admission) -> None:
        self._config = config
        self._backends = backends
        self._admission = admission
        self.errors = Errors()

    def forecast(self, model_id: ModelId, turn: Turn | None, program: Program, at_s: float) -> Forecast:
        """The wait of a program that would join the model's order now.

        Args:
            turn: its first; None where there is none to be placed, and then only the line counts.
        """
        n_ahead = self._n_held(model_id, at_s)
        if n_ahead == 0 and turn is not None and self._admission.room_at(model_id, turn, program, at_s) is not None:
            return NO_WAIT
        return self.line(model_id, n_ahead, at_s, is_shown=True)(n_ahead)

    def line(self, model_id: ModelId, n_most: int, at_s: float, *, is_shown: bool = False) -> Callable[[int], Forecast]:
        """The waits of all who stand in a model's line, by how many stand before them.

        Args:
            is_shown: whether the interval is asked for, where the rule needs the mean only.
        """
        windows = self._windows(model_id, at_s)
        if windows is not None:
            frees_at_s = windows
            return lambda n: certain(_window_wait_s(frees_at_s, n, at_s))
        demands = [self._admission.demand_by_model[m] for m in self._sharing(model_id, at_s)]
        is_mean = self._config.divert.is_on and self._config.divert.forecast == "mean"
        held = self._held(model_id, at_s)
        run_s = sum(demand.expected_run_s for demand in demands) / len(demands)
        if is_mean and not is_shown:
            return lambda n: certain(mean_wait_s(n, len(held), run_s))
        drain = self._drain(model_id, demands, held, n_most, at_s)
        own = demands[0]
        leave_per_s = own.n_left / (own.waited_s + PSEUDO_OBSERVATIONS * drain.life_s)

        def wait(n_ahead: int) -> Forecast:
            said = self.errors.corrected(span_of(drain, n_ahead, leave_per_s))
            return around(mean_wait_s(n_ahead, len(held), run_s), said) if is_mean else said

        return wait

    # --- what the line waits for ---

    def _drain(
        self, model_id: ModelId, demands: Sequence[Demand], held: Sequence[Held], n_most: int, at_s: float
    ) -> Drain:
        budget_s = math.inf if self._config.budget_s is None else self._config.budget_s
        left_s = np.array([h.left_s for h in held], dtype=np.float64)
        first_tokens = float(demands[0].first_tokens)
        rate_per_s = _tokens_per_s(demands, held, first_tokens)
        if rate_per_s < RATE_MIN:  # nobody counts tokens here: seconds have to do, and each fills a place
            elapsed_s, share = np.array([h.elapsed_s for h in held]), np.full(len(held), 1.0 / max(len(held), 1))
            places = Crowd(elapsed_s, left_s, share, np.zeros(len(held)))
            one = Newcomer(0.0, 1.0, budget_s, 1.0 / max(len(held), 1), 0.0)
            return Drain(places, _lives_in_s(demands, elapsed_s), one, Gate(limit=1.0), n_most)
        rows = np.array([(h.tokens, h.base, h.slope) for h in held], dtype=np.float64).reshape(-1, 3)
        tokens, base, slope = rows.T
        crowd = Crowd(tokens, left_s, base, slope)
        gate, each, per_token = self._gate(model_id, demands, at_s)
        if held and not slope.any():  # other units, or other rules, than tokens: who is there fills what there is
            gate, each, per_token = Gate(limit=float(base.sum())), float(base.mean()), 0.0
        newcomer = Newcomer(first_tokens, rate_per_s, budget_s, each, per_token)
        return Drain(crowd, _lives_in_tokens(demands, tokens), newcomer, gate, n_most)

    def _gate(self, model_id: ModelId, demands: Sequence[Demand], at_s: float) -> tuple[Gate, float, float]:
        """The gate, and what a newcomer fills of a cache: a share, and a share for each token."""
        admission, gate = self._admission, self._looking_ahead
        ids = self._backends_sharing(model_id, at_s)
        accounts = [admission.ledger.account_by_backend[b] for b in ids]
        shares = [self._share(b, len(account.amount_by_key)) for b, account in zip(ids, accounts, strict=True)]
        base, slope = (sum(values) / len(ids) for values in zip(*shares, strict=True))
        limit = float(len({a.pool or f"backend:{b}" for a, b in zip(accounts, ids, strict=True)}))
        sum_peaks = sum(PSEUDO_OBSERVATIONS * demand.prior_tokens + demand.sum_peak_tokens for demand in demands)
        n_peaks = sum(PSEUDO_OBSERVATIONS + demand.n_finished for demand in demands)
        if gate is None:
            return Gate(limit=limit, sum_peaks=sum_peaks, n_peaks=n_peaks, doubt=PEAKS_DOUBT), base, slope
        own = [b for b in self._backends.usable(model_id, at_s) if admission.is_gated(b)]
        ahead = Gate(
            limit=limit,
            looks_ahead=True,
            sum_peaks=sum_peaks,
            n_peaks=n_peaks,
            n_missing=max(min((gate.n_missing(b) for b in own), default=0.0), 0.0),
            doubt=AHEAD_DOUBT,
        )
        return ahead, base, slope

    @property
    def _looking_ahead(self) -> FootprintGate | None:
        """The gate, if the line is let in by what all together come to; where it reserves, it is by peaks."""
        gate = self._admission.gate
        return gate if isinstance(gate, FootprintGate) and not self._config.admission.reserves else None

    def _share(self, backend_id: BackendId, n_programs: int) -> tuple[float, float]:
        """What a program fills of the backend, as the gate counts: a share of its limit, and a share for each token."""
        admission, gate = self._admission, self._looking_ahead
        account = admission.ledger.account_by_backend[backend_id]
        if not admission.is_gated(backend_id) or self._config.admission.kind not in ("ledger", "footprint"):
            return 1.0 / max(n_programs, 1), 0.0
        ratio = self._config.admission_ratio if gate is None else gate.bound_ratio(backend_id)
        extra_tokens = admission.books.extra_tokens(backend_id, n_programs) / max(n_programs, 1)
        limit = max(ratio * account.capacity, 1.0)
        return max(extra_tokens, 0.0) / limit, 1.0 / limit

    def _held(self, model_id: ModelId, at_s: float) -> list[Held]:
        """Everybody who holds a place there."""
        books, found = self._admission.books, []
        for backend_id in self._backends_sharing(model_id, at_s):
            amounts = books.ledger.account_by_backend[backend_id].amount_by_key
            base, slope = self._share(backend_id, len(amounts))
            for key, amount in amounts.items():
                program = books.programs.get(ProgramId(key))
                if program is None:
                    found.append(Held(float(amount), 0.0, math.inf, base, slope))
                    continue
                began_at_s = at_s if program.admitted_at_s is None else program.admitted_at_s
                ends_at_s = math.inf if program.budget_ends_at_s is None else program.budget_ends_at_s
                elapsed_s, left_s = max(at_s - began_at_s, 0.0), max(ends_at_s - at_s, 0.0)
                found.append(Held(float(program.tokens), elapsed_s, left_s, base, slope))
        return found

    def _windows(self, model_id: ModelId, at_s: float) -> list[float] | None:
        """When the next requests per minute come free, earliest first, where such are all that the line waits for."""
        ledger, found = self._admission.ledger, []
        for backend_id in self._backends.usable(model_id, at_s):
            account = ledger.account_by_backend[backend_id]
            if account.unit is not CapacityUnit.REQUESTS_PER_MINUTE:
                return None
            granted = [g + RATE_WINDOW_S for g in account.granted_at_s[-account.capacity :] if g > at_s - RATE_WINDOW_S]
            found += [at_s] * (account.capacity - len(granted)) + granted
        return sorted(found) or None

    def _backends_sharing(self, model_id: ModelId, at_s: float) -> list[BackendId]:
        """Backends whose departures make room for the model: its own, and those that use the same caches."""
        ledger = self._admission.ledger
        ids = self._backends.usable(model_id, at_s) or self._backends.all_of(model_id)
        return list(dict.fromkeys(BackendId(m) for b in ids for m in ledger.members(b)))

    def _sharing(self, model_id: ModelId, at_s: float) -> list[ModelId]:
        """Models that wait for the same room, itself first."""
        by_backend = self._admission.books.model_by_backend
        return list(dict.fromkeys([model_id, *(by_backend[b] for b in self._backends_sharing(model_id, at_s))]))

    def _n_held(self, model_id: ModelId, at_s: float) -> int:
        return sum(len(self._admission.order_by_model[m]) for m in self._sharing(model_id, at_s))


def _tokens_per_s(demands: Sequence[Demand], held: Sequence[Held], first_tokens: float) -> float:
    """How fast contexts grow, over whole lives of late and those that run; a prior life is worth two of them."""
    tokens = sum(PRIOR_WEIGHT * max(demand.prior_tokens - first_tokens, 0.0) for demand in demands)
    seconds = sum(PRIOR_WEIGHT * demand.prior_run_s for demand in demands)
    for demand in demands:
        peaks, runs_s = demand.recent_peaks[-PACE_RECENT:], demand.recent_runs_s[-PACE_RECENT:]
        if len(peaks) == len(runs_s):
            tokens += sum(max(peak - first_tokens, 0.0) for peak in peaks)
            seconds += sum(runs_s)
    tokens += sum(max(h.tokens - first_tokens, 0.0) for h in held)
    seconds += sum(h.elapsed_s for h in held)
    if not any(demand.recent_peaks for demand in demands) and not any(h.tokens > 0.0 for h in held):
        return 0.0
    return tokens / max(seconds, 1e-9)


def _lives_in_s(demands: Sequence[Demand], elapsed_s: Floats) -> Lives:
    """Run times, with those that were cut off."""
    return Lives(
        [demand.prior_run_s for demand in demands],
        [s for demand in demands for s in demand.recent_runs_s],
        [*elapsed_s.tolist(), *(s for demand in demands for s in demand.cut_s)],
    )


def _lives_in_tokens(demands: Sequence[Demand], tokens: Floats) -> Lives:
    """Peaks, with the contexts of those that were cut off."""
    return Lives(
        [float(demand.prior_tokens) for demand in demands],
        [float(peak) for demand in demands for peak in demand.recent_peaks],
        [*tokens.tolist(), *(float(cut) for demand in demands for cut in demand.cut_tokens)],
    )


def _window_wait_s(frees_at_s: Sequence[float], n_ahead: int, at_s: float) -> float:
    """The wait behind `n_ahead` requests: each takes the next that comes free, for a window's length.

    >>> _window_wait_s([10.0, 20.0], 3, 5.0)
    75.0
    """
    rounds, place = divmod(n_ahead, len(frees_at_s))
    return max(frees_at_s[place] - at_s, 0.0) + rounds * RATE_WINDOW_S
