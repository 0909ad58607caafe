"""The identity of a full key/value block: what was computed before it, its tokens, and the adapter of each. Knows no memory.

A block's key is a hash over its parent's key, so it stands for the whole history, and two requests share a block exactly if base,
tenant, tokens and the adapter of every token agree:

    chain_start(base, salt) ─▶ block 0 ─▶ block 1 ─▶ block 2
                               none       none|A     A          adapter A begins inside block 1

Block 0 is also what the same tenant's requests without A would compute; blocks 1 and 2 are A's alone.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NewType

BlockKey = NewType("BlockKey", bytes)
"""32 bytes; equal keys mean equal contents."""


_BLOCK_TAG = b"graftwork.kv.block.v1"
_SIZE = struct.Struct("<Q")
_RUN = struct.Struct("<QQQ")  # size of the offset, offset, size of the name that follows


class AdapterRun(NamedTuple):
    """From this offset in a block on, tokens run on ``adapter_key`` (None: the base alone)."""

    offset: int
    adapter_key: str | None


BASE_ALONE = (AdapterRun(0, None),)
"""The runs of a block without an adapter."""


def chain_start(base_id: str, cache_salt: bytes) -> BlockKey:
    """What stands for the parent of a first block: nobody without the same base and salt can find what follows from it."""
    base = base_id.encode()
    parts = (b"graftwork.kv.start.v1", _SIZE.pack(len(base)), base, _SIZE.pack(len(cache_salt)), cache_salt)
    return BlockKey(hashlib.sha256(b"".join(parts)).digest())


def adapter_runs(start: int, end: int, adapter_key: str | None, adapter_start: int) -> tuple[AdapterRun, ...]:
    """The runs of tokens ``start..end`` of a request whose adapter applies from ``adapter_start`` on.

             start          adapter_start          end
    tokens     |── no adapter ──|── adapter_key ────|
    """
    if adapter_key is None or adapter_start >= end:
        return BASE_ALONE
    if adapter_start <= start:
        return (AdapterRun(0, adapter_key),)
    return (AdapterRun(0, None), AdapterRun(adapter_start - start, adapter_key))


def block_key(parent: BlockKey, token_ids: Sequence[int], runs: Iterable[AdapterRun]) -> BlockKey:
    """sha256 over parent key, token ids and adapter runs.

    Every part has a fixed length or is preceded by its length, so no two different inputs are encoded alike. Token ids are
    below 2⁶³.
    """
    num_tokens = len(token_ids)
    parts = [_BLOCK_TAG, parent, struct.pack(f"<Q{num_tokens}q", 8 * num_tokens, *token_ids)]
    for offset, adapter_key in runs:
        name = b"" if adapter_key is None else b"\x01" + adapter_key.encode()
        parts += (_RUN.pack(_SIZE.size, offset, len(name)), name)
    return BlockKey(hashlib.sha256(b"".join(parts)).digest())
