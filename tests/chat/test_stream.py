"""Markdown while it comes, on a screen of the tests' own."""

import random
from io import StringIO

import pytest
from rich.console import Console

from kvlite.cli.chat.stream import Blocks, MarkdownStream, lines_of
from kvlite.printable import harmless
from tests.chat.screen import Screen

POEM = "Roses are red,\nviolets are **blue**,\nand `code` is green.\n\n"
TEXT = f"""# Tea

{POEM}Then, in one long paragraph that is broken by the terminal and by nobody else, water *boils*.

1. Boil water.
2. Wait, <b>patiently</b>, for {"a very " * 12}long time.
   - not too long
   - not too short

3. Drink.

```python
def tea(cups: int = 1) -> str:

    return "tea " * cups
```

| cups | minutes |
|---|---|
| 1 | 3 |
| 2 | 4 |

[1]: https://example.org
Title
-----
> said
> someone

{chr(10).join(f"- item {n}" for n in range(30))}

The end."""


class Clock:
    """Time that passes as it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(width: int, height: int, clock: Clock) -> tuple[MarkdownStream, Screen, Console]:
    screen = Screen(width, height)
    file = StringIO()
    console = Console(file=file, width=width, height=height, force_terminal=True, color_system=None)
    console.file = file
    stream = MarkdownStream(console, lambda columns: "STATUS"[:columns], clock)
    return stream, screen, console


def flush(console: Console, screen: Screen) -> None:
    """What the program wrote reaches the screen."""
    file = console.file
    assert isinstance(file, StringIO)
    screen.write(file.getvalue())
    file.seek(0)
    file.truncate()


def whole(text: str, width: int) -> str:
    """A text drawn at once."""
    console = Console(file=StringIO(), width=width, color_system=None)
    blocks = Blocks()
    drawn = [*blocks.push(text + "\n\n"), blocks.open]
    shown = [
        "\n".join("".join(s.text for s in line) for line in lines_of(console, each))
        for each in drawn
        if each.strip()
    ]
    return "\n\n".join(shown)


def pieces(text: str, seed: int) -> list[str]:
    draw, parts = random.Random(seed), []
    while text:
        size = draw.choice((1, 2, 3, 5, 9, 40))
        parts.append(text[:size])
        text = text[size:]
    return parts


def streamed(size: tuple[int, int], seed: int) -> str:
    """What stands on a screen after the text came in pieces."""
    clock = Clock()
    stream, screen, console = make(*size, clock)
    draw = random.Random(seed)
    for piece in pieces(TEXT, seed):
        stream.push(piece)
        clock.now += draw.choice((0.01, 0.5))
        flush(console, screen)
        assert screen.text.count("STATUS") == 1
    stream.close()
    flush(console, screen)
    return screen.text


@pytest.mark.parametrize("size", [(100, 30), (40, 14), (72, 12), (40, 5), (20, 6), (12, 3)])
@pytest.mark.parametrize("seed", [1])
def test_in_the_end_everything_stands_there_once(size: tuple[int, int], seed: int) -> None:
    assert streamed(size, seed) == whole(TEXT, size[0])


def test_a_table_taller_than_the_screen_that_changes_is_printed_once() -> None:
    rows = [f"| {'wide ' * (n // 8)}{n} | b |" for n in range(40)]
    table = "\n".join(["| a | b |", "|---|---|", *rows])
    clock = Clock()
    stream, screen, console = make(60, 12, clock)
    for piece in pieces(table, 1):
        stream.push(piece)
        clock.now += 0.5
    stream.close()
    flush(console, screen)
    assert screen.text == whole(table, 60).rstrip()


@pytest.mark.parametrize("seed", range(2))
def test_a_terminal_that_becomes_narrower(seed: int) -> None:
    """What is drawn again is erased whole, however it was broken."""
    clock, draw = Clock(), random.Random(seed)
    stream, screen, console = make(60, 24, clock)
    widths = [52, 37, 30]
    parts = pieces(POEM * 3 + "word " * 60, seed)
    for number, piece in enumerate(parts):
        stream.push(piece)
        flush(console, screen)
        clock.now += draw.choice((0.01, 0.5))
        if number % 15 == 14 and widths:
            width = widths.pop(0)
            screen.narrow(width)
            console.width = width
            stream.push("")
    stream.close()
    flush(console, screen)
    assert "STATUS" not in screen.text
    assert " ".join(screen.text.split()).count("Roses are red,") == 3
    assert screen.text.split().count("word") == 60


def test_a_note_stands_above_and_stays() -> None:
    clock = Clock()
    stream, screen, console = make(40, 12, clock)
    stream.push("half a sent")
    stream.note("memory was short")
    flush(console, screen)
    assert screen.text.split("\n") == ["Note: memory was short", "half a sent", "", "STATUS"]
    stream.push("ence")
    stream.close()
    flush(console, screen)
    assert screen.text.split("\n") == ["Note: memory was short", "half a sentence"]


def test_what_a_terminal_would_obey_is_not_passed_on() -> None:
    assert (
        harmless("a\x1b]0;title\x07\tb\r\nc\x9bd\x7f") == "a\ufffd]0;title\ufffd\tb\nc\ufffdd\ufffd"
    )
    clock = Clock()
    stream, screen, console = make(40, 12, clock)
    stream.push("\x1b[2Jgone?\x1b[5A")
    stream.close()
    flush(console, screen)
    assert screen.text == "\ufffd[2Jgone?\ufffd[5A"
