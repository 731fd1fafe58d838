"""Import path of the original package."""

from decent_dp.startup import initialize_dist

__all__ = ["initialize_dist"]
