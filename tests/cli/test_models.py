"""`kvlite models` and `kvlite pull`, against a hub on this machine."""

import hashlib
from pathlib import Path

import pytest

from tests.cli.conftest import Refused, Run
from tests.gguf_files import write_gguf
from tests.hub import Hub


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without any models; the cache as the child processes see it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("KVLITE_MODELS", str(tmp_path / "models"))
    cache = str(tmp_path / "home" / "hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", cache)


@pytest.mark.long
def test_a_model_is_pulled_listed_and_removed(
    kvlite: Run, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLITE_CACHE", str(tmp_path / "cache"))
    total = sum(map(len, hub.files.values()))
    pulled = kvlite("pull", "a/b", "--context", 500, "--json")
    assert pulled.code == 0, pulled.err
    assert pulled.json()["bytes"] == total
    # The config came before, to plan with.
    assert pulled.json()["downloaded_bytes"] == total - len(hub.files["config.json"])
    assert pulled.json()["fits"]["fits"] and pulled.json()["fits"]["tokens"] == 500
    assert "of it here already. 500 tokens fit" in pulled.err
    folder = Path(pulled.json()["folder"])
    assert {name: (folder / name).read_bytes() for name in hub.files} == hub.files

    listed = kvlite("models", "--context", 500, "--json").json()["models"]
    assert [each["name"] for each in listed] == ["smollm2-135m", "a/b"]
    assert listed[1]["plan"] == pulled.json()["fits"] and listed[1]["bytes"] == total
    table = kvlite("models", "--context", 500)
    assert table.code == 0 and "a/b" in table.out and "500 tokens" in table.out

    again = kvlite("pull", "a/b", "--context", 500, "--json").json()
    assert again["downloaded_bytes"] == 0
    weights = (folder / "model.safetensors").resolve()
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    damaged = kvlite("pull", "a/b")
    assert damaged.code == 2 and "model.safetensors came damaged" in damaged.err
    mended = kvlite("pull", "a/b", "--json").json()
    assert mended["downloaded_bytes"] == len(hub.files["model.safetensors"])

    removed = kvlite("models", "remove", "a/b", "--json").json()
    assert removed == {"removed": ["a/b"], "bytes": total}
    assert [each["name"] for each in kvlite("models", "--json").json()["models"]] == [
        "smollm2-135m"
    ]


@pytest.mark.long
def test_a_repository_without_weights_is_refused_before_it_is_downloaded(
    refused: Refused, hub: Hub, tmp_path: Path
) -> None:
    del hub.files["model.safetensors"]
    refused(["pull", "a/b"], "a/b", "neither .safetensors nor .gguf")
    assert not list(tmp_path.rglob("tokenizer.json"))


@pytest.mark.long
def test_one_file_of_a_repository_of_ggufs_is_pulled(
    kvlite: Run, refused: Refused, hub: Hub, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    hub.files.clear()
    hub.files |= {
        "m-Q4_K_M.gguf": content,
        "m-Q8_0.gguf": content + bytes(100),
        "m-IQ4_XS.gguf": content + bytes(50),
        "mmproj-Q4_K_M.gguf": b"no model",
        "m-BF16-00001-of-00002.gguf": b"",
    }
    pulled = kvlite("pull", "a/b", "--json")
    assert pulled.code == 0, pulled.err
    file = Path(pulled.json()["model"])
    assert file.name == "m-Q4_K_M.gguf" and file.read_bytes() == content
    assert pulled.json()["downloaded_bytes"] == pulled.json()["bytes"] == len(content)
    assert kvlite("pull", "a/b", "--json").json()["downloaded_bytes"] == 0
    other = kvlite("pull", "a/b", "--file", "q8", "--json").json()
    assert Path(other["model"]).read_bytes() == content + bytes(100)
    with file.resolve().open("r+b") as blob:
        blob.write(b"!")
    assert "m-Q4_K_M.gguf came damaged" in kvlite("pull", "a/b").err
    refused(["pull", "a/b", "--file", "Q2"], "no GGUF file like 'Q2'", "m-Q8_0.gguf (")
    refused(["pull", "a/b", "--file", "m-"], "4 GGUF files like 'm-'", "--file")
    refused(["pull", "a/b", "--file", "bf16"], "in parts, which `kvlite pull` does not get")


def test_what_is_no_id_or_not_here_is_refused(refused: Refused) -> None:
    refused(["pull", "a/b"], "a/b is not here", "HF_HUB_OFFLINE", "put its folder into")
    refused(["pull", "qwen"], "'qwen'", "no Hugging Face id")
    refused(["pull", "./a"], "'./a'", "no Hugging Face id")
    refused(["models", "remove", "a/b"], "'a/b'", "`kvlite models` lists them")
    refused(["models", "remove", "smollm2-135m"], "smollm2-135m belongs to pip")


def test_copies_of_older_versions_are_removed_when_asked(
    kvlite: Run, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("KVLITE_CACHE", str(cache))
    assert "nothing to clean" in kvlite("models", "clean").err
    (cache / "models" / "a-v1").mkdir(parents=True)
    (cache / "models" / "a-v1" / "model.safetensors").write_bytes(b"12345")
    checks = kvlite("doctor", "--quick", "--json").json()["checks"]
    (copies,) = [each for each in checks if each["name"] == "copies"]
    assert copies["remedy"] == "kvlite models clean" and "5 B" in copies["found"]
    refused(["models", "clean"], f"{cache / 'models'} (5 B) would be removed")
    assert (cache / "models").exists()
    cleaned = kvlite("models", "clean", "--yes", "--json").json()
    assert cleaned == {"removed": [str(cache / "models")], "bytes": 5}
    assert not (cache / "models").exists()


def test_a_whole_digest_is_told_when_asked(kvlite: Run, refused: Refused, tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", split=6)
    parts = sorted(tmp_path.glob("a-*.gguf"))
    found = kvlite("models", "digest", parts[0], "--json").json()
    assert found == {
        "sha256": {str(part): hashlib.sha256(part.read_bytes()).hexdigest() for part in parts}
    }
    assert len(parts) == 2 and str(parts[1]) in kvlite("models", "digest", parts[0]).out
    refused(["models", "digest", "a/b"], "is no GGUF file")
    refused(["models", "digest", tmp_path / "none.gguf"], "no model")
