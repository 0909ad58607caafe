"""The identity of a base model: a hash over its tensors' contents, remembered until a file changes. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from graftwork_adapters.safetensors_header import TensorEntry

_CHUNK_BYTES = 4 << 20


def base_id(model_dir: Path, tensors: Mapping[str, tuple[Path, TensorEntry]], cache_dir: Path | None) -> str:
    """Hex sha256 over (name, dtype, shape, sha256 of the bytes) of every tensor, in name order.

    The result is kept in ``cache_dir`` (beside the model if None; not at all where that cannot be written) and holds while path,
    size and modification time of every file stay the same. Reading a large model takes minutes the first time.
    """
    files = sorted({path for path, _ in tensors.values()})
    stamp: list[list[str | int]] = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    cache = _cache_path(model_dir, cache_dir)
    known = _read_cache(cache, stamp)
    if known is not None:
        return known
    result = _hash_tensors(tensors)
    _write_cache(cache, stamp, result)
    return result


def sha256_of_range(path: Path, start: int, end: int) -> bytes:
    """sha256 of the bytes ``start`` to ``end`` of a file; raises `EOFError` if it ends before."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        left = end - start
        while left:
            chunk = file.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise EOFError(f"{path.name} ended {left} bytes early")
            digest.update(chunk)
            left -= len(chunk)
    return digest.digest()


def _hash_tensors(tensors: Mapping[str, tuple[Path, TensorEntry]]) -> str:
    total = hashlib.sha256(b"graftwork.base.v1")
    for name in sorted(tensors):
        path, entry = tensors[name]
        content = sha256_of_range(path, entry.start, entry.end).hex()
        total.update(json.dumps([name, entry.dtype, list(entry.shape), content]).encode() + b"\n")
    return total.hexdigest()


def _cache_path(model_dir: Path, cache_dir: Path | None) -> Path:
    if cache_dir is None:
        return model_dir / ".graftwork-base-id.json"
    return cache_dir / f"base-id-{hashlib.sha256(str(model_dir.resolve()).encode()).hexdigest()[:16]}.json"


def _read_cache(cache: Path, stamp: list[list[str | int]]) -> str | None:
    with suppress(OSError, ValueError):
        known = json.loads(cache.read_bytes())
        if isinstance(known, dict) and known.get("files") == stamp and isinstance(known.get("base_id"), str):
            return str(known["base_id"])
    return None


def _write_cache(cache: Path, stamp: list[list[str | int]], result: str) -> None:
    with suppress(OSError):  # a read-only model folder costs the next start the hashing again, nothing else
        cache.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=cache.parent, prefix=f"{cache.name}.")
        with os.fdopen(handle, "w") as file:
            json.dump({"files": stamp, "base_id": result}, file)
        Path(name).replace(cache)
