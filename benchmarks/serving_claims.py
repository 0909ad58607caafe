"""From what the users of a row felt to its claims: pairs, ratios, added time, the best of several peers. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from load import Felt
from results import Claim, paired_ratios
from serving_rows import PEER_NAMES, Mix, PeerBar, Row, Size

ADDED_FACTOR, ADDED_SLACK_MS = 1.6, 2.0
"""What adapters may add to a step: so many times the reading of their bytes, and so much more."""


@dataclass
class Entry:
    """One who takes part in a row: ``kind`` is "" for us with the row's own mix, "own" for us with the other, or a peer's.

    One with fewer ``repeats`` than the row takes part in the first ones; ``felt`` has a reading of each.
    """

    kind: str
    name: str
    mix: Mix
    size: Size
    repeats: int
    felt: list[Felt] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Output tokens a second."""
        return [felt.output_tokens_per_s for felt in self.felt]


def row_claims(row: Row, entries: Sequence[Entry], adapter_bytes: float, read_bandwidth: float) -> list[Claim]:
    """All of a row; the first of ``entries`` is ours."""
    ours, *others = entries
    alone = {bar.kinds[0]: bar.bar for bar in row.peer_bars if len(bar.kinds) == 1}
    claims: list[Claim] = []
    for entry in others:
        if entry.kind == "own":
            claims += own_claims(row, ours, entry, adapter_bytes, read_bandwidth)
        else:
            claims.append(peer_claim(row, ours, entry, alone.get(entry.kind)))
    peers = {entry.kind: entry for entry in others if entry.kind != "own"}
    for bar in row.peer_bars:
        if len(bar.kinds) > 1:
            claims += best_claims(row, ours, peers, bar)
    return claims


def own_claims(row: Row, ours: Entry, own: Entry, adapter_bytes: float, read_bandwidth: float) -> list[Claim]:
    """Beside another mix of our own: throughput, and where that is the base the time that adapters add to each token.

    A token's time is (last - first) / (tokens - 1) of its request; the median over requests is subtracted pair by pair.
    """
    against, note = f"our own, {own.mix.title}", ours.size.note
    added = None
    pairs = [(a.per_token_ms[0], b.per_token_ms[0]) for a, b in _pairs(ours, own) if a.per_token_ms and b.per_token_ms]
    if row.added_adapters and pairs:
        bar = ADDED_FACTOR * 1e3 * row.added_adapters * adapter_bytes / read_bandwidth + ADDED_SLACK_MS if row.or_added else None
        added = Claim.of(f"{row.title}: added time a token", against, [a - b for a, b in pairs], "ms", bar, "at most", note=note)
    alternative = added if row.or_added else None
    title = row.title if alternative is None else f"{row.title}: throughput, or added time a token"
    ratio = Claim.of(title, against, _ratios(ours, own), "×", row.own_bar, note=note, alternative=alternative)
    return [ratio] if alternative is not None or added is None else [ratio, added]


def peer_claim(row: Row, ours: Entry, peer: Entry, bar: float | None = None) -> Claim:
    """Our throughput to a peer's."""
    return Claim.of(row.title, peer.name, _ratios(ours, peer), "×", bar, note=_note(ours, peer))


def best_claims(row: Row, ours: Entry, peers: Mapping[str, Entry], bar: PeerBar) -> list[Claim]:
    """The bar beside that peer of its kinds with which the median of ratios is least; none where none took part."""
    present = [kind for kind in bar.kinds if kind in peers]
    if not present:
        return []
    best = min((peer_claim(row, ours, peers[kind], bar.bar) for kind in present), key=lambda claim: claim.value)
    absent = ", ".join(PEER_NAMES[kind] for kind in bar.kinds if kind not in peers)
    note = "; ".join(text for text in (best.note, f"{absent} did not take part" if absent else "") if text)
    against = f"the best of {', '.join(PEER_NAMES[kind] for kind in present)}: {best.against}"
    return [replace(best, against=against, note=note)]


def _pairs(first: Entry, second: Entry) -> list[tuple[Felt, Felt]]:
    """Readings of the same repetition; the second may have fewer."""
    return list(zip(first.felt[: len(second.felt)], second.felt, strict=True))


def _ratios(first: Entry, second: Entry) -> list[float]:
    return paired_ratios(first.rates[: len(second.felt)], second.rates)


def _note(ours: Entry, peer: Entry) -> str:
    """What is unusual about the loads."""
    notes = [ours.size.note]
    if peer.size != ours.size:
        notes.append(f"{peer.name} got {peer.size.requests_per_stream} requests a stream, we {ours.size.requests_per_stream}")
    return "; ".join(note for note in notes if note)
