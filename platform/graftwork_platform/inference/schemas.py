"""What a client may ask for: the bodies of both inference endpoints, parsed and checked. Knows no models and no tokenizer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec

from graftwork_platform.errors import BadRequest
from graftwork_platform.inference.unserved import (
    UNSERVED_CHAT,
    UNSERVED_COMPLETION,
    UNSERVED_MESSAGE,
    UNSERVED_STREAM_OPTIONS,
    refuse_unserved,
)
from graftwork_platform.text.chat_template import Message

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 128
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for text completions; a chat completion may go on to the end of the context."""

_INT64_MIN, _UINT64_MAX = -(1 << 63), (1 << 64) - 1
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Templates know no ``developer``: OpenAI's newer name for the system role."""

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_TokenId = Annotated[int, msgspec.Meta(ge=0)]
_T = TypeVar("_T")


class StreamOptions(msgspec.Struct, frozen=True):
    """``stream_options``."""

    include_usage: bool | None = False


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints share. None: not given."""

    model: Annotated[str, msgspec.Meta(min_length=1)]
    max_tokens: _Positive | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1)] = 0  # -1 and 0 switch it off
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop_token_ids: Annotated[tuple[_TokenId, ...], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    ignore_eos: bool = False
    return_token_ids: bool = False
    user: str | None = None


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``; ``messages`` as `parse_messages` returns them."""

    messages: list[Message]
    max_completion_tokens: _Positive | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """Body of ``POST /v1/completions``; ``prompt`` is one text, or the token ids of one prompt."""

    prompt: str | list[_TokenId]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None


def parse_chat(body: bytes) -> ChatRequest:
    """A chat completion's body; raises `BadRequest` naming the field."""
    fields = _parse_object(body)
    refuse_unserved(fields, ChatRequest.__struct_fields__, UNSERVED_CHAT)
    request = _convert(fields, ChatRequest)
    _check_shared(fields, request)
    if request.top_logprobs and not request.logprobs:
        raise BadRequest("`top_logprobs` needs `logprobs: true`.", param="top_logprobs")
    return msgspec.structs.replace(request, messages=parse_messages(request.messages))


def parse_completion(body: bytes) -> CompletionRequest:
    """A text completion's body; raises `BadRequest` naming the field."""
    fields = _parse_object(body)
    refuse_unserved(fields, CompletionRequest.__struct_fields__, UNSERVED_COMPLETION)
    fields["prompt"] = _single_prompt(fields.get("prompt"))
    request = _convert(fields, CompletionRequest)
    _check_shared(fields, request)
    return request


def parse_messages(raw: list[Message]) -> list[Message]:
    """Messages as a template takes them: a known role, ``content`` as one text, ``name`` if given. Raises `BadRequest`.

    The texts of several content parts are joined by line breaks.
    """
    if not raw:
        raise BadRequest("`messages` is empty; give at least one.", param="messages")
    return [_parse_message(message, f"messages[{place}]") for place, message in enumerate(raw)]


def _parse_message(raw: Message, where: str) -> Message:
    role, content, name = raw.get("role"), raw.get("content"), raw.get("name")
    if role in ("tool", "function"):
        raise BadRequest(
            f"`{where}.role`: tools are not supported by this server.", param=f"{where}.role", code="unsupported_parameter"
        )
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRequest(f"`{where}.role` must be one of {', '.join(_ROLES)}.", param=f"{where}.role")
    refuse_unserved(raw, ("role", "content", "name"), UNSERVED_MESSAGE, within=f"{where}.")
    parsed: Message = {"role": _ROLES[role], "content": _parse_content(content, f"{where}.content")}
    if name is not None:
        if not isinstance(name, str):
            raise BadRequest(f"`{where}.name` must be a string.", param=f"{where}.name")
        parsed["name"] = name
    return parsed


def _parse_content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"`{where}` must be a string or a list of text parts.", param=where)
    return "\n".join(_parse_part(part, f"{where}[{place}]") for place, part in enumerate(content))


def _parse_part(part: object, where: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise BadRequest(f"`{where}` must be an object with a `type`.", param=where)
    if part["type"] != "text":
        raise BadRequest(
            f"`{where}.type`: content of type `{part['type']}` is not supported by this server (only `text`).",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    refuse_unserved(part, ("type", "text"), {}, within=f"{where}.")
    text = part.get("text")
    if not isinstance(text, str):
        raise BadRequest(f"`{where}.text` must be a string.", param=f"{where}.text")
    return text


def _single_prompt(prompt: object) -> object:
    """The one prompt inside a list of one; several are refused."""
    if not isinstance(prompt, list) or not any(isinstance(entry, (str, list)) for entry in prompt):
        return prompt
    if len(prompt) > 1:
        raise BadRequest(
            "`prompt`: several prompts in one request are not supported by this server; send one request for each.",
            param="prompt",
            code="unsupported_parameter",
        )
    return prompt[0]


def _check_shared(fields: Mapping[str, object], request: GenerationFields) -> None:
    if request.stream_options is not None:
        options = fields["stream_options"]
        if isinstance(options, dict):
            refuse_unserved(options, ("include_usage",), UNSERVED_STREAM_OPTIONS, within="stream_options.")
        if not request.stream:
            raise BadRequest("`stream_options` needs `stream: true`.", param="stream_options")
    if request.seed is not None and not _INT64_MIN <= request.seed <= _UINT64_MAX:
        raise BadRequest("`seed` must fit 64 bits, signed or unsigned.", param="seed")


def _parse_object(body: bytes) -> dict[str, object]:
    """The body's fields that are set: null is the same as absent."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"The body of the request is not valid JSON: {error}") from error
    except RecursionError as error:
        raise BadRequest("The body of the request is nested too deeply.") from error
    if not isinstance(raw, dict):
        raise BadRequest("The body of the request must be a JSON object.")
    return {name: value for name, value in raw.items() if value is not None}


def _convert(fields: Mapping[str, object], kind: type[_T]) -> _T:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _as_bad_request(str(error)) from error


def _as_bad_request(text: str) -> BadRequest:
    """msgspec's words with the field first: "`top_p` must be: `float` <= 1.0"."""
    if match := re.fullmatch(r"Object missing required field `(\w+)`(?: - at `\$\.(.*)`)?", text):
        param = f"{match[2]}.{match[1]}" if match[2] else match[1]
        return BadRequest(f"Missing required parameter: `{param}`.", param=param)
    match = re.fullmatch(r"(.*) - at `\$\.?(.*)`", text, re.DOTALL)
    if match is None:
        return BadRequest(text)
    return BadRequest(f"`{match[2]}`: {match[1][:1].lower()}{match[1][1:]}.", param=match[2])
