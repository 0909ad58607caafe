"""``python -m graftwork_migrations upgrade --database-url URL``: for processes that may not import this package."""

from __future__ import annotations

import argparse
import sys

from alembic.util import CommandError
from sqlalchemy.exc import SQLAlchemyError

from graftwork_migrations import runner
from graftwork_platform.db_url import UnsupportedDatabase

_MESSAGES = (
    runner.NewerDatabase,
    runner.UnreachableDatabase,
    runner.UnusableDatabase,
    UnsupportedDatabase,
    CommandError,  # a revision that there is none of
    OSError,  # of a file that is to be made
    SQLAlchemyError,
)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 0 when done, 2 for a database that must not be touched. Revisions go to standard output."""
    parser = argparse.ArgumentParser(prog="graftwork_migrations", description="Bring the database to a revision.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("upgrade", "make or upgrade the tables"),
        ("downgrade", "take the tables back; loses what only newer ones hold"),
        ("current", "say which revision the database is at, and which is the newest"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--database-url", required=True, help="- reads it from standard input, where no other user sees it")
        if name != "current":
            command.add_argument("--revision", default=runner.HEAD, required=name == "downgrade")
    chosen = parser.parse_args(arguments)
    url = sys.stdin.readline().strip() if chosen.database_url == "-" else chosen.database_url
    try:
        if chosen.command == "upgrade":
            runner.upgrade(url, chosen.revision)
        elif chosen.command == "downgrade":
            runner.downgrade(url, chosen.revision)
        else:
            sys.stdout.write(f"{runner.current(url) or runner.BASE} {runner.head()}\n")
    except _MESSAGES as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
