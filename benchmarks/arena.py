"""Who takes part in the serving benchmark: our server all along, and the peers that a row needs, in their fastest variant.

Peers are started for the first row that needs them and ended before a row that does not, since each holds gigabytes.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from graftwork_server import SERVE_OPTIONS, OurServer, our_server, publish
from load import Felt
from machine import Machine
from peers import llama_cpp, llama_source, vllm, vllm_program
from results import BenchmarkFailed
from servers import Contender
from serving_rows import ADAPTERS, PEER_NAMES, RANK, Mix, Row, Size, load_of

Kind = Literal["vllm", "llamacpp", "peft"]
Say = Callable[[str], None]

PROBE_OUTPUT = 16
"""Tokens a request when variants are compared, after every adapter has been used once."""

WARM_OUTPUT, WARM_SEED, PROBE_SEED = 2, -1, -2
"""No reading has these seeds: prompts must not be found in a prefix cache."""

SLOW_BF16 = 0.1
"""A processor whose matrix products in bf16 are slower than this share of those in fp32 has no instructions for them."""


@dataclass(frozen=True)
class Peer:
    """A kind of peer, where it lies ("" for PEFT, which this environment has), vLLM's numbers of slots to try, and the
    interpreter for llama.cpp's converters."""

    kind: Kind
    where: Path
    slots: tuple[int, ...]
    python: Path

    def check(self) -> None:
        """Raise `BenchmarkFailed` where it cannot be started: now, and not after an hour."""
        if self.kind == "vllm":
            vllm_program(self.where)
        if self.kind == "llamacpp":
            llama_source(self.where)
            if shutil.which(self.python) is None:
                raise BenchmarkFailed(f"--llama-python {self.python} is no program")

    @classmethod
    def parse(cls, text: str, slots: str, python: Path = Path(sys.executable)) -> Peer:
        """``vllm=VENV``, ``llamacpp=FOLDER`` or ``peft``; raises ValueError."""
        kind, _, where = text.partition("=")
        numbers = tuple(int(number) for number in slots.split(",") if number.isdigit() and int(number) > 0)
        if not numbers or len(numbers) != len(slots.split(",")):
            raise ValueError(f"--vllm-slots {slots}: give numbers above 0, as 8,16,32")
        if kind == "peft" and not where:
            return cls("peft", Path(), numbers, python)
        if kind == "vllm" and where:
            return cls("vllm", Path(where).absolute(), numbers, python)
        if kind == "llamacpp" and where:
            return cls("llamacpp", Path(where).absolute(), numbers, python)
        raise ValueError(f"--peer {text}: write vllm=VENV, llamacpp=FOLDER or peft")


@dataclass(frozen=True)
class Variant:
    """One way to run a peer: with adapters or without, the element type ("": its own), and vLLM's slots for adapters."""

    peer: Peer
    adapters: bool
    dtype: str = ""
    slots: int = 0

    def __str__(self) -> str:
        slots = f"{self.slots} slots" if self.slots else ""
        return ", ".join(text for text in (PEER_NAMES[self.peer.kind], self.dtype, slots) if text)


def element_types(floors: Machine) -> tuple[str, ...]:
    """Those worth trying on this machine, the likely faster first: a peer is not held to bf16 where it has no instructions."""
    return ("bfloat16", "float32") if floors.gemm_bf16 >= SLOW_BF16 * floors.gemm_fp32 else ("float32",)


def variants(peer: Peer, adapters: bool, dtypes: Sequence[str]) -> list[Variant]:
    """All that are to be tried. A peer's base is measured without the price of adapters."""
    if peer.kind == "vllm":
        return [Variant(peer, adapters, dtypes[0], slots) for slots in (peer.slots if adapters else (0,))]
    if peer.kind == "peft":
        return [Variant(peer, adapters, dtype) for dtype in dtypes]
    return [Variant(peer, adapters)]


def warm(contender: Contender, row: Row, mix: Mix, size: Size) -> None:
    """One short request for each stream: what is done once, as loading adapters, is not a part of any reading."""
    few = replace(size, requests_per_stream=1, output=min(WARM_OUTPUT, size.output))
    requests = replace(load_of(row, mix, few, WARM_SEED), zipf=0.0)
    accept(contender, contender.measure(requests, lambda: None))


def accept(contender: Contender, felt: Felt) -> None:
    """Raise `BenchmarkFailed` if a request failed."""
    if felt.errors:
        raise BenchmarkFailed(f"{len(felt.errors)} requests to {contender.name} failed, the first with {felt.errors[0]}")


@dataclass
class Arena:
    """Our server and the peers that are up."""

    ours: OurServer
    base: Path
    work: Path
    folders: Mapping[str, Path]
    peers: Sequence[Peer]
    dtypes: Sequence[str]
    _stack: contextlib.ExitStack
    _up: dict[Variant, tuple[Contender, contextlib.ExitStack]] = field(default_factory=dict)
    _fastest: dict[tuple[str, Peer], Variant] = field(default_factory=dict)

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        base: Path,
        work: Path,
        folders: Mapping[str, Path],
        names: frozenset[str],
        peers: Sequence[Peer],
        dtypes: Sequence[str],
        serve_options: Sequence[str],
        say: Say,
    ) -> Iterator[Arena]:
        """Start our server with the adapters ``names``; at the end all that were started are ended."""
        with contextlib.ExitStack() as stack:
            say("starting graftwork serve")
            ours = stack.enter_context(our_server(base, work / "data", [*SERVE_OPTIONS, *serve_options]))
            say(f"ready after {ours.start_s:.1f} s; publishing {len(names)} adapters")
            publish(ours, {name: folders[name] for name in folders if name in names})
            yield cls(ours, base, work, folders, peers, dtypes, stack)

    def contenders(self) -> list[Contender]:
        """All that are up."""
        return [self.ours.contender, *(contender for contender, _ in self._up.values())]

    def peers_for(self, row: Row, size: Size, say: Say) -> list[tuple[str, Contender]]:
        """Each peer's fastest variant for a row, with the peer's kind; started where it is not up."""
        chosen = [self._choose(peer, row, size, say) for peer in self.peers]
        for variant in [variant for variant in self._up if variant not in chosen]:
            self._end(variant)
        return [(variant.peer.kind, self._start(variant, say)) for variant in chosen]

    def _choose(self, peer: Peer, row: Row, size: Size, say: Say) -> Variant:
        candidates = variants(peer, bool(row.adapters), self.dtypes)
        if len(candidates) == 1:
            return candidates[0]
        if (row.name, peer) not in self._fastest:
            rates = {}
            for variant in candidates:
                contender = self._start(variant, say)
                rates[variant] = self._probe(contender, row, size).output_tokens_per_s
                say(f"{row.name}: {contender.name} tried with one request a stream: {rates[variant]:.1f} tokens/s")
                self._end(variant)  # one at a time: together they may not fit
            self._fastest[row.name, peer] = max(rates, key=lambda variant: rates[variant])
        return self._fastest[row.name, peer]

    def _probe(self, contender: Contender, row: Row, size: Size) -> Felt:
        warm(contender, row, row.mix, size)
        few = replace(size, requests_per_stream=1, output=min(PROBE_OUTPUT, size.output))
        felt = contender.measure(load_of(row, row.mix, few, PROBE_SEED), lambda: None)
        accept(contender, felt)
        return felt

    def _start(self, variant: Variant, say: Say) -> Contender:
        if variant not in self._up:
            say(f"starting {variant}")
            stack = contextlib.ExitStack()
            self._stack.push(stack)
            self._up[variant] = self._contender(variant, stack), stack
        return self._up[variant][0]

    def _end(self, variant: Variant) -> None:
        _, stack = self._up.pop(variant)
        stack.close()

    def _contender(self, variant: Variant, stack: contextlib.ExitStack) -> Contender:
        peer = variant.peer
        adapters = {name: self.folders[name] for name in ADAPTERS} if variant.adapters else {}
        log = self.work / f"{peer.kind}-{'adapters' if adapters else 'base'}{variant.slots or ''}.log"
        if peer.kind == "peft":
            from peft_batch import PeftBatch  # torch and transformers are loaded only where they take part

            return PeftBatch(self.base, adapters, variant.dtype)
        if peer.kind == "llamacpp":
            return stack.enter_context(
                llama_cpp(peer.where, self.base, adapters, python=peer.python, work=self.work / "gguf", log=log)
            )
        server = vllm(peer.where, self.base, adapters, dtype=variant.dtype, max_loras=variant.slots, max_rank=RANK, log=log)
        return stack.enter_context(server)
