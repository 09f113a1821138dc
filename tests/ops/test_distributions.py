"""Distributions against those of torch, in float64."""

import torch

from tether.ops.distributions import Categorical, DiagonalGaussian, as_distribution


def test_gaussians_agree_with_torch():
    torch.manual_seed(0)
    means, deviations = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    ours = [DiagonalGaussian(mean, log_std) for mean, log_std in zip(means, deviations, strict=True)]
    theirs = [torch.distributions.Normal(mean, log_std.exp()) for mean, log_std in zip(means, deviations, strict=True)]
    actions = torch.randn(5, 3, dtype=torch.float64)
    torch.testing.assert_close(ours[0].logprobs(actions), theirs[0].log_prob(actions).sum(1))
    torch.testing.assert_close(ours[0].entropy(), theirs[0].entropy().sum(1))
    torch.testing.assert_close(ours[0].kl(ours[1]), torch.distributions.kl_divergence(*theirs).sum(1))


def test_choices_agree_with_torch():
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 4, dtype=torch.float64)
    ours = [Categorical(torch.log_softmax(each, 1)) for each in logits]
    theirs = [torch.distributions.Categorical(logits=each) for each in logits]
    actions = torch.tensor([0, 1, 2, 3, 0])
    torch.testing.assert_close(ours[0].logprobs(actions), theirs[0].log_prob(actions))
    torch.testing.assert_close(ours[0].entropy(), theirs[0].entropy())
    torch.testing.assert_close(ours[0].kl(ours[1]), torch.distributions.kl_divergence(*theirs))
    assert as_distribution(ours[0].log_p) == Categorical(ours[0].log_p)
