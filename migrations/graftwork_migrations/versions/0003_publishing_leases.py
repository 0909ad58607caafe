"""What several servers that publish need: who runs a publication, and which blobs are being deleted."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    """Apply. Uploads whose parts lie on one server's disk are not carried over: they expire, or fail with the reason."""
    op.create_table(
        "blob_sweeps",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("token", sa.Uuid(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_blob_sweeps")),
    )
    op.add_column("uploads", sa.Column("lease_holder", sa.Uuid(), nullable=True))
    op.add_column("uploads", sa.Column("lease_until", sa.BigInteger(), server_default="0", nullable=False))


def downgrade() -> None:
    """Take back. Digests of versions that never became ready are forgotten, as older servers expect."""
    op.execute("UPDATE adapter_versions SET digest = NULL, deleted_at = NULL WHERE state IN ('validating', 'failed')")
    op.drop_column("uploads", "lease_until")
    op.drop_column("uploads", "lease_holder")
    op.drop_table("blob_sweeps")
