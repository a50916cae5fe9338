"""`/tokenize` and `/detokenize`, in the words of vLLM and of llama.cpp."""

import asyncio
from functools import partial
from typing import Any

from kvlite.model.chat_template import chat_tokens
from kvlite.server.fields import Detokenizing, Tokenizing
from kvlite.server.messages import plain_messages
from kvlite.server.refusals import Refusal
from kvlite.server.served_model import ServedModel


async def tokenized(model: ServedModel, fields: Tokenizing) -> dict[str, Any]:
    """The tokens of a text, or of a chat in its template. Raises Refusal or KvliteError."""
    runner = model.ready()
    if fields.messages is not None:
        fields.require_end()
        messages = await asyncio.to_thread(plain_messages, fields.messages)
        text = "".join(each["content"] for each in messages)
        given = fields.variables(runner.settings)
        encode = partial(
            chat_tokens, runner.tokenizer, messages, variables=given, continues=fields.continues
        )
    else:
        text = (fields.content if fields.prompt is None else fields.prompt) or ""
        flags = (fields.add_special_tokens, fields.add_special)
        special = next((each for each in flags if each is not None), True)
        encode = partial(runner.tokenizer.encode, text, add_special_tokens=special)
    model.require_short(len(text))
    ids = await asyncio.to_thread(encode)
    return {"tokens": ids, "count": len(ids), "max_model_len": runner.shape.max_context}


async def detokenized(model: ServedModel, fields: Detokenizing) -> dict[str, Any]:
    """The text of tokens. Raises Refusal if one is not in the vocabulary."""
    runner = model.ready()
    vocab = runner.shape.vocab

    def decoded() -> str:
        if wrong := [each for each in fields.tokens if not 0 <= each < vocab]:
            said = f"token {wrong[0]} is not in this model's vocabulary"
            raise Refusal(said, param="tokens")
        return str(runner.tokenizer.decode(fields.tokens))

    text = await asyncio.to_thread(decoded)
    return {"prompt": text, "content": text}
