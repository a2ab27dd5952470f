"""Keeps web pages out: a browser sends whatever any page asks it to, also to this machine's loopback.

A browser says where a page comes from (`Origin`) whenever the page might read or change something; only listed origins
are let in. A page whose own name has been pointed at us afterwards (DNS rebinding) is told by `Host`, which a browser
takes from the page's address: on loopback it must be one by which we are known. That is asked of browsers only (they
all say which language they want); whoever is no browser sends no `Origin` and may call us what it likes.
"""

from collections.abc import Mapping
from ipaddress import ip_address

from loadwise.kernel.errors import CallerError
from loadwise.wire.exchange import Exchange

from .config import GatewayConfig

ANY = "*"
_KNOWN_MAX = 1024
_KNOWN_MAX_BYTES = 256


class Forbidden(CallerError):
    status = 403
    code = "forbidden"


class Guard:
    """Looks at `Host` and `Origin`."""

    def __init__(self, config: GatewayConfig) -> None:
        self.known_hosts: set[bytes | None] = {None}
        """Values of `Host` that were let in before; HTTP/1.0 sends none."""
        self._is_loopback = is_loopback(config.host)
        self._hosts = frozenset(name.lower().rstrip(".") for name in (config.host, *config.hosts))
        self._origins = frozenset(origin.lower().encode() for origin in config.origins)

    def admit(self, exchange: Exchange) -> bool:
        """Whether the request goes on; False where it was a preflight, which is answered here.

        Raises:
            Forbidden: it comes from a page, or by a name, that is not let in.
        """
        headers = exchange.headers
        host = headers.get(b"host")
        if host not in self.known_hosts and host is not None and _is_browser(headers):
            self._require_host(host)
        origin = headers.get(b"origin")
        if origin is None:
            return True
        if ANY.encode() not in self._origins and origin.lower() not in self._origins:
            shown = origin[:100].decode("latin-1")
            text = f"pages of {shown!r} may not ask this gateway; list it in gateway.origins to let them"
            raise Forbidden(text, code="origin_not_allowed", param="Origin")
        exchange.answer_headers = _grant(origin)
        asked = headers.get(b"access-control-request-method")
        if exchange.method != b"OPTIONS" or asked is None:
            return True
        wanted = headers.get(b"access-control-request-headers", b"authorization, content-type")
        lines = b"access-control-allow-methods: GET, POST\r\naccess-control-allow-headers: %b\r\n" % wanted
        exchange.respond(204, lines + b"access-control-max-age: 600\r\n")
        return False

    def _require_host(self, host: bytes) -> None:
        name = _name_of(host.decode("latin-1"))
        if self._is_loopback and not (_is_address(name) or name in self._hosts or _is_localhost(name)):
            text = f"this gateway is not known as {name[:100]!r}; list the name in gateway.hosts to let it in"
            raise Forbidden(text, code="host_not_allowed", param="Host")
        if len(self.known_hosts) >= _KNOWN_MAX:
            self.known_hosts = {None}
        if len(host) <= _KNOWN_MAX_BYTES:
            self.known_hosts.add(host)


def _is_browser(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser may be asking: it always sends a language, whatever a page makes it say otherwise."""
    return b"accept-language" in headers or headers.get(b"user-agent", b"").startswith(b"Mozilla/")


def _grant(origin: bytes) -> bytes:
    return b"access-control-allow-origin: %b\r\naccess-control-expose-headers: *\r\nvary: origin\r\n" % origin


def _name_of(host: str) -> str:
    """The name or address in a `Host`, without port, brackets and final dot."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_localhost(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address that is listened on."""
    name = _name_of(f"[{host}]" if ":" in host else host)
    return _is_localhost(name) or (_is_address(name) and ip_address(name).is_loopback)
