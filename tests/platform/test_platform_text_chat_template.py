"""Chat templates render as transformers' `apply_chat_template`, and what a template cannot do is the request's error."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from graftwork_platform.errors import BadRequest
from graftwork_platform.text.chat_template import ChatTemplate, Message
from graftwork_platform.text.tokenizer import TokenizerError

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """{% for message in messages %}
    {%- if loop.first and messages[0]['role'] != 'system' %}
        {{- '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}"""

TEMPLATES = [
    CHATML,
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}[{{ m.content | trim }}]{% endfor %}"
    "{{ eos_token }}",
    "{% set ns = namespace(count=0) %}{% for m in messages %}{% set ns.count = ns.count + 1 %}{% endfor %}{{ ns.count }}",
    "{% for m in messages %}\n    {% if true %}\n  x\n    {% endif %}\n{% endfor %}\nend\n",
    "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }} {{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true) }}",
    "{% generation %}{% set inner = 1 %}hi {{ messages[0].content }}{% endgeneration %}{{ inner is defined }}",
    "{{ tools is none }} {{ documents is none }} {{ dict(a=1).a }} {{ messages[0].get('name', 'nobody') }}",
    "{{ unknown }}|{{ unknown is defined }}|{{ messages[-1]['content'][:3] }}|{{ '%05d' | format(7) }}",
]
CHATS: list[list[Message]] = [
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": "  Be brief. "},
        {"role": "user", "content": "Été <b>"},
        {"role": "assistant", "content": "“Oui”"},
    ],
    [{"role": "user", "content": "x", "name": "ann"}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}],
    [{"role": "user", "content": "x", "name": None}],
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers_does(template: str, chat: list[Message], prompt: bool) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(models.BPE()), **SPECIALS)
    expected = theirs.apply_chat_template(chat, chat_template=template, tokenize=False, add_generation_prompt=prompt)
    assert ChatTemplate(template, SPECIALS).render(chat, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content }}", "no element 5"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{% set ns = namespace(_x=1) %}", "_x"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ messages | tojson(separators=7) }}", "int"),
    ],
)
def test_what_goes_wrong_inside_is_a_bad_request(template: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as caught:
        ChatTemplate(template, {}).render([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_clock_is_injected() -> None:
    template = ChatTemplate("{{ strftime_now('%d %B %Y') }}", {}, now=lambda: datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC))
    assert template.render([]) == "01 March 2026"


def test_where_templates_are_found(tmp_path: Path) -> None:
    def rendered() -> str:
        template = ChatTemplate.from_dir(tmp_path, SPECIALS)
        return "" if template is None else template.render([])

    config = tmp_path / "tokenizer_config.json"
    assert rendered() == ""
    config.write_text(json.dumps({"chat_template": "one"}))
    assert rendered() == "one"
    config.write_text(
        json.dumps({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "two"}]})
    )
    assert rendered() == "two"
    (tmp_path / "chat_template.jinja").write_text("three {{ bos_token }}")
    assert rendered() == "three <s>"


def test_unusable_templates_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "tool_use", "template": "t"}]}))
    with pytest.raises(TokenizerError, match="none named default"):
        ChatTemplate.from_dir(tmp_path, {})
    with pytest.raises(TokenizerError, match="line 2"):
        ChatTemplate("\n{% if %}", {})
