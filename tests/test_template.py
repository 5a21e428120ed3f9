"""Chat templates: where they are found, what they may do, and how long."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from longbatch.errors import RowError, UsageError
from longbatch.prompt import ChatTemplate

CHAT = [{"role": "user", "content": "Hi"}]


def refused(source: str, *, time_limit: float = 5.0) -> RowError:
    with pytest.raises(RowError) as caught:
        ChatTemplate(source, time_limit=time_limit).render(CHAT, {})
    assert caught.value.field == "messages"
    return caught.value


# ---------------------------------------------------------------------------------------------- loading


def test_a_folder_without_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert ChatTemplate.load(tmp_path) is None


def test_places_in_order(tmp_path: Path) -> None:
    def load() -> str:
        template = ChatTemplate.load(tmp_path)
        assert template is not None
        return template.render(CHAT, {})

    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    assert load() == "processor"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config"}))
    assert load() == "config"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load() == "named"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load() == "file"


def test_several_templates_without_default_are_named(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "x"}, {"name": "tool_use", "template": "y"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    with pytest.raises(UsageError, match="rag, tool_use"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize("content", ["{", '{"chat_template": 7}', '{"chat_template": "{% for %}"}'])
def test_damaged_settings(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(UsageError):
        ChatTemplate.load(tmp_path)


def test_a_template_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff{{ x }}")
    with pytest.raises(UsageError, match="UTF-8"):
        ChatTemplate.load(tmp_path)


def test_deep_nesting_is_refused_and_does_not_crash() -> None:
    with pytest.raises(UsageError):
        ChatTemplate("{{ " + "(" * 5000 + ")" * 5000 + " }}")


def test_the_hash_is_the_sources() -> None:
    assert ChatTemplate("a").hash == ChatTemplate("a").hash != ChatTemplate("b").hash


# ---------------------------------------------------------------------------------------------- what it sees


def test_variables() -> None:
    source = "{{ bos_token }}{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ flag }}"
    assert ChatTemplate(source).render(CHAT, {"bos_token": "<s>", "flag": 3}) == "<s>TrueTrueTrue3"


def test_a_row_can_overrule_the_defaults() -> None:
    assert ChatTemplate("{{ add_generation_prompt }}").render(CHAT, {"add_generation_prompt": False}) == "False"


def test_renderings_do_not_leak_into_each_other() -> None:
    template = ChatTemplate("{% if first is defined %}{{ first }}{% endif %}{% set first = 1 %}{{ first }}")
    assert [template.render(CHAT, {}) for _ in range(2)] == ["1", "1"]


def test_json_is_not_escaped_for_html() -> None:
    assert ChatTemplate("{{ x | tojson }}").render(CHAT, {"x": {"a": "<é>"}}) == '{"a": "<é>"}'


def test_the_generation_tag_renders_its_body() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert ChatTemplate(source).render(CHAT, {}) == "Hi"


def test_literals_are_what_the_template_can_write() -> None:
    literals = ChatTemplate("<a>{{ '<b>' + messages[0]['role'] }}{# <c> #}").literals.split("\0")
    assert {"<a>", "<b>"} <= set(literals)
    assert "<c>" not in "".join(literals)


# ---------------------------------------------------------------------------------------------- refusals


def test_the_templates_own_refusal_is_quoted() -> None:
    error = refused("{{ raise_exception('System role not supported') }}")
    assert error.type == "template_error"
    assert "System role not supported" in error.message


def test_a_refusal_that_quotes_the_row_is_not() -> None:
    error = refused("{{ raise_exception('bad: ' + messages[0].content) }}")
    assert error.type == "template_error"
    assert "Hi" not in error.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.missing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{% include 'other' %}",
        "{{ ().__class__.__bases__[0].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ namespace(_x=1) }}",
        "{% set ns = namespace() %}{% set ns['_x'] = 1 %}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ range(10000000) | list }}",
        "{{ 'x' * 10000000000 }}",
        "{{ 10000000000 * 'x' }}",
        "{{ [0] * 10000000000 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_what_a_template_may_not_do(source: str) -> None:
    try:
        error = refused(source)
    except UsageError:
        return  # refused when it was compiled
    assert error.type == "template_error"


def test_small_products_are_allowed() -> None:
    assert ChatTemplate("{{ '=' * 3 }}{{ 2 ** 10 }}{{ 6 * 7 }}").render(CHAT, {}) == "===102442"


# ---------------------------------------------------------------------------------------------- time

NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        NESTED,
        "{% for a in range(99999) %}{% for b in range(99999) %}{% if b %}{{ b }}{% endif %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) if a >= 0 %}{% for b in range(99999) %}{% continue %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
        "{% macro loops() %}" + NESTED + "{% endmacro %}{{ loops() }}",
        "{% block b %}" + NESTED + "{% endblock %}",
        "{% set x %}" + NESTED + "{% endset %}",
        "{% for i in [[[], []]] * 9 recursive %}{{ loop(i) }}" + NESTED + "{% endfor %}",
    ],
)
def test_the_time_limit_holds_everywhere(source: str) -> None:
    start = time.monotonic()
    error = refused(source, time_limit=0.2)
    assert error.type == "template_timeout"
    assert time.monotonic() - start < 2


def test_a_template_is_usable_after_a_timeout() -> None:
    template = ChatTemplate("{% if slow %}" + NESTED + "{% endif %}done", time_limit=0.2)
    with pytest.raises(RowError):
        template.render(CHAT, {"slow": True})
    assert template.render(CHAT, {"slow": False}) == "done"
