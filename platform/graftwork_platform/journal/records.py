"""What a journal says, and how it lies in a file: records that check themselves. Knows no files, no engine, no database.

segment = MAGIC, record*
record  = size of payload (u32), crc32 of size and payload (u32), payload (msgpack); both numbers little-endian
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from graftwork_platform.usage import UsageRow

MAGIC = b"graftwork usage journal 1\n"
"""Opens every segment; another number is another format, which this version leaves alone."""

MAX_PAYLOAD = 16 << 20
"""Bytes. A size beyond it is a damaged one, so none is written."""

_CHECKPOINT_BYTES = 1 << 20
"""About what one `Checkpoint` holds; more counts than that make several."""

_COUNT_BYTES = 24
"""The most that one count takes beside its id."""

_HEAD = struct.Struct("<II")


class RecordTooLong(ValueError):
    """A record that no reader would take."""


class Count(NamedTuple):
    """What one engine request has made so far."""

    output_tokens: int
    cached_tokens: int


class Open(msgspec.Struct, frozen=True, tag="open"):
    """A request is about to run, as these engine requests. ``row`` is how it would end if nothing more were known."""

    row: UsageRow
    engine_ids: tuple[str, ...]


class Checkpoint(msgspec.Struct, frozen=True, tag="checkpoint"):
    """Totals so far, by engine id, of those that have changed since the last one."""

    counts: dict[str, Count]


class Close(msgspec.Struct, frozen=True, tag="close"):
    """The final row of a request."""

    row: UsageRow


Record = Open | Checkpoint | Close

_encoder = msgspec.msgpack.Encoder(uuid_format="bytes")
_decoder = msgspec.msgpack.Decoder(Record)


def encode_record(record: Record) -> bytes:
    """One record with its head. Raises `RecordTooLong`."""
    payload = _encoder.encode(record)
    if len(payload) > MAX_PAYLOAD:
        raise RecordTooLong(f"a journal record of {len(payload)} bytes; at most {MAX_PAYLOAD} can be read again")
    size = len(payload).to_bytes(4, "little")
    return size + _check(size, payload).to_bytes(4, "little") + payload


def encode_counts(counts: Mapping[str, Count]) -> bytes:
    """As many checkpoints, one behind the other, as these counts need: none at all for none."""
    frames: list[bytes] = []
    part: dict[str, Count] = {}
    size = 0
    for engine_id, count in counts.items():
        added = len(engine_id.encode()) + _COUNT_BYTES
        if part and size + added > _CHECKPOINT_BYTES:
            frames.append(encode_record(Checkpoint(part)))
            part, size = {}, 0
        part[engine_id] = count
        size += added
    if part:
        frames.append(encode_record(Checkpoint(part)))
    return b"".join(frames)


class Reading:
    """The records of one segment's bytes, up to the first that is torn, damaged or unknown; nothing behind that is trusted.

    Iterate it once, then ask ``num_cut``: how many bytes were left out.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.num_cut = 0

    @property
    def is_other_format(self) -> bool:
        """True if the segment's first bytes are whole and not ours."""
        head = self._data[: len(MAGIC)]
        return not MAGIC.startswith(head)

    def __iter__(self) -> Iterator[Record]:
        data, at = self._data, 0
        if data.startswith(MAGIC):
            at = len(MAGIC)
            while (record := _record_at(data, at)) is not None:
                yield record[0]
                at = record[1]
        self.num_cut = len(data) - at


def _record_at(data: bytes, at: int) -> tuple[Record, int] | None:
    """The record at ``at`` and where the next one begins, or None if there is no sound one."""
    begin = at + _HEAD.size
    if len(data) < begin:
        return None
    size, crc = _HEAD.unpack_from(data, at)
    payload = data[begin : begin + size]
    if size > MAX_PAYLOAD or len(payload) < size or _check(data[at : at + 4], payload) != crc:
        return None
    try:
        return _decoder.decode(payload), begin + size
    except msgspec.DecodeError:
        return None


def _check(size: bytes, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(size))
