"""The doctor: what it finds at engines of every kind, and that it changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadwise.gateway.config import GatewayConfig
from loadwise.gateway.doctor import Diagnosis, examine, look_at_journal
from loadwise.journal.entry import make_header
from loadwise.journal.store import JournalWriter
from loadwise.kernel.events import HostRestarted
from loadwise.settings import parse_config
from loadwise.wire.exchange import Exchange
from loadwise.wire.heads import JSON_TYPE
from loadwise.wire.server import Server

Pages = dict[str, tuple[int, Any]]

VLLM_METRICS = """\
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0
"""
LLAMA_METRICS = "llamacpp:requests_processing 1\nllamacpp:requests_deferred 0\n"
SGLANG_METRICS = "sglang:num_running_reqs 1\nsglang:num_queue_reqs 0\nsglang:token_usage 0.5\n"


def models(*names: str, **more: Any) -> tuple[int, Any]:
    """A list of models as engines give it."""
    return 200, {"object": "list", "data": [{"id": name, "object": "model", **more} for name in names]}


VLLM: Pages = {"/v1/models": models("m", max_model_len=4096), "/health": (200, ""), "/metrics": (200, VLLM_METRICS)}
LLAMA: Pages = {
    "/v1/models": models("m"),
    "/health": (200, {"status": "ok"}),
    "/metrics": (200, LLAMA_METRICS),
    "/props": (200, {"total_slots": 4}),
    "/slots": (200, []),
}


class Engine:
    """An HTTP server with pages; keeps what it was asked, and wants a key where it has one."""

    def __init__(self, pages: Pages, key: str | None = None) -> None:
        self.pages = pages
        self.key = key
        self.asked: list[str] = []

    def __call__(self, exchange: Exchange) -> None:
        path = exchange.path.decode()
        self.asked.append(f"{exchange.method.decode()} {path}")
        status, page = self.pages.get(path, (404, {"error": "not found"}))
        if self.key is not None and exchange.headers.get(b"authorization") != f"Bearer {self.key}".encode():
            status, page = 401, {}
        exchange.respond(status, JSON_TYPE, page.encode() if isinstance(page, str) else json.dumps(page).encode())


class HangingEngine(Engine):
    """Takes requests and says nothing."""

    def __call__(self, exchange: Exchange) -> None:
        self.asked.append("hang")


def diagnose(
    engine: Engine | None,
    backend: Mapping[str, Any] | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    gateway: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> Diagnosis:
    """Examine a pool of one backend `a` of model `m` at an engine."""

    async def run() -> Diagnosis:
        said: dict[str, Any] = {"name": "a", "model": "m", "kv_tokens": 1000, **(backend or {})}
        server: Server | None = None
        if engine is not None:
            server = Server(engine)
            ((host, port), *_) = await server.listen("127.0.0.1", 0)
            said.setdefault("url", f"http://{host}:{port}/v1")
        pool = {"models": {"m": {"usd_per_million": {"input": 1}}}, "backends": [said], **(config or {})}
        settings = GatewayConfig(**{"port": 0, "journal": None, **(gateway or {})})
        try:
            return await examine(parse_config(pool), settings, environment=environment or {}, **options)
        finally:
            if server is not None:
                await server.close(0.1)

    return asyncio.run(run())


def texts(diagnosis: Diagnosis, level: str) -> str:
    """What was found at a level."""
    return "\n".join(f"{f.subject}: {f.text}" for f in diagnosis.findings if f.level == level)


def test_a_healthy_vllm() -> None:
    """Signals are named and read, KV tokens are found, nothing is broken, nothing was posted."""
    engine = Engine(VLLM)
    found = diagnose(engine, {"kv_tokens": 16000})
    (report,) = found.backends
    assert not found.is_broken
    assert texts(found, "warning") == ""
    assert report.is_reachable
    assert report.served_models == ("m",)
    assert report.signals["n_running"] == 2.0
    assert (report.signals["n_waiting"], report.signals["kv_usage_ratio"]) == (1.0, 0.25)
    assert report.signals["kv_tokens"] == 16000.0
    assert report.signals_age_s is not None
    assert report.missing_signals == ()
    assert report.found_capacity == 16000
    assert report.priority == "not tested"
    assert sorted(engine.asked) == ["GET /health", "GET /metrics", "GET /v1/models"]
    assert "answers within" in texts(found, "ok")


def test_a_healthy_llamacpp() -> None:
    """Its slots are found."""
    found = diagnose(Engine(LLAMA), {"engine": "llamacpp", "kv_tokens": None, "slots": 4})
    assert not found.is_broken
    assert texts(found, "warning") == ""
    assert found.backends[0].signals == {"n_running": 1.0, "n_waiting": 0.0, "n_slots": 4.0}
    assert found.backends[0].found_capacity == 4


def test_a_healthy_sglang() -> None:
    """Its tokens are found."""
    pages: Pages = {
        **VLLM,
        "/metrics": (200, SGLANG_METRICS),
        "/get_server_info": (200, {"max_total_num_tokens": 5000}),
    }
    found = diagnose(Engine(pages), {"engine": "sglang"})
    assert texts(found, "warning") == ""
    assert found.backends[0].found_capacity == 5000


def test_a_paid_api_is_asked_for_its_models_only() -> None:
    """Nobody else's health and metrics are looked for."""
    engine = Engine({"/v1/models": models("m")}, key="k")
    backend = {"engine": "api", "key_env": "KEY", "kv_tokens": None, "requests_per_minute": 5}
    found = diagnose(engine, backend, environment={"KEY": "k"})
    assert not found.is_broken
    assert engine.asked == ["GET /v1/models"]


@pytest.mark.parametrize(
    ("pages", "backend", "said"),
    [
        ({}, {}, "/models answered 404; is the path of url"),
        ({"/v1/models": models("tiny", "other")}, {}, "does not serve 'm' (model) but tiny, other; set served_model"),
        ({"/v1/models": models("m")}, {"served_model": "x"}, "does not serve 'x' (served_model) but m"),
        ({"/v1/models": (401, {})}, {}, "refuses requests without a key (set key_env)"),
        ({"/v1/models": (403, {})}, {"key_env": "KEY"}, "refuses the key in KEY"),
        ({}, {"key_env": "ABSENT"}, "environment variable ABSENT (key_env) is not set"),
        ({}, {"key_env": "BAD"}, "environment variable BAD (key_env) holds no key that a header takes"),
        ({}, {"url": ""}, "has no url"),
        ({}, {"url": "ftp://x/v1"}, "url 'ftp://x/v1': url must be http"),
    ],
)
def test_what_is_broken_is_named(pages: Pages, backend: Mapping[str, Any], said: str) -> None:
    """Each fault that would fail every call, with what to do."""
    engine = Engine({**VLLM, "/v1/models": (404, {}), **pages})
    found = diagnose(engine, backend, environment={"KEY": "k", "BAD": "a\n"})
    assert found.is_broken
    assert said in texts(found, "broken")


def test_an_unreachable_backend_is_broken_and_the_others_are_examined() -> None:
    """A closed port says where and why."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
        backends = [{"name": name, "model": "m", "url": url} for name in ("a", "b")]
        found = diagnose(None, config={"backends": backends})
    assert f"backend a: cannot be reached at {url}: refused" in texts(found, "broken")
    assert "backend b: cannot be reached" in texts(found, "broken")
    assert not found.backends[0].is_reachable


def test_an_engine_that_hangs_is_given_up() -> None:
    """The examination ends when nobody answers."""
    found = diagnose(HangingEngine({}), timeout_s=0.05)
    assert "no complete answer within 0.05 s" in texts(found, "broken")


@pytest.mark.parametrize(
    ("pages", "backend", "said"),
    [
        ({"/metrics": (404, {})}, {}, "/metrics answered 404: its load stays unknown to the router; vLLM serves them"),
        ({"/metrics": (501, {})}, {"engine": "llamacpp"}, "start it with --metrics"),
        ({"/metrics": (404, {})}, {"engine": "sglang"}, "start it with --enable-metrics"),
        ({"/metrics": (200, "vllm:num_requests_running 1\n")}, {}, "/metrics lacks the signals n_waiting, kv_usage"),
        ({"/metrics": (200, LLAMA_METRICS)}, {}, "is declared as engine vllm but its metrics are those of llamacpp"),
        ({"/health": (503, {})}, {}, "/health answered 503: it may be loading"),
        ({"/v1/models": (200, {"data": []})}, {}, "/models lists no model"),
        ({"/v1/models": (200, "<html>")}, {}, "/models lists no model"),
        ({"/v1/models": (200, {"data": {"id": 1}})}, {}, "/models lists no model"),
        ({}, {"kv_tokens": 20000}, "declares kv_tokens 20000; the engine has 16000"),
        (
            {"/metrics": (200, LLAMA_METRICS), "/props": (200, {"total_slots": 2}), "/slots": (200, [])},
            {"engine": "llamacpp", "kv_tokens": None, "slots": 8},
            "declares slots 8; the engine has 2",
        ),
    ],
)
def test_what_works_worse_than_it_could_is_a_warning(pages: Pages, backend: Mapping[str, Any], said: str) -> None:
    """Not broken, and named with what to do."""
    found = diagnose(Engine({**VLLM, **pages}), backend)
    assert said in texts(found, "warning")
    assert not found.is_broken


def test_capacity_that_is_not_declared_is_assumed_aloud() -> None:
    """The default is named, and what the engine says of itself."""
    found = diagnose(Engine(VLLM), {"kv_tokens": None})
    assert "declares no capacity: the engine's word is taken, kv_tokens 16000" in texts(found, "note")
    assert not found.backends[0].is_capacity_declared


def test_models_of_the_pool_are_looked_at() -> None:
    """One without a backend, one without a price, one that declares more context than the engine has."""
    config = {"models": {"m": {"context_tokens": 5000}, "lonely": {"usd_per_million": {"output": 1}}}}
    found = diagnose(Engine(VLLM), config=config)
    assert "model lonely: no backend serves it" in texts(found, "warning")
    assert "model m: has no price" in texts(found, "note")
    assert "takes 4096 tokens; model 'm' declares context_tokens 5000" in texts(found, "warning")


def test_a_pool_without_backends_is_broken() -> None:
    """Nothing could run."""
    assert "backends is empty" in texts(diagnose(None, config={"backends": []}), "broken")


@pytest.mark.parametrize(
    ("status", "page", "said"),
    [
        (200, {"choices": []}, "accepted; whether the engine's order heeds it was not tested"),
        (400, {"error": {"message": "no priority here"}}, "refused with 400: no priority here"),
        (500, "oops", "refused with 500: None"),
    ],
)
def test_priority_is_tried_when_asked(status: int, page: Any, said: str) -> None:
    """One request, and an honest word for what it shows."""
    engine = Engine({**VLLM, "/v1/chat/completions": (status, page)})
    found = diagnose(engine, test_priority=True)
    assert found.backends[0].priority == said
    assert engine.asked.count("POST /v1/chat/completions") == 1
    assert ("--scheduling-policy priority" in texts(found, "note")) is (status == 400)


@pytest.mark.parametrize(
    ("gateway", "level", "said"),
    [
        ({"key_env": "NOBODY"}, "broken", "NOBODY (gateway.key_env) is not set"),
        ({"key_env": "EMPTY"}, "broken", "EMPTY (gateway.key_env) is not set or holds no key"),
        ({"host": "192.0.2.1"}, "broken", "cannot listen on 192.0.2.1:0"),
        ({"host": "192.0.2.1"}, "warning", "listens on 192.0.2.1 and lets everybody in"),
        ({}, "note", "journal: is off"),
    ],
)
def test_the_gateway_itself_is_looked_at(gateway: Mapping[str, Any], level: str, said: str) -> None:
    """Keys, address, journal."""
    assert said in texts(diagnose(Engine(VLLM), gateway=gateway, environment={"EMPTY": " , "}), level)


def test_a_taken_port_is_a_warning() -> None:
    """It may well be the gateway that is running."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = diagnose(Engine(VLLM), gateway={"port": port})
    assert f"port {port} of 127.0.0.1 is taken" in texts(found, "warning")


def test_an_embedder_without_its_packages_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway would not start."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "loadwise[embed]" in texts(diagnose(Engine(VLLM), gateway={"embedder": "minilm"}), "broken")


def journal_findings(path: Path) -> dict[str, str]:
    """Findings about a journal by level."""
    return {finding.level: finding.text for finding in look_at_journal(GatewayConfig(journal=str(path)))}


def write_journal(path: Path) -> Path:
    """Three entries; returns the segment."""
    writer = JournalWriter(path, make_header({}, seed=0))
    for n in range(3):
        writer.append(HostRestarted(at_s=float(n)))
    writer.sync()
    writer.close()
    return path / "000001.journal"


def test_a_journal_that_will_be_begun_is_not_begun(tmp_path: Path) -> None:
    """The doctor makes no directory."""
    assert "will be begun" in journal_findings(tmp_path / "a" / "b")["ok"]
    assert list(tmp_path.iterdir()) == []


def test_a_whole_journal(tmp_path: Path) -> None:
    """Where it ends."""
    write_journal(tmp_path / "j")
    assert "ends at sequence 3" in journal_findings(tmp_path / "j")["ok"]


def test_a_crash_tail_is_told_and_left(tmp_path: Path) -> None:
    """Its length is named; recovery, not the doctor, cuts it off."""
    segment = write_journal(tmp_path / "j")
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-3])
    found = journal_findings(tmp_path / "j")
    assert "torn tail" in found["note"]
    assert "ends at sequence 2" in found["ok"]
    assert segment.read_bytes() == whole[:-3]


def test_a_damaged_journal_is_broken(tmp_path: Path) -> None:
    """A gateway would refuse it."""
    segment = write_journal(tmp_path / "j")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)
    assert "broken" in journal_findings(tmp_path / "j")


def test_a_file_in_the_journals_place_is_broken(tmp_path: Path) -> None:
    """Neither the place itself nor its parent may be a file."""
    (tmp_path / "f").write_text("x")
    assert "is not a directory" in journal_findings(tmp_path / "f")["broken"]
    assert "is not a directory" in journal_findings(tmp_path / "f" / "j")["broken"]


def test_a_place_that_cannot_be_written_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before a program is lost to it; a nearly full disk is a warning."""
    monkeypatch.setattr(os, "access", lambda *args: False)
    assert "cannot be written" in journal_findings(tmp_path)["broken"]
    monkeypatch.undo()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 5 << 20}))
    assert "only 5 MiB are free" in journal_findings(tmp_path)["warning"]


def test_a_diagnosis_is_a_fact() -> None:
    """It can be written as JSON and read back."""
    found = diagnose(Engine(VLLM))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Diagnosis) == found


def verifier_findings(task_types: dict[str, Any], **verification: Any) -> list[tuple[str, str, str]]:
    """What is found of verifiers."""

    async def run() -> list[tuple[str, str, str]]:
        config = parse_config({"models": {"m": {}}, "task_types": task_types, "verification": verification})
        found = (await examine(config, GatewayConfig(port=0, journal=None))).findings
        return [(f.level, f.subject, f.text) for f in found if f.subject.startswith(("task type", "verification"))]

    return asyncio.run(run())


MEMBERS = [{"kind": "exact"}, {"kind": "numeric"}]
COMMAND = {"kind": "command", "run": "true"}
FUSED_CODE = {"kind": "fusion", "options": {"rule": "first", "members": [*MEMBERS, {"kind": "code"}]}}
ONE_OR_OTHER = {"kind": "fusion", "options": {"rule": "first", "members": MEMBERS}}


@pytest.mark.parametrize(
    ("task_type", "level", "said"),
    [
        ({"verifier": {"kind": "exact"}}, "ok", "rightly"),
        ({"verifier": {"kind": "exact"}, "known_pass": {"answer": "a"}}, "warning", "could not be judged"),
        (
            {"verifier": {"kind": "exact"}, "known_fail": {"answer": "a", "references": {"reference": "a"}}},
            "broken",
            "known fail was judged pass",
        ),
        ({"verifier": {"kind": "judge"}}, "note", "when the gateway serves"),
        (
            {"verifier": {"kind": "command", "run": "true"}},
            "warning",
            "not checked for want of known_pass and known_fail: give task_types.work.known_pass",
        ),
        ({"verifier": {"kind": "command", "run": "true"}, "unchecked": True}, "warning", "credited on your word"),
        ({"verifier": ONE_OR_OTHER}, "ok", "rightly"),
        (
            {"verifier": {**ONE_OR_OTHER, "options": {"rule": "first", "members": [*MEMBERS, COMMAND]}}},
            "warning",
            "known_pass of member 'command' and known_fail of member 'command'",
        ),
        (
            {"verifier": ONE_OR_OTHER, "known_pass": {"answer": "a", "references": {"reference": "b"}}},
            "broken",
            "its known pass was judged fail",
        ),
    ],
)
def test_verifiers_judge_their_known_cases(task_type: dict[str, Any], level: str, said: str) -> None:
    """Before anybody relies on them; a judge is asked by a gateway that serves only."""
    ((found_level, subject, text),) = verifier_findings({"work": task_type})
    assert (found_level, subject) == (level, "task type work") and said in text


@pytest.mark.parametrize(
    ("verifier", "is_needed"),
    [
        ({"kind": "code"}, True),
        ({"kind": "command", "run": "true"}, False),
        (ONE_OR_OTHER, False),
        ({"kind": "fusion", "options": {"rule": "first", "members": [*MEMBERS, {"kind": "code"}]}}, True),
        ({"kind": "fusion", "options": {"rule": "first", "members": [ONE_OR_OTHER, *MEMBERS]}}, False),
        ({"kind": "fusion", "options": {"rule": "first", "members": [FUSED_CODE, *MEMBERS]}}, True),
    ],
)
def test_a_sandbox_is_missed_only_where_untrusted_code_would_run(verifier: dict[str, Any], is_needed: bool) -> None:
    """A fusion needs what its members need, however deep."""
    texts = [text for _, subject, text in verifier_findings({"work": {"verifier": verifier}}, sandbox="none")]
    assert any("untrusted code is refused" in text for text in texts) == is_needed


def test_verification_that_could_not_start_is_broken_or_told() -> None:
    """A wrong section; code without a sandbox; and nothing at all where nothing is run."""
    assert verifier_findings({"work": {}}) == []
    ((level, _, text),) = verifier_findings({"work": {"verifier": {"kind": "exact"}}}, sandbox="jail")
    assert level == "broken" and "sandbox" in text
    found = verifier_findings({"work": {"verifier": {"kind": "code"}}}, sandbox="none")
    assert [level for level, _, _ in found] == ["warning", "warning"] and "refused" in found[0][2]
