"""FLOPs and bytes of attention, by the shapes of its inputs, its mask and its window, of sequences
that are batched, packed into one, or in pages of a cache."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from analysis.work.cost import Cost, Inputs, parse_value

# Texts of the input that tells of a causal mask; the numbers are kinds of masks, 1 from the upper
# left corner.
CAUSAL = ("True", "1", "2")


# ---- What a query sees ---------------------------------------------------------------------------


class Window(NamedTuple):
    """Which keys a query sees, besides that of its own position."""

    left: float  # keys before it
    right: float  # keys after it
    top_left: bool  # the first query is beside the first key; else the last beside the last


def unmasked_pairs(queries: int, keys: int, window: Window) -> int:
    """How many scores are left, where a query sees the keys of its window."""
    beside = np.arange(queries)
    if not window.top_left:
        beside += keys - queries
    last = np.minimum(beside + window.right, keys - 1)
    first = np.maximum(beside - window.left, 0)
    return int(np.maximum(last - first + 1, 0).sum())


def unmasked_pairs_of_equal(queries: int, sequences: int, window: Window) -> int:
    """The same of queries in so many sequences of equal length, as near as that can be."""
    each, longer = divmod(queries, sequences)
    of_shorter = (sequences - longer) * unmasked_pairs(each, each, window)
    return of_shorter + longer * unmasked_pairs(each + 1, each + 1, window)


def window_of(inputs: Inputs, heads_first: bool) -> Window:
    mask = inputs.values.get("causal") or ""
    left, right = width_of(inputs.values.get("left")), width_of(inputs.values.get("right"))
    if mask in CAUSAL:
        right = 0
    return Window(left, right, top_left=heads_first or mask == "1")


def width_of(text: str | None) -> float:
    """Of a side of a window; without a number it has no end."""
    return int(text) if re.fullmatch(r"\d+", text or "") else math.inf


def longest_keys(inputs: Inputs, length: int, is_packed: bool) -> float:
    """How many keys a query has at most, windows apart.  length: of the keys that were passed."""
    pages = inputs.shapes.get("pages", [])
    if not is_packed and not pages:
        return length
    longest = inputs.values.get("longest_keys")
    if not pages:
        return parse_value(longest)
    in_pages = pages[1] * inputs.shapes["key"][1]
    return min(in_pages, parse_value(longest)) if longest else in_pages


# ---- Costs ---------------------------------------------------------------------------------------


def attention_cost(inputs: Inputs, heads_first: bool = False) -> Cost:
    """query [B, S, H, E] or, with heads first, [B, H, S, E], keys of length T -> the query's shape;
    the full S x T, causal or not, but of a window its width.

    Two matmuls forward; five backward, one of which recomputes the scores.  Of sequences packed
    into one ([tokens, H, E]) traces record the number and the longest, not the lengths: FLOPs are
    known where no query can have more keys than a sequence has on average, and else limited.  Of
    keys in pages of a cache only the longest is known.  What is needed at least is that of
    sequences of equal length, because it grows with their squares.
    """
    query, key, value = attention_shapes(inputs, heads_first)
    is_packed = len(query) == 3
    if is_packed and "longest_keys" not in inputs.names:
        return Cost()
    position = -3
    if heads_first and not is_packed:
        position = -2
    queries, length = query[position], key[position]
    window = window_of(inputs, heads_first)
    keys = min(longest_keys(inputs, length, is_packed), window.left + window.right + 1)
    per_key, again = query[-1] + value[-1], 0  # again: of these, for scores that it had before
    if "gradient" in inputs.names:
        per_key, again = 3 * query[-1] + 2 * value[-1], query[-1]
    flops = 2 * math.prod(query[:-1]) * keys * per_key
    if inputs.shapes.get("pages", []):
        return Cost(most_flops=flops, keys=keys)
    full = Cost(
        flops,
        attention_bytes(inputs, heads_first),
        keys=keys if keys < length else None,
        recomputed_flops=flops * again // per_key,
    )
    if not is_packed:
        per_query = 2 * math.prod(query[:-1]) // queries * per_key
        return replace(full, unmasked_flops=per_query * unmasked_pairs(queries, length, window))
    sequences = inputs.shapes["key_edges"][0] - 1
    if queries == length:
        pairs = unmasked_pairs_of_equal(queries, sequences, window)
        full = replace(full, unmasked_flops=2 * query[-2] * pairs * per_key)
    if keys <= length / sequences:
        return full
    return replace(full, flops=None, most_flops=flops, recomputed_flops=0)


def attention_bytes(inputs: Inputs, heads_first: bool) -> int | None:
    """The output is as large as the query; the backward pass moves all and their gradients."""
    query, key, value = attention_shapes(inputs, heads_first)
    size = inputs.sizes["query"]
    if not size:
        return None
    moved = (2 * math.prod(query) + math.prod(key) + math.prod(value)) * size
    return 2 * moved if "gradient" in inputs.names else moved


def attention_shapes(inputs: Inputs, heads_first: bool) -> tuple[list, list, list]:
    """Of query, key and value; of packed sequences without the batch, which is 1."""
    query, key, value = inputs.shapes["query"], inputs.shapes["key"], inputs.shapes["value"]
    if query[0] == 1 and inputs.shapes.get("key_edges", []) and not heads_first:
        return query[-3:], key[-3:], value[-3:]
    return query, key, value


def heads_first_attention_cost(inputs: Inputs) -> Cost:
    return attention_cost(inputs, heads_first=True)


def untold_attention_cost(inputs: Inputs) -> Cost:
    """vLLM's own operator: what it takes from a cache is not among the inputs."""
    return Cost()


def paged_attention_cost(inputs: Inputs) -> Cost:
    """query [sequences, H, E], keys and values in pages of a cache;
    no sequence is longer than the longest."""
    longest = parse_value(inputs.values["longest_keys"])
    return Cost(most_flops=4 * math.prod(inputs.shapes["query"]) * longest, keys=longest)


class BatchSums(NamedTuple):
    """Sums over the sequences of a batch."""

    queries: int
    keys: int
    squares: int  # of queries
    products: int  # of queries and keys


def batch_attention_cost(inputs: Inputs, sums: BatchSums) -> Cost | None:
    """Causal attention of a batch; None if these are inputs of something else, such as a part of
    the batch.  query [tokens, H, E], key [..., H of keys, E]; the cache is read too."""
    query, key, value = inputs.shapes["query"], inputs.shapes["key"], inputs.shapes["value"]
    if math.prod(query[:-2]) != sums.queries:
        return None
    per_score = 2 * query[-2] * (query[-1] + value[-1])
    of_keys = sums.keys * key[-2] * (key[-1] + value[-1])
    moved, query_size, key_size = None, inputs.sizes["query"], inputs.sizes["key"]
    if query_size and key_size:
        moved = sums.queries * per_score // 2 * query_size + of_keys * key_size
    masked_scores = (sums.squares - sums.queries) // 2
    return Cost(
        per_score * sums.products, moved, unmasked_flops=per_score * (sums.products - masked_scores)
    )


# ---- The names of an operator's inputs, in its order ---------------------------------------------

QKV = "query key value"
BACKWARD = "gradient query key value out logsumexp"
EDGES = "query_edges key_edges longest_queries longest_keys"
WINDOW = "dropout scale causal left right"
GRADIENTS = "query_gradient key_gradient value_gradient"
PAGED = "heads scale pages lengths"
FORWARD_3 = (
    "new_key new_value query_value out query_edges key_edges new_key_edges used_queries used_keys"
    " longest_queries longest_keys pages batch_of_cache left_padding rotary_cos rotary_sin"
    " rotary_lengths query_scale key_scale value_scale scale causal left right"
)
BACKWARD_3 = (
    "query_edges key_edges used_queries used_keys longest_queries longest_keys scale causal left"
    " right"
)
VARLEN = (
    f"{QKV} {EDGES} shortest dropout scale cap zero causal left right logsumexp random how out"
    " pages"
)
# Those of PyTorch without their namespace and the underscores around them.
ATTENTION_INPUTS: dict[Callable[[Inputs], Cost], dict[str, str]] = {
    attention_cost: {
        "flash_attention_forward": f"{QKV} {EDGES} dropout causal debug scale left right",
        "flash_attention_backward": (
            f"{BACKWARD} {EDGES} dropout causal seed unused scale left right"
        ),
        "flash_attn_3::fwd": f"{QKV} {FORWARD_3}",
        "_vllm_fa3_C::fwd": f"{QKV} {FORWARD_3}",
        "sgl_kernel::fwd": f"{QKV} {FORWARD_3}",
        "flash_attn_3::bwd": f"{BACKWARD} {GRADIENTS} {BACKWARD_3}",
        "flash_attn::_flash_attn_forward": f"{QKV} {WINDOW}",
        "aiter::_flash_attn_forward": f"{QKV} {WINDOW}",
        "aiter::mha_fwd": f"{QKV} {WINDOW}",
        "aiter::fmha_v3_fwd": f"{QKV} {WINDOW}",
        "flash_attn::_flash_attn_backward": f"{BACKWARD} {GRADIENTS} {WINDOW}",
        "aiter::mha_bwd": f"{BACKWARD} {WINDOW}",
        "aiter::fmha_v3_bwd": f"{BACKWARD} {WINDOW}",
        "flash_attn::_flash_attn_varlen_forward": (
            f"{QKV} {EDGES} {WINDOW} cap slopes softmax pages"
        ),
        "flash_attn::_flash_attn_varlen_backward": f"{BACKWARD} {GRADIENTS} {EDGES} {WINDOW}",
        "aiter::mha_varlen_fwd": VARLEN,
        "aiter::fmha_v3_varlen_fwd": VARLEN,
        "_vllm_fa2_C::varlen_fwd": (
            f"{QKV} out query_edges key_edges used_keys left_padding pages slopes longest_queries"
            " longest_keys dropout scale zero causal left right"
        ),
        "efficient_attention_forward": f"{QKV} bias {EDGES} dropout causal",
        "efficient_attention_backward": (
            f"gradient {QKV} bias out {EDGES} logsumexp dropout seed offset causal"
        ),
    },
    heads_first_attention_cost: {
        "cudnn_attention_forward": f"{QKV} bias {EDGES} logsumexp dropout causal",
        "scaled_dot_product_cudnn_attention": f"{QKV} bias logsumexp dropout causal",
        "scaled_dot_product_cudnn_attention_backward": (
            f"{BACKWARD} seed offset bias {EDGES} dropout causal"
        ),
        "scaled_dot_product_flash_attention_for_cpu": f"{QKV} dropout causal",
        "scaled_dot_product_flash_attention_for_cpu_backward": f"{BACKWARD} dropout causal",
    },
    untold_attention_cost: {
        "vllm::unified_attention": QKV,
        "vllm::unified_attention_with_output": QKV,
    },
    paged_attention_cost: {
        "_C::paged_attention_v1": f"out {QKV} {PAGED} page_size longest_keys",
        "_C::paged_attention_v2": f"out sums maxima parts {QKV} {PAGED} page_size longest_keys",
        "_rocm_C::paged_attention": (
            f"out sums maxima parts {QKV} {PAGED} query_edges page_size longest_keys"
        ),
    },
}
