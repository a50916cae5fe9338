"""Documents of the tasks in this folder, which need nothing from elsewhere."""

from typing import Any

from datasets import Dataset

PLACES = ("mat", "old wall", "warm stove", "chair by the window", "stairs")
ANIMALS = ("cat", "dog", "cow", "owl", "heron")


def documents(**_: Any) -> dict[str, Dataset]:
    rows = [
        {
            "text": f"The {animal} sat on the {place}. " * (2 + at) + f"It was the {animal}.",
            "question": f"Where did the {animal} sit?",
            "places": [*PLACES[at:], *PLACES[:at]],
            "place": place,
        }
        for at, (animal, place) in enumerate(zip(ANIMALS, PLACES, strict=True))
    ]
    return {"test": Dataset.from_list(rows)}


def unreachable(**_: Any) -> dict[str, Dataset]:
    raise OSError("there is no network")
