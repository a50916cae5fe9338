"""`/tokenize` and `/detokenize`, with the fields of vLLM and of llama.cpp."""

import asyncio
from functools import partial
from typing import Any

from kvlite.model.chat_template import chat_tokens
from kvlite.server.fields import Detokenizing, Tokenizing
from kvlite.server.messages import plain_messages
from kvlite.server.refusals import Refusal
from kvlite.server.served_model import ServedModel


async def tokens_of(model: ServedModel, fields: Tokenizing) -> dict[str, Any]:
    """The tokens of a text, or of a chat in its template.

    Raises:
        Refusal, KvliteError: there is none, or it cannot fit the model.
    """
    runner = model.ready()
    if fields.messages is not None:
        messages = plain_messages(fields.messages)
        text = "".join(each["content"] for each in messages)
        encode = partial(chat_tokens, runner.tokenizer, messages)
    else:
        text = (fields.content if fields.prompt is None else fields.prompt) or ""
        given = (fields.add_special_tokens, fields.add_special)
        special = next((each for each in given if each is not None), True)
        encode = partial(runner.tokenizer.encode, text, add_special_tokens=special)
    model.require_short(len(text))
    ids = await asyncio.to_thread(encode)
    return {"tokens": ids, "count": len(ids), "max_model_len": runner.shape.max_context}


async def text_of(model: ServedModel, fields: Detokenizing) -> dict[str, Any]:
    """The text of tokens.

    Raises:
        Refusal: one is not in the vocabulary.
    """
    runner = model.ready()
    wrong = [each for each in fields.tokens if not 0 <= each < runner.shape.vocab]
    if wrong:
        raise Refusal(f"token {wrong[0]} is not in this model's vocabulary", param="tokens")
    text = await asyncio.to_thread(runner.tokenizer.decode, fields.tokens)
    return {"prompt": text, "content": text}
