"""The runs that are recorded: every method, and every other setting with some of them."""

from dataclasses import dataclass, field
from typing import Any

from .play import Play, Script, tokens

EMBEDDED = "smollm2-135m"
DEFAULT = "kvx:pool=31,layers=uniform,queries=max,heads=max,omega=16,alpha=32,decode=grow"
STORY = (
    "The lighthouse at Corran Point was built in 1847 by Agnes Muir, who had never seen the sea. "
    "Its lamp burned whale oil, then paraffin, and since 1931 a mantle of thorium. The keeper's "
    "log names eleven wrecks; the last was the barque Halcyon, lost with her cargo of slate on "
    "the night of the third of March. The code of the oil store was 4172, and the dog was called "
    "Bosun. Nobody has lived there since the war, but the lamp still turns by itself. "
)
DRAWN = {"temperature": 1.3, "seed": 7}


def token_turns(play: Play) -> None:
    """Tokens read, answered, and answered again by drawing."""
    play.read(tokens(180))
    play.generate(tokens(12, 1))
    play.generate(tokens(5, 2), **DRAWN)


def chat(play: Play) -> None:
    """Three messages, the second answer drawn."""
    play.say(f"{STORY[:170]}\nWhat is this about?")
    play.say("Who built it?", **DRAWN)
    play.say("And when?")


def going_back(play: Play) -> None:
    """All ways to go back, and to go on from there."""
    play.say(f"{STORY[:120]}\nWhat is this about?")
    play.say("Who built it?")
    play.say("And when?")
    play.edit(2, "Where is it?")
    play.regenerate(**DRAWN)
    play.branch(1)
    play.say("What burned there?")
    play.switch(0)
    play.say("Is it lit?")
    play.undo()
    play.check()
    play.say("Was it lit?")


def saved(play: Play) -> None:
    """Saved and opened in between, with the cache and without."""
    play.say(f"{STORY[:150]}\nWhat is this about?")
    play.reopen()
    play.say("Who built it?")
    play.say("And when?")
    play.branch(1)
    play.reopen()
    play.say("What burned there?")
    play.reopen(light=True)
    play.say("Is it lit?", **DRAWN)
    play.switch(0)
    play.regenerate()


def token_file(play: Play) -> None:
    """Tokens, saved and opened in between."""
    play.read(tokens(150))
    play.generate(tokens(9, 1))
    play.reopen()
    play.generate(tokens(20, 2))
    play.reopen(light=True)
    play.generate(tokens(3, 3))


def read_ahead(play: Play) -> None:
    """A document before the question about it."""
    play.read_ahead(STORY[:200])
    play.say(f"{STORY[:200]}\n\nWho built it?")
    play.edit(1, f"{STORY[:200]}\n\nWhat burned there?")
    play.regenerate(**DRAWN)
    play.undo()
    play.say(f"{STORY[:200]}\n\nIs it lit?")


def changing(play: Play) -> None:
    """Turns by different methods, budgets and bits."""
    play.generate(tokens(120), method="kvx", budget=40)
    play.generate(tokens(12, 1), method="snapkv:window=8", budget=60)
    play.generate(tokens(12, 2), method="full")
    play.generate(tokens(12, 3), method="h2o", budget=30)
    play.generate(tokens(12, 4), budget=50)


def outgrowing(play: Play) -> None:
    """More than the model's context."""
    play.read(tokens(900))
    for seed in (1, 2, 3):
        play.generate(tokens(60, seed))


def short_of_memory(play: Play) -> None:
    """As much as fits the limit, and more."""
    play.read(tokens(300))
    play.generate(tokens(200, 1))
    play.generate(tokens(200, 2))


def sampled(play: Play) -> None:
    """Every way to draw."""
    play.read(tokens(60))
    for settings in (
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 1.5, "temperature": 0.0},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 8},
    ):
        play.generate(tokens(3, 1), **{**DRAWN, **settings})


def together(play: Play) -> None:
    """Questions about one text, in the same steps, and a message after them."""
    play.say(f"{STORY[:170]}\nWhat is this about?")
    play.ask_each(["Who built it?", "And when, by whom and of what?", "Is it lit?"])
    play.ask_each(["Where is it?", "Who?"], **DRAWN)
    play.say("And then?")


def repeating(play: Play) -> None:
    """Text that comes again and again, as what is proposed does, and messages about it."""
    play.read(tokens(40) * 4)
    play.generate(tokens(40)[:9], max_new_tokens=40)
    play.say(f"{STORY[:60] * 3}\nWhat is this about?", max_new_tokens=30)
    play.say("And when?", max_new_tokens=30, **DRAWN)


def long_answer(play: Play) -> None:
    """An answer many times as long as the budget."""
    play.read(tokens(100))
    play.generate(tokens(9, 1), max_new_tokens=70)
    play.generate(tokens(3, 2), max_new_tokens=20)


def story(play: Play) -> None:
    """Real text and a model that was trained."""
    play.say(f"{STORY}\nWhat was the dog called?")
    play.say("And who built the lighthouse?", **DRAWN)


def story_going_back(play: Play) -> None:
    """The same, edited and opened again."""
    play.say(f"{STORY}\nWhat was the dog called?")
    play.reopen()
    play.edit(1, f"{STORY}\nWhen was it built?")
    play.undo()
    play.say(f"{STORY}\nWhich ship was the last?")


@dataclass(frozen=True)
class Run:
    """A run.

    Attributes:
        model: one of `models.MODELS`, or the embedded one.
        given: settings of the conversation.
        loading: settings that loading heeds.
    """

    name: str
    model: str
    script: Script
    given: dict[str, Any]
    loading: dict[str, Any] = field(default_factory=dict)


def _run(
    model: str, script: Script, method: str, budget: Any = 48, load: Any = None, **given: Any
) -> Run:
    usual = {"recall": "off", "max_new_tokens": 8, "recall_entries": 8, "chunk": 64}
    words = [f"{name}={value}" for name, value in {**given, **(load or {})}.items()]
    name = " ".join([model, script.__name__, "default" if method == DEFAULT else method, *words])
    return Run(
        name, model, script, {**usual, "method": method, "budget": budget, **given}, load or {}
    )


RUNS = [
    # Every method, bits and recall in rotation.
    _run("llama", token_turns, "full"),
    _run("llama", token_turns, "random"),
    _run("llama", token_turns, "streaming", kv_bits="8"),
    _run("llama", token_turns, "lminfinite", kv_bits="4"),
    _run("llama", token_turns, "snapkv:window=8", recall="ram"),
    _run("llama", token_turns, "pyramidkv:window=8", kv_bits="8", recall="ram", recall_bits="8"),
    _run("llama", token_turns, "kvx", kv_bits="k8v4"),
    _run("llama", token_turns, DEFAULT, 60, recall="ram", recall_bits="4"),
    _run("llama", token_turns, "h2o"),
    _run("llama", token_turns, "tova", kv_bits="4", recall="disk"),
    _run("llama", token_turns, "keydiff", kv_bits="kivi4"),
    _run("llama", token_turns, "keydiff", recall="ram", recall_entries=0),
    _run("llama", token_turns, "kvzip:passage=50"),
    _run("llama", token_turns, "uncomp:window=8"),
    _run("llama", token_turns, "pyramidinfer:ratio=0.6,least=16", kv_bits="8"),
    _run("llama", token_turns, "minicache"),
    _run("llama", token_turns, "simlayerkv:threshold=0.15,recent=30"),
    _run("llama", token_turns, "minference:columns=16,near=16,observed=8,sinks=4"),
    # Their options and compositions.
    _run("llama", token_turns, "snapkv:window=8,per_head=true,pooling=avg,pool=3"),
    _run("llama", token_turns, "snapkv:window=8,layers=entropy", "25%"),
    _run("llama", token_turns, "snapkv:window=8,layers=gini,queries=max", recall="ram"),
    _run("llama", token_turns, "kvx:layers=global", kv_bits="4g32"),
    _run("llama", token_turns, "kvx:layers=geometric,groups=2,decode=grow", kv_bits="kivi4"),
    _run("llama", token_turns, "kvx:layers=exponential,per_layer=true", "40KiB"),
    _run("llama", token_turns, "kvx:middle=example,limit=60,until_limit=true"),
    _run("llama", token_turns, "kvx:layers=rank,omega=8", kv_bits="2"),
    _run("llama", token_turns, "uncomp:window=8,delete=1", recall="ram"),
    _run("llama", token_turns, "uncomp:window=8,stage=true,least=30", kv_bits="8"),
    _run("llama", token_turns, "pyramidinfer:schedule=constant,ratio=0.5,least=8"),
    _run("llama", token_turns, "minicache:start=0,retain=0.2", kv_bits="8", recall="ram"),
    _run("llama", token_turns, "simlayerkv:threshold=0.15,recent=20,detect=decode"),
    _run("llama", token_turns, "simlayerkv:threshold=0.15,recent=20,bound_decode=true+kvx"),
    _run(
        "llama", token_turns, "minference:columns=16,near=16,observed=8,sinks=4+kvx", recall="ram"
    ),
    _run(
        "llama",
        token_turns,
        "minference:columns=8,near=8,observed=4,sinks=4+simlayerkv:threshold=0.15,recent=20+kvx",
    ),
    # Chosen on the host.
    _run("llama", token_turns, "snapkv:window=8", scores="host"),
    _run("llama", token_turns, "kvx", scores="host-softmax", kv_bits="8"),
    _run("llama", token_turns, "h2o", scores="host"),
    _run("llama", token_turns, "kvx:layers=global", scores="host-softmax", recall="ram"),
    # Other architectures, sliding windows among them.
    _run("gemma2", chat, DEFAULT, 60, recall="ram"),
    _run("gemma2", token_turns, "h2o", kv_bits="4"),
    _run("gemma3", going_back, "snapkv:window=8", recall="ram"),
    _run("gemma3", saved, "kvx", kv_bits="8"),
    _run("gemma3", token_turns, "simlayerkv:threshold=0.15,recent=16+snapkv:window=8"),
    _run("mistral", chat, "tova", recall="disk", recall_bits="8"),
    _run("mistral", token_file, "kvx"),
    _run("qwen2", chat, "pyramidkv:window=8", kv_bits="k8v4"),
    _run("qwen3", going_back, "keydiff", recall="ram"),
    _run("qwen3-moe", chat, "snapkv:window=8", kv_bits="8", recall="ram"),
    _run("phi3", chat, "kvzip:passage=60", recall="ram"),
    _run("mixtral", token_turns, "keydiff", kv_bits="4"),
    # Going back, saving, reading ahead.
    _run("llama", going_back, "full"),
    _run("llama", going_back, DEFAULT, 60, recall="ram"),
    _run("llama", going_back, "h2o"),
    _run("llama", going_back, "kvx", kv_bits="4", recall="disk"),
    _run("llama", going_back, "snapkv:window=8", checkpoint_limit="0MiB"),
    _run("llama", saved, DEFAULT, 60, recall="ram", recall_bits="8"),
    _run("llama", saved, "h2o", kv_bits="8"),
    _run("llama", token_file, "minicache:start=0", kv_bits="8"),
    _run("llama", token_file, "uncomp:window=8,delete=1", kv_bits="4"),
    _run("llama", token_file, "simlayerkv:threshold=0.15,recent=20,detect=decode", recall="ram"),
    _run("llama", token_file, "keydiff", kv_bits="kivi4"),
    _run("llama", read_ahead, "snapkv:window=8", recall="ram"),
    _run("llama", read_ahead, "full", kv_bits="8"),
    _run("llama", chat, "kvx", system="Answer in one word.", stop=("a", "e")),
    # What a conversation may change, and what it may run out of.
    _run("llama", changing, DEFAULT, 60),
    _run("llama", changing, DEFAULT, 60, recall="ram", kv_bits="8"),
    _run("llama", outgrowing, "kvx", beyond_context="compact"),
    _run("gemma3", outgrowing, "snapkv:window=8", beyond_context="compact", kv_bits="8"),
    _run("llama", sampled, "full"),
    _run("llama", token_turns, "snapkv:window=8", 48, {"stream": "disk"}, recall="ram"),
    _run("gemma3", chat, "h2o", 48, {"stream": "disk"}),
    _run("llama", short_of_memory, "full", "auto", {"vram": "1700KiB"}, measure="tensors"),
    _run("llama", short_of_memory, DEFAULT, 400, {"vram": "1500KiB"}, measure="tensors"),
    _run("llama", short_of_memory, "h2o", 400, {"vram": "1500KiB"}, measure="tensors"),
    _run("llama", short_of_memory, DEFAULT, 200, {"vram": "8MiB"}, measure="tensors", recall="ram"),
    _run("llama", short_of_memory, "full", "auto", {"vram": "1400KiB"}, never_lossy=True),
    # Answers that are longer than what is kept.
    *(
        _run("llama", long_answer, method, **given)
        for method, given in (
            ("full", {"kv_bits": "4"}),
            (DEFAULT, {"recall": "ram"}),
            ("h2o", {"recall": "ram"}),
            ("pyramidkv:window=8", {"kv_bits": "kivi4"}),
            ("keydiff", {"recall": "disk", "recall_bits": "4"}),
            ("kvx", {"kv_bits": "k8v4", "recall": "ram"}),
            ("uncomp:window=8,delete=1", {"kv_bits": "8", "recall": "ram"}),
            ("simlayerkv:threshold=0.15,recent=20,detect=decode", {}),
            ("simlayerkv:threshold=0.15,recent=20,detect=decode", {"recall": "ram"}),
            ("simlayerkv:threshold=0.15,recent=20,detect=decode", {"kv_bits": "8"}),
            ("simlayerkv:threshold=0.15,recent=20,bound_decode=true+snapkv:window=8", {}),
        )
    ),
    # Quantized keys and values with recall, each with each.
    *(
        _run("llama", token_turns, "snapkv:window=8", kv_bits=bits, recall="ram", **there)
        for bits in ("8", "4", "k8v4", "kivi4", "2")
        for there in ({}, {"recall_bits": "8"}, {"recall_bits": "4"})
        if bits != "2" or not there
    ),
    # Several questions in the same steps.
    *(
        _run(model, together, method, 60, **given)
        for model, method, given in (
            ("llama", "full", {}),
            ("llama", DEFAULT, {"recall": "ram"}),
            ("llama", "snapkv:window=8", {"kv_bits": "8"}),
            ("llama", "h2o", {"kv_bits": "4", "recall": "ram"}),
            ("llama", "kvx", {"recall": "ram", "recall_bits": "4"}),
            ("llama", "uncomp:window=8", {}),
            ("llama", "simlayerkv:threshold=0.15,recent=20,detect=decode", {}),
            ("gemma3", "snapkv:window=8", {"recall": "ram"}),
            ("qwen3-next", DEFAULT, {"recall": "ram"}),
            ("gemma3n", "snapkv:window=8", {}),
        )
    ),
    _run("llama", together, "snapkv:window=8", 60, {"stream": "disk"}, recall="ram"),
    # Tokens that are proposed.
    *(
        _run(model, repeating, method, 90, {"speculate": "auto"}, **given)
        for model, method, given in (
            ("llama", "full", {}),
            ("llama", "snapkv:window=8", {"kv_bits": "8"}),
            ("llama", DEFAULT, {"recall": "ram"}),
            ("llama", "h2o", {}),
            ("gemma3", "full", {}),
            ("qwen3-5", "full", {}),
            ("qwen3-5", "snapkv:window=8", {"recall": "ram"}),
            ("qwen3-next", "full", {"kv_bits": "8"}),
        )
    ),
    # Every other kind of layer.
    *(
        _run(model, script, method, **given)
        for model in (
            *("gemma3n", "gemma4", "gemma4-e", "llama4", "deepseek-v3", "gpt-oss"),
            *("qwen3-next", "qwen3-5", "granite-hybrid", "nemotron-h", "lfm2"),
        )
        for script, method, given in (
            (token_turns, "kvx", {"recall": "ram"}),
            (chat, "h2o", {"kv_bits": "8"}),
            (long_answer, DEFAULT, {"recall": "ram"}),
        )
    ),
    _run("gpt-oss", going_back, "kvx", kv_bits="4", recall="ram"),
    _run("qwen3-next", going_back, DEFAULT, 60, recall="ram"),
    _run("lfm2", saved, "snapkv:window=8", recall="ram"),
    _run("nemotron-h", token_file, "kvx"),
    # Weights that are streamed.
    *(
        _run(model, token_turns, method, 48, {"stream": "disk"}, **given)
        for model, method, given in (
            ("llama", "kvx", {"kv_bits": "4"}),
            ("qwen3-moe", "snapkv:window=8", {"recall": "ram"}),
            ("gpt-oss", "h2o", {}),
            ("gemma4-e", "snapkv:window=8", {}),
            ("qwen3-next", DEFAULT, {"recall": "ram"}),
            ("nemotron-h", "full", {"kv_bits": "8"}),
        )
    ),
    # Real words.
    _run(EMBEDDED, story, "full", kv_bits="kivi4"),
    _run(EMBEDDED, story, "simlayerkv:recent=20+snapkv", 60, recall="ram", recall_entries=16),
    _run(EMBEDDED, story_going_back, DEFAULT, 64, recall="ram"),
    _run(EMBEDDED, story, "uncomp", kv_bits="8"),
]

# Arguments of `kvlite plan`, the model first.
CARD = ["--vram", "24GiB", "--card", "RTX 4090"]
PLANS: list[list[str]] = [
    ["llama", "--device", "cpu", "--vram", "64MiB", "--context", "700"],
    ["llama", "--device", "cpu", "--vram", "3MiB", "--context", "700", "--method", "full"],
    ["llama", "--vram", "2GiB", "--context", "500", "--method", "minference+kvx"],
    ["llama", "--vram", "2GiB", "--kv-bits", "4", "--recall-bits", "8", "--context", "600"],
    ["llama", "--vram", "2GiB", "--method", "simlayerkv:threshold=1+kvx", "--budget", "25%"],
    ["gemma3", "--vram", "2GiB", "--scores", "host-softmax", "--budget", "100"],
    ["gemma2", "--vram", "2GiB", "--method", "minicache", "--stream", "disk"],
    ["mixtral", "--device", "cpu", "--vram", "40MiB", "--method", "kvzip", "--budget", "200"],
    ["llama-8b", *CARD, "--context", "60000", "--budget", "2048"],
    ["llama-8b", "--vram", "8GiB", "--context", "30000", "--recall", "off"],
    ["llama-8b", "--vram", "8GiB", "--context", "30000", "--recall", "off", "--budget", "25%"],
]
