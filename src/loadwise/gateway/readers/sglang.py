"""SGLang, started with `--enable-metrics`: one sample per data-parallel rank; tensor-parallel ranks repeat it."""

from collections.abc import Mapping

from .exposition import Page
from .reader import Table, TableReader, decoded, number

INFO_EVERY_S = 60.0
_INFO = "/get_server_info"


class SglangReader(TableReader):
    """Reads `sglang:*`, and the capacity from the server's description where its metrics do not have it."""

    table = Table(
        sums={
            "n_running": ("sglang:num_running_reqs",),
            "n_waiting": ("sglang:num_queue_reqs",),
            "kv_tokens": ("sglang:max_total_num_tokens",),
            "n_preemptions": ("sglang:num_retracted_requests_total",),
            "prompt_tokens": ("sglang:prompt_tokens_total",),
            "generation_tokens": ("sglang:generation_tokens_total",),
        },
        largest={
            "kv_usage_ratio": ("sglang:token_usage", "sglang:full_token_usage"),
            "kv_block_tokens": ("sglang:page_size",),
            "prefix_hit_ratio": ("sglang:cache_hit_rate",),
        },
        means={
            "e2e_s": ("sglang:e2e_request_latency_seconds",),
            "first_token_s": ("sglang:time_to_first_token_seconds",),
            "queue_s": ("sglang:queue_time_seconds",),
            "inter_token_s": ("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
        },
    )

    def __init__(self, served_model: str) -> None:
        super().__init__(served_model)
        self._info_at_s: float | None = None
        self._info_tokens: float | None = None

    def paths(self, at_s: float) -> tuple[str, ...]:
        if self._info_at_s is None or at_s - self._info_at_s >= INFO_EVERY_S:
            return ("/metrics", _INFO)
        return ("/metrics",)

    def also(self, page: Page, bodies: Mapping[str, bytes], at_s: float, values: dict[str, float]) -> None:
        """The capacity, from wherever it is told."""
        if _INFO in bodies:
            self._info_at_s, self._info_tokens = at_s, _capacity(decoded(bodies[_INFO]))
        if "kv_tokens" not in values and self._info_tokens is not None:
            values["kv_tokens"] = self._info_tokens


def _capacity(said: object) -> float | None:
    total = number(said, "max_total_num_tokens")
    states = said.get("internal_states") if isinstance(said, dict) else None
    each = [
        number(state.get("memory_usage"), "token_capacity")
        for state in (states if isinstance(states, list) else ())
        if isinstance(state, dict)
    ]
    known = [tokens for tokens in each if tokens is not None]
    return sum(known) if known else total
