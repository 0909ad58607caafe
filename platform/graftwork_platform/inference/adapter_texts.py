"""The text side of what a model's name means: the base's, or an adapter's own, read from the object store when first asked for.

What is read here was looked at when it was published, in a process with limits. It is read in threads, once for all who wait, and
kept while there is room; whoever still uses what is let go keeps it for that long.

The library that reads a tokenizer holds the interpreter's lock until it is done, so all streams stand still for that long. What was
looked at bounds it; tokenizers are read one by one, and with pauses, so that many of them take no more than a part of the time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from graftwork_adapters.errors import AdapterError, BlobCorrupt
from graftwork_adapters.keys import AdapterDigest
from graftwork_adapters.scratch import scratch_folder
from graftwork_platform.catalog.catalog import ResolvedModel
from graftwork_platform.catalog.facts import OwnText
from graftwork_platform.inference.failures import as_platform_error
from graftwork_platform.text.chat_template import ChatTemplate
from graftwork_platform.text.model_text import ModelText
from graftwork_platform.text.template_sandbox import TemplateSandbox
from graftwork_platform.text.template_source import template_source
from graftwork_platform.text.tokenizer import Tokenizer, TokenizerError
from graftwork_platform.text.upload_text import OWN_TEMPLATE_SECONDS, own_special_tokens

_log = logging.getLogger(__name__)

CACHE_BYTES = 512 << 20
"""Of memory for the tokenizers that are kept."""
MAX_KEPT = 256
"""Of adapters' text sides, however small they are."""
BYTES_PER_FILE_BYTE = 9
"""Memory that a tokenizer takes at most for each byte of its file: some 3.5 when it has been read, the rest for what its tokens
spell, as they are seen. Measured with byte-level BPE of 49 000 and of 128 000 tokens."""
PAUSE_FACTOR = 4
"""After a tokenizer has been read, none is read for so many times as long as that took."""

FetchText = Callable[[AdapterDigest, Path], Awaitable[None]]
"""Writes an upload's text files into a folder; raises `AdapterError`, `OSError`."""


@dataclass(frozen=True, slots=True)
class _Own:
    """What was read of one upload. ``cost``: bytes of memory, about."""

    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    cost: int


class AdapterTexts:
    """All models' text sides. Belongs to one event loop; `close` when done."""

    def __init__(self, base: ModelText, fetch: FetchText, scratch: Path, *, max_bytes: int = CACHE_BYTES) -> None:
        """``scratch``: where files lie for as long as they are read."""
        self.base = base
        self._fetch = fetch
        self._scratch = scratch
        self._max_bytes = max_bytes
        # Not the base's: templates of their own that take their time never hold up what most requests need.
        self._sandbox = TemplateSandbox(cpu_seconds=OWN_TEMPLATE_SECONDS, is_forgiving=False)
        self._kept: OrderedDict[tuple[AdapterDigest, OwnText], _Own] = OrderedDict()  # the one asked for last is the last
        self._reading = asyncio.Lock()
        self._read_next = 0.0  # on the loop's clock: when the next tokenizer may be read
        self._loading: dict[tuple[AdapterDigest, OwnText], asyncio.Task[_Own]] = {}

    async def of(self, model: ResolvedModel) -> ModelText:
        """The text side of ``model``. Raises `ServiceUnavailable` where its own files cannot be read."""
        base, facts = self.base, model.facts
        if model.digest is None:
            return base
        vocab_size = facts.traits.vocab_size or base.vocab_size
        eos_token_ids = base.eos_token_ids if facts.text.eos_token_ids is None else facts.text.eos_token_ids
        eos_token_ids = tuple(token_id for token_id in eos_token_ids if token_id < vocab_size)  # of a vocabulary that shrank
        if not facts.text.needs_files:
            if vocab_size == base.vocab_size and eos_token_ids == base.eos_token_ids:
                return base
            return replace(base, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        try:
            own = await self._own(model.digest, facts.text, vocab_size)
        except AdapterError as failure:
            raise as_platform_error(failure, model.public_name) from failure
        return replace(
            base,
            tokenizer=own.tokenizer or base.tokenizer,
            chat_template=own.chat_template or base.chat_template,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
        )

    def close(self) -> None:
        """End the process of the templates. Blocks until work that is under way has ended."""
        self._sandbox.close()

    async def _own(self, digest: AdapterDigest, text: OwnText, num_rows: int) -> _Own:
        wanted = (digest, text)
        kept = self._kept.get(wanted)
        if kept is not None:
            self._kept.move_to_end(wanted)
            return kept
        task = self._loading.get(wanted)
        if task is None:
            task = asyncio.create_task(self._load(digest, text, num_rows), name=f"read the text files of {digest}")
            self._loading[wanted] = task
            task.add_done_callback(lambda _: self._loading.pop(wanted, None))
        return await asyncio.shield(task)  # one caller's disconnect must not fail the others

    async def _load(self, digest: AdapterDigest, text: OwnText, num_rows: int) -> _Own:
        with scratch_folder(self._scratch) as folder:
            try:
                await self._fetch(digest, folder)
                own = await self._read_in_turn(folder, digest, text, num_rows)
            except (TokenizerError, OSError) as error:
                _log.error("the text files of %s cannot be read: %s", digest, error)
                raise BlobCorrupt("its own tokenizer or chat template cannot be read") from error
        self._kept[digest, text] = own
        while len(self._kept) > 1 and not self._has_room():
            self._kept.popitem(last=False)
        return own

    def _has_room(self) -> bool:
        return len(self._kept) <= MAX_KEPT and sum(each.cost for each in self._kept.values()) <= self._max_bytes

    async def _read_in_turn(self, folder: Path, digest: AdapterDigest, text: OwnText, num_rows: int) -> _Own:
        if not text.tokenizer:
            return await asyncio.to_thread(self._read, folder, digest, text, num_rows)
        clock = asyncio.get_running_loop().time
        async with self._reading:
            await asyncio.sleep(self._read_next - clock())
            started = clock()
            try:
                return await asyncio.to_thread(self._read, folder, digest, text, num_rows)
            finally:
                self._read_next = clock() + PAUSE_FACTOR * (clock() - started)

    def _read(self, folder: Path, digest: AdapterDigest, text: OwnText, num_rows: int) -> _Own:
        tokenizer = Tokenizer.from_dir(folder, num_rows) if text.tokenizer else None
        template = None
        if text.chat_template:
            if (source := template_source(folder)) is None:
                raise TokenizerError("the chat template is missing")
            special_tokens = own_special_tokens(folder, tokenizer or self.base.tokenizer)
            template = ChatTemplate(source, special_tokens, self._sandbox, group=digest)
        files_bytes = sum(path.stat().st_size for path in folder.iterdir())
        return _Own(tokenizer, template, BYTES_PER_FILE_BYTE * files_bytes)
