"""What the large suites share: pools so big that offsets into them pass 2^31 elements, of which only a few are in use.

The suites hold one case for each tensor that can grow that far. They run on a GPU with enough memory and are skipped
elsewhere, with the reason; the expected output is reference.py's, rounded, as in the tiny suites.
"""

from __future__ import annotations

import torch
from torch import Tensor

PAST = 1 << 31  # elements: from here on a 32-bit offset has overflowed


def rows_past(row_elements: int, spare: int) -> int:
    """Rows of `row_elements` each that reach 2^31 elements, and `spare` more behind them."""
    return -(-PAST // row_elements) + spare


def poisoned_pool(shape: tuple[int, ...], device: str) -> Tensor:
    """A bf16 pool in which every slot is NaN until a case fills it."""
    return torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)


def far_pages(count: int, total: int, generator: torch.Generator) -> Tensor:
    """`count` page ids in random order, half from the very end of a pool of `total` pages and half from its start."""
    near = count // 2
    ids = torch.cat((torch.arange(near), torch.arange(total - (count - near), total)))
    return ids[torch.randperm(count, generator=generator)].to(torch.int32)
