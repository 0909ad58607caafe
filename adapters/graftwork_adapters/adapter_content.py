"""What an adapter does to a base, as validation finds it and packing writes it. Vocabulary alone: holds no values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from graftwork_adapters.base_spec import Site
from graftwork_adapters.tensor_source import TensorSource


@dataclass(frozen=True, slots=True)
class LoraPair:
    """``scale`` · B · A is added to the weight of ``module``. A is [rank, in], B is [out, rank].

    Of an embedding, A is [rank, tokens] and B [hidden size, rank], as PEFT saves them. A ``magnitude`` makes it DoRA; ``bias`` is
    B's own.
    """

    module: str
    a: TensorSource
    b: TensorSource
    rank: int
    alpha: float
    use_rslora: bool
    magnitude: TensorSource | None = None
    bias: TensorSource | None = None

    @property
    def scale(self) -> float:
        """alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA (arXiv:2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


@dataclass(frozen=True, slots=True)
class SiteContent:
    """One projection: its LoRA, and the ``bias`` that stands in place of the base's; at least one of them."""

    site: Site
    pair: LoraPair | None
    bias: TensorSource | None


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of an embedding or a head that stand in place of others: row i of ``rows`` is that of token ``ids[i]``."""

    ids: tuple[int, ...]
    rows: TensorSource


@dataclass(frozen=True, slots=True)
class VocabularyContent:
    """The embedding or the head. ``whole`` stands in place of the base's, then ``tokens`` and ``pair`` act on it."""

    whole: TensorSource | None = None
    tokens: TokenRows | None = None
    pair: LoraPair | None = None


@dataclass(frozen=True, slots=True)
class WholeModule:
    """A norm or projection in place of the base's. ``bias`` is set exactly if the base's has one."""

    module: str
    weight: TensorSource
    bias: TensorSource | None = None


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """All that an adapter does. ``sites`` are in the base's order, ``modules`` in that of their names.

    ``left_out`` names the tensors that were sent and do nothing: copies of the base's own.
    """

    sites: tuple[SiteContent, ...] = ()
    embedding: VocabularyContent = field(default_factory=VocabularyContent)
    head: VocabularyContent = field(default_factory=VocabularyContent)
    modules: tuple[WholeModule, ...] = ()
    invocation_token_ids: tuple[int, ...] = ()
    vocab_size: int | None = None
    left_out: tuple[str, ...] = ()

    @property
    def pairs(self) -> tuple[LoraPair, ...]:
        """Every LoRA of it."""
        of_sites = [content.pair for content in self.sites]
        return tuple(pair for pair in (*of_sites, self.embedding.pair, self.head.pair) if pair is not None)

    def sources(self) -> Iterator[TensorSource]:
        """Every tensor of the upload that is read when packing; one that serves twice comes twice."""
        for pair in self.pairs:
            yield from (source for source in (pair.a, pair.b, pair.magnitude, pair.bias) if source is not None)
        yield from (content.bias for content in self.sites if content.bias is not None)
        for vocabulary in (self.embedding, self.head):
            if vocabulary.whole is not None:
                yield vocabulary.whole
            if vocabulary.tokens is not None:
                yield vocabulary.tokens.rows
        for module in self.modules:
            yield module.weight
            if module.bias is not None:
                yield module.bias
