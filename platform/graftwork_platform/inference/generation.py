"""Running an admitted request and accounting for it: whatever its end, one usage row, durable before anyone is told of that end."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Protocol

from graftwork_adapters.errors import AdapterError
from graftwork_adapters.keys import AdapterDigest
from graftwork_engine.client import GenerationRequest
from graftwork_engine.errors import EngineUnavailable, ErrorCode, GraftworkEngineError, RequestFailed
from graftwork_engine.messages import OutItem
from graftwork_engine.request import FinishReason
from graftwork_platform.errors import PlatformError
from graftwork_platform.ids import show
from graftwork_platform.inference.admission import Admitted
from graftwork_platform.inference.engine import Engine
from graftwork_platform.inference.failures import as_platform_error, never_ran
from graftwork_platform.inference.watchdog import Watchdog
from graftwork_platform.models import UsageStatus
from graftwork_platform.usage import UsageNotRecorded, UsageRow

_log = logging.getLogger(__name__)


class UsageRecorder(Protocol):
    """Where usage rows go."""

    async def record(self, row: UsageRow) -> None:
        """Returns when ``row`` is durable; raises `UsageNotRecorded`. Once awaited, the row is written even if the caller is
        cancelled.
        """
        ...


@dataclass(slots=True)
class Tally:
    """What a request has used so far."""

    prompt_tokens: int
    cached_tokens: int = 0
    output_tokens: int = 0
    status: UsageStatus = UsageStatus.ABORTED  # until it ends in another way, it ends by its client's leaving

    def add(self, item: OutItem) -> None:
        """Count the next item."""
        self.output_tokens += len(item.token_ids)
        self.cached_tokens = max(self.cached_tokens, item.cached_tokens)


class Generator:
    """Runs requests on an engine. ``ensure_packed`` rebuilds an adapter's packed form; it raises `AdapterError`."""

    def __init__(
        self,
        engine: Engine,
        usage: UsageRecorder,
        ensure_packed: Callable[[AdapterDigest], Awaitable[None]],
        *,
        timeout: float,
        observe: Callable[[UsageRow], None],
        grace: float = 5.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        """``timeout``: seconds from a request's arrival to its last token; ``grace``: how much longer an engine is waited for that
        does not keep it. ``observe`` is told of each row as it is handed over.
        """
        self._engine = engine
        self._usage = usage
        self._ensure_packed = ensure_packed
        self._timeout = timeout
        self._observe = observe
        self._grace = grace
        self._now = now

    async def run(self, admitted: Admitted, tally: Tally) -> AsyncGenerator[OutItem, None]:
        """The request's output, counted in ``tally``. The last item comes once its usage is durable; closing early aborts.

        Raises `PlatformError`, also after usage is durable.
        """
        recorded = False
        try:
            with self._watchdog(admitted) as watchdog:
                async with aclosing(self._items(admitted)) as items:
                    while (item := await watchdog.next_of(items)) is not None:
                        tally.add(item)
                        if item.finish == FinishReason.ABORT.value:
                            raise EngineUnavailable("it stopped this request")
                        if item.finish is not None:
                            tally.status = UsageStatus.COMPLETED
                            recorded = True
                            await self._record(admitted, tally)
                        yield item
            if not recorded:
                raise EngineUnavailable("its output ended without a finish")
        except (GraftworkEngineError, AdapterError, TimeoutError) as failure:
            tally.status = UsageStatus.FAILED
            if tally.output_tokens == 0 and never_ran(failure):
                tally.prompt_tokens = 0
            error = as_platform_error(failure, admitted.model.public_name)
            if error.status >= 500:
                _log.warning("%s failed: %s", show("req", admitted.origin.request_id), failure)
            raise error from failure
        except Exception:
            tally.status = UsageStatus.FAILED
            raise
        finally:
            if not recorded:
                with suppress(UsageNotRecorded):  # the writer has logged it; the request's own end is what the client hears of
                    await self._usage.record(self._final_row(admitted, tally))

    async def _items(self, admitted: Admitted) -> AsyncGenerator[OutItem, None]:
        """The engine's items. A missing packed form is rebuilt once, as long as nothing has been sent."""
        started = False
        try:
            async with aclosing(self._engine.generate(self._request(admitted))) as items:
                async for item in items:
                    started = True
                    yield item
            return
        except RequestFailed as failure:
            if started or failure.code != ErrorCode.ADAPTER_MISSING or admitted.model.digest is None:
                raise
        await self._ensure_packed(admitted.model.digest)
        async with aclosing(self._engine.generate(self._request(admitted))) as items:
            async for item in items:
                yield item

    def _request(self, admitted: Admitted) -> GenerationRequest:
        caller = admitted.origin.caller
        return GenerationRequest(
            request_id=show("req", admitted.origin.request_id),
            prompt_ids=admitted.prompt_ids,
            sampling=admitted.sampling,
            cache_salt=caller.cache_salt,
            flow=show("tn", caller.tenant_id),
            adapter_key=admitted.adapter_key,
            timeout_s=self._time_left(admitted),
        )

    def _watchdog(self, admitted: Admitted) -> Watchdog:
        """The engine keeps the deadline; this is for one that died and does not come back."""
        return Watchdog(self._time_left(admitted) + self._grace)

    def _time_left(self, admitted: Admitted) -> float:
        return max(0.0, admitted.origin.arrived + self._timeout - self._now())

    async def _record(self, admitted: Admitted, tally: Tally) -> None:
        try:
            await self._usage.record(self._final_row(admitted, tally))
        except UsageNotRecorded as error:
            raise PlatformError("The server could not account for the request.", status=500, code="usage_not_recorded") from error

    def _final_row(self, admitted: Admitted, tally: Tally) -> UsageRow:
        origin = admitted.origin
        row = UsageRow(
            request_id=origin.request_id,
            client_request_id=origin.client_request_id,
            tenant_id=origin.caller.tenant_id,
            key_id=origin.caller.key_id,
            model=admitted.model.public_name,
            version_id=admitted.model.version_id,
            prompt_tokens=tally.prompt_tokens,
            cached_tokens=min(tally.cached_tokens, tally.prompt_tokens),
            output_tokens=tally.output_tokens,
            status=tally.status,
            created_at=int(origin.arrived * 1000),
        )
        self._observe(row)
        return row
