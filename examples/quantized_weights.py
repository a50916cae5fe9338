"""What 8- and 4-bit weights cost and save on the embedded model: a row for each.

Times are taken in turns, and given as ratios to fp32 in the same round; what follows each of 2,000
tokens of the bundled prose is predicted, and compared with what fp32 weights predict.
"""

from statistics import median

import torch

import kvlite
from kvlite.bench.prose import bundled_prose

NAMES = ["fp32", "int8", "int4", "nf4"]
ROUNDS, READ, SAID, TOLD = 5, 1000, 24, 2000


def predictions(runner: kvlite.Runner, ids: list[int]) -> torch.Tensor:
    """Log-probabilities `(n - 1, vocab)` of what follows each token."""
    module = runner.model.module
    module.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            logits = module(torch.tensor([ids]), use_cache=False).logits
    finally:
        module.set_attn_implementation("kvlite")
    return logits[0, :-1].float().log_softmax(-1)


def main() -> None:
    """Measure, and print a table."""
    runners = {name: kvlite.load(weights=name, method="full") for name in NAMES}
    ids = runners["fp32"].tokenizer.encode(bundled_prose())
    reading: dict[str, list[float]] = {name: [] for name in NAMES}
    token: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in range(-1, ROUNDS):
        for name in NAMES[:: 1 if turn % 2 else -1]:
            answer = runners[name].generate(ids[:READ], max_new_tokens=SAID, ignore_eos=True)
            if turn >= 0:  # the first round warms up
                reading[name].append(answer.metrics.time_to_first_token_s)
                token[name].append(1 / answer.metrics.decode_tokens_per_s)
    told, next_ids = ids[:TOLD], torch.tensor(ids[1:TOLD])[:, None]
    full = predictions(runners["fp32"], told)
    print("| weights | MiB | reading | a token | perplexity | same likeliest token | KL, nats |")
    print("|---|---|---|---|---|---|---|")
    for name, runner in runners.items():
        held = sum(runner.shape.weight_bytes(runner.model.weights).values()) / 2**20
        said = predictions(runner, told)
        ratios = [
            median(own / plain for own, plain in zip(times[name], times["fp32"], strict=True))
            for times in (reading, token)
        ]
        perplexity = said.gather(1, next_ids).mean().neg().exp()
        same = (said.argmax(-1) == full.argmax(-1)).float().mean()
        divergence = (full.exp() * (full - said)).sum(-1).mean()
        print(
            f"| `{name}` | {held:.1f} | {median(reading[name]):.2f} s (x{ratios[0]:.2f}) "
            f"| {1e3 * median(token[name]):.1f} ms (x{ratios[1]:.2f}) "
            f"| {perplexity:.1f} | {same:.1%} | {divergence:.3f} |"
        )


if __name__ == "__main__":
    main()
