"""The commands on real files and real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from cli_runs import POOL, SCENARIO, refused, run

import loadwise
from loadwise.cli.output import columns, plain
from loadwise.kernel.pool import Price
from loadwise.settings import preset_names, read_preset

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    """A scenario that takes a moment."""
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    return path


@contextmanager
def running(*argv: str | Path) -> Iterator[Any]:
    """A command in a process of its own, once it has said its first line, which is JSON; interrupted at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "loadwise", *map(str, argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(loadwise.__file__).parents[1])},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield json.loads(line)
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "Traceback" not in err


def test_presets_lists_and_shows(capsys: Capture) -> None:
    """Every preset with its description, and one of them as YAML or JSON that reads back."""
    assert set(run(capsys, "presets", "--json").json["presets"]) == set(preset_names())
    listed = run(capsys, "presets").out.splitlines()
    assert [line.split()[0] for line in listed] == list(preset_names())
    for name in preset_names():
        assert yaml.safe_load(run(capsys, "presets", name).out) == read_preset(name)
        assert run(capsys, "presets", name, "--json").json == {"name": name, **read_preset(name)}
    assert "known: admission_only, deals" in refused(run(capsys, "presets", "nope"))


def test_simulate_gives_equal_bytes_for_equal_seeds(scenario: Path, capsys: Capture) -> None:
    """Law L6 through the command."""
    first = run(capsys, "simulate", scenario, "--seed", "3", "--json")
    assert first.status == 0
    assert first.json["programs"]["finished"] == 8
    assert run(capsys, "simulate", scenario, "--seed", "3", "--json").out == first.out
    assert run(capsys, "simulate", scenario, "--seed", "4", "--json").out != first.out
    assert "finished 8" in run(capsys, "simulate", scenario, "--seed", "3").out


def test_simulate_refuses_what_it_cannot_read_or_would_spoil(scenario: Path, tmp_path: Path, capsys: Capture) -> None:
    """A missing scenario, a wrong one, a journal that is there already."""
    assert "nope.yaml" in refused(run(capsys, "simulate", tmp_path / "nope.yaml"))
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(SCENARIO.replace("n_programs", "n_programmes"))
    assert "n_programmes" in refused(run(capsys, "simulate", wrong))
    journal = tmp_path / "j"
    assert run(capsys, "simulate", scenario, "--journal", journal).status == 0
    assert "holds a journal already" in refused(run(capsys, "simulate", scenario, "--journal", journal))


def test_a_simulated_journal_can_be_read_in_every_way(scenario: Path, tmp_path: Path, capsys: Capture) -> None:
    """verify, replay (law L7), cat, story and why agree on what is there."""
    journal = tmp_path / "sim.journal"
    report = run(capsys, "simulate", scenario, "--journal", journal, "--json")
    assert "journal written" in report.err
    whole = run(capsys, "journal", "verify", journal, "--json")
    assert (whole.status, whole.json["is_whole"], whole.json["problems"]) == (0, True, [])
    replayed = run(capsys, "journal", "replay", journal, "--json")
    assert (replayed.status, replayed.json["holds"]) == (0, True)
    assert replayed.json["n_entries"] == whole.json["n_entries"]
    assert "same commands" in run(capsys, "journal", "replay", journal).out
    entries = [json.loads(line) for line in run(capsys, "journal", "cat", journal).out.splitlines()]
    assert "header" in entries[0]
    assert len(entries) == whole.json["n_entries"] + 1
    programs = run(capsys, "journal", "story", journal, "--json").json["programs"]
    assert len(programs) == 8
    assert all(program["n_turns"] == 2 for program in programs)
    program_id = programs[0]["program"]
    told = run(capsys, "journal", "story", journal, program_id, "--json").json
    assert told["program"] == program_id
    assert told["lines"][0]["kind"] == "turn_arrived"
    assert program_id in run(capsys, "journal", "story", journal, program_id).out
    why = run(capsys, "why", program_id, "--journal", journal, "--json").json
    assert {c["candidate"] for c in why["decisions"][0]["candidates"]} == {"small", "large"}
    assert f"program {program_id}: 2 turns" in run(capsys, "why", program_id, "--journal", journal).out


def test_story_finds_its_journal(
    scenario: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One name is a program of the journal that is named or usual, or a journal."""
    monkeypatch.chdir(tmp_path)
    run(capsys, "simulate", scenario, "--journal", "loadwise-journal")
    listed = run(capsys, "journal", "story")
    program_id = listed.out.split()[-1]
    said = run(capsys, "journal", "story", program_id).out
    assert program_id in said
    assert run(capsys, "journal", "story", program_id, "--journal", "loadwise-journal").out == said
    assert run(capsys, "journal", "story", "loadwise-journal").out == listed.out
    assert "3 names" in refused(run(capsys, "journal", "story", "a", "b", "c"))


def test_a_program_that_nobody_knows(scenario: Path, tmp_path: Path, capsys: Capture) -> None:
    """Status 1: the journal is fine, the answer is no."""
    journal = tmp_path / "j"
    run(capsys, "simulate", scenario, "--journal", journal)
    for argv in (["why", "nobody", "--journal", journal], ["journal", "story", journal, "nobody"]):
        ran = run(capsys, *argv)
        assert ran.status == 1
        assert "'nobody'" in ran.err
        assert ran.out == ""


@pytest.mark.parametrize("verb", ["story", "replay", "verify", "cat"])
def test_a_journal_that_is_not_there(verb: str, tmp_path: Path, capsys: Capture) -> None:
    """Missing, and a folder without one."""
    names = ["--journal", str(tmp_path / "nope"), "p"] if verb == "story" else [str(tmp_path / "nope")]
    assert "does not exist" in refused(run(capsys, "journal", verb, *names))
    names[names.index(str(tmp_path / "nope"))] = str(tmp_path)
    assert "holds no segment" in refused(run(capsys, "journal", verb, *names))


def test_a_damaged_journal_has_status_one(scenario: Path, tmp_path: Path, capsys: Capture) -> None:
    """verify tells what is damaged; replay refuses in one line."""
    journal = tmp_path / "sim.journal"
    run(capsys, "simulate", scenario, "--journal", journal)
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 0xFF
    journal.write_bytes(data)
    found = run(capsys, "journal", "verify", journal, "--json")
    assert found.status == 1
    assert found.json["problems"]
    assert "damaged" in run(capsys, "journal", "verify", journal).out
    replayed = run(capsys, "journal", "replay", journal)
    assert replayed.status == 1
    assert len(replayed.err.splitlines()) == 1


def test_a_journal_of_other_commands_fails_replay(scenario: Path, tmp_path: Path, capsys: Capture) -> None:
    """Status 1 and the first difference, where a machine answers otherwise than recorded."""
    from msgspec.structs import replace

    from loadwise.journal.entry import encode_entry, encode_header
    from loadwise.journal.frame import SEGMENT_MAGIC, frame
    from loadwise.journal.reader import read
    from loadwise.kernel.events import TurnArrived

    journal = tmp_path / "sim.journal"
    run(capsys, "simulate", scenario, "--journal", journal)
    reader = read(journal)
    entries = list(reader)
    at = next(i for i, entry in enumerate(entries) if isinstance(entry.event, TurnArrived))
    entries[at] = replace(entries[at], digest=entries[at].digest ^ 1)
    frames = [SEGMENT_MAGIC, frame(encode_header(reader.header))]
    for entry in entries:
        frames.append(frame(encode_entry(entry)))
    journal.write_bytes(b"".join(frames))
    ran = run(capsys, "journal", "replay", journal)
    assert ran.status == 1
    assert f"sequence {entries[at].sequence}" in ran.out
    assert run(capsys, "journal", "replay", journal, "--json").json["holds"] is False


def test_serve_refuses_what_it_cannot_serve(tmp_path: Path, capsys: Capture) -> None:
    """A typo, a port out of range, an address that is not ours: one line, status 2."""
    pool = tmp_path / "pool.yaml"
    pool.write_text(POOL)
    assert "unknown key 'prot'" in refused(run(capsys, "serve", pool, "--set", "gateway.prot=1"))
    assert "gateway.port is 70000" in refused(run(capsys, "serve", pool, "--port", "70000"))
    with_journal = ["--journal", tmp_path / "j"]
    assert "cannot listen on" in refused(run(capsys, "serve", pool, "--host", "192.0.2.1", *with_journal))


def test_agents_are_served_and_the_live_journal_replays(tmp_path: Path, capsys: Capture) -> None:
    """emulate, serve, an OpenAI agent with `loadwise.program`, a verdict, then why and replay of what was written."""
    journal = tmp_path / "j"
    pool = tmp_path / "pool.yaml"
    with running("emulate", "--model", "small", "--model", "big-1.5b", "--scale", "50", "--json") as emulated:
        pool.write_text(
            POOL.replace("http://127.0.0.1:1/v1", emulated["urls"]["small"], 1).replace(
                "http://127.0.0.1:1/v1", emulated["urls"]["big-1.5b"]
            )
        )
        with running("serve", pool, "--port", "0", "--journal", journal, "--seed", "7", "--json") as served:
            assert served["models"] == ["small", "big-1.5b"]
            with openai.OpenAI(base_url=served["url"], api_key="none") as client:
                with loadwise.program(client, task="patch") as p:
                    p.client.chat.completions.create(model="auto", messages=[{"role": "user", "content": "Mend it"}])
                assert p.finish() is not None
                answer = p.verdict("pass", verifier="tests")
                assert answer["program"] == p.id
                assert answer["credited"] is True
                assert p.verdict("pass", verifier="tests") == answer
    why = run(capsys, "why", p.id, "--journal", journal, "--json").json
    assert why["verdicts"][0]["verifier"] == "tests"
    assert run(capsys, "journal", "replay", journal).status == 0
    header = json.loads(run(capsys, "journal", "cat", journal).out.splitlines()[0])["header"]
    assert header["seed"] == 7


def test_emulate_takes_the_engines_settings(capsys: Capture) -> None:
    """A wrong one is refused with the valid keys."""
    assert "valid keys" in refused(run(capsys, "emulate", "--model", "m", "--set", "slotz=3"))
    assert "slots is 0" in refused(run(capsys, "emulate", "--model", "m", "--set", "slots=0"))
    assert "differ" in refused(run(capsys, "emulate", "--model", "m", "--model", "m"))
    assert "finite" in refused(run(capsys, "emulate", "--model", "m", "--output-tokens", "nan"))


def test_demo_prints_one_object(tmp_path: Path, capsys: Capture) -> None:
    """A short demo, whose rows and gain are where outside checks read them, whose journal replays."""
    ran = run(capsys, "demo", "--n", "6", "--seed", "5", "--journal", tmp_path / "j", "--json")
    assert ran.status == 0
    said = ran.json
    assert {row["policy"] for row in said["rows"]} >= {"loadwise", "random", "mixing"}
    assert said["gain_pp"] is not None
    assert len(said["ci95"]) == 2
    assert run(capsys, "journal", "replay", tmp_path / "j" / "loadwise").status == 0


def test_columns_align() -> None:
    """Every column but the last is as wide as its widest cell."""
    assert columns([("a", "b"), ("ccc", "")]) == "a    b\nccc"


def test_plain_writes_defaults_out() -> None:
    """A reader of JSON need not know our defaults."""
    assert plain({"p": [Price()]}) == {"p": [{"input": 0.0, "output": 0.0, "cached_input": None}]}
