"""GGUF files in other types, and in F32 what they hold, by gguf's own quantizers."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

# What llama-quantize leaves alone, too.
_KEPT = ("norm", "ffn_gate_inp", "conv", "rope_", "altup", "laurel", "per_layer", "ssm_a", "ssm_d")
_Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


def quantize(source: Path, target: Path, kind: str) -> None:
    """Write the weights of an F32 file in blocks, where rows are whole ones."""
    to = GGMLQuantizationType[kind.upper()]
    block, _ = gguf.GGML_QUANT_SIZES[to]

    def converted(name: str, data: _Array, _: GGMLQuantizationType) -> tuple[_Array, int]:
        whole = data.ndim > 1 and data.shape[-1] % block == 0
        if kind == "mxfp4" and "_exps" not in name:
            # As in GPT-OSS.
            return data, GGMLQuantizationType.F32
        if not whole or not name.endswith(".weight") or any(each in name for each in _KEPT):
            return data, GGMLQuantizationType.F32
        return gguf.quantize(data, to), to

    _rewrite(source, target, converted)


def dequantize(source: Path, target: Path) -> None:
    """Write what a file holds as F32."""

    def converted(_: str, data: _Array, kind: GGMLQuantizationType) -> tuple[_Array, int]:
        return gguf.dequantize(data, kind).astype(np.float32), GGMLQuantizationType.F32

    _rewrite(source, target, converted)


def _rewrite(
    source: Path,
    target: Path,
    converted: Callable[[str, _Array, GGMLQuantizationType], tuple[_Array, int]],
) -> None:
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name != "general.architecture" and not name.startswith("GGUF."):
            kind, inner = field.types[0], field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        data, to = converted(tensor.name, tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, data, raw_dtype=GGMLQuantizationType(to))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
