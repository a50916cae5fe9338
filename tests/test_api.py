"""The package as a program uses it: `kvlite.load`, the runner, conversations, their accounts."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kvlite
from kvlite.conversation.metrics import Piece
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import ContextError, InterruptedCacheError, SettingError, Stopped

DEFAULTS = {"method": "snapkv:window=8", "budget": 48, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def runner(tiny_folder: Path) -> kvlite.Runner:
    return kvlite.load(str(tiny_folder), **DEFAULTS)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    """300 random tokens, none of them special."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(100, 49_000, (300,), generator=generator).tolist()


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def ids_of(pieces: list[Piece]) -> list[int]:
    return [piece.token_id for piece in pieces]


# --- importing -----------------------------------------------------------------------------------

IMPORT = """
import json, sys
import kvlite
from kvlite import Settings, KvliteError
assert Settings().replace({"budget": 512})
try:
    kvlite.laod
except AttributeError as error:
    message = str(error)
print(json.dumps([message, dir(kvlite), sorted(sys.modules)]))
"""


def test_importing_kvlite_imports_no_torch() -> None:
    run = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    message, names, modules = json.loads(run.stdout)
    assert message == "module 'kvlite' has no attribute 'laod'"
    assert {*kvlite.__all__, "__version__"} <= {*names}
    assert not {"torch", "transformers", "numpy", "safetensors", "gguf"} & {*modules}


def test_every_public_name_is_there_and_documented() -> None:
    assert {*kvlite.__all__} <= {*dir(kvlite)}
    assert all(getattr(kvlite, name).__doc__ for name in kvlite.__all__)


# --- load and Runner -----------------------------------------------------------------------------


def test_settings_of_load_are_defaults_and_later_ones_override_them(
    runner: kvlite.Runner, prompt: list[int]
) -> None:
    usual = runner.generate(prompt, ignore_eos=True)
    assert (usual.metrics.method, usual.metrics.budget) == ("snapkv:window=8", 48)
    assert (len(usual.token_ids), usual.finish_reason) == (6, "length")
    other = runner.generate(
        prompt, max_new_tokens=9, ignore_eos=True, method="kvx", budget="10%", temperature=1, seed=1
    )
    assert (other.metrics.method, other.metrics.budget) == ("kvx", 30)
    assert len(other.token_ids) == 9
    greedy = runner.generate(prompt, max_new_tokens=9, ignore_eos=True, method="kvx", budget="10%")
    assert other.token_ids != greedy.token_ids
    # Neither the runner's defaults nor the next answer changed.
    assert runner.generate(prompt, ignore_eos=True).token_ids == usual.token_ids


def test_a_loaded_model_is_not_changed_by_settings(runner: kvlite.Runner) -> None:
    wrong = {"model": "other", "device": "cuda", "weights": "fp16", "stream": "disk"}
    for name, value in wrong.items():
        for call in (runner.conversation, lambda **given: runner.generate([5], **given)):
            with pytest.raises(SettingError, match="cannot be changed once a model is loaded"):
                call(**{name: value})
    same = {name: getattr(runner.settings, name) for name in wrong}
    assert runner.generate([5], **same).token_ids


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"heat": 1}, "unknown setting 'heat': there is beyond_context, budget, "),
        ({"temperature": -1}, "--temperature -1 is out of range"),
        ({"method": "snapkw"}, "unknown method 'snapkw'"),
        ({"budget": "lots"}, "--budget 'lots' is not a budget"),
        ({"method": "kvx", "budget": 2}, "too small for kvx: give it at least 3"),
    ],
)
def test_a_wrong_setting_is_named_wherever_it_is_given(
    runner: kvlite.Runner, wrong: dict[str, object], reason: str
) -> None:
    talk = runner.conversation(method="full")
    before = talk.generate([5, 6, 7], max_new_tokens=3).token_ids
    for call in (
        lambda: kvlite.load("/no/such/model", **wrong),  # before it looks for the model
        lambda: runner.conversation(**wrong),
        lambda: runner.generate([5], **wrong),
        lambda: talk.generate([5], **wrong),
        lambda: list(talk.stream("Well?", **wrong)),
    ):
        with pytest.raises(SettingError, match=reason):
            call()
    # And changes nothing, not even half of it.
    assert (talk.settings.method, talk.cache.seen) == ("full", 5)
    again = runner.conversation(method="full")
    again.generate([5, 6, 7], max_new_tokens=3)
    assert again.token_ids[:3] == [5, 6, 7] and again.token_ids[3:] == before[:2]
    assert again.generate([8]).token_ids == talk.generate([8]).token_ids


def test_an_answer_says_what_it_was_made_from(runner: kvlite.Runner, prompt: list[int]) -> None:
    answer = runner.generate(prompt, max_new_tokens=8, ignore_eos=True)
    shape, metrics = runner.shape, answer.metrics
    assert answer.text == runner.tokenizer.decode(answer.token_ids)
    assert (metrics.prompt_tokens, metrics.generated_tokens, metrics.seen_tokens) == (300, 8, 307)
    # SnapKV keeps 48 entries of the prompt, and what is answered; room for a last token is unused.
    assert metrics.kept_entries_mean == 48 + 7
    assert answer.kv_bytes == shape.layers * shape.kv_heads * (48 + 8) * shape.kv_size.entry_bytes(
        4
    )
    assert answer.full_kv_bytes == 307 * shape.layers * shape.kv_heads * 2 * shape.head_dim * 4
    assert json.loads(json.dumps(metrics.to_json()))["budget"] == 48
    for part in ("read 300 tokens", "kept 55 of 307 (18%) with snapkv", "length limit"):
        assert part in metrics.line()
    line = runner.generate([5, 6, 7], max_new_tokens=1, ignore_eos=True).metrics.line()
    assert "kept all 3 " in line and " of " not in line and "tokens/s" not in line


def test_the_end_token_ends_an_answer_unless_it_is_ignored(
    runner: kvlite.Runner, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = runner.generate(prompt, max_new_tokens=8, ignore_eos=True)
    end = free.token_ids[3]
    assert end not in free.token_ids[:3]
    monkeypatch.setattr(runner.model, "stop_ids", frozenset({end}))
    ended = runner.generate(prompt, max_new_tokens=8)
    assert (ended.token_ids, ended.finish_reason) == (free.token_ids[:4], "stop")
    assert ended.text == runner.tokenizer.decode(free.token_ids[:3])
    assert runner.generate(prompt, max_new_tokens=8, ignore_eos=True).token_ids == free.token_ids


def test_seeds_make_draws_repeatable(runner: kvlite.Runner, prompt: list[int]) -> None:
    def drawn(seed: int | None) -> list[int]:
        options = {"temperature": 1.5, "seed": seed, "max_new_tokens": 12}
        return runner.generate(prompt, ignore_eos=True, **options).token_ids

    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(None) != drawn(None)


def test_a_template_that_rewrites_the_past_loses_nothing(
    runner: kvlite.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of Llama 3 and Gemma do, which trim, or of Qwen 3, which drops thoughts."""
    trims = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}[assistant]"
    monkeypatch.setattr(runner.tokenizer, "chat_template", trims)
    talk = runner.conversation(method="full", max_new_tokens=4)
    talk.read("A document. " * 30)
    first = [piece.token_id for piece in talk.stream(" What? ")]
    before = [*talk.token_ids, first[-1]]
    second = list(talk.stream("Why?"))
    assert talk.token_ids[: len(before)] == before
    added = talk.token_ids[len(before) : len(talk.token_ids) - len(second) + 1]
    assert runner.tokenizer.decode(added) == "[user]Why?[assistant]"


# --- conversations -------------------------------------------------------------------------------


def test_reading_tokens_then_text_is_reading_them_in_one_piece(
    runner: kvlite.Runner, prompt: list[int]
) -> None:
    talk = runner.conversation(method="full")
    talk.read(prompt)
    talk.read(" and some words")
    talk.read([])
    talk.read("")
    words = runner.tokenizer.encode(" and some words", add_special_tokens=False)
    assert talk.token_ids == prompt + words
    whole = runner.generate([*prompt, *words, 500], method="full", ignore_eos=True)
    assert talk.generate([500], ignore_eos=True).token_ids == whole.token_ids


def test_stream_speaks_in_the_models_chat_template(runner: kvlite.Runner) -> None:
    talk = runner.conversation(method="full", max_new_tokens=5)
    tokenizer, said = runner.tokenizer, []
    for text in ("Who are you?", "Really?"):
        said.append({"role": "user", "content": text})
        expected = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        pieces = list(talk.stream(text))
        read = tokenizer.decode(talk.token_ids[: 1 - len(pieces)])
        assert read == expected
        said.append({"role": "assistant", "content": text_of(pieces)})
        assert talk.messages == said


def test_every_piece_carries_the_account_so_far(runner: kvlite.Runner, prompt: list[int]) -> None:
    talk = runner.conversation(max_new_tokens=20)
    talk.read(prompt)
    seen = 300
    for turn in range(2):
        pieces = list(talk.stream("What then?"))
        metrics_list = [piece.metrics for piece in pieces]
        assert [each.generated_tokens for each in metrics_list] == list(range(1, len(pieces) + 1))
        assert [each.finish_reason for each in metrics_list[:-1]] == [None] * (len(pieces) - 1)
        assert metrics_list[-1].finish_reason in ("length", "stop")
        # The account goes on where the last turn's ended, one token a piece.
        assert metrics_list[0].seen_tokens == seen + metrics_list[0].prompt_tokens
        seen = metrics_list[-1].seen_tokens
        assert [each.seen_tokens for each in metrics_list] == [
            metrics_list[0].seen_tokens + step for step in range(len(pieces))
        ]
        assert all(each.time_to_first_token_s > 0 for each in metrics_list)
        assert talk.messages[2 * turn + 1]["content"] == text_of(pieces)


def test_pieces_join_to_the_answer(runner: kvlite.Runner, prompt: list[int]) -> None:
    options = {"max_new_tokens": 40, "temperature": 1.0, "seed": 3}
    answer = runner.generate(prompt, ignore_eos=True, **options)
    pieces = list(runner.conversation().stream_tokens(prompt, ignore_eos=True, **options))
    assert text_of(pieces) == answer.text == runner.tokenizer.decode(answer.token_ids)
    assert ids_of(pieces) == answer.token_ids
    assert len({*answer.token_ids}) > 20  # or the rest of this file would compare nothing


def test_a_template_that_leaves_out_the_past_still_says_the_question(
    runner: kvlite.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.tokenizer, "chat_template", FORGETFUL)
    talk = runner.conversation(method="full", max_new_tokens=3)
    for question in ("Who are you?", "Really?"):
        read = len(talk.token_ids)
        pieces = list(talk.stream(question))
        said = runner.tokenizer.decode(talk.token_ids[read : 1 - len(pieces)])
        assert said.endswith(f" {question}")


# --- stopping, refusing, failing: nothing is lost ------------------------------------------------


class StopAfter:
    """Sets its event after so many chunks of reading."""

    def __init__(self, chunks: int) -> None:
        self.event = threading.Event()
        self.chunks = chunks

    def progress(self, done: int, total: int) -> None:
        self.chunks -= 1
        if self.chunks == 0:
            self.event.set()


def held(talk: kvlite.Conversation) -> list[list[int]]:
    """Positions each layer and KV head holds, ascending."""
    return [
        sorted(line[: head_group.used])
        for layer in talk.cache.layers
        for head_group in layer.head_groups
        for line in head_group.positions[0].tolist()
    ]


FORGETFUL = "{{ messages | length }} {{ messages[-1]['content'] }}"


@pytest.mark.parametrize(
    ("method", "template"), [("full", None), ("snapkv:window=8", FORGETFUL), ("kvx", None)]
)
def test_a_stopped_reading_leaves_the_conversation_as_it_was(
    runner: kvlite.Runner,
    prompt: list[int],
    method: str,
    template: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the chat template shows nothing of the past."""
    if template:
        monkeypatch.setattr(runner.tokenizer, "chat_template", template)
    stopped, fresh = (runner.conversation(method=method, chunk=16) for _ in range(2))
    for talk in (stopped, fresh):
        talk.read(prompt)
        list(talk.stream("What is it about?"))
    before = held(stopped)
    state = (stopped.cache.seen, [*stopped.token_ids], [*stopped.messages])
    for chunks in (1, 7):
        stop = StopAfter(chunks)
        for call in (
            lambda stop=stop: stopped.read(
                prompt, callbacks=Callbacks(progress=stop.progress, cancel=stop.event)
            ),
            lambda stop=stop: list(
                stopped.stream(
                    "And " * 50, callbacks=Callbacks(progress=stop.progress, cancel=stop.event)
                )
            ),
        ):
            stop.event.clear()
            stop.chunks = chunks
            with pytest.raises(Stopped):
                call()
            assert held(stopped) == before
            assert state == (stopped.cache.seen, stopped.token_ids, stopped.messages)
    for text in ("Why?", "Why not?"):
        expected = list(fresh.stream(text))
        assert ids_of(list(stopped.stream(text))) == ids_of(expected)
    assert stopped.messages == fresh.messages


@pytest.mark.parametrize("template", [None, FORGETFUL], ids=["own", "forgetful"])
def test_what_is_too_long_is_refused_and_leaves_the_conversation_usable(
    runner: kvlite.Runner, prompt: list[int], template: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if template:
        monkeypatch.setattr(runner.tokenizer, "chat_template", template)
    refused, fresh = (runner.conversation() for _ in range(2))
    for talk in (refused, fresh):
        list(talk.stream("What is it about?"))
    seen = refused.cache.seen
    for call in (
        lambda: refused.read([5] * 1024),
        lambda: refused.generate([5] * 1024),
        lambda: list(refused.stream("word " * 1024)),
    ):
        with pytest.raises(ContextError, match=r"tokens do not fit this model, .* 1,024"):
            call()
    assert refused.cache.seen == seen > 0
    assert refused.messages == fresh.messages
    assert ids_of(list(refused.stream("Why?"))) == ids_of(list(fresh.stream("Why?")))


def test_a_stopped_answer_or_one_that_nobody_hears_is_remembered_as_far_as_it_was_said(
    runner: kvlite.Runner,
) -> None:
    talk, stop, pieces = runner.conversation(method="full", max_new_tokens=30), StopAfter(0), []
    for piece in talk.stream("Tell me everything.", callbacks=Callbacks(cancel=stop.event)):
        pieces.append(piece)
        if len(pieces) == 3:
            stop.event.set()
    assert [piece.metrics.finish_reason for piece in pieces] == [None] * 3 + ["interrupted"]
    assert "interrupted" in pieces[-1].metrics.line()
    assert_remembered(runner, talk, "Tell me everything.", text_of(pieces))
    talk = runner.conversation(method="full", max_new_tokens=30)
    left: Iterator[Piece] = talk.stream("Tell me everything.")
    heard = [next(left) for _ in range(3)]
    left.close()  # type: ignore[attr-defined]
    assert_remembered(runner, talk, "Tell me everything.", text_of(heard))


def test_the_token_that_ends_an_answer_is_not_read_on_top_of_the_templates_own(
    runner: kvlite.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = "Tell me everything."
    free = list(runner.conversation(method="full").stream(question))
    end = free[3].token_id
    monkeypatch.setattr(runner.model, "stop_ids", frozenset({end}))
    talk = runner.conversation(method="full")
    pieces = list(talk.stream(question))
    assert ids_of(pieces) == ids_of(free[:4]) and pieces[-1].metrics.finish_reason == "stop"
    assert_remembered(runner, talk, question, text_of(free[:3]))


def assert_remembered(
    runner: kvlite.Runner, talk: kvlite.Conversation, question: str, answer: str
) -> None:
    said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    assert talk.messages == said
    again = list(talk.stream("Go on.", max_new_tokens=4))
    said.append({"role": "user", "content": "Go on."})
    template = runner.tokenizer.apply_chat_template(
        said, tokenize=False, add_generation_prompt=True
    )
    read = talk.token_ids[: 1 - len(again)]
    assert runner.tokenizer.decode(read) == template
    assert len(read) + len(again) - 1 == talk.cache.seen
    fresh = runner.generate(read, method="full", max_new_tokens=4)
    assert fresh.token_ids == ids_of(again)


def test_an_interrupted_step_is_not_answered_from(
    runner: kvlite.Runner, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where tokens are written over others, which are lost then."""
    talk = runner.conversation(recall="off", method="h2o", budget="20")
    talk.generate(prompt, max_new_tokens=2)
    step_layer, calls = runner.model.step_layer, 0

    def interrupted(index: int) -> object:
        nonlocal calls
        calls += index == 2
        if index == 2 and calls == 2:
            raise KeyboardInterrupt
        return step_layer(index)

    monkeypatch.setattr(runner.model, "step_layer", interrupted)
    pieces = talk.stream_tokens([500], ignore_eos=True, max_new_tokens=9)
    with pytest.raises(KeyboardInterrupt):
        for piece in pieces:
            assert piece.metrics.finish_reason is None
    for call in (
        lambda: talk.generate([501]),
        lambda: talk.read([501]),
        lambda: list(talk.stream("Well?")),
    ):
        with pytest.raises(InterruptedCacheError, match="start a new conversation"):
            call()
    # The model itself is unharmed.
    assert runner.generate(prompt, ignore_eos=True).finish_reason == "length"


# --- turns that end otherwise than expected -------------------------------------------------------


def test_a_turn_is_refused_until_the_answer_before_it_was_heard_or_closed(
    runner: kvlite.Runner,
) -> None:
    left, whole = (runner.conversation(method="full", max_new_tokens=4) for _ in range(2))
    answer = left.stream("One?")
    heard = [next(answer), next(answer)]
    for another in (
        lambda: next(left.stream("Two?")),
        lambda: left.read([600]),
        lambda: left.undo(),
        lambda: next(left.regenerate()),
    ):
        with pytest.raises(SettingError, match="an answer is still going on here"):
            another()
    [(_, refusal)] = left.ask_each(["Two?"])
    assert isinstance(refusal, SettingError) and "still going on" in str(refusal)
    heard.append(next(answer))  # nothing was lost
    answer.close()
    assert len(heard) == 3 and len(left.messages) == 2
    first = list(left.stream("Two?"))
    assert [message["content"] for message in left.messages] == [
        "One?",
        text_of(heard),
        "Two?",
        text_of(first),
    ]
    seen = left.cache.seen
    assert list(answer) == [] and left.cache.seen == seen
    list(whole.stream("One?", max_new_tokens=3))
    assert ids_of(list(whole.stream("Two?"))) == ids_of(first)
    assert whole.token_ids == left.token_ids
    for piece in left.stream("Three?"):  # a loop that is left closes its stream
        if piece.text:
            break
    left.read([600])


def test_halves_of_characters_are_replaced(runner: kvlite.Runner) -> None:
    talk = runner.conversation(method="full", max_new_tokens=2)
    talk.read("a\udcffb")
    list(talk.stream("\udcff what"))
    assert "a\ufffdb" in runner.tokenizer.decode(talk.token_ids)
