"""The end mark of a stream is found where a reader of event streams finds it, and nowhere else."""

import itertools
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadwise.gateway.events import EventStream

LINE = re.compile(rb"(?:^|[\r\n])data: ?(\[DONE\])[ \t]*[\r\n]")
"""The rule itself, as slow as it is."""
PIECES = st.sampled_from(
    [
        b"data: ",
        b"data:",
        b"[DONE]",
        b"data: [DONE]",
        b"data:[DONE]",
        b"\n",
        b"\n\n",
        b"\r\n\r\n",
        b"\r",
        b" ",
        b"\t",
        b"x",
    ]
)


@given(st.lists(PIECES, max_size=12).map(b"".join))
def test_the_end_mark_is_found_by_the_rule(written: bytes) -> None:
    """A stream is over when a line holds the mark and nothing else, wherever the mark is mentioned besides."""
    written += b"\n\n"  # whole events only are let through
    stream = EventStream(drops_usage=False)
    passed = stream.feed(written)
    found = LINE.search(written)
    assert stream.is_done == (found is not None)
    if found is None:
        assert passed == written
    else:
        ends = [
            written.find(mark, found.start(1)) + len(mark)
            for mark in (b"\n\n", b"\r\n\r\n")
            if mark in written[found.start(1) :]
        ]
        assert passed == written[: min(ends)]


@pytest.mark.parametrize("text", [b"[DONE]", b" data: [DONE]", b"data:  [DONE]", b"data: [DONE]x", b'data: "[DONE]"'])
def test_a_mention_of_the_mark_ends_nothing(text: bytes) -> None:
    """The mark in an answer's text, or out of its place, is text."""
    stream = EventStream(drops_usage=False)
    assert stream.feed(text + b"\n\n") == text + b"\n\n"
    assert not stream.is_done


EVENT = st.sampled_from(
    [
        b'data: {"choices":[{"delta":{}}]}',
        b'data: {"choices":[],"usage":{"prompt_tokens":3}}',
        b'data: {"choices":[] , "usage" : {"prompt_tokens":4}}',
        b'data: {"choices":[{}],"usage":{"prompt_tokens":5}}',
        b'data: {"choices":[],"usage":null}',
        b'data: {"choices":[{"delta":{"content":"\\"usage\\": {"}}]}',
        b": ping",
        b'data: {"usage":{"usage":{"prompt_tokens":1}},"choices":[{}]}',
    ]
)
GAP = st.sampled_from([b"\n\n", b"\r\n\r\n"])


@given(st.lists(st.tuples(EVENT, GAP), max_size=8), st.lists(st.integers(0, 500), max_size=4), st.booleans())
def test_events_pass_however_they_are_cut(
    events: list[tuple[bytes, bytes]], cuts: list[int], drops_usage: bool
) -> None:
    """What passes, and the usage that is read, depend on the events alone, not on how the engine's bytes arrive."""
    written = b"".join(event + gap for event, gap in events)
    ends = sorted({min(cut, len(written)) for cut in cuts} | {0, len(written)})
    stream = EventStream(drops_usage=drops_usage)
    passed = b"".join(stream.feed(written[a:b]) for a, b in itertools.pairwise(ends))
    kept = [event + gap for event, gap in events if not (drops_usage and carries_usage_only(event))]
    assert passed == b"".join(kept)
    said = [found for event, _ in events if (found := usage(event)) is not None]
    assert (None if stream.usage is None else stream.usage.prompt_tokens) == (said[-1] if said else None)


def fields(event: bytes) -> dict[str, Any]:
    """What an event's data hold."""
    found = msgspec.json.decode(event[5:]) if event.startswith(b"data:") else {}
    assert isinstance(found, dict)
    return found


def usage(event: bytes) -> int | None:
    """The prompt's tokens, where an event tells them."""
    said = fields(event).get("usage")
    return said.get("prompt_tokens") if isinstance(said, dict) else None


def carries_usage_only(event: bytes) -> bool:
    """Whether an event is the one that we asked for and the client did not."""
    return isinstance(fields(event).get("usage"), dict) and not fields(event).get("choices")
