"""What an emulated model says: the seam between an engine, which takes time, and whoever writes its lines."""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from loadwise.kernel.fact import Fact
from loadwise.kernel.streams import Streams
from loadwise.sim.draw import Draw, LogNormal, Quantity, sample_count

MAX_OUTPUT_TOKENS = 100_000


class ToolCall(Fact, frozen=True, kw_only=True):
    """One call of a tool by the model."""

    name: str
    arguments: str
    """JSON text, as on the wire."""
    call_id: str = ""
    """Unique within the conversation; made from the answer's own id where empty."""


class Reply(Fact, frozen=True, kw_only=True):
    """What a model says in one turn."""

    text: str = ""
    """Empty when the turn consists of tool calls only."""
    tool_calls: tuple[ToolCall, ...] = ()
    output_tokens: int | None = None
    """What the turn costs; may exceed the text's own length (reasoning that is not shown). Counted where absent."""


Script = Callable[[Mapping[str, Any]], Reply]
"""The parsed request body becomes a reply. Equal bodies should give equal replies; it is called on the event loop."""

_WORDS = (
    *("the", "queue", "holds", "what", "the", "pool", "cannot", "serve", "yet", "and", "every", "answer", "that"),
    *("arrives", "in", "time", "frees", "a", "place", "for", "the", "next", "program", "while", "engine", "reads"),
)


def filler_script(output_tokens: Quantity | None = None, seed: int = 0) -> Script:
    """Deterministic filler of sampled length: equal bodies and seeds give equal texts.

    Args:
        output_tokens: length of a reply; lognormal around 150 where absent.
    """
    length = Draw(lognormal=LogNormal(median=150.0, sigma=0.5)) if output_tokens is None else output_tokens
    streams = Streams(seed)

    def script(body: Mapping[str, Any]) -> Reply:
        asked = [body.get("messages"), body.get("prompt"), *([body["seed"]] if "seed" in body else [])]
        said = msgspec.json.encode(asked, order="deterministic")
        rng = streams.at("filler", zlib.crc32(said))
        n_tokens = sample_count(length, rng, least=1, most=MAX_OUTPUT_TOKENS)
        n_bytes, words = 4 * n_tokens, []
        while n_bytes > 0:
            words.append(_WORDS[int(rng.integers(len(_WORDS)))])
            n_bytes -= len(words[-1]) + 1
        return Reply(text=" ".join(words), output_tokens=n_tokens)

    return script
