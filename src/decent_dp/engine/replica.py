"""One worker's replica in training: what a backward does to its buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from decent_dp.comm.protocol import Communicator
from decent_dp.engine.bucket import Bucket
from decent_dp.engine.guards import ParameterWatch
from decent_dp.engine.release import ReleaseOrder
from decent_dp.engine.settings import Settings
from decent_dp.engine.step import step
from decent_dp.engine.whole_model import WholeModel, decide
from decent_dp.errors import TrainingError, UnusableError
from decent_dp.topology import AnyTopology, Plan


class Replica:
    """Steps buckets while backward runs; the listener of `decent_dp.engine.hooks.BackwardHooks`.

    Args:
        model: The module, for the order of its parameters.
        buckets: In release order.
        topology: Selects the plan of each step.
        communicator: Of this worker.
        watch: Notices parameters that were replaced.
        settings: What the user chose.

    Attributes:
        t: The number of updates taken, and the round of the next one.
        accumulating: Whether gradients are kept for a later backward.
        num_accumulated: Backwards whose gradients wait for an update.
        strength: Mixing strength of rounds started from now on.
        paused: Why no update may happen now, or None.
        after_step: Called with the number of each step taken, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[Bucket],
        topology: AnyTopology,
        communicator: Communicator,
        watch: ParameterWatch,
        settings: Settings,
    ) -> None:
        self.buckets = tuple(buckets)
        self.parameters = [p for bucket in buckets for p in bucket.parameters]
        self.names = [name for bucket in buckets for name in bucket.names]
        self.t = 0
        self.accumulating = False
        self.num_accumulated = 0
        self.strength = 1.0
        self.paused: str | None = None
        self.after_step: Callable[[int], None] | None = None
        self._topology, self._communicator, self._watch = topology, communicator, watch
        self.scaler, self._max_norm = settings.active_scaler, settings.grad_clip_norm
        position = {id(p): index for index, p in enumerate(self.parameters)}
        self._release = ReleaseOrder([[position[id(p)] for p in bucket.parameters] for bucket in buckets])
        self.whole_model = WholeModel([p for p in model.parameters() if id(p) in position])
        self._failure: str | None = None
        self._in_backward = False

    @property
    def here(self) -> str:
        """How messages begin."""
        return f"rank {self._communicator.rank}, step {self.t}"

    def check_usable(self) -> None:
        """Raise if an earlier error left the replica half-stepped, or a parameter is not what it was."""
        if self._failure is not None:
            raise UnusableError(
                f"{self.here}: this model stopped in the middle of a step ({self._failure}); its parameters are "
                "half-stepped and other workers may be ahead: restart from a checkpoint"
            )
        self._watch.check()

    def wait(self) -> None:
        """Return when nothing travels from the parameters; mixes nothing."""
        with self.fails_on_error():
            for bucket in self.buckets:
                if bucket.exchange is not None:
                    bucket.exchange.wait()

    @contextmanager
    def fails_on_error(self) -> Iterator[None]:
        """Whatever is raised inside leaves the replica unusable."""
        try:
            yield
        except BaseException as error:
            self._failure = self._failure or f"{type(error).__name__} in step {self.t}: {error}"
            raise

    def forget_interrupted(self) -> None:
        """Outside of any backward: drop what one that raised before its first update has left."""
        if self._in_backward and self._release.num_released == 0 and self.num_accumulated == 0:
            self._in_backward = False
            self._release.reset()
            for parameter in self.parameters:
                parameter.grad = None

    def drop_exchanges(self) -> None:
        """Wait, and forget what arrived."""
        self.wait()
        for bucket in self.buckets:
            bucket.exchange = None

    def backward_started(self, computed_at: int) -> None:
        """Check that this backward may update the parameters."""
        try:
            self._may_update(computed_at)
        except TrainingError:
            if self.num_accumulated:
                self._in_backward = True  # part of this backward is in the window now
            else:
                for parameter in self.parameters:  # of this backward, which goes no further
                    parameter.grad = None
            raise
        self._release.reset()
        self._in_backward = True

    def _may_update(self, computed_at: int) -> None:
        self.check_usable()
        if self.paused is not None:
            raise TrainingError(f"{self.here}: {self.paused}")
        if computed_at != self.t:
            raise TrainingError(
                f"{self.here}: this loss was computed before the update of step {computed_at}, so its gradients belong "
                "to parameters that have changed; add the losses and call backward() once, or put all but the last "
                "backward() under 'with model.no_sync():'"
            )
        if self._in_backward and not self._release.num_released:
            raise TrainingError(
                f"{self.here}: an earlier backward was interrupted and has left a part of its gradients; call "
                "zero_grad() and repeat the accumulation window"
            )
        if self._release.num_released:
            self._fail(f"its backward was interrupted after {self._release.num_released} buckets were updated")

    def gradient_ready(self, index: int) -> None:
        """Step every bucket that is complete and whose predecessors are done."""
        self._note(self._release.ready, index)
        if not self.accumulating and not self._decides_at_the_end:
            self._step_buckets()

    def gradient_growing(self, index: int) -> None:
        """Leave the bucket of this gradient to the end of backward."""
        self._note(self._release.hold, index)

    def backward_finished(self) -> None:
        """Step the remaining buckets; the step ends here."""
        self._in_backward = False
        if self.accumulating:
            self.num_accumulated += 1
            return
        with self.fails_on_error():
            if self._decides_at_the_end:
                self._refuse_sparse()
                decide(self.whole_model, self.scaler, self._max_norm)
            self._step_buckets(everything=True)
            self._release.reset()
            self.num_accumulated = 0
            self.t += 1
            for bucket in self.buckets:
                if bucket.scheduler is not None:
                    bucket.scheduler.step()
            if self.after_step is not None:
                self.after_step(self.t - 1)

    def drop_gradients(self) -> None:
        """Forget the window, and what an interrupted backward has left."""
        self.num_accumulated, self._in_backward = 0, False
        for parameter in self.parameters:
            parameter.grad = None

    def finish_window(self) -> None:
        """Take a step with the gradients there are, outside of backward."""
        self.forget_interrupted()
        accumulating, self.accumulating = self.accumulating, False
        try:
            self.backward_started(self.t)
            self.backward_finished()
        finally:
            self.accumulating = accumulating

    def plan_at(self, t: int) -> Plan:
        """What this worker does in round t."""
        return self._topology.plan_at(t, self._communicator.rank)

    def nested_backward(self, index: int) -> None:
        """Refuse a gradient whose end cannot be awaited, before anything moves."""
        raise TrainingError(
            f"{self.here}: parameter '{self.names[index]}' got its gradient inside a nested backward of a module that "
            "was called past the wrapper; call model(...) instead of model.module(...), or checkpoint with "
            "use_reentrant=False"
        )

    @property
    def _decides_at_the_end(self) -> bool:
        return self.scaler is not None or self._max_norm > 0

    def _note(self, note: Callable[[int], None], index: int) -> None:
        try:
            note(index)
        except LookupError:
            self._fail(
                f"parameter '{self.names[index]}' got another gradient after its update in the same backward, as one "
                "does that is used inside and outside of a reentrant checkpoint; use checkpoint(use_reentrant=False)"
            )

    def _refuse_sparse(self) -> None:
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if self._max_norm > 0 and parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise TrainingError(
                    f"{self.here}: parameter '{name}' has a sparse gradient, which clipping does not take; use "
                    "sparse=False in its module, or grad_clip_norm=0"
                )

    def _step_buckets(self, *, everything: bool = False) -> None:
        while (index := self._release.release(everything=everything)) is not None:
            with self.fails_on_error():
                step(self.buckets[index], self.t, self.plan_at(self.t), self._communicator, self.strength)

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self.check_usable()
