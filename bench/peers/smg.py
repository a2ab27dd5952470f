"""SGLang's model gateway (Rust), one worker behind it."""

from __future__ import annotations

import msgspec

from bench.peers.peer import Peer

PEER = Peer(
    name="smg",
    requirement="smg==1.13.0",
    environment_name="smg",
    argv=(
        "{bin}/smg",
        "launch",
        "--host=127.0.0.1",
        "--port={port}",
        "--worker-urls={engine_url}",
        "--policy=cache_aware",
        "--log-level=error",
        "--prometheus-host=127.0.0.1",
        "--prometheus-port={metrics_port}",
    ),
    ready_limit_s=30.0,
    differs=("log level error", "one worker"),
)
"""As its launcher runs it: `cache_aware` is the default policy."""

ROUND_ROBIN = msgspec.structs.replace(
    PEER,
    name="smg-round-robin",
    argv=tuple("--policy=round_robin" if part.startswith("--policy") else part for part in PEER.argv),
    differs=("log level error", "one worker", "policy round_robin"),
)
"""Its cheapest policy, which looks at no prompt."""
