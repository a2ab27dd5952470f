"""A gateway and its engines in one small server, for the demo's tests: loopback, scripted, no routing of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from loadwise.demo.luck import Luck
from loadwise.demo.run import RowPlan
from loadwise.emulator.script import Reply, Script

Choose = Callable[[Mapping[str, Any], str], str]
"""Model for a first request body and its program id."""


def completion(reply: Reply, model: str, input_tokens: int) -> dict[str, Any]:
    """Put a reply into the shape of a chat completion."""
    calls = [
        {"id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in reply.tool_calls
    ]
    output_tokens = reply.output_tokens or 1
    message = {"role": "assistant", "content": reply.text or None, **({"tool_calls": calls} if calls else {})}
    reason = "tool_calls" if calls else "stop"
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {
            "prompt_tokens": input_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": input_tokens + output_tokens,
        },
    }


def by_plan(plan: RowPlan) -> Choose:
    """Choose as a row's plan says; the routed row picks by the kind of task."""

    def choose(body: Mapping[str, Any], program_id: str) -> str:
        if plan.policy == "loadwise":
            return {"arithmetic": "large", "dates": "medium"}.get(body["metadata"]["task_type"], "small")
        at = Luck("gateway", plan.seed, program_id).unit()
        for model, share in plan.shares.items():
            at -= share
            if at < 0:
                return model
        return next(reversed(plan.shares))

    return choose


class FakeGateway(ThreadingHTTPServer):
    """Keeps what it was asked, so that tests can look."""

    daemon_threads = False

    def __init__(self, script: Script, choose: Choose) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.choose = choose
        self.lock = threading.Lock()
        self.model_by_program: dict[str, str] = {}
        self.bodies: list[dict[str, Any]] = []
        self.posts: list[tuple[str, dict[str, Any]]] = []
        self.refuse: Callable[[dict[str, Any]], int | None] = lambda body: None
        self.wait_ms = "12.5"

    def server_bind(self) -> None:
        """Bind without looking up the host's name, which the standard server does and may take seconds."""
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: without this each answer waits 40 ms
    server: FakeGateway

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            with self.server.lock:
                self.server.posts.append((self.path, body))
            return self._send(200, {"ok": True})
        with self.server.lock:
            self.server.bodies.append(body)
        status = self.server.refuse(body)
        if status is not None:
            return self._send(status, {"error": {"message": f"refused with {status}", "type": "test"}})
        program_id = self.headers["X-Session-ID"]
        with self.server.lock:
            model = self.server.model_by_program.setdefault(
                program_id, self.server.choose(body, program_id) if body["model"] == "auto" else body["model"]
            )
        reply = self.server.script({**body, "model": model})
        self._send(200, completion(reply, model, 40 * len(body["messages"])), model)

    def _send(self, status: int, body: dict[str, Any], model: str = "") -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.send_header("x-should-retry", "false")
        if model:
            self.send_header("X-Loadwise-Model", model)
            self.send_header("X-Loadwise-Wait-Ms", self.server.wait_ms)
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""


@contextmanager
def fake_gateway(script: Script, choose: Choose = lambda body, program_id: "large") -> Iterator[FakeGateway]:
    """Serve until the block ends."""
    server = FakeGateway(script, choose)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
