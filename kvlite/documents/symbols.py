"""Characters of the font Symbol, whose codes say nothing of what they show."""

_AT_20 = " !∀#∃%&∋()∗+,−./0123456789:;<=>?≅ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ[∴]⊥_‾αβχδεφγηιϕκλμνοπθρστυϖωξψζ{|}∼"
_AT_A0 = "€ϒ′≤⁄∞ƒ♣♦♥♠↔←↑→↓°±″≥×∝∂•÷≠≡≈…⏐⎯↵ℵℑℜ℘⊗⊕∅∩∪⊃⊇⊄⊂⊆∈∉∠∇®©™∏√⋅¬∧∨⇔⇐⇑⇒⇓◊〈®©™∑⎛⎜⎝⎡⎢⎣⎧⎨⎩⎪\ufffd〉∫⌠⎮⌡⎞⎟⎠⎤⎥⎦⎫⎬⎭"
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
