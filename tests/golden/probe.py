"""All that golden runs know of kvlite beyond its public functions, to be adapted here and nowhere
else when names change. What is recorded has names of its own, and they stay."""

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import kvlite

# Recorded name: attribute of an answer's account. Seconds, peaks of the process and sentences are
# not recorded; of notes and fallbacks it is how many there are.
METRICS = {
    "finish_reason": "finish_reason",
    "method": "method",
    "kv_bits": "kv_bits",
    "dtype": "dtype",
    "weights": "weights",
    "budget": "budget",
    "num_prompt_tokens": "prompt_tokens",
    "num_reread_tokens": "again_tokens",
    "num_seen_tokens": "seen_tokens",
    "num_new_tokens": "generated_tokens",
    "mean_kept_entries": "kept_entries_mean",
    "kv_bytes": "kv_bytes",
    "full_kv_bytes": "full_kv_bytes",
    "recall_index_bytes": "index_bytes",
    "recall_store_bytes": "host_kv_bytes",
    "recall_store_place": "host_kv_place",
    "recalled_bytes": "recalled_bytes",
    "recall_hit_rate": "recall_hit_rate",
    "streamed_weight_bytes": "streamed_bytes",
    "score_bytes_to_host": "score_bytes_to_host",
    "score_bytes_back": "score_bytes_back",
    "planned_peak_bytes": "planned_peak_bytes",
    "planned_phase_bytes": "planned_phase_bytes",
}
COUNTED = {"num_warnings": "notes", "num_fallbacks": "fallbacks"}


def metrics(account: Any) -> dict[str, Any]:
    """What an answer's account says that is the same in every run."""
    found = {name: getattr(account, attribute) for name, attribute in METRICS.items()}
    found |= {name: len(getattr(account, attribute)) for name, attribute in COUNTED.items()}
    return found


def kept_positions(talk: kvlite.Conversation) -> list[dict[int, list[int]]]:
    """Of each layer, by KV head, which tokens' entries it holds, ascending."""
    return [
        {
            head: sorted(head_group.positions[0, index, : head_group.used].tolist())
            for head_group in layer.head_groups
            for index, head in enumerate(head_group.heads)
        }
        for layer in talk.cache.layers
    ]


def mtp_parameters(model: Any) -> dict[str, Any]:
    """The parameters of a model's own MTP head, by what checkpoints call them; nothing in them."""
    import torch

    from kvlite.model.mtp import empty_mtp, stored_name

    head = empty_mtp(model, torch.float32).to_empty(device="cpu")
    return {stored_name(name): torch.ones_like(each) for name, each in head.state_dict().items()}


@contextlib.contextmanager
def proposals_are_free() -> Iterator[None]:
    """Whatever is proposed is checked, however long that takes."""
    from kvlite.engine.speculate import Pace

    with patch.object(Pace, "factor", 0.0):
        yield


def command(*args: object) -> str:
    """What the program prints on standard output, in this process."""
    from kvlite.cli.main import main

    out = io.StringIO()
    with (
        patch.object(sys, "argv", ["kvlite", *map(str, args)]),
        contextlib.redirect_stdout(out),
        contextlib.suppress(SystemExit),
    ):
        main()
    return out.getvalue()


def command_json(*args: object) -> Any:
    """The one JSON object that the program prints."""
    return json.loads(command(*args, "--json"))


def asked(*args: object) -> dict[str, Any]:
    """What `kvlite ask` answers, and from how much that was read now, or before."""
    said = command_json("ask", *args)
    names = {"answer": "answer"} | {key: METRICS[key] for key in ("num_prompt_tokens", "kv_bytes")}
    names["num_seen_tokens"] = METRICS["num_seen_tokens"]
    return {name: said[key] for name, key in names.items()}


def library() -> list[dict[str, Any]]:
    """What `kvlite library` lists of documents, and the bytes that each was saved in."""
    keys = ("name", "tokens", "messages", "documents", "method", "light", "flaw")
    return [
        {key: each[key] for key in keys} | {"bytes": Path(each["path"]).stat().st_size}
        for each in command_json("library")["entries"]
        if not each["messages"]
    ]


def configured(*args: object) -> dict[str, Any]:
    """Settings that `kvlite config` says come from elsewhere than the defaults, and from where."""
    said = command_json("config", *args)["settings"]
    return {
        name: [each["value"], each["from"], each.get("name")]
        for name, each in said.items()
        if each["from"] != "default"
    }


PLAN = {
    "weights": "weights",
    "stream_weights": "stream",
    "budget": "budget",
    "kv_bits": "kv_bits",
    "chunk": "chunk",
    "num_tokens": "tokens",
    "max_new_tokens": "answer_tokens",
    "fits": "fits",
    "peak_bytes": "peak_bytes",
    "kv_bytes": "kv_bytes",
    "host_bytes": "host_bytes",
    "device_bytes": "device_bytes",
    "tensor_bytes": "tensor_bytes",
}
PHASES = {"load": "load", "prefill": "read", "select": "choose", "decode": "answer"}
PARTS = {
    "weights": "weights",
    "weight_in_flight": "a weight on its way",
    "kv_cache": "KV cache",
    "hidden_states": "hidden states",
    "layer_kv": "one layer's KV",
    "workspace": "activations and scores",
}


def plan(*args: object) -> dict[str, Any]:
    """What `kvlite plan` predicts, byte by byte."""
    said = command_json("plan", *args)
    found = {name: said[key] for name, key in PLAN.items()}
    found["num_reasons"] = len(said["reasons"])
    for name, phase in PHASES.items():
        parts = said["phases"][phase]
        known = {part: parts.pop(key) for part, key in PARTS.items() if key in parts}
        found[f"{name}_bytes"] = known | parts
    found["max_context"] = [
        [each["weights"], each["method"] == "full", each["kv_bits"], each["tokens"]]
        for each in said["fitting"]
    ]
    return found


@contextlib.contextmanager
def app_service(model: Path, data: Path) -> Iterator[Any]:
    """The app without its pages, on a data folder; to be handed to the functions below."""
    from kvlite.config.settings import Settings
    from kvlite_app.engine.service import Service

    service = Service(Settings(model=str(model), device="cpu", max_new_tokens=6), data)
    try:
        service.load(service.model_host.settings).wait()
        yield service
    finally:
        service.close()


def app_conversations(service: Any) -> list[dict[str, Any]]:
    """What the app shows of conversations, and how many of their answers have an account."""
    from kvlite.conversation.record import keys_of

    store = service.store("")
    return [
        {
            "id": each.id,
            "name": each.title,
            "messages": [[said.role, said.text, [*said.documents]] for said in each.said],
            "branches": [[branch.title, branch.current] for branch in each.branches],
            "elsewhere": each.elsewhere,
            "waiting": each.waiting,
            "draft": each.draft,
            "changed": each.changed,
            "num_accounts": sum(bool(store.account(each.id, key)) for key in keys_of(each.said)),
        }
        for each in sorted(store.records(), key=lambda each: each.id)
        if not each.is_document
    ]


def app_search(service: Any, query: str) -> list[str]:
    """Ids of the conversations that the app finds, without documents."""
    found = service.store("").records(query)
    return sorted(each.id for each in found if not each.is_document)


def app_upload(service: Any, id: str, name: str, content: bytes) -> None:
    """Have the app read a document."""
    path = service.uploads.new("") / name
    path.write_bytes(content)
    app_do(service, "say", id, "", [str(path)])


def app_do(service: Any, what: str, id: str, *args: Any) -> None:
    """Have the app `say`, `edit`, `undo`, `branch`, `switch` or `regenerate`, and wait."""
    work = getattr(service, what)("", id, *args)
    work.wait()
    assert work.failure is None, work.failure
