"""Send a folder as a new version of an adapter and wait for the verdict. Knows no terminal and checks nothing itself."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from graftwork_platform.admin.client import AdminClient, CallFailed
from graftwork_platform.admin.schemas import VersionOut
from graftwork_platform.models import UploadState, VersionState
from graftwork_platform.row_types import WantedRowType

_READ_BYTES = 1 << 20
_FIRST_PAUSE = 0.1  # seconds between questions for the verdict
_LONGEST_PAUSE = 2.0


def push(
    client: AdminClient,
    folder: Path,
    *,
    tenant: str,
    name: str,
    timeout: float,
    sent: Callable[[int, int], None],
    adapter_dtype: WantedRowType | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> VersionOut:
    """The version that ``folder`` became, ready or failed. Hidden files are left out. ``adapter_dtype``: of its rows.

    ``sent(done, total)`` hears of the bytes on their way. Raises `CallFailed`, also when the verdict takes longer than ``timeout``
    seconds.
    """
    files = _files(folder)
    promised: list[dict[str, str | int]] = [
        {"path": path, "size": (folder / path).stat().st_size, "sha256": _sha256(folder / path)} for path in files
    ]
    upload = client.create_upload(tenant, name, promised, adapter_dtype)
    total, done = sum(part.size for part in upload.parts), 0
    sent(0, total)
    for part in upload.parts:
        with (folder / part.path).open("rb") as file:
            file.seek(part.offset)
            client.put_part(tenant, upload.id, part, file.read(part.size))
        done += part.size
        sent(done, total)
    version: VersionOut | None = client.complete_upload(tenant, upload.id)
    give_up, pause = clock() + timeout, _FIRST_PAUSE
    while version is None or version.state == VersionState.VALIDATING:
        if clock() > give_up:
            step = f"It goes on; ask GET /admin/v1/tenants/{tenant}/uploads/{upload.id}."
            raise CallFailed(f"No verdict after {timeout:.0f} s.", code="timeout", next_step=step)
        sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE)
        upload = client.get_upload(tenant, upload.id)
        if upload.state == UploadState.EXPIRED:
            raise CallFailed("The upload expired before it was complete.", code="upload_expired", next_step="Push it again.")
        version = upload.version
    return version


def _files(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise CallFailed(f"{folder} is not a folder.", code="not_a_folder", next_step="Give the folder that PEFT saved.")
    inside = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    files = sorted(path.as_posix() for path in inside if not any(part.startswith(".") for part in path.parts))
    if not files:
        raise CallFailed(f"{folder} holds no files.", code="empty_folder", next_step="Give the folder that PEFT saved.")
    return files


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
