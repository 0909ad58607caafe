"""Chat templates render as transformers' `apply_chat_template`, and what a template cannot do is the request's error."""

from __future__ import annotations

import asyncio
import datetime
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import tokenizers
from tokenizers import models, processors
from transformers import PreTrainedTokenizerFast

from graftwork_platform.errors import BadRequest, ServiceUnavailable
from graftwork_platform.text.chat_template import ChatTemplate, Message
from graftwork_platform.text.template_sandbox import TemplateSandbox
from graftwork_platform.text.tokenizer import Tokenizer, TokenizerError

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


@pytest.fixture(scope="module")
def sandbox() -> Iterator[TemplateSandbox]:
    sandbox = TemplateSandbox(cpu_seconds=0.2)
    yield sandbox
    sandbox.close()


def render(template: ChatTemplate, chat: list[Message], *, add_generation_prompt: bool = True) -> str:
    return asyncio.run(template.render(chat, add_generation_prompt=add_generation_prompt))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers_does(sandbox: TemplateSandbox, template: str, chat: list[Message], prompt: bool) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(models.BPE()), **SPECIALS)
    expected = theirs.apply_chat_template(chat, chat_template=template, tokenize=False, add_generation_prompt=prompt)
    assert render(ChatTemplate(template, SPECIALS, sandbox), chat, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize("template", ["{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"])
def test_a_prompt_has_the_bos_tokens_that_its_template_writes(sandbox: TemplateSandbox, template: str) -> None:
    """A pipeline that adds one of its own must not add it again."""
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "Hello": 2, "<unk>": 3}, unk_token="<unk>"))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIALS)
    expected = theirs.apply_chat_template(CHATS[0], chat_template=template, return_dict=False)
    text = render(ChatTemplate(template, SPECIALS, sandbox), CHATS[0])
    assert Tokenizer(backend, SPECIALS).encode(text, add_special_tokens=False) == expected
    assert expected.count(0) == template.count("bos_token")


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
        ("{{ raise_exception('x' * 10**5) }}", "^.{100,1000}$"),
        ("{{ messages.__init__.__globals__ }}", "unsafe"),
        ("{{ raise_exception('\\ud800 is no text') }}", r"\? is no text"),
        ("{{ '\\ud800' }}", "half a surrogate pair"),
        ("{{ lipsum.__globals__['os'].getcwd() }}", "unsafe|undefined"),
        ("{{ ''|attr('__class__') }}x{{ (''|attr('__class__')).mro() }}", "unsafe|undefined"),
        ("{{ '{0.__class__.__mro__}'.format('x') }}{{ raise_exception('shown') }}", "unsafe|undefined"),
    ],
)
def test_what_goes_wrong_inside_is_a_bad_request(sandbox: TemplateSandbox, template: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as caught:
        render(ChatTemplate(template, {}, sandbox), CHATS[0])
    assert caught.value.param == "messages"


def processor_seconds(sandbox: TemplateSandbox) -> float:
    """What templates have used so far, in processes that have ended too: as much on a slow machine as on a quick one."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    living = sandbox._process is not None and psutil.Process(sandbox._process.pid).cpu_times()
    return ended.ru_utime + ended.ru_stime + (living.user + living.system if living else 0.0)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{{ 'x' * (messages | length * 10**10) }}",
        "{{ 10 ** (messages | length * 10**9) }}",
        "{{ 'x' | center(10**9) }}",
        "{{ '%999999999d' | format(7) }}",
        "{{ '{:>999999999}'.format('x') }}",
        "{{ ([1] * 10**9) | length }}",
        "{{ 'x'.ljust(10**10) }}",
        "{{ lipsum(n=10**7) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
        "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
        "{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ ('(' * 90000) | tojson(indent=90000) | urlize | wordwrap(1) | replace('(', 'x' * 90000) }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    ],
)
def test_no_template_takes_more_than_it_may(sandbox: TemplateSandbox, template: str) -> None:
    """It is refused within its limits, and the next one is served as if nothing had been."""
    used = processor_seconds(sandbox)
    with pytest.raises((BadRequest, TokenizerError), match=r"memory|processor time|longer than|range|recursion|[Oo]ver"):
        render(ChatTemplate(template, {}, sandbox), CHATS[0])
    assert processor_seconds(sandbox) - used < 5
    assert render(ChatTemplate(CHATML, {}, sandbox), CHATS[0]).endswith("Hello<|im_end|>\n<|im_start|>assistant\n")


def test_the_event_loop_goes_on_while_a_template_runs(sandbox: TemplateSandbox) -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", {}, sandbox)

    async def main() -> float:
        rendering = asyncio.create_task(template.render(CHATS[0]))
        longest, last = 0.0, time.monotonic()
        while not rendering.done():
            await asyncio.sleep(0.001)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        with pytest.raises(BadRequest, match="processor time"):
            await rendering
        return longest

    assert any(asyncio.run(main()) < 0.2 for _ in range(6)), "one pause may be the machine's, not all of them"


def test_a_queue_that_is_full_takes_no_more() -> None:
    sandbox = TemplateSandbox(cpu_seconds=0.2, max_renders=3)
    slow = ChatTemplate("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", {}, sandbox)
    quick = ChatTemplate("{{ messages[0].content }}", {}, sandbox)

    async def main() -> None:
        waiting = [asyncio.create_task(template.render(CHATS[0])) for template in (slow, quick, quick)]
        await asyncio.sleep(0)
        with pytest.raises(ServiceUnavailable) as caught:
            await quick.render(CHATS[0])
        assert (caught.value.status, caught.value.code) == (503, "templates_busy")
        assert int(caught.value.headers["retry-after"]) > 0
        waiting[1].cancel()
        refused, cancelled, answered = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(refused, BadRequest)
        assert isinstance(cancelled, asyncio.CancelledError)
        assert answered == "Hello"
        assert await asyncio.gather(*(quick.render(CHATS[0]) for _ in range(3))) == ["Hello"] * 3

    asyncio.run(main())
    sandbox.close()


def test_a_process_that_was_killed_costs_nobody_his_prompt() -> None:
    sandbox = TemplateSandbox()
    template = ChatTemplate("{{ messages[0].content }}", {}, sandbox)
    for _ in range(2):
        assert render(template, CHATS[0]) == "Hello"
        assert sandbox._process is not None
        sandbox._process.kill()
        sandbox._process.wait()
    sandbox.close()
    assert sandbox._process is None
    assert render(template, CHATS[0]) == "Hello", "closed is not the end"
    sandbox.close()


def test_what_is_no_text_is_a_bad_request(sandbox: TemplateSandbox) -> None:
    with pytest.raises(BadRequest, match="no text"):
        render(ChatTemplate("{{ messages }}", {}, sandbox), [{"role": "user", "content": "\ud800"}])


def test_the_worker_imports_nothing_heavy() -> None:
    """It starts again in the middle of a request."""
    code = "import sys, graftwork_platform.text.template_worker as w; sys.exit(any(n in sys.modules for n in sys.argv[1:]))"
    assert subprocess.run([sys.executable, "-c", code, "fastapi", "tokenizers", "zmq"], check=False).returncode == 0


def test_clock_is_injected(sandbox: TemplateSandbox) -> None:
    now = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)
    assert render(ChatTemplate("{{ strftime_now('%d %B %Y') }}", {}, sandbox, now=lambda: now), []) == "01 March 2026"


def test_where_templates_are_found(sandbox: TemplateSandbox, tmp_path: Path) -> None:
    def rendered() -> str:
        template = ChatTemplate.from_dir(tmp_path, SPECIALS, sandbox)
        return "" if template is None else render(template, [])

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


def test_unusable_templates_are_refused(sandbox: TemplateSandbox, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "tool_use", "template": "t"}]}))
    with pytest.raises(TokenizerError, match="none named default"):
        ChatTemplate.from_dir(tmp_path, {}, sandbox)
    with pytest.raises(TokenizerError, match="line 2"):
        ChatTemplate("\n{% if %}", {}, sandbox)
