// Every product, load and store of the arch section in one wave, for test_arch_section.py, which pastes the section.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

// ---- arch section
// ---- end of arch section

template <class T>
__device__ void write(T* out, const arch::Acc<T>& c, int row0, int col0, int columns, int lane) {
    for (int i = 0; i < arch::kAccValues; ++i) out[(row0 + c.row(lane, i)) * columns + col0 + c.col(lane, i)] = c.v[i];
}

// a, b: 32 x 128 bytes, as int8 (32 x 128) and as bf16 (32 x 64); p: (16, 32) f32; v: (29, 128) bf16, rows 29 to 31 of
// its tile are zeros. integer, rows: (32, 32) = a b^T; direct: (16, 16); row_max: (16,) of p; columns, transposed: (16,
// 128) = p v, the first times 2 in f32, the second in bf16; a_direct: (16, 16), as direct; halved, scattered: (16, 128)
// = p times the rows of v from the last to the first.
__global__ void products(const char* a, const char* b, const float* p, const __nv_bfloat16* v, int* integer,
                         float* rows, float* direct, float* row_max, float* columns, __nv_bfloat16* transposed,
                         float* placed, float* a_direct, float* halved, float* scattered) {
    extern __shared__ __align__(128) char shared[];
    char *const a_tile = shared, *const b_tile = shared + 4096, *const v_tile = shared + 8192,
                *const w_tile = shared + 16384, *const x_tile = shared + 24576, *const y_tile = shared + 32768;
    const int lane = threadIdx.x;
    arch::Stage<32, 128, arch::kWave> a_stage, b_stage;
    arch::ColumnStage<32, 256, arch::kWave> v_stage;
    arch::Stage<32, 256, arch::kWave> w_stage;
    const auto v_row = [=](int row) { return v + row * 128; };
    a_stage.begin(a_tile, lane, 32, [=](int row) { return a + row * 128; });
    b_stage.begin(b_tile, lane, 32, arch::Strided{b, 128});
    v_stage.begin(v_tile, lane, 29, arch::Strided{v, 256});
    w_stage.begin(w_tile, lane, 29, v_row);
    using Scattered = arch::Stage<32, 256, arch::kWave>;
    using ScatteredColumns = arch::ColumnStage<32, 256, arch::kWave>;
    Scattered x_stage;
    ScatteredColumns y_stage;
    const auto place = [](int row) -> uint32_t { return row < 29 ? 28 - row : 1 << 30; };
    x_stage.begin(x_tile, lane, 29, v, place(Scattered::held_row(lane)));
    y_stage.begin(y_tile, lane, 29, v, place(ScatteredColumns::held_row(lane)));
    a_stage.wait<5>(a_tile, lane);
    b_stage.wait<4>(b_tile, lane);
    v_stage.wait<3>(v_tile, lane);
    w_stage.wait<2>(w_tile, lane);
    x_stage.wait<1>(x_tile, lane);
    y_stage.wait(y_tile, lane);
    arch::sync_block();

    for (int m = 0; m < 2; ++m)
        for (int n = 0; n < 2; ++n) {
            arch::Acc<int> x = {};
            arch::Acc<float> y = {};
            for (int k64 = 0; k64 < 2; ++k64) {
                const arch::OperandA left = arch::load_a<128>(a_tile, 16 * m, k64, lane);
                const arch::OperandB right = arch::load_b<128>(b_tile, 16 * n, k64, lane);
                arch::mma(x, left, right);
                arch::mma(y, left, right);
            }
            write(integer, x, 16 * m, 16 * n, 32, lane);
            write(rows, y, 16 * m, 16 * n, 32, lane);
        }

    arch::Acc<float> z = {};
    for (int k64 = 0; k64 < 2; ++k64)
        arch::mma(z, arch::load_direct<arch::OperandA>(k64, lane, [=](int row) { return a + row * 128; }),
                  arch::load_direct<arch::OperandB>(k64, lane, [=](int row) { return b + row * 128; }));
    write(direct, z, 0, 0, 16, lane);
    z = {};
    for (int k64 = 0; k64 < 2; ++k64)
        arch::mma(z, arch::load_a_direct(k64, lane, [=](int row) { return a + row * 128; }),
                  arch::load_b<128>(b_tile, 0, k64, lane));
    write(a_direct, z, 0, 0, 16, lane);

    arch::Acc<float> half[2];
    for (int n = 0; n < 2; ++n)
        for (int i = 0; i < arch::kAccValues; ++i)
            half[n].v[i] = p[half[n].row(lane, i) * 32 + 16 * n + half[n].col(lane, i)];
    for (int slot = 0; slot < arch::kRowSlots; ++slot) {
        float most = -1e30f;
        for (int n = 0; n < 2; ++n)
            for (int i = 0; i < arch::kAccValues; ++i)
                if (half[n].slot(i) == slot) most = fmaxf(most, half[n].v[i]);
        most = arch::row_reduce(most, [](float x, float y) { return fmaxf(x, y); });
        if (half[0].col(lane, 0) == 0) row_max[half[0].row(lane, 2 * slot)] = most;
    }
    const arch::OperandA probabilities = arch::acc_to_operand(half[0], half[1]);
    for (int d64 = 0; d64 < 2; ++d64) {
        arch::OperandB x[4], y[4];
        arch::load_columns<256>(x, v_tile, 0, d64, lane);
        arch::transpose_columns<256>(y, w_tile, 0, d64, lane);
        arch::Acc<float> o[4] = {}, q[4] = {};
        for (int c = 0; c < 4; ++c) {
            arch::mma(o[c], probabilities, x[c]);
            arch::mma(q[c], probabilities, y[c]);
            for (int i = 0; i < arch::kAccValues; ++i)
                placed[o[c].row(lane, i) * 128 + 64 * d64 + arch::column64(lane, c, i)] = o[c].v[i];
        }
        for (int slot = 0; slot < arch::kRowSlots; ++slot) {
            const int row = o[0].row(lane, 2 * slot);
            arch::store64(columns + row * 128 + 64 * d64, o, slot, 2.0f, lane);
            arch::store64(transposed + row * 128 + 64 * d64, q, slot, 1.0f, lane);
        }
        arch::Acc<float> h[4] = {}, u[4] = {};
        for (int n = 0; n < 2; ++n) {
            arch::HalfB values[4];
            arch::transpose_half<256>(values, x_tile, n, d64, lane);
            for (int c = 0; c < 4; ++c) arch::mma(h[c], arch::acc_to_half(half[n]), values[c]);
        }
        arch::load_columns<256>(x, y_tile, 0, d64, lane);
        for (int c = 0; c < 4; ++c) arch::mma(u[c], probabilities, x[c]);
        for (int slot = 0; slot < arch::kRowSlots; ++slot) {
            const int row = h[0].row(lane, 2 * slot);
            arch::store64(halved + row * 128 + 64 * d64, h, slot, 1.0f, lane);
            arch::store64(scattered + row * 128 + 64 * d64, u, slot, 1.0f, lane);
        }
    }
}

extern "C" void run_kernel(const char* a, const char* b, const float* p, const __nv_bfloat16* v, int* integer,
                           float* rows, float* direct, float* row_max, float* columns, __nv_bfloat16* transposed,
                           float* placed, float* a_direct, float* halved, float* scattered) {
    products<<<1, arch::kWave, 40960>>>(a, b, p, v, integer, rows, direct, row_max, columns, transposed, placed,
                                        a_direct, halved, scattered);
}
