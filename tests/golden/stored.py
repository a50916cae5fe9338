"""What is in files/, which kvlite 0.1.0 wrote: how it was made, and what opening it comes to.

The files are never made anew for a later version: that opens them. `python -m tests.golden.stored`
made them, and expected.json with them.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvlite.config.paths import config_folder
from kvlite.config.profiles import Profiles

from . import probe
from .play import Play, tokens
from .record import FILES, Workshop, written
from .runs import DEFAULT, DRAWN, STORY, Run

EXPECTED = FILES / "expected.json"
# Files name the model by where it was.
MADE_IN = Path("/tmp/kvlite-golden")
DOCUMENT = "lighthouse.txt"
ONE, TWO = "a" * 32, "b" * 32
APP_MODEL = "small-llama"
PROFILES: dict[str, list[object]] = {
    "default": ["--budget", "25%", "--recall", "ram"],
    "golden": [
        *("--method", "kvx:pool=31,layers=uniform,decode=grow", "--kv-bits", "k8v4"),
        *("--budget", "64MiB", "--temperature", "0.5", "--seed", "3", "--stop", "END"),
        *("--stop", "\n\n", "--never-lossy", "--system", "Answer in one word.", "--chunk", "128"),
    ],
}


# --- conversations: how each was made, and how it goes on ----------------------------------------


def said(play: Play) -> None:
    """Two messages."""
    play.say(f"{STORY[:130]}\nWhat is this about?")
    play.say("Who built it?")


def edited(play: Play) -> None:
    """Messages on three branches, the first of them current."""
    said(play)
    play.edit(2, "Where is it?")
    play.regenerate(**DRAWN)
    play.switch(0)


def read_and_answered(play: Play) -> None:
    """Tokens."""
    play.read(tokens(150))
    play.generate(tokens(9, 1))


def compacted(play: Play) -> None:
    """More than the model's context."""
    play.read(tokens(950))
    play.generate(tokens(60, 1))
    play.generate(tokens(60, 2))


def interrupted(play: Play) -> None:
    """An answer that nobody heard to its end."""
    said(play)
    pieces = play.talk.stream("And when?")
    for _ in range(3):
        next(pieces)


def ahead(play: Play) -> None:
    """The beginning of a message."""
    said(play)
    play.read_ahead(STORY[:100])


def goes_on(play: Play) -> None:
    """A message, another one in its place, and back."""
    play.say("And then?")
    play.edit(2, "Is it lit?")
    play.undo()
    play.say("Was it lit?", **DRAWN)


def switches(play: Play) -> None:
    """To all its branches."""
    for branch in (1, 2, 0):
        play.switch(branch)
        play.say("And then?")


def tokens_go_on(play: Play) -> None:
    """More tokens."""
    play.generate(tokens(20, 2))
    play.generate(tokens(3, 3), **DRAWN)


def goes_on_from_ahead(play: Play) -> None:
    """What goes on from what was read."""
    play.say(f"{STORY[:100]}\n\nWho built it?")
    play.undo()
    play.say(f"{STORY[:100]}\n\nIs it lit?")


def _saved(
    name: str,
    made: Any,
    on: Any,
    method: str,
    budget: Any = 40,
    model: str = APP_MODEL,
    **given: Any,
) -> tuple[Run, Callable[[Play], None]]:
    usual = {"recall": "off", "max_new_tokens": 6, "recall_entries": 8, "chunk": 64}
    return Run(name, model, made, {**usual, "method": method, "budget": budget, **given}), on


SAVED = [
    _saved("full.kv", said, goes_on, "full"),
    _saved("recall.kv", said, goes_on, DEFAULT, recall="ram"),
    _saved("four-bit.kv", said, goes_on, "kvx", kv_bits="4", recall="disk", recall_bits="8"),
    _saved("branches.kv", edited, switches, "snapkv:window=8", recall="ram", recall_bits="4"),
    _saved("branches-forget.kv", edited, switches, "h2o", kv_bits="8"),
    _saved("light.kv", said, goes_on, DEFAULT, recall="ram"),
    _saved("light-branches.kv", edited, switches, "snapkv:window=8"),
    _saved("light-compacted.kv", compacted, tokens_go_on, "kvx", beyond_context="compact"),
    _saved("interrupted.kv", interrupted, goes_on, "tova"),
    _saved("ahead.kv", ahead, goes_on_from_ahead, "snapkv:window=8", recall="ram"),
    _saved("kivi.kv", read_and_answered, tokens_go_on, "keydiff", kv_bits="kivi4"),
    _saved("pairs.kv", read_and_answered, tokens_go_on, "minicache:start=0", kv_bits="8"),
    _saved("kvzip.kv", read_and_answered, tokens_go_on, "kvzip:passage=60", recall="ram"),
    _saved("lazy.kv", read_and_answered, tokens_go_on, "simlayerkv:threshold=0.15,recent=20+kvx"),
    _saved("heads.kv", read_and_answered, tokens_go_on, "uncomp:window=8,delete=1", 40, "llama"),
    _saved("sliding.kv", said, goes_on, "snapkv:window=8", 40, "gemma3", recall="ram"),
]


def make_conversations(shop: Workshop, scratch: Path) -> None:
    for run, _ in SAVED:
        play = Play(shop.runner(run.model, ()), run.given, scratch)
        run.script(play)
        play.talk.save(FILES / "conversations" / run.name, light=run.name.startswith("light"))


def opened(shop: Workshop, run: Run, on: Callable[[Play], None], scratch: Path) -> Any:
    """What opening a copy of one comes to, and going on with it."""
    path = Path(shutil.copy(FILES / "conversations" / run.name, scratch))
    play = Play(shop.runner(run.model, ()), {}, scratch)
    play.resume(path)
    on(play)
    return json.loads(json.dumps(play.steps))


# --- what the program and the app keep ------------------------------------------------------------


def make_library(shop: Workshop) -> None:
    """An entry, made by a program that had `KVLITE_DATA` in files/."""
    document = FILES / DOCUMENT
    document.write_text(STORY[:200])
    model = shop.model(APP_MODEL)
    probe.command("read", document, "--model", model, "--device", "cpu", "--budget", 40)


def from_library(shop: Workshop) -> Any:
    """What there is, and an answer from it; `KVLITE_DATA` is a copy."""
    model = shop.model(APP_MODEL)
    rest = ["--model", model, "--device", "cpu", "--budget", 40, "--max-tokens", 6]
    return {
        "entries": probe.library(),
        "answer": probe.asked(FILES / DOCUMENT, "Who built it?", *rest),
        "read_anew": probe.asked(FILES / DOCUMENT, "Who built it?", "--no-library", *rest),
    }


def make_app(shop: Workshop, data: Path) -> None:
    """Two conversations: one with a document and all it takes to go on at once, and one with
    branches that is read again."""
    with probe.app_service(shop.model(APP_MODEL), data) as app:
        probe.app_upload(app, ONE, DOCUMENT, STORY[:200].encode())
        probe.app_do(app, "say", ONE, "Who built it?")
        probe.app_do(app, "say", TWO, "Is anyone there?")
        probe.app_do(app, "say", TWO, "Really?")
        probe.app_do(app, "edit", TWO, 2, "Are you sure?")
        probe.app_do(app, "say", ONE, "When?")  # sets the other one aside, whole
    shutil.rmtree(data / "app" / "uploads", ignore_errors=True)
    (data / "app" / "everyone" / TWO / "whole.kv").unlink()


def from_app(shop: Workshop, data: Path) -> Any:
    """What its list shows at first, and after going on with both."""
    with probe.app_service(shop.model(APP_MODEL), data) as app:
        found = {
            "listed": probe.app_conversations(app),
            "found": [probe.app_search(app, words) for words in (DOCUMENT, "really", "nowhere")],
        }
        probe.app_do(app, "say", ONE, "And then?")
        probe.app_do(app, "undo", TWO)
        probe.app_do(app, "say", TWO, "And then?")
        found["gone_on"] = probe.app_conversations(app)
    return found


def make_profiles() -> None:
    for name, flags in PROFILES.items():
        probe.command("profile", "save", name, *flags)


def from_profiles() -> Any:
    """What `kvlite config` says, with the default profile and with another."""
    return {
        "listed": Profiles(config_folder()).names(),
        "default": probe.configured(),
        "golden": probe.configured("--profile", "golden"),
        "golden_and_flags": probe.configured("--profile", "golden", "--budget", 99),
    }


def from_calibration(shop: Workshop) -> Any:
    """Which entries a method keeps that needs what was measured, for which `KVLITE_DATA` is a
    copy."""
    play = Play(shop._runner("llama", ()), {"method": "uncomp:window=8", "budget": 48}, shop.folder)
    play.read(tokens(120))
    return play.steps


def without_profiles(shop: Workshop) -> Any:
    """`from_library`, for which there is no default profile."""
    os.environ["KVLITE_CONFIG"] = str(MADE_IN)
    return from_library(shop)


def main() -> None:
    """Write all files, and what opening them comes to."""
    shutil.rmtree(MADE_IN, ignore_errors=True)
    kept = [FILES / "conversations", FILES / "library", FILES / "app", FILES / "config"]
    for folder in kept:
        shutil.rmtree(folder, ignore_errors=True)
    MADE_IN.mkdir()
    os.environ |= {"KVLITE_DATA": str(FILES), "KVLITE_CONFIG": str(FILES / "config")}
    shop = Workshop(MADE_IN)
    (FILES / "conversations").mkdir()
    make_conversations(shop, MADE_IN)
    make_library(shop)
    make_app(shop, FILES)
    make_profiles()  # last, as the default one decides what the program does from then on
    data = MADE_IN / "data"
    for folder in (FILES / "library", FILES / "app", FILES / "calibrations"):
        shutil.copytree(folder, data / folder.name)
    os.environ["KVLITE_DATA"] = str(data)
    scratch = MADE_IN / "opened"
    scratch.mkdir()
    found = {
        "conversations": {run.name: opened(shop, run, on, scratch) for run, on in SAVED},
        "others": {
            "profiles": from_profiles(),
            "app": from_app(shop, data),
            "library": without_profiles(shop),
            "calibration": from_calibration(shop),
        },
    }
    EXPECTED.write_text(written(found))


if __name__ == "__main__":
    main()
