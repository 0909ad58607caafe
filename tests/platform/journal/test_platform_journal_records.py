"""The journal's format: what is written is read; whatever is torn or flipped is cut off with all behind it, and nothing else is."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from journal_bench import engine_ids_of, make_row

from graftwork_platform.ids import uuid7
from graftwork_platform.journal.records import (
    MAGIC,
    MAX_PAYLOAD,
    Checkpoint,
    Close,
    Count,
    Open,
    Reading,
    Record,
    RecordTooLong,
    encode_counts,
    encode_record,
)
from graftwork_platform.models import UsageStatus

_ROW = make_row(client_request_id="mine", version_id=uuid7())
RECORDS: list[Record] = [
    Open(_ROW, tuple(engine_ids_of(_ROW, 2))),
    Checkpoint({engine_id: Count(3, 1) for engine_id in engine_ids_of(_ROW, 2)}),
    Close(make_row(status=UsageStatus.COMPLETED, output_tokens=7)),
]
FRAMES = [encode_record(record) for record in RECORDS]
SEGMENT = MAGIC + b"".join(FRAMES)
ENDS = [len(MAGIC) + sum(len(frame) for frame in FRAMES[:count]) for count in range(len(FRAMES) + 1)]


def read(data: bytes) -> tuple[list[Record], int]:
    reading = Reading(data)
    return list(reading), reading.num_cut


def test_what_is_written_is_read() -> None:
    assert read(SEGMENT) == (RECORDS, 0)
    assert read(MAGIC) == ([], 0)
    assert read(b"") == ([], 0)


def test_a_tail_torn_at_any_byte_costs_only_the_torn_record() -> None:
    for size in range(len(SEGMENT)):
        records, num_cut = read(SEGMENT[:size])
        whole = [end for end in ENDS if end <= size]
        assert records == RECORDS[: max(0, len(whole) - 1)]
        assert num_cut == size - (whole[-1] if whole else 0)


def test_a_flipped_bit_is_noticed_wherever_it_is() -> None:
    for place in range(len(MAGIC), len(SEGMENT)):
        for bit in range(8):
            damaged = bytearray(SEGMENT)
            damaged[place] ^= 1 << bit
            records, num_cut = read(bytes(damaged))
            sound = sum(end <= place for end in ENDS) - 1
            assert records == RECORDS[:sound]
            assert num_cut == len(SEGMENT) - ENDS[sound]


@given(st.binary(max_size=200))
def test_garbage_behind_the_last_record_changes_nothing(garbage: bytes) -> None:
    records, num_cut = read(SEGMENT + garbage)
    assert records == RECORDS
    assert num_cut == len(garbage)


def test_zeros_and_absurd_sizes_are_no_records() -> None:
    assert read(SEGMENT + bytes(4096)) == (RECORDS, 4096)
    for size in (MAX_PAYLOAD + 1, 0xFFFFFFFF):
        assert read(SEGMENT + size.to_bytes(4, "little") + bytes(100))[0] == RECORDS


def test_a_sound_record_of_an_unknown_kind_is_not_guessed_at() -> None:
    payload = msgspec.msgpack.encode({"type": "refund"})
    size = len(payload).to_bytes(4, "little")
    frame = size + zlib.crc32(size + payload).to_bytes(4, "little") + payload
    assert read(MAGIC + frame + FRAMES[0]) == ([], len(frame) + len(FRAMES[0]))


def test_another_format_is_told_from_a_torn_beginning() -> None:
    assert Reading(b"graftwork usage journal 2\n" + FRAMES[0]).is_other_format
    for size in range(len(MAGIC) + 1):
        assert not Reading(MAGIC[:size]).is_other_format


def test_no_number_of_counts_hides_what_lies_behind_them() -> None:
    counts = {f"req_{number:0160x}-{number % 1024}": Count(2**40 + number, 2**33) for number in range(100_000)}
    frames = encode_counts(counts)
    assert len(frames) > MAX_PAYLOAD, "too much for one record"
    records, num_cut = read(MAGIC + frames + FRAMES[2])
    assert (records[-1], num_cut) == (RECORDS[2], 0)
    found: dict[str, Count] = {}
    for record in records[:-1]:
        assert isinstance(record, Checkpoint)
        assert found.keys().isdisjoint(record.counts)
        found |= record.counts
    assert found == counts
    assert encode_counts({}) == b""
    assert read(MAGIC + encode_counts({"x" * (3 << 20): Count(1, 1), "y": Count(2, 2)}))[1] == 0


def test_a_record_that_no_reader_would_take_is_not_written() -> None:
    longest = Checkpoint({"x" * (MAX_PAYLOAD - 100): Count(1, 1)})
    assert read(MAGIC + encode_record(longest)) == ([longest], 0)
    with pytest.raises(RecordTooLong):
        encode_record(Checkpoint({"x" * MAX_PAYLOAD: Count(1, 1)}))


def test_the_largest_request_is_read_again() -> None:
    opened = Open(_ROW, tuple(engine_ids_of(_ROW, 1024)))
    assert read(MAGIC + encode_record(opened)) == ([opened], 0)
