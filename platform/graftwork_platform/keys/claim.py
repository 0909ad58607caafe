"""One database, one pepper: a server with another could neither check the keys of the others nor make any that they know."""

from __future__ import annotations

import hmac

from sqlalchemy.orm import Session

from graftwork_platform.db_postgresql import Turn, take_turn
from graftwork_platform.models import SecretFingerprint
from graftwork_platform.secrets import BadSecret, Secrets

_PEPPER = "pepper"


def claim(session: Session, secrets: Secrets) -> None:
    """Leave the pepper's fingerprint in a database that has none yet; raises `BadSecret` if it has another's."""
    take_turn(session, Turn.CLAIM_SECRETS)
    row = session.get(SecretFingerprint, _PEPPER)
    if row is None:
        session.add(SecretFingerprint(name=_PEPPER, fingerprint=secrets.pepper_fingerprint))
    elif not hmac.compare_digest(row.fingerprint, secrets.pepper_fingerprint):
        raise BadSecret(
            "the keys in this database were made with another pepper, so this server could check none of them: give all servers on "
            "one database the same secrets, by --secrets-dir with copies of the same files (DATA_DIR/secrets of the first server) "
            "or by GRAFTWORK_PEPPER and GRAFTWORK_CACHE_SALT"
        )
