"""What the tiles of a prefill kernel need, for the search spaces of both prefill tasks (see tasks/*/tuning.py).

Registers are the least that a thread holds at once: accumulator, scores, P as bf16, and Q where it stays in registers;
addresses and the running statistics come on top. All of them are counted in 32-bit registers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Needs = Callable[[Any, int], Mapping[str, int]]
Blocks = Callable[[Any, Mapping[str, Sequence[int]]], int]


def cuda(dim_qk: int, dim_vo: int, keys: int, waves: int = 4) -> Needs:
    """Rows of `keys` head dimensions, then (frags, BLOCK_N, q_in_registers, kv_tiles): as struct Config of the .cu."""

    def needs(row: Any, lanes: int) -> dict[str, int]:
        frags, block_n, q_in_registers, kv_tiles = row[keys:]
        threads, block_m = waves * lanes, waves * 16 * frags
        q, kv = block_m * dim_qk * 2, kv_tiles * block_n * (dim_qk + dim_vo) * 2
        kept = 16 * frags * (dim_vo + block_n + (dim_qk // 2 if q_in_registers else 0))
        return {"shared": max(q, kv if q_in_registers else q + kv), "threads": threads, "registers": kept // lanes}

    return needs


def triton(dim_qk: int, dim_vo: int) -> Needs:
    """(BLOCK_M, BLOCK_N, num_warps, num_stages). With one stage Q is in registers and a tile in no more than one place;
    with more, Q lies in shared memory beside the stages, which is where wgmma reads it."""

    def needs(row: Any, lanes: int) -> dict[str, int]:
        block_m, block_n, warps, stages = row
        threads, kv = warps * lanes, block_n * (dim_qk + dim_vo) * 2
        kept = block_m * (dim_vo + block_n + block_n // 2 + (dim_qk // 2 if stages == 1 else 0))
        shared = kv if stages == 1 else block_m * dim_qk * 2 + stages * kv
        return {"shared": shared, "threads": threads, "registers": kept // threads}

    return needs


def tilelang(dim_qk: int, dim_vo: int) -> Needs:
    """(BLOCK_M, BLOCK_N, threads, num_stages). Stages bring a loading warpgroup, which is not counted: it has 24
    registers per thread, and what it leaves of a multiprocessor's goes to the one block that then fits."""

    def needs(row: Any, lanes: int) -> dict[str, int]:
        block_m, block_n, threads, stages = row
        shared = (block_m * dim_qk + max(1, stages) * block_n * (dim_qk + dim_vo)) * 2
        kept = block_m * (dim_vo + block_n + block_n // 2)
        return {"shared": shared, "threads": threads, "registers": kept // threads}

    return needs


def row_tiles(block_m: Callable[[Any], int], kv: str, kv_heads: int) -> Blocks:
    """Row tiles of packed (token, head of the group) rows. `kv`: the argument with KV heads at position `kv_heads`."""

    def blocks(row: Any, shapes: Mapping[str, Sequence[int]]) -> int:
        tokens, heads, _ = shapes["q"]
        pairs = (len(shapes["qo_indptr"]) and shapes["qo_indptr"][0] - 1) * shapes[kv][kv_heads]
        rows = tokens * heads // pairs  # of a sequence and KV head, on average
        return pairs * -(-rows // block_m(row))

    return blocks
