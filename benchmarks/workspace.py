"""The folder of a benchmark's adapters, data and logs. One that is kept belongs to the base that it was made for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from results import BenchmarkFailed

STAMP = "base.json"
SAMPLE_BYTES = 1 << 20
"""Of the beginning and the end of each file of weights: a base that was trained further differs there too."""


def base_identity(base: Path) -> str:
    """A digest of a model's configuration and of samples of its weights."""
    digest = hashlib.sha256((base / "config.json").read_bytes())
    for shard in sorted(base.glob("*.safetensors")):
        size = shard.stat().st_size
        digest.update(f"{shard.name} {size} ".encode())
        with shard.open("rb") as weights:
            digest.update(weights.read(SAMPLE_BYTES))
            weights.seek(max(0, size - SAMPLE_BYTES))
            digest.update(weights.read(SAMPLE_BYTES))
    return digest.hexdigest()


@contextlib.contextmanager
def workspace(chosen: Path | None, base: Path) -> Iterator[Path]:
    """The chosen folder, which is kept, or another, which is removed unless the benchmark failed.

    Raises `BenchmarkFailed` for a chosen folder that holds what was not made for ``base``.
    """
    if chosen is not None:
        _claim(chosen, base)
        yield chosen.absolute()
        return
    path = Path(tempfile.mkdtemp(prefix="graftwork-bench-"))
    try:
        yield path
    except BenchmarkFailed:
        print(f"Logs and data are kept in {path}", file=sys.stderr)
        raise
    except BaseException:
        shutil.rmtree(path)
        raise
    shutil.rmtree(path)


def _claim(folder: Path, base: Path) -> None:
    """Stamp a new or empty folder with the base; compare a stamp that is there."""
    stamp, identity = folder / STAMP, base_identity(base)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not stamp.exists():
            if any(folder.iterdir()):
                raise BenchmarkFailed(f"--work {folder} holds other files and no {STAMP}; name a new or an empty folder")
            stamp.write_text(json.dumps({"base": base.name, "identity": identity}) + "\n", encoding="utf-8")
            return
        made_for = json.loads(stamp.read_text(encoding="utf-8"))
        name, other = made_for["base"], made_for["identity"]
    except OSError as error:
        raise BenchmarkFailed(f"--work {folder} cannot be used: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise BenchmarkFailed(f"{stamp} cannot be read ({error!r}); name another --work folder") from error
    if other != identity:
        raise BenchmarkFailed(
            f"--work {folder} was made for another base, {name}, and its adapters do not fit {base}; name another folder"
        )
