"""A faulty chat template is one sentence, and another one can be given."""

import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.gguf_files import write_gguf

# Each fails in another way, two of them before anything is asked.
FAULTY = ["tool {{ undefined_fn() }}", "{% if %}", "{{ 1 // 0 }}", "{{ raise_exception('no') }}"]


@pytest.mark.parametrize("source", FAULTY)
def test_a_faulty_template_is_a_sentence(
    kvlite: Run, tiny_folder: Path, tmp_path: Path, source: str
) -> None:
    folder = tmp_path / "faulty"
    shutil.copytree(tiny_folder, folder)
    (folder / "chat_template.jinja").write_text(source)
    (tmp_path / "own.jinja").write_text(source)
    (tmp_path / "a.txt").write_text("The river rose.")
    asked = ("ask", tmp_path / "a.txt", "What rose?", "--max-tokens", 2, "--model")
    own = ("--chat-template", tmp_path / "own.jinja")
    for given in ((folder,), (tiny_folder, *own)):
        done = kvlite(*asked, *given)
        assert done.code == 2
        assert "Traceback" not in done.err
        assert "chat template" in done.err or "--chat-template" in done.err
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    done = kvlite(*asked, folder, *own)
    assert done.code == 0, done.err


def test_a_faulty_template_in_a_gguf_file_is_a_sentence(kvlite: Run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcd")
    for source in FAULTY:
        write_gguf(tmp_path / "a.gguf", fields={"tokenizer.chat_template": source})
        done = kvlite(
            "ask", tmp_path / "a.txt", "ab?", "--max-tokens", 2, "--model", tmp_path / "a.gguf"
        )
        assert (done.code, done.err.count("chat template")) == (2, 1), done.err
        assert "Traceback" not in done.err and done.err.count("\n") <= 4
