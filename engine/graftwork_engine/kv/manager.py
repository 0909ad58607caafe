"""Which blocks a request's keys and values lie in, and which of them it need not compute. Refuses to know tensors.

    tokens    |<───────────────── num_tokens ─────────────────>|
              |<─ num_computed_tokens ─>|<─ this step ─>|<later>|
    blocks    [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ][ 5 ][ 6 ][ 7 ][  8  ]      block_ids
              |<─ found ──>|                                       shared, never written
              |<─ registered: full and computed ─>|                block_keys; may be found by others

A block is registered in the update after the step that filled it. Not sooner: a request that found it in the same step's plan
would read what is being written, and a step that fails would leave a key that leads to garbage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graftwork_engine.kv.block_pool import BlockPool
from graftwork_engine.kv.hashing import BlockKey, adapter_runs, block_key, chain_start
from graftwork_engine.request import Request


class KVCacheManager:
    """Owns ``num_blocks`` blocks of ``block_size`` tokens. ``base_id`` goes into every key."""

    def __init__(self, num_blocks: int, block_size: int, base_id: str, *, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self._base_id = base_id
        self._enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)

    @property
    def num_token_slots(self) -> int:
        """Tokens that fit when one request has all blocks."""
        return self._pool.num_blocks * self.block_size

    def find_computed(self, request: Request) -> list[int]:
        """Blocks that hold the beginning of this request's tokens. Takes nothing.

        Never all tokens: the newest one is computed, since its logits are needed. Nothing at all for a request whose prompt
        logprobs are still due, because they come from computing the prompt.
        """
        if not self._enable_prefix_caching or request.needs_prompt_logprobs:
            return []
        last = (request.num_tokens - 1) // self.block_size
        return self._pool.find(self._keys(request, last)[:last])

    def can_start(self, request: Request, computed: Sequence[int], reserved: int) -> bool:
        """True if all of the request's tokens fit beside ``reserved`` blocks, once it shares the ``computed`` ones.

        All of them, not just the first chunk: two long prompts let in chunk by chunk would take each other's blocks.
        """
        new = self._blocks_for(request.num_tokens) - len(computed)
        return new + self._pool.num_unused(computed) + reserved <= self._pool.num_available

    def num_missing(self, request: Request) -> int:
        """Blocks that a running request still needs for the tokens it has."""
        return self._blocks_for(request.num_tokens) - len(request.block_ids)

    def share(self, request: Request, computed: Sequence[int]) -> None:
        """Let a request that has no blocks begin with the ``computed`` ones."""
        if request.block_ids:
            raise AssertionError(f"request {request.request_id} shares a prefix while it has blocks")
        self._pool.share(computed)
        request.block_ids = list(computed)

    def extend(self, request: Request, end: int) -> bool:
        """Make the request's blocks cover tokens up to ``end``; False, and nothing taken, if there are too few."""
        missing = self._blocks_for(end) - len(request.block_ids)
        if missing > self._pool.num_available:
            return False
        if missing > 0:
            request.block_ids.extend(self._pool.take(missing))
        return True

    def register(self, request: Request, start: int, end: int) -> None:
        """Tokens ``start..end`` have been computed: the blocks that this filled can now be found."""
        first, last = start // self.block_size, end // self.block_size
        if not self._enable_prefix_caching or first == last:
            return
        keys, block_ids = self._keys(request, last), request.block_ids
        for number in range(first, last):
            self._pool.register(block_ids[number], keys[number])

    def withdraw(self, request: Request) -> None:
        """Let nobody find what this request computed or shared, in this run of it or an earlier one."""
        self._pool.withdraw(request.block_keys)

    def free(self, request: Request) -> None:
        """Give back all blocks of a request. Their registered contents stay findable until the blocks are needed."""
        self._pool.give_back(request.block_ids)
        request.block_ids = []

    def stats(self) -> dict[str, float]:
        """How many blocks are in which state."""
        return {
            "kv_blocks_total": self._pool.num_blocks,
            "kv_blocks_free": self._pool.num_free,
            "kv_blocks_cached": self._pool.num_cached,
            "kv_blocks_used": self._pool.num_used,
        }

    def discrepancies(self, requests: Iterable[Request]) -> list[str]:
        """What is wrong with the books, given all requests; empty when all is well."""
        return self._pool.discrepancies([request.block_ids for request in requests])

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _keys(self, request: Request, last: int) -> list[BlockKey]:
        """Keys of the request's blocks, ``last`` at least, hashed once: a request's tokens are only ever added to."""
        keys, size = request.block_keys, self.block_size
        for start in range(len(keys) * size, last * size, size):
            parent = keys[-1] if keys else chain_start(self._base_id, request.cache_salt)
            runs = adapter_runs(start, start + size, request.adapter_key, request.adapter_start)
            keys.append(block_key(parent, request.token_ids(start, start + size), runs))
        return keys
