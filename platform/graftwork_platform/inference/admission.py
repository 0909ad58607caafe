"""From a checked body to a request the engine can run: model, prompt tokens, limits, concrete sampling. Knows no streams."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

import msgspec

from graftwork_adapters.keys import PackedKey, RowTypeName, packed_key
from graftwork_engine.errors import ErrorCode
from graftwork_engine.messages import Sampling
from graftwork_platform.catalog.catalog import ResolvedModel
from graftwork_platform.errors import BadRequest, ServiceUnavailable
from graftwork_platform.ids import show
from graftwork_platform.inference.engine import Engine
from graftwork_platform.inference.output import StopRule
from graftwork_platform.inference.schemas import (
    DEFAULT_COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    TokenizeRequest,
)
from graftwork_platform.keys.ring import Caller
from graftwork_platform.text.chat_template import Message
from graftwork_platform.text.model_text import ModelText

_LONG_TEXT = 8192
"""Characters from which on tokens are left to a thread, so that other clients' streams go on meanwhile."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose request this is. ``request_id`` is ours; the client's own is kept beside it."""

    caller: Caller
    request_id: UUID
    client_request_id: str | None
    arrived: float  # Unix time


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt's tokens, and how its outputs are drawn."""

    ids: list[int]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that may run: ``n`` choices of each prompt, choice ``i · n + j`` being the j-th of prompt i.

    ``echo``: outputs begin with their prompt.
    """

    origin: Origin
    model: ResolvedModel
    prompts: tuple[Prompt, ...]
    adapter_key: PackedKey | None
    n: int
    stop: StopRule
    echo: bool

    @property
    def num_choices(self) -> int:
        """Choices of all prompts."""
        return len(self.prompts) * self.n

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt.ids) for prompt in self.prompts)

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of choice ``index``."""
        return self.prompts[index // self.n]

    def sampling_of(self, index: int) -> Sampling:
        """How choice ``index`` is drawn. What is said of the prompt's tokens is asked for once, with its first choice."""
        sampling, choice = self.prompt_of(index).sampling, index % self.n
        return sampling if choice == 0 else msgspec.structs.replace(sampling, choice=choice, prompt_logprobs=None)

    def engine_id(self, index: int) -> str:
        """The engine's name for choice ``index``: the request's own id for the first one."""
        shown = show("req", self.origin.request_id)
        return shown if index == 0 else f"{shown}-{index}"


class Models(Protocol):
    """Which version a model's name means to a tenant."""

    async def resolve(self, tenant_id: UUID, model: str, default_adapter_id: UUID | None = None) -> ResolvedModel:
        """Raises `ModelNotFound`."""
        ...


def draw_seed() -> int:
    """A seed for a request that gave none; unsigned 64 bit."""
    return secrets.randbits(64)


class Admission:
    """Admits requests for one base model, and answers what tokens a text is."""

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
        model = await self._resolve(request.model, origin)
        prompt_ids = await self._chat_ids(request.messages, self._limit())
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        wanted = request.max_completion_tokens or request.max_tokens
        return self._finish(request, origin, model, [prompt_ids], _Output("messages", wanted, None, logprobs))

    async def admit_completion(self, request: CompletionRequest, origin: Origin) -> Admitted:
        """Raises as `admit_chat` does."""
        model = await self._resolve(request.model, origin)
        limit = self._limit()
        is_long = sum(len(prompt) for prompt in request.prompts if isinstance(prompt, str)) >= _LONG_TEXT
        prompts: list[list[int]] = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                prompts.append(await self._encode(prompt, "prompt", limit, add_special_tokens=True, is_long=is_long))
            else:
                self._check_size(len(prompt), limit, "prompt")
                prompts.append(prompt)
        output = _Output("prompt", request.max_tokens, DEFAULT_COMPLETION_TOKENS, request.logprobs, request.echo)
        return self._finish(request, origin, model, prompts, output)

    async def tokenize(self, request: TokenizeRequest, origin: Origin) -> list[int]:
        """The tokens that a completion's prompt, or a chat's messages, would be. Raises as `admit_chat` does."""
        await self._resolve(request.model, origin)
        if request.messages is not None:
            add, generation = request.add_special_tokens or False, request.add_generation_prompt
            return await self._chat_ids(request.messages, None, add_special_tokens=add, add_generation_prompt=generation)
        add = request.add_special_tokens is not False
        return await self._encode(request.prompt or "", "prompt", None, add_special_tokens=add)

    async def detokenize(self, request: DetokenizeRequest, origin: Origin) -> str:
        """The text of tokens, special ones shown. Raises as `admit_chat` does."""
        await self._resolve(request.model, origin)
        self._check_ids(request.tokens, "tokens")
        return await asyncio.to_thread(self._text.tokenizer.decode, request.tokens, skip_special_tokens=False)

    async def _resolve(self, model: str, origin: Origin) -> ResolvedModel:
        caller = origin.caller
        return await self._models.resolve(caller.tenant_id, model, caller.default_adapter_id)

    async def _chat_ids(
        self,
        messages: list[Message],
        limit: int | None,
        *,
        add_special_tokens: bool = False,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        template = self._text.chat_template
        if template is None:
            raise BadRequest("The base model has no chat template; use /v1/completions.", param="messages")
        contents = sum(len(str(message.get("content") or "")) for message in messages)
        # Each message makes a token at least; characters are at most bytes.
        self._check_size(max(contents // self._text.tokenizer.max_bytes_per_token, len(messages)), limit, "messages")
        prompt = await template.render(messages, add_generation_prompt=add_generation_prompt)
        # The template has written the special tokens that belong there, a BOS included.
        return await self._encode(prompt, "messages", limit, add_special_tokens=add_special_tokens)

    def _limit(self) -> int:
        """Tokens that prompt and output may have together."""
        info = self._engine.info
        if info is None:
            raise ServiceUnavailable("The model is still starting.", code="engine_unavailable", retry_after=2)
        return min(info.max_model_len, info.max_prompt_and_output)

    def _check_size(self, min_tokens: int, limit: int | None, param: str) -> None:
        """Refuse what is too long however it is cut into tokens, before the work of cutting it."""
        if limit is not None and min_tokens > limit:
            raise BadRequest(
                f"This model's maximum context length is {limit} tokens, but the {param} alone make at least {min_tokens}. "
                "Shorten them.",
                param=param,
                code=ErrorCode.CONTEXT_LENGTH,
            )

    async def _encode(
        self, text: str, param: str, limit: int | None, *, add_special_tokens: bool, is_long: bool = False
    ) -> list[int]:
        encode = self._text.tokenizer.encode
        try:
            self._check_size(self._text.tokenizer.min_tokens(len(text.encode())), limit, param)
            if len(text) < _LONG_TEXT and not is_long:
                return encode(text, add_special_tokens=add_special_tokens)
            return await asyncio.to_thread(encode, text, add_special_tokens=add_special_tokens)
        except UnicodeEncodeError as error:
            raise BadRequest(f"`{param}` holds half a surrogate pair, which is no text.", param=param) from error

    def _finish(
        self, request: GenerationFields, origin: Origin, model: ResolvedModel, prompts: list[list[int]], output: _Output
    ) -> Admitted:
        for prompt_ids in prompts:
            self._check_ids(prompt_ids, output.param)
        self._check_ids(request.stop_token_ids, "stop_token_ids")
        self._check_ids(request.bias_by_id, "logit_bias")
        limit, info = self._limit(), self._engine.info
        if info is None:
            raise AssertionError("a limit without the engine's word")
        eos = () if request.ignore_eos else self._text.eos_token_ids
        sampling = Sampling(
            max_tokens=0,  # its prompt decides
            seed=self._new_seed() if request.seed is None else request.seed % (1 << 64),
            temperature=request.temperature,
            top_k=min(max(request.top_k, 0), self._text.vocab_size),
            top_p=request.top_p,
            min_p=request.min_p,
            stop_token_ids=tuple(sorted({*eos, *request.stop_token_ids})),
            logprobs=output.logprobs,
            prompt_logprobs=output.logprobs if output.echo else None,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty,
            logit_bias=request.bias_by_id,
            min_tokens=request.min_tokens,
        )
        key = None if model.digest is None else packed_key(model.digest, info.base_id, self._row_type)
        stop = StopRule(request.stop, request.include_stop_str_in_output, request.min_tokens)
        admitted = tuple(_admit_prompt(prompt_ids, sampling, output, limit) for prompt_ids in prompts)
        return Admitted(origin, model, admitted, key, request.n, stop, output.echo)

    def _check_ids(self, ids: Collection[int], param: str) -> None:
        if ids and max(ids) >= self._text.vocab_size:
            raise BadRequest(f"`{param}`: token id {max(ids)} is outside the vocabulary of {self._text.vocab_size}.", param=param)


@dataclass(frozen=True, slots=True)
class _Output:
    """How much is wanted. ``param`` names the field that holds the prompt."""

    param: str
    max_tokens: int | None
    default: int | None  # None: to the end of the context
    logprobs: int | None
    echo: bool = False


def _admit_prompt(prompt_ids: list[int], sampling: Sampling, output: _Output, limit: int) -> Prompt:
    max_tokens = _max_tokens(len(prompt_ids), output, limit)
    if sampling.min_tokens > max_tokens:
        raise BadRequest(
            f"`min_tokens` ({sampling.min_tokens}) is more than the {max_tokens} tokens there may be.", param="min_tokens"
        )
    return Prompt(prompt_ids, msgspec.structs.replace(sampling, max_tokens=max_tokens))


def _max_tokens(prompt: int, output: _Output, limit: int) -> int:
    """Tokens the request may make, so that prompt and output fit the context and the memory of an idle engine."""
    if prompt == 0:
        raise BadRequest(f"`{output.param}` is empty; give at least one token.", param=output.param)
    room = limit - prompt
    if output.max_tokens is None and room >= 1:
        return room if output.default is None else min(output.default, room)
    wanted = 1 if output.max_tokens is None else output.max_tokens
    if wanted > room:
        raise BadRequest(
            f"This model's maximum context length is {limit} tokens, but the request needs {prompt + wanted}: {prompt} in the "
            f"{output.param} and {wanted} for the output. Shorten one of them.",
            param=output.param,
            code=ErrorCode.CONTEXT_LENGTH,
        )
    return wanted
