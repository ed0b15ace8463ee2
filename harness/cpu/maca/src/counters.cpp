// Counters per kernel. Accesses are grouped into wave instructions: the n-th execution of one instruction by each lane
// since the wave was last together belongs to one group.
#include "runtime.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include "memory.h"

namespace sim {
namespace {
std::map<std::string, Counters> by_kernel;

struct Access {
    uintptr_t instruction;
    uint32_t occurrence;
    bool shared;
    uint16_t bytes;
    uintptr_t address;
};
std::vector<Access> log_of[kMaxWaves];
std::unordered_map<uintptr_t, uint32_t> occurrences[kMaxThreads];

std::unordered_set<uintptr_t> lines_of_block[2];  // of 128 bytes that the current block has read, and written
uint32_t block_of_lines = 0;

/// How many of the access's lines are new to the block.
uint64_t new_lines(uintptr_t address, size_t bytes, bool write) {
    if (block_of_lines != g.block_serial) {  // blocks run one after the other
        for (auto& lines : lines_of_block) lines.clear();
        block_of_lines = g.block_serial;
    }
    uint64_t fresh = 0;
    for (uintptr_t line = address / 128; line <= (address + bytes - 1) / 128; ++line)
        fresh += lines_of_block[write].insert(line).second;
    return fresh;
}

/// Bank conflicts of one shared access: 32 banks of 4 bytes, 128 bytes per pass; extra passes count.
uint64_t conflicts(const Access* first, const Access* end) {
    const int per_pass = std::max(1, 128 / int(first->bytes));
    uint64_t extra = 0;
    for (const Access* pass = first; pass < end; pass += per_pass) {
        const Access* stop = std::min(end, pass + per_pass);
        std::vector<uintptr_t> bank[32];
        for (const Access* a = pass; a < stop; ++a) {
            for (uintptr_t word = a->address / 4; word <= (a->address + a->bytes - 1) / 4; ++word) {
                auto& words = bank[word % 32];
                if (std::find(words.begin(), words.end(), word) == words.end()) words.push_back(word);
            }
        }
        size_t deepest = 1;
        for (const auto& words : bank) deepest = std::max(deepest, words.size());
        extra += deepest - 1;
    }
    return extra;
}

uint64_t transactions(const Access* first, const Access* end) {
    std::vector<uintptr_t> lines;
    for (const Access* a = first; a < end; ++a) {
        for (uintptr_t line = a->address / 128; line <= (a->address + a->bytes - 1) / 128; ++line)
            lines.push_back(line);
    }
    std::sort(lines.begin(), lines.end());
    return uint64_t(std::unique(lines.begin(), lines.end()) - lines.begin());
}
}  // namespace

void begin_counting(const char* kernel) {
    g.counters = &by_kernel[kernel];
    block_of_lines = 0;  // serial numbers of blocks begin anew, at 1
}

void record_access(uintptr_t address, size_t bytes, bool write, bool shared, void* frame) {
    Counters& c = *g.counters;
    if (shared) {
        (write ? c.shared_bytes_written : c.shared_bytes_read) += bytes;
    } else {
        (write ? c.global_bytes_written : c.global_bytes_read) += bytes;
        (write ? c.global_lines_written : c.global_lines_read) += new_lines(address, bytes, write);
    }
    const Thread& self = *g.current;
    const uintptr_t instruction = reinterpret_cast<uintptr_t>(frame);
    const uint32_t occurrence = occurrences[self.id][instruction]++;
    log_of[self.wave->id].push_back({instruction, occurrence, shared, uint16_t(bytes), address});
}

void flush_accesses(Wave& wave) {
    auto& log = log_of[wave.id];
    if (log.empty()) return;
    // Lanes log in their order, so a stable sort keeps a group's accesses in lane order.
    std::stable_sort(log.begin(), log.end(), [](const Access& a, const Access& b) {
        return a.instruction != b.instruction ? a.instruction < b.instruction : a.occurrence < b.occurrence;
    });
    for (size_t from = 0; from < log.size();) {
        size_t to = from + 1;
        while (to < log.size() && log[to].instruction == log[from].instruction &&
               log[to].occurrence == log[from].occurrence)
            ++to;
        if (log[from].shared) {
            ++g.counters->shared_accesses;
            g.counters->bank_conflicts += conflicts(&log[from], log.data() + to);
        } else {
            g.counters->global_transactions += transactions(&log[from], log.data() + to);
        }
        from = to;
    }
    log.clear();
    for (int lane = 0; lane < kWaveLanes; ++lane) {
        if (wave.thread[lane] != nullptr) occurrences[wave.thread[lane]->id].clear();
    }
}

std::string counters_json() {
    std::string text = "{";
    for (const auto& [kernel, c] : by_kernel) {
        if (text.size() > 1) text += ",";
        text += "\"";
        for (char ch : kernel) text += ch == '"' || ch == '\\' ? '\'' : ch;
        text += "\":{";
        const std::pair<const char*, uint64_t> fields[] = {
            {"launches", c.launches},
            {"blocks", c.blocks},
            {"mma", c.mma},
            {"wave_ops", c.wave_ops - c.mma},
            {"barriers", c.barriers},
            {"atomics", c.atomics},
            {"global_bytes_read", c.global_bytes_read},
            {"global_bytes_written", c.global_bytes_written},
            {"global_transactions", c.global_transactions},
            {"global_lines_read", c.global_lines_read},
            {"global_lines_written", c.global_lines_written},
            {"shared_bytes_read", c.shared_bytes_read},
            {"shared_bytes_written", c.shared_bytes_written},
            {"shared_accesses", c.shared_accesses},
            {"bank_conflicts", c.bank_conflicts},
        };
        bool first = true;
        for (const auto& [name, value] : fields) {
            text += std::string(first ? "\"" : ",\"") + name + "\":" + std::to_string(value);
            first = false;
        }
        text += "}";
    }
    by_kernel.clear();
    static Counters none;
    g.counters = &none;
    return text + "}";
}
}  // namespace sim
