// Who runs next. A wave keeps the processor until all its lanes wait at the block's barrier or have exited; the order
// of the waves changes at every barrier, from a seed, so that code that relies on an order shows different results.
#include <algorithm>
#include <numeric>

#include "runtime.h"

namespace sim {
namespace {
constexpr int kSpinRounds = 1000;  // rounds in which every thread that can run only polls, before it counts as deadlock

uint64_t bit(int lane) { return uint64_t(1) << lane; }
uint64_t bit(const Thread& thread) { return bit(thread.lane); }

const Exchange& request(const Wave& wave, int lane) { return *wave.thread[lane]->waiting; }

bool same_site(const Exchange& a, const Exchange& b) {
    return a.combine == b.combine && a.line == b.line && a.file == b.file && a.mask == b.mask && a.name == b.name;
}

std::string lanes_text(uint64_t lanes) {
    const int first = __builtin_ctzll(lanes), count = __builtin_popcountll(lanes);
    std::string text = "lane " + std::to_string(first);
    if (count > 1) text += " and " + std::to_string(count - 1) + " more";
    return text;
}

/// The lanes that wait at the same operation as `first`.
uint64_t group_of(const Wave& wave, int first) {
    uint64_t group = 0;
    for (uint64_t rest = wave.at_wave; rest != 0; rest &= rest - 1) {
        const int lane = __builtin_ctzll(rest);
        if (same_site(request(wave, first), request(wave, lane))) group |= bit(lane);
    }
    return group;
}

uint64_t needed(const Wave& wave, const Exchange& e) {
    if (e.take == Take::kWhole) return kWaveLanes == 64 ? ~0ull : (1ull << kWaveLanes) - 1;
    return e.mask & wave.exist;
}

void complete(Wave& wave, uint64_t group) {
    Exchange* lanes[64] = {};
    for (uint64_t rest = group; rest != 0; rest &= rest - 1) {
        const int lane = __builtin_ctzll(rest);
        lanes[lane] = wave.thread[lane]->waiting;
        wave.thread[lane]->waiting = nullptr;
    }
    wave.at_wave &= ~group;
    wave.runnable |= group;
    ++g.counters->wave_ops;
    g.idle_rounds = 0;
    advance_wave_epoch(wave);
    if (g.counting) flush_accesses(wave);
    g.current = wave.thread[__builtin_ctzll(group)];
    lanes[__builtin_ctzll(group)]->combine(lanes, group);
}

/// Complete one wave operation whose lanes are all here. Called only when no lane of the wave can run.
bool resolve(Wave& wave) {
    for (uint64_t rest = wave.at_wave; rest != 0;) {
        const int first = __builtin_ctzll(rest);
        const uint64_t group = group_of(wave, first);
        const Exchange& e = request(wave, first);
        const bool ready = e.take == Take::kActive ? wave.yielded == 0 : (needed(wave, e) & ~group) == 0;
        if (ready) {
            complete(wave, group);
            return true;
        }
        rest &= ~group;
    }
    return false;
}

/// No lane of the block can go on: say why, starting with waves whose lanes wait for each other.
[[noreturn]] void report_stuck() {
    for (Wave& wave : g.waves) {
        if (wave.at_wave == 0) continue;
        const int first = __builtin_ctzll(wave.at_wave);
        const Exchange& e = request(wave, first);
        const uint64_t missing = needed(wave, e) & ~group_of(wave, first);
        g.current = wave.thread[first];
        std::string why;
        if (missing & ~wave.exist) {
            why = "the block has no " + lanes_text(missing & ~wave.exist) + " of this wave (use a multiple of " +
                  std::to_string(kWaveLanes) + " threads)";
        } else if (missing & wave.exited) {
            why = lanes_text(missing & wave.exited) + " has exited";
        } else if (missing & wave.at_barrier) {
            const Exchange& other = request(wave, __builtin_ctzll(missing & wave.at_barrier));
            why = lanes_text(missing & wave.at_barrier) + " waits at " + other.name + " in line " +
                  std::to_string(other.line);
        } else if (missing & wave.at_wave) {
            const Exchange& other = request(wave, __builtin_ctzll(missing & wave.at_wave));
            why = lanes_text(missing & wave.at_wave) + " waits at " + other.name + " in line " +
                  std::to_string(other.line) + (other.mask != e.mask ? " with mask " + hex(other.mask) : "");
        } else {
            why = lanes_text(missing) + " spins elsewhere";
        }
        fail("RUNTIME_ERROR", std::string(e.name) + " is divergent: it waits for lanes that do not come: " + why,
             e.file, e.line);
    }
    const Exchange* first = nullptr;
    for (Wave& wave : g.waves) {
        for (uint64_t rest = wave.at_barrier; rest != 0; rest &= rest - 1) {
            Thread& thread = *wave.thread[__builtin_ctzll(rest)];
            if (first == nullptr) {
                first = thread.waiting;
                g.current = &thread;
            }
        }
    }
    if (first == nullptr) fail("RUNTIME_ERROR", "no thread can run", nullptr, 0);
    fail("RUNTIME_ERROR",
         std::string(first->name) + " is a divergent barrier: " + std::to_string(g.exited) + " of " +
             std::to_string(g.thread_count) + " threads of the block have exited and will never arrive",
         first->file, first->line);
}

void release_barrier() {
    if (settle_pending()) abandon();
    const Exchange* first = nullptr;
    uint64_t total = 0;
    for (Wave& wave : g.waves) {
        for (uint64_t rest = wave.at_barrier; rest != 0; rest &= rest - 1) {
            Thread& thread = *wave.thread[__builtin_ctzll(rest)];
            const Exchange& e = *thread.waiting;
            if (first == nullptr) first = &e;
            if (e.line != first->line || e.file != first->file) {
                g.current = &thread;
                fail("RUNTIME_ERROR",
                     std::string(e.name) + " is a divergent barrier: other threads of the block wait at " +
                         first->name + " in line " + std::to_string(first->line),
                     e.file, e.line);
            }
            total += e.value;
        }
    }
    for (Wave& wave : g.waves) {
        for (uint64_t rest = wave.at_barrier; rest != 0; rest &= rest - 1) {
            Thread& thread = *wave.thread[__builtin_ctzll(rest)];
            thread.waiting->result = total;
            thread.waiting = nullptr;
        }
        if (g.counting) flush_accesses(wave);
        wave.runnable = wave.at_barrier;
        wave.at_barrier = 0;
    }
    g.at_barrier = 0;
    g.idle_rounds = 0;
    ++g.counters->barriers;
    advance_block_epoch();
    for (size_t i = g.order.size(); i > 1; --i) std::swap(g.order[i - 1], g.order[next_random() % i]);
}

/// The next thread to run, or null when all have exited. `wave` is the one that ran last: it goes on while it can.
Thread* choose(Wave* wave, int after) {
    for (;;) {
        if (wave != nullptr) {
            if (wave->runnable == 0) resolve(*wave);
            if (wave->runnable != 0) {
                const uint64_t later = after >= 63 ? 0 : wave->runnable & (~0ull << (after + 1));
                return wave->thread[__builtin_ctzll(later != 0 ? later : wave->runnable)];
            }
        }
        wave = nullptr;
        after = 63;
        for (int id : g.order) {
            Wave& candidate = g.waves[size_t(id)];
            if (candidate.runnable != 0 || (candidate.at_wave != 0 && resolve(candidate))) {
                wave = &candidate;
                break;
            }
        }
        if (wave != nullptr) continue;
        if (g.exited == g.thread_count) return nullptr;
        if (g.at_barrier == g.thread_count) {
            release_barrier();
            continue;
        }
        bool any_yielded = false;
        for (Wave& each : g.waves) {
            if (each.yielded == 0) continue;
            any_yielded = true;
            g.current = each.thread[__builtin_ctzll(each.yielded)];
            each.runnable |= each.yielded;
            each.yielded = 0;
        }
        if (!any_yielded) report_stuck();
        if (++g.idle_rounds > kSpinRounds) {
            fail_here("RUNTIME_ERROR",
                      "deadlock: the thread spins on memory that nobody in its block will change; blocks run one after "
                      "another "
                      "here, and a card promises no order among them",
                      g.current->poll_frame, nullptr);
        }
    }
}

void pass_turn(Thread& self) {
    Thread* next = choose(self.wave, self.lane);
    g.current = next;
    if (next != &self) switch_stack(&self.stack_pointer, next->stack_pointer);
}

void thread_main() {
    g.entry(g.closure);
    Thread& self = *g.current;
    self.wave->runnable &= ~bit(self);
    self.wave->exited |= bit(self);
    ++g.exited;
    g.idle_rounds = 0;
    Thread* next = choose(self.wave, self.lane);
    g.current = next;
    switch_stack(&self.stack_pointer, next != nullptr ? next->stack_pointer : g.host_stack_pointer);
    __builtin_unreachable();
}
}  // namespace

void rendezvous(Exchange& exchange) {
    Thread& self = *g.current;
    Wave& wave = *self.wave;
    if (exchange.take == Take::kMask) {
        if (kWaveLanes == 32) exchange.mask &= 0xffffffffull;
        if ((exchange.mask & bit(self)) == 0) {
            const bool half = kWaveLanes == 64 && exchange.mask == 0xffffffffull;
            fail("RUNTIME_ERROR",
                 std::string(exchange.name) + ": lane " + std::to_string(self.lane) + " is not in its own mask " +
                     hex(exchange.mask) +
                     (half ? ", a full mask of 32 lanes on a wave of 64; a full wave is ~0ull" : ""),
                 exchange.file, exchange.line);
        }
    }
    self.waiting = &exchange;
    wave.runnable &= ~bit(self);
    wave.at_wave |= bit(self);
    pass_turn(self);
}

void block_barrier(Exchange& exchange) {
    Thread& self = *g.current;
    self.waiting = &exchange;
    self.wave->runnable &= ~bit(self);
    self.wave->at_barrier |= bit(self);
    ++g.at_barrier;
    pass_turn(self);
}

void yield_turn() {
    Thread& self = *g.current;
    self.wave->runnable &= ~bit(self);
    self.wave->yielded |= bit(self);
    pass_turn(self);
}

void spin_hint() { yield_turn(); }

void abandon() {
    Thread& self = *g.current;
    g.current = nullptr;
    switch_stack(&self.stack_pointer, g.host_stack_pointer);
    __builtin_unreachable();
}

void run_block() {
    const dim3 size = g.grid.block;
    g.exited = g.at_barrier = g.idle_rounds = 0;
    for (Wave& wave : g.waves) {
        wave.exited = wave.at_wave = wave.at_barrier = wave.yielded = 0;
        wave.runnable = wave.exist;
    }
    for (int id = 0; id < g.thread_count; ++id) {
        Thread& thread = g.threads[size_t(id)];
        const unsigned u = unsigned(id);
        thread.index = {u % size.x, u / size.x % size.y, u / (size.x * size.y)};
        thread.waiting = nullptr;
        thread.polls = 0;
        thread.copies.clear();
        thread.groups = 0;
        thread.stack_pointer = fresh_stack(thread, thread_main);
    }
    for (size_t i = g.order.size(); i > 1; --i) std::swap(g.order[i - 1], g.order[next_random() % i]);
    g.current = g.waves[size_t(g.order[0])].thread[0];
    switch_stack(&g.host_stack_pointer, g.current->stack_pointer);
    settle_pending();
    if (g.counting) {
        for (Wave& wave : g.waves) flush_accesses(wave);
    }
}
}  // namespace sim
