"""Formulas are told from prices."""

import pytest

from kvlite_app.views.markdown import formulas


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("so $x^2$ is", r"so \(x^2\) is"),
        ("$a$, $b_1 + c$.", r"\(a\), \(b_1 + c\)."),
        ("($x$)", r"(\(x\))"),
        ("`a $b$` $c$", r"`a $b$` \(c\)"),
        ("``a ` $b$`` $c$", r"``a ` $b$`` \(c\)"),
        ("```\n$x$\n```\n$y$", "```\n$x$\n```\n" + r"\(y\)"),
        ("```sh\necho $A$B", "```sh\necho $A$B"),
        (r"it costs $5, that is \(x\) and $y$", r"it costs $5, that is \(x\) and \(y\)"),
    ],
)
def test_formulas_are_marked(text: str, shown: str) -> None:
    assert formulas(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "costs $5 and $6",
        "from $5-$6 to $7",
        "US$5 and A$6$",
        r"\$x$ or $x\$",
        "$$x + y$$",
        "$ x $",
        "$one\nline$",
        "one $ only",
    ],
)
def test_everything_else_stays(text: str) -> None:
    assert formulas(text) == text
