"""Agents over HTTP are those of the simulated world: the same tokens, turns and luck, and honest about what failed."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from bench.disc_live import Asked, checks, scenario_for, shortened, simulated
from bench.disc_peers import OTHERS, PRESETS, over, pressed_scenario, scenario_of
from bench.live_agents import Endpoint, LiveAgents, Lived, message, require_playable
from bench.live_replies import Answer, read_reply
from bench.live_site import pool_of
from bench.peers import PEERS
from loadwise.emulator.backend import EmulatedBackendSpec
from loadwise.emulator.conversation import message_parts, text_tokens
from loadwise.emulator.emulator import EmulatorSpec
from loadwise.emulator.metrics import read_signals
from loadwise.emulator.script import filler_script
from loadwise.emulator.thread import emulator_in_thread
from loadwise.kernel.errors import ConfigError
from loadwise.kernel.streams import Streams
from loadwise.sim.scenario import convert_scenario
from loadwise.sim.workload import Workload
from loadwise.wire.client import Upstream

ASKED = Asked("qwen-h200", load=4, n_programs=6, seed=3, scale=10.0, is_stream=False, length=0.1, spread=False)


@given(st.sampled_from(["system", "user"]), st.integers(3, 3000))
def test_a_message_costs_exactly_its_tokens(role: str, n_tokens: int) -> None:
    """By the emulator's own rule; two tags never share a beginning."""
    said = msgspec.json.decode(message(role, "p1.1.", n_tokens))
    (part,) = message_parts([said], None)
    assert text_tokens(part) == n_tokens
    assert message(role, "p1.1.", 30) != message(role, "p1.2.", 30)


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_engine_counts_the_worlds_own_tokens(is_stream: bool) -> None:
    """Prompts, answers and turns over HTTP are those that the world draws, to the last token."""
    scenario = scenario_of("vllm_alone", n_programs=4, load=2, blocks=4000)
    spec = EmulatorSpec(backends=(EmulatedBackendSpec(name="a", model="m", engine=scenario.engines["a"]),), scale=500.0)

    async def live(url: str) -> tuple[Lived, Any]:
        endpoint = Endpoint(url=url, model="m", has_programs=False)
        lived = await LiveAgents(scenario, 3, endpoint, scale=500.0, is_stream=is_stream).run()
        upstream = Upstream(url)
        page = (await upstream.get("/metrics", from_root=True)).body.decode()
        await upstream.close()
        return lived, read_signals(page)

    with emulator_in_thread(spec, filler_script(1.0)) as emulator:
        lived, signals = uvloop.run(live(emulator.url))
    shapes = [Workload(scenario.workload, Streams(3)).shape(number) for number in range(1, 5)]
    prompt_tokens = answer_tokens = 0
    for shape in shapes:
        context_tokens = 0
        for turn in shape.turns:
            context_tokens += turn.growth_tokens
            prompt_tokens += context_tokens
            context_tokens += turn.output_tokens
            answer_tokens += turn.output_tokens
    assert [program.code for program in lived.programs] == [""] * 4
    assert sum(program.n_turns for program in lived.programs) == sum(len(shape.turns) for shape in shapes)
    assert signals["generation_tokens"] == answer_tokens
    assert signals["prefix_queries_tokens"] == pytest.approx(prompt_tokens, rel=1e-3)
    assert signals["prefix_hits_tokens"] / signals["prefix_queries_tokens"] > 0.5


def test_what_failed_is_told_by_its_code() -> None:
    """The gateway's code where there is one, the status where there is none, else the transport's word."""
    refused = Answer(504, {}, b'{"error": {"code": "budget_exceeded", "message": "x"}}')
    assert read_reply(refused, "m", is_stream=False).code == "budget_exceeded"
    assert read_reply(Answer(503, {}, b'{"error": {"message": "x"}}'), "m", is_stream=False).code == "503"
    assert read_reply(Answer(0, {}, b"reset: gone"), "m", is_stream=False).code == "0: reset: gone"
    assert read_reply(Answer(200, {}, b"{}"), "m", is_stream=False).code.startswith("unreadable")
    broken = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: {"error": {"code": "upstream_broken"}}\n\n'
    assert "upstream_broken" in read_reply(Answer(200, {}, broken), "m", is_stream=True).code
    whole = Answer(
        200,
        {b"x-loadwise-model": b"big", b"x-loadwise-wait-ms": b"1500"},
        b'{"choices": [{"message": {"content": "hi"}}], "usage": {"prompt_tokens": 9, "completion_tokens": 2, '
        b'"prompt_tokens_details": {"cached_tokens": 4}}}',
    )
    assert read_reply(whole, "m", is_stream=False) == ("hi", 2, "big", 1.5, "", 9, 4)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"workload": {"ends": "idle"}}, "finish call"),
        ({"workload": {"patience_s": 3}}, "lose patience"),
        ({"truth": {"output_ratio": {"m": 2.0}}}, "differ in length"),
        ({"verdicts": {"source": "none"}}, "do not report"),
        ({"failures": [{"at_s": 1, "backend": "a", "kind": "crash"}]}, "fail in it"),
    ],
)
def test_a_world_that_cannot_be_played_is_refused(changes: dict[str, Any], why: str) -> None:
    """Rather than compared with something else."""
    plain = msgspec.to_builtins(scenario_of("fast", n_programs=4, load=2, blocks=4000))
    for key, value in changes.items():
        plain[key] = {**plain.get(key, {}), **value} if isinstance(value, dict) else value
    with pytest.raises(ConfigError, match=why):
        require_playable(convert_scenario(plain))


def test_shorter_programs_are_shorter_in_both_worlds() -> None:
    """`--length` scales the turns and nothing else; the simulated run is of that world."""
    whole, short = scenario_for(ASKED._replace(length=1.0), "fast"), scenario_for(ASKED, "fast")
    assert short == shortened(whole, 0.1) and short.workload.growth_tokens == whole.workload.growth_tokens
    turns = [len(Workload(s.workload, Streams(1)).shape(1).turns) for s in (short, whole)]
    assert 1 <= turns[0] < turns[1] / 4
    found = simulated(short, 3)
    assert 0.0 < found["hit_ratio"] < 1.0 and found["programs_per_h"] * found["makespan_s"] == pytest.approx(6 * 3600)


def test_both_bounds_are_checked_both_ways() -> None:
    """Better than simulated is as wrong as worse."""
    values = {"fast.off.hit_ratio": -0.06, "fast.off.programs_per_h": 0.11}
    assert [entry["holds"] for entry in checks(values, ["fast"])] == [False, False]
    values = {"fast.off.hit_ratio": 0.05, "fast.off.programs_per_h": -0.1}
    assert [entry["holds"] for entry in checks(values, ["fast"])] == [True, True]
    values = {"fast.off.hit_ratio": math.nan, "fast.off.programs_per_h": math.nan}
    assert [entry["holds"] for entry in checks(values, ["fast"])] == [False, False]


def test_peers_are_put_in_front_of_all_engines() -> None:
    """Each of them exists, and knows both addresses without `/v1`."""
    for name in OTHERS:
        peer = over(PEERS[name], ["http://h:1/v1", "http://h:2/v1"])
        assert peer.argv[-3:] == ("--worker-urls", "http://h:1", "http://h:2")
        assert not any(part.startswith("--worker-urls=") for part in peer.argv)
    scenario = scenario_of(PRESETS[0], n_programs=4, load=3, blocks=4000)
    assert [b["url"] for b in pool_of(scenario, {"a": "x", "b": "y"})["backends"]] == ["x", "y"]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_contestants_world_is_one_that_agents_can_play(preset: str) -> None:
    """Two replicas as large as their engines say, no budget of time, the preset's own rules."""
    scenario = pressed_scenario(preset, n_programs=6, load=3, blocks=300)
    require_playable(scenario)
    spec = scenario.engine_spec("a")
    assert {backend.kv_tokens for backend in scenario.backends} == {spec.n_blocks * spec.block_tokens}
    assert scenario.config.router.budget_s is None and scenario.config.preset == preset
