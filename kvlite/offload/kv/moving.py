"""Moving a layer's storage, in place."""

from collections.abc import Callable, Sequence

from torch import Tensor

from kvlite.cache import LayerCache


def move_storage(
    layer: LayerCache,
    tensors: Sequence[Tensor],
    homes_for: Callable[[list[Tensor]], list[Tensor]],
) -> None:
    """Move a layer's tensors to other memory; they, and its head groups' views, stay the same
    objects.

    Args:
        tensors: which of them, including keys, values and positions.
        homes_for: given one tensor of each storage, returns flat tensors of as many bytes with
            their contents. If it fails, the layer is unchanged.
    """
    held = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    homes = dict(zip(held, homes_for(list(held.values())), strict=True))
    for tensor in [*layer.views, *tensors]:
        home = homes[tensor.untyped_storage().data_ptr()]
        offset, size, stride = tensor.storage_offset(), tensor.shape, tensor.stride()
        tensor.set_(home.untyped_storage(), offset, size, stride)
