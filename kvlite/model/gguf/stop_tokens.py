"""Which tokens end an answer, by a GGUF file's header.

Source: llama.cpp's llama-vocab.cpp, which goes by what tokens are called where the header is silent
or names one of several; Ollama's files have a list (`tokenizer.ggml.eos_token_ids`).
"""

from kvlite.model.gguf.vocabulary import ENDS, Vocabulary

_ROLES = ("eos", "eot", "eom")
# What fills up or separates files in code, and is never part of an answer.
_BETWEEN_FILES = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_HARMONY = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})


def stop_ids(vocabulary: Vocabulary) -> list[int]:
    """The tokens that end an answer, in order."""
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    found = {ids[token] for token in ENDS if token in ids}
    for role, names in _BETWEEN_FILES.items():
        number = vocabulary.roles.get(role)
        if number is None:
            number = next((ids[name] for name in names if name in ids), None)
        if number is not None:
            found.add(number)
    found |= {number for role in _ROLES if (number := vocabulary.role(role)) is not None}
    found |= {*vocabulary.more_ends}
    # gpt-oss and Solar end each part of an answer so, and the answer with another token.
    if any(all(each in ids for each in pair) for pair in _HARMONY):
        found.discard(ids.get("<|end|>", -1))
    # Gemma 4 has it as a word.
    if "<|tool_response>" in ids:
        found.discard(ids.get("</s>", -1))
    return sorted(found)
