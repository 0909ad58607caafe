"""From a checked body to a request the engine can run: model, prompt tokens, limits, concrete sampling. Knows no streams."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
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
from graftwork_platform.inference.invocation import last_occurrence
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
from graftwork_platform.text.tokenizer import Tokenizer

_LONG_TEXT = 8192
"""Characters from which on encoding is left to a thread. Other clients' streams go on meanwhile, because for so long a text the
tokenizer does not hold the interpreter's lock; a thread alone would not do it."""
_COUNTED_CONTEXTS = 8
"""How many times the context a text may be whose tokens are only counted."""
MAX_LOGPROB_ENTRIES = 4 << 20
"""Log-probabilities that one answer may hold: some 300 MB of JSON."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose request this is. ``request_id`` is ours; the client's own is kept beside it."""

    caller: Caller
    request_id: UUID
    client_request_id: str | None
    arrived: float  # Unix time


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt's tokens, and how its outputs are drawn. ``text``: what the tokens were made of, where it may be repeated.

    The adapter applies to the tokens from ``adapter_start`` on; to none, its outputs being the base's, where that is None.
    """

    ids: list[int]
    sampling: Sampling
    text: str | None = None
    adapter_start: int | None = 0


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that may run: ``n`` choices of each prompt, choice ``i · n + j`` being the j-th of prompt i.

    ``tokenizer`` is the model's. ``echo``: outputs begin with their prompt.
    """

    origin: Origin
    model: ResolvedModel
    tokenizer: Tokenizer
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

    @property
    def adapter_active(self) -> bool | None:
        """Whether every prompt calls the adapter; None for what no prompt has to call."""
        if not self.model.facts.traits.invocation_token_ids:
            return None
        return all(prompt.adapter_start is not None for prompt in self.prompts)

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


class Texts(Protocol):
    """The text side of what a name means; `adapter_texts.AdapterTexts` is one."""

    @property
    def base(self) -> ModelText:
        """The base's."""
        ...

    async def of(self, model: ResolvedModel) -> ModelText:
        """Raises `ServiceUnavailable`."""
        ...


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The tokens that a text is to ``tokenizer``, a model's."""

    ids: list[int]
    tokenizer: Tokenizer


class Admission:
    """Admits requests for one base model and its adapters, and answers what tokens a text is."""

    def __init__(
        self, models: Models, texts: Texts, engine: Engine, row_type: RowTypeName, new_seed: Callable[[], int] = draw_seed
    ) -> None:
        self._models = models
        self._texts = texts
        self._engine = engine
        self._row_type: RowTypeName = row_type
        self._new_seed = new_seed

    async def admit_chat(self, request: ChatRequest, origin: Origin) -> Admitted:
        """Raises `ModelNotFound`, `BadRequest` (the template's too), or `ServiceUnavailable` before the engine's first start."""
        model, text = await self._resolve(request.model, origin)
        prompt_ids = await self._chat_ids(text, request.messages, self._limit())
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        wanted = request.max_completion_tokens or request.max_tokens
        return self._finish(request, origin, model, text, [prompt_ids], _Output("messages", wanted, None, logprobs))

    async def admit_completion(self, request: CompletionRequest, origin: Origin) -> Admitted:
        """Raises as `admit_chat` does."""
        model, text = await self._resolve(request.model, origin)
        limit = self._limit()
        is_long = sum(len(prompt) for prompt in request.prompts if isinstance(prompt, str)) >= _LONG_TEXT
        prompts: list[list[int]] = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                prompts.append(await self._encode(text, prompt, "prompt", limit, add_special_tokens=True, is_long=is_long))
            else:
                self._check_size(len(prompt), limit, "prompt")
                prompts.append(prompt)
        output = _Output("prompt", request.max_tokens, DEFAULT_COMPLETION_TOKENS, request.logprobs, request.echo)
        admitted = self._finish(request, origin, model, text, prompts, output)
        if not request.echo:
            return admitted
        pairs = zip(admitted.prompts, request.prompts, strict=True)
        texts = tuple(replace(prompt, text=sent) if isinstance(sent, str) else prompt for prompt, sent in pairs)
        return replace(admitted, prompts=texts)

    async def tokenize(self, request: TokenizeRequest, origin: Origin) -> Tokenized:
        """The tokens that a completion's prompt, or a chat's messages, would be. Raises as `admit_chat` does.

        A prompt may be some times longer than the context; messages may not, since one process renders everybody's.
        """
        _, text = await self._resolve(request.model, origin)
        limit = self._limit()
        if request.messages is not None:
            add, generation = request.add_special_tokens or False, request.add_generation_prompt
            ids = await self._chat_ids(text, request.messages, limit, add_special_tokens=add, add_generation_prompt=generation)
            return Tokenized(ids, text.tokenizer)
        add, prompt = request.add_special_tokens is not False, request.prompt or ""
        ids = await self._encode(text, prompt, "prompt", limit, add_special_tokens=add, contexts=_COUNTED_CONTEXTS)
        self._check_size(len(ids), limit, "prompt", _COUNTED_CONTEXTS)
        return Tokenized(ids, text.tokenizer)

    async def detokenize(self, request: DetokenizeRequest, origin: Origin) -> str:
        """The text of tokens, special ones shown. Raises as `admit_chat` does."""
        _, text = await self._resolve(request.model, origin)
        self._check_size(len(request.tokens), self._limit(), "tokens", _COUNTED_CONTEXTS)
        _check_ids(request.tokens, "tokens", text.vocab_size)
        return await asyncio.to_thread(text.tokenizer.decode, request.tokens, skip_special_tokens=False)

    async def _resolve(self, model: str, origin: Origin) -> tuple[ResolvedModel, ModelText]:
        caller = origin.caller
        resolved = await self._models.resolve(caller.tenant_id, model, caller.default_adapter_id)
        return resolved, await self._texts.of(resolved)

    async def _chat_ids(
        self,
        text: ModelText,
        messages: list[Message],
        limit: int,
        *,
        add_special_tokens: bool = False,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        template = text.chat_template
        if template is None:
            raise BadRequest("The model has no chat template; use /v1/completions.", param="messages")
        contents = sum(len(str(message.get("content") or "")) for message in messages)
        # Each message makes a token at least; characters are at most bytes.
        self._check_size(max(contents // text.tokenizer.max_bytes_per_token, len(messages)), limit, "messages")
        prompt = await template.render(messages, add_generation_prompt=add_generation_prompt)
        # The template has written the special tokens that belong there, a BOS included.
        return await self._encode(text, prompt, "messages", limit, add_special_tokens=add_special_tokens)

    def _limit(self) -> int:
        """Tokens that prompt and output may have together."""
        info = self._engine.info
        if info is None:
            raise ServiceUnavailable("The model is still starting.", code="engine_unavailable", retry_after=2)
        return min(info.max_model_len, info.max_prompt_and_output)

    def _check_size(self, min_tokens: int, limit: int, param: str, contexts: int = 1) -> None:
        """Refuse what is too long however it is cut into tokens, before the work of cutting it."""
        if min_tokens > limit * contexts:
            times = "" if contexts == 1 else f" and at most {contexts} times as many are taken here"
            raise BadRequest(
                f"This model's maximum context length is {limit} tokens{times}, but the {param} alone make at least {min_tokens}. "
                "Shorten them.",
                param=param,
                code=ErrorCode.CONTEXT_LENGTH,
            )

    async def _encode(
        self,
        text: ModelText,
        words: str,
        param: str,
        limit: int,
        *,
        add_special_tokens: bool,
        is_long: bool = False,
        contexts: int = 1,
    ) -> list[int]:
        encode = text.tokenizer.encode
        try:
            self._check_size(text.tokenizer.min_tokens(len(words.encode())), limit, param, contexts)
            if len(words) < _LONG_TEXT and not is_long:
                return encode(words, add_special_tokens=add_special_tokens)
            return await asyncio.to_thread(encode, words, add_special_tokens=add_special_tokens)
        except UnicodeEncodeError as error:
            raise BadRequest(f"`{param}` holds half a surrogate pair, which is no text.", param=param) from error

    def _finish(
        self,
        request: GenerationFields,
        origin: Origin,
        model: ResolvedModel,
        text: ModelText,
        prompts: list[list[int]],
        output: _Output,
    ) -> Admitted:
        for prompt_ids in prompts:
            _check_ids(prompt_ids, output.param, text.vocab_size)
        _check_ids(request.stop_token_ids, "stop_token_ids", text.vocab_size)
        _check_ids(request.bias_by_id, "logit_bias", text.vocab_size)
        limit, info = self._limit(), self._engine.info
        if info is None:
            raise AssertionError("a limit without the engine's word")
        eos = () if request.ignore_eos else text.eos_token_ids
        sampling = Sampling(
            max_tokens=0,  # its prompt decides
            seed=0,  # of its own for each prompt
            temperature=request.temperature,
            top_k=min(max(request.top_k, 0), text.vocab_size),
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
        key = None if model.digest is None else packed_key(model.digest, info.base_id, model.row_type or self._row_type)
        stop = StopRule(request.stop, request.include_stop_str_in_output, request.min_tokens)
        admitted = tuple(_admit_prompt(prompt_ids, self._seeded(sampling, request.seed), output, limit) for prompt_ids in prompts)
        _check_entries(admitted, request.n, output)
        if invocation := model.facts.traits.invocation_token_ids:
            base_size = self._texts.base.vocab_size
            admitted = tuple(_activated(prompt, invocation, base_size, output.param) for prompt in admitted)
        return Admitted(origin, model, text.tokenizer, admitted, key, request.n, stop, output.echo)

    def _seeded(self, sampling: Sampling, seed: int | None) -> Sampling:
        """With the seed that was given, or else one of its own, so that equal prompts of one request have different outputs."""
        return msgspec.structs.replace(sampling, seed=self._new_seed() if seed is None else seed % (1 << 64))


@dataclass(frozen=True, slots=True)
class _Output:
    """How much is wanted. ``param`` names the field that holds the prompt."""

    param: str
    max_tokens: int | None
    default: int | None  # None: to the end of the context
    logprobs: int | None
    echo: bool = False


def _check_ids(ids: Collection[int], param: str, vocab_size: int) -> None:
    if ids and max(ids) >= vocab_size:
        raise BadRequest(f"`{param}`: token id {max(ids)} is outside the vocabulary of {vocab_size}.", param=param)


def _admit_prompt(prompt_ids: list[int], sampling: Sampling, output: _Output, limit: int) -> Prompt:
    max_tokens = _max_tokens(len(prompt_ids), output, limit)
    if sampling.min_tokens > max_tokens:
        raise BadRequest(
            f"`min_tokens` ({sampling.min_tokens}) is more than the {max_tokens} tokens there may be.", param="min_tokens"
        )
    return Prompt(prompt_ids, msgspec.structs.replace(sampling, max_tokens=max_tokens))


def _activated(prompt: Prompt, invocation: Sequence[int], base_vocab_size: int, param: str) -> Prompt:
    """The prompt with where its adapter begins. One that does not call it is the base's, in the base's vocabulary."""
    start = last_occurrence(prompt.ids, invocation)
    if start is not None:
        return replace(prompt, adapter_start=start)
    sampling = prompt.sampling
    _check_ids(prompt.ids, param, base_vocab_size)
    _check_ids(sampling.logit_bias, "logit_bias", base_vocab_size)
    stops = tuple(token_id for token_id in sampling.stop_token_ids if token_id < base_vocab_size)
    sampling = msgspec.structs.replace(sampling, stop_token_ids=stops, top_k=min(sampling.top_k, base_vocab_size))
    return replace(prompt, sampling=sampling, adapter_start=None)


def _check_entries(prompts: Sequence[Prompt], n: int, output: _Output) -> None:
    """Refuse what would be an answer of gigabytes."""
    if output.logprobs is None:
        return
    num_tokens = sum(prompt.sampling.max_tokens + (len(prompt.ids) if output.echo else 0) for prompt in prompts)
    entries = num_tokens * n * (output.logprobs + 1)
    if entries > MAX_LOGPROB_ENTRIES:
        most, of_all = ("top_logprobs", "") if output.param == "messages" else ("logprobs", " for all prompts together")
        raise BadRequest(
            f"The answer could hold {entries} log-probabilities, and may hold {MAX_LOGPROB_ENTRIES}: `n` times (`{most}` + 1) "
            f"times `max_tokens` (and the prompt's, with `echo`){of_all}. Lower one of them.",
            param=most,
        )


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
