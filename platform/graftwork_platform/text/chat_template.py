"""A model's chat template: messages to the prompt's text, as transformers' `apply_chat_template` does it. Knows no requests.

A template is code that came with a model: it runs in jinja2's immutable sandbox, sees plain JSON values only, and whatever goes
wrong in it is the request's error.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from graftwork_platform.errors import BadRequest
from graftwork_platform.text.tokenizer import TokenizerError, read_tokenizer_config

Message = dict[str, object]
"""One message as the template sees it: role, content, and what else the client may send."""

_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)


class ChatTemplate:
    """A compiled template with the special tokens it may name."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment(now).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"the chat template cannot be compiled: line {error.lineno}: {error.message}") from error

    @classmethod
    def from_dir(cls, model_dir: Path, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """The folder's default template, or None if it has none; raises `TokenizerError` if it cannot be compiled.

        A ``chat_template.jinja`` stands above ``chat_template`` in ``tokenizer_config.json``: a text, or a list of named ones.
        """
        source = _default_source(model_dir)
        return None if source is None else cls(source, special_tokens)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt's text; encode it without adding special tokens. Raises `BadRequest` with the template's own words."""
        plain = [{name: value for name, value in message.items() if value is not None} for message in messages]
        try:
            return self._template.render(
                messages=plain,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except _TEMPLATE_FAILURES as error:
            raise BadRequest(f"The model's chat template refused the messages: {error}", param="messages") from error


def _default_source(model_dir: Path) -> str | None:
    path = model_dir / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    declared = read_tokenizer_config(model_dir).get("chat_template")
    if declared is None or isinstance(declared, str):
        return declared
    named = {entry["name"]: entry["template"] for entry in declared} if isinstance(declared, list) else declared
    if not isinstance(named, dict) or not isinstance(named.get("default"), str):
        raise TokenizerError(f"{model_dir / 'tokenizer_config.json'} has several chat templates and none named default")
    return str(named["default"])


def _environment(now: Callable[[], datetime.datetime]) -> ImmutableSandboxedEnvironment:
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
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
