"""Tensors that adapters bring whole: what does not fit is refused by name, and what fits is brought to its own memory as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_base as small
import torch
from small_base import HIDDEN, UP, VOCAB, limits

from graftwork_adapters import whole_memory, wholes
from graftwork_adapters.device_pool import DevicePool
from graftwork_adapters.errors import AdapterTooLarge, BlobCorrupt
from graftwork_adapters.fetcher import Fetcher, HostAdapter
from graftwork_adapters.packed import PackedWhole, read_packed, write_packed
from graftwork_adapters.residency import AdapterResidency

PAGE = 512


def new_pool(**changes: Any) -> DevicePool:
    settings = {"page_bytes": PAGE, "max_rows": 64, "max_adapters": 4, "wholes": limits(), **changes}
    return DevicePool(16 * PAGE, 4, 256, **settings)


def whole(name: str, *shape: int, dtype: Any = "float32") -> PackedWhole:
    return PackedWhole(name, dtype, shape)


@pytest.mark.parametrize(
    ("brought", "finding"),
    [
        ((whole("model.layers.7.mlp.up_proj.weight", 12, HIDDEN),), "model.layers.7.mlp.up_proj.weight has no place in this base"),
        ((whole("__class__", 1),), "__class__ has no place in this base"),
        ((whole("model.norm.weight", HIDDEN + 1),), r"model.norm.weight is \[9\], the base calls for \[8\]"),
        ((whole(UP, HIDDEN, 12),), r"up_proj.weight is \[8, 12\], the base calls for \[12, 8\]"),
        ((whole(wholes.HEAD, VOCAB, HIDDEN, 1),), r"lm_head.weight is \[10, 8, 1\], the base calls for \[10, 8\]"),
        ((whole(wholes.HEAD, VOCAB, HIDDEN - 1),), "lm_head.weight is"),
        ((whole(wholes.EMBEDDING, VOCAB),), "embed_tokens.weight is"),
        ((*small.NORM, *small.NORM), "model.norm.weight is there twice"),
        ((whole("model.norm.weight", 0),), "model.norm.weight has no elements"),
        ((whole("model.norm.weight", HIDDEN, dtype="int64"),), "model.norm.weight is int64, due is bfloat16 or float32"),
        ((whole(wholes.HEAD_SCALE, VOCAB, dtype="bfloat16"),), "lm_head.scale is bfloat16, due is float32"),
        ((whole(wholes.HEAD_TOKENS, 2),), "token_ids is float32, due is int64"),
        ((whole(wholes.HEAD_TOKENS, 2, dtype="int64"),), "one of lm_head.token_ids and lm_head.token_rows without the other"),
        ((whole(wholes.EMBEDDING_ROWS, 2, HIDDEN),), "token_rows is"),
        ((whole(wholes.EMBEDDING_LORA_A, VOCAB, 2),), "one of model.embed_tokens.lora_A and model.embed_tokens.lora_B without"),
        (
            (whole(wholes.HEAD_LORA_A, 2, HIDDEN), whole(wholes.HEAD_LORA_B, VOCAB, 3)),
            r"lora_B is \[10, 3\], the base calls for \[10, 2\]",
        ),
        ((whole(wholes.HEAD_TOKENS, 11, dtype="int64"), whole(wholes.HEAD_ROWS, 11, HIDDEN)), r"token_ids is \[11\]"),
        ((whole(wholes.HEAD, VOCAB + 1, HIDDEN),), "its head can draw 11 tokens, its embedding knows 10"),
        ((whole(wholes.EMBEDDING, VOCAB - 1, HIDDEN),), "its head can draw 10 tokens, its embedding knows 9"),
        ((whole(wholes.EMBEDDING, VOCAB + 1, HIDDEN), whole(wholes.EMBEDDING_LORA_A, VOCAB, 2)), r"lora_A is \[10, 2\]"),
    ],
)
def test_what_does_not_fit_the_base_is_refused_by_name(packed_of, brought: tuple[PackedWhole, ...], finding: str) -> None:
    with pytest.raises(BlobCorrupt, match=finding):
        new_pool().plan(packed_of("a", wholes=brought).index)


def test_rows_beside_a_whole_of_the_same_projection_are_refused(packed_of) -> None:
    with pytest.raises(BlobCorrupt, match=r"up_proj\.weight whole and has rows for it as well"):
        new_pool().plan(packed_of("a", (0, 0, 3), wholes=small.LINEAR).index)
    new_pool().plan(packed_of("a", (1, 2, 0, 3), wholes=small.LINEAR).index)


def test_a_base_that_is_served_without_wholes_refuses_all(packed_of) -> None:
    with pytest.raises(BlobCorrupt, match="brings tensors whole, which this base is not served with"):
        new_pool(wholes=None).plan(packed_of("a", wholes=small.NORM).index)


def test_what_can_never_fit_is_refused_with_the_option(packed_of) -> None:
    packed = packed_of("a", wholes=small.WIDE)
    for room in (0, 64, 704):
        with pytest.raises(
            AdapterTooLarge, match=f"take 768 bytes, there are {room} for those of all adapters.*adapter_whole_bytes"
        ):
            new_pool(wholes=limits(room + 60)).plan(packed.index)
    assert new_pool(wholes=limits(768)).plan(packed.index).num_whole_bytes == 768


@pytest.mark.parametrize("ids", [[3, 1, 5], [1, 1, 5], [-1, 2, 3], [1, 2, VOCAB]])
def test_token_ids_that_no_row_stands_for_are_refused(packed_of, ids: list[int]) -> None:
    packed, pool = packed_of("a", wholes=small.TOKENS), new_pool()
    start = packed.index.whole_starts[0]
    packed.rows[start : start + 24].view("<i8")[:] = ids
    layout = pool.plan(packed.index)
    place = pool.place(layout.extent)
    with pytest.raises(BlobCorrupt, match=f"token_ids are not ascending within 0..{VOCAB - 1}"):
        pool.write(place, layout, HostAdapter(packed.index, packed.rows))
    assert not pool.wholes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [7, 1 << 20])
def test_they_lie_there_in_the_type_that_the_model_computes_in(
    packed_of, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, at_once: int
) -> None:
    """Both ways, a part at a time; ids and scales keep their own type. Bytes are counted as they lie there."""
    monkeypatch.setattr(whole_memory, "_CAST_ELEMENTS", at_once)
    brought = (*small.TOKENS, *small.HEAD, *small.NORM)
    packed, pool = packed_of("a", wholes=brought), new_pool(wholes=limits(dtype=dtype))
    values = {}
    for part, start in zip(brought, packed.index.whole_starts, strict=True):
        raw = packed.rows[start : start + part.num_bytes]
        if part.dtype != "int64":
            random = torch.randn(part.shape, generator=torch.Generator().manual_seed(len(values)))
            values[part.name] = random.to(getattr(torch, part.dtype))
            raw[:] = values[part.name].view(torch.uint8).numpy().reshape(-1)
    layout = pool.plan(packed.index)
    place = pool.place(layout.extent)
    pool.write(place, layout, HostAdapter(packed.index, packed.rows))
    found = pool.wholes[place.index]
    assert found.tensors[wholes.EMBEDDING_TOKENS].tolist() == [1, 3, 5]
    for name, value in values.items():
        wanted = value if name == wholes.HEAD_SCALE else value.to(dtype)
        assert found.tensors[name].dtype == wanted.dtype
        assert torch.equal(found.tensors[name], wanted)
    assert found.facts.num_bytes == layout.num_whole_bytes == pool.used_whole_bytes
    assert layout.num_whole_bytes == sum(-(-tensor.nbytes // 64) * 64 for tensor in found.tensors.values())
    assert pool.discrepancies({"a": place}, ["a"]) == []


@pytest.mark.parametrize(
    ("brought", "vocab_size"),
    [(small.NORM, None), (small.TOKENS, None), (small.HEAD, VOCAB), (small.WIDE, VOCAB + 2), ((whole(wholes.HEAD, 7, HIDDEN),), 7)],
)
def test_what_a_scheduler_is_told(packed_of, brought: tuple[PackedWhole, ...], vocab_size: int | None) -> None:
    packed, pool = packed_of("a", wholes=brought), new_pool()
    layout = pool.plan(packed.index)
    place = pool.place(layout.extent)
    pool.write(place, layout, HostAdapter(packed.index, packed.rows))
    assert pool.wholes[place.index].facts.vocab_size == vocab_size


def test_a_recount_finds_tensors_that_are_not_in_their_place(packed_of) -> None:
    packed, pool = packed_of("a", wholes=small.NORM), new_pool()
    layout = pool.plan(packed.index)
    place = pool.place(layout.extent)
    pool.write(place, layout, HostAdapter(packed.index, packed.rows))
    moved = replace(place, whole_start=64)
    assert "model.norm.weight of adapter a lies at 0, its place is 64 to 128" in pool.discrepancies({"a": moved}, ["a"])
    grown = replace(place, num_whole_bytes=128)
    assert "wholes of adapter a: 64 bytes, its place has 128" in pool.discrepancies({"a": grown}, ["a"])
    pool._wholes.forget(place.index)
    assert pool.discrepancies({"a": place}, ["a"]) == ["adapter a has a place for wholes, which are not there"]
    assert "bytes for wholes 0 to 64 belong to nobody" in pool.discrepancies({}, [])


class Bench:
    """A residency whose background jobs run when told to."""

    def __init__(
        self, folder: Path, store: Any, new_executor: Callable[[], Any], whole_bytes: int, host_bytes: int = 1 << 16
    ) -> None:
        self.folder, self.store, self.new_executor = folder, store, new_executor
        self.sizes = whole_bytes, host_bytes
        self.start()

    def start(self) -> None:
        whole_bytes, host_bytes = self.sizes
        self.pool = new_pool(wholes=limits(whole_bytes))
        self.lanes = [self.new_executor() for _ in range(3)]
        load, store, copy = self.lanes
        self.fetcher = Fetcher(self.store, self.folder / "cache", 1 << 20)
        self.residency = AdapterResidency(
            self.fetcher, self.pool, host_bytes, load_executor=load, store_executor=store, copy_executor=copy
        )

    def run(self) -> None:
        for _ in range(20):
            for lane in self.lanes:
                while lane.jobs:
                    lane.run()
            self.residency.poll()

    def bring(self, key: str, *, keep: bool = False) -> int | None:
        """To the device, and with a reference if ``keep``."""
        self.residency.hold(key)
        self.residency.acquire(key)
        self.run()
        index = self.residency.acquire(key)
        self.residency.drop(key)
        if index is not None and not keep:
            self.residency.release(key)
        return index


@pytest.fixture
def bench(tmp_path: Path, memory_store, new_executor) -> Bench:
    return Bench(tmp_path, memory_store, new_executor, whole_bytes=800)


def test_room_for_wholes_is_made_by_those_that_have_some(bench: Bench, packed_of, tmp_path: Path, model_sees) -> None:
    """Others stay, however long they have not been used; and nobody goes if it could not be enough."""
    plain = bench.store.add(packed_of("plain"), tmp_path)
    norm = bench.store.add(packed_of("norm", (1,), wholes=small.NORM), tmp_path)
    head = bench.store.add(packed_of("head", (1,), wholes=small.HEAD), tmp_path)
    wide = packed_of("wide", (1,), wholes=small.WIDE)
    bench.store.add(wide, tmp_path)
    for key in (plain, norm, head):
        assert bench.bring(key) is not None
    assert bench.pool.used_whole_bytes == 64 + 320 + 64
    index = bench.bring(wide.key)
    assert index is not None
    model_sees(bench.pool.wholes, index, wide)
    assert bench.pool.used_whole_bytes == 768
    assert bench.residency.stats()["adapter_device_evictions_total"] == 2
    assert bench.residency.acquire(plain) is not None
    bench.residency.release(plain)
    assert bench.residency.discrepancies({}, {}) == []


def test_wholes_in_use_keep_others_waiting_for_room(bench: Bench, packed_of, tmp_path: Path) -> None:
    wide = bench.store.add(packed_of("wide", (1,), wholes=small.WIDE), tmp_path)
    head = bench.store.add(packed_of("head", (1,), wholes=small.HEAD), tmp_path)
    assert bench.bring(wide, keep=True) is not None
    bench.residency.hold(head)
    assert bench.residency.acquire(head) is None
    bench.run()
    assert bench.residency.acquire(head) is None
    assert bench.residency.needs_room(head)
    bench.residency.release(wide)
    bench.run()
    assert bench.residency.acquire(head) is not None
    assert bench.residency.discrepancies({head: 1}, {head: 1}) == []


def test_an_adapter_that_is_found_on_the_disk_gets_there_known_or_not(
    bench: Bench, packed_of, tmp_path: Path, model_sees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a start nobody knows what a file on the disk holds, and a place for as many rows is guessed, which is too little; later
    it is known that it brings wholes, and it is placed by its index, without an eviction for nothing."""
    packed = packed_of("wide", (1,), wholes=small.WIDE)
    bench.store.add(packed, tmp_path)
    assert bench.bring(packed.key) is not None
    bench.start()
    assert not bench.fetcher.brings_wholes(packed.key)
    index = bench.bring(packed.key)
    assert index is not None
    model_sees(bench.pool.wholes, index, packed)
    assert bench.fetcher.brings_wholes(packed.key)
    guessed = []
    monkeypatch.setattr(bench.pool, "most_needed", lambda *_: guessed.append(1))
    other = bench.store.add(packed_of("other", (1,), wholes=small.WIDE), tmp_path)
    bench.residency._host.capacity_bytes = packed.index.num_bytes + 10  # room on the host for one of them
    assert bench.bring(other) is not None
    index = bench.bring(packed.key)
    assert index is not None
    model_sees(bench.pool.wholes, index, packed)
    assert not guessed
    assert bench.store.fetched == [f"packed/{key}.safetensors" for key in (packed.key, other)]


def test_ids_that_are_wrong_fail_their_adapter_and_take_no_room(bench: Bench, packed_of, tmp_path: Path) -> None:
    packed = packed_of("wrong", (1,), wholes=small.TOKENS)
    start = packed.index.whole_starts[0]
    packed.rows[start : start + 24].view("<i8")[:] = [1, 2, VOCAB]
    bench.store.add(packed, tmp_path)
    bench.residency.hold(packed.key)
    bench.residency.acquire(packed.key)
    bench.run()
    failure = bench.residency.failure(packed.key)
    assert failure is not None
    assert failure.code == "adapter_corrupt"
    assert bench.pool.used_whole_bytes == bench.pool.used_bytes == 0
    assert bench.residency.discrepancies({packed.key: 1}, {}) == []


def test_a_file_with_wholes_is_read_as_it_was_written(packed_of, tmp_path: Path) -> None:
    packed = packed_of("a", wholes=small.TOKENS + small.HEAD)
    write_packed(tmp_path / "file", packed.index, packed.rows)
    index, rows = read_packed(tmp_path / "file", packed.key)
    assert index == packed.index
    assert np.array_equal(rows, packed.rows)
    assert index.num_bytes == index.num_row_bytes + 64 + 64 + 192 + 64
