// What went wrong, where: kernel, block, thread, and the source line, either as given by the call or as return
// addresses that the Python side looks up in the debug information.
#include <signal.h>

#include <cstdio>
#include <cstdlib>

#include "runtime.h"

extern "C" const char __ehdr_start __attribute__((visibility("hidden")));

namespace sim {
std::string hex(uint64_t value) {
    char text[24];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
    return text;
}

std::string where(const Thread& thread) {
    auto triple = [](uint3 v) {
        return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")";
    };
    return std::string(g.grid.name) + ", block " + triple(g.block) + ", thread " + triple(thread.index);
}

void set_fault(const char* verdict, const std::string& text, const char* file, int line) {
    if (g.fault.set) return;
    g.fault.set = true;
    g.fault.verdict = verdict;
    g.fault.text = g.current != nullptr ? where(*g.current) : std::string(g.grid.name);
    if (file != nullptr) g.fault.text += ", line " + std::to_string(line);
    g.fault.text += ": " + text;
    g.fault.frames.clear();
}

void fail(const char* verdict, const std::string& text, const char* file, int line) {
    set_fault(verdict, text, file, line);
    abandon();
}

void fail_here(const char* verdict, const std::string& text, void* frame, void* frame_pointer) {
    set_fault(verdict, text, nullptr, 0);
    const uintptr_t base = reinterpret_cast<uintptr_t>(&__ehdr_start);
    g.fault.frames.push_back(reinterpret_cast<uintptr_t>(frame) - base);
    // Callers by the chain of frame pointers, as long as it stays on this thread's stack.
    const Thread& self = *g.current;
    auto* link = static_cast<uintptr_t*>(frame_pointer);
    for (int depth = 0; depth < 16; ++depth) {
        const uintptr_t at = reinterpret_cast<uintptr_t>(link);
        if (at - self.stack_low >= kStackBytes - 16 || at % 8 != 0) break;
        if (link[1] == 0) break;
        if (depth > 0) g.fault.frames.push_back(link[1] - base);
        if (link[0] <= at) break;
        link = reinterpret_cast<uintptr_t*>(link[0]);
    }
    abandon();
}

void trap(const char* what, const char* file, int line) { fail("RUNTIME_ERROR", what, file, line); }

namespace {
struct sigaction old_segv, old_bus, old_fpe;

void on_signal(int signal, siginfo_t* info, void*) {
    const Thread* self = g.current;
    if (self == nullptr) {  // not in a kernel: the process's own business
        guard_signals(false);
        raise(signal);
        return;
    }
    const uintptr_t address = reinterpret_cast<uintptr_t>(info->si_addr);
    if (signal == SIGFPE) fail("RUNTIME_ERROR", "integer division by zero", nullptr, 0);
    if (self->stack_low - address <= 64 * 1024) {
        fail("RESOURCE_LIMIT", "the thread's local variables exceed 256 KiB", nullptr, 0);
    }
    fail("OUT_OF_BOUNDS", "access to address " + hex(address) + ", outside every tensor and allocation", nullptr, 0);
}
}  // namespace

void guard_signals(bool on) {
    if (!on) {
        sigaction(SIGSEGV, &old_segv, nullptr);
        sigaction(SIGBUS, &old_bus, nullptr);
        sigaction(SIGFPE, &old_fpe, nullptr);
        return;
    }
    constexpr size_t kAlternate = 64 * 1024;
    static void* stack = nullptr;
    if (stack == nullptr) stack = std::malloc(kAlternate);
    stack_t alternate{};
    alternate.ss_sp = stack;
    alternate.ss_size = kAlternate;
    sigaltstack(&alternate, nullptr);
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &old_segv);
    sigaction(SIGBUS, &action, &old_bus);
    sigaction(SIGFPE, &action, &old_fpe);
}
}  // namespace sim
