"""Killed at random moments, every resume goes on from the last complete checkpoint; see `kills.py` for more kills."""

from pathlib import Path

import pytest

from .kills import kill_at_random


@pytest.mark.timeout(180)
def test_every_resume_after_a_kill_is_whole(tmp_path: Path):
    summary = kill_at_random(50, budget_s=10, seed=0, folder=tmp_path)
    assert summary.num_kills >= 3
    assert summary.last_step > 0
