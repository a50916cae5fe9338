"""Calls of tools as models write them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvlite.engine.grammar import Grammar
from kvlite.errors import SettingError
from kvlite.model.answers.form import INDEX, Arguments, CallForm
from kvlite.model.answers.gemma_arguments import GemmaArguments, literal
from kvlite.model.answers.json_arguments import JSONArguments
from kvlite.model.answers.parameter_arguments import ParameterArguments


def written(form: CallForm, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Calls, each a name and arguments, in a form."""
    pieces = list[str]()
    for number, (name, arguments) in enumerate(calls):
        around = form.between if number else form.first
        one = f"{around}{name}{form.middle}{_arguments(form.arguments, arguments)}"
        pieces.append(one.replace(INDEX, str(number)))
    return "".join([*pieces, form.last])


def takes(grammar: Grammar, tokenizer: Any, answer: str) -> bool:
    """Whether a grammar takes an answer, whole."""
    try:
        for each in tokenizer.encode(answer, add_special_tokens=False):
            grammar.take(each)
    except SettingError:
        return False
    return grammar.may_end


def _arguments(notation: Arguments, arguments: Mapping[str, Any]) -> str:
    if isinstance(notation, JSONArguments):
        return json.dumps(arguments, ensure_ascii=False)
    if isinstance(notation, ParameterArguments):
        return notation.written(arguments)
    if isinstance(notation, GemmaArguments):
        return literal(arguments)
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())
