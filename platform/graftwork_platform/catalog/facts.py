"""What a published version is beside its bytes and its row type, and the form in which the database keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from graftwork_adapters.publish_job import AdapterTraits


@dataclass(frozen=True, slots=True)
class OwnText:
    """Which of the text files an adapter brought are in force in place of the base's.

    ``eos_token_ids``: what its generation ends at; None: what the base's does.
    """

    tokenizer: bool = False
    chat_template: bool = False
    eos_token_ids: tuple[int, ...] | None = None

    @property
    def needs_files(self) -> bool:
        """True if files of the upload must be read to serve it."""
        return self.tokenizer or self.chat_template


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """All of it. The default is a plain LoRA without text files."""

    traits: AdapterTraits = field(default_factory=AdapterTraits)
    text: OwnText = field(default_factory=OwnText)


def facts_to_json(facts: VersionFacts) -> dict[str, object]:
    """The form in which the database keeps them."""
    found: dict[str, object] = msgspec.to_builtins(facts)
    return found


def facts_from_json(kept: dict[str, object]) -> VersionFacts:
    """What `facts_to_json` was given."""
    return msgspec.convert(kept, VersionFacts)
