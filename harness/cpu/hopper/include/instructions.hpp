// The instructions of tasks/common/hopper.cuh, on the model.
#pragma once

#include "model.hpp"

namespace hopper {

inline uint32_t shared_address(const void* p) { return model::address(p); }

template <int kCount, bool kMore>
void set_registers() {}

// ---- Barriers ------------------------------------------------------------------------------------------------------

inline void barrier_init(uint64_t* barrier, int count) {
    model::Barrier& b = model::block().barriers[model::address(barrier)];
    b = {};
    b.expected = b.pending = count;
}
inline void barriers_ready() {}
inline void barrier_arrive(uint64_t* barrier) {
    model::Barrier& b = model::barrier(model::block(), model::address(barrier));
    --b.pending;
    model::settle(b);
}
inline void barrier_arrive_at(uint64_t* barrier, int rank) {
    model::Barrier& b = model::barrier(*model::block().cluster.at(rank), model::address(barrier));
    --b.pending;
    model::settle(b);
}
inline void barrier_expect(uint64_t* barrier, int bytes) {
    model::Barrier& b = model::barrier(model::block(), model::address(barrier));
    b.bytes += bytes, --b.pending;
    model::settle(b);
}
inline void barrier_arrive_after_copies(uint64_t* barrier) {
    model::Block* const block = &model::block();
    const uint32_t at = model::address(barrier);
    auto& mine = block->copies[model::thread()];
    model::later([block, at, copies = std::exchange(mine, {})] {
        for (const auto& copy : copies) copy();
        model::Barrier& b = model::barrier(*block, at);
        --b.pending;
        model::settle(b);
    });
}
inline void barrier_wait(uint64_t* barrier, int parity) {
    const model::Barrier* const b = &model::barrier(model::block(), model::address(barrier));
    model::wait_until([b, parity] { return b->parity != parity; });
}
inline void named_sync(int id, int threads) { model::meet(model::block().named[id], threads, true); }
inline void named_arrive(int id, int threads) { model::meet(model::block().named[id], threads, false); }
inline void proxy_fence() {}

// ---- Clusters ------------------------------------------------------------------------------------------------------

inline int cluster_rank() { return model::block().rank; }
inline void cluster_sync() {
    model::Block& first = *model::block().cluster.front();
    model::meet(first.of_cluster, static_cast<int>(first.cluster.size() * first.threads.x), true);
}
template <int kCluster, class... Parameters, class... Args>
cudaError_t launch_in_clusters(void (*kernel)(Parameters...), int blocks, int threads, int bytes, const Args&... args) {
    if (blocks % kCluster != 0) return cudaErrorInvalidValue;
    model::launch([=] { kernel(args...); }, dim3(blocks), dim3(threads), bytes, kCluster);
    return cudaSuccess;
}

// ---- Copies --------------------------------------------------------------------------------------------------------

inline void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y) {
    model::load_box(to, *map, barrier, {x, y}, false);
}
inline void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z) {
    model::load_box(to, *map, barrier, {x, y, z}, false);
}
template <int kCluster>
void tma_load_to_all(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y) {
    if (static_cast<int>(model::block().cluster.size()) != kCluster)
        model::fail("RUNTIME_ERROR", "a multicast to more blocks than the cluster has");
    model::load_box(to, *map, barrier, {x, y}, true);
}
inline void copy16(uint32_t to, const void* from, bool valid) {
    model::Block* const block = &model::block();
    block->copies[model::thread()].push_back([block, to, from, valid] {
        if (valid)
            memcpy(model::pointer(*block, to), from, 16);
        else
            memset(model::pointer(*block, to), 0, 16);
    });
}

// ---- Products ------------------------------------------------------------------------------------------------------

inline void wgmma_fence() {}
inline void wgmma_commit() {
    model::Block& b = model::block();
    b.groups[model::thread()].push_back(std::exchange(b.open[model::thread()], {}));
}
template <int kPending>
void wgmma_wait() {
    model::wait_for_groups(kPending);
}
template <class T, int kCount>
void pin(T (&)[kCount]) {}

template <bool kTransposedB, int kCount>
void wgmma(float (&sums)[kCount], uint64_t a, uint64_t b, int accumulate) {
    model::Product p;
    p.a = a, p.b = b, p.columns = 2 * kCount, p.accumulate = accumulate, p.b_transposed = kTransposedB;
    model::give(p, sums, nullptr);
}
template <bool kTransposedB, int kCount>
void wgmma(float (&sums)[kCount], const uint32_t* a, uint64_t b, int accumulate) {
    model::Product p;
    p.b = b, p.columns = 2 * kCount, p.accumulate = accumulate, p.b_transposed = kTransposedB, p.a_in_registers = true;
    model::give(p, sums, a);
}
template <int kCount>
void wgmma(int (&sums)[kCount], uint64_t a, uint64_t b, int accumulate) {
    model::Product p;
    p.a = a, p.b = b, p.columns = 2 * kCount, p.accumulate = accumulate, p.int8 = true;
    model::give(p, sums, nullptr);
}

// ---- Numbers -------------------------------------------------------------------------------------------------------

inline float exp2(float x) { return exp2f(x); }
inline uint32_t pack(float low, float high) {
    return model::to_bfloat16(low) | static_cast<uint32_t>(model::to_bfloat16(high)) << 16;
}

}  // namespace hopper
