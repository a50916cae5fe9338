"""What an answer must follow, as llguidance takes it: a JSON Schema, or a grammar."""

import json
import random
from functools import lru_cache, partial
from typing import Any

from kvlite.config.checked_file import from_json
from kvlite.errors import SettingError, reason
from kvlite.model.grammar_trial import TOO_HARD, TooHard, limits, tried
from kvlite.model.in_thread import with_deep_stack

# An answer that is any JSON object.
JSON = "json"
# White space between the parts of JSON: a line's end and indentation, or a space. Small models
# would go on with more.
_SPACES = r"(\n[ \t]{0,16}| )?"
# Answers that are tried, and their longest in bytes: some schemas take long only once an answer has
# come to what is hard in them.
_WALKS, _STEPS = 3, 100
# Characters of a schema: more take seconds to look at.
LONGEST = 1 << 18


def require_grammar(text: str) -> str:
    """A setting's text (`json`, a JSON Schema, or a grammar in llguidance's variant of Lark) as
    llguidance takes it; "" for none. Raises SettingError if it is none of these, or says what
    cannot be followed; Stopped if nobody waits for it any more."""
    if not text.strip():
        return ""
    said = f"--schema {text[:60]!r}"
    if len(text) > LONGEST:
        raise SettingError(f"{said} has {len(text):,} characters: give {LONGEST:,} at most")
    grammar, why = _known(text.strip())
    if why == TOO_HARD:
        raise SettingError(f"{said} cannot be followed ({why}): give a simpler one")
    if why:
        raise SettingError(
            f"{said} cannot be followed ({in_a_line(why)}): give a JSON Schema without what is "
            "named here, or json for any object"
        )
    return grammar


@lru_cache(maxsize=128)
def _known(text: str) -> tuple[str, str]:
    """As of `looked_at`; what may take long is looked at in a child process."""
    try:
        return looked_at(text) if text == JSON else tried(looked_at, text)
    except TooHard:
        return "", TOO_HARD


def looked_at(text: str) -> tuple[str, str]:
    """A text as llguidance takes it, and what is wrong with it; "" if nothing is."""
    try:
        return with_deep_stack(partial(_checked, text))
    except ValueError as error:
        return "", reason(error)


def _checked(text: str) -> tuple[str, str]:
    from llguidance import LLMatcher, LLTokenizer

    grammar, most = _grammar(text), limits()
    is_wrong, why = LLMatcher.validate_grammar_with_warnings(grammar, limits=most)
    if is_wrong:
        return grammar, why[0]
    if "<[" in text:  # tokens of a model that is not known here
        return grammar, ""
    choose = random.Random(0)
    for _ in range(_WALKS):
        begun = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=most)
        for _ in range(_STEPS):
            allowed = [at for at, bias in enumerate(begun.compute_logit_bias()) if bias]
            if begun.is_error():
                return grammar, begun.get_error()
            if begun.is_stopped() or not allowed:
                break
            begun.consume_token(choose.choice(allowed))
    return grammar, ""


def in_a_line(said: str) -> str:
    """What llguidance says is wrong, which may quote the text, in a line that can be printed."""
    if said.startswith("NoExtension"):
        return "no answer can come of it, as a part of it refers to itself without end"
    line = " ".join(said.split())[:200].rstrip(" .:")
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)


def _grammar(text: str) -> str:
    from llguidance import LLMatcher

    if not is_schema(text):
        return LLMatcher.grammar_from_lark(text)
    schema = '{"type": "object"}' if text == JSON else text
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _SPACES})


def is_schema(text: str) -> bool:
    """Whether a setting's text is a schema, not a grammar."""
    return text.strip() == JSON or text.lstrip().startswith("{")


def whole_schema_rule(text: str) -> str:
    """A setting's text, which is a schema, as a part of a Lark grammar."""
    return schema_rule({"type": "object"} if text.strip() == JSON else from_json(text))


def schema_rule(schema: dict[str, Any], *, lenient: bool = False) -> str:
    """A JSON Schema as a part of a Lark grammar; if `lenient`, what cannot be followed is left
    out."""
    options = {"whitespace_pattern": _SPACES, "lenient": lenient}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


class Vocabulary:
    """A tokenizer's tokens as a trie, which takes a third of a second to make."""

    def __init__(self, tokenizer: Any, size: int, ends: frozenset[int]) -> None:
        """For `size` logits; an answer may end with one of `ends`, if there is any. Raises
        SettingError if the tokenizer is not one of those that llguidance reads."""
        from llguidance.hf import from_tokenizer

        self.size = size
        most = max(size, len(tokenizer))
        try:
            self.trie = from_tokenizer(tokenizer, n_vocab=most, eos_token=sorted(ends) or None)
        except ValueError as error:
            raise SettingError(
                f"this model's tokenizer cannot be held to a --schema ({reason(error)}): leave it "
                "out, or use a model with a tokenizer.json"
            ) from error
