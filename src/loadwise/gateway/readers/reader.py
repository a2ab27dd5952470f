"""What a reader is, and the tables that most of them are made of.

Signals, whatever the engine (absent where the engine does not tell, law L10):

    n_running, n_waiting        requests in the engine
    kv_usage_ratio              used share of the KV cache; of several engines the fullest
    kv_tokens, kv_block_tokens  its size, all engines together, as the engine believes it; the size of a block
    n_slots                     requests that run at once, where that is a fixed number
    e2e_s, first_token_s, queue_s, prefill_s, decode_s, inter_token_s   means of the last half minute
    prefix_hit_ratio            of the last half minute
    prefix_queries_tokens, prefix_hits_tokens, n_preemptions, prompt_tokens, generation_tokens   totals since its start
"""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from .deltas import Ratios
from .exposition import Page, fold, kept, of_model, parts, read_page, wanted


class Reader(Protocol):
    """Makes signals of an engine's pages; keeps earlier readings for differences."""

    expected: tuple[str, ...]
    """Signals that every engine of the kind should show."""

    def paths(self, at_s: float) -> tuple[str, ...]:
        """What to ask for now, from the server's root; the first is the one that must answer."""
        ...

    def read(self, bodies: Mapping[str, bytes], at_s: float) -> dict[str, float]:
        """The signals in what came back; pages that failed are absent."""
        ...


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Where a kind of engine shows what: names by preference, the newest first."""

    sums: dict[str, tuple[str, ...]]
    """Of several engines behind one target the sum counts."""
    largest: dict[str, tuple[str, ...]]
    means: dict[str, tuple[str, ...]] = {}
    """Histograms of seconds, by their base name."""

    def names(self) -> list[str]:
        """Every metric that is looked for."""
        plain = [name for names in (*self.sums.values(), *self.largest.values()) for name in names]
        return plain + [
            f"{name}_{part}" for names in self.means.values() for name in names for part in ("sum", "count")
        ]


class TableReader:
    """Reads `/metrics` by a table. Kinds of engines with more to tell override `also`."""

    table: Table
    expected: tuple[str, ...] = ("n_running", "n_waiting", "kv_usage_ratio")
    extra_names: tuple[str, ...] = ()

    def __init__(self, served_model: str) -> None:
        self._served_model = served_model
        self._ratios = Ratios()
        self._lines = wanted([*self.table.names(), *self.extra_names])

    def paths(self, at_s: float) -> tuple[str, ...]:
        return ("/metrics",)

    def read(self, bodies: Mapping[str, bytes], at_s: float) -> dict[str, float]:
        page = self._page(bodies.get("/metrics", b""))
        values: dict[str, float] = {}
        for signals, how in ((self.table.sums, sum), (self.table.largest, max)):
            for signal, names in signals.items():
                value = fold(page, names, how)
                if value is not None:
                    values[signal] = value
        for signal, names in self.table.means.items():
            total, count = (fold(page, [f"{name}_{part}" for name in names], sum) for part in ("sum", "count"))
            each = parts(page, [f"{name}_count" for name in names])
            self._ratios.read(values, signal, at_s, total, count, each)
        self.also(page, bodies, at_s, values)
        hits, queries = values.get("prefix_hits_tokens"), values.get("prefix_queries_tokens")
        each = parts(page, self.table.sums.get("prefix_queries_tokens", ()))
        self._ratios.read(values, "prefix_hit_ratio", at_s, hits, queries, each)
        return values

    def also(self, page: Page, bodies: Mapping[str, bytes], at_s: float, values: dict[str, float]) -> None:
        """Add what the table cannot say."""

    def _page(self, body: bytes) -> Page:
        page = of_model(read_page(body.decode("utf-8", "replace"), self._lines), self._served_model)
        return kept(page, _is_first_rank)


def _is_first_rank(labels: Mapping[str, str]) -> bool:
    """Ranks that share one request (tensor, pipeline) all count it; data-parallel ones do not."""
    return all(labels.get(name, "0") in ("", "0") for name in ("tp_rank", "pp_rank"))


def decoded(body: bytes | None) -> object:
    """JSON, or None where it is none."""
    try:
        return None if body is None else msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None


def number(said: object, name: str) -> float | None:
    """A positive number of a JSON object, or None."""
    value = said.get(name) if isinstance(said, dict) else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < 1e15 else None  # type: ignore[operator, arg-type]
