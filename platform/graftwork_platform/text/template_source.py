"""Where a model folder's chat template is written. Runs none."""

from __future__ import annotations

from pathlib import Path

from graftwork_platform.text.tokenizer import TokenizerError, read_object, read_tokenizer_config

JINJA_FILE, CONFIG_FILE, JSON_FILE = "chat_template.jinja", "tokenizer_config.json", "chat_template.json"


def template_source(folder: Path) -> str | None:
    """The folder's default template, or None if it has none. Raises `TokenizerError`."""
    found = find_template(folder)
    return None if found is None else found[1]


def find_template(folder: Path) -> tuple[str, str] | None:
    """The name of the file that holds the default template, and the template.

    A ``chat_template.jinja`` stands above ``chat_template`` in ``tokenizer_config.json``: a text, or a list of named ones. That
    stands above the same in ``chat_template.json``, which processors save. Raises `TokenizerError`.
    """
    if (folder / JINJA_FILE).exists():
        return JINJA_FILE, (folder / JINJA_FILE).read_text(encoding="utf-8")
    for file, content in ((CONFIG_FILE, read_tokenizer_config(folder)), (JSON_FILE, read_object(folder / JSON_FILE))):
        if (source := _default(file, content.get("chat_template"))) is not None:
            return file, source
    return None


def _default(file: str, declared: object) -> str | None:
    if declared is None or isinstance(declared, str):
        return declared
    if isinstance(declared, list):
        if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in declared):
            raise TokenizerError(f"{file} has a list of chat templates, and not each of them has a name")
        declared = {entry["name"]: entry.get("template") for entry in declared}
    if not isinstance(declared, dict):
        raise TokenizerError(f"chat_template in {file} is no text and no list of named ones")
    if not isinstance(declared.get("default"), str):
        raise TokenizerError(f"{file} has several chat templates and none named default")
    return str(declared["default"])
