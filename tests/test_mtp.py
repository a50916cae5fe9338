"""A model's own MTP head says what transformers' says, and answers are as without it."""

import shutil
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpLayer, MtpModel

import kvlite
from kvlite.cache.hidden_log import ROWS, HiddenLog
from kvlite.cache.segment import bytes_held
from kvlite.engine import mtp
from kvlite.engine.callbacks import Callbacks
from kvlite.engine.mtp import MtpGuesses
from kvlite.engine.prefill import prefill
from kvlite.engine.prompt_lookup import PromptLookup
from kvlite.engine.speculate import Pace
from kvlite.errors import ModelError
from kvlite.methods.full import Full
from kvlite.methods.layer_policy import layer_policies
from kvlite.model.mtp import empty_mtp, stored_name
from kvlite.model.weights import Weights, held_tensors
from kvlite.offload.weights.loader import load_mtp
from tests.conftest import Tiny, make_tiny
from tests.test_speculate import alike, opened

IDS = [3 + 7 * i % 190 for i in range(60)]


def headed(name: str, device: str = "cpu", *, right: bool, **sizes: Any) -> Tiny:
    """A tiny random model with a head: one that says what follows a token where nothing lies before
    it, as this model often does, or one that says anything."""
    tiny = make_tiny(name, device, mtp_num_hidden_layers=1, **sizes)
    head = empty_mtp(tiny.model.module, torch.float32).to_empty(device="cpu")
    for each, parameter in head.named_parameters():
        parameter.data = 0.1 * torch.randn(parameter.shape)
        if right:
            parameter.data = torch.zeros(parameter.shape)
            if each == "eh_proj.weight":
                parameter.data[:, : len(parameter)] = torch.eye(len(parameter))
    tiny.model.mtp = head.to(device)
    return tiny


@pytest.fixture(autouse=True)
def proposes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it takes, and nothing else does."""
    monkeypatch.setattr(Pace, "factor", 0.0)
    monkeypatch.setattr(PromptLookup, "chances", lambda self, count: [])


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["qwen3-5", "qwen3-5-moe"])
def test_the_head_says_what_transformers_says(name: str) -> None:
    """Of each token, and further ones of what it made itself."""
    tiny = headed(name, right=False)
    model, main = tiny.model, tiny.reference
    main.config.num_mtp_layers, main.config.mtp_layer_types = 1, ["full_attention"]
    theirs = MtpModel(main, 1)
    kinds = type(main.model.layers[0]), type(main.model.norm)
    theirs.layers[0] = MtpLayer(theirs.config, *kinds, 0).eval()
    theirs.layers[0].load_state_dict(model.mtp.state_dict())
    with torch.no_grad():
        hidden = main(torch.tensor([IDS]), output_hidden_states=True).hidden_states[-1]

    def expected(end: int, count: int) -> list[int]:
        """What follows IDS[:end], of which the model saw all but the last."""
        ids, seen = IDS[1:end], hidden[:, : end - 1]
        for _ in range(count):
            at = torch.arange(1, len(ids) + 1)[None]
            with torch.no_grad():
                made = theirs.forward_layer(0, seen, at, None, torch.tensor([ids]))
                ids = [*ids, int(main.lm_head(made[:, -1]).argmax())]
            seen = torch.cat([seen, made[:, -1:]], 1)
        return ids[-count:]

    cache = model.empty_cache()
    cache.hidden = HiddenLog(torch.device("cpu"))
    policies = layer_policies(Full(), model.shape, 10**6, 60)
    prefill(model, cache, torch.tensor([IDS[:40]]), policies, chunk=16)
    guesses = MtpGuesses(model, cache.hidden, IDS[:40])
    for end in (41, 42, 45):
        if more := IDS[cache.seen : end - 1]:
            prefill(model, cache, torch.tensor([more]), policies)
        for token in IDS[len(guesses.token_ids) : end]:
            guesses.push(token)
        assert guesses.proposed(4) == expected(end, 4)


@pytest.mark.cases(1)
@pytest.mark.parametrize("how", [{}, {"temperature": 0.03, "seed": 5}], ids=str)
@pytest.mark.parametrize("right", [True, False])
def test_answers_are_those_without_it(right: bool, how: dict[str, Any]) -> None:
    """In fewer steps where it is right; in a second turn and drawn again, and after a stop."""
    tiny = headed("qwen3-5", right=right)
    given: dict[str, Any] = {"method": "full", "max_new_tokens": 24, **how}
    plain, talk = (opened(tiny.model, **given, speculate=each) for each in ("off", "auto"))
    for ids in (IDS, IDS[:9]):
        expected, answer = (each.generate(ids, ignore_eos=True) for each in (plain, talk))
        assert answer.token_ids == expected.token_ids
        metrics = answer.metrics
        assert metrics.proposed_tokens > 4 and expected.metrics.proposed_tokens == 0
        assert metrics.accepted_tokens >= 2 * right
        assert metrics.decode_steps == 23 - metrics.accepted_tokens
        alike(talk, plain)
    for each in (plain, talk):
        cancel, texts = Event(), list[str]()
        for piece in each.stream("5 6 7 8", callbacks=Callbacks(cancel=cancel)):
            texts.append(piece.text)
            if len(texts) == 5:
                cancel.set()
    alike(talk, plain)
    again = [[piece.token_id for piece in each.regenerate()] for each in (plain, talk)]
    assert again[0] == again[1]
    alike(talk, plain)


def test_a_log_has_the_last_tokens() -> None:
    log, every = HiddenLog(torch.device("cpu")), torch.randn(1, 3 * ROWS, 4)
    log.write(0, every[:, : ROWS + 7])
    assert (log.start, log.end) == (7, ROWS + 7)
    log.write(ROWS + 7, every[:, ROWS + 7 : ROWS + 9])
    assert log.of(range(ROWS - 3, ROWS + 9)).equal(every[:, ROWS - 3 : ROWS + 9])
    log.write(ROWS, every[:, :1])  # another answer to the same
    assert (log.start, log.end) == (9, ROWS + 1)
    assert log.of(range(ROWS, ROWS + 1)).equal(every[:, :1])
    log.write(2 * ROWS, every[:, 2 * ROWS : 2 * ROWS + 1])  # what lies between is not known
    assert (log.start, log.end) == (2 * ROWS, 2 * ROWS + 1)


def test_a_full_layer_keeps_the_last_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an answer of any length takes as much."""
    monkeypatch.setattr(mtp, "ROWS", 8)
    monkeypatch.setattr(mtp, "ROOM", 40)
    tiny, log = headed("qwen3-5", right=False), HiddenLog(torch.device("cpu"))
    guesses = MtpGuesses(tiny.model, log, IDS[:1])
    for at, token in enumerate(IDS[1:]):
        log.write(at, torch.randn(1, 1, tiny.model.shape.hidden))
        guesses.push(token)
        assert len(guesses.proposed(3)) == 3
    layer = guesses._layer
    assert layer is not None and layer.head_groups[0].capacity == 40
    used = layer.head_groups[0].used
    assert layer.head_groups[0].positions[0, 0, :used].tolist() == list(range(60 - used, 60))


@pytest.mark.long
def test_it_is_loaded_and_planned(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is room; a checkpoint without it, as quantized ones are, does as well."""

    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("made up by a test")

    tiny = headed("qwen3-5", right=True, vocab_size=49_152)
    folder, given = tmp_path / "model", {"method": "full", "max_new_tokens": 8}
    tiny.reference.save_pretrained(folder)
    for each in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_folder / each, folder)
    assert kvlite.load(str(folder), **given, speculate="auto").model.mtp is None
    stored = load_file(folder / "model.safetensors")
    head: dict[str, Tensor] = tiny.model.mtp.state_dict()
    whole = stored | {stored_name(name): each for name, each in head.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    plain = kvlite.load(str(folder), **given)
    runner = kvlite.load(str(folder), **given, speculate="auto")
    assert plain.model.mtp is None and plain.plan is not None and runner.plan is not None
    for name, each in runner.model.mtp.state_dict().items():
        assert each.equal(head[name])
    weights = sum(each.nbytes for each in head.values())
    assert bytes_held(held_tensors(runner.model.mtp)) == weights
    for name, phase in runner.plan.phases.items():
        assert weights < phase.pop("MTP head") < weights + 2**20
        assert phase == plain.plan.phases[name]
    answers = [each.conversation().generate(IDS, ignore_eos=True) for each in (plain, runner)]
    assert answers[0].token_ids == answers[1].token_ids and answers[1].metrics.proposed_tokens
    room = f"{runner.plan.peak_bytes // 1024 - 1}KiB"
    tight = kvlite.load(str(folder), **given, speculate="auto", vram=room)
    assert tight.model.mtp is None and tight.plan is not None
    assert "MTP head is left out: there is no room" in tight.plan.changes[-1]
    with monkeypatch.context() as short:
        short.setattr("kvlite.offload.weights.loader.read_and_pack", no_memory)
        without = kvlite.load(str(folder), **given, speculate="auto")
    assert without.model.mtp is None and without.plan is not None and plain.plan is not None
    assert without.plan.phases == plain.plan.phases
    assert "MTP head is left out: there is no room" in without.plan.changes[-1]
    assert without.conversation().generate(IDS, ignore_eos=True).token_ids == answers[0].token_ids
    tight.model.weights = Weights("gptq", torch.float32, stored=True)
    assert load_mtp(tight.model)
    save_file(
        {name: each for name, each in whole.items() if name != "mtp.fc.weight"},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    assert not load_mtp(tight.model)
    with pytest.raises(ModelError, match=r"has no mtp\.fc\.weight of the size"):
        kvlite.load(str(folder), **given, speculate="auto")
