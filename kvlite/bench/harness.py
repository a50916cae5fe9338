"""lm-evaluation-harness (lm_eval) over the engine: its tasks, its metrics, its files of results.

Source: github.com/EleutherAI/lm-evaluation-harness; the adapter encodes, cuts off and stops as its
`hf` backend does (lm_eval/models/huggingface.py), so that scores can be compared with others'.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
from torch import Tensor
from tqdm import tqdm

from kvlite import __version__
from kvlite.bench.batch_decode import teacher_force
from kvlite.bench.fork import Branch, Choice, Recalled, read_turns
from kvlite.bench.prose import digest
from kvlite.config.settings import OPTIONS
from kvlite.conversation.context import Context
from kvlite.conversation.prefix import answer_prompt
from kvlite.conversation.runner import Runner
from kvlite.conversation.turn_config import TurnConfig
from kvlite.errors import OutOfMemory, SettingError, reason
from kvlite.methods.layer_policy import can_recall

# Settings that results are named by, and those that only say where and in which parts work is done.
_DECIDING = ("method", "budget", "kv_bits", "recall", "recall_entries", "recall_bits", "weights")
_PLACES = {"device", "vram", "stream", "chunk"}

# Tokens of an answer where a task does not say, as lm_eval's `hf` has it.
_LONGEST = 256


class KvliteLM(TemplateLM):  # type: ignore[misc]
    """A loaded model as lm_eval asks it.

    A context is read and cut by the runner's settings, as a prompt is; what is scored then goes
    through as an answer would. Contexts that are alike are read once; prompts to be answered share
    what they begin with, where the settings allow it.
    """

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        self.runner = runner
        self.tokenizer = runner.tokenizer

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        token: int = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        """What a text follows that follows nothing."""
        begins = self.tokenizer.bos_token_id
        return self.eot_token_id if begins is None else int(begins)

    @property
    def max_length(self) -> int:
        """Tokens of a context and what follows it; what is before them is cut off."""
        return self.runner.shape.max_context

    @property
    def tokenizer_name(self) -> str:
        """By which lm_eval tells cached requests apart."""
        return str(self.runner.model_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """A text's tokens, with those a tokenizer begins texts with."""
        if add_special_tokens is None:
            begins = self.tokenizer.decode(self.prefix_token_id)
            add_special_tokens = not has_bos_prefix(string, begins)
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Messages in the model's template."""
        said: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return said

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        groups: dict[tuple[int, ...], list[int]] = {}
        for at, (_, context, continuation) in enumerate(requests):
            both = [*context, *continuation][-(self.max_length + 1) :]
            groups.setdefault(tuple(both[: -len(continuation)]), []).append(at)
        scores = dict[int, tuple[float, bool]]()
        for context, members in tqdm(groups.items(), "Scoring", disable=disable_tqdm):
            branch = self._read(context, max(len(requests[at][2]) for at in members))
            scores |= {at: self._score(branch, requests[at][2]) for at in members}
            for at in members:  # all at once, since they decide together how much is kept
                if (asked := requests[at][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", asked, scores[at])
        return [scores[at] for at in range(len(requests))]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihoods of whole texts, longer ones in windows that do not overlap."""
        windows = [[*self._windows(*each.args)] for each in requests]
        whole = [window for each in windows for window in each]
        scores = iter(self._loglikelihood_tokens(whole, disable_tqdm=disable_tqdm))
        return [sum(next(scores)[0] for _ in each) for each in windows]

    def _windows(self, text: str) -> Iterator[tuple[None, list[int], list[int]]]:
        for window in get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        ):
            yield None, *make_disjoint_window(window)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers, each up to the first of its stop strings."""
        prompts = [self.tok_encode(each.args[0]) for each in requests]
        talk = self.runner.conversation()
        said = dict[int, str]()
        in_order = sorted(range(len(prompts)), key=prompts.__getitem__)  # those alike follow
        for at in tqdm(in_order, "Answering", disable=disable_tqdm):
            given = normalize_gen_kwargs(requests[at].args[1], _LONGEST)
            stops = handle_stop_sequences(
                given.pop("until"), self.tokenizer.decode(self.eot_token_id)
            )
            settings = _settings(given)
            room = self.max_length - settings["max_new_tokens"]
            if room < 1:
                raise SettingError(
                    f"a task wants answers of {settings['max_new_tokens']:,} tokens, and the model "
                    f"was trained for {self.max_length:,}: take another model"
                )
            pieces = answer_prompt(
                talk, prompts[at][-room:], stop=tuple(filter(None, stops)), **settings
            )
            *_, last = answer = [piece for piece in pieces if piece is not None]
            if last.finish_reason == "memory":
                raise OutOfMemory(
                    "memory ran out in an answer: take a smaller --budget or fewer --kv-bits, or "
                    "end other programs; begun again with the same --out, the run goes on"
                )
            text = "".join(piece.text for piece in answer)
            said[at] = postprocess_generated_text(text, stops, None)
            self.cache_hook.add_partial("generate_until", requests[at].args, said[at])
        return [said[at] for at in range(len(requests))]

    def _read(self, context: Sequence[int], longest: int) -> Branch:
        model = self.runner.model
        answer = dict.fromkeys(("max_new_tokens", "reserve_tokens"), max(1, longest))
        config = self.runner.config.after_load(answer)
        turn = TurnConfig.of(Context(model), [*context], config, answers=True)
        recalls = config.settings.recall != "off" and can_recall(config.method)
        recall = None
        if recalls and not config.ignores_recall:
            recall = Recalled(config.settings.recall_entries, config.recall_bits)
        choice = Choice(turn.method, turn.budget, turn.bits, recall)
        (branch,) = read_turns(model, [context], [choice], reserve=longest)
        return branch

    def _score(self, branch: Branch, ids: Sequence[int]) -> tuple[float, bool]:
        total, greedy = 0.0, True

        def compare_logits(_: int, begin: int, logits: Tensor) -> None:
            nonlocal total, greedy
            wanted = logits.new_tensor(ids[begin : begin + len(logits)]).long()
            own = logits.log_softmax(-1).gather(-1, wanted[:, None])
            total += float(own.double().sum())
            greedy &= bool((logits.argmax(-1) == wanted).all())

        teacher_force(self.runner.model, [branch], ids, compare_logits)
        return total, greedy


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    draws = given.get("do_sample", False)
    settings = {
        "max_new_tokens": given["max_gen_toks"],
        "temperature": given.get("temperature", 1.0) if draws else 0.0,
    }
    for name in given.keys() - {"max_gen_toks", "temperature", "do_sample"}:
        if name not in OPTIONS:
            raise SettingError(
                f"a task generates with {name}={given[name]!r}, which kvlite does not have"
            )
        settings[name] = given[name]
    return settings


class Tasks(TaskManager):  # type: ignore[misc]
    """lm_eval's tasks, and others.

    Attributes:
        data: a folder with datasets as folders OWNER/NAME; others come from Hugging Face.
    """

    def __init__(self, *, data: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.data = data

    def load(self, task_list: Any) -> Any:
        """As lm_eval; raises SettingError if a task cannot be had, as where its data is not."""
        try:
            # Where a dataset's name is that of a folder, it is read from there.
            with chdir(self.data or "."):
                return super().load(task_list)
        except Exception as error:  # tasks fetch data, and run code of their own
            raise SettingError(
                f"--tasks {','.join(map(str, task_list))} cannot be run here ({reason(error)}): is "
                "all their data in the Hugging Face cache, or in --data as OWNER/NAME?"
            ) from error


def tasks_named(
    names: Sequence[str],
    model: Path,
    include: str = "",
    tokens: Sequence[int] = (),
    data: str = "",
) -> tuple[Tasks, list[str]]:
    """lm_eval's tasks, and the names that are meant: names may have wildcards.

    Args:
        model: the folder of the model, by whose tokens some tasks measure the prompts they make.
        include: a folder with other tasks.
        tokens: lengths of those prompts.
        data: as of `Tasks`.

    Raises:
        SettingError: there is no such task.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it says much about each task
    own = {"max_seq_lengths": [*tokens]} if tokens else {}
    # Its own thousands of tasks take seconds to look through.
    for defaults in (False, True) if include else (True,):
        manager = Tasks(
            data=data,
            include_path=str(Path(include).absolute()) if include else None,
            include_defaults=defaults,
            metadata={"pretrained": str(model.absolute()), **own},
        )
        missing = [name for name in names if not manager.match_tasks([name])]
        if not missing:
            return manager, manager.match_tasks([*names])
    raise SettingError(
        f"--tasks {','.join(missing)}: lm_eval has no such task; `lm-eval ls tasks` lists all"
    )


def evaluate(
    runner: Runner, tasks: Sequence[str], folder: Path, manager: Tasks, **options: Any
) -> dict[str, Any]:
    """Run tasks and write lm_eval's files of results and samples. What the same model said by the
    same settings is in the folder, so that a run that was ended goes on.

    Args:
        options: of `simple_evaluate`.

    Returns:
        What the file of results holds.

    Raises:
        SettingError: as of `Tasks.load`, or a task generates in a way that kvlite has not.
    """
    tracker = EvaluationTracker(output_path=str(folder))
    about = {name: getattr(runner.settings, name) for name in _DECIDING}
    model_args = {"pretrained": runner.settings.model, **about}
    said_by = {name: value for name, value in vars(runner.settings).items() if name not in _PLACES}
    results: dict[str, Any] = simple_evaluate(
        KvliteLM(runner),
        model_args=model_args,
        use_cache=str(folder / f"answers-{digest(str((__version__, said_by)))}"),
        tasks=[*tasks],
        task_manager=manager,
        evaluation_tracker=tracker,
        **options,
    )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for name in results["configs"]:
        tracker.save_results_samples(task_name=name, samples=samples[name])
    return results


def table(results: dict[str, Any]) -> str:
    """Results for people, as lm_eval shows them."""
    groups = [make_table(results, "groups")] if "groups" in results else []
    return "\n".join([make_table(results), *groups])
