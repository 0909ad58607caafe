"""What a failed S3 request means: worth another try or not, in which of the room's errors. Sends nothing and waits for nothing."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ProxyConnectionError,
    ReadTimeoutError,
    SSLError,
)
from urllib3.exceptions import HTTPError
from urllib3.exceptions import TimeoutError as ConnectionTimeout

from graftwork_adapters.errors import BlobCorrupt, BlobNotFound, InvalidKey, StoreError, StoreUnavailable


class Interrupted(Exception):
    """An answer that ended early."""


class Clash(Exception):
    """Another request changed the blob between two of ours."""


class Damaged(Exception):
    """Bytes that are not what was stored; if they come again like that, it is not the network."""


S3_ERRORS = (ClientError, BotoCoreError, HTTPError, Interrupted, Clash, Damaged)
"""What a request can raise; `failure_of` reads them all."""


@dataclass(frozen=True, slots=True)
class Failure:
    """``error`` is what the caller gets if the request is not tried again."""

    error: StoreError
    is_transient: bool


_KEYS = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile or role that the server runs with"
_REFUSED_KEYS = ("the object store refuses the server's credentials", _KEYS)
_EXPIRED = ("the server's credentials for the object store have expired", "give the server new ones, or a role that renews them")
_NO_KEYS = (
    "the server has no credentials for the object store",
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give it a role",
)
_HALF_A_KEY = (
    "the server has half of a key pair for the object store",
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY both, or neither and give it a profile or role",
)
_CLOCK = ("the object store refuses the server's clock, which is off by minutes", "set the clock of this machine (NTP)")
_NOT_ALLOWED = (
    "the object store does not allow this to the server's credentials",
    "allow s3:ListBucket on the bucket and s3:GetObject, PutObject, DeleteObject and AbortMultipartUpload on its objects",
)
_NO_BUCKET = ("the object store's bucket is not there", "create it, or correct the bucket's name in --object-store")
_REGION = ("the object store's bucket is in another region", "name the region with --s3-region, or the server with --s3-endpoint")
_NAME = ("the object store's host name is not known", "correct --s3-endpoint or --s3-region, or mend this machine's DNS")
_NO_ANSWER = ("nothing answers at the object store's address", "start it, or correct --s3-endpoint")
_SILENT = ("the object store does not answer in time", "look at its log and at the network between; is --s3-endpoint right?")
_CUT = ("the object store breaks connections", "look at its log and at the network between")
_TRUST = ("the object store's certificate is not trusted", "give its authority's certificate with --s3-ca-bundle")
_TLS = ("no TLS connection to the object store can be made", "is --s3-endpoint right, and not one that speaks http://?")
_PROXY = ("the proxy to the object store does not answer", "correct HTTP_PROXY, HTTPS_PROXY or NO_PROXY")
_BUSY = ("the object store is overloaded or failing", "look at its log; requests are tried again for a while before they end so")
_CLASH = ("other writers keep changing the object store while this one writes", "try again")

_BY_CODE = {
    "InvalidAccessKeyId": _REFUSED_KEYS,
    "SignatureDoesNotMatch": _REFUSED_KEYS,
    "InvalidToken": _REFUSED_KEYS,
    "InvalidClientTokenId": _REFUSED_KEYS,
    "UnrecognizedClientException": _REFUSED_KEYS,
    "ExpiredToken": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "RequestTimeTooSkewed": _CLOCK,
    "AccessDenied": _NOT_ALLOWED,
    "AllAccessDisabled": _NOT_ALLOWED,
    "NoSuchBucket": _NO_BUCKET,
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
}
_BY_STATUS = {301: _REGION, 307: _REGION, 401: _REFUSED_KEYS, 403: _NOT_ALLOWED}

# Codes that S3 sends with a status of 400: the body was slow, cut or damaged on its way.
_TRANSIENT_CODES = frozenset(
    {"RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "SlowDown"}
)
_TRANSIENT_STATUS = frozenset({408, 409, 429, 500, 502, 503, 504})


def code_of(error: ClientError) -> str:
    """S3's own code, or the HTTP status where an answer has no body to carry one."""
    return str(error.response.get("Error", {}).get("Code", ""))


def status_of(error: ClientError) -> int:
    """The HTTP status; 0 if there is none."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def failure_of(error: BaseException, key: str) -> Failure:
    """What one of `S3_ERRORS` means for a request about ``key``."""
    if isinstance(error, ClientError):
        return _answered(error, key)
    if isinstance(error, Damaged):
        return Failure(BlobCorrupt(f"the store's bytes of {key} are not those that were stored"), is_transient=True)
    if isinstance(error, Interrupted):
        return _unavailable(_CUT, is_transient=True)
    if isinstance(error, Clash):
        return _unavailable(_CLASH, is_transient=True)
    if isinstance(error, PartialCredentialsError):
        return _unavailable(_HALF_A_KEY, is_transient=False)
    if isinstance(error, NoCredentialsError | CredentialRetrievalError):
        return _unavailable(_NO_KEYS, is_transient=isinstance(error, CredentialRetrievalError))
    if isinstance(error, SSLError):
        return _unavailable(_TRUST if _is_distrust(error) else _TLS, is_transient=not _is_distrust(error))
    if isinstance(error, ProxyConnectionError):
        return _unavailable(_PROXY, is_transient=True)
    if isinstance(error, ConnectTimeoutError | ReadTimeoutError | ConnectionTimeout):
        return _unavailable(_SILENT, is_transient=True)
    if isinstance(error, EndpointConnectionError):
        return _unavailable(_NAME if _has_cause(error, socket.gaierror) else _NO_ANSWER, is_transient=True)
    sending: BaseException | None = error.kwargs.get("error") if isinstance(error, HTTPClientError) else None
    if isinstance(sending, StoreError):  # raised by the body that was being sent
        return Failure(sending, is_transient=False)
    if isinstance(error, HTTPClientError | HTTPError):
        return _unavailable(_CUT, is_transient=True)
    return Failure(StoreUnavailable(f"the object store cannot be asked: {type(error).__name__}"), is_transient=False)


def _answered(error: ClientError, key: str) -> Failure:
    code, status = code_of(error), status_of(error)
    if code in _BY_CODE:
        return _unavailable(_BY_CODE[code], is_transient=False)
    if code == "NoSuchKey" or (status == 404 and code == "404"):  # an answer to HEAD has no body
        return Failure(BlobNotFound(f"the store has no {key}"), is_transient=False)
    if code == "KeyTooLongError":
        return Failure(InvalidKey(f"{key!r} is too long a key for this object store"), is_transient=False)
    if code in _TRANSIENT_CODES or status in _TRANSIENT_STATUS:
        return _unavailable(_BUSY, is_transient=True)
    if status in _BY_STATUS:
        return _unavailable(_BY_STATUS[status], is_transient=False)
    return Failure(StoreUnavailable(f"the object store answers {code or status}"), is_transient=False)


def _unavailable(what: tuple[str, str], *, is_transient: bool) -> Failure:
    problem, fix = what
    return Failure(StoreUnavailable(problem, fix=fix), is_transient)


def _is_distrust(error: SSLError) -> bool:
    return _has_cause(error, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in str(error)


def _has_cause(error: BaseException, kind: type[BaseException]) -> bool:
    """True if an error of this kind is behind ``error``, by any of the ways in which libraries keep them."""
    pending: list[object] = [error]
    for _ in range(10):
        if not pending:
            break
        found = pending.pop()
        if isinstance(found, kind):
            return True
        if isinstance(found, BaseException):
            inner = [found.__cause__, found.__context__, getattr(found, "reason", None), *found.args]
            kept = getattr(found, "kwargs", {}).get("error")  # botocore's
            pending += [cause for cause in (*inner, kept) if isinstance(cause, BaseException)]
    return False
