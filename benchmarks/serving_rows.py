"""The rows of the serving benchmark: which load, whom it is put on, and the bars. Starts and measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from load import Load
from results import REPEATS, needed_repeats

BASE = "base"
"""How every server here names its base."""

RANK, NUM_ADAPTERS = 16, 32
SMALL_RANK, NUM_SMALL = 4, 1000
ADAPTERS = tuple(f"a{i}" for i in range(NUM_ADAPTERS))
SMALL = tuple(f"s{i}" for i in range(NUM_SMALL))
"""Of rank `SMALL_RANK`; registered only where a row asks for them."""

DORA = tuple(f"d{i}" for i in range(NUM_ADAPTERS))
"""Of rank `RANK`, with DoRA's magnitudes; registered only where a row asks for them."""


def half_dora(number: int) -> tuple[str, ...]:
    """So many adapters, plain ones and DoRAs in turn."""
    return tuple((DORA if place % 2 else ADAPTERS)[place] for place in range(number))


PEER_NAMES = {"vllm": "vLLM", "llamacpp": "llama.cpp", "peft": "PEFT"}
"""By the kind of a peer, in the order of tables."""


@dataclass(frozen=True)
class Mix:
    """Models that a load's requests name, in turn or by Zipf's law."""

    title: str
    models: tuple[str, ...]
    zipf: float = 0.0


@dataclass(frozen=True)
class PeerBar:
    """Our throughput to that of the best of some kinds of peers: at least ``bar``."""

    kinds: tuple[str, ...]
    bar: float


ANY_PEER = tuple(PEER_NAMES)


@dataclass(frozen=True)
class Row:
    """A load of our server, beside a second one of our own server (``own``), of each peer, or both.

    ``own_bar`` is a share of our own throughput with ``own``. With ``or_added`` it is enough that adapters add no more to a step
    than 1.6 times the reading of their bytes and 2 ms.
    """

    name: str
    streams: int
    mix: Mix
    own: Mix | None = None
    own_bar: float | None = None
    or_added: bool = False
    peers: bool = False
    peer_bars: tuple[PeerBar, ...] = ()

    @property
    def title(self) -> str:
        """For the table."""
        return f"{self.streams} stream{'s' if self.streams > 1 else ''}, {self.mix.title}"

    @property
    def adapters(self) -> frozenset[str]:
        """All that our server must have."""
        mixes = [self.mix, *([self.own] if self.own else [])]
        return frozenset(model for mix in mixes for model in mix.models if model != BASE)

    @property
    def has_bar(self) -> bool:
        """Whether the row can fail."""
        return self.own_bar is not None or bool(self.peer_bars)

    @property
    def repeats(self) -> int:
        """Repetitions that its bars need."""
        bars = [self.own_bar, *(peer.bar for peer in self.peer_bars)]
        return max(REPEATS, *(needed_repeats(bar, "×") for bar in bars))

    @property
    def added_adapters(self) -> int:
        """Distinct adapters of a step that the own base does not have; 0 where no base is beside it or popularity is uneven."""
        return len(self.mix.models) if self.own == BASE_ALONE and not self.mix.zipf else 0


BASE_ALONE = Mix("base", (BASE,))

ROWS = (
    Row("base-1", 1, BASE_ALONE, peers=True, peer_bars=(PeerBar(ANY_PEER, 1.1),)),
    Row("base-8", 8, BASE_ALONE, peers=True, peer_bars=(PeerBar(ANY_PEER, 1.5),)),
    Row("base-32", 32, BASE_ALONE, peers=True, peer_bars=(PeerBar(ANY_PEER, 1.7),)),
    Row("1x1", 1, Mix("1 adapter", ADAPTERS[:1]), BASE_ALONE, 0.88),
    Row("8x8", 8, Mix("8 adapters", ADAPTERS[:8]), BASE_ALONE, peers=True),
    Row("32x1", 32, Mix("1 adapter", ADAPTERS[:1]), BASE_ALONE, 0.95, or_added=True),
    Row("32x8", 32, Mix("8 adapters", ADAPTERS[:8]), BASE_ALONE, 0.88, or_added=True),
    Row(
        "32x32",
        32,
        Mix("32 adapters", ADAPTERS),
        BASE_ALONE,
        0.75,
        or_added=True,
        peers=True,
        peer_bars=(PeerBar(("vllm",), 15.0), PeerBar(("llamacpp", "peft"), 4.0)),
    ),
    Row("32x8-dora", 32, Mix("8 adapters, 4 of them DoRA", half_dora(8)), BASE_ALONE, 0.88, or_added=True),
    Row("32x32-dora", 32, Mix("32 adapters, 16 of them DoRA", half_dora(32)), BASE_ALONE, 0.75, or_added=True),
    Row(
        "thousand",
        32,
        Mix("1,000 adapters of rank 4, Zipf 1.0", SMALL, 1.0),
        Mix("32 of them, Zipf 1.0", SMALL[:32], 1.0),
        0.85,
    ),
)


@dataclass(frozen=True)
class Size:
    """How much of a row's load is put on a server, and the token ids it may draw from."""

    requests_per_stream: int = 4
    input: int = 128
    output: int = 64
    vocab: int = 49_000

    @property
    def note(self) -> str:
        """How it differs from the load that the bars are for."""
        usual = Size()
        lengths = f"{self.input} tokens in, {self.output} out" if (self.input, self.output) != (usual.input, usual.output) else ""
        few = f"{self.requests_per_stream} of {usual.requests_per_stream} requests a stream"
        return "; ".join(text for text in (lengths, few if self.requests_per_stream < usual.requests_per_stream else "") if text)


def load_of(row: Row, mix: Mix, size: Size, seed: int) -> Load:
    """The load of one repetition.

    The seed is the same for both of a pair. Two loads of one server must not share prompts, or the second would find the first's in
    the prefix cache: a mix that is not the row's own is seeded apart.
    """
    return Load(
        mix.models,
        row.streams * size.requests_per_stream,
        row.streams,
        2 * seed + (mix != row.mix),
        input=size.input,
        output=size.output,
        vocab=size.vocab,
        zipf=mix.zipf,
    )


def choose_rows(names: str, rows: Sequence[Row] = ROWS) -> list[Row]:
    """Rows by a comma list of names, in the order in which they stand; ``bars``: those that can fail; ``all``.

    Raises ValueError for a name that none has.
    """
    if names == "all":
        return list(rows)
    if names == "bars":
        return [row for row in rows if row.has_bar]
    wanted = names.split(",")
    if unknown := sorted(set(wanted) - {row.name for row in rows}):
        known = ", ".join(row.name for row in rows)
        raise ValueError(f"--rows: no row is called {', '.join(repr(name) for name in unknown)}; there are {known}, bars and all")
    return [row for row in rows if row.name in wanted]
