"""`kvlite ask` answers one question, and accounts for what it did."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from kvlite.conversation.conversation import Conversation
from tests.cli.conftest import Done, Run, tokens
from tests.documents.files import Stdin


def test_the_account_of_an_answer(kvlite: Run, model: Path, text: Path, said: list[str]) -> None:
    flags = ("--model", model, "--method", "snapkv:window=16", "--budget", "64")
    asked = ("ask", text, "What?", *flags, "--max-tokens", "8", "--json", "-q", "--measure")
    done = kvlite(*asked, "tensors")
    answer = done.json()
    assert (done.code, done.err) == (0, "")
    read = tokens(model, said[0])
    assert read > 200
    expected = {
        "finish_reason": "length",
        "model": str(model),
        "device": "cpu",
        "weights": "fp32",
        "dtype": "float32",
        "method": "snapkv:window=16",
        "budget": 64,
        "prompt_tokens": read,
        "seen_tokens": read + 7,
        "generated_tokens": 8,
        "kept_entries_mean": 64 + 7,
        "full_kv_bytes": (read + 7) * 4 * 2 * 2 * 8 * 4,  # layers, heads, K and V, dim, float32
    }
    assert {name: answer[name] for name in expected} == expected
    assert 0 < answer["kv_bytes"] < answer["full_kv_bytes"] / 2
    for name in ("time_to_first_token_s", "prefill_tokens_per_s", "decode_tokens_per_s"):
        assert isinstance(answer[name], float) and answer[name] > 0
    weights = sum(w.nbytes for w in load_file(model / "model.safetensors").values())
    assert weights < answer["peak_bytes"] < kvlite(*asked, "process").json()["peak_bytes"]


def test_answer_and_ledger_go_apart_and_what_limit_cut_it_is_said(
    kvlite: Run, model: Path, text: Path
) -> None:
    flags = ("ask", text, "What?", "--model", model, "--max-tokens", "12")
    answer = kvlite(*flags, "--json").json()
    plain = kvlite(*flags)
    assert (plain.code, plain.out) == (0, answer["answer"] + "\n")
    read = f"read {answer['prompt_tokens']:,} tokens · kept "
    assert re.fullmatch(
        rf"{read}.* · stopped at the length limit\nThe answer was cut at 12 tokens: .*\n", plain.err
    )
    assert "raise --max-tokens or leave it out, or ask in " in " ".join(plain.err.split())
    assert kvlite(*flags, "--quiet") == Done(0, plain.out, "")
    text.write_text("the cat sat on the mat " * 70)
    full = " ".join(kvlite("ask", text, "What?", "--model", model, "--method", "full").err.split())
    assert "as the model's context of 512 tokens is full: ask about less, or in kvlite chat" in full


@pytest.mark.long
def test_what_speaks_against_the_bits_is_said_once(kvlite: Run, model: Path, text: Path) -> None:
    flags = ("--model", model, "--method", "full", "--max-tokens", "6", "--kv-bits", "K8V4")
    done = kvlite("ask", text, "What?", *flags)
    assert done.code == 0 and "KV in k8v4 " in done.err
    assert done.err.count("Note: 4-bit values cost models below 1 billion weights") == 1
    answer = kvlite("ask", text, "What?", *flags, "--json", "-q").json()
    assert answer["kv_bits"] == "k8v4" and len(answer["notes"]) == 1
    assert answer["kv_bytes"] < 0.6 * answer["full_kv_bytes"]


def test_several_files_in_order(
    kvlite: Run, model: Path, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(b"piped words\n"))
    for name in ("z.txt", "a.md"):
        (tmp_path / name).write_text(f"{name} holds words")
    monkeypatch.chdir(tmp_path)
    flags = ("--model", model, "--max-tokens", "1", "--json")
    done = kvlite("ask", "z.txt", "-", "a.md", " Which fruit? ", *flags)
    parts = ("z.txt", "z.txt holds words", "stdin", "piped words")
    parts += ("a.md", "a.md holds words", "Which fruit?")
    assert re.search(".*".join(map(re.escape, parts)), said[0], re.DOTALL)
    assert done.json()["prompt_tokens"] == tokens(model, said[0])


@pytest.mark.long
def test_draws_repeat_with_their_seed_and_end_before_stop_texts(
    kvlite: Run, model: Path, text: Path
) -> None:
    flags = ("ask", text, "What?", "--model", model, "--max-tokens", "16", "--temperature", "1")
    drawn = [kvlite(*flags, *seed).out for seed in (("--seed", 3), ("--seed", 3), ("--seed", 2))]
    assert drawn[0] == drawn[1] != drawn[2]
    assert kvlite(*flags).out != kvlite(*flags).out
    whole = drawn[0][:-1]
    early, late = whole[20:24], whole[40:44]
    asked = (*flags, "--seed", 3, "--stop", late, "--stop", early, "--json")
    stopped = kvlite(*asked).json()
    assert stopped["answer"] == whole[: whole.index(early)]
    assert stopped["finish_reason"] == "stop"


@pytest.mark.long
def test_an_encoding_that_lacks_characters(model: Path, text: Path) -> None:
    command = [sys.executable, "-m", "kvlite", "ask", text, "What?", "--model", model]
    draws = ["--temperature", "1", "--seed", "1", "--max-tokens", "60"]
    for flags in ([], ["--json"]):
        done = subprocess.run(
            [*map(str, command), *draws, *flags],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            check=False,
        )
        assert done.returncode == 0 and done.stdout.isascii()
    assert not json.loads(done.stdout)["answer"].isascii()


def test_long_compiling_is_a_note(
    kvlite: Run, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("kvlite.compiling"), "disabled", False)
    stream = Conversation.stream

    def compiling(self: Conversation, *args: Any, **given: Any) -> Any:
        logging.getLogger("kvlite.compiling").info("Compiling.")
        return stream(self, *args, **given)

    monkeypatch.setattr(Conversation, "stream", compiling)
    asked = ("ask", text, "What?", "--model", model, "--max-tokens", "1")
    assert kvlite(*asked).err.startswith("Note: Compiling.\n")


def test_of_what_is_too_long_relevant_parts_are_read(
    kvlite: Run, model: Path, text: Path, said: list[str]
) -> None:
    text.write_text("the cat sat on the mat.\n\n" * 200 + "A heron waits.\n\n" + "the mat\n" * 500)
    flags = ("ask", text, "Where is the heron?", "--model", model, "--max-tokens", "8")
    refused = kvlite(*flags)
    assert refused.code == 2 and "--relevant reads the parts" in refused.err
    done = kvlite(*flags, "--relevant")
    assert done.code == 0 and "those that a text search found for this question" in done.err
    assert "A heron waits." in said[-1] and "passages left out here]" in said[-1]
    two = kvlite(*flags, "Why?", "--relevant")
    assert two.code == 2 and "one question, for which it searches" in two.err
