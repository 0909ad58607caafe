"""Blocks and prefixes under random use: what is found was computed under the very base, salt, adapters and tokens of its finder.

A model of the memory remembers of each slot the whole history it was written under, so one wrong hit, one write into a shared block
and one block with two owners show at once.
"""

from __future__ import annotations

import hashlib
from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from property_budget import budget

from graftwork_engine.kv.manager import KVCacheManager
from graftwork_engine.messages import Sampling
from graftwork_engine.request import AdapterKey, Request, RequestId

BASES = ("base", "base2")
SALTS = (b"", b"2", b"A")  # one is an adapter's key; base and "2" laid end to end are base2
ADAPTERS = (None, None, None, "A", "AB", "A@v2")


def history(base: str, request: Request, count: int) -> list[bytes]:
    """For each of the first ``count`` tokens, a digest of everything that its keys and values depend on."""
    state = repr((base, request.cache_salt)).encode()
    made = []
    for position, token in enumerate(request.token_ids(0, count)):
        adapter = request.adapter_key if position >= request.adapter_start else None
        state = hashlib.sha256(state + repr((token, adapter)).encode()).digest()
        made.append(state)
    return made


class BlockMachine(RuleBasedStateMachine):
    """Two bases share one pool, as if memory outlived a change of base; requests run, are preempted and end in any order."""

    @initialize(num_blocks=st.integers(2, 9), block_size=st.integers(1, 3))
    def build(self, num_blocks: int, block_size: int) -> None:
        self.size = block_size
        self.managers = {base: KVCacheManager(num_blocks, block_size, base) for base in BASES}
        self.pool = self.managers[BASES[0]]._pool
        self.managers[BASES[1]]._pool = self.pool
        self.memory: dict[tuple[int, int], bytes] = {}  # (block, offset) → history
        self.running: list[tuple[str, Request]] = []
        self.preempted: list[tuple[str, Request]] = []
        self.num_started = 0

    @rule(
        base=st.sampled_from(BASES),
        salt=st.sampled_from(SALTS),
        adapter=st.sampled_from(ADAPTERS),
        adapter_start=st.sampled_from([0, 0, 1, 2, 3]),
        length=st.integers(1, 10),
        last=st.integers(0, 1),
        scores=st.booleans(),
    )
    def arrive(self, base: str, salt: bytes, adapter: str | None, adapter_start: int, length: int, last: int, scores: bool) -> None:
        request = Request(
            RequestId(f"r{self.num_started}"),
            [0] * (length - 1) + [last],  # mostly alike, so that prefixes are found
            Sampling(9, 1, prompt_logprobs=0 if scores and last else None),
            salt,
            "flow",
            0.0,
            adapter_key=None if adapter is None else AdapterKey(adapter),
            adapter_start=adapter_start,
        )
        self.num_started += 1
        self._start(base, request)

    @precondition(lambda self: self.preempted)
    @rule(place=st.integers(0, 9))
    def resume(self, place: int) -> None:
        self._start(*self.preempted.pop(place % len(self.preempted)))

    def _start(self, base: str, request: Request) -> None:
        kv = self.managers[base]
        found = kv.find_computed(request)
        assert len(found) * self.size < request.num_tokens, "the newest token is always computed"
        assert not (found and request.needs_prompt_logprobs)
        self._check_contents(base, request, found, len(found) * self.size)
        available = self.pool.num_available
        if not kv.can_start(request, found, 0):
            if request.num_tokens <= kv.num_token_slots:
                self.preempted.append((base, request))
            return
        kv.share(request, found)
        request.num_computed_tokens = len(found) * self.size
        assert kv.extend(request, request.num_tokens), "there was room a moment ago"
        assert self.pool.num_available == available - sum(1 for block in set(request.block_ids) if self._num_holders(block) == 0)
        self.running.append((base, request))

    @precondition(lambda self: self.running)
    @rule(place=st.integers(0, 9), chunk=st.sampled_from([1, 2, 9, 9]), fails=st.sampled_from([False] * 6 + [True]))
    def compute(self, place: int, chunk: int, fails: bool) -> None:
        base, request = self.running[place % len(self.running)]
        start, kv = request.num_computed_tokens, self.managers[base]
        end = min(start + chunk, request.num_tokens)
        if start == end or not kv.extend(request, end):
            return
        states = history(base, request, end)
        for position in range(start, end):
            block = request.block_ids[position // self.size]
            assert self._num_holders(block) == 1, "a shared block is written to"
            self.memory[block, position % self.size] = b"garbage" if fails else states[position]
        if not fails:  # a step that failed books nothing
            request.num_computed_tokens = end
            kv.register(request, start, end)

    @precondition(lambda self: self.running)
    @rule(place=st.integers(0, 9), token=st.integers(0, 1))
    def draw_a_token(self, place: int, token: int) -> None:
        _, request = self.running[place % len(self.running)]
        if request.num_computed_tokens == request.num_tokens < self.pool.num_blocks * self.size:
            request.output_ids.append(token)

    @precondition(lambda self: self.running)
    @rule(place=st.integers(0, 9))
    def preempt(self, place: int) -> None:
        base, request = self.running.pop(place % len(self.running))
        self.managers[base].free(request)
        request.num_computed_tokens = 0
        self.preempted.append((base, request))

    @precondition(lambda self: self.running)
    @rule(place=st.integers(0, 9), withdraws=st.sampled_from([False, False, True]))
    def end(self, place: int, withdraws: bool) -> None:
        base, request = self.running.pop(place % len(self.running))
        kv = self.managers[base]
        if withdraws:
            kv.withdraw(request)
            again = Request(
                RequestId("again"), request.token_ids(0, request.num_tokens), Sampling(1, 1), request.cache_salt, "", 0.0
            )
            again.adapter_key, again.adapter_start = request.adapter_key, request.adapter_start
            assert request.num_computed_tokens < self.size or kv.find_computed(again) == []
        kv.free(request)

    @rule(count=st.sampled_from([1, 99, 99]))
    def others_need_the_memory(self, count: int) -> None:
        blocks = self.pool.take(min(count, self.pool.num_available))
        for block in blocks:
            for offset in range(self.size):
                self.memory[block, offset] = b"other"
        self.pool.give_back(blocks)

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.discrepancies([request.block_ids for _, request in self.running]) == []
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_used == self.pool.num_blocks
        for base, request in self.running:
            assert len(set(request.block_ids)) == len(request.block_ids)
            self._check_contents(base, request, request.block_ids, request.num_computed_tokens)

    @invariant()
    def only_equal_and_complete_blocks_have_two_owners(self) -> None:
        if not hasattr(self, "pool"):
            return
        owners: dict[int, set[bytes]] = {}
        holders = Counter(block for _, request in self.running for block in request.block_ids)
        for base, request in self.running:
            states = history(base, request, request.num_computed_tokens)
            for number, block in enumerate(request.block_ids):
                if holders[block] > 1:
                    assert (number + 1) * self.size <= request.num_computed_tokens
                    owners.setdefault(block, set()).add(states[(number + 1) * self.size - 1])
        assert all(len(states) == 1 for states in owners.values())

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for base, request in self.running:
                self.managers[base].free(request)
            assert self.pool.num_available == self.pool.num_blocks
            assert self.pool.discrepancies([]) == []

    def _check_contents(self, base: str, request: Request, blocks: list[int], count: int) -> None:
        for position, state in enumerate(history(base, request, count)):
            assert self.memory[blocks[position // self.size], position % self.size] == state, f"another's token at {position}"

    def _num_holders(self, block: int) -> int:
        return sum(block in request.block_ids for _, request in self.running)


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = budget(100, steps=40)


def test_base_and_salt_are_not_laid_end_to_end() -> None:
    """Fault kind of sglang#24638: parts joined without their lengths, so that another split of the same letters is the same key."""
    machine = BlockMachine()
    machine.build(num_blocks=8, block_size=2)
    machine.arrive("base", b"2", None, 0, 5, 0, scores=False)
    machine.compute(0, 5, fails=False)
    again, other = (Request(RequestId(salt.decode()), [0] * 5, Sampling(1, 1), salt, "flow", 0.0) for salt in (b"2", b""))
    assert len(machine.managers["base"].find_computed(again)) == 2
    assert machine.managers["base2"].find_computed(other) == []
