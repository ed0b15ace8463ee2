// Kernel launches. `kernel<<<grid, block, shared, stream>>>(arguments)` reaches the compiler as
// `sim::configure("kernel", grid, block, shared, stream)([&](auto&... a) { kernel(a...); })(arguments)`.
#pragma once
#include <tuple>
#include <utility>

#include "sim/core.h"

typedef struct CUstream_st* cudaStream_t;

// The launch's lambda reads the closure, which is host memory: no business of the hook.
#define SIM_UNHOOKED_CALL __attribute__((no_sanitize("thread")))

namespace sim {
template <class Call>
struct Bound {
    Grid grid;
    Call call;

    // The arguments are copied once per launch, as a card does; every thread then copies them into its parameters.
    template <class... Args>
    void operator()(Args&&... args) const {
        struct Closure {
            const Call& call;
            std::tuple<std::decay_t<Args>...> args;
        } closure{call, {std::forward<Args>(args)...}};
        launch(grid, &enter<Closure>, &closure);
    }

  private:
    template <class Closure>
    static SIM_UNHOOKED void enter(const void* opaque) {
        Closure& closure = *static_cast<Closure*>(const_cast<void*>(opaque));
        std::apply(closure.call, closure.args);
    }
};

struct Configured {
    Grid grid;
    template <class Call>
    Bound<Call> operator()(Call call) const {
        return {grid, call};
    }
};

inline Configured configure(const char* name, dim3 grid, dim3 block, size_t shared_bytes = 0, cudaStream_t = nullptr) {
    return {{name, grid, block, shared_bytes}};
}

template <class... Params, size_t... Index>
void launch_with(const Configured& configured, void (*kernel)(Params...), void** args, std::index_sequence<Index...>) {
    configured([kernel](auto&... values) SIM_UNHOOKED_CALL { kernel(values...); })(
        *static_cast<std::remove_reference_t<Params>*>(args[Index])...);
}
}  // namespace sim
