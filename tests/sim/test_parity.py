"""Law L7 in the simulator: what a scenario's stack did is what its journal says, and a replay does it again."""

from pathlib import Path

import msgspec
import pytest

from loadwise.journal.entry import make_header
from loadwise.journal.parity import replay
from loadwise.journal.store import JournalWriter
from loadwise.sim.scenario import load_scenario
from loadwise.sim.simulate import simulate

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "scenarios").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_simulated_journals_replay(path: Path, tmp_path: Path) -> None:
    """Every example's journal replays to the same commands, decisions and credits included."""
    scenario = load_scenario(path)
    scenario = msgspec.structs.replace(scenario, n_programs=min(scenario.n_programs or 80, 80))
    journal = JournalWriter(
        tmp_path / "run.journal", make_header(msgspec.to_builtins(scenario.config), seed=3, host="sim")
    )
    report = simulate(scenario, 3, journal=journal)
    journal.close()
    found = replay(tmp_path / "run.journal")
    assert found.holds, found.mismatch
    assert found.n_entries > 80
    assert found.n_decisions >= report.programs["finished"]
