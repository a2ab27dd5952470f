"""The agents of a simulated world, played over HTTP: the same programs, turns, gaps, luck and verdicts, in scaled time.

What an agent asks follows from the world's seed and the program's number, as in `loadwise.sim.agents`: only who answers
differs, and when. Prompts are chats whose messages cost an emulated engine exactly the tokens that the world counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from bench.live_replies import Answer, AnswerSink, Reply, read_reply
from loadwise.kernel.errors import ConfigError
from loadwise.kernel.streams import Streams
from loadwise.sim.agents import Agent
from loadwise.sim.report import mean
from loadwise.sim.scenario import Scenario
from loadwise.sim.truth import Truth
from loadwise.sim.verdicts import judge
from loadwise.sim.workload import Closed, ProgramShape, Workload
from loadwise.wire.client import Upstream
from loadwise.wire.heads import header_block

TOKEN_BYTES = 4
"""An emulated engine counts four bytes a token, a message's role and a separator among them."""
REPLY_EXTRA_TOKENS = 3
"""What `assistant` costs where a reply comes back; the next message is so much shorter."""
_JSON = b"content-type: application/json\r\n"


class LivedProgram(NamedTuple):
    """One program that is over; seconds of the world."""

    number: int
    model: str | None
    is_finished: bool
    is_solved: bool
    code: str
    """Why it failed."""
    wait_s: float
    """Before its first turn was dispatched."""
    began_at_s: float
    ended_at_s: float
    n_turns: int
    call_s: float
    """In its calls, without the first wait."""
    first_s: float
    """Until its first answer."""
    prompt_tokens: int
    cached_tokens: int


class Lived(NamedTuple):
    """A whole run."""

    programs: list[LivedProgram]
    late_mean_s: float
    """How late the agents' own timers were: what of a gap is the driver's fault."""

    @property
    def makespan_s(self) -> float:
        return max(program.ended_at_s for program in self.programs)

    def failures(self) -> dict[str, int]:
        """Why programs did not finish, and how many each."""
        codes = [program.code for program in self.programs if not program.is_finished]
        return {code: codes.count(code) for code in sorted(set(codes))}

    def figures(self, dear_model: str) -> dict[str, float]:
        """What is compared with a simulated run."""
        finished = [program for program in self.programs if program.is_finished]
        ran = [program for program in self.programs if program.model is not None]
        return {
            "programs_per_h": len(finished) * 3600.0 / self.makespan_s,
            "resolved": float(sum(program.is_solved for program in self.programs)),
            "wait_mean_s": mean([program.wait_s for program in ran]) or 0.0,
            "call_mean_s": sum(program.call_s for program in ran) / max(sum(program.n_turns for program in ran), 1),
            "first_answer_mean_s": mean([program.first_s for program in ran]) or 0.0,
            "cached_ratio": sum(program.cached_tokens for program in ran)
            / max(sum(program.prompt_tokens for program in ran), 1),
            "dear_share": sum(program.model == dear_model for program in ran) / max(len(ran), 1),
            "killed": float(len(self.programs) - len(finished)),
            "makespan_s": self.makespan_s,
            "late_mean_s": self.late_mean_s,
        }


def message(role: str, tag: str, n_tokens: int) -> bytes:
    """A chat message that costs `n_tokens`, with text that no other tag has.

    >>> message("user", "p1.2", 4)
    b'{"role":"user","content":"p1.2_______"}'
    """
    n_bytes = max(TOKEN_BYTES * n_tokens - len(role) - 1, 1)
    text = (tag + "_" * n_bytes)[:n_bytes]
    return b'{"role":"%b","content":"%b"}' % (role.encode(), text.encode())


class Endpoint(NamedTuple):
    """Who is asked, and how."""

    url: str
    """With `/v1`."""
    model: str = "auto"
    session_header: str = "x-session-id"
    has_programs: bool = True
    """Whether it takes finish and verdict calls, as Loadwise does."""
    headers: tuple[tuple[str, str], ...] = ()
    wants_min_tokens: bool = True
    """Whether the answer's length is asked for by `min_tokens`; else by `max_tokens` and `ignore_eos`."""
    write: Callable[[str, str, int], bytes] = message
    """Makes a message of a role, a tag and a number of tokens, as the engine counts them."""
    reply_extra_tokens: int = REPLY_EXTRA_TOKENS
    final_header: str = ""
    """Of a call after a program's last turn, which says that it is over and has no answer (Dynamo)."""


def require_playable(scenario: Scenario) -> None:
    """Refuse worlds that agents over HTTP cannot live in as the simulated ones do.

    Raises:
        ConfigError: says why.
    """
    workload = scenario.workload
    problems = {
        "its arrivals are no closed loop": not isinstance(workload.arrivals, Closed),
        "its engines share a GPU, which emulated ones cannot": bool(scenario.gpus),
        "its models' answers differ in length": bool(scenario.truth.output_ratio),
        "its programs do not end by a finish call": workload.ends != "finish",
        "its clients lose patience": workload.patience_s is not None,
        "agents do not report its verdicts": scenario.verdicts.source != "agent",
        "backends fail in it": bool(scenario.failures),
        "its number of programs is open": scenario.n_programs is None,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ConfigError(f"world {scenario.name!r} cannot be played over HTTP: {problem}")


class Conversation:
    """A program's messages as bytes, ready to be sent."""

    def __init__(self, shape: ProgramShape, shared_tokens: int, endpoint: Endpoint) -> None:
        self._number = shape.number
        self._endpoint = endpoint
        self._messages = [endpoint.write("system", "shared", shared_tokens)] if shared_tokens else []
        self._shared_tokens = shared_tokens
        self._n = 0

    def ask(self, growth_tokens: int) -> None:
        """The next message of the user, or of a tool."""
        self._n += 1
        taken = self._shared_tokens if self._n == 1 else self._endpoint.reply_extra_tokens
        tag = f"p{self._number}.{self._n}."
        self._messages.append(self._endpoint.write("user", tag, max(growth_tokens - taken, 2)))

    def hear(self, text: str) -> None:
        """The model's reply."""
        self._messages.append(b'{"role":"assistant","content":%b}' % msgspec.json.encode(text))

    @property
    def body(self) -> bytes:
        return b"[" + b",".join(self._messages) + b"]"


class LiveAgents:
    """Agents of a closed loop, each with one program after another."""

    def __init__(
        self, scenario: Scenario, seed: int, endpoint: Endpoint, *, scale: float = 1.0, is_stream: bool = False
    ) -> None:
        """
        Args:
            scale: Seconds of the world per real second.
            is_stream: Ask for streams.

        Raises:
            ConfigError: the world cannot be played so.
        """
        require_playable(scenario)
        self._scenario, self._endpoint, self._scale, self._is_stream = scenario, endpoint, scale, is_stream
        self._streams = Streams(seed)
        self._workload = Workload(scenario.workload, self._streams)
        self._truth = Truth(scenario.truth, self._streams)
        self._upstream = Upstream(endpoint.url)
        self._extra = _JSON + header_block(list(endpoint.headers))
        self._n_scheduled = self._n_started = 0
        self._lives: list[LivedProgram] = []
        self._late_s: list[float] = []
        self._verdicts: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._began_s = 0.0

    @property
    def now_s(self) -> float:
        """Seconds of the world since the run began."""
        return (self._loop.time() - self._began_s) * self._scale

    async def run(self) -> Lived:
        """Live all programs."""
        arrivals = self._scenario.workload.arrivals
        assert isinstance(arrivals, Closed)
        self._began_s = self._loop.time()
        try:
            await asyncio.gather(*(self._agent() for _ in range(arrivals.n_agents)))
        finally:
            for task in self._verdicts:
                task.cancel()
            await asyncio.gather(*self._verdicts, return_exceptions=True)
            await self._upstream.close()
        return Lived(self._lives, mean(self._late_s) or 0.0)

    async def _agent(self) -> None:
        n_programs = self._scenario.n_programs or 0
        is_first = True
        while self._n_scheduled < n_programs:
            self._n_scheduled += 1
            await self._sleep(self._workload.think_s(self._n_scheduled, is_first))
            is_first = False
            self._n_started += 1
            await self._program(self._workload.shape(self._n_started))

    async def _sleep(self, seconds: float) -> None:
        if seconds > 0:
            due_at_s = self._loop.time() + seconds / self._scale
            await asyncio.sleep(seconds / self._scale)
            self._late_s.append((self._loop.time() - due_at_s) * self._scale)

    async def _program(self, shape: ProgramShape) -> None:
        agent, conversation = (
            Agent(shape, self.now_s),
            Conversation(shape, self._scenario.workload.shared_tokens, self._endpoint),
        )
        wait_s, first_s, call_s, n_turns = 0.0, 0.0, 0.0, 0
        prompt_tokens = cached_tokens = 0
        while True:
            turn, asked_at_s = agent.turn, self.now_s
            agent.context_tokens += turn.growth_tokens
            conversation.ask(turn.growth_tokens)
            reply = await self._turn(agent, conversation.body, turn.output_tokens)
            took_s = self.now_s - asked_at_s
            if n_turns == 0:
                wait_s, first_s = reply.wait_s, took_s
                took_s = max(took_s - wait_s, 0.0)
            if reply.code:
                break
            call_s, n_turns = call_s + took_s, n_turns + 1
            prompt_tokens, cached_tokens = prompt_tokens + reply.prompt_tokens, cached_tokens + reply.cached_tokens
            agent.context_tokens += reply.output_tokens
            conversation.hear(reply.text)
            agent.model = reply.model
            agent.n_turns = self._truth.n_turns(reply.model, shape)
            if agent.is_at_last_turn or self._is_too_long(agent):
                break
            agent.i_turn += 1
            await self._sleep(agent.turn.gap_s)
        is_solved = not reply.code and agent.model is not None and self._truth.is_solved(agent.model, shape)
        times = (agent.arrived_at_s, self.now_s)
        fate = (agent.model, not reply.code, is_solved, reply.code)
        used = (prompt_tokens, cached_tokens)
        self._lives.append(LivedProgram(shape.number, *fate, wait_s, *times, n_turns, call_s, first_s, *used))
        if self._endpoint.final_header:
            await self._turn(agent, conversation.body, 1, is_over=True)
        if self._endpoint.has_programs:
            await self._post(f"/programs/{agent.program_id}/finish", b"{}")
            self._judge(agent, is_solved)

    def _is_too_long(self, agent: Agent) -> bool:
        is_beyond = agent.i_turn + 1 >= len(agent.shape.turns)
        return is_beyond and agent.context_tokens >= self._workload.spec.context_limit_tokens

    async def _turn(self, agent: Agent, messages: bytes, output_tokens: int, *, is_over: bool = False) -> Reply:
        endpoint, shape = self._endpoint, agent.shape
        options: dict[str, Any] = {"model": endpoint.model, "messages": msgspec.Raw(messages)}
        if endpoint.wants_min_tokens:
            options["min_tokens"] = output_tokens
        else:
            options |= {"max_tokens": output_tokens, "ignore_eos": True}
        if self._is_stream:
            options |= {"stream": True, "stream_options": {"include_usage": True}}
        named = [(endpoint.session_header, str(agent.program_id))] if endpoint.session_header else []
        if is_over:
            named.append((endpoint.final_header, "true"))
        if endpoint.has_programs and shape.task_type is not None:
            named.append(("x-loadwise-task-type", shape.task_type))
        answer = await self._post("/chat/completions", msgspec.json.encode(options), header_block(named))
        return read_reply(answer, endpoint.model, is_stream=self._is_stream)

    async def _post(self, path: str, body: bytes, headers: bytes = b"") -> Answer:
        sink = AnswerSink()
        self._upstream.send(b"POST", path.encode(), self._extra + headers, body, sink)
        return await sink.over

    def _judge(self, agent: Agent, is_solved: bool) -> None:
        for due in judge(self._scenario.verdicts, self._streams, agent.shape.number, is_solved, "agent"):
            task = self._loop.create_task(self._tell(agent, due.after_s, due.verdict))
            self._verdicts.add(task)
            task.add_done_callback(self._verdicts.discard)

    async def _tell(self, agent: Agent, after_s: float, verdict: Any) -> None:
        await asyncio.sleep(after_s / self._scale)
        body = {"verdict": verdict.verdict.value, "id": verdict.verdict_id, "verifier": "agent"}
        await self._post(f"/programs/{agent.program_id}/verdict", msgspec.json.encode(body))
