"""What agents send whole with every turn is read once, whatever the cache is made of."""

from pathlib import Path
from typing import Any

import pytest

from kvlite.config.settings import Settings
from kvlite.conversation import prefix
from kvlite.conversation.record import StoredMessage
from kvlite.conversation.runner import Runner
from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks
from kvlite.server import conversations, kept
from kvlite.server.config import ServerConfig
from kvlite.server.conversations import Conversations
from tests.cli.conftest import model_of
from tests.conftest import make_tiny
from tests.server.conftest import serving
from tests.server.test_conversations import Asked, ids_of, pool_in

# The last tokens of a prompt, which are read with it where not all is kept exactly.
CHOOSING = 64
# The instructions and 20 tools of an agent.
TOOLS = ids_of(300, 0)
EVERYTHING: dict[str, Any] = {"budget": "auto"}
# A way to keep what was read, and the architectures that are tried with it.
CUT_ANYWHERE = {
    "everything": ("llama", EVERYTHING),
    "8 bits": ("llama", {"kv_bits": "8", "recall": "off"}),
    "kivi": ("llama", {"kv_bits": "kivi4", "recall": "off"}),
    "recall": ("llama", {"budget": "60"}),
    "recall from disk": ("llama", {"budget": "60", "recall": "disk"}),
    "latents": ("deepseek-v3", EVERYTHING),
}
FROM_CHECKPOINTS = {
    "a window": ("gemma3", EVERYTHING),
    "windows alone": ("mistral-sliding", EVERYTHING),
    "windows and recall": ("gemma3", {"budget": "60"}),
    "delta nets": ("qwen3-next", EVERYTHING),
    "convolutions": ("lfm2", EVERYTHING),
    "mamba": ("nemotron-h", EVERYTHING),
    "recall in 8 bits": ("llama", {"budget": "60", "recall_bits": "8"}),
    "delta nets and recall": ("qwen3-next", {"budget": "60"}),
}
WAYS = CUT_ANYWHERE | FROM_CHECKPOINTS


def pool_of(name: str, root: Path, **more: Any) -> Conversations:
    architecture, given = WAYS[name]
    settings = Settings().replace({"max_new_tokens": 4, **given, **more})
    runner = Runner(make_tiny(architecture, max_position_embeddings=4096).model, settings)
    return pool_in(root, runner)


def test_a_few_checkpoints_are_kept_and_what_is_behind_instructions_and_tools_stays(
    tmp_path: Path,
) -> None:
    """Those go first that are close behind another."""
    pool = pool_of("convolutions", tmp_path)
    Asked(pool, [*TOOLS, *ids_of(70, 1)])
    main = Asked(pool, [*TOOLS, *ids_of(70, 2)])
    sizes = list[int]()
    for turn in range(24):
        main = Asked(pool, [*main.ids, *ids_of(66, 10 + turn)])
        sizes.append(max(each.host_bytes for each in pool.kept))
    assert sizes[-1] == sizes[-2] < 18 * sizes[0]
    pool.kept = [each for each in pool.kept if len(each.ids) == len(main.ids)]
    assert Asked(pool, [*TOOLS, *ids_of(70, 3)]).read == 70
    assert Asked(pool, [*main.ids[:1200], *ids_of(70, 4)]).read < 70 + 300
    assert Asked(pool, [*main.ids, *ids_of(70, 5)]).read == 71


def most(name: str, new: int) -> int:
    """Tokens that a prompt with so many new ones may read: the answer's last token is new, too; in
    groups of KIVI's layout some more."""
    exact = name in ("everything", "latents")
    return new + 1 if exact else max(new + 1, CHOOSING) + (64 if name == "kivi" else 4)


@pytest.mark.parametrize("name", WAYS)
def test_an_agent_reads_what_is_new(name: str, tmp_path: Path) -> None:
    """Ten turns, each sent whole, a title in between, an edited result of a tool, the original
    again, and subagents."""
    pool = pool_of(name, tmp_path)
    main = Asked(pool, [*TOOLS, *ids_of(70, 1)])
    starts = list[int]()
    for turn in range(9):
        starts.append(len(main.ids))
        if turn == 3:
            Asked(pool, ids_of(80, 90))
        main = Asked(pool, [*main.ids, *ids_of(66, 10 + turn)])
        assert main.read <= most(name, 66), turn
    edited = Asked(pool, [*main.ids[: starts[5] + 20], *ids_of(100, 30)])
    lost = 25 if name in FROM_CHECKPOINTS else 0  # back to where the turn began
    assert edited.read <= most(name, 100) + lost
    again = Asked(pool, [*main.ids, *ids_of(66, 31)])
    assert again.read <= most(name, 66)
    subagents = [Asked(pool, [*TOOLS, *ids_of(70, 40 + each)]) for each in range(3)]
    for number, each in enumerate(subagents):
        # Nobody knew at first that others would begin in this way.
        first = number == 0 and name in FROM_CHECKPOINTS
        assert first or each.read <= most(name, 70)
    if WAYS[name][1] == EVERYTHING:
        for each in (edited, subagents[2]):
            alone = Asked(pool_of(name, tmp_path / "alone"), each.ids[:-4])
            assert alone.read == len(each.ids) - 4 and alone.answer == each.answer


@pytest.mark.parametrize("name", ["everything", "8 bits", "a window", "delta nets"])
def test_two_agents_at_once(name: str, tmp_path: Path) -> None:
    """The second begins with what the first has read, while that one answers; neither changes the
    other's answer."""
    pool, common = pool_of(name, tmp_path), [*TOOLS, *ids_of(80, 1)]
    first = Asked(pool, common)
    if name in FROM_CHECKPOINTS:
        Asked(pool, [*TOOLS, *ids_of(80, 7)])  # so that it is known where agents part
    prompts = [[*first.ids, *ids_of(90, 2)], [*TOOLS, *ids_of(90, 3)]]
    expected = [Asked(pool_of(name, tmp_path / "alone"), ids).answer for ids in prompts]
    running = [pool.answer(ids, {}, NO_CALLBACKS, ignore_eos=True) for ids in prompts]
    said, read = [list[int](), list[int]()], [0, 0]
    for each in (0, 1, 0, 1, 0, 0, 1, 1):
        while (piece := next(running[each])[0]) is None:
            pass
        if piece.token_id is not None:
            said[each].append(piece.token_id)
        read[each] = piece.metrics.ahead_tokens + piece.metrics.prompt_tokens
    assert read[0] <= most(name, 90) and read[1] <= most(name, 90)
    if name != "8 bits":
        assert said == expected


@pytest.mark.parametrize("name", ["recall", "recall from disk"])
def test_what_is_read_anew_behind_a_shared_beginning_is_not_the_others(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation that is cut back, as there is no room for two, writes where it had others."""
    answers = list[list[int]]()
    for is_cut in (False, True):
        pool = pool_of(name, tmp_path)
        main = Asked(pool, ids_of(400, 0))
        branch = Asked(pool, [*main.ids[:300], *ids_of(150, 1)])
        assert len(pool.kept) == 2
        if is_cut:
            with monkeypatch.context() as patch:
                patch.setattr(Conversations, "_has_room_beside", lambda *_: False)
                Asked(pool, [*main.ids[:202], *ids_of(150, 2)])
            assert len(pool.kept) == 2
        answers.append(Asked(pool, [*branch.ids, *ids_of(70, 3)]).answer)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["a window", "delta nets", "windows and recall"])
def test_what_is_left_half_read_before_or_behind_a_parting_goes_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlite.conversation.run_stats.SLICE_S", 0.0)  # every chunk is a slice
    prompts = [[*TOOLS, *ids_of(80, each)] for each in (1, 2)]

    def read(left_at: int) -> tuple[list[int | None], int]:
        pool, slices = pool_of(name, tmp_path, chunk=64), 0
        Asked(pool, prompts[0])
        heard = pool.answer(prompts[1], {}, NO_CALLBACKS, ignore_eos=True)
        while slices < left_at:
            assert next(heard)[0] is None
            slices += 1
        heard.close()
        pieces = [piece for piece, _ in pool.answer(prompts[1], {}, NO_CALLBACKS, ignore_eos=True)]
        said = [each.token_id for each in pieces if each is not None]
        return said, slices + len(pieces) - len(said)

    whole = read(0)
    assert whole[1] > 20
    for left_at in range(1, whole[1], 9):
        assert read(left_at) == whole, left_at


def test_after_a_restart_what_was_dropped_since_is_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several checkpoints share copies of layers, of which each has had a part."""
    monkeypatch.setattr(kept, "SHORT", 100)
    given = Settings().replace({"max_new_tokens": 4, "budget": "900", "recall": "off"})
    runner = Runner(make_tiny("llama", max_position_embeddings=4096).model, given)
    pool = pool_in(tmp_path, runner)
    turns = [Asked(pool, ids_of(300, 0))]
    for number in range(3):
        turns.append(Asked(pool, [*turns[-1].ids, *ids_of(250, 1 + number)]))
    pool.set_aside()
    for number, turn in enumerate(turns[:-1]):
        again = pool_in(tmp_path, runner)
        again.resume()
        edited = Asked(again, [*turn.ids, *ids_of(80, 9)])
        fresh = pool_in(tmp_path / f"{number}", runner)
        assert edited.read <= 82 and edited.answer == Asked(fresh, edited.ids[:-4]).answer


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("killed", ["reading", "answering"])
def test_what_took_long_to_read_outlives_a_server_that_is_killed(
    name: str, killed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "SHORT", 100)
    monkeypatch.setattr(conversations, "SAVED_AFTER", 0.0)
    monkeypatch.setattr(prefix, "PART", 200)
    monkeypatch.setattr("kvlite.conversation.run_stats.SLICE_S", 0.0)  # every chunk is a slice
    pool, prompt = pool_of(name, tmp_path, chunk=50), ids_of(720, 1)
    told = list[tuple[int, int]]()
    callbacks = Callbacks(lambda *progress: told.append(progress))
    heard = pool.answer(prompt, {}, callbacks, said=[StoredMessage("user", "Why?")])
    layers = pool.runner.shape.layers
    for piece, _ in heard:
        done = told[-1][0] if told else 0
        if piece is not None or (killed == "reading" and done > 470 * layers):
            break
    assert told == sorted(told) and {total for _, total in told} == {720 * layers}
    again = pool_of(name, tmp_path)  # nothing is ended: the other one is not there any more
    again.resume()
    assert [each.name for each in again.files.library.records()] == ["Why?"]
    answer = Asked(again, prompt)
    assert answer.read <= (330 if killed == "reading" else most(name, 200))
    if WAYS[name][1] == EVERYTHING:
        assert answer.answer == Asked(pool_of(name, tmp_path / "alone"), prompt).answer


@pytest.mark.parametrize("kind", ["gemma3", "qwen3-next"])
def test_the_first_subagent_begins_with_instructions_and_tools(kind: str, tmp_path: Path) -> None:
    """Also in a model that can only go back to checkpoints: one is made behind them."""
    model = model_of(tmp_path, 4096, kind)
    config = ServerConfig(folder=tmp_path / "server")
    with serving(Settings(model=str(model)), config) as server:

        def known(text: str) -> tuple[int, int]:
            system = {"role": "system", "content": "You are a careful agent. " * 60}
            messages: Any = [system, {"role": "user", "content": text}]
            ask = server.client.chat.completions.create
            usage = ask(model=server.model.names[0], messages=messages, max_tokens=4).usage
            assert usage is not None and usage.prompt_tokens_details is not None
            return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0

        assert known("Write a program that counts words. " * 20)[1] == 0
        for task in ("Find all tests. ", "Where is the parser? "):
            prompt, before = known(task * 20)
            assert before > 300 and prompt - before < 130


def test_a_disk_without_room_for_a_copy_has_the_prompt_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, fresh = pool_of("recall from disk", tmp_path), pool_of("recall from disk", tmp_path)
    main = Asked(pool, [*TOOLS, *ids_of(400, 1)])

    def is_full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("kvlite.offload.kv.copies.mapped_copies", is_full)
        other = Asked(pool, [*TOOLS, *ids_of(100, 2)])
    assert other.answer == Asked(fresh, other.ids[:-4]).answer
    assert Asked(pool, [*main.ids, *ids_of(70, 3)]).read <= 71 and len(pool.kept) == 2


@pytest.mark.parametrize("name", WAYS)
def test_after_a_restart_a_subagent_and_an_edit_begin_with_what_was_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "SHORT", 100)
    pool = pool_of(name, tmp_path)
    Asked(pool, [*TOOLS, *ids_of(70, 1)])
    main = Asked(pool, [*TOOLS, *ids_of(70, 2)])
    middle = len(main.ids)
    for turn in range(4):
        main = Asked(pool, [*main.ids, *ids_of(66, 10 + turn)])
    subagent, edited = [*TOOLS, *ids_of(70, 3)], [*main.ids[: middle + 70], *ids_of(100, 4)]
    pool.set_aside()
    answers = list[list[int]]()
    # A cache of windows alone is as small as a checkpoint of it: fewer of these are written.
    lost = 140 if name == "windows alone" else 66
    for ids, new in ((subagent, 70), (edited, 100 + lost)):
        pool = pool_of(name, tmp_path)
        pool.resume()
        again = Asked(pool, ids)
        assert again.read <= most(name, new), name
        answers.append(again.answer)
    if WAYS[name][1] == EVERYTHING:
        for ids, answer in zip((subagent, edited), answers, strict=True):
            assert Asked(pool_of(name, tmp_path / "alone"), ids).answer == answer
