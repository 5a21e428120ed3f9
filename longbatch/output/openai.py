"""Results as the lines of an OpenAI batch output file."""

from __future__ import annotations

from typing import Any

from longbatch.output.folder import RunFolder

Row = dict[str, Any]


def openai_line(folder: RunFolder, samples: list[Row]) -> Row:
    """One line for the samples of one manifest row, which become its choices.

    A row without an id gets its row number as `custom_id`. A failed sample is left out of the choices and
    named in `error`; `response` is null when all failed.
    """
    first = samples[0]
    answered = [sample for sample in samples if sample["status"] == "ok"]
    failed = [sample for sample in samples if sample["status"] != "ok"]
    name = f"{folder.run_id}-{first['row']}"
    response = None
    if answered:
        response = {"status_code": 200, "request_id": name, "body": _body(folder, name, answered)}
    return {
        "id": f"batch_req_{name}",
        "custom_id": str(first["row"]) if first["id"] is None else first["id"],
        "response": response,
        "error": _error(failed[0]["error"]) if failed else None,
    }


def _error(error: Row | None) -> Row:
    error = error or {}
    return {"code": error.get("type"), "message": error.get("message"), "param": error.get("field")}


def _body(folder: RunFolder, name: str, samples: list[Row]) -> Row:
    model = folder.info.get("model") or folder.identity.get("model") or "unknown"
    prompt = samples[0]["usage"]["prompt_tokens"]
    completion = sum(sample["usage"]["completion_tokens"] for sample in samples)
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": samples[0]["usage"]["cached_tokens"]},
    }
    if all(sample["embedding"] is not None for sample in samples):
        data = [
            {"object": "embedding", "index": sample["sample"], "embedding": sample["embedding"]} for sample in samples
        ]
        return {"object": "list", "model": model, "data": data, "usage": usage}
    return {
        "id": f"chatcmpl-{name}",
        "object": "chat.completion",
        "created": int(folder.created.timestamp()),
        "model": model,
        "choices": [_choice(sample) for sample in samples],
        "usage": usage,
    }


def _choice(sample: Row) -> Row:
    message = {"role": "assistant", "content": sample["label"] if sample["text"] is None else sample["text"]}
    if sample["reasoning"] is not None:
        message["reasoning_content"] = sample["reasoning"]
    return {
        "index": sample["sample"],
        "message": message,
        "logprobs": None if sample["logprobs"] is None else {"content": [_token(item) for item in sample["logprobs"]]},
        "finish_reason": sample["finish_reason"],
    }


def _token(item: Row) -> Row:
    top = [{"token": other["token"], "logprob": other["logprob"]} for other in item["top"] or ()]
    return {"token": item["token"], "logprob": item["logprob"], "top_logprobs": top}
