"""`python -m tests.golden.record` writes what kvlite does into golden.json, which
tests/test_golden.py compares with what it does later."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GOLDEN = HERE / "golden.json"
FILES = HERE / "files"
# A model to plan for, of which no weights are needed.
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


class Workshop:
    """Models and runners, made once.

    Attributes:
        folder: where models are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runner: Callable[..., Any] = cache(self._runner)

    def model(self, name: str) -> Path:
        """The folder of one of `models.MODELS`, or of one that can only be planned for."""
        from .models import make_model

        folder = self.folder / name
        if not folder.exists():
            if name == "llama-8b":
                folder.mkdir()
                (folder / "config.json").write_text(json.dumps(LLAMA_8B))
            else:
                make_model(name, folder)
        return folder

    def _runner(self, name: str, loading: tuple[tuple[str, Any], ...]) -> Any:
        import kvlite

        from .models import MODELS

        model = str(self.model(name)) if name in MODELS else name
        # Plain weights, as then; bytes of packed ones would differ.
        return kvlite.load(model, device="cpu", weights="fp32", **dict(loading))


def prepare(data: Path) -> None:
    """A data folder as runs need it: with the calibration of the tiny Llama."""
    shutil.copytree(FILES / "calibrations", data / "calibrations")


def played(shop: Workshop, run: Any, folder: Path) -> list[dict[str, Any]]:
    """What a run comes to, as JSON has it."""
    import torch

    from . import probe
    from .play import Play

    torch.set_num_threads(1)
    play = Play(shop.runner(run.model, tuple(run.loading.items())), run.given, folder)
    with probe.proposals_are_free():
        run.script(play)
    return list(json.loads(json.dumps(play.steps)))


def planned(shop: Workshop, args: list[str]) -> dict[str, Any]:
    """What a plan comes to, as JSON has it."""
    from . import probe

    model, *rest = args
    return dict(json.loads(json.dumps(probe.plan(shop.model(model), *rest))))


def written(found: dict[str, dict[str, Any]]) -> str:
    """As a file has it: a line for each step, so that changes can be read."""
    parts = []
    for part, entries in found.items():
        lines = []
        for name, entry in entries.items():
            steps = entry if isinstance(entry, list) else [entry]
            inner = ",\n   ".join(json.dumps(step, separators=(",", ":")) for step in steps)
            shown = f"[\n   {inner}]" if isinstance(entry, list) else inner
            lines.append(f"  {json.dumps(name)}: {shown}")
        parts.append(f" {json.dumps(part)}: {{\n" + ",\n".join(lines) + "}")
    return "{\n" + ",\n".join(parts) + "}\n"


def main() -> None:
    """Record everything."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("KVLITE_CACHE", str(HERE.parent / ".cache"))
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        os.environ["KVLITE_DATA"] = str(root / "data")
        os.environ["KVLITE_CONFIG"] = str(root / "config")
        from .runs import PLANS, RUNS

        prepare(root / "data")
        shop, runs, plans = Workshop(root), {}, {}
        for number, run in enumerate(RUNS):
            begun, folder = time.monotonic(), root / f"run-{number}"
            folder.mkdir()
            runs[run.name] = played(shop, run, folder)
            print(f"{time.monotonic() - begun:6.2f} s  {run.name}")
        for args in PLANS:
            begun, name = time.monotonic(), " ".join(args)
            plans[name] = planned(shop, args)
            print(f"{time.monotonic() - begun:6.2f} s  plan {name}")
        assert (len(runs), len(plans)) == (len(RUNS), len(PLANS)), "names are not unique"
        Path(os.environ.get("GOLDEN", GOLDEN)).write_text(written({"runs": runs, "plans": plans}))


if __name__ == "__main__":
    main()
