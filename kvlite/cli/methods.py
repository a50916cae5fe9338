"""`kvlite methods`: the compression methods."""

import inspect
import re
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvlite.cli.console import output, print_json, say
from kvlite.cli.options import AsJson
from kvlite.cli.word_wrap import terminal_width

if TYPE_CHECKING:
    from kvlite.methods import Method

# Between a docstring's paragraphs, points and options; and an option.
_ITEMS, _OPTION = re.compile(r"\n(?=\n|- | {4}\S)"), re.compile(r" {4}(\w+):")


def methods(
    name: Annotated[str, typer.Argument(help="a method, to read what its options mean")] = "",
    papers: Annotated[bool, typer.Option("--papers", help="show the paper of each method")] = False,
    as_json: AsJson = False,
) -> None:
    """List the methods that compress a KV cache; or explain one, with its options.

    Examples:

      kvlite methods

      kvlite methods --papers

      kvlite methods kvx

      kvlite ask report.pdf "Who paid?" --method snapkv:window=16,pool=31
    """
    from kvlite.methods import METHODS, parse_method

    chosen = [type(parse_method(name))] if name else list(METHODS.values())
    if as_json:
        print_json({"methods": [_row(method) for method in chosen]})
        return
    if name:
        say(_explained(chosen[0]))
        return
    listed = Table.grid("name", "about", padding=(0, 2, 0, 0))
    for method in chosen:
        listed.add_row(method.name, method.paper if papers else method.summary)
    screen = output()
    screen.print(listed)
    screen.print("\nkvlite methods NAME explains one, with its options.")


def _row(method: "type[Method]") -> dict[str, Any]:
    return {
        "name": method.name,
        "summary": method.summary,
        "paper": method.paper,
        "frees_memory": method().compresses,
        "while_answering": "keeps its size" if method().decoding.bounded else "grows",
        "options": method.defaults(),
    }


def _explained(method: "type[Method]") -> str:
    """The docstrings of a method and of its parents with options, and the defaults. What a parent
    says of an option that the method has explained is left out, and so are fields that are no
    options."""
    left, texts = set(method.defaults()), list[str]()
    for each in method.__mro__:
        doc = inspect.cleandoc(each.__doc__ or "")
        if "Attributes:" not in doc and each is not method:
            continue
        said = []
        for item in _ITEMS.split(doc.replace("Attributes:", "Options:")):
            option = _OPTION.match(item)
            if option is None or option[1] in left:
                said.append(_filled(item))
            left -= {option[1]} if option else set()
        texts.append("\n".join(said).removesuffix("\n\nOptions:"))
    options = ",".join(f"{option}={value}" for option, value in method.defaults().items())
    written = f"{method.name}:{options}" if options else method.name
    row = _row(method)
    freed = "frees memory" if row["frees_memory"] else "frees no memory by itself"
    course = f"This method {freed}; while an answer is written, the cache {row['while_answering']}."
    said = [_filled(each) for each in (f"Source: {method.paper}.", course)]
    return "\n\n".join([*texts, *said, f"Defaults: --method {written}"])


def _filled(item: str) -> str:
    blank, lead = "\n" * item.startswith("\n"), "    " * item.startswith("    ")
    hanging = lead or "  " * item.strip().startswith("- ")
    return blank + textwrap.fill(
        " ".join(item.split()),
        terminal_width(),
        initial_indent=lead,
        subsequent_indent=lead + hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
