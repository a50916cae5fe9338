"""Files of kvlite's own that were cut, flipped, or made up: one error, that names the file."""

import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvlite.config.checked_file import Damaged, from_json, from_toml
from kvlite.config.settings import Settings
from kvlite.conversation import tensor_file as tensorfile
from kvlite.conversation.convert import open_library
from kvlite.conversation.entries import entries
from kvlite.conversation.file_info import about
from kvlite.conversation.library import Library
from kvlite.documents import Document
from kvlite.errors import KvliteError, SnapshotError
from kvlite.jobs.output import Written
from kvlite.model.calibration import Calibration, calibration_of, calibration_path
from kvlite.model.gguf.index import read_index
from kvlite.model.local_models import _missing
from kvlite.model.text_limit import text_limit_of
from kvlite.server.files import Files
from kvlite.server.refusals import Refusal

ROOT = Path(__file__).parents[1]
# Where text that is no file of kvlite's is parsed: what clients send; a program beside; the reader.
ELSEWHERE = {
    "kvlite/config/checked_file.py",
    "kvlite/config/plain_json.py",
    "kvlite/bench/peer_program.py",
}
# Pickles go between kvlite's own processes, and are in no file.
PICKLES = {"kvlite/config/child_process.py", "kvlite/jobs/cluster.py"}
DEEP = "[" * 100_000
VALUES: list[Any] = [
    *(None, True, 0, -1, 10**400, 1e308, float("nan"), float("inf"), "", "x", "\ud800", "9" * 5000),
    *([], {}, [[]], [None], [-1], {"x": 1}, json.loads("[" * 500 + "]" * 500)),
]


def places(plain: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(plain) if isinstance(plain, dict) else range(len(plain))
    for key in keys:
        yield plain, key
        if isinstance(plain[key], dict | list):
            yield from places(plain[key])


def spoiled(plain: Any) -> Iterator[str]:
    """JSON texts of a description with every value once each of the wrong ones, or missing."""
    for at in range(sum(1 for _ in places(plain))):
        for value in [*VALUES, ...]:
            copy = deepcopy(plain)
            owner, key = list(places(copy))[at]
            if value is ...:
                del owner[key]
            else:
                owner[key] = value
            yield json.dumps(copy)
    for value in VALUES:
        yield json.dumps(value)
    text = json.dumps(plain)
    yield from (text[:at] for at in range(0, len(text), 7))
    yield from (DEEP, '{"a":' * 50_000, "9" * 5000, "1e999", "", "\x00", '"\\ud800"')


def test_one_place_parses() -> None:
    found, pickles = set[str](), set[str]()
    for file in [*ROOT.glob("kvlite/**/*.py"), *ROOT.glob("app/**/*.py")]:
        name, text = file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")
        if re.search(r"\bjson\.loads?\b|\btomllib\b|\.json\(\)\[", text):
            found.add(name)
        if re.search(r"\bpickle\.loads?\b|\btorch\.load\b|\bmarshal\b|\bnp\.load\b", text):
            pickles.add(name)
    assert found <= ELSEWHERE and pickles <= PICKLES


@pytest.mark.parametrize("text", [DEEP, "9" * 5000, "{", "\x00", "é", b"\xff", b'{"a": 1e5', ""])
def test_texts_that_are_none(text: str | bytes) -> None:
    with pytest.raises(Damaged) as found:
        from_json(text)
    assert "set_int" not in str(found.value) and "\n" not in str(found.value)
    with pytest.raises(Damaged):
        from_toml(text.encode() * 2 if isinstance(text, str) and text else b"=")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVLITE_DATA", str(tmp_path))
    return tmp_path


def _kv() -> dict[str, Any]:
    identity = dict.fromkeys(
        ("fingerprint", "config", "weights", "dtype", "tokenizer", "template"), "x"
    )
    return {
        "kvlite": "0.1",
        "created": 5.0,
        "model": "m",
        "identity": identity,
        "settings": asdict(Settings()),
        "tokens": 3,
        "messages": 0,
        "documents": ["a"],
        "ahead": "0" * 16,
    }


def test_descriptions_of_conversations(home: Path) -> None:
    """A library with a bad file lists it, and what is beside it."""
    library = open_library()
    good = library.new()
    good.name = "good"
    library.save(good)
    tensorfile.write_tensors(library.whole(good.id), _kv(), {})
    assert about(library.whole(good.id)).tokens == 3
    path = library.folder / "bad.kv"
    refused = 0
    for text in spoiled(_kv()):
        path.write_bytes(_with_header({"__metadata__": {"crc32": "0" * 8}}, text))
        found = {each.name: each for each in entries(library)}
        assert found["good"].about is not None
        bad = found["bad"]
        assert bad.about is None and "\n" not in bad.flaw and str(path) in bad.flaw
        refused += "damaged" in bad.flaw
        _listed()
    assert refused > 100
    for header in (DEEP, "9" * 5000, "[]", '{"__metadata__":' * 9):
        path.write_bytes(tensorfile._summed(_prefixed(header)))
        with pytest.raises(SnapshotError, match=r"bad\.kv"):
            about(path)


def _listed() -> None:
    from kvlite.cli.library import _plain, _table

    found = entries(open_library())
    _table(found)
    json.dumps([_plain(each) for each in found])


def _prefixed(text: str) -> bytes:
    begin = b'{"__metadata__":{"crc32":"00000000"' + text.encode("utf-8", "surrogatepass")
    return len(begin).to_bytes(8, "little") + begin


def _with_header(table: dict[str, Any], values: str) -> bytes:
    """A file without tensors whose values are this text; its checksum is right."""
    table["__metadata__"] |= {"format": "1", "sums": "", "kvlite": values}
    text = json.dumps(table, separators=(",", ":")).encode()
    return tensorfile._summed(len(text).to_bytes(8, "little") + text)


def check(path: Path, plain: Any, use: Callable[[], Any], *allowed: type[Exception]) -> None:
    """Every spoiled file is refused in one of these ways, or used."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for text in spoiled(plain):
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        try:
            use()
        except allowed as error:
            assert "\n" not in str(error), text[:300]
        except Exception as error:
            error.add_note(text[:300])
            raise


def test_other_files(home: Path) -> None:
    """Batch answers, calibrations, uploads, indices of weights and vocabularies."""
    row = {"id": "a", "job": {"x": "y"}, "error": None, "task": "t"}
    out = home / "out.jsonl"
    check(out, row, partial(_written, out), KvliteError)
    ranks = ((0.5, 0.25),)
    made = Calibration("m", "x", "t", 1, 9, 99, (0.5,), 1, ranks, ((1, 0),), (0.1,), 0.5)
    check(calibration_path("x"), made.to_json(), _calibrated, KvliteError)
    document = asdict(Document("a", "text", (0, 2), ("1 picture",)))
    name = f"file-{'0' * 32}"
    about_it = {"id": name, "created_at": 5, "bytes": 3, "filename": "a"}
    files = Files(home / "files")
    check(
        home / "files" / f"{name}.json",
        {"about": about_it, "document": document},
        lambda: (files.all(), files.document(name).page_of(0), files.about(name)),
        Refusal,
    )
    tensors = {"w": [[[0, "F32", [2], 0, 8]], [2], ["x", [1]], None, False, ""]}
    index = {"digest": "d", "files": [[str(home / "x"), 3, 5]], "tensors": tensors}
    check(home / "gguf.json", index, lambda: read_index(home))
    check(home / "model.safetensors.index.json", {"weight_map": {"a": "b"}}, lambda: _missing(home))
    (home / "config.json").write_text('{"max_position_embeddings": 5}')
    vocabulary = {"model": {"vocab": {"a": 1}}, "added_tokens": [{"content": "x"}]}
    check(home / "tokenizer.json", vocabulary, lambda: text_limit_of(home))


def _written(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")
    Written.of(path)


def _calibrated() -> None:
    found = calibration_of("x")
    assert found is not None
    found.heads_by_rank(0)


def test_records_of_the_app(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A bad one is named once, and the others are listed."""
    store = Library("", home)
    good, bad = store.new(), store.new()
    for each in (good, bad):
        each.draft = "Hello"
        store.save(each)
    path = store.place(bad.id) / "record.json"
    path.write_text(DEEP)
    for _ in range(3):
        assert [each.id for each in store.records()] == [good.id]
    assert sum(str(path) in each.getMessage() for each in caplog.records) == 1
    plain = json.loads(bad.to_json())
    plain["said"] = [{"role": "user", "text": "x", "documents": ["a"]}]
    check(path, plain, lambda: (store.records("x"), store.record(bad.id).title), KvliteError)
    check(
        store.place(bad.id) / "answers" / "k.json", {"brief": 1}, lambda: store.account(bad.id, "k")
    )
