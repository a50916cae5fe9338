"""What the page calls each setting, and says of it: `Settings` speaks to people at a terminal."""

import re

# A label, and what stands below it.
WORDS: dict[str, tuple[str, str]] = {
    "model": (
        "Model",
        "one on this machine: its name, a folder, a GGUF file, or a Hugging Face id",
    ),
    "vram": ("Memory to use", "at most, such as 8GiB; auto is what is free"),
    "method": (
        "Method",
        "which tokens stay in the cache; full keeps all. Options follow a colon, as in kvx:omega=8",
    ),
    "budget": (
        "How much is kept",
        "of what was read: a share (25%), tokens (1024) or bytes in all (64MiB); auto is "
        "everything while it fits, and then as much as does",
    ),
    "kv_bits": (
        "Bits of what is kept",
        "16 as the model has it; 8 or 4 take less memory and are less exact, k8v4 has keys and "
        "values apart; auto is 16, or 8 where everything then fits",
    ),
    "recall": (
        "Where the rest goes",
        "to be fetched back: ram, disk (a temporary file), auto (ram if there is enough), or off, "
        "to forget it",
    ),
    "recall_bits": ("Bits of what is offloaded", "16 as the model has it; 8 or 4 take less memory"),
    "recall_limit": (
        "RAM for what is offloaded",
        "at most, such as 8GiB; auto is half of what is free",
    ),
    "recall_entries": (
        "Fetched back for a token",
        "at most so many for each token of an answer; 0 fetches back between messages only",
    ),
    "checkpoint_limit": (
        "RAM for going back",
        "so that editing, undo and another answer need no reading; auto is a quarter of what is "
        "free",
    ),
    "beyond_context": (
        "When it gets too long",
        "for the model: refuse the message, or compact, which goes on with what the cache has and "
        "forgets the rest",
    ),
    "scores": (
        "Where the choice is made",
        "of what is kept: on the device, or on the host, which takes less memory of the GPU and "
        "more time",
    ),
    "device": ("Device", "auto, cpu, cuda, or cuda:1 for the second GPU"),
    "weights": (
        "Weights",
        "how the model's numbers are stored: fewer bits take less memory and are less exact; auto "
        "goes by the model's files and this machine",
    ),
    "chat_template": (
        "Chat template",
        "a file in Jinja, for a model whose own is missing or faulty",
    ),
    "stream": (
        "Offload weights",
        "to ram or disk, so that a model larger than the GPU runs, slower; auto does so only if "
        "nothing else fits",
    ),
    "chunk": (
        "Tokens read together",
        "more is faster and takes more memory; auto is 1,024, or fewer if memory is short",
    ),
    "reserve_tokens": (
        "Answer to plan for",
        "in tokens: memory is planned for so long an answer; a longer one goes on while there is "
        "memory; auto is 256, or the longest answer, up to 2,048",
    ),
    "never_lossy": (
        "Never give up exactness",
        "if memory runs out, the answer ends rather than that less is kept",
    ),
    "ocr": ("Read scanned pages", "of a PDF (OCR), which takes some seconds each"),
    "encoding": (
        "Encoding of text files",
        "that say nothing of it, such as windows-1254; empty is UTF-8 or the likeliest",
    ),
    "measure": (
        "What peak memory counts",
        "process: all that this program takes; tensors: the model's numbers alone, slower",
    ),
    "system": ("Instructions", "what the model is told first; empty leaves that to the model"),
    "max_new_tokens": (
        "Longest answer",
        "in tokens, of which a page of text has about 500; auto goes on until the model ends it",
    ),
    "thinking": (
        "Thinking",
        "whether models that can do both think before they answer; auto is as the model does it by "
        "itself",
    ),
    "reasoning_budget": (
        "Longest thinking",
        "in tokens, after which the answer begins; empty is no limit",
    ),
    "temperature": ("Temperature", "0 always takes the likeliest token; above it, answers vary"),
    "top_k": ("Top k", "draws from so many of the likeliest tokens; 0 is all of them"),
    "top_p": ("Top p", "draws from the likeliest tokens that come to this probability together"),
    "min_p": ("Min p", "leaves out tokens less likely than this share of the likeliest"),
    "repetition_penalty": ("Repetition penalty", "above 1, tokens already seen are less likely"),
    "presence_penalty": (
        "Presence penalty",
        "above 0, tokens that the answer has already are less likely",
    ),
    "frequency_penalty": ("Frequency penalty", "likewise, for each time that it has them"),
    "logit_bias": (
        "Token biases",
        "a token's number and what is added to its score, from -100 to 100, as in 5:-100",
    ),
    "seed": ("Seed", "a number repeats what was drawn; auto draws anew each time"),
    "speculate": (
        "Guess repeated text",
        "what followed the same words before is tried at once: the same answer, sooner where text "
        "repeats",
    ),
    "stop": ("Stop before", "the answer ends before any of these texts"),
    "schema": ("Form of the answer", "json, a JSON Schema or a grammar (Lark) that it must follow"),
}

# Options of the command line in a remedy, as in "a model with a longer context (--model)".
_FLAGS = re.compile(r" \(--[a-z][a-z-]*\)")
_NAMES = re.compile(r"--([a-z][a-z-]*)")


def spoken(sentence: str) -> str:
    """A sentence with what the page calls options, where it has them."""
    return _NAMES.sub(_labelled, _FLAGS.sub("", sentence))


def _labelled(flag: re.Match[str]) -> str:
    words = WORDS.get(flag[1].replace("-", "_"))
    return flag[0] if words is None else f"\u201c{words[0]}\u201d"
