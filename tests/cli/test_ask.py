"""`kvlite ask` answers, and accounts for what it did."""

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


@pytest.mark.long
def test_json(kvlite: Run, model: Path, text: Path, said: list[str]) -> None:
    flags = ("--model", model, "--method", "snapkv:window=16", "--budget", "64")
    done = kvlite("ask", text, "What?", *flags, "--max-tokens", "8", "--json", "-q")
    answer = done.json()
    kinds = {
        **dict.fromkeys(
            ("answer", "finish_reason", "model", "device", "weights", "dtype", "method"), str
        ),
        **dict.fromkeys(("budget", "prompt_tokens", "seen_tokens", "generated_tokens"), int),
        **dict.fromkeys(("kv_bytes", "full_kv_bytes", "peak_bytes"), int),
        **dict.fromkeys(("kept_entries_mean", "time_to_first_token_s"), float),
        **dict.fromkeys(("prefill_tokens_per_s", "decode_tokens_per_s"), float),
    }
    assert {name: type(answer[name]) for name in kinds} == kinds
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
    assert min(answer[name] for name in kinds if name.endswith("_s")) > 0


def test_what_limit_cut_an_answer_is_said(kvlite: Run, model: Path, tmp_path: Path) -> None:
    """And where it may go on."""
    text = tmp_path / "long.txt"
    text.write_text("the cat sat on the mat " * 40)
    flags = ("--model", model, "--method", "full")
    cut = " ".join(kvlite("ask", text, "What?", *flags, "--max-tokens", 8).err.split())
    assert "The answer was cut at 8 tokens: raise --max-tokens or leave it out, or ask in " in cut
    full = " ".join(kvlite("ask", text, "What?", *flags).err.split())
    assert "as the model's context of 512 tokens is full: ask about less, or in kvlite chat" in full
    several = kvlite("ask", text, "What?", "Why?", *flags, "--max-tokens", 8).err
    assert several.count("The answer was cut at 8 tokens") == 2
    assert "cut" not in kvlite("ask", text, "What?", *flags, "--max-tokens", 8, "-q").err


@pytest.mark.long
def test_what_speaks_against_the_bits_is_said_once(kvlite: Run, model: Path, text: Path) -> None:
    flags = ("--model", model, "--method", "full", "--max-tokens", "6", "--kv-bits", "K8V4")
    done = kvlite("ask", text, "What?", *flags)
    assert done.code == 0 and "KV in k8v4 " in done.err
    assert done.err.count("Note: 4-bit values cost models below 1 billion weights") == 1
    answer = kvlite("ask", text, "What?", *flags, "--json", "-q").json()
    assert answer["kv_bits"] == "k8v4" and len(answer["notes"]) == 1
    assert answer["kv_bytes"] < 0.6 * answer["full_kv_bytes"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("budget", ["100000", "64GiB"])
def test_budget_larger_than_the_prompt_keeps_everything(
    kvlite: Run, model: Path, text: Path, budget: str
) -> None:
    flags = ("--model", model, "--max-tokens", "6", "--json", "--method")
    done = kvlite("ask", text, "What?", *flags, "snapkv", "--budget", budget)
    answer, full = done.json(), kvlite("ask", text, "What?", *flags, "full").json()
    assert done.code == 0
    assert answer["budget"] > answer["kept_entries_mean"] == answer["seen_tokens"]
    assert answer["answer"] == full["answer"]


@pytest.mark.long
def test_peak_of_tensors(kvlite: Run, model: Path, text: Path) -> None:
    weights = sum(w.nbytes for w in load_file(model / "model.safetensors").values())
    flags = ("ask", text, "What?", "--model", model, "--max-tokens", "2", "--json", "--measure")
    process = kvlite(*flags, "process").json()["peak_bytes"]
    assert weights < kvlite(*flags, "tensors").json()["peak_bytes"] < process


def test_answer_and_ledger_go_apart(kvlite: Run, model: Path, text: Path) -> None:
    flags = ("ask", text, "What?", "--model", model, "--max-tokens", "12")
    answer = kvlite(*flags, "--json").json()
    plain = kvlite(*flags)
    assert (plain.code, plain.out) == (0, answer["answer"] + "\n")
    read = f"read {answer['prompt_tokens']:,} tokens · kept "
    assert re.fullmatch(
        rf"{read}.* · stopped at the length limit\nThe answer was cut at 12 tokens: .*\n", plain.err
    )
    assert kvlite(*flags, "--quiet") == Done(0, plain.out, "")


def test_several_files_in_order(
    kvlite: Run, model: Path, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(b"piped words\n"))
    files = ["z.txt", "-", "a.md"]
    for name in ("z.txt", "a.md"):
        (tmp_path / name).write_text(f"{name} holds words")
    monkeypatch.chdir(tmp_path)
    flags = ("--model", model, "--max-tokens", "1", "--json")
    done = kvlite("ask", *files, " Which fruit? ", *flags)
    parts = ("z.txt", "z.txt holds words", "stdin", "piped words")
    parts += ("a.md", "a.md holds words", "Which fruit?")
    assert re.search(".*".join(map(re.escape, parts)), said[0], re.DOTALL)
    assert done.json()["prompt_tokens"] == tokens(model, said[0])


@pytest.mark.long
def test_seed_repeats_draws(kvlite: Run, model: Path, text: Path) -> None:
    flags = ("ask", text, "What?", "--model", model, "--max-tokens", "12", "--temperature", "1")
    drawn = [kvlite(*flags, *seed).out for seed in (("--seed", 1), ("--seed", 1), ("--seed", 2))]
    assert drawn[0] == drawn[1] != drawn[2]
    assert kvlite(*flags).out != kvlite(*flags).out


@pytest.mark.long
def test_stop_texts(kvlite: Run, model: Path, text: Path) -> None:
    flags = ("ask", text, "What?", "--model", model, "--max-tokens", "16", "--json")
    flags += ("--temperature", "1", "--seed", "3")
    whole = kvlite(*flags).json()["answer"]
    early, late = whole[20:24], whole[40:44]
    stopped = kvlite(*flags, "--stop", late, "--stop", early).json()
    assert stopped["answer"] == whole[: whole.index(early)]
    assert stopped["finish_reason"] == "stop"


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_an_encoding_that_lacks_characters(model: Path, text: Path, flags: list[str]) -> None:
    command = [sys.executable, "-m", "kvlite", "ask", text, "What?", "--model", model, *flags]
    draws = ["--temperature", "1", "--seed", "1", "--max-tokens", "60"]
    done = subprocess.run(
        [*map(str, command), *draws],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert done.returncode == 0 and done.stdout.isascii()
    if flags:
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
    assert kvlite(*asked, "--quiet").err == ""
