"""Stop strings found in a text as it grows, whatever pieces it comes in. Knows no tokens.

The text ends before the first stop string that is complete: of all occurrences the one that ends first counts, and of those that
end at the same character the longest. That rule looks at characters alone, so how a text was cut into pieces changes nothing, and
a stop string is acted on the moment it is complete. Each stop string is followed by the automaton of Knuth, Morris and Pratt
("Fast pattern matching in strings", 1977), whose state is the length of the longest part of the text's end that it begins with:
exactly what must be held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Follows one text. After a match it must not be used any more."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """``stops``: not empty ones. ``include``: the stop string that ends the text is a part of it."""
        self._automata = [_Automaton(stop) for stop in stops]
        self._first_characters = tuple({stop[0] for stop in stops})
        self._include = include
        self._held = ""
        self.matched = False

    def push(self, piece: str, *, counts: bool = True) -> str:
        """Take the next piece; the text that has become certain. A stop string that ends in a piece that does not count is text."""
        if not self._held and not any(first in piece for first in self._first_characters):
            return piece  # none has begun, and none begins: so it is with most pieces
        text = self._held + piece
        for place in range(len(self._held), len(text)):
            char = text[place]
            complete = 0
            for automaton in self._automata:
                if automaton.step(char):
                    complete = max(complete, len(automaton.stop))
            if complete and counts:
                self.matched = True
                self._held = ""
                return text[: place + 1 if self._include else place + 1 - complete]
        certain = len(text) - max(automaton.state for automaton in self._automata)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """The text has ended without a stop string: what was held back."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        # For each length, that of the longest proper beginning of `stop` that its first so many characters end with.
        self._fallback = [0] * (len(stop) + 1)
        length = 0
        for place in range(1, len(stop)):
            while length and stop[place] != stop[length]:
                length = self._fallback[length]
            length += stop[place] == stop[length]
            self._fallback[place + 1] = length

    def step(self, char: str) -> bool:
        """Take the next character; True if it completes the stop string, which goes on as its own longest beginning."""
        stop, state = self.stop, self.state
        while state and stop[state] != char:
            state = self._fallback[state]
        state += stop[state] == char
        complete = state == len(stop)
        self.state = self._fallback[state] if complete else state
        return complete
