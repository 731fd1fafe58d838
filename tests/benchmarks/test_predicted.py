"""The comparisons of the runtime model: what is stored, counted and written; nothing here measures a network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import paper, predicted
from benchmarks.predicted import SIDES, Compared, Setting
from decent_dp.plan import Profile
from plan.synthetic import MB, profile
from pool import Pool


def test_the_settings_are_those_of_the_sweep() -> None:
    assert len(predicted.ALL) == 18
    assert Setting.parse("400x4x2x300") == Setting(400, 4, 2, 300)
    assert Setting.parse("400x4x2x300").name == "400x4x2x300"
    for name in ("400x4x2", "0x4x2x300", "axbxcxd"):
        with pytest.raises(ValueError, match=r"setting|invalid literal"):
            Setting.parse(name)


def stored() -> dict[str, object]:
    facts = {"date": "today", "network": "none", "decent_dp": "0", "commit": "none"}
    blocks = {side: [1000.0 + 10 * k, 1000.0 + 10 * k] for k, side in enumerate(SIDES)}
    one = {"profile": json.loads(profile(4, 1, net={"across": MB}).to_json()), "block_ms": blocks}
    return {"100x4x1x300": {**one, "took_s": 1.0, "facts": facts}}


def test_errors_and_choices_are_counted() -> None:
    one = Compared(Setting(1, 4, 1, 1), {"ddp": 110.0, "ours:exp": 95.0}, {"ddp": 100.0, "ours:exp": 100.0})
    assert one.errors == pytest.approx({"ddp": 0.1, "ours:exp": -0.05})
    assert (one.choice, one.lost) == ("ours:exp", 0.0)
    wrong = Compared(Setting(1, 4, 1, 2), {"ddp": 90.0, "ours:exp": 100.0}, {"ddp": 110.0, "ours:exp": 100.0})
    assert wrong.lost == pytest.approx(0.1)
    found = predicted.summary([one, wrong])
    assert found["median error"] == pytest.approx((0.05 + 0.1) / 2)
    assert found["worst error"] == pytest.approx(1 - 90 / 110)
    assert found["right choices"] == 1


def test_predictions_are_made_from_what_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "predicted.json").write_text(json.dumps(stored()))
    (one,) = predicted.main(["--report", "--output", str(tmp_path)])
    assert one.predicted_ms["ours:ring"] == pytest.approx(1000)
    assert one.predicted_ms["ours:complete"] == pytest.approx(1500)
    out = capsys.readouterr().out
    assert "1 of 18 settings" in out
    assert (tmp_path / "predicted.md").read_text().startswith("# The runtime model")
    assert (tmp_path / "predicted.png").stat().st_size > 5000
    # nothing is measured again
    assert predicted.main(["--settings", "100x4x1x300", "--output", str(tmp_path)]) == [one]
    with pytest.raises(SystemExit):
        predicted.main(["--report", "--output", str(tmp_path / "empty")])


def profiled(rank: int, n: int) -> str:
    work = {"kind": "emulated", "parameters_mib": 0.2, "num_layers": 4, "compute_s": 0.02}
    return predicted.profile({}, work, workers_per_host=1, bucket_mib=0.1, num_steps=4)


def test_workers_of_the_laboratory_measure_their_profile(pool: Pool) -> None:
    first, second = pool.run(profiled, 2)
    assert first == second
    found = Profile.from_json(first)
    assert found.num_bytes == int(0.2 * 2**20 / 16) * 16
    assert 0.019 < found.compute.forward_s + found.compute.backward_s < 0.06


def test_the_paper_is_fitted_with_four_numbers_a_cluster() -> None:
    assert len(paper.Fitted.__dataclass_fields__) == 4
    assert sum(len(ms) for cluster in paper.CLUSTERS for ms in cluster.ms.values()) == 27
    # the numbers of a full fit; the search itself takes half a minute
    a100 = paper.Fitted(fixed_ms=31.0, shared_ms=254.0, pairs_gb_per_s=17.9, sums_gb_per_s=13.3)
    errors = sorted(map(abs, paper.errors_of(paper.CLUSTERS[1], paper.table_of(paper.CLUSTERS[1], a100))))
    assert errors[4] < 0.05
    assert errors[-1] < 0.15


def test_the_simplex_finds_a_minimum() -> None:
    found = paper._simplex(lambda x: float((x[0] - 1) ** 2 + 3 * (x[1] + 2) ** 2), [0.0, 0.0], 80)
    assert list(found) == pytest.approx([1.0, -2.0], abs=0.01)
