import json

import pytest
import torch

from vlmrl.commands.bench.logprobs import METHODS, PASSES, differences, full_logits, logprobs, make_layer
from vlmrl.config.bench import OutputLayer
from vlmrl.config.bench_verbs import LogprobsBench

SIZES = {"vocabulary": 500, "tokens": 40, "hidden": 16, "repeats": 2}


def test_full_logits_give_the_log_of_a_softmax() -> None:
    # Logits 0 and log 3: probabilities 1/4 and 3/4.
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [3.0]]).log().clamp(min=0.0)
    assert full_logits(hidden, weight, torch.tensor([0, 1])).exp().tolist() == pytest.approx([0.25, 0.75])


def test_both_methods_agree_in_values_and_gradients() -> None:
    diffs = differences(make_layer(OutputLayer(**SIZES), torch.device("cpu")))
    assert diffs["logprob_diff_max"] < 1e-5
    assert diffs["hidden_gradient_diff_max"] < 1e-5 * diffs["hidden_gradient_max"]
    assert diffs["weight_gradient_diff_max"] < 1e-5 * diffs["weight_gradient_max"]


def test_a_method_that_shifts_targets_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(OutputLayer(**SIZES), torch.device("cpu"))
    monkeypatch.setitem(METHODS, "chunked", lambda h, w, t: full_logits(h, w, torch.cat([t[:1], t[:-1]])))
    assert differences(layer)["logprob_diff_max"] > 0.1


def test_every_method_and_pass_is_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    logprobs(LogprobsBench.model_validate({"bench": SIZES}))
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["method"], line["passes"]) for line in lines] == [
        (method, passes) for method in METHODS for passes in PASSES
    ]
    for line in lines:
        assert len(line["seconds_each"]) == 2
        # fp32: 500 x 16 of the weight, 40 x 16 of the hidden states.
        gradients = (500 + 40) * 16 * 4 / 2**20 if "backward" in line["passes"] else 0.0
        assert line["gradients_mib"] == pytest.approx(gradients, abs=0.05)
    assert "chunked" in err
