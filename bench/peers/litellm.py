"""LiteLLM's proxy (Python), one worker process, one deployment behind it."""

from __future__ import annotations

from bench.peers.peer import Peer

PEER = Peer(
    name="litellm",
    requirement="litellm[proxy]==1.108.7",
    environment_name="litellm",
    argv=(
        "{bin}/litellm",
        "--host=127.0.0.1",
        "--port={port}",
        "--config={here}/litellm.yaml",
        "--log_config={here}/litellm_logging.json",
        "--num_workers=1",
    ),
    variables={
        "BENCH_ENGINE_URL": "{engine_url}/v1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_MASTER_KEY": "{key}",
        "LITELLM_MODE": "PRODUCTION",
    },
    headers={"Authorization": "Bearer {key}"},
    model="bench-model",
    ready_limit_s=120.0,
    differs=("log level error, no access log", "no database", "one worker process, since it has one core"),
)
"""As its documentation runs it for production; a weak master key would be refused."""
