"""Options of `kvlite bench` and `kvlite tune`: each one's name, default, range and help, once.

A benchmark's options are a class; its docstring is the command's help, and the task of the same
name inherits its fields. Nothing here imports torch, so that help comes at once.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from kvlite.config.settings import Settings

NO_RECALL = "off"
KINDS = ("number", "sentence", "pairs")
TASKS = (
    "single", "multi-key", "multi-value", "multi-query", "copy-many", "variables", "words",
)  # fmt: skip
RULERS_OWN = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
"""Tasks whose prompts are RULER's own."""
EXERCISES = ("copy-many", "edits", "tools", "arithmetic", "twenty-turns", "code")
TUNE_PROFILE, TUNE_MINUTES = "tuned", 10
"""The profile that `kvlite tune` makes, and how long that may take."""


def _option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    flag: str = "",
    commas: bool = False,
    argument: bool = False,
) -> Any:
    """A field with what its flag needs.

    Args:
        flag: where it is not the field's name.
        commas: values may also be given with commas between.
        argument: it is given by its place.
    """
    about = {"help": help, "low": low, "flag": flag, "commas": commas, "argument": argument}
    return dataclasses.field(
        default_factory=lambda: [*default] if isinstance(default, list) else default,
        metadata=about,
    )


_file = partial(_option, "", "a document; - for standard input; else bundled prose", argument=True)
_tokens = partial(_option, help="prompt length; may be repeated", low=100)
_methods = partial(
    _option,
    help="as for `kvlite ask`; may be repeated. full and random are added where they are not named",
    flag="--method",
)
_kv_bits = partial(_option, help="as for `kvlite ask`; may be repeated")
_recall = partial(
    _option,
    help="off, or entries that each token of an answer may look for in all that was read, 0 for "
    "recall between turns only; several with commas between, as in off,0,128. Methods that have "
    "nothing to bring back are measured without",
    commas=True,
)
_recall_bits = partial(
    _option,
    [Settings.recall_bits],
    "as for `kvlite ask`; several with commas between",
    commas=True,
)
_parts = partial(_option, help="parts of the text, from its beginning to its end", low=1)
_repeats = partial(_option, help="prompts of each kind, from different seeds", low=1)
_as_asked = partial(_option, help="as for `kvlite ask`")


@dataclass(kw_only=True)
class Options:
    """What decides the rows of a benchmark.

    Attributes:
        name: of the command and of the module that has the task.
    """

    name: ClassVar[str]


@dataclass(kw_only=True)
class GridOptions(Options):
    """Methods x budgets x bits."""

    tokens: list[int] = _tokens([2000])
    methods: list[str] = _methods(["snapkv", "pyramidkv", "kvx", Settings.method])
    budgets: list[int] = _option(
        [512], "entries a KV head; may be repeated", flag="--budget", low=1
    )
    kv_bits: list[str] = _kv_bits(["16"])


@dataclass(kw_only=True)
class RecallOptions(GridOptions):
    """Methods x budgets x bits x recall."""

    recall: list[str] = _recall([NO_RECALL])
    recall_bits: list[str] = _recall_bits()


@dataclass(kw_only=True)
class QuestionOptions(RecallOptions):
    """Questions about texts."""

    question: str = _option(
        "known",
        "known: the question is read with the text, and entries are kept for it; unknown: the text "
        "is read and cut before it is asked; both",
    )
    repeats: int = _repeats(1)
    peer: list[str] = _option(
        [],
        "others' caches too, by as many entries and with times: kvpress:snapkv or another of its "
        "presses, transformers:hqq4; `kvlite bench install-peers` comes first",
        commas=True,
    )


@dataclass(kw_only=True)
class NiahOptions(QuestionOptions):
    """Hide a needle in real prose and ask for it: which methods still find it?

    Each prompt is read once for all methods and budgets. Found means that the whole number, or
    the whole sentence, is in the answer; leading is the share of a number's digits right from the
    left, or of a sentence's words; surprise is nats a token of it, had the answer begun rightly.

    Examples:

      kvlite bench niah --tokens 2000 --tokens 7000 --budget 256 --budget 1024

      kvlite bench niah --method snapkv --method kvx:pool=31 --depths 3 --repeats 5 --out run1

      kvlite bench niah --kind pairs --question both --json

      kvlite bench niah --question unknown --budget 256 --recall off,0,128 --recall-bits 16,4

      kvlite bench niah --method snapkv --peer kvpress:snapkv,transformers:hqq4
    """

    name: ClassVar = "niah"

    depths: int = _option(9, "places of the needle, evenly spread", low=1)
    kinds: list[str] = _option(
        [*KINDS],
        "number: a passcode; sentence: what to do in San Francisco; pairs: one code among many; "
        "may be repeated",
        flag="--kind",
    )


@dataclass(kw_only=True)
class RulerOptions(QuestionOptions):
    """Ask for one of several needles, for all of them, for a chain of variables, for the words
    that stand most often: tasks after RULER.

    Found is the share of the wanted names or numbers that are in the answer. Small models fail
    some tasks with their whole cache: compare with `full`.

    Examples:

      kvlite bench ruler --tokens 4000 --budget 512 --repeats 10

      kvlite bench ruler --task multi-query,variables --question both --out run2

      kvlite bench ruler --tokens 4000 --question unknown --budget 256 --recall off,0,128

      kvlite bench ruler --task niah_single_1,niah_multikey_2,vt,cwe,fwe --tokens 4096 --budget 512
    """

    name: ClassVar = "ruler"

    tasks: list[str] = _option(
        [*TASKS],
        f"{', '.join(TASKS)}; RULER's own prompts (extra `eval`): {', '.join(RULERS_OWN)}; several "
        "with commas between",
        flag="--task",
        commas=True,
    )
    repeats: int = _repeats(5)


@dataclass(kw_only=True)
class TurnsOptions(RecallOptions):
    """Hide several codes in real prose and ask for one after the other, in one conversation: is the
    last question answered as well as the first, in whichever order?

    What later questions ask for is dropped by then, or comes back (--recall). Beside every method
    is what it answers of the questions that the full cache answers. By place: how many first
    questions were answered, how many second ones, and so on.

    Examples:

      kvlite bench turns --tokens 2000 --tokens 7000 --budget 256 --recall off,0,128 --orders 2

      kvlite bench turns --method snapkv --questions 4 --repeats 5 --out run4

      kvlite bench turns --question unknown --tokens 6000 --budget 180 --recall 128 --repeats 5
    """

    name: ClassVar = "turns"

    recall: list[str] = _recall([NO_RECALL, str(Settings.recall_entries)])
    questions: int = _option(8, "codes in the text, each asked for in a turn of its own", low=1)
    orders: int = _option(1, "orders in which they are asked, a conversation each", low=1)
    question: str = _option(
        "known",
        "known: the first question is read with the text; unknown: the text is read and cut before "
        "it, as in the app, by what recalls",
    )
    repeats: int = _repeats(1)


@dataclass(kw_only=True)
class FidelityOptions(RecallOptions):
    """Read a text, cut the cache, go on with the same text: how far off are the predictions?

    Compares each method with the full cache, token by token: KL divergence and top-1 agreement of
    the distributions, change of the text's negative log-likelihood, and how much of the full
    cache's attention fell on what was kept. With --recall each of these tokens is one of an
    answer, and brings entries back.

    Examples:

      kvlite bench fidelity --tokens 4000 --budget 256 --budget 1024

      kvlite bench fidelity --method full --kv-bits 8 --kv-bits 4 --kv-bits kivi4

      kvlite bench fidelity --tokens 4000 --after 200 --budget 256 --recall off,64,128

      kvlite bench fidelity novel.txt --method snapkv --method h2o --repeats 8 --out run3
    """

    name: ClassVar = "fidelity"

    file: str = _file()
    after: int = _option(256, "tokens of the text that are scored after the cut", low=2)
    repeats: int = _parts(5)


@dataclass(kw_only=True)
class MemoryOptions(GridOptions):
    """Read a text by each method: bytes of the KV cache, and peak of live tensors over the weights.

    Counted, not estimated: every tensor that torch hands out, or on CUDA what the allocator gave.

    Examples:

      kvlite bench memory --tokens 2000 --tokens 7000 --budget 256 --budget 1024

      kvlite bench memory --method full --method kvx --kv-bits 16 --kv-bits 4 --json
    """

    name: ClassVar = "memory"


@dataclass(kw_only=True)
class SpeedOptions(Options):
    """Read and answer beside transformers' own `generate`: time, peak memory, KV bytes.

    Each repetition runs both programs back to back, so that their ratio means something on a
    machine that is never quite quiet. Ratios below 1 are in kvlite's favor.

    Examples:

      kvlite bench speed --tokens 7000 --method snapkv

      kvlite bench speed --method full --repeats 3 --json

      kvlite bench speed --tokens 7000 --budget 256 --recall 128

      kvlite bench speed --weights gguf --peer transformers,llama.cpp
    """

    name: ClassVar = "speed"

    tokens: list[int] = _tokens([2000, 7000])
    method: str = _as_asked(Settings.method)
    budget: str = _as_asked("512")
    kv_bits: str = _as_asked("16")
    recall: str = _option(NO_RECALL, "entries that each token of an answer may bring back, or off")
    repeats: int = _option(5, "pairs of runs; medians are given", low=1)
    new_tokens: int = _option(24, "tokens generated in each run", low=3)
    peer: list[str] = _option(
        ["transformers"],
        "transformers, and llama.cpp for a GGUF file, where llama-server or the package xllamacpp "
        "is there",
        commas=True,
    )


@dataclass(kw_only=True)
class AttentionOptions(Options):
    """Show where the attention of the last tokens falls in each layer.

    Counts the entries that take 90% of it, beside the lines to which pyramidkv and kvx would cut
    the layers, had they as many entries altogether.

    Examples:

      kvlite bench attention

      kvlite bench attention report.pdf --tokens 6000

      kvlite bench attention --repeats 5 --json
    """

    name: ClassVar = "attention"

    file: str = _file()
    tokens: int = _option(2000, "of a part of the text", low=100)
    repeats: int = _parts(3)


@dataclass(kw_only=True)
class QualityOptions(Options):
    """Exercises that people depend on, made from seeds and checked by exact rules: where does
    compression hurt?

    copy-many: 30 fields of a text into JSON; edits: exact searches and replacements in a long file;
    tools: which of 20 to call, with arguments copied out of long results; arithmetic: some of many
    word problems; twenty-turns: a fact in each of 20 messages; code: calls whose signatures stand
    elsewhere. Each way is compared with the full cache of the same model, exercise by exercise, by
    95% intervals.

    Examples:

      kvlite bench quality --tokens 3000 --cases 20 --budget auto --budget 6% --recall auto,off

      kvlite bench quality --task copy-many,tools --budget 100% --kv-bits 8,4,k8v4 --out run5

      kvlite bench quality --model qwen.gguf --tokens 12000 --cases 8 --json
    """

    name: ClassVar = "quality"

    tasks: list[str] = _option(
        [],
        f"{', '.join(EXERCISES)}; several with commas between; left out, all that the model can "
        "do: tools are for models whose chat template has them",
        flag="--task",
        commas=True,
    )
    tokens: list[int] = _option([3000], "of each exercise; may be repeated", low=1500)
    cases: int = _option(5, "exercises of each task, from different seeds", low=1)
    method: str = _as_asked(Settings.method)
    budgets: list[str] = _option(
        ["auto"],
        "as for `kvlite ask`: auto, 6%, 512, 100%; several with commas between; 100% is added "
        "where it is not named",
        flag="--budget",
        commas=True,
    )
    kv_bits: list[str] = _option(
        ["16"], "as for `kvlite ask`; several with commas between", commas=True
    )
    recall: list[str] = _option(
        ["auto"], "as for `kvlite ask`; several with commas between, as in auto,off", commas=True
    )


COMMANDS = (
    NiahOptions, RulerOptions, TurnsOptions, FidelityOptions, MemoryOptions, SpeedOptions,
    AttentionOptions, QualityOptions,
)  # fmt: skip


@dataclass(kw_only=True)
class TuneOptions(Options):
    """What `kvlite tune` compares, light enough for minutes. Runs are found again by these options
    in this order."""

    name: ClassVar = "tune"

    file: str
    tokens: int = _option(6000, "of the document to read at a time, at most", low=200)
    methods: list[str] = _methods([Settings.method, "snapkv"])
    budgets: list[str] = _option(
        ["3%", "6%", "12%", "25%"],
        "a share of what is read, such as 6%; may be repeated",
        flag="--budget",
    )
    kv_bits: list[str] = _kv_bits(["16", "4"])
    recall: list[str] = _recall([NO_RECALL, str(Settings.recall_entries)])
    recall_bits: list[str] = _recall_bits()
    most_lost: float = _option(
        0.1, "nats a token that may be lost, compared with the full cache", flag="--lost", low=0
    )
