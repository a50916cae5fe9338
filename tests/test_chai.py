"""CHAI: clusters against loops, bytes, and answers against transformers with heads made alike."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvlite.cache import LayerCache
from kvlite.cache.query_log import QueryLog
from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.engine.passage_attention import passage_attention
from kvlite.engine.prefill import prefill
from kvlite.engine.step import decode_step
from kvlite.errors import SettingError
from kvlite.methods import LayerView, parse_method
from kvlite.methods.chai import CHAI
from kvlite.methods.chai import clusters as linked
from kvlite.methods.layer_policy import layer_policies
from kvlite.methods.scores import Window
from kvlite.ops.attention import grouped
from kvlite.ops.softmax import Softmax
from tests.conftest import Tiny, make_tiny
from tests.oracles import clusters

DIM = 8


def clusters_of(layer: LayerCache) -> list[tuple[int, ...]]:
    """The heads that attend alike, those alone too."""
    shared = [each.heads for each in layer.head_groups if each.shares_keys]
    alone = [(head,) for each in layer.head_groups if not each.shares_keys for head in each.heads]
    return sorted([*shared, *alone])


@pytest.mark.parametrize("seed", range(6))
def test_clusters_and_their_bytes_are_the_oracles(seed: int) -> None:
    heads, group, count, n, first = 7, 1 + seed % 3, 1 + seed % 4, 20, 5
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 1, heads, n, DIM, generator=generator) * 1.5
    queries = torch.randn(1, heads * group, first, DIM, generator=generator) * 1.5
    layer = LayerCache(
        [(tuple(range(heads)), n)], batch=1, dim=DIM, dtype=keys.dtype, device=keys.device
    )
    layer.head_groups[0].append(keys, values, torch.arange(n))
    before, softmax = 6 * (seed % 2), Softmax(DIM**-0.5)
    opening = Window(queries, before, heads, softmax)
    window = Window(queries[:, :, :0], n, heads, softmax)
    view = LayerView(0, layer.head_groups, window, 10, opening=opening)
    chosen = CHAI(keep=count / heads).select(view)
    made = LayerCache.gathered(chosen, [n + 2] * len(chosen))

    rows = clusters.looks(queries[0].double().numpy(), keys[0].double().numpy(), before, DIM**-0.5)
    distances = [[clusters.distance(one, other) for other in rows] for one in rows]
    expected = clusters.clusters(distances, count)
    assert clusters_of(made) == expected
    entries = n + 2
    assert made.keys.nbytes == count * entries * DIM * 4
    assert made.nbytes == entries * (4 * DIM * (count + heads) + 4 * heads)
    for each in made.head_groups:
        assert each.values[:, :, :n].equal(values[:, [*each.heads]])
        assert each.keys[:, :, :n].equal(keys[:, [*each.asking_heads]])


@pytest.mark.parametrize("seed", range(8))
def test_clusters_by_any_distances(seed: int) -> None:
    random = torch.rand(12, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    distances = random + random.T
    for count in (1, 2, 3, 5, 8, 12):
        assert linked(distances.numpy(), count) == clusters.clusters(distances.tolist(), count)


class Alike:
    """transformers' own model, of which some layers' heads get another's projections and keys."""

    def __init__(self, reference: Any, read: Tensor, found: list[list[tuple[int, ...]]]) -> None:
        with torch.no_grad():
            self.cache: DynamicCache = reference(read, use_cache=True).past_key_values
        self.model = deepcopy(reference)
        kv_heads = reference.config.num_key_value_heads
        for layer, held, each in zip(
            self.model.model.layers, self.cache.layers, found, strict=True
        ):
            for cluster in each:
                for head in cluster[1:]:
                    for name in ("q_proj", "k_proj"):
                        weight = getattr(layer.self_attn, name).weight.data
                        of_head = weight.view(kv_heads, -1, weight.shape[1])
                        of_head[head] = of_head[cluster[0]]
                    assert held.keys is not None
                    held.keys[:, head] = held.keys[:, cluster[0]]

    def step(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return self.model(ids, past_key_values=self.cache, use_cache=True).logits[:, -1]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("name", "spec", "sizes"),
    [
        ("llama-mha", "chai", [4, 4, 1, 1]),
        ("llama-mha", "chai:start=0.25,keep=0.5", [4, 2, 2, 2]),
        ("llama", "chai:start=0", [1, 1, 1, 1]),
    ],
)
def test_answers_over_two_turns_equal_transformers_with_heads_alike(
    name: str, spec: str, sizes: list[int]
) -> None:
    tiny = make_tiny(name)
    method, (cache,) = parse_method(spec), [Conversation(tiny.model, Settings()).cache]
    torch.manual_seed(4)
    prompt = torch.randint(3, 199, (1, 60))
    policies = layer_policies(method, tiny.model.shape, 24, 60)
    logits = prefill(tiny.model, cache, prompt, policies, reserve=8, chunk=7)
    found = [clusters_of(layer) for layer in cache.layers]
    assert [len(each) for each in found] == sizes
    alike = Alike(tiny.reference, prompt, found)
    with torch.no_grad():
        assert (logits - tiny.reference(prompt).logits[:, -1]).abs().max() < 1e-4
    for _ in range(70):  # longer than the room there is
        token = logits.argmax(-1)
        logits = decode_step(tiny.model, cache, token, policies)
        assert (logits - alike.step(token[:, None])).abs().max() < 1e-4
    # A turn without a host store: heads stay as they were clustered.
    more = torch.randint(3, 199, (1, 30))
    policies = layer_policies(method, tiny.model.shape, 24, cache.seen + 30)
    logits = prefill(tiny.model, cache, more, policies, reserve=8, chunk=7)
    assert (logits - alike.step(more)).abs().max() < 1e-4
    assert [clusters_of(layer) for layer in cache.layers] == found


def test_attention_to_passages_is_that_of_the_heads_that_ask(llama: Tiny) -> None:
    talk = Conversation(llama.model, Settings(method="chai:start=0", budget="24", recall="off"))
    talk.generate([*range(3, 90)], max_new_tokens=3, ignore_eos=True)
    (layer, *_), tokens, owner = talk.cache.layers, range(80, 87), torch.arange(90) // 30
    (shared,) = (each for each in layer.head_groups if each.shares_keys)
    shape = llama.model.shape
    queries = torch.randn(1, shape.heads, len(tokens), shape.head_dim)
    alike = grouped(queries.clone(), layer.kv_heads)
    alike[:, list(shared.heads)] = alike[:, [shared.heads[0]]]
    found = []
    for each in (queries, alike.flatten(1, 2)):
        log = QueryLog()
        log.write(torch.tensor(tokens), each, Softmax(shape.head_dim**-0.5))
        found.append(passage_attention(layer, log, tokens, owner, 3))
    assert found[0].sum() > 0 and found[0].equal(found[1])


def test_what_shares_keys_is_neither_cut_nor_taken_for_whole(llama: Tiny) -> None:
    talk = Conversation(llama.model, Settings(method="chai:start=0", budget="24", recall="off"))
    talk.generate([*range(3, 90)], max_new_tokens=3, ignore_eos=True)
    assert all(layer.shares_keys for layer in talk.cache.layers)
    before = talk.cache.nbytes
    talk.settings = Settings(method="snapkv:window=8", budget="24", recall="off")
    with pytest.raises(SettingError, match="heads of this conversation share keys"):
        talk.generate([5, 6], max_new_tokens=3)
    assert talk.cache.nbytes == before


def test_options_have_ranges() -> None:
    for wrong in ("start=1.5", "keep=0", "keep=2", "first=0"):
        with pytest.raises(SettingError, match="out of range"):
            parse_method(f"chai:{wrong}")
    with pytest.raises(SettingError, match="simlayerkv holds no chai"):
        parse_method("simlayerkv+chai")
