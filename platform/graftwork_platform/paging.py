"""Lists that are read page by page behind a cursor. Knows no table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from sqlalchemy import Select
from sqlalchemy.orm import Session

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    """One page, and whether more follows it."""

    rows: Sequence[Row]
    has_more: bool


def page_of(session: Session, query: Select[Row], limit: int) -> Page[Row]:
    """The first ``limit`` rows of an ordered query that already begins behind the cursor."""
    rows = session.scalars(query.limit(limit + 1)).all()
    return Page(rows[:limit], len(rows) > limit)
