"""Whatever a GGUF header, a safetensors header or a config says: one sentence, at once."""

import json
import os
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvlite.config.child_process import run_in_child
from kvlite.errors import KvliteError, ModelError
from kvlite.model.files import fingerprint
from kvlite.model.gguf.folder import gguf_folder
from kvlite.model.gguf.header import read_header
from kvlite.model.shape import read_config, read_shape
from tests.configs import PUBLISHED
from tests.gguf_files import write_gguf

many = settings(max_examples=400, phases=[Phase.generate], suppress_health_check=[*HealthCheck])
HUGE = [0, 1, 7, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]


def told(work: Callable[[], object]) -> None:
    """Done, or refused in one sentence."""
    try:
        work()
    except KvliteError as error:
        said = str(error)
        assert "\n" not in said and len(said) < 1000


# --- GGUF headers --------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def header(
    *fields: bytes, tensors: bytes = b"", count: int = 1, version: int = 3, said: int | None = None
) -> bytes:
    number = len(fields) if said is None else said
    return b"GGUF" + struct.pack("<IQQ", version, count, number) + b"".join(fields) + tensors


def listed(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


ARCHITECTURE = field("general.architecture", 8, text("llama"))
TENSOR = text("t") + struct.pack("<I", 1) + struct.pack("<Q", 1) + struct.pack("<IQ", 0, 0)
ODD_HEADERS = {
    "a text of 2^63 bytes": header(struct.pack("<Q", 2**63)),
    "a text beyond its end": header(field("a", 8, struct.pack("<Q", 1000))),
    "bytes that are no text": header(field("a", 8, struct.pack("<Q", 2) + b"\xff\xfe")),
    "a list of 2^63 bytes": header(field("a", 9, listed(0, 2**63))),
    "a list of 2^63 texts": header(field("a", 9, listed(8, 2**63))),
    "8 million bytes that are not there": header(field("a", 9, listed(0, 8 << 20))),
    "lists of lists": header(field("a", 9, listed(9, 1) * 50_000)),
    "a value of no type": header(field("a", 99, b"")),
    "2^60 fields": header(said=2**60),
    "2^60 tensors": header(ARCHITECTURE, count=2**60),
    "version 9": header(ARCHITECTURE, version=9),
    "a field twice": header(ARCHITECTURE, ARCHITECTURE, tensors=TENSOR),
    "alignment 0": header(field("general.alignment", 4, struct.pack("<I", 0)), tensors=TENSOR),
    "alignment 3": header(field("general.alignment", 4, struct.pack("<I", 3)), tensors=TENSOR),
    "alignment of a text": header(field("general.alignment", 8, text("a")), tensors=TENSOR),
    "architecture 7": header(field("general.architecture", 4, b"\7\0\0\0"), tensors=TENSOR),
    "no architecture": header(tensors=TENSOR + b"\0" * 100),
    "2^31 dimensions": header(ARCHITECTURE, tensors=text("t") + struct.pack("<I", 2**31)),
    "a tensor of 2^80 numbers": header(
        ARCHITECTURE, tensors=text("t") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0)
    ),
    "a tensor beyond the end": header(
        ARCHITECTURE, tensors=text("t") + struct.pack("<IQIQ", 1, 1, 0, 2**63)
    ),
    "a tensor twice": header(ARCHITECTURE, tensors=TENSOR * 2 + b"\0" * 100, count=2),
}


@pytest.mark.parametrize("name", ODD_HEADERS)
def test_an_odd_gguf_header_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(ODD_HEADERS[name])
    with pytest.raises(ModelError, match=r"odd\.gguf is truncated or damaged \(.+\): download"):
        read_header(path)


def test_files_that_are_no_whole_model_are_refused(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(header(ARCHITECTURE, count=0))
    with pytest.raises(ModelError, match=r"a\.gguf has no weights: get the whole file"):
        gguf_folder(path)
    for kind in (4, 97, 999):
        tensors = text("t") + struct.pack("<IQIQ", 1, 1, kind, 0)
        path.write_bytes(header(ARCHITECTURE, tensors=tensors))
        with pytest.raises(ModelError, match=rf"'t' are of type {kind}, which llama.cpp does not"):
            gguf_folder(path)


SIZES = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
CONFIG = dict(
    zip(
        SIZES,
        ("num_hidden_layers", "head_dim", "intermediate_size", "num_attention_heads"),
        strict=True,
    )
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVLITE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", [None, 0, 2**32 - 1])
def test_sizes_of_no_model_in_a_gguf_header_are_refused(
    key: str, value: int | None, tmp_path: Path, cache: Path
) -> None:
    """Before transformers makes up what is not there: a million layers, or those of its default."""
    path = tmp_path / "a.gguf"
    write_gguf(path)
    content, name = path.read_bytes(), f"llama.{key}".encode()
    at = content.index(name)
    if value is None:
        content = content.replace(name, name[::-1])
    else:
        after = at + len(name) + 4
        content = content[:after] + struct.pack("<I", value) + content[after + 4 :]
    path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"llama\.{key}|{CONFIG[key]}|do not fit what it says"):
        gguf_folder(path, with_tokenizer=False)
    assert not [*cache.glob("gguf/*/gguf.json")]


# --- safetensors headers -------------------------------------------------------------------------

PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(HUGE),
    st.integers(-10, 10),
    st.floats(),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
)
ODD = st.one_of(PLAIN, st.lists(PLAIN, max_size=3), st.dictionaries(st.text(), PLAIN, max_size=3))


def as_safetensors(content: bytes, length: int | None = None, data: bytes = b"\0" * 64) -> bytes:
    return struct.pack("<Q", len(content) if length is None else length) + content + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0",
        as_safetensors(b"[]"),
        as_safetensors(b"null"),
        as_safetensors(b"[" * 90_000),
        as_safetensors(b"{}", 2**63),
        as_safetensors(b"{}", 90_000_000),
        as_safetensors(b'{"a": 5}'),
        as_safetensors(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1, 2]}}'),
        as_safetensors(b'{"a": {"dtype": "F32", "shape": [1e400], "data_offsets": [0, 4]}}'),
        as_safetensors(b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}'),
        as_safetensors(b'{"a": {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]}}'),
        as_safetensors(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [NaN, 4]}}'),
        as_safetensors(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.5, 4.5]}}'),
    ],
)
def test_an_odd_safetensors_header_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged, get it again"):
        fingerprint(tmp_path)


@pytest.mark.long
def test_safetensors_headers_bent_at_random(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    whole = {
        "a": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
        "b": {"dtype": "BF16", "shape": [16], "data_offsets": [32, 64]},
    }

    @many
    @given(
        st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), ODD, max_size=2),
        st.one_of(st.just(whole), ODD),
        st.one_of(st.none(), st.sampled_from(HUGE)),
        st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), max_size=3),
    )
    def bend(
        about: dict[str, Any], base: Any, length: int | None, bytes_: list[tuple[int, int]]
    ) -> None:
        if isinstance(base, dict) and isinstance(base.get("a"), dict):
            base = {**base, "a": {**base["a"], **about}}
        content = bytearray(json.dumps(base).encode())
        for at, byte in bytes_:
            if at < len(content):
                content[at] = byte
        path.write_bytes(as_safetensors(bytes(content), length))
        told(lambda: fingerprint(tmp_path))

    bend()


# --- configs -------------------------------------------------------------------------------------


@pytest.mark.long
def test_configs_changed_at_random(tmp_path: Path) -> None:
    """Those that are taken have a shape, or transformers says in one sentence why not."""
    path = tmp_path / "config.json"
    small = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
    }

    @many
    @given(
        st.sampled_from(sorted(PUBLISHED)),
        st.integers(0, 2**32),
        st.lists(ODD, min_size=1, max_size=3),
        st.booleans(),
    )
    def change(name: str, seed: int, values: list[Any], lose: bool) -> None:
        config = {**PUBLISHED[name], **small, "pad_token_id": 0}
        chance = random.Random(seed)
        for value in values:
            key = chance.choice(sorted(config))
            if lose:
                config.pop(key)
            else:
                config[key] = value
        path.write_text(json.dumps(config))
        told(lambda: read_config(tmp_path))
        told(lambda: read_shape(tmp_path))

    change()


@pytest.mark.skipif(sys.platform == "win32", reason="no limits there")
def test_absurd_claims_take_no_memory(tmp_path: Path) -> None:
    """A hundred megabytes that a header says are a list of single bytes."""
    path = tmp_path / "list.gguf"
    path.write_bytes(header(field("a", 9, listed(0, 100 << 20))))
    os.truncate(path, 100 << 20)
    with pytest.raises(ModelError, match=r"damaged \(a list of 104,857,600 values\)"):
        run_in_child(read_header, path, memory=100 << 20)
