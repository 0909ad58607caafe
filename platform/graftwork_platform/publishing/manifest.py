"""The files that an upload promises to send, and the parts they arrive in. Knows no disk and no database."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from graftwork_platform.errors import BadRequest, PayloadTooLarge
from graftwork_platform.models import Manifest
from graftwork_platform.settings import UploadLimits

_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._ -]*(/[A-Za-z0-9_][A-Za-z0-9._ -]*)*")
_MAX_PATH_CHARS = 200
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file: its path inside the adapter's folder, its length in bytes and the hex sha256 of its bytes."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes ``offset .. offset + size`` of a file, sent as one body. Parts are numbered from 1."""

    path: str
    number: int
    offset: int
    size: int


def check_manifest(files: Sequence[FileEntry], limits: UploadLimits) -> None:
    """Raises `BadRequest` or `PayloadTooLarge` unless these files can be taken."""
    if not files:
        raise BadRequest("An upload needs at least one file.", param="files")
    if len(files) > limits.max_files:
        raise BadRequest(f"An upload has at most {limits.max_files} files, this one has {len(files)}.", param="files")
    for index, file in enumerate(files):
        _check_entry(file, f"files.{index}")
    total = sum(file.size for file in files)
    if total > limits.max_bytes:
        raise PayloadTooLarge(f"An upload has at most {limits.max_bytes} bytes, this one has {total}.", param="files")
    # Folded case: what differs only in case would be one file on some stores.
    paths = sorted(file.path.lower() + "/" for file in files)
    for earlier, later in pairwise(paths):
        if later.startswith(earlier):
            raise BadRequest(f"Two files share the path `{earlier[:-1]}`.", param="files", code="duplicate_path")


def check_path(path: str, param: str) -> None:
    """Raises `BadRequest` unless a file may have this path. Nothing is cleaned: two spellings never mean one file."""
    if len(path) > _MAX_PATH_CHARS or not _PATH.fullmatch(path):
        shown = ascii(path[:_MAX_PATH_CHARS])  # whatever it holds, it can be sent and read
        raise BadRequest(f"{shown} is not a path inside an adapter's folder.", param=param, code="invalid_path")


def parts_of(file: FileEntry, part_bytes: int) -> list[Part]:
    """The bodies in which ``file`` is sent; an empty file is one empty part."""
    count = max(1, -(-file.size // part_bytes))
    return [
        Part(file.path, index + 1, index * part_bytes, min(part_bytes, file.size - index * part_bytes)) for index in range(count)
    ]


def to_json(files: Sequence[FileEntry]) -> Manifest:
    """The form in which the database keeps a manifest."""
    return [asdict(file) for file in files]


def from_json(files: Manifest) -> list[FileEntry]:
    """What `to_json` was given."""
    return [FileEntry(str(file["path"]), int(file["size"]), str(file["sha256"])) for file in files]


def manifest_sha256(files: Sequence[FileEntry]) -> str:
    """A hash that two uploads share exactly if they have the same bytes under the same paths."""
    lines = sorted(f"{file.path}\0{file.sha256}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _check_entry(file: FileEntry, param: str) -> None:
    check_path(file.path, f"{param}.path")
    if file.size < 0:
        raise BadRequest("A file's size is not negative.", param=f"{param}.size")
    if not _SHA256.fullmatch(file.sha256):
        raise BadRequest("sha256 is 64 digits of lower-case hex.", param=f"{param}.sha256")
