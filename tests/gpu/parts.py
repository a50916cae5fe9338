"""What is owed to a GPU, a generator of rows for each question, the most valuable first.

Each is to end within three minutes on a card. Times are medians unless a row says otherwise. What
fails is a row that says so, and the others go on.
"""

from tests.gpu import correctness, memory, speed
from tests.gpu.measure import Part

PARTS: dict[str, Part] = {
    part.__name__: part
    for part in (
        correctness.equality,
        correctness.methods,
        correctness.suites,
        speed.kernels,
        speed.attention,
        speed.chunks,
        speed.products,
        speed.speed,
        speed.other_weights,
        speed.graphs,
        speed.proposals,
        speed.together,
        speed.requests,
        speed.beside_transformers,
        memory.long_documents,
        memory.out_of_memory,
        memory.quantized_weights,
        memory.streamed_weights,
        memory.saved_conversations,
        speed.choosing,
    )
}
