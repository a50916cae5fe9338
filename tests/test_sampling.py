"""Drawing tokens: greedy, seeded, and within what the settings allow."""

from collections import Counter
from typing import Any

import torch

from kvlite.config.settings import Settings
from kvlite.engine.sampling import Sampler
from kvlite.methods.engine_config import EngineConfig

CPU = torch.device("cpu")
LOGITS = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]])


def draws(count: int = 400, **settings: Any) -> Counter[int]:
    sampler = Sampler(EngineConfig.from_settings(Settings(**settings)), CPU)
    return Counter(sampler(LOGITS.clone(), [0, 1]) for _ in range(count))


def test_temperature_zero_takes_the_likeliest_whatever_the_seed() -> None:
    for coldest in (0, 1e-300):
        assert set(draws(5, seed=1, temperature=coldest)) == {4}
        assert set(draws(5, seed=2, temperature=coldest)) == {4}


def test_the_same_seed_draws_the_same_tokens() -> None:
    def drawn(seed: int) -> list[int]:
        sampler = Sampler(EngineConfig.from_settings(Settings(temperature=2.0, seed=seed)), CPU)
        return [sampler(LOGITS.clone(), []) for _ in range(40)]

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    seen = draws(4000, temperature=2.0, seed=0)
    expected = (LOGITS[0] / 2).softmax(-1)
    for token in range(5):
        assert abs(seen[token] / 4000 - float(expected[token])) < 0.04


def test_top_k_top_p_and_min_p_cut_the_tail() -> None:
    assert set(draws(temperature=5.0, seed=0, top_k=2)) == {3, 4}
    assert set(draws(temperature=1.0, seed=0, top_p=0.6)) == {4}
    assert set(draws(temperature=1.0, seed=0, min_p=0.3)) == {3, 4}


def test_repetition_is_penalised_where_asked() -> None:
    sampler = Sampler(EngineConfig.from_settings(Settings(repetition_penalty=2.0)), CPU)
    assert sampler(LOGITS.clone(), [4]) == 3
    assert sampler(LOGITS.clone(), []) == 4


def test_penalties_count_what_the_answer_has_and_biases_are_added() -> None:
    settings = Settings(
        presence_penalty=0.75, frequency_penalty=0.5, logit_bias=("0:4", "4:-1.5"), seed=1
    )
    sampler, came = Sampler(EngineConfig.from_settings(settings), CPU), list[int]()
    for _ in range(30):
        expected = LOGITS[0].clone()
        expected[0] += 4
        expected[4] -= 1.5
        for token in range(5):
            times = came.count(token)
            expected[token] -= 0.5 * times + 0.75 * (times > 0)
        drawn = sampler(LOGITS.clone(), [4, 4, 4])  # the prompt does not count
        assert drawn == int(expected.argmax())
        assert not sampler.take(drawn)
        came.append(drawn)
    assert {*came} == {0, 1, 2, 3, 4}
