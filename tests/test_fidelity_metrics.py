"""What benchmarks/peers tells of two predictions, against direct computation in float64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks" / "peers"))
from fidelity_metrics import (
    Forward,
    bootstrap_interval,
    check_exact,
    full_log_probs,
    kl_divergence,
    summary,
    trace,
)

TOKENS, VOCABULARY, PROMPT = 40, 31, 8


def table(seed: int) -> Tensor:
    return torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def reading(logits: Tensor) -> Forward:
    """A model whose logits at each position are known; it attends to all tokens so far."""

    def forward(ids: Tensor, start: int) -> tuple[Tensor, float]:
        stop = start + ids.shape[1]
        return logits[start:stop], float(stop)

    return forward


IDS = torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(9))
LOGITS, OTHER = table(1), table(2)
FULL = full_log_probs(reading(LOGITS), IDS, chunk=7)


@pytest.mark.parametrize("step", [1, 4, 32])
def test_each_position_is_compared_with_the_same_position_of_the_full_cache(step):
    found = trace(reading(OTHER), IDS, FULL, PROMPT, step)
    p, q = (logits.double().softmax(-1)[:-1] for logits in (LOGITS, OTHER))
    following = IDS[0, 1:, None]
    nll_change = p.gather(1, following).log() - q.gather(1, following).log()
    torch.testing.assert_close(found.kl.double(), (p * (p / q).log()).sum(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.nll_change.double(), nll_change[:, 0], rtol=1e-5, atol=1e-5)
    assert found.top1.tolist() == (p.argmax(-1) == q.argmax(-1)).double().tolist()
    assert found.attended.tolist() == list(range(1, TOKENS))


def test_the_same_predictions_differ_by_nothing():
    found = trace(reading(LOGITS), IDS, FULL, PROMPT, 4)
    assert found.kl.abs().max() < 1e-6 and found.nll_change.abs().max() < 1e-6
    assert found.top1.all()
    check_exact(found, TOKENS)


def test_what_differs_before_anything_can_be_evicted_is_refused():
    changed = LOGITS.clone()
    changed[20] = OTHER[20]
    found = trace(reading(changed), IDS, FULL, PROMPT, 4)
    check_exact(found, 20)
    with pytest.raises(RuntimeError, match="first 21 tokens"):
        check_exact(found, 21)


def test_means_are_over_the_positions_after_the_first_compaction():
    changed = torch.cat((OTHER[:24], LOGITS[24:]))
    found = trace(reading(changed), IDS, FULL, PROMPT, 4)
    after = summary(found, budget=16, interval=8)
    assert after["positions"] == TOKENS - 1 - 24
    assert after["kl"] == pytest.approx(0, abs=1e-6) and after["top1"] == 1
    assert after["attended_least"] == 25 and after["attended_most"] == TOKENS - 1
    assert summary(found, budget=15, interval=8)["kl"] > 0.01


def test_steps_that_do_not_make_up_the_text_are_refused():
    with pytest.raises(ValueError, match="step: a divisor of 40 - 8 tokens expected, got 5"):
        trace(reading(LOGITS), IDS, FULL, PROMPT, 5)


def test_kl_of_a_sure_prediction_is_its_surprise():
    sure = torch.tensor([[0.0, -200.0]])
    assert kl_divergence(sure, torch.tensor([[0.25, 0.75]]).log()).item() == pytest.approx(1.386294)


def test_the_interval_of_independent_values_is_that_of_the_normal_distribution():
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(3)) + 5
    low, high = bootstrap_interval(values)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 / 20_000**0.5, rel=0.15)
    assert bootstrap_interval(values) == [low, high]


def test_the_interval_of_values_that_go_together_is_as_wide_as_they_make_it():
    values = torch.randn(500, generator=torch.Generator().manual_seed(3)).repeat_interleave(16)
    low, high = bootstrap_interval(values)
    assert high - low == pytest.approx(2 * 1.96 / 500**0.5, rel=0.25)  # of 500 values, not 8,000
