"""Bad input gets one sentence that names the value and the remedy, and exit code 2, before a weight
is read; what no model could do is refused before a document is."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvlite.documents import opening
from kvlite.model.embedded import embedded_ggufs
from tests.cli.conftest import LIMIT, Refused, Run, one_sentence, tokens
from tests.configs import PUBLISHED
from tests.documents.files import encrypted, pdf
from tests.gguf_files import write_gguf

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
ZEROS = "0" * 400
# What is told to leave out of `kvlite ask`, and what the sentence names.
SETTINGS: list[tuple[str, str, str]] = [
    ("--method magic", "'magic'", "choose from full,"),
    ("--method snapkv:depth=3", "'depth'", "it has pool"),
    ("--method snapkv:pool=4", "snapkv:pool=4", "must be an odd number"),
    ("--method snapkv --budget 8", "budget of 8", "give it at least"),
    ("--method kvx:omega=1,omega=2", "'omega' twice", "give it once"),
    ("--method kvx:omega=\uff12", "kvx:omega='\uff12'", "is not a number"),
    (f"--method kvx:omega=1{ZEROS}", "kvx:omega='1000", "is not a number"),
    ("--method " + "simlayerkv+" * 1000 + "kvx", "", "holds too many methods"),
    ("--method " + "x" * 1_000_000, "unknown method 'xxx", "choose from full"),
    ("--method lminfinite --recall ram", "lminfinite", "use --recall off"),
    ("--method kvx --kv-bits kivi4 --budget 64", "kivi4", "use --kv-bits 4"),
    ("--kv-bits 3", "'3'", "8, 4, 2, or keys and values apart"),
    ("--encoding windows1299", "'windows1299'", "such as windows-1254"),
    ("--temperature nan", "--temperature nan", "between 0 and 10"),
    ("--temperature warm", "'--temperature'", "'warm' (see `kvlite "),
    ("--top-k \u0663", "'--top-k'", "integer"),
    ("--top-k 99999999999999999999", "--top-k 99999999999999999999", "between 0 and"),
    ("--max-tokens 0", "--max-tokens 0", "at least 1"),
    ("--weights int3", "--weights 'int3'", "auto, fp32, bf16, fp16, gguf, int8, int4, nf4"),
    ("--measure guess", "--measure 'guess'", "process, tensors"),
    ("--device toaster", "'toaster'", "use auto, cpu or cuda"),
    ("--device cuda:\u0663", "unknown device", "use auto, cpu or cuda"),
    ("--budget -5", "--budget -5", "give more than 0"),
    ("--budget 150%", "--budget 150%", "give up to 100%"),
    ("--budget 1.5", "--budget '1.5'", "whole number of entries"),
    ("--budget \u0663MiB", "a share (25%)", "is not a budget"),
    ("--budget 12furlongs", "--budget '12furlongs'", "bytes (64MiB)"),
    ("--budget 1B", "--budget 1B", "64MiB"),
    ("--budget 2", "too small for spans", ""),  # by the default method's name, not its options
    ("--vram \uff12GiB", "--vram '\uff12GiB'", "is not a size"),
    ("--vram 0B", "--vram '0B'", "24GiB"),
    ("--recall-limit much", "--recall-limit 'much'", "8GiB"),
    ("--checkpoint-limit=-1", "--checkpoint-limit '-1'", "2GiB"),
    ("--stream tape", "'tape'", "off, ram, disk"),
]
# Likewise, after a document was looked at, or of `ask` alone.
MORE: list[tuple[str, str, str]] = [
    ("--device cuda:3", "'cuda:3'", "--device cpu"),
    ("--stream ram --device cpu", "--stream ram", "use --stream disk"),
    ("--stream disk --weights nf4", "nf4", "leave --weights out"),
    ("--budget 2KiB", "--budget 2048 bytes is too little", "spans"),
    ("--vram 3MiB", "needs at least", "3.0 MiB"),
    ("--model gpt-17", "'gpt-17'", "such as Qwen/Qwen3-8B"),
    ("--model=", "''", "such as Qwen/Qwen3-8B"),
    ("--model ./no/folder", "'./no/folder'", "a folder"),
    ("--model ~nosuchuser/m", "~nosuchuser/m", "a folder"),
    ("--model nobody/nothing-1b", "nobody/nothing-1b", "or give a folder"),
    ("--colour red", "--colour", "see `kvlite ask --help`"),
    ("--budget", "--budget", "requires an argument"),
]


@pytest.mark.parametrize(("flags", "value", "remedy"), SETTINGS)
def test_settings_that_fit_no_model(
    refused: Refused,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    value: str,
    remedy: str,
) -> None:
    def read_document(*_: object, **__: object) -> None:
        raise AssertionError("a document would be read")

    monkeypatch.setattr("kvlite.cli.opening.read_document", read_document)
    for command in (["ask", text, "What?"], ["chat", text]):
        refused([*command, *flags.split()], value, remedy)


@pytest.mark.parametrize(("flags", "value", "remedy"), MORE)
@no_gpu
def test_settings_that_do_not_fit(
    refused: Refused, model: Path, text: Path, flags: str, value: str, remedy: str
) -> None:
    refused(["ask", text, "What?", "--model", model, *flags.split()], value, remedy)


@pytest.mark.parametrize(
    ("name", "content", "remedy"),
    [
        ("none.txt", None, "check the path"),
        ("", None, "name one of the files in it"),
        ("blank.md", b" \n\n", "name a file that has some"),
        ("program.txt", b"\x7fELF\0\1\2", "convert it to text"),
        ("locked.pdf", encrypted(pdf(["secret"]), "password", "AES-256"), "qpdf --decrypt"),
        ("broken.pdf", pdf(["one", "two"])[:400], "repair it"),
        ("scanned.pdf", pdf([None, None]), "run OCR"),
        ("none.kv", None, "check the path"),
        ("it.kv", b"Not at all a conversation, but what someone wrote", "not a kvlite snapshot"),
    ],
)
def test_bad_document(
    refused: Refused, tmp_path: Path, text: Path, name: str, content: bytes | None, remedy: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    refused(["ask", path, "What?"], path, remedy)
    both = "by itself" if path.suffix == ".kv" else remedy
    refused(["ask", text, path, "What?", "--json", "--quiet"], path, both)


@pytest.mark.parametrize("args", [[], ["-"], ["-", " \n"], [__file__, "-", ""]])
def test_no_file_or_no_question(refused: Refused, args: list[str]) -> None:
    refused(["ask", *args], "give a file and a question", "kvlite ask report.pdf")


def test_what_is_no_file_question_or_command(refused: Refused, text: Path) -> None:
    refused(["ask", "What?"], "no file 'What?'", "check the path")
    refused(["ask", text, " \n"], "is empty", 'kvlite ask report.pdf "')
    refused(["answer", "text.txt", "What?"], "'answer'", "see `kvlite --help`")
    refused(["methods", "snapkw"], "'snapkw'", "choose from full")


@pytest.mark.parametrize("stream", ["stdin", "stdout"])
def test_closed_streams(model: Path, text: Path, stream: str) -> None:
    file, close = ("-", "<&-") if stream == "stdin" else (str(text), ">&-")
    command = f"{sys.executable} -m kvlite ask {file} What? --model {model} {close}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"kvlite: standard (in|out)put is closed: .*\n", done.stderr)


def test_bytes_that_are_no_text_in_arguments(kvlite: Run, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "n\udcff.txt"
    path.write_text("Some words.")
    done = kvlite("ask", path, "\udcff what", "--model", model, "--max-tokens", "2", "-q")
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize(
    ("config", "flaw", "remedy"),
    [
        (None, "no config.json", "give a folder saved by transformers"),
        ('{"model_type": "gpt2"}', "'gpt2'", "has no hidden_size"),
        ("{", "config.json", "not readable JSON"),
        ("[1]", "config.json", "not a JSON object"),
        (json.dumps(PUBLISHED["Llama-3.1-8B"]), "pytorch_model.bin", "no .safetensors weights"),
    ],
)
def test_bad_model_folder(
    refused: Refused, text: Path, tmp_path: Path, config: str | None, flaw: str, remedy: str
) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    refused(["ask", text, "What?", "--model", tmp_path], tmp_path, flaw, remedy)


def test_weights_that_cannot_be_had(
    refused: Refused, model: Path, text: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    ask = ["ask", text, "What?", "--model", folder, "--weights"]
    four_bits = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    mixtral = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    for changes, weights, said in (
        ({"quantization_config": four_bits}, "bf16", ("--weights bf16", "nf4", "leave --weights")),
        ({"quantization_config": four_bits}, "nf4", ("--weights nf4", "leave --weights out")),
        (mixtral, "int4", ("--weights int4", "'mixtral'", "use nf4")),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        refused([*ask, weights], folder, *said)


@pytest.mark.parametrize(
    ("name", "content", "remedy"),
    [
        ("notes.txt", b"some text", "give the model's folder"),
        ("empty.gguf", b"", "its first bytes are not 'GGUF'"),
        ("head.gguf", 2000, "download it again"),
        ("half.gguf", 4 << 20, "download it again"),
    ],
)
def test_bad_model_file(
    refused: Refused, text: Path, tmp_path: Path, name: str, content: bytes | int, remedy: str
) -> None:
    path = tmp_path / name
    path.write_bytes(
        embedded_ggufs()[0].read_bytes()[:content] if isinstance(content, int) else content
    )
    refused(["ask", text, "What?", "--model", path], path, remedy)


def test_a_schema_that_takes_too_long(refused: Refused, text: Path) -> None:
    schema = {"type": "integer", "multipleOf": 9_999_991}
    asked = ["ask", text, "What?", "--schema", json.dumps(schema)]
    refused(asked, "--schema", "takes more than 2 s", "give a simpler one")


# Each fails in another way, two of them before anything is asked.
FAULTY = ["tool {{ undefined_fn() }}", "{% if %}", "{{ 1 // 0 }}", "{{ raise_exception('no') }}"]


def test_a_faulty_chat_template_is_a_sentence_and_another_can_be_given(
    kvlite: Run, model: Path, text: Path, tmp_path: Path
) -> None:
    folder, own = Path(shutil.copytree(model, tmp_path / "faulty")), tmp_path / "own.jinja"
    text.write_text("ab")
    asked = ("ask", text, "What rose?", "--max-tokens", 2, "--model")
    for source in FAULTY:
        (folder / "chat_template.jinja").write_text(source)
        own.write_text(source)
        write_gguf(tmp_path / "a.gguf", fields={"tokenizer.chat_template": source})
        for given in ((folder,), (model, "--chat-template", own), (tmp_path / "a.gguf",)):
            done = kvlite(*asked, *given)
            assert done.code == 2, done.err
            assert "Traceback" not in done.err and done.err.count("\n") <= 4
            assert "chat template" in done.err or "--chat-template" in done.err
    own.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    done = kvlite(*asked, folder, "--chat-template", own)
    assert done.code == 0, done.err


def test_a_large_file_is_refused_by_its_size(
    refused: Refused, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "long.txt"
    with path.open("wb") as file:
        file.write(b"It was a dark and stormy night. ")
        file.truncate(40 << 20)
    monkeypatch.setattr(opening, "_PIECE", 1 << 16)
    pieces, read = opening._pieces, []

    def watched(path: str, file: object) -> object:
        for piece in pieces(path, file):  # type: ignore[arg-type]
            read.append(len(piece))
            yield piece

    monkeypatch.setattr(opening, "_pieces", watched)
    for command in (["ask", path, "What?"], ["plan", "--doc", path]):
        refused([*command, "--model", model], "long.txt has 10,485,760 characters or more")
    assert 0 < sum(read) <= 8 << 16


def test_a_long_text_is_refused_before_weights_are_read(
    refused: Refused, model: Path, text: Path
) -> None:
    text.write_text("It was a dark and stormy night. " * 500)
    words = ("tokens of text.txt do not fit this model", f"trained for {LIMIT}", "split it")
    for command in (["ask", text, "What?"], ["ask", text], ["chat", text], ["read", text]):
        refused([*command, "--model", model], *words)


@pytest.mark.long
def test_a_text_that_only_its_template_makes_too_long(
    kvlite: Run, model: Path, text: Path, said: list[str]
) -> None:
    text.write_text("One word follows another. " * 97)
    done = kvlite("ask", text, "What?", "--model", model)
    read = tokens(model, said[0])
    assert read > LIMIT and "compact" not in done.err
    one_sentence(done, f"{read:,} tokens", f"trained for {LIMIT}", "split it", "--model")
    done = kvlite("ask", text, "What?", "--model", model, "--beyond-context", "compact")
    one_sentence(done, "split it", "compact forgets earlier messages, and no part of a new one")
