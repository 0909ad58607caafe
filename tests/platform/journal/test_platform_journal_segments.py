"""A journal's files: whose they are, and what a write that fails leaves of them."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest
from journal_bench import Bench, fail_writes, kill, run

from graftwork_platform.journal.records import MAGIC
from graftwork_platform.journal.segments import JournalFolder, Segment, take_dead


def test_a_living_journal_is_nobody_elses(bench: Bench) -> None:
    async def work() -> None:
        ledger = await bench.started()
        assert take_dead(bench.root) == []
        await kill(ledger)
        [dead] = take_dead(bench.root)
        assert take_dead(bench.root) == []
        dead.release()
        [dead] = take_dead(bench.root)
        dead.remove()
        other = os.open(os.devnull, os.O_RDONLY)  # gets the lock's number
        dead.release()
        os.close(other)
        assert take_dead(bench.root) == []
        assert bench.folders() == []

    run(work)


def test_what_a_cut_short_deletion_left_is_deleted(tmp_path: Path) -> None:
    root = tmp_path / "journal"
    folder = JournalFolder.create(root)
    folder.release()
    (folder.path / "lock").unlink()
    (tmp_path / "journal" / "notes.txt").write_text("not ours")
    [dead] = take_dead(root)
    dead.remove()
    assert [path.name for path in root.iterdir()] == ["notes.txt"]


def test_a_segment_takes_all_or_nothing_from_many_threads(tmp_path: Path) -> None:
    folder = JournalFolder.create(tmp_path / "journal")
    segment = folder.start_segment(MAGIC)

    async def work() -> None:
        await asyncio.gather(*(asyncio.to_thread(segment.append, bytes([65 + n % 26]) * 100) for n in range(200)))

    asyncio.run(work())
    body = segment.path.read_bytes()[len(MAGIC) :]
    assert len(body) == 200 * 100
    assert all(len(set(body[place : place + 100])) == 1 for place in range(0, len(body), 100))
    segment.close()
    with pytest.raises(OSError, match="closed"):
        segment.append(b"x")
    folder.remove()


def test_a_tail_that_cannot_be_cut_off_ends_the_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = JournalFolder.create(tmp_path / "journal")
    segment: Segment = folder.start_segment(MAGIC)

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as broken:
        fail_writes(broken, 3)
        broken.setattr("graftwork_platform.journal.segments.os.ftruncate", refuse)
        with pytest.raises(OSError, match="No space"):
            segment.append(b"record")
    with pytest.raises(OSError, match="No space"):
        segment.append(b"record")
    segment.close()
    folder.remove()
