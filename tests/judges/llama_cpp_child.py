"""A child process that asks llama.cpp's engine, by the wheel xllamacpp, never imported by tests.

Called as `python llama_cpp_child.py PACKAGES`, with a list of jobs as JSON on stdin: for each, the
ids of a GGUF file are read and 16 tokens generated greedily; the tokens, and the log-probabilities
of the first over the whole vocabulary, go to a file beside it.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    sys.path[0] = sys.argv[1]
    import xllamacpp

    for job in json.load(sys.stdin):
        # A process for each: a file that it does not like may end it, and its threads never do.
        if not (child := os.fork()):
            os.dup2(os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            os.dup2(2, 1)
            os._exit(_answer(xllamacpp, job))
        os.waitpid(child, 0)


def _answer(x: Any, job: dict[str, Any]) -> int:
    ids, count = job["ids"], job["count"]
    params = x.CommonParams()
    params.model.path = job["model"]
    params.n_ctx = len(ids) + count + 64
    params.n_parallel, params.warmup, params.verbosity = 1, False, 1
    params.fit_params, params.ui = False, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = x.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    request = {"prompt": ids, "max_tokens": count, "top_k": 1, "samplers": ["top_k"]}
    request |= {"n_probs": job["vocabulary"], "logprobs": job["vocabulary"]}
    request |= {"ignore_eos": True, "cache_prompt": False}
    reply = x.Server(params).handle_completions(request)
    content = reply["choices"][0]["logprobs"]["content"]
    first = {each["id"]: each["logprob"] for each in content[0]["top_logprobs"]}
    made = {"tokens": [each["id"] for each in content], "log_probabilities": first}
    Path(job["out"]).write_text(json.dumps(made))
    return 0


if __name__ == "__main__":
    main()
