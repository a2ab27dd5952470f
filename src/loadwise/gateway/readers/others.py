"""Engines that tell less: Text Generation Inference and TensorRT-LLM."""

from collections.abc import Mapping

from .exposition import Page
from .reader import Table, TableReader, decoded, number

INFO_EVERY_S = 60.0


class TgiReader(TableReader):
    """Text Generation Inference: `tgi_*`, and its token budget from `/info`."""

    table = Table(
        sums={
            "n_running": ("tgi_batch_current_size",),
            "n_waiting": ("tgi_queue_size",),
            "held_tokens": ("tgi_batch_current_max_tokens",),
        },
        largest={},
        means={
            "e2e_s": ("tgi_request_duration",),
            "queue_s": ("tgi_request_queue_duration",),
            "inter_token_s": ("tgi_request_mean_time_per_token_duration",),
        },
    )
    expected = ("n_running", "n_waiting")

    def __init__(self, served_model: str) -> None:
        super().__init__(served_model)
        self._info_at_s: float | None = None
        self._kv_tokens: float | None = None

    def paths(self, at_s: float) -> tuple[str, ...]:
        if self._info_at_s is None or at_s - self._info_at_s >= INFO_EVERY_S:
            return ("/metrics", "/info")
        return ("/metrics",)

    def also(self, page: Page, bodies: Mapping[str, bytes], at_s: float, values: dict[str, float]) -> None:
        """The share of its budget that the running batch may grow to."""
        if "/info" in bodies:
            self._info_at_s, self._kv_tokens = at_s, number(decoded(bodies["/info"]), "max_batch_total_tokens")
        held = values.pop("held_tokens", None)
        if self._kv_tokens is not None:
            values["kv_tokens"] = self._kv_tokens
            if held is not None:
                values["kv_usage_ratio"] = min(held / self._kv_tokens, 1.0)


class TrtllmReader(TableReader):
    """TensorRT-LLM: `trtllm_*`."""

    table = Table(
        sums={
            "n_running": ("trtllm_num_requests_running",),
            "n_waiting": ("trtllm_num_requests_waiting",),
            "kv_blocks": ("trtllm_kv_cache_max_blocks",),
        },
        largest={
            "kv_usage_ratio": ("trtllm_kv_cache_utilization",),
            "kv_block_tokens": ("trtllm_kv_cache_tokens_per_block",),
        },
    )

    def also(self, page: Page, bodies: Mapping[str, bytes], at_s: float, values: dict[str, float]) -> None:
        """Capacity is blocks times their size."""
        n_blocks, block_tokens = values.pop("kv_blocks", None), values.get("kv_block_tokens")
        if n_blocks and block_tokens:
            values["kv_tokens"] = n_blocks * block_tokens
