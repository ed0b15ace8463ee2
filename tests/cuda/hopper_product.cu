// C = A B^T for the tests of the Hopper model: A (64, k), B (64, k) bf16, C (64, 64) float, k a multiple of 64. One
// warpgroup loads by TMA through two places, one multiplies. `fault`: what to do wrong, 0 for nothing.
#include "../../tasks/common/hopper.cuh"

constexpr int kStages = 2, kTile = 64 * 128;
enum Fault {
    kNone,
    kNoWait,
    kEarlyRelease,
    kParity,
    kArrivals,
    kFewerBytes,
    kMoreBytes,
    kAlignment,
    kStep,
    kSmall,
    kLarge
};

__global__ void __launch_bounds__(256)
    product(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, float* c, int steps,
            int fault) {
    extern __shared__ char shared[];
    uint64_t *const full = reinterpret_cast<uint64_t*>(shared + kStages * 2 * kTile), *const empty = full + kStages;
    const auto tile = [&](int step) { return shared + step % kStages * 2 * kTile; };
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s)
            hopper::barrier_init(full + s, 1), hopper::barrier_init(empty + s, fault == kArrivals ? 2 : 1);
        hopper::barriers_ready();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        if (threadIdx.x != 0) return;
        for (int step = 0; step < steps; ++step) {
            uint64_t* const barrier = full + step % kStages;
            hopper::barrier_wait(empty + step % kStages, (step / kStages & 1) ^ (fault == kParity ? 0 : 1));
            hopper::barrier_expect(barrier, fault == kFewerBytes ? kTile : fault == kMoreBytes ? 3 * kTile : 2 * kTile);
            hopper::tma_load(tile(step), &a_map, barrier, 64 * step, 0);
            hopper::tma_load(tile(step) + kTile + (fault == kAlignment ? 64 : 0), &b_map, barrier, 64 * step, 0);
        }
        return;
    }
    float sums[32];
    for (int step = 0; step < steps; ++step) {
        if (fault != kNoWait) hopper::barrier_wait(full + step % kStages, step / kStages & 1);
        const uint64_t a = hopper::descriptor(tile(step)), b = hopper::descriptor(tile(step) + kTile);
        hopper::wgmma_fence();
        for (int i = 0; i < 4; ++i)
            hopper::wgmma<false>(sums, a + (fault == kStep ? 4 : 2) * i, b + 2 * i, step > 0 || i > 0);
        hopper::wgmma_commit();
        if (fault == kEarlyRelease) {
            if (threadIdx.x == 128) hopper::barrier_arrive(empty + step % kStages);
            hopper::wgmma_wait<1>();
            continue;
        }
        hopper::wgmma_wait<0>();
        if (threadIdx.x == 128) hopper::barrier_arrive(empty + step % kStages);
    }
    hopper::wgmma_wait<0>();
    const int thread = threadIdx.x - 128, row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    for (int i = 0; i < 32; ++i) c[(row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + column + i % 2] = sums[i];
}

extern "C" void run_kernel(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c, int64_t k, int64_t fault) {
    CUtensorMap a_map, b_map;
    const cuuint64_t columns = k;
    if (!hopper::make_map<2>(&a_map, a, 2, {columns, 64}, {64, 64})) return;
    if (!hopper::make_map<2>(&b_map, b, 2, {columns, 64}, {64, 64})) return;
    const int bytes = fault == kSmall ? kTile : fault == kLarge ? 240 << 10 : kStages * 2 * kTile + 64;
    product<<<1, 256, bytes>>>(a_map, b_map, c, static_cast<int>(k / 64), static_cast<int>(fault));
}
