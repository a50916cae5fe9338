"""A tokenizer of 704 tokens, all of them whole characters, so that models are small.

llama.cpp leaves tokens that end within a character out of its answers: there are none here.
"""

from itertools import islice, product
from string import ascii_lowercase

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS, SIZE = 688, 704
# The converter looks up some of these by name.
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<|endoftext|>", "[gMASK]", "<|user|>"]
SPECIAL += ["<|observation|>", "<|assistant|>"]
SPECIAL += [f"<|extra_{number}|>" for number in range(SIZE - WORDS - len(SPECIAL))]
PAD, BOS, EOS = (WORDS + SPECIAL.index(name) for name in ("<pad>", "<bos>", "<eos>"))


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over ASCII: printable characters, and pairs of letters."""
    characters = [*map(chr, range(33, 127)), "Ġ", "Ċ", "ĉ"]
    pairs = list(islice(product(ascii_lowercase, repeat=2), WORDS - len(characters)))
    tokens = [*characters, *("".join(pair) for pair in pairs)]
    made = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
