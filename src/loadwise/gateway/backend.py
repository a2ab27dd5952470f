"""The way to one backend: its connections, its headers, its name for the model."""

import os
import ssl
from collections.abc import Mapping
from urllib.parse import quote, urlsplit

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.pool import BackendSpec
from loadwise.wire.client import Timeouts, Upstream, UpstreamLimits
from loadwise.wire.heads import Ticker, header_block

from .config import GatewayConfig
from .readers.api import ApiMeter

_WATCHED = UpstreamLimits(connections=2, idle_connections=2)


class BackendLink:
    """One backend as the live host reaches it."""

    def __init__(
        self, spec: BackendSpec, config: GatewayConfig, ticker: Ticker, environment: Mapping[str, str] = os.environ
    ) -> None:
        """Prepare; nothing is connected yet.

        Raises:
            ConfigError: no or a bad url, or the key's environment variable is not set.
        """
        if not spec.url:
            raise ConfigError(f"backend {spec.name!r} has no url")
        n_max = config.upstream_connections_max
        limits = UpstreamLimits(connections=n_max, idle_connections=n_max)
        tls = ssl.create_default_context() if spec.url.lower().startswith("https:") else None
        timeouts = Timeouts(
            connect_s=spec.connect_timeout_s, first_byte_s=spec.first_byte_timeout_s, idle_s=spec.idle_timeout_s
        )
        try:
            url = base_url(spec.url)
            self.upstream = Upstream(url, limits=limits, timeouts=timeouts, ticker=ticker, tls=tls)
            self.watched = Upstream(url, limits=_WATCHED, timeouts=timeouts, ticker=ticker, tls=tls)
            """For the probe, which must not wait behind turns: a backend that is busy is not down."""
        except ValueError as error:
            raise ConfigError(f"backend {spec.name!r}: url {spec.url!r}: {error}") from error
        self.spec = spec
        self.served_model = spec.served_model or spec.model
        names = header_text(spec.model), header_text(spec.name)
        self.head = b"x-loadwise-model: %b\r\nx-loadwise-backend: %b\r\n" % names
        """What a client is told of it with every answer."""
        self.meter = ApiMeter(spec.requests_per_minute) if spec.engine == "api" else None
        """Of a paid API, which shows nothing itself."""
        self.request_headers = b"content-type: application/json\r\naccept: */*\r\n" + self._key(environment)

    def engine_priority(self, priority: int) -> int | None:
        """A turn's priority as the engine counts it; None where it was not asked for, or the engine takes none."""
        if self.spec.priority is None or priority == 0:
            return None
        return priority if self.spec.priority == "lower_first" else -priority

    async def close(self) -> None:
        """Break off what is in flight and close every connection."""
        await self.upstream.close()
        await self.watched.close()

    def _key(self, environment: Mapping[str, str]) -> bytes:
        if self.spec.key_env is None:
            return b""
        key = environment.get(self.spec.key_env)
        if not key:
            raise ConfigError(f"backend {self.spec.name!r}: environment variable {self.spec.key_env} is not set")
        return header_block([("authorization", f"Bearer {key}")])


def base_url(url: str) -> str:
    """The engine's API root: a url without a path means `/v1`.

    >>> base_url("http://127.0.0.1:8000")
    'http://127.0.0.1:8000/v1'
    """
    return url.rstrip("/") + "/v1" if urlsplit(url).path in ("", "/") else url


def header_text(text: str) -> bytes:
    """Text as a header value: printable ASCII, everything else percent-encoded."""
    if text.isascii() and text.isprintable():
        return text.encode()
    return quote(text, safe=" !#$&'()*+,/:;=?@[]~").encode()
