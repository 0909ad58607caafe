"""A model's chat template: messages to the prompt's text, as transformers' `apply_chat_template` does it. Knows no requests.

A template is code that came with a model: it sees plain JSON values only, in jinja2's immutable sandbox, in a process that may use
so much time and memory; whatever goes wrong in it is the request's error.
"""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from graftwork_platform.errors import BadRequest, ServiceUnavailable
from graftwork_platform.text.template_queue import TemplatesBusy
from graftwork_platform.text.template_sandbox import TemplateFailure, TemplateSandbox
from graftwork_platform.text.template_source import template_source
from graftwork_platform.text.tokenizer import TokenizerError

Message = dict[str, object]
"""One message as the template sees it: role, content, and what else the client may send."""


class ChatTemplate:
    """A compiled template with the special tokens it may name."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        sandbox: TemplateSandbox,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
        group: str = "",
    ) -> None:
        """``group``: whose it is, for `TemplateSandbox.compile`. Raises `TokenizerError` if ``source`` cannot be compiled."""
        self._special_tokens = dict(special_tokens)
        self._sandbox = sandbox
        self._now = now
        try:
            self._number = sandbox.compile(source, group)
        except TemplateFailure as failure:
            raise TokenizerError(f"the chat template cannot be compiled: {failure}") from failure
        # Requests that run hold their template; whoever of them is last lets the sandbox forget it.
        weakref.finalize(self, sandbox.forget, self._number).atexit = False

    @classmethod
    def from_dir(cls, model_dir: Path, special_tokens: Mapping[str, str], sandbox: TemplateSandbox) -> ChatTemplate | None:
        """The folder's default template, or None if it has none; raises `TokenizerError` if it cannot be read or compiled."""
        source = template_source(model_dir)
        return None if source is None else cls(source, special_tokens, sandbox)

    async def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt's text; encode it without adding special tokens. Raises `BadRequest` with the template's own
        words, or `ServiceUnavailable` while too many wait.
        """
        variables = {
            **self._special_tokens,
            "messages": [{name: value for name, value in message.items() if value is not None} for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return await self._sandbox.render(self._number, variables, self._now())
        except TemplateFailure as failure:
            raise BadRequest(f"The model's chat template refused the messages: {failure}", param="messages") from failure
        except TemplatesBusy as busy:
            raise ServiceUnavailable(str(busy), code="templates_busy", retry_after=busy.retry_after) from busy
