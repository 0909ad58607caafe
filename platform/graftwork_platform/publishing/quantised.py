"""The finding that says what 8-bit rows cost a version: its unrounded form is packed beside it, compared, and dropped again."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import get_args

from sqlalchemy.exc import SQLAlchemyError

from graftwork_adapters.errors import StoreError
from graftwork_adapters.keys import AdapterDigest, PackedKey, RowTypeName
from graftwork_adapters.publish_job import PublishJob, PublishResult
from graftwork_platform.publishing.blobs import Blobs
from graftwork_platform.publishing.quality import Measure, NotMeasured

_log = logging.getLogger(__name__)

QUANTISED: tuple[RowTypeName, ...] = ("int8", "e4m3")
HIGH_DIVERGENCE = 1e-2
"""Nats per token above which the report warns."""

_CHECK = "quantised"
_FIX = "compare its answers with those of a version with bfloat16 rows (adapters push --adapter-dtype bfloat16)"

Run = Callable[[PublishJob], Awaitable[PublishResult]]


class QuantisedCheck:
    """Adds the finding to the report of a version whose packed form is stored already."""

    def __init__(self, blobs: Blobs, run: Run, measure: Measure | None, reference_type: RowTypeName) -> None:
        """``measure`` None: no engine is there to ask. ``reference_type``: that of the rows which are compared with."""
        if reference_type not in get_args(RowTypeName) or reference_type in QUANTISED:
            raise AssertionError(f"{reference_type} rows are no reference")
        self._blobs = blobs
        self._run = run
        self._measure = measure
        self._reference_type: RowTypeName = reference_type

    async def look(self, job: PublishJob, result: PublishResult, prompts: Sequence[list[int]] | None) -> None:
        """Do so for a passed ``job``; ``prompts`` as `Measure` says.

        What goes wrong here is a finding, and keeps no version from being served.
        """
        if job.row_type not in QUANTISED or result.digest is None or result.packed_key is None:
            return
        try:
            message, is_high = await self._compare(job, result, result.digest, result.packed_key, prompts)
        except (NotMeasured, OSError, StoreError, SQLAlchemyError) as error:
            _log.warning("what %s rows cost %s was not measured: %s", job.row_type, result.digest, error)
            why = str(error) if isinstance(error, NotMeasured) else "the store or the database failed"
            message, is_high = f"what {job.row_type} rows cost could not be measured: {why}", True
        if is_high:
            result.report.warn(_CHECK, None, message, _FIX)
        else:
            result.report.passed(_CHECK, message)

    async def _compare(
        self, job: PublishJob, result: PublishResult, digest: AdapterDigest, key: PackedKey, prompts: Sequence[list[int]] | None
    ) -> tuple[str, bool]:
        if self._measure is None:
            raise NotMeasured("no engine is there")
        kind = self._reference_type
        path = job.out_path.with_name("reference.safetensors")
        packed = await self._run(replace(job, out_path=path, row_type=kind, expected_digest=digest))
        if not packed.ok or packed.packed_key is None:
            reason = next((finding.message for finding in packed.report.findings if finding.result == "fail"), "no reason given")
            raise NotMeasured(f"its form with {kind} rows cannot be packed: {reason}")
        was_there = await self._blobs.has_packed(digest, kind)
        await self._blobs.store_packed(digest, packed.packed_key, path)
        try:
            found = await self._measure(key, packed.packed_key, result.traits.vocab_size, prompts)
        finally:
            if not was_there:
                await self._blobs.drop_packed(digest, kind)
        message = (
            f"{job.row_type} rows against {kind}: divergence (KL) {found.divergence:.1e} per token, the most probable token is the "
            f"same at {found.same_token:.1%} of {found.num_places} places"
        )
        return message, found.divergence > HIGH_DIVERGENCE
