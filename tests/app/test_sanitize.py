"""What an answer has in it loads nothing."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from kvlite_app.views.markdown import sanitized

MARKDOWN = MarkdownIt("commonmark", {"html": True})


def loads(text: str) -> list[str]:
    """Tags of a rendered text that make a browser fetch or run something: an independent look."""
    html = MARKDOWN.render(text)
    names = "img|image|script|iframe|video|audio|object|embed|link|style|svg|source|form|input|base"
    return re.findall(rf"<(?:{names})\b", html, re.IGNORECASE)


@pytest.mark.parametrize(
    "text",
    [
        "![x](http://example.org/x.png)",
        "![x][1]\n\n[1]: http://example.org/x.png",
        "![![x](http://a/)](http://b/)",
        "<img src=http://example.org>",
        "<IMG\nsrc=x>",
        "a <script>alert(1)</script> b",
        "<svg/onload=alert(1)>",
        "`a` ![x](y) `b`",
        "```\ncode\n```\n![x](y)",
        "``` ![x](y)",
        "``a` ![x](y)",
        "> ![x](y)",
        "- ```\n  ![x](y)\n\n![x](y)",
        "- a\n  ```\n![x](y)\n```\n",
        "- a\nb\n  ```\n```\n![x](y)",
        "<div>\n```\n<img src=x>\n```\n</div>",
        "<!--\n\n```\n-->\n<img src=x>",
    ],
)
def test_nothing_is_loaded(text: str) -> None:
    assert loads(sanitized(text)) == []


pieces = st.sampled_from(
    [
        "![",
        "]",
        "(x)",
        "<img ",
        "src=x>",
        "`",
        "``",
        "```",
        "\n",
        "~~~",
        "\x0b",
        "\x85",
        "\r",
        "a",
        " ",
        "<svg>",
        "    ",
        "!",
        "\n```\n",
        "\n  ```",
        "\n~~~x\n",
        "\n- ",
        "\n2) ",
        "\n> ",
        "\n\n",
        "\n   ",
        "\t",
        "- - -",
        "\n![x](y)\n",
        "\n<div>",
        "<pre>",
        "<!--",
        "-->",
    ]
)


@given(st.lists(pieces, max_size=20).map("".join))
def test_nothing_is_loaded_however_it_is_put_together(text: str) -> None:
    assert loads(sanitized(text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "a < b and <b>c</b>, $x<y$",
        "```html\n<img src=x>\n![x](y)\n```",
        "[link](http://example.org) and 5! [6]",
        "~~~\n<script>\n",
        "  ```\n  <img>\n  ```",
        "1. Type\n   ```\n   make\n   ```\n2. and\n\nthen\n```\n<img>\n```",
        "<div>\n```\na\n```\n\n```html\n<img>\n```",
    ],
)
def test_what_loads_nothing_stays_as_it_is(text: str) -> None:
    assert sanitized(text) == text


@given(st.text(st.sampled_from("ab<>![]()`~ \n\r\x0b\x85\u2028img"), max_size=40))
def test_what_is_seen_is_the_same(text: str) -> None:
    assert sanitized(text).replace("\u2060", "") == text


blocks = st.sampled_from(
    [
        "Prose\nof two lines.\n",
        "- a\n- b\n  - c\n",
        "1. a\n   ```\n   b\n   ```\n2. c\n",
        "- a\n\n  ```py\n  b\n\n  c\n  ```\n",
        "> quoted\n",
        "* * *\n",
        "<b>x</b>\n",
    ]
)


@given(st.lists(blocks, max_size=6).map("\n".join))
def test_code_between_ordinary_blocks_stays_as_it_is(text: str) -> None:
    code = "```\n<img src=x>\n\n- ![x](y)\n```\n"
    assert sanitized(f"{text}\n{code}\n![x](y)\n\n{code}").count(code) == 2
