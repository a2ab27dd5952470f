"""What `gateway:` in a pool file may say; every default of the live host stands here and nowhere else."""

import math
from typing import Literal

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.runner.embed import EmbedderSpec
from loadwise.verify.task_types import SelectionSpec


class GatewayConfig(Fact, frozen=True, kw_only=True):
    """Where to listen, what to refuse, where to remember."""

    host: str = "127.0.0.1"
    port: int = 8080
    journal: str | None = "loadwise-journal"
    """Directory of the journal, or null: then nothing survives a restart."""
    keep_segments: int | None = None
    """Closed journal segments to keep; null keeps all."""
    seed: int = 0
    key_env: str | None = None
    """Environment variable with the API keys that clients may use, separated by commas; null lets everybody in."""
    hosts: tuple[str, ...] = ()
    """Names besides `host`, localhost and addresses by which a gateway on loopback may be asked (the Host header)."""
    origins: tuple[str, ...] = ()
    """Origins of web pages that may ask, as "https://example.org"; "*" lets every page in."""
    embedder: Literal["none", "hash", "minilm"] | EmbedderSpec = "hash"
    """What turns a program's first request into components of its context, and tells its task type."""
    task_selector: SelectionSpec = SelectionSpec()
    """How the task type of a program is told that names none."""
    pack: str | None = None
    """File of an experience pack: what the router knows before its first verdict."""
    siblings: dict[str, str] = {}
    """By model of the pool that the pack does not know, the model of the pack that stands for it."""
    probe_interval_s: float = 0.5
    time_scale: float = 1.0
    """Seconds of the router per real second: other than 1 in front of engines emulated at that scale only. Time limits
    of connections and `keep_alive_s` stay real."""
    body_max_bytes: int = 32 * 1024 * 1024
    headers_max_bytes: int = 64 * 1024
    connections_max: int = 4096
    answer_max_bytes: int = 64 * 1024 * 1024
    """A whole answer that is not streamed; beyond it the engine counts as broken."""
    upstream_connections_max: int = 1024
    """Connections to one backend."""
    keep_alive_s: float = 15.0
    """Between two comments to a streaming client that is held."""
    grace_s: float = 10.0
    """How long a stopping gateway lets open turns finish."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"gateway.port is {self.port!r}; it must be 0 to 65535")
        if self.keep_segments is not None and self.keep_segments < 1:
            raise ConfigError(f"gateway.keep_segments is {self.keep_segments!r}; it must be >= 1")
        if self.siblings and self.pack is None:
            raise ConfigError(f"gateway.siblings names {', '.join(self.siblings)}, but gateway.pack is not set")
        for name, values in (("hosts", self.hosts), ("origins", self.origins)):
            for value in values:
                if not value or not value.isascii() or not value.isprintable() or value.endswith("/") or " " in value:
                    raise ConfigError(
                        f"gateway.{name} holds {value!r}; it must be a name without spaces or final slash"
                    )
        for value in self.hosts:
            if "/" in value or ":" in value:
                raise ConfigError(f"gateway.hosts holds {value!r}; it must be a name without scheme and port")
        for name in ("probe_interval_s", "grace_s", "keep_alive_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"gateway.{name} is {value!r}; it must be a finite number > 0")
        if not 1e-3 <= self.time_scale <= 1e3:
            raise ConfigError(f"gateway.time_scale is {self.time_scale!r}; it must be in [0.001, 1000]")
        for name in self.__struct_fields__:
            if name.endswith(("_max_bytes", "_max")) and getattr(self, name) < 1:
                raise ConfigError(f"gateway.{name} is {getattr(self, name)!r}; it must be >= 1")
