"""Stop strings: whatever the pieces, the text ends before the stop string that is complete first, and nothing of it is shown."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graftwork_platform.text.stop import StopMatcher

FEW_LETTERS = st.text(st.sampled_from("ab☃🎉"), max_size=40)
STOPS = st.lists(st.text(st.sampled_from("ab☃🎉"), min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str], *, include: bool = False, free: int = 0) -> tuple[str, bool]:
    """The rule itself: the first end of a stop string behind the ``free`` first characters, then the longest that ends there."""
    for end in range(free + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end if include else end - max(map(len, complete))], True
    return text, False


def follow(pieces: list[str], stops: list[str], *, include: bool = False, num_free: int = 0) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops, include=include)
    shown = []
    for place, piece in enumerate(pieces):
        shown.append(matcher.push(piece, counts=place >= num_free))
        if matcher.matched:
            return shown, True
    return [*shown, matcher.flush()], False


def split(text: str, cuts: list[int]) -> list[str]:
    places = sorted({place for place in cuts if 0 < place < len(text)})
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@settings(max_examples=200, deadline=None)
@given(FEW_LETTERS, STOPS, st.lists(st.integers(0, 40), max_size=40), st.booleans())
def test_pieces_change_nothing(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    shown, matched = follow(split(text, cuts), stops, include=include)
    assert ("".join(shown), matched) == cut(text, stops, include=include)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text(st.sampled_from("ab"), max_size=3), max_size=15),
    st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=4), max_size=3),
    st.integers(0, 6),
)
@example(["aa", "a"], ["aa"], 1)
def test_what_ends_in_a_piece_that_does_not_count_is_text(pieces: list[str], stops: list[str], num_free: int) -> None:
    shown, matched = follow(pieces, stops, num_free=num_free)
    free = len("".join(pieces[:num_free]))
    assert ("".join(shown), matched) == cut("".join(pieces), stops, free=free)


@settings(max_examples=200, deadline=None)
@given(FEW_LETTERS, st.lists(st.text(st.sampled_from("ab☃🎉"), min_size=1, max_size=5), min_size=1, max_size=4))
def test_no_more_is_held_back_than_could_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for place, char in enumerate(text):
        shown += matcher.push(char)
        if matcher.matched:
            break
        seen = text[: place + 1]
        beginnings = [seen[start:] for start in range(len(seen)) if any(stop.startswith(seen[start:]) for stop in stops)]
        assert shown == seen.removesuffix(max(beginnings, key=len, default=""))


@pytest.mark.parametrize(
    ("text", "stops", "left"),
    [
        ("one\n\ntwo", ["\n\n"], "one"),
        ("STOP", ["STOP"], ""),
        ("x", ["x"], ""),
        ("STSTOP", ["STOP"], "ST"),
        ("aabaaab", ["aaab"], "aab"),
        ("abcd", ["cd", "bcd"], "a"),
        ("abcd", ["abcd", "bc"], "a"),
        ("abab", ["bab", "ab"], ""),
        ("ST", ["STOP"], "ST"),
        ("STO STO", ["STOP"], "STO STO"),
        ("né☃e", ["☃"], "né"),
        ("x" * 50 + "END", ["END"], "x" * 50),
    ],
)
def test_examples(text: str, stops: list[str], left: str) -> None:
    for pieces in ([text], list(text), [text[:3], text[3:]]):
        shown, _ = follow(pieces, stops)
        assert "".join(shown) == left
        for count in range(1, len(shown)):
            assert left.startswith("".join(shown[:count]))
