// The threads of a block as fibers: each runs until it must wait for others (a barrier, an operation of its warp, a gate), and blocks are shared by the
// CPU's cores; those of a cluster run together, each on a thread of the CPU of its own. Neighbours: device.h (what CUDA calls these things), ptx.h (what
// instructions do with them); driver.c calls `emu_launch`.
#pragma once
#ifndef __x86_64__
#error "fibers switch by x86-64 code"
#endif
#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>
#include <sys/mman.h>

// Dynamic shared memory, as much as the largest chip has. (TLS descriptors must not be chosen: the C library's may spoil vector registers.)
alignas(1024) thread_local float shared[227 * 256];

namespace emu {

struct Dim { unsigned x, y, z; };
enum class Wait { None, Warp, Block, Named, Gate, Cluster, Ended };
const int WARP = 32, MOST = 1024, STACK = 256 << 10, MOST_CLUSTER = 8;

// What a thread brings to an operation of its warp.
struct Operands { uint64_t v[8]; };

struct Fiber {
    void* sp;
    Wait wait;
    unsigned on, parity; // the named barrier, or the gate and the phase of it whose end is waited for
};

// A counting barrier in shared memory: it ends a phase when as many have arrived as are expected, and all bytes are there.
struct Gate {
    uint32_t phase : 1, expected : 15, missing : 16;
    int32_t bytes;
};
static Gate& gate_at(unsigned place) { return *(Gate*)((char*)shared + (int)place); }

// Blocks that run together and read each other's shared memory.
struct Cluster {
    unsigned size, here = 0, round = 0;
    char* shared[MOST_CLUSTER];
    bool all_ended = true, ended = false;
    std::mutex lock;
    std::condition_variable gone;

    // Waits until every block has come, and says whether all came as ended ones: others still meet without those.
    bool meet(bool as_ended) {
        std::unique_lock<std::mutex> held(lock);
        all_ended &= as_ended;
        if (++here < size) {
            gone.wait(held, [this, mine = round] { return round != mine; });
        } else {
            ended = all_ended;
            all_ended = true;
            here = 0;
            round++;
            gone.notify_all();
        }
        return ended;
    }
};

struct Block {
    Fiber fibers[MOST];
    Operands brought[MOST], seen[MOST];
    char* stacks;
    void* home;
    int current, count, arrived[16];
    void (*entry)(void**);
    void** args;
    Dim index, grid, threads;
    Cluster* cluster; // null: the block runs alone
};

inline thread_local Block* block;

// Saves what a call must keep, and goes on where `to` was left.
__attribute__((naked, noinline)) static void switch_to(void**, void*) {
    __asm__("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
            "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}

static void wait(Wait what, unsigned on = 0, unsigned parity = 0) {
    Fiber& f = block->fibers[block->current];
    f.wait = what;
    f.on = on;
    f.parity = parity;
    switch_to(&f.sp, block->home);
}

static void live() {
    block->entry(block->args);
    for (;;) wait(Wait::Ended);
}

static void begin(int i) {
    Fiber& f = block->fibers[i];
    void** top = (void**)(block->stacks + (size_t)(i + 1) * STACK);
    top -= 2;               // a call's frame begins 8 bytes off a multiple of 16
    *top = (void*)live;
    for (int k = 0; k < 6; k++) *--top = nullptr;
    f = {top, Wait::None, 0, 0};
}

[[noreturn]] static void stuck() {
    int at[7] = {};
    for (int i = 0; i < block->count; i++) at[(int)block->fibers[i].wait]++;
    fprintf(stderr,
            "emulated kernel: block (%u, %u, %u) waits for ever: %d threads in operations of warps, %d at the barrier, %d at a named one, %d at a gate, "
            "%d at the cluster's, %d ended\n",
            block->index.x, block->index.y, block->index.z, at[1], at[2], at[3], at[4], at[5], at[6]);
    abort();
}

// Runs the fibers of a warp until none can go on.
static bool run_warp(int first, int end) {
    bool moved = false;
    for (;;) {
        int at_warp = 0, alive = 0;
        for (int i = first; i < end; i++) {
            Fiber& f = block->fibers[i];
            if (f.wait == Wait::Gate && gate_at(f.on).phase != f.parity) f.wait = Wait::None;
            if (f.wait == Wait::None) {
                block->current = i;
                switch_to(&block->home, f.sp);
                moved = true;
            }
            if (f.wait == Wait::Ended) memset(&block->brought[i], 0, sizeof(Operands));
            alive += f.wait != Wait::Ended;
            at_warp += f.wait == Wait::Warp;
        }
        if (at_warp == 0 || at_warp < alive) return moved;
        memcpy(&block->seen[first], &block->brought[first], sizeof(Operands) * (end - first));
        for (int i = first; i < end; i++)
            if (block->fibers[i].wait == Wait::Warp) block->fibers[i].wait = Wait::None;
    }
}

static void release(Wait what, unsigned on) {
    for (int i = 0; i < block->count; i++)
        if (block->fibers[i].wait == what && block->fibers[i].on == on) block->fibers[i].wait = Wait::None;
}

static void run_block() {
    for (int i = 0; i < block->count; i++) begin(i);
    memset(block->arrived, 0, sizeof block->arrived);
    for (;;) {
        bool moved = false;
        for (int first = 0; first < block->count; first += WARP) moved |= run_warp(first, std::min(first + WARP, block->count));
        int alive = 0, at_block = 0, at_cluster = 0;
        for (int i = 0; i < block->count; i++) {
            alive += block->fibers[i].wait != Wait::Ended;
            at_block += block->fibers[i].wait == Wait::Block;
            at_cluster += block->fibers[i].wait == Wait::Cluster;
        }
        if (alive == 0) return;
        if (at_block == alive) {
            release(Wait::Block, 0);
        } else if (at_cluster == alive && block->cluster) {
            block->cluster->meet(false);
            release(Wait::Cluster, 0);
        } else if (!moved) {
            stuck();
        }
    }
}

// A launch, whose blocks the CPU's threads take one after another; of clusters each thread takes one block of every one.
struct Launch {
    void (*entry)(void**);
    void** args;
    Dim grid, threads;
    std::atomic<uint64_t> next{0};
    uint64_t blocks = 0;
    Cluster cluster;
};

static void work(Launch* launch) {
    if (!block) {
        block = (Block*)calloc(1, sizeof(Block));
        block->stacks = (char*)mmap(nullptr, (size_t)MOST * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (block->stacks == MAP_FAILED) abort();
    }
    Dim g = launch->grid, t = launch->threads;
    block->entry = launch->entry;
    block->args = launch->args;
    block->grid = g;
    block->threads = t;
    block->count = (int)t.x;
    block->cluster = nullptr;
    auto run = [&](uint64_t i) {
        block->index = {(unsigned)(i % g.x), (unsigned)(i / g.x % g.y), (unsigned)(i / g.x / g.y)};
        run_block();
    };
    if (launch->cluster.size > 1) {
        Cluster& c = launch->cluster;
        uint64_t rank = launch->next.fetch_add(1);
        if (rank >= c.size) return;
        block->cluster = &c;
        c.shared[rank] = (char*)shared;
        for (uint64_t i = rank; i < launch->blocks; i += c.size) {
            run(i);
            while (!c.meet(true)) {}
        }
    } else {
        for (uint64_t i; (i = launch->next.fetch_add(1)) < launch->blocks;) run(i);
    }
}

// Threads that live as long as the process and help with launches.
struct Helpers {
    std::mutex lock;
    std::condition_variable come, gone;
    Launch* launch = nullptr;
    unsigned round = 0, busy = 0, count;
    explicit Helpers(unsigned many) : count(many) {
        for (unsigned i = 0; i < count; i++) std::thread([this] { serve(); }).detach();
    }
    void serve() {
        unsigned seen = 0;
        for (;;) {
            Launch* mine;
            {
                std::unique_lock<std::mutex> held(lock);
                come.wait(held, [&] { return round != seen; });
                seen = round;
                mine = launch;
            }
            work(mine);
            std::lock_guard<std::mutex> held(lock);
            if (--busy == 0) gone.notify_all();
        }
    }
    void run(Launch* l) {
        if (l->blocks > 1 && count > 0) {
            {
                std::lock_guard<std::mutex> held(lock);
                launch = l;
                busy = count;
                round++;
            }
            come.notify_all();
            work(l);
            std::unique_lock<std::mutex> held(lock);
            gone.wait(held, [&] { return busy == 0; });
        } else {
            work(l);
        }
    }
};

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) { kernel(*(std::remove_reference_t<A>*)args[I]...); }
template <class... A>
void call(void (*kernel)(A...), void** args) { call(kernel, args, std::index_sequence_for<A...>()); }

static int lane() { return block->current & (WARP - 1); }
// Brings operands to the warp and returns those of all its threads.
static const Operands* together(std::initializer_list<uint64_t> operands) {
    int k = 0;
    for (uint64_t v : operands) block->brought[block->current].v[k++] = v;
    wait(Wait::Warp);
    return &block->seen[block->current & ~(WARP - 1)];
}

struct Thread { unsigned x; };
static Thread thread() { return {(unsigned)block->current}; }

} // namespace emu

// Runs a kernel's entry over a grid, in clusters of so many neighbours in x, and returns when it is done.
extern "C" void emu_launch(void (*entry)(void**), void** args, const unsigned* grid, const unsigned* threads, unsigned cluster) {
    static std::mutex one;
    std::lock_guard<std::mutex> held(one);
    emu::Launch launch;
    launch.entry = entry;
    launch.args = args;
    launch.grid = {grid[0], grid[1], grid[2]};
    launch.threads = {threads[0], threads[1], threads[2]};
    launch.blocks = (uint64_t)grid[0] * grid[1] * grid[2];
    launch.cluster.size = cluster;
    if (cluster > 1) {
        static emu::Helpers* together = new emu::Helpers(emu::MOST_CLUSTER - 1);
        together->run(&launch);
    } else {
        static emu::Helpers* helpers = new emu::Helpers(std::max(1u, std::thread::hardware_concurrency()) - 1);
        helpers->run(&launch);
    }
}
