"""State check: the final state equals, or satisfies, the expected one (as τ²-bench judges a database).

Both are JSON. Objects are compared by key, numbers within tolerances, lists in order or as collections. The explanation
names the paths that differ. A comparison has a budget of steps, because matching two unordered lists of lists is not
linear.
"""

import json
from collections.abc import Iterator
from typing import Any, Literal

from loadwise.kernel.fact import Fact

from .case import Case
from .check import Finding
from .options import read_options, require_range, strict_json
from .spec import VerifierSpec
from .verifier import State, Step, abstained, failed, passed, shown

STEPS_MAX = 150_000
CHARACTERS_PER_STEP = 50
"""Writing an entry in one spelling, to find its like, costs as many steps as its length holds of these."""
DEPTH_MAX = 64
_DIFFERENCES_SHOWN = 10
_EXPECTED_NAMES = ("expected_state", "reference", "expected")
_FOUND_NAMES = ("state", "final_state")


class StateOptions(Fact, frozen=True, kw_only=True):
    """Options of kind `state`. Paths are written `orders.*.items`; `*` stands for any key or index."""

    mode: Literal["equal", "subset"] = "equal"
    """`subset`: the final state must hold all that is expected, and may hold more."""
    unordered: bool | tuple[str, ...] = False
    """Lists whose order does not count: all of them, or those at these paths."""
    ignore: tuple[str, ...] = ()
    """Paths that are not compared, such as times and generated names."""
    absolute: float = 0.0
    relative_ratio: float = 0.0
    reads: Literal["artefact", "answer"] = "artefact"
    """Where the final state stands: the artefact `state`, or the answer itself."""

    def __post_init__(self) -> None:
        require_range("absolute", self.absolute, 0.0, 1e300)
        require_range("relative_ratio", self.relative_ratio, 0.0, 1.0)


class StateCheck:
    """Passes where the final state is as expected."""

    kind = "state"
    version = "1"

    def __init__(self, spec: VerifierSpec) -> None:
        self.options = read_options(spec, StateOptions)

    def begin(self, case: Case) -> Step:
        """Compare at once."""
        expected = case.given(*_EXPECTED_NAMES)
        if expected is None:
            return abstained(self, "there is no expected state")
        try:
            wanted = _load(expected)
        except ValueError as error:
            return abstained(self, f"the expected state cannot be read: {error}")
        text = case.answer if self.options.reads == "answer" else _artefact(case)
        if text is None:
            return failed(self, f"the program left no artefact {_FOUND_NAMES[0]!r}")
        try:
            found = _load(text)
        except ValueError as error:
            return failed(self, f"the final state cannot be read: {error}")
        if _spelled(found) == _spelled(wanted):
            return passed(self, "the final state is as expected")
        comparison = _Comparison(self.options)
        try:
            comparison.compare(found, wanted, ())
        except _TooLarge:
            return abstained(self, f"comparing the states takes more than {STEPS_MAX} steps")
        return self._verdict(comparison.differences, comparison.n_differences)

    def resume(self, case: Case, state: State, finding: Finding) -> Step:
        """Never asked: it wants no check."""
        return abstained(self, "no check was asked for")

    def known_pass(self) -> Case | None:
        """The expected state, keys in another order."""
        return self._known('{"seats":2,"paid":true}')

    def known_fail(self) -> Case | None:
        """A list where an object is expected, which no tolerance and no ignored path allows."""
        return self._known('[{"seats":2,"paid":true}]')

    def _known(self, found: str) -> Case:
        expected = '{"paid": true, "seats": 2}'
        return Case(answer=found, artefacts={"state": found}, references={"expected_state": expected})

    def _verdict(self, differences: list[str], n_differences: int) -> Step:
        if not n_differences:
            return passed(self, "the final state is as expected")
        more = f" and {n_differences - 1} more" if n_differences > 1 else ""
        evidence = {f"difference {number}": text for number, text in enumerate(differences, 1)}
        return failed(self, differences[0] + more, evidence=evidence)


class _TooLarge(Exception):
    pass


_Path = tuple[str, ...]


class _Comparison:
    """One comparison: its differences so far, and the steps that are left."""

    def __init__(self, options: StateOptions) -> None:
        self.options = options
        self.differences: list[str] = []
        self.n_differences = 0
        self._steps = STEPS_MAX
        self._ignore = [tuple(path.split(".")) for path in options.ignore]
        unordered = options.unordered
        self._unordered = [] if isinstance(unordered, bool) else [tuple(path.split(".")) for path in unordered]

    def compare(self, found: Any, wanted: Any, path: _Path) -> bool:
        """Note where the two differ; tell whether they are the same."""
        before = self.n_differences
        for text in self._differ(found, wanted, path):
            self.n_differences += 1
            if len(self.differences) < _DIFFERENCES_SHOWN:
                self.differences.append(text)
        return self.n_differences == before

    def _differ(self, found: Any, wanted: Any, path: _Path) -> Iterator[str]:
        self._spend(1)
        if _matches(path, self._ignore):
            return
        if isinstance(wanted, dict) and isinstance(found, dict):
            yield from self._differ_mapping(found, wanted, path)
        elif isinstance(wanted, list) and isinstance(found, list):
            if self.options.unordered is True or _matches(path, self._unordered):
                yield from self._differ_collection(found, wanted, path)
            else:
                yield from self._differ_list(found, wanted, path)
        elif not self._same_leaf(found, wanted):
            yield f"{_written(path)} is {_leaf(found)}, expected {_leaf(wanted)}"

    def _differ_mapping(self, found: dict[str, Any], wanted: dict[str, Any], path: _Path) -> Iterator[str]:
        for key in wanted:
            here = (*path, key)
            if key in found:
                yield from self._differ(found[key], wanted[key], here)
            elif not _matches(here, self._ignore):
                yield f"{_written(here)} is missing"
        if self.options.mode == "equal":
            for key in found:
                if key not in wanted and not _matches((*path, key), self._ignore):
                    yield f"{_written((*path, key))} is not expected"

    def _differ_list(self, found: list[Any], wanted: list[Any], path: _Path) -> Iterator[str]:
        if len(found) < len(wanted) or (self.options.mode == "equal" and len(found) > len(wanted)):
            yield f"{_written(path)} has {len(found)} entries, expected {len(wanted)}"
            return
        for index, (mine, theirs) in enumerate(zip(found, wanted, strict=False)):
            yield from self._differ(mine, theirs, (*path, str(index)))

    def _differ_collection(self, found: list[Any], wanted: list[Any], path: _Path) -> Iterator[str]:
        """Match each expected entry with one found entry: a largest matching, as equality here is not transitive."""
        if len(found) < len(wanted) or (self.options.mode == "equal" and len(found) > len(wanted)):
            yield f"{_written(path)} has {len(found)} entries, expected {len(wanted)}"
            return
        if not self.options.absolute and not self.options.relative_ratio:
            found, wanted = self._without_twins(found, wanted)
        fits = [self._fitting(found, item, (*path, "*")) for item in wanted]
        owner: dict[int, int] = {}
        for number, item in enumerate(wanted):
            if not self._placed(number, fits, owner):
                yield f"{_written(path)} holds no entry like {_leaf(item)}, or too few of them"
                return

    def _without_twins(self, found: list[Any], wanted: list[Any]) -> tuple[list[Any], list[Any]]:
        """Both without the entries that are spelled the same: they may be matched with one another.

        Only without tolerances, where fitting is transitive: then no matching is lost.
        """
        spelled = [_spelled(item) for item in found]
        self._spend(sum(len(text) for text in spelled) // CHARACTERS_PER_STEP)
        places: dict[str, list[int]] = {}
        for index, text in enumerate(spelled):
            places.setdefault(text, []).append(index)
        left_wanted = []
        gone: set[int] = set()
        for item in wanted:
            twins = places.get(_spelled(item))
            if twins:
                gone.add(twins.pop())
            else:
                left_wanted.append(item)
        return [item for index, item in enumerate(found) if index not in gone], left_wanted

    def _fitting(self, found: list[Any], item: Any, path: _Path) -> list[int]:
        return [index for index, mine in enumerate(found) if next(self._differ(mine, item, path), None) is None]

    def _spend(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise _TooLarge

    def _placed(self, start: int, fits: list[list[int]], owner: dict[int, int]) -> bool:
        """Find a place for one entry, moving others on where needed (breadth first, so without deep recursion)."""
        came_from: dict[int, int] = {}
        queue = [start]
        for number in queue:
            for place in fits[number]:
                self._spend(1)
                if place in came_from:
                    continue
                came_from[place] = number
                if place not in owner:
                    self._move(place, start, came_from, owner)
                    return True
                queue.append(owner[place])
        return False

    def _move(self, place: int, start: int, came_from: dict[int, int], owner: dict[int, int]) -> None:
        while True:
            number = came_from[place]
            before = next((where for where, who in owner.items() if who == number), None)
            owner[place] = number
            if number == start or before is None:
                return
            place = before

    def _same_leaf(self, found: Any, wanted: Any) -> bool:
        if isinstance(found, bool) or isinstance(wanted, bool):
            return found is wanted
        if isinstance(found, int | float) and isinstance(wanted, int | float):
            if found == wanted:
                return True
            try:
                apart, size = abs(found - wanted), abs(wanted)
                return apart <= max(self.options.absolute, self.options.relative_ratio * size)
            except OverflowError:  # an integer beyond the floats
                return False
        return type(found) is type(wanted) and bool(found == wanted)


def _spelled(value: Any) -> str:
    """JSON in one spelling: equal texts are equal values, though not the other way round (1 and 1.0)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _load(text: str) -> Any:
    return strict_json(text, DEPTH_MAX)


def _artefact(case: Case) -> str | None:
    return next((case.artefacts[name] for name in _FOUND_NAMES if name in case.artefacts), None)


def _matches(path: _Path, patterns: list[_Path]) -> bool:
    return any(
        len(pattern) == len(path) and all(part in ("*", key) for part, key in zip(pattern, path, strict=True))
        for pattern in patterns
    )


def _written(path: _Path) -> str:
    text = ".".join(path) or "the state"
    return text if len(text) <= 120 else text[:120] + "…"


def _leaf(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object of {len(value)} keys"
    if isinstance(value, list):
        return f"a list of {len(value)} entries"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    return shown(value) if isinstance(value, str) else repr(value)
