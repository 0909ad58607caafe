"""All that the API process knows of the base model: its words, where they end, and how a chat is written. Knows no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graftwork_engine.model.config import ModelConfig
from graftwork_platform.text.chat_template import ChatTemplate
from graftwork_platform.text.template_sandbox import TemplateSandbox
from graftwork_platform.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelText:
    """A base model's text side. ``vocab_size`` is the number of rows of its embedding: what ids it can be given.

    ``sandbox`` is where templates run; whoever is done with the model closes it.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    sandbox: TemplateSandbox
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_dir(cls, model_dir: Path) -> ModelText:
        """Read a Hugging Face folder; raises `TokenizerError`, and `UnsupportedModel` for a config that is not served.

        Generation ends at the ids that the folder's generation config (or config) names and at the tokenizer's own
        end-of-sequence token, which chat models often end their turn with.
        """
        tokenizer, sandbox = Tokenizer.from_dir(model_dir), TemplateSandbox()
        config = ModelConfig.from_dir(model_dir)
        own = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
        return cls(
            tokenizer=tokenizer,
            chat_template=ChatTemplate.from_dir(model_dir, tokenizer.special_tokens, sandbox),
            sandbox=sandbox,
            vocab_size=config.vocab_size,
            eos_token_ids=tuple(sorted({*config.eos_token_ids, *own})),
        )
