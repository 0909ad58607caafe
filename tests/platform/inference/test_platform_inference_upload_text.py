"""What is found in an upload's text files: what is in force, what is refused, and that nothing in them reaches this process."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from graftwork_adapters.report import Finding
from graftwork_adapters.upload_files import TOKENIZER_FILES
from graftwork_platform.catalog.facts import OwnText
from graftwork_platform.publishing.text_check import check_text
from graftwork_platform.text.model_text import ModelText
from graftwork_platform.text.neutral_texts import neutral_prompts
from graftwork_platform.text.template_source import template_source
from graftwork_platform.text.tokenizer import Tokenizer
from graftwork_platform.text.upload_text import TextJob, TextVerdict, examine, max_tokenizer_bytes

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def upload(model_dir: Path, tmp_path: Path) -> Path:
    """The base's own text files, as most trainers save them beside an adapter."""
    folder = tmp_path / "upload"
    folder.mkdir()
    for name in TOKENIZER_FILES:
        if (model_dir / name).exists():
            shutil.copy(model_dir / name, folder)
    return folder


def job_of(model_dir: Path, upload: Path, num_rows: int | None = None) -> TextJob:
    return TextJob(str(model_dir), str(upload), tuple(sorted(path.name for path in upload.iterdir())), num_rows)


def edit(path: Path, change: Edit) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    change(content)
    path.write_text(json.dumps(content))


def add_tokens(upload: Path, *tokens: str) -> list[int]:
    """Their ids."""
    backend = tokenizers.Tokenizer.from_file(str(upload / "tokenizer.json"))
    backend.add_special_tokens(list(tokens))
    backend.save(str(upload / "tokenizer.json"))
    return [backend.token_to_id(token) for token in tokens]


def finding_of(verdict: TextVerdict, check: str) -> Finding:
    [found] = [finding for finding in verdict.report.findings if finding.check == check]
    return found


def refusal_of(verdict: TextVerdict) -> Finding:
    assert not verdict.report.ok
    found = [finding for finding in verdict.report.findings if finding.result == "fail"]
    assert all(finding.field for finding in found), "every refusal names what it is about"
    return found[0]


def test_the_base_s_own_files_change_nothing_and_the_report_says_so(model_dir: Path, upload: Path) -> None:
    verdict = examine(job_of(model_dir, upload))
    assert (verdict.text, verdict.prompts) == (OwnText(), None)
    assert "base's" in finding_of(verdict, "tokenizer").message
    assert finding_of(verdict, "chat template").message == "is the base's"
    assert {finding.result for finding in verdict.report.findings} == {"pass"}


def test_what_only_training_needs_is_no_other_tokenizer(model_dir: Path, upload: Path) -> None:
    def train(content: dict[str, Any]) -> None:
        content["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
        content["padding"] = {
            "strategy": "BatchLongest",
            "direction": "Left",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "x",
        }

    edit(upload / "tokenizer.json", train)
    edit(upload / "tokenizer_config.json", lambda content: content.update(pad_token="<|endoftext|>", model_max_length=9))
    assert examine(job_of(model_dir, upload)).text == OwnText()


def test_an_added_token_is_the_adapter_s_own_tokenizer(model_dir: Path, upload: Path, model_text: ModelText) -> None:
    [new] = add_tokens(upload, "<|tool|>")
    rows = model_text.vocab_size
    assert new == rows, "the base's embedding is as long as its vocabulary"
    refused = refusal_of(examine(job_of(model_dir, upload)))
    assert refused.field == "tokenizer.json"
    assert str(new) in refused.message
    assert f"{rows} rows" in refused.message
    assert "trainable_token_indices" in (refused.fix or "")
    verdict = examine(job_of(model_dir, upload, rows + 1))
    assert verdict.report.ok
    assert verdict.text == OwnText(tokenizer=True)
    assert "1 tokens more" in finding_of(verdict, "tokenizer").message
    assert verdict.prompts == neutral_prompts(Tokenizer.from_dir(upload))


def test_ids_that_only_the_wrapping_of_a_text_names_are_counted(model_dir: Path, upload: Path) -> None:
    def wrap(content: dict[str, Any]) -> None:
        content["post_processor"]["special_tokens"]["<|im_start|>"]["ids"] = [100_000]

    edit(upload / "tokenizer.json", wrap)
    assert "100000" in refusal_of(examine(job_of(model_dir, upload))).message


def test_tokens_that_share_an_id_are_refused(model_dir: Path, upload: Path) -> None:
    edit(upload / "tokenizer.json", lambda content: content["model"]["vocab"].update({f"zq{i}": 5 for i in range(1000)}))
    refused = refusal_of(examine(job_of(model_dir, upload)))
    assert refused.field == "tokenizer.json: model.vocab"
    assert "1000" in refused.message
    assert refused.fix is not None


def test_a_file_much_larger_than_the_base_s_is_not_read(model_dir: Path, upload: Path) -> None:
    size = max_tokenizer_bytes((model_dir / "tokenizer.json").stat().st_size)
    with (upload / "tokenizer.json").open("a") as file:
        file.write(" " * (size - file.tell()))
    assert examine(job_of(model_dir, upload)).report.ok
    with (upload / "tokenizer.json").open("a") as file:
        file.write(" ")
    refused = refusal_of(examine(job_of(model_dir, upload)))
    assert refused.field == "tokenizer.json"
    assert f"{size + 1} bytes" in refused.message
    assert refused.fix is not None


def test_a_tokenizer_that_takes_too_long_to_read_is_refused(model_dir: Path, upload: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from_dir, seconds = Tokenizer.from_dir, {model_dir: 0.1, upload: 2.5}
    clock = [0.0]

    def slow(folder: Path) -> Tokenizer:
        clock[0] += seconds[folder]
        return from_dir(folder)

    monkeypatch.setattr(Tokenizer, "from_dir", slow)
    monkeypatch.setattr(time, "process_time", lambda: clock[0])
    add_tokens(upload, "<|tool|>")
    refused = refusal_of(examine(job_of(model_dir, upload, 400)))
    assert (refused.field, refused.message) == ("tokenizer.json", "takes 2.5 s to read, more than the 2.0 s it may")
    seconds[model_dir] = 1.0
    assert examine(job_of(model_dir, upload, 400)).report.ok, "the base's own takes long too"


def test_a_tokenizer_without_its_json_is_told(model_dir: Path, upload: Path) -> None:
    (upload / "tokenizer.json").unlink()
    (upload / "tokenizer.model").write_bytes(b"sentencepiece")
    verdict = examine(job_of(model_dir, upload))
    assert verdict.text == OwnText()
    assert finding_of(verdict, "tokenizer").result == "warn"
    assert "tokenizer.model" in finding_of(verdict, "tokenizer").message


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_another_template_is_in_force(model_dir: Path, upload: Path, place: str) -> None:
    source = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    if place == "chat_template.jinja":
        (upload / place).write_text(source)
    else:
        edit(upload / place, lambda content: content.update(chat_template=source))
    verdict = examine(job_of(model_dir, upload))
    assert verdict.text == OwnText(chat_template=True)
    found = finding_of(verdict, "chat template")
    assert (found.field, found.result) == (place, "pass")


LATE = "{{ messages[0].content }}{% if messages | length > 2 %}BODY{% endif %}"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for m in messages %}", "line 1"),
        ("{% for i in range(10**9) %}{% endfor %}", "range"),
        ("{% set x = namespace(n=0) %}{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", ""),
        ("{{ 'x' * 10**10 }}", "memory"),
        (
            "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
            "0.5 s",
        ),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "loader"),
        ("{{ messages[0].content.nothing.at.all }}", "nothing"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ unknown_function() }}", "unknown_function"),
        ("", "no text"),
        ("{% for m in messages %}{% endfor %}\n ", "no text"),
        ("{{ '\\ud800' }}", "surrogate"),
        ("{{ {}['\\ud800'].x }}", "no attribute"),
        (LATE.replace("BODY", "{{ messages.a.b }}"), "several turns"),
        (LATE.replace("BODY", "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"), "0.5 s"),
        ("{% if messages[0].role == 'system' %}{{ 1 + 'x' }}{% endif %}x", "a system message"),
    ],
)
def test_templates_that_cannot_be_served_are_refused(model_dir: Path, upload: Path, source: str, words: str) -> None:
    (upload / "chat_template.jinja").write_text(source)
    verdict = examine(job_of(model_dir, upload))
    found = finding_of(verdict, "chat template")
    assert (found.field, found.result, verdict.report.ok) == ("chat_template.jinja", "fail", False)
    assert words in found.message
    assert "ended" not in found.message, "the process it ran in is nobody's business"
    assert "leave it out" in (found.fix or "")


def test_a_template_that_wants_something_else_is_served_with_a_word(model_dir: Path, upload: Path) -> None:
    (upload / "chat_template.jinja").write_text("{{ raise_exception('a system message comes first') }}")
    verdict = examine(job_of(model_dir, upload))
    assert verdict.text == OwnText(chat_template=True)
    assert finding_of(verdict, "chat template").result == "warn"
    assert "a system message comes first" in finding_of(verdict, "chat template").message
    (upload / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}"
    )
    told = finding_of(examine(job_of(model_dir, upload)), "chat template")
    assert (told.result, "lone" in told.message) == ("warn", False)
    assert "a system message: no system" in told.message.replace("'", "").replace('"', "")


def test_a_processor_s_template_is_in_force_where_there_is_no_other(model_dir: Path, upload: Path) -> None:
    own = "[{{ messages[0].content }}]"
    (upload / "chat_template.json").write_text(json.dumps({"chat_template": own}))
    told = [finding for finding in examine(job_of(model_dir, upload)).report.findings if finding.field == "chat_template.json"]
    assert [(finding.result, "is not read" in finding.message) for finding in told] == [("warn", True)]
    (upload / "chat_template.jinja").unlink(missing_ok=True)
    edit(upload / "tokenizer_config.json", lambda content: content.pop("chat_template", None))
    verdict = examine(job_of(model_dir, upload))
    assert verdict.text == OwnText(chat_template=True)
    assert finding_of(verdict, "chat template").field == "chat_template.json"
    assert template_source(upload) == own


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ([{"template": "x"}], "name"),
        (["x"], "name"),
        ([{"name": "tool_use", "template": "x"}], "none named default"),
        ([{"name": "default"}], "none named default"),
        (7, "no text"),
    ],
)
@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.json"])
def test_templates_of_no_shape_are_refused_in_plain_words(
    model_dir: Path, upload: Path, file: str, declared: object, words: str
) -> None:
    (upload / "chat_template.jinja").unlink(missing_ok=True)
    edit(upload / "tokenizer_config.json", lambda content: content.pop("chat_template", None))
    edit(upload / file, lambda content: content.update(chat_template=declared))
    refused = refusal_of(examine(job_of(model_dir, upload)))
    assert file in f"{refused.field} {refused.message}"
    assert words in refused.message


def test_a_generation_config_s_ends_stand_in_place_of_the_base_s(model_dir: Path, upload: Path, model_text: ModelText) -> None:
    assert model_text.eos_token_ids == (2,)
    for declared, wanted in ((0, (0,)), ([2, 0], (0, 2)), ([2], None), (2, None), (None, None)):
        (upload / "generation_config.json").write_text(json.dumps({"eos_token_id": declared, "temperature": 0.6}))
        verdict = examine(job_of(model_dir, upload))
        assert verdict.text == OwnText(eos_token_ids=wanted)
        if wanted:
            assert finding_of(verdict, "eos").field == "generation_config.json"


def test_a_tokenizer_s_own_end_is_one_more(model_dir: Path, upload: Path) -> None:
    edit(upload / "tokenizer_config.json", lambda content: content.update(eos_token="<|endoftext|>"))
    verdict = examine(job_of(model_dir, upload))
    assert verdict.text.eos_token_ids == (0, 2)
    assert finding_of(verdict, "eos").message == "generation ends at 0, 2; the base's ends at 2"


def test_an_end_that_is_no_token_of_the_base_s_is_told(model_dir: Path, upload: Path) -> None:
    (upload / "tokenizer.json").unlink()
    edit(upload / "tokenizer_config.json", lambda content: content.update(eos_token="<|nowhere|>"))
    verdict = examine(job_of(model_dir, upload))
    assert verdict.text.eos_token_ids is None
    assert finding_of(verdict, "eos").result == "warn"


@pytest.mark.parametrize("declared", [-1, 10**6, "2", [], [2.0], {"a": 1}, True])
def test_ends_that_are_no_ids_are_refused(model_dir: Path, upload: Path, declared: object) -> None:
    (upload / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
    assert refusal_of(examine(job_of(model_dir, upload))).field == "generation_config.json"


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.json"],
)
@pytest.mark.parametrize("content", ["", "[]", "{", "null", DEEP, '{"model": 7}', "\0"])
def test_files_that_are_not_what_they_are_called_are_refused(model_dir: Path, upload: Path, name: str, content: str) -> None:
    (upload / name).write_text(content)
    verdict = examine(job_of(model_dir, upload))
    harmless = content == '{"model": 7}' and name != "tokenizer.json"
    assert verdict.report.ok is harmless
    if not harmless:
        refused = refusal_of(verdict)
        assert refused.field == name
        assert str(upload) not in refused.message, "where the server keeps it is nobody's business"


def test_declared_tokens_of_no_shape_are_refused(model_dir: Path, upload: Path) -> None:
    edit(upload / "tokenizer_config.json", lambda content: content.update(added_tokens_decoder={"x": {"content": "y"}}))
    assert not examine(job_of(model_dir, upload)).report.ok


def test_files_too_large_to_read_are_not_read(model_dir: Path, upload: Path) -> None:
    with (upload / "generation_config.json").open("wb") as file:
        file.truncate(5 << 20)
    refused = refusal_of(examine(job_of(model_dir, upload)))
    assert refused.field == "generation_config.json"
    assert "5242880 bytes" in refused.message


# In its process


def checked(model_dir: Path, upload: Path, **limits: Any) -> TextVerdict:
    return asyncio.run(check_text(job_of(model_dir, upload), **limits))


def test_the_process_finds_what_is_found_here(model_dir: Path, upload: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFTWORK_PEPPER", "secret")
    (upload / "chat_template.jinja").write_text("{{ messages[0].content }}")
    verdict = checked(model_dir, upload)
    assert verdict == examine(job_of(model_dir, upload))
    assert verdict.text == OwnText(chat_template=True)


def test_a_process_that_is_stopped_is_a_finding_with_the_files(model_dir: Path, upload: Path) -> None:
    for limits, words in (({"timeout_s": 0.01}, "ran out of time"), ({"memory_bytes": 1 << 20}, "")):
        refused = refusal_of(checked(model_dir, upload, **limits))
        assert "tokenizer.json" in (refused.field or "")
        assert words in refused.message
        assert refused.fix is not None


def test_what_is_read_to_serve_is_what_was_looked_at(model_dir: Path, upload: Path) -> None:
    add_tokens(upload, "<|tool|>")
    tokenizer = Tokenizer.from_dir(upload)
    assert tokenizer.encode("a<|tool|>b", add_special_tokens=False)[1] == tokenizer.max_id
    assert tokenizer.pipeline() != Tokenizer.from_dir(model_dir).pipeline()
