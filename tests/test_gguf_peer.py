# ruff: noqa: RUF001
"""Tokenizers of GGUF headers against llama.cpp itself, by its wheel, which pip fetches."""

import json
import random
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from kvlite.model.gguf.header import read_header
from kvlite.model.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from kvlite.model.gguf.tokenizer import write_tokenizer
from tests.gguf_vocabularies import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN
from tests.judges.make import ENGINE, unpacked

pytestmark = pytest.mark.long
TEXTS = [
    *("Hello world", "  Hello  world   ", "a\n\nb\n", "\t\ttabs  \n  \n x \r\n\r\nend  ", "   "),
    *("1234567890 12 345", "a1b22c333 x5", "4 ½ and ² or 10³", "3.14 1,000 1e-10 0xFF"),
    *("it's they'd don't 's ' tis", "日本語 漢字カタカナ、ひらがな。中文", "한국어 가나다ㄱㄴ"),
    *("مرحبا بالعالم ؟، ۔", "שלום עולם", "👩‍👩‍👧 🙂🏽 🇩🇪 ❤️", "!!! ... ?! --- ==> {}[]() $100 €5"),
    *("a.b,c;d:e/f\\g|h~i`j^k", "path/to/file.py?a=b&c=d", "foo()\n\n    return x\n\t}\n", "x\n y"),
    *("\n", "\n\n\n", " \n \n", "a\r\nb\rc", "“quotes” ‘single’ — …！？：；，", "ー・ｱｲｳ"),
    *("123_456 __a__", "©®™ ∑∫√ ← ₂", "«guillemets» ¿qué?", "mixed 漢字kanji123 テスト12345"),
    *("…。，、।۔،(|)", "1 22 333"),
]
# Where llama.cpp only approximates the published rules, or knows ASCII's digits and words alone.
HARDER = [
    *("I'm HE'S WE'LL DON'T it's", "camelCase ABCdef HTTPServer", "ÀÉÎ Straße ŒUVRE"),
    *("ПРИВЕТ приВЕТ", "नमस्ते दुनिया", "ภาษาไทย", "e\u0301a\u0300 n\u0303", "٣٤٥٦ १२३४"),
    *("Ⅻ ①②③④", "123é １２３４", "𐐀𐐨 ა Ა ա"),
]
APPROXIMATED = (
    *("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "granite-embed-multi-97m", "tekken"),
    *("tiny_aya", "cohere2moe", "kimi-k2", "youtu", "superbpe"),
)
SERVER = """
import json, os, sys, urllib.request
sys.path[0] = sys.argv[1]
import xllamacpp
texts, found = json.load(sys.stdin), {}
for name in sys.argv[2:]:
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = name, 64, 1
    params.warmup, params.verbosity = False, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    found[name] = []
    for text in texts:
        asked = {"content": text, "add_special": False, "parse_special": True}
        request = urllib.request.Request(
            server.listening_address + "/tokenize",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        found[name].append(json.load(urllib.request.urlopen(request))["tokens"])
print("IDS" + json.dumps(found), flush=True)
os._exit(0)
"""
ALIKE: dict[PreTokenizer, list[str]] = {}
"""Names of the same rules."""
for name, rules in PRE_TOKENIZERS.items():
    ALIKE.setdefault(rules, []).append(name)


@cache
def trained(raw: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tokens and merges that join whatever is next to each other in the texts, so that every cut
    shows."""
    tokenizer = Tokenizer(models.BPE())
    alphabet = list[str]()
    texts = [*TEXTS, *HARDER]
    if raw:
        texts = [text.replace(" ", SPACE).replace("\n", "") for text in texts]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    rnd = random.Random(0)
    words = [word for text in texts for word in text.split(SPACE if raw else " ") if word]
    texts += [(SPACE if raw else " ").join(rnd.sample(words, 3)) for _ in range(300)]
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256) if raw)]
    trainer = trainers.BpeTrainer(
        vocab_size=6000,
        min_frequency=1,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [f"{left} {right}" for left, right in model["merges"]]
    if raw:
        lines = ["\n" * count for count in range(1, 9)]
        tokens += lines
        merges += [f"{a} {b}" for line in lines for a in lines for b in lines if a + b == line]
    return (*tokens,), (*merges,)


def write_model(path: Path, pre: str) -> None:
    tokens, merges = trained(PRE_TOKENIZERS[pre].raw)
    kinds = [BYTE if token.startswith("<0x") and len(token) == 6 else NORMAL for token in tokens]
    kinds[:3] = [UNKNOWN, CONTROL, CONTROL]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens])
    writer.add_token_types(kinds)
    writer.add_token_merges([*merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {f"blk.0.{name}": (32, 32) for name in square}
    shapes |= {"token_embd": (len(tokens), 32), "output_norm": (32,)}
    shapes |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def engine() -> Path:
    """The folder of llama.cpp's wheel."""
    try:
        return unpacked(ENGINE)
    except subprocess.CalledProcessError:
        pytest.skip("pip cannot fetch llama.cpp's engine")


@pytest.mark.parametrize("names", ALIKE.values(), ids=lambda names: names[0])
def test_ids_are_those_of_llama_cpp(names: list[str], engine: Path, tmp_path: Path) -> None:
    paths = {name: tmp_path / f"{name}.gguf" for name in names}
    for name, path in paths.items():
        write_model(path, name)
    approximated = {*names} & {*APPROXIMATED}
    assert not approximated or approximated == {*names}
    texts = TEXTS if approximated else [*TEXTS, *HARDER]
    ran = subprocess.run(
        [sys.executable, "-c", SERVER, str(engine), *map(str, paths.values())],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        timeout=120,
    )
    line = next(line for line in ran.stdout.splitlines() if line.startswith("IDS"))
    expected = json.loads(line[3:])
    for path in paths.values():
        write_tokenizer(read_header(path), tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
        found = tokenizer(texts, add_special_tokens=False)["input_ids"]
        theirs = dict(zip(texts, expected[str(path)], strict=True))
        assert dict(zip(texts, found, strict=True)) == theirs, path.stem
