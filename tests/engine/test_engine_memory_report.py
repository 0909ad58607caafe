"""What a start says of memory: numbers that an operator can size by, and that the pool then keeps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_model import CONFIG

from graftwork_adapters.base_spec import BaseSpec, Site
from graftwork_adapters.device_pool import DevicePool
from graftwork_adapters.pack import longest_row_bytes, row_bytes_of_rank
from graftwork_adapters.page_table import plan_pages
from graftwork_adapters.whole_memory import WholeLimits
from graftwork_engine.kv_memory import allocate_kv_cache
from graftwork_engine.memory_report import AdapterRoom, adapter_room, what_fits

SITES = (Site(0, 0, "a", "m.a", 96, 128, False), Site(1, 0, "b", "m.b", 128, 32, True))
BASE = BaseSpec("id", "base", "LlamaForCausalLM", 1, SITES, frozenset())


def test_the_line_names_kv_adapters_and_what_is_left() -> None:
    kv = allocate_kv_cache(CONFIG, 10, 16, torch.float32)
    room = AdapterRoom(256 << 20, 1024, 256 << 10, "bfloat16", {8: 40, 16: 20, 64: 0}, 300 << 20, 7)
    line = what_fits(kv, 64, room, 5 << 29, 3 << 29)
    assert "holds 160 tokens in 10 blocks of 16, 2.5 requests of the greatest length, 64 tokens; " in line
    assert "adapter memory of 256 MiB in 1024 pages of 256 KiB holds 40 adapters of rank 8, 20 adapters of rank 16 or " in line
    assert "or 0 adapters of rank 64, on every projection in bfloat16; " in line
    assert "memory for what adapters bring whole of 300 MiB holds 7 heads or embeddings; " in line
    assert line.endswith("2.5 GiB are left free, of which a step takes up to 1.5 GiB")
    assert "\n" not in line


def test_what_is_not_there_or_not_known_is_not_invented() -> None:
    kv = allocate_kv_cache(CONFIG, 1, 16, torch.float32)
    line = what_fits(replace(kv, keys=(), values=()), 16, None, None)
    assert line == (
        "KV memory of 0 bytes holds 16 tokens in 1 blocks of 16, 1.0 requests of the greatest length, 16 tokens; "
        "there is no adapter memory, since there is no store"
    )


@pytest.mark.parametrize("row_type", ["bfloat16", "float32", "int8", "e4m3"])
@pytest.mark.parametrize("page_bytes", [64, 1024, 4096])
def test_as_many_adapters_have_a_place_as_are_reported(row_type, page_bytes: int) -> None:
    def new_pool() -> DevicePool:
        wholes = WholeLimits(1000, {}, {}, torch.float32)
        return DevicePool(200_000, len(SITES), longest_row_bytes(BASE), page_bytes=page_bytes, wholes=wholes)

    room = adapter_room(new_pool(), BASE, row_type, head_bytes=300)
    assert (room.whole_bytes, room.num_heads) == (960, 3)
    assert room.num_bytes == room.num_pages * room.page_bytes <= 200_000
    assert list(room.fit) == [8, 16, 64]
    for rank, count in room.fit.items():
        pool = new_pool()
        extent = plan_pages(row_bytes_of_rank(BASE, row_type, rank), pool.page_bytes).extent
        assert [pool.place(extent) is not None for _ in range(count + 1)] == [True] * count + [False]
    assert room.fit[8] > room.fit[64]


def test_rows_are_those_that_packing_makes() -> None:
    assert np.array_equal(row_bytes_of_rank(BASE, "bfloat16", 2), [192, 192, 256, 256, 256, 256, 64, 64])
