"""From a validated upload to the packed form: the rows that kernels read, behind them what is brought whole. Knows no configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graftwork_adapters import wholes
from graftwork_adapters.adapter_content import AdapterContent, SiteContent, VocabularyContent
from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.base_weights import BaseWeights, rows_at_a_time
from graftwork_adapters.keys import AdapterDigest, RowTypeName, packed_key
from graftwork_adapters.packed import ABSENT, PackedIndex, PackedSite, PackedWhole, WholeTypeName
from graftwork_adapters.peft_config import EMBEDDING_MODULE, HEAD_MODULE
from graftwork_adapters.tensor_source import TensorSource
from graftwork_adapters.tensor_values import Bytes, Matrix, RawValues, encode_rows, row_size, to_bf16_bits, to_fp32


def pack(
    content: AdapterContent,
    scales: Mapping[str, Matrix],
    base: BaseWeights,
    spec: BaseSpec,
    digest: AdapterDigest,
    row_type: RowTypeName,
) -> tuple[PackedIndex, Bytes]:
    """The packed form of ``content``: its index and its bytes, uint8 [num_bytes]. ``scales`` are DoRA's (`dora.output_scales`).

    The same upload, base and row type give the same bytes. Beside the result, only a part of any tensor is in memory at a time.
    """
    sites, runs = _lay_out(content.sites, scales, row_type)
    whole_tensors = list(_wholes(content, scales, row_type))
    key = packed_key(digest, spec.base_id, row_type)
    packed_wholes = tuple(whole.packed for whole in whole_tensors)
    index = PackedIndex(key, digest, spec.base_id, row_type, tuple(sites), tuple(runs), packed_wholes)
    out = np.zeros(index.num_bytes, dtype=np.uint8)
    start = 0
    for content_of_site in content.sites:
        for matrix, kind in _site_rows(content_of_site, scales, base, row_type):
            num_rows, size = matrix.shape[0], row_size(kind, matrix.shape[1])
            encode_rows(matrix, kind, out[start : start + num_rows * size].reshape(num_rows, size))
            start += num_rows * size
    for whole, begin in zip(whole_tensors, index.whole_starts, strict=True):
        whole.write(out[begin : begin + whole.packed.num_bytes])
    return index, out


def _lay_out(
    contents: tuple[SiteContent, ...], scales: Mapping[str, Matrix], row_type: RowTypeName
) -> tuple[list[PackedSite], list[tuple[int, int]]]:
    sites: list[PackedSite] = []
    runs: list[tuple[int, int]] = []
    row = 0
    for content in contents:
        site, rank = content.site, 0 if content.pair is None else content.pair.rank
        vector = row_size("float32", site.out_features)
        parts = [(rank, row_size(row_type, site.in_features)), (rank, row_size(row_type, site.out_features))]
        scale_row = bias_row = ABSENT
        after = row + 2 * rank
        if site.module in scales:
            scale_row, after = after, after + 1
            parts.append((1, vector))
        if _has_bias(content):
            bias_row, after = after, after + 1
            parts.append((1, vector))
        sites.append(PackedSite(site.index, rank, row, row + rank, scale_row, bias_row))
        runs += [part for part in parts if part[0]]
        row = after
    return sites, runs


def _has_bias(content: SiteContent) -> bool:
    return content.bias is not None or (content.pair is not None and content.pair.bias is not None)


def _site_rows(
    content: SiteContent, scales: Mapping[str, Matrix], base: BaseWeights, row_type: RowTypeName
) -> Iterator[tuple[Matrix, RowTypeName]]:
    """A, B transposed, the output scale and the bias of a site, as far as it has them, and the type of their rows."""
    if content.pair is not None:
        yield content.pair.a.read(), row_type
        yield np.ascontiguousarray(fold_scale(content.pair.b.read(), content.pair.scale).T), row_type
    if content.site.module in scales:
        yield scales[content.site.module][np.newaxis], "float32"
    if _has_bias(content):
        yield _bias(content, base)[np.newaxis], "float32"


def _bias(content: SiteContent, base: BaseWeights) -> Matrix:
    """The bias that stands in place of the base's: the adapter's or the base's, and B's own times the scale."""
    site = content.site
    if content.bias is not None:
        bias = content.bias.read()
    elif site.has_bias:
        bias = base.tensor(f"{site.module}.bias").read()
    else:
        bias = np.zeros(site.out_features, dtype=np.float32)
    if content.pair is not None and content.pair.bias is not None:
        bias = bias + fold_scale(content.pair.bias.read(), content.pair.scale)
    return bias


@dataclass(frozen=True, slots=True)
class _Whole:
    """A tensor to be written whole: ``values`` as a file or this process holds them, of the type ``dtype`` in safetensors' name."""

    packed: PackedWhole
    values: RawValues
    dtype: str
    scale: float = 1.0
    order: npt.NDArray[np.int64] | None = None

    def write(self, out: Bytes) -> None:
        """Write the elements into ``out``, uint8 [num_bytes], a part at a time."""
        step, start = rows_at_a_time(self.packed.shape), 0
        for first in range(0, self.packed.shape[0], step):
            part = self.values[first : first + step] if self.order is None else self.values[self.order[first : first + step]]
            elements = self._encode(part)
            out[start : start + elements.nbytes] = elements.reshape(-1).view(np.uint8)
            start += elements.nbytes

    def _encode(self, part: RawValues) -> RawValues:
        if self.packed.dtype == "int64":
            return np.ascontiguousarray(part, dtype="<i8")
        exact = np.ascontiguousarray(to_fp32(part, self.dtype))
        if self.scale != 1.0:
            exact = fold_scale(exact, self.scale)
        return to_bf16_bits(exact) if self.packed.dtype == "bfloat16" else exact.astype("<f4", copy=False)


def _wholes(content: AdapterContent, scales: Mapping[str, Matrix], row_type: RowTypeName) -> Iterator[_Whole]:
    dtype: WholeTypeName = "float32" if row_type == "float32" else "bfloat16"
    yield from _vocabulary(content.embedding, _EMBEDDING_NAMES, scales.get(EMBEDDING_MODULE), dtype)
    yield from _vocabulary(content.head, _HEAD_NAMES, scales.get(HEAD_MODULE), dtype)
    for module in content.modules:
        yield _sent(f"{module.module}.weight", module.weight, dtype)
        if module.bias is not None:
            yield _sent(f"{module.module}.bias", module.bias, dtype)


@dataclass(frozen=True, slots=True)
class _Names:
    whole: str
    tokens: str
    rows: str
    a: str
    b: str
    scale: str
    is_a_turned: bool  # an embedding's A lies as [tokens, r]: a row for each token


_EMBEDDING_NAMES = _Names(
    wholes.EMBEDDING,
    wholes.EMBEDDING_TOKENS,
    wholes.EMBEDDING_ROWS,
    wholes.EMBEDDING_LORA_A,
    wholes.EMBEDDING_LORA_B,
    wholes.EMBEDDING_SCALE,
    is_a_turned=True,
)
_HEAD_NAMES = _Names(
    wholes.HEAD, wholes.HEAD_TOKENS, wholes.HEAD_ROWS, wholes.HEAD_LORA_A, wholes.HEAD_LORA_B, wholes.HEAD_SCALE, is_a_turned=False
)


def _vocabulary(content: VocabularyContent, names: _Names, scale: Matrix | None, dtype: WholeTypeName) -> Iterator[_Whole]:
    if content.whole is not None:
        yield _sent(names.whole, content.whole, dtype)
    if content.tokens is not None:
        ids = np.array(content.tokens.ids, dtype=np.int64)
        order = np.argsort(ids)
        yield _Whole(PackedWhole(names.tokens, "int64", ids.shape), ids[order], "I64")
        rows = content.tokens.rows
        yield _Whole(PackedWhole(names.rows, dtype, rows.shape), rows.map(), rows.dtype, order=order)
    if content.pair is not None:
        a, b = content.pair.a, content.pair.b
        values = a.map().T if names.is_a_turned else a.map()
        yield _Whole(PackedWhole(names.a, dtype, values.shape), values, a.dtype)
        yield _Whole(PackedWhole(names.b, dtype, b.shape), b.map(), b.dtype, scale=content.pair.scale)
        if (bias := content.pair.bias) is not None:  # a head's
            yield _Whole(PackedWhole(wholes.HEAD_BIAS, "float32", bias.shape), bias.map(), bias.dtype, scale=content.pair.scale)
    if scale is not None:
        yield _Whole(PackedWhole(names.scale, "float32", scale.shape), scale, "F32")


def _sent(name: str, source: TensorSource, dtype: WholeTypeName) -> _Whole:
    return _Whole(PackedWhole(name, dtype, source.shape), source.map(), source.dtype)


def longest_row_bytes(base: BaseSpec) -> int:
    """Bytes of the longest row that an adapter of ``base`` can have: of A or of B in fp32, or of an output scale or a bias."""
    return max(row_size("float32", max(site.in_features, site.out_features)) for site in base.sites)


def row_bytes_of_rank(base: BaseSpec, row_type: RowTypeName, rank: int) -> npt.NDArray[np.int64]:
    """Bytes of each row, in packing order, of an adapter of ``rank`` on every projection of ``base``; int64 [rows]."""
    sizes = [row_size(row_type, features) for site in base.sites for features in (site.in_features, site.out_features)]
    return np.repeat(np.array(sizes, dtype=np.int64), rank)


def fold_scale(b: Matrix, scale: float) -> Matrix:
    """B with the adapter's scale in it: the one place where scale is applied. fp32 in, fp32 out."""
    return b * np.float32(scale)
