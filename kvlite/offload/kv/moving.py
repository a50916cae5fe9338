"""A layer's storage put elsewhere, in place."""

from collections.abc import Callable, Sequence

from torch import Tensor

from kvlite.cache import LayerCache


def move_storage(
    layer: LayerCache,
    tensors: Sequence[Tensor],
    homes_for: Callable[[list[Tensor]], list[Tensor]],
) -> None:
    """Let a layer's tensors lie elsewhere; they, and its head groups' views, stay the same objects.

    Args:
        tensors: which, keys, values and positions among them.
        homes_for: gives for tensors of a storage each as many flat ones, as large in bytes. If it
            fails, the layer is as it was.
    """
    held = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    homes = dict(zip(held, homes_for(list(held.values())), strict=True))
    for tensor in [*layer.views, *tensors]:
        home = homes[tensor.untyped_storage().data_ptr()]
        offset, size, stride = tensor.storage_offset(), tensor.shape, tensor.stride()
        tensor.set_(home.untyped_storage(), offset, size, stride)
