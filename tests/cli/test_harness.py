"""lm-evaluation-harness over the engine gives what it gives over transformers."""

import json
import shutil
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import kvlite as library
from tests.cli.conftest import Run, one_sentence

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra `eval` (lm_eval)")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.evaluator import simple_evaluate  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from kvlite.bench.harness import KvliteLM  # noqa: E402
from kvlite.config.settings import Settings  # noqa: E402
from kvlite.conversation.prefix import answer_prompt  # noqa: E402
from kvlite.engine.prefill import Prefill  # noqa: E402
from kvlite.server.config import ServerConfig  # noqa: E402
from tests.cli.harness.data import documents  # noqa: E402
from tests.server.conftest import serving  # noqa: E402

TASKS = Path(__file__).parent / "harness"
KINDS = ["kvlite_answer", "kvlite_choice", "kvlite_cloze", "kvlite_rolling"]


def samples(model: Any, **options: Any) -> dict[str, list[list[Any]]]:
    """What a model answered to each document of all tasks."""
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    results = simple_evaluate(
        model, tasks=KINDS, task_manager=manager, bootstrap_iters=0, **options
    )
    assert results is not None
    return {
        task: [each["resps"] for each in sorted(rows, key=lambda row: row["doc_id"])]
        for task, rows in results["samples"].items()
    }


def require_alike(own: dict[str, list[list[Any]]], other: dict[str, list[list[Any]]]) -> None:
    assert own["kvlite_answer"] == other["kvlite_answer"]
    for task in ("kvlite_choice", "kvlite_cloze"):
        pairs = [*zip(chain(*own[task]), chain(*other[task]), strict=True)]
        for ((found, greedy),), ((wanted, wanted_greedy),) in pairs:
            assert found == pytest.approx(wanted, abs=1e-4) and greedy == wanted_greedy
    rolled = zip(own["kvlite_rolling"], other["kvlite_rolling"], strict=True)
    for (found,), (wanted,) in rolled:  # sums of hundreds, which transformers' own floats round
        assert found == pytest.approx(wanted, rel=1e-6)


def of_transformers(model: Path) -> HFLM:
    return HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=1)


@pytest.fixture(scope="module")
def short(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model for 100 tokens: contexts are cut off, long texts come in windows."""
    folder = tmp_path_factory.mktemp("short") / "model"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 100}))
    return folder


def test_full_is_the_hf_backend(short: Path) -> None:
    runner = library.load(str(short), method="full")
    require_alike(samples(KvliteLM(runner)), samples(of_transformers(short)))


@pytest.mark.parametrize(
    "settings", [{"method": "snapkv", "recall": "off"}, {"method": "spans", "recall_entries": 4}]
)
def test_what_is_scored_is_what_the_settings_answer(
    tiny_folder: Path, settings: dict[str, Any]
) -> None:
    """The answer to a prompt is the greedy one by the cache that those settings leave, and by no
    other."""
    runner = library.load(str(tiny_folder), budget="48", **settings)
    document = documents()["test"][4]
    context = runner.tokenizer.encode(document["text"] * 2 + document["question"])
    answer = runner.generate(context, 12, ignore_eos=True).token_ids
    asked = [(None, context, answer)]
    ((score, greedy),) = KvliteLM(runner)._loglikelihood_tokens(asked, disable_tqdm=True)
    assert greedy and score < 0
    full = library.Runner(runner.model, runner.settings.replace({"method": "full"}))
    ((_, greedy),) = KvliteLM(full)._loglikelihood_tokens(asked, disable_tqdm=True)
    assert not greedy


def test_what_is_alike_is_read_once(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, read, begin = (
        KvliteLM(library.load(str(tiny_folder), method="full")),
        [0],
        Prefill.__init__,
    )

    def counts(self: Prefill, loaded: Any, cache: Any, ids: Any, *given: Any, **more: Any) -> None:
        read[0] += ids.shape[1]
        begin(self, loaded, cache, ids, *given, **more)

    monkeypatch.setattr(Prefill, "__init__", counts)
    text = documents()["test"][4]["text"] * 2
    context = model.tok_encode(text)
    choices = [[1], [2, 3], [4, 5, 6]]
    model._loglikelihood_tokens([(None, context, each) for each in choices], disable_tqdm=True)
    assert read == [len(context) + 0 + 1 + 2]
    read[0] = 0
    asked = [(text + question, {"max_gen_toks": 1}) for question in ("Who?", "And where?", "When?")]
    requests = [Instance("generate_until", {}, each, at) for at, each in enumerate(asked)]
    model.generate_until(requests, disable_tqdm=True)
    assert len(context) < read[0] < len(context) + 40


def test_results_are_files_of_lm_eval(
    kvlite: Run, short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["bench", "lm-eval", "--model", short, "--include-path", TASKS, "--max-tokens", "20"]
    out = ["--out", tmp_path / "out"]
    done = kvlite(
        *asked, "--tasks", "kvlite_cho*", "--limit", "2", "--budget", "30", *out, "--json"
    )
    assert done.code == 0, done.err
    (results,) = (tmp_path / "out").rglob("results_*.json")
    made = json.loads(results.read_text())
    assert made["results"] == done.json()["results"] and "kvlite_choice" in made["configs"]
    assert made["config"]["model_args"]["budget"] == "30" and made["n-samples"]
    (lines,) = (tmp_path / "out").rglob("samples_kvlite_choice_*.jsonl")
    assert [json.loads(line)["doc_id"] for line in lines.read_text().splitlines()] == [0, 1]
    broken = kvlite(*asked, "--tasks", "kvlite_broken")
    assert broken.code == 2 and "--tasks kvlite_broken cannot be run here (OSError" in broken.err
    monkeypatch.delattr("kvlite.bench.harness")
    monkeypatch.setitem(sys.modules, "kvlite.bench.harness", None)
    one_sentence(kvlite(*asked, "--tasks", "kvlite_choice"), "kvlite[eval]")


@pytest.fixture
def farm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments of a run of a task whose data is in a folder."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    data = tmp_path / "data" / "kvlite" / "farm"
    data.mkdir(parents=True)
    lines = [json.dumps(row) for row in documents()["test"]]
    (data / "test.jsonl").write_text("\n".join(lines))
    task = (TASKS / "answer.yaml").read_text().replace("kvlite_answer", "kvlite_farm")
    task = task.replace("custom_dataset: !function data.documents\n", "")
    task = task.replace('dataset_path: ""', "dataset_path: kvlite/farm")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "farm.yaml").write_text(task)
    monkeypatch.chdir(tmp_path)
    asked = ["bench", "lm-eval", "--include-path", "tasks", "--max-tokens", "20", "--out", "out"]
    return [*asked, "--tasks", "kvlite_farm"]


def test_data_comes_from_a_folder_and_a_run_goes_on(
    kvlite: Run, short: Path, farm: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [*farm, "--model", short]
    one_sentence(kvlite(*asked), "or in --data as OWNER/NAME?")
    one_sentence(kvlite(*asked, "--data", "nowhere"), "--data nowhere is no folder")
    asked += ["--data", "data", "--json", "--budget"]
    answered, most = [0], 2

    def counts(*given: Any, **more: Any) -> Any:
        if answered[0] == most:
            raise KeyboardInterrupt
        answered[0] += 1
        return answer_prompt(*given, **more)

    monkeypatch.setattr("kvlite.bench.harness.answer_prompt", counts)
    ended = kvlite(*asked, "30")
    assert ended.code == 130 and "Stopped. To go on: kvlite" in ended.err
    most = 100
    gone_on = kvlite(*asked, "30")
    assert gone_on.code == 0 and answered == [5]
    others = kvlite(*asked, "20")
    assert others.code == 0 and answered == [10]
    whole = kvlite(*asked, "30", "--out", "new")
    assert answered == [15] and gone_on.json()["results"] == whole.json()["results"]


@pytest.mark.long
def test_local_completions_over_the_server_is_the_hf_backend(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tenacity", reason="needs lm_eval[api]")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.setenv("OPENAI_API_KEY", "any")
    settings = Settings(model=str(tiny_folder), method="full")
    with serving(settings, ServerConfig(folder=tmp_path)) as server:
        asked = LocalCompletionsAPI(
            base_url=f"{server.address}/v1/completions",
            model=server.model.names[0],
            tokenizer=str(tiny_folder),
            max_length=1024,
        )
        own = samples(asked)
    require_alike(own, samples(of_transformers(tiny_folder)))
