"""The simulator of the C500's programming model: builtins against plain arithmetic, checks against planted faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from simulated import FOLDER, load, runner
from torch import Tensor

from harness import devices, languages
from harness.verdict import KernelFault, Verdict

LANES = torch.arange(64)
ROWS, COLUMNS = LANES % 16, LANES // 16


def builtin(which: int, x: Tensor | None = None, i: Tensor | None = None) -> Tensor:
    """Run kernel `which` of builtins.cu; its 4096 words as int32."""
    x = torch.zeros(4096) if x is None else x
    i = torch.zeros(4096, dtype=torch.int32) if i is None else i
    y = torch.zeros(4096, dtype=torch.int32)
    runner("builtins", "wave64", ("x", "i", "y"))(x, i, y, which)
    return y


def operands(depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The flat input of an MMA kernel, and its X (16, depth), Y (16, depth), C (16, 16)."""
    x = torch.zeros(4096)
    generator = torch.Generator().manual_seed(depth)
    for start, count in ((0, 16 * depth), (1024, 16 * depth), (2048, 256)):
        x[start : start + count] = torch.randn(count, generator=generator)
    return (
        x,
        x[: 16 * depth].view(16, depth),
        x[1024 : 1024 + 16 * depth].view(16, depth),
        x[2048:2304].view(16, 16).clone(),
    )


@pytest.mark.parametrize(
    ("which", "depth", "dtype"),
    [
        (0, 16, torch.bfloat16),
        (1, 16, torch.float16),
        (3, 4, torch.float32),
        (4, 8, None),
        (5, 4, torch.float64),
    ],
    ids=["bf16", "f16", "f32", "tf32", "f64"],
)
def test_mma_is_x_times_y_transposed_plus_c(which: int, depth: int, dtype: torch.dtype | None) -> None:
    x, left, right, c = operands(depth)
    got = builtin(which, x)[:256].view(torch.float32).view(16, 16).double()
    if dtype is None:  # tf32: 10 bits of fraction
        left, right = ((t.view(torch.int32) + 0x1000 & -0x2000).view(torch.float32) for t in (left, right))
    else:
        left, right = left.to(dtype), right.to(dtype)
    want = left.double() @ right.double().T + c.double()
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)
    # The same fragments in another layout are another product: operands exchanged, or k in another order on one side.
    assert not torch.allclose(got, (right.double() @ left.double().T) + c.double(), atol=0.1)
    assert not torch.allclose(got, left.double().flip(1) @ right.double().T + c.double(), atol=0.1)


def test_mma_of_int8_is_exact() -> None:
    i = torch.zeros(4096, dtype=torch.int32)
    generator = torch.Generator().manual_seed(3)
    i[:256] = torch.randint(-128, 128, (256,), generator=generator)
    i[1024:1280] = torch.randint(-128, 128, (256,), generator=generator)
    i[2048:2304] = torch.randint(-(1 << 20), 1 << 20, (256,), generator=generator)
    want = i[:256].view(16, 16).long() @ i[1024:1280].view(16, 16).long().T + i[2048:2304].view(16, 16)
    assert torch.equal(builtin(2, i=i)[:256].view(16, 16).long(), want)


def test_mma_needs_the_whole_wave() -> None:
    with pytest.raises(KernelFault, match=r"builtins\.cu:\d+: .*the block has no lane 32 and 31 more of this wave"):
        builtin(12)


def values(seed: int = 0) -> Tensor:
    return torch.randint(-(1 << 30), 1 << 30, (4096,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def pick(a: Tensor, source: Tensor, otherwise: Tensor | int | None = None) -> Tensor:
    """a[source], and `otherwise` (the lane's own value without it) where source is -1."""
    own = a if otherwise is None else torch.as_tensor(otherwise, dtype=a.dtype).expand(a.shape)
    return torch.where(source >= 0, a[source.clamp(min=0)], own)


def test_shuffles_of_64_lanes() -> None:
    i = values()
    a = i[:64]
    got = builtin(6, i=i).view(64, 64)
    segment = LANES & ~7
    want = [a[LANES ^ offset] for offset in (32, 16, 8, 4, 2, 1)]
    want += [
        a[(LANES * 7 + 3) & 63],
        a[(LANES & ~15) + 5],
        pick(a, torch.where(LANES >= 3, LANES - 3, -1)),
        pick(a, torch.where(LANES < 24, LANES + 40, -1)),
        pick(a, torch.where(segment <= LANES - 2, LANES - 2, -1)),
        pick(a, torch.where(segment + 7 >= LANES + 2, LANES + 2, -1)),
        a[LANES ^ 48],
        a[LANES * 5 & 63],
        a[(LANES - 1) & 63],
        a[42].expand(64),
        a[0].expand(64),
        torch.where(LANES == 9, -1, a),
        torch.where(LANES >= 10, a[10], 0),
    ]
    for n, row in enumerate(want):
        assert torch.equal(got[n], row.int()), n


def test_row_moves() -> None:
    i = values(1)
    a, row, at = i[:64], LANES & ~15, LANES & 15
    left, right = torch.where(at + 3 < 16, LANES + 3, -1), torch.where(at >= 2, LANES - 2, -1)
    want = [
        a[LANES ^ 3],
        pick(a, left),
        pick(a, left, 0),
        pick(a, right, 0),
        a[row + (at - 8) % 16],
        a[row + 15 - at],
        a[row + 5],
        torch.where((LANES // 16) % 2 == 0, a[row], -7),
    ]
    got = builtin(7, i=i).view(64, 64)
    for n, expected in enumerate(want):
        assert torch.equal(got[n], expected.int()), n


def test_votes_and_reductions_take_all_64_lanes() -> None:
    i = values(2)
    i[:64:3] %= 200
    a = [int(v) for v in i[:64]]
    got = builtin(8, i=i).view(torch.int64)[: 64 * 12].view(64, 12)

    def mask(chosen: list[bool]) -> int:
        bits = sum(1 << lane for lane, yes in enumerate(chosen) if yes)
        return bits - (1 << 64) if bits >= 1 << 63 else bits

    total = sum(a) & 0xFFFFFFFF
    total = total - (1 << 32) if total >= 1 << 31 else total
    either = 0
    for v in a:
        either |= v
    for lane in range(64):
        want = [
            mask([bool(v & 1) for v in a]),
            1,
            1,
            total,
            min(a),
            max(v & 0xFFFFFFFF for v in a),
            either,
            mask([v & 3 == a[lane] & 3 for v in a]),
            mask([(v & 0xFFFFFFFF) > 100 for v in a]),
            mask([v < 0 for v in a]),
            (1 << 40) - 1 if lane < 40 else 0,
            mask([n >= 48 for n in range(64)]) if lane >= 48 else 0,
        ]
        assert got[lane].tolist()[3] & 0xFFFFFFFF == want[3] & 0xFFFFFFFF
        want[3] = int(got[lane][3])
        assert got[lane].tolist() == want, lane


def permute_bytes(high: int, low: int, selector: int, per_byte: int) -> int:
    both = high << 32 | low
    picks = [selector >> per_byte * n & (1 << per_byte) - 1 for n in range(4)]
    table = {12: 0x00, 13: 0xFF}
    return sum((table[p] if p in table else both >> 8 * p & 0xFF) << 8 * n for n, p in enumerate(picks))


def test_arithmetic_builtins() -> None:
    generator = torch.Generator().manual_seed(4)
    x, i = torch.zeros(4096), values(5)
    x[:192] = torch.randn(192, generator=generator)
    a, b, c = (x[64 * n : 64 * n + 64].double() for n in range(3))
    u = [int(v) & 0xFFFFFFFF for v in i[:64]]
    w = [int(v) & 0xFFFFFFFF for v in i[64:128]]
    got = builtin(9, x, i)[: 64 * 24].view(24, 64)
    floats = got.view(torch.float32).double()
    exact = [a * b + c, b * c + a, b * c, a + c, 2**a, 1 / a, a.abs() ** -0.5, a.exp(), a / b, b.abs() ** -0.5]
    for n, want in enumerate(exact):
        assert torch.allclose(floats[n], want, rtol=1e-6), n
    as_bits = [
        [permute_bytes(p, q, 0x05040100, 8) for p, q in zip(u, w, strict=True)],  # u is the high word
        [permute_bytes(p, q, 0x07060302, 8) for p, q in zip(u, w, strict=True)],
        [permute_bytes(p, q, 0x0C0D0700, 8) for p, q in zip(u, w, strict=True)],
        [permute_bytes(q, p, 0x7531, 4) for p, q in zip(u, w, strict=True)],  # CUDA's own: u is the low word
        [p >> 5 & 0x1FF for p in u],
        None,
        None,
        [(p * q + 7) >> 32 for p, q in zip(u, w, strict=True)],
        [
            bin(p).count("1") + 100 * (32 - p.bit_length()) + 10000 * ((q & -q).bit_length())
            for p, q in zip(u, w, strict=True)
        ],
        [int(f"{p:032b}"[::-1], 2) for p in u],
        [p * q >> 32 for p, q in zip(u, w, strict=True)],
    ]
    for n, words in enumerate(as_bits):
        if words is not None:
            assert [int(v) & 0xFFFFFFFF for v in got[10 + n]] == words, n
    assert floats[15].tolist() == [float(p >> 16 & 0xFF) for p in u]
    packed = torch.stack([x[:64], x[64:128]], 1).bfloat16().view(torch.int32).reshape(-1)
    assert torch.equal(got[16], packed)
    for n, scaled in ((21, x[:64] * 1000.0), (22, x[64:128] * 1e-6)):  # ordinary and subnormal halves
        assert torch.equal(got[n], scaled.half().view(torch.int16).int() & 0xFFFF)
    assert torch.equal(floats[23], (x[:64].bfloat16() * x[64:128].bfloat16()).double())


def test_loads_and_stores_of_all_widths() -> None:
    i = values(6)
    got = builtin(10, i=i)[:2048].view(64, 32)
    source = i[:256].view(64, 4)
    octets = source.contiguous().view(torch.uint8).view(64, 16).int()
    lanes = LANES.int()
    assert torch.equal(got[:, 0], octets[:, 1])
    assert torch.equal(got[:, 1], octets[:, 2] + 256 * octets[:, 3])
    assert torch.equal(got[:, 2], source[:, 1])
    assert torch.equal(got[:, 3], source[:, 3])
    assert torch.equal(got[:, 4], source[:, 3])
    assert torch.equal(got[:, 5], torch.where(lanes % 2 == 0, source[:, 2], 0))
    assert torch.equal(got[:, 6], torch.where(lanes % 2 == 0, source[:, 0], 77))
    assert torch.equal(got[:, 7], torch.where(lanes < 20, lanes, -1))
    assert torch.equal(got[:, 8], torch.where(lanes <= 20, lanes, -1))  # -l >= -20, signed
    assert torch.equal(got[:, 12:16], source)
    assert torch.equal(got[:, 16:18], source[:, 2:])
    assert not got[:, 18].any()


def test_barriers_of_all_kinds() -> None:
    i = values(7) % 1000
    want = 4 * i[:128].flip(0) + 6 + 1000 * 43
    assert torch.equal(builtin(11, i=i)[:128], want)


FAULTS: dict[int, tuple[Verdict, str]] = {
    # kernel of faults.cu: verdict, words of the message; the line is the one marked "planted"
    1: (
        Verdict.OUT_OF_BOUNDS,
        r"read_past_end, block \(0,0,0\), thread \(63,0,0\): reads 4 bytes at byte 4096 of x,",
    ),
    2: (Verdict.OUT_OF_BOUNDS, r"thread \(0,0,0\): writes 4 bytes at byte -4 of y, which has 4096 bytes"),
    3: (Verdict.UNINITIALISED_READ, "reads byte 256 of y"),
    4: (Verdict.UNINITIALISED_READ, "reads byte 0 of a cudaMalloc block"),
    5: (Verdict.OUT_OF_BOUNDS, "misaligned access to byte 4 of x.* must be a multiple of 16"),
    6: (Verdict.RACE, "of shared tile, which thread .* with no barrier in between"),
    7: (Verdict.RACE, "of shared tile, which .* with no barrier in between"),
    8: (Verdict.RACE, "of shared tile, which .* with no __syncwarp or other wave operation in between"),
    9: (
        Verdict.UNINITIALISED_READ,
        "reads byte 128 of dynamic shared memory, which no thread of the block has written",
    ),
    10: (Verdict.OUT_OF_BOUNDS, "byte 256 of dynamic shared memory, of which the launch asked for 256 bytes"),
    11: (Verdict.OUT_OF_BOUNDS, "byte 4000 of shared tile, which has 256 bytes"),
    12: (
        Verdict.RUNTIME_ERROR,
        "lane 32 is not in its own mask 0xffffffff, a full mask of 32 lanes on a wave of 64",
    ),
    13: (
        Verdict.RUNTIME_ERROR,
        "__shfl_xor_sync is divergent: .*lane 32 and 31 more waits at __syncthreads in line",
    ),
    14: (Verdict.RUNTIME_ERROR, "lane 0 reads lane 20, which does not take part"),
    15: (Verdict.RUNTIME_ERROR, "divergent barrier: 28 of 128 threads of the block have exited"),
    16: (Verdict.RUNTIME_ERROR, "divergent barrier: other threads of the block wait at __syncthreads in line"),
    17: (Verdict.RESOURCE_LIMIT, "66560 bytes of shared memory; a C500 has 65536 per block"),
    18: (Verdict.RESOURCE_LIMIT, "asks for 66560 bytes of dynamic shared memory; a C500 has 65536 per block"),
    19: (Verdict.RESOURCE_LIMIT, "a block of 1025x1x1 threads cannot be launched"),
    20: (Verdict.RUNTIME_ERROR, "deadlock: the thread spins on memory that nobody in its block will change"),
    21: (Verdict.RACE, r"block \((0|1),0,0\) of the same launch wrote another value"),
    23: (Verdict.OUT_OF_BOUNDS, "outside every tensor and allocation"),
    24: (Verdict.RUNTIME_ERROR, "integer division by zero"),
    25: (Verdict.RESOURCE_LIMIT, "65 threads per block, but __launch_bounds__ promises at most 64"),
    26: (Verdict.RUNTIME_ERROR, r"thread \(3,0,0\): assertion failed: threadIdx.x < 3"),
    27: (Verdict.RESOURCE_LIMIT, "local variables exceed 256 KiB"),
    28: (Verdict.OUT_OF_BOUNDS, "writes 32 bytes at byte 4080 of y"),
    30: (Verdict.RESOURCE_LIMIT, "a grid of 0x1x1 blocks cannot be launched"),
    32: (Verdict.OUT_OF_BOUNDS, r"\(in the kernel: line \d+\): through_helper, .* byte 20000 of x"),
    31: (Verdict.OUT_OF_BOUNDS, "reads 4 bytes at address 0x0, outside every tensor"),
}


def faulty(which: int) -> Tensor:
    """Run kernel `which` of faults.cu twice, with two orders of waves and blocks; its output."""
    # In the middle of larger ones: what lies 4000 bytes behind a shared variable must not be a tensor by chance.
    x, y = (torch.zeros(1 << 16)[1 << 15 :][:1024] for _ in range(2))
    x.copy_(torch.arange(1024.0))
    for _ in range(2):
        runner("faults", "wave64", ("x", "y"), ("y",))(x, y, which)
    return y


@pytest.mark.parametrize("which", FAULTS)
def test_planted_fault_is_found_and_named(which: int) -> None:
    verdict, words = FAULTS[which]
    with pytest.raises(KernelFault, match=words) as caught:
        faulty(which)
    assert caught.value.verdict is verdict, caught.value.message
    source = (FOLDER / "faults.cu").read_text(encoding="utf-8").splitlines()
    for line in [n for n, text in enumerate(source, 1) if text.endswith(f"// planted {which}")]:
        assert caught.value.message.startswith((f"faults.cu:{line}: ", f"faults.cu:{line} (")), caught.value.message


@pytest.mark.parametrize(
    ("which", "want"),
    [
        (0, torch.arange(1024.0)),
        (22, torch.cat([torch.ones(64), torch.zeros(960)])),  # two blocks store one value
        (29, torch.cat([torch.ones(256), torch.zeros(768)])),  # threads store to bytes of one word
        (33, torch.full((1024,), 4.0)),  # launches, one after another, store other values
    ],
)
def test_what_is_no_fault_is_let_through(which: int, want: Tensor) -> None:
    assert torch.equal(faulty(which), want)


def test_a_fault_is_named_with_its_line_wherever_the_file_lies(tmp_path: Path) -> None:
    folder = tmp_path / 'my "核" dir (discriminator 3): 7'
    folder.mkdir()
    text = (
        "#include <cuda_runtime.h>\n__global__ void past_the_end(float* y) {\n  y[threadIdx.x + 1] = 1;\n}\n"
        'extern "C" void run_kernel(float* y) {\n  past_the_end<<<1, 64>>>(y);\n}\n'
    )
    (folder / "内核 1.cu").write_text(text, encoding="utf-8")
    submission = languages.load("cuda", folder / "内核 1.cu", ("y",), devices.pick("cpu"), "wave64", {})
    with pytest.raises(KernelFault) as caught:
        submission.run([torch.zeros(64)])
    assert caught.value.message.startswith("内核 1.cu:3: past_the_end, block (0,0,0), thread (63,0,0): writes 4 bytes")


def test_a_fault_ends_its_run_only() -> None:
    with pytest.raises(KernelFault):
        faulty(1)
    assert torch.equal(faulty(0), torch.arange(1024.0))


def warp32(which: int, x: Tensor) -> Tensor:
    y = torch.zeros(1024, dtype=torch.int32)
    runner("warp32", "warp32", ("x", "y"))(x, y, which)
    return y


def test_fragments_of_mma_sync() -> None:
    x = torch.randn(1024, generator=torch.Generator().manual_seed(8)).bfloat16()
    a, b = x[:256].view(16, 16).double(), x[512:640].view(8, 16).double()
    want = (a @ b.T + 1).float()
    got = [warp32(which, x)[:128].view(torch.float32).view(16, 8) for which in (0, 1, 3)]
    assert torch.allclose(got[0], want, atol=1e-4)
    assert not torch.allclose(got[1], want, atol=0.1)  # registers 1 and 2 of A exchanged
    assert torch.equal(got[2], got[0])  # the same fragments through ldmatrix
    transposed = x[512:640].view(16, 8).double()  # B itself lies in memory
    assert torch.allclose(warp32(4, x)[:128].view(torch.float32).view(16, 8), (a @ transposed + 1).float(), atol=1e-4)


def test_fragments_of_int8_mma_sync() -> None:
    x = torch.randint(-128, 128, (2048,), generator=torch.Generator().manual_seed(9)).to(torch.int8)
    a, b = x[:512].view(16, 32).long(), x[1024:1280].view(8, 32).long()
    assert torch.equal(warp32(2, x)[:128].view(16, 8).long(), a @ b.T + 1)


def test_async_copies_arrive_when_waited_for() -> None:
    x = torch.arange(512, dtype=torch.int32)
    got = warp32(5, x)
    back = torch.arange(31, -1, -1, dtype=torch.int32)
    assert torch.equal(got[:32], 4 * back + 1)
    assert torch.equal(got[32:64], 128 + 4 * back)
    assert not got[64:96].any()  # 4 of 16 bytes copied, the rest zero
    assert torch.equal(got[96:128], torch.arange(32, dtype=torch.int32) + (-128 * 5 + 127 * 4 - 1 * 3 + 1 * 2))
    with pytest.raises(KernelFault) as caught:
        warp32(6, x)
    assert caught.value.verdict is Verdict.RACE  # read before the copy that a later wait completes


def idiom(which: int, mode: str, x: Tensor) -> Tensor:
    y = torch.zeros(4096)
    runner("idioms", mode, ("x", "y"))(x, y, which)
    return y


@pytest.mark.parametrize("mode", ["wave64", "warp32"])
def test_public_idioms_run_unchanged(mode: str) -> None:
    lanes = 64 if mode == "wave64" else 32
    x = torch.randn(4096, generator=torch.Generator().manual_seed(10))
    assert idiom(0, mode, x)[0].item() == pytest.approx(x[:4000].double().sum().item(), abs=1e-3)
    product = x[:1024].view(32, 32).double() @ x[2048:3072].view(32, 32).double()
    assert torch.allclose(idiom(1, mode, x)[:1024].view(32, 32).double(), product, atol=1e-4)
    assert torch.allclose(idiom(2, mode, x)[:256].double(), x[:256].double().cumsum(0), atol=1e-4)
    whole = torch.randint(0, 16, (4096,), generator=torch.Generator().manual_seed(11))
    counts = idiom(3, mode, whole.float()).view(torch.int32)[:16]
    assert torch.equal(counts.long(), torch.bincount(whole, minlength=16))
    for shift in range(3):  # the tickets wrap, the blocks take other turns, the workspace gets other values
        moved = x + shift
        assert idiom(4, mode, moved)[0].item() == pytest.approx(moved[: 20 * lanes].double().sum().item(), abs=1e-3)
    assert torch.equal(idiom(5, mode, x)[:8], x[:128].view(8, 16).max(1).values)
    shifted = x[:64].double() + 0.5
    polynomial = 1 + 2 * shifted + 3 * shifted**2 + 4 * shifted**3
    assert torch.allclose(idiom(6, mode, x)[:64].double(), polynomial, rtol=1e-5)
    shared = 65536 if mode == "wave64" else 232448  # of a C500's block; of a Hopper's
    assert idiom(7, mode, x)[:8].tolist() == [lanes, 104, shared, 1024, 16384, 16384, 0, 0]


def test_counters() -> None:
    submission = load("idioms", "wave64", ("x", "y"), (), True)
    x, y = torch.ones(4096), torch.zeros(4096)
    submission.drain()
    submission.run([x, y, 1])
    counts: dict[str, Any] = submission.drain()
    assert list(counts["kernels"]) == ["tiled_gemm"]
    # 4 blocks of 256 threads, 2 tiles each: 2 loads per tile and thread, 1 store per thread, of 4 bytes.
    assert (counts["launches"], counts["blocks"], counts["mma"], counts["barriers"]) == (1, 4, 0, 16)
    assert counts["global_bytes_read"] == 4 * 256 * 2 * 2 * 4
    assert counts["global_bytes_written"] == 4 * 256 * 4
    # A wave's 64 threads are 4 rows of 16 floats, each row in a 128-byte line of its own.
    assert counts["global_transactions"] == 4 * 4 * 4 * (2 * 2 + 1)
    # A block reads 16 whole rows of 32 floats of a and half of all 32 rows of b, and writes 16 half rows of y.
    base = x.data_ptr()
    lines = [
        {(base + 4 * (32 * row + i)) // 128 for i in range(32 * 16)}
        | {(base + 4 * (2048 + 32 * k + col + i)) // 128 for k in range(32) for i in range(16)}
        for row in (0, 16)
        for col in (0, 16)
    ]
    assert counts["global_lines_read"] == sum(map(len, lines))
    assert counts["global_lines_written"] == 4 * 16
    assert counts["shared_bytes_written"] == 4 * 256 * 2 * 2 * 4
    assert counts["shared_bytes_read"] == 4 * 256 * 2 * 16 * 2 * 4
    assert counts["shared_accesses"] == 4 * 4 * 2 * (2 + 16 * 2)
    assert submission.drain() == {}


def test_bank_conflicts_are_those_of_the_layout() -> None:
    submission = load("conflicts", "wave64", ("y",), (), True)
    found = []
    for stride in (1, 2, 32, 33):
        submission.drain()
        submission.run([torch.zeros(64), stride])
        found.append(submission.drain()["bank_conflicts"])
    # 64 lanes store one word each: two passes of 32 lanes, and 32 banks. Stride 32: all lanes of a pass in one bank.
    assert found == [0, 2 * 1, 2 * 31, 0]
