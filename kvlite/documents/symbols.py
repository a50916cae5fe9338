"""Characters that stand for others: marks of ours, ligatures, and signs of the font Symbol, whose
codes say nothing of what they show."""

# Marks that readers put where a tab or a space is to be kept: others become one space.
TAB, SPACE = "\ufdd0\ufdd1"
# Ligatures as letters, no soft hyphens, and marks as what they stand for.
PLAIN = {
    **dict(enumerate(("ff", "fi", "fl", "ffi", "ffl", "st", "st"), 0xFB00)),
    0xAD: "",
    ord(TAB): "\t",
    ord(SPACE): " ",
}
# From 0x20 and from 0xA0 on.
_AT_20 = (
    " !∀#∃%&∋()∗+,−./0123456789:;<=>?≅ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ[∴]⊥_"  # noqa: RUF001
    "‾αβχδεφγηιϕκλμνοπθρστυϖωξψζ{|}∼"  # noqa: RUF001
)
_AT_A0 = (
    "€ϒ′≤⁄∞ƒ♣♦♥♠↔←↑→↓°±″≥×∝∂•÷≠≡≈…⏐⎯↵ℵℑℜ℘⊗⊕∅∩∪⊃⊇⊄⊂⊆∈∉"  # noqa: RUF001
    "∠∇®©™∏√⋅¬∧∨⇔⇐⇑⇒⇓◊〈®©™∑⎛⎜⎝⎡⎢⎣⎧⎨⎩⎪\ufffd〉∫⌠⎮⌡⎞⎟⎠⎤⎥⎦⎫⎬⎭"  # noqa: RUF001
)
_SYMBOL = dict(enumerate(_AT_20, 0xF020)) | dict(enumerate(_AT_A0, 0xF0A0))


def is_private(character: str) -> bool:
    """Whether only a font knows what a character shows."""
    return "\ue000" <= character <= "\uf8ff"


def shown_in(font: str | None, text: str) -> tuple[str, int]:
    """A text as it is shown in a font, without characters that only other fonts know; and how many
    those are."""
    text = text.translate(_SYMBOL) if font == "Symbol" else text
    kept = "".join(each for each in text if not is_private(each))
    return kept, len(text) - len(kept)
