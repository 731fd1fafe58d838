"""The wrapper: layout -> topology -> buckets -> hooks -> step."""

from __future__ import annotations

import numbers
import warnings
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from decent_dp.comm import Communicator, TorchCommunicator
from decent_dp.consensus import Averager
from decent_dp.engine import guards
from decent_dp.engine.hooks import BackwardHooks, in_backward
from decent_dp.engine.replica import Replica
from decent_dp.engine.settings import OptimizerFactory, SchedulerFactory, Settings
from decent_dp.engine.setup import set_up
from decent_dp.engine.training_state import capture, rename, restore
from decent_dp.errors import ConfigurationError, ModelChangedError, TrainingError
from decent_dp.join import Joins
from decent_dp.startup import default_workers_per_node
from decent_dp.topology import AnyTopology

if TYPE_CHECKING:
    import torch.distributed as dist

OPTIM_FN_TYPE = OptimizerFactory
LR_SCHEDULER_FN_TYPE = SchedulerFactory


class DecentralizedDataParallel(nn.Module):
    """Train one replica per worker; average parameters over a topology while the next step runs.

    All workers start from the parameters and buffers of rank 0. Each ``backward()`` updates the parameters before it
    returns, with an optimizer per bucket; there is no ``optimizer.step()`` to call, and gradients are None afterwards.
    Replicas differ from worker to worker: evaluate the local one, or the average inside `consensus`.

    Args:
        model: Module on its device; its forward and its names stay as they are.
        optim_fn: Called once per bucket with (name, parameter) pairs, returns an optimizer; for example
            ``functools.partial(torch.optim.AdamW, lr=1e-3)`` or a factory of `decent_dp.optim`.
        lr_scheduler_fn: Called once per optimizer, returns its learning-rate scheduler, which ticks once per update.
        topology: Name of a topology (`decent_dp.topology.catalog.names`) or a `Topology`, or what
            `from_function` returns, for this number of workers.
        scaler: Scaler of the loss, for float16 autocast. A worker whose gradients overflow skips its update and still
            mixes.
        grad_clip_norm: Largest global 2-norm of the gradient, as `torch.nn.utils.clip_grad_norm_`; 0 does not clip.
        param_as_bucket_view: Whether parameters become views of their bucket, which saves a copy per step.
        sync_buffer_in_global_avg: Whether `consensus` and `global_avg` average buffers too.
        bucket_size_in_mb: Largest size of a bucket of several parameters, in MiB. Results do not depend on it, but for
            the last bit where a backend's sum over three or more workers orders its terms by position.
        _local_world_size: `workers_per_node` under its name in the original package.
        wire_dtype: Floating dtype that parameters wider than it travel in; their own when None. The mean over workers
            is kept either way.
        process_group: Group whose ranks are the workers; the default group when None.
        communicator: Moves the bytes; made from ``process_group`` when None. See `decent_dp.comm.InProcessWorld`.
        workers_per_node: Workers on one machine; from LOCAL_WORLD_SIZE when None.
        timeout: How long a worker may be silent before the others raise; that of the process group when None.
        check_finite: Whether to raise, naming the parameter, rather than send parameters that are not finite.

    Raises:
        ConfigurationError: An argument or the model cannot work; `TopologyError`, `MismatchError` are its kinds.

    Example:
        >>> from functools import partial
        >>> from decent_dp.comm import InProcessWorld
        >>> model = DecentralizedDataParallel(nn.Linear(2, 1), partial(torch.optim.SGD, lr=0.1),
        ...                                   communicator=InProcessWorld(1).communicator(0))
        >>> before = model.module.weight.clone()
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> torch.equal(model.module.weight, before - 0.1)
        True

    References:
        Wang, Zhang, Wu, Johansson: From Promise to Practice: Realizing High-performance Decentralized Training, ICLR
        2025.
    """

    def __init__(
        self,
        model: nn.Module,
        optim_fn: OptimizerFactory,
        lr_scheduler_fn: SchedulerFactory | None = None,
        topology: str | AnyTopology = "complete",
        scaler: GradScaler | None = None,
        grad_clip_norm: float = 0.0,
        param_as_bucket_view: bool = True,
        sync_buffer_in_global_avg: bool = False,
        bucket_size_in_mb: float = 25,
        _local_world_size: int | None = None,
        *,
        wire_dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | None = None,
        communicator: Communicator | None = None,
        workers_per_node: int | None = None,
        timeout: timedelta | None = None,
        check_finite: bool = False,
    ) -> None:
        super().__init__()
        self._communicator: Communicator = communicator or TorchCommunicator(process_group, timeout)
        self._settings = Settings(
            optim_fn,
            lr_scheduler_fn,
            topology,
            scaler,
            grad_clip_norm,
            param_as_bucket_view,
            sync_buffer_in_global_avg,
            bucket_size_in_mb,
            wire_dtype,
            check_finite,
        )
        per_node = workers_per_node if _local_world_size is None else _local_world_size
        if per_node is None:
            per_node = default_workers_per_node(self._communicator.num_workers)
        self._workers_per_node = per_node
        self._prefix = ""
        weakref.finalize(self, self._communicator.close).atexit = False  # a process that ends closes by itself
        self._attach(model)
        self._joins = Joins(self._communicator)
        self.module = model
        self.register_load_state_dict_pre_hook(_load_nested)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_name_nested)  # type: ignore[no-untyped-call]

    def _attach(self, model: nn.Module, trained_before: Collection[int] | None = None) -> None:
        """Set up everything that depends on which parameters there are, and hook into their backward."""
        if not isinstance(model, nn.Module):
            raise ConfigurationError(f"model is {type(model).__name__}; it must be a torch.nn.Module")
        topology, buckets = set_up(model, self._settings, self._workers_per_node, self._communicator, trained_before)
        trained = [p for bucket in buckets for p in bucket.parameters]
        watch = guards.ParameterWatch(model, trained, as_view=self._settings.param_as_bucket_view)
        self._replica = Replica(model, buckets, topology, self._communicator, watch, self._settings)
        self._averager = Averager(self._replica, self._communicator)
        self._hooks = BackwardHooks(trained, self._replica)
        names = dict(zip(map(id, trained), self._replica.names, strict=True))
        refusal = guards.Refusal(names, [*self.optimizers, self._replica.whole_model])
        self._wrapped = (model,)  # in a tuple, so that it is not registered twice
        self._take_down = weakref.finalize(self, _take_down, self._hooks, refusal)

    # ---------------------------------------------------------------- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; nothing is waited for and nothing changes."""
        if not torch.compiler.is_compiling():
            if torch.is_grad_enabled() and not in_backward():
                self._replica.forget_interrupted()
            self._replica.check_usable()
            self._check_module()
        output = self.module(*args, **kwargs)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._hooks.watch_output(output)
        return output

    def _check_module(self) -> None:
        if self.module is not self._wrapped[0] or len(self._modules) + len(self._parameters) > 1:
            raise ModelChangedError(
                f"{self._replica.here}: a module or parameter was assigned to the wrapper itself, where it is not "
                "trained; change what is inside of model.module and call refresh()"
            )

    # ---------------------------------------------------------------- accumulation and mixing

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients instead of updating, for every ``backward()`` inside; as in torch DDP."""
        before = self._replica.accumulating
        self._replica.accumulating = True
        try:
            yield
        finally:
            self._replica.accumulating = before

    def set_accumulate_grad(self, enable: bool = True) -> None:
        """Switch accumulation on or off; what counts is the state while ``backward()`` runs."""
        self._replica.accumulating = bool(enable)

    def finish_window(self) -> None:
        """End an accumulation window without another ``backward()``: one update, one round, one scheduler tick.

        For the last, incomplete window of an epoch. It is a step like any other, which all workers take; one without
        gradients only mixes.
        """
        with torch.no_grad():
            self._replica.finish_window()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients; outside of an accumulation window there are none."""
        if self._replica.num_accumulated:
            warnings.warn(
                f"{self._replica.here}: zero_grad() discards {self._replica.num_accumulated} accumulated backward "
                "passes; call finish_window() first if they should count",
                stacklevel=2,
            )
        self._replica.drop_gradients()
        self._hooks.reset()
        super().zero_grad(set_to_none)

    @contextmanager
    def join(self) -> Iterator[DecentralizedDataParallel]:
        """Let workers take unequal numbers of updates inside; every worker must enter and leave.

        A worker that leaves its loop goes on answering exchanges with its replica, without updates of its own, until
        all have left. Afterwards every worker is at the same step. Accumulated gradients without an update are
        discarded with a warning; see `finish_window`.

        Example:
            >>> def train(model, batches):
            ...     with model.join():
            ...         for batch in batches:  # as many as this worker has, or none
            ...             model(batch).sum().backward()
        """
        with self._joins.enter(self._replica):
            yield self
            if self._replica.num_accumulated:
                self.zero_grad()

    def refresh(self) -> None:
        """Take over parameters that were frozen, thawed, replaced or converted; all workers must call it.

        Buckets, optimizers and schedulers are built anew. Parameters that were trained before keep what belongs to
        them: optimizer state, learning rate, what is in flight. The others start from those of rank 0.
        """
        self._averager.refuse_applied()
        if self._replica.after_step is not None:
            raise TrainingError(f"{self._replica.here}: refresh() inside of join(); call it between two joins")
        state, old, take_down = capture(self._replica), self._replica, self._take_down
        before = dict(zip(map(id, old.parameters), old.names, strict=True))
        with old.fails_on_error():
            self._attach(self.module, before)
        take_down()
        new = zip(self._replica.names, self._replica.parameters, strict=True)
        rename(state, {before[id(p)]: name for name, p in new if id(p) in before})
        with self._replica.fails_on_error():
            restore(self._replica, state)
        self._replica.accumulating, self._replica.num_accumulated = old.accumulating, old.num_accumulated

    def set_adaptive_factor(self, factor: float) -> None:
        """Set the mixing strength gamma of the rounds started from now on: ``x <- (1 - gamma) x + gamma W x``.

        Set the same on all workers, or their mean is not kept.

        Args:
            factor: Between 0 (no mixing) and 1 (the topology's weights).
        """
        if not isinstance(factor, numbers.Real) or not 0 <= factor <= 1:
            raise ConfigurationError(f"the mixing strength must lie between 0 and 1, got {factor}")
        self._replica.strength = float(factor)

    def synchronize(self, *, drop: bool = False) -> None:
        """Wait until nothing travels from the parameters, before they are written by hand; mixes nothing.

        Args:
            drop: Whether to forget what has arrived. Without, the next update still mixes it into what was written,
                which is right for clamping and wrong for a new start.
        """
        if drop:
            self._replica.drop_exchanges()
        else:
            self._replica.wait()

    # ---------------------------------------------------------------- averages over all workers

    @contextmanager
    def consensus(self) -> Iterator[DecentralizedDataParallel]:
        """Replace all replicas by their average inside the context; every worker must enter it.

        Parameters (and buffers with ``sync_buffer_in_global_avg``) are restored bit for bit on exit, and exchanges in
        flight are as before.

        Raises:
            ExchangeError: If a worker does not enter within the timeout.
        """
        self.global_avg()
        try:
            yield self
        finally:
            self.revert_global_avg()

    def global_avg(self, will_revert: bool = True, return_d2c: bool = False) -> float | None:
        """Replace all replicas by their average; every worker must call it.

        Args:
            will_revert: Whether `revert_global_avg` will restore the replicas. If not, the average replaces them for
                good and what is in flight is dropped.
            return_d2c: Whether to return the distance.

        Returns:
            L2 distance of this worker's replica to the average if asked for.
        """
        return self._averager.replace(self._averaged_buffers, will_revert=will_revert, return_distance=return_d2c)

    def _averaged_buffers(self) -> list[Tensor]:
        buffers = self.module.buffers() if self._settings.sync_buffer_in_global_avg else []
        return [buffer for buffer in buffers if buffer.layout == torch.strided]

    def revert_global_avg(self) -> None:
        """Restore the replicas that `global_avg` replaced, bit for bit."""
        self._averager.revert()

    def consensus_distance(self) -> float:
        """Return the root mean square over workers of the L2 distance to their mean; every worker must call it."""
        return self._averager.distance()

    # ---------------------------------------------------------------- reading and loading

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the wrapped module, under its own names; local to this worker."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load the state of the wrapped module, under its own names; local to this worker.

        Waits until nothing travels from the parameters. What was in flight is dropped: the loaded values are the
        replica.
        """
        if assign:
            raise ConfigurationError(
                "load_state_dict(assign=True) would replace the parameters that buckets and optimizers hold; load with "
                "assign=False, or load into the module before wrapping it"
            )
        self._about_to_load(state_dict)
        return self.module.load_state_dict(state_dict, strict)

    def _about_to_load(self, names: Collection[str]) -> None:
        """Let nothing travel, and drop what was in flight if anything is going to be overwritten."""
        self._averager.refuse_applied()
        self.synchronize(drop=not set(names).isdisjoint(self.module.state_dict()))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of the wrapped module, under its own names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """As of the wrapped module, under its own names."""
        return self.module.named_buffers(*args, **kwargs)

    @property
    def t(self) -> int:
        """The number of updates taken, which is also the round of the next one."""
        return self._replica.t

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers, one per bucket."""
        return tuple(bucket.optimizer for bucket in self._replica.buckets)

    @property
    def lr_schedulers(self) -> tuple[LRScheduler, ...]:
        """The learning-rate schedulers, one per bucket; empty without ``lr_scheduler_fn``."""
        return tuple(bucket.scheduler for bucket in self._replica.buckets if bucket.scheduler is not None)

    def get_lr(self) -> float:
        """Return the learning rate of the next update (of the first parameter group)."""
        return float(self._replica.buckets[0].optimizer.param_groups[0]["lr"])

    # ---------------------------------------------------------------- inside

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a DecentralizedDataParallel holds connections and cannot be copied or pickled; copy or save "
            "model.module instead"
        )


def _load_nested(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """When a module that contains the wrapper is loaded: give the names back their place."""
    assert isinstance(module, DecentralizedDataParallel)
    module._prefix = prefix
    names = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
    module._about_to_load(names)
    for name in names:
        state_dict[f"{prefix}module.{name}"] = state_dict.pop(f"{prefix}{name}")


def _name_nested(module: nn.Module, keys: Any) -> None:
    """And tell the keys that do not fit by the names the user knows."""
    assert isinstance(module, DecentralizedDataParallel)
    inside = f"{module._prefix}module."
    for names in (keys.missing_keys, keys.unexpected_keys):
        names[:] = [f"{module._prefix}{n.removeprefix(inside)}" if n.startswith(inside) else n for n in names]


def _take_down(hooks: BackwardHooks, refusal: Any) -> None:
    hooks.remove()
    refusal.remove()
