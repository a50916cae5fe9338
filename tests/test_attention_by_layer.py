"""Where attention falls, beside what transformers says of it."""

import pytest
import torch

from kvlite.bench.attention import BINS, MOST, QUERIES, _rows, lines_of

from .conftest import Tiny


@pytest.mark.cases(1, 5)
def test_it_falls_where_transformers_says(kind: Tiny) -> None:
    ids = torch.randint(3, 199, (1, 150), generator=torch.Generator().manual_seed(5))
    attentions = kind.reference(ids, output_attentions=True).attentions
    rows = list(_rows(kind.model, ids[0].tolist(), part=1))
    assert [row.layer for row in rows] == list(kind.model.shape.full_layers)
    for row in rows:
        paid = attentions[row.layer][0, :, -QUERIES:].double().mean(1)
        paid /= paid.sum(-1, keepdim=True)  # what falls on a learned sink falls on no entry
        counts = [
            next(n for n in range(1, 151) if head.topk(n).values.sum() >= MOST) for head in paid
        ]
        assert row.needed == pytest.approx(sum(counts) / len(counts), abs=0.51)
        shares = [0.0] * BINS
        for position, share in enumerate(paid.mean(0).tolist()):
            shares[position * BINS // 150] += share
        assert row.shares == pytest.approx(shares, abs=1e-5)
        assert (row.part, row.length) == (1, 150)


def test_lines_have_as_many_entries_in_all_as_attention_needs() -> None:
    lines = lines_of([300.0, 100.0, 40.0, 20.0], 2000)
    assert set(lines) == {"pyramidkv", "kvx"}
    for line in lines.values():
        assert sum(line) == 460 and line == sorted(line, reverse=True)
