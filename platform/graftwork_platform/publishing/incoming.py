"""Uploads in the object store while they arrive: parts in, checked files out. Knows no database and no tenants."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID, uuid4

from graftwork_adapters.scratch import scratch_folder, sweep_scratch
from graftwork_adapters.store import ObjectStore
from graftwork_platform.errors import BadRequest
from graftwork_platform.ids import unix_millis
from graftwork_platform.publishing.manifest import FileEntry, Part, parts_of
from graftwork_platform.publishing.store_threads import StoreThreads

_ROOT = "incoming/"
_COPY_BYTES = 1 << 20
_PART_KEY = re.compile(
    r"incoming/(?P<upload>[0-9a-f]{32})/(?P<file>\d+)\.(?P<number>\d+)\.(?P<generation>\d+)\.(?P<unique>[0-9a-f]{32})"
)
_CLOCK_SLACK_MS = 3_600_000  # by which the clocks of two servers may differ


@dataclass(frozen=True, slots=True)
class _StoredPart:
    """A part as a key names it. The one with the highest (generation, unique) is the part; lower ones it has replaced."""

    key: str
    file: int
    number: int
    generation: int
    unique: str


class Incoming:
    """Parts of uploads, below ``incoming/`` in the store, so that any server can take, count and assemble them.

    A part's presence is the only record of its arrival. A blob never changes, so a part that is sent again gets a key of its own,
    one generation above all it saw, and only then deletes those: readers find the old part or the new one, and of several sent at
    once the same one everywhere. ``root`` is a local folder for files on their way; other processes may use it too. Errors are
    `StoreError` and `OSError`. Blocking methods say so; call them from a worker thread.
    """

    def __init__(self, store: ObjectStore, root: Path, threads: StoreThreads) -> None:
        self._store = store
        self._threads = threads
        self._root = root
        self._folders: dict[UUID, tuple[Path, ExitStack]] = {}  # assembled here; closing the stack removes the folder

    async def receive(self, upload_id: UUID, files: Sequence[FileEntry], part: Part, body: AsyncIterator[bytes]) -> str:
        """Store one part; the key it got, for `forget`. It counts only when all of it has arrived.

        Raises `BadRequest` if the body is longer or shorter than the part, or, where the part is the whole file, not the file.
        """
        index = [file.path for file in files].index(part.path)
        with scratch_folder(self._root) as scratch:
            received = scratch / "part"
            digest = await _write_body(received, part, body)
            if part.size == files[index].size and digest != files[index].sha256:
                raise _checksum_mismatch(part.path)
            return await self._threads.run(self._store_part, upload_id, index, part.number, received)

    def forget(self, key: str) -> None:
        """Take back a part that came too late. Blocks on the store."""
        self._store.delete(key)

    def received(self, upload_id: UUID, files: Sequence[FileEntry], part_bytes: int) -> set[tuple[str, int]]:
        """(path, part number) of every part that is here. Blocks on the store."""
        return _here(_newest(self._parts(upload_id)), files, part_bytes)

    def assemble(self, upload_id: UUID, files: Sequence[FileEntry], part_bytes: int) -> None:
        """Make the adapter's folder of the parts and keep it for `folder`. Blocks on store and disk.

        Raises `BadRequest` naming the parts that are missing, or a file whose bytes are not those promised: its parts are then
        forgotten, so that they can be sent again; `BlobNotFound` if a part is being sent again just now.
        """
        stored = self._parts(upload_id)
        newest = _newest(stored)
        here = _here(newest, files, part_bytes)
        missing = [p for file in files for p in parts_of(file, part_bytes) if (p.path, p.number) not in here]
        if missing:
            named = ", ".join(f"{part.path} part {part.number}" for part in missing[:8])
            raise BadRequest(f"{len(missing)} parts have not arrived: {named}.", param="files", code="parts_missing")
        with ExitStack() as stack:
            scratch = stack.enter_context(scratch_folder(self._root))
            for index, file in enumerate(files):
                keys = [newest[index, part.number].key for part in parts_of(file, part_bytes)]
                if self._concatenate(keys, scratch / "files" / file.path, scratch / "part") != file.sha256:
                    for part in stored:
                        if part.file == index:
                            self._store.delete(part.key)
                    raise _checksum_mismatch(file.path)
            self.release(upload_id)
            self._folders[upload_id] = (scratch / "files", stack.pop_all())

    def folder(self, upload_id: UUID, files: Sequence[FileEntry], part_bytes: int) -> Path:
        """The adapter's folder, assembled here unless it was already; until `drop`. Blocks and raises as `assemble` does."""
        if upload_id not in self._folders:
            self.assemble(upload_id, files, part_bytes)
        return self._folders[upload_id][0]

    def release(self, upload_id: UUID) -> None:
        """Remove what was assembled here, since another server publishes it. Blocks on disk."""
        if (kept := self._folders.pop(upload_id, None)) is not None:
            kept[1].close()

    def drop(self, upload_id: UUID) -> None:
        """Forget an upload's bytes. Blocks on store and disk."""
        self.release(upload_id)
        for key in list(self._store.list_keys(f"{_ROOT}{upload_id.hex}/")):
            self._store.delete(key)

    def sweep(self, keep: Collection[UUID], now: int) -> None:
        """Forget every upload but these; ``now`` in Unix milliseconds. Blocks on store and disk.

        Uploads of the last hour stay: they may have been made behind the list ``keep``, by a server whose clock is slow.
        """
        kept, young = set(keep), now - _CLOCK_SLACK_MS
        for upload_id in list(self._folders):  # a copy: other threads assemble and drop meanwhile
            if upload_id not in kept and unix_millis(upload_id) < young:
                self.release(upload_id)
        for key in list(self._store.list_keys(_ROOT)):
            named = _PART_KEY.fullmatch(key)
            if named and (upload_id := UUID(hex=named["upload"])) not in kept and unix_millis(upload_id) < young:
                self._store.delete(key)

    def sweep_local(self) -> None:
        """Remove what crashed processes left on the local disk. Blocks on disk."""
        sweep_scratch(self._root)

    def close(self) -> None:
        """Remove this process's local files; what is in the store stays. Blocks on disk."""
        for upload_id in list(self._folders):
            self.release(upload_id)

    def _store_part(self, upload_id: UUID, index: int, number: int, source: Path) -> str:
        older = [part for part in self._parts(upload_id) if (part.file, part.number) == (index, number)]
        generation = max((part.generation for part in older), default=0) + 1
        # Numbers, never the client's paths: nothing that a client wrote becomes a key before the whole manifest was checked.
        key = f"{_ROOT}{upload_id.hex}/{index}.{number}.{generation}.{uuid4().hex}"
        self._store.put_if_absent(key, source)
        for part in older:
            self._store.delete(part.key)
        return key

    def _parts(self, upload_id: UUID) -> list[_StoredPart]:
        found = filter(None, map(_PART_KEY.fullmatch, self._store.list_keys(f"{_ROOT}{upload_id.hex}/")))
        return [_StoredPart(m[0], int(m["file"]), int(m["number"]), int(m["generation"]), m["unique"]) for m in found]

    def _concatenate(self, keys: Sequence[str], target: Path, scratch: Path) -> str:
        """Write the file made of these parts; the hex sha256 of its bytes."""
        target.parent.mkdir(parents=True, exist_ok=True)
        self._store.fetch(keys[0], target)
        with target.open("r+b") as out:
            digest = hashlib.file_digest(out, "sha256")
            for key in keys[1:]:
                self._store.fetch(key, scratch)
                with scratch.open("rb") as part:
                    while chunk := part.read(_COPY_BYTES):
                        digest.update(chunk)
                        out.write(chunk)
                scratch.unlink()
        return digest.hexdigest()


def _newest(stored: Sequence[_StoredPart]) -> dict[tuple[int, int], _StoredPart]:
    """What counts, by file index and part number."""
    return {(part.file, part.number): part for part in sorted(stored, key=lambda part: (part.generation, part.unique))}


def _here(newest: Collection[tuple[int, int]], files: Sequence[FileEntry], part_bytes: int) -> set[tuple[str, int]]:
    return {
        (part.path, part.number)
        for index, file in enumerate(files)
        for part in parts_of(file, part_bytes)
        if (index, part.number) in newest
    }


async def _write_body(path: Path, part: Part, body: AsyncIterator[bytes]) -> str:
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        async for chunk in body:
            size += len(chunk)
            if size > part.size:
                raise BadRequest(f"Part {part.number} of `{part.path}` has more than {part.size} bytes.", code="part_size")
            digest.update(chunk)
            await asyncio.to_thread(file.write, chunk)
    if size != part.size:
        raise BadRequest(f"Part {part.number} of `{part.path}` has {size} bytes, expected {part.size}.", code="part_size")
    return digest.hexdigest()


def _checksum_mismatch(path: str) -> BadRequest:
    return BadRequest(f"The bytes of `{path}` do not have the promised sha256; send the file again.", code="checksum_mismatch")
