"""Texts that no customer wrote, for comparing models with. Knows no models."""

from __future__ import annotations

from graftwork_platform.text.tokenizer import Tokenizer

_TEXTS = (
    "The library opens at nine in the morning. Visitors are asked to leave their bags at the entrance, and",
    "To change the filter, first switch the machine off and wait until it has cooled down. Then",
    "Question: What is the difference between weather and climate?\nAnswer:",
    'def mean(values):\n    """The arithmetic mean of a list of numbers."""\n',
)


def neutral_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """A few texts of different kinds, as a model with this tokenizer is given them."""
    return [tokenizer.encode(text) for text in _TEXTS]
