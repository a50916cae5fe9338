"""What a turn is expected to take, beside what it takes: live tensors, counted one by one."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import pytest
import torch

from kvlite.cache import KVBits, parse_kv_bits
from kvlite.cache.quantization.hadamard import rotation
from kvlite.config.settings import Settings
from kvlite.engine.prefill import prefill
from kvlite.engine.step import decode_step
from kvlite.errors import SettingError
from kvlite.memory.meter import TensorMeter
from kvlite.methods import METHODS, parse_method
from kvlite.methods.engine_config import EngineConfig
from kvlite.methods.layer_policy import can_recall, layer_policies, loses
from kvlite.model.load import LoadedModel
from kvlite.model.weights import held_tensors
from kvlite.offload import HostKVStore, Recall
from kvlite.planner.forecaster import Forecaster
from kvlite.planner.peaks import Forecast
from tests.conftest import ARCHITECTURES, make_tiny

CASES_EACH, LONGEST, CLOSE, UNDER = 4, 6, 0.01, 0.005


@dataclass(frozen=True)
class Case:
    """One cell of the grid."""

    method: str
    tokens: int
    budget: int
    bits: str
    chunk: int
    batch: int
    recall: int | None


def cases(start: int) -> Iterator[Case]:
    """Steps of different length through each axis, so that every pair of values is met."""
    methods = [*METHODS, Settings.method, "simlayerkv+snapkv", "kvx:layers=global,per_head=true"]
    lengths, budgets, bits = [40, 300, 517, 900], [48, 120, 256], ["16", "4", "8", "k8v4"]
    chunks, recalls = [64, 200, 1024], [None, 0, 32]
    for i in range(start, start + CASES_EACH):
        yield Case(
            methods[i % len(methods)],
            lengths[i % 4],
            budgets[i % 3],
            bits[i // 2 % 4],
            chunks[i // 3 % 3],
            1 + (i % 5 == 4),
            recalls[i // 4 % 3],
        )


def taken(model: LoadedModel, case: Case) -> int:
    """The peak over the weights, measured."""
    shape, bits = model.shape, parse_kv_bits(case.bits)
    method = parse_method(case.method).fitted(shape, model.calibration)
    policies = layer_policies(method, shape, case.budget, case.tokens, None, case.tokens, bits)
    cache = model.empty_cache(case.batch)
    store = store_of(model, case, bits)
    for size in shape.kv_sizes:
        rotation(size.dim, model.device)  # made once in a process
    meter = TensorMeter(held_tensors(model.module))
    weights = meter.live
    torch.manual_seed(0)
    with meter:
        ids = torch.randint(3, 190, (case.batch, case.tokens))
        context = torch.empty(case.batch, 0, dtype=torch.int64)
        logits = prefill(
            model,
            cache,
            ids,
            policies,
            context=context,
            store=store,
            reserve=LONGEST,
            chunk=case.chunk,
        )
        del ids, context
        recall = Recall(store, case.recall or 0) if store else None
        for _ in range(LONGEST - 1):
            logits = decode_step(model, cache, logits.argmax(-1), policies, recall)
    return meter.peak - weights


def store_of(model: LoadedModel, case: Case, bits: KVBits | None) -> HostKVStore | None:
    method = parse_method(case.method).fitted(model.shape, model.calibration)
    lost = loses(method, case.budget, case.tokens, LONGEST, bits)
    if case.recall is None or case.batch > 1 or not lost or not can_recall(method):
        return None
    return HostKVStore.empty(model.shape, model.dtype, None)


def expected(model: LoadedModel, case: Case) -> int:
    return forecast_of(model, case).peak_bytes


def forecast_of(model: LoadedModel, case: Case) -> Forecast:
    settings = Settings(method=case.method, budget=str(case.budget), kv_bits=case.bits)
    if case.recall is None or case.batch > 1:
        settings = settings.replace({"recall": "off"})
    else:
        settings = settings.replace({"recall_entries": case.recall})
    config = EngineConfig.from_settings(settings)
    forecaster = Forecaster(
        model.module.config, model.shape, model.calibration, model.tokenizer, on_cpu=True
    )
    return forecaster.first_turn(
        config,
        model.weights,
        chunk=case.chunk,
        tokens=case.tokens,
        longest=LONGEST,
        batch=case.batch,
    )


@pytest.mark.parametrize("method", ["h2o", "kvzip"])
def test_a_cpu_takes_what_was_expected_in_16_bits(method: str) -> None:
    """Attention is summed up in blocks of rows there, and not by a kernel."""
    model = make_tiny("llama", "cpu", torch.bfloat16).model
    case = Case(method, 900, 120, "16", 1024, 1, None)
    assert expected(model, case) == pytest.approx(taken(model, case), rel=CLOSE)


@pytest.mark.cases(1, 20)
@pytest.mark.parametrize("name, start", zip(ARCHITECTURES, cycle(range(0, 209, 11))))
def test_a_turn_takes_what_was_expected(name: str, start: int) -> None:
    model = make_tiny(name).model
    weights = TensorMeter(held_tensors(model.module)).live
    errors = {}
    for case in cases(start):
        parse_method(case.method)
        try:
            real = taken(model, case)
        except SettingError as error:
            with pytest.raises(SettingError, match=re.escape(str(error))):
                expected(model, case)
            continue
        errors[case] = (weights + expected(model, case)) / (weights + real) - 1
    far = {case: error for case, error in errors.items() if abs(error) > CLOSE}
    under = {case: error for case, error in errors.items() if error < -UNDER}
    assert len(errors) >= CASES_EACH // 2
    assert len(far) <= 0.05 * CASES_EACH + 0.4, far
    assert not under, under


@pytest.mark.parametrize("recall", [None, 32])
def test_the_first_forecast_of_a_process_is_what_later_ones_are(recall: int | None) -> None:
    """What is made once for all layers is not counted with each of them."""
    model, case = make_tiny("llama").model, Case("snapkv", 300, 120, "8", 64, 1, recall)
    rotation.cache_clear()
    assert forecast_of(model, case) == forecast_of(model, case)
