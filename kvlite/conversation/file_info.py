"""What a saved conversation says of itself; no tensor is looked at for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvlite.conversation.tensor_file import TensorFile
from kvlite.documents import Document
from kvlite.methods import renamed
from kvlite.model.chat_template import all_of
from kvlite.model.identity import Identity

# What a description that is none makes fail.
WRONG = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)


@dataclass(frozen=True)
class About:
    """What a file says of itself.

    Attributes:
        path: where it is.
        nbytes: how large.
        created: when it was made, in seconds since 1970.
        kvlite: the version that made it.
        model: what users call it; a folder's or a file's whole path.
        tokens: read and answered.
        messages: said, by both sides.
        documents: names of those that were read.
        ahead: a digest of the text that the next message must begin with; "" for none.
        recalls: whether all that was read is there, whatever the cache dropped.
        light: whether the cache and what is recalled from are left out, to be read again.
        settings: of the conversation, by name.
        identity: of the model.
    """

    path: Path
    nbytes: int
    created: float
    kvlite: str
    model: str
    tokens: int
    messages: int
    documents: tuple[str, ...]
    ahead: str
    recalls: bool
    light: bool
    settings: dict[str, Any]
    identity: Identity


def about(path: Path) -> About:
    """What a file says of itself.

    Raises:
        SnapshotError: it is none, a damaged one, or of a newer format.
    """
    with TensorFile(path) as file:
        return about_in(file)


def about_in(file: TensorFile) -> About:
    """The same, of an open file; errors likewise."""
    plain = file.about
    try:
        return About(
            path=file.path,
            nbytes=file.nbytes,
            created=float(plain["created"]),
            kvlite=str(plain["kvlite"]),
            model=str(plain["model"]),
            tokens=int(plain["tokens"]),
            messages=int(plain["messages"]),
            documents=tuple(map(str, plain["documents"])),
            ahead=str(plain["ahead"]),
            recalls="tier" in plain,
            light=bool(plain.get("light", False)),
            settings=renamed(plain["settings"]),
            identity=Identity(**plain["identity"]),
        )
    except WRONG as error:
        raise file.damaged("its header") from error


def digest_of(documents: Sequence[Document]) -> str:
    """Documents' names and texts as a message begins with them, in 16 digits."""
    said = all_of(documents).encode("utf-8", "surrogatepass")
    return sha256(said).hexdigest()[:16]
