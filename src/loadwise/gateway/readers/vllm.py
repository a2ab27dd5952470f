"""vLLM, old and new, and our emulator of it: facts as of releases 0.6 to 0.32 (and a recorded page of 0.32.0).

`kv_cache_usage_perc` counts running requests' blocks only: what is merely cached counts as free.
"""

from collections.abc import Mapping

from .exposition import Page, folded
from .reader import Table, TableReader

_CAPACITY = "vllm:cache_config_info"
_BY_REASON = "vllm:num_requests_waiting_by_reason"


class VllmReader(TableReader):
    """Reads `vllm:*`; one sample per data-parallel engine."""

    table = Table(
        sums={
            "n_running": ("vllm:num_requests_running",),
            "n_waiting": ("vllm:num_requests_waiting", _BY_REASON),
            "prefix_queries_tokens": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
            "prefix_hits_tokens": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
            "n_preemptions": ("vllm:num_preemptions_total",),
            "prompt_tokens": ("vllm:prompt_tokens_total",),
            "generation_tokens": ("vllm:generation_tokens_total",),
        },
        largest={"kv_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")},
        means={
            "e2e_s": ("vllm:e2e_request_latency_seconds",),
            "first_token_s": ("vllm:time_to_first_token_seconds",),
            "queue_s": ("vllm:request_queue_time_seconds",),
            "prefill_s": ("vllm:request_prefill_time_seconds",),
            "decode_s": ("vllm:request_decode_time_seconds",),
            "inter_token_s": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        },
    )
    extra_names = (_CAPACITY, _BY_REASON)

    def also(self, page: Page, bodies: Mapping[str, bytes], at_s: float, values: dict[str, float]) -> None:
        """Capacity stands in labels; waiting for capacity is told apart from waiting for anything else."""
        reasons = [sample for sample in page.get(_BY_REASON, ()) if sample.labels.get("reason") == "capacity"]
        waiting = folded(reasons, sum) if reasons else None
        if waiting is not None:
            values["n_waiting_capacity"] = waiting
        sizes = [_kv_tokens(sample.labels) for sample in page.get(_CAPACITY, ())]
        if sizes and all(sizes):
            values["kv_tokens"] = float(sum(sizes))
            blocks = [_whole(sample.labels.get("block_size")) for sample in page[_CAPACITY]]
            if all(blocks):
                values["kv_block_tokens"] = float(max(blocks))


def _kv_tokens(labels: Mapping[str, str]) -> int:
    """Tokens of one engine's cache; 0 where it does not say.

    The engine's own count is right for models with mixed layers, the product of blocks is not.
    """
    said = _whole(labels.get("kv_cache_size_tokens"))
    return said or _whole(labels.get("block_size")) * _whole(labels.get("num_gpu_blocks"))


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) <= 15 else 0
