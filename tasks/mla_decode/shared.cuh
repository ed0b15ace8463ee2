// ---- shared section: also in the files beside this one. Master copy: shared.cuh of the task -------------------------
struct Args {
    const __nv_bfloat16 *q_nope, *q_pe, *ckv, *kpe;
    __nv_bfloat16* output;
    const int32_t *kv_indptr, *kv_indices, *kv_lens;
    int batch_size, num_heads, head_tiles;  // head_tiles: of BLOCK_M heads
    int max_parts;                          // blocks per head tile; more than batch_size unless nothing is cut
    int page_size, page_shift;              // page_shift: log2(page_size), or -1 if that is no whole number
    float scale_log2;                       // log2(e) / sqrt(576)
    float slack;                            // by which a score exceeds the running maximum before that is raised
    float *partial, *lse;                   // (rows, num_heads, 512) and (rows, num_heads), base 2
    int2* plan;                             // (batch_size,) first row of partial, NUM_SPLITS
};

// ---- Which part of which sequence ----------------------------------------------------------------------------------

struct Part {
    int sequence;  // -1: none, there are fewer parts than blocks
    int split, num_splits;
    int row;  // of partial, for the sequence's first part
};

// A sequence gets ceil(tiles / chunk) parts and one at least. The chunk is so large that all fit into max_parts. The
// whole block calls this with the same part; scratch: (threads + 1) ints of shared memory.
__device__ __forceinline__ Part find_part(const Args& args, int part, int block_n, int* scratch, int tid, int threads) {
    const auto tiles = [&](int sequence) { return (args.kv_lens[sequence] + block_n - 1) / block_n; };
    if (tid == 0) scratch[0] = 0;
    __syncthreads();
    int sum = 0;
    for (int b = tid; b < args.batch_size; b += threads) sum += tiles(b);
    atomicAdd(scratch, sum);
    __syncthreads();
    const int spare = args.max_parts - args.batch_size;
    const int chunk = spare > 0 ? max(kMinKeys / block_n, (scratch[0] + spare - 1) / spare) : INT32_MAX;
    int first = 0, row = 0;
    for (int b0 = 0; b0 < args.batch_size; b0 += threads) {
        __syncthreads();
        if (b0 + tid < args.batch_size) scratch[1 + tid] = max(tiles(b0 + tid) - 1, 0) / chunk + 1;
        __syncthreads();
        for (int i = 0; i < min(threads, args.batch_size - b0); ++i) {
            const int num_splits = scratch[1 + i];
            if (part < first + num_splits) return {b0 + i, part - first, num_splits, row};
            first += num_splits;
            row += num_splits > 1 ? num_splits : 0;
        }
    }
    return {-1};
}

// ---- Joining the parts ----------------------------------------------------------------------------------------------

// One block per (head, sequence): thread (x, y) has four columns and every kReaders-th part.
template <int kReaders>
__global__ void __launch_bounds__(kDimCkv / 4 * kReaders) combine(const Args args) {
    __shared__ float4 sums[kReaders][kDimCkv / 4];
    __shared__ float most_of[kReaders], total_of[kReaders];
    const int head = blockIdx.x % args.num_heads, sequence = blockIdx.x / args.num_heads;
    const int x = threadIdx.x % (kDimCkv / 4), y = threadIdx.x / (kDimCkv / 4);
    const int2 plan = args.plan[sequence];
    if (plan.y == 1) return;  // the first kernel wrote the output

    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    float most = kNoScore, total = 0.0f;
    for (int split = y; split < plan.y; split += 4 * kReaders) {
        float lse[4], largest = most;
        float4 value[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // four parts in flight; one past the end is the first again, without weight
            const int part = split + i * kReaders < plan.y ? split + i * kReaders : split;
            const int64_t row = static_cast<int64_t>(plan.x + part) * args.num_heads + head;
            value[i] = arch::at<float4>(args.partial + row * kDimCkv, 16 * x);
            lse[i] = args.lse[row];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) largest = fmaxf(largest, lse[i]);
        const float old = exp2f(most - largest);
        sum = {sum.x * old, sum.y * old, sum.z * old, sum.w * old}, total *= old, most = largest;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float weight = split + i * kReaders < plan.y ? exp2f(lse[i] - most) : 0.0f;
            sum = {sum.x + value[i].x * weight, sum.y + value[i].y * weight, sum.z + value[i].z * weight,
                   sum.w + value[i].w * weight};
            total += weight;
        }
    }
    sums[y][x] = sum;
    if (x == 0) most_of[y] = most, total_of[y] = total;
    __syncthreads();
    if (y != 0) return;
#pragma unroll
    for (int i = 0; i < kReaders; ++i) most = fmaxf(most, most_of[i]);
    sum = {0.0f, 0.0f, 0.0f, 0.0f}, total = 0.0f;
#pragma unroll
    for (int i = 0; i < kReaders; ++i) {  // always in this order: the same bits each time
        const float weight = exp2f(most_of[i] - most);
        const float4 value = sums[i][x];
        sum = {sum.x + value.x * weight, sum.y + value.y * weight, sum.z + value.z * weight, sum.w + value.w * weight};
        total += total_of[i] * weight;
    }
    const int64_t out = (static_cast<int64_t>(sequence) * args.num_heads + head) * kDimCkv;
    arch::at<uint2>(args.output + out, 8 * x) = {arch::pack(sum.x / total, sum.y / total),
                                                 arch::pack(sum.z / total, sum.w / total)};
}
// ---- end of shared section ------------------------------------------------------------------------------------------
