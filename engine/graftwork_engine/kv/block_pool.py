"""Reference counts of key/value blocks, and which of them hold findable contents. Refuses to know requests and tokens.

A block is in one of three states:

    used    references > 0; findable if it has a key
    cached  no references, but a key: contents are kept and findable until the block is needed (least recently used first)
    free    no references and no key

    free ──take──▶ used ──give_back──▶ cached ──share──▶ used
      ▲              │                   │
      └──────────────┘ (it had no key)   ├──take──▶ used, without its key
      ▲                                  │
      └──────────────withdraw────────────┘
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from graftwork_engine.kv.hashing import BlockKey


class BlockPool:
    """``num_blocks`` blocks, numbered from 0.

    A key leads to one block. When two requests compute the same block side by side, the first to be registered is found, and
    the other one becomes free as soon as its request ends.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._key: list[BlockKey | None] = [None] * num_blocks
        self._block_of: dict[BlockKey, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))  # the last is taken first
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody uses and that can be found."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with references."""
        return self.num_blocks - self.num_available

    @property
    def num_available(self) -> int:
        """Blocks that `take` could hand out."""
        return len(self._free) + len(self._cached)

    def find(self, keys: Iterable[BlockKey]) -> list[int]:
        """The blocks of the longest run of leading keys that are all here. Takes no references."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_unused(self, blocks: Iterable[int]) -> int:
        """How many of these found blocks nobody uses, so that sharing them makes fewer available."""
        return sum(1 for block in blocks if not self._references[block])

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference to each of these found blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def take(self, count: int) -> list[int]:
        """``count`` blocks with one reference each and contents of no meaning; cached contents go when nothing is free."""
        if count > self.num_available:
            raise AssertionError(f"{count} blocks asked for, {self.num_available} available")
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget_key(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def register(self, block: int, key: BlockKey) -> None:
        """A used block's contents are complete: let it be found by ``key``, unless another block already is."""
        if self._references[block] == 0:
            raise AssertionError(f"block {block} is registered without being used")
        if self._key[block] is None and key not in self._block_of:
            self._key[block] = key
            self._block_of[key] = block

    def withdraw(self, keys: Iterable[BlockKey]) -> None:
        """Undo `register`: these keys lead nowhere from now on. Who holds their blocks keeps them."""
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                continue
            self._forget_key(block)
            if self._references[block] == 0:
                del self._cached[block]
                self._free.append(block)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each. Of a sequence's blocks the last become the least recently used: a prefix serves more."""
        for block in reversed(blocks):
            if self._references[block] == 0:
                raise AssertionError(f"block {block} is given back more often than it was taken")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._key[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def discrepancies(self, held: Iterable[Sequence[int]]) -> list[str]:
        """What is wrong with the books, given the blocks of every holder; empty when all is well."""
        due = [0] * self.num_blocks
        for blocks in held:
            for block in blocks:
                due[block] += 1
        found = []
        if due != self._references:
            found += [
                f"block {block} has {count} references and {holders} holders"
                for block, (count, holders) in enumerate(zip(self._references, due, strict=True))
                if count != holders
            ]
        found += [
            f"a key leads to block {block}, which does not have it"
            for key, block in self._block_of.items()
            if self._key[block] != key
        ]
        if len(self._block_of) != self.num_blocks - self._key.count(None):
            led_to = set(self._block_of.values())
            found += [
                f"block {block} has a key that does not lead to it"
                for block, key in enumerate(self._key)
                if key is not None and block not in led_to
            ]
        found += [
            f"block {block} is listed as free and has references or a key"
            for block in self._free
            if self._references[block] or self._key[block] is not None
        ]
        found += [
            f"block {block} is listed as cached and has references or no key"
            for block in self._cached
            if self._references[block] or self._key[block] is None
        ]
        listed = set(self._free).union(self._cached)
        if len(listed) != self.num_available:
            found.append(f"{self.num_available - len(listed)} blocks are listed as free more than once")
        if len(listed) != self._references.count(0):
            found += [
                f"block {block} has no references and is listed neither as free nor as cached"
                for block, count in enumerate(self._references)
                if not count and block not in listed
            ]
        return found

    def _forget_key(self, block: int) -> None:
        key = self._key[block]
        if key is not None:
            del self._block_of[key]
            self._key[block] = None
