"""A body's bytes to a checked struct, whatever is wrong with it told by the field's name. Knows no fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from graftwork_platform.errors import BadRequest

_T = TypeVar("_T")


def parse_object(body: bytes) -> dict[str, object]:
    """The body's fields that are set: null is the same as absent. Numbers that no float holds are refused, as NaN is.

    Raises `BadRequest`.
    """
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"The body of the request is not valid JSON: {error}") from error
    except RecursionError as error:
        raise BadRequest("The body of the request is nested too deeply.") from error
    if not isinstance(raw, dict):
        raise BadRequest("The body of the request must be a JSON object.")
    return {name: value for name, value in raw.items() if value is not None}


def convert(fields: Mapping[str, object], kind: type[_T]) -> _T:
    """The fields as a struct of ``kind``; raises `BadRequest` naming the first one that does not fit."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _as_bad_request(str(error)) from error


def _as_bad_request(text: str) -> BadRequest:
    """msgspec's words with the field first: "`top_p` must be: `float` <= 1.0"."""
    if match := re.fullmatch(r"Object missing required field `(\w+)`(?: - at `\$\.(.*)`)?", text):
        param = f"{match[2]}.{match[1]}" if match[2] else match[1]
        return BadRequest(f"Missing required parameter: `{param}`.", param=param)
    match = re.fullmatch(r"(.*) - at `\$\.?(.*)`", text, re.DOTALL)
    if match is None:
        return BadRequest(text)
    param = match[2].replace("[...]", "")  # some value of an object
    return BadRequest(f"`{param}`: {match[1][:1].lower()}{match[1][1:]}.", param=param)
