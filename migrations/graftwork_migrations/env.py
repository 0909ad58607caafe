"""Alembic's entry point: run revisions on the connection that `runner` prepared. Knows no URL."""

from alembic import context
from sqlalchemy import Connection

from graftwork_platform.models import Base


def _run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=True,  # SQLite changes a table by copying it
        transactional_ddl=True,  # all revisions or none: `runner` has begun a transaction that SQLite keeps over DDL
        compare_server_default=True,
    )
    with context.begin_transaction():
        context.run_migrations()


_run(context.config.attributes["connection"])
