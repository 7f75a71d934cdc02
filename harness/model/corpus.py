"""The tokens of a corpus: drawn from a model of language, or the bytes of a text file."""

import functools
import math
import os

import numpy as np

from harness.base.errors import UserError


@functools.lru_cache(maxsize=1)
def synthetic_corpus(vocab_size: int, length: int, seed: int) -> np.ndarray:
    """A token stream with something to learn: `length` tokens of a bigram model.

    Token frequencies follow the Zipf-Mandelbrot law of natural text, 1 / (rank + 2.7).  Four times
    out of five the next token is one of eight fixed successors of the current one, the first of
    them most likely; otherwise it is drawn from the frequencies.

    A study asks for that of each of its runs, which is the same: it is kept, and read alone.
    """
    rng = np.random.default_rng(seed)
    # Permuted, so that a token's id does not reveal its rank.
    frequency = 1.0 / (2.7 + rng.permutation(vocab_size))
    frequency /= frequency.sum()
    successors = rng.choice(vocab_size, size=(vocab_size, 8), p=frequency)
    preference = 1.0 / np.arange(1, 9)
    chains = 256  # independent sequences, generated in parallel and concatenated
    steps = math.ceil(length / chains)
    fresh = rng.choice(vocab_size, size=(steps, chains), p=frequency)
    choice = rng.choice(8, size=(steps, chains), p=preference / preference.sum())
    # The rest is unpredictable: the loss cannot fall to 0.
    follows = rng.random((steps, chains)) < 0.8
    tokens = np.empty((steps, chains), dtype=np.int32)
    tokens[0] = fresh[0]
    for i in range(1, steps):
        tokens[i] = np.where(follows[i], successors[tokens[i - 1], choice[i]], fresh[i])
    corpus = tokens.T.reshape(-1)[:length]
    corpus.flags.writeable = False
    return corpus


def text_corpus(path: str, vocab_size: int, seq_len: int) -> np.ndarray:
    """The bytes of a text file as tokens.  Memory-mapped, because a corpus may be larger than the
    memory."""
    try:
        size_bytes = os.path.getsize(path)
        if size_bytes < seq_len + 1:
            raise UserError(
                f"--data {path}: {size_bytes} bytes, but one sample of --seq-len {seq_len} needs"
                f" {seq_len + 1}; use a longer file or a shorter --seq-len",
                2,
            )
        tokens = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise UserError(f"--data {path}: {error.strerror}; use a text file", exit_code=2) from error
    if not tokens[: 1 << 16].all():
        raise UserError(
            f"--data {path}: contains NUL bytes, so it is not text; use a text file", exit_code=2
        )
    if vocab_size < 256:  # else there is a token for any byte
        largest = int(tokens.max())
        if largest >= vocab_size:
            raise UserError(
                f"--vocab-size {vocab_size}: {path} has the byte {largest}; use 256 or more with"
                " --data",
                2,
            )
    return tokens
