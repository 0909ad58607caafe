"""What several servers on one database need: whose secrets it was made with, and word of every change of keys and tenants."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

# Triggers, so that no path round the server's own code, a hand in psql included, can change a key unheard.
_ANNOUNCE = """
CREATE FUNCTION graftwork_announce() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_notify('graftwork_keys', TG_ARGV[0] || ':' || CASE TG_OP WHEN 'DELETE' THEN OLD.id ELSE NEW.id END);
  RETURN NULL;
END $$
"""
_ANNOUNCE_ALL = """
CREATE FUNCTION graftwork_announce_all() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_notify('graftwork_keys', 'all');
  RETURN NULL;
END $$
"""


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "secret_fingerprints",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("fingerprint", sa.LargeBinary(length=32), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_secret_fingerprints")),
    )
    # A table that is cut by day can have no unique index without the day.
    op.drop_index("uq_usage_seq", table_name="usage")
    op.create_index("uq_usage_seq_day", "usage", ["seq", "day"], unique=True)
    if op.get_context().dialect.name == "postgresql":
        op.execute(_ANNOUNCE)
        op.execute(_ANNOUNCE_ALL)
        for table, what in (("api_keys", "key"), ("tenants", "tenant")):
            op.execute(
                f"CREATE TRIGGER {table}_announce AFTER INSERT OR UPDATE OR DELETE ON {table} "
                f"FOR EACH ROW EXECUTE FUNCTION graftwork_announce('{what}')"
            )
            op.execute(
                f"CREATE TRIGGER {table}_announce_all AFTER TRUNCATE ON {table} "
                "FOR EACH STATEMENT EXECUTE FUNCTION graftwork_announce_all()"
            )


def downgrade() -> None:
    """Take back."""
    if op.get_context().dialect.name == "postgresql":
        for table in ("tenants", "api_keys"):
            op.execute(f"DROP TRIGGER {table}_announce_all ON {table}")
            op.execute(f"DROP TRIGGER {table}_announce ON {table}")
        op.execute("DROP FUNCTION graftwork_announce_all()")
        op.execute("DROP FUNCTION graftwork_announce()")
    op.drop_index("uq_usage_seq_day", table_name="usage")
    op.create_index("uq_usage_seq", "usage", ["seq"], unique=True)
    op.drop_table("secret_fingerprints")
