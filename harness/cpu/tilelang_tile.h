// Run-time support of the C++ that tilelang_emit.py writes for one TileLang kernel: bf16, checked buffers, tile
// operators. Every access goes through Buffer::at, so an index outside a shape is named instead of read.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

namespace tile {

// What went wrong, as the caller (tilelang_c.py) numbers it.
enum Kind { OK = 0, OUT_OF_BOUNDS = 1, BAD_ARGUMENT = 2, BAD_LAUNCH = 3 };

struct Fault {
    Kind kind;
    char text[400];
};

static int64_t block_index[3];

struct bf16 {
    uint16_t bits;
    bf16() = default;
    template <class U>
    explicit bf16(U value) {
        float f = static_cast<float>(value);
        uint32_t u;
        std::memcpy(&u, &f, 4);
        if (f != f)
            bits = static_cast<uint16_t>((u >> 16) | 0x40);
        else
            bits = static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);  // round to nearest, ties to even
    }
    operator float() const {
        uint32_t u = static_cast<uint32_t>(bits) << 16;
        float f;
        std::memcpy(&f, &u, 4);
        return f;
    }
};

// Type in which one dtype is multiplied and summed.
template <class T>
using wide = std::conditional_t<std::is_same_v<T, bf16>, float, T>;

template <class T, int N>
struct Buffer {
    T* data;
    const char* name;
    bool global;
    int64_t shape[N];

    [[noreturn]] __attribute__((noinline, cold)) void fail(const char* what, const int64_t* index) const {
        Fault fault{OUT_OF_BOUNDS, {}};
        char at[120] = "", dims[120] = "";
        for (int d = 0, a = 0, s = 0; d < N; ++d) {
            a += std::snprintf(at + a, sizeof at - a, d ? ", %lld" : "%lld", (long long)index[d]);
            s += std::snprintf(dims + s, sizeof dims - s, d ? ", %lld" : "%lld", (long long)shape[d]);
        }
        std::snprintf(fault.text, sizeof fault.text, "%s %s[%s] in block (%lld, %lld, %lld) is outside its shape (%s)",
                      what, name, at, (long long)block_index[0], (long long)block_index[1], (long long)block_index[2],
                      dims);
        throw fault;
    }
    template <class... I>
    bool has(I... i) const {
        const int64_t index[N] = {static_cast<int64_t>(i)...};
        bool inside = true;
        for (int d = 0; d < N; ++d)
            inside = inside & (static_cast<uint64_t>(index[d]) < static_cast<uint64_t>(shape[d]));
        return inside;
    }
    template <class... I>
    T& at(const char* what, I... i) const {
        const int64_t index[N] = {static_cast<int64_t>(i)...};
        int64_t offset = 0;
        for (int d = 0; d < N; ++d) {
            if (__builtin_expect(static_cast<uint64_t>(index[d]) >= static_cast<uint64_t>(shape[d]), 0))
                fail(what, index);
            offset = offset * shape[d] + index[d];
        }
        return data[offset];
    }
    template <class... I>
    const T& get(I... i) const {
        return at("read of", i...);
    }
    template <class... I>
    T& put(I... i) const {
        return at("write of", i...);
    }

    // The address of a region's first element, once its two corners are known to lie inside.
    template <class... I>
    T* corner(const int64_t (&extent)[N], I... i) const {
        const int64_t index[N] = {static_cast<int64_t>(i)...};
        int64_t last[N];
        for (int d = 0; d < N; ++d) last[d] = index[d] + extent[d] - 1;
        for (int d = 0; d < N; ++d)
            if (index[d] < 0 || last[d] >= shape[d]) fail("use of", index[d] < 0 ? index : last);
        return &at("use of", i...);
    }
    int64_t row() const { return shape[N - 1]; }
};

// Memory nobody wrote reads as NaN, or as a large odd integer that no index survives.
template <class T>
void poison(T* data, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        if constexpr (std::is_floating_point_v<T> || std::is_same_v<T, bf16>)
            data[i] = T(std::numeric_limits<float>::quiet_NaN());
        else
            std::memset(&data[i], 0x55, sizeof(T));
    }
}

template <class T>
T maximum(T a, T b) {
    if constexpr (std::is_integral_v<T>)
        return a > b ? a : b;
    else
        return T(std::fmax(wide<T>(a), wide<T>(b)));
}
template <class T>
T minimum(T a, T b) {
    if constexpr (std::is_integral_v<T>)
        return a < b ? a : b;
    else
        return T(std::fmin(wide<T>(a), wide<T>(b)));
}
template <class T>
T floor_div(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
        T q = a / b;
        return (a % b != 0 && ((a < 0) != (b < 0))) ? q - 1 : q;
    } else {
        return T(std::floor(wide<T>(a) / wide<T>(b)));
    }
}
template <class T>
T floor_mod(T a, T b) {
    return T(a - floor_div(a, b) * b);
}
template <class To, class From>
To reinterpret(From value) {
    static_assert(sizeof(To) == sizeof(From), "reinterpret needs equal sizes");
    To result;
    std::memcpy(&result, &value, sizeof(To));
    return result;
}

// C[M, N] += op(A) op(B); operands widened exactly, sums in C's own type (float for bf16 operands, int32 for int8).
// transpose_a: A is stored (K, M); transpose_b: B is stored (N, K).
template <class TA, class TB, class TC>
__attribute__((noinline)) void gemm(const TA* a, int64_t lda, const TB* b, int64_t ldb, TC* c, int64_t ldc, int64_t M,
                                    int64_t N, int64_t K, bool transpose_a, bool transpose_b, bool clear) {
    using Acc = wide<TC>;
    static thread_local std::vector<Acc> rows;
    rows.resize(static_cast<size_t>(K * N));
    for (int64_t k = 0; k < K; ++k)
        for (int64_t n = 0; n < N; ++n) rows[k * N + n] = Acc(transpose_b ? b[n * ldb + k] : b[k * ldb + n]);
    std::vector<Acc> sum(static_cast<size_t>(N));
    for (int64_t m = 0; m < M; ++m) {
        for (int64_t n = 0; n < N; ++n) sum[n] = clear ? Acc(0) : Acc(c[m * ldc + n]);
        for (int64_t k = 0; k < K; ++k) {
            const Acc x = Acc(transpose_a ? a[k * lda + m] : a[m * lda + k]);
            const Acc* row = &rows[k * N];
            for (int64_t n = 0; n < N; ++n) sum[n] += x * row[n];
        }
        for (int64_t n = 0; n < N; ++n) c[m * ldc + n] = TC(sum[n]);
    }
}

inline void expect_dim(const char* name, int axis, int64_t expected, int64_t found) {
    if (expected == found) return;
    Fault fault{BAD_ARGUMENT, {}};
    std::snprintf(fault.text, sizeof fault.text, "argument %s: dimension %d must be %lld, got %lld", name, axis,
                  (long long)expected, (long long)found);
    throw fault;
}
inline int64_t grid(const char* axis, int64_t extent) {
    if (extent > 0) return extent;
    Fault fault{BAD_LAUNCH, {}};
    std::snprintf(fault.text, sizeof fault.text, "a grid of %lld blocks along %s cannot be launched on a GPU",
                  (long long)extent, axis);
    throw fault;
}

}  // namespace tile
