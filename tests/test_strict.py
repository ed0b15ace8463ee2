"""The strict error rule: just inside and just outside of every bound it has."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from harness import strict
from harness.verdict import Verdict

UNIT = 2.0**-8  # bfloat16


def attention(
    rows: int, keys: int, uniform: bool = False, drop: float = 0.0, normalised: bool = False
) -> dict[str, Tensor]:
    """Plain attention on seeded data, D = 64: {"truth", "honest", "kernel"}; the kernel may drop its first keys."""
    generator = torch.Generator().manual_seed(rows + keys)
    draw = torch.rand if uniform else torch.randn
    q, k, v = (draw(n, 64, generator=generator).to(torch.bfloat16).double() for n in (rows, keys, keys))
    scores = q @ k.T / 8

    def rounded(p: Tensor) -> Tensor:
        return p.to(torch.bfloat16).double()

    p = (scores - scores.amax(-1, keepdim=True)).exp()
    honest = (rounded(p) @ v / p.sum(-1, keepdim=True)).to(torch.bfloat16)
    kept = p.clone()
    kept[:, : int(drop * keys)] = 0
    total = kept.sum(-1, keepdim=True)
    kernel = rounded(kept / total) @ v if normalised else rounded(kept * 0.7) @ v / (total * 0.7)
    return {"truth": p / p.sum(-1, keepdim=True) @ v, "honest": honest, "kernel": kernel.to(torch.bfloat16)}


def compare(out: Tensor, truth: Tensor, honest: Tensor) -> strict.Agreement:
    return strict.compare("output", out, truth, honest)


def one_row(error: float, honest_error: float = 2.0**-6, rows: int = 4096) -> tuple[Tensor, Tensor, Tensor]:
    """Output, truth, honest of 8 columns: truth 1, one element off by `error`, honest off by its own in each row."""
    truth = torch.ones(rows, 8, dtype=torch.float64)
    honest = truth.clone()
    honest[:, 3] += honest_error
    out = honest.clone()
    out[17, 5] = 1 + error
    return out.to(torch.bfloat16), truth, honest.to(torch.bfloat16)


def test_an_element_just_inside_its_bound_passes_and_just_outside_fails() -> None:
    bound = strict.MULTIPLE * 2.0**-6  # 0.0625; bfloat16 can tell 1.0625 from its neighbours, 2^-7 apart
    inside = compare(*one_row(bound))
    assert inside.finding is None
    assert inside.margin == 1.0
    outside = compare(*one_row(bound + 2.0**-7))
    assert outside.finding is not None
    assert outside.margin == pytest.approx(1.125)
    assert outside.finding.verdict is Verdict.WRONG_ANSWER
    assert outside.finding.detail == (
        "output[17, 5] = 1.07031, expected 1: the error 0.0703 is 1.12 times what is allowed; "
        "1 of 32768 elements are beyond"
    )


def test_the_error_may_be_below_as_well_as_above() -> None:
    assert compare(*one_row(-0.0625)).finding is None
    assert compare(*one_row(-0.0703125)).finding is not None


def test_the_bound_of_an_exact_row_is_its_rounding() -> None:
    # honest is right to the bit here, so the floor alone allows 4 * u/2 = 2^-7 of the row's largest element
    allowed, too_much = one_row(2.0**-7, 0.0), one_row(2.0**-6, 0.0)
    assert compare(*allowed).margin == 1.0
    assert compare(*allowed).finding is None
    assert compare(*too_much).finding is not None


def test_a_bound_belongs_to_its_row() -> None:
    out, truth, honest = one_row(0.0)
    honest[16] += 100  # the neighbour's honest error excuses nothing
    out[17, 5] = 2
    assert compare(out, truth, honest).finding is not None


def test_rows_that_must_be_zero_must_be_zero() -> None:
    truth = torch.zeros(2, 4, dtype=torch.float64)
    honest, out = truth.to(torch.bfloat16), truth.to(torch.bfloat16)
    assert compare(out, truth, honest) == strict.Agreement(0.0, None)
    out[1, 2] = 1e-30
    assert compare(out, truth, honest).finding is not None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_must_be_where_the_reference_has_it(bad: float) -> None:
    out, truth, honest = one_row(0.0)
    out[40, 1] = bad
    out[41, 7] = bad
    agreement = compare(out, truth, honest)
    assert agreement.finding is not None
    assert agreement.finding.verdict is Verdict.NON_FINITE
    assert agreement.finding.detail.startswith(f"output[40, 1] = {bad:.6g}, expected 1; 2 of 32768 elements")
    truth[40, 1] = honest[40, 1] = bad
    truth[41, 7] = honest[41, 7] = bad
    assert compare(out, truth, honest).finding is None
    out[41, 7] = 1.0
    assert compare(out, truth, honest).finding is not None


def test_infinities_of_the_wrong_sign_are_wrong() -> None:
    out, truth, honest = one_row(0.0)
    out[3, 3], truth[3, 3], honest[3, 3] = math.inf, -math.inf, -math.inf
    finding = compare(out, truth, honest).finding
    assert finding is not None
    assert finding.verdict is Verdict.NON_FINITE


def test_nan_is_told_before_a_wrong_value() -> None:
    out, truth, honest = one_row(5.0)
    out[4000, 7] = math.nan
    finding = compare(out, truth, honest).finding
    assert finding is not None
    assert finding.verdict is Verdict.NON_FINITE


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.uint8, torch.int64], ids=str)
def test_integers_must_be_equal(dtype: torch.dtype) -> None:
    truth = torch.tensor([[0, 1, 1], [1, 0, 1]])
    out = truth.to(dtype)
    assert compare(out, truth, out) == strict.Agreement(0.0, None)
    wrong = out.clone()
    wrong[1, 1] = 1
    agreement = compare(wrong, truth, out)
    assert agreement.margin == math.inf
    assert agreement.finding is not None
    assert agreement.finding.detail.endswith("; 1 of 6 differ")
    assert agreement.finding.detail.startswith("output[1, 1] = ")


@pytest.mark.parametrize(
    ("truth", "honest"),
    [
        (torch.zeros(3), torch.zeros(4, dtype=torch.bfloat16)),
        (torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)),
        (torch.zeros(4), torch.zeros(4)),
        (torch.zeros(4), torch.full((4,), math.nan, dtype=torch.bfloat16)),
        (torch.zeros(4), torch.tensor([0, 0, math.inf, 0], dtype=torch.bfloat16)),
    ],
)
def test_a_contract_that_does_not_fit_is_an_error_not_a_verdict(truth: Tensor, honest: Tensor) -> None:
    with pytest.raises(ValueError, match="honest"):
        compare(torch.zeros(4, dtype=torch.bfloat16), truth, honest)


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (5, 2), (64, 33), (512, 700)])
@pytest.mark.parametrize("normalised", [False, True])
def test_honest_kernels_pass(rows: int, keys: int, uniform: bool, normalised: bool) -> None:
    data = attention(rows, keys, uniform, normalised=normalised)
    agreement = compare(data["kernel"], data["truth"], data["honest"])
    assert agreement.finding is None
    assert agreement.margin < 0.95


def test_dropped_keys_are_far_beyond() -> None:
    data = attention(256, 1024, drop=0.05)
    agreement = compare(data["kernel"], data["truth"], data["honest"])
    assert agreement.margin > 20
    assert agreement.finding is not None


def test_the_mean_square_sees_what_no_single_element_shows() -> None:
    data = attention(512, 2048, uniform=True, drop=0.06)
    agreement = compare(data["kernel"], data["truth"], data["honest"])
    assert agreement.finding is not None
    assert "the root mean square error is" in agreement.finding.detail
    within = attention(512, 2048, uniform=True)
    assert compare(within["kernel"], within["truth"], within["honest"]).margin < 0.5


@pytest.mark.parametrize(("factor", "passes"), [(0.97, True), (1.03, False)])
def test_the_mean_square_just_inside_and_just_outside(factor: float, passes: bool) -> None:
    rows = 1024
    truth = torch.ones(rows, 64, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(rows, 64, generator=generator, dtype=torch.float64) * 0.01
    # float16 adds next to no rounding of its own to noise of this size
    honest = (truth + noise).to(torch.float16)
    out = (truth + noise * strict.rms_multiple(rows) * factor).to(torch.float16)
    agreement = compare(out, truth, honest)
    assert (agreement.finding is None) == passes
    assert agreement.margin == pytest.approx(1 + (factor - 1) * 1.625 / 0.625, rel=0.01)


def test_small_outputs_get_more_room_for_chance() -> None:
    assert strict.rms_multiple(1) == 5.5
    assert strict.rms_multiple(64) == 2.0
    assert strict.rms_multiple(10**6) == pytest.approx(1.504)


def test_blocks_change_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    out, truth, honest = one_row(0.07)
    odd = out.clone()
    odd[4000, 2] = odd[9, 0] = math.nan
    answers = []
    for step in (1 << 22, 100):
        monkeypatch.setattr(strict, "_STEP", step)
        answers.append((compare(out, truth, honest), compare(odd, truth, honest), strict.first_non_finite(odd)))
    assert answers[0][1:] == answers[1][1:]
    assert answers[0][0].finding == answers[1][0].finding
    assert answers[0][0].margin == pytest.approx(answers[1][0].margin)
    assert answers[0][2] == (2, 72)


def test_first_non_finite_knows_integers_and_emptiness() -> None:
    assert strict.first_non_finite(torch.tensor([1, 2])) is None
    assert strict.first_non_finite(torch.empty(0, 5)) is None
    assert strict.first_non_finite(torch.tensor(math.inf)) == (1, 0)


def test_an_empty_output_agrees() -> None:
    empty = torch.empty(0, 4, dtype=torch.bfloat16)
    assert compare(empty, empty.double(), empty).finding is None


def test_fakes_that_would_pass_are_named() -> None:
    data = attention(32, 40)
    truth, honest = {"output": data["truth"]}, {"output": data["honest"]}
    q, k = torch.randn(32, 64), torch.randn(40, 64)
    assert strict.fakes(truth, honest, [q, k, 3]) == []
    copied = {"output": k[:32].double()}
    assert strict.fakes(copied, {"output": k[:32].to(torch.bfloat16)}, [q, k, 3]) == ["copy of argument 1"]
    for value, names in ((0.0, ["zeros"]), (1.0, ["ones"]), (0.25, [])):
        flat = torch.full((4, 8), value, dtype=torch.float64)
        weak = strict.fakes({"output": flat}, {"output": flat.to(torch.bfloat16)}, [])
        assert weak == [*names, "mean of the reference"]


def test_a_fake_must_pass_for_all_outputs() -> None:
    data = attention(32, 40)
    zero = torch.zeros(4, 4, dtype=torch.float64)
    truth = {"output": data["truth"], "lse": zero}
    honest = {"output": data["honest"], "lse": zero.to(torch.bfloat16)}
    assert strict.fakes(truth, honest, []) == []


@pytest.mark.parametrize(("flat", "shape", "text"), [(0, (), ""), (5, (6,), "[5]"), (23, (2, 3, 4), "[1, 2, 3]")])
def test_place(flat: int, shape: tuple[int, ...], text: str) -> None:
    assert strict.place(flat, shape) == text
