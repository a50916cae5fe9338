"""The description in a saved conversation, read without loading torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvlite.config.checked_file import of_type, sound
from kvlite.conversation.tensor_file import TensorFile
from kvlite.documents import Document
from kvlite.methods import renamed
from kvlite.model.chat_template import all_of
from kvlite.model.identity import Identity


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
        ends: tokens that it can be cut back to, from checkpoints; None if it has no need of them,
            or was written before there were any.
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
    ends: tuple[int, ...] | None
    settings: dict[str, Any]
    identity: Identity


def about(path: Path) -> About:
    """What a file says about itself. Raises SnapshotError if it is not a snapshot, damaged, or of a
    newer format."""
    with TensorFile(path) as file:
        return about_in(file)


def about_in(file: TensorFile) -> About:
    """`about`, of an open file."""
    plain = file.values
    with sound(lambda _: file.damaged("its header")):
        identity = {name: of_type(str, each) for name, each in plain["identity"].items()}
        return About(
            path=file.path,
            nbytes=file.nbytes,
            created=of_type(float, plain["created"]),
            kvlite=of_type(str, plain["kvlite"]),
            model=of_type(str, plain["model"]),
            tokens=of_type(int, plain["tokens"]),
            messages=of_type(int, plain["messages"]),
            documents=tuple(of_type(str, each) for each in plain["documents"]),
            ahead=of_type(str, plain["ahead"]),
            recalls="tier" in plain,
            light=bool(plain.get("light", False)),
            ends=_ends(plain.get("checkpoints")),
            settings=renamed(plain["settings"]),
            identity=Identity(**identity),
        )


def _ends(checkpoints: dict[str, Any] | None) -> tuple[int, ...] | None:
    if checkpoints is None:
        return None
    return tuple(of_type(int, each["seen"]) for each in checkpoints["held"])


def digest_of(documents: Sequence[Document]) -> str:
    """A digest of documents as a message begins with them, in 16 digits."""
    said = all_of(documents).encode("utf-8", "surrogatepass")
    return sha256(said).hexdigest()[:16]
