"""What the server has done, as Prometheus reads it."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvlite.conversation.metrics import GenerationMetrics
from kvlite.server.kept import Kept


@dataclass
class Counters:
    """Numbers that only grow, and some that are true now.

    Attributes:
        waiting: requests for answers that are open.
        answered: answers that have begun.
        prompt, fresh: tokens of prompts, and those of them that had to be read.
        generated: tokens of answers.
        read_s, answered_s: seconds until first tokens, and from there to the last ones.
        last: metrics of the last answer that ended.
    """

    waiting: int = 0
    answered: int = 0
    prompt: int = 0
    fresh: int = 0
    generated: int = 0
    read_s: float = 0.0
    answered_s: float = 0.0
    last: GenerationMetrics | None = None

    def read(self, tokens: int, metrics: GenerationMetrics) -> None:
        """A prompt of so many tokens was read."""
        self.answered += 1
        self.prompt += tokens
        self.fresh += metrics.ahead_tokens + metrics.prompt_tokens
        self.read_s += metrics.ahead_s + metrics.time_to_first_token_s

    def end(self, metrics: GenerationMetrics) -> None:
        """An answer ended."""
        self.last, speed = metrics, metrics.decode_tokens_per_s
        self.answered_s += (metrics.generated_tokens - 1) / speed if speed else 0.0

    def text(self, processing: int, kept: Sequence[Kept] = ()) -> str:
        """Prometheus' text format, by llama.cpp's names where it has one; `processing` requests are
        answered now, and conversations are `kept` that may go on."""
        rows: list[tuple[str, str, str, float]] = [
            ("prompt_tokens_total", "counter", "tokens of prompts", self.prompt),
            ("read_tokens_total", "counter", "tokens of prompts that were read", self.fresh),
            ("tokens_predicted_total", "counter", "tokens of answers", self.generated),
            ("prompt_seconds_total", "counter", "seconds until first tokens", self.read_s),
            ("tokens_predicted_seconds_total", "counter", "seconds after that", self.answered_s),
            ("answers_total", "counter", "answers begun", self.answered),
            ("requests_processing", "gauge", "requests that are answered", processing),
            ("requests_deferred", "gauge", "those that wait", max(0, self.waiting - processing)),
            ("conversations", "gauge", "conversations that may go on", len(kept)),
            *(
                (f"conversation_{name}_bytes", "gauge", f"what they take of {where}", size)
                for name, where, size in (
                    ("device", "the device", sum(each.device_bytes for each in kept)),
                    ("host", "host memory", sum(each.host_bytes for each in kept)),
                    ("disk", "the disk", sum(each.file_bytes for each in kept if each.id)),
                )
            ),
        ]
        last = self.last
        if last is not None:
            rows += [
                ("kv_bytes", "gauge", "the cache, in the last answer", last.kv_bytes),
                ("host_kv_bytes", "gauge", "everything for recall", last.host_kv_bytes),
                ("recalled_bytes", "gauge", "fetched back for it", last.recalled_bytes),
                ("kept_entries", "gauge", "entries held, mean", last.kept_entries_mean),
                ("seen_tokens", "gauge", "tokens of that conversation", last.seen_tokens),
                ("fallbacks", "gauge", "given up for lack of memory", len(last.fallbacks)),
            ]
        lines = list[str]()
        for name, kind, about, value in rows:
            full = f"kvlite:{name}"
            lines += [f"# HELP {full} {about}", f"# TYPE {full} {kind}", f"{full} {value}"]
        return "\n".join(lines) + "\n"
