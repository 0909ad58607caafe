"""The identity of an adapter version: a hash over what its upload says, whatever its folder or name. Imports no torch.

``sha256("graftwork.adapter.v1" ‖ semantic config ‖ per tensor in name order: name, dtype, shape, sha256(bytes) ‖ per tokenizer file
in name order: name, sha256(bytes))``, every part preceded by its length in eight bytes, so that no two uploads share an encoding.
Tensors are those of all weight files together: how they are dealt out to shards says nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from graftwork_adapters.adapter_content import AdapterContent, VocabularyContent
from graftwork_adapters.base_id import sha256_of_range
from graftwork_adapters.keys import AdapterDigest
from graftwork_adapters.safetensors_header import TensorEntry, read_header
from graftwork_adapters.tensor_source import TensorSource, UploadTensors

DIGEST_VERSION = b"graftwork.adapter.v1"


def adapter_digest(
    upload_dir: Path, upload: UploadTensors, content: AdapterContent, tokenizer_files: Iterable[str]
) -> AdapterDigest:
    """The digest of a validated upload; ``content`` carries the config with its patterns resolved. Streams the files."""
    total = hashlib.sha256(DIGEST_VERSION)
    for part in _parts(upload_dir, upload, content, tokenizer_files):
        total.update(len(part).to_bytes(8, "little") + part)
    return AdapterDigest(total.hexdigest())


def _parts(upload_dir: Path, upload: UploadTensors, content: AdapterContent, tokenizer_files: Iterable[str]) -> Iterator[bytes]:
    yield semantic_config(upload, content)
    sent: list[tuple[Path, TensorEntry]] = []
    for name in upload.shards:
        sent += [(upload_dir / name, entry) for entry in read_header(upload_dir / name).tensors]
    yield len(sent).to_bytes(8, "little")
    for path, entry in sorted(sent, key=lambda item: item[1].name):
        yield entry.name.encode()
        yield entry.dtype.encode()
        yield json.dumps(entry.shape, separators=(",", ":")).encode()
        yield sha256_of_range(path, entry.start, entry.end)
    for name in sorted(tokenizer_files):
        path = upload_dir / name
        yield name.encode()
        yield sha256_of_range(path, 0, path.stat().st_size)


def semantic_config(upload: UploadTensors, content: AdapterContent) -> bytes:
    """What the config does to the output, in one way of writing it: rank, alpha and kind of scale of every adapted module.

    What only some adapters have stands in keys of its own, so that it changes no digest of the others. Beside the names and bytes
    of the tensors, which the digest covers anyway, these say which of them are applied, and how.
    """
    modules = sorted([pair.module, pair.rank, pair.alpha.hex(), pair.use_rslora] for pair in content.pairs)
    more: dict[str, object] = {
        "dora": sorted(pair.module for pair in content.pairs if pair.magnitude is not None),
        "lora_bias": sorted(pair.module for pair in content.pairs if pair.bias is not None),
        "bias": [site.site.module for site in content.sites if site.bias is not None],
        "wholes": [module.module for module in content.modules],
        "embedding": _of_vocabulary(content.embedding),
        "head": _of_vocabulary(content.head),
        "alora": content.invocation_token_ids,
        "read_as": sorted(
            [tensor.module, tensor.part, *_reading(tensor.source)] for tensor in upload.tensors if _is_turned(tensor.source)
        ),
    }
    said = {"modules": modules} | {key: value for key, value in more.items() if value}
    return json.dumps(said, separators=(",", ":")).encode()


def _of_vocabulary(content: VocabularyContent) -> dict[str, object]:
    said: dict[str, object] = {}
    if content.whole is not None:
        said["whole"] = content.whole.sent_as
    if content.tokens is not None:
        said["tokens"], said["rows"] = content.tokens.ids, content.tokens.rows.sent_as
    return said


def _is_turned(source: TensorSource) -> bool:
    return source.transposed or source.rows is not None


def _reading(source: TensorSource) -> list[object]:
    rows = None if source.rows is None else [[part.start, part.stop, part.step] for part in source.rows]
    return [source.sent_as, source.transposed, rows]
