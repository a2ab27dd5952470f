"""Backends that are not there: said at the start, refused at once, found again without a restart; and the selector."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from engines import METRICS, Behaviour, Call, Engine, fails, hangs, resets, says, writes
from sites import UNTIL_S, on_loop, pool, site, until

from loadwise.gateway.probe import MISSES_MAX
from loadwise.gateway.serve import start
from loadwise.kernel.errors import ConfigError
from loadwise.settings import parse_config
from loadwise.wire.client import Answer, UpstreamError


async def closed_port() -> Engine:
    """An engine that has a port and does not listen."""
    engine = await Engine().start()
    await engine.stop()
    return engine


@on_loop
async def test_an_unreachable_backend_is_said_refused_and_found_again() -> None:
    """The gateway starts, says so, refuses at once with Retry-After, and serves when the backend is up."""
    engine = await closed_port()
    async with site(engine, config=pool(engine)) as s:
        assert any("'a' cannot be used" in text and "refused" in text for text in s.said), s.said
        ready = await s.ask("GET", "/readyz")
        assert (ready.status, ready.json["ready"], ready.json["models"]) == (503, False, [])
        assert (ready.json["backends"]["a"]["health"], bool(ready.json["backends"]["a"]["detail"])) == ("down", True)
        assert (await s.ask("GET", "/healthz")).status == 200
        for stream in (False, True):
            answer = await s.chat("p", stream=stream)
            assert (answer.status, answer.error["code"]) == (503, "no_backend_available")
            assert int(answer.headers["retry-after"]) >= 1
        await engine.start()
        await until(lambda: any("can be used" in text for text in s.said))
        assert (await s.ask("GET", "/readyz")).status == 200
        assert (await s.chat("p")).status == 200
        await engine.stop()
        await until(lambda: sum("cannot be used" in text for text in s.said) == 2)
        assert (await s.chat("q")).status == 503
        await engine.start()
        await until(lambda: sum(": " not in text and "can be used" in text for text in s.said) == 2)
        assert (await s.chat("q")).status == 200
        await engine.stop()


@on_loop
async def test_a_pinned_model_without_a_backend_is_refused_and_others_serve() -> None:
    """Only the model that cannot be reached is refused; `auto` goes elsewhere."""
    up, down = await Engine().start(), await closed_port()
    async with site(up, down, config=pool(up, down, models={"x": {}, "y": {}})) as s:
        ready = await s.ask("GET", "/readyz")
        assert (ready.status, ready.json["models"]) == (200, ["x"])
        assert (await s.chat("p", model="y")).status == 503
        assert [(await s.chat(f"p{n}")).headers["x-loadwise-model"] for n in range(4)] == ["x"] * 4


@on_loop
async def test_a_backend_that_does_not_answer_does_not_hold_up_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that hangs is given up on; until it has answered once the backend is not called ready."""
    monkeypatch.setattr("loadwise.gateway.serve.FIRST_LOOK_S", 0.01)
    monkeypatch.setattr("loadwise.gateway.probe.TIMEOUT_S", 0.01)
    engine = await Engine().start()
    engine.metrics = hangs
    async with site(engine, config=pool(engine), probe_interval_s=600.0) as s:
        assert (await s.ask("GET", "/readyz")).status == 503
        assert (await s.chat("p")).status == 200, "it is tried all the same"
        engine.metrics = None
        await until(lambda: s.gateway.probes[0].detail)
        monkeypatch.setattr("loadwise.gateway.probe.TIMEOUT_S", UNTIL_S)
        await s.gateway.probes[0].poll()
        assert (await s.ask("GET", "/readyz")).status == 200


PROBED: dict[str, tuple[Behaviour, bool]] = {
    "no metrics here": (fails(404), True),
    "metrics are off (llama.cpp)": (fails(501), True),
    "no right to see them": (fails(401), True),
    "loading": (fails(503), False),
    "broken": (fails(500), False),
    "resets": (resets, False),
    "not http": (writes(b"what?\r\n\r\n"), False),
    "endless": (writes(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n" + b"x" * (9 << 20)), False),
}


@pytest.mark.parametrize("name", PROBED)
def test_a_probe_tells_alive_from_dead(name: str) -> None:
    """Whatever `/metrics` answers, the probe goes on looking and the backend comes back."""
    behaviour, is_up = PROBED[name]

    @on_loop
    async def run() -> None:
        engine = await Engine().start()
        engine.metrics = behaviour
        async with site(engine, config=pool(engine)) as s:
            assert s.gateway.probes[0].is_reachable is is_up
            assert (await s.ask("GET", "/readyz")).status == (200 if is_up else 503)
            engine.metrics = None
            await until(lambda: s.router.backends.by_id["a"].signals)
            assert (await s.ask("GET", "/readyz")).status == 200

    run()


@on_loop
async def test_signals_reach_the_decision() -> None:
    """What the probe read stands in the journal's decisions and has an age."""
    async with site(Engine()) as s:
        signals = s.router.backends.by_id["a"].signals
        assert METRICS and signals["n_running"].value == 1.0
        assert 0.0 <= s.host.now_s() - signals["n_running"].observed_at_s < 60.0


def chooses(answer: Any, status: int = 200) -> Behaviour:
    async def behave(call: Call) -> None:
        await call.respond(answer, status)

    return behave


BOTH: dict[str, Any] = {"x": {}, "y": {}}
FIXED = {"name": "fixed", "candidate": "x"}
UNUSABLE: dict[str, Behaviour] = {
    "unknown model": chooses({"model": "z"}),
    "a model of megabytes": chooses({"model": "z" * 3_000_000}),
    "no model": chooses({}),
    "wrong type": chooses({"model": 3}),
    "propensity 0": chooses({"model": "y", "propensity": 0}),
    "propensity 2": chooses({"model": "y", "propensity": 2}),
    "propensity text": chooses({"model": "y", "propensity": "1"}),
    "not json": chooses(b"y"),
    "deep": chooses(b"[" * 200_000),
    "nothing": chooses(b""),
    "status 500": chooses({"model": "y"}, 500),
    "status 302": chooses({"model": "y"}, 302),
    "slow": hangs,
    "resets": resets,
    "no http": writes(b"hm\r\n\r\n"),
}


@on_loop
async def test_the_selectors_word_counts() -> None:
    """The selector is asked once a program, with the candidates, and its choice is carried out as its own."""
    one, two = Engine(), Engine()
    selector = await Engine(chooses({"model": "y", "propensity": 0.25})).start()
    url = f"http://127.0.0.1:{selector.port}/select/me?team=a"
    router = {"policy": FIXED, "selector": {"url": url, "timeout_s": 60.0}}
    async with site(one, two, models=BOTH, router=router) as s:
        for _ in range(2):
            answer = await s.chat("p", metadata={"task_type": "t"})
            assert answer.headers["x-loadwise-model"] == "y"
        assert len(selector.calls) == 1 and selector.calls[0].path == "/select/me?team=a"
        asked = selector.calls[0].json
        assert asked["candidates"] == ["x", "y"] and (asked["program"], asked["task_type"]) == ("p", "t")
        assert (await s.verdict("p")).json["credited"] is True
        assert (await s.chat("pinned", model="x")).headers["x-loadwise-model"] == "x"
        assert len(selector.calls) == 1


@pytest.mark.parametrize("name", UNUSABLE)
def test_without_a_usable_word_the_policy_decides(name: str) -> None:
    """Slow, broken or wrong: the turn is answered by the policy's choice."""

    @on_loop
    async def run() -> None:
        selector = await Engine(UNUSABLE[name]).start()
        router = {"policy": FIXED, "selector": {"url": f"http://127.0.0.1:{selector.port}", "timeout_s": 0.1}}
        async with site(Engine(), Engine(), models=BOTH, router=router) as s:
            answers = await asyncio.gather(*(s.chat("p") for _ in range(3)), s.chat("q"))
            assert [(a.status, a.headers["x-loadwise-model"]) for a in answers] == [(200, "x")] * 4
            assert not s.router.asked

    run()


@on_loop
async def test_a_selector_that_refuses_costs_nothing() -> None:
    """Nobody listens there: the policy decides at once."""
    gone = await closed_port()
    router = {"policy": FIXED, "selector": {"url": f"http://127.0.0.1:{gone.port}/s", "timeout_s": 60.0}}
    async with site(Engine(), Engine(), models=BOTH, router=router) as s:
        assert (await s.chat("p")).headers["x-loadwise-model"] == "x"
        client = asyncio.ensure_future(s.chat("q"))
        client.cancel()


@on_loop
async def test_a_client_that_leaves_while_the_selector_thinks() -> None:
    """The late word is about nobody; the laws hold."""
    selector = await Engine(hangs).start()
    router = {"policy": FIXED, "selector": {"url": f"http://127.0.0.1:{selector.port}/", "timeout_s": 60.0}}
    async with site(Engine(), Engine(), models=BOTH, router=router) as s:
        client = asyncio.ensure_future(s.chat("q"))
        await until(lambda: selector.calls)
        client.cancel()
        await until(lambda: s.counts.cancelled == 1)
        selector.usual = chooses({"model": "y"})
        assert (await s.chat("r")).headers["x-loadwise-model"] == "y"


@pytest.mark.parametrize("url", ["http://", "http://h:99999/", "http://h/ü", "http://h/a b", "http://user@h/"])
def test_a_selectors_url_that_cannot_be_asked_is_a_config_error(url: str) -> None:
    """Said at the start, by name."""

    @on_loop
    async def run() -> None:
        config = pool(Engine(), router={"selector": {"url": url}})
        config["gateway"] = {"port": 0, "journal": None}
        with pytest.raises(ConfigError, match="selector"):
            await start(parse_config(config))

    run()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"gateway": {"prot": 1}}, "prot"),
        ({"gateway": {"port": 70000}}, "70000"),
        ({"gateway": {"key_env": "NO_SUCH_KEYS"}}, "NO_SUCH_KEYS"),
        ({"gateway": {"grace_s": float("nan")}}, "grace_s"),
        ({"gateway": {"body_max_bytes": 0}}, "body_max_bytes"),
        ({"backends": [{"name": "a", "model": "m", "url": ""}]}, "no url"),
        ({"backends": [{"name": "a", "model": "m", "url": "ftp://h"}]}, "ftp"),
        ({"backends": [{"name": "a", "model": "m", "url": "http://h", "key_env": "NO_SUCH_KEY"}]}, "NO_SUCH_KEY"),
    ],
)
def test_a_gateway_that_cannot_be_served_says_why(more: dict[str, Any], text: str) -> None:
    """Each is a ConfigError that names the thing, and leaves nothing open."""

    @on_loop
    async def run() -> None:
        config = {**pool(Engine()), "gateway": {"port": 0, "journal": None}, **json.loads(json.dumps(more))}
        config["gateway"] = {"journal": None, **config["gateway"]}
        with pytest.raises(ConfigError, match=text):
            await start(parse_config(config), environment={})

    run()


@on_loop
async def test_a_port_that_is_taken_is_a_config_error() -> None:
    """Two gateways on one port: the second says so."""
    async with site(Engine()) as s:
        config = {**pool(s.engine), "gateway": {"port": s.port, "journal": None}}
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{s.port}"):
            await start(parse_config(config), environment={})


@on_loop
async def test_our_own_connection_limit_is_not_the_backends_fault() -> None:
    """Turns that find no free connection are told to come again; the backend stays up, and its probe sees it."""
    engine = Engine(hangs)
    async with site(engine, upstream_connections_max=2) as s:
        clients = [asyncio.ensure_future(s.chat(f"p{n}")) for n in range(2)]
        await until(lambda: len(engine.calls) == 2)
        s.wait_for_engine(connect_s=0.1)
        for answer in await asyncio.gather(*(s.chat(f"q{n}", stream=n % 2 == 0) for n in range(6))):
            assert (answer.status, answer.error["code"]) == (503, "connections_busy")
            assert int(answer.headers["retry-after"]) >= 1
        state = s.router.backends.by_id["a"]
        assert (state.health, state.n_failures, state.is_cooling) == ("up", 0, False)
        assert s.gateway.probes[0].is_reachable and (await s.ask("GET", "/readyz")).status == 200
        engine.usual = says()
        s.wait_for_engine()
        clients[0].cancel()
        await until(lambda: s.counts.cancelled == 1)
        assert (await s.chat("r")).status == 200
        clients[1].cancel()
        await until(lambda: s.counts.cancelled == 2)


async def probed() -> tuple[Engine, list[Any]]:
    """An engine, and how its metrics are answered one look after another."""
    engine, looks = await Engine().start(), []

    async def behave(call: Call) -> None:
        if looks:
            await looks.pop(0)(call)
        else:
            await call.respond(METRICS, kind="text/plain")

    engine.metrics = behave
    return engine, looks


@on_loop
async def test_one_bad_look_is_no_reason_to_stop_several_are() -> None:
    """Broken or answered with 5xx: three in a row take a backend down, a good one between begins the count anew."""
    engine, looks = await probed()
    async with site(engine, config=pool(engine), probe_interval_s=600.0) as s:
        probe, state = s.gateway.probes[0], s.router.backends.by_id["a"]
        for bad in (fails(500), writes(b"what?\r\n\r\n"), fails(503)):
            looks += [bad, bad]
            for _ in range(3):
                await probe.poll()
                assert (probe.is_reachable, state.health) == (True, "up")
        looks += [fails(500), writes(b"what?\r\n\r\n"), fails(503)]
        for health in ("up", "up", "down"):
            await probe.poll()
            assert state.health == health
        await probe.poll()
        assert (probe.is_reachable, state.health) == (True, "up")


@on_loop
async def test_slow_metrics_are_no_dead_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy engine may be slow to show them, even at the start."""
    monkeypatch.setattr("loadwise.gateway.probe.TIMEOUT_S", 0.01)
    engine, looks = await probed()
    looks += [hangs, hangs]
    async with site(engine, config=pool(engine), probe_interval_s=600.0) as s:
        probe, state = s.gateway.probes[0], s.router.backends.by_id["a"]
        assert (probe.is_reachable, state.health) == (None, "up")
        await probe.poll()
        assert (probe.is_reachable, state.health) == (None, "up")
        looks += [hangs]
        await probe.poll()
        assert (probe.is_reachable, state.health) == (False, "down")


@on_loop
@pytest.mark.parametrize("answers_every", [1, MISSES_MAX])
async def test_an_engine_that_answers_turns_is_not_down_however_slow_its_metrics(answers_every: int) -> None:
    """Looks run out of time while a turn is answered during each, or during every third: alive. Three while nothing is
    heard: down, and no look earlier."""
    engine, _ = await probed()
    async with site(engine, config=pool(engine), probe_interval_s=600.0) as s:
        probe, state = s.gateway.probes[0], s.router.backends.by_id["a"]
        n_looks, n_answering = 0, 4 * MISSES_MAX

        async def runs_out_of_time(path: str, *, from_root: bool = True) -> Answer:
            nonlocal n_looks
            n_looks += 1
            if n_looks <= n_answering and n_looks % answers_every == 0:
                assert (await s.chat()).status == 200
            raise UpstreamError("first_byte_timeout", "nothing within 2 s")

        probe._ask = runs_out_of_time  # type: ignore[method-assign]
        for _ in range(n_answering + MISSES_MAX - 1):
            await probe.poll()
            assert (probe.is_reachable, state.health) == (True, "up")
        await probe.poll()
        assert (probe.is_reachable, state.health) == (False, "down")


@on_loop
@pytest.mark.parametrize("is_looking", [True, False])
async def test_who_was_called_down_and_answers_a_turn_after_all_is_there(is_looking: bool) -> None:
    """Its metrics still run out of time; a turn that was under way when it was called down is answered meanwhile, be it
    during a look or between two."""
    engine, _ = await probed()
    release = asyncio.Event()

    async def answers_late(call: Call) -> None:
        await release.wait()
        await says()(call)

    engine.usual = answers_late
    async with site(engine, config=pool(engine), probe_interval_s=600.0) as s:
        probe, state = s.gateway.probes[0], s.router.backends.by_id["a"]
        turn = asyncio.create_task(s.chat())
        await until(lambda: len(engine.calls) == 1)

        async def runs_out_of_time(path: str, *, from_root: bool = True) -> Answer:
            if release.is_set() and is_looking:
                assert (await turn).status == 200
            raise UpstreamError("first_byte_timeout", "nothing within 2 s")

        probe._ask = runs_out_of_time  # type: ignore[method-assign]
        for _ in range(MISSES_MAX):
            await probe.poll()
        assert (probe.is_reachable, state.health) == (False, "down")
        release.set()
        if not is_looking:
            assert (await turn).status == 200
        await probe.poll()
        assert (probe.is_reachable, state.health) == (True, "up")


@on_loop
async def test_a_closed_port_is_down_at_once_and_found_again() -> None:
    """Refused is certain; the probe that said so says when it is over."""
    engine, _ = await probed()
    async with site(engine, config=pool(engine), probe_interval_s=600.0) as s:
        probe, state = s.gateway.probes[0], s.router.backends.by_id["a"]
        await engine.stop()
        await until(lambda: s.gateway.probes[0]._link.watched.statistics().connections == 0)
        await probe.poll()
        assert (probe.is_reachable, state.health) == (False, "down")
        await engine.start()
        await probe.poll()
        assert (probe.is_reachable, state.health) == (True, "up")


@on_loop
async def test_a_probe_does_not_end_a_cooldown_that_failed_calls_have_earned() -> None:
    """Metrics may be fine where calls are not: the router's own clock ends it; a probe's `down` replaces it."""
    engine, _ = await probed()
    engine.usual = resets
    async with site(engine, config=pool(engine), probe_interval_s=600.0) as s:
        probe, state = s.gateway.probes[0], s.router.backends.by_id["a"]
        for n in range(3):
            await s.chat(f"p{n}")
        assert (state.health, state.is_cooling) == ("down", True)
        for _ in range(5):
            await probe.poll()
            assert (state.health, state.is_cooling) == ("down", True)
        await engine.stop()
        await until(lambda: s.gateway.probes[0]._link.watched.statistics().connections == 0)
        await probe.poll()
        assert (state.health, state.is_cooling) == ("down", False)
        await engine.start()
        await probe.poll()
        assert probe.is_reachable and (state.health, state.is_cooling) == ("down", True), "it is sat out all the same"


@on_loop
async def test_a_cooldown_of_what_could_not_be_reached_ends_when_it_can() -> None:
    """Refused calls say what a probe can disprove: an engine that is back serves at once."""
    engine, _ = await probed()
    async with site(engine, config=pool(engine), probe_interval_s=600.0) as s:
        probe, state = s.gateway.probes[0], s.router.backends.by_id["a"]
        await engine.stop()
        await until(lambda: probe._link.upstream.statistics().connections == 0)
        for n in range(3):
            await s.chat(f"p{n}")
        assert (state.health, state.is_cooling) == ("down", True)
        await engine.start()
        await probe.poll()
        assert state.health == "up"
        assert (await s.chat("p")).status == 200


@on_loop
async def test_what_an_earlier_run_called_down_is_called_up(tmp_path: Path) -> None:
    """The journal remembers a backend as down; the probe of the next run knows better."""
    engine, _ = await probed()
    async with site(engine, config=pool(engine), journal=tmp_path) as s:
        await engine.stop()
        await until(lambda: s.router.backends.by_id["a"].health == "down" and s.gateway.probes[0].is_reachable is False)
    await engine.start()
    async with site(engine, config=pool(engine), journal=tmp_path) as s:
        assert s.router.backends.by_id["a"].health == "up"


@on_loop
async def test_a_paid_api_is_looked_at_seldom() -> None:
    """Its list of models is asked for every 30 s, an engine's metrics as often as configured."""
    engine = await Engine(fails(404)).start()
    async with site(engine, config=pool(engine, backend_0={"engine": "api"}), probe_interval_s=0.05) as s:
        for _ in range(5):
            await s.gateway.probes[0].poll()
        assert [call.path for call in engine.calls] == ["/v1/models"]


@on_loop
async def test_a_paid_api_is_known_by_our_own_traffic() -> None:
    """Calls in flight, the minute's window and the latency become signals of the backend, without asking it."""
    engine = await Engine(fails(404)).start()
    backend = {"engine": "api", "requests_per_minute": 10}
    async with site(engine, config=pool(engine, backend_0=backend), probe_interval_s=600.0) as s:
        engine.script = [says(), says()]
        assert (await s.chat("p")).status == 200
        assert (await s.chat("p", stream=True)).status == 200
        await s.gateway.probes[0].poll()
        signals = {name: signal.value for name, signal in s.router.backends.by_id["a"].signals.items()}
        assert (signals["n_running"], signals["request_window_ratio"]) == (0.0, 0.2)
        assert signals["e2e_s"] >= 0.0


@pytest.mark.parametrize(
    ("declared", "sent", "heard"),
    [("lower_first", 7, 7), ("higher_first", 7, -7), (None, 7, None), ("lower_first", 0, None)],
)
def test_priority_reaches_engines_that_declare_it_in_their_own_sense(
    declared: str | None, sent: int, heard: int | None
) -> None:
    """Lower is sooner for our clients and for vLLM, higher for SGLang; an engine that declares nothing is told none."""

    @on_loop
    async def run() -> None:
        engine = await Engine().start()
        backend = {} if declared is None else {"priority": declared}
        async with site(engine, config=pool(engine, backend_0=backend)) as s:
            headers = {"X-Loadwise-Priority": str(sent)} if sent else {}
            assert (await s.chat("p", headers=headers)).status == 200
            assert engine.calls[-1].json.get("priority") == heard

    run()


@on_loop
async def test_a_held_streaming_client_hears_comments_until_it_is_served() -> None:
    """Nothing between us gives up on it; the stream then goes on as if nothing had been, and ends with [DONE]."""
    engine = await Engine().start()
    router = {"hold_max_s": 20.0, "policy": "fixed"}
    async with site(engine, config=pool(engine, backend_0={"slots": 1}, router=router), keep_alive_s=0.02) as s:
        assert (await s.chat("first")).status == 200
        waiting = asyncio.ensure_future(s.chat("second", stream=True))
        await until(lambda: s.router.admission.n_held == 1)
        (relay,) = s.host.relay_by_turn.values()
        await until(lambda: relay._exchange.is_started)  # type: ignore[attr-defined]
        await s.finish("first")
        answer = await waiting
        assert answer.status == 200
        assert b": waiting for a place" in answer.body
        assert answer.body.rstrip().endswith(b"data: [DONE]")
    short = {"hold_max_s": 0.2, "policy": "fixed"}
    async with site(engine, config=pool(engine, backend_0={"slots": 1}, router=short), keep_alive_s=0.02) as s:
        assert (await s.chat("first")).status == 200
        late = await s.chat("second", stream=True)
        assert late.status == 200, "the stream had begun"
        assert b"held_too_long" in late.body and b"[DONE]" not in late.body


@on_loop
async def test_what_a_policy_does_wrong_and_what_is_not_believed_is_shown() -> None:
    """Both counts stand in the metrics, so that a silent fallback is not silent."""
    async with site(Engine()) as s:
        s.counts.policy_errors, s.counts.malformed = 3, 2
        page = (await s.ask("GET", "/metrics")).body.decode()
        assert "\nloadwise_policy_errors_total 3.0\n" in page and "\nloadwise_malformed_total 2.0\n" in page
