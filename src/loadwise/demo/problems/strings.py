"""Strings: pick, reverse, count, shift and combine letters of made-up words."""

from __future__ import annotations

from collections.abc import Callable

from loadwise.demo.luck import Luck
from loadwise.demo.task import Problem

_CONSONANTS = "bcdfghklmnprstvw"
_VOWELS = "aeiou"


def _word(luck: Luck, n_syllables: int) -> str:
    return "".join(luck.pick(_CONSONANTS) + luck.pick(_VOWELS) for _ in range(n_syllables))


def _text(statement: str, answer: str) -> Problem:
    return Problem(statement=statement, answer=answer, kind="text")


def end_letter(luck: Luck) -> Problem:
    """Level 1: a word's first or last letter."""
    word = _word(luck, 3) + luck.pick(_CONSONANTS)
    end, at = luck.pick((("first", 0), ("last", -1)))
    return _text(f'What is the {end} letter of the word "{word}"?', word[at])


def reverse(luck: Luck) -> Problem:
    """Level 2: a short word backwards."""
    word = _word(luck, 2) + luck.pick(_CONSONANTS)
    return _text(f'Write the word "{word}" backwards.', word[::-1])


def count_letter(luck: Luck) -> Problem:
    """Level 3: how often a letter occurs in a phrase."""
    words = [_word(luck, luck.integer(2, 4)) for _ in range(5)]
    letter = luck.pick(words[luck.integer(0, 4)])
    phrase = " ".join(words)
    return Problem(
        statement=f'How many times does the letter "{letter}" occur in "{phrase}"?',
        answer=str(phrase.count(letter)),
        kind="number",
        units=("times", "time"),
    )


def shift(luck: Luck) -> Problem:
    """Level 4: every letter moved k places along the alphabet, z followed by a."""
    word, k = _word(luck, 3), luck.integer(2, 9)
    moved = "".join(chr((ord(letter) - ord("a") + k) % 26 + ord("a")) for letter in word)
    return _text(
        f'Replace every letter of "{word}" by the letter {k} places later in the alphabet (after z comes a). '
        "What is the result?",
        moved,
    )


def combine(luck: Luck) -> Problem:
    """Level 5: drop vowels, reverse each word, sort, join."""
    words = [_word(luck, 3) for _ in range(4)]
    bare = ["".join(letter for letter in word if letter not in _VOWELS)[::-1] for word in words]
    listed = ", ".join(words)
    return _text(
        f"Take the words {listed}. Remove the vowels (a, e, i, o, u) from each word, write what is left of "
        "each word backwards, sort the results alphabetically and join them with hyphens. What is the "
        "result?",
        "-".join(sorted(bare)),
    )


PROBLEMS: tuple[Callable[[Luck], Problem], ...] = (end_letter, reverse, count_letter, shift, combine)
