"""How far apart two next-token distributions are."""

import torch


def divergence(full: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence in nats of the distributions of logits [n, vocabulary], the full
    one's from the sparse one's, [n]."""
    wanted, found = full.log_softmax(-1), sparse.log_softmax(-1)
    return (wanted.exp() * (wanted - found)).sum(-1).clamp_(min=0.0)
