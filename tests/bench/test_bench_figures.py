"""From samples to figures: medians over runs, pairs within a run, and bounds that can fail."""

from __future__ import annotations

import json

import pytest

from bench import result
from bench.answers import Answer, Verified
from bench.figures import Figures, Samples, check, summarise

ANSWER = Answer(text="a", chunks=40, ended=True)
WHOLE = Verified(plain=ANSWER, stream=ANSWER, plain_bytes=100, stream_bytes=1000, plain_s=0.1, stream_s=0.1)
VERIFIED = {"loadwise": WHOLE, "smg": WHOLE, "other": WHOLE}


def samples(ours_rps: list[float | None], smg_rps: list[float | None]) -> Samples:
    """Three targets' runs; None is a run that did not count."""
    found = Samples()
    for run, (ours, smg) in enumerate(zip(ours_rps, smg_rps, strict=True)):
        for target, base_ms in (("engine", 0.1), ("loadwise", 0.4), ("smg", 0.9)):
            found.put(target, "p50_ms", run, base_ms + run)
            found.put(target, "p99_ms", run, base_ms * 10 + run)
        for kind in ("plain", "stream"):
            found.put("engine", f"rps.{kind}", run, 1000.0)
            if ours is not None:
                found.put("loadwise", f"rps.{kind}", run, ours)
            if smg is not None:
                found.put("smg", f"rps.{kind}", run, smg)
    return found


def holds(figures: Figures) -> dict[str, object]:
    """Which checks hold."""
    return {str(entry["key"]): entry["holds"] for entry in figures["checks"]}


def test_added_latency_is_the_difference_within_each_run() -> None:
    """A machine that slows down from run to run slows engine and gateway alike, and the difference stays."""
    figures = summarise(samples([300.0] * 3, [100.0] * 3), "loadwise", ["smg"], VERIFIED, 40)
    assert round(figures["values"]["added_p50_ms"], 9) == 0.3
    assert round(figures["values"]["added_p99_ms"], 9) == 3.0
    assert figures["values"]["direct_p50_ms"] == 1.1
    assert round(figures["peers"]["smg"]["added_p50_ms"], 9) == 0.8


def test_a_ratio_is_paired_within_a_run_and_takes_only_runs_that_count() -> None:
    """A peer's good run is not compared with our run of another time."""
    figures = summarise(samples([300.0, 900.0, None], [100.0, None, 100.0]), "loadwise", ["smg"], VERIFIED, 40)
    assert figures["values"]["ratio.smg.plain"] == 3.0
    assert figures["values"]["rps.plain"] == 600.0
    assert figures["ci95"]["rps.plain"] == [300.0, 900.0]
    assert "ratio.smg.plain" not in figures["ci95"], "one pair has no range"


def test_every_bound_of_a_good_run_holds() -> None:
    """The bounds are those that were asked for, for measured peers only."""
    figures = summarise(samples([150.0] * 3, [100.0] * 3), "loadwise", ["smg"], VERIFIED, 40)
    assert holds(figures) == {
        "added_p50_ms": True,
        "added_p99_ms": True,
        "stream_chunks": True,
        "ratio.smg.plain": True,
        "ratio.smg.stream": True,
    }


def test_bounds_that_are_missed_do_not_hold() -> None:
    """A rate just under the bound fails, and so does a lost chunk."""
    figures = summarise(samples([149.0] * 3, [100.0] * 3), "loadwise", ["smg"], VERIFIED, 41)
    missed = holds(figures)
    assert not missed["ratio.smg.plain"] and not missed["ratio.smg.stream"] and not missed["stream_chunks"]


def test_a_gateway_without_an_error_free_run_has_rate_zero_and_holds_nothing() -> None:
    """Errors may not make a figure vanish, and its bound with it."""
    figures = summarise(samples([None] * 3, [100.0] * 3), "loadwise", ["smg"], VERIFIED, 40)
    assert figures["values"]["rps.plain"] == 0.0
    assert not holds(figures)["ratio.smg.plain"]


def test_peers_alone_have_no_values_of_ours_and_no_checks() -> None:
    """Where our gateway was left out, nothing is said of it."""
    figures = summarise(samples([None] * 3, [100.0] * 3), None, ["smg"], VERIFIED, 40)
    assert figures["checks"] == []
    assert "rps.plain" not in figures["values"]
    assert figures["peers"]["smg"]["rps.plain"] == 100.0


def test_a_peer_has_the_same_keys_as_we_have() -> None:
    """What is read of us can be read of each peer."""
    figures = summarise(samples([300.0] * 3, [100.0] * 3), "loadwise", ["smg"], VERIFIED, 40)
    shared = {"added_p50_ms", "added_p99_ms", "rps.plain", "rps.stream"}
    assert shared <= set(figures["values"]) and shared <= set(figures["peers"]["smg"])


def test_counted_errors_add_up_and_none_leave_no_trace() -> None:
    """A report without errors has an empty table of them."""
    found = Samples()
    found.count("smg", "plain", 0)
    assert found.errors == {}
    found.count("smg", "plain", 2)
    found.count("smg", "plain", 3)
    assert found.errors == {"smg": {"plain": 5}}


def test_what_was_not_measured_does_not_hold() -> None:
    """A missing value is a failed check, at the bound is a held one."""
    assert not check("k", "<=", 1.0, None)["holds"]
    assert check("k", "<=", 1.0, 1.0)["holds"] and not check("k", "<=", 1.0, 1.1)["holds"]
    assert check("k", ">=", 1.0, 1.0)["holds"] and not check("k", ">=", 1.0, 0.9)["holds"]


def report() -> dict[str, object]:
    """A report with something in each part."""
    figures = summarise(samples([149.0] * 3, [100.0] * 3), "loadwise", ["smg"], VERIFIED, 40)
    return result.build("gateway", seeds=[7], config={"load_average": 0.1}, **figures)


def test_a_report_is_one_json_object_with_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    """What outside checks parse is all there is on stdout."""
    result.show(report(), as_json=True)
    printed = json.loads(capsys.readouterr().out)
    expected = {"name", "version", "commit", "machine", "seeds", "config", "values", "ci95", "peers", "checks"}
    assert set(printed) == expected
    assert printed["seeds"] == [7]
    assert printed["machine"]["cores"] >= 1
    assert {"key": "added_p50_ms", "op": "<=", "bound": 0.5, "holds": True} in printed["checks"]


def test_a_report_for_a_reader_shows_each_peer_and_each_missed_bound(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures stand beside the peers', and a bound that was missed is not hidden among those that hold."""
    result.show(report(), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["gateway", "smg"]
    assert ["rps.plain", "149.000", "100.000"] in [line.split() for line in lines]
    assert "MISSED ratio.smg.plain >= 1.5" in lines
    assert "holds  added_p50_ms <= 0.5" in lines
