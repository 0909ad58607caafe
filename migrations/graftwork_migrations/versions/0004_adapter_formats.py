"""What there is to say of a version beside its bytes, and of which type its rows are: by tenant, by upload, by version."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0004"
down_revision: str | None = "0003"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

_WITH_ROW_TYPE = ("tenants", "uploads", "adapter_versions")


def upgrade() -> None:
    """Apply. What is there already keeps the server's row type. Its facts are not known, also where a downgrade took them away: the
    server finds them out from the stored upload before it serves such a version.
    """
    for table in _WITH_ROW_TYPE:
        op.add_column(table, sa.Column("row_type", sa.String(length=16), nullable=True))
    op.add_column("adapter_versions", sa.Column("facts", sa.JSON(), nullable=True))


def downgrade() -> None:
    """Take back. Versions that need what older servers lack are answered by those as plain LoRA, or refused by their engine."""
    op.drop_column("adapter_versions", "facts")
    for table in reversed(_WITH_ROW_TYPE):
        op.drop_column(table, "row_type")
