"""Which of an upload's text files are to be in force in place of the base's: tokenizer, chat template, where a reply ends.

Opens what a stranger sent, so it runs in a process with limits (`upload_text_worker`).
"""

from __future__ import annotations

import asyncio
import datetime
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from graftwork_adapters.report import Report
from graftwork_adapters.safetensors_header import shown
from graftwork_engine.model.config import ModelConfig
from graftwork_platform.catalog.facts import OwnText
from graftwork_platform.text.neutral_texts import neutral_prompts
from graftwork_platform.text.template_sandbox import TemplateFailure, TemplateSandbox
from graftwork_platform.text.template_source import CONFIG_FILE, JINJA_FILE, JSON_FILE, find_template, template_source
from graftwork_platform.text.tokenizer import Tokenizer, named_special_tokens, read_tokenizer_config
from graftwork_platform.text.untrusted_pipeline import find_problems

EXTRA_TOKENIZER_BYTES = 4 << 20
"""By which a tokenizer's file may be more than twice as large as the base's."""
MAX_SMALL_FILE_BYTES = 4 << 20
"""Of every other text file."""
MIN_READ_SECONDS, READ_TIMES_BASE = 2.0, 4
"""Processor time in which an adapter's tokenizer must be read: so much, or so many times what the base's own takes if that is more.
Whoever serves it stands still meanwhile."""
OWN_TEMPLATE_SECONDS = 0.5
"""Processor time in which an adapter's own template must write one prompt."""

_TOKENIZER, _CONFIG, _GENERATION = "tokenizer.json", CONFIG_FILE, "generation_config.json"
_SPECIAL = "special_tokens_map.json"
_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")
_TRIAL: Mapping[str, object] = {"tools": None, "documents": None, "add_generation_prompt": True}
_USER, _ASSISTANT = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}
_TRIALS: Mapping[str, Sequence[Mapping[str, str]]] = {
    "a lone message of a user": (_USER,),
    "several turns": (_USER, _ASSISTANT, _USER),
    "a system message": ({"role": "system", "content": "Be brief."}, _USER),
}
_TEMPLATE_FIX = "correct it, or leave it out: then the base's holds"
_PAD = "pad_token"  # is for training, and makes no tokenizer another one


class TextJob(msgspec.Struct, frozen=True):
    """Look at the text files ``names`` of ``upload_dir``. ``num_rows``: of the adapter's own embedding; None: the base's."""

    base_dir: str
    upload_dir: str
    names: tuple[str, ...]
    num_rows: int | None = None


class TextVerdict(msgspec.Struct, frozen=True):
    """What was found: ``text`` is in force if nothing of the report failed.

    ``prompts``: `neutral_prompts` of its own tokenizer, if it has one.
    """

    report: Report
    text: OwnText
    prompts: list[list[int]] | None = None


@dataclass(frozen=True, slots=True)
class _Base:
    """The base's text side, as far as an upload is compared with it."""

    tokenizer: Tokenizer
    template: str | None
    num_rows: int
    eos_ids: frozenset[int]
    tokenizer_bytes: int
    read_seconds: float


def examine(job: TextJob) -> TextVerdict:
    """Compare an upload's text files with the base's, and refuse those that cannot be served."""
    report, folder = Report(), Path(job.upload_dir)
    base = _read_base(Path(job.base_dir))
    for name in job.names:
        limit = max_tokenizer_bytes(base.tokenizer_bytes) if name.startswith("tokenizer.") else MAX_SMALL_FILE_BYTES
        if (size := (folder / name).stat().st_size) > limit:
            fix = "save the tokenizer that the adapter was trained with, or leave the file out: then the base's holds"
            report.fail("tokenizer", name, f"has {size} bytes, more than the {limit} that are read", fix)
        elif name in (_CONFIG, _SPECIAL, _GENERATION, JSON_FILE):
            _check_object(folder, name, report)
    if not report.ok:
        return TextVerdict(report, OwnText())
    rows = base.num_rows if job.num_rows is None else job.num_rows
    own = _own_tokenizer(folder, job.names, base, rows, report)
    special_tokens = own_special_tokens(folder, own or base.tokenizer)
    has_template = report.ok and _has_own_template(folder, job.names, base.template, special_tokens, report)
    eos_ids = _own_eos(folder, job.names, own or base.tokenizer, special_tokens, base.eos_ids, rows, report) if report.ok else None
    return TextVerdict(report, OwnText(own is not None, has_template, eos_ids), None if own is None else neutral_prompts(own))


def own_special_tokens(folder: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """What an upload's chat template may name: what its own files say, and else what ``tokenizer`` has. Raises `TokenizerError`."""
    return tokenizer.special_tokens | named_special_tokens(read_tokenizer_config(folder))


def max_tokenizer_bytes(base_bytes: int) -> int:
    """How large an upload's tokenizer may be, given the size of the base's."""
    return 2 * base_bytes + EXTRA_TOKENIZER_BYTES


def _read_base(folder: Path) -> _Base:
    started = time.process_time()
    tokenizer, config = Tokenizer.from_dir(folder), ModelConfig.from_dir(folder)
    seconds = time.process_time() - started
    own = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    size = (folder / _TOKENIZER).stat().st_size
    eos_ids = frozenset({*config.eos_token_ids, *own})
    return _Base(tokenizer, template_source(folder), config.vocab_size, eos_ids, size, seconds)


def _check_object(folder: Path, name: str, report: Report) -> None:
    try:
        if not isinstance(json.loads((folder / name).read_text(encoding="utf-8")), dict):
            report.fail("tokenizer", name, "does not hold a JSON object", "save it again")
    except Exception as error:  # noqa: BLE001 — whatever goes wrong in reading a stranger's file is the file's fault
        report.fail("tokenizer", name, f"cannot be read: {_words(error, folder)}", "save it again")


def _own_tokenizer(folder: Path, names: Sequence[str], base: _Base, rows: int, report: Report) -> Tokenizer | None:
    """The upload's tokenizer if it has one that does something else than the base's."""
    if _TOKENIZER not in names:
        if others := [name for name in names if name in _OTHER_TOKENIZERS]:
            message = f"is missing beside {', '.join(others)}; the base's tokenizer is in force"
            report.warn("tokenizer", _TOKENIZER, message, "save the fast tokenizer with the adapter, if it is another one")
        return None
    try:
        started = time.process_time()
        own = Tokenizer.from_dir(folder)
        seconds = time.process_time() - started
        pipeline, base_pipeline = own.pipeline(), base.tokenizer.pipeline()
        highest = max((own.max_id, *own.encode("a"), *own.encode("a b", add_special_tokens=False)), default=0)
    except Exception as error:  # noqa: BLE001 — as above
        report.fail("tokenizer", _TOKENIZER, f"cannot be read: {_words(error, folder)}", "save the tokenizer again")
        return None
    if problems := find_problems(pipeline, base_pipeline, rows):
        fix = "use the base's normalizer, pre-tokenizer and decoder; added tokens and merges may differ"
        report.fail_each("tokenizer", [(f"{_TOKENIZER}: {where}", what) for where, what in problems], fix)
        return None
    if (limit := max(MIN_READ_SECONDS, READ_TIMES_BASE * base.read_seconds)) < seconds:
        message = f"takes {seconds:.1f} s to read, more than the {limit:.1f} s it may"
        report.fail("tokenizer", _TOKENIZER, message, "save the base's tokenizer with the added tokens, and no others")
        return None
    if own.num_shared_ids > base.tokenizer.num_shared_ids:
        message = f"{own.num_shared_ids} of its tokens have the id of another one"
        report.fail("tokenizer", f"{_TOKENIZER}: model.vocab", message, "give each token an id of its own")
        return None
    if highest >= rows:
        message = f"has ids up to {highest}, and the embedding has {rows} rows (ids up to {rows - 1})"
        fix = (
            "save the embedding and the head with the adapter (modules_to_save or save_embedding_layers), or train the new tokens' "
            "rows (trainable_token_indices), after resizing the base's embedding"
        )
        report.fail("tokenizer", _TOKENIZER, message, fix)
        return None
    if pipeline == base_pipeline and _without_pad(own) == _without_pad(base.tokenizer):
        report.passed("tokenizer", "does what the base's does, which is in force", _TOKENIZER)
        return None
    more = own.vocab_size - base.tokenizer.vocab_size
    count = "as many tokens as the base's" if not more else f"{abs(more)} tokens {'more' if more > 0 else 'fewer'} than the base's"
    report.passed("tokenizer", f"the adapter's own tokenizer is in force: {own.vocab_size} tokens, {count}", _TOKENIZER)
    return own


def _without_pad(tokenizer: Tokenizer) -> dict[str, str]:
    return {name: token for name, token in tokenizer.special_tokens.items() if name != _PAD}


def _has_own_template(
    folder: Path, names: Sequence[str], base: str | None, special_tokens: Mapping[str, str], report: Report
) -> bool:
    """True if the upload's chat template is another one than the base's, and can be served."""
    file = next((name for name in (JINJA_FILE, CONFIG_FILE, JSON_FILE) if name in names), CONFIG_FILE)
    try:
        found = find_template(folder)
    except Exception as error:  # noqa: BLE001 — as above
        report.fail("chat template", file, f"cannot be read: {_words(error, folder)}", _TEMPLATE_FIX)
        return False
    if found is None:
        return False
    file, source = found
    if file != JSON_FILE and JSON_FILE in names:
        report.warn("chat template", JSON_FILE, f"is not read, because {file} has a template too", "keep one of the two")
    if source == base:
        report.passed("chat template", "is the base's", file)
        return False
    try:
        refused = _try_template(source, special_tokens)
    except TemplateFailure as failure:
        report.fail("chat template", file, f"cannot be served: {shown(str(failure)[:300])}", _TEMPLATE_FIX)
        return False
    if not refused:
        report.passed("chat template", "the adapter's own chat template is in force", file)
        return True
    said = "; ".join(f"{what}: {shown(why[:200])}" for what, why in refused.items())
    report.warn(
        "chat template",
        file,
        f"the adapter's own chat template is in force, and refuses {said}",
        "make sure that clients send what it asks for",
    )
    return True


def _try_template(source: str, special_tokens: Mapping[str, str]) -> dict[str, str]:
    """Which of the trials the template refuses, and what it says. Raises `TemplateFailure` for one that does not work."""
    sandbox, refused = TemplateSandbox(cpu_seconds=OWN_TEMPLATE_SECONDS), {}
    try:
        number = sandbox.compile(source)
        for what, messages in _TRIALS.items():
            variables = {**special_tokens, **_TRIAL, "messages": messages}
            try:
                text = asyncio.run(sandbox.render(number, variables, datetime.datetime.now()))
            except TemplateFailure as failure:
                if not failure.is_refusal:
                    raise TemplateFailure(f"with {what}: {failure}") from failure
                refused[what] = str(failure)
            else:
                if not text.strip():
                    raise TemplateFailure(f"it makes no text of {what}")
    finally:
        sandbox.close()
    return refused


def _own_eos(
    folder: Path,
    names: Sequence[str],
    tokenizer: Tokenizer,
    special_tokens: Mapping[str, str],
    base: frozenset[int],
    rows: int,
    report: Report,
) -> tuple[int, ...] | None:
    """Where generation ends, if that is not where the base's does.

    A generation config's ``eos_token_id`` stands in place of the base's, as it does for transformers' ``generate``; a tokenizer's
    own token is one more.
    """
    declared: frozenset[int] | None = None
    file = _GENERATION
    if _GENERATION in names:
        try:
            declared = _declared_eos(json.loads((folder / _GENERATION).read_text(encoding="utf-8")))
        except Exception as error:  # noqa: BLE001 — as above
            report.fail("eos", _GENERATION, f"cannot be read: {_words(error, folder)}", "save the generation config again")
            return None
    if declared is None:
        file, token = _CONFIG, special_tokens.get("eos_token")
        token_id = None if token is None else tokenizer.token_id(token)
        declared = base if token_id is None else base | {token_id}
        if token is not None and token_id is None:
            report.warn("eos", file, f"{shown(token)} ends a reply, and is no token; generation ends where the base's does")
    if outside := sorted(token_id for token_id in declared if not 0 <= token_id < rows):
        message = f"names the token {outside[0]} as an end, and the embedding has {rows} rows"
        report.fail("eos", file, message, "name a token of the vocabulary")
        return None
    if declared == base:
        return None
    report.passed("eos", f"generation ends at {_listed(declared)}; the base's ends at {_listed(base)}", file)
    return tuple(sorted(declared))


def _words(error: Exception, folder: Path) -> str:
    """An error's own, without where the server keeps the file."""
    return shown(str(error).replace(f"{folder}/", "")[:300])


def _declared_eos(config: object) -> frozenset[int] | None:
    if not isinstance(config, dict):
        raise ValueError("it does not hold an object")
    ids = config.get("eos_token_id")
    if ids is None:
        return None
    found = ids if isinstance(ids, list) else [ids]
    if not found or not all(type(token_id) is int for token_id in found):
        raise ValueError("eos_token_id is no token id, and no list of them")
    return frozenset(found)


def _listed(ids: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ids))) or "no token"
