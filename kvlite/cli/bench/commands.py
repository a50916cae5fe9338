"""`kvlite bench`: measure methods on this machine."""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlite.cli.bench.harness import lm_eval
from kvlite.cli.bench.peers import install_peers
from kvlite.cli.bench.report import report
from kvlite.cli.bench.run import Json, Out, run
from kvlite.cli.opening import require_files
from kvlite.cli.options import Command, with_model
from kvlite.config.settings import Settings

app = typer.Typer(
    no_args_is_help=True,
    help="Measure speed, memory and quality on this machine.\n\n"
    "Every command writes its rows to a folder (--out), and goes on from there once stopped.",
    epilog="Try: kvlite bench niah --tokens 2000 --budget 128 --budget 512 --depths 3",
)


def measures(task: str) -> Callable[[Command], Command]:
    """Make the body of a command, whose options are the fields of a task in `kvlite.bench`: its
    module and class, which are imported when the command is run."""

    def decorate(command: Command) -> Command:
        @wraps(command)
        def body(settings: Settings, *, out: Path | None, as_json: bool, **options: Any) -> None:
            file = options.get("file")
            require_files([file] if file else [], settings)
            module, name = task.split(".")
            made = getattr(import_module(f"kvlite.bench.{module}"), name)(**options)
            run(made, settings, out, as_json)

        return body

    return decorate


def _once(values: list[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _listed(values: list[str]) -> list[str]:
    """Values that were given apart or with commas between."""
    return _once([each.strip() for value in values for each in value.split(",")])


NO_RECALL, KV_BITS = ["off"], ["16"]
RECALL_BITS = [str(Settings.recall_bits)]
METHODS = ["snapkv", "pyramidkv", "kvx", str(Settings.method)]

File = Annotated[str, typer.Argument(help="a document; - for standard input; else bundled prose")]
Parts = Annotated[int, typer.Option(min=1, help="parts of the text, from its beginning to its end")]
Tokens = Annotated[
    list[int], typer.Option(min=100, callback=_once, help="prompt length; may be repeated")
]
Methods = Annotated[
    list[str],
    typer.Option(
        "--method",
        callback=_once,
        help="as for `kvlite ask`; may be repeated. full and random are added where they are not "
        "named",
    ),
]
Budgets = Annotated[
    list[int],
    typer.Option("--budget", min=1, callback=_once, help="entries a KV head; may be repeated"),
]
KVBits = Annotated[
    list[str],
    typer.Option("--kv-bits", callback=_once, help="as for `kvlite ask`; may be repeated"),
]
Recall = Annotated[
    list[str],
    typer.Option(
        "--recall",
        callback=_listed,
        help="off, or entries that each token of an answer may look for in all that was read, 0 "
        "for recall between turns only; several with commas between, as in off,0,128. Methods "
        "that have nothing to bring back are measured without",
    ),
]
RecallBits = Annotated[
    list[str],
    typer.Option(
        "--recall-bits", callback=_listed, help="as for `kvlite ask`; several with commas between"
    ),
]
Repeats = Annotated[int, typer.Option(min=1, help="prompts of each kind, from different seeds")]
Question = Annotated[
    str,
    typer.Option(
        help="known: the question is read with the text, and entries are kept for it; unknown: the "
        "text is read and cut before it is asked; both"
    ),
]
Kinds = Annotated[
    list[str],
    typer.Option(
        "--kind",
        callback=_once,
        help="number: a passcode; sentence: what to do in San Francisco; pairs: one code among "
        "many; may be repeated",
    ),
]
Peers = Annotated[
    list[str],
    typer.Option(
        "--peer",
        callback=_listed,
        help="others' caches too, by as many entries and with times: kvpress:snapkv or another of "
        "its presses, transformers:hqq4; `kvlite bench install-peers` comes first",
    ),
]
RULER_TASKS = ["single", "multi-key", "multi-value", "multi-query", "copy-many"]
RULER_TASKS += ["variables", "words"]
RULERS_OWN = "niah_single_1, niah_multikey_2, niah_multikey_3, vt, cwe, fwe"
Tasks = Annotated[
    list[str],
    typer.Option(
        "--task",
        callback=_listed,
        help=f"{', '.join(RULER_TASKS)}; RULER's own prompts (extra `eval`): "
        f"{RULERS_OWN}; several with commas between",
    ),
]


@app.command()
@with_model
@measures("niah.Niah")
def niah(
    settings: Settings,
    tokens: Tokens = [2000],
    methods: Methods = METHODS,
    budgets: Budgets = [512],
    kv_bits: KVBits = KV_BITS,
    recall: Recall = NO_RECALL,
    recall_bits: RecallBits = RECALL_BITS,
    depths: Annotated[int, typer.Option(min=1, help="places of the needle, evenly spread")] = 9,
    kinds: Kinds = ["number", "sentence", "pairs"],
    question: Question = "known",
    repeats: Repeats = 1,
    peer: Peers = [],
    out: Out = None,
    as_json: Json = False,
) -> None:
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


@app.command()
@with_model
@measures("ruler.Ruler")
def ruler(
    settings: Settings,
    tokens: Tokens = [2000],
    methods: Methods = METHODS,
    budgets: Budgets = [512],
    kv_bits: KVBits = KV_BITS,
    recall: Recall = NO_RECALL,
    recall_bits: RecallBits = RECALL_BITS,
    tasks: Tasks = RULER_TASKS,
    question: Question = "known",
    repeats: Repeats = 5,
    peer: Peers = [],
    out: Out = None,
    as_json: Json = False,
) -> None:
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


@app.command()
@with_model
@measures("turns.Turns")
def turns(
    settings: Settings,
    tokens: Tokens = [2000],
    methods: Methods = METHODS,
    budgets: Budgets = [512],
    kv_bits: KVBits = KV_BITS,
    recall: Recall = ["off", str(Settings.recall_entries)],
    recall_bits: RecallBits = RECALL_BITS,
    questions: Annotated[
        int, typer.Option(min=1, help="codes in the text, each asked for in a turn of its own")
    ] = 8,
    orders: Annotated[
        int, typer.Option(min=1, help="orders in which they are asked, a conversation each")
    ] = 1,
    question: Annotated[
        str,
        typer.Option(
            help="known: the first question is read with the text; unknown: the text is read and "
            "cut before it, as in the app, by what recalls"
        ),
    ] = "known",
    repeats: Repeats = 1,
    out: Out = None,
    as_json: Json = False,
) -> None:
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


@app.command()
@with_model
@measures("fidelity.Fidelity")
def fidelity(
    settings: Settings,
    file: File = "",
    tokens: Tokens = [2000],
    after: Annotated[
        int, typer.Option(min=2, help="tokens of the text that are scored after the cut")
    ] = 256,
    methods: Methods = METHODS,
    budgets: Budgets = [512],
    kv_bits: KVBits = KV_BITS,
    recall: Recall = NO_RECALL,
    recall_bits: RecallBits = RECALL_BITS,
    repeats: Parts = 5,
    out: Out = None,
    as_json: Json = False,
) -> None:
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


@app.command()
@with_model
@measures("memory.Memory")
def memory(
    settings: Settings,
    tokens: Tokens = [2000],
    methods: Methods = METHODS,
    budgets: Budgets = [512],
    kv_bits: KVBits = KV_BITS,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Read a text by each method: bytes of the KV cache, and peak of live tensors over the weights.

    Counted, not estimated: every tensor that torch hands out, or on CUDA what the allocator gave.

    Examples:

      kvlite bench memory --tokens 2000 --tokens 7000 --budget 256 --budget 1024

      kvlite bench memory --method full --method kvx --kv-bits 16 --kv-bits 4 --json
    """


@app.command()
@with_model
@measures("speed.Speed")
def speed(
    settings: Settings,
    tokens: Tokens = [2000, 7000],
    method: Annotated[str, typer.Option(help="as for `kvlite ask`")] = Settings.method,
    budget: Annotated[str, typer.Option(help="as for `kvlite ask`")] = "512",
    kv_bits: Annotated[str, typer.Option(help="as for `kvlite ask`")] = KV_BITS[0],
    recall: Annotated[
        str, typer.Option(help="entries that each token of an answer may bring back, or off")
    ] = "off",
    repeats: Annotated[int, typer.Option(min=1, help="pairs of runs; medians are given")] = 5,
    new_tokens: Annotated[int, typer.Option(min=3, help="tokens generated in each run")] = 24,
    peer: Annotated[
        list[str],
        typer.Option(
            callback=_listed,
            help="transformers, and llama.cpp for a GGUF file, where llama-server or the package "
            "xllamacpp is there",
        ),
    ] = ["transformers"],
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Read and answer beside transformers' own `generate`: time, peak memory, KV bytes.

    Each repetition runs both programs back to back, so that their ratio means something on a
    machine that is never quite quiet. Ratios below 1 are in kvlite's favor.

    Examples:

      kvlite bench speed --tokens 7000 --method snapkv

      kvlite bench speed --method full --repeats 3 --json

      kvlite bench speed --tokens 7000 --budget 256 --recall 128

      kvlite bench speed --weights gguf --peer transformers,llama.cpp
    """


@app.command()
@with_model
@measures("attention.Attention")
def attention(
    settings: Settings,
    file: File = "",
    tokens: Annotated[int, typer.Option(min=100, help="of a part of the text")] = 2000,
    repeats: Parts = 3,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Show where the attention of the last tokens falls in each layer.

    Counts the entries that take 90% of it, beside the lines to which pyramidkv and kvx would cut
    the layers, had they as many entries altogether.

    Examples:

      kvlite bench attention

      kvlite bench attention report.pdf --tokens 6000

      kvlite bench attention --repeats 5 --json
    """


app.command()(report)
app.command()(install_peers)
app.command("lm-eval")(lm_eval)
