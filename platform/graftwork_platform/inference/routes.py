"""The routes of inference: who calls, what is asked, and how the answer is sent. Knows no SQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Depends, Request
from msgspec import UNSET
from starlette.responses import Response

from graftwork_platform.catalog.catalog import Catalog, ListedModel
from graftwork_platform.inference.admission import Admission, Admitted, Origin
from graftwork_platform.inference.body import parse_body, read_body
from graftwork_platform.inference.engine import Engine
from graftwork_platform.inference.frames import Frames
from graftwork_platform.inference.generation import Generator, Tally
from graftwork_platform.inference.output import Delta, join
from graftwork_platform.inference.responses import Model, ModelList, PromptTokensDetails, Text, Tokens, Usage
from graftwork_platform.inference.schemas import GenerationFields, parse_chat, parse_completion, parse_detokenize, parse_tokenize
from graftwork_platform.inference.sse import DONE, ClientGone, EventStream, event, until_disconnect
from graftwork_platform.inference.wire import ChatWire, CompletionWire, Heading, Wire
from graftwork_platform.keys.ring import Caller, KeyRing
from graftwork_platform.observability import client_request_id, request_id_of
from graftwork_platform.text.tokenizer import Tokenizer

MAX_BODY_BYTES = 8 << 20
_LONG_OUTPUT = 1024
"""Tokens from which on a whole answer, which may have 20 log-probabilities for each, is written in a thread."""
_CLIENT_CLOSED_REQUEST = 499
"""nginx's number for a client that has gone; nobody reads it but the log and the metrics."""


@dataclass(frozen=True, slots=True)
class Inference:
    """What the routes need."""

    keyring: KeyRing
    catalog: Catalog
    admission: Admission
    generator: Generator
    engine: Engine
    keep_alive: float = 15.0  # seconds of silence after which a stream says that it is alive
    max_body_bytes: int = MAX_BODY_BYTES


def inference_router(inference: Inference) -> APIRouter:
    """OpenAI's endpoints, and vLLM's for tokens. Each authenticates from the headers before the body is read."""
    router = APIRouter()

    async def caller_of(request: Request) -> Caller:
        return await inference.keyring.admit(request.headers.get("authorization"))

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request, caller: Caller = Depends(caller_of)) -> Response:
        origin = _origin(request, caller)
        chat = await parse_body(parse_chat, await read_body(request, inference.max_body_bytes))
        admitted = await inference.admission.admit_chat(chat, origin)
        wire = ChatWire(_heading("chatcmpl", chat, admitted), admitted.tokenizer)
        return await _respond(inference, request, admitted, wire, stream=chat.stream)

    @router.post("/v1/completions")
    async def create_completion(request: Request, caller: Caller = Depends(caller_of)) -> Response:
        origin = _origin(request, caller)
        completion = await parse_body(parse_completion, await read_body(request, inference.max_body_bytes))
        admitted = await inference.admission.admit_completion(completion, origin)
        wire = CompletionWire(_heading("cmpl", completion, admitted), admitted.tokenizer)
        return await _respond(inference, request, admitted, wire, stream=completion.stream)

    @router.post("/tokenize")
    @router.post("/v1/tokenize")
    async def tokenize(request: Request, caller: Caller = Depends(caller_of)) -> Response:
        asked = await parse_body(parse_tokenize, await read_body(request, inference.max_body_bytes))
        found = await inference.admission.tokenize(asked, _origin(request, caller))
        ids = found.ids
        words = await asyncio.to_thread(_words, found.tokenizer, ids) if asked.return_token_strs else None
        return _json(Tokens(len(ids), _max_model_len(inference), ids, words))

    @router.post("/detokenize")
    @router.post("/v1/detokenize")
    async def detokenize(request: Request, caller: Caller = Depends(caller_of)) -> Response:
        asked = await parse_body(parse_detokenize, await read_body(request, inference.max_body_bytes))
        return _json(Text(await inference.admission.detokenize(asked, _origin(request, caller))))

    @router.get("/v1/models")
    async def list_models(caller: Caller = Depends(caller_of)) -> Response:
        listed = await inference.catalog.list_models(caller.tenant_id)
        return _json(ModelList([_model(inference, line) for line in listed]))

    @router.get("/v1/models/{model:path}")
    async def get_model(model: str, caller: Caller = Depends(caller_of)) -> Response:
        resolved = await inference.catalog.resolve(caller.tenant_id, model, caller.default_adapter_id)
        listed = await inference.catalog.list_models(caller.tenant_id)
        name = resolved.public_name.partition("@")[0] if resolved.digest else resolved.public_name
        created = next((line.created for line in listed if line.name == name), listed[0].created)
        return _json(_model(inference, ListedModel(model, created, resolved.version, resolved.facts.text.tokenizer)))

    return router


async def _respond(inference: Inference, request: Request, admitted: Admitted, wire: Wire, *, stream: bool) -> Response:
    if stream:
        left = inference.generator.time_left(admitted)
        return EventStream(_frames(inference, admitted, wire), keep_alive=inference.keep_alive, time_left=left)
    try:
        return _as_json(await until_disconnect(request.receive, _whole(inference, admitted, wire)))
    except ClientGone:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _frames(inference: Inference, admitted: Admitted, wire: Wire) -> AsyncGenerator[bytes, None]:
    """Frames of a stream, several of one delta at once. By the last delta's, usage is durable."""
    tally, frames = Tally(), Frames(wire)
    async with aclosing(inference.generator.run(admitted, tally)) as deltas:
        async for delta in deltas:
            is_long = admitted.echo and delta.is_first
            if part := await asyncio.to_thread(frames.of, delta) if is_long else frames.of(delta):
                yield part
    yield b"".join(event(chunk) for chunk in wire.closing(_usage(tally, admitted))) + DONE


async def _whole(inference: Inference, admitted: Admitted, wire: Wire) -> bytes:
    tally = Tally()
    outputs: list[list[Delta]] = [[] for _ in range(admitted.num_choices)]
    async with aclosing(inference.generator.run(admitted, tally)) as deltas:
        async for delta in deltas:
            outputs[delta.index].append(delta)

    def encoded() -> bytes:
        return msgspec.json.encode(wire.whole([join(output) for output in outputs], _usage(tally, admitted)))

    is_long = admitted.echo or tally.output_tokens >= _LONG_OUTPUT
    return await asyncio.to_thread(encoded) if is_long else encoded()


def _words(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_text(token_id) for token_id in ids]


def _origin(request: Request, caller: Caller) -> Origin:
    ours = request_id_of(request.scope)
    return Origin(caller, ours.id, client_request_id(request.scope), ours.arrived)


def _heading(kind: str, fields: GenerationFields, admitted: Admitted) -> Heading:
    origin = admitted.origin
    return Heading(
        id=f"{kind}-{origin.request_id.hex}",
        created=int(origin.arrived),
        model=admitted.model.public_name,
        n=admitted.n,
        prompt_ids=[prompt.ids for prompt in admitted.prompts] if fields.return_token_ids else None,
        usage=fields.stream_options is not None and bool(fields.stream_options.include_usage),
    )


def _usage(tally: Tally, admitted: Admitted) -> Usage:
    prompt, output, active = tally.prompt_tokens, tally.output_tokens, admitted.adapter_active
    details = PromptTokensDetails(tally.cached_tokens)
    return Usage(prompt, output, prompt + output, details, UNSET if active is None else active)


def _model(inference: Inference, line: ListedModel) -> Model:
    is_base = line.version is None
    return Model(
        id=line.name,
        created=line.created,
        owned_by="graftwork" if is_base else "tenant",
        parent=None if is_base else inference.catalog.base_name,
        max_model_len=_max_model_len(inference),
        tokenizer=UNSET if is_base or line.has_own_tokenizer is None else "own" if line.has_own_tokenizer else "base",
    )


def _max_model_len(inference: Inference) -> int | None:
    info = inference.engine.info
    return None if info is None else min(info.max_model_len, info.max_prompt_and_output)


def _json(payload: msgspec.Struct) -> Response:
    return _as_json(msgspec.json.encode(payload))


def _as_json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
