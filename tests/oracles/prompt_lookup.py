"""Prompt lookup by going through everything, and comparing."""


def match(tokens: list[int], longest: int) -> tuple[int, int]:
    """How many of the last tokens, up to `longest`, stood before in the same order, and where the
    token after them is: the latest place of the longest match. If not even the last one stood
    before, where the second token after the one before it is; (0, 0) if that did not either."""
    for length in range(min(longest, len(tokens) - 1), 0, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                return length, end
    for place in range(len(tokens) - 3, -1, -1):
        if tokens[place] == tokens[-2]:
            return 0, place + 2
    return 0, 0


def continued(tokens: list[int], follows: int, count: int) -> list[int]:
    """The tokens from a place on, gone on with as if they were said again."""
    said = [*tokens]
    for at in range(follows, follows + count):
        said.append(said[at])
    return said[len(tokens) :]
