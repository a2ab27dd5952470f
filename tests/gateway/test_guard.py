"""Web pages are kept out unless they are listed, and so are names that are not ours."""

from __future__ import annotations

from typing import Any

import pytest
from engines import DONE, Engine, chunk, sends
from sites import exchange, on_loop, parse, site

from loadwise.gateway.config import GatewayConfig
from loadwise.gateway.guard import is_loopback
from loadwise.kernel.errors import ConfigError

PAGE = "https://page.example"


def raw(host: str, *, method: str = "GET", path: str = "/v1/models", more: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{more}\r\n".encode()


@on_loop
async def test_a_page_is_refused_wherever_it_asks() -> None:
    """Whatever the route, method or key: nothing is dispatched, and no grant is given."""
    async with site(Engine()) as s:
        origin = {"Origin": PAGE}
        for answer in (
            await s.chat("p", headers=origin),
            await s.ask("GET", "/healthz", headers=origin),
            await s.ask("GET", "/v1/programs", headers={"Origin": "null"}),
            await s.ask("OPTIONS", "/v1/chat/completions", headers={**origin, "Access-Control-Request-Method": "POST"}),
            await s.ask("POST", "/v1/programs/p/finish", {}, {"Origin": s.gateway.url}),
        ):
            assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")
            assert "gateway.origins" in answer.error["message"]
            assert "access-control-allow-origin" not in answer.headers
        assert not s.engine.calls and s.counts.arrived == 0
        assert (await s.ask("OPTIONS", "/v1/chat/completions")).status == 405


@on_loop
async def test_a_listed_page_is_let_in() -> None:
    """Its preflight is answered without a key; every answer, also errors and streams, lets it read."""
    engine = Engine()
    environment = {"KEYS": "k"}
    async with site(engine, origins=(PAGE,), key_env="KEYS", environment=environment) as s:
        page = {"Origin": PAGE}
        wish = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, x-session-id",
        }
        answer = await s.ask("OPTIONS", "/v1/chat/completions", headers={**page, **wish})
        assert (answer.status, answer.body) == (204, b"")
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-allow-headers"] == "authorization, x-session-id"
        assert "POST" in answer.headers["access-control-allow-methods"]
        engine.script = [sends(chunk({"content": "a"}), DONE)]
        key = {**page, "Authorization": "Bearer k"}
        for expected, answer in (
            (200, await s.chat("p", stream=True, headers=key)),
            (200, await s.chat("p", headers=key)),
            (401, await s.chat("p", headers=page)),
            (404, await s.ask("GET", "/v1/programs/q", headers=key)),
        ):
            assert answer.status == expected
            assert (answer.headers["access-control-allow-origin"], answer.headers["vary"]) == (PAGE, "origin")
        other = await s.chat("p", headers={**key, "Origin": "https://other.example"})
        assert other.status == 403 and "access-control-allow-origin" not in other.headers
        plain = await s.chat("p", headers={"Authorization": "Bearer k"})
        assert plain.status == 200 and "access-control-allow-origin" not in plain.headers


HOSTS = {
    "localhost": True,
    "LOCALHOST:8080": True,
    "agent.localhost": True,
    "127.0.0.1:1": True,
    "[::1]:80": True,
    "10.0.0.9": True,
    "gateway.test": True,
    "Gateway.Test.:99": True,
    "evil.example": False,
    "evil.example:8080": False,
    "localhost.evil.example": False,
    "127.0.0.1.evil.example": False,
    "notlocalhost": False,
    "": False,
}


@on_loop
async def test_a_gateway_on_loopback_answers_to_its_names_only() -> None:
    """A page whose name was pointed at loopback is refused, each time and on every route."""
    async with site(Engine(), hosts=("gateway.test",)) as s:
        for host, is_known in HOSTS.items():
            for path in ("/v1/models", "/healthz", "/v1/models"):
                for browser in ("Accept-Language: *\r\n", "User-Agent: Mozilla/5.0 (X11)\r\n"):
                    answer = parse(await exchange(s.port, raw(host, path=path, more=browser)))
                    assert answer.status == (200 if is_known else 403), host
                    assert is_known or answer.error["code"] == "host_not_allowed"
            assert parse(await exchange(s.port, raw(host))).status == 200, "whoever is no browser may say any name"
        assert parse(await exchange(s.port, b"GET /healthz HTTP/1.0\r\n\r\n")).status == 200
        for n in range(3000):
            assert s.gateway.server.handler  # the set of known values is bounded
            s.gateway.server.handler.routes._guard._require_host(b"127.0.0.1:%d" % n)  # type: ignore[attr-defined]
        assert len(s.gateway.server.handler.routes._guard.known_hosts) <= 1024  # type: ignore[attr-defined]


@on_loop
async def test_a_gateway_for_others_answers_to_any_name() -> None:
    """Bound to all addresses its names are not known to it."""
    async with site(Engine(), host="0.0.0.0") as s:
        assert parse(await exchange(s.port, raw("any.example"))).status == 200


@pytest.mark.parametrize(
    ("host", "is_ours_only"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("gateway.example", False),
    ],
)
def test_loopback_is_known(host: str, is_ours_only: bool) -> None:
    """Only this machine reaches it."""
    assert is_loopback(host) is is_ours_only


@pytest.mark.parametrize(
    "options",
    [
        {"origins": ("https://a/",)},
        {"origins": ("",)},
        {"hosts": ("a b",)},
        {"hosts": ("a:80",)},
        {"hosts": ("http://a",)},
    ],
)
def test_what_could_never_match_is_refused(options: dict[str, Any]) -> None:
    """A slash, a port or a space is a slip of the pen."""
    with pytest.raises(ConfigError, match="gateway"):
        GatewayConfig(**options)
