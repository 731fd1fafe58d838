"""Everything a replica knows, keyed by parameter name: independent of buckets, and plain data.

The keys of the state:

- ``step``, ``strength``: the step t and the mixing strength;
- ``optimizer``: for each parameter its optimizer state and the options of its group;
- ``schedulers``: for each parameter the state of its scheduler, with lists over groups reduced to the group's element;
- ``scaler``: the state of the loss scaler, or None;
- ``exchange``: step and weight of the exchange in flight, or None, and what was received (and sent) for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from decent_dp.engine.arithmetic import cast
from decent_dp.engine.bucket import Bucket
from decent_dp.engine.exchange import Arrived, finish, sent_by
from decent_dp.engine.replica import Replica
from decent_dp.errors import TrainingError
from decent_dp.topology import Idle

State = dict[str, Any]

_TRAVELS = ("received", "sent", "remainder")


@torch.no_grad()
def capture(replica: Replica, *, copy: bool = True) -> State:
    """Return the training state of this worker.

    Waits until the exchange in flight has arrived; it stays to be mixed by the next step.

    Args:
        replica: Of this worker.
        copy: Whether tensors are copies; else they change with the next step.
    """
    take = _copy if copy else _keep
    state: State = {
        "step": replica.t,
        "strength": replica.strength,
        "optimizer": {},
        "schedulers": {},
        "scaler": None if replica.scaler is None else replica.scaler.state_dict(),
        "exchange": None,
    }
    for bucket in replica.buckets:
        _capture_optimizer(bucket, state, take)
        with replica.fails_on_error():
            arrived = bucket.exchange = finish(bucket)
        if arrived is not None:
            exchange = state["exchange"] = state["exchange"] or {
                "step": arrived.step,
                "weight": arrived.weight,
                "received": {},
                "sent": {},
                "remainder": {},
            }
            remainder = None
            if arrived.remainder is not None:
                begin, part = arrived.remainder
                remainder = torch.zeros_like(bucket.storage.flat)
                remainder[begin : begin + part.numel()] = part
            for key, flat in (
                ("received", arrived.received),
                ("sent", sent_by(bucket, arrived)),
                ("remainder", remainder),
            ):
                if flat is not None:
                    views = bucket.storage.views(flat)
                    exchange[key] |= {name: take(v) for name, v in zip(bucket.names, views, strict=True)}
    return state


@torch.no_grad()
def restore(replica: Replica, state: State) -> None:
    """Take over a training state; parameters that it does not know start afresh."""
    replica.t = state["step"]
    replica.strength = state["strength"]
    if replica.scaler is not None and state["scaler"] is not None:
        replica.scaler.load_state_dict(state["scaler"])
    for bucket in replica.buckets:
        _restore_optimizer(bucket, state)
        if state["exchange"] is not None:
            bucket.exchange = _restore_exchange(replica, bucket, state["exchange"])


def check(replica: Replica, state: State) -> None:
    """Refuse what `restore` would refuse, while nothing is changed.

    Raises:
        TrainingError: Parameters come to share a parameter group whose options were not the same.
    """
    for bucket in replica.buckets:
        for known in _known_of_groups(bucket, state):
            _refuse_different(known, state)


def rename(state: State, names: Mapping[str, str]) -> None:
    """Move what belongs to parameters to their new names, and drop what belongs to others.

    Args:
        state: From `capture`; changed.
        names: New name of every parameter that is still there, by its old one.
    """

    def moved(values: dict[str, Any]) -> dict[str, Any]:
        return {names[name]: value for name, value in values.items() if name in names}

    for key in ("optimizer", "schedulers"):
        state[key] = moved(state[key]) or {name: _fresh(value) for name, value in state[key].items()}
    if state["exchange"] is not None:
        state["exchange"] |= {key: moved(state["exchange"][key]) for key in _TRAVELS}


def _fresh(value: Any) -> Any:
    return {**value, "state": {}} if isinstance(value, dict) and "options" in value else value


def _capture_optimizer(bucket: Bucket, state: State, take: Callable[[Any], Any]) -> None:
    names = {id(p): name for name, p in zip(bucket.names, bucket.parameters, strict=True)}
    num_groups = len(bucket.optimizer.param_groups)
    scheduler = None if bucket.scheduler is None else bucket.scheduler.state_dict()
    for position, group in enumerate(bucket.optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for parameter in group["params"]:
            name = names[id(parameter)]
            values = bucket.optimizer.state.get(parameter, {})
            dtype = str(bucket.storage.flat.dtype)
            state["optimizer"][name] = {"state": take(values), "options": take(options), "dtype": dtype}
            if scheduler is not None:
                state["schedulers"][name] = _of_group(scheduler, position, num_groups)


def _restore_optimizer(bucket: Bucket, state: State) -> None:
    names = {id(p): name for name, p in zip(bucket.names, bucket.parameters, strict=True)}
    loaded = bucket.optimizer.state_dict()
    loaded["state"] = {}
    index = 0
    representatives: list[str | None] = []
    groups = zip(bucket.optimizer.param_groups, loaded["param_groups"], _known_of_groups(bucket, state), strict=True)
    for group, entry, known in groups:
        representatives.append(known[0] if known else None)
        if known:
            _refuse_different(known, state)
            entry.update(_copy(state["optimizer"][known[0]]["options"]))
        elif state["optimizer"]:  # new parameters only: at least the rates of the schedule so far
            other = next(iter(state["optimizer"].values()))["options"]
            entry.update({key: other[key] for key in ("lr", "initial_lr") if key in other})
        for parameter in group["params"]:
            values = state["optimizer"].get(names[id(parameter)], {"state": {}})["state"]
            if values:
                loaded["state"][index] = _copy(values)
            index += 1
    bucket.optimizer.load_state_dict(loaded)
    for parameter, values in bucket.optimizer.state.items():
        saved = state["optimizer"].get(names[id(parameter)], {})
        if saved.get("dtype") == str(bucket.storage.flat.dtype):
            values |= {key: _in_dtypes_of(saved["state"][key], v) for key, v in values.items() if key in saved["state"]}
        for key, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0:
                values[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)  # in its layout
    if bucket.scheduler is not None and state["schedulers"]:
        first = next(iter(state["schedulers"]))
        parts = [state["schedulers"][name or first] for name in representatives]
        bucket.scheduler.load_state_dict(_to_groups(parts))


def _known_of_groups(bucket: Bucket, state: State) -> list[list[str]]:
    """For each parameter group the parameters that the state knows."""
    names = {id(p): name for name, p in zip(bucket.names, bucket.parameters, strict=True)}
    groups = [[names[id(p)] for p in group["params"]] for group in bucket.optimizer.param_groups]
    return [[name for name in group if name in state["optimizer"]] for group in groups]


def _in_dtypes_of(saved: Any, loaded: Any) -> Any:
    """Undo the casts of torch's optimizers, which give their state the dtype of the parameters whatever it had."""
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        return loaded if saved.dtype == loaded.dtype else saved.to(loaded.device, copy=True)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {key: _in_dtypes_of(saved[key], v) if key in saved else v for key, v in loaded.items()}
    if isinstance(saved, list | tuple) and isinstance(loaded, list | tuple) and len(saved) == len(loaded):
        return type(loaded)(_in_dtypes_of(s, v) for s, v in zip(saved, loaded, strict=True))
    return loaded


def _of_group(value: Any, position: int, num_groups: int) -> Any:
    """Reduce a scheduler's state to what concerns one parameter group."""
    if isinstance(value, dict):
        return {key: _group_entry(key, v, position, num_groups) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_of_group(v, position, num_groups) for v in value)
    return _copy(value)


def _group_entry(key: str, value: Any, position: int, num_groups: int) -> Any:
    if key in _GROUP_LISTS and isinstance(value, (list, tuple)) and len(value) == num_groups:
        return {"of_group": _copy(value[position])}
    return _of_group(value, position, num_groups)


def _refuse_different(names: list[str], state: State) -> None:
    """Parameters that come to share a group must have had the same options."""
    first = state["optimizer"][names[0]]["options"]
    for name in names[1:]:
        for key, value in state["optimizer"][name]["options"].items():
            if str(value) != str(first.get(key)):
                raise TrainingError(
                    f"parameters '{names[0]}' and '{name}' come to share a parameter group and their {key} differs "
                    f"({first.get(key)} and {value}); set it equal in model.optimizers before"
                )


#: Attributes of torch's schedulers with one element for each parameter group.
_GROUP_LISTS = ("base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums")


def _to_groups(parts: list[Any]) -> Any:
    """Put the states of a scheduler for several groups together again."""
    first = parts[0]
    if isinstance(first, dict) and set(first) == {"of_group"}:
        return [part["of_group"] for part in parts]
    if isinstance(first, dict):
        return {key: _to_groups([part[key] for part in parts]) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(_to_groups([part[i] for part in parts]) for i in range(len(first)))
    return _copy(first)


def _restore_exchange(replica: Replica, bucket: Bucket, exchange: State) -> Arrived | None:
    """Lay out what had arrived as the bucket is now; for parameters without, it is as if nothing had moved."""
    received, sent, remainder = (
        {name: exchange[key][name] for name in bucket.names if name in exchange[key]} for key in _TRAVELS
    )
    if not received:
        return None
    bucket.storage.pack()
    own = bucket.storage.flat
    if sent:  # the same value on both sides, so that their difference is nothing
        own = cast(own, torch.empty_like(own, dtype=_real(sent)))

    def lay_out(pieces: dict[str, Tensor], otherwise: Tensor) -> Tensor:
        flat = otherwise.to(_real(pieces), copy=True)
        for name, view in zip(bucket.names, bucket.storage.views(flat), strict=True):
            if name in pieces:
                assert view.shape == pieces[name].shape, name
                view.copy_(pieces[name])
        return flat

    plan = replica.plan_at(exchange["step"])
    assert not isinstance(plan, Idle), "something arrived in a round in which this worker idles"
    return Arrived(
        step=exchange["step"],
        plan=plan,
        received=lay_out(received, own),
        weight=exchange["weight"],
        sent=lay_out(sent, own) if sent else None,
        remainder=(0, lay_out(remainder, torch.zeros_like(own))) if remainder else None,
    )


def _real(pieces: dict[str, Tensor]) -> torch.dtype:
    """The dtype of pieces of one bucket, that of the parts if they are complex."""
    dtype = next(iter(pieces.values())).dtype
    return dtype.to_real() if dtype.is_complex else dtype


def _keep(value: Any) -> Any:
    return value


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(v) for v in value)
    return value
