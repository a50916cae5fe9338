"""OpenAI's batch files: chat completions, a request a line, and the lines that answer them."""

import time
from collections.abc import Iterable
from typing import Any

from kvlite.config.settings import Settings
from kvlite.errors import SettingError
from kvlite.jobs.answer import BatchAnswer
from kvlite.jobs.rows import Named
from kvlite.jobs.tasks import ANSWER, Task, new_id
from kvlite.server.fields import Chat, parsed
from kvlite.server.messages import plain_messages
from kvlite.server.refusals import Refusal

_URL = "/v1/chat/completions"


def tasks_of_requests(rows: Iterable[Named], usual: Settings) -> list[Task]:
    """The tasks in rows with custom_id, url and body; the body's model is not looked at. Raises
    SettingError if one is no chat completion, or wants what is not here."""
    made: list[Task] = []
    seen: dict[str, str] = {}
    for where, row in rows:
        name = row.get("custom_id")
        if not isinstance(name, str) or not name:
            raise SettingError(f"{where} has no custom_id: each request needs one, a text")
        name = new_id(name, where, seen)
        if row.get("url", _URL) != _URL:
            raise SettingError(f"{where} asks for {row['url']!r}: there is {_URL} alone")
        try:
            made.append(_task(name, row.get("body"), usual))
        except (Refusal, SettingError) as error:
            raise SettingError(f"{where}: {error}") from error
    return made


def _task(name: str, body: Any, usual: Settings) -> Task:
    chat = parsed(Chat, body if isinstance(body, dict) else {})
    chat.require_here()
    if chat.choices > 1 or chat.logprobs or chat.tools or chat.chat_template_kwargs:
        raise Refusal(
            "n, logprobs, tools and chat_template_kwargs are not supported in a batch: ask kvlite "
            "serve for them"
        )
    if chat.longest == 0:
        raise Refusal(f"{chat.length_field} 0: nothing would come of it in a batch")
    settings = chat.settings(usual)
    if others := [each for each in settings if each not in ANSWER]:
        raise Refusal(f"kvlite.{others[0]} is the job's: give it to the command")
    *before, last = plain_messages(chat.messages)
    if last["role"] != "user" or [each["role"] for each in before] not in ([], ["system"]):
        raise Refusal(
            "messages are more than a system message and a user's: a chat that goes on is for "
            "kvlite serve"
        )
    if before:
        settings["system"] = before[0]["content"]
    return Task(name, last["content"], settings=settings)


def answer_line(answer: BatchAnswer, model: str) -> dict[str, Any]:
    """An answer in OpenAI's form; `id` is the request's own."""
    line: dict[str, Any] = {"id": answer.id, "custom_id": answer.id, "response": None}
    metrics = answer.metrics
    if answer.error is not None or metrics is None:
        return {**line, "error": {"code": None, "message": answer.error}}
    prompt, completion = metrics.prompt_tokens, metrics.generated_tokens
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    message = {"role": "assistant", "content": answer.answer, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
        usage["completion_tokens_details"] = {"reasoning_tokens": metrics.reasoning_tokens}
    choice = {"index": 0, "message": message, "logprobs": None}
    body = {
        "id": f"chatcmpl-{answer.id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{**choice, "finish_reason": answer.finish_reason}],
        "usage": {**usage, "total_tokens": prompt + completion},
    }
    response = {"status_code": 200, "request_id": answer.id, "body": body}
    return {**line, "response": response, "error": None}
