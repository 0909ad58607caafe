"""The first tables."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | None = None
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    """Apply."""
    _create_tenants()
    _create_adapters()
    _create_adapter_versions()
    _create_api_keys()
    _create_uploads()
    _create_usage()


def downgrade() -> None:
    """Take back."""
    op.drop_table("usage")
    op.drop_table("uploads")
    op.drop_table("api_keys")
    op.drop_table("adapter_versions")
    op.drop_table("adapters")
    op.drop_table("tenants")


def _create_tenants() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
    )


def _create_adapters() -> None:
    op.create_table(
        "adapters",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("next_version", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("next_version > 0", name=op.f("ck_adapters_next_version_positive")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_adapters_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapters")),
        sa.UniqueConstraint("tenant_id", "id", name=op.f("uq_adapters_tenant_id_id")),
        sa.UniqueConstraint("tenant_id", "name", name=op.f("uq_adapters_tenant_id_name")),
    )


def _create_adapter_versions() -> None:
    op.create_table(
        "adapter_versions",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("adapter_id", sa.Uuid(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=True),
        sa.Column("digest", sa.String(length=64), nullable=True),
        sa.Column("manifest_sha256", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("report", sa.JSON(), nullable=False),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("ready_at", sa.BigInteger(), nullable=True),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "state IN ('validating', 'failed') OR (number IS NOT NULL AND digest IS NOT NULL)",
            name=op.f("ck_adapter_versions_ready_is_complete"),
        ),
        sa.CheckConstraint(
            "state IN ('validating', 'ready', 'failed', 'deleting', 'deleted')", name=op.f("ck_adapter_versions_state_known")
        ),
        sa.CheckConstraint("number IS NULL OR number > 0", name=op.f("ck_adapter_versions_number_positive")),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id"],
            ["adapters.tenant_id", "adapters.id"],
            name=op.f("fk_adapter_versions_tenant_id_adapter_id_adapters"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapter_versions")),
        sa.UniqueConstraint("adapter_id", "number", name=op.f("uq_adapter_versions_adapter_id_number")),
        sa.UniqueConstraint("tenant_id", "id", name=op.f("uq_adapter_versions_tenant_id_id")),
    )
    op.create_index(op.f("ix_adapter_versions_digest"), "adapter_versions", ["digest"], unique=False)


def _create_api_keys() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=True),
        sa.Column("is_admin", sa.Boolean(), nullable=False),
        sa.Column("public_id", sa.String(length=32), nullable=False),
        sa.Column("key_hmac", sa.LargeBinary(length=32), nullable=False),
        sa.Column("default_adapter_id", sa.Uuid(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("revoked_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("default_adapter_id IS NULL OR tenant_id IS NOT NULL", name=op.f("ck_api_keys_default_needs_tenant")),
        sa.CheckConstraint("is_admin = (tenant_id IS NULL)", name=op.f("ck_api_keys_admin_has_no_tenant")),
        sa.ForeignKeyConstraint(
            ["tenant_id", "default_adapter_id"],
            ["adapters.tenant_id", "adapters.id"],
            name=op.f("fk_api_keys_tenant_id_default_adapter_id_adapters"),
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_api_keys_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("public_id", name=op.f("uq_api_keys_public_id")),
        sa.UniqueConstraint("tenant_id", "id", name=op.f("uq_api_keys_tenant_id_id")),
    )


def _create_uploads() -> None:
    op.create_table(
        "uploads",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("adapter_name", sa.String(length=64), nullable=False),
        sa.Column("files", sa.JSON(), nullable=False),
        sa.Column("part_bytes", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("version_id", sa.Uuid(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "state IN ('uploading', 'validating', 'ready', 'failed', 'expired')", name=op.f("ck_uploads_state_known")
        ),
        sa.CheckConstraint("state NOT IN ('validating', 'ready') OR version_id IS NOT NULL", name=op.f("ck_uploads_version_known")),
        sa.ForeignKeyConstraint(
            ["tenant_id", "version_id"],
            ["adapter_versions.tenant_id", "adapter_versions.id"],
            name=op.f("fk_uploads_tenant_id_version_id_adapter_versions"),
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_uploads_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_uploads")),
    )
    op.create_index(op.f("ix_uploads_state"), "uploads", ["state"], unique=False)


def _create_usage() -> None:
    op.create_table(
        "usage",
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("request_id", sa.Uuid(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("client_request_id", sa.Text(), nullable=True),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("key_id", sa.Uuid(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("version_id", sa.Uuid(), nullable=True),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("status IN ('completed', 'aborted', 'failed')", name=op.f("ck_usage_status_known")),
        sa.CheckConstraint("cached_tokens BETWEEN 0 AND prompt_tokens", name=op.f("ck_usage_cached_within_prompt")),
        sa.CheckConstraint("prompt_tokens >= 0 AND output_tokens >= 0", name=op.f("ck_usage_tokens_not_negative")),
        sa.ForeignKeyConstraint(
            ["tenant_id", "key_id"], ["api_keys.tenant_id", "api_keys.id"], name=op.f("fk_usage_tenant_id_key_id_api_keys")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "version_id"],
            ["adapter_versions.tenant_id", "adapter_versions.id"],
            name=op.f("fk_usage_tenant_id_version_id_adapter_versions"),
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_usage_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("day", "request_id", name=op.f("pk_usage")),
    )
    op.create_index(op.f("ix_usage_tenant_id_seq"), "usage", ["tenant_id", "seq"], unique=False)
    op.create_index("uq_usage_seq", "usage", ["seq"], unique=True)
