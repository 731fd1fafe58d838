"""`decent-dp inspect` and `decent-dp export`."""

import json
from functools import partial

import pytest
import torch
from torch import nn

from decent_dp import DecentralizedDataParallel
from decent_dp.checkpoint import save

from .program import in_process


def train_and_save(rank, n, folder):
    model = DecentralizedDataParallel(nn.Linear(3, 2), partial(torch.optim.SGD, lr=0.1), topology="ring")
    for t in range(3):
        model(torch.full((2, 3), float(rank + t))).square().mean().backward()
    save(model, folder, extra={"epoch": 1})
    with model.consensus():
        return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.fixture
def saved(pool, tmp_path):
    return tmp_path, pool.run(train_and_save, 2, tmp_path)[0]


def test_inspect_and_export(saved, capsys):
    folder, consensus = saved
    ran = in_process(capsys, f"inspect {folder}")
    assert (ran.code, ran.err) == (0, "")
    facts = {line[:20].strip(): line[20:] for line in ran.out.splitlines()}
    assert facts["step"] == "3"
    assert facts["workers"] == "2 on 1 node"
    assert (facts["topology"], facts["optimizer"], facts["saved besides"]) == ("ring", "SGD", "epoch")
    assert float(facts["consensus distance"]) > 0
    assert "consensus distance" not in in_process(capsys, f"inspect {folder} --no-distance").out
    assert json.loads(in_process(capsys, f"inspect {folder} --json").out)["num_parameters"] == 8
    for name in ("model.pt", "model.safetensors"):
        file = folder / name
        ran = in_process(capsys, f"export {folder} --out {file}")
        assert (ran.code, ran.err) == (0, "")
        assert ran.out.startswith(f"wrote {file}, ")
        if file.suffix == ".pt":
            state = torch.load(file, weights_only=True)
        else:
            from safetensors.torch import load_file

            state = load_file(file)
        bare = nn.Linear(3, 2)
        bare.load_state_dict(state)
        for key, value in consensus.items():
            torch.testing.assert_close(state[key], value)
    assert json.loads(in_process(capsys, f"export {folder} --out {folder / 'b.pt'} --json").out)["num_bytes"] > 0


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("inspect {}/nothing", 1, "nothing"),
        ("inspect {} --step x", 2, "steps are counted from 0"),
        ("export {}", 2, "--out"),
        ("export {}/nothing --out {}/a.pt", 1, "nothing"),
    ],
)
def test_errors_are_one_line(capsys, tmp_path, line, code, words):
    ran = in_process(capsys, line.replace("{}", str(tmp_path)))
    assert (ran.code, ran.out) == (code, "")
    assert len(ran.err.splitlines()) == 1
    assert words in ran.err
