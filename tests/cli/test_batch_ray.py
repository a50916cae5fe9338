"""`kvlite batch --ray`: the rows of a job on one machine, whatever happens to nodes and actors."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run, one_sentence

cluster_utils = pytest.importorskip("ray.cluster_utils", reason="needs the extra `cluster` (Ray)")

pytestmark = pytest.mark.long

# Ends every process of the cluster that opens crash.txt, and counts them.
CRASHES = """
import os, sys

def ends(event, args):
    if event == "open" and str(args[0]).endswith("crash.txt"):
        with open({tried!r}, "a") as file:
            file.write("x")
        os._exit(1)

sys.addaudithook(ends)
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes of one processor each, as processes."""
    (tmp_path / "site").mkdir()
    hook = CRASHES.format(tried=str(tmp_path / "tried"))
    (tmp_path / "site" / "sitecustomize.py").write_text(hook)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.getcwd()]))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    yield made
    made.shutdown()


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_those_of_one_machine(
    cluster: Any, kvlite: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node is killed in the middle, and one document ends every actor that opens it."""
    monkeypatch.chdir(tmp_path)
    folder = Path("reports")
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text(f"The cat sat on mat {number} by the door. " * 20)
    flags = ["--questions", "Who?", "--questions", "Where?", "--model", model, "--max-tokens", "8"]
    assert kvlite("batch", folder, "--out", "alone.jsonl", *flags, "-q").code == 0
    (folder / "1-crash.txt").write_text("It ends whoever opens it.")
    node = cluster.add_node(num_cpus=1)
    out = tmp_path / "out.jsonl"

    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.02):
            if out.exists() and out.read_bytes().count(b"\n"):
                break
        cluster.remove_node(node, allow_graceful=False)

    gone = kvlite("batch", folder, "--out", out, *flags, "--ray", "localhost:9")
    one_sentence(gone, "--ray localhost:9", "no cluster")
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        done = kvlite("batch", folder, "--out", out, *flags, "--ray", cluster.address, "--json")
    finally:
        over.set()
        killer.join()
    assert done.code == 2 and done.json()["failed"] == 2
    rows = {row["id"]: row for row in rows_of(out)}
    assert len(rows) == len(rows_of(out)) == 12
    assert all("ended 3 times" in rows.pop(f"1-crash.txt#{n}")["error"] for n in (1, 2))
    assert (tmp_path / "tried").read_text() == "xxx"
    kept = ("id", "document", "question", "answer", "finish_reason", "error", "job", "task")
    local = {row["id"]: {name: row[name] for name in kept} for row in rows_of(Path("alone.jsonl"))}
    assert {name: {key: row[key] for key in kept} for name, row in rows.items()} == local
