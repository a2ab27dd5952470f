"""The simulator's bench: its programs are valid, its figures are those that outside checks read."""

from bench import sim


def test_its_cases_run_and_its_keys_are_those_that_are_read() -> None:
    """Small versions of all four cases run whole on the plain core, and each promised key has a positive figure."""
    small = {name: case._replace(n_programs=6, n_agents=4) for name, case in sim.CASES.items()}
    values = {}
    for name, case in small.items():
        values[f"calls_per_s.{name}"], theirs = sim.measure(case, None, 1, is_compiled=False)
        assert theirs is None
    values["calls_per_s.python"], _ = sim.measure(sim.PLAIN._replace(n_programs=6), None, 1, is_compiled=False)
    assert set(values) == {
        "calls_per_s.engines8_programs128",
        "calls_per_s.thrash",
        "calls_per_s.large_batch",
        "calls_per_s.python",
    }
    assert min(values.values()) > 0


def test_a_missed_bound_is_said() -> None:
    """A check holds exactly if its figure reaches its bound."""
    found = {
        c["key"]: c["holds"]
        for c in sim.checks(
            {"calls_per_s.python": 9_999.0, "speedup.thrash": 1.3}
            | dict.fromkeys(["calls_per_s.engines8_programs128"], 1e6)
        )
    }
    assert found["calls_per_s.python"] is False
    assert found["speedup.thrash"] is True


def test_without_the_prototype_there_is_no_peer(tmp_path: object) -> None:
    """A missing file is no error: the figures stand alone."""
    assert sim.load_prototype(sim.Path(str(tmp_path)) / "nothing.py") is None
