"""Conversations in files: the next answer is that of the one that was never saved."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.snapshot import Snapshot
from kvlite.errors import SettingError, SnapshotError
from kvlite.methods import METHODS
from kvlite.model.load import LoadedModel
from tests.conftest import make_tiny

from .faults import Faults
from .test_packed import random_ids

BITS = ["16", "8", "4", "k8v4", "kivi4"]
COMPOSED = [
    "simlayerkv+kvx",
    "simlayerkv:threshold=0.2,recent=20,detect=decode",
    "snapkv:per_head=true",
    "uncomp:delete=1",
    "kvx:layers=global",
    "minicache:start=0",
    Settings().method,
]
DROPS_ONE_BY_ONE = {
    "streaming",
    "lminfinite",
    "kvx",
    "h2o",
    "tova",
    "uncomp",
    "simlayerkv+kvx",
    "uncomp:delete=1",
    "kvx:layers=global",
}
FIRST, SECOND, THIRD = (random_ids(n, n)[0].tolist() for n in (110, 12, 20))


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    torch.set_num_threads(1)
    return make_tiny("llama", num_hidden_layers=2, hidden_size=32, intermediate_size=48).model


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KVLITE_DATA", str(tmp_path / "data"))


def chat(model: LoadedModel, **given: Any) -> Conversation:
    usual = {"recall": "off", "budget": 48, "max_new_tokens": 4, "recall_entries": 8}
    return Conversation(model, Settings(**{**usual, **given}))


def opened(model: LoadedModel, path: Path, **given: Any) -> Conversation:
    with Snapshot(path) as saved:
        chosen = saved.settings(Settings()).replace(given)
        talk = Conversation(model, chosen)
        saved.restore(talk)
    return talk


def answered(talk: Conversation, ids: list[int], **given: Any) -> tuple[list[int], torch.Tensor]:
    """The tokens of an answer, and the logits of its last one."""
    said = talk.generate(ids, ignore_eos=True, **given).token_ids
    assert talk.context.turn is not None
    return said, talk.context.turn.logits


def same(one: tuple[list[int], torch.Tensor], other: tuple[list[int], torch.Tensor]) -> bool:
    return one[0] == other[0] and one[1].equal(other[1])


def follows(model: LoadedModel, path: Path, **given: Any) -> Conversation:
    """Two turns, saved in between twice; the one that was opened goes on like one that was never
    saved, and holds as many bytes."""
    straight, saved = chat(model, **given), chat(model, **given)
    for talk in (straight, saved):
        talk.generate(FIRST, ignore_eos=True)
    saved.save(path)
    again = opened(model, path)
    assert again.cache.nbytes == straight.cache.nbytes
    assert (again.store is None) == (straight.store is None)
    if again.store is not None and straight.store is not None:
        assert again.store.nbytes == straight.store.nbytes
        assert again.store.index_bytes == straight.store.index_bytes
        assert again.store.on_disk == straight.store.on_disk
    wanted = answered(straight, SECOND)
    assert same(answered(again, SECOND), wanted)
    assert same(answered(saved, SECOND), wanted)
    again.save(path)
    again = opened(model, path)
    assert same(answered(again, THIRD), answered(straight, THIRD))
    assert again.token_ids == straight.token_ids and again.cache.seen == straight.cache.seen
    return again


@pytest.mark.cases(6, 24)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", [*METHODS, *COMPOSED])
def test_the_next_answer_is_that_without_saving(
    model: LoadedModel, tmp_path: Path, name: str, bits: str
) -> None:
    if bits == "kivi4" and name in DROPS_ONE_BY_ONE:
        with pytest.raises(SettingError, match="would drop one by one"):
            chat(model, method=name, kv_bits=bits).generate(FIRST)
        return
    follows(model, tmp_path / "talk.kv", method=name, kv_bits=bits)


@pytest.mark.cases(4, 20)
@pytest.mark.parametrize(
    ("place", "recall_bits", "bits"),
    [
        ("ram", "8", "16"),
        ("disk", "4", "k8v4"),
        pytest.param("ram", "16", "4", marks=pytest.mark.long),
        pytest.param("ram", "4", "8", marks=pytest.mark.long),
        pytest.param("disk", "16", "16", marks=pytest.mark.long),
        pytest.param("disk", "8", "4", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("name", [*METHODS, *COMPOSED])
def test_it_recalls_what_it_would_have(
    model: LoadedModel, tmp_path: Path, name: str, place: str, recall_bits: str, bits: str
) -> None:
    given = {"method": name, "recall": place, "recall_bits": recall_bits, "kv_bits": bits}
    try:
        recalls = chat(model, **given)
        recalls.generate(FIRST)
    except SettingError as error:
        assert "masks attention to what it drops" in str(error)
        return
    assert (recalls.store is None) == (name in ("full", "minference"))
    follows(model, tmp_path / "talk.kv", **given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types(tmp_path: Path, dtype: torch.dtype) -> None:
    model = make_tiny("llama", dtype=dtype).model
    follows(model, tmp_path / "talk.kv", method="snapkv", recall="ram")
    with pytest.raises(SnapshotError, match=r"made with .* weights in .*: open it with --weights "):
        opened(make_tiny("llama").model, tmp_path / "talk.kv")


@pytest.mark.parametrize("name", ["simlayerkv:threshold=1,detect=decode", "minicache:start=0"])
@pytest.mark.parametrize("bits", ["16", "4"])
def test_what_was_read_and_not_answered(
    model: LoadedModel, tmp_path: Path, name: str, bits: str
) -> None:
    """Where a cut that quantizes is still to come, it is known where entries were packed."""
    talks = [chat(model, method=name, kv_bits=bits, budget=60) for _ in range(2)]
    for talk in talks:
        talk.generate(FIRST, ignore_eos=True)
        talk.read(SECOND)
    if bits == "4" and name.startswith("simlayerkv"):
        assert any(
            head_group.packed_before
            for layer in talks[0].cache.layers
            for head_group in layer.head_groups
        )
    talks[0].save(tmp_path / "talk.kv")
    again = opened(model, tmp_path / "talk.kv")
    cuts = {} if "minicache" in name else {"method": "snapkv:window=8"}
    assert same(answered(again, THIRD, **cuts), answered(talks[1], THIRD, **cuts))


@pytest.mark.parametrize("recall", ["off", "ram"])
@pytest.mark.parametrize("heard", [1, 3])
def test_an_answer_that_was_not_heard_to_its_end(
    model: LoadedModel, tmp_path: Path, recall: str, heard: int
) -> None:
    talks = [chat(model, method="snapkv", recall=recall, max_new_tokens=9) for _ in range(2)]
    streams = [talk.stream("3 4 5 " * 30) for talk in talks]
    for stream in streams:
        for _ in range(heard):
            next(stream)
    talks[0].save(tmp_path / "talk.kv")
    again = opened(model, tmp_path / "talk.kv")
    assert again.messages == talks[1].messages and len(again.messages) == 2
    assert again.context.pending_ids == talks[1].context.pending_ids
    # And the one that was saved answers on.
    assert [piece.token_id for piece in streams[0]] == [piece.token_id for piece in streams[1]]
    other = chat(model, method="snapkv", recall=recall, max_new_tokens=9)
    rest = other.stream("3 4 5 " * 30)
    for _ in range(heard):
        next(rest)
    rest.close()
    assert same(answered(again, SECOND), answered(other, SECOND))


@pytest.mark.long
@pytest.mark.parametrize("recall", ["off", "ram"])
def test_an_answer_for_which_there_was_no_memory(
    model: LoadedModel, tmp_path: Path, recall: str
) -> None:
    def broken_off() -> Conversation:
        talk = chat(model, method="snapkv", recall=recall, never_lossy=True, max_new_tokens=20)
        stream = talk.stream_tokens(FIRST, ignore_eos=True)
        next(stream)
        with Faults(range(9, 100_000)):
            (last,) = stream
        assert last.metrics.finish_reason == "memory"
        return talk

    talks = [broken_off() for _ in range(2)]
    talks[0].save(tmp_path / "talk.kv")
    again = opened(model, tmp_path / "talk.kv")
    assert again.context.pending_ids == talks[0].context.pending_ids
    assert again.cache.writing == (recall == "ram")
    assert same(answered(again, SECOND), answered(talks[1], SECOND))


def test_what_was_given_up_stays_given_up(model: LoadedModel, tmp_path: Path) -> None:
    talk = chat(model, method="snapkv", budget=80)
    talk.context.oom_policy.taken = ["smaller chunk", "8-bit cache", "smaller budget"]
    talk.generate(FIRST, ignore_eos=True)
    talk.save(tmp_path / "talk.kv")
    again = opened(model, tmp_path / "talk.kv")
    assert again.context.oom_policy.taken == talk.context.oom_policy.taken
    answers = [each.generate(SECOND, ignore_eos=True) for each in (again, talk)]
    assert answers[0].token_ids == answers[1].token_ids
    assert {each.metrics.kv_bits for each in answers} == {"8"}
    assert {each.metrics.budget for each in answers} == {40}


def test_where_a_tier_goes_is_up_to_whoever_opens_it(model: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "talk.kv"
    straight, talk = (chat(model, method="snapkv", recall="ram") for _ in range(2))
    wanted = answered(straight, FIRST), answered(straight, SECOND)
    assert same(answered(talk, FIRST), wanted[0])
    talk.save(path)
    for here, where in (
        ({"recall": "disk"}, "disk"),
        ({"recall": "auto"}, "ram"),
        ({"recall": "auto", "recall_limit": "1KiB"}, "disk"),
        ({"recall": "auto", "recall_limit": "1GiB"}, "ram"),
    ):
        again = opened(model, path, **here)
        assert again.store is not None and again.store.on_disk == (where == "disk")
        assert again.store.on_disk == (where == "disk")
        answer = again.generate(SECOND, ignore_eos=True)
        assert answer.token_ids == wanted[1][0]
        if "recall_limit" in here and where == "disk":
            assert "goes to a temporary file" in answer.metrics.notes[0]
    assert opened(model, path, recall="off").store is None
    with pytest.raises(SnapshotError, match=r"talk\.kv has .* --recall off opens it without"):
        opened(model, path, recall="ram", recall_limit="1KiB")


def test_a_tier_for_which_the_disk_is_full(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = chat(model, method="snapkv", recall="disk")
    talk.generate(FIRST)
    talk.save(tmp_path / "talk.kv")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvlite.offload.kv.storage._reserve", full)
    with pytest.raises(SnapshotError, match="--recall off opens it without"):
        opened(model, tmp_path / "talk.kv")
    assert opened(model, tmp_path / "talk.kv", recall="off").token_ids == talk.token_ids


def test_settings_are_those_it_was_saved_with_but_for_this_machine(
    model: LoadedModel, tmp_path: Path
) -> None:
    talk = chat(model, method="tova", budget=33, stop=("x",), chunk=17, recall_limit="3GiB")
    talk.generate(FIRST)
    talk.save(tmp_path / "talk.kv")
    with Snapshot(tmp_path / "talk.kv") as saved:
        here = saved.settings(Settings(chunk=99, vram="5GiB", seed=3))
    assert (here.method, here.budget, here.stop, here.seed) == ("tova", "33", ("x",), None)
    assert (here.chunk, here.vram, here.recall_limit) == (99, "5GiB", "auto")


def test_other_programs_can_look_into_it(model: LoadedModel, tmp_path: Path) -> None:
    talk = chat(model, method="minicache:start=0", kv_bits="4", recall="ram")
    talk.generate(FIRST)
    size = talk.save(tmp_path / "talk.kv")
    assert size == (tmp_path / "talk.kv").stat().st_size
    head_group = talk.cache.layers[0].head_groups[0]
    with safe_open(tmp_path / "talk.kv", "pt") as file:
        assert file.get_tensor("token_ids").tolist() == talk.token_ids
        keys = file.get_tensor("cache.0.0.keys")
        assert keys.equal(head_group.residual_keys[:, :, : head_group.residual_len])
        about = json.loads(file.metadata()["kvlite"])
    assert about["settings"]["method"] == "minicache:start=0"
    # What two layers share is there once, and room that is not filled is not there at all.
    assert size < talk.cache.nbytes + talk.store.nbytes + talk.store.index_bytes + 30_000  # type: ignore[union-attr]


PROCESS = """
import sys
import kvlite
runner = kvlite.load(sys.argv[1], device="cpu")
talk = runner.open(sys.argv[2])
answer = talk.generate([5, 6, 7], ignore_eos=True)
print(answer.token_ids, talk.context.turn.logits.double().sum().item(), talk.store.on_disk)
"""


@pytest.mark.long
def test_in_a_new_process(tiny_folder: Path, tmp_path: Path) -> None:
    import kvlite

    given = {"budget": 48, "recall": "disk", "recall_bits": "8", "kv_bits": "4", "temperature": 0.7}
    runner = kvlite.load(str(tiny_folder), device="cpu", seed=5, max_new_tokens=8, **given)
    talk = runner.conversation()
    talk.generate(FIRST, ignore_eos=True)
    talk.save(tmp_path / "talk.kv")
    command = [sys.executable, "-c", PROCESS, str(tiny_folder), str(tmp_path / "talk.kv")]
    # Sums depend on how many threads share them, in the last digit.
    own = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=own)
    answer = talk.generate([5, 6, 7], ignore_eos=True)
    assert talk.context.turn is not None and answer.token_ids
    logits = talk.context.turn.logits.double().sum().item()
    *said, found, place = done.stdout.rsplit(" ", 2)
    assert (said, place) == ([str(answer.token_ids)], "True\n"), done.stderr
    assert float(found) == pytest.approx(logits, rel=2e-6)  # beside other tests sums may differ


# What is kept, whatever happens.


def killed_at(path: Path, talk: Conversation, moment: int) -> bool:
    """Save in a process that is killed after so many of a save's steps; whether it was."""
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        return os.WIFSIGNALED(status)
    left = [moment]

    def step() -> None:
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    fsync, rename = os.fsync, os.replace

    def stepwise(does: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            step()
            does(*args)
            step()

        return run

    os.fsync, os.replace = stepwise(fsync), stepwise(rename)  # type: ignore[assignment]
    try:
        talk.save(path, progress=lambda *_: step())
    finally:
        os._exit(0)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_killed_in_the_middle_of_a_save(model: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "talk.kv"
    talk = chat(model, method="snapkv", recall="ram")
    talk.generate(FIRST)
    talk.save(path)
    before = path.read_bytes()
    talk.generate(SECOND)
    seen, moment, left_behind = [], 0, 0
    while killed_at(path, talk, moment):
        left_behind = max(left_behind, len(list(tmp_path.glob(".*.part"))))
        whole = path.read_bytes() == before
        assert whole or opened(model, path).token_ids == talk.token_ids
        seen.append(whole)
        moment += 1
    assert seen[0] and not seen[-1] and len(seen) > 20
    assert left_behind == 1  # the next save removes what the one before left
    assert opened(model, path).token_ids == talk.token_ids
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["talk.kv"]


def test_what_others_still_write_is_not_removed(model: LoadedModel, tmp_path: Path) -> None:
    talk = chat(model)
    talk.generate(FIRST)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    theirs = tmp_path / f".a.kv.{os.getpid()}-01234567.part"
    lost = tmp_path / f".a.kv.{dead.pid}-01234567.part"
    reused = tmp_path / f".b.kv.{os.getpid()}-01234567.part"
    foreign = tmp_path / ".hidden.part"
    for file in (theirs, lost, reused, foreign):
        file.write_bytes(b"half")
    os.utime(reused, (1, 1))  # before a process of this number was there
    talk.save(tmp_path / "talk.kv")
    assert theirs.exists() and foreign.exists()
    assert not lost.exists() and not reused.exists()


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_save_that_fails_leaves_what_was_there(
    model: LoadedModel, tmp_path: Path, failure: BaseException
) -> None:
    path, talk = tmp_path / "talk.kv", chat(model)
    talk.generate(FIRST)
    talk.save(path)
    before = path.read_bytes()
    talk.generate(SECOND)

    def fail(done: int, of: int) -> None:
        if done > of / 2:
            raise failure

    with pytest.raises((SnapshotError, KeyboardInterrupt)) as error:
        talk.save(path, progress=fail)
    if isinstance(failure, OSError):
        assert "talk.kv cannot be written (No space left on device)" in str(error.value)
    assert path.read_bytes() == before and list(tmp_path.glob(".*")) == []


def test_where_nothing_can_be_saved(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = chat(model)
    talk.generate(FIRST)
    for path, part in ((tmp_path / "no" / "talk.kv", "No such file"), (tmp_path, "is a folder")):
        with pytest.raises(SnapshotError, match=part):
            talk.save(path)
    usage = os.statvfs_result((4096, 4096, 9, 1, 1, 9, 9, 9, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: usage)
    with pytest.raises(SnapshotError, match=r"would take .* has 4\.0 KiB free"):
        talk.save(tmp_path / "talk.kv")
    assert list(tmp_path.iterdir()) == []


def test_a_link_stays_one_and_what_was_said_is_private(model: LoadedModel, tmp_path: Path) -> None:
    talk = chat(model)
    talk.generate(FIRST)
    (tmp_path / "real").mkdir()
    (tmp_path / "link.kv").symlink_to(tmp_path / "real" / "talk.kv")
    talk.save(tmp_path / "link.kv")
    assert (tmp_path / "link.kv").is_symlink()
    assert (tmp_path / "real" / "talk.kv").stat().st_mode & 0o777 == 0o600
