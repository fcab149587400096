"""Prompt sizes as an engine counts them: by the model's own tokenizer and chat template, to the token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from asgi_call import Call
from front import HOT, body, front
from hypothesis import given
from hypothesis import strategies as st
from scripted_upstream import answer
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from serve_app.model_schema import Model
from serve_app.router.tokens import TokenCounter, most_tokens

TEMPLATE = """{{ bos_token }}
{%- if tools %}{{ ' tools' }} {% for tool in tools %}{{ tool | tojson }} {% endfor %}{% endif %}
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('no such role') }}{% endif %}
{{ ' <' + message.role + '> ' + message.content }}
{%- for call in message.tool_calls or [] %} call {{ call.function.arguments.city }}{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %} <assistant>{% if enable_thinking is defined and not enable_thinking %} <think>
{%- endif %}{% endif %}"""
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model's files, with a tokenizer that splits at white space, and sets one token in front of plain prompts."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "<s>": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}, "model_max_length": 99}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def model(directory: Path, **engine: Any) -> Model:
    fields = {"id": HOT, "tier": "resident", "source": str(directory), "context": 4096, "engine": engine}
    return Model.model_validate(fields)


async def counted(directory: Path, *messages: dict[str, Any], **fields: Any) -> int | None:
    return await TokenCounter("").count(model(directory), {"messages": list(messages), **fields})


USER = {"role": "user", "content": "what is it"}


async def test_chat_is_counted_with_all_that_its_template_writes(directory: Path) -> None:
    # <s> <user> what is it <assistant>
    assert await counted(directory, USER) == 6
    assert await counted(directory, USER, chat_template_kwargs={"enable_thinking": False}) == 7
    assert await counted(directory, USER, add_generation_prompt=False) == 5
    parts = {"role": "user", "content": [{"type": "text", "text": "what"}, {"type": "text", "text": "is it"}]}
    assert await counted(directory, parts) == 6


async def test_tools_and_calls_are_counted_as_the_template_writes_them(directory: Path) -> None:
    spoken = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    # <s> <user> what is it, <assistant> call Oslo, <assistant>
    assert await counted(directory, USER, spoken) == 9
    # ...and: tools {"a": "b"} {"c": "d"}
    assert await counted(directory, USER, tools=[{"a": "b"}, {"c": "d"}]) == 6 + 5


async def test_what_the_template_refuses_is_still_sized_and_left_to_the_engine(directory: Path) -> None:
    odd = {"role": "odd", "content": "a b c"}
    assert await counted(directory, odd) == 3 + 5


async def test_template_in_a_file_of_its_own_or_in_the_engines_arguments_goes_before_the_other(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("one two {{ messages[0].content }}")
    assert await counted(directory, USER) == 5
    other = directory / "other.jinja"
    other.write_text("one {{ messages[0].content }}")
    for chosen in (str(other), "one {{ messages[0].content }}"):
        assert await TokenCounter("").count(model(directory, chat_template=chosen), {"messages": [USER]}) == 4


@pytest.mark.parametrize("template", ["{% if %}", {"a": "b"}, [{"name": "default", "template": "x"}], None])
async def test_without_a_template_that_is_understood_what_it_adds_is_estimated(directory: Path, template: Any) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert await counted(directory, USER) == 3 + 5


async def test_plain_prompts_are_counted_with_the_tokenizers_own_tokens(directory: Path) -> None:
    counter, texts = TokenCounter(""), ["one", "one two three", ""]
    assert await counter.longest(model(directory), texts) == 4
    assert await counter.longest(model(directory), texts, special=False) == 3
    assert await counter.longest(model(directory), []) == 0


async def test_without_a_tokenizer_nothing_is_counted(tmp_path: Path) -> None:
    assert await counted(tmp_path, USER) is None
    assert await TokenCounter("").longest(model(tmp_path), ["one"]) is None


BYTES = Tokenizer(models.BPE({char: place for place, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
BYTES.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)


@given(st.text())
def test_no_prompt_has_more_tokens_than_its_body_has_bytes(text: str) -> None:
    """The worst tokenizer there can be: it knows bytes only."""
    sent = json.dumps({"messages": [{"role": "user", "content": text}]}, ensure_ascii=False)
    assert len(BYTES.encode(text).ids) <= most_tokens(len(sent.encode(errors="surrogatepass")))


async def test_pairs_are_counted_as_one_prompt_each(directory: Path) -> None:
    assert await TokenCounter("").longest(model(directory), [("one", "two three"), ("one", "two")]) == 3
    assert await TokenCounter("").longest(model(directory), [("one", "two three")], special=False) == 3


OK = answer(200, {"choices": []})


@pytest.mark.parametrize(
    ("path", "fields", "tokens"),
    [
        ("/v1/chat/completions", body("one two three"), 6),
        ("/v1/completions", {"prompt": "one two three four five"}, 6),
        ("/v1/completions", {"prompt": ["one", "one two three four five"]}, 6),
        ("/v1/completions", {"prompt": "one two three four five six", "add_special_tokens": False}, 6),
        ("/v1/embeddings", {"input": "one two three four five"}, 6),
        ("/v1/responses", {"input": "two three", "instructions": "one"}, 6 + 1),
    ],
)
async def test_limit_is_exact_to_the_token(directory: Path, path: str, fields: dict[str, Any], tokens: int) -> None:
    hot = {"source": str(directory)} | ({"abilities": ["embeddings"]} if "embed" in path else {})
    for limit, status in ((tokens, 200), (tokens - 1, 400)):
        async with front(OK, model={**hot, "max_prompt_tokens": limit}) as (app, (upstream,)):
            call = await Call(app, fields, path=path).done()
        assert (call.status, len(upstream.seen)) == (status, 1 if status == 200 else 0)
        if status == 400:
            assert call.error["code"] == "context_length_exceeded"
            assert f"has {tokens} tokens" in call.error["message"]


async def test_text_that_the_estimate_takes_for_short_is_counted_too(directory: Path) -> None:
    """200 tokens in 399 bytes, which the estimate takes for a hundred."""
    async with front(OK, model={"source": str(directory), "max_prompt_tokens": 190}) as (app, (upstream,)):
        call = await Call(app, body(" ".join("7" * 200))).done()
    assert (call.status, call.error["code"], upstream.seen) == (400, "context_length_exceeded", [])
