"""Models that are loaded and planned for by two threads at once."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvlite.model.load import load_module
from kvlite.model.transformers_lock import meta_module
from kvlite.model.weights import Weights
from tests.app.conftest import waited
from tests.conftest import SIZES

FP32, BF16 = Weights("fp32", torch.float32), Weights("bf16", torch.bfloat16)


class Watched:
    """A lock that tells of the threads that come to it."""

    def __init__(self) -> None:
        self.lock, self.came = threading.RLock(), list[str]()

    def __enter__(self) -> None:
        self.came.append(threading.current_thread().name)
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_weights_are_tied_however_many_threads_make_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    watched, loads, made = Watched(), threading.Event(), threading.Event()
    monkeypatch.setattr("kvlite.model.transformers_lock._LOCK", watched)
    load: Any = AutoModelForCausalLM.from_pretrained

    def slowly(*args: Any, **kwargs: Any) -> Any:
        # As transformers has it while it loads.
        with monkeypatch.context() as patch:
            patch.setattr(PreTrainedModel, "tie_weights", lambda *_, **__: None)
            loads.set()
            waited(lambda: "other" in watched.came)
            assert not made.wait(0.2)
        return load(*args, **kwargs)

    def make() -> None:
        assert loads.wait(60)
        module = meta_module(config)
        made.set()
        assert module.lm_head.weight is module.model.embed_tokens.weight

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", slowly)
    failures: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    other = threading.Thread(target=make, daemon=True, name="other")
    other.start()
    load_module(tmp_path, device=torch.device("cpu"), weights=FP32)
    other.join(60)
    assert made.is_set()
    assert not failures


RACE = """
import threading, time
from kvlite.model.transformers_lock import load_transformers

failed = []

def load(seconds):
    time.sleep(seconds)
    try:
        load_transformers()
    except AttributeError as error:
        failed.append(error)

def imported():
    import transformers

others = [threading.Thread(target=load, args=[wait / 20]) for wait in range(20)]
for each in [threading.Thread(target=imported), *others]:
    each.start()
for each in others:
    each.join()
print(len(failed))
"""


@pytest.mark.long
def test_transformers_is_whole_whoever_else_is_importing_it() -> None:
    ended = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "0"
