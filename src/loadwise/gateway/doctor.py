"""Reaches everything that a gateway would need, changes nothing, and says what is missing or wrong.

Each finding names the thing, what was found and what to do. `broken` means that the gateway would not start, or that
every call to that backend would fail; `warning` that it works worse than it could; `note` says what is assumed.
"""

import asyncio
import errno
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from loadwise.journal.files import list_segments
from loadwise.journal.reader import Segment
from loadwise.kernel.errors import ConfigError, Error
from loadwise.kernel.fact import Fact
from loadwise.kernel.pool import DEFAULT_SLOTS, BackendSpec, CapacityUnit
from loadwise.runner.embed import Embedder
from loadwise.runner.verification import checked_healths
from loadwise.settings import Config
from loadwise.wire.client import Answer, Upstream, UpstreamError
from loadwise.wire.heads import Ticker, header_block

from .asking import ASKED_ELSEWHERE, Asking
from .backend import base_url
from .config import GatewayConfig
from .judging import assign, make_carrier, verification_config
from .readers.kinds import make_reader
from .reading import embedder_of, reading_notices
from .turns import EMBEDDING_MAX_S

TIMEOUT_S = 5.0
AT_ONCE_MAX = 16
"""Backends asked at the same time."""
LOW_DISK_BYTES = 256 * 1024 * 1024

Level = Literal["ok", "note", "warning", "broken"]

_METRICS_ADVICE = {
    "sglang": "start it with --enable-metrics",
    "llamacpp": "start it with --metrics",
    "vllm": "vLLM serves them unless started with --disable-log-stats",
}
_ENGINE_BY_PREFIX = {
    "vllm:": "vllm",
    "sglang:": "sglang",
    "llamacpp:": "llamacpp",
    "tgi_": "tgi",
    "trtllm_": "trtllm",
}


class Finding(Fact, frozen=True, kw_only=True):
    """One thing found out."""

    level: Level
    subject: str
    """`backend NAME`, `model NAME`, `task type NAME`, `verification`, `gateway` or `journal`."""
    text: str


class BackendReport(Fact, frozen=True, kw_only=True):
    """What one backend answered."""

    name: str
    model: str
    engine: str
    url: str
    is_reachable: bool = False
    latency_ms: float | None = None
    """Of the list of models."""
    served_models: tuple[str, ...] = ()
    signals: dict[str, float] = {}
    """Those that the router hears of. Means of the last half minute need two looks: they are not among them."""
    signals_age_s: float | None = None
    """Of their reading, when the report was made; None where there is none."""
    missing_signals: tuple[str, ...] = ()
    """Those that engines of the kind show and this one does not: unknown to the router, never zero."""
    capacity: int
    capacity_unit: CapacityUnit
    is_capacity_declared: bool
    found_capacity: int | None = None
    """KV tokens or slots, as the engine tells."""
    priority: str = "not tested"


class Diagnosis(Fact, frozen=True, kw_only=True):
    """All findings about a pool file."""

    backends: tuple[BackendReport, ...]
    findings: tuple[Finding, ...]

    @property
    def is_broken(self) -> bool:
        """Whether anything is."""
        return any(finding.level == "broken" for finding in self.findings)


async def examine(
    config: Config,
    gateway: GatewayConfig,
    *,
    environment: Mapping[str, str] = os.environ,
    test_priority: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> Diagnosis:
    """Look at everything.

    Args:
        environment: where keys are looked up.
        test_priority: also send vLLM and SGLang one request for one token, with a priority.
        timeout_s: of each request.
    """
    findings = [*_look_at_models(config), *_look_at_gateway(config, gateway, environment), *look_at_journal(gateway)]
    ticker = Ticker()
    ticker.start()
    gate = asyncio.Semaphore(AT_ONCE_MAX)

    async def one(spec: BackendSpec) -> _Examination:
        async with gate:
            examination = _Examination(spec, config, environment, ticker, timeout_s)
            await examination.run(test_priority=test_priority)
            return examination

    try:
        examinations = await asyncio.gather(*(one(spec) for spec in config.backends))
        findings += await _look_at_verifiers(config, ticker)
    finally:
        ticker.stop()
    for examination in examinations:
        findings += examination.findings
    return Diagnosis(backends=tuple(x.report for x in examinations), findings=tuple(findings))


class _Examination:
    """One backend's."""

    def __init__(
        self, spec: BackendSpec, config: Config, environment: Mapping[str, str], ticker: Ticker, timeout_s: float
    ) -> None:
        self.spec = spec
        self.findings: list[Finding] = []
        self._model = config.models[spec.model]
        self._takes_engine_capacity = config.router.admission.capacity == "engine"
        self._timeout_s = timeout_s
        self._ticker = ticker
        unit, capacity = spec.capacity
        declared = (spec.kv_tokens, spec.slots, spec.requests_per_minute)
        self.report = BackendReport(
            name=spec.name,
            model=spec.model,
            engine=spec.engine,
            url=spec.url,
            capacity=capacity,
            capacity_unit=unit,
            is_capacity_declared=any(value is not None for value in declared),
        )
        self._headers = b"accept: */*\r\n" + self._key_header(environment)

    def _key_header(self, environment: Mapping[str, str]) -> bytes:
        if self.spec.key_env is None:
            return b""
        key = environment.get(self.spec.key_env)
        if not key:
            self._say("broken", f"environment variable {self.spec.key_env} (key_env) is not set")
            return b""
        try:
            return header_block([("authorization", f"Bearer {key}")])
        except ValueError:
            self._say("broken", f"environment variable {self.spec.key_env} (key_env) holds no key that a header takes")
            return b""

    def _say(self, level: Level, text: str) -> None:
        self.findings.append(Finding(level=level, subject=f"backend {self.spec.name}", text=text))

    def _learn(self, **found: Any) -> None:
        self.report = msgspec.structs.replace(self.report, **found)

    async def run(self, *, test_priority: bool) -> None:
        """Ask the engine everything that it can be asked for free."""
        if not self.spec.url:
            self._say("broken", "has no url")
            return
        try:
            upstream = Upstream(base_url(self.spec.url), ticker=self._ticker)
        except ValueError as error:
            self._say("broken", f"url {self.spec.url!r}: {error}")
            return
        try:
            if not await self._ask_models(upstream):
                return
            if self.spec.engine != "api":
                await self._ask_health(upstream)
                await self._ask_metrics(upstream)
            if test_priority and self.spec.engine in ("vllm", "sglang", "emulator"):
                await self._try_priority(upstream)
        finally:
            await upstream.close()
        self._judge_capacity()
        if not any(finding.level == "broken" for finding in self.findings):
            self._say("ok", f"answers within {self.report.latency_ms:.0f} ms")

    async def _get(self, upstream: Upstream, path: str, *, from_root: bool = True) -> Answer | None:
        try:
            return await upstream.get(path, self._headers, timeout_s=self._timeout_s, from_root=from_root)
        except UpstreamError as error:
            self._say("warning", f"{path} gave no answer: {error}")
            return None

    async def _ask_models(self, upstream: Upstream) -> bool:
        """Whether there is any sense in asking more."""
        began_at_s = time.monotonic()
        try:
            answer = await upstream.get("/models", self._headers, timeout_s=self._timeout_s)
        except UpstreamError as error:
            self._say("broken", f"cannot be reached at {self.spec.url}: {error}")
            return False
        self._learn(is_reachable=True, latency_ms=1000.0 * (time.monotonic() - began_at_s))
        if answer.status in (401, 403):
            how = f"the key in {self.spec.key_env}" if self.spec.key_env else "requests without a key (set key_env)"
            self._say("broken", f"refuses {how}: /models answered {answer.status}")
            return False
        if answer.status != 200:
            self._say("broken", f"/models answered {answer.status}; is the path of url {self.spec.url!r} right?")
            return True
        served, context_tokens = _served_models(answer.body)
        self._learn(served_models=tuple(served))
        self._judge_models(served, context_tokens)
        return True

    def _judge_models(self, served: list[str], context_tokens: dict[str, int]) -> None:
        wanted = self.spec.served_model or self.spec.model
        if not served:
            self._say("warning", "/models lists no model")
        elif wanted not in served:
            key = "served_model" if self.spec.served_model else "model"
            few = ", ".join(served[:10]) + (", ..." if len(served) > 10 else "")
            self._say("broken", f"does not serve {wanted!r} ({key}) but {few}; set served_model to one of them")
        limit, declared = context_tokens.get(wanted), self._model.context_tokens
        if limit is not None and declared is not None and declared > limit:
            self._say("warning", f"takes {limit} tokens; model {self.spec.model!r} declares context_tokens {declared}")

    async def _ask_health(self, upstream: Upstream) -> None:
        answer = await self._get(upstream, "/health")
        if answer is None or answer.status == 200:
            return
        if answer.status == 404:
            self._say("note", "has no /health")
        else:
            self._say("warning", f"/health answered {answer.status}: it may be loading, or ill")

    async def _ask_metrics(self, upstream: Upstream) -> None:
        answer = await self._get(upstream, "/metrics")
        if answer is None:
            return
        engine = self.spec.engine
        if answer.status != 200:
            advice = _METRICS_ADVICE.get(engine)
            then = f"; {advice}" if advice else ""
            self._say("warning", f"/metrics answered {answer.status}: its load stays unknown to the router{then}")
            return
        reader = make_reader(self.spec)
        assert reader is not None
        bodies = {"/metrics": answer.body}
        read_at_s = time.monotonic()
        for path in reader.paths(0.0)[1:]:
            page = await self._get(upstream, path)
            if page is not None and page.status == 200:
                bodies[path] = page.body
        signals = reader.read(bodies, 0.0)
        self._learn(signals=signals, signals_age_s=time.monotonic() - read_at_s)
        text = answer.body.decode("utf-8", "replace")
        seen = next((kind for prefix, kind in _ENGINE_BY_PREFIX.items() if re.search(rf"^{prefix}", text, re.M)), None)
        if seen is not None and seen != engine and not (seen == "vllm" and engine == "emulator"):
            self._say("warning", f"is declared as engine {engine} but its metrics are those of {seen}")
        missing = tuple(name for name in reader.expected if name not in signals)
        if missing:
            self._learn(missing_signals=missing)
            self._say("warning", f"/metrics lacks the signals {', '.join(missing)}")
        found = signals.get("n_slots" if engine == "llamacpp" else "kv_tokens")
        if found is not None:
            self._learn(found_capacity=int(found))

    def _judge_capacity(self) -> None:
        report, found = self.report, self.report.found_capacity
        in_slots = self.spec.engine == "llamacpp"
        key = "slots" if in_slots else "kv_tokens"
        if not report.is_capacity_declared:
            hint = f"; the engine says {key}: {found}" if found is not None else ""
            if found is not None and not in_slots and self._takes_engine_capacity:
                self._learn(capacity=found, capacity_unit=CapacityUnit.KV_TOKENS)
                self._say("note", f"declares no capacity: the engine's word is taken, kv_tokens {found}")
            else:
                self._say("note", f"declares no capacity: {DEFAULT_SLOTS} slots are assumed{hint}")
        elif found is not None and getattr(self.spec, key) is not None and report.capacity > found:
            self._say("warning", f"declares {key} {report.capacity}; the engine has {found}")

    async def _try_priority(self, upstream: Upstream) -> None:
        """One request for one token; the queue may be busy, so the answer says whether a priority is taken, no more."""
        model = self.spec.served_model or self.spec.model
        body: dict[str, Any] = {"model": model, "max_tokens": 1, "priority": 1}
        body["messages"] = [{"role": "user", "content": "Hi"}]
        headers = b"content-type: application/json\r\n" + self._headers
        try:
            answer = await upstream.fetch(
                b"POST", "/chat/completions", headers, msgspec.json.encode(body), timeout_s=6 * self._timeout_s
            )
        except UpstreamError as error:
            self._learn(priority=f"no answer: {error}")
            return
        if answer.status == 200:
            self._learn(priority="accepted; whether the engine's order heeds it was not tested")
            return
        message = _decoded(answer)
        detail = message.get("error", message) if isinstance(message, dict) else message
        if isinstance(detail, dict):
            detail = detail.get("message")
        self._learn(priority=f"refused with {answer.status}: {str(detail)[:200]}")
        if self.spec.engine == "vllm" and answer.status == 400:
            self._say("note", "takes no priority; start it with --scheduling-policy priority")


def _look_at_models(config: Config) -> list[Finding]:
    findings = []
    served = {spec.model for spec in config.backends}
    if not config.backends:
        findings.append(Finding(level="broken", subject="gateway", text="backends is empty: no turn could run"))
    for name, model in config.models.items():
        subject = f"model {name}"
        if name not in served and config.backends:
            findings.append(Finding(level="warning", subject=subject, text="no backend serves it"))
        if model.usd_per_million.input == 0 and model.usd_per_million.output == 0:
            text = "has no price (usd_per_million): it costs nothing in the router's eyes"
            findings.append(Finding(level="note", subject=subject, text=text))
    return findings


def _look_at_gateway(config: Config, gateway: GatewayConfig, environment: Mapping[str, str]) -> list[Finding]:
    findings = []

    def say(level: Level, text: str) -> None:
        findings.append(Finding(level=level, subject="gateway", text=text))

    if gateway.key_env is not None and not environment.get(gateway.key_env, "").strip(" ,"):
        say("broken", f"environment variable {gateway.key_env} (gateway.key_env) is not set or holds no key")
    if gateway.key_env is None and gateway.host not in ("127.0.0.1", "::1", "localhost"):
        say("warning", f"listens on {gateway.host} and lets everybody in; set gateway.key_env")
    problem = _listen_problem(gateway.host, gateway.port)
    if problem is not None and problem.errno == errno.EADDRINUSE:
        say("warning", f"port {gateway.port} of {gateway.host} is taken; is a gateway running already?")
    elif problem is not None:
        say("broken", f"cannot listen on {gateway.host}:{gateway.port}: {problem}")
    try:
        embedder = embedder_of(config, gateway, environment)
        for text in reading_notices(config, gateway, embedder):
            say("warning", text)
        if embedder is not None:
            _try_embedder(embedder, say)
            embedder.close()
    except ConfigError as error:
        say("broken", error.message)
    return findings


async def _look_at_verifiers(config: Config, ticker: Ticker) -> list[Finding]:
    """Let every verifier that is run here judge its known cases; judges are asked by a gateway that serves only."""
    findings: list[Finding] = []

    def say(level: Level, text: str, subject: str = "verification") -> None:
        findings.append(Finding(level=level, subject=subject, text=text))

    try:
        verification = verification_config(config)
        assigned = assign(config)
    except ConfigError as error:
        return [Finding(level="broken", subject="verification", text=error.message)]
    if not assigned:
        return findings
    carrier = await asyncio.to_thread(make_carrier, config, verification, lambda text: say("warning", text))
    asking = Asking(None, ticker)
    carrier.asking = asking.ask
    try:
        healths = await checked_healths(assigned, carrier, verification)
    finally:
        carrier.close()
        await asking.close()
    for name, health in healths.items():
        kind, subject = assigned[name].verifier.kind, f"task type {name}"
        if health.problem and ASKED_ELSEWHERE in health.problem:
            say("note", f"verifier {kind} asks models: its known cases are judged when the gateway serves", subject)
        elif health.problem:
            is_wrong = health.is_checked and not health.lacks
            say("broken" if is_wrong else "warning", f"verifier {kind}: {health.problem}", subject)
        elif health.note:
            say("warning", health.note, subject)
        else:
            say("ok", f"verifier {kind} judges its known pass and its known fail rightly", subject)
    return findings


def _try_embedder(embedder: Embedder, say: Callable[[Level, str], None]) -> None:
    """Read one text, as the first request will be."""
    done = threading.Event()
    embedder.submit("Is anybody there?", lambda reading: done.set())
    problem = getattr(embedder, "problem", None) if done.wait(EMBEDDING_MAX_S) else "no answer"
    if problem is not None:
        say("warning", f"the embedder gives nothing, so programs have no components and no told task type: {problem}")


def _listen_problem(host: str, port: int) -> OSError | None:
    """Why the gateway could not listen there; it is tried, and given up at once."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error
    return None


def look_at_journal(gateway: GatewayConfig) -> list[Finding]:
    """Whether the journal can be written, and whether a crash has left a tail; nothing is made or cut off."""
    if gateway.journal is None:
        return [Finding(level="note", subject="journal", text="is off: nothing survives a restart")]
    path = Path(gateway.journal)
    findings: list[Finding] = []

    def say(level: Level, text: str) -> None:
        findings.append(Finding(level=level, subject="journal", text=text))

    there = next((place for place in (path, *path.absolute().parents) if place.exists()), Path("/"))
    if not there.is_dir():
        say("broken", f"{str(there)!r} is not a directory")
        return findings
    if not os.access(there, os.W_OK | os.X_OK):
        say("broken", f"{str(there)!r} cannot be written")
    free_bytes = shutil.disk_usage(there).free
    if free_bytes < LOW_DISK_BYTES:
        say("warning", f"only {free_bytes >> 20} MiB are free at {str(there)!r}")
    segments = list_segments(path)
    if not segments:
        if not findings:
            say("ok", f"{str(path)!r} will be begun")
        return findings
    try:
        last = Segment(segments[-1].number, segments[-1].path, is_last=True)
        for _ in last.entries():
            pass
    except Error as error:
        say("broken", error.message)
        return findings
    if last.torn is not None:
        say("note", f"{last.torn}: a crash left it, the next start cuts it off (or a gateway is writing right now)")
    if not any(finding.level == "broken" for finding in findings):
        say("ok", f"{str(path)!r} ends at sequence {last.next_sequence - 1}")
    return findings


def _served_models(body: bytes) -> tuple[list[str], dict[str, int]]:
    """Ids of a list of models, and how many tokens each takes where the engine says so."""
    answer = _json(body)
    entries = answer.get("data") if isinstance(answer, dict) else None
    found = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    ids = [entry["id"] for entry in found if isinstance(entry.get("id"), str)]
    limits = {entry["id"]: limit for entry in found if (limit := _number(entry, "max_model_len")) and "id" in entry}
    return ids, limits


def _decoded(answer: Answer | None) -> Any:
    return None if answer is None else _json(answer.body)


def _json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None


def _number(said: Any, name: str) -> int | None:
    value = said.get(name) if isinstance(said, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
