"""Block keys, the block pool and the manager: what is shared, what never is, and that no block is lost."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from graftwork_engine.kv.block_pool import BlockPool
from graftwork_engine.kv.hashing import AdapterRun, BlockKey, adapter_runs, block_key, chain_start
from graftwork_engine.kv.manager import KVCacheManager
from graftwork_engine.messages import Sampling
from graftwork_engine.request import AdapterKey, Request, RequestId

BLOCK = 4


def key(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(bytes([number])).digest())


def make_request(
    prompt: list[int],
    *,
    name: str = "r",
    salt: bytes = b"tenant",
    adapter: str | None = None,
    adapter_start: int = 0,
    prompt_logprobs: int | None = None,
) -> Request:
    return Request(
        RequestId(name),
        prompt,
        Sampling(8, 0, prompt_logprobs=prompt_logprobs),
        salt,
        "flow",
        0.0,
        adapter_key=None if adapter is None else AdapterKey(adapter),
        adapter_start=adapter_start,
    )


def compute(kv: KVCacheManager, request: Request) -> int:
    """Take, compute and register all of a request's tokens; how many were found."""
    computed = kv.find_computed(request)
    assert kv.can_start(request, computed, 0)
    kv.share(request, computed)
    start, end = len(computed) * kv.block_size, request.num_tokens
    assert kv.extend(request, end)
    kv.register(request, start, end)
    return start


class TestKeys:
    def test_runs_of_a_block_before_across_and_after_the_adapters_start(self) -> None:
        assert adapter_runs(0, 4, None, 0) == ((0, None),)
        assert adapter_runs(0, 4, "a", 4) == ((0, None),)
        assert adapter_runs(4, 8, "a", 6) == ((0, None), (2, "a"))
        assert adapter_runs(8, 12, "a", 8) == ((0, "a"),)
        assert adapter_runs(8, 12, "a", 3) == ((0, "a"),)

    def test_every_part_counts(self) -> None:
        start = chain_start("base", b"salt")
        plain = (AdapterRun(0, None),)
        keys = [
            start,
            chain_start("base2", b"salt"),
            chain_start("base", b"salt2"),
            chain_start("bases", b"alt"),
            block_key(start, [1, 2], plain),
            block_key(start, [2, 1], plain),
            block_key(start, [1, 2, 0], plain),
            block_key(start, [1, 2], (AdapterRun(0, ""),)),
            block_key(start, [1, 2], (AdapterRun(0, "a"),)),
            block_key(start, [1, 2], (AdapterRun(0, None), AdapterRun(1, "a"))),
            block_key(chain_start("base", b"salt2"), [1, 2], plain),
            block_key(block_key(start, [1, 2], plain), [1, 2], plain),
        ]
        assert len(set(keys)) == len(keys)
        assert {len(k) for k in keys} == {32}

    @settings(max_examples=60, deadline=None)
    @given(
        tokens=st.lists(st.lists(st.integers(0, 300), max_size=4), max_size=4),
        names=st.sets(st.none() | st.text("ab\x01", max_size=2)),
    )
    def test_different_blocks_have_different_keys(self, tokens: list[list[int]], names: set[str | None]) -> None:
        blocks = [(of_block, name) for of_block in tokens for name in names]
        made = {(tuple(ids), name): block_key(key(0), ids, (AdapterRun(0, name),)) for ids, name in blocks}
        assert len(set(made.values())) == len(made)


class TestPool:
    def test_free_blocks_go_before_cached_ones_and_those_by_last_use(self) -> None:
        pool = BlockPool(4)
        first, second, third, fourth = pool.take(4)
        for block, number in ((first, 1), (second, 2), (third, 3)):
            pool.register(block, key(number))
        pool.give_back([second])
        pool.give_back([first])
        pool.give_back([third, fourth])
        assert (pool.num_free, pool.num_cached, pool.num_used) == (1, 3, 0)
        assert pool.take(3) == [fourth, second, first]
        assert pool.find([key(1)]) == pool.find([key(2)]) == []
        assert pool.find([key(3)]) == [third]

    def test_the_end_of_a_sequence_is_forgotten_before_its_beginning(self) -> None:
        pool = BlockPool(3)
        blocks = pool.take(3)
        for number, block in enumerate(blocks):
            pool.register(block, key(number))
        pool.give_back(blocks)
        pool.take(1)
        assert pool.find([key(0), key(1), key(2)]) == blocks[:2]

    def test_contents_stay_findable_while_used_and_after(self) -> None:
        pool = BlockPool(2)
        (block,) = pool.take(1)
        assert pool.find([key(1)]) == []
        pool.register(block, key(1))
        assert pool.find([key(1)]) == [block]
        pool.give_back([block])
        assert pool.find([key(1)]) == [block]
        assert pool.num_unused([block]) == 1
        pool.share([block])
        pool.share([block])
        assert pool.num_unused([block]) == 0
        pool.give_back([block])
        assert pool.num_used == 1
        pool.give_back([block])
        assert pool.num_used == 0

    def test_of_two_blocks_with_one_key_the_first_is_found_and_the_second_becomes_free(self) -> None:
        pool = BlockPool(2)
        first, second = pool.take(2)
        pool.register(first, key(1))
        pool.register(second, key(1))
        pool.give_back([first])
        pool.give_back([second])
        assert pool.find([key(1)]) == [first]
        assert (pool.num_free, pool.num_cached) == (1, 1)
        assert pool.discrepancies([]) == []

    def test_misuse_is_a_bug_and_is_named(self) -> None:
        pool = BlockPool(1)
        (block,) = pool.take(1)
        with pytest.raises(AssertionError, match="1 blocks asked for, 0 available"):
            pool.take(1)
        pool.give_back([block])
        with pytest.raises(AssertionError, match="given back more often"):
            pool.give_back([block])
        with pytest.raises(AssertionError, match="without being used"):
            pool.register(block, key(1))

    def test_a_lost_reference_is_named(self) -> None:
        pool = BlockPool(2)
        (block,) = pool.take(1)
        assert pool.discrepancies([[block]]) == []
        assert pool.discrepancies([]) == [f"block {block} has 1 references and 0 holders"]
        assert pool.discrepancies([[block], [block]]) == [f"block {block} has 1 references and 2 holders"]


class PoolMachine(RuleBasedStateMachine):
    """Sequences take, share, register and give back; a model of block contents says what may be found."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.lists: list[list[int]] = []
        self.contents: dict[int, int] = {}

    @rule(target=held, count=st.integers(0, 4))
    def take(self, count: int) -> list[int]:
        count = min(count, self.pool.num_available)
        blocks = self.pool.take(count)
        assert len(set(blocks)) == count
        assert not {b for held in self.lists for b in held} & set(blocks), "a block in use was handed out"
        for block in blocks:
            self.contents.pop(block, None)
        self.lists.append(blocks)
        return blocks

    @rule(blocks=held, number=st.integers(0, 5))
    def register(self, blocks: list[int], number: int) -> None:
        for block in blocks[:1]:
            if block not in self.contents and number not in self.contents.values():
                self.contents[block] = number
            self.pool.register(block, key(number))

    @rule(target=held, number=st.integers(0, 5))
    def find_and_share(self, number: int) -> list[int]:
        found = self.pool.find([key(number)])
        assert found == [block for block, content in self.contents.items() if content == number]
        self.pool.share(found)
        self.lists.append(found)
        return found

    @rule(blocks=consumes(held))
    def give_back(self, blocks: list[int]) -> None:
        self.pool.give_back(blocks)
        self.lists = [held for held in self.lists if held is not blocks]

    @invariant()
    def books_agree(self) -> None:
        assert self.pool.discrepancies(self.lists) == []
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_used == 6
        assert self.pool.num_used == len({block for held in self.lists for block in held})


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


class TestManager:
    def test_full_blocks_are_found_again_but_never_the_newest_token(self) -> None:
        kv = KVCacheManager(16, BLOCK, "base")
        first = make_request(list(range(10)))
        assert compute(kv, first) == 0
        assert len(first.block_ids) == 3
        kv.free(first)
        assert compute(kv, make_request(list(range(10)))) == 8
        assert compute(kv, make_request(list(range(8)))) == 4, "all 8 tokens are there, but one has to be computed"
        assert compute(kv, make_request(list(range(9)))) == 8
        assert compute(kv, make_request([0, 1, 2, 3, 4, 5, 6, 9, 8])) == 4

    def test_a_block_is_found_only_once_it_is_registered(self) -> None:
        kv = KVCacheManager(16, BLOCK, "base")
        first, second = make_request(list(range(9))), make_request(list(range(9)))
        assert kv.extend(first, 9)
        assert kv.find_computed(second) == []
        kv.register(first, 0, 3)
        assert kv.find_computed(second) == [], "no block is full yet"
        kv.register(first, 3, 6)
        assert kv.find_computed(second) == first.block_ids[:1]
        kv.register(first, 6, 9)
        assert kv.find_computed(second) == first.block_ids[:2]

    def test_tenants_and_adapters_do_not_share_but_what_lies_before_the_adapter_is_the_bases(self) -> None:
        kv = KVCacheManager(64, BLOCK, "base")
        tokens = list(range(17))
        assert compute(kv, make_request(tokens)) == 0
        assert compute(kv, make_request(tokens, salt=b"other")) == 0
        assert compute(kv, make_request(tokens, adapter="a")) == 0
        assert compute(kv, make_request(tokens, adapter="b")) == 0
        assert compute(kv, make_request(tokens, adapter="c", adapter_start=8)) == 8
        assert compute(kv, make_request(tokens, adapter="d", adapter_start=10)) == 8
        assert compute(kv, make_request(tokens, adapter="d", adapter_start=11)) == 8
        assert compute(kv, make_request(tokens, adapter="d", adapter_start=10)) == 16
        assert compute(kv, make_request(tokens)) == 16

    def test_bases_do_not_share(self) -> None:
        one, other = (KVCacheManager(8, BLOCK, base) for base in ("one", "other"))
        requests = [make_request(list(range(8))) for _ in range(2)]
        for kv, request in zip((one, other), requests, strict=True):
            compute(kv, request)
        assert not set(requests[0].block_keys) & set(requests[1].block_keys)

    def test_prompt_logprobs_and_a_switched_off_cache_compute_everything(self) -> None:
        kv = KVCacheManager(16, BLOCK, "base")
        compute(kv, make_request(list(range(9))))
        assert compute(kv, make_request(list(range(9)), prompt_logprobs=0)) == 0
        resumed = make_request(list(range(9)), prompt_logprobs=0)
        resumed.output_ids = [1]
        assert compute(kv, resumed) == 8, "its client has the prompt's logprobs"
        off = KVCacheManager(16, BLOCK, "base", enable_prefix_caching=False)
        compute(off, make_request(list(range(9))))
        assert compute(off, make_request(list(range(9)))) == 0

    def test_nothing_is_taken_when_it_does_not_fit(self) -> None:
        kv = KVCacheManager(3, BLOCK, "base")
        request = make_request(list(range(8)))
        assert kv.extend(request, 8)
        assert not kv.extend(request, 13)
        assert len(request.block_ids) == 2
        assert kv.extend(request, 12)
        assert kv.extend(request, 12), "nothing is missing"
        assert len(request.block_ids) == 3
        assert kv.discrepancies([request]) == []
        kv.free(request)
        assert request.block_ids == []
        assert kv.discrepancies([]) == []

    def test_found_blocks_that_nobody_uses_count_as_taken(self) -> None:
        kv = KVCacheManager(3, BLOCK, "base")
        first = make_request(list(range(9)))
        compute(kv, first)
        kv.free(first)
        again = make_request(list(range(9)))
        found = kv.find_computed(again)
        assert len(found) == 2
        assert kv.can_start(again, found, 0)
        assert not kv.can_start(again, found, 1)
        longer = make_request([*range(9), *range(4)])
        assert not kv.can_start(longer, kv.find_computed(longer), 0)

    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def test_what_is_found_has_the_same_history(self, data: st.DataObject) -> None:
        kv = KVCacheManager(12, 2, "base")
        written: dict[int, tuple[object, ...]] = {}
        for number in range(data.draw(st.integers(2, 8))):
            request = make_request(
                data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=8)),
                name=str(number),
                salt=data.draw(st.sampled_from([b"s", b"t"])),
                adapter=data.draw(st.sampled_from([None, "a", "b"])),
                adapter_start=data.draw(st.integers(0, 5)),
            )
            found = compute(kv, request)
            for index, block in enumerate(request.block_ids):
                end = (index + 1) * 2
                adapters = tuple(request.adapter_key if p >= request.adapter_start else None for p in range(end))
                history = (request.cache_salt, tuple(request.token_ids(0, end)), adapters[: request.num_tokens])
                if end <= found:
                    assert written[block] == history
                written[block] = history
            kv.free(request)
            assert kv.discrepancies([]) == []
