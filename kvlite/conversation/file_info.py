"""The description in a saved conversation, read without loading torch."""

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

# What a malformed description can raise.
WRONG = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)


@dataclass(frozen=True)
class About:
    """What a file says about itself.

    Attributes:
        created: in seconds since 1970.
        kvlite: the version that wrote it.
        model: as users name it; a local one by its whole path.
        tokens: read and generated.
        messages: of both sides.
        documents: their names.
        ahead: a digest of the documents that the next message must begin with; "" for none.
        recalls: whether it has a host store.
        light: whether cache and host store are left out, to be read again.
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
    """What a file says about itself.

    Raises:
        SnapshotError: it is not a snapshot, damaged, or of a newer format.
    """
    with TensorFile(path) as file:
        return about_in(file)


def about_in(file: TensorFile) -> About:
    """`about`, of an open file."""
    plain = file.values
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
    """A digest of documents as a message begins with them, in 16 digits."""
    said = all_of(documents).encode("utf-8", "surrogatepass")
    return sha256(said).hexdigest()[:16]
