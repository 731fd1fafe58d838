"""Which parameters travel together: integers only.

A bucket holds parameters of one kind (dtype and device), up to a capacity. Parameters are taken in reverse registration
order, since that is roughly the order in which backward finishes their gradients.
"""

from collections.abc import Hashable, Sequence


def plan_buckets(
    sizes_bytes: Sequence[int], kinds: Sequence[Hashable], capacity_bytes: int
) -> tuple[tuple[int, ...], ...]:
    """Cut parameters into buckets.

    Buckets are numbered in the order in which a backward in reverse registration order completes them. A parameter
    larger than the capacity gets a bucket of its own; parameters are never cut.

    Args:
        sizes_bytes: Size of each parameter in bytes, in registration order.
        kinds: What must be equal inside a bucket (dtype and device), in the same order.
        capacity_bytes: Largest size of a bucket that holds more than one parameter, in bytes; at least 1.

    Returns:
        For every bucket the indices of its parameters into ``sizes_bytes``, in release order.

    Raises:
        ValueError: If the lengths differ or the capacity is not positive.

    Example:
        >>> plan_buckets([8, 8, 8, 8], ["f32", "f32", "bf16", "f32"], 16)
        ((3, 1), (2,), (0,))
    """
    if len(sizes_bytes) != len(kinds):
        raise ValueError(f"got {len(sizes_bytes)} sizes and {len(kinds)} kinds; every parameter has one of each")
    if capacity_bytes < 1:
        raise ValueError(f"the bucket capacity must be at least one byte, got {capacity_bytes}")
    finished: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for index in reversed(range(len(sizes_bytes))):
        members, filled = open_buckets.get(kinds[index], ([], 0))
        if members and filled + sizes_bytes[index] > capacity_bytes:
            finished.append(members)
            members, filled = [], 0
        members.append(index)
        open_buckets[kinds[index]] = (members, filled + sizes_bytes[index])
    finished.extend(members for members, _ in open_buckets.values())
    return tuple(tuple(members) for members in sorted(finished, key=lambda members: -members[-1]))


def plan_offsets(numels: Sequence[int], align: int) -> tuple[tuple[int, ...], int]:
    """Place tensors one after the other, each start a multiple of ``align`` elements.

    Args:
        numels: Number of elements of each tensor.
        align: Alignment in elements.

    Returns:
        The start of every tensor and the total length, in elements (Python integers: no 32-bit limit).
    """
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += -(-numel // align) * align
    return tuple(offsets), end
