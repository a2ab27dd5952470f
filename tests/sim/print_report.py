"""Run one scenario under its pool's stack and print its report and a digest of its journal (a child of a test)."""

import hashlib
import sys

import msgspec

from loadwise.kernel.commands import Command
from loadwise.kernel.events import Event
from loadwise.sim.scenario import load_scenario
from loadwise.sim.simulate import simulate


class Digest:
    """A journal of which only the fingerprint is kept."""

    def __init__(self) -> None:
        self.sha = hashlib.sha256()

    def append(self, event: Event, commands: list[Command]) -> None:
        self.sha.update(msgspec.json.encode((event, commands)))

    def flush(self) -> None:
        return None


if __name__ == "__main__":
    scenario = load_scenario(sys.argv[1])
    journal = Digest()
    report = simulate(scenario, int(sys.argv[2]), journal=journal)
    sys.stdout.write(report.to_json().decode() + journal.sha.hexdigest())
