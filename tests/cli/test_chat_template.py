"""A faulty chat template is one sentence, and another one can be given."""

import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Run

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
