"""Bad input gets one sentence that names the value and the remedy, and exit code 2."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvlite.model.embedded import embedded_ggufs
from tests.cli.conftest import LIMIT, Refused, Run, one_sentence, tokens
from tests.configs import PUBLISHED
from tests.documents.files import encrypted, pdf

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


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


@pytest.mark.parametrize("args", [[], ["-"], ["-", " \n"], [__file__, "-", ""]])
def test_no_file_or_no_question(refused: Refused, args: list[str]) -> None:
    refused(["ask", *args], "give a file and a question", "kvlite ask report.pdf")


def test_a_question_without_a_file(refused: Refused) -> None:
    refused(["ask", "What?"], "no file 'What?'", "check the path")


@pytest.mark.cases(6)
@pytest.mark.parametrize(
    ("flags", "value", "remedy"),
    [
        ("--method magic", "'magic'", "choose from full,"),
        ("--encoding windows1299", "'windows1299'", "such as windows-1254"),
        ("--method snapkv:depth=3", "'depth'", "it has pool"),
        ("--method snapkv:pool=4", "snapkv:pool=4", "must be an odd number"),
        ("--method snapkv --budget 8", "budget of 8", "give it at least"),
        ("--kv-bits 3", "'3'", "8, 4, 2, or keys and values apart"),
        ("--method kvx --kv-bits kivi4 --budget 64", "kivi4", "use --kv-bits 4"),
        ("--temperature -1", "--temperature -1", "between 0 and 10"),
        ("--temperature nan", "--temperature nan", "between 0 and 10"),
        ("--temperature warm", "'--temperature'", "'warm' (see `kvlite ask --help`)"),
        ("--top-p 2", "--top-p 2", "between 0 and 1"),
        ("--top-k 1.5", "'--top-k'", "'1.5' (see `kvlite ask --help`)"),
        ("--max-tokens 0", "--max-tokens 0", "at least 1"),
        ("--weights int3", "--weights 'int3'", "auto, fp32, bf16, fp16, gguf, int8, int4, nf4"),
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
    refused(["methods", "snapkw"], "'snapkw'", "choose from full")


def test_no_such_user(refused: Refused, text: Path) -> None:
    refused(["ask", text, "What?", "--model", "~nosuchuser/m"], "~nosuchuser/m", "a folder")


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
        ('{"model_type": "llama"}', "config.json", "has no hidden_size"),
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
        embedded_ggufs()[0].read_bytes()[:content] if isinstance(content, int) else content
    )
    refused(["ask", text, "What?", "--model", path], path, remedy)


@pytest.mark.long
def test_document_longer_than_the_model_knows(
    kvlite: Run, model: Path, tmp_path: Path, said: list[str]
) -> None:
    path = tmp_path / "long.txt"
    path.write_text("One word follows another. " * 97)
    done = kvlite("ask", path, "What?", "--model", model)
    read = tokens(model, said[0])
    assert read > LIMIT
    one_sentence(done, f"{read:,} tokens", f"trained for {LIMIT}", "split it", "--model")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 9_999_991},
        {"type": "object", "properties": {f"name{at}": {"type": "string"} for at in range(8000)}},
    ],
)
def test_a_schema_that_takes_too_long(refused: Refused, text: Path, schema: object) -> None:
    asked = ["ask", text, "What?", "--schema", json.dumps(schema)]
    refused(asked, "--schema", "takes more than 2 s", "give a simpler one")
