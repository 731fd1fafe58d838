"""In which order buckets are stepped, whatever order gradients arrive in: integers only.

A bucket is *complete* once every one of its parameters is ready, and *released* once it is complete and so are all
buckets before it. All workers therefore start their exchanges in one order.
"""

from collections.abc import Sequence


class ReleaseOrder:
    """Counts ready parameters of one backward and says which buckets may be stepped.

    Args:
        buckets: For every bucket the indices of its parameters; each parameter is in exactly one bucket.
    """

    def __init__(self, buckets: Sequence[Sequence[int]]) -> None:
        self._buckets = tuple(tuple(members) for members in buckets)
        self._bucket_of = {index: k for k, members in enumerate(self._buckets) for index in members}
        self.reset()

    def reset(self) -> None:
        """Forget everything: no parameter is ready, no bucket released."""
        self._missing = [len(members) for members in self._buckets]
        self._ready: set[int] = set()
        self._held: set[int] = set()
        self.num_released = 0

    def ready(self, parameter: int) -> None:
        """Note that a parameter has its gradient; nothing new for one that is ready or held.

        Raises:
            LookupError: If the bucket of the parameter was already released.
        """
        bucket = self._waiting(parameter)
        if parameter not in self._ready and parameter not in self._held:
            self._ready.add(parameter)
            self._missing[bucket] -= 1

    def hold(self, parameter: int) -> None:
        """Note that the gradient of a parameter may grow until backward ends.

        Raises:
            LookupError: If the bucket of the parameter was already released.
        """
        bucket = self._waiting(parameter)
        self._held.add(parameter)
        if parameter in self._ready:
            self._ready.remove(parameter)
            self._missing[bucket] += 1

    def _waiting(self, parameter: int) -> int:
        """Return the bucket of a parameter, which must not be released."""
        bucket = self._bucket_of[parameter]
        if bucket < self.num_released:
            raise LookupError(parameter)
        return bucket

    def release(self, *, everything: bool = False) -> int | None:
        """Return the next bucket that may be stepped and mark it released, or None.

        Args:
            everything: Backward has ended: parameters that are not ready will not become ready.
        """
        bucket = self.num_released
        if bucket == len(self._buckets) or (self._missing[bucket] and not everything):
            return None
        self.num_released += 1
        return bucket
