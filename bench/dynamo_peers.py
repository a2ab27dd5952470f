"""Dynamo's ThunderAgent port and its KV router beside Loadwise, over Dynamo's own simulated engines, in real time.

LOADWISE_DYNAMO_PYTHON=.../python python -m bench.dynamo_peers [--json] [--contestant kv,thunderagent_router,fast,...]

Two mocker engines. Dynamo's routers reach them over its own request plane; Loadwise reaches each through a frontend of
its own that does nothing but pass on (`round-robin` over one engine). Dynamo's parts listen on every address, so the
whole bench moves into a network of its own (`unshare -rn`) that has loopback only. The mocker does not find its own
answers again when they come back in a prompt, so hit rates are lower than those of real engines, for everybody.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop

from bench import result
from bench.disc_peers import scenario_of
from bench.judges.servers import Absent, is_alone, python_of, running, wait_until_up
from bench.judges.tiny_model import VOCABULARY, write_model
from bench.live_agents import Endpoint, LiveAgents, Lived
from bench.live_site import serving
from bench.pinned import ProcessFailed
from loadwise.sim.scenario import Scenario

DYNAMO = ("round-robin", "kv", "thunderagent_router")
PRESETS = ("vllm_alone", "thunderagent", "oracle", "fast")
BLOCKS, BLOCK_TOKENS = 2000, 16
FIRST_PORT = 8400
"""Of a network of our own; the mocker takes no port above 32,767."""


def words(role: str, tag: str, n_tokens: int) -> bytes:
    """A chat message of so many words, each a token, and hardly any two alike."""
    rng = np.random.default_rng(list(tag.encode()))
    text = " ".join(f"w{i}" for i in rng.integers(8, VOCABULARY, n_tokens))
    return msgspec.json.encode({"role": role, "content": text})


@contextlib.contextmanager
def fleet(python: str, folder: Path, n_engines: int, port: int, mode: str) -> Iterator[str]:
    """Mocker engines behind one frontend, and ThunderAgent between them where `mode` says so; gives its address."""
    folder.mkdir()
    model = write_model(folder / "tiny")
    (folder / "kv").mkdir()
    common = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(folder / "kv"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "PYTHONPATH": "",
    }
    worker = [python, "-m", "dynamo.mocker", "--model-path", str(model), "--model-name", "m", "--speedup-ratio", "1.0"]
    worker += ["--num-gpu-blocks-override", str(BLOCKS), "--block-size", str(BLOCK_TOKENS)]
    worker += ["--max-num-seqs", "256", "--max-num-batched-tokens", "2048", "--num-workers", str(n_engines)]
    is_thunder = mode == "thunderagent_router"
    front = [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    front += ["--router-mode", "round-robin" if is_thunder else mode]
    thunder = [python, "-m", "dynamo.thunderagent_router", "--endpoint", "dynamo.backend.generate"]
    thunder += ["--model-name", "ta", "--model-path", str(model), "--router-block-size", str(BLOCK_TOKENS)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(worker, common))
        if is_thunder:
            stack.enter_context(running(thunder, common))
        process = stack.enter_context(running(front, common))
        needs = b'"ta"' if is_thunder else b'"m"'
        wait_until_up(process, f"http://127.0.0.1:{port}/v1/models", needs, limit_s=90.0)
        yield f"http://127.0.0.1:{port}/v1"


@contextlib.contextmanager
def contestant(python: str, name: str, scenario: Scenario, folder: Path) -> Iterator[Endpoint]:
    """Fresh engines behind one contestant."""
    plain: dict[str, Any] = {"write": words, "reply_extra_tokens": 0, "wants_min_tokens": False}
    if name in DYNAMO:
        with fleet(python, folder / "fleet", 2, FIRST_PORT, name) as url:
            model = "ta" if name == "thunderagent_router" else "m"
            header, final = "x-dynamo-session-id", "x-dynamo-session-final"
            yield Endpoint(url=url, model=model, session_header=header, final_header=final, has_programs=False, **plain)
        return
    with (
        fleet(python, folder / "a", 1, FIRST_PORT, "round-robin") as a,
        fleet(python, folder / "b", 1, FIRST_PORT + 1, "round-robin") as b,
        serving(scenario, {"a": a, "b": b}, folder, scale=1.0) as (url, _),
    ):
        yield Endpoint(url=url, **plain)


def measure(python: str, names: Sequence[str], seed: int, **shape: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures by contestant, and why some contestants or programs have none."""
    found: dict[str, Any] = {}
    notes: dict[str, Any] = {"absent": {}, "failures": {}}
    for name in names:
        scenario = scenario_of(name if name in PRESETS else "vllm_alone", blocks=BLOCKS, **shape)
        began_at_s = time.monotonic()

        async def live(endpoint: Endpoint, scenario: Scenario = scenario) -> Lived:
            return await LiveAgents(scenario, seed, endpoint).run()

        try:
            with (
                tempfile.TemporaryDirectory() as folder,
                contestant(python, name, scenario, Path(folder)) as endpoint,
            ):
                lived = uvloop.run(live(endpoint))
        except ProcessFailed as problem:
            notes["absent"][name] = str(problem)[-1000:]
            continue
        found[name], notes["failures"][name] = lived.figures("m"), lived.failures()
        del found[name]["dear_share"], found[name]["resolved"]
        found[name]["load_average"] = os.getloadavg()[0]
        told = ", ".join(f"{key} {value:.3f}" for key, value in found[name].items())
        print(f"{name}: {told} ({time.monotonic() - began_at_s:.0f} s)", file=sys.stderr, flush=True)
    return found, notes


def alone() -> None:
    """Go on in a network of our own, unless this is one."""
    if is_alone():
        return
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        raise Absent("unshare and ip are needed for a network of their own")
    argv = [sys.executable, "-m", "bench.dynamo_peers", *sys.argv[1:]]
    quoted = " ".join("'" + part.replace("'", "'\\''") + "'" for part in argv)
    os.execvp("unshare", ["unshare", "-rn", "sh", "-c", f"ip link set lo up && exec {quoted}"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--contestant", help=f"separated by commas (default {','.join((*DYNAMO, *PRESETS))})")
    parser.add_argument("--load", type=int, default=16, help="programs in flight (default 16)")
    parser.add_argument("--programs", type=int, default=32, help="programs in all (default 32)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    try:
        python = python_of("LOADWISE_DYNAMO_PYTHON")
        alone()
    except Absent as absent:
        print(json.dumps({"name": "dynamo_peers", "absent": str(absent)}))
        return
    names = (arguments.contestant or ",".join((*DYNAMO, *PRESETS))).split(",")
    shape = {"n_programs": arguments.programs, "load": arguments.load}
    found, notes = measure(python, names, arguments.seed, **shape)
    config = {**shape, "scale": 1.0, "contestants": names, **notes}
    config["load_average"] = os.getloadavg()[0]
    report = result.build("dynamo_peers", values={}, config=config, seeds=[arguments.seed], peers=found)
    result.show(report, as_json=arguments.json)


if __name__ == "__main__":
    main()
