"""OpenAI batch lines: {custom_id, method, url, body}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longbatch.errors import RowError
from longbatch.manifest import fields
from longbatch.manifest.chat import read_messages, with_system
from longbatch.manifest.draft import Draft
from longbatch.manifest.options import ManifestOptions
from longbatch.manifest.sampling import MOST_LOGPROBS, SAMPLING_NAMES, read_num_samples, read_sampling

LINE_NAMES = frozenset({"method", "url", "body"})
_URLS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}

_SUPPORTED = SAMPLING_NAMES | {"messages", "prompt", "n", "top_logprobs", "chat_template_kwargs"}
# The model is the run's own (`--model`); the rest steers a service and not the answer.
_HARMLESS = frozenset(
    [
        "model",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "stream_options",
        "parallel_tool_calls",
    ]
)
_OFF: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
}


def read_openai(values: Mapping[str, Any], options: ManifestOptions) -> Draft:
    """The request of one line. Raises RowError."""
    url = _read_url(values)
    body = fields.mapping(values["body"], "body")
    fields.refuse_unsupported(body, _SUPPORTED, _HARMLESS, _OFF, ignore=options.ignore_unsupported, prefix="body.")
    wanted = _URLS[url] if url else "messages" if body.get("messages") is not None else "prompt"
    other = "prompt" if wanted == "messages" else "messages"
    if body.get(other) is not None:
        message = f"the endpoint of this row reads `{wanted}`, so `{other}` must go"
        raise RowError("ambiguous_row", message, field=f"body.{other}")
    if body.get(wanted) is None:
        raise RowError("missing_field", f"the body needs {wanted}", field=f"body.{wanted}")

    draft = Draft()
    if wanted == "messages":
        messages = read_messages(body["messages"], "body.messages", ignore_unsupported=options.ignore_unsupported)
        draft.messages = with_system(messages, None, options.system, "body.messages")
        draft.sampling = read_sampling({**body, "logprobs": _chat_logprobs(body)}, "body.")
    else:
        if options.system is not None:
            message = "a system prompt cannot be added to a raw completion; use messages"
            raise RowError("unsupported_field", message, field="body.prompt")
        draft.text = _read_raw_prompt(body["prompt"])
        draft.sampling = read_sampling(body, "body.")
    draft.num_samples = read_num_samples(body.get("n"), "body.n")
    if body.get("chat_template_kwargs") is not None:
        draft.template_kwargs = fields.mapping(body["chat_template_kwargs"], "body.chat_template_kwargs")
    return draft


def _read_url(values: Mapping[str, Any]) -> str | None:
    method, url = values.get("method"), values.get("url")
    if method is not None and method != "POST":
        raise RowError("unsupported_field", "the method must be POST", field="method")
    if url is not None and fields.text(url, "url") not in _URLS:
        raise RowError("unsupported_field", f"the url must be one of {', '.join(_URLS)}", field="url")
    return url


def _chat_logprobs(body: Mapping[str, Any]) -> int | bool | None:
    """Chat bodies switch logprobs on by a boolean and count the alternatives in another field."""
    switch, count = body.get("logprobs"), body.get("top_logprobs")
    if switch is not None and not isinstance(switch, bool):
        raise fields.wrong_type("a boolean", switch, "body.logprobs")
    if count is None:
        return switch
    if not switch:
        raise RowError("invalid_value", "needs logprobs to be true", field="body.top_logprobs")
    return fields.integer(count, "body.top_logprobs", 0, MOST_LOGPROBS)


def _read_raw_prompt(value: Any) -> str:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return fields.text(value, "body.prompt")
