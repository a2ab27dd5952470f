"""The judges' processes: each on loopback, with a small KV space, ended when the block ends.

Each needs an environment of its own (`bench/README.md` says how to make one) that a variable names:
LOADWISE_VLLM_PYTHON, LOADWISE_DYNAMO_PYTHON; llama.cpp comes with the extra `real`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.agents import prometheus
from bench.judges.endpoints import LlamaEndpoint, OpenAIEndpoint
from bench.judges.tiny_gguf import write_gguf
from bench.judges.tiny_model import write_model
from bench.pinned import ProcessFailed, reserved_port
from loadwise.emulator.metrics import read_signals
from loadwise.sim.vllm_engine import VllmEngineSpec

START_LIMIT_S = 600.0
LLAMA_SLOTS = 3
LLAMA_SLOT_TOKENS = 2048


class Absent(Exception):
    """A judge cannot be had here; the message says what is missing."""


class Judge(NamedTuple):
    """An engine that can be started."""

    name: str
    open: Callable[[], contextlib.AbstractContextManager[Callable[[int], Any]]]
    """Starts it; gives a function that makes an endpoint from a seed."""
    spec: VllmEngineSpec | None
    """What our simulator is told of it; None where it is not such an engine."""
    what: str
    keeps_replies: bool = True
    """Whether it finds its own answers again when they come back in a prompt."""


def python_of(variable: str) -> str:
    """The interpreter that a variable names.

    Raises:
        Absent: there is none.
    """
    path = os.environ.get(variable, "")
    if not path or not Path(path).exists():
        raise Absent(f"{variable} names no Python: {path!r}")
    return path


VLLM_SPEC = VllmEngineSpec(
    num_gpu_blocks=64, block_size=32, max_num_seqs=8, max_num_batched_tokens=512, max_model_len=1536
)
DYNAMO_SPEC = VllmEngineSpec(num_gpu_blocks=128, block_size=16, max_num_seqs=8, max_num_batched_tokens=512)


@contextlib.contextmanager
def vllm() -> Iterator[Callable[[int], Any]]:
    """vLLM on the CPU with a tiny model of random weights."""
    with vllm_server() as url:
        yield lambda seed: OpenAIEndpoint(f"{url}/v1", read_signals, seed=seed)


@contextlib.contextmanager
def vllm_server() -> Iterator[str]:
    """The same; gives its root."""
    python = python_of("LOADWISE_VLLM_PYTHON")
    spec = VLLM_SPEC
    with reserved_port() as port, tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "tiny")
        argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "m"]
        argv += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--load-format", "dummy"]
        argv += ["--enforce-eager", "--enable-prompt-tokens-details", "--max-model-len", str(spec.max_model_len)]
        # One block is vLLM's own null block.
        argv += ["--block-size", str(spec.block_tokens), "--num-gpu-blocks-override", str(spec.n_blocks + 1)]
        argv += ["--max-num-seqs", str(spec.max_num_seqs)]
        argv += ["--max-num-batched-tokens", str(spec.max_num_batched_tokens)]
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONPATH": "",
        }
        with running(argv, environment) as process:
            wait_until_up(process, f"http://127.0.0.1:{port}/health")
            yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def dynamo() -> Iterator[Callable[[int], Any]]:
    """Dynamo's mocker behind its own frontend. They listen on every address, so they need a network of their own."""
    python = python_of("LOADWISE_DYNAMO_PYTHON")
    if not is_alone():
        raise Absent("the mocker listens on every address: run in `unshare -n` with `ip link set lo up`")
    # Its own network, so any port is free; the worker takes none above 32,767.
    spec, port, metrics_port = DYNAMO_SPEC, 8400, 8401
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "tiny")
        common = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(Path(folder) / "kv"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1",
            "PYTHONPATH": "",
        }
        worker = [python, "-m", "dynamo.mocker", "--model-path", str(model), "--model-name", "m"]
        worker += ["--num-gpu-blocks-override", str(spec.n_blocks), "--block-size", str(spec.block_tokens)]
        worker += ["--max-num-seqs", str(spec.max_num_seqs)]
        worker += ["--max-num-batched-tokens", str(spec.max_num_batched_tokens), "--speedup-ratio", "1.0"]
        front = [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
        front += ["--router-mode", "round-robin"]
        (Path(folder) / "kv").mkdir()
        with (
            running(worker, common | {"DYN_SYSTEM_PORT": str(metrics_port)}),
            running(front, common) as process,
        ):
            wait_until_up(process, f"http://127.0.0.1:{port}/v1/models", b'"m"')
            yield lambda seed: OpenAIEndpoint(
                f"http://127.0.0.1:{port}/v1",
                read_dynamo,
                metrics_url=f"http://127.0.0.1:{metrics_port}",
                has_token_ids=False,
                seed=seed,
            )


def read_dynamo(page: str) -> Mapping[str, float]:
    """What the mocker exports of our readings, under vLLM's names."""
    values = prometheus(page)
    names = {"n_preemptions": "num_preemptions_total", "kv_usage_ratio": "kv_cache_usage_perc"}
    return {signal: values[f"vllm:{name}"] for signal, name in names.items() if f"vllm:{name}" in values}


@contextlib.contextmanager
def llamacpp() -> Iterator[Callable[[int], Any]]:
    """llama.cpp's own server on random weights; idle contexts are not saved outside the slots."""
    with llamacpp_server() as url:
        yield lambda seed: LlamaEndpoint(url, seed=seed)


@contextlib.contextmanager
def llamacpp_server() -> Iterator[str]:
    """The same; gives its root."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise Absent("xllamacpp is not installed: pip install 'loadwise[real]'")
    script = Path(__file__).with_name("llama_server.py")
    with reserved_port() as port, tempfile.TemporaryDirectory() as folder:
        weights = write_gguf(Path(folder) / "tiny.gguf")
        argv = [sys.executable, str(script), str(weights), str(LLAMA_SLOTS), str(LLAMA_SLOT_TOKENS), str(port)]
        with running(argv, dict(os.environ)) as process:
            url = f"http://127.0.0.1:{port}"
            wait_until_up(process, url + "/health")
            yield url


JUDGES = {
    judge.name: judge
    for judge in (
        Judge("vllm", vllm, VLLM_SPEC, "vLLM 0.32 on a CPU, eight layers of random weights"),
        Judge("dynamo", dynamo, DYNAMO_SPEC, "Dynamo 1.6.1's mocker, itself a simulator", keeps_replies=False),
        Judge("llamacpp", llamacpp, None, "llama.cpp's server, two layers of random weights"),
    )
}


def is_alone() -> bool:
    """Whether this process sees no network but loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return [line.split(":")[0].strip() for line in lines] == ["lo"]


@contextlib.contextmanager
def running(argv: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process with all that it starts, gone at the end; what it printed is in the error if it fails."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            argv, stdout=log, stderr=subprocess.STDOUT, env=dict(environment), start_new_session=True
        )
        try:
            yield process
        except ProcessFailed as error:
            log.seek(0)
            raise ProcessFailed(f"{error}\n{log.read()[-3000:].decode(errors='replace')}") from error
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the group to end, then make it."""
    import signal

    for number, limit_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=limit_s)


def wait_until_up(
    process: subprocess.Popen[bytes], url: str, needs: bytes = b"", limit_s: float = START_LIMIT_S
) -> None:
    """Ask until there is an answer of 200 with `needs` in it.

    Raises:
        ProcessFailed: the process ended, or it takes too long.
    """
    import urllib.error
    import urllib.request

    give_up_at_s = time.monotonic() + limit_s
    while time.monotonic() < give_up_at_s:
        if process.poll() is not None:
            raise ProcessFailed(f"the judge ended with {process.returncode}")
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200 and needs in answer.read():
                return
        time.sleep(0.3)
    raise ProcessFailed(f"{url} did not answer within {limit_s:g} s")
