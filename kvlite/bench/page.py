"""Runs as one page: their tables and plots in one file of HTML that needs nothing else."""

import base64
import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from kvlite.bench.folder import CONFIG
from kvlite.bench.report import COMMAND, TABLE, can_draw
from kvlite.config.checked_file import Damaged, from_json, sound
from kvlite.errors import ModelError, SettingError
from kvlite.model.calibration import Calibration, calibration_of

_STYLE = """
:root { color-scheme: light dark; --line: #d0d5dd; --quiet: #667085; }
@media (prefers-color-scheme: dark) { :root { --line: #3a4150; --quiet: #98a2b3; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1.5rem; }
pre { overflow-x: auto; padding: .75rem; border: 1px solid var(--line); border-radius: 6px; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .7rem; text-align: left; }
img { max-width: 100%; background: white; border-radius: 6px; margin: .5rem 0; }
p.note { color: var(--quiet); font-size: 14px; }
"""


_KEYS = ("command", "options", "model", "machine")


@dataclass(frozen=True)
class Run:
    """A run's folder.

    Attributes:
        config: what decides its rows; see `folder.configuration`.
    """

    path: Path
    config: Mapping[str, Any]

    @property
    def command(self) -> str:
        """As it was given, or what is known of it in runs of before."""
        file = self.path / COMMAND
        if file.is_file():
            return file.read_text(encoding="utf-8").strip()
        given = " ".join(f"{name}={value}" for name, value in self.config["options"].items())
        return f"kvlite bench {self.config['command']} ({given})"


def runs_in(folder: Path) -> list[Run]:
    """The runs in a folder and below it, by name.

    Raises:
        SettingError: there are none, or one is damaged.
    """
    found = []
    for path in sorted(folder.rglob(CONFIG)):
        if (path.parent / TABLE).is_file():
            try:
                config = from_json(path.read_bytes())
                with sound():
                    found.append(Run(path.parent, {key: config[key] for key in _KEYS}))
            except (OSError, Damaged):
                raise SettingError(f"{path} is damaged: remove its folder") from None
    if not found:
        raise SettingError(
            f"{folder} holds no run: name a folder that `kvlite bench` or `kvlite tune` has written"
        )
    return found


def page(runs: Sequence[Run]) -> str:
    """The page, with every picture in it."""
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    parts = ["<h1>Measurements</h1>", _contents(runs)]
    for number, run in enumerate(runs):
        text = (run.path / TABLE).read_text(encoding="utf-8")
        title, _, body = text.partition("\n")
        parts += [
            f'<h2 id="run{number}">{html.escape(title.lstrip("# "))}, {_model(run)}</h2>',
            f"<pre>{html.escape(run.command)}</pre>",
            f'<div class="table">{markdown.render(body)}</div>',
            *(_image(each.read_bytes(), each.stem) for each in sorted(run.path.glob("*.png"))),
        ]
    parts += _calibrations(runs)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Measurements of kvlite</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _model(run: Run) -> str:
    return html.escape(str(run.config["model"]["name"]))


def _contents(runs: Sequence[Run]) -> str:
    lines = (
        f'<li><a href="#run{number}">{html.escape(run.config["command"])}, {_model(run)}</a></li>'
        for number, run in enumerate(runs)
    )
    return f"<ul>{''.join(lines)}</ul>"


def _image(png: bytes, about: str) -> str:
    data = base64.b64encode(png).decode()
    return f'<img alt="{html.escape(about)}" src="data:image/png;base64,{data}">'


def _calibrations(runs: Sequence[Run]) -> Iterator[str]:
    """What the papers show of a model, redrawn from its calibration, if it has one."""
    models = {run.config["model"]["files"]: _model(run) for run in runs}
    for mark, name in models.items():
        try:
            found = calibration_of(mark)
        except ModelError:
            continue
        if found is None or not can_draw():
            continue
        yield f"<h2>Layers and heads of {name}</h2>"
        yield (
            f"<p>From <code>kvlite calibrate</code> on {html.escape(found.text)}, {found.samples} "
            f"pieces of {found.tokens:,} tokens.</p>"
        )
        yield _image(_drawn(found), "effective ranks, and attention to the ends, by layer")
        yield (
            '<p class="note">Above: truncated effective rank of each KV head\'s queries, by which '
            "UNComp groups heads (section 3.3). Below: the share of attention that a layer pays to "
            "its first and recent tokens, by which SimLayerKV calls it lazy (section 5).</p>"
        )


def _drawn(calibration: Calibration) -> bytes:
    import matplotlib
    from matplotlib.figure import Figure

    from kvlite.bench.plots import COLORS, STYLE

    layers = range(len(calibration.layer_ranks))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 5), layout="constrained")
        ranks, lazy = figure.subplots(2, 1, sharex=True)
        for head in range(max(map(len, calibration.head_ranks))):
            values = [each[head] if head < len(each) else None for each in calibration.head_ranks]
            ranks.plot(layers, values, "o", color=COLORS[head % len(COLORS)], markersize=4)
        ranks.set_ylabel("effective rank of a head")
        lazy.bar(layers, calibration.lazy_shares, color=COLORS[0])
        if calibration.lazy_threshold is not None:
            lazy.axhline(calibration.lazy_threshold, color=COLORS[1], linestyle="--")
        lazy.set_ylabel("attention to the ends")
        lazy.set_xlabel("layer")
        out = BytesIO()
        figure.savefig(out, format="png")
    return out.getvalue()
