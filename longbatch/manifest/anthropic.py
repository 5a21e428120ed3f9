"""Anthropic batch lines: {custom_id, params}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longbatch.errors import RowError
from longbatch.manifest import fields
from longbatch.manifest.chat import read_content, read_messages, with_system
from longbatch.manifest.draft import Draft
from longbatch.manifest.options import ManifestOptions
from longbatch.manifest.sampling import read_sampling

LINE_NAMES = frozenset({"params"})

_SAMPLING = frozenset({"max_tokens", "stop_sequences", "temperature", "top_k", "top_p"})
_SUPPORTED = _SAMPLING | {"system", "messages"}
_HARMLESS = frozenset({"model", "metadata", "service_tier"})
_OFF: dict[str, tuple[object, ...]] = {
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
}


def read_anthropic(values: Mapping[str, Any], options: ManifestOptions) -> Draft:
    """The request of one line. Raises RowError."""
    params = fields.mapping(values["params"], "params")
    fields.refuse_unsupported(params, _SUPPORTED, _HARMLESS, _OFF, ignore=options.ignore_unsupported, prefix="params.")
    if params.get("messages") is None:
        raise RowError("missing_field", "the params need messages", field="params.messages")
    ignore = options.ignore_unsupported
    messages = read_messages(params["messages"], "params.messages", ignore_unsupported=ignore)
    system = None
    if params.get("system") is not None:
        parts = read_content(params["system"], "params.system", ignore_unsupported=ignore)
        system = "".join(part for part in parts if isinstance(part, str))
    sampling = read_sampling({name: params[name] for name in params if name in _SAMPLING}, "params.")
    return Draft(messages=with_system(messages, system, options.system, "params.system"), sampling=sampling)
