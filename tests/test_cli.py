"""The command line as users meet it: refusals in one sentence, answers, help, Ctrl-C."""

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvlite import __version__
from kvlite.cli.main import main
from kvlite.cli.screen import ReadingBar
from kvlite.conversation import Conversation
from kvlite.engine.text import TextStream
from kvlite.methods import METHODS
from kvlite.model.source import _embedded_gguf, find_model
from kvlite.settings import EMBEDDED_MODEL, Settings
from tests.conftest import SIZES
from tests.test_documents import Stdin, encrypted, pdf

LIMIT = 512
INTERRUPTED = 130
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@dataclass(frozen=True)
class Done:
    """What a run of the program left."""

    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        """The one JSON object on standard output, one line long."""
        assert self.out.endswith("}\n")
        assert self.out.count("\n") == 1
        return dict(json.loads(self.out))


Run = Callable[..., Done]
Refused = Callable[..., None]


@pytest.fixture
def kvlite(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    def run(*args: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["kvlite", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return Done(int(ended.value.code or 0), out, err)

    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")  # main sets it, this restores it
    monkeypatch.setenv("COLUMNS", "80")
    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with the embedded model's tokenizer, loaded in no time."""
    folder = tmp_path_factory.mktemp("tiny")
    for file in find_model(EMBEDDED_MODEL).iterdir():
        if "token" in file.name or "template" in file.name:
            shutil.copy(file, folder)
    sizes = {"vocab_size": 49152, "hidden_size": 32, "max_position_embeddings": LIMIT}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes})).save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A document of some 300 tokens."""
    path = tmp_path / "text.txt"
    path.write_text("The cat sat on the mat and the dog lay by the door. " * 20)
    return path


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What conversations were told, in order."""
    heard: list[str] = []
    stream = Conversation.stream

    def listen(self: Conversation, text: str, **given: Any) -> Any:
        heard.append(text)
        return stream(self, text, **given)

    monkeypatch.setattr(Conversation, "stream", listen)
    return heard


def tokens(model: Path, message: str) -> int:
    """Length of a user's message in the model's chat template."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    talk = [{"role": "user", "content": message}]
    prompt = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    return len(tokenizer.encode(prompt, add_special_tokens=False))


def one_sentence(done: Done, *named: object) -> None:
    """One line on standard error, which names the value and the remedy; exit code 2."""
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(r"kvlite: .{20,}\n", done.err)
    for part in named:
        assert str(part) in done.err


@pytest.fixture
def refused(kvlite: Run, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Checks that arguments are refused, before a weight is read."""

    def load_model(*_: object, **__: object) -> None:
        raise AssertionError("weights would be read")

    def refused(args: Sequence[object], *named: object) -> None:
        monkeypatch.setattr("kvlite.runner.load_model", load_model)
        one_sentence(kvlite(*args), *named)

    return refused


# Bad input


@pytest.mark.parametrize(
    ("name", "content", "remedy"),
    [
        ("none.txt", None, "check the path"),
        ("", None, "name one of the files in it"),
        ("empty.txt", b"", "name a file that has some"),
        ("blank.md", b" \n\n", "name a file that has some"),
        ("program.txt", b"\x7fELF\0\1\2", "convert it to text"),
        ("locked.pdf", encrypted(pdf(["secret"]), "password", "AES-256"), "qpdf --decrypt"),
        ("broken.pdf", pdf(["one", "two"])[:400], "repair it"),
        ("scanned.pdf", pdf([None, None]), "run OCR"),
    ],
)
def test_bad_document(
    refused: Refused, tmp_path: Path, text: Path, name: str, content: bytes | None, remedy: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    refused(["ask", path, "What?"], path, remedy)
    refused(["ask", text, path, "What?", "--json", "--quiet"], path, remedy)


@pytest.mark.parametrize("args", [[], ["What?"], [__file__], [__file__, ""], [__file__, " \n"]])
def test_no_file_or_no_question(refused: Refused, args: list[str]) -> None:
    refused(["ask", *args], "give a file and a question", "kvlite ask report.pdf")


@pytest.mark.parametrize(
    ("flags", "value", "remedy"),
    [
        ("--method magic", "'magic'", "choose from full,"),
        ("--method snapkv:depth=3", "'depth'", "it has window"),
        ("--method snapkv:pool=4", "snapkv:pool=4", "must be an odd number"),
        ("--method snapkv --budget 8", "budget of 8", "give it at least"),
        ("--temperature -1", "--temperature -1", "between 0 and 10"),
        ("--temperature nan", "--temperature nan", "between 0 and 10"),
        ("--temperature warm", "'--temperature'", "'warm' (see `kvlite ask --help`)"),
        ("--top-p 2", "--top-p 2", "between 0 and 1"),
        ("--top-k 1.5", "'--top-k'", "'1.5' (see `kvlite ask --help`)"),
        ("--max-tokens 0", "--max-tokens 0", "at least 1"),
        ("--dtype int3", "--dtype 'int3'", "auto, float32, bfloat16, float16"),
        ("--measure guess", "--measure 'guess'", "process, tensors"),
        ("--device toaster", "'toaster'", "use auto, cpu or cuda"),
        ("--device mps", "'mps'", "use auto, cpu or cuda"),
        pytest.param("--device cuda", "'cuda'", "--device cpu", marks=no_gpu),
        pytest.param("--device cuda:3", "'cuda:3'", "--device cpu", marks=no_gpu),
        ("--budget 0", "--budget 0 ", "give more than 0"),
        ("--budget -5", "--budget -5", "give more than 0"),
        ("--budget 0%", "--budget 0%", "give more than 0"),
        ("--budget 150%", "--budget 150%", "give up to 100%"),
        ("--budget 1.5", "--budget '1.5'", "whole number of entries"),
        ("--budget abc", "--budget 'abc'", "a share (25%)"),
        ("--budget 12furlongs", "--budget '12furlongs'", "bytes (64MiB)"),
        ("--model gpt-17", "'gpt-17'", "such as Qwen/Qwen3-8B"),
        ("--model=", "''", "such as Qwen/Qwen3-8B"),
        ("--model ./no/folder", "'./no/folder'", "a folder"),
        ("--model nobody/nothing-1b", "nobody/nothing-1b", "or give a folder"),
        ("--colour red", "--colour", "see `kvlite ask --help`"),
        ("--budget", "--budget", "requires an argument"),
    ],
)
def test_bad_setting(refused: Refused, text: Path, flags: str, value: str, remedy: str) -> None:
    refused(["ask", text, "What?", *flags.split()], value, remedy)


def test_unknown_command(refused: Refused) -> None:
    refused(["answer", "text.txt", "What?"], "'answer'", "see `kvlite --help`")
    refused(["methods", "snapkv"], "snapkv", "see `kvlite methods --help`")


@pytest.mark.parametrize(
    ("config", "flaw", "remedy"),
    [
        (None, "no config.json", "give a folder saved by transformers"),
        ('{"model_type": "gpt2"}', "'gpt2'", "it runs llama, "),
        ("{", "config.json", "not readable JSON"),
        ("[1]", "config.json", "not a JSON object"),
        ('{"model_type": "llama"}', "pytorch_model.bin", "no .safetensors weights"),
    ],
)
def test_bad_model_folder(
    refused: Refused, text: Path, tmp_path: Path, config: str | None, flaw: str, remedy: str
) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    refused(["ask", text, "What?", "--model", tmp_path], tmp_path, flaw, remedy)


@pytest.mark.parametrize(
    ("name", "content", "remedy"),
    [
        ("notes.txt", b"some text", "give the model's folder"),
        ("empty.gguf", b"", "its first bytes are not 'GGUF'"),
        ("garbage.gguf", b"\0garbage" * 1000, "its first bytes are not 'GGUF'"),
        ("head.gguf", 2000, "download it again"),
        ("half.gguf", 4 << 20, "download it again"),
    ],
)
def test_bad_model_file(
    refused: Refused, text: Path, tmp_path: Path, name: str, content: bytes | int, remedy: str
) -> None:
    path = tmp_path / name
    path.write_bytes(
        _embedded_gguf().read_bytes()[:content] if isinstance(content, int) else content
    )
    refused(["ask", text, "What?", "--model", path], path, remedy)


def test_document_longer_than_the_model_knows(
    kvlite: Run, model: Path, tmp_path: Path, said: list[str]
) -> None:
    path = tmp_path / "long.txt"
    path.write_text("One word follows another. " * 300)
    done = kvlite("ask", path, "What?", "--model", model)
    read = tokens(model, said[0])
    assert read > LIMIT
    one_sentence(done, f"{read:,} tokens", f"trained for {LIMIT}", "split it", "--model")


# Answers


def test_json(kvlite: Run, model: Path, text: Path, said: list[str]) -> None:
    flags = ("--model", model, "--method", "snapkv:window=16", "--budget", "64")
    done = kvlite("ask", text, "What?", *flags, "--max-tokens", "8", "--json", "-q")
    answer = done.json()
    kinds = {
        **dict.fromkeys(("answer", "finish_reason", "model", "device", "dtype", "method"), str),
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
    assert re.fullmatch(rf"{read}.* · stopped at the length limit\n", plain.err)
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


def test_seed_repeats_draws(kvlite: Run, model: Path, text: Path) -> None:
    flags = ("ask", text, "What?", "--model", model, "--max-tokens", "12", "--temperature", "1")
    drawn = [kvlite(*flags, *seed).out for seed in (("--seed", 1), ("--seed", 1), ("--seed", 2))]
    assert drawn[0] == drawn[1] != drawn[2]
    assert kvlite(*flags).out != kvlite(*flags).out


def test_stop_texts(kvlite: Run, model: Path, text: Path) -> None:
    flags = ("ask", text, "What?", "--model", model, "--max-tokens", "16", "--json")
    flags += ("--temperature", "1", "--seed", "3")
    whole = kvlite(*flags).json()["answer"]
    early, late = whole[20:24], whole[40:44]
    stopped = kvlite(*flags, "--stop", late, "--stop", early).json()
    assert stopped["answer"] == whole[: whole.index(early)]
    assert stopped["finish_reason"] == "stop"


# Methods and help


def test_methods_as_json(kvlite: Run) -> None:
    done = kvlite("methods", "--json")
    rows = {row["name"]: row for row in done.json()["methods"]}
    assert list(rows) == list(METHODS)
    for name, row in rows.items():
        assert (row["summary"], row["paper"]) == (METHODS[name].summary, METHODS[name].paper)
        assert min(len(row["summary"]), len(row["paper"])) > 5
        assert row["frees_memory"] is (name != "full")
        assert row["options"] == {f.name: f.default for f in dataclasses.fields(METHODS[name])}
    assert (done.code, done.err) == (0, "")


def test_methods_as_a_table(kvlite: Run) -> None:
    done = kvlite("methods")
    names = re.findall(r"^│ (\w+) ", done.out, re.MULTILINE)
    assert names == list(METHODS)
    assert (done.code, done.err) == (0, "")


def test_help(kvlite: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    done = kvlite("--help")
    assert re.search(r"ask +Ask a question about", done.out)
    assert re.search(r"methods +List the ways", done.out)
    assert 'kvlite ask report.pdf "' in done.out
    assert (done.code, done.err) == (0, "")
    assert kvlite("--version") == Done(0, f"kvlite {__version__}\n", "")
    alone = kvlite()
    assert (alone.code, alone.out.split(), alone.err) == (2, done.out.split(), "")


def test_help_of_ask_shows_every_setting(kvlite: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    done = kvlite("ask", "--help")
    assert done.out.count("kvlite ask ") >= 4
    assert '| kvlite ask - "' in done.out
    shown = {line.split()[1]: line for line in done.out.splitlines() if "│ --" in line}
    for option in dataclasses.fields(Settings):
        about = option.metadata
        line = shown[about["flag"] or f"--{option.name.replace('_', '-')}"]
        assert about["help"].replace("`", "") in line.replace("`", "")
        for choice in about["choices"]:
            assert choice in line.replace(about["help"], "").partition("[default")[0]
    assert {"--json", "--quiet"} < set(shown)
    assert kvlite("methods", "--help").out.count("kvlite methods") == 2


@pytest.mark.parametrize("args", [["--help"], ["ask", "--help"], ["ask", "a", "b", "--top-p", "2"]])
def test_help_waits_for_no_library(args: list[str]) -> None:
    code = (
        f"import atexit, sys; sys.argv = {['kvlite', *args]}; from kvlite.cli.main import main; "
        "atexit.register(lambda: print({'torch', 'transformers'} & set(sys.modules))); main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.endswith("set()\n")


# Ctrl-C


def interrupted(module: str, owner: str, method: str, call: int, *args: object) -> Done:
    """The program in a process of its own, sent SIGINT at the given call of a method."""
    code = f"""
import signal
from {module} import {owner} as owner
before = owner.{method}
def watched(self, *args):
    self.calls = getattr(self, "calls", 0) + 1
    if self.calls == {call}:
        signal.raise_signal(signal.SIGINT)
    return before(self, *args)
owner.{method} = watched
from kvlite.cli.main import main
main()
"""
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True)
    return Done(done.returncode, done.stdout, done.stderr)


def test_interrupted_while_reading(model: Path, text: Path) -> None:
    args = ("ask", text, "What?", "--model", model, "--chunk", "64")
    done = interrupted("kvlite.cli.screen", "ReadingBar", "update", 2, *args)
    assert done == Done(INTERRUPTED, "", "Stopped while reading; nothing was answered.\n")


def test_interrupted_while_answering(kvlite: Run, model: Path, text: Path) -> None:
    args = ("ask", text, "What?", "--model", model)
    begun = kvlite(*args, "--max-tokens", "3").out
    done = interrupted("kvlite.engine.text", "TextStream", "push", 3, *args)
    assert (done.code, done.out) == (INTERRUPTED, begun)
    assert re.fullmatch(r"read .* · interrupted\n", done.err)


def test_interrupted_while_answering_in_json(
    kvlite: Run, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = TextStream.push

    def interrupt(self: TextStream, token: int) -> str:
        if len(self.ids) == 4:
            signal.raise_signal(signal.SIGINT)
        return push(self, token)

    monkeypatch.setattr(TextStream, "push", interrupt)
    before = signal.getsignal(signal.SIGINT)
    done = kvlite("ask", text, "What?", "--model", model, "--json")
    assert signal.getsignal(signal.SIGINT) is before
    answer = done.json()
    assert (done.code, done.err.count("\n")) == (INTERRUPTED, 0)
    assert (answer["finish_reason"], answer["generated_tokens"]) == ("interrupted", 5)
    assert answer["answer"]


def test_second_interrupt_waits_for_nothing(
    kvlite: Run, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def update(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("went on")

    monkeypatch.setattr(ReadingBar, "update", update)
    assert kvlite("ask", text, "What?", "--model", model) == Done(INTERRUPTED, "", "")


def test_interrupted_while_loading(
    kvlite: Run, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvlite.runner.load_model", interrupt)
    assert kvlite("ask", text, "What?") == Done(INTERRUPTED, "", "")
