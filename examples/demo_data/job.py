"""What a demo job is: its instruction, its examples and its score. Knows no particular job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Example:
    """One customer message and the answer the job asks for."""

    user: str
    answer: str


class Job(Protocol):
    """One job an adapter learns. Base and adapter get the same messages, so the instruction states the whole task in words."""

    @property
    def name(self) -> str:
        """The adapter's name."""

    @property
    def instruction(self) -> str:
        """The system message of every prompt of this job."""

    @property
    def rule(self) -> str:
        """What counts as a success, in words."""

    @property
    def max_tokens(self) -> int:
        """Enough output tokens for every right answer."""

    def draw(self, rng: random.Random) -> Example:
        """Draw one training example."""

    def held_out(self) -> list[Example]:
        """The prompts for measuring: from templates and words that `draw` never uses, always the same."""

    def is_success(self, example: Example, output: str) -> bool:
        """Whether ``output`` does the job for ``example``."""


def chat(job: Job, example: Example) -> list[dict[str, str]]:
    """The messages of a prompt in chat form."""
    return [{"role": "system", "content": job.instruction}, {"role": "user", "content": example.user}]


def pick(rng: random.Random, words: Sequence[str]) -> str:
    """Draw one word."""
    return words[rng.randrange(len(words))]
