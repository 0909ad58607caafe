"""Running an admitted request and accounting for it: whatever its end, one usage row, durable before anyone is told of that end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from graftwork_adapters.errors import AdapterError
from graftwork_adapters.keys import AdapterDigest, RowTypeName
from graftwork_engine.errors import EngineUnavailable, ErrorCode, GraftworkEngineError, RequestFailed
from graftwork_engine.request import FinishReason
from graftwork_engine.streams import GenerationRequest
from graftwork_platform.errors import PlatformError, ServiceUnavailable
from graftwork_platform.ids import show
from graftwork_platform.inference.admission import Admitted
from graftwork_platform.inference.choices import Choices
from graftwork_platform.inference.engine import Engine
from graftwork_platform.inference.failures import as_platform_error
from graftwork_platform.inference.output import Delta
from graftwork_platform.inference.watchdog import Watchdog
from graftwork_platform.models import UsageStatus
from graftwork_platform.usage import UsageNotRecorded, UsageRow

_log = logging.getLogger(__name__)

_ABORTED = FinishReason.ABORT.value
_REBUILT = (ErrorCode.ADAPTER_MISSING, ErrorCode.ADAPTER_CORRUPT)
_LEDGER_RETRY_AFTER = 2  # seconds; a full disk is repaired by somebody, a slow one by itself


class Entry(Protocol):
    """What is kept of one running request's usage."""

    def count(self, engine_id: str, output_tokens: int, cached_tokens: int) -> None:
        """Totals so far of one of the engine requests it consists of, as billed."""
        ...

    async def close(self, row: UsageRow) -> None:
        """Returns when ``row``, the final one, is durable; carried through even if cancelled. Raises `UsageNotRecorded`."""
        ...


class Ledger(Protocol):
    """Where usage is kept."""

    def open(self, row: UsageRow, engine_ids: Sequence[str]) -> Entry:
        """Note a request that is about to run, as these engine requests. Raises `UsageNotRecorded`."""
        ...


@dataclass(slots=True)
class Tally:
    """What a request has used so far, all its choices together."""

    prompt_tokens: int = 0  # of the prompts that were computed, which the first item of a choice of theirs tells
    output_tokens: int = 0
    status: UsageStatus = UsageStatus.ABORTED  # until it ends in another way, it ends by its client's leaving
    cached: dict[int, int] = field(default_factory=dict)  # of each prompt, by its first choice

    @property
    def cached_tokens(self) -> int:
        """How much of the prompts was found computed, each counted once."""
        return min(sum(self.cached.values()), self.prompt_tokens)

    def note_cached(self, admitted: Admitted, index: int, cached_tokens: int) -> int:
        """Take in what choice ``index`` found computed; its total, which is 0 where it found what another choice computed."""
        if index % admitted.n != 0:
            return 0
        known = self.cached.get(index, 0)
        if cached_tokens > known:
            known = self.cached[index] = cached_tokens
        return known


class EnsurePacked(Protocol):
    """Sees to an adapter's packed form: built if it is not there, or, to ``replace`` it, if its bytes are wrong."""

    async def __call__(self, digest: AdapterDigest, row_type: RowTypeName | None = None, *, replace: bool = False) -> None:
        """``row_type`` None: the server's. Raises `AdapterError`."""
        ...


class Generator:
    """Runs requests on an engine."""

    def __init__(
        self,
        engine: Engine,
        ledger: Ledger,
        ensure_packed: EnsurePacked,
        *,
        timeout: float,
        observe: Callable[[UsageRow], None],
        grace: float = 5.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        """``timeout``: seconds from a request's arrival to its last token; ``grace``: how much longer an engine is waited for that
        does not keep it. ``observe`` is told of each final row as it is handed over.
        """
        self._engine = engine
        self._ledger = ledger
        self._ensure_packed = ensure_packed
        self._timeout = timeout
        self._observe = observe
        self._grace = grace
        self._now = now

    async def run(self, admitted: Admitted, tally: Tally) -> AsyncGenerator[Delta, None]:
        """The output of all choices, counted in ``tally``. The last delta comes once its usage is durable; closing early aborts.

        Raises `PlatformError`, also after usage is durable. If one choice fails, the request does.
        """
        entry = self._open(admitted, tally)
        num_unfinished = admitted.num_choices
        recorded = False
        try:
            async with aclosing(self._deltas(admitted, tally, entry)) as deltas:
                with self._watchdog(admitted) as watchdog:
                    async for delta in deltas:
                        watchdog.look_away()
                        if delta.finish is not None:
                            num_unfinished -= 1
                            if num_unfinished == 0:
                                tally.status = UsageStatus.COMPLETED
                                recorded = True
                                await self._close(entry, admitted, tally)
                        yield delta
                        if recorded:
                            return  # asking for more might find the deadline passed
                        watchdog.watch()
            raise EngineUnavailable("its output ended without a finish")
        except (GraftworkEngineError, AdapterError, TimeoutError) as failure:
            tally.status = UsageStatus.FAILED
            error = as_platform_error(failure, admitted.model.public_name)
            if error.status >= 500:
                _log.warning("%s failed: %s", show("req", admitted.origin.request_id), failure)
            raise error from failure
        except Exception:
            tally.status = UsageStatus.FAILED
            raise
        finally:
            if not recorded:
                with suppress(UsageNotRecorded):  # the ledger has logged it; the request's own end is what the client hears of
                    await entry.close(self._final_row(admitted, tally))

    async def _deltas(self, admitted: Admitted, tally: Tally, entry: Entry) -> AsyncGenerator[Delta, None]:
        """The output. A missing or corrupt packed form is rebuilt once, as long as nothing has been sent.

        Of each prompt one choice starts at once, and the others when its first item is there: they find the prompt computed.
        """
        rebuilt = False
        while True:
            choices = Choices(admitted)
            started = False
            try:
                async with self._engine.streams() as streams:
                    for index in choices.leaders():
                        await streams.add(self._request(admitted, index))
                    # From here on the path of each token: a step's 64 tokens are 64 turns of this loop, one in each stream.
                    async for item in streams:
                        if item.finish == _ABORTED:
                            raise EngineUnavailable("it stopped this request")
                        # A repeated prompt may be long: other clients' streams go on meanwhile.
                        is_long = admitted.echo and item.first_output_index == 0
                        delta = await asyncio.to_thread(choices.take, item) if is_long else choices.take(item)
                        started = True
                        num_tokens = choices.num_tokens(delta.index)
                        tally.output_tokens += len(delta.token_ids)
                        if delta.is_first and delta.index % admitted.n == 0:
                            tally.prompt_tokens += len(admitted.prompt_of(delta.index).ids)
                        entry.count(item.request_id, num_tokens, tally.note_cached(admitted, delta.index, item.cached_tokens))
                        if delta.finish is not None and item.finish is None:
                            await streams.stop(item.request_id, num_tokens)
                        if delta.is_first:
                            for index in choices.followers(delta.index):
                                await streams.add(self._request(admitted, index))
                        yield delta
                return
            except RequestFailed as failure:
                digest = admitted.model.digest
                if started or rebuilt or failure.code not in _REBUILT or digest is None:
                    raise
                is_corrupt = failure.code == ErrorCode.ADAPTER_CORRUPT
            await self._ensure_packed(digest, admitted.model.row_type, replace=is_corrupt)
            rebuilt = True

    def _request(self, admitted: Admitted, index: int) -> GenerationRequest:
        caller, prompt = admitted.origin.caller, admitted.prompt_of(index)
        is_active = admitted.adapter_key is not None and prompt.adapter_start is not None
        return GenerationRequest(
            request_id=admitted.engine_id(index),
            prompt_ids=prompt.ids,
            sampling=admitted.sampling_of(index),
            cache_salt=caller.cache_salt,
            flow=show("tn", caller.tenant_id),
            adapter_key=admitted.adapter_key if is_active else None,
            adapter_start=prompt.adapter_start or 0,
            vocab_size=admitted.model.facts.traits.vocab_size if is_active else None,
            timeout_s=self.time_left(admitted),
        )

    def _watchdog(self, admitted: Admitted) -> Watchdog:
        """The engine keeps the deadline; this is for one that died and does not come back."""
        return Watchdog(self.time_left(admitted) + self._grace)

    def time_left(self, admitted: Admitted) -> float:
        """Seconds until the request must have ended."""
        return max(0.0, admitted.origin.arrived + self._timeout - self._now())

    def _open(self, admitted: Admitted, tally: Tally) -> Entry:
        engine_ids = [admitted.engine_id(index) for index in range(admitted.num_choices)]
        try:
            row = replace(_row(admitted, tally), prompt_tokens=admitted.num_prompt_tokens)
            return self._ledger.open(row, engine_ids)
        except UsageNotRecorded as error:
            raise ServiceUnavailable(
                "The server cannot account for requests at the moment.",
                code="usage_not_recordable",
                retry_after=_LEDGER_RETRY_AFTER,
            ) from error

    async def _close(self, entry: Entry, admitted: Admitted, tally: Tally) -> None:
        try:
            await entry.close(self._final_row(admitted, tally))
        except UsageNotRecorded as error:
            raise PlatformError("The server could not account for the request.", status=500, code="usage_not_recorded") from error

    def _final_row(self, admitted: Admitted, tally: Tally) -> UsageRow:
        row = _row(admitted, tally)
        self._observe(row)
        return row


def _row(admitted: Admitted, tally: Tally) -> UsageRow:
    origin = admitted.origin
    return UsageRow(
        request_id=origin.request_id,
        client_request_id=origin.client_request_id,
        tenant_id=origin.caller.tenant_id,
        key_id=origin.caller.key_id,
        model=admitted.model.public_name,
        version_id=admitted.model.version_id,
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        output_tokens=tally.output_tokens,
        status=tally.status,
        created_at=int(origin.arrived * 1000),
    )
