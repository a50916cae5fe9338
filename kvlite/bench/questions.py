"""Questions about a text, asked of many methods: the one runner of every question task."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, ClassVar

from torch import Tensor

from kvlite.bench.batch_decode import answers, each_token, told
from kvlite.bench.case import MOST_ANSWER, Case, Recipe, require_fit
from kvlite.bench.fork import NO_RECALL, Branch, Choice
from kvlite.bench.grid import fitted, label, require_memory, require_room
from kvlite.bench.intervals import Estimate, mean_of, share_of
from kvlite.bench.marks import found, leading, rouge_1
from kvlite.bench.multi_turn import parties, read_turns
from kvlite.config.units import readable
from kvlite.conversation.runner import Runner
from kvlite.model.load import LoadedModel

KNOWN, UNKNOWN = "known", "unknown"
ASKED = {KNOWN: (KNOWN,), UNKNOWN: (UNKNOWN,), "both": (KNOWN, UNKNOWN)}


@dataclass(frozen=True)
class QuestionRow:
    """One answer of the grid.

    Attributes:
        task, kind, length, depth, seed: which case, as in `Case`.
        question: "known" while the cache was cut, or "unknown".
        method, budget, kv_bits: as asked for.
        recall: "off", or how what was dropped came back, as in "128 of 4 bits".
        tokens: the prompt's.
        entries_mean, kv_bytes: what the cache held when the prompt was read.
        index_bytes, host_kv_bytes: what recall took beside it then, on the device and in host
            memory.
        hit: all keys are in the answer.
        found, leading, rouge: see `marks`.
        surprise: nats a token of the keys, had the model answered in the needle's own words; 0 if
            it was sure of each, 10.8 if all of 49,152 tokens were alike to it.
        answer: what was said.
    """

    KEY: ClassVar = (
        "task", "kind", "length", "depth", "seed", "question", "method", "budget", "kv_bits",
        "recall",
    )  # fmt: skip

    task: str
    kind: str
    length: int
    depth: float | None
    seed: int
    question: str
    method: str
    budget: int
    kv_bits: str
    recall: str = field(default=NO_RECALL, kw_only=True)
    tokens: int
    entries_mean: float
    kv_bytes: int
    index_bytes: int = field(default=0, kw_only=True)
    host_kv_bytes: int = field(default=0, kw_only=True)
    hit: bool
    found: float
    leading: float
    rouge: float
    surprise: float
    answer: str

    def to_json(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)


def measured(
    runner: Runner,
    prose: str,
    recipes: Sequence[Recipe],
    choices: Sequence[Choice],
    questions: Sequence[str],
    done: frozenset[tuple[Any, ...]],
) -> tuple[int, Iterator[QuestionRow]]:
    """How many rows a grid has, and `ask` for those that are missing.

    Args:
        prose: what prompts are made of.

    Raises:
        SettingError: prompts are too long for the prose or the model, or too short for a task; or
            host memory is too small for recall.
    """
    longest = max(recipe.length for recipe in recipes)
    held = len(runner.tokenizer.encode(prose))
    require_room(longest, MOST_ANSWER, held, runner.shape.max_context)
    require_fit(recipes, runner.tokenizer)
    require_memory(choices, runner.model, longest + MOST_ANSWER)
    total = len(recipes) * len(questions) * len(choices)
    return total, ask(runner.model, recipes, choices, questions, done)


def ask(
    model: LoadedModel,
    recipes: Iterable[Recipe],
    choices: Sequence[Choice],
    questions: Sequence[str],
    done: frozenset[tuple[Any, ...]] = frozenset(),
) -> Iterator[QuestionRow]:
    """Every row of the grid that is not done yet. Each prompt is read once for all choices that
    one host store serves.

    Args:
        choices: what is compared.
        questions: "known", "unknown" or both.
        done: keys of rows there are. Where rows of choices that share their steps are only partly
            there, all of these are asked again.
    """
    choices = fitted(choices, model)
    shared = [[choices[index] for index in party] for party in parties(choices)]
    for recipe in recipes:
        about = (recipe.task, recipe.kind, recipe.length, recipe.depth, recipe.seed)
        missing = [
            (question, party, keys)
            for question in questions
            for party in shared
            if not done.issuperset(keys := [(*about, question, *_key(each)) for each in party])
        ]
        if not missing:
            continue
        case = recipe.case(model.tokenizer)
        for question, party, keys in missing:
            read = read_known if question == KNOWN else read_unknown
            rows = _rows(model, case, question, read(model, case, party))
            yield from (row for row, key in zip(rows, keys, strict=True) if key not in done)


def _key(choice: Choice) -> tuple[Any, ...]:
    return choice.method.spec, choice.budget, choice.kv_bits, choice.recalls


def read_known(model: LoadedModel, case: Case, choices: Sequence[Choice]) -> list[Branch]:
    """The prompt read as one turn, so that what is kept is chosen with the question in view.

    Args:
        choices: a party.
    """
    return read_turns(model, [case.prompt], choices, reserve=case.new_tokens)


def read_unknown(model: LoadedModel, case: Case, choices: Sequence[Choice]) -> list[Branch]:
    """The context read and cut, and then the question, as a later turn is.

    Args:
        choices: a party.
    """
    return read_turns(model, [case.context, case.question], choices, reserve=case.new_tokens)


def _rows(
    model: LoadedModel, case: Case, question: str, branches: Sequence[Branch]
) -> list[QuestionRow]:
    held = [(branch.cache.entries_mean, branch.cache.nbytes) for branch in branches]
    surprises = surprise(model, case, branches)
    said = answers(model, branches, case.new_tokens)
    rows = []
    for branch, (entries, nbytes), nats, ids in zip(branches, held, surprises, said, strict=True):
        text: str = model.tokenizer.decode(ids, skip_special_tokens=True)
        share = found(case.keys, text)
        row = QuestionRow(
            task=case.task,
            kind=case.kind,
            length=case.length,
            depth=case.depth,
            seed=case.seed,
            question=question,
            method=branch.choice.method.spec,
            budget=branch.choice.budget,
            kv_bits=branch.choice.kv_bits,
            recall=branch.choice.recalls,
            tokens=len(case.prompt),
            entries_mean=entries,
            kv_bytes=nbytes,
            index_bytes=branch.index_bytes,
            host_kv_bytes=branch.host_kv_bytes,
            hit=share == 1,
            found=share,
            leading=leading(case.keys, text),
            rouge=rouge_1(case.words, text),
            surprise=nats,
            answer=text,
        )
        rows.append(row)
    return rows


def surprise(model: LoadedModel, case: Case, branches: Sequence[Branch]) -> list[float]:
    """Nats a token of the keys, with the needle's own words put in the model's mouth."""
    nats: list[list[float]] = [[] for _ in branches]
    wanted = frozenset(case.at_keys)

    def judge(index: int, at: int, logits: Tensor) -> None:
        for place, token, row in each_token(case.forced, at, logits):
            if place in wanted:
                nats[index].append(-float(row.log_softmax(-1)[token]))

    told(model, branches, case.forced, judge)
    return [fmean(each) for each in nats]


@dataclass(frozen=True)
class QuestionTally:
    """All prompts of one kind, length, setting, method, budget and recall.

    Attributes:
        asked: prompts.
        hit: share of prompts whose keys were all found.
        found, leading, rouge, surprise: means of the rows'.
        entries_mean: mean of the rows'.
        kv_bytes: mean of the rows', recall's index on the device included.
    """

    kind: str
    question: str
    length: int
    method: str
    budget: int
    kv_bits: str
    recall: str
    asked: int
    hits: int
    hit: Estimate
    found: Estimate
    leading: Estimate
    rouge: Estimate
    surprise: Estimate
    entries_mean: float
    kv_bytes: float

    def cells(self) -> dict[str, str]:
        """What a table shows, by column."""
        low, high = self.hit.low or 0.0, self.hit.high or 0.0
        return {
            "kind": self.kind,
            "question": self.question,
            "tokens": f"{self.length:,}",
            "method": label(self.method, self.kv_bits),
            "budget": "all" if self.method == "full" else f"{self.budget:,}",
            "recall": self.recall,
            "entries": f"{self.entries_mean:,.0f}",
            "KV": readable(self.kv_bytes),
            "all found": f"{self.hits} of {self.asked} ({low:.0%} to {high:.0%})",
            "found": self.found.shown(),
            "leading": self.leading.shown(),
            "ROUGE-1": self.rouge.shown(),
            "surprise": self.surprise.shown(),
        }


def tallies(rows: Iterable[QuestionRow]) -> list[QuestionTally]:
    """Rows added up over depths and seeds, in their order."""
    groups: dict[tuple[str, str, int, str, int, str, str], list[QuestionRow]] = {}
    for row in rows:
        how = (row.method, row.budget, row.kv_bits, row.recall)
        group = (row.kind, row.question, row.length, *how)
        groups.setdefault(group, []).append(row)
    return [
        QuestionTally(
            *group,
            asked=len(cells),
            hits=sum(row.hit for row in cells),
            hit=share_of(sum(row.hit for row in cells), len(cells)),
            found=mean_of([row.found for row in cells], 0, 1),
            leading=mean_of([row.leading for row in cells], 0, 1),
            rouge=mean_of([row.rouge for row in cells], 0, 1),
            surprise=mean_of([row.surprise for row in cells], 0),
            entries_mean=fmean(row.entries_mean for row in cells),
            kv_bytes=fmean(row.kv_bytes + row.index_bytes for row in cells),
        )
        for group, cells in groups.items()
    ]
