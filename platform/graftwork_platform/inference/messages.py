"""A chat's messages as a client sends them: checked, and in the plain form that templates take. Knows no models."""

from __future__ import annotations

from graftwork_platform.errors import BadRequest
from graftwork_platform.inference.unserved import UNSERVED_MESSAGE, refuse_unserved
from graftwork_platform.text.chat_template import Message

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Templates know no ``developer``: OpenAI's newer name for the system role."""


def parse_messages(raw: list[Message]) -> list[Message]:
    """Messages as a template takes them: a known role, ``content`` as one text, ``name`` if given. Raises `BadRequest`.

    The texts of several content parts are joined by line breaks.
    """
    if not raw:
        raise BadRequest("`messages` is empty; give at least one.", param="messages")
    return [_parse_message(message, f"messages[{place}]") for place, message in enumerate(raw)]


def _parse_message(raw: Message, where: str) -> Message:
    role, content, name = raw.get("role"), raw.get("content"), raw.get("name")
    if role in ("tool", "function"):
        raise BadRequest(
            f"`{where}.role`: tools are not supported by this server.", param=f"{where}.role", code="unsupported_parameter"
        )
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRequest(f"`{where}.role` must be one of {', '.join(_ROLES)}.", param=f"{where}.role")
    refuse_unserved(raw, ("role", "content", "name"), UNSERVED_MESSAGE, within=f"{where}.")
    parsed: Message = {"role": _ROLES[role], "content": _parse_content(content, f"{where}.content")}
    if name is not None:
        if not isinstance(name, str):
            raise BadRequest(f"`{where}.name` must be a string.", param=f"{where}.name")
        parsed["name"] = name
    return parsed


def _parse_content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"`{where}` must be a string or a list of text parts.", param=where)
    return "\n".join(_parse_part(part, f"{where}[{place}]") for place, part in enumerate(content))


def _parse_part(part: object, where: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise BadRequest(f"`{where}` must be an object with a `type`.", param=where)
    if part["type"] != "text":
        raise BadRequest(
            f"`{where}.type`: content of type `{part['type']}` is not supported by this server (only `text`).",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    refuse_unserved(part, ("type", "text"), {}, within=f"{where}.")
    text = part.get("text")
    if not isinstance(text, str):
        raise BadRequest(f"`{where}.text` must be a string.", param=f"{where}.text")
    return text
