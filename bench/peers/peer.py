"""What a peer is, how its environment is made from the package index, and how it is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from bench.pinned import Pinned, free_port

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".cache" / "peers"
INSTALL_LIMIT_S = 900.0


class PeerUnavailable(RuntimeError):
    """The peer cannot be measured here; the message is the reason that the report prints."""


class Peer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One other gateway: what to install and how its users run it."""

    name: str
    """The name in `--peer` and in the report."""
    requirement: str
    """The pinned requirement, as pip reads it."""
    environment_name: str
    """The folder of its environment; two configurations of one peer share one."""
    argv: tuple[str, ...]
    """The command. `{bin}`, `{here}`, `{port}`, `{metrics_port}` and `{engine_url}` are filled in."""
    variables: dict[str, str] = {}
    """Environment variables, filled in like `argv`, with `{key}` besides."""
    headers: dict[str, str] = {}
    """Headers that each request must carry, filled in like `variables`."""
    model: str | None = None
    """The model to ask for; None asks for the one that the engine lists."""
    ready_limit_s: float = 60.0
    differs: tuple[str, ...] = ()
    """Where this configuration differs from what a user runs, in words."""


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """A peer that runs: where it listens and what a request to it must carry."""

    process: Pinned
    port: int
    headers: dict[str, str]


def _run(argv: list[str], what: str) -> None:
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise PeerUnavailable(f"{what} took longer than {INSTALL_LIMIT_S:g} s") from exc
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise PeerUnavailable(f"{what} failed: {(errors or done.stderr.splitlines() or ['no message'])[-1]}")


def install(peer: Peer, environments: Path = ENVIRONMENTS) -> Path:
    """Make the peer's environment unless it stands already.

    A stamp written last tells a whole environment from one whose installation was interrupted.

    Returns:
        The environment's folder of commands.

    Raises:
        PeerUnavailable: pip could not install it.
    """
    home = environments / peer.environment_name
    stamp = home / "installed"
    if not (stamp.exists() and stamp.read_text() == peer.requirement):
        print(f"installing {peer.requirement} into its own environment", file=sys.stderr)
        _run([sys.executable, "-m", "venv", "--clear", str(home)], f"making an environment for {peer.name!r}")
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", peer.requirement]
        _run(pip, f"installing {peer.requirement!r}")
        stamp.write_text(peer.requirement)
    return home / "bin"


def start(peer: Peer, engine_url: str, core: int, key: str, environments: Path = ENVIRONMENTS) -> Started:
    """Install the peer if need be and start it on a loopback port and one core.

    Args:
        peer: which one.
        engine_url: base address of the engine, without `/v1`.
        core: the core that it may use.
        key: a secret for a peer that refuses to run without one.
        environments: where the environments of peers are kept.

    Raises:
        PeerUnavailable: it cannot be installed.
    """
    known = {
        "bin": str(install(peer, environments)),
        "here": str(Path(__file__).parent),
        "port": str(free_port()),
        "metrics_port": str(free_port()),
        "engine_url": engine_url,
        "key": key,
    }
    # nothing of this process's own Python environment may leak into the peer's
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    variables = {name: value.format(**known) for name, value in peer.variables.items()}
    process = Pinned(peer.name, [part.format(**known) for part in peer.argv], core, {**inherited, **variables})
    headers = {name: value.format(**known) for name, value in peer.headers.items()}
    return Started(process=process, port=int(known["port"]), headers=headers)
