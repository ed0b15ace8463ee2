// What went wrong, where: kernel, block, thread, and the source line, either as given by the call or as return
// addresses that the Python side looks up in the debug information.
#include <signal.h>
#include <ucontext.h>

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

namespace {
Fault make_fault(const char* verdict, const std::string& text, const char* file, int line) {
    const std::string kernel = g.grid.name != nullptr ? g.grid.name : "before any launch";
    const std::string subject = g.current != nullptr ? where(*g.current) : kernel;
    return {true, verdict, subject + ": " + text, file != nullptr ? file : "", line, {}};
}

/// Add the return address `frame` and those of its callers, as long as the chain of frame pointers stays on the stack.
void add_frames(Fault& fault, void* frame, void* frame_pointer) {
    const uintptr_t base = reinterpret_cast<uintptr_t>(&__ehdr_start);
    fault.frames.push_back(reinterpret_cast<uintptr_t>(frame) - base);
    auto* link = static_cast<uintptr_t*>(frame_pointer);
    for (int depth = 0; depth < 16; ++depth) {
        const uintptr_t at = reinterpret_cast<uintptr_t>(link);
        if (at - g.current->stack_low >= kStackBytes - 16 || at % 8 != 0 || link[1] == 0) break;
        if (depth > 0) fault.frames.push_back(link[1] - base);
        if (link[0] <= at) break;
        link = reinterpret_cast<uintptr_t*>(link[0]);
    }
}

void set(const Fault& fault) {
    if (g.fault.set) return;
    // What follows from a read of unwritten memory is that read's fault; a race may be why it was unwritten.
    g.fault = g.pending.set && fault.verdict != "RACE" ? g.pending : fault;
}
}  // namespace

void set_fault(const char* verdict, const std::string& text, const char* file, int line) {
    set(make_fault(verdict, text, file, line));
}

void set_fault_here(const char* verdict, const std::string& text, void* frame, void* frame_pointer) {
    Fault fault = make_fault(verdict, text, nullptr, 0);
    add_frames(fault, frame, frame_pointer);
    set(fault);
}

void fail(const char* verdict, const std::string& text, const char* file, int line) {
    set_fault(verdict, text, file, line);
    abandon();
}

void fail_here(const char* verdict, const std::string& text, void* frame, void* frame_pointer) {
    set_fault_here(verdict, text, frame, frame_pointer);
    abandon();
}

void postpone_here(const char* verdict, const std::string& text, void* frame, void* frame_pointer) {
    if (g.pending.set) return;
    g.pending = make_fault(verdict, text, nullptr, 0);
    add_frames(g.pending, frame, frame_pointer);
}

bool settle_pending() {
    if (g.pending.set) set(g.pending);
    return g.pending.set;
}

void trap(const char* what, const char* file, int line) { fail("RUNTIME_ERROR", what, file, line); }

namespace {
struct sigaction old_segv, old_bus, old_fpe;

void* instruction(void* context) {
#if defined(__x86_64__)
    const uintptr_t at = uintptr_t(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
    const uintptr_t at = uintptr_t(static_cast<ucontext_t*>(context)->uc_mcontext.pc);
#else
    const uintptr_t at = 0 * reinterpret_cast<uintptr_t>(context);
#endif
    return reinterpret_cast<void*>(at + 1);  // as a return address, which lies behind its instruction
}

void on_signal(int signal, siginfo_t* info, void* context) {
    const Thread* self = g.current;
    if (self == nullptr) {  // not in a kernel: the process's own business
        guard_signals(false);
        raise(signal);
        return;
    }
    const uintptr_t address = reinterpret_cast<uintptr_t>(info->si_addr);
    if (signal == SIGFPE) fail_here("RUNTIME_ERROR", "integer division by zero", instruction(context), nullptr);
    if (self->stack_low - address <= 64 * 1024) {
        fail_here("RESOURCE_LIMIT", "the thread's local variables exceed 256 KiB", instruction(context), nullptr);
    }
    fail_here("OUT_OF_BOUNDS", "access to address " + hex(address) + ", outside every tensor and allocation",
              instruction(context), nullptr);
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
