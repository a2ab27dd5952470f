"""llama.cpp's own server: `/metrics` for its requests, `/slots` for its memory, `/props` for what it was started with.

KV usage left its metrics; slots show it still. Any of the three may be off (501, `--no-slots`): the others stand.
"""

from collections.abc import Mapping

from .exposition import Page, fold
from .reader import Table, TableReader, decoded, number

PROPS_EVERY_S = 60.0


class LlamacppReader(TableReader):
    """Reads `llamacpp:*`, slots and properties."""

    table = Table(
        sums={
            "n_running": ("llamacpp:requests_processing",),
            "n_waiting": ("llamacpp:requests_deferred",),
            "prompt_tokens": ("llamacpp:prompt_tokens_total",),
            "prefix_hits_tokens": ("llamacpp:prompt_tokens_cached_total",),
            "generation_tokens": ("llamacpp:tokens_predicted_total",),
        },
        largest={"kv_usage_ratio": ("llamacpp:kv_cache_usage_ratio",)},
    )
    expected = ("n_running", "n_waiting")
    extra_names = ("llamacpp:prompt_seconds_total", "llamacpp:tokens_predicted_seconds_total")

    def __init__(self, served_model: str) -> None:
        super().__init__(served_model)
        self._props_at_s: float | None = None
        self._n_slots: float | None = None

    def paths(self, at_s: float) -> tuple[str, ...]:
        if self._props_at_s is None or at_s - self._props_at_s >= PROPS_EVERY_S:
            return ("/metrics", "/slots", "/props")
        return ("/metrics", "/slots")

    def also(self, page: Page, bodies: Mapping[str, bytes], at_s: float, values: dict[str, float]) -> None:
        """Memory by slot, all that was asked for, seconds per token."""
        read, hits = values.get("prompt_tokens"), values.get("prefix_hits_tokens")
        if read is not None and hits is not None:  # what it calls prompt tokens leaves the cached ones out
            values["prefix_queries_tokens"] = read + hits
        seconds = fold(page, ["llamacpp:tokens_predicted_seconds_total"], sum)
        self._ratios.read(values, "inter_token_s", at_s, seconds, values.get("generation_tokens"))
        if "/props" in bodies:
            self._props_at_s, self._n_slots = at_s, number(decoded(bodies["/props"]), "total_slots")
        self._read_slots(decoded(bodies.get("/slots")), values)
        if self._n_slots is not None:
            values.setdefault("n_slots", self._n_slots)

    def _read_slots(self, said: object, values: dict[str, float]) -> None:
        slots = [slot for slot in said if isinstance(slot, dict)] if isinstance(said, list) else []
        if not slots:
            return
        values["n_slots"] = float(len(slots))
        values.setdefault("n_running", float(sum(slot.get("is_processing") is True for slot in slots)))
        sizes = [number(slot, "n_ctx") for slot in slots]
        known = [size for size in sizes if size is not None]
        if len(known) == len(slots):
            used = sum(_used_tokens(slot) for slot in slots if slot.get("is_processing") is True)
            values["kv_tokens"] = sum(known)
            values["kv_usage_ratio"] = min(used / sum(known), 1.0)


def _used_tokens(slot: dict[object, object]) -> float:
    """What a busy slot holds: its prompt, and what it has said so far.

    Servers differ in whether the prompt's count grows with the answer; the processed and cached parts do not.
    """
    said = slot.get("next_token")
    if isinstance(said, list):
        said = said[0] if said else None
    read = sum(number(slot, f"n_prompt_tokens_{part}") or 0.0 for part in ("processed", "cache"))
    whole = number(slot, "n_prompt_tokens") or number(slot, "n_past") or 0.0
    said_tokens = number(said, "n_decoded") or 0.0
    return max(whole, read + said_tokens) if read else whole + said_tokens
