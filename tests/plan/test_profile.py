"""The profile as a file: what is written is read again, and what is wrong is named."""

from __future__ import annotations

import json

import pytest

from decent_dp.errors import ConfigurationError
from decent_dp.plan import Profile, lognormal, predict
from plan.synthetic import profile


@pytest.fixture
def good():
    return profile(8, 2, buckets=3, update_s=0.01, jitter_quantiles=(0.9, 1.1), net={"latency_s": 0.001})


@pytest.mark.parametrize(("n", "L"), [(1, 1), (4, 1), (4, 4), (8, 2)])
def test_round_trip(tmp_path, n, L):
    written = profile(n, L, buckets=3, jitter_quantiles=lognormal(0.1, 11), net={"latency_s": 0.001})
    written.save(tmp_path / "profile.json")
    read = Profile.load(tmp_path / "profile.json")
    assert read == written
    assert read.to_json() == written.to_json()
    assert predict(read, "exp") == predict(written, "exp")
    assert len(written.to_json()) < 10_000


def changed(good, path, value):
    whole = json.loads(good.to_json())
    *parents, last = path
    place = whole
    for key in parents:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return json.dumps(whole)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "other", "'format' must be 'decent-dp profile'"),
        (("version",), 2, "version is 2; this version of decent-dp reads 1"),
        (("num_workers",), 0, "num_workers is 0; it must be a whole number of at least 1"),
        (("num_workers",), True, "num_workers is True"),
        (("workers_per_node",), 3, "workers_per_node is 3; it must be a divisor of num_workers = 8"),
        (("device",), "tpu", "device is 'tpu'; it must be 'cpu' or 'cuda'"),
        (("element_bytes",), None, "element_bytes is missing"),
        (("compute",), [], "compute is .*; it must be an object"),
        (("compute", "forward_s"), -1, "compute.forward_s is -1; it must be a number of at least 0"),
        (("compute", "forward_s"), "1", "compute.forward_s is '1'; it must be a number"),
        (("compute", "update_s"), float("nan"), "compute.update_s is nan"),
        (("compute", "backward_s"), None, "compute.backward_s is missing"),
        (("compute", "backward_s"), 0.1, r"compute.buckets\[1\].ready_s is .*between that of the bucket before and"),
        (("compute", "buckets"), [], "compute.buckets is .*; it must be a list with at least one element"),
        (("compute", "buckets", 1, "bytes"), 1.5, r"compute.buckets\[1\].bytes is 1.5; it must be a whole number"),
        (("compute", "worker_factors"), [1.0], "compute.worker_factors is .* one number for each of the 8 workers"),
        (("compute", "jitter_quantiles"), [2, 1], "compute.jitter_quantiles is .*; it must be ascending"),
        (("compute", "typo_s"), 1, "compute.typo_s is not known"),
        (("typo",), 1, "typo is not known; known are"),
        (("network", "pair_across"), None, "network.pair_across is missing; .* these workers have the pattern"),
        (("network", "all_reduce", "bytes_per_s"), 0, "network.all_reduce.bytes_per_s is 0; .* at least 1"),
        (("network", "all_reduce", "bytes_per_s"), 1e-300, "all_reduce.bytes_per_s is 1e-300; .* at least 1"),
        pytest.param(("network", "all_reduce", "latency_s"), 10**400, "network.all_reduce.latency_s", id="huge number"),
        pytest.param(("element_bytes",), 10**400, "element_bytes is 1000", id="huge size"),
        (("network", "all_reduce"), 3, "network.all_reduce is 3; it must be an object"),
        (("notes",), {"a": 1}, "notes.a is 1; it must be a text"),
    ],
)
def test_what_is_wrong_is_named(good, path, value, message):
    with pytest.raises(ConfigurationError, match=message):
        Profile.from_json(changed(good, path, value))


def test_files_that_are_none(tmp_path):
    with pytest.raises(ConfigurationError, match=r"cannot be read \(No such file.*decent-dp measure"):
        Profile.load(tmp_path / "missing.json")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Profile.load(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="it is no text"):
        Profile.load(tmp_path / "bytes")
    for text in ("", "{", "[" * 100000):
        with pytest.raises(ConfigurationError, match="no JSON"):
            Profile.from_json(text)
    for text in ("[]", "3", "{}"):
        with pytest.raises(ConfigurationError, match="is no profile"):
            Profile.from_json(text)
