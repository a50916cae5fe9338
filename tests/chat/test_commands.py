"""Commands, at a terminal that remembers."""

from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

import kvlite
from kvlite import documents
from kvlite.cli.chat.commands import COMMANDS
from kvlite.cli.chat.completion import ChatCompleter
from kvlite.cli.chat.typed import shown_name
from kvlite.config.settings import OPTIONS, Settings
from kvlite.conversation.library import Library
from kvlite.conversation.session import Session
from kvlite.engine.callbacks import NO_CALLBACKS
from kvlite.errors import Stopped
from kvlite.model.chat_template import question_about, tokens_of
from tests.chat.conftest import Chat, Recorder

TEXT = "The cat sat on the mat and the dog lay by the door. " * 5


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "cats and dogs.txt"
    path.write_text(TEXT)
    return path


def seen(chat: Chat) -> int:
    return chat.session.talk.cache.seen


@pytest.mark.parametrize("width", [30, 100])
def test_help_has_every_command(chat: Chat, width: int) -> None:
    chat.terminal.width = width
    shown = chat("/help")
    for command in COMMANDS:
        assert command.usage in shown
    assert max(len(line.rstrip()) for line in shown.split("\n")) <= width
    assert chat("/help undo") == "/undo: forgets your last message and its answer"
    assert chat("/help /quit").startswith("/exit: ")


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("/hlep", "did you mean /help?"),
        ("/mem", "did you mean /memory?"),
        ("/brnaches", "did you mean /branches?"),
        ("/xyzzy", "/help lists them"),
        ("/help sett", "did you mean /set?"),
    ],
)
def test_an_unknown_command_is_told_the_nearest(chat: Chat, typed: str, near: str) -> None:
    said = chat.refused(typed)
    assert near in said and typed.split()[-1].removeprefix("/") in said


def test_messages_are_answered_in_one_conversation(chat: Chat, runner: kvlite.Runner) -> None:
    chat("Who sat?")
    chat('"""\nWho\nlay?\n"""')
    chat("  ")
    talk = runner.conversation()
    expected = ["".join(p.text for p in talk.stream(said)) for said in ("Who sat?", "Who\nlay?")]
    assert chat.terminal.answers == expected


def test_a_document_waits_for_the_next_message(chat: Chat, text: Path) -> None:
    said = chat(f"/read {text}")
    ahead = seen(chat)
    assert said == f"Read {text.name}: {ahead:,} tokens. Your next message is about it."
    chat("Who sat?")
    chat("Who lay?")
    first, second = chat.session.messages
    assert first.said == question_about(chat.session.messages[0].documents, "Who sat?")
    assert [each["content"] for each in chat.session.talk.messages[::2]] == [first.said, "Who lay?"]
    assert (first.text, second.documents, chat.session.waiting) == ("Who sat?", (), [])
    assert chat.session.last is not None and chat.session.last.prompt_tokens < ahead


def test_a_second_document_is_read_with_the_message(chat: Chat, text: Path, tmp_path: Path) -> None:
    other = tmp_path / "b.md"
    other.write_text("Nothing of it.")
    chat(f"/read {text}")
    ahead = seen(chat)
    assert chat(f"/read '{other}'") == "b.md will be read with your next message."
    assert seen(chat) == ahead
    chat("Which?")
    assert "b.md\n\nNothing of it.\n\nBased on" in chat.session.talk.messages[0]["content"]
    both = chat.session.messages[0].documents
    assert [document.name for document in both] == [text.name, "b.md"]


def test_what_does_not_fit_is_refused_and_does_not_wait(
    chat: Chat, text: Path, tmp_path: Path
) -> None:
    long = tmp_path / "long.txt"
    long.write_text(TEXT * 30)
    assert "trained for 1,024" in chat.refused(f"/read {long}")
    assert chat.session.waiting == []
    chat(f"/read {text}")
    long.write_text(TEXT * 14)
    said = chat.refused(f"/read {long}")
    told = f"Document: long.txt\n\n{long.read_text().strip()}"
    new = tokens_of(chat.session.runner.tokenizer, told, 1024)
    assert f"{new:,} more tokens do not fit" in said and f"{seen(chat):,} are read" in said
    assert len(chat.session.waiting) == 1
    chat("Who sat?")


def test_reading_that_is_stopped_leaves_nothing(chat: Chat, text: Path) -> None:
    chat.terminal.cancel.set()
    for typed in (f"/read {text}", "Who sat?"):
        with pytest.raises(Stopped):
            chat(typed)
    assert (chat.session.waiting, chat.session.messages, seen(chat)) == ([], [], 0)
    chat.terminal.cancel.clear()
    chat(f"/read {text}")
    chat.terminal.cancel.set()
    with pytest.raises(Stopped):
        chat("Who sat?")
    chat.terminal.cancel.clear()
    chat("Who sat?")  # the document still waits
    assert len(chat.session.messages[0].documents) == 1


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("/read", "name a file: /read report.pdf"),
        ("/read none.txt", "none.txt"),
        ("/read -", "standard input is what you type"),
        ("/read 'open", "a quotation mark is not closed"),
        ("/save", "give it a name"),
        ("/save x.md", "nothing has been said yet"),
        ("/load", "which one"),
        ("/load x.md", "text for people"),
        ("/load trip", "the library has no 'trip'"),
        ("/load ./none.kv", "none.kv"),
        ("/save trip", "nothing has been said yet"),
        ("/metrics", "nothing has been answered yet"),
        ("/edit", "nothing has been said yet"),
        ("/regen", "nothing has been said yet"),
        ("/branch", "nothing has been said yet"),
        ("/edit two", "'two' is not a number"),
        ("/undo 3", "/undo takes nothing after it: leave out '3'"),
        ("/clear all", "/clear takes nothing after it"),
        ("/set temperature 20", "between 0 and 10"),
        ("/set temperature warm", "not a number"),
        ("/set model other", "cannot be changed once a model is loaded"),
        ("/set method magic", "magic"),
        ("/set budget 0", "--budget 0"),
        ("/set colour red", "no setting 'colour'"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(chat: Chat, typed: str, said: str) -> None:
    before = chat.session.talk.settings
    assert said in chat.refused(typed)
    assert chat.session.talk.settings == before


def test_settings_are_changed_from_the_next_message_on(chat: Chat) -> None:
    assert chat("/set max-tokens 3") == "max-tokens is 3 now."
    chat("Who sat?")
    assert chat.session.last is not None and chat.session.last.generated_tokens == 3
    assert chat("/set --max_new_tokens = 4") == "max-tokens is 4 now."
    chat("Who lay?")
    assert chat.session.last.generated_tokens == 4
    chat("/set never-lossy on")
    assert chat.session.talk.settings.never_lossy is True
    chat("/clear")
    assert chat.session.talk.settings.never_lossy is True  # also in a new conversation


def test_settings_are_explained(chat: Chat) -> None:
    said = chat("/set top-p")
    assert said.startswith("top-p is 1.0: as --top-k,") and said.endswith("(0 to 1)")
    assert "(auto, ram, disk, off)" in chat("/set recall")
    assert chat("/set chunk").endswith("(from 1 on)")
    listed = chat("/set").split("\n")
    for name in OPTIONS:
        assert any(line.startswith(shown_name(name) + " ") for line in listed)


def test_show_has_what_differs(runner: kvlite.Runner, tiny_folder: Path) -> None:
    chat = Chat(Session(runner, Settings(model=str(tiny_folder))), Recorder(width=200))
    chat("/set temperature 0.5")
    chat("/set never-lossy true")
    lines = {line.split()[0]: line for line in chat("/show").splitlines() if line}
    assert "0.5" in lines["temperature"] and "usually 0.0" in lines["temperature"]
    assert "true" in lines["never-lossy"]
    assert "usually smollm2-135m" in lines["model"]
    assert "decided by the plan" in lines["weights"]
    assert not {"top-p", "seed", "budget", "kv-bits"} & set(lines)


def test_another_system_message_begins_anew(chat: Chat, runner: kvlite.Runner) -> None:
    assert chat("/system") == "The model is told nothing first."
    chat("Who sat?")
    chat("/set temperature 0.5")
    chat("/system Be brief.")
    assert (chat.session.messages, seen(chat)) == ([], 0)
    settings = chat.session.talk.settings
    assert (settings.system, settings.temperature) == ("Be brief.", 0.5)
    assert chat("/system") == "The model is told: Be brief."
    chat("/set temperature 0")
    chat("Who sat?")
    expected = runner.conversation(system="Be brief.").stream("Who sat?")
    assert chat.terminal.answers[-1] == "".join(piece.text for piece in expected)
    chat("/set system none")
    assert (chat.session.talk.settings.system, seen(chat)) == ("", 0)


def test_memory_plan_and_ledger(chat: Chat) -> None:
    chat("Who sat?")
    memory = chat("/memory")
    for part in ("weights", "KV, full attention", "this program", "free", "GiB used", "peak"):
        assert part in memory
    assert "fits" in chat("/plan") and "weights" in chat("/plan")
    chat.terminal.width = 40
    assert max(len(line) for line in chat("/plan").split("\n")) <= 40
    assert "Answered 6 tokens" in chat("/metrics")


def test_saved_for_people(chat: Chat, text: Path, tmp_path: Path) -> None:
    chat(f"/read {text}")
    chat("Who sat?")
    chat("Who lay?")
    path = tmp_path / "talk.md"
    assert chat(f"/save {path}") == f"Saved as {path}."
    first, second = (each["content"].strip() for each in chat.session.talk.messages[1::2])
    parts = ["## You", f"*read {text.name}*", "Who sat?", "## Model", first]
    parts += ["## You", "Who lay?", "## Model", second]
    written = path.read_text()
    assert (
        written
        == "\n\n".join([f"# A conversation with {chat.session.given.model}", *parts, ""])[:-1]
    )
    assert {each.name for each in tmp_path.iterdir()} <= {text.name, "talk.md", "data"}
    nowhere = tmp_path / "nowhere" / "talk.md"
    assert chat.refused(f"/save {nowhere}").startswith(f"{nowhere} cannot be written: No such")
    chat.session.read(
        [documents.Document("caf\udce9.txt", "Nobody sat.", ())], NO_CALLBACKS
    )  # in Latin-1
    chat("Who?")
    chat(f"/save {path}")
    assert "*read caf?.txt*" in path.read_text()


@pytest.mark.parametrize("name", ["trip", "{folder}/trip.kv"])
def test_saved_to_go_on_with(chat: Chat, text: Path, tmp_path: Path, name: str) -> None:
    name = name.format(folder=tmp_path)
    chat(f"/read {text}")
    chat("Who sat?")
    chat(f"/read {text}")
    assert chat(f"/save {name}").startswith("Saved as ")
    chat("Who lay?")
    expected = chat.terminal.answers[-1]
    chat("/clear")
    said = chat(f"/load {name}")
    assert said == f"{name}: 1 message. It goes on.\nYour next message is about {text.name}."
    (message,) = chat.session.messages
    assert (message.text, message.documents[0].name) == ("Who sat?", text.name)
    chat("Who lay?")
    assert chat.terminal.answers[-1] == expected
    assert [message.text for message in chat.session.messages] == ["Who sat?", "Who lay?"]
    assert f"/load {name}" in offered(f"/load {name[:-1]}")


def test_what_the_library_has_is_replaced_by_force_only(chat: Chat) -> None:
    library = Library()
    record = library.new()
    record.name = "trip"
    library.save(record)
    chat("Who sat?")
    said = chat.refused("/save trip")
    assert said.startswith("trip is there already") and "/save trip --force" in said
    assert not library.whole(record.id).exists()
    chat("/save trip --force")
    chat("/save trip")  # again, as it is this conversation
    chat("/clear")
    chat("Who lay?")
    assert "is there already" in chat.refused("/save trip")
    mine = library.whole(record.id).read_bytes()
    chat("/load trip")
    chat("Who lay?")
    chat("/save trip")  # it goes on with what was loaded
    assert library.whole(record.id).read_bytes() != mine
    assert [each.text for each in library.record(record.id).said[::2]] == ["Who sat?", "Who lay?"]


def test_what_another_program_has_open_is_read_and_not_written(chat: Chat) -> None:
    chat("Who sat?")
    chat("/save trip")
    chat("/clear")
    (record,) = Library().records()
    with Library().hold(record.id):
        said = chat("/load trip")
        assert '"trip" is open in another kvlite' in said and "under another name" in said
        chat("Who lay?")
        assert "is there already" in chat.refused("/save trip")
        chat("/save mine")
    names = sorted(each.title for each in Library().records())
    assert names == ["mine", "trip"] and len(Library().record(record.id).said) == 2


def test_an_answer_is_checked(chat: Chat, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nothing has been said" in chat.refused("/check")
    chat(f"/read {text}")
    chat("Who sat?")
    metrics, branches = chat.session.last, chat.session.talk.branches
    assert chat("/check") == "The same answer."
    first, second = chat.terminal.answers
    assert first == second
    assert chat.session.last is metrics and chat.session.talk.branches == branches
    last = chat.session.talk.history.branch.tip
    assert last is not None
    monkeypatch.setattr(last, "answer", f"No, {first} a b c d e f g")
    said = " ".join(chat("/check").split())
    assert said.startswith("The former answer [-said-], this one {+says+}: [-No,-] ")
    assert said.endswith("[-a b c d e f g-]") and last.answer.startswith("No, ")
    chat.terminal.cancel.set()
    with pytest.raises(Stopped):
        chat("/check")
    chat.terminal.cancel.clear()


def test_undo_gives_the_document_back(chat: Chat, text: Path) -> None:
    chat(f"/read {text}")
    ahead = seen(chat)
    chat("Who sat?")
    said = chat("/undo")
    assert said == f"Forgotten: Who sat?\nYour next message is about {text.name}."
    assert (seen(chat), chat.session.messages) == (ahead, [])
    chat("Who lay?")
    assert chat.session.messages[0].said == question_about(
        chat.session.messages[0].documents, "Who lay?"
    )
    assert "there is no" in chat.refused("/edit 2")
    chat("/undo")
    chat.refused("/undo")


def test_edit_changes_the_question_and_not_the_document(
    chat: Chat, runner: kvlite.Runner, text: Path
) -> None:
    chat(f"/read {text}")
    chat("Who sat?")
    chat("And then?")
    chat.terminal.makes = "Who lay?"
    chat("/edit 1")
    (message,) = chat.session.messages
    assert (chat.terminal.asked, message.text) == ("Who sat?", "Who lay?")
    assert [document.name for document in message.documents] == [text.name]
    expected = runner.conversation().stream(question_about(message.documents, "Who lay?"))
    assert chat.terminal.answers[-1] == "".join(piece.text for piece in expected)
    for chat.terminal.makes in ("", "Who lay?"):
        assert chat("/edit") == "Nothing was changed."
    assert "there is no message 9: give 1 to 1" in chat.refused("/edit 9")


def test_regenerate(chat: Chat) -> None:
    chat("Who sat?")
    assert "/set temperature" in chat("/regen")
    assert chat.terminal.answers[0] == chat.terminal.answers[1]
    chat("/set temperature 1")
    chat("/set seed 3")
    assert chat("/regen") == ""
    assert chat.terminal.answers[2] != chat.terminal.answers[0]
    assert len(chat.session.messages) == 1 and len(chat.session.talk.branches) == 3


def test_branches(chat: Chat, text: Path) -> None:
    assert "no branches yet" in chat.refused("/branches")
    chat("Hello")
    chat(f"/read {text}")
    chat("Who lay\n down?")
    listed = [line.strip() for line in chat("/branch").splitlines()]
    assert listed == ["1 Hello", f"2 [{text.name}] Who lay down?"]
    shown = chat("/branch 1")
    assert "You are after the answer to message 1" in shown
    assert shown.endswith(f"Your next message is about {text.name}.")
    chat("Who sat?")  # its document was read for it
    assert chat.session.messages[1].documents[0].name == text.name
    first, second = chat("/branches").splitlines()[:2]
    assert first.startswith(" 1 2 messages, the last: Who lay down?")
    assert second.startswith("*2 2 messages, the last: Who sat?")
    assert "You are on branch 1." in chat("/branches 1")
    assert [message.text for message in chat.session.messages] == ["Hello", "Who lay\n down?"]
    assert chat.session.waiting == []
    assert "no branch 3: give 1 to 2" in chat.refused("/branches 3")
    assert "is the last one" in chat.refused("/branch 2")


@pytest.mark.parametrize(
    ("typed", "said"),
    [("/undo", "Forgotten: And then?"), ("/branch 1", "after the answer to message 1;")],
)
def test_going_back_that_is_stopped_says_where_it_is(chat: Chat, typed: str, said: str) -> None:
    for setting in ("budget 16", "recall off", "checkpoint-limit 0MB"):
        chat(f"/set {setting}")
    for message in ("The cat sat on the mat, and the dog lay by the door.", "Who sat?"):
        chat(message)
    chat("And then?")
    before = chat.session.messages
    chat.terminal.cancel.set()
    told = chat(typed)
    chat.terminal.cancel.clear()
    assert "tokens are read again" in told and told.endswith(
        "Stopped: you are at the beginning, on a branch of its own; /branches lists the others."
    )
    assert chat.session.messages == [] and chat.session.waiting == []
    chat("/branches 1")
    assert chat.session.messages == before
    assert said in chat(typed)


def offered(typed: str) -> list[str]:
    """What a text becomes, one for each way to go on."""
    found = ChatCompleter().get_completions(Document(typed), CompleteEvent())
    return [typed[: len(typed) + each.start_position] + each.text for each in found]


def test_completion(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "talk.md").write_text("x")
    (tmp_path / ".hidden").write_text("x")
    monkeypatch.chdir(tmp_path)
    assert offered("/br") == ["/branch", "/branches"]
    assert len(offered("/")) == len(COMMANDS)
    assert offered("/read ") == ["/read cats and dogs.txt", "/read folder/", "/read talk.md"]
    assert offered("/read cats and") == ["/read cats and dogs.txt"]
    assert offered("/read talk.md fo") == ["/read talk.md folder/"]
    assert offered(f"/read {tmp_path}/ta") == [f"/read {tmp_path}/talk.md"]
    assert offered("/read .h") == ["/read .hidden"]
    assert offered("/load ") == ["/load folder/", "/load talk.md"]
    assert offered("/set max") == ["/set max-tokens"]
    assert offered("/set recall ") == [
        f"/set recall {each}" for each in ("auto", "ram", "disk", "off")
    ]
    assert offered("/set never-lossy t") == ["/set never-lossy true"]
    assert offered("/help me") == ["/help memory", "/help metrics"]
    for typed in (
        "hello",
        "/read nowhere/x",
        "/undo ",
        "/xyzzy a",
        "/set xyzzy a",
        "/set seed ",
        "",
    ):
        assert offered(typed) == []


def test_documents_that_wait_outlast_another_system_message(
    chat: Chat, runner: kvlite.Runner, text: Path
) -> None:
    chat(f"/read {text}")
    assert chat("/system Be brief.").endswith("Your next message is about it.")
    chat("Who sat?")
    (message,) = chat.session.messages
    assert [each.name for each in message.documents] == [text.name]
    expected = runner.conversation(system="Be brief.").stream(message.said)
    assert chat.terminal.answers[-1] == "".join(piece.text for piece in expected)


def test_a_light_file_is_read_again(chat: Chat, text: Path, tmp_path: Path) -> None:
    chat(f"/read {text}")
    chat("Who sat?")
    path, tokens = tmp_path / "trip.kv", len(chat.session.talk.token_ids)
    chat.session.talk.save(path, light=True)
    chat("Who lay?")
    expected = chat.terminal.answers[-1]
    chat("/clear")
    chat("Where?")
    here = chat.session.talk
    chat.terminal.cancel.set()
    with pytest.raises(Stopped):
        chat(f"/load {path}")
    assert chat.session.talk is here  # nothing was lost
    chat.terminal.cancel.clear()
    assert chat(f"/load {path}") == (
        f"{tokens:,} tokens are read again\n{path}: 1 message. It goes on."
    )
    assert chat.session.messages[0].documents[0].name == text.name
    chat("Who lay?")
    assert chat.terminal.answers[-1] == expected


def test_an_answer_that_is_stopped_while_it_is_read_again(chat: Chat, text: Path) -> None:
    """The message is not said then; its document waits."""
    chat("Hello")
    chat(f"/read {text}")
    chat("Who sat?")
    chat.terminal.cancel.set()
    chat.terminal.makes = "Who lay?"
    with pytest.raises(Stopped):
        chat("/edit 2")
    chat.terminal.cancel.clear()
    assert [message.text for message in chat.session.messages] == ["Hello"]
    assert [document.name for document in chat.session.waiting] == [text.name]
    chat("Who lay?")
    assert chat.session.messages[1].documents[0].name == text.name
