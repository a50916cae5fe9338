"""`kvlite bench lm-eval`: lm-evaluation-harness over the engine."""

import shlex
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlite.cli import INTERRUPTED
from kvlite.cli.console import print_json, write
from kvlite.cli.opening import load_by
from kvlite.cli.options import AsJson, with_settings
from kvlite.cli.screen import console
from kvlite.config.settings import Settings
from kvlite.errors import SettingError
from kvlite.model.source import find_model, require_model


@with_settings
def lm_eval(
    settings: Settings,
    tasks: Annotated[str, typer.Option(help="lm_eval's names, with commas between")],
    include_path: Annotated[
        str, typer.Option(help="a folder with tasks of your own, as YAML files")
    ] = "",
    data: Annotated[
        str, typer.Option(help="a folder with their datasets, each as OWNER/NAME")
    ] = "",
    limit: Annotated[
        int | None, typer.Option(min=1, help="documents of each task, the first ones")
    ] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="examples before each")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="put prompts in the chat template")] = False,
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=100, help="prompt length of tasks that make theirs (RULER); repeatable"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="folder of the files [default: a new one in the user's data folder]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run tasks of lm-evaluation-harness by any method, budget and bits (extra `eval`).

    A context is read and cut like a prompt, and what is scored goes through like an answer; with
    `--method full` log-likelihoods are those of lm_eval's own `hf` model. Results and samples are
    files as lm_eval writes them. Given the same --out again, it goes on. Tasks fetch their data
    from Hugging Face, unless --data has it; RULER's niah_single_1, niah_multikey_2,
    niah_multikey_3, ruler_vt, ruler_cwe and ruler_fwe make theirs here.

    Examples:

      kvlite bench lm-eval --tasks arc_easy,hellaswag --limit 100 --method full

      kvlite bench lm-eval --tasks niah_single_1 --tokens 4096 --limit 20 --budget 10%

      kvlite bench lm-eval --tasks longbench_qasper --data /media/datasets --out qasper
    """
    screen, names = console(), [name.strip() for name in tasks.split(",")]
    require_model(settings.model)
    for option, given in (("--include-path", include_path), ("--data", data)):
        if given and not Path(given).is_dir():
            raise SettingError(f"{option} {given} is no folder")
    with screen.status("Looking for tasks") as status:
        harness = _harness()
        folder = find_model(settings.model, status.update)
        manager, names = harness.tasks_named(names, folder, include_path, tokens or (), data)

    def reads(tokenizer: Any, max_context: int) -> int:
        return min(max(tokens or (TOKENS,)), max_context - settings.planned_tokens)

    from kvlite.bench.folder import run_folder
    from kvlite.conversation.runner import TOKENS, open_runner

    runner = load_by(partial(open_runner, settings, reads=reads), screen)
    path = out or run_folder("lm-eval")
    try:
        with redirect_stdout(sys.stderr):  # where tasks print
            results = harness.evaluate(
                runner,
                names,
                path,
                manager,
                limit=limit,
                num_fewshot=num_fewshot,
                apply_chat_template=chat,
                system_instruction=settings.system or None,
            )
    except KeyboardInterrupt:
        command = [*sys.argv[1:], *([] if out else ["--out", str(path)])]
        screen.print(f"Stopped. To go on: kvlite {shlex.join(command)}")
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print_json({"folder": str(path), "results": results["results"]})
    else:
        write(f"{harness.table(results)}\n")
    screen.print(f"Results and samples: {path}")


def _harness() -> Any:
    try:
        from kvlite.bench import harness
    except ImportError as error:
        raise SettingError(
            "kvlite bench lm-eval needs lm-evaluation-harness, which is not installed: pip install "
            "'kvlite[eval]'"
        ) from error
    return harness
