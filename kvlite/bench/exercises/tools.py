"""Tools: which of twenty to call, with arguments copied out of long results."""

import json
from functools import partial
from statistics import fmean
from typing import Any

from kvlite.bench.exercises.exercise import Exercise, Material, Turn
from kvlite.bench.prose import names, numbers
from kvlite.config.checked_file import Damaged, from_json
from kvlite.model.answers.form import Tool

TOOLS = 20
_VERBS = "cancel refund ship delay inspect insure label weigh store return"
_THINGS = "order", "parcel"
_ARGUMENTS = {
    "order_id": "number of the order",
    "customer": "name of the customer",
    "warehouse": "code of the warehouse",
}


def make(material: Material) -> Exercise:
    """One of the records that a call returned is to be acted on. A call counts if it is of the
    right tool, by the share of its arguments that are there to the letter."""
    random = material.random
    deeds = [(verb, thing) for verb in _VERBS.split() for thing in _THINGS][: TOOLS - 1]
    listed = Tool("list_records", "List records.", _parameters({"day": "the day"}))
    tools = [listed, *(_tool(*deed) for deed in deeds)]
    verb, thing = random.choice(deeds)
    ids, called, codes = numbers(random, 1500), names(random, 1500), numbers(random, 1500)

    def part(number: int) -> dict[str, Any]:
        return {
            "order_id": ids[number],
            "customer": called[number],
            "warehouse": f"W-{codes[number]}",
            "weight_kg": random.randrange(1, 900) / 10,
            "status": random.choice(("open", "paid", "packed")),
        }

    shown = json.dumps([each.plain() for each in tools])
    records = material.parts(part, partial(json.dumps, indent=1), shown)
    wanted = random.choice(records)
    request = f"Now {verb} the {thing} of {wanted['customer']}."
    arguments = {name: wanted[name] for name in _ARGUMENTS}
    name = f"{verb}_{thing}"
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


def _tool(verb: str, thing: str) -> Tool:
    return Tool(f"{verb}_{thing}", f"{verb.title()} one {thing}.", _parameters(_ARGUMENTS))


def _parameters(known: dict[str, str]) -> dict[str, Any]:
    properties = {name: {"type": "string", "description": said} for name, said in known.items()}
    return {"type": "object", "properties": properties, "required": [*known]}


def _check(name: str, arguments: dict[str, str], answer: str) -> float:
    try:
        called, given = from_json(answer)
    except (Damaged, TypeError, ValueError):
        return 0.0
    if called != name or not isinstance(given, dict):
        return 0.0
    return fmean(given.get(each) == value for each, value in arguments.items())
