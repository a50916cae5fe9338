"""An interrupt at any line of a decode step: the token is in the cache once, or not at all."""

import sys
from collections.abc import Callable
from copy import deepcopy
from types import FrameType
from typing import Any

import pytest
import torch

from kvlite.cache import KVCache
from kvlite.config.settings import Settings
from kvlite.conversation.runner import Runner
from kvlite.conversation.turn import Turn
from kvlite.engine.step import StepRows, decode_step, step
from kvlite.errors import InterruptedCacheError

from .conftest import make_tiny
from .test_speculate import IDS, opened
from .test_step_program import Read, read


def interrupted(work: Callable[[], Any], line: int) -> bool:
    """Do work with an interrupt at its `line`-th line of kvlite's own; whether it came to that."""
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if "/kvlite/" not in frame.f_code.co_filename or "/tests/" in frame.f_code.co_filename:
            return None
        left -= event == "line"
        if not left:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def once(cache: KVCache) -> bool:
    """Whether no layer holds a token twice."""
    groups = [group for layer in cache.layers for group in layer.head_groups]
    lines = [line for each in groups for line in each.positions[0, :, : each.used].tolist()]
    return all(len(line) == len({*line}) for line in lines)


@pytest.mark.parametrize("stride", [23, pytest.param(5, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("name", "method"), [("llama", "full"), ("llama", "h2o"), ("lfm2", "full"), ("llama4", "full")]
)
def test_a_step(name: str, method: str, stride: int) -> None:
    made = read(make_tiny(name), method)
    token = made.logits.argmax(-1)

    def taken(each: Read) -> torch.Tensor:
        given = each.cache, token, each.policies
        return decode_step(made.model, *given)

    def fresh() -> Read:
        return Read(
            made.model, deepcopy(made.cache), [*made.policies], made.logits, [*made.token_ids]
        )

    expected, found = taken(fresh()), set[str]()
    for line in range(1, 10**6, stride):
        each = fresh()
        rows = StepRows(made.model, each.cache, token[None], each.policies)
        if not interrupted(lambda rows=rows: step(made.model, [rows]), line):
            break
        if each.cache.writing:
            found.add("refused")
            with pytest.raises(InterruptedCacheError):
                taken(each)
        elif each.cache.seen > made.cache.seen:
            found.add("there")
        else:
            found.add("not there")
            assert torch.allclose(taken(each), expected, atol=1e-5), line
        assert once(each.cache), line
    assert "not there" in found and line > 20 * stride
    assert ("refused" in found) == (method == "h2o")


@pytest.mark.parametrize("stride", [61, pytest.param(13, marks=pytest.mark.long)])
@pytest.mark.parametrize("speculate", ["off", "auto"])
def test_a_turn(speculate: str, stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows whether its token is in the cache, and goes on."""
    model, enter, going = make_tiny("llama").model, Turn._enter, 0
    settings = Settings(method="full", max_new_tokens=6, speculate=speculate)
    ids = [3 + 7 * at % 9 for at in range(40)]
    line, came = 0, True

    def third(turn: Turn, *given: Any) -> None:
        nonlocal going, came
        going += 1
        if going == 3:
            came = interrupted(lambda: enter(turn, *given), line)
            if came:
                raise KeyboardInterrupt
        else:
            enter(turn, *given)

    monkeypatch.setattr(Turn, "_enter", third)
    while came:
        line, going, talk = line + stride, 0, Runner(model, settings).conversation()
        try:
            talk.generate(ids, ignore_eos=True)
        except KeyboardInterrupt:
            assert len(talk.token_ids) == talk.cache.seen, line
            assert len(talk.token_ids) + len(talk.context.pending_ids) == len(ids) + 3
            if talk.cache.writing:  # for a few lines nobody knows
                continue
        going = 100
        talk.generate([5], ignore_eos=True, max_new_tokens=2)
        assert once(talk.cache) and talk.cache.seen == len(talk.token_ids), line
    assert line > 5 * stride


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.long)])
def test_what_rejected_tokens_recalled_goes_back(stride: int) -> None:
    """Or the cache is of no use: no entry has another's position."""
    model = make_tiny("llama").model
    talk = opened(model, budget="36", recall_entries=8, max_new_tokens=2)
    talk.generate(IDS, ignore_eos=True)
    turn, line = talk.context.turn, 1
    assert turn is not None and turn.recall is not None
    ids = torch.tensor([[5, 9, 30, 70, 9]])
    rows = StepRows(model, talk.cache, ids, turn.policies, turn.recall)
    step(model, [rows])
    refused = 0
    while True:
        each = deepcopy(rows, {id(model): model})
        if not interrupted(each.leave, line):
            break
        assert each.recall is not None
        if not each.cache.writing:
            for layer, source in zip(each.cache.layers, each.recall.store.layers, strict=True):
                group, far = layer.head_groups[0], source.head_group
                own = group.positions[:, :, : group.used].long()
                keys = far.residual_keys.gather(2, own[..., None].expand(-1, -1, -1, 16))
                assert keys.equal(group.residual_keys[:, :, : group.used])
        else:
            refused += 1
            with pytest.raises(InterruptedCacheError):
                each.cache.require_whole()
        line += stride
    assert refused > 10
