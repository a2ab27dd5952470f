"""The judges' bench: its runner, its comparison and its models are right, without any judge at hand."""

from __future__ import annotations

import asyncio
import itertools
import json
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench import emulator
from bench.agents import (
    Answered,
    Run,
    Script,
    Seen,
    Turn,
    agreement,
    closed_loop,
    draw,
    figures,
    in_turn,
    live,
    prometheus,
    simulated,
)
from bench.emulator import EmulatorEndpoint
from bench.judges import __main__ as judges
from bench.judges import servers
from bench.judges.endpoints import Contexts
from bench.judges.fit import fit, rough_step
from bench.judges.servers import Absent
from bench.judges.slots import predicted_hits
from bench.judges.tiny_gguf import write_gguf
from bench.judges.tiny_model import CONFIG, write_model
from loadwise.emulator.backend import EmulatedBackendSpec
from loadwise.emulator.emulator import EmulatorSpec, start_emulator
from loadwise.sim.calibrate import Cell, simulate_cell
from loadwise.sim.step_time import StepCost
from loadwise.sim.vllm_engine import VllmEngine, VllmEngineSpec

SPEC = VllmEngineSpec(num_gpu_blocks=60, max_num_batched_tokens=512)


def small(*, keeps_replies: bool = True) -> Script:
    return draw(
        4,
        4,
        first=(100, 200),
        growth=(20, 60),
        output=(4, 12),
        gap_s=0.01,
        shared_tokens=48,
        keeps_replies=keeps_replies,
    )


@pytest.mark.parametrize("keeps_replies", [True, False])
def test_every_turn_is_asked_once_and_every_token_has_its_time(keeps_replies: bool) -> None:
    """Prompts grow by answers, if they are kept, and by what is appended; hits are whole blocks of earlier prompts."""
    script = small(keeps_replies=keeps_replies)
    for chains in (closed_loop(script), in_turn(script)):
        run = simulated(VllmEngine(SPEC), script, chains)
        assert sorted((call.program, call.turn) for call in run.calls) == sorted(
            p for c in closed_loop(script) for p in c
        )
        for call in run.calls:
            turns = script.programs[call.program][: call.turn + 1]
            said = sum(turn.output_tokens for turn in turns[:-1]) if keeps_replies else 0
            assert call.prompt_tokens == sum(turn.growth_tokens for turn in turns) + said
            assert len(call.token_at_s) == turns[-1].output_tokens
            assert list(call.token_at_s) == sorted(call.token_at_s) and call.first_s > 0
            assert call.cached_tokens % 16 == 0 and call.cached_tokens < call.prompt_tokens


def test_one_chain_asks_one_call_at_a_time() -> None:
    """No call begins before the last one is over, and a program's turns come in order."""
    script = small()
    calls = simulated(VllmEngine(SPEC), script, in_turn(script)).calls
    for before, after in itertools.pairwise(calls):
        assert after.arrived_at_s >= before.token_at_s[-1]
    for p in range(4):
        assert [call.turn for call in calls if call.program == p] == [0, 1, 2, 3]


def test_an_emulated_engine_in_real_time_finds_the_same() -> None:
    """The runner over HTTP, at many times the speed: hits of calls asked one at a time do not depend on time."""
    script = small()

    async def asked() -> Run:
        backend = EmulatedBackendSpec(name="a", model="m", engine=SPEC)
        handle = await start_emulator(EmulatorSpec(backends=(backend,), scale=100.0))
        endpoint = EmulatorEndpoint(handle.url)
        try:
            return await live(endpoint, script, in_turn(script))
        finally:
            await endpoint.close()
            await handle.close()

    theirs, ours = asyncio.run(asked()), simulated(VllmEngine(SPEC), script, in_turn(script))
    found = agreement(ours, theirs)
    assert (found["calls_with_equal_hits"], found["order_agreement"]) == (1.0, 1.0)
    assert figures(theirs)["hit_tokens"] == figures(ours)["hit_tokens"] == theirs.signals["prefix_hits_tokens"] > 0


class Short:
    """A server that says one token too few."""

    async def ask(self, program: int, turn: Turn, script: Script, hear: Callable[[int], None]) -> Answered:
        hear(turn.output_tokens - 1)
        return Answered(1, 0)

    async def signals(self) -> Mapping[str, float]:
        return {}


def test_an_answer_of_another_length_is_no_measurement() -> None:
    """A judge that says fewer tokens than it was asked for is an error, not a fast engine."""
    script = small()
    with pytest.raises(RuntimeError, match="were asked for"):
        asyncio.run(live(Short(), script, closed_loop(script)))


def seen(program: int, cached: int, *token_at_s: float) -> Seen:
    return Seen(program, 0, 0.0, 100, cached, token_at_s)


def test_disagreement_is_seen() -> None:
    """Two of three hits equal; of three pairs of first tokens one is swapped; times are a little off."""
    ours = Run([seen(0, 16, 1.0, 2.0), seen(1, 32, 1.5, 2.0), seen(2, 0, 3.0, 4.0)], [], {})
    theirs = Run([seen(0, 16, 1.6, 2.0), seen(1, 48, 1.5, 2.0), seen(2, 0, 3.0, 4.0)], [], {})
    found = agreement(ours, theirs)
    assert found["calls_with_equal_hits"] == pytest.approx(2 / 3)
    assert found["order_agreement"] == pytest.approx(2 / 3)
    assert found["token_time_error_mean"] == pytest.approx(0.6 / 2.0 / 6)


def test_slots_keep_one_context_each() -> None:
    """Two slots, three programs: the one used longest ago is lost, and a common beginning is found in any slot."""
    script = Script([[Turn(100, 10, 0), Turn(50, 10, 0)] for _ in range(3)], shared_tokens=20)
    order = [[(0, 0), (1, 0), (0, 1), (2, 0), (1, 1)]]
    hits = predicted_hits(script, order, 2)
    assert hits == {(0, 0): 0, (1, 0): 20, (0, 1): 20, (2, 0): 20, (1, 1): 20}
    alone = Script(script.programs, shared_tokens=0)
    assert predicted_hits(alone, order, 2) == {(0, 0): 0, (1, 0): 0, (0, 1): 109, (2, 0): 0, (1, 1): 0}


SHAPES = [(64, 32, 1), (64, 32, 8), (512, 4, 1), (512, 4, 4), (900, 16, 4), (256, 48, 8)]


def test_an_engine_of_any_speed_is_fitted() -> None:
    """Cells of an engine a hundred times slower than a GPU, and worse with many users, are met within 3 %."""
    slow = StepCost(
        fixed_s=0.03,
        weights_s=1e-3,
        gemm_s_per_token=1e-3,
        kv_s_per_token=5e-6,
        attention_s_per_pair=1e-7,
        request_s=2e-3,
    )
    engine = VllmEngineSpec(num_gpu_blocks=400, step=slow, max_num_batched_tokens=512, max_num_seqs=8)
    cells = []
    for shape in SHAPES:
        cell = Cell(prompt_tokens=shape[0], output_tokens=shape[1], concurrency=shape[2], output_tokens_per_s=1.0)
        cells.append(msgspec.structs.replace(cell, output_tokens_per_s=simulate_cell(cell, engine)))
    rough = rough_step(cells)
    assert rough.gemm_s_per_token == pytest.approx(1e-3, rel=0.5)
    found = fit(cells, msgspec.structs.replace(engine, step=None))
    assert found.max_error < 0.03
    assert found.spec.cost.gemm_s_per_token == pytest.approx(1e-3, rel=0.3)


def test_prompts_in_token_ids_share_what_they_should() -> None:
    """The common beginning is the same ids, everything else differs, and an answer becomes part of its program only."""
    contexts, script = Contexts(0), Script([], shared_tokens=30)
    first = contexts.grow(0, Turn(50, 1, 0), script)
    other = contexts.grow(1, Turn(50, 1, 0), script)
    contexts.reply(0, [9, 9])
    second = contexts.grow(0, Turn(10, 1, 0), script)
    assert first[:30] == other[:30] and first[30:] != other[30:]
    assert second[:52] == [*first, 9, 9] and len(second) == 62


def test_model_folders_are_whole(tmp_path: Path) -> None:
    """Every id has a word, and the weights file has the header, the tensors and the length that it says."""
    folder = write_model(tmp_path / "tiny")
    words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(words.values()) == list(range(CONFIG["vocab_size"]))
    data = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    magic, version, n_tensors, n_keys = struct.unpack_from("<4sIQQ", data)
    assert (magic, version, n_tensors) == (b"GGUF", 3, 3 + 2 * 9)
    assert n_keys == 18
    assert len(data) % 32 == 0


def test_absent_judges_are_named_and_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without an interpreter nothing is measured, the count and the reason are said, and the status is not 0."""
    monkeypatch.delenv("LOADWISE_VLLM_PYTHON", raising=False)
    monkeypatch.setattr(sys, "argv", ["judges", "--json", "--judge", "vllm"])
    assert judges.main() == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "1 of 1 judges absent" in said.err and "LOADWISE_VLLM_PYTHON" in said.err
    with pytest.raises(Absent, match="LOADWISE_VLLM_PYTHON"):
        servers.python_of("LOADWISE_VLLM_PYTHON")


def test_unknown_judges_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A typing error is not a judge that happens to be absent."""
    monkeypatch.setattr(sys, "argv", ["judges", "--judge", "vlm"])
    with pytest.raises(SystemExit):
        judges.main()
    assert "unknown judge 'vlm'; known are vllm, dynamo, llamacpp" in capsys.readouterr().err


def test_pages_of_metrics_are_summed_over_labels() -> None:
    """Comments are left out; equal names add up."""
    assert prometheus('# HELP a b\na{x="1"} 2\na{x="2"} 3.5\nb 1e3\n') == {"a": 5.5, "b": 1000.0}


def test_the_real_time_bench_judges_within_five_percent() -> None:
    """Exactly what is judged has a check, in both directions."""
    values: dict[str, Any] = {f"off.{key}": 0.049 for key in emulator.JUDGED} | {"token_time_error_mean": 0.01}
    assert all(check["holds"] for check in emulator.checks(values))
    values["off.hit_tokens"] = -0.06
    assert [check["key"] for check in emulator.checks(values) if not check["holds"]] == ["off.hit_tokens"]
