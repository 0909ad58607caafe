"""Uploads on disk while they arrive: parts in, checked files out. Knows no database and no tenants."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from uuid import UUID, uuid4

from graftwork_platform.errors import BadRequest
from graftwork_platform.ids import unix_millis
from graftwork_platform.publishing.manifest import FileEntry, Part, parts_of

_COPY_BYTES = 1 << 20


class Incoming:
    """A folder with one folder per upload: ``parts`` as they came, then ``files`` as they will be published.

    A part's presence on disk is the only record of its arrival. Blocking methods say so; call them from a worker thread.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    async def receive(self, upload_id: UUID, files: Sequence[FileEntry], part: Part, body: AsyncIterator[bytes]) -> None:
        """Write one part. It counts only when all of it has arrived; sent again, it replaces the old one.

        Raises `BadRequest` if the body is longer or shorter than the part, or, where the part is the whole file, not the file.
        """
        index = [file.path for file in files].index(part.path)
        folder = self._parts(upload_id)
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        partial = folder / f"{uuid4().hex}.partial"
        try:
            digest = await _write_body(partial, part, body)
            if part.size == files[index].size and digest != files[index].sha256:
                raise _checksum_mismatch(part.path)
            partial.replace(folder / _part_name(index, part.number))
        finally:
            partial.unlink(missing_ok=True)

    def received(self, upload_id: UUID, files: Sequence[FileEntry], part_bytes: int) -> set[tuple[str, int]]:
        """(path, part number) of every part that is here. Blocks on disk."""
        folder = self._parts(upload_id)
        return {
            (part.path, part.number)
            for index, file in enumerate(files)
            for part in parts_of(file, part_bytes)
            if (folder / _part_name(index, part.number)).exists()
        }

    def assemble(self, upload_id: UUID, files: Sequence[FileEntry], part_bytes: int) -> None:
        """Make `files` of the parts, durably. Blocks on disk.

        Raises `BadRequest` naming the parts that are missing, or a file whose bytes are not those promised: its parts are then
        forgotten, so that they can be sent again.
        """
        here = self.received(upload_id, files, part_bytes)
        missing = [p for file in files for p in parts_of(file, part_bytes) if (p.path, p.number) not in here]
        if missing:
            named = ", ".join(f"{part.path} part {part.number}" for part in missing[:8])
            raise BadRequest(f"{len(missing)} parts have not arrived: {named}.", param="files", code="parts_missing")
        assembled = self._root / upload_id.hex / "assembling"
        shutil.rmtree(assembled, ignore_errors=True)
        for index, file in enumerate(files):
            sources = [self._parts(upload_id) / _part_name(index, part.number) for part in parts_of(file, part_bytes)]
            if _concatenate(sources, assembled / file.path) != file.sha256:
                for source in sources:
                    source.unlink()
                raise _checksum_mismatch(file.path)
        target = self.files(upload_id)
        shutil.rmtree(target, ignore_errors=True)
        assembled.rename(target)

    def files(self, upload_id: UUID) -> Path:
        """Where `assemble` leaves the adapter's folder."""
        return self._root / upload_id.hex / "files"

    def drop(self, upload_id: UUID) -> None:
        """Forget an upload's bytes. Blocks on disk."""
        shutil.rmtree(self._root / upload_id.hex, ignore_errors=True)

    def sweep(self, keep: Collection[UUID], before: int) -> None:
        """Forget every upload made before ``before`` (Unix milliseconds) but these. Blocks on disk."""
        kept = {upload_id.hex for upload_id in keep}
        for folder in self._root.iterdir() if self._root.is_dir() else ():
            if folder.name not in kept and unix_millis(UUID(hex=folder.name)) < before:
                shutil.rmtree(folder, ignore_errors=True)

    def _parts(self, upload_id: UUID) -> Path:
        return self._root / upload_id.hex / "parts"


def _part_name(file_index: int, number: int) -> str:
    # Numbers, never the client's paths: nothing a client wrote becomes a file name before the whole manifest was checked.
    return f"{file_index}.{number}"


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


def _concatenate(sources: Sequence[Path], target: Path) -> str:
    digest = hashlib.sha256()
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as out:
        for source in sources:
            with source.open("rb") as part:
                while chunk := part.read(_COPY_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _checksum_mismatch(path: str) -> BadRequest:
    return BadRequest(f"The bytes of `{path}` do not have the promised sha256; send the file again.", code="checksum_mismatch")
