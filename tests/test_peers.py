"""Others' caches on the same prompts: what is asked of their program, and what it does."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvlite.bench import peer_program, peers
from kvlite.bench.fork import Choice
from kvlite.bench.niah import Niah
from kvlite.bench.peers import PeerChoice, PeerProgram, peer_choices
from kvlite.bench.questions import QuestionRow, ask
from kvlite.bench.speed import Speed
from kvlite.bench.task import measure
from kvlite.config.settings import Settings
from kvlite.errors import ModelError, SettingError
from kvlite.methods import parse_method

from .conftest import Tiny
from .test_questions import make_case, recipes

VERSIONS = {"kvpress": "0.5.5", "transformers": "5.2.0", "torch": "2.13.0"}


@pytest.fixture
def program(llama: Tiny, monkeypatch: pytest.MonkeyPatch) -> Iterator[PeerProgram]:
    """A fake one, that is a process nevertheless."""
    monkeypatch.setattr(peers, "python", lambda _: Path(sys.executable))
    monkeypatch.setattr(peers, "PROGRAM", Path(__file__).with_name("fake_peer.py"))
    chosen = peer_choices(["kvpress:snapkv", "transformers:hqq4"], [40, 20], 120)
    made = PeerProgram(llama.model, Path("somewhere"), chosen)
    yield made
    made.close()


def niah(**given: Any) -> Niah:
    return Niah(
        tokens=[500], methods=[], budgets=[64], kv_bits=["16"], depths=2, kinds=["number"],
        question="known", repeats=1, **given,
    )  # fmt: skip


def test_rows_of_peers_stand_beside_ours(llama: Tiny, program: PeerProgram) -> None:
    own = [Choice(parse_method("full"), 120), Choice(parse_method("snapkv:window=8"), 40)]
    work = ask(llama.model, recipes([0]), own, ["known", "unknown"], program)
    rows: list[QuestionRow] = list(measure(work))
    about = [(row.question, row.method, row.budget) for row in rows]
    names = ["full", "snapkv:window=8", "kvpress:snapkv", "kvpress:snapkv", "transformers:hqq4"]
    sizes = [120, 40, 40, 20, 120]
    assert about == [
        (question, name, size)
        for question in ("known", "unknown")
        for name, size in zip(names, sizes, strict=True)
    ]
    case = make_case(0)
    for row in rows[2:5] + rows[7:]:
        # The question counts among the entries, whether it was read before the cut or after.
        assert (row.entries_mean, row.kv_bytes) == (row.budget, 10 * row.budget)
        read_first = case.prompt if row.question == "known" else case.context
        assert row.surprise == len(read_first)
        assert (row.reading_s, row.token_ms) == (2.0, 30.0)
        assert row.answer == llama.model.tokenizer.decode(list(case.forced))
    assert all(row.reading_s and row.token_ms for row in rows)
    lines = niah().table(rows)
    assert {line["reading, s"] for line in lines[2:5]} == {"2.00"} and lines[0]["a token, ms"]
    done = [QuestionRow.key(row.to_json()) for row in rows]
    assert list(measure(work, frozenset(done[:-1]))) == rows[-1:]


def test_what_a_peer_cannot_do_is_one_sentence(program: PeerProgram) -> None:
    case = make_case(0)
    with pytest.raises(ModelError, match=r"kvpress:fails fails in .*: ValueError: too short"):
        program.told(PeerChoice("kvpress:fails", 40), case, known=True)
    assert program.told(PeerChoice("kvpress:knorm", 40), case, known=True)["entries_mean"] == 40
    for _ in range(2):
        with pytest.raises(ModelError, match=r"kvpress:dies fails in .*: its program has ended"):
            program.told(PeerChoice("kvpress:dies", 40), case, known=True)


def test_a_press_that_is_not_there_is_refused_before_anything_is_read(
    llama: Tiny, program: PeerProgram
) -> None:
    chosen = peer_choices(["kvpress:knorm", "kvpress:nosuch"], [40], 120)
    with pytest.raises(SettingError, match=r"--peer kvpress:nosuch is none of .* alone: knorm$"):
        PeerProgram(llama.model, Path("somewhere"), chosen)


def test_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVLITE_DATA", str(tmp_path))
    with pytest.raises(SettingError, match="'snapkv' is neither a press of kvpress"):
        niah(peer=["snapkv"])
    with pytest.raises(SettingError, match=r"which is not there: kvlite bench install-peers makes"):
        niah(peer=["kvpress:snapkv"])
    monkeypatch.setattr("kvlite.bench.questions.versions", lambda: VERSIONS)
    options = niah(peer=["kvpress:snapkv"]).options()
    assert (options["peer"], options["versions"]) == (["kvpress:snapkv"], VERSIONS)
    assert "peer" not in niah().options()  # runs of before go on


@dataclass
class KeepLastPress:
    """As kvpress' are: keeps the last entries of each layer."""

    compression_ratio: float

    def __call__(self, model: Any) -> "KeepLastPress":
        self.model = model
        return self

    def __enter__(self) -> None:
        layers = self.model.model.layers
        self.hooks = [
            each.self_attn.register_forward_hook(self.cut, with_kwargs=True) for each in layers
        ]

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def cut(self, module: Any, _: Any, given: dict[str, Any], output: Any) -> Any:
        layer = given["past_key_values"].layers[module.layer_idx]
        kept = int(layer.keys.shape[2] * (1 - self.compression_ratio))
        layer.keys, layer.values = layer.keys[:, :, -kept:], layer.values[:, :, -kept:]
        return output


@pytest.mark.parametrize("known", [True, False])
def test_their_program_keeps_reads_and_answers(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """With a press that keeps the last entries, it says what one pass says that sees no others."""
    monkeypatch.setitem(sys.modules, "kvpress", SimpleNamespace(KeepLastPress=KeepLastPress))
    case, kept = make_case(0), 30
    model = peer_program.opened(
        {
            "model": str(tiny_folder),
            "dtype": "float32",
            "device": "cpu",
            "threads": torch.get_num_threads(),
        }
    )
    context = case.prompt if known else [*case.context]
    asked = {
        "peer": "kvpress:keeplast",
        "keep": kept,
        "context": context,
        "question": [] if known else case.question,
        "forced": case.forced,
        "at_keys": case.at_keys,
        "stop": [],
        "new_tokens": 4,
    }
    with torch.inference_mode():
        told = peer_program.told(model, asked)
        said = one_pass(model, [*case.prompt, *case.forced], len(context), kept)
        scores = said.log_softmax(-1)[len(case.prompt) - 1 :]
        nats = [-float(scores[at, case.forced[at]]) for at in case.at_keys]
        answer: list[int] = []
        while len(answer) < asked["new_tokens"]:
            said = one_pass(model, [*case.prompt, *answer], len(context), kept)
            answer.append(int(said[-1].argmax()))
    assert told["surprise"] == pytest.approx(sum(nats) / len(nats), abs=1e-4)
    assert told["ids"] == answer
    entries, shape = kept + len(asked["question"]), model.config
    assert told["entries_mean"] == entries
    width = shape.num_key_value_heads * shape.hidden_size // shape.num_attention_heads
    assert told["kv_bytes"] == 2 * 4 * entries * width * shape.num_hidden_layers


def test_unknown_presses_are_named_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which is not even there; a press that is made around another is none to be named."""
    presses = {"KeepLastPress": KeepLastPress, "WrapperPress": lambda press: press}
    monkeypatch.setitem(sys.modules, "kvpress", SimpleNamespace(**presses))
    assert peer_program.missing(["kvpress:keeplast", "transformers:hqq4"]) == {}
    asked = [{"peers": ["kvpress:keeplast", f"kvpress:{name}"]} for name in ("snapkv", "wrapper")]
    monkeypatch.setattr("sys.stdin", StringIO("".join(f"{json.dumps(each)}\n" for each in asked)))
    answers = StringIO()
    monkeypatch.setattr("sys.stdout", answers)
    peer_program.main()
    assert list(map(json.loads, answers.getvalue().splitlines())) == [
        {"unknown": f"kvpress:{name}", "presses": ["keeplast"]} for name in ("snapkv", "wrapper")
    ]


def one_pass(model: Any, ids: list[int], cut: int, kept: int) -> torch.Tensor:
    """Logits `(tokens, vocab)`, where tokens from `cut` on see the last `kept` before it alone."""
    sees = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    sees[cut:, : cut - kept] = False
    mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
    logits: torch.Tensor = model(torch.tensor([ids]), attention_mask=mask[None, None]).logits[0]
    return logits


def test_others_run_on_one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is said before a model is opened."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("kvlite.bench.questions.versions", lambda: VERSIONS)
    spread = Settings(device="cuda:0,cuda:1")
    speed = Speed(
        tokens=[500], method="full", budget="64", kv_bits="16", recall="off", repeats=1,
        new_tokens=3,
    )  # fmt: skip
    beside = (speed, "transformers"), (niah(peer=["kvpress:snapkv"]), "kvpress:snapkv")
    for task, name in beside:
        with pytest.raises(SettingError, match=f"several cards, and {name} runs on one: name one"):
            task.settings(spread)
        assert task.settings(Settings(device="cuda:1")).device == "cuda:1"
    assert niah().settings(spread) is spread
