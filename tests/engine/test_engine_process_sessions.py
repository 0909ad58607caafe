"""Whose request is whose, and what is kept of those whose client died."""

from __future__ import annotations

import pytest

from graftwork_engine import sessions
from graftwork_engine.messages import Orphan, OutItem
from graftwork_engine.sessions import Session, SessionTable


def opened(table: SessionTable, name: str) -> Session:
    session = Session(name, name.encode(), 0.0, None)
    table.open(session)
    return session


def made(request_id: str, first: int, count: int, finish: str | None = None) -> OutItem:
    return OutItem(request_id, first, [0] * count, finish=finish)


def test_a_request_is_stopping_until_its_client_is_dead_and_it_has_stopped() -> None:
    table = SessionTable()
    session = opened(table, "a")
    assert table.own(session, "r", 2)
    assert table.claim(["r", "stranger"]) == ([], ["r"])
    table.deliver([made("r", 2, 3)])
    assert table.close(session) == ["r"]
    assert table.is_stopping("r")
    assert table.claim(["r"]) == ([], ["r"])
    table.deliver([made("r", 5, 1)])
    assert table.deliver([made("r", 6, 0, "abort")]) == {}
    assert table.claim(["r", "stranger"]) == ([Orphan("r", 6)], [])
    assert table.claim(["r"]) == ([Orphan("r", 6)], [])
    table.settle(["r", "stranger"])
    assert table.claim(["r"]) == ([], [])


def test_what_had_ended_is_an_orphan_once_its_client_is_dead() -> None:
    table = SessionTable()
    session = opened(table, "a")
    table.own(session, "finished", 0)
    table.own(session, "stopped", 0)
    table.deliver([made("finished", 0, 4, "stop"), made("stopped", 0, 9)])
    table.forget("stopped", 6)
    table.deliver([made("stopped", 9, 0, "abort")])
    assert table.claim(["finished", "stopped"]) == ([], ["finished", "stopped"])
    assert table.close(session) == []
    assert table.claim(["stopped", "finished"]) == ([Orphan("stopped", 6), Orphan("finished", 4)], [])


def test_a_request_that_is_added_again_is_no_orphan() -> None:
    table = SessionTable()
    first = opened(table, "a")
    table.own(first, "r", 0)
    table.deliver([made("r", 0, 4)])
    table.close(first)
    table.deliver([made("r", 4, 0, "abort")])
    second = opened(table, "b")
    assert table.own(second, "r", 4)
    assert not table.own(second, "r", 4)
    assert table.claim(["r"]) == ([], ["r"])
    table.deliver([made("r", 4, 3, "stop")])
    table.close(second)
    assert table.claim(["r"]) == ([Orphan("r", 7)], [])


def test_a_request_tried_again_by_its_client_counts_from_its_second_run() -> None:
    table = SessionTable()
    session = opened(table, "a")
    table.own(session, "r", 0)
    table.deliver([made("r", 0, 0, "error")])
    assert table.own(session, "r", 0)
    table.close(session)
    assert table.claim(["r"]) == ([], ["r"])


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_KEPT_ENDED", 3)
    monkeypatch.setattr(sessions, "MAX_KEPT_ORPHANS", 4)
    table = SessionTable()
    for client in ("a", "b"):
        session = opened(table, client)
        for number in range(5):
            table.own(session, f"{client}{number}", 0)
            table.deliver([made(f"{client}{number}", 0, 1, "stop")])
        assert len(session.ended) == 3
        table.close(session)
    kept, stopping = table.claim(f"{client}{number}" for client in "ab" for number in range(5))
    assert [orphan.request_id for orphan in kept] == ["a4", "b2", "b3", "b4"]
    assert stopping == []


def test_an_aborted_requests_last_items_end_no_second_run_of_its_id() -> None:
    table = SessionTable()
    session = opened(table, "a")
    table.own(session, "r", 0)
    table.deliver([made("r", 0, 3)])
    table.forget("r", 2)
    assert table.is_stopping("r")
    assert table.deliver([made("r", 3, 1)]) == {}, "nothing more of it is wanted"
    last = made("r", 4, 0, "abort")
    assert table.deliver([last]) == {b"a": [last]}, "its client waits for this"
    assert not table.is_stopping("r")
    assert table.own(session, "r", 0)
    table.deliver([made("r", 0, 1)])
    assert table.owned_by(session, "r")
    table.deliver([made("r", 1, 6, "length")])
    table.close(session)
    assert table.claim(["r"]) == ([Orphan("r", 7)], []), "the second run's count"


def test_a_client_that_dies_right_after_an_abort_leaves_what_it_wanted() -> None:
    table = SessionTable()
    session = opened(table, "a")
    table.own(session, "r", 0)
    table.deliver([made("r", 0, 5)])
    table.forget("r", 3)
    assert table.close(session) == [], "it is being aborted already"
    assert table.is_stopping("r")
    assert table.deliver([made("r", 5, 0, "abort")]) == {}
    assert not table.is_stopping("r")
    assert table.claim(["r"]) == ([Orphan("r", 3)], [])
