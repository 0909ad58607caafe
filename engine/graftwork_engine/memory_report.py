"""What an engine's memory holds, in words for whoever starts it. Measures nothing and decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.device_pool import DevicePool
from graftwork_adapters.keys import RowTypeName
from graftwork_adapters.pack import row_bytes_of_rank
from graftwork_engine.kv_memory import KvCache

RANKS = (8, 16, 64)
"""What is said of adapter memory is said of these: small, usual and large."""


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """Adapter memory in numbers. ``fit`` says by rank how many adapters that cover every projection can be there at once;
    ``whole_bytes`` are for what adapters bring whole, and ``num_heads`` of the base's size fit there.
    """

    num_bytes: int
    num_pages: int
    page_bytes: int
    row_type: RowTypeName
    fit: Mapping[int, int]
    whole_bytes: int
    num_heads: int


def adapter_room(pool: DevicePool, base: BaseSpec, row_type: RowTypeName, head_bytes: int) -> AdapterRoom:
    """What ``pool`` holds of adapters for ``base``, whose head has ``head_bytes``, if their rows are of ``row_type``."""
    fit = {rank: pool.how_many(row_bytes_of_rank(base, row_type, rank)) for rank in RANKS}
    whole_bytes = pool.whole_capacity_bytes
    return AdapterRoom(
        pool.capacity_bytes, pool.table.num_pages, pool.page_bytes, row_type, fit, whole_bytes, whole_bytes // head_bytes
    )


def what_fits(
    kv: KvCache, max_model_len: int, adapters: AdapterRoom | None, free_bytes: int | None, reserved_bytes: int = 0
) -> str:
    """One line: KV memory, adapter memory (None: there is none), and what is left, of which a step takes ``reserved_bytes``.

    ``free_bytes`` is None where that is not known.
    """
    parts = [
        f"KV memory of {_size(kv.num_bytes)} holds {kv.num_tokens} tokens in {kv.num_blocks} blocks of {kv.block_size}, "
        f"{kv.num_tokens / max_model_len:.1f} requests of the greatest length, {max_model_len} tokens"
    ]
    if adapters is None:
        parts.append("there is no adapter memory, since there is no store")
    else:
        counts = [f"{count} adapters of rank {rank}" for rank, count in adapters.fit.items()]
        parts.append(
            f"adapter memory of {_size(adapters.num_bytes)} in {adapters.num_pages} pages of {_size(adapters.page_bytes)} holds "
            f"{', '.join(counts[:-1])} or {counts[-1]}, on every projection in {adapters.row_type}"
        )
        parts.append(
            f"memory for what adapters bring whole of {_size(adapters.whole_bytes)} holds {adapters.num_heads} heads or embeddings"
        )
    if free_bytes is not None:
        step = f", of which a step takes up to {_size(reserved_bytes)}" if reserved_bytes else ""
        parts.append(f"{_size(free_bytes)} are left free{step}")
    return "; ".join(parts)


def _size(num_bytes: int) -> str:
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << shift:
            return f"{num_bytes / (1 << shift):.4g} {unit}"
    return f"{num_bytes} bytes"
