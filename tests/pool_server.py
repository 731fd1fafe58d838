"""Imported by the server that forks the workers of the pool, before the first fork, and by nobody else."""

import numpy  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch.distributed  # noqa: F401

from processes import die_with_parent

# The server dies with the tests and the workers with the server, all at once and without a word from anybody.
die_with_parent()
