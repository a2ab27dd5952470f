"""Readers: pages of every kind of engine, recorded or in its format; torn, old, and of two engines."""

from __future__ import annotations

import math
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from loadwise.gateway.readers.api import ApiMeter
from loadwise.gateway.readers.deltas import Ratio
from loadwise.gateway.readers.kinds import READER_BY_ENGINE, make_reader
from loadwise.gateway.readers.reader import TableReader
from loadwise.kernel.pool import BackendSpec

DUMPS = Path(__file__).parent / "dumps"


def reader(engine: str, served_model: str = "m") -> TableReader:
    """A fresh reader."""
    made = make_reader(BackendSpec(name="a", model="m", engine=engine, served_model=served_model))  # type: ignore[arg-type]
    assert isinstance(made, TableReader)
    return made


def dump(name: str) -> bytes:
    """A page."""
    return (DUMPS / name).read_bytes()


def read(engine: str, page: bytes | str, at_s: float = 0.0) -> dict[str, float]:
    """The signals of one page of metrics."""
    body = page.encode() if isinstance(page, str) else page
    return reader(engine).read({"/metrics": body}, at_s)


def test_a_recorded_page_of_vllm() -> None:
    """Every signal of vLLM 0.32.0, as recorded from a real server."""
    values = read("vllm", dump("vllm-0.32.0.txt"))
    assert values["n_running"] == values["n_waiting"] == values["n_waiting_capacity"] == values["kv_usage_ratio"] == 0
    assert (values["prefix_queries_tokens"], values["prefix_hits_tokens"]) == (9149.0, 6400.0)
    assert (values["prompt_tokens"], values["generation_tokens"]) == (9149.0, 334.0)
    assert values["kv_tokens"] > 0
    assert values["kv_block_tokens"] == 128
    assert "e2e_s" not in values, "one reading of a histogram says nothing of now"


def test_old_names_exponents_and_several_engines() -> None:
    """Names before 0.9 are read; of two engines sums count, and of their KV usage the larger."""
    values = read("vllm", dump("vllm-old.txt"))
    assert (values["n_running"], values["n_waiting"], values["kv_usage_ratio"]) == (8.0, 2.0, 0.5)
    assert (values["prefix_queries_tokens"], values["prefix_hits_tokens"]) == (2_000_000.0, 1_400_000.0)
    assert values["kv_tokens"] == 2 * 27_000 * 16
    tiny = read("vllm", 'vllm:gpu_cache_usage_perc{engine="0"} 9.75e-06\n')
    assert tiny == {"kv_usage_ratio": 9.75e-06}


def test_an_engine_that_shows_both_names_is_counted_once() -> None:
    """While a name is on its way out, the new one counts and the old one does not add to it."""
    both = """vllm:prefix_cache_hits_total 10
vllm:gpu_prefix_cache_hits_total 10
vllm:kv_cache_usage_perc 0.25
vllm:gpu_cache_usage_perc 0.75
vllm:num_requests_waiting 4
vllm:num_requests_waiting_by_reason{reason="capacity"} 3
vllm:num_requests_waiting_by_reason{reason="deferred"} 1
"""
    values = read("vllm", both)
    assert (values["prefix_hits_tokens"], values["kv_usage_ratio"]) == (10.0, 0.25)
    assert (values["n_waiting"], values["n_waiting_capacity"]) == (4.0, 3.0)
    without_total = "\n".join(line for line in both.splitlines() if "waiting 4" not in line) + "\n"
    assert read("vllm", without_total)["n_waiting"] == 4.0


def test_names_are_matched_exactly() -> None:
    """No comment, no longer name, none that is indented; braces and commas inside labels are text."""
    page = """# vllm:num_requests_running 99
vllm:num_requests_running{engine="0",m="a} b, c=\\"d\\""} 2.0
vllm:num_requests_running{engine="1", } 3 1700000000000
vllm:num_requests_running_total 50
 vllm:num_requests_running 5
xvllm:num_requests_running 5
vllm:kv_cache_usage_perc
"""
    assert read("vllm", page) == {"n_running": 5.0}


@pytest.mark.parametrize("rest", [" NaN", " +Inf", " -1", '="4} 7', "", " 1_0", " 1 2 3", " one", " 1e999"])
def test_one_unknown_engine_makes_the_sum_unknown(rest: str) -> None:
    """Its share is not zero; what else the page says stands."""
    line = (
        f'vllm:num_requests_running{{engine="1"}}{rest}' if rest[:1] == " " else f"vllm:num_requests_running{{e{rest}"
    )
    page = f'vllm:num_requests_running{{engine="0"}} 2.0\nvllm:num_requests_waiting 1\n{line}\n'
    assert read("vllm", page) == {"n_waiting": 1.0}
    assert read("vllm", "vllm:num_requests_running 1e308\n" * 2) == {}


def test_an_engine_that_joins_or_restarts_brings_no_lifetime_into_a_mean() -> None:
    """Its counts since its start are no news of the last half minute, though the sum over engines grows."""
    made = reader("vllm")

    def mean(at_s: float, **sum_and_count: tuple[float, float]) -> float | None:
        lines = [
            f'vllm:e2e_request_latency_seconds_{part}{{engine="{name}"}} {value}\n'
            for name, said in sum_and_count.items()
            for part, value in zip(("sum", "count"), said, strict=True)
        ]
        return made.read({"/metrics": "".join(lines).encode()}, at_s).get("e2e_s")

    assert mean(0.0, a=(10.0, 10.0)) is None
    assert mean(1.0, a=(12.0, 11.0)) == 2.0
    assert mean(2.0, a=(12.0, 11.0), b=(9000.0, 10.0)) is None, "b joins"
    assert mean(3.0, a=(12.0, 11.0), b=(9003.0, 11.0)) == 3.0
    assert mean(4.0, a=(1.0, 1.0), b=(9999.0, 99.0)) is None, "a has restarted"


@pytest.mark.parametrize("page", ["", "\x00\n{}\n", "vllm:", "vllm:num_requests_running{", "\u2028"])
def test_nothing_is_unknown_not_zero(page: str) -> None:
    """A page without a signal yields none (law L10)."""
    assert read("vllm", page) == {}


def test_a_page_with_several_models_is_read_for_the_served_one() -> None:
    """Where a proxy shows all, only ours counts; where our name is on no sample, all do."""
    page = 'vllm:num_requests_running{model_name="m"} 1\nvllm:num_requests_running{model_name="other"} 20\n'
    assert read("vllm", page) == {"n_running": 1.0}
    assert reader("vllm", "adapter").read({"/metrics": page.encode()}, 0.0) == {"n_running": 21.0}


def test_the_capacity_that_the_engine_counted_comes_before_blocks_times_size() -> None:
    """Of models with mixed layers the product is wrong; a label without a number leaves the capacity unknown."""
    line = 'vllm:cache_config_info{block_size="784",engine="0",kv_cache_size_tokens="250000",num_gpu_blocks="1100"} 1\n'
    assert read("vllm", line) == {"kv_tokens": 250_000.0, "kv_block_tokens": 784.0}
    unknown = line.replace('"250000"', '"None"').replace('"1100"', '"None"')
    assert read("vllm", unknown) == {}


def page_of_latency(total_s: float, count: float) -> bytes:
    """A page of one histogram."""
    return (
        f"vllm:e2e_request_latency_seconds_sum {total_s}\nvllm:e2e_request_latency_seconds_count {count}\n"
        f'vllm:e2e_request_latency_seconds_bucket{{le="+Inf"}} {count}\n'
    ).encode()


def test_histograms_are_read_as_differences_and_survive_a_restart() -> None:
    """The mean is that of the last half minute; a counter that falls begins anew, and silence is unknown."""
    vllm = reader("vllm")

    def at(at_s: float, total_s: float, count: float) -> float | None:
        return vllm.read({"/metrics": page_of_latency(total_s, count)}, at_s).get("e2e_s")

    assert at(0.0, 1000.0, 100.0) is None
    assert at(1.0, 1006.0, 102.0) == 3.0
    assert at(20.0, 1006.0, 102.0) == 3.0
    assert at(60.0, 1006.0, 102.0) is None, "nothing ended within the window"
    assert at(61.0, 5.0, 1.0) is None, "a restart"
    assert at(62.0, 11.0, 2.0) == 6.0


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 100)), min_size=2, max_size=60))
def test_a_ratio_of_growing_counters_is_a_mean_of_what_was_added(added: list[tuple[int, float]]) -> None:
    """Law of deltas: never below the smallest nor above the largest mean that was added, and never of nothing."""
    ratio, total, count = Ratio(), 0.0, 0
    each = []
    for i, (n, mean) in enumerate(added):
        total, count = total + n * mean, count + n
        each += [mean] if n and i else []
        found = ratio.at(float(i), total, float(count))
        if found is not None:
            assert min(each) - 1e-6 <= found <= max(each) + 1e-6


def test_sglang() -> None:
    """Data-parallel ranks add up, tensor-parallel ones repeat; capacity from metrics, else from the description."""
    sglang = reader("sglang")
    assert sglang.paths(0.0) == ("/metrics", "/get_server_info")
    values = sglang.read({"/metrics": dump("sglang.txt")}, 0.0)
    assert (values["n_running"], values["n_waiting"], values["kv_usage_ratio"]) == (6.0, 1.0, 0.37)
    assert (values["kv_tokens"], values["prefix_hit_ratio"]) == (461_234.0, 0.81)
    info = b'{"max_total_num_tokens": 5000, "internal_states": [{"memory_usage": {"token_capacity": 4096}}]}'
    other = reader("sglang")
    assert other.read({"/metrics": b"", "/get_server_info": info}, 0.0) == {"kv_tokens": 4096.0}
    assert other.paths(1.0) == ("/metrics",)
    assert other.read({"/metrics": b""}, 1.0) == {"kv_tokens": 4096.0}
    assert other.paths(61.0) == ("/metrics", "/get_server_info")


def test_a_recorded_busy_llamacpp() -> None:
    """Requests from the metrics, memory from the slots, as recorded from a real server (2 slots, 3 calls)."""
    llama = reader("llamacpp")
    pages = {
        "/metrics": dump("llamacpp-metrics.txt"),
        "/slots": dump("llamacpp-slots.json"),
        "/props": dump("llamacpp-props.json"),
    }
    assert llama.paths(0.0) == tuple(pages)
    values = llama.read(pages, 0.0)
    assert (values["n_running"], values["n_waiting"], values["n_slots"], values["kv_tokens"]) == (2, 1, 2, 4096)
    assert values["kv_usage_ratio"] == pytest.approx((44 + 45) / 4096)
    assert llama.paths(0.5) == ("/metrics", "/slots")


def test_llamacpp_hits_of_the_last_half_minute() -> None:
    """What it calls prompt tokens leaves the cached ones out, so the share is of both together."""
    llama, page = reader("llamacpp"), "llamacpp:prompt_tokens_total {}\nllamacpp:prompt_tokens_cached_total {}\n"
    first, then = (
        llama.read({"/metrics": page.format(*n).encode()}, at_s) for n, at_s in (((100, 20), 0), ((130, 90), 1))
    )
    assert "prefix_hit_ratio" not in first
    assert (then["prefix_queries_tokens"], then["prefix_hit_ratio"]) == (220.0, 0.7)


def test_llamacpp_with_its_metrics_off_still_shows_its_slots() -> None:
    """Busy slots are counted; without slots either, nothing is known."""
    values = reader("llamacpp").read({"/slots": dump("llamacpp-slots.json")}, 0.0)
    assert (values["n_running"], values["n_slots"]) == (2, 2)
    assert "n_waiting" not in values
    busy = b'{"is_processing":true,"next_token":{"n_decoded":5},"n_past":7}'
    odd = b'[{"id":0,"is_processing":false,"n_ctx":4096},' + busy + b", 3]"
    assert reader("llamacpp").read({"/slots": odd}, 0.0) == {"n_running": 1.0, "n_slots": 2.0}
    assert reader("llamacpp").read({"/slots": b"[", "/props": b"[]"}, 0.0) == {}


def test_tgi_and_trtllm() -> None:
    """What they call their queues, batches and blocks."""
    pages = {"/metrics": dump("tgi.txt"), "/info": b'{"max_batch_total_tokens": 48000}'}
    assert reader("tgi").read(pages, 0.0) == {
        "n_running": 8.0,
        "n_waiting": 3.0,
        "kv_tokens": 48_000.0,
        "kv_usage_ratio": 0.25,
    }
    assert read("trtllm", dump("trtllm.txt")) == {
        "n_running": 6.0,
        "n_waiting": 1.0,
        "kv_usage_ratio": 0.42,
        "kv_block_tokens": 32.0,
        "kv_tokens": 160_000.0,
    }


@given(engine=st.sampled_from(sorted(READER_BY_ENGINE)), page=st.binary(max_size=300), at_s=st.floats(0, 1e6))
def test_no_page_breaks_a_reader(engine: str, page: bytes, at_s: float) -> None:
    """Whatever comes, signals are finite numbers or absent."""
    made = reader(engine)
    values = made.read(dict.fromkeys(("/metrics", "/slots", "/props", "/info", "/get_server_info"), page), at_s)
    assert all(math.isfinite(value) for value in values.values())


def test_a_paid_api_is_known_by_our_own_traffic() -> None:
    """In flight, the minute's sends over the limit, a running latency; what headers said holds until its reset."""
    meter = ApiMeter(requests_per_minute=4)
    assert meter.read(0.0) == {"n_running": 0.0, "request_window": 0.0, "request_window_ratio": 0.0}
    meter.sent(0.0)
    meter.sent(1.0)
    assert meter.read(1.0)["n_running"] == 2.0
    meter.answered(0.0, 10.0, {b"x-ratelimit-remaining-tokens": b"9000", b"x-ratelimit-reset-tokens": b"6s"})
    meter.heard(11.0, {b"retry-after": b"3", b"x-ratelimit-remaining-requests": b"lots"})
    meter.ended()
    values = meter.read(12.0)
    assert values == {
        "n_running": 0.0,
        "request_window": 2.0,
        "request_window_ratio": 0.5,
        "e2e_s": 10.0,
        "ratelimit_tokens": 9000.0,
        "retry_after_s": 2.0,
    }
    assert "retry_after_s" not in meter.read(14.5)
    assert "ratelimit_tokens" not in meter.read(16.5)
    assert meter.read(60.5)["request_window"] == 1.0
    meter.sent(70.0)
    meter.answered(70.0, 75.0, {})
    assert meter.read(75.0)["e2e_s"] == pytest.approx(9.0)
