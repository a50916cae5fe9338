"""Files that are damaged, made to look whole, of another model or no snapshots: refused in one
sentence."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from kvlite.config.settings import Settings
from kvlite.conversation import snapshot
from kvlite.conversation import tensor_file as tensorfile
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.snapshot import Snapshot
from kvlite.errors import OutOfMemory, SnapshotError
from kvlite.model.identity import Identity
from kvlite.model.load import LoadedModel
from tests.conftest import make_tiny

from .faults import Faults
from .test_snapshot import FIRST, chat, opened


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return make_tiny("llama", num_hidden_layers=2, hidden_size=32, intermediate_size=48).model


@pytest.fixture(scope="module")
def saved(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "talk.kv"
    talk = chat(model, method="snapkv", recall="ram", kv_bits="4", recall_bits="4")
    talk.generate(FIRST)
    talk.save(path)
    return path


def refused(model: LoadedModel, path: Path, *parts: str) -> None:
    """In one sentence, which names the file and what to do."""
    with pytest.raises(SnapshotError) as error:
        opened(model, path)
    said = str(error.value)
    assert str(path) in said and "\n" not in said and (": " in said or " opens it " in said)
    for part in parts:
        assert part in said


def test_a_file_that_was_cut_short_anywhere(
    model: LoadedModel, saved: Path, tmp_path: Path
) -> None:
    path, whole = tmp_path / "cut.kv", saved.read_bytes()
    with tensorfile.TensorFile(saved) as file:
        ends = [entry.end for entry in file._table.values()]
    begin = 8 + int.from_bytes(whole[:8], "little")
    places = {0, 1, 7, 8, 9, 30, begin - 1, begin, begin + 1}
    places |= {end + more for end in ends for more in (-1, 0, 1)} - {len(whole), len(whole) + 1}
    assert len(places) > 100
    for place in sorted(places):
        path.write_bytes(whole[:place])
        refused(model, path, "damaged or cut short", "another copy")
    path.write_bytes(whole + b"\0")
    refused(model, path, "damaged or cut short", f"{len(whole) + 1:,} bytes")


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_flipped_bytes(model: LoadedModel, saved: Path, tmp_path: Path, data: Any) -> None:
    whole = bytearray(saved.read_bytes())
    begin = 8 + int.from_bytes(whole[:8], "little")
    where = st.one_of(st.integers(0, begin - 1), st.integers(0, len(whole) - 1))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(where)] ^= data.draw(st.integers(1, 255))
    if bytes(whole) == saved.read_bytes():
        return
    path = tmp_path / "flipped.kv"
    path.write_bytes(whole)
    refused(model, path)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ("damaged or cut short",)),
        (
            b"text, and more text than a header is long" * 9,
            ("not a kvlite snapshot", "`kvlite read`"),
        ),
        (b"\x80\x04\x95" + b"pickled" * 99, ("not a kvlite snapshot", "`kvlite read`")),
        (b'\x10\0\0\0\0\0\0\0{"__metadata__":{"crc32":"', ("damaged or cut short",)),
    ],
)
def test_other_files(
    model: LoadedModel, tmp_path: Path, content: bytes, parts: tuple[str, ...]
) -> None:
    (tmp_path / "other.kv").write_bytes(content)
    refused(model, tmp_path / "other.kv", *parts)


def test_no_file(model: LoadedModel, tmp_path: Path) -> None:
    refused(model, tmp_path / "none.kv", "check the path")
    refused(model, tmp_path, "is a folder", "name a .kv file")


def test_a_newer_format(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = chat(model)
    talk.generate(FIRST)
    with monkeypatch.context() as later:
        later.setattr(snapshot, "WHOLE", tensorfile.FORMAT + 1)
        talk.save(tmp_path / "talk.kv")
    refused(model, tmp_path / "talk.kv", "made by a newer kvlite", "update kvlite")


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"fingerprint": "0"}, "another model, smollm2-135m: open it with --model smollm2-135m"),
        ({"config": "0"}, "another model"),
        ({"weights": "nf4"}, "these are nf4 in float32: open it with --weights fp32"),
        ({"tokenizer": "0"}, "another tokenizer"),
        ({"template": "0"}, "another chat template"),
    ],
)
def test_another_model(
    model: LoadedModel,
    saved: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    remedy: str,
) -> None:
    other = replace(Identity.of(model), **changes)
    monkeypatch.setattr(Identity, "of", lambda model: other)
    refused(model, saved, remedy)


def test_what_makes_a_model_another(model: LoadedModel) -> None:
    own = asdict(Identity.of(model))
    for kind, sizes, other in (
        ("llama", {"intermediate_size": 48}, set()),
        ("llama", {"num_hidden_layers": 3}, {"config"}),
        ("llama-rope-linear", {}, {"config"}),
        ("mistral-sliding", {}, {"config"}),
    ):
        small = {"num_hidden_layers": 2, "hidden_size": 32, **sizes}
        theirs = asdict(Identity.of(make_tiny(kind, **small).model))
        assert {name for name in own if own[name] != theirs[name]} == other


def first(plain: Any, key: str) -> Any:
    """The first value under a key, however deep."""
    if isinstance(plain, dict) and key in plain:
        return plain
    children = plain.values() if isinstance(plain, dict) else plain
    for child in children if isinstance(children, list | type({}.values())) else ():
        if isinstance(child, dict | list) and (found := first(child, key)) is not None:
            return found
    return None


def _set(key: str, value: Any) -> Callable[[Any, Any], None]:
    def change(about: Any, tensors: Any) -> None:
        first(about["cache"], key)[key] = value

    return change


def _ways(**changes: Any) -> Callable[[Any, Any], None]:
    def change(about: Any, tensors: Any) -> None:
        plain = json.loads(tensors["ways"].numpy().tobytes()) | changes
        tensors["ways"] = torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)

    return change


def _tensor(
    name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Any, Any], None]:
    def changed(about: Any, tensors: Any) -> None:
        tensors[name] = change(tensors[name])

    return changed


def _part(kind: str, side: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def changed(about: Any, tensors: Any) -> None:
        (plain, *_) = (each for each in about["cache"]["objects"] if each["kind"] == kind)
        tensors[plain[side]] = change(tensors[plain[side]])

    return changed


def _object(kind: str, **values: Any) -> Any:
    def changed(about: Any, tensors: Any) -> None:
        (plain, *_) = (each for each in about["cache"]["objects"] if each["kind"] == kind)
        plain.update(values)

    return changed


@pytest.mark.cases(38)
@pytest.mark.parametrize(
    "change",
    [
        _set("kind", "Tensor"),
        _set("kind", "KVCache"),
        _set("heads", [0, 0]),
        _set("heads", [0]),
        _set("heads", [0, 7]),
        _set("heads", "01"),
        _set("capacity", 3),
        _set("capacity", -3),
        _set("capacity", "many"),
        _set("used", 1000),
        _set("used", 3),
        _set("like", [[0, 1]]),
        _set("like", [[5, 0]]),
        _set("rows", 5),
        _set("layers", []),
        _set("seen", 10_000),
        _set("front", 99),
        _set("front", 0),
        _set("keys", "tier.0.0.positions"),
        _set("keys", "nothing"),
        _object("Packed", keys={"object": 999}),
        _object("Packed", keys={"object": 2}),
        _object("Packed", mean={}),
        _object("KVBits", keys=3),
        _object("Hadamard", bits=2),
        _object("Hadamard", bits="4"),
        _part("Hadamard", "scales", lambda each: each[..., :-1]),
        _part("Hadamard", "zeros", lambda each: each.float()),
        _part("Hadamard", "codes", lambda each: each[:, :, :-1]),
        _part("Packed", "positions", lambda each: each + 1000),
        _part("Packed", "positions", lambda each: -each),
        _part("Packed", "mean", lambda each: each[..., :-1]),
        _tensor("cache.0.0.positions", lambda each: each + 1000),
        _tensor("cache.0.0.positions", lambda each: -1 - each),
        _tensor("cache.0.0.keys", lambda each: each[..., :-1]),
        _tensor("cache.0.0.keys", lambda each: each.double()),
        _tensor("token_ids", lambda each: each + 199),
        _tensor("token_ids", lambda each: each[:-1]),
        _tensor("token_ids", lambda each: each.float()),
        _tensor("ways", lambda each: each[:-1]),
        _ways(at=7),
        _ways(at=-1),
        _ways(paths=[]),
        _ways(said=[{}]),
        _ways(before=3),
        _tensor("tier.0.signs", lambda each: each[..., :-1]),
        _tensor("tier.0.0.keys", lambda each: each[:, :, :-1]),
    ],
)
def test_files_made_to_look_whole(
    model: LoadedModel, saved: Path, tmp_path: Path, change: Callable[[Any, Any], None]
) -> None:
    """Checksums and all; nothing of them gets as far as a compiled loop."""
    with tensorfile.TensorFile(saved) as file:
        about = file.values
        tensors = load_file(saved)
    path = tmp_path / "made.kv"
    tensorfile.write_tensors(path, about, tensors)
    opened(model, path)
    change(about, tensors)
    tensorfile.write_tensors(path, about, tensors)
    refused(model, path, "damaged or cut short")


def test_memory_that_is_short(model: LoadedModel, saved: Path) -> None:
    with Snapshot(saved) as file:
        own = file.settings(Settings())
        with (
            Faults(cap=20_000),
            pytest.raises(OutOfMemory, match=r"talk\.kv takes .* cpu with .* free"),
        ):
            file.restore(Conversation(model, own))
        file.restore(Conversation(model, own))
