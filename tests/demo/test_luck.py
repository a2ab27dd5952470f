"""Chance by name."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadwise.demo.luck import Luck


@given(st.lists(st.text(), max_size=4), st.integers(-(10**6), 10**6), st.integers(0, 10**6))
def test_a_draw_depends_on_its_names_only(names: list[str], low: int, span: int) -> None:
    """The same names give the same draws, within range, whatever was drawn under other names."""
    first, second = Luck(*names), Luck(*names)
    Luck("somebody", "else").unit()
    drawn = [first.integer(low, low + span) for _ in range(5)]
    assert drawn == [second.integer(low, low + span) for _ in range(5)]
    assert all(low <= value <= low + span for value in drawn)


def test_names_are_told_apart_by_their_borders() -> None:
    """('ab', 'c') and ('a', 'bc') are different names."""
    assert Luck("ab", "c").unit() != Luck("a", "bc").unit()


def test_the_sequence_is_pinned() -> None:
    """Draws are the same on every machine and Python: committed figures can be made again."""
    luck = Luck(7, "pinned")
    assert [luck.integer(0, 999) for _ in range(4)] == [84, 714, 971, 346]


def test_units_look_uniform() -> None:
    """Over 20,000 draws each tenth of [0, 1) holds a tenth, within five standard deviations."""
    luck = Luck("uniform")
    counts = [0] * 10
    for _ in range(20_000):
        counts[int(10 * luck.unit())] += 1
    assert all(abs(count - 2_000) < 5 * (20_000 * 0.09) ** 0.5 for count in counts)


@given(st.lists(st.integers(), max_size=30))
def test_shuffling_keeps_every_item(items: list[int]) -> None:
    """A shuffle is a permutation and leaves its argument alone."""
    before = list(items)
    assert sorted(Luck("shuffle", len(items)).shuffled(items)) == sorted(items)
    assert items == before
