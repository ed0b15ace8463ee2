"""Wrong kernels as functions of a case's arguments: what a tiny suite must be able to tell from the truth.

Attention fakes work on the sequences that a task's reference hands to `attention.exact`, so one list serves the four
tasks; others change the arguments and call the reference. All compute in float64, to show their mistake alone.
`Problem.tiled` is the opposite: right, but in other steps than the yardstick, and to be accepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.common import attention

Args = list[Any]
Fake = Callable[["Problem"], Tensor]


@dataclasses.dataclass
class Problem:
    """One case of a task, and, for attention, the sequences that its reference sees."""

    module: ModuleType
    args: Args
    out_shape: torch.Size = dataclasses.field(init=False)
    sequences: list[attention.Sequence] = dataclasses.field(init=False, default_factory=list)
    causal: bool = False
    scale: float = 0.0

    def __post_init__(self) -> None:
        def record(shape: torch.Size, sequences: Any, causal: bool, scale: float, scores: int) -> Tensor:
            self.sequences, self.causal, self.scale = list(sequences), causal, scale
            return torch.zeros(shape)

        self.out_shape = self.args[self.module.ARGUMENTS.index(self.module.OUTPUTS[0])].shape
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "exact", record)
            self.module.reference(*self.args)

    def truth(self, **changes: Any) -> Tensor:
        """The reference, with the named arguments replaced."""
        args = [changes.get(name, arg) for name, arg in zip(self.module.ARGUMENTS, self.args, strict=True)]
        result: Tensor = self.module.reference(*args)[self.module.OUTPUTS[0]]
        return result

    def honest(self) -> Tensor:
        """The yardstick."""
        result: Tensor = self.module.honest(*self.args)[self.module.OUTPUTS[0]]
        return result

    def __getitem__(self, name: str) -> Any:
        return self.args[self.module.ARGUMENTS.index(name)]

    def attend(
        self,
        mask: Callable[[Tensor, Tensor, int, int], Tensor] | None = None,
        head_map: Callable[[int, int, int], int] = lambda h, heads, kv_heads: h // (heads // kv_heads),
        weigh: Callable[[Tensor], Tensor] = lambda s: torch.softmax(s, -1),
        scale: float | None = None,
        rows: int | None = None,
    ) -> Tensor:
        """Attention with one thing changed.

        mask(i, j, q_len, kv_len) -> bool (q_len, kv_len), what is seen; None: what the contract says. weigh turns
        masked scores (heads, q_len, kv_len) into P. Rows from `rows` on stay 0.
        """
        out = torch.zeros(self.out_shape, dtype=torch.float64)
        flat = out.view(-1, *self.out_shape[-2:])
        for where, q, k, v in self.sequences:
            q_len, heads, kv_len, kv_heads = q.shape[0], q.shape[1], *k.shape[:2]
            if not q_len * kv_len:
                continue
            i, j = torch.arange(q_len)[:, None], torch.arange(kv_len)
            seen = (mask or self.contract_mask)(i, j, q_len, kv_len).expand(q_len, kv_len)
            for kv in range(kv_heads):
                served = [h for h in range(heads) if head_map(h, heads, kv_heads) == kv]
                s = q[:, served].double().transpose(0, 1) @ k[:, kv].double().T * (scale or self.scale)
                p = weigh(s.masked_fill(~seen, -torch.inf))  # (heads served, q_len, kv_len)
                o = (p @ v[:, kv].double()).masked_fill(~seen.any(-1)[:, None], 0)
                flat[where][:rows, served] = o.transpose(0, 1)[:rows]
        return out

    def contract_mask(self, i: Tensor, j: Tensor, q_len: int, kv_len: int) -> Tensor:
        """Bottom-right causal, or everything."""
        return j <= kv_len - q_len + i if self.causal else (j >= 0) & (i >= 0)

    def tiled(self, block: int, splits: int) -> Tensor:
        """A right kernel in bf16: online softmax over tiles of `block` keys, `splits` partial results combined."""
        out = torch.zeros(self.out_shape, dtype=torch.float32)
        flat = out.view(-1, *self.out_shape[-2:])
        for where, q, k, v in self.sequences:
            if not q.shape[0] * k.shape[0]:
                continue
            group = q.shape[1] // k.shape[1]
            i, j = torch.arange(q.shape[0])[:, None], torch.arange(k.shape[0])
            hidden = ~self.contract_mask(i, j, q.shape[0], k.shape[0]).expand(q.shape[0], k.shape[0])
            for h in range(q.shape[1]):
                s = (q[:, h].float() @ k[:, h // group].float().T * (self.scale * 1.4426950408889634)).masked_fill(
                    hidden, -torch.inf
                )  # exp2 instead of exp, the scale folded
                parts = zip(s.chunk(splits, -1), v[:, h // group].chunk(splits), strict=True)
                partial = [_online(own, values.float(), block) for own, values in parts]
                top = torch.stack([m for m, _, _ in partial]).amax(0)
                weights = [(m - top).exp2().nan_to_num(0) for m, _, _ in partial]
                total = sum(w * total for w, (_, total, _) in zip(weights, partial, strict=True))
                o = sum(w * o for w, (_, _, o) in zip(weights, partial, strict=True)) / total
                flat[where][:, h] = o.nan_to_num(0)
        return out.to(torch.bfloat16)

    def without(self, dropped: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Attention that misses the keys j for which dropped(j, kv_len)."""
        return self.attend(lambda i, j, q, kv: self.contract_mask(i, j, q, kv) & ~dropped(j, kv))


def _online(s: Tensor, v: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row maximum, row sum and unnormalised output of scores (rows, keys), tile by tile."""
    top, total = torch.full((len(s), 1), -torch.inf), torch.zeros(len(s), 1)
    o = torch.zeros(len(s), v.shape[1])
    for tile, values in zip(s.split(block, -1), v.split(block), strict=True):
        new = torch.maximum(top, tile.amax(-1, keepdim=True))
        p, shrink = (tile - new).exp2().nan_to_num(0), (top - new).exp2().nan_to_num(0)
        total = total * shrink + p.sum(-1, keepdim=True)
        o = o * shrink + p.to(torch.bfloat16).float() @ values
        top = new
    return top, total, o


def _uniform(s: Tensor) -> Tensor:
    seen = torch.isfinite(s).double()
    return seen / seen.sum(-1, keepdim=True)


def _no_maximum(s: Tensor) -> Tensor:
    p = s.float().exp()
    return (p / p.sum(-1, keepdim=True)).double()


def _no_rescale(s: Tensor) -> Tensor:
    """Online softmax over tiles of 16 keys that forgets to scale down what it has when the maximum rises."""
    top = torch.full_like(s[..., :1], -torch.inf)
    parts = []
    for tile in s.split(16, -1):
        top = torch.maximum(top, tile.amax(-1, keepdim=True))
        parts.append((tile - top).exp().nan_to_num(0))
    p = torch.cat(parts, -1)
    return p / p.sum(-1, keepdim=True)


ATTENTION: dict[str, Fake] = {
    "zeros": lambda p: torch.zeros(p.out_shape, dtype=torch.float64),
    "ones": lambda p: torch.ones(p.out_shape, dtype=torch.float64),
    "prefix mean of V": lambda p: p.attend(weigh=_uniform),
    "mean of V": lambda p: p.attend(lambda i, j, q, kv: (j >= 0) & (i >= 0), weigh=_uniform),
    "last key dropped": lambda p: p.without(lambda j, kv: j == kv - 1),
    "first key dropped": lambda p: p.without(lambda j, kv: j == 0),
    "5 % of the keys dropped": lambda p: p.without(lambda j, kv: j % 20 == 19),
    "tail of kv past 16 dropped": lambda p: p.without(lambda j, kv: j >= kv // 16 * 16),
    "tile of 64 keys dropped": lambda p: p.without(lambda j, kv: j // 64 == 1),
    "KV heads interleaved": lambda p: p.attend(head_map=lambda h, heads, kv: h % kv),
    "KV head 0 for all": lambda p: p.attend(head_map=lambda h, heads, kv: 0),
    "maximum not subtracted": lambda p: p.attend(weigh=_no_maximum),
    "accumulator not rescaled": lambda p: p.attend(weigh=_no_rescale),
    "scale 10 % off": lambda p: p.attend(scale=p.scale * 0.9),
}
PREFILL: dict[str, Fake] = {
    "top-left causal": lambda p: p.attend(lambda i, j, q, kv: (j <= i) if p.causal else (i >= 0) & (j >= 0)),
    "mask off by one": lambda p: p.attend(lambda i, j, q, kv: p.contract_mask(i - 1, j, q, kv)),
    "causal flag inverted": lambda p: p.truth(causal=int(not p.causal)),
    "rows past 128 unwritten": lambda p: p.attend(rows=128),
    "wrong Q head": lambda p: p.truth(q=p["q"].roll(1, 1)),
}


def _spill(p: Problem) -> Tensor:
    """One token more than the last page holds, where the page has room."""
    return p.truth(last_page_len=(p["last_page_len"] + 1).clamp(max=p["page_block_size"]))


PAGED: dict[str, Fake] = {
    "page table ignored": lambda p: p.truth(kv_indices=torch.arange(len(p["kv_indices"]), dtype=torch.int32)),
    "padding slot read": _spill,
    "last page full": lambda p: p.truth(last_page_len=torch.full_like(p["last_page_len"], p["page_block_size"])),
    "keys as values": lambda p: p.truth(kv_data=p["kv_data"][:, [0, 0]]),
}
MLA: dict[str, Fake] = {
    "rope part ignored": lambda p: p.truth(q_pe=torch.zeros_like(p["q_pe"])),
    "scale 1 / sqrt(512)": lambda p: p.attend(scale=512**-0.5),
    "page table ignored": lambda p: p.truth(kv_indices=torch.arange(len(p["kv_indices"]), dtype=torch.int32)),
    "reserved slot read": lambda p: p.truth(
        kv_lens=(p["kv_lens"] + 1).minimum(p["kv_indptr"].diff() * p["page_size"]).int()
    ),
    "wrong Q head": lambda p: p.truth(q_nope=p["q_nope"].roll(1, 1), q_pe=p["q_pe"].roll(1, 1)),
}
KVCACHE: dict[str, Fake] = {
    "page table ignored": lambda p: p.truth(
        block_table=torch.arange(p["block_table"].numel(), dtype=torch.int32).view_as(p["block_table"])
    ),
    "padding slot read": lambda p: p.truth(cache_seqlens=p["cache_seqlens"] + 1),
    "capacity for length": lambda p: p.truth(cache_seqlens=torch.full_like(p["cache_seqlens"], p["seqlen_k"])),
    "last page dropped": lambda p: p.truth(
        cache_seqlens=(p["cache_seqlens"] - 1) // p["page_block_size"] * p["page_block_size"]
    ),
    "wrong Q head": lambda p: p.truth(q=p["q"].roll(1, 2)),
}


def _moe_partial(p: Problem) -> Tensor:
    """The last 32 products of every sum are missing."""
    a = p["a"].clone()
    a[:, -32:] = 0
    return p.truth(a=a)


def _moe_int16(p: Problem) -> Tensor:
    """Sums that saturate at 16 bits."""
    scale = p.truth(a=torch.eye(1, p["a"].shape[1], dtype=torch.int8).expand_as(p["a"]), b_col_major=_ones(p))
    return (p.truth() / scale).clamp(-(2**15), 2**15 - 1) * scale


def _ones(p: Problem) -> Tensor:
    return torch.ones_like(p["b_col_major"])


def _last_tile_empty(p: Problem) -> Tensor:
    out = p.truth()
    out[-128:] = 0
    return out


MOE: dict[str, Fake] = {
    "zeros": lambda p: torch.zeros(p.out_shape),
    "rows gathered by token_ids": lambda p: p.truth(a=p["a"][p["token_ids"].long()]),
    "next expert": lambda p: p.truth(expert_ids=(p["expert_ids"] + 1) % len(p["b_col_major"])),
    "experts sorted": lambda p: p.truth(expert_ids=p["expert_ids"].sort().values),
    "tile number for expert": lambda p: p.truth(
        expert_ids=torch.arange(len(p["expert_ids"]), dtype=torch.int32) % len(p["b_col_major"])
    ),
    "scale_b of expert 0": lambda p: p.truth(scale_b=p["scale_b"][:1].expand_as(p["scale_b"])),
    "scale_a shifted by a row": lambda p: p.truth(scale_a=p["scale_a"].roll(1)),
    "weights ignored": lambda p: p.truth(moe_weights=torch.ones_like(p["moe_weights"])),
    "end of K missed": _moe_partial,
    "sums saturated at int16": _moe_int16,
    "b transposed": lambda p: p.truth(
        b_col_major=p["b_col_major"].transpose(1, 2).reshape(p["b_col_major"].shape).contiguous()
    ),
    "last tile unwritten": _last_tile_empty,
}
FAKES: dict[str, dict[str, Fake]] = {
    "ragged_prefill": ATTENTION | PREFILL,
    "paged_prefill": ATTENTION | PREFILL | PAGED,
    "mla_decode": {name: fake for name, fake in ATTENTION.items() if "KV head" not in name} | MLA,
    "kvcache_decode": ATTENTION | KVCACHE,
    "fused_moe": MOE,
}
