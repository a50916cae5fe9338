"""Caches of kvpress and of transformers on prompts of the bench.

A program of its own, for the Python of an environment that has these: kvlite does not import it.
It reads JSON lines. The first, `{"peers", "model", "dtype", "device", "threads"}`, it answers with
`{"unknown", "presses"}` if kvpress does not have one of the peers, else with `{}` once the model is
loaded. Then comes a case a line,

    {"peer": "kvpress:snapkv", "keep": 512, "context": [...], "question": [...], "forced": [...],
     "at_keys": [...], "stop": [...], "new_tokens": 40}

and answers each with a line `{"ids", "kv_bytes", "entries_mean", "surprise", "reading_s",
"token_ms"}`, or `{"error"}`. A press cuts the context to `keep` entries a KV head, mean over
layers; the question is read afterwards. As in kvpress' own pipeline, tokens keep their positions.
"""

import contextlib
import copy
import json
import sys
import time
from inspect import signature
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, QuantizedCache


def main() -> None:
    """Answer until standard input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print
    model = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if model is None:
                answer = missing(asked["peers"])
                model = None if answer else opened(asked)
            else:
                with torch.inference_mode():
                    answer = told(model, asked)
        except Exception as error:  # whatever a method raises, the next may work
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def missing(peers: list[str]) -> dict[str, Any]:
    """The first peer that is a press which kvpress does not have, and the presses it has."""
    for peer in peers:
        program, _, name = peer.partition(":")
        if program == "kvpress" and name not in (held := presses()):
            return {"unknown": peer, "presses": sorted(held)}
    return {}


def presses() -> dict[str, Any]:
    """kvpress' presses that take a compression ratio alone, by the names that peers have."""
    import kvpress

    return {
        key.removesuffix("Press").lower(): press
        for key, press in vars(kvpress).items()
        if key.endswith("Press") and takes_ratio_alone(press)
    }


def takes_ratio_alone(press: Any) -> bool:
    """Whether nothing else has to be given; some presses are made around another."""
    try:
        signature(press).bind(compression_ratio=0.0)
    except TypeError:
        return False
    return True


def opened(asked: dict[str, Any]) -> Any:
    """The model in a folder."""
    torch.set_num_threads(asked["threads"])
    dtype = getattr(torch, asked["dtype"])
    return AutoModelForCausalLM.from_pretrained(asked["model"], dtype=dtype).to(asked["device"])


def told(model: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Read, cut and answer one case."""
    begun = time.perf_counter()
    context, question = asked["context"], asked["question"]
    # Half an entry more, since presses cut off what a rounded ratio falls short of a whole number.
    press, cache = chosen(asked["peer"], model, (asked["keep"] + 0.5) / len(context))
    with press(model) if press else contextlib.nullcontext():
        logits = step(model, cache, context, 0)
    if question:
        logits = step(model, cache, question, len(context))
    seconds = time.perf_counter() - begun
    held, entries = held_bytes(cache), [layer_entries(each) for each in cache.layers]
    seen, forced = len(context) + len(question), asked["forced"]
    scores = torch.cat(
        [logits, step(model, copy.deepcopy(cache), forced[:-1], seen, keep=0)]
        if forced[1:]
        else [logits]
    ).log_softmax(-1)
    nats = [-float(scores[at, forced[at]]) for at in asked["at_keys"]]
    ids: list[int] = []
    begun = time.perf_counter()
    while (
        len(ids) < asked["new_tokens"] and (token := int(logits[-1].argmax())) not in asked["stop"]
    ):
        ids.append(token)
        logits = step(model, cache, [token], seen)
        seen += 1
    return {
        "ids": ids,
        "kv_bytes": held,
        "entries_mean": sum(entries) / len(entries),
        "surprise": sum(nats) / len(nats),
        "reading_s": seconds,
        "token_ms": 1000 * (time.perf_counter() - begun) / len(ids) if ids else None,
    }


def chosen(peer: str, model: Any, share: float) -> tuple[Any, Any]:
    """The press, if it is one, and the cache that a prompt is read into."""
    program, _, name = peer.partition(":")
    if program == "transformers":
        bits = int(name.removeprefix("hqq"))
        return None, QuantizedCache("hqq", model.config, nbits=bits, axis_key=1, axis_value=1)
    return presses()[name](compression_ratio=max(0.0, 1 - share)), DynamicCache()


def step(model: Any, cache: Any, ids: list[int], position: int, keep: int = 1) -> torch.Tensor:
    """Read tokens; logits of what follows the last `keep` of them, or all if 0."""
    given = torch.tensor([ids], device=model.device)
    positions = torch.arange(position, position + len(ids), device=model.device)[None]
    logits: torch.Tensor = model(
        input_ids=given, past_key_values=cache, position_ids=positions, logits_to_keep=keep
    ).logits
    return logits[0].float()


def layer_entries(layer: Any) -> int:
    """Entries a KV head that a layer really holds."""
    if hasattr(layer, "cumulative_length"):
        return int(layer.get_seq_length())
    return int(layer.keys.shape[-2])


def held_bytes(value: Any) -> int:
    """Bytes of all tensors in a cache, those of quantized ones as they are packed."""
    if isinstance(value, (list, tuple)):
        return sum(map(held_bytes, value))
    if isinstance(value, dict):
        return held_bytes(list(value.values()))
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    names = ("layers", "keys", "values", "_quantized_keys", "_quantized_values")
    return held_bytes([getattr(value, name) for name in names if hasattr(value, name)])


if __name__ == "__main__":
    main()
