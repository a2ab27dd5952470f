"""The load of the gateway's bench: what it sends, what it counts, and that it hides no waiting."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import load, rate, wrk
from bench.answers import Answer, read_plain, read_stream, verify
from bench.load import Connection, Endpoint, LoadFailed, Reply

PLAIN = json.dumps({"choices": [{"message": {"content": "a b"}}]}).encode()
EVENTS = [json.dumps({"choices": [{"delta": {"content": text}}]}) for text in ("a ", "b")]
STREAM = "".join(f"data: {event}\n\n" for event in (*EVENTS, "[DONE]")).encode()

GRACE_S = 120.0
"""For answers that come, on however slow a machine."""
SECONDS_MAX = 60
"""Of wrk, which stops by the clock, until it has done what a test looks for."""

Answering = Callable[[bytes], bytes | None]


def framed(content: bytes, status: int = 200) -> bytes:
    """One answer in HTTP/1.1."""
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(content), content)


def engine(request: bytes) -> bytes:
    """Answer as an engine does."""
    return framed(STREAM if b'"stream": true' in request else PLAIN)


def _read_request(connection: socket.socket) -> bytes:
    content = b""
    while b"\r\n\r\n" not in content:
        piece = connection.recv(65536)
        if not piece:
            return b""
        content += piece
    head, _, rest = content.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
    while len(rest) < length:
        rest += connection.recv(65536)
    return head + b"\r\n\r\n" + rest


def _serve_one(connection: socket.socket, answering: Answering) -> None:
    # a client that measures leaves whenever its time is over
    with connection, suppress(ConnectionError):
        while request := _read_request(connection):
            answer = answering(request)
            if answer is None:
                return
            connection.sendall(answer)


@contextmanager
def serving(answering: Answering) -> Iterator[Endpoint]:
    """A loopback server with a thread for each connection; None as an answer closes it."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:

        def accept() -> None:
            while True:
                try:
                    connection = listener.accept()[0]
                except OSError:
                    return
                threads.append(threading.Thread(target=_serve_one, args=(connection, answering)))
                threads[-1].start()

        threads: list[threading.Thread] = []
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield Endpoint(name="server", port=listener.getsockname()[1], model="m")
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for thread in threads:
                thread.join()


def turns(endpoint: Endpoint, count: int = 1) -> list[bytes]:
    """Some programs' turns."""
    return [load.request(endpoint, load.program_id("aaaaaaaa", number), stream=False) for number in range(count)]


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0.01, 1))
def test_percentile_is_the_smallest_value_that_enough_values_do_not_exceed(values: list[float], ratio: float) -> None:
    """A percentile is one of the values, enough values reach no higher, and no smaller value would do."""
    found = load.percentile(values, ratio)
    assert found in values
    assert sum(value <= found for value in values) >= ratio * len(values)
    assert not any(sum(value <= less for value in values) >= ratio * len(values) for less in values if less < found)


def test_percentile_of_nothing_is_an_error() -> None:
    """No values have no percentile, not a zero."""
    with pytest.raises(ValueError, match="no values"):
        load.percentile([], 0.5)


def test_a_request_keeps_its_length_whatever_the_program() -> None:
    """The mark and an id are equally long, so wrk may exchange one for the other without touching Content-Length."""
    endpoint = Endpoint(name="e", port=1, model="m")
    assert len(load.program_id(load.new_prefix(), 0)) == len(load.MARK)
    assert (
        len({len(request) for request in (*turns(endpoint, 3), load.request(endpoint, load.MARK, stream=False))}) == 1
    )


def test_a_request_names_its_program_in_header_and_text_and_asks_for_usage_when_streamed() -> None:
    """Two programs differ for a gateway that reads headers and for one that reads prompts."""
    endpoint = Endpoint(name="e", port=1, model="m", headers={"Authorization": "Bearer k"})
    head, _, content = load.request(endpoint, "program-1", stream=True, extra={"X-Extra": "1"}).partition(b"\r\n\r\n")
    turn = json.loads(content)
    assert {b"X-Session-ID: program-1", b"Authorization: Bearer k", b"X-Extra: 1"} <= set(head.split(b"\r\n"))
    assert "program-1" in turn["messages"][1]["content"]
    assert (turn["model"], turn["stream"], turn["stream_options"]) == ("m", True, {"include_usage": True})


@contextmanager
def connected() -> Iterator[tuple[Connection, socket.socket]]:
    """A connection of ours under way, and the other end of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = Connection(listener.getsockname()[1])
        other = listener.accept()[0]
    with other:
        connection.send(b"GET / HTTP/1.1\r\n\r\n")
        yield connection, other
    connection.close()


def test_a_connection_reads_an_answer_that_comes_byte_by_byte_and_keeps_its_size() -> None:
    """An answer is whole when its framing says so, not when a read returns."""
    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    with connected() as (connection, other):
        for index in range(len(answer)):
            other.sendall(answer[index : index + 1])
            assert connection.receive().whole == (index == len(answer) - 1)
    assert (connection.reply.status, connection.reply.body, connection.reply.size_bytes) == (200, b"abcde", len(answer))


def test_a_connection_that_closes_in_the_middle_has_not_answered() -> None:
    """A gateway that hangs up is told from one that is done."""
    with connected() as (connection, other):
        other.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc")
        assert not connection.receive().whole
        other.shutdown(socket.SHUT_WR)
        with pytest.raises(LoadFailed, match="closed after 41 bytes"):
            connection.receive()


def test_one_connection_refuses_an_answer_other_than_200() -> None:
    """A fast refusal is no latency."""
    with serving(lambda request: framed(b"busy", 503)) as endpoint, pytest.raises(LoadFailed, match="answered 503"):
        load.one_connection(endpoint, itertools.cycle(turns(endpoint)), 0.0)


def test_one_connection_gives_a_median_over_at_least_one_answer() -> None:
    """Even no time at all measures something."""
    with serving(engine) as endpoint:
        assert load.one_connection(endpoint, itertools.cycle(turns(endpoint)), 0.0) > 0


def test_a_constant_rate_sends_every_request_and_counts_bad_answers() -> None:
    """Answers and errors add up to what was due."""
    seen = itertools.count()
    with serving(lambda request: framed(PLAIN, 200 if next(seen) % 2 else 500)) as endpoint:
        met = rate.constant_rate(
            endpoint, turns(endpoint, load.PROGRAMS), rate_per_s=2000, duration_s=0.02, grace_s=GRACE_S
        )
    assert (met.answered, met.unanswered, met.errors) == (40, 0, 20)


def test_a_request_that_waits_for_a_connection_is_charged_from_when_it_was_due() -> None:
    """Behind one answer that never comes, each later request has waited exactly one interval less."""
    release = threading.Event()

    def hang(request: bytes) -> None:
        release.wait(GRACE_S)

    with serving(hang) as endpoint, load.connections(endpoint.port, 1) as opened:
        run = rate._Rate(opened, turns(endpoint), rate_per_s=1000, count=8)
        run.run(grace_s=0.05)
        release.set()
    waits = run.latencies_s
    assert run.unanswered == 8
    assert [a - b for a, b in itertools.pairwise(waits)] == pytest.approx([0.001] * 7)
    assert waits[-1] == pytest.approx(0.051)


def test_requests_that_a_client_could_not_even_send_count_as_unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that stands still from the start to the end has met nothing, not a perfect gateway."""
    clock = itertools.chain([0.0], itertools.repeat(1000.0))
    monkeypatch.setattr(rate, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    run = rate._Rate([], [], rate_per_s=100, count=8)
    run.run(grace_s=0.5)
    assert (run.unanswered, len(run.latencies_s)) == (8, 8)
    assert run.latencies_s == pytest.approx([0.58 - 0.01 * number for number in range(8)])


def test_a_constant_rate_counts_a_connection_that_closes_and_goes_on() -> None:
    """A hang-up costs one request, not the measurement."""
    seen = itertools.count()
    with serving(lambda request: None if next(seen) == 0 else engine(request)) as endpoint:
        met = rate.constant_rate(endpoint, turns(endpoint), rate_per_s=1000, duration_s=0.01, grace_s=GRACE_S)
    assert (met.answered, met.errors) == (10, 1)


def test_wrk_counts_are_read_and_every_kind_of_error_counts() -> None:
    """The rate is answers over time; sockets, statuses and timeouts are all errors."""
    met = wrk.read_result(
        "Running\n"
        '{"requests": 50, "duration_us": 2000000, "bytes": 7, "connect": 1, "read": 2, "write": 4, "status": 8, '
        '"timeout": 16}\n'
    )
    assert (met.per_s, met.errors) == (25.0, 31)


def test_wrk_without_a_result_says_what_it_said() -> None:
    """A script that fails must not read as a rate of zero."""
    with pytest.raises(LoadFailed, match="unable to connect"):
        wrk.read_result("", "unable to connect to 127.0.0.1")


@pytest.mark.real
@pytest.mark.parametrize("threads", [1, load.PROGRAMS])
def test_wrk_sends_32_programs_with_well_formed_turns(threads: int) -> None:
    """Each turn that wrk sends is byte for byte a turn of ours, for just 32 programs."""
    bodies: set[bytes] = set()
    ids: set[bytes] = set()

    def answer(request: bytes) -> bytes:
        head, _, content = request.partition(b"\r\n\r\n")
        ids.add(head.partition(b"X-Session-ID: ")[2].split(b"\r\n")[0])
        bodies.add(content)
        return engine(request)

    expected = [load.program_id("aaaaaaaa", number) for number in range(load.PROGRAMS)]
    with serving(answer) as endpoint:
        for _ in range(SECONDS_MAX):  # a busy machine may not come to all of them in one
            met = wrk.run(endpoint, 0, 1, stream=True, prefix="aaaaaaaa", threads=threads)
            assert met.errors == 0
            if len(ids) >= len(expected):
                break
    assert sorted(ids) == [program.encode() for program in expected]
    assert bodies == {load.body("m", program, stream=True) for program in expected}


@pytest.mark.real
def test_wrk_never_sends_a_fresh_program_twice() -> None:
    """A first turn is only a first turn if its program is new."""
    ids: list[bytes] = []

    def answer(request: bytes) -> bytes:
        ids.append(request.partition(b"X-Session-ID: ")[2].split(b"\r\n")[0])
        assert b"X-Loadwise-Final: 1" in request
        return engine(request)

    with serving(answer) as endpoint:
        for second in range(SECONDS_MAX):
            prefix = f"{second:08}"
            wrk.run(endpoint, 0, 1, stream=False, prefix=prefix, fresh=True, extra={"X-Loadwise-Final": "1"})
            if len(ids) > load.PROGRAMS:
                break
    assert len(ids) > load.PROGRAMS and len(set(ids)) == len(ids)


def test_a_stream_is_read_chunk_by_chunk_to_its_end_mark() -> None:
    """Chunks with text count, chunks without do not, and the text is their sum."""
    usage = b'data: {"choices": [], "usage": {}}\n\n'
    body = STREAM.replace(b"data: [DONE]", usage + b'data: {"choices": [{"delta": {}}]}\n\ndata: [DONE]')
    assert read_stream(Reply(body=body)) == Answer(text="a b", chunks=2, ended=True)


@pytest.mark.parametrize(
    "body",
    [
        STREAM.replace(b"data: [DONE]\n\n", b""),
        b"data: [DONE]\n\n" + STREAM,
        b"data: [DONE]\n\n" + STREAM.replace(b"data: [DONE]\n\n", b""),
        b"",
    ],
)
def test_a_stream_has_ended_only_if_its_last_event_alone_says_so(body: bytes) -> None:
    """No mark, two marks and a mark in the middle are all a broken stream."""
    assert not read_stream(Reply(body=body)).ended


@pytest.mark.parametrize("event", [b"{", b"[]", b"{}", b'{"choices": [{}]}', b'{"choices": [{"delta": null}]}'])
def test_an_event_that_is_no_chunk_is_refused(event: bytes) -> None:
    """What cannot be read is not counted as an empty chunk."""
    with pytest.raises(LoadFailed, match="no chunk"):
        read_stream(Reply(body=b"data: " + event + b"\n\n"))


@pytest.mark.parametrize("body", [b"", b"{}", b'{"choices": []}', b"[]"])
def test_a_body_that_is_no_completion_is_refused(body: bytes) -> None:
    """An error body is no answer."""
    with pytest.raises(LoadFailed, match="no chat completion"):
        read_plain(Reply(body=body))


def test_verify_takes_a_gateway_that_answers_as_the_engine() -> None:
    """The same text over another framing is the same answer."""
    with serving(engine) as endpoint:
        known = verify(endpoint, "aaaaaaaa")
        again = verify(endpoint, "bbbbbbbb", known)
    assert (again.plain, again.stream, again.stream_bytes) == (known.plain, known.stream, known.stream_bytes)
    assert (known.stream.chunks, known.plain.text) == (2, "a b")
    assert (known.plain_bytes, known.stream_bytes) == (len(framed(PLAIN)), len(framed(STREAM)))


@pytest.mark.parametrize(
    ("stream", "match"),
    [
        (STREAM.replace(b"data: [DONE]\n\n", b""), "does not end"),
        (STREAM.replace(EVENTS[0].encode(), EVENTS[1].encode()), "the engine"),
    ],
)
def test_verify_refuses_a_stream_that_is_cut_or_altered(stream: bytes, match: str) -> None:
    """A gateway that loses the end or a chunk is not measured at all."""

    def altered(request: bytes) -> bytes:
        return framed(stream) if b'"stream": true' in request else framed(PLAIN)

    with serving(engine) as endpoint:
        known = verify(endpoint, "aaaaaaaa")
    with serving(altered) as endpoint, pytest.raises(LoadFailed, match=match):
        verify(endpoint, "aaaaaaaa", known)


def test_verify_refuses_a_gateway_that_answers_only_some() -> None:
    """One altered answer among 32 is enough."""
    seen = itertools.count()

    def now_and_then(request: bytes) -> bytes:
        return engine(request) if next(seen) != 7 else framed(PLAIN.replace(b"a b", b"a"))

    with serving(now_and_then) as endpoint, pytest.raises(LoadFailed, match="2 different answers"):
        verify(endpoint, "aaaaaaaa")
