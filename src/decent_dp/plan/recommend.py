"""Which topology to use on a measured cluster, and whether to use one at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decent_dp.errors import TopologyError
from decent_dp.plan.predict import ALL_REDUCE, Prediction, narrow_dtype, predict
from decent_dp.plan.profile import Profile
from decent_dp.topology import AnyTopology, Layout, Topology, catalog

_WORTH = 0.05  # of a step: what a run must gain for replicas that differ to be worth it
_EQUAL = 0.03  # step times closer than this count as equal
_NUM_DENSE = 256  # workers up to which the contraction is computed
_ALIASES = frozenset({"one-peer-exp"})
_PLAIN = ("complete", "exp", "ring")  # the names that stay where several topologies are one
_NARROW = "bfloat16"
_SHORT_S = 0.01  # steps shorter than this are told in microseconds


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What the model says about a cluster.

    Attributes:
        predictions: All-reduce and every topology that serves the cluster, with every wire dtype, fastest first.
        choice: What to use. It may be all-reduce.
        fastest: The shortest step, whatever else is to be said of it.
        is_worth_it: Whether decentralized training is.
        reason: Why, in a sentence or two.
        left_out: Why other topologies were not looked at, by name: they do not serve the cluster, or are the same as
            another one there.
    """

    predictions: tuple[Prediction, ...]
    choice: Prediction
    fastest: Prediction
    is_worth_it: bool
    reason: str
    left_out: dict[str, str]


def recommend(
    profile: Profile,
    *,
    layout: Layout | None = None,
    topologies: Sequence[str] | None = None,
    wire_dtypes: Sequence[str | None] = (None, _NARROW),
    num_steps: int = 400,
    seed: int = 0,
) -> Recommendation:
    """Predict the step of everything that could be used, and choose.

    Of the topologies whose steps are within 3 % of the shortest one, the one that brings the replicas together fastest
    is chosen; a narrow wire dtype only where it saves more than 3 %. If all-reduce with the same dtypes is within 5 %
    of that, or fills its own bound, all-reduce is chosen: its replicas are equal.

    Args:
        profile: The cluster and the model.
        layout: The workers, if others than were measured.
        topologies: Names to look at; all of the catalog by default.
        wire_dtypes: To look at; None: as the parameters are.
        num_steps: See `predict`.
        seed: See `predict`.

    Raises:
        TopologyError: If a topology is unknown, or none of those named serves these workers.
        ConfigurationError: As for `predict`.
    """
    layout = layout or profile.layout
    dtypes = list(dict.fromkeys(narrow_dtype(profile, dtype) for dtype in wire_dtypes))
    contraction, left_out = _look_at(layout, topologies)
    predictions = [
        predict(profile, topology, dtype, layout=layout, num_steps=num_steps, seed=seed)
        for topology in (ALL_REDUCE, *contraction)
        for dtype in dtypes
    ]
    predictions.sort(key=lambda p: p.step_s)
    baseline = min((p for p in predictions if p.topology == ALL_REDUCE), key=lambda p: p.step_s)
    others = [p for p in predictions if p.topology != ALL_REDUCE]
    fastest = predictions[0]
    if layout.num_workers == 1:
        reason = "One worker has nobody to mix with."
        return Recommendation(tuple(predictions), baseline, fastest, False, reason, left_out)
    best = _best(others, contraction)
    is_worth_it, reason = _judge(best, baseline)
    return Recommendation(tuple(predictions), best if is_worth_it else baseline, fastest, is_worth_it, reason, left_out)


def _look_at(layout: Layout, topologies: Sequence[str] | None) -> tuple[dict[str, float], dict[str, str]]:
    """The topologies that serve these workers with their contraction a step, and why the others do not."""
    serve, left_out = {}, {}
    known: dict[object, str] = {}
    plain_first = [
        *_PLAIN,
        *sorted(set(catalog.names()) - {*_PLAIN}, key=lambda name: (name.startswith("base-"), name)),
    ]
    for name in plain_first if topologies is None else dict.fromkeys(topologies):
        if (topologies is None and name in _ALIASES) or name == ALL_REDUCE:
            continue
        try:
            topology = catalog.build(name, layout)
        except TopologyError as error:
            if name not in catalog.names() and not name.startswith("base-"):
                raise
            left_out[name] = str(error)
            continue
        if isinstance(topology, Topology):
            same = known.setdefault((topology.rounds, topology.between), name)
            if same != name and topologies is None:
                left_out[name] = f"same as {same}"
                continue
        serve[name] = _contraction(topology)
    if not serve:
        raise TopologyError(
            f"no topology that was named serves {layout.num_workers} workers on {layout.num_nodes} nodes: "
            + "; ".join(left_out.values() or ["none was named"])
        )
    return serve, left_out


def _contraction(topology: AnyTopology) -> float:
    """Factor on the distance to the mean a step: of a whole cycle, spread evenly; 1 where that is not computed."""
    n = topology.layout.num_workers
    if n > _NUM_DENSE:
        return 1.0
    num_rounds = topology.num_rounds if isinstance(topology, Topology) else 64
    product = np.eye(n)
    for t in range(num_rounds):
        product = topology.round_at(t).matrix() @ product
    norm = float(np.linalg.norm(product - 1 / n, 2))
    return float(max(norm, 1e-12) ** (1 / num_rounds))


def _best(predictions: Sequence[Prediction], contraction: dict[str, float]) -> Prediction:
    """The shortest step, or one about equal that mixes better; narrow only where that saves time."""
    best: Prediction | None = None
    for is_narrow in (False, True):
        some = [p for p in predictions if (p.wire_dtype is not None) == is_narrow]
        if not some:
            continue
        limit_s = min(p.step_s for p in some) * (1 + _EQUAL)
        chosen = min((p for p in some if p.step_s <= limit_s), key=lambda p: (contraction[p.topology], p.step_s))
        if best is None or chosen.step_s < best.step_s * (1 - _EQUAL):
            best = chosen
    assert best is not None
    return best


def _judge(best: Prediction, baseline: Prediction) -> tuple[bool, str]:
    """Whether decentralized training is worth it, and why."""
    saved = 1 - best.step_s / baseline.step_s
    digits = 0 if best.step_s >= _SHORT_S else 3
    times = f"{1000 * best.step_s:.{digits}f} ms against {1000 * baseline.step_s:.{digits}f} ms of all-reduce"
    if saved >= _WORTH:
        how = {"compute": "waits for almost nothing", "wire": "still waits for the network", "jitter": "still waits"}
        return True, f"{best.topology} saves {saved:.0%} of a step ({times}) and {how[best.bound]}."
    if baseline.bound == "compute":
        return False, f"All-reduce already hides under backward ({times}): there is nothing left to gain."
    if saved <= 0:
        return False, f"No topology is faster than all-reduce here ({times})."
    return False, f"The fastest topology saves only {saved:.0%} of a step ({times}), and replicas would differ."
