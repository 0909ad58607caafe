"""What can be said of the type of adapters' rows. Knows no tenants and no uploads."""

from __future__ import annotations

from typing import Final, Literal

SERVERS: Final = "auto"
"""The server's own type, whatever a tenant's is."""

WantedRowType = Literal["auto", "bfloat16", "float32", "int8", "e4m3"]
"""A type of rows (`RowTypeName`), or `SERVERS`."""
