"""Our readers against real engines: vLLM on a CPU and llama.cpp's server, asked through the gateway and the doctor.

LOADWISE_VLLM_PYTHON names a Python with vLLM (bench/README.md); llama.cpp is the extra `real`. Both run tiny models of
random weights. What a signal says is held against what the calls themselves report: tokens to the last one, requests
against how many were sent at once, seconds against the test's own clock.
"""

import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.judges.servers import LLAMA_SLOT_TOKENS, LLAMA_SLOTS, VLLM_SPEC, Absent, llamacpp_server, vllm_server
from loadwise.demo.live import LoopThread
from loadwise.gateway.config import GatewayConfig
from loadwise.gateway.serve import Gateway, start
from loadwise.settings import parse_config

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("default")]

N_AT_ONCE = 5
"""More than llama.cpp has slots, so that some wait there."""
ROUNDS_MAX = 30
"""On a busy machine a whole round may pass between two looks."""
UNUSED = ROUNDS_MAX * N_AT_ONCE
"""A prompt that no round asks."""
WORDS = 120
SETTLE_S = 1800.0
"""For what must come, on however busy a machine."""


class Kind(NamedTuple):
    """One kind of engine, and what must be so of it."""

    open: Callable[[], AbstractContextManager[str]]
    engine: str
    backend: dict[str, Any]
    says: int
    """Tokens of an answer: enough that several readings fall into a call, on a busy machine too."""
    kv_tokens: float
    n_running_max: int
    always: frozenset[str]
    """Signals that are there after a few calls, whatever they were."""


COMMON = frozenset(
    {"n_running", "n_waiting", "prompt_tokens", "generation_tokens", "prefix_hits_tokens", "prefix_queries_tokens"}
)
KINDS = {
    "vllm": Kind(
        open=vllm_server,
        engine="vllm",
        backend={"kv_tokens": VLLM_SPEC.n_blocks * VLLM_SPEC.block_tokens},
        says=150,
        kv_tokens=float((VLLM_SPEC.n_blocks + 1) * VLLM_SPEC.block_tokens),
        n_running_max=N_AT_ONCE,
        always=COMMON | {"kv_usage_ratio", "kv_tokens", "kv_block_tokens", "e2e_s", "first_token_s", "n_preemptions"},
    ),
    "llamacpp": Kind(
        open=llamacpp_server,
        engine="llamacpp",
        backend={"slots": LLAMA_SLOTS},
        says=150,
        kv_tokens=float(LLAMA_SLOTS * LLAMA_SLOT_TOKENS),
        n_running_max=LLAMA_SLOTS,
        always=COMMON | {"kv_usage_ratio", "kv_tokens", "n_slots", "inter_token_s"},
    ),
}


class Site:
    """An engine and a gateway in front of it that lets everything through."""

    def __init__(self, kind: Kind, url: str, thread: LoopThread, gateway: Gateway, pool: Path) -> None:
        self.kind, self.url, self.pool = kind, url, pool
        self._thread, self._gateway = thread, gateway

    def ask(self, words: str, n_tokens: int) -> dict[str, Any]:
        """One completion; gives its usage."""
        body = {"model": "m", "prompt": words, "max_tokens": n_tokens, "ignore_eos": True, "temperature": 0}
        request = urllib.request.Request(
            f"{self._gateway.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=SETTLE_S) as answer:
            usage: dict[str, Any] = json.load(answer)["usage"]
        return usage

    def signals(self) -> dict[str, tuple[float, float]]:
        """Value and age of each signal, as the router has them now."""

        async def look() -> dict[str, tuple[float, float]]:
            host = self._gateway.host
            now_s, state = host.now_s(), host.router.backends.by_id["cpu"]  # type: ignore[index]
            return {name: (signal.value, now_s - signal.observed_at_s) for name, signal in state.signals.items()}

        return self._thread.run(look())

    def until(self, holds: Callable[[dict[str, tuple[float, float]]], bool]) -> dict[str, tuple[float, float]]:
        """The first readings for which something holds."""
        give_up_at_s = time.monotonic() + SETTLE_S
        while not holds(found := self.signals()):
            assert time.monotonic() < give_up_at_s, found
            time.sleep(0.05)
        return found


@pytest.fixture(scope="module", params=sorted(KINDS))
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Each kind of engine once."""
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp(request.param)
    engine = kind.open()
    try:
        url = engine.__enter__()
    except Absent as absent:
        pytest.skip(str(absent))
    try:
        # The engine is to be full, so the gateway in front of it holds nothing back.
        backend = {
            "name": "cpu",
            "model": "m",
            "url": url + "/v1",
            "engine": kind.engine,
            "first_byte_timeout_s": SETTLE_S,
            "idle_timeout_s": SETTLE_S,
        }
        pool = {"preset": "vllm_alone", "models": {"m": {}}, "backends": [{**backend, "slots": 64}]}
        thread = LoopThread("gateway")
        settings = GatewayConfig(port=0, journal=None, embedder="none", probe_interval_s=0.1)
        gateway = thread.run(start(parse_config(pool), settings))
        try:
            path = folder / "pool.json"
            path.write_text(
                json.dumps({**pool, "backends": [backend | kind.backend], "gateway": {"port": 0, "journal": None}})
            )
            yield Site(kind, url, thread, gateway, path)
        finally:
            thread.run(gateway.close())
            thread.close()
    finally:
        engine.__exit__(None, None, None)


def prompt(number: int) -> str:
    """Words that no other prompt has."""
    return " ".join(f"w{300 + number * WORDS + i}" for i in range(WORDS))


def looked_at(site: Site, number: int, usages: list[dict[str, Any]]) -> list[dict[str, tuple[float, float]]]:
    """What was read while so many calls at once were answered; their usages are added."""
    calls = [
        threading.Thread(target=lambda n=n: usages.append(site.ask(prompt(number + n), site.kind.says)))
        for n in range(N_AT_ONCE)
    ]
    for call in calls:
        call.start()
    seen = [site.signals()]
    while any(call.is_alive() for call in calls):
        seen.append(site.signals())
        time.sleep(0.05)
    for call in calls:
        call.join()
    return [found for found in seen if "n_running" in found and "n_waiting" in found]


def most(seen: list[dict[str, tuple[float, float]]], name: str) -> float:
    """The largest value of a signal that was read."""
    return max((found[name][0] for found in seen if name in found), default=0.0)


def test_load_is_seen_while_it_is_there_and_gone_after(site: Site) -> None:
    """Requests in the engine, its waiting line and its memory rise with concurrent calls and fall with their end; no
    reading is older than a few looks."""
    before = site.until(lambda found: found["n_running"][0] == 0 if "n_running" in found else False)
    usages: list[dict[str, Any]] = []
    began_at_s = time.monotonic()
    full = {"n_running": float(site.kind.n_running_max)}
    if site.kind.n_running_max < N_AT_ONCE:
        full["n_waiting"] = float(N_AT_ONCE - site.kind.n_running_max)
    seen: list[dict[str, tuple[float, float]]] = []
    for number in range(0, ROUNDS_MAX * N_AT_ONCE, N_AT_ONCE):
        seen += looked_at(site, number, usages)
        if all(most(seen, name) >= n for name, n in full.items()) and most(seen, "kv_usage_ratio") > 0.0:
            break
    took_s = time.monotonic() - began_at_s
    assert usages and len(usages) % N_AT_ONCE == 0
    # Neither more than the engine takes at once, nor more in line than are left.
    assert {name: most(seen, name) for name in full} == full
    # Used tokens over all of the cache: a share, and what these calls can hold at most.
    fullest = most(seen, "kv_usage_ratio")
    most_tokens = sum(usage["total_tokens"] for usage in usages)
    assert 0.0 < fullest <= 1.0 and fullest <= 1.3 * most_tokens / site.kind.kv_tokens + 0.05
    site.until(lambda found: found["n_running"][1] < 1.0)
    assert_settled(site, before.get("generation_tokens", (0.0, 0.0))[0] + spoken(usages), took_s)


def assert_settled(site: Site, said_tokens: float, took_s: float) -> None:
    """Nothing runs or waits, every token is counted, and means are of seconds: none is longer than the calls took."""
    site.until(lambda found: found["n_running"][0] == 0 and found["n_waiting"][0] == 0)
    after = site.until(lambda found: found["generation_tokens"][0] >= said_tokens)
    assert after["generation_tokens"][0] == said_tokens
    for name in ("e2e_s", "first_token_s", "inter_token_s"):
        if name in after:
            assert 0.0 < after[name][0] <= took_s + 1.0, (name, after[name], took_s)
    if "e2e_s" in after and "first_token_s" in after:
        assert after["first_token_s"][0] < after["e2e_s"][0]


def spoken(usages: list[dict[str, Any]]) -> int:
    """Tokens of all answers."""
    return sum(usage["completion_tokens"] for usage in usages)


def test_prefix_hits_are_counted_in_tokens(site: Site) -> None:
    """A prompt asked again is found in the cache: as many tokens as the answer's usage says, out of all that were
    asked for."""
    before = site.signals()
    usages = [site.ask(prompt(UNUSED), 2), site.ask(prompt(UNUSED), 2)]
    cached = sum((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for usage in usages)
    asked = sum(usage["prompt_tokens"] for usage in usages)
    assert cached > 0

    def grown(found: dict[str, tuple[float, float]], name: str) -> float:
        return found[name][0] - before[name][0] if name in before else found[name][0]

    after = site.until(lambda found: grown(found, "prefix_queries_tokens") >= asked)
    assert grown(after, "prefix_queries_tokens") == asked
    assert grown(after, "prefix_hits_tokens") == cached
    assert 0.0 < after["prefix_hit_ratio"][0] <= 1.0


def test_the_doctor_shows_what_there_is(site: Site) -> None:
    """`loadwise doctor` on the same engine: every expected signal with its age, none missing, the engine's own size."""
    site.until(lambda found: "n_running" in found and found["n_running"][0] == found["n_waiting"][0] == 0.0)
    argv = [sys.executable, "-m", "loadwise", "doctor", str(site.pool), "--timeout-s", "600"]
    began_at_s = time.monotonic()
    done = subprocess.run([*argv, "--json"], capture_output=True, text=True, timeout=SETTLE_S, check=False)
    took_s = time.monotonic() - began_at_s
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = json.loads(done.stdout)["backends"]
    needs_two_looks = {"e2e_s", "first_token_s", "inter_token_s", "prefix_hit_ratio"}
    assert site.kind.always - needs_two_looks <= set(report["signals"]), report["signals"]
    assert report["missing_signals"] == []
    assert 0.0 <= report["signals_age_s"] < took_s, "read by this doctor, not before"
    assert report["signals"]["kv_tokens"] == site.kind.kv_tokens
    assert report["signals"]["n_running"] == report["signals"]["n_waiting"] == 0.0
    told = subprocess.run(argv, capture_output=True, text=True, timeout=SETTLE_S, check=True).stdout
    assert "n_running=0" in told and "s old)" in told
    live = site.until(lambda found: site.kind.always <= set(found))
    fresh = {"n_running", "kv_tokens", "n_slots"} & set(live)
    site.until(lambda found: all(found[name][1] < 5.0 for name in fresh))
