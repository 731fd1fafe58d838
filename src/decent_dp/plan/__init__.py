"""The runtime model: what a step will take on a measured cluster, for every topology.

A :class:`Profile` is what ``decent-dp measure`` writes: the times of a model on one worker, and what each pattern of
traffic gets. :func:`predict` runs the recursion of the model over it for one topology, :func:`recommend` for all that
serve the cluster, with torch's DistributedDataParallel beside them. ``docs/runtime-model.md`` derives the model.

Measuring is in :mod:`decent_dp.plan.measure`, which alone needs torch.
"""

from decent_dp.plan.jitter import lognormal, quantiles_of
from decent_dp.plan.predict import ALL_REDUCE, Prediction, predict
from decent_dp.plan.profile import BucketTime, Compute, Network, Profile, Rate
from decent_dp.plan.recommend import Recommendation, recommend

__all__ = [
    "ALL_REDUCE",
    "BucketTime",
    "Compute",
    "Network",
    "Prediction",
    "Profile",
    "Rate",
    "Recommendation",
    "lognormal",
    "predict",
    "quantiles_of",
    "recommend",
]
