"""Every registered method answers end to end, and adding one is a class and a line."""

import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import kvlite
from kvlite.cache import Selection
from kvlite.config.settings import Settings
from kvlite.errors import SettingError
from kvlite.methods import METHODS, LayerView, Method, parse_method
from kvlite.methods.select import ends
from kvlite.methods.wrapper import Wrapper
from tests.conftest import Tiny
from tests.test_api import held

DOC = Path(__file__).parents[1] / "docs" / "adding-a-method.md"
PAGES = DOC.with_name("methods.md")


def prompt(count: int = 200) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 199, (count,), generator=generator).tolist()


def runner(tiny: Tiny, **settings: object) -> kvlite.Runner:
    return kvlite.Runner(
        tiny.model, Settings().replace({"max_new_tokens": 5, "recall": "off", **settings})
    )


def test_a_wrapper_asks_the_method_it_holds_for_all_that_methods_say_of_themselves() -> None:
    """Else it would answer with `Method`'s own words."""
    said = {
        member
        for kind in METHODS.values()
        for base in kind.__mro__
        if issubclass(base, Method) and base not in (Method, Wrapper)
        for member in vars(base)
        if member in vars(Method) and not member.startswith("_")
    }
    # What each says of itself, and never of another.
    assert said - {"name", "summary", "paper", "at_least"} <= vars(Wrapper).keys()
    assert {"select", "layer_budgets", "decoding", "needs"} <= said


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_a_frozen_dataclass_in_a_module_of_its_name(name: str) -> None:
    kind = METHODS[name]
    module = importlib.import_module(f"kvlite.methods.{name}")
    own = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and value.__module__ == module.__name__
    ]
    assert own == [kind] and kind.__name__.lower() == name
    assert issubclass(kind, Method) and dataclasses.is_dataclass(kind)
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind().name = "other"  # type: ignore[misc]
    for text in (module.__doc__, kind.__doc__, kind.summary, kind.paper):
        assert text and text.strip()
    for option in dataclasses.fields(kind):
        assert option.default is not dataclasses.MISSING
        about = "".join(base.__doc__ or "" for base in kind.__mro__[:-2])
        assert re.search(rf"^    .*\b{option.name}\b.*:", about, re.MULTILINE), option.name
        if type(option.default) is int and option.name != "seed":
            with pytest.raises(SettingError, match=option.name):
                kind(**{option.name: -1})


@pytest.mark.parametrize("name", METHODS)
def test_a_method_reads_and_answers_within_its_budget(llama: Tiny, name: str) -> None:
    method = METHODS[name]()
    for budget in (method.min_budget, method.min_budget + 20):
        require_budget_kept(llama, method, budget)
    if method.min_budget > 1:
        with pytest.raises(SettingError, match="too small"):
            runner(llama, method=name, budget=method.min_budget - 1).generate(prompt())


def require_budget_kept(llama: Tiny, method: Method, budget: int) -> None:
    talk = runner(llama, method=method.name, budget=budget).conversation()
    talk.read(prompt())
    cut = method.compresses and method.respects_budget
    kept = talk.cache.entries_mean
    least = budget if not method.variable_head_lens else budget - 0.5  # groups of heads round down
    assert least <= kept <= budget if cut else 0.9 * 200 < kept <= 200
    answer = talk.generate([7], max_new_tokens=5, ignore_eos=True)
    assert len(answer.token_ids) == 5
    grown = (
        0 if method.decoding.bounded else 4
    )  # the last token of an answer is not in the cache yet
    assert talk.cache.entries_mean == (kept if cut else kept + 1) + grown
    assert answer.kv_bytes == talk.cache.nbytes
    if cut:
        assert answer.kv_bytes < answer.full_kv_bytes / 2
    for line in held(talk):
        assert len({*line}) == len(line) and line[0] >= 0
        assert line[-1] == talk.cache.seen - 1 == 204


def test_a_conversation_of_a_method_that_was_removed_is_refused_until_another_is_named(
    llama: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, name = runner(llama), "triattention"
    with monkeypatch.context() as before:
        before.setitem(METHODS, name, type(name, (METHODS["keydiff"],), {"name": name}))
        talk = there.conversation(method=name, budget=20)
        talk.generate(prompt())
        talk.save(tmp_path / "old.kv")
    sentence = f"unknown method '{name}': choose from {', '.join(METHODS)}"
    with pytest.raises(SettingError, match=f"^{sentence}$"):
        there.open(tmp_path / "old.kv")
    again = there.open(tmp_path / "old.kv", method="keydiff")
    assert again.generate([7]).metrics.method == "keydiff"


# --- adding one ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Newest(Method):
    """The last entries, and the first `sinks` while reading."""

    name: ClassVar[str] = "newest"
    summary: ClassVar[str] = "a toy"
    paper: ClassVar[str] = "none"

    sinks: int = 0

    def select(self, view: LayerView) -> list[Selection]:
        return [
            Selection(b, ends(b, self.sinks, view.budget - self.sinks)) for b in view.head_groups
        ]


def test_a_new_method_is_one_class_and_one_registry_line(
    llama: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingError, match="unknown method 'newest'"):
        runner(llama, method="newest").generate(prompt())
    monkeypatch.setitem(METHODS, "newest", Newest)
    answer = runner(llama).generate(prompt(), method="newest:sinks=3", budget=10)
    assert answer.metrics.method == "newest:sinks=3"
    assert answer.metrics.kept_entries_mean == 10 + len(answer.token_ids) - 1
    talk = runner(llama).conversation(method="newest:sinks=3", budget=10)
    talk.read(prompt())
    assert held(talk) == [[0, 1, 2, *range(193, 200)]] * 8
    with pytest.raises(SettingError, match="newest has no option 'sinkz': it has sinks"):
        parse_method("newest:sinkz=3")


@pytest.fixture
def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Method]:
    """The method that docs/adding-a-method.md makes, registered as it says."""
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = (block for block in blocks if "class " in block)
    file = tmp_path / "strided.py"
    file.write_text(code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("kvlite.methods.strided", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(METHODS, "strided", module.Strided)
    return module.Strided


def strided_line(seen: int, budget: int, window: int) -> list[int]:
    older, chosen = seen - window, budget - window
    return [i * older // chosen for i in range(chosen)] + list(range(older, seen))


def test_the_documented_method_works_as_documented(llama: Tiny, documented: type[Method]) -> None:
    test_a_method_reads_and_answers_within_its_budget(llama, "strided")
    talk = runner(llama).conversation(method="strided:window=6", budget=20)
    talk.read(prompt())
    line = strided_line(200, 20, 6)
    assert held(talk) == [line] * 8
    answered = 0
    for _ in talk.stream_tokens([7], max_new_tokens=60, ignore_eos=True):
        if answered:
            candidates = range(1, len(line) - 5)
            closest = min(candidates, key=lambda i: line[i + 1] - line[i - 1])
            del line[closest]
            line.append(200 + answered)
        else:
            line = strided_line_again(line)
        assert held(talk) == [line] * 8
        answered += 1
    assert answered == 60 and len(line) == 20 and line[0] == 0


def strided_line_again(line: list[int]) -> list[int]:
    """A second reading, of the token at position 200, chooses among what is left."""
    candidates = [*line, 200]
    return [candidates[slot] for slot in strided_line(21, 20, 6)]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_a_page_with_a_measured_row(name: str) -> None:
    pages = re.split(r"^## ", PAGES.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (page,) = (each for each in pages if each.startswith(f"`{name}`"))
    text = " ".join(page.split())
    title = METHODS[name].paper.partition(", section")[0]
    assert title in text or name in ("full", "random")
    assert re.search(r"Measured: .*\d of \d", text)


def test_the_document_names_what_there_is() -> None:
    text = DOC.read_text(encoding="utf-8")
    own = {name for name in vars(Method) if not name.startswith("_")}
    for member in own - {"require", "defaults", "spec", "caches_scores"}:
        assert f"`{member}" in text, member
    root = DOC.parents[1]
    paths = set(re.findall(r"`((?:kvlite|tests)/[\w/]+\.py)`", text)) - {
        "kvlite/methods/strided.py"
    }
    assert len(paths) >= 6
    for path in paths:
        assert (root / path).is_file(), path
