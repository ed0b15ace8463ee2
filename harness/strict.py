"""The strict error rule: how far an output may be from the ground truth, measured by what honest arithmetic costs.

`reference` is the ground truth (float64 or float32); `honest` is the same computation with bfloat16 operands and
float32 accumulation, rounded to the output's dtype. A row is the last dimension of an output. Two rules, and the margin
that is printed is the larger of the two "used / allowed":

* every element:  |out - reference| <= MULTIPLE * e(row),
  e(row) = max(row max |honest - reference|, u/2 * row max |reference|), u the unit roundoff of the dtype (bf16 2^-8).
* all of them:    rms(out - reference) <= rms_multiple(rows) * rms(honest - reference), each row divided by its
  rms(reference) first, so that rows of different size count alike. Its margin counts from honest's own error: 0 for an
  output that errs like honest, 1 at the limit.

Why 4. Take errors that are Gaussian with deviation s: the largest of 1e8 is 5.7 s. The row maximum of honest over 64 to
512 columns lies at 2.4 s to 3.1 s, in one row of a thousand below 1.7 s. Allowing 4 * 1.7 s = 6.8 s even in such a row
leaves honest kernels alone without any smoothing over neighbouring rows; 3 would not (5.1 s). Tried on 3600 random
cases (4 to 256 rows, 1 to 2048 keys, D 64 to 256, flat and peaked softmax): flash kernels with tiles of 16 and 64,
split KV, row sums of rounded or unrounded P use at most 0.61 of what is allowed and 1.06 times honest's rms; P divided
by its sum before it is rounded, the worst that still deserves the name honest, 0.99 and 1.39 times. Wrong kernels are
not near: zeros are at about 128, 5 % dropped keys of random V at 37 and more, one dropped key of 16384 at 4.

Why the second rule. With V uniform in [0, 1) the rounding of the output (up to 2^-9 near 0.5) hides 5 % dropped keys of
1024 in every single element, but not in the mean square of all (2.7 times honest's).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.guard import Difference, Finding, differences
from harness.verdict import Verdict

MULTIPLE = 4.0
_STEP = 4 << 20  # elements compared at a time: a step needs about ten float64 copies of them, 320 MB
# Bound at import: a submission that replaces these in torch changes nothing here.
_amax, _where, _isfinite, _isnan = torch.amax, torch.where, torch.isfinite, torch.isnan


def rms_multiple(rows: int) -> float:
    """Allowed ratio of root mean squares for an output of that many rows.

    1.5 for many (see above); a row counts as one sample at worst (one dominant key: its rounding shifts the whole row),
    which makes the ratio of two such means scatter by about 1/sqrt(rows).
    """
    return 1.5 + 4.0 / math.sqrt(max(1, rows))


class Agreement(NamedTuple):
    """`margin`: largest used / allowed, infinite for what no bound excuses; `finding`: None when all is well."""

    margin: float
    finding: Finding | None


def place(flat: int, shape: Sequence[int]) -> str:
    """ "[2, 0, 17]" for a flat index into a tensor of that shape; "" for a 0-dim tensor."""
    index: list[int] = []
    for size in reversed(shape):
        flat, here = divmod(flat, size)
        index.insert(0, here)
    return str(index) if index else ""


def first_non_finite(tensor: Tensor) -> Difference | None:
    """NaN and infinite elements of a floating-point tensor; None when there are none, or it holds integers."""
    if not tensor.is_floating_point():
        return None
    count, first = 0, -1
    for begin, (part,) in _rows(tensor):
        odd = ~_isfinite(part.reshape(-1))
        here = int(odd.sum())
        if here and first < 0:
            first = begin + int(odd.to(torch.uint8).argmax())
        count += here
    return Difference(count, first) if count else None


def _exact(name: str, out: Tensor, reference: Tensor) -> Agreement:
    wanted = reference.to(out.dtype).contiguous()
    wrong = differences(out, wanted)
    if wrong is None:
        return Agreement(0.0, None)
    got, expected = (tensor.reshape(-1)[wrong.first].item() for tensor in (out, wanted))
    detail = (
        f"{name}{place(wrong.first, out.shape)} = {got}, expected {expected}; {wrong.number} of {out.numel()} differ"
    )
    return Agreement(math.inf, Finding(Verdict.WRONG_ANSWER, detail))


def _rows(*tensors: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
    """Blocks of whole rows in float64, each with the flat index of its first element."""
    columns = tensors[0].shape[-1] if tensors[0].ndim else 1
    if not tensors[0].numel():
        return
    flat = [tensor.reshape(-1, columns) for tensor in tensors]
    step = max(1, _STEP // columns)
    for begin in range(0, flat[0].shape[0], step):
        yield begin * columns, [tensor[begin : begin + step].double() for tensor in flat]


class _Tally:
    """What the blocks of one output add up to."""

    def __init__(self, unit: float, tiny: float) -> None:
        self.unit, self.tiny = unit, tiny
        self.non_finite: Difference | None = None
        self.worst, self.worst_at, self.worst_error, self.beyond = 0.0, 0, 0.0, 0
        self.square, self.honest_square = 0.0, 0.0

    def add(self, begin: int, out: Tensor, reference: Tensor, honest: Tensor) -> None:
        """One block, (rows, columns) in float64. Raises ValueError for an honest value that makes no bound."""
        odd = (~_isfinite(out) | ~_isfinite(reference)) & (out != reference) & ~(_isnan(out) & _isnan(reference))
        count = int(odd.sum())
        if count:
            first = begin + int(odd.reshape(-1).to(torch.uint8).argmax())
            before = self.non_finite or Difference(0, first)
            self.non_finite = Difference(before.number + count, before.first)
        usable = _isfinite(out) & _isfinite(reference)
        zero = torch.zeros((), dtype=torch.float64, device=out.device)
        size = _where(_isfinite(reference), reference.abs(), zero)
        error = _where(usable, (out - reference).abs(), zero)
        slack = _where(_isfinite(reference), (honest - reference).abs(), zero)
        if not bool(_isfinite(slack).all()):  # an infinite one would excuse its whole row
            raise ValueError("honest() is not finite where reference() is")
        allowed = _amax(slack, -1).clamp(min=self.tiny).maximum(self.unit / 2 * _amax(size, -1)) * MULTIPLE
        used = error / allowed.unsqueeze(-1)
        top = float(used.max())
        if top > self.worst:
            at = int(used.argmax())
            self.worst, self.worst_at, self.worst_error = top, begin + at, float(error.reshape(-1)[at])
        self.beyond += int((used > 1).sum())
        scale = size.square().mean(-1)
        live = scale > 0
        scale = scale[live]
        # The floor is for rows that honest gets exactly right (one visible key): a rounding costs 0.4 u on average.
        floor = (self.unit / 4) ** 2
        self.square += float((error.square().mean(-1)[live] / scale).sum())
        self.honest_square += float((slack.square().mean(-1)[live] / scale).clamp(min=floor).sum())

    def rms_ratio(self) -> float:
        """Root mean square error in units of honest's."""
        return math.sqrt(self.square / self.honest_square) if self.honest_square else 0.0


def compare(name: str, out: Tensor, reference: Tensor, honest: Tensor) -> Agreement:
    """Hold one output against its ground truth; all three of one shape, `out` and `honest` of one dtype.

    NON_FINITE when NaN and infinities are not exactly where the reference has them (judged first), else WRONG_ANSWER
    with the worst element. Integers and bool must be equal. Raises ValueError when reference or honest do not fit the
    output: a fault of the contract, not of the submission.
    """
    if not out.shape == reference.shape == honest.shape or out.dtype != honest.dtype:
        raise ValueError(
            f"{name} is {out.dtype} {tuple(out.shape)}, but reference() gives {tuple(reference.shape)} "
            f"and honest() {honest.dtype} {tuple(honest.shape)}"
        )
    if not out.is_floating_point():
        return _exact(name, out, reference)
    info = torch.finfo(out.dtype)
    tally = _Tally(info.eps / 2, float(info.tiny))
    for begin, (part, truth, slack) in _rows(out, reference, honest):
        tally.add(begin, part, truth, slack)
    return _sentence(name, out, reference, tally)


def _sentence(name: str, out: Tensor, reference: Tensor, tally: _Tally) -> Agreement:
    def value(tensor: Tensor, flat: int) -> float:
        return float(tensor.reshape(-1)[flat])

    if tally.non_finite is not None:
        count, at = tally.non_finite
        detail = (
            f"{name}{place(at, out.shape)} = {value(out, at)}, expected {value(reference, at):.6g}; "
            f"{count} of {out.numel()} elements are not finite where they should be, or the reverse"
        )
        return Agreement(math.inf, Finding(Verdict.NON_FINITE, detail))
    rows = out.numel() // out.shape[-1] if out.ndim and out.numel() else 1
    ratio, limit = tally.rms_ratio(), rms_multiple(rows)
    margin = max(tally.worst, (ratio - 1) / (limit - 1))
    if tally.worst > 1:
        at = tally.worst_at
        detail = (
            f"{name}{place(at, out.shape)} = {value(out, at):.6g}, expected {value(reference, at):.6g}: the error "
            f"{tally.worst_error:.3g} is {tally.worst:.3g} times what is allowed; "
            f"{tally.beyond} of {out.numel()} elements are beyond"
        )
        return Agreement(margin, Finding(Verdict.WRONG_ANSWER, detail))
    if margin > 1:
        detail = (
            f"{name}: the root mean square error is {ratio:.3g} times that of honest arithmetic, allowed {limit:.3g}"
        )
        return Agreement(margin, Finding(Verdict.WRONG_ANSWER, detail))
    return Agreement(margin, None)


def _fake_outputs(args: Sequence[Any], truth: Tensor, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Outputs that took no computation: constants, the truth's mean, every input in the output's shape."""
    like: dict[str, Callable[[], Tensor]] = {
        "zeros": lambda: torch.zeros_like(truth),
        "ones": lambda: torch.ones_like(truth),
        "mean of the reference": lambda: torch.full_like(truth, float(truth.double().mean())),
    }
    for label, make in like.items():
        yield label, make().to(dtype)
    for index, argument in enumerate(args):
        if isinstance(argument, Tensor) and argument.numel() >= truth.numel():
            yield (
                f"copy of argument {index}",
                argument.reshape(-1)[: truth.numel()].reshape(truth.shape).to(device=truth.device, dtype=dtype),
            )


def fakes(reference: Mapping[str, Tensor], honest: Mapping[str, Tensor], args: Sequence[Any]) -> list[str]:
    """Fakes that would pass the strict rule for every output of a case: a case with any is too weak to test with.

    `args` are the inputs to try as copies; leave the outputs out or they could hold the answer.
    """
    passing: dict[str, int] = {}
    for name, truth in reference.items():
        for label, fake in _fake_outputs(args, truth, honest[name].dtype):
            if compare(name, fake, truth, honest[name]).finding is None:
                passing[label] = passing.get(label, 0) + 1
    return [label for label, count in passing.items() if count == len(reference)]
