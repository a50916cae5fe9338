"""Which tokens say nothing by themselves: punctuation and white space."""

from typing import Any
from unicodedata import category

import torch
from torch import Tensor


def structural(tokenizer: Any, token_ids: Tensor) -> Tensor:
    """Which tokens are punctuation and white space alone: bool, of the shape of `token_ids` and
    on the device of these. Tokens that are a part of a character are not."""
    if token_ids.is_meta:
        return torch.empty_like(token_ids, dtype=torch.bool)
    known, places = token_ids.cpu().unique(return_inverse=True)
    kinds = [_is_structure(tokenizer, each) for each in known.tolist()]
    return torch.tensor(kinds)[places].to(token_ids.device)


def _is_structure(tokenizer: Any, token_id: int) -> bool:
    # Some tokenizers leave out the space that a text begins with.
    text = tokenizer.decode([token_id])
    text = text or tokenizer.convert_ids_to_tokens(token_id).replace("\u2581", " ")
    return bool(text) and all(each.isspace() or category(each)[0] == "P" for each in text)
