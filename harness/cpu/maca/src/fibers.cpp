// Fibers: one stack per thread of a block, pooled, with a guard page under each.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "runtime.h"

#if !defined(__x86_64__) || defined(SIM_UCONTEXT)
#define SIM_USE_UCONTEXT
#include <ucontext.h>
#endif

namespace sim {
namespace {
unsigned char* pool = nullptr;
int pool_count = 0;
size_t stride() { return kStackBytes + size_t(sysconf(_SC_PAGESIZE)); }
}  // namespace

void prepare_stacks(int count) {
    if (count > pool_count) {
        if (pool != nullptr) munmap(pool, stride() * size_t(pool_count));
        void* memory =
            mmap(nullptr, stride() * size_t(count), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) {
            std::perror("simulator: no memory for the threads' stacks");
            std::abort();
        }
        pool = static_cast<unsigned char*>(memory);
        pool_count = count;
        for (int i = 0; i < count; ++i) {
            mprotect(pool + stride() * size_t(i + 1) - kStackBytes, kStackBytes, PROT_READ | PROT_WRITE);
        }
    }
    for (int i = 0; i < count; ++i) {
        g.threads[size_t(i)].stack_low = reinterpret_cast<uintptr_t>(pool + stride() * size_t(i + 1) - kStackBytes);
    }
}

#if !defined(SIM_USE_UCONTEXT)
// Push the callee-saved registers, exchange stack pointers, pop the other side's registers and return there.
extern "C" void sim_switch_stack(void** save, void* load);
__asm__(
    ".text\n"
    ".p2align 4\n"
    ".hidden sim_switch_stack\n"
    ".globl sim_switch_stack\n"
    ".type sim_switch_stack, @function\n"
    "sim_switch_stack:\n"
    "    pushq %rbp\n"
    "    pushq %rbx\n"
    "    pushq %r12\n"
    "    pushq %r13\n"
    "    pushq %r14\n"
    "    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15\n"
    "    popq %r14\n"
    "    popq %r13\n"
    "    popq %r12\n"
    "    popq %rbx\n"
    "    popq %rbp\n"
    "    ret\n"
    ".size sim_switch_stack, . - sim_switch_stack\n");

void switch_stack(void** save, void* load) { sim_switch_stack(save, load); }

void* fresh_stack(Thread& thread, void (*main)()) {
    // The entry sees the alignment it would see behind a call: 8 modulo 16, with a return address that is never used.
    void** top = reinterpret_cast<void**>(thread.stack_low + kStackBytes - 16);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(main);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    return top;
}
#else
namespace {
std::vector<ucontext_t*> contexts(kMaxThreads);
ucontext_t host_context;
}  // namespace

void switch_stack(void** save, void* load) {
    // Here a "stack pointer" is the address of a context; the host's own is made on first use.
    if (*save == nullptr) *save = &host_context;
    swapcontext(static_cast<ucontext_t*>(*save), static_cast<ucontext_t*>(load));
}

void* fresh_stack(Thread& thread, void (*main)()) {
    ucontext_t*& context = contexts[thread.id];
    if (context == nullptr) context = new ucontext_t;
    getcontext(context);
    context->uc_stack.ss_sp = reinterpret_cast<void*>(thread.stack_low);
    context->uc_stack.ss_size = kStackBytes;
    context->uc_link = nullptr;
    makecontext(context, main, 0);
    return context;
}
#endif
}  // namespace sim
