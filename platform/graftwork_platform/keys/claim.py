"""What all servers on one database must have in common: the pepper of its keys, and, where there can be several, what they serve.

A server with another pepper could neither check the keys of the others nor make any that they know. One with another base or row
type would publish adapters that the others cannot run, and refuse what they can.
"""

from __future__ import annotations

import hashlib
import hmac

from sqlalchemy.orm import Session

from graftwork_platform.db_postgresql import Turn, take_turn
from graftwork_platform.models import SecretFingerprint
from graftwork_platform.secrets import BadSecret, Secrets

_PEPPER = "pepper"
_BASE = "base"
_ROW_TYPE = "row type"


class OtherServing(Exception):
    """The database belongs to servers of another base or row type; the message says what to do."""


def claim(session: Session, secrets: Secrets) -> None:
    """Leave the pepper's fingerprint in a database that has none yet; raises `BadSecret` if it has another's."""
    if not _is_ours(session, _PEPPER, secrets.pepper_fingerprint):
        raise BadSecret(
            "the keys in this database were made with another pepper, so this server could check none of them: give all servers on "
            "one database the same secrets, by --secrets-dir with copies of the same files (DATA_DIR/secrets of the first server) "
            "or by GRAFTWORK_PEPPER and GRAFTWORK_CACHE_SALT"
        )


def claim_serving(session: Session, base_id: str, row_type: str) -> None:
    """As `claim`, for what is served. For databases that several servers may use; raises `OtherServing`."""
    for name, ours, option in ((_BASE, base_id, "--model"), (_ROW_TYPE, row_type, "--dtype and --adapter-dtype")):
        if not _is_ours(session, name, hashlib.sha256(ours.encode()).digest()):
            raise OtherServing(
                f"the other servers on this database serve another {name}: give all of them the same {option}, or this one a "
                "database of its own (to change it for all of them, see docs/operating.md)"
            )


def _is_ours(session: Session, name: str, fingerprint: bytes) -> bool:
    take_turn(session, Turn.CLAIM_SECRETS)
    row = session.get(SecretFingerprint, name)
    if row is None:
        session.add(SecretFingerprint(name=name, fingerprint=fingerprint))
        return True
    return hmac.compare_digest(row.fingerprint, fingerprint)
