"""`lab orchestrator`: what it asks, what it makes of answers, and what it says of a chat endpoint that misbehaves."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from loadwise.cli.main import main
from loadwise.kernel.errors import ConfigError
from loadwise.lab.chat import Chat, read_answers
from loadwise.lab.orchestrated import OrchestratorConfig, run_orchestrator
from tests.lab.lab_folder import invented, write_texts


def folder_with_texts(folder: Path) -> Path:
    """Tasks of `swe` have a text; those of `chat` have none."""
    invented(folder)
    write_texts(folder, {f"swe-{index:03}": f"Repair number {index}." for index in range(30)})
    return folder


def config(folder: Path, **more: object) -> OrchestratorConfig:
    """Small, and only one verifier."""
    given = {"outcomes": str(folder), "families": ("swe",), "models": ("small", "big"), "n_tasks": 30, **more}
    return OrchestratorConfig(**given)  # type: ignore[arg-type]


@contextmanager
def endpoint(status: int, body: bytes, owner: str = "somebody") -> Iterator[tuple[str, list[dict[str, object]]]]:
    """A chat endpoint on loopback that gives everybody the same answer."""
    heard: list[dict[str, object]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.answer(status, body)

        def do_GET(self) -> None:
            self.answer(200, json.dumps({"data": [{"id": "m", "owned_by": owner}]}).encode())

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", heard
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Drops:
    """A body that never ends."""

    def read1(self, n: int) -> bytes:
        """One byte."""
        return b" "


def answering(model: str) -> bytes:
    """A chat completion that names `model`."""
    content = json.dumps({"model": model})
    usage = {"prompt_tokens": 660, "completion_tokens": 7}
    return json.dumps({"choices": [{"message": {"content": content}}], "usage": usage}).encode()


def test_warm_means_that_probed_outcomes_stand_in_the_first_prompt(tmp_path: Path) -> None:
    """Cold, the first prompt shows no outcome; warm, it shows some; both show prices, the tier and the dollar."""
    prompts: list[str] = []

    def ask(prompt: str) -> str:
        prompts.append(prompt)
        return '{"model": "big"}'

    compared = run_orchestrator(
        config(folder_with_texts(tmp_path), cost_weights_per_usd=(0.5,), verifications=("adaptive",)), ask
    )
    assert compared.n_scored == 21
    cold, warm = prompts[0], prompts[21]
    assert "\nnone\n" in cold and "similarity" not in cold
    assert "similarity" in warm
    assert "minus 0.5 for every dollar" in cold and "The task looks simple." in cold and "Repair number" in cold


def test_rows_tell_what_was_chosen_and_reached(tmp_path: Path) -> None:
    """One who always names the dear model stands at that single model: no gain, and nothing unparsed."""
    folder = folder_with_texts(tmp_path)
    rows = run_orchestrator(config(folder), lambda prompt: '{"model": "big"}').rows
    mine = [row for row in rows if row.policy == "orchestrator"]
    assert len(rows) == 16 and len(mine) == 8
    assert all(row.share == {"small": 0.0, "big": 1.0} and row.hull_gain_pp == 0.0 for row in mine)
    assert all(row.n_unparsed == 0 for row in mine)
    silent = run_orchestrator(config(folder), lambda prompt: "Hm.").rows
    assert {row.share["small"] for row in silent if row.policy == "orchestrator"} == {1.0}
    assert {row.n_unparsed for row in silent if row.policy == "orchestrator"} == {21}


def test_the_same_seed_gives_the_same_rows(tmp_path: Path) -> None:
    """Everything but the time that choosing took."""
    folder = folder_with_texts(tmp_path)
    runs = [run_orchestrator(config(folder, seed=3), lambda prompt: '{"model": "small"}').rows for _ in range(2)]
    first, second = ([row._replace(choose_p50_ms=0.0) for row in rows] for rows in runs)
    assert first == second


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"models": ("small",)}, "at least 2"),
        ({"models": ("small", "small")}, "distinct"),
        ({"n_tasks": 9}, "tasks is 9"),
        ({"warm_ratio": 1.0}, "warm is 1.0"),
        ({"warm_ratio": float("nan")}, "warm is nan"),
        ({"cost_weights_per_usd": (float("nan"),)}, "cost weight nan"),
        ({"verifications": ("none",)}, "verification 'none'"),
        ({"families": ("chat",)}, "no task of chat has a text"),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, more: dict[str, object], named: str) -> None:
    """Before anything is asked."""
    folder = folder_with_texts(tmp_path)
    with pytest.raises(ConfigError, match=named):
        run_orchestrator(config(folder, **more), lambda prompt: pytest.fail("asked"))


def test_a_chat_endpoint_is_asked_and_its_tokens_counted() -> None:
    """Temperature zero and a short answer; usage is kept as the endpoint reports it."""
    with endpoint(200, answering("small")) as (url, heard):
        chat = Chat(url, "m")
        assert chat("Which?") == '{"model": "small"}'
        assert not chat.is_emulated()
    assert heard[0]["temperature"] == 0 and heard[0]["messages"] == [{"role": "user", "content": "Which?"}]
    assert chat.asked[0].prompt_tokens == 660 and chat.asked[0].completion_tokens == 7


@pytest.mark.parametrize(
    ("status", "body", "named"),
    [
        (500, b"oh", "status 500: oh"),
        (200, b"{", "not JSON"),
        (200, b"\xff", "not JSON"),
        (200, b"[]", "not a JSON object"),
        (200, b'{"choices": []}', "choices"),
        (200, b'{"choices": [{"message": "text"}]}', "choices"),
    ],
)
def test_a_wrong_answer_is_named_with_its_address(status: int, body: bytes, named: str) -> None:
    """Never a traceback, never a guess."""
    with endpoint(status, body) as (url, _), pytest.raises(ConfigError, match=named) as caught:
        Chat(url, "m")("Which?")
    assert "127.0.0.1" in str(caught.value)


@pytest.mark.parametrize(
    "usage", ["5", [1], {}, {"prompt_tokens": "many"}, {"prompt_tokens": 1e308}, {"prompt_tokens": -1}]
)
def test_nonsense_about_tokens_is_no_count(usage: object) -> None:
    """The answer counts all the same."""
    body = json.dumps({"choices": [{"message": {"content": "small"}}], "usage": usage}).encode()
    with endpoint(200, body) as (url, _):
        chat = Chat(url, "m")
        assert chat("Which?") == "small"
    assert chat.asked[0].prompt_tokens is None and chat.asked[0].completion_tokens is None


def test_a_body_that_comes_drop_by_drop_is_out_of_time() -> None:
    """The limit is of the whole answer, not of each drop."""
    with pytest.raises(TimeoutError, match="not whole after 5 s"):
        Chat("http://host/v1", "m", timeout_s=5.0)._read(Drops(), 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("owner", [None, 5, {"id": "m"}])
def test_an_endpoint_that_lists_no_models_is_no_emulator(owner: object) -> None:
    """A run is not lost for want of a list."""
    with endpoint(200, answering("small")) as (url, _):
        chat = Chat(url, "m")
        chat._request = lambda *_: {"data": owner}  # type: ignore[method-assign]
        assert not chat.is_emulated()
    assert not Chat(url, "m").is_emulated()  # nobody answers there any more


@pytest.mark.parametrize(
    "url", ["", "ftp://host/v1", "host:80", "http://", "http://[::1", "http://h:99999/v1", "http://h:0/"]
)
def test_an_url_that_is_none_is_named(url: str) -> None:
    """Before anything is sent."""
    with pytest.raises(ConfigError, match="url is"):
        Chat(url, "m")


def test_recorded_answers_repeat_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run is recorded by the hash of its prompts, holds no task's text, and its repetition asks nobody."""
    folder, record = folder_with_texts(tmp_path), tmp_path / "answers.json"
    common = ["lab", "orchestrator", "--outcomes", str(folder), "--stream", "swe", "--models", "small,big", "--json"]
    with endpoint(200, answering("big"), owner="loadwise") as (url, heard):
        assert main([*common, "--url", url, "--record", str(record)]) == 0
    asked = json.loads(capsys.readouterr().out)
    assert "Repair" not in record.read_text() and len(heard) == len(read_answers(str(record)))
    assert len(asked["config"]["scored_ids_sha256"]) == 64
    assert asked["config"]["answers"] == "emulated" and asked["config"]["reading"] == "plumbing, not result"
    assert asked["values"]["orchestrator.prompt_tokens_p50"] == 660
    assert main([*common, "--answers", str(record)]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["config"]["answers"] == "recorded" and "result of this model" not in again["config"]["reading"]
    strip = [{**row, "choose_p50_ms": 0} for row in asked["rows"]]
    assert [{**row, "choose_p50_ms": 0} for row in again["rows"]] == strip


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "either --url"),
        (["--url", "http://127.0.0.1:1/v1", "--answers", "x"], "either --url"),
        (["--answers", "/nowhere/x"], "cannot be read"),
        (["--url", "http://127.0.0.1:1/v1"], "no answer"),
        (["--url", "http://127.0.0.1:1/v1", "--key-env", "LOADWISE_NO_SUCH"], "LOADWISE_NO_SUCH"),
        (["--url", "http://127.0.0.1:1/v1", "--timeout", "nan"], "timeout_s"),
        (["--url", "http://127.0.0.1:1/v1", "--cost-weights", "x"], "--cost-weights"),
        (["--url", "http://127.0.0.1:1/v1", "--record", "/nowhere/x"], "cannot be written"),
    ],
)
def test_wrong_flags_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], named: str
) -> None:
    """One line, status 2."""
    folder = folder_with_texts(tmp_path)
    common = ["lab", "orchestrator", "--outcomes", str(folder), "--stream", "swe", "--models", "small,big"]
    assert main([*common, *flags]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert named in error
