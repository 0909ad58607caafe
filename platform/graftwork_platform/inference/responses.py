"""OpenAI's answers as they go over the wire, field for field. Knows no engine.

Fields that OpenAI lacks (``token_ids``, ``prompt_token_ids``: vLLM's names) are left out unless they were asked for.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """How much of the prompt was found computed."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """What a request used. ``adapter_active`` is there for an activated LoRA: false where a prompt lacks what calls it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    adapter_active: bool | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    """A token with its natural-log probability; ``bytes`` are exact where ``token`` is a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A drawn token, and the most probable ones at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """One `TokenLogprob` per token, each encoded by itself: all at once would hold the interpreter's lock for as long."""

    content: list[msgspec.Raw]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Four lists of one entry per token; ``text_offset`` counts characters from the start of the output.

    ``top_logprobs`` holds texts with their log-probabilities, encoded by themselves as in `ChatLogprobs`.
    Nothing comes before the first token of a prompt that is repeated, so it has no log-probabilities.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[msgspec.Raw | None]
    text_offset: list[int]


class ChatMessage(msgspec.Struct, frozen=True):
    """What the assistant says."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One choice of a chat completion."""

    message: ChatMessage
    finish_reason: FinishReason
    index: int
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """Answer of ``POST /v1/chat/completions``."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """What a chunk adds to one choice."""

    delta: ChatDelta
    index: int
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    """A frame of a streamed chat completion; ``usage`` is null on all but the last, and absent unless asked for."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True):
    """One choice of a text completion, or what a chunk adds to it."""

    text: str
    index: int
    finish_reason: FinishReason | None = None
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True):
    """Answer of ``POST /v1/completions``, and each frame of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


class Model(msgspec.Struct, frozen=True):
    """A line of the model list. ``tokenizer`` of an adapter: its own, or the base's, once that is known."""

    id: str
    created: int
    owned_by: str
    object: Literal["model"] = "model"
    parent: str | None = None
    max_model_len: int | None = None
    tokenizer: Literal["base", "own"] | UnsetType = UNSET


class ModelList(msgspec.Struct, frozen=True):
    """Answer of ``GET /v1/models``."""

    data: list[Model]
    object: Literal["list"] = "list"


class Tokens(msgspec.Struct, frozen=True):
    """Answer of ``POST /tokenize``."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Text(msgspec.Struct, frozen=True):
    """Answer of ``POST /detokenize``."""

    prompt: str
