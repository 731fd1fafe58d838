"""One training step of one bucket, on one worker.

    x_i(t+1) = sum_j W_t[i,j] x_j(t)  +  update_i( g_i( x_i(t) ) )          adapt while communicating

The exchange of step t travels while the next forward and backward run, and is finished when the same parameters are
updated again:

    finish   wait for the exchange started last step       -> received, weight
    mix      x <- (1 - weight) x + weight * received
    update   local optimizer on the local gradient
    start    exchange x over round t

The gradient was taken at the unmixed x. Bucket after bucket goes through these phases while backward still computes the
gradients of the next ones.
"""

import torch

from decent_dp.comm.protocol import Communicator
from decent_dp.engine.bucket import Bucket
from decent_dp.engine.exchange import finish, mix, start
from decent_dp.engine.pre_average import announce
from decent_dp.topology import Plan


@torch.no_grad()
def step(bucket: Bucket, t: int, plan: Plan, communicator: Communicator, strength: float = 1.0) -> None:
    """Take one step of one bucket.

    Args:
        bucket: Its parameters have their gradients; those without are mixed but not updated.
        t: The step; selects the round.
        plan: What this worker does in round t.
        communicator: Moves the bytes.
        strength: Mixing strength gamma of the round that is started: ``x <- (1 - gamma) x + gamma W x``.

    Raises:
        ExchangeError: If another worker did not do its part of the exchange started last step.
    """
    # finish
    arrived = finish(bucket)

    # mix
    if arrived is not None:
        mix(bucket, announce(bucket, arrived, communicator.rank))

    # update
    bucket.update()

    # start
    bucket.exchange = start(bucket, t, plan, communicator, strength)
