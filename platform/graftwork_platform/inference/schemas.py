"""What a client may ask for: the bodies of the inference endpoints, parsed and checked. Knows no models and no tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from graftwork_platform.errors import BadRequest
from graftwork_platform.inference.messages import parse_messages
from graftwork_platform.inference.parsing import convert, parse_object
from graftwork_platform.inference.unserved import (
    UNSERVED_CHAT,
    UNSERVED_COMPLETION,
    UNSERVED_STREAM_OPTIONS,
    UNSERVED_TOKENIZE,
    refuse_unserved,
)
from graftwork_platform.text.chat_template import Message

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 128
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIAS = 1024
MAX_N = 128
MAX_CHOICES = 1024
"""Of one request: prompts times ``n``."""

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for text completions; a chat completion may go on to the end of the context."""

_INT64_MIN, _UINT64_MAX = -(1 << 63), (1 << 64) - 1

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_TokenId = Annotated[int, msgspec.Meta(ge=0)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]


class StreamOptions(msgspec.Struct, frozen=True):
    """``stream_options``."""

    include_usage: bool | None = False


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints share. None: not given.

    ``stop`` is as `_parse_stop` returns it. ``repetition_penalty`` may be anything above zero elsewhere; beyond the bounds here
    single-precision logits overflow or vanish.
    """

    model: Annotated[str, msgspec.Meta(min_length=1)]
    max_tokens: _Count | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_N)] = 1
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1)] = 0  # -1 and 0 switch it off
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100)] = 1.0
    logit_bias: dict[str, _Bias] = {}
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Annotated[tuple[_TokenId, ...], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    min_tokens: _Count = 0
    ignore_eos: bool = False
    return_token_ids: bool = False
    user: str | None = None

    @property
    def bias_by_id(self) -> dict[int, float]:
        """``logit_bias`` with its keys as token ids; those that ask for nothing are left out."""
        return {int(key): value for key, value in self.logit_bias.items() if value != 0}


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``; ``messages`` as `parse_messages` returns them."""

    messages: list[Message]
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """Body of ``POST /v1/completions``; ``max_tokens`` 0 needs ``echo``. ``prompts`` stands for ``prompt`` in all its forms."""

    prompts: tuple[str | list[int], ...] = ()
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False
    best_of: int | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``POST /tokenize``: either a ``prompt`` or ``messages``. ``add_special_tokens`` is true by default for a prompt."""

    model: Annotated[str, msgspec.Meta(min_length=1)]
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``POST /detokenize``."""

    model: Annotated[str, msgspec.Meta(min_length=1)]
    tokens: list[_TokenId]


def parse_chat(body: bytes) -> ChatRequest:
    """A chat completion's body; raises `BadRequest` naming the field."""
    fields = parse_object(body)
    refuse_unserved(fields, ChatRequest.__struct_fields__, UNSERVED_CHAT)
    fields["stop"] = _parse_stop(fields.get("stop"))
    request = convert(fields, ChatRequest)
    _check_shared(fields, request)
    if request.top_logprobs and not request.logprobs:
        raise BadRequest("`top_logprobs` needs `logprobs: true`.", param="top_logprobs")
    return msgspec.structs.replace(request, messages=parse_messages(request.messages))


def parse_completion(body: bytes) -> CompletionRequest:
    """A text completion's body; raises `BadRequest` naming the field."""
    fields = parse_object(body)
    refuse_unserved(fields, _COMPLETION_FIELDS, UNSERVED_COMPLETION)
    fields["stop"] = _parse_stop(fields.get("stop"))
    prompts = _parse_prompts(fields.pop("prompt", None))
    request = msgspec.structs.replace(convert(fields, CompletionRequest), prompts=prompts)
    _check_shared(fields, request)
    if request.max_tokens == 0 and not request.echo:
        raise BadRequest("`max_tokens` must be at least 1, or 0 with `echo: true`.", param="max_tokens")
    if request.best_of not in (None, request.n):
        raise BadRequest(
            "`best_of` is not supported by this server (only the value of `n`).", param="best_of", code="unsupported_parameter"
        )
    if len(request.prompts) * request.n > MAX_CHOICES:
        raise BadRequest(
            f"`prompt`: {len(request.prompts)} prompts with `n` {request.n} are more than {MAX_CHOICES} choices.", param="prompt"
        )
    return request


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """A body of ``/tokenize``; raises `BadRequest` naming the field."""
    fields = parse_object(body)
    refuse_unserved(fields, TokenizeRequest.__struct_fields__, UNSERVED_TOKENIZE)
    request = convert(fields, TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        raise BadRequest("Give either `prompt` or `messages`.", param="prompt")
    if request.messages is None:
        return request
    return msgspec.structs.replace(request, messages=parse_messages(request.messages))


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """A body of ``/detokenize``; raises `BadRequest` naming the field."""
    fields = parse_object(body)
    refuse_unserved(fields, DetokenizeRequest.__struct_fields__, {})
    return convert(fields, DetokenizeRequest)


_COMPLETION_FIELDS = frozenset({"prompt", *CompletionRequest.__struct_fields__} - {"prompts"})


class _Texts(msgspec.Struct):
    prompt: list[str]


class _Ids(msgspec.Struct):
    prompt: list[_TokenId]


class _IdLists(msgspec.Struct):
    prompt: list[list[_TokenId]]


def _parse_prompts(prompt: object) -> tuple[str | list[int], ...]:
    """Every prompt of a request; raises `BadRequest`."""
    if prompt is None:
        raise BadRequest("Missing required parameter: `prompt`.", param="prompt")
    if isinstance(prompt, str):
        return (prompt,)
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if isinstance(first, str):
        return tuple(convert({"prompt": prompt}, _Texts).prompt)
    if isinstance(first, list):
        return tuple(convert({"prompt": prompt}, _IdLists).prompt)
    return (convert({"prompt": prompt}, _Ids).prompt,)


def _parse_stop(stop: object) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise BadRequest("`stop` must be a string or a list of strings.", param="stop")
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"`stop` may hold at most {MAX_STOPS} strings.", param="stop")
    if not all(1 <= len(each) <= MAX_STOP_CHARS for each in stops):
        raise BadRequest(f"`stop`: each string must have 1 to {MAX_STOP_CHARS} characters.", param="stop")
    return tuple(dict.fromkeys(stops))


def _check_shared(fields: Mapping[str, object], request: GenerationFields) -> None:
    if request.stream_options is not None:
        options = fields["stream_options"]
        if isinstance(options, dict):
            refuse_unserved(options, ("include_usage",), UNSERVED_STREAM_OPTIONS, within="stream_options.")
        if not request.stream:
            raise BadRequest("`stream_options` needs `stream: true`.", param="stream_options")
    if request.seed is not None and not _INT64_MIN <= request.seed <= _UINT64_MAX:
        raise BadRequest("`seed` must fit 64 bits, signed or unsigned.", param="seed")
    if len(request.logit_bias) > MAX_LOGIT_BIAS:
        raise BadRequest(f"`logit_bias` may hold at most {MAX_LOGIT_BIAS} tokens.", param="logit_bias")
    for key in request.logit_bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise BadRequest(f"`logit_bias`: the key {key[:20]!r} is no token id.", param="logit_bias")
