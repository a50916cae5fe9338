"""Saved conversations that somebody made up, and disks that fail: one sentence, nothing lost."""

import errno
import json
import os
import random
import resource
import shutil
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import kvlite
from kvlite.conversation import tensor_file as tensorfile
from kvlite.documents import Document
from kvlite.errors import KvliteError, ModelError, SnapshotError

Plain = Any
WRONG: list[Plain] = [
    *(None, True, False, 0, 1, -1, 7, 10**9, 2**63, -(2**70), 10**400, 1.5, -0.0, 1e308),
    *(float("nan"), float("inf"), "", "x", "\x00", "\ud800", "9" * 5000, "<|im_end|>"),
    *([], {}, [[]], [None], [0], [-1], [1.5], ["x"], [10**9] * 3, {"x": 1}, {"object": 0}),
    [0] * 2000,
]


@pytest.fixture(scope="module")
def runner(tiny_folder: Path) -> kvlite.Runner:
    torch.set_num_threads(1)
    return kvlite.load(str(tiny_folder), method="snapkv:window=8", budget=48, max_new_tokens=2)


INPUTS = 10  # of each kind
Made = dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], int]]


@pytest.fixture(scope="module")
def made(runner: kvlite.Runner, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """What files of conversations with branches and documents hold, whole and light."""
    talk = runner.conversation(recall="ram", recall_bits="8", kv_bits="8")
    talk.documents = (Document("a.pdf", "one\ntwo", (0, 4)), Document("b.txt", "three", ()))
    for text in ("One " * 20, "Two", "Three"):
        list(talk.stream(text))
    list(talk.edit(2, "Other"))
    talk.read_ahead("Document: a.pdf")
    found: Made = {}
    for light in (False, True):
        path = tmp_path_factory.mktemp("made") / "talk.kv"
        talk.save(path, light=light)
        with tensorfile.TensorFile(path) as file:
            tensors = load_file(path)
            form = tensorfile.LIGHT if light else tensorfile.WHOLE
            found["light" if light else "whole"] = (file.values, tensors, form)
    return found


def places(plain: Plain) -> Iterator[tuple[Any, Any]]:
    """Every value in a description: what holds it, and under which key."""
    keys = plain.keys() if isinstance(plain, dict) else range(len(plain))
    for key in keys:
        yield plain, key
        if isinstance(plain[key], dict | list):
            yield from places(plain[key])


def spoil(draw: random.Random, about: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    """Make one value another; what was done."""
    described = {"about": about} | {name: unpacked(tensors[name]) for name in ("ways", "documents")}
    if draw.random() < 0.25:
        name = draw.choice([name for name in tensors if name not in ("ways", "documents")])
        tensors[name] = another(draw, tensors[name])
        return f"tensor {name} {tensors[name].dtype} {tuple(tensors[name].shape)}"
    part = draw.choice([*described])
    owner, key = draw.choice([*places(described[part])])
    change = draw.random()
    if change < 0.15:
        del owner[key]
        value: Plain = "(none)"
    elif change < 0.35:
        other, found = draw.choice([*places(described[part])])
        value = owner[key] = deepcopy(other[found])
    elif change < 0.5 and isinstance(owner[key], int):
        value = owner[key] = owner[key] + draw.choice([-2, -1, 1, 2, 100])
    else:
        value = owner[key] = draw.choice(WRONG)
    for name in ("ways", "documents"):
        tensors[name] = packed(described[name])
    return f"{part} {key} {value!r:.80}"


def another(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    kinds = [torch.int32, torch.uint8, torch.float32, torch.int64, torch.bool, torch.float64]
    return draw.choice(
        [
            lambda: tensor.to(draw.choice(kinds)),
            lambda: tensor[..., :-1].contiguous(),
            lambda: tensor[:0],
            lambda: tensor.flatten(),
            lambda: torch.cat([tensor, tensor], -1),
            lambda: -1 - tensor if tensor.dtype != torch.bool else ~tensor,
            lambda: tensor + draw.choice([1, 200, 10**5]) if tensor.dtype != torch.bool else tensor,
            lambda: torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor,
        ]
    )()


def unpacked(tensor: torch.Tensor) -> Plain:
    return json.loads(tensor.numpy().tobytes())


def packed(plain: Plain) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)


def use(runner: kvlite.Runner, path: Path) -> None:
    """All that one does with a conversation that was opened."""
    talk = runner.open(path)
    for branch in range(len(talk.branches)):
        talk.switch(branch)
    if not talk.history.branch.prefilled_ids:
        list(talk.stream("And?"))
        list(talk.regenerate())
    list(talk.edit(1, "Else"))
    talk.save(path.with_name("again.kv"))


def refusal(runner: kvlite.Runner, path: Path) -> KvliteError | None:
    """What is said of a file, if anything; any other error is one of kvlite's own."""
    try:
        use(runner, path)
    except KvliteError as error:
        return error
    return None


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["whole", "light"])
def test_descriptions_with_wrong_values(
    runner: kvlite.Runner, made: Made, tmp_path: Path, kind: str
) -> None:
    """Their checksums are right: whoever made them knew how."""
    path, refused = tmp_path / "made.kv", 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(INPUTS):
        draw, (about, tensors, form) = random.Random(seed), made[kind]
        about, tensors = deepcopy(about), dict(tensors)
        done = [spoil(draw, about, tensors) for _ in range(draw.choice([1, 1, 2]))]
        try:
            tensorfile.write_tensors(path, about, tensors, form=form)
        except (ValueError, TypeError):  # a description that JSON cannot hold
            continue
        try:
            said = refusal(runner, path)
        except Exception as error:
            error.add_note(f"seed {seed}: {done}")
            raise
        assert said is None or "\n" not in str(said)
        refused += isinstance(said, SnapshotError)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 300 * 1024  # kilobytes
    assert refused > INPUTS / 4


FAULTS = [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]


class Failing:
    """Lets one of a program's calls to write a file fail.

    Attributes:
        calls: names of those that were made.
        at: which of them fails.
    """

    def __init__(self, patch: pytest.MonkeyPatch, fault: BaseException, at: int) -> None:
        self.calls: list[str] = []
        self.at, self.fault = at, fault
        for name in ("fsync", "replace", "chmod", "open", "scandir", "listdir"):
            patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
        opened = Path.open

        def opens(path: Path, *args: Any, **options: Any) -> Any:
            self._call("Path.open")
            file = opened(path, *args, **options)
            if "x" in args[0]:
                file = _Writes(file, self._call)
            return file

        patch.setattr(Path, "open", opens)

    def _wrapped(self, name: str, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self._call(name)
            return real(*args, **options)

        return call

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) - 1 == self.at:
            raise self.fault


class _Writes:
    """A file whose writing is told first."""

    def __init__(self, file: Any, told: Any) -> None:
        self.file, self.told = file, told

    def write(self, data: Any) -> Any:
        self.told("write")
        return self.file.write(data)

    def __enter__(self) -> "_Writes":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__ + str(fault))
def test_a_fault_at_any_call_of_a_save_loses_nothing(
    runner: kvlite.Runner, tmp_path: Path, fault: BaseException
) -> None:
    """What was there is whole, or what was to be; no half of a file stays."""
    path, talk = tmp_path / "talk.kv", runner.conversation()
    talk.read([5, 6, 7])
    talk.save(path)
    former = path.read_bytes()
    talk.read([8])
    failed, at = set[str](), 0
    while True:
        with pytest.MonkeyPatch.context() as patch:
            made = Failing(patch, fault, at)
            said: BaseException | None = None
            try:
                talk.save(path)
            except (SnapshotError, KeyboardInterrupt) as error:
                said = error
        assert [file.name for file in tmp_path.iterdir()] == ["talk.kv"]
        if len(made.calls) <= at:
            break
        failed.add(made.calls[at])
        if isinstance(said, SnapshotError):
            assert "what was there still is" in str(said)
            assert "\n" not in str(said)
        assert said is None or path.read_bytes() == former or isinstance(said, KeyboardInterrupt)
        opened = runner.open(path)
        assert opened.token_ids in ([5, 6, 7], [5, 6, 7, 8])
        path.write_bytes(former)
        at += 1
    assert {"write", "fsync", "replace", "chmod", "open", "Path.open"} <= failed
    assert runner.open(path).token_ids == [5, 6, 7, 8]


@pytest.mark.long
def test_a_conversation_whose_model_is_gone_is_not_saved_as_of_another(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """It could never be opened again; the file of before still can."""
    shutil.copytree(tiny_folder, tmp_path / "model")
    own, path = kvlite.load(str(tmp_path / "model"), method="full"), tmp_path / "talk.kv"
    talk = own.conversation()
    talk.read([5, 6])
    talk.save(path)
    talk.read([7])
    (tmp_path / "model").rename(tmp_path / "moved")
    with pytest.raises(SnapshotError, match=r"the model's files in .* cannot be read"):
        talk.save(path)
    with pytest.raises(ModelError, match="put them back"):
        own.open(path)
    (tmp_path / "moved").rename(tmp_path / "model")
    assert own.open(path).token_ids == [5, 6]
    talk.save(path)
    assert own.open(path).token_ids == [5, 6, 7]
