"""Models on this machine are found wherever programs keep them, and what is wrong is named."""

import json
import os
import shutil
from pathlib import Path

import pytest

import kvlite
from kvlite.config.settings import EMBEDDED_MODEL
from kvlite.errors import ModelError
from kvlite.model.embedded import embedded_ggufs
from kvlite.model.local_models import LocalModel, models_here, remove_model
from kvlite.model.source import (
    find_config,
    find_model,
    folder_here,
    gguf_file,
    is_repo,
    ollama_file,
)
from tests.gguf_files import write_gguf


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without any models."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("KVLITE_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("KVLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def by_name() -> dict[str, LocalModel]:
    found = models_here()
    assert len({each.name for each in found}) == len(found)
    return {each.name: each for each in found}


def whole() -> list[str]:
    return [name for name, each in by_name().items() if not each.flaw]


def in_ollama(home: Path, name: str, blob: Path | None, *more: str) -> None:
    """A manifest, with layers of further kinds, and the blob of its weights."""
    root = home / ".ollama" / "models"
    manifest = root / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    (root / "blobs").mkdir(exist_ok=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:aa"},
        {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:bb"},
    ]
    layers += [{"mediaType": f"application/vnd.ollama.image.{kind}"} for kind in more]
    manifest.write_text(json.dumps({"layers": layers}))
    if blob is not None:
        (root / "blobs" / "sha256-bb").symlink_to(blob)


def test_those_of_the_hubs_cache_are_listed(home: Path, tiny_folder: Path) -> None:
    assert whole() == [EMBEDDED_MODEL]
    hub = home / "hub"
    for name in ("models--a--whole", "models--b--config", "models--c--other", "datasets--d--e"):
        shutil.copytree(tiny_folder, hub / name / "snapshots" / "1")
    (hub / "models--b--config/snapshots/1/model.safetensors").unlink()
    config = hub / "models--c--other/snapshots/1/config.json"
    config.write_text(json.dumps({"model_type": "bert"}))
    assert whole() == [EMBEDDED_MODEL, "a/whole"]
    assert by_name()["a/whole"].architecture == "llama"
    assert by_name()["a/whole"].max_context == 1024
    assert "no .safetensors" in by_name()["b/config"].flaw
    assert "bert" in by_name()["c/other"].flaw
    # One whose download was ended: what is there does not hold all that its index names.
    index = hub / "models--a--whole/snapshots/1/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert whole() == [EMBEDDED_MODEL, "a/whole"]
    for partial in ({"weight_map": {"a": "model-00002.safetensors"}}, {}, [], {"weight_map": 5}):
        index.write_text(json.dumps(partial))
        assert whole() == [EMBEDDED_MODEL]
    assert by_name()["a/whole"].flaw.endswith("is missing: kvlite pull a/whole")


def test_those_of_folders_lm_studio_and_ollama_are_listed(home: Path, tiny_folder: Path) -> None:
    shutil.copytree(tiny_folder, home / "models" / "mine")
    studio = home / ".lmstudio" / "models" / "maker" / "smol"
    studio.mkdir(parents=True)
    (studio / "smol.gguf").symlink_to(embedded_ggufs()[0])
    (studio / "mmproj-smol.gguf").symlink_to(embedded_ggufs()[0])
    (studio / "broken.gguf").write_bytes(b"GGUF")
    in_ollama(home, "registry.ollama.ai/library/smol/latest", embedded_ggufs()[0])
    in_ollama(home, "registry.ollama.ai/ann/gone/7b", None)
    found = by_name()
    assert [(each.place, each.name) for each in found.values()] == [
        ("embedded", EMBEDDED_MODEL),
        ("models folder", "~/models/mine"),
        ("LM Studio", "~/.lmstudio/models/maker/smol/broken.gguf"),
        ("LM Studio", "~/.lmstudio/models/maker/smol/smol.gguf"),
        ("Ollama", "ollama:ann/gone:7b"),
        ("Ollama", "ollama:smol:latest"),
    ]
    assert "broken.gguf" in found["~/.lmstudio/models/maker/smol/broken.gguf"].flaw
    smol = found["ollama:smol:latest"]
    assert smol.flaw == "" and smol.architecture == "llama" and smol.max_context == 8192
    assert smol.nbytes == embedded_ggufs()[0].stat().st_size
    assert ollama_file("ollama:smol").samefile(embedded_ggufs()[0])
    assert find_model("~/models/mine") == home / "models" / "mine"
    with pytest.raises(ModelError, match=r"no model 'ollama:other'.*ollama:smol:latest"):
        find_model("ollama:other")


def test_ollamas_names_are_those_of_its_manifests(home: Path) -> None:
    in_ollama(home, "hf.co/ann/Smol-GGUF/Q4_K_M", None)
    in_ollama(home, "registry.ollama.ai/library/tuned/latest", None, "adapter")
    in_ollama(home, "registry.ollama.ai/library/seeing/latest", None, "projector", "params")
    blob = home / ".ollama" / "models" / "blobs" / "sha256-bb"
    names = ("ollama:hf.co/ann/Smol-GGUF:Q4_K_M", "ollama:seeing:latest")
    assert [name for name in by_name() if name != EMBEDDED_MODEL] == [*names]
    for name in (*names, "ollama:seeing"):
        with pytest.raises(ModelError, match=f"{blob} is missing, the file of {name}: pull it"):
            find_model(name)
    write_gguf(blob)
    assert {ollama_file(name) for name in names} == {blob}
    assert not is_repo(names[0]) and find_model(names[0]).name.startswith("sha256-bb")
    for name in ("ollama:tuned", "ollama:hf.co/ann/Smol-GGUF", "ollama:ann/Smol-GGUF:Q4_K_M"):
        with pytest.raises(ModelError, match=rf"no model '{name}'.*seeing:latest there .*adapters"):
            find_model(name)


def test_a_manifest_that_is_not_one_is_passed_over(home: Path) -> None:
    for number, text in enumerate(("", "[]", "{}", '{"layers": [{}]}', '{"layers": 5}')):
        in_ollama(home, f"registry.ollama.ai/library/m{number}/latest", None)
        (home / f".ollama/models/manifests/registry.ollama.ai/library/m{number}/latest").write_text(
            text
        )
    assert list(by_name()) == [EMBEDDED_MODEL]


def test_models_are_removed_where_they_are_ours(home: Path, tiny_folder: Path) -> None:
    shutil.copytree(tiny_folder, home / "models" / "mine")
    shutil.copytree(tiny_folder, home / "hub" / "models--a--b" / "snapshots" / "1")
    in_ollama(home, "registry.ollama.ai/library/smol/latest", embedded_ggufs()[0])
    found = by_name()
    for name in (EMBEDDED_MODEL, "ollama:smol:latest"):
        with pytest.raises(ModelError, match="remove it there"):
            remove_model(found[name])
    remove_model(found["a/b"])
    remove_model(found["~/models/mine"])
    assert list(by_name()) == [EMBEDDED_MODEL, "ollama:smol:latest"]
    assert not os.listdir(home / "hub") and not os.listdir(home / "models")


def test_all_parts_of_a_model_are_removed(home: Path) -> None:
    """From a folder, and from the hub's cache, which has links to what it downloaded."""
    folder, repo = home / "models", home / "hub" / "models--a--b-GGUF"
    snapshot, blobs = repo / "snapshots" / "1", repo / "blobs"
    for each in (folder, snapshot, blobs):
        each.mkdir(parents=True)
    write_gguf(folder / "a.gguf", split=4)
    write_gguf(folder / "b.gguf")
    for number, part in enumerate(sorted(folder.glob("a-*"))):
        shutil.copy(part, blobs / f"{number}")
        (snapshot / part.name).symlink_to(blobs / f"{number}")
    shutil.copy(folder / "b.gguf", blobs / "b")
    (snapshot / "b.gguf").symlink_to(blobs / "b")
    found = by_name()
    first = "a-00001-of-00003.gguf"
    in_hub = f"~/hub/models--a--b-GGUF/snapshots/1/{first}"
    assert found[in_hub].nbytes == sum((blobs / f"{each}").stat().st_size for each in range(3))
    remove_model(found[in_hub])
    assert os.listdir(blobs) == ["b"] and os.listdir(snapshot) == ["b.gguf"]
    assert len(os.listdir(folder)) == 4
    remove_model(found[f"~/models/{first}"])
    assert os.listdir(folder) == ["b.gguf"]
    assert len(by_name()) == 3


def test_a_folder_with_one_gguf_model_is_that_model(home: Path) -> None:
    """As LM Studio's folders are, split or not; image encoders beside it are none."""
    folder = home / ".lmstudio" / "models" / "maker" / "smol"
    folder.mkdir(parents=True)
    write_gguf(folder / "a.gguf", split=4)
    write_gguf(folder / "mmproj-a-f16.gguf", architecture="clip")
    write_gguf(folder / "a.mmproj.gguf", architecture="clip")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    first = folder / "a-00001-of-00003.gguf"
    assert gguf_file(str(folder)) == first
    expected = find_model(str(first))
    assert find_model(str(folder)) == find_config(str(folder)) == expected
    assert folder_here(str(folder)) == expected
    assert kvlite.load(str(folder), device="cpu").shape.layers == 1
    assert whole() == [EMBEDDED_MODEL, "~/.lmstudio/models/maker/smol/a-00001-of-00003.gguf"]
    write_gguf(folder / "b.gguf")
    several = r"smol has several models: name one of .*\(a-00001-of-00003\.gguf, b\.gguf\)"
    for find in (find_model, find_config, folder_here):
        with pytest.raises(ModelError, match=several):
            find(str(folder))
    (folder / "model.safetensors").touch()
    assert gguf_file(str(folder)) is None


def test_a_file_that_was_used_is_listed_and_stays(home: Path) -> None:
    shutil.copyfile(embedded_ggufs()[0], home / "own.gguf")
    assert "~/own.gguf" not in by_name()
    find_config(str(home / "own.gguf"))
    used = by_name()["~/own.gguf"]
    assert used.place == "used before" and used.architecture == "llama" and not used.flaw
    with pytest.raises(ModelError, match="delete it yourself"):
        remove_model(used)
    (home / "own.gguf").unlink()
    assert "~/own.gguf" not in by_name()
