"""An engine's readings as Prometheus text, under vLLM's names and labels (checked against a recorded scrape)."""

from bisect import bisect_left

from loadwise.sim.engine import Engine
from loadwise.sim.simple_engine import SimpleEngine
from loadwise.sim.vllm_engine import VllmEngine

BLOCK_TOKENS = 16
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")

_GAUGES = (
    ("num_requests_running", "n_running", "Number of requests in model execution batches."),
    ("num_requests_waiting", "n_waiting", "Number of requests waiting to be processed."),
    ("kv_cache_usage_perc", "kv_usage_ratio", "KV-cache usage. 1 means 100 percent usage."),
)
_COUNTERS = (
    ("prefix_cache_queries_total", "prefix_queries_tokens", "Prefix cache queries, in number of tokens."),
    ("prefix_cache_hits_total", "prefix_hits_tokens", "Prefix cache hits, in number of cached tokens."),
    ("num_preemptions_total", "n_preemptions", "Cumulative number of preemption from the engine."),
    ("prompt_tokens_total", "prompt_tokens", "Number of prefill tokens processed."),
    ("generation_tokens_total", "generation_tokens", "Number of generation tokens processed."),
)
_TTFT_BUCKETS_S: tuple[float, ...] = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_E2E_BUCKETS_S: tuple[float, ...] = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Histogram:
    """A Prometheus histogram of seconds."""

    def __init__(self, name: str, text: str, bounds_s: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, value_s: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds_s, value_s)] += 1
        self._sum_s += value_s

    def lines(self, labels: str) -> list[str]:
        """Its samples."""
        name, total = f"vllm:{self._name}", 0
        lines = [f"# HELP {name} {self._text}", f"# TYPE {name} histogram"]
        for bound, count in zip([*map(str, self._bounds_s), "+Inf"], self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{engine="0",le="{bound}",{labels}}} {float(total)}')
        lines.append(f'{name}_count{{engine="0",{labels}}} {float(total)}')
        lines.append(f'{name}_sum{{engine="0",{labels}}} {self._sum_s!r}')
        return lines


class EngineMetrics:
    """What an engine's HTTP front counts beside the engine itself. Seconds are real ones, as clients feel them."""

    def __init__(self, model: str) -> None:
        self._labels = f'model_name="{_escaped(model)}"'
        self._n_by_reason = dict.fromkeys(FINISH_REASONS, 0)
        self.first_token = Histogram(
            "time_to_first_token_seconds", "Histogram of time to first token in seconds.", _TTFT_BUCKETS_S
        )
        self.whole = Histogram(
            "e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", _E2E_BUCKETS_S
        )

    def count_finished(self, reason: str) -> None:
        """One request is over; vLLM counts tool calls as `stop`."""
        self._n_by_reason[reason if reason in self._n_by_reason else "stop"] += 1

    def text(self, engine: Engine, signals: dict[str, float]) -> bytes:
        """The whole page."""
        labels, lines = self._labels, []
        for name, signal, text in _GAUGES:
            lines += [f"# HELP vllm:{name} {text}", f"# TYPE vllm:{name} gauge"]
            lines.append(f'vllm:{name}{{engine="0",{labels}}} {signals[signal]!r}')
        for name, signal, text in _COUNTERS:
            lines += [f"# HELP vllm:{name} {text}", f"# TYPE vllm:{name} counter"]
            lines.append(f'vllm:{name}{{engine="0",{labels}}} {signals[signal]!r}')
        name = "vllm:request_success_total"
        lines += [f"# HELP {name} Count of successfully processed requests.", f"# TYPE {name} counter"]
        for reason, n in self._n_by_reason.items():
            lines.append(f'{name}{{engine="0",finished_reason="{reason}",{labels}}} {float(n)}')
        lines += self.first_token.lines(labels) + self.whole.lines(labels)
        lines += _cache_config(engine)
        return ("\n".join(lines) + "\n").encode()


def read_signals(page: str) -> dict[str, float]:
    """The engine's own readings out of a page of metrics, as `Engine.signals` gives them."""
    values = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name.partition("{")[0]] = value
    return {signal: float(values[f"vllm:{name}"]) for name, signal, _ in (*_GAUGES, *_COUNTERS)}


def _cache_config(engine: Engine) -> list[str]:
    """vLLM's capacity line; it has no `model_name`. An engine without KV has none."""
    name = "vllm:cache_config_info"
    if isinstance(engine, VllmEngine):
        block_tokens, n_blocks = engine.spec.block_tokens, engine.spec.n_blocks
    elif isinstance(engine, SimpleEngine):
        block_tokens, n_blocks = BLOCK_TOKENS, engine.spec.kv_tokens // BLOCK_TOKENS
    else:
        return []
    spec = engine.spec
    labels = (
        f'block_size="{block_tokens}",enable_prefix_caching="{spec.has_prefix_cache}",engine="0",'
        f'kv_cache_size_tokens="{spec.kv_tokens}",num_gpu_blocks="{n_blocks}"'
    )
    help_line = f"# HELP {name} Information of the LLMEngine CacheConfig"
    return [help_line, f"# TYPE {name} gauge", f"{name}{{{labels}}} 1.0"]


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
