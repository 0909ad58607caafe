"""From a checked body to a request the engine can run: model, prompt tokens, limits, concrete sampling. Knows no streams."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from graftwork_adapters.keys import PackedKey, RowTypeName, packed_key
from graftwork_engine.errors import ErrorCode
from graftwork_engine.messages import Sampling
from graftwork_platform.catalog.catalog import ResolvedModel
from graftwork_platform.errors import BadRequest, ServiceUnavailable
from graftwork_platform.inference.engine import Engine
from graftwork_platform.inference.schemas import DEFAULT_COMPLETION_TOKENS, ChatRequest, CompletionRequest, GenerationFields
from graftwork_platform.keys.ring import Caller
from graftwork_platform.text.model_text import ModelText

_LONG_TEXT = 8192
"""Characters from which on templates and tokens are left to a thread, so that other clients' streams go on meanwhile."""

_MANY_MESSAGES = 64


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose request this is. ``request_id`` is ours; the client's own is kept beside it."""

    caller: Caller
    request_id: UUID
    client_request_id: str | None
    arrived: float  # Unix time


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that may run."""

    origin: Origin
    model: ResolvedModel
    prompt_ids: list[int]
    sampling: Sampling
    adapter_key: PackedKey | None


class Models(Protocol):
    """Which version a model's name means to a tenant."""

    async def resolve(self, tenant_id: UUID, model: str, default_adapter_id: UUID | None = None) -> ResolvedModel:
        """Raises `ModelNotFound`."""
        ...


def draw_seed() -> int:
    """A seed for a request that gave none; unsigned 64 bit."""
    return secrets.randbits(64)


class Admission:
    """Admits requests for one base model."""

    def __init__(
        self, models: Models, text: ModelText, engine: Engine, row_type: RowTypeName, new_seed: Callable[[], int] = draw_seed
    ) -> None:
        self._models = models
        self._text = text
        self._engine = engine
        self._row_type: RowTypeName = row_type
        self._new_seed = new_seed

    async def admit_chat(self, request: ChatRequest, origin: Origin) -> Admitted:
        """Raises `ModelNotFound`, `BadRequest` (the template's too), or `ServiceUnavailable` before the engine's first start."""
        model = await self._resolve(request, origin)
        limit = self._limit()
        template = self._text.chat_template
        if template is None:
            raise BadRequest("The base model has no chat template; use /v1/completions.", param="messages")
        contents = sum(len(str(message.get("content") or "")) for message in request.messages)
        # Each message makes a token at least; characters are at most bytes.
        self._check_size(max(contents // self._text.tokenizer.max_bytes_per_token, len(request.messages)), limit, "messages")
        if contents < _LONG_TEXT and len(request.messages) < _MANY_MESSAGES:
            prompt = template.render(request.messages)
        else:
            prompt = await asyncio.to_thread(template.render, request.messages)
        # The template has written the special tokens that belong there, a BOS included.
        prompt_ids = await self._encode(prompt, "messages", limit, add_special_tokens=False)
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        wanted = request.max_completion_tokens or request.max_tokens
        return self._finish(request, origin, model, prompt_ids, _Output("messages", wanted, None, logprobs))

    async def admit_completion(self, request: CompletionRequest, origin: Origin) -> Admitted:
        """Raises as `admit_chat` does."""
        model = await self._resolve(request, origin)
        if isinstance(request.prompt, str):
            prompt_ids = await self._encode(request.prompt, "prompt", self._limit(), add_special_tokens=True)
        else:
            self._check_size(len(request.prompt), self._limit(), "prompt")
            prompt_ids = request.prompt
        output = _Output("prompt", request.max_tokens, DEFAULT_COMPLETION_TOKENS, request.logprobs)
        return self._finish(request, origin, model, prompt_ids, output)

    async def _resolve(self, request: GenerationFields, origin: Origin) -> ResolvedModel:
        caller = origin.caller
        return await self._models.resolve(caller.tenant_id, request.model, caller.default_adapter_id)

    def _limit(self) -> int:
        """Tokens that prompt and output may have together."""
        info = self._engine.info
        if info is None:
            raise ServiceUnavailable("The model is still starting.", code="engine_unavailable", retry_after=2)
        return min(info.max_model_len, info.max_prompt_and_output)

    def _check_size(self, min_tokens: int, limit: int, param: str) -> None:
        """Refuse what is too long however it is cut into tokens, before the work of cutting it."""
        if min_tokens > limit:
            raise BadRequest(
                f"This model's maximum context length is {limit} tokens, but the {param} alone make at least {min_tokens}. "
                "Shorten them.",
                param=param,
                code=ErrorCode.CONTEXT_LENGTH,
            )

    async def _encode(self, text: str, param: str, limit: int, *, add_special_tokens: bool) -> list[int]:
        encode = self._text.tokenizer.encode
        try:
            self._check_size(self._text.tokenizer.min_tokens(len(text.encode())), limit, param)
            if len(text) < _LONG_TEXT:
                return encode(text, add_special_tokens=add_special_tokens)
            return await asyncio.to_thread(encode, text, add_special_tokens=add_special_tokens)
        except UnicodeEncodeError as error:
            raise BadRequest(f"`{param}` holds half a surrogate pair, which is no text.", param=param) from error

    def _finish(
        self, request: GenerationFields, origin: Origin, model: ResolvedModel, prompt_ids: list[int], output: _Output
    ) -> Admitted:
        self._check_ids(prompt_ids, output.param)
        self._check_ids(request.stop_token_ids, "stop_token_ids")
        limit, info = self._limit(), self._engine.info
        if info is None:
            raise AssertionError("a limit without the engine's word")
        eos = () if request.ignore_eos else self._text.eos_token_ids
        sampling = Sampling(
            max_tokens=_max_tokens(len(prompt_ids), output, limit),
            seed=self._new_seed() if request.seed is None else request.seed % (1 << 64),
            temperature=request.temperature,
            top_k=min(max(request.top_k, 0), self._text.vocab_size),
            top_p=request.top_p,
            min_p=request.min_p,
            stop_token_ids=tuple(sorted({*eos, *request.stop_token_ids})),
            logprobs=output.logprobs,
        )
        key = None if model.digest is None else packed_key(model.digest, info.base_id, self._row_type)
        return Admitted(origin, model, prompt_ids, sampling, key)

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        if ids and max(ids) >= self._text.vocab_size:
            raise BadRequest(f"`{param}`: token id {max(ids)} is outside the vocabulary of {self._text.vocab_size}.", param=param)


@dataclass(frozen=True, slots=True)
class _Output:
    """How much is wanted. ``param`` names the field that holds the prompt."""

    param: str
    max_tokens: int | None
    default: int | None  # None: to the end of the context
    logprobs: int | None


def _max_tokens(prompt: int, output: _Output, limit: int) -> int:
    """Tokens the request may make, so that prompt and output fit the context and the memory of an idle engine."""
    if prompt == 0:
        raise BadRequest(f"`{output.param}` is empty; give at least one token.", param=output.param)
    room = limit - prompt
    if output.max_tokens is None and room >= 1:
        return room if output.default is None else min(output.default, room)
    wanted = output.max_tokens or 1
    if wanted > room:
        raise BadRequest(
            f"This model's maximum context length is {limit} tokens, but the request needs {prompt + wanted}: {prompt} in the "
            f"{output.param} and {wanted} for the output. Shorten one of them.",
            param=output.param,
            code=ErrorCode.CONTEXT_LENGTH,
        )
    return wanted
