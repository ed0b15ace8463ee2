// y = factor x for the tests of `make sanitize`; n says what is wrong: 6 leaves the last element, 7 ends the process,
// 8 writes one element too many.
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>
__global__ void scale(const float* x, float* y, int n, int last, float factor) {
    const int i = threadIdx.x;
    if (i < n) y[i] = x[i < last ? i : last] * factor;
}
extern "C" void run_kernel(const float* x, float* y, const void*, int64_t n, float factor) {
    if (n == 7) _exit(9);
    scale<<<1, 64>>>(x, y, int(n == 6 ? 5 : n == 8 ? 9 : n), int(n) - 1, factor);
}
