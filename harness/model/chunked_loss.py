"""The cross-entropy of a linear layer without its logits: a part of the vocabulary at a time.

PyTorch 2.13 has F.linear_cross_entropy for this.  It is one operator that computes its gradients in
the forward pass: FLOP counters and memory trackers see nothing of it, and a compiler does not
compile it.  Here it is made of operators that every tool of the workshop sees, and that older
versions have too.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harness.base.ranges import trace_range

MOST_CHUNKS = 16  # each reads all tokens, and launches its own kernels


def chunk_size(vocab_size: int, hidden_dim: int) -> int:
    """Tokens of the vocabulary per chunk: hidden_dim, so that its logits are as large as the
    layer's input, or as many as make MOST_CHUNKS; never all."""
    return math.ceil(vocab_size / min(MOST_CHUNKS, max(2, math.ceil(vocab_size / hidden_dim))))


def chunked_loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the logits x [B, S, D] times weight [V, D], with labels [B, S].

    -log softmax at the label is the logarithm of the sum of exponentials, which adds up over
    chunks, less the logit of the label.  The backward pass computes the logits of each chunk again:
    one more matmul in exchange for the memory.
    """
    size = chunk_size(*weight.shape)
    with trace_range("lm_head"):
        parts = weight.split(size)  # views [C, D]
    again = {"use_reentrant": False, "preserve_rng_state": False}
    logs, at_labels = [], []  # of chunks, [B, S] each
    for number, part in enumerate(parts):
        log, at_label = checkpoint(loss_of_chunk, x, part, labels, number * size, **again)
        logs.append(log)
        at_labels.append(at_label)
    with trace_range("loss"):
        log_of_sum = torch.stack(logs).logsumexp(0)  # [B, S] of [chunks, B, S]
        return (log_of_sum - torch.stack(at_labels).sum(0)).mean()


def loss_of_chunk(x: Tensor, weight: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """The logarithm of the sum of a chunk's exponentials [B, S], and the logit of the label [B, S],
    0 where the label is in another chunk.

    The chunk is the tokens from `first` on, whose logits are x [B, S, D] times weight [C, D];
    labels are [B, S].

    A plain tuple, which the compiler takes as the output of a checkpointed function."""
    with trace_range("lm_head"):
        logits = F.linear(x, weight).float()  # [B, S, C]
    with trace_range("loss"):
        position, last = labels - first, len(weight) - 1  # of the label in the chunk
        at_label = logits.gather(-1, position.clamp(0, last).unsqueeze(-1)).squeeze(-1)  # [B, S]
        elsewhere = (position < 0) | (position > last)
        return logits.logsumexp(-1), at_label.masked_fill(elsewhere, 0.0)
