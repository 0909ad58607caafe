"""The ring between reads that overtake each other: what was learnt later stays, whatever arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork_platform.errors import Unauthorized
from graftwork_platform.keys.ring import KeyEntry, KeyRing, Reading
from graftwork_platform.keys.text import generate, key_hmac, public_id_of
from graftwork_platform.secrets import Secrets

SECRETS = Secrets(pepper=b"p" * 32, cache_salt=b"s" * 32)
TENANTS = [UUID(int=100 + n) for n in range(2)]
KEYS = [
    KeyEntry(UUID(int=n), f"k{n}", bytes(32), TENANTS[n % 2], "acme", None, None)  # three keys of each tenant
    for n in range(6)
]

BEGIN_ALL, BEGIN_KEY, BEGIN_TENANT, LOOK, FINISH, CREATE, REVOKE, DELETE = range(8)


class World:
    """A database, a ring, and reads on their way from one to the other."""

    def __init__(self) -> None:
        self.ring = KeyRing(SECRETS)
        self.valid: set[int] = set()
        self.used: set[int] = set()
        self.open: list[tuple[ExitStack, Reading, int, int]] = []
        self.seen: dict[int, list[KeyEntry]] = {}  # open read → what it found

    def step(self, what: int, n: int) -> None:
        if what in (BEGIN_ALL, BEGIN_KEY, BEGIN_TENANT):
            stack = ExitStack()
            self.open.append((stack, stack.enter_context(self.ring.reading()), what, n))
        elif what == LOOK and self.open:
            self.look(n % len(self.open))
        elif what == FINISH and self.open:
            self.finish(n % len(self.open))
        elif what == CREATE and n not in self.used:
            with self.ring.reading() as read:
                self.valid.add(n)
                self.used.add(n)
                read.replace([KEYS[n].key_id], [], [KEYS[n]])
        elif what == REVOKE:
            self.valid.discard(n)
            self.used.add(n)
            self.ring.remove(KEYS[n].key_id)
        elif what == DELETE:
            self.valid -= {k for k in self.valid if KEYS[k].tenant_id == TENANTS[n % 2]}
            self.used |= {k for k in range(6) if KEYS[k].tenant_id == TENANTS[n % 2]}
            self.ring.remove_tenant(TENANTS[n % 2])

    def look(self, place: int) -> None:
        stack, _, what, n = self.open[place]
        wanted: dict[int, Callable[[KeyEntry], bool]] = {
            BEGIN_ALL: lambda _key: True,
            BEGIN_KEY: lambda key: key is KEYS[n],
            BEGIN_TENANT: lambda key: key.tenant_id == TENANTS[n % 2],
        }
        self.seen.setdefault(id(stack), [KEYS[k] for k in sorted(self.valid) if wanted[what](KEYS[k])])

    def finish(self, place: int) -> None:
        self.look(place)
        stack, read, what, n = self.open.pop(place)
        found = self.seen.pop(id(stack))
        if what == BEGIN_ALL:
            read.replace_all(found)
        elif what == BEGIN_KEY:
            read.replace([KEYS[n].key_id], [], found)
        else:
            read.replace([], [TENANTS[n % 2]], found)
        stack.close()


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5)), max_size=60))
def test_a_read_that_arrives_late_never_brings_back_what_was_revoked(steps: list[tuple[int, int]]) -> None:
    world = World()
    for step in steps:
        world.step(*step)
        held = {entry.key_id.int for entry in world.ring.entries}
        assert held == world.valid
    while world.open:
        world.finish(0)
    assert {entry.key_id.int for entry in world.ring.entries} == world.valid
    assert world.ring._told == {}, "nothing is kept for reads that are over"


def test_a_key_whose_making_is_overtaken_by_its_revocation_stays_out() -> None:
    """The maker's own answer comes back after another server's revocation was heard."""
    ring, new = KeyRing(SECRETS), generate()
    made = KeyEntry(UUID(int=1), public_id_of(new.text) or "", key_hmac(SECRETS.pepper, new.text), TENANTS[0], "acme", None, None)
    with ring.reading() as making:
        with ring.reading() as heard:
            heard.replace([made.key_id], [], [])
        making.replace([made.key_id], [], [made])
    with pytest.raises(Unauthorized):
        ring.authenticate(f"Bearer {new.text}")


def test_a_failed_read_changes_nothing() -> None:
    ring = KeyRing(SECRETS)
    with ring.reading() as read:
        read.replace_all(KEYS[:1])
    with pytest.raises(OSError, match="away"), ring.reading():
        raise OSError("away")
    assert ring.entries == KEYS[:1]


def test_a_key_that_was_refused_is_not_let_in_by_older_news() -> None:
    """A beat that set out before a revocation arrives after the database has said that the key is revoked."""
    clock, text = [100.0], generate().text
    entry = KeyEntry(UUID(int=9), public_id_of(text) or "", key_hmac(SECRETS.pepper, text), TENANTS[0], "acme", None, None)
    valid: list[KeyEntry | None] = [entry]

    async def reread(_public_id: str) -> KeyEntry | None:
        return valid[0]

    ring = KeyRing(SECRETS, clock=lambda: clock[0], reread=reread)
    with ring.reading() as everything:
        everything.replace_all([entry])
    ring.hear(99.0)
    clock[0] = 100.5
    assert asyncio.run(ring.admit(f"Bearer {text}")).key_id == entry.key_id  # the database says so, not the ring
    valid[0] = None
    with pytest.raises(Unauthorized):
        asyncio.run(ring.admit(f"Bearer {text}"))
    ring.hear(100.2)
    assert ring.is_current
    with pytest.raises(Unauthorized):
        asyncio.run(ring.admit(f"Bearer {text}"))
