"""The optimizer: warm-up, decay where it belongs, a bounded and finite gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.common.errors import InvalidArgument
from trainer.batch import Sample
from trainer.config import LossSpec, OptimizerSpec
from trainer.optimizer import Optimizer
from trainer.policy import Policy
from trainer.update import train_step


def one(spec: OptimizerSpec) -> tuple[torch.nn.Parameter, torch.nn.Parameter, Optimizer]:
    matrix, bias = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    return matrix, bias, Optimizer([matrix, bias], spec)


def test_the_learning_rate_warms_up_linearly_and_then_stays() -> None:
    matrix, _, optimizer = one(OptimizerSpec(learning_rate=1.0, warmup_steps=4))
    seen = []
    for _ in range(6):
        seen.append(optimizer.learning_rate)
        matrix.grad = torch.ones(2, 2)
        optimizer.step()
    assert seen == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert one(OptimizerSpec(learning_rate=1.0, warmup_steps=0))[2].learning_rate == 1.0


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    matrix, bias, optimizer = one(OptimizerSpec(learning_rate=0.1, weight_decay=0.5, warmup_steps=0))
    matrix.grad, bias.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    torch.testing.assert_close(matrix.detach(), torch.full((2, 2), 0.95))
    torch.testing.assert_close(bias.detach(), torch.ones(2))


def test_the_norm_is_returned_before_clipping_and_gradients_are_cleared() -> None:
    matrix, _, optimizer = one(OptimizerSpec(gradient_clip=1.0))
    matrix.grad = torch.full((2, 2), 3.0)
    assert optimizer.step() == pytest.approx(6.0)
    assert matrix.grad is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    matrix, _, optimizer = one(OptimizerSpec())
    matrix.grad = torch.full((2, 2), bad)
    with pytest.raises(FloatingPointError, match="nothing was changed"):
        optimizer.step()
    torch.testing.assert_close(matrix.detach(), torch.ones(2, 2))
    assert optimizer.steps_done == 0


def test_a_policy_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        Optimizer([torch.nn.Parameter(torch.ones(1), requires_grad=False)], OptimizerSpec())


def test_a_step_makes_good_rollouts_likelier_than_bad_ones(policy: Policy) -> None:
    prompt = np.array([1, 50, 60], np.uint32)
    pair = [
        Sample("g", prompt, np.array([70, 2], np.uint32), np.full(2, -5, np.float32), 1.0),
        Sample("g", prompt, np.array([80, 2], np.uint32), np.full(2, -5, np.float32), -1.0),
    ]
    optimizer = Optimizer(policy.model.parameters(), OptimizerSpec(learning_rate=1e-3, warmup_steps=0))
    before = [float(x[0]) for x in policy.sample_logprobs(pair, 1.0, 100)]
    train_step(policy, optimizer, pair, LossSpec(), temperature=1.0, micro_batch_tokens=100)
    after = [float(x[0]) for x in policy.sample_logprobs(pair, 1.0, 100)]
    assert after[0] - after[1] > before[0] - before[1] + 0.01


def test_a_batch_without_trained_tokens_is_an_error(policy: Policy) -> None:
    empty = Sample("g", np.ones(2, np.uint32), np.zeros(0, np.uint32), np.zeros(0, np.float32), 1.0)
    optimizer = Optimizer(policy.model.parameters(), OptimizerSpec())
    with pytest.raises(InvalidArgument, match="none of the 1 rollouts"):
        train_step(policy, optimizer, [empty], LossSpec(), temperature=1.0, micro_batch_tokens=100)
