"""The list of demo jobs. Knows no models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from demo_data.brand_voice import BrandVoice
from demo_data.invoice_extractor import InvoiceExtractor
from demo_data.ticket_router import TicketRouter

if TYPE_CHECKING:
    from demo_data.job import Job


def all_jobs() -> tuple[Job, ...]:
    """Every demo job, in the order of the tables."""
    return (TicketRouter(), InvoiceExtractor(), BrandVoice())
