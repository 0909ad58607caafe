"""The memory for tensors that adapters bring whole: one buffer, a stretch of it for each adapter. Knows no references and no pages.

A tensor lies there in the type that the model computes in, so that a step reads it as it reads the base's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graftwork_adapters.device_copy import Copier
from graftwork_adapters.errors import BlobCorrupt
from graftwork_adapters.fetcher import HostAdapter
from graftwork_adapters.packed import ROW_ALIGNMENT, PackedIndex, PackedWhole
from graftwork_adapters.page_table import Placement
from graftwork_adapters.tensor_values import to_bf16_bits
from graftwork_adapters.whole_checks import TOKEN_IDS, VECTORS, check_wholes, embedding_rows, head_rows, held_bytes, whole_facts
from graftwork_adapters.wholes import EMBEDDING_TOKENS, WholeFacts

_CAST_ELEMENTS = 1 << 20
"""Cast at a time: small beside a head, whose cast would else take as much memory again."""

_Elements = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class WholeLimits:
    """What adapters may bring whole: ``num_bytes`` all together, for a base that computes in ``dtype``.
    ``shapes`` and ``sites`` are `whole_shapes` and `weight_sites` of `graftwork_adapters.whole_checks`.
    """

    num_bytes: int = 0
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sites: Mapping[str, int] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class DeviceWholes:
    """What an adapter on the device brings whole: ``tensors`` by the names of `graftwork_adapters.wholes`."""

    tensors: Mapping[str, Tensor]
    facts: WholeFacts


class WholeMemory:
    """Tensors by adapter index. `write` belongs to the thread that copies, all else to the one that keeps the books.

    ``by_index`` always is the same mapping; an adapter is in it from the end of `write` to `forget`.
    """

    def __init__(self, limits: WholeLimits, device: torch.device) -> None:
        self._limits = limits
        self._by_index: dict[int, DeviceWholes] = {}
        self.by_index: Mapping[int, DeviceWholes] = MappingProxyType(self._by_index)
        # Not cleared: nobody reads what has not been written, and on the CPU what nobody writes takes no memory.
        self._memory = torch.empty(self.capacity_bytes, dtype=torch.uint8, device=device)

    @property
    def capacity_bytes(self) -> int:
        """Bytes for all adapters together."""
        return self._limits.num_bytes // ROW_ALIGNMENT * ROW_ALIGNMENT

    def num_bytes(self, index: PackedIndex) -> int:
        """What an adapter's wholes take here. Any thread may call it; raises `BlobCorrupt` if they do not fit the base."""
        check_wholes(index, self._limits.shapes, self._limits.sites)
        return sum(self._size(whole) for whole in index.wholes)

    def write(self, placement: Placement, adapter: HostAdapter, copier: Copier) -> None:
        """Start to copy an adapter's wholes to their place. Raises `BlobCorrupt` for token ids that no row stands for."""
        index = adapter.index
        if not index.wholes:
            return
        self._check_token_ids(adapter)
        tensors: dict[str, Tensor] = {}
        place = placement.whole_start
        for whole, start in zip(index.wholes, index.whole_starts, strict=True):
            dtype = self._dtype(whole)
            size = math.prod(whole.shape) * dtype.itemsize
            flat = self._memory[place : place + size].view(dtype)
            done = 0
            for part in _cast(_elements(adapter, whole, start), whole, dtype):
                copier.copy(flat[done : done + len(part)], part)
                done += len(part)
            tensors[whole.name] = flat.view(whole.shape)
            place += self._size(whole)
        facts = whole_facts(index, placement.num_whole_bytes)
        if facts is None or place != placement.whole_start + placement.num_whole_bytes:
            raise AssertionError(f"adapter {index.key}: its wholes end at {place}, its place is {placement}")
        self._by_index[placement.index] = DeviceWholes(MappingProxyType(tensors), facts)

    def forget(self, index: int) -> None:
        """The adapter's place goes to others; nothing reads its tensors any more."""
        self._by_index.pop(index, None)

    def discrepancies(self, live: Mapping[str, Placement]) -> list[str]:
        """What is wrong with the tensors that are here, given the placement of every complete adapter; empty when all is well."""
        found = []
        start = self._memory.data_ptr()
        placed = {place.index: (key, place) for key, place in live.items()}
        for index, brought in list(self._by_index.items()):
            if index not in placed:
                continue  # it is being copied, or its adapter has not been booked as complete yet
            key, place = placed[index]
            first, end = place.whole_start, place.whole_start + place.num_whole_bytes
            for name, tensor in brought.tensors.items():
                offset = tensor.data_ptr() - start
                if not first <= offset <= offset + tensor.nbytes <= end:
                    found.append(f"{name} of adapter {key} lies at {offset}, its place is {first} to {end}")
            if brought.facts.num_bytes != place.num_whole_bytes:
                found.append(f"wholes of adapter {key}: {brought.facts.num_bytes} bytes, its place has {place.num_whole_bytes}")
        missing = [key for index, (key, place) in placed.items() if place.num_whole_bytes and index not in self._by_index]
        return found + [f"adapter {key} has a place for wholes, which are not there" for key in missing]

    def _dtype(self, whole: PackedWhole) -> torch.dtype:
        if whole.name in TOKEN_IDS:
            return torch.int64
        return torch.float32 if whole.name in VECTORS else self._limits.dtype

    def _size(self, whole: PackedWhole) -> int:
        return held_bytes(whole, self._limits.dtype.itemsize)

    def _check_token_ids(self, adapter: HostAdapter) -> None:
        index, base = adapter.index, self._limits.shapes
        shapes = {whole.name: whole.shape for whole in index.wholes}
        for whole, start in zip(index.wholes, index.whole_starts, strict=True):
            if whole.name not in TOKEN_IDS:
                continue
            most = embedding_rows(shapes, base) if whole.name == EMBEDDING_TOKENS else head_rows(shapes, base)
            ids = _elements(adapter, whole, start)
            if ids[0] < 0 or ids[-1] >= most or (np.diff(ids) <= 0).any():
                raise BlobCorrupt(f"packed adapter {index.key}: {whole.name} are not ascending within 0..{most - 1}")


def _elements(adapter: HostAdapter, whole: PackedWhole, start: int) -> _Elements:
    """As they lie in the packed form; bf16 as its bits."""
    types = {"bfloat16": "<u2", "float32": "<f4", "int64": "<i8"}
    return adapter.rows[start : start + whole.num_bytes].view(types[whole.dtype])


def _cast(elements: _Elements, whole: PackedWhole, dtype: torch.dtype) -> Iterator[_Elements]:
    """Them in ``dtype``, bf16 as its bits, a part at a time. Not by torch, which would take the cores from the step."""
    if whole.dtype == "int64" or str(dtype) == f"torch.{whole.dtype}":
        yield elements
        return
    for start in range(0, len(elements), _CAST_ELEMENTS):
        part = elements[start : start + _CAST_ELEMENTS]
        if dtype == torch.float32:
            yield (part.astype(np.uint32) << 16).view(np.float32)
        elif dtype == torch.bfloat16:
            yield to_bf16_bits(part)
        else:
            raise AssertionError(f"no model computes in {dtype}")
