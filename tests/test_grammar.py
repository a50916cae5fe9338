"""Answers that follow a schema: the mask against a naive one, answers against transformers'."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

import kvlite
from kvlite.config.settings import Settings
from kvlite.conversation.runner import Runner
from kvlite.engine.grammar import Grammar
from kvlite.errors import SettingError
from kvlite.methods.engine_config import require_meanings

WORDS = ("red", "green", "greenish grey", "größer", "  two  spaces")
LARK = "start: " + " | ".join(f'"{word}"' for word in WORDS)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 3, "maximum": 5},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["color", "count", "names"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def runner(tiny_folder: Path) -> Runner:
    return kvlite.load(str(tiny_folder))


def allowed_next(tokens: list[bytes], so_far: bytes) -> list[int]:
    """Tokens that may follow, by trying every one; the end, if a word is complete, is -1."""
    words = [word.encode() for word in WORDS]
    found = [
        number
        for number, token in enumerate(tokens)
        if token and any(word.startswith(so_far + token) for word in words)
    ]
    return found + [-1] * (so_far in words)


def token_bytes(tokenizer: Any) -> list[bytes]:
    """Each token's bytes, none of a control token, as GPT-2's alphabet spells them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [each for each in range(256) if each not in printable]
    alphabet = {chr(each): each for each in printable}
    alphabet |= {chr(256 + number): each for number, each in enumerate(others)}
    spelled = tokenizer.convert_ids_to_tokens(list(range(49_152)))
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return [
        b"" if number in special else bytes(alphabet[each] for each in token)
        for number, token in enumerate(spelled)
    ]


def test_the_mask_is_a_naive_one_and_answers_are_those_of_transformers(
    runner: Runner, tiny_folder: Path
) -> None:
    tokens, (end,) = token_bytes(runner.tokenizer), runner.model.stop_ids

    class Naive(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            came, grammar = input_ids[0, 3:].tolist(), Grammar(runner.model.vocabulary, LARK)
            for each in came:
                grammar.take(each)
            found = allowed_next(tokens, b"".join(tokens[each] for each in came))
            naive = {end if each < 0 else each for each in found}
            mask = {*(grammar.masked(torch.zeros(1, 49_152))[0] == 0).nonzero()[:, 0].tolist()}
            assert grammar.ended == (found == [-1])
            if mask != naive:  # one way to go on is one token: the tokenizer's own
                assert len(mask) == 1 and mask < naive
                ways = sorted((tokens[each] for each in naive), key=len)
                assert all(ways[-1].startswith(each) for each in ways)
            kept = torch.tensor(sorted(mask))
            return torch.full_like(scores, float("-inf")).index_copy_(1, kept, scores[:, kept])

    model = AutoModelForCausalLM.from_pretrained(tiny_folder, attn_implementation="eager").eval()
    for prompt in ([5, 6, 7], [90, 80, 70]):
        given: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": end}
        naive = LogitsProcessorList([Naive()])
        made = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, logits_processor=naive, **given
        )
        answer = runner.generate(prompt, 12, schema=LARK)
        expected = [each for each in made[0, 3:].tolist() if each != end]
        assert [each for each in answer.token_ids if each != end] == expected
        assert answer.text in WORDS and answer.metrics.finish_reason == "stop"
        assert runner.generate(prompt, 12).text not in WORDS


def test_answers_are_json_by_their_schema_however_they_are_drawn(runner: Runner) -> None:
    settings: dict[str, Any] = {"schema": json.dumps(SCHEMA), "max_new_tokens": 200}
    drawing = ({}, {"temperature": 1.0, "seed": 1}, {"temperature": 3.0, "top_k": 9, "seed": 2})
    talk = runner.conversation(**settings)
    for given in (*drawing, {"speculate": "auto", "repetition_penalty": 1.3}):
        found = json.loads("".join(each.text for each in talk.stream("Which?", **given)))
        assert found["color"] in SCHEMA["properties"]["color"]["enum"]
        assert found["count"] in (3, 4, 5)
        assert len(found["names"]) <= 2 and all(len(each) <= 4 for each in found["names"])
        assert [*found] == ["color", "count", "names"]
    again = "".join(each.text for each in talk.regenerate(schema=LARK))
    assert again in WORDS
    heard = talk.ask_each(["One?", "Two?"], **settings)
    texts = ["", ""]
    for index, piece in heard:
        texts[index] += piece.text  # type: ignore[union-attr]
    assert [json.loads(text)["color"] for text in texts]
    cut = runner.generate([5, 6, 7], 1, schema=settings["schema"])
    assert cut.metrics.finish_reason == "length"
    assert "cut at 1 tokens" in cut.metrics.failure and cut.metrics.notes[-1] == cut.metrics.failure
    plain = runner.generate([5, 6, 7], 1)
    assert (plain.metrics.finish_reason, plain.metrics.failure) == ("length", "")


def test_what_cannot_be_followed_is_refused_by_name(runner: Runner) -> None:
    for schema, words in (
        ("{", "cannot be followed"),
        ('{"type": "objct"}', "Invalid type: objct"),
        ('{"type": "string", "not": {}}', "not"),
        ('{"enum": []}', "Unsatisfiable"),
        ('{"$ref": "file:///etc/passwd"}', "does not fetch"),
        ('{"$ref": "#"}', r"refers to itself without end\): give a JSON Schema"),
        ('{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}', "to itself without end"),
        ("nowhere.json", "cannot be followed"),
        ("{" + " " * 300_000, "262,144 at most"),
        ("[" * 9000, "cannot be followed"),
        ('{"not":' * 9000 + "{}" + "}" * 9000, "cannot be followed"),
    ):
        with pytest.raises(SettingError, match=words) as error:
            runner.conversation().generate([5], schema=schema)
        assert str(error.value).startswith("--schema ")
        with pytest.raises(SettingError, match=r"^KVLITE_SCHEMA"):
            require_meanings(Settings(schema=schema), lambda name: f"KVLITE_{name.upper()}")
    within = (
        '{"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}'
    )
    with pytest.raises(SettingError, match=r"cannot be followed \(no answer can come"):
        runner.conversation(max_new_tokens=200).generate([5], schema=within)


def test_a_thousand_references_in_a_row_are_followed(runner: Runner) -> None:
    """On the usual stack of a thread llguidance ends the process."""
    steps: dict[str, Any] = {
        f"d{at}": {"type": "array", "items": {"$ref": f"#/$defs/d{at + 1}"}} for at in range(4000)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": {**steps, "d4000": {"type": "null"}}}
    text = runner.generate([1], schema=json.dumps(schema), max_new_tokens=2).text
    assert text[0] == "["
