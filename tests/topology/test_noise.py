"""How far noise keeps the replicas apart, in closed recursion on the covariance of the replicas.

With independent noise of variance 1 added by every update, x(t+1) = W_t x(t) + u_t, the covariance of the
deviations from the mean follows C <- W C W^T + (I - J), and trace(C) / n settles to one value per round of the
cycle, of which the mean is taken.
"""

import numpy as np
import pytest

from decent_dp.topology import Layout, Topology, build


def stationary(topology: Topology) -> float:
    n = topology.layout.num_workers
    P = np.eye(n) - 1 / n
    matrices = [round.matrix() for round in topology.rounds]
    C, before, after = P, 0.0, 1.0
    while abs(after - before) > 1e-9:
        before, after = after, 0.0
        for W in matrices:
            C = W @ C @ W.T + P
            after += np.trace(C) / n / len(matrices)
    return after


@pytest.mark.parametrize(
    ("name", "n", "expected"),
    [
        ("complete", 16, 0.9375),
        ("static-ring", 16, 2.4096),
        ("torus", 16, 1.1393),
        ("hypercube", 16, 1.1393),
        ("exp", 16, (2 * 16 - 2 - 4) / 16),
        ("ring", 16, 2.25),
        ("exp", 24, 1.8097),
        ("base-2", 24, 2.0880),
        ("base-3", 24, 1.5938),
    ],
)
def test_stationary_distance_under_noise(name: str, n: int, expected: float) -> None:
    topology = build(name, Layout(n, 1))
    assert isinstance(topology, Topology)
    assert stationary(topology) == pytest.approx(expected, abs=1e-4)
