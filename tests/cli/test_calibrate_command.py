"""`loadwise calibrate`: known costs are found again, an engine is really asked, and bad input is named."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml
from cli_runs import refused, run

from loadwise.kernel.errors import ConfigError
from loadwise.lab.calibration import N_WAYS, Endpoint, Prober, Rung, ladder, read_measurements
from loadwise.sim.calibrate import Cell, simulate_cell
from loadwise.sim.hardware import HardwareSpec
from loadwise.sim.scenario import convert_scenario
from loadwise.sim.step_time import StepCost
from loadwise.sim.vllm_engine import VllmEngineSpec

Capture = pytest.CaptureFixture[str]
TRUE = StepCost(
    fixed_s=4e-3,
    weights_s=12e-3,
    gemm_s_per_token=8e-5,
    kv_s_per_token=3e-7,
    attention_s_per_pair=4e-9,
    request_s=5e-5,
)
HEAD = "prompt_tokens,output_tokens,concurrency,output_tokens_per_s,n_requests,held_out\n"


def measurements(path: Path, spec: VllmEngineSpec, noise_sigma: float = 0.0, seed: int = 0) -> Path:
    """The ladder as an engine of these costs would answer it, perhaps with noise in what is fitted."""
    rng = np.random.default_rng(seed)
    lines = [HEAD]
    for rung in ladder(32, 6000):
        shape = {"prompt_tokens": rung.prompt_tokens, "output_tokens": rung.output_tokens}
        cell = Cell(**shape, concurrency=rung.concurrency, n_requests=rung.n_requests, output_tokens_per_s=1.0)
        rate = simulate_cell(cell, spec) * math.exp(0 if rung.is_held_out else noise_sigma * rng.standard_normal())
        lines.append(f"{','.join(map(str, rung[:3]))},{rate},{rung.n_requests},{int(rung.is_held_out)}\n")
    path.write_text("".join(lines))
    return path


def test_costs_are_found_again(tmp_path: Path, capsys: Capture) -> None:
    """Seven cells give back every cost within a tenth, and three others within half a percent.

    Of a step's fixed part and its weights only the sum is told apart by cells of this size.
    """
    path = measurements(tmp_path / "cells.csv", VllmEngineSpec(step=TRUE))
    ran = run(capsys, "calibrate", "--measurements", path, "--json", "--out", tmp_path / "engine.yaml")
    assert ran.status == 0
    found = ran.json["constants"]
    assert found["fixed_s"] + found["weights_s"] == pytest.approx(TRUE.fixed_s + TRUE.weights_s, rel=0.02)
    for name in ("gemm_s_per_token", "kv_s_per_token", "attention_s_per_pair", "request_s"):
        assert found[name] == pytest.approx(getattr(TRUE, name), rel=0.1), name
    assert (ran.json["n_fit"], ran.json["n_held_out"]) == (7, 3)
    assert ran.json["held_out_error"] < 0.005
    assert "3 cells that it has not seen" in ran.err
    engine = yaml.safe_load((tmp_path / "engine.yaml").read_text())
    scenario = convert_scenario(world(engine))
    spec = scenario.engines["a"]
    assert isinstance(spec, VllmEngineSpec)
    assert spec.cost.gemm_s_per_token == found["gemm_s_per_token"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("step", [StepCost(), HardwareSpec(gpu="h200", model="qwen3-8b").step, TRUE])
def test_noise_of_two_percent_leaves_costs_in_place(tmp_path: Path, capsys: Capture, step: StepCost, seed: int) -> None:
    """Every cost that matters is found within a few times the noise, and cells that were not fitted within its size."""
    path = measurements(tmp_path / "cells.csv", VllmEngineSpec(step=step), noise_sigma=0.02, seed=seed)
    ran = run(capsys, "calibrate", "--measurements", path, "--json")
    found = ran.json["constants"]
    assert found["fixed_s"] + found["weights_s"] == pytest.approx(step.fixed_s + step.weights_s, rel=0.04)
    for name, within in (("gemm_s_per_token", 0.1), ("kv_s_per_token", 0.3), ("attention_s_per_pair", 0.4)):
        assert found[name] == pytest.approx(getattr(step, name), rel=within), name
    assert ran.json["held_out_error"] < 0.02


def test_a_bad_fit_is_called_one(tmp_path: Path, capsys: Capture) -> None:
    """Measurements that contradict each other are fitted all the same, and said to be."""
    path = tmp_path / "cells.csv"
    path.write_text(HEAD + "16,128,1,0.01,2,0\n" + "16,128,1,1000,2,0\n" + "2000,16,1,50,2,0\n")
    ran = run(capsys, "calibrate", "--measurements", path)
    assert ran.status == 0
    assert "no good fit" in ran.err


def test_an_engine_with_little_memory_is_not_made_to_preempt() -> None:
    """No rung wants more KV than there is; the longest prompts are shortened before users are sent away."""
    for rung in ladder(32, 6000, kv_tokens=4000):
        assert rung.concurrency * (rung.prompt_tokens + rung.output_tokens) <= 4000
    assert max(rung.prompt_tokens for rung in ladder(32, 6000, kv_tokens=4000)) > 2000
    assert ladder(32, 6000, kv_tokens=10**7) == ladder(32, 6000)


def test_shares_of_a_gpu_are_fitted(tmp_path: Path, capsys: Capture) -> None:
    """With a GPU and a model named, what is fitted are shares of its peak; the YAML is an engine of a scenario."""
    hardware = HardwareSpec(gpu="h100", model="qwen3-8b")
    path = measurements(tmp_path / "cells.csv", VllmEngineSpec(hardware=hardware))
    ran = run(capsys, "calibrate", "--measurements", path, "--gpu", "h100", "--shape", "qwen3-8b")
    engine = yaml.safe_load(ran.out)
    spec = convert_scenario(world(engine)).engines["a"]
    assert isinstance(spec, VllmEngineSpec)
    assert spec.hardware is not None
    assert spec.hardware.constants is not None
    assert spec.cost.weights_s == pytest.approx(hardware.step.weights_s, rel=0.02)


def world(engine: dict[str, Any]) -> dict[str, Any]:
    """A scenario with this engine."""
    return {
        "scenario": 1,
        "name": "calibrated",
        "n_programs": 1,
        "pool": {"models": {"m": {}}, "backends": [{"name": "a", "model": "m"}]},
        "engines": {"a": engine},
        "workload": {"arrivals": {"kind": "closed", "n_agents": 1}},
    }


class Stub:
    """An engine that answers at once what it is told to."""

    def __init__(self) -> None:
        self.status = 200
        self.usage: Any = "count"
        self.models: Any = {"data": [{"id": "first"}, {"id": "second"}]}
        self.metrics = 'vllm:cache_config_info{block_size="32",num_gpu_blocks="4000"} 1.0\n'
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                return None

            def do_GET(self) -> None:
                self._answer(200, stub.metrics if self.path == "/metrics" else json.dumps(stub.models))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                stub.asked.append(body)
                stub.keys.add(self.headers["authorization"])
                usage = stub.usage
                if usage == "count":
                    # Two tokens a word.
                    n = 2 * len(body["prompt"].split())
                    usage = {"prompt_tokens": n, "completion_tokens": body["max_tokens"]}
                self._answer(stub.status, json.dumps({"usage": usage}))

            def _answer(self, status: int, text: str) -> None:
                data = text.encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()


@pytest.fixture
def stub() -> Iterator[Stub]:
    one = Stub()
    yield one
    one.server.shutdown()
    one.thread.join()
    one.server.server_close()


def test_an_engine_is_asked_as_the_ladder_says(stub: Stub, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many requests, of the length that its own tokens need, none of which begins like another."""
    monkeypatch.setenv("KEY", "secret")
    flags = ("--max-concurrency", "4", "--max-prompt-tokens", "100", "--api-key-env", "KEY")
    ran = run(capsys, "calibrate", "--url", stub.url, *flags, "--json")
    assert ran.status == 0
    rungs = ladder(4, 100)
    assert len(stub.asked) == 2 + 2 * sum(rung.n_requests for rung in rungs)
    assert {body["model"] for body in stub.asked} == {"first"}
    assert len({body["prompt"].split()[0] for body in stub.asked}) == len(stub.asked)
    assert stub.keys == {"Bearer secret"}
    cells = ran.json["cells"]
    assert len(cells) == len(rungs)
    assert max(cell["prompt_tokens"] for cell in cells) == pytest.approx(100, rel=0.05)
    assert ran.json["engine"]["num_gpu_blocks"] == 4000
    assert ran.json["engine"]["block_size"] == 32


def test_a_rung_counts_what_the_engine_says(stub: Stub) -> None:
    """Tokens of `usage` over the time from the first request to the last answer."""
    now = iter([10.0, 14.0])
    prober = Prober(Endpoint(url=stub.url, model="m"), clock=lambda: next(now))
    stub.usage = {"prompt_tokens": 7, "completion_tokens": 5}
    cell = prober.measure(Rung(16, 128, 2, 6))
    shape = {"prompt_tokens": 7, "output_tokens": 5, "concurrency": 2, "n_requests": 6}
    assert cell == Cell(**shape, output_tokens_per_s=30 / 4)


def test_the_fastest_of_several_counts_without_the_way(stub: Stub) -> None:
    """What else runs only slows down; the network's share of every round is taken off."""
    way = [0.0, 0.5] * N_WAYS
    now = iter([*way, 10.0, 20.0, 20.0, 26.0, 30.0, 39.0])
    prober = Prober(Endpoint(url=stub.url, model="m"), clock=lambda: next(now))
    prober.prepare()
    stub.usage = {"prompt_tokens": 7, "completion_tokens": 5}
    cell = prober.measure(Rung(16, 128, 2, 6), 3)
    assert cell.output_tokens_per_s == 30 / (6 - 3 * 0.5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"status": 500}, "answered 500"),
        ({"usage": None}, "does not report usage"),
        ({"usage": {"prompt_tokens": 0, "completion_tokens": 3}}, "each must be >= 1"),
        ({"models": {"data": []}}, "lists no models"),
    ],
)
def test_an_engine_that_answers_nonsense_is_named(stub: Stub, capsys: Capture, changes: Any, named: str) -> None:
    """One line, status 1, no traceback."""
    for name, value in changes.items():
        setattr(stub, name, value)
    ran = run(capsys, "calibrate", "--url", stub.url)
    assert ran.status == 1
    assert named in ran.err
    assert stub.url in ran.err


def test_an_engine_that_is_not_there_is_named(capsys: Capture) -> None:
    """A refused connection, with the URL."""
    ran = run(capsys, "calibrate", "--url", "http://127.0.0.1:1/v1")
    assert ran.status == 1
    assert "http://127.0.0.1:1/v1" in ran.err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "either --url"),
        (["--url", "ftp://x"], "ftp://x"),
        (["--url", "http://[::1"], "http://[::1"),
        (["--url", "http://x:99999/v1"], "99999"),
        (["--url", "http://127.0.0.1:1/v1", "--timeout", "nan"], "timeout is nan"),
        (["--url", "http://127.0.0.1:1/v1", "--max-concurrency", "0"], "--max-concurrency is 0"),
        (["--url", "http://127.0.0.1:1/v1", "--max-prompt-tokens", "3"], "--max-prompt-tokens is 3"),
        (["--url", "http://127.0.0.1:1/v1", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY"),
        (["--url", "http://127.0.0.1:1/v1", "--gpu", "h100"], "belong together"),
        (["--url", "http://127.0.0.1:1/v1", "--num-gpu-blocks", "0"], "num_gpu_blocks is 0"),
        (["--url", "http://127.0.0.1:1/v1", "--times", "0"], "--times is 0"),
        (["--measurements", "/no/such.csv"], "/no/such.csv"),
    ],
)
def test_bad_flags_are_named(flags: list[str], named: str, capsys: Capture) -> None:
    """Nothing is measured."""
    assert named in refused(run(capsys, "calibrate", *flags))


GOOD = "16,128,1,60,2,0\n" * 2


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "column 'prompt_tokens' is missing"),
        (HEAD.replace("concurrency,", "") + GOOD, "column 'concurrency' is missing"),
        (HEAD.replace("held_out", "notes") + GOOD, "column 'notes' is unknown"),
        (HEAD + GOOD, "has 2 rows"),
        (HEAD + GOOD + "16,128,1,nan,2,0\n", "row 2: output_tokens_per_s is 'nan'"),
        (HEAD + GOOD + "16,128,1,-3,2,0\n", "row 2: output_tokens_per_s is '-3'"),
        (HEAD + GOOD + "16,128,1,inf,2,0\n", "row 2: output_tokens_per_s is 'inf'"),
        (HEAD + GOOD + "16,1.5,1,60,2,0\n", "row 2: output_tokens is '1.5'"),
        (HEAD + GOOD + "0,128,1,60,2,0\n", "row 2: prompt_tokens is '0'"),
        (HEAD + GOOD + "16,128,,60,2,0\n", "row 2: concurrency is ''"),
        (HEAD + GOOD + "16,128\n", "row 2: concurrency is None"),
        (HEAD + GOOD + "16,128,8,60,2,0\n", "row 2: cell n_requests is 2"),
        (HEAD + GOOD + "16,128,1,60,2,yes\n", "row 2: held_out is 'yes'"),
        (HEAD + GOOD + "16,128,1e300,60,2,0\n", "row 2: cell concurrency"),
        (HEAD + '"' + GOOD, "cannot be read"),
    ],
)
def test_bad_measurements_are_named(text: str, named: str, tmp_path: Path) -> None:
    """File, row, column and value."""
    path = tmp_path / "cells.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_measurements(str(path))
    assert named in error.value.message
    assert str(path) in error.value.message


def test_rows_are_held_out_where_none_is_marked(tmp_path: Path) -> None:
    """Every third of six or more; of fewer none, and the error is that of the fit alone."""
    path = tmp_path / "cells.csv"
    head = "prompt_tokens,output_tokens,concurrency,output_tokens_per_s\n"
    path.write_text(head + "16,128,1,60\n" * 7)
    measured = read_measurements(str(path))
    assert (len(measured.fit), len(measured.held_out)) == (5, 2)
    path.write_text(head + "16,128,1,60\n" * 5)
    assert len(read_measurements(str(path)).held_out) == 0
    assert msgspec.structs.asdict(measured.fit[0])["n_requests"] is None
