"""A quantized cache is smaller than one of 16 bits, or refused."""

import pytest

import kvlite
from kvlite.cache.bits import parse_kv_bits
from kvlite.cache.kv_size import KVSize
from kvlite.documents import Document
from kvlite.errors import SettingError
from tests.conftest import make_tiny


@pytest.mark.parametrize("text", ["8", "4", "2", "k8v4", "4g16", "8g128", "kivi4", "kivi2"])
@pytest.mark.parametrize("latent", [False, True])
def test_quantized_entries_save(text: str, latent: bool) -> None:
    bits = parse_kv_bits(text)
    assert bits is not None
    for dim in range(8, 300, 2):
        size = KVSize(1, dim, latent)
        assert bits.saves(size) == (bits.entry_bytes(size) < 2 * size.numbers + 4)
    assert all(bits.saves(KVSize(1, dim, latent)) for dim in (64, 80, 96, 128, 256))


@pytest.mark.parametrize("dim", [34, 74])
def test_heads_that_share_no_factor_with_groups_are_refused(dim: int) -> None:
    model = make_tiny("llama", num_hidden_layers=1, head_dim=dim).model
    settings = kvlite.Settings(kv_bits="8", method="full", max_new_tokens=1)
    with pytest.raises(SettingError, match=f"more memory than 16 bits, .* have {dim} channels"):
        list(kvlite.Conversation(model, settings).stream("Hello"))


def test_names_are_one_line() -> None:
    assert Document("a\nb\u2028c.txt", "", ()).name == "a b c.txt"
