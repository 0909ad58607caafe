"""The jinja environment of chat templates, as transformers sets it up, made immutable and blind to Python's own objects."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def template_environment(now: Callable[[], datetime.datetime]) -> ImmutableSandboxedEnvironment:
    """An environment whose templates can read what they are given and change nothing; ``now`` is their clock."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json

    def strftime_now(format: str) -> str:  # noqa: A002 — templates may pass it by this name
        return now().strftime(format)

    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=strftime_now, dict=_new_dict, namespace=_PublicNamespace
    )
    return environment


class TemplateRefusal(jinja2.TemplateError):
    """A template called ``raise_exception``: it does not want what it was given."""


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here it is its own content."""

    tags = {"generation"}  # noqa: RUF012 — as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _PublicNamespace(Namespace):
    """jinja2's namespace without underscore names, which lead to the interpreter's own objects."""

    def __init__(*args: object, **kwargs: object) -> None:
        self, *values = args
        if not isinstance(self, _PublicNamespace):
            raise TypeError("not a namespace")
        attributes: dict[str, object] = dict(*values, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}")


def _new_dict(*args: Iterable[tuple[str, object]], **kwargs: object) -> dict[str, object]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
