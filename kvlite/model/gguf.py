"""GGUF files: converted once to safetensors, kept under the user's cache folder by content."""

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from kvlite.errors import KvliteError, ModelError, reason
from kvlite.folders import cache_folder
from kvlite.model.shape import ADMITTED, require_admitted

_GGUF_NAMES = {"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe"}
_FORMAT = 1
FLOAT32_LIMIT = 1 << 30


def converted_folder(gguf: Path, notify: Callable[[str], None] | None = None) -> Path:
    """The safetensors folder of a GGUF file, made on first use (about 20 s for 135M weights).

    Weights are written in float32, those of files above 1 GiB in bfloat16, which takes half.

    It is written to a temporary folder and renamed, so it is whole or not there. The name is
    the SHA-256 of the file's content: a changed file is converted anew.

    Raises:
        ModelError: the file is not a whole GGUF, its architecture is not admitted, or it cannot
            be converted.
    """
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache_folder() / "models" / f"{gguf.stem}-{digest[:16]}-v{_FORMAT}"
    if folder.is_dir():
        return folder
    _check(gguf)
    if notify is not None:
        notify(f"Converting {gguf.name} to safetensors, once, into {folder.parent}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        try:
            _convert(gguf, partial)
        except KvliteError:
            raise
        except Exception as error:  # libraries fail in many ways over a stranger's file
            raise ModelError(f"{gguf} cannot be converted: {reason(error)}") from error
        try:
            partial.rename(folder)
        except OSError:
            # Another process finished the same conversion first.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _check(gguf: Path) -> None:
    """Raises ModelError unless the file is a whole GGUF of an admitted architecture."""
    from gguf import GGUFReader

    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{gguf} is not a GGUF file: its first bytes are not 'GGUF'")
    try:
        reader = GGUFReader(gguf)
        architecture = reader.fields["general.architecture"].contents()
        end = max(int(t.data_offset) + int(t.n_bytes) for t in reader.tensors)
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise ModelError(f"{gguf} is truncated or damaged ({error}): download it again") from None
    if end > gguf.stat().st_size:
        raise ModelError(f"{gguf} is truncated: download it again")
    require_admitted(_GGUF_NAMES.get(architecture, architecture), str(gguf))


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvlite.model.load import require_whole
    from kvlite.model.making import making_modules

    small = gguf.stat().st_size < FLOAT32_LIMIT
    place: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    # transformers draws thousands of progress lines.
    with making_modules(), redirect_stderr(StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **place)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            dtype=torch.float32 if small else torch.bfloat16,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **place,
        )
    model, found = loaded
    require_whole(found, str(gguf))
    assert model.config.model_type in ADMITTED
    # transformers refuses to save what it believes is still quantized.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with redirect_stderr(StringIO()):
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
