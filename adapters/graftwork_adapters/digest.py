"""The identity of an adapter version: a hash over what its upload says, whatever its folder or name. Imports no torch.

``sha256("graftwork.adapter.v1" ‖ semantic config ‖ per tensor in name order: name, dtype, shape, sha256(bytes) ‖ per tokenizer file
in name order: name, sha256(bytes))``, every part preceded by its length in eight bytes, so that no two uploads share an encoding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from graftwork_adapters.base_id import sha256_of_range
from graftwork_adapters.keys import AdapterDigest
from graftwork_adapters.lora_tensors import LoraPair
from graftwork_adapters.safetensors_header import SafetensorsHeader
from graftwork_adapters.upload_files import WEIGHTS_FILE

DIGEST_VERSION = b"graftwork.adapter.v1"


def adapter_digest(
    upload_dir: Path, header: SafetensorsHeader, pairs: Iterable[LoraPair], tokenizer_files: Iterable[str]
) -> AdapterDigest:
    """The digest of a validated upload; ``pairs`` carry the config with its patterns resolved. Streams the files."""
    total = hashlib.sha256(DIGEST_VERSION)
    for part in _parts(upload_dir, header, pairs, tokenizer_files):
        total.update(len(part).to_bytes(8, "little") + part)
    return AdapterDigest(total.hexdigest())


def _parts(
    upload_dir: Path, header: SafetensorsHeader, pairs: Iterable[LoraPair], tokenizer_files: Iterable[str]
) -> Iterator[bytes]:
    yield semantic_config(pairs)
    weights = upload_dir / WEIGHTS_FILE
    yield len(header.tensors).to_bytes(8, "little")
    for entry in sorted(header.tensors, key=lambda entry: entry.name):
        yield entry.name.encode()
        yield entry.dtype.encode()
        yield json.dumps(entry.shape, separators=(",", ":")).encode()
        yield sha256_of_range(weights, entry.start, entry.end)
    for name in sorted(tokenizer_files):
        path = upload_dir / name
        yield name.encode()
        yield sha256_of_range(path, 0, path.stat().st_size)


def semantic_config(pairs: Iterable[LoraPair]) -> bytes:
    """What the config does to the output, in one way of writing it: rank, alpha and kind of scale of every adapted module."""
    modules = sorted([pair.site.module, pair.rank, pair.alpha.hex(), pair.use_rslora] for pair in pairs)
    return json.dumps({"modules": modules}, separators=(",", ":")).encode()
