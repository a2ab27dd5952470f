"""What the gateway's bench starts of our own: the engine stub, and Loadwise in front of it as a user runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from bench import load
from bench.figures import ENGINE
from bench.load import Endpoint, LoadFailed
from bench.pinned import Pinned, environment, free_port

OURS = "loadwise"
REAL_EMBEDDER = "minilm"
"""What reads the first turn of a program outside the bench, as the pool file calls it."""
CHUNKS = 40
"""In how many pieces the engine streams an answer."""


def _python(name: str, arguments: list[str], core: int, cwd: Path | None = None) -> Pinned:
    return Pinned(name, [sys.executable, *arguments], core, environment(), cwd)


def start_engine(core: int) -> tuple[Pinned, Endpoint]:
    """Start the engine stub and learn the model that it lists."""
    port = free_port()
    process = _python(ENGINE, ["-m", "bench.engine_stub", "--port", str(port), "--chunks", str(CHUNKS)], core)
    try:
        process.wait_ready(lambda: load.get(port, "/v1/models") is not None, 30.0)
        listed = msgspec.json.decode(load.get(port, "/v1/models") or b"")
        return process, Endpoint(name=ENGINE, port=port, model=listed["data"][0]["id"])
    except BaseException:
        process.stop()
        raise


POOL = """\
models:
  small: {{usd_per_million: {{input: 0.10, output: 0.15}}}}
  medium: {{usd_per_million: {{input: 0.32, output: 3.20}}}}
  large: {{usd_per_million: {{input: 1.00, output: 5.00}}}}
backends:
  - {{name: a, model: small, url: "{engine_url}/v1", engine: vllm}}
  - {{name: b, model: medium, url: "{engine_url}/v1", engine: vllm}}
  - {{name: c, model: large, url: "{engine_url}/v1", engine: vllm}}
router: {{policy: linucb}}
gateway: {{port: {port}, journal: "{journal}", embedder: {embedder}}}
"""


def start_loadwise(directory: Path, engine_url: str, core: int, embedder: str = "hash") -> tuple[Pinned, Endpoint]:
    """Start our gateway as a user does, with a journal in `directory` and three models that one engine serves."""
    port = free_port()
    pool = directory / "pool.yaml"
    journal = directory / "journal"
    pool.write_text(POOL.format(engine_url=engine_url, port=port, journal=journal, embedder=embedder))
    arguments = ["-m", "loadwise.cli.main", "serve", str(pool)]
    return _python(OURS, arguments, core, directory), Endpoint(name=OURS, port=port, model="auto")


OURS_DIFFERS = ("embedder hash", "errors only are logged", "three models on one engine")


def answers(endpoint: Endpoint) -> bool:
    """Tell whether one turn is answered well; a gateway that is up may not know its engine yet."""
    try:
        with load.connections(endpoint.port, 1) as (connection,):
            content = load.request(endpoint, load.program_id("settling", 0), stream=False)
            return connection.exchange(content).status == 200
    except (OSError, LoadFailed):
        return False
