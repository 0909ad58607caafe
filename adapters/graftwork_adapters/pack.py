"""From a validated upload to the rows that kernels read. Knows no configs and no names of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.keys import AdapterDigest, RowTypeName, packed_key
from graftwork_adapters.lora_tensors import LoraPair
from graftwork_adapters.packed import ABSENT, PackedIndex, PackedSite
from graftwork_adapters.tensor_values import Bytes, Matrix, encode_rows, read_fp32, row_size


def pack(
    weights: Path, pairs: Sequence[LoraPair], spec: BaseSpec, digest: AdapterDigest, row_type: RowTypeName
) -> tuple[PackedIndex, Bytes]:
    """The packed form of ``pairs`` (in site order), whose tensors lie in ``weights``: its index and its rows, uint8 [num_bytes].

    The same upload, base and row type give the same bytes.
    """
    sites: list[PackedSite] = []
    runs: list[tuple[int, int]] = []
    row = 0
    for pair in pairs:
        sites.append(PackedSite(pair.site.index, pair.rank, row, row + pair.rank, ABSENT, ABSENT))
        runs += [(pair.rank, row_size(row_type, pair.site.in_features)), (pair.rank, row_size(row_type, pair.site.out_features))]
        row += 2 * pair.rank
    key = packed_key(digest, spec.base_id, row_type)
    index = PackedIndex(key, digest, spec.base_id, row_type, tuple(sites), tuple(runs))
    rows = np.zeros(index.num_bytes, dtype=np.uint8)
    start = 0
    for pair in pairs:
        a, b = read_fp32(weights, pair.a), read_fp32(weights, pair.b)
        for matrix in (a, np.ascontiguousarray(fold_scale(b, pair.scale).T)):
            num_rows, size = matrix.shape[0], row_size(row_type, matrix.shape[1])
            encode_rows(matrix, row_type, rows[start : start + num_rows * size].reshape(num_rows, size))
            start += num_rows * size
    return index, rows


def longest_row_bytes(base: BaseSpec, row_type: RowTypeName) -> int:
    """Bytes of the longest row that an adapter of ``base`` can have: of A, of B, or of an fp32 scale or bias."""
    return max(
        max(row_size(row_type, max(site.in_features, site.out_features)), row_size("float32", site.out_features))
        for site in base.sites
    )


def row_bytes_of_rank(base: BaseSpec, row_type: RowTypeName, rank: int) -> npt.NDArray[np.int64]:
    """Bytes of each row, in packing order, of an adapter of ``rank`` on every projection of ``base``; int64 [rows]."""
    sizes = [row_size(row_type, features) for site in base.sites for features in (site.in_features, site.out_features)]
    return np.repeat(np.array(sizes, dtype=np.int64), rank)


def fold_scale(b: Matrix, scale: float) -> Matrix:
    """B with the adapter's scale in it: the one place where scale is applied. fp32 in, fp32 out."""
    return b * np.float32(scale)
