"""Where an activated LoRA begins in a prompt. Knows no requests and no engine."""

from __future__ import annotations

from collections.abc import Sequence


def last_occurrence(ids: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Index of the first token of the last place where ``ids`` holds ``wanted``; None if it is nowhere, or ``wanted`` is nothing.

    Linear in both, whatever the numbers are (Knuth, Morris and Pratt).
    """
    borders = _borders(wanted)
    num_matched, found = 0, None
    for place, token_id in enumerate(ids):
        while num_matched and (num_matched == len(wanted) or wanted[num_matched] != token_id):
            num_matched = borders[num_matched - 1]
        if wanted and wanted[num_matched] == token_id:
            num_matched += 1
        if wanted and num_matched == len(wanted):
            found = place + 1 - len(wanted)
    return found


def _borders(wanted: Sequence[int]) -> list[int]:
    """Of each beginning of ``wanted``: the length of the longest one, shorter than it, that it also ends with."""
    borders = [0] * len(wanted)
    length = 0
    for place in range(1, len(wanted)):
        while length and wanted[length] != wanted[place]:
            length = borders[length - 1]
        if wanted[length] == wanted[place]:
            length += 1
        borders[place] = length
    return borders
