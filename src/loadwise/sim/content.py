"""Which tokens are equal: the identity of a prompt's blocks, without the tokens.

An engine with a prefix cache compares prompts token by token, in whole blocks, and a block counts as equal only if
everything before it is equal too (chained hashes). A simulated prompt has no tokens, but it has an origin: its own
program's conversation up to some block, or a system prompt that many programs share. A *line* is a list of runs
`(first block, origin)`; block i of a line is named by the origin of the last run that begins at or before i, and by i.
Two blocks have one name exactly if the tokens up to their ends are the same, so the name serves as the chained hash.

A conversation that only grows keeps its line. One that is edited (compacted, reasoning dropped) keeps the blocks before
the edit and gets a new origin from there; so does a request that starts while its program's last one is still talking.
"""

from collections import OrderedDict

from .engine import PREFIX_ID_TOKENS, EngineRequest

MAX_BLOCKS_BITS = 26
"""A line has fewer than 2**26 blocks; names are `origin << 26 | block`."""

FIRST_NAMED_ORIGIN = 1 << 40
"""Origins from here on are names from traces; the engine's own never get so far."""

Line = tuple[tuple[int, int], ...]


def block_name(line: Line, block: int) -> int:
    """The name of one block.

    >>> block_name(((0, 1), (3, 2)), 2) == 1 << 26 | 2, block_name(((0, 1), (3, 2)), 3) == 2 << 26 | 3
    (True, True)
    """
    for first, origin in reversed(line):
        if first <= block:
            return origin << MAX_BLOCKS_BITS | block
    raise IndexError(f"line {line} has no block {block}")


class _Told:
    """What a program has told an engine so far."""

    __slots__ = ("line", "n_tokens", "prompt_tokens", "request_id", "shared")

    def __init__(self, line: Line, request: EngineRequest) -> None:
        self.line = line
        self.shared = (request.shared_key, request.shared_tokens)
        self.request_id: int | None = request.request_id
        """The request that is still talking; None where it is over."""
        self.prompt_tokens = request.prompt_tokens
        self.n_tokens = request.prompt_tokens


class Contents:
    """Names the blocks of requests. Remembers at most `limit` programs that have no request under way."""

    def __init__(self, block_size: int, limit: int) -> None:
        self._block_size = block_size
        self._limit = limit
        self._told: OrderedDict[str, _Told] = OrderedDict()
        self._n_talking = 0
        self._origin_by_shared: OrderedDict[str, int] = OrderedDict()
        self._n_origins = 0

    def __len__(self) -> int:
        return len(self._told)

    def open(self, request: EngineRequest) -> Line:
        """The line of a request that arrives now."""
        told = self._told.get(request.program_id)
        if request.line:
            line = tuple((token // self._block_size, FIRST_NAMED_ORIGIN + origin) for token, origin in request.line)
        elif request.prefix_ids:
            line = self._named_line(request)
        elif told is None or told.shared != (request.shared_key, request.shared_tokens):
            line = self._new_line(request)
        else:
            line = self._continue(told, request)
        if told is None or told.request_id is None:
            self._n_talking += 1
        self._told[request.program_id] = _Told(line, request)
        self._told.move_to_end(request.program_id)
        return line

    def close(self, request: EngineRequest, n_tokens: int) -> None:
        """A request is over; prompt and answer together are `n_tokens` long."""
        told = self._told.get(request.program_id)
        if told is None or told.request_id != request.request_id:
            return
        told.request_id = None
        told.n_tokens = n_tokens
        self._n_talking -= 1
        self._told.move_to_end(request.program_id)
        self._forget()

    def _continue(self, told: _Told, request: EngineRequest) -> Line:
        is_over = told.request_id is None
        known = told.n_tokens if is_over else told.prompt_tokens
        common = min(known, request.prompt_tokens)
        if request.prefix_tokens is not None:
            common = min(common, max(request.prefix_tokens, request.shared_tokens))
        if is_over and common == told.n_tokens:
            return told.line
        first = common // self._block_size
        return (*((at, origin) for at, origin in told.line if at < first), (first, self._new_origin()))

    def _named_line(self, request: EngineRequest) -> Line:
        """Blocks that end within a named one bear its name, which stands for all that precedes it."""
        line: list[tuple[int, int]] = []
        n_named = min(len(request.prefix_ids) * PREFIX_ID_TOKENS, request.prompt_tokens) // self._block_size
        for i, prefix_id in enumerate(request.prefix_ids):
            first = i * PREFIX_ID_TOKENS // self._block_size
            if first < n_named:
                line.append((first, FIRST_NAMED_ORIGIN + prefix_id))
        return (*line, (n_named, self._new_origin()))

    def _new_line(self, request: EngineRequest) -> Line:
        n_shared = min(request.shared_tokens, request.prompt_tokens) // self._block_size
        if not n_shared:
            return ((0, self._new_origin()),)
        shared = self._origin_by_shared.get(request.shared_key)
        if shared is None:
            shared = self._origin_by_shared[request.shared_key] = self._new_origin()
        self._origin_by_shared.move_to_end(request.shared_key)
        if len(self._origin_by_shared) > self._limit:
            self._origin_by_shared.popitem(last=False)
        return ((0, shared), (n_shared, self._new_origin()))

    def _new_origin(self) -> int:
        self._n_origins += 1
        return self._n_origins

    def _forget(self) -> None:
        while len(self._told) - self._n_talking > self._limit:
            for program_id, told in self._told.items():
                if told.request_id is None:
                    del self._told[program_id]
                    break
