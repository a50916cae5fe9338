"""Tools: which of twenty to call, with arguments copied out of long results."""

import json
from functools import partial
from statistics import fmean
from typing import Any

from kvlite.bench.exercises.exercise import Exercise, Material, Turn
from kvlite.bench.prose import names, numbers
from kvlite.config.checked_file import Damaged, from_json
from kvlite.model.answers.form import Tool

_VERBS = """cancel refund ship delay inspect insure label weigh store return archive confirm copy
donate hold invoice price split track"""
_ARGUMENTS = {
    "customer": "name of the customer",
    "order_id": "number of the order",
    "warehouse": "code of the warehouse",
}


def make(material: Material) -> Exercise:
    """One of the records that a call returned is to be acted on. A call counts if it is of the
    right tool, by the share of its arguments that are there to the letter."""
    random = material.random
    listed = Tool("list_records", "List records.", _parameters({"day": "the day"}))
    tools = [listed, *map(_tool, _VERBS.split())]
    verb = random.choice(_VERBS.split())
    ids, called, codes = numbers(random, 1500), names(random, 1500), numbers(random, 1500)

    def part(number: int) -> dict[str, Any]:
        return {
            "customer": called[number],
            "order_id": ids[number],
            "warehouse": f"W-{codes[number]}",
            "weight_kg": random.randrange(1, 900) / 10,
            "status": random.choice(("open", "paid", "packed")),
        }

    shown = json.dumps([each.plain() for each in tools])
    records = material.parts(part, partial(json.dumps, indent=1), shown)
    wanted = random.choice(records)
    request = f"Now {verb} the order of {wanted['customer']}."
    arguments = {name: wanted[name] for name in _ARGUMENTS}
    name = f"{verb}_order"
    listing = {"name": "list_records", "arguments": json.dumps({"day": "today"})}
    before: list[dict[str, Any]] = [
        {"role": "user", "content": "List today's records."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call00001", "type": "function", "function": listing}],
        },
        {"role": "tool", "tool_call_id": "call00001", "content": json.dumps(records, indent=1)},
        {"role": "assistant", "content": f"There are {len(records)} records."},
    ]
    right = json.dumps([name, arguments])
    turn = Turn(request, partial(_check, name, arguments), right)
    return Exercise([turn], before, tools)


def _tool(verb: str) -> Tool:
    return Tool(f"{verb}_order", f"{verb.title()} one order.", _parameters(_ARGUMENTS))


def _parameters(known: dict[str, str]) -> dict[str, Any]:
    properties = {name: {"type": "string", "description": said} for name, said in known.items()}
    required = {"required": [*known], "additionalProperties": False}
    return {"type": "object", "properties": properties, **required}


def _check(name: str, arguments: dict[str, str], answer: str) -> float:
    try:
        called, given = from_json(answer)
    except (Damaged, TypeError, ValueError):
        return 0.0
    if called != name or not isinstance(given, dict):
        return 0.0
    return fmean(given.get(each) == value for each, value in arguments.items())
