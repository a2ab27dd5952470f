"""One reading gives components and task type, from whatever embeds; a server that fails costs nobody his turn."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from loadwise.kernel.errors import ConfigError
from loadwise.runner import openai_embed, reader
from loadwise.runner.embed import UNREAD, Embedder, EmbedderSpec, HashEmbedder, Reading, make_embedder
from loadwise.runner.openai_embed import EmbeddingServer, OpenAIEmbedder
from loadwise.runner.reader import Reader, Unreachable, fixed_rows, hash_reader
from loadwise.verify.task_types import SelectionSpec

EXAMPLES = {
    "patch": ["Fix the crash in parser.py when the file is empty.", "The test of `Reader.close` fails, repair it."],
    "support": ["Hello, I would like to return my shoes.", "My order has not arrived, where is it?"],
}
SELECTION = SelectionSpec()
LIMIT_S = 120.0
"""Of one wait for what must come, on however slow a machine."""


def read(embedder: Embedder, text: str) -> Reading:
    """The reading of one text, waited for."""
    heard: list[Reading] = []
    done = threading.Event()

    def on_reading(reading: Reading) -> None:
        heard.append(reading)
        done.set()

    embedder.submit(text, on_reading)
    assert done.wait(LIMIT_S)
    return heard[0]


class Source:
    """Tells texts apart by whether they speak of tests; does what `trouble` says first."""

    batch_max = 4
    width: int | None = 3

    def __init__(self, *, is_remote: bool = False) -> None:
        self.is_remote = is_remote
        self.asked: list[list[str]] = []
        self.trouble: Callable[[list[str]], None] = lambda texts: None

    def embed(self, texts: list[str]) -> Any:
        self.asked.append(list(texts))
        self.trouble(list(texts))
        rows = [[1.0, 0.0, 0.0] if "test" in text or "crash" in text else [0.0, 1.0, 0.0] for text in texts]
        return np.array(rows, dtype=np.float32)


@pytest.fixture
def source() -> Source:
    """A source that always answers."""
    return Source(is_remote=True)


@pytest.fixture
def made(source: Source) -> Iterator[Reader]:
    """A reader of a remote source."""
    reading = Reader(lambda: source, "fake-1", 2, EXAMPLES, SELECTION)
    yield reading
    reading.close()
    assert not reading._thread.is_alive()


def test_one_reading_gives_components_and_type(made: Reader, source: Source) -> None:
    """A text is embedded once for both, and remembered."""
    reading = read(made, "The test crashes.")
    assert len(reading.components) == 2
    assert reading.told.task_type == "patch"
    assert made.read_now("The test crashes.") is reading
    assert sum("The test crashes." in batch for batch in source.asked) == 1
    assert read(made, "Where are my shoes?").told.task_type == "support"


def test_a_reader_without_selection_tells_no_type(source: Source) -> None:
    """Components alone, as before."""
    made = Reader(lambda: source, "fake-1", 2, EXAMPLES)
    assert read(made, "The test crashes.").told.nearest is None
    made.close()


def test_a_remote_source_is_asked_when_a_text_comes_not_at_the_start(source: Source) -> None:
    """A gateway starts although its embedding server is down."""

    def down(texts: list[str]) -> None:
        raise Unreachable("down")

    source.trouble = down
    made = Reader(lambda: source, "fake-1", 2, EXAMPLES, SELECTION)
    assert source.asked == []
    assert read(made, "The test crashes.") is UNREAD
    assert made.problem == "down"
    made.close()


def test_a_server_that_is_down_is_left_alone_and_asked_again(
    made: Reader, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it rests texts are unread at once; afterwards it is asked, and all is well."""
    clock = [100.0]
    monkeypatch.setattr(reader.time, "monotonic", lambda: clock[0])

    def down(texts: list[str]) -> None:
        raise Unreachable("down")

    source.trouble = down
    assert read(made, "one") is UNREAD
    n_asked = len(source.asked)
    clock[0] += reader.REST_S / 2
    assert read(made, "two") is UNREAD
    assert len(source.asked) == n_asked
    source.trouble = lambda texts: None
    clock[0] += reader.REST_S
    assert read(made, "The test crashes.").told.task_type == "patch"
    assert made.read_now("one") is None, "what could not be read is not remembered"
    assert (made.n_failed, made.n_skipped) == (1, 1)


def test_one_text_that_is_refused_does_not_stop_its_batch(made: Reader, source: Source) -> None:
    """The others of its batch are read one by one."""
    read(made, "first")
    gate, running = threading.Event(), threading.Event()

    def trouble(texts: list[str]) -> None:
        running.set()
        gate.wait(LIMIT_S)
        if "poison" in texts:
            raise ValueError("refused")

    source.trouble = trouble
    heard: dict[str, Reading] = {}
    made.submit("blocker", lambda reading: None)
    assert running.wait(LIMIT_S)
    done = threading.Event()
    for text in ("a test", "poison", "b"):
        made.submit(text, lambda reading, text=text: (heard.__setitem__(text, reading), len(heard) == 3 and done.set()))
    gate.set()
    assert done.wait(LIMIT_S)
    assert heard["poison"] is UNREAD
    assert heard["a test"].components and heard["b"].components


def test_a_text_that_would_wait_too_long_is_unread_at_once(
    made: Reader, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under more first requests than can be read, the rest go on at once instead of all waiting in vain."""
    clock = [100.0]
    monkeypatch.setattr(reader.time, "monotonic", lambda: clock[0])

    def slow(texts: list[str]) -> None:
        clock[0] += 2.0 * len(texts)

    source.trouble = slow
    read(made, "one")  # two seconds each, of which a fifth counts at once
    gate, running = threading.Event(), threading.Event()

    def hold(texts: list[str]) -> None:
        running.set()
        gate.wait(LIMIT_S)

    source.trouble = hold
    heard: list[Reading] = []
    made.submit("held", lambda reading: None)
    assert running.wait(LIMIT_S)
    for n in range(20):
        made.submit(f"text {n}", heard.append)
    n_unread = len(heard)
    assert 0 < n_unread < 20
    assert all(reading is UNREAD for reading in heard)
    assert made.n_skipped == n_unread
    gate.set()


def test_the_version_names_the_examples(source: Source) -> None:
    """Other examples give other components, so learners begin anew."""
    versions = set()
    for examples in (EXAMPLES, {**EXAMPLES, "support": ["x"]}, {}):
        made = Reader(lambda: source, "fake-1", 2, examples)
        versions.add(made.version)
        made.close()
    assert len(versions) == 3


def test_misplaced_examples_are_told(source: Source) -> None:
    """A reader says which examples look like another type."""
    source.is_remote = False
    examples = {"patch": ["a test", "my test", "his test"], "support": ["shoes", "my shoes", "the crash of his test"]}
    made = Reader(lambda: source, "fake-1", 2, examples, SELECTION)
    assert made.confused == [("support", 2, "patch")]
    made.close()


@pytest.mark.parametrize("width", [256, 384, 1024, 3072])
def test_the_fixed_projection_fits_any_width(width: int) -> None:
    """Rows for the vectors of any server are orthonormal; those of 384 entries are as they were."""
    rows = fixed_rows(16, width)
    np.testing.assert_allclose(rows @ rows.T, np.eye(16), atol=1e-5)
    assert (fixed_rows(16, 384) == fixed_rows(16)).all()


def test_more_components_than_the_vectors_have_give_none(source: Source) -> None:
    """The reason is kept; nobody's turn fails."""
    made = Reader(lambda: source, "fake-1", 8, EXAMPLES, SELECTION)
    assert read(made, "a test") is UNREAD
    assert made.problem is not None and "3 entries" in made.problem
    made.close()


# --- hash ---------------------------------------------------------------------------------------------------------


def test_hash_with_examples_tells_types_and_gives_the_same_components() -> None:
    """The default embedder tells types without a model, off the caller's thread."""
    made = make_embedder("hash", 16, EXAMPLES, SELECTION)
    assert made is not None
    assert made.version == HashEmbedder(16).version
    text = "The parser crashes when the file is empty. Fix the test."
    assert made.read_now(text) is None
    reading = read(made, text)
    assert reading.told.task_type == "patch"
    assert reading.components == HashEmbedder(16).components_of(text)
    made.close()


def test_types_are_told_although_the_context_has_no_components() -> None:
    """`n_components: 0` leaves components out, not the task type."""
    made = make_embedder("hash", 0, EXAMPLES, SELECTION)
    assert made is not None
    reading = read(made, "Hello, where is my order? I would like to return it.")
    assert (reading.components, reading.told.task_type) == ((), "support")
    made.close()


@pytest.mark.parametrize(
    ("examples", "selection"),
    [
        ({}, SELECTION),
        ({"patch": ["x"]}, SELECTION),
        ({"patch": ["x"], "support": [" "]}, SELECTION),
        (EXAMPLES, SelectionSpec(rule="off")),
        (EXAMPLES, SelectionSpec(task_type="patch")),
        (EXAMPLES, None),
    ],
)
def test_hash_answers_at_once_where_no_type_is_told(examples: Any, selection: SelectionSpec | None) -> None:
    """Without two types to tell apart nothing changes: no thread, no wait."""
    made = make_embedder("hash", 16, examples, selection)
    assert isinstance(made, HashEmbedder)


def test_a_shared_example_is_a_config_error() -> None:
    """A pool file that contradicts itself is refused at the start."""
    with pytest.raises(ConfigError, match="have the same example"):
        make_embedder("hash", 16, {"a": ["x"], "b": ["x"]}, SELECTION)


def test_the_paper_s_rule_compares_bare_embeddings(source: Source) -> None:
    """`prototype` sees nothing of the words."""
    made = Reader(lambda: source, "fake-1", 2, EXAMPLES, SelectionSpec(rule="prototype"))
    told = read(made, "test").told
    assert (told.task_type, round(told.margin, 3)) == ("patch", 1.0)
    made.close()


# --- an OpenAI-compatible server ----------------------------------------------------------------------------------


class Stub(http.server.BaseHTTPRequestHandler):
    """An embedding server; `answer` makes status and body of one question."""

    answer: Callable[[dict[str, Any]], tuple[int, bytes]]
    heard: list[tuple[str, dict[str, str], dict[str, Any]]]
    gate: threading.Event

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.heard.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        self.gate.wait(LIMIT_S)
        status, answer = type(self).answer(body)
        self.send_response(status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


def embeddings(body: dict[str, Any], *, width: int = 4) -> tuple[int, bytes]:
    """What a right server says, in the reverse order, as it may."""
    rows = []
    for index, text in enumerate(body["input"]):
        vector = [0.0] * width
        vector["test" in text or "crash" in text] = 2.5
        rows.append({"object": "embedding", "index": index, "embedding": vector})
    return 200, json.dumps({"object": "list", "data": rows[::-1]}).encode()


@pytest.fixture
def stub() -> Iterator[tuple[str, type[Stub]]]:
    """A server on loopback and the class that answers."""

    class Answering(Stub):
        answer = staticmethod(embeddings)
        heard: list[Any] = []
        gate = threading.Event()

    Answering.gate.set()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", Answering
    Answering.gate.set()
    server.shutdown()
    thread.join()
    server.server_close()


def openai_embedder(url: str, **more: Any) -> OpenAIEmbedder:
    """An embedder on that server."""
    spec = EmbedderSpec(kind="openai", url=url, model="bge-m3", **{"timeout_s": 60.0, **more})
    made = make_embedder(spec, 2, EXAMPLES, SELECTION, {"EMBED_KEY": "secret"})
    assert isinstance(made, OpenAIEmbedder)
    return made


def test_a_server_gives_components_and_types(stub: tuple[str, type[Stub]]) -> None:
    """Model, texts and key are sent; vectors are read by their index and brought to unit length."""
    url, handler = stub
    made = openai_embedder(url, key_env="EMBED_KEY")
    reading = read(made, "My test has crashed \ud800.")
    assert reading.told.task_type == "patch"
    assert len(reading.components) == 2 and max(map(abs, reading.components)) <= 1.0
    path, headers, body = handler.heard[-1]
    assert (path, body["model"], body["input"]) == ("/v1/embeddings", "bge-m3", ["My test has crashed ?."])
    assert headers["authorization"] == "Bearer secret"
    made.close()


@pytest.mark.parametrize(
    ("path", "asked"), [("", "/v1"), ("/", "/v1"), ("/api/v2/", "/api/v2"), ("/v1/embeddings", "/v1")]
)
def test_the_path_of_the_url_is_kept(stub: tuple[str, type[Stub]], path: str, asked: str) -> None:
    """As for backends: no path means /v1."""
    url, handler = stub
    EmbeddingServer(EmbedderSpec(kind="openai", url=url + path, model="m")).embed(["x"])
    assert handler.heard[-1][0] == f"{asked}/embeddings"


BAD_ANSWERS = {
    "500": (500, b"{}"),
    "401": (401, b"{}"),
    "redirect": (302, b""),
    "no JSON": (200, b"<html>"),
    "no data": (200, b"{}"),
    "a list": (200, b"[]"),
    "too few": (200, b'{"data": []}'),
    "no length": (200, b'{"data": [{"index": 0, "embedding": [0, 0, 0, 0]}]}'),
    "not finite": (200, b'{"data": [{"index": 0, "embedding": [1, NaN, 0, 0]}]}'),
    "ragged": (200, b'{"data": [{"index": 0, "embedding": [1]}, {"index": 1, "embedding": [1, 2]}]}'),
    "text": (200, b'{"data": [{"index": 0, "embedding": "AAAA"}]}'),
    "null": (200, b'{"data": [{"index": 0, "embedding": null}]}'),
    "wrong index": (200, b'{"data": [{"index": 7, "embedding": [1, 0, 0, 0]}]}'),
    "nested": (200, b"[" * 100_000),
    "empty": (200, b'{"data": [{"index": 0, "embedding": []}]}'),
}


@pytest.mark.parametrize("answer", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_an_answer_that_is_no_embedding_is_no_embedding(
    stub: tuple[str, type[Stub]], answer: tuple[int, bytes]
) -> None:
    """Whatever the server says, the text is unread and the reason kept."""
    url, handler = stub
    handler.answer = staticmethod(lambda body: answer)
    made = openai_embedder(url)
    assert read(made, "a test") is UNREAD
    assert made.problem
    made.close()


def test_a_server_that_changes_its_width_is_not_believed(stub: tuple[str, type[Stub]]) -> None:
    """Vectors of another length are of another model."""
    url, handler = stub
    made = openai_embedder(url)
    assert read(made, "a test").components
    handler.answer = staticmethod(lambda body: embeddings(body, width=5))
    assert read(made, "another test") is UNREAD
    made.close()


def test_a_text_that_the_server_refuses_stops_nobody_else(stub: tuple[str, type[Stub]]) -> None:
    """A 400 is about the text: the server is asked again at once for the next."""
    url, handler = stub
    made = openai_embedder(url)
    handler.answer = staticmethod(lambda body: (400, b"{}") if "poison" in body["input"] else embeddings(body))
    assert read(made, "poison") is UNREAD
    assert read(made, "a test").told.task_type == "patch"
    made.close()


def test_a_server_that_is_silent_is_given_up_in_time(stub: tuple[str, type[Stub]]) -> None:
    """A question ends after its time-out, also where the server holds the connection open."""
    url, handler = stub
    handler.gate.clear()
    made = openai_embedder(url, timeout_s=0.05)
    assert read(made, "a test") is UNREAD
    assert handler.heard and not handler.gate.is_set(), "it is silent to this moment"
    made.close()


def test_a_server_that_drips_is_given_up_in_time() -> None:
    """The time-out is of the whole answer, not of each byte."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def drip() -> None:
        connection, _ = listener.accept()
        with connection:
            while not stop.wait(0.01):
                try:
                    connection.sendall(b"H")
                except OSError:
                    return

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    server = EmbeddingServer(
        EmbedderSpec(kind="openai", url=f"http://127.0.0.1:{listener.getsockname()[1]}", model="m", timeout_s=0.1)
    )
    try:
        with pytest.raises(Unreachable):
            server.embed(["x"])
    finally:
        stop.set()
        thread.join(LIMIT_S)
        listener.close()


def test_a_port_that_is_closed_is_no_embedding() -> None:
    """A refused connection is unread, at once."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody else gets the port meanwhile
        made = openai_embedder(f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert read(made, "a test") is UNREAD
        made.close()


def test_an_answer_beyond_the_bound_is_not_read(stub: tuple[str, type[Stub]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a server sends is bounded."""
    url, _ = stub
    monkeypatch.setattr(openai_embed, "ANSWER_MAX_BYTES", 40)
    with pytest.raises(Unreachable, match="more than 40 bytes"):
        EmbeddingServer(EmbedderSpec(kind="openai", url=url, model="m", timeout_s=60.0)).embed(["x"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "openai", "model": "m"}, "needs an http"),
        ({"kind": "openai", "url": "ftp://x", "model": "m"}, "needs an http"),
        ({"kind": "openai", "url": "http://x"}, "needs an http"),
        ({"kind": "openai", "url": "http://x", "model": "m", "timeout_s": 0.0}, r"\(0, 60\]"),
        ({"kind": "hash", "model": "m"}, "'hash' has no option 'model'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], said: str) -> None:
    """An option that is missing, wrong or of another kind is named."""
    with pytest.raises(ConfigError, match=said):
        EmbedderSpec(**options)


def test_a_missing_key_is_a_config_error() -> None:
    """The variable is named."""
    spec = EmbedderSpec(kind="openai", url="http://127.0.0.1:9", model="m", key_env="NO_SUCH_KEY")
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        make_embedder(spec, 2, {}, None, {})


def test_a_closed_hash_reader_reads_no_more() -> None:
    """As every embedder."""
    made = hash_reader(4, EXAMPLES, SELECTION)
    made.close()
    assert read(made, "x") is UNREAD
