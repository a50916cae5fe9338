"""Quantized caches: what is held, that it is rounded once, and what is attended to."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlite.cache import KVBits, KVCache, KVHeadGroup, KVSize, LayerCache, parse_kv_bits
from kvlite.cache.copying import copied
from kvlite.cache.packed import Packed
from kvlite.cache.selection import Selection
from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.engine.callbacks import Callbacks
from kvlite.engine.implementations import implementation_for
from kvlite.engine.prefill import prefill
from kvlite.engine.quantized_attention import attend_segment
from kvlite.engine.step import decode_step
from kvlite.errors import SettingError, Stopped
from kvlite.memory.meter import TensorMeter
from kvlite.methods import METHODS, parse_method
from kvlite.methods.base import LayerView
from kvlite.methods.full import Full
from kvlite.methods.layer_policy import LayerPolicy, layer_policies
from kvlite.methods.scores import Window
from kvlite.model.load import LoadedModel
from kvlite.ops.attention import attend_with_rows
from kvlite.ops.softmax import Softmax
from tests.conftest import Tiny, make_tiny

from .oracles import quantized as oracle
from .test_engine import empty, positions

FOUR = KVBits(4, 4)
KIVI = KVBits(4, 4, 32, "kivi")


PLANNED = 200  # tokens of an answer, which storage is reserved for


def read(
    model: LoadedModel,
    cache: KVCache,
    ids: Tensor,
    method: str,
    bits: KVBits | None,
    budget: int = 40,
) -> tuple[Tensor, list[LayerPolicy]]:
    end = cache.seen + ids.shape[1]
    policies = layer_policies(
        parse_method(method).fitted(model.shape, model.calibration),
        model.shape,
        budget,
        end,
        cache.layers,
        ids.shape[1],
        bits,
    )
    context = torch.zeros(ids.shape[0], cache.seen, dtype=torch.int64)
    return prefill(
        model, cache, ids, policies, reserve=PLANNED, chunk=64, context=context
    ), policies


def random_ids(count: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 199, (1, count), generator=torch.Generator().manual_seed(seed))


def restored(cache: KVCache) -> dict[tuple[int, int, int], Tensor]:
    """Key and value of every quantized entry by layer, KV head and position, as it comes back."""
    found = {}
    for index, layer in enumerate(cache.layers):
        for head_group in layer.head_groups:
            segment = head_group.segment
            if not isinstance(segment, Packed):
                continue
            keys, values = (
                torch.empty(1, len(head_group.heads), segment.count, 16) for _ in range(2)
            )
            segment.write_keys(keys)
            segment.write_values(values)
            for row, head in enumerate(head_group.heads):
                for at, position in enumerate(segment.positions[0, row].tolist()):
                    both = torch.cat([keys[0, row, at], values[0, row, at]])
                    found[index, head, position] = both
    return found


def codes(cache: KVCache) -> dict[tuple[int, int, int], bytes]:
    """What is stored of every quantized entry, to the bit."""
    found = {}
    for index, layer in enumerate(cache.layers):
        for head_group in layer.head_groups:
            if not isinstance(head_group.segment, Packed):
                continue
            for row, head in enumerate(head_group.heads):
                for at, position in enumerate(head_group.segment.positions[0, row].tolist()):
                    stored = b""
                    for side in (head_group.segment.keys, head_group.segment.values):
                        each, scales, zeros = side.tensors
                        stored += each[0, row, at].numpy().tobytes()
                        stored += scales[0, row, :, at].numpy().tobytes()
                        stored += zeros[0, row, :, at].numpy().tobytes()
                    found[index, head, position] = stored
    return found


def unchanged(before: dict[Any, Any], after: dict[Any, Any]) -> int:
    """How many entries both hold; all of them the same."""
    both = before.keys() & after.keys()
    assert all(before[key] == after[key] for key in both)
    return len(both)


# --- what is held --------------------------------------------------------------------------------


def test_what_is_read_is_rounded_as_the_oracle_says(llama: Tiny) -> None:
    model, ids = llama.model, random_ids(120)
    exact, four = empty(model), empty(model)
    read(model, exact, ids, "full", None)
    read(model, four, ids, "full", FOUR)
    held = restored(four)
    assert len(held) == 4 * 2 * (120 - 36)
    for index, layer in enumerate(exact.layers):
        head_group = layer.head_groups[0]
        for head in range(2):
            keys, values = (
                head_group.keys[0, head, :120].double(),
                head_group.values[0, head, :120].double(),
            )
            mean = keys.mean(0)
            for position in range(4, 88, 9):
                key, value = held[index, head, position].double().split(16)
                for mine, its, centre in ((key, keys, mean), (value, values, 0 * mean)):
                    back, _, steps = oracle.turned_and_rounded(its[position] - centre, 4, 16)
                    expected = torch.from_numpy(back) + centre
                    assert (mine - expected).abs().max() < max(steps)
                    assert (mine - expected).norm() < 0.2 * (its[position] - centre).norm()
            positions_held = four.layers[index].head_groups[0].positions[0, head, :120]
            assert positions_held.equal(torch.arange(120, dtype=torch.int32))


@pytest.mark.parametrize("bits", ["8", "4", "2", "k8v4", "4g16", "kivi4"])
def test_bytes_are_those_of_codes_scales_and_the_window(llama: Tiny, bits: str) -> None:
    model, asked, count = llama.model, parse_kv_bits(bits), 300
    assert asked is not None
    cache = empty(model)
    with TensorMeter(model.module.parameters()) as meter:
        before = meter.live
        read(model, cache, random_ids(count), "full", asked)
        live = meter.live - before
    group = min(asked.group, 16)
    per_entry = 16 * (asked.keys + asked.values) / 8 + 4 * 16 / group + 4
    per_entry += 4 * 16 / (asked.group if asked.form == "kivi" else group)
    packed = asked.packed(count)
    exact = count - packed + 32
    spare = PLANNED + -PLANNED % asked.together
    head = (packed + spare) * per_entry + exact * (2 * 16 * 4 + 4) + 16 * 4
    assert packed >= 300 - 36 - 31 and asked.entry_bytes(KVSize(1, 16)) == per_entry
    assert cache.nbytes == 4 * 2 * head
    assert live == pytest.approx(cache.nbytes, rel=0.02)


@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.bfloat16, 64), (torch.float32, 64), (torch.bfloat16, 128)]
)
def test_four_bits_take_less_than_a_third_of_sixteen(dtype: torch.dtype, dim: int) -> None:
    count = 7000
    layer = LayerCache([((0, 1), count)], batch=1, dim=dim, dtype=dtype, device=torch.device("cpu"))
    keys, values = torch.randn(2, 1, 2, count, dim, dtype=dtype)
    layer.head_groups[0].append(keys, values, torch.arange(count, dtype=torch.int32))
    window = Window(torch.zeros(1, 2, 0, dim), count, 2, Softmax(1.0))
    policy = LayerPolicy(Full(), count, bits=FOUR)
    small = policy.cut(LayerView(0, layer.head_groups, window, count), 64)
    assert small.head_groups[0].used == count
    assert small.nbytes <= 0.32 * 2 * count * 2 * dim * 2


def test_small_lines_are_left_exact(llama: Tiny) -> None:
    cache = empty(llama.model)
    read(llama.model, cache, random_ids(36), "full", FOUR)
    assert not any(layer.packed for layer in cache.layers)


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "name",
    [
        *METHODS,
        "simlayerkv+kvx",
        "snapkv:per_head=true",
        "uncomp:delete=1",
        "kvx:decode=grow,layers=global",
    ],
)
def test_every_method_reads_and_answers_on_a_quantized_cache(llama: Tiny, name: str) -> None:
    model, cache = llama.model, empty(llama.model)
    plain = empty(model)
    ids = random_ids(200)
    read(model, plain, ids, name, None, 100)
    logits, policies = read(model, cache, ids, name, FOUR, 100)
    assert any(layer.packed or layer.computed for layer in cache.layers)
    assert positions(cache) == positions(plain) and cache.nbytes < 0.75 * plain.nbytes
    before = codes(cache)
    for _ in range(50):
        logits = decode_step(model, cache, logits.argmax(-1), policies)
    assert bool(logits.isfinite().all())
    assert unchanged(before, codes(cache)) > 0 or not before
    for layer in cache.layers:
        for head_group in layer.head_groups:
            line = head_group.positions[0, :, : head_group.used].sort(-1).values
            assert bool((line[:, 1:] > line[:, :-1]).all()) and int(line[0, -1]) == 249


# --- once and never again ------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.cases(1, 3)
@pytest.mark.parametrize(
    "method",
    [
        "full",
        "snapkv:per_head=true,window=8",
        "kvx",
        "h2o",
        "streaming",
        "kvx:middle=example,omega=2",
    ],
)
def test_an_entry_is_rounded_once(llama: Tiny, method: str) -> None:
    """Through an answer, a second turn and its answer, and turns of other methods."""
    model, cache = llama.model, empty(llama.model)
    logits, policies = read(model, cache, random_ids(150), method, FOUR, 90)
    held = codes(cache)
    stayed = 0
    for turn in range(3):
        for _ in range(60):
            logits = decode_step(model, cache, logits.argmax(-1), policies)
            now = codes(cache)
            stayed += unchanged(held, now)
            held = now
        another = method if turn < 1 else "tova"
        logits, policies = read(model, cache, random_ids(40, turn), another, FOUR, 90)
        now = codes(cache)
        assert unchanged(held, now) > 50
        held = now
    assert stayed > 1000


def test_a_change_of_bits_is_heeded(llama: Tiny) -> None:
    model, cache = llama.model, empty(llama.model)
    read(model, cache, random_ids(150), "full", KVBits(8, 8))
    eight = restored(cache)
    read(model, cache, random_ids(3), "full", FOUR)
    segment = cache.layers[0].head_groups[0].segment
    assert isinstance(segment, Packed) and segment.bits == FOUR
    four = restored(cache)
    assert all((four[key] - eight[key]).norm() < 0.3 * eight[key].norm() + 0.3 for key in eight)
    read(model, cache, random_ids(3), "full", None)
    assert not any(layer.packed for layer in cache.layers)


def test_reading_that_is_stopped_leaves_a_quantized_cache_as_it_was(llama: Tiny) -> None:
    talk = Conversation(llama.model, Settings(method="full", kv_bits="4"))
    talk.generate(random_ids(100)[0].tolist(), max_new_tokens=4, ignore_eos=True)
    before, seen, stop = codes(talk.cache), talk.cache.seen, threading.Event()
    chunks = iter(range(100))

    def progress(done: int, total: int) -> None:
        if next(chunks) == 2:
            stop.set()

    with pytest.raises(Stopped):
        talk.read([5] * 90, callbacks=Callbacks(progress=progress, cancel=stop))
    assert codes(talk.cache) == before and talk.cache.seen == seen


def test_nothing_is_quantized_before_what_will_be_dropped_was(llama: Tiny) -> None:
    """A layer that is tested at an answer's first step is exact until then."""
    model, cache = llama.model, empty(llama.model)
    method = "simlayerkv:detect=decode,threshold=0,recent=60"
    logits, policies = read(model, cache, random_ids(200), method, FOUR, 1000)
    assert not any(layer.packed for layer in cache.layers)
    decode_step(model, cache, logits.argmax(-1), policies)
    for layer in cache.layers:
        (head_group,) = layer.head_groups
        assert (
            head_group.used == 64
            and isinstance(head_group.segment, Packed)
            and head_group.segment.count == 28
        )


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("method", "budgets", "widths"),
    [
        ("tova:per_head=true,floor=0", (60, 60, 60, 60), (FOUR, FOUR, FOUR, FOUR)),
        ("streaming", (120, 120, 120, 120), (FOUR, None, FOUR, KVBits(8, 8))),
        ("lminfinite", (120, 120, 120, 90), (FOUR, FOUR, FOUR, FOUR)),
        ("kvx:layers=global,decode=grow", (90, 60, 120, 90), (FOUR, FOUR, None, FOUR)),
        ("h2o:recent=8", (200, 45, 120, 120), (FOUR, FOUR, FOUR, FOUR)),
        ("full", (900, 900, 900, 900), (KIVI, FOUR, None, FOUR)),
    ],
)
def test_turns_on_quantized_entries_keep_what_they_choose(
    llama: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    budgets: tuple[int, ...],
    widths: tuple[KVBits | None, ...],
) -> None:
    """What is packed is what was selected, whatever was overwritten, slid or widened before; and
    nothing but the cache's own tensors is held on to."""
    checked = 0
    real = Selection.packed

    def packed(self: Selection, bits: KVBits, room: int = 0) -> Packed | None:
        nonlocal checked
        made = real(self, bits, room)
        if made is not None:
            checked += 1
            middle = slice(bits.sinks, bits.sinks + made.count)
            assert made.positions.equal(self.positions(middle))
        return made

    monkeypatch.setattr(Selection, "packed", packed)
    model, cache, seed = llama.model, empty(llama.model), 0
    for budget, bits in zip(budgets, widths, strict=True):
        for count in (150, 70):
            seed += 1
            logits, policies = read(model, cache, random_ids(count, seed), method, bits, budget)
            for _ in range(40):
                logits = decode_step(model, cache, logits.argmax(-1), policies)
            assert bool(logits.isfinite().all())
            for layer in cache.layers:
                assert all(head_group.packed_before is None for head_group in layer.head_groups)
                for head_group in layer.head_groups:
                    line = head_group.positions[0, :, : head_group.used].sort(-1).values
                    assert bool((line[:, 1:] > line[:, :-1]).all())
    assert checked > 16


# --- what is attended to -------------------------------------------------------------------------


def head_groups(device: str = "cpu") -> Iterator[KVHeadGroup]:
    """Of a full line, a cut one, and one whose slots lie in disorder."""
    for method, steps in (("full", 3), ("kvx", 40), ("streaming:sinks=2", 70)):
        model = make_tiny("llama-mha" if method == "kvx" else "llama", device).model
        cache = empty(model)
        logits, policies = read(model, cache, random_ids(150).to(device), method, FOUR, 80)
        for _ in range(steps):
            logits = decode_step(model, cache, logits.argmax(-1), policies)
        yield cache.layers[1].head_groups[0]


@pytest.mark.cases(1)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_is_that_over_the_restored_entries(softcap: float | None) -> None:
    for head_group in head_groups():
        q = torch.randn(1, 4, 1, 16) * 3
        keys, values = (
            head_group.keys[:, :, : head_group.used],
            head_group.values[:, :, : head_group.used],
        )
        attend = implementation_for(q).segment
        given = q, head_group, Softmax(0.3, softcap), attend
        out, row = attend_segment(*given, remembers=True)
        expected, rows = attend_with_rows(q, keys, values, Softmax(0.3, softcap))
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(row, rows[:, :, 0], atol=1e-6, rtol=1e-4)


def test_an_answer_never_restores_a_layer(llama: Tiny) -> None:
    model, cache = llama.model, empty(llama.model)
    with TensorMeter(model.module.parameters()) as meter:
        logits, policies = read(model, cache, random_ids(960), "full", FOUR)
        before = meter.live
        meter.peak = before
        decode_step(model, cache, logits.argmax(-1), policies)
        restored_layer = model.shape.full_kv_bytes(960, 4) // model.shape.layers
        # A block of float32 steps of keys, or of values, exists at a time: here all of one side.
        assert meter.peak - before < 0.85 * restored_layer


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "method", ["full", "snapkv:window=8", "kvx", "simlayerkv:threshold=0,recent=60+kvx"]
)
def test_quantizing_never_takes_more_memory_than_leaving_it(llama: Tiny, method: str) -> None:
    model, peaks = llama.model, []
    for bits in (None, FOUR):
        cache = empty(model)
        with TensorMeter(model.module.parameters()) as meter:
            before = meter.live
            read(model, cache, random_ids(900), method, bits, 300)
            read(model, cache, random_ids(20, 2), method, bits, 300)
            peaks.append(meter.peak - before)
    assert peaks[1] <= peaks[0]


@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3", "mistral-sliding", "phi3-longrope", "qwen3-moe", "gpt-oss"]
)
def test_eight_bits_say_what_sixteen_do(name: str) -> None:
    model, ids = make_tiny(name).model, random_ids(150)
    rows = []
    for bits in (None, KVBits(8, 8)):
        cache = empty(model)
        logits, policies = read(model, cache, ids, "full", bits)
        for token in random_ids(20, 3)[0]:
            logits = decode_step(model, cache, token[None], policies)
        rows.append(logits)
    assert (rows[0] - rows[1]).abs().max() < 0.02 * rows[0].abs().max()


def test_a_batch_is_quantized_like_its_rows(llama: Tiny) -> None:
    model, ids = llama.model, torch.cat([random_ids(120, 1), random_ids(120, 2)])
    together, alone = empty(model, batch=2), empty(model)
    logits, policies = read(model, together, ids, "kvx", FOUR, 60)
    apart, own = read(model, alone, ids[1:], "kvx", FOUR, 60)
    for token in random_ids(30, 5)[0]:
        logits = decode_step(model, together, token.expand(2), policies)
        apart = decode_step(model, alone, token[None], own)
    torch.testing.assert_close(logits[1:], apart, atol=2e-2, rtol=1e-2)


# --- what users see ------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "method"),
    [("llama", "h2o"), ("llama", "kvx"), ("llama", "streaming"), ("gemma3", "kvx")],
)
def test_a_budget_in_bytes_is_kept(name: str, method: str) -> None:
    model = make_tiny(name).model
    settings = Settings(method=method, kv_bits="4", budget="160000B", max_new_tokens=20)
    talk = Conversation(model, settings)
    answer = talk.generate(random_ids(900)[0].tolist(), ignore_eos=True)
    assert 0.75 * 160_000 < answer.kv_bytes <= 160_000
    exact = Conversation(model, settings.replace({"kv_bits": "16"}))
    less = exact.generate(random_ids(900)[0].tolist(), ignore_eos=True)
    assert answer.metrics.kept_entries_mean > 1.4 * less.metrics.kept_entries_mean


@pytest.mark.long
def test_keys_by_channel_are_for_lines_that_only_grow(llama: Tiny) -> None:
    model = llama.model
    for method in ("full", "snapkv:window=8", "simlayerkv:threshold=0.5+snapkv"):
        cache = empty(model)
        logits, policies = read(model, cache, random_ids(200), method, KIVI, 150)
        for _ in range(80):
            logits = decode_step(model, cache, logits.argmax(-1), policies)
        read(model, cache, random_ids(60, 2), method, KIVI, 150)
        segment = cache.layers[0].head_groups[0].segment
        assert (
            isinstance(segment, Packed)
            and segment.count % 32 == 0
            and bool(logits.isfinite().all())
        )
    for method in (
        "kvx",
        "kvx:middle=example",
        "simlayerkv:threshold=0.5+kvx",
        "simlayerkv:threshold=0.5,bound_decode=true",
        "minference+tova",
    ):
        with pytest.raises(SettingError, match=r"kivi4 .* which .* would drop one by one"):
            read(model, empty(model), random_ids(200), method, KIVI, 100)
    gemma = make_tiny("gemma3").model
    with pytest.raises(SettingError, match="this model's sliding windows would drop"):
        read(gemma, empty(gemma), random_ids(200), "full", KIVI)


def test_heads_that_codes_do_not_fill_are_refused(llama: Tiny) -> None:
    shape = replace(llama.model.shape, kv_sizes=(KVSize(2, 18),) * 4)
    with pytest.raises(
        SettingError, match=r"--kv-bits 2 needs heads whose .* multiple of 4, .* 18"
    ):
        layer_policies(Full(), shape, 9, 9, bits=KVBits(2, 2))


def test_notes_name_what_they_are_about() -> None:
    gemma = make_tiny("gemma3").model
    (small, slow) = (
        Conversation(gemma, Settings(method="lminfinite", kv_bits="k8v4", budget=60))
        .generate(random_ids(100)[0].tolist(), max_new_tokens=1)
        .metrics.notes
    )
    assert small.startswith("4-bit values cost models below 1 billion") and "has 0.00" in small
    assert slow.startswith("lminfinite restores a quantized layer")
    model = make_tiny("llama").model
    assert (
        not Conversation(model, Settings(kv_bits="8"))
        .generate([5] * 9, max_new_tokens=1)
        .metrics.notes
    )
    merged = Conversation(model, Settings(method="minicache", kv_bits="8"))
    (note,) = merged.generate([5] * 9, max_new_tokens=1).metrics.notes
    assert note.startswith("minicache leaves entries exact")


@pytest.mark.parametrize(
    "method",
    [
        "h2o",
        "tova",
        "kvx",
        "simlayerkv+kvx",
        "uncomp",
        "streaming",
        "lminfinite",
        "h2o:per_head=true",
    ],
)
@pytest.mark.cases(3)
def test_a_budget_that_is_reached_while_answering(llama: Tiny, method: str) -> None:
    """Between two times that entries are quantized: what is free behind the last is nothing."""
    given = Settings(method=method, budget="200", kv_bits="4", recall="off", chunk=64)
    talk = Conversation(llama.model, given)
    talk.generate(random_ids(100)[0].tolist(), ignore_eos=True, max_new_tokens=220)
    for layer in talk.cache.layers:
        for group in layer.head_groups:
            held = group.positions[:, :, : group.used]
            assert group.positions.shape[2] == group.keys.shape[2] == group.capacity
            for head in held.flatten(0, 1).tolist():
                assert len({*head}) == group.used and max(head) == talk.cache.seen - 1
            if method in ("streaming", "lminfinite"):
                last = range(talk.cache.seen - 190, talk.cache.seen)
                assert all({*last} <= {*head} for head in held.flatten(0, 1).tolist())


def test_a_copy_has_its_own_storage(llama: Tiny) -> None:
    model, cache = llama.model, empty(llama.model)
    with TensorMeter(model.module.parameters()) as meter:
        read(model, cache, random_ids(150), "full", FOUR)
        before = meter.live
        (copy, *_) = copies = copied(cache.layers, [torch.device("cpu")] * len(cache.layers))
        held = sum(layer.nbytes for layer in copies)
        assert meter.live - before == pytest.approx(held, rel=0.02)
    segment = copy.head_groups[0].segment
    assert isinstance(segment, Packed) and segment.storage is not None
    for mine, whole in zip(segment.tensors, segment.storage.tensors, strict=True):
        assert mine.data_ptr() == whole.data_ptr()


def test_a_note_tells_how_to_answer_faster_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlite.engine.implementations.has_compiled", lambda device: False)
    chat = Conversation(make_tiny("llama").model, Settings(kv_bits="8"))
    (note,) = chat.generate([5] * 9, max_new_tokens=1).metrics.notes
    assert note.startswith("numba is not installed") and note.endswith("pip install numba")


def test_the_ledger_says_how_it_was_held(llama: Tiny) -> None:
    settings = Settings(method="full", kv_bits="k8v4", max_new_tokens=2)
    metrics = Conversation(llama.model, settings).generate(random_ids(120)[0].tolist()).metrics
    assert metrics.to_json()["kv_bits"] == "k8v4" and "KV in k8v4 " in metrics.line()
    with pytest.raises(SettingError, match="--kv-bits '5' is not one of"):
        Conversation(llama.model, Settings(kv_bits="5"))
