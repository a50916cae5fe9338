"""The cases of the judges: each architecture that llama.cpp's converter and kvlite know, with each
kind of rotation and each option that it has."""

from tests.judges.case import Case
from tests.judges.cases import gemma, hybrid, latent, llama, others, qwen

ALL: dict[str, Case] = {
    case.name: case
    for module in (llama, qwen, gemma, latent, hybrid, others)
    for case in module.CASES
}
