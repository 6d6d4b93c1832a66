// CUDA's execution model on one CPU thread: a fiber per CUDA thread, blocks one after the other, those of a cluster
// (TL_CLUSTER blocks along y) side by side.
//
// In: a kernel (a plain C++ function) with its grid, block and arguments.  Out: 0, or 1 and a sentence in tl_error().
// A fiber runs until it meets a barrier or a warp-wide instruction; the last one to arrive does the work of all and
// the others go on.  What a GPU leaves undefined is made visible: shared memory starts as NaNs, warp-wide
// instructions that not all lanes reach, barriers that not all threads reach and writes past the end of shared
// memory are errors.  `descending` runs blocks, warps and lanes in reverse, so that a missing barrier shows in one of
// the two orders.  Refuses: blocks that are not whole warps, cooperative grids, waiting for a
// block of another cluster.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "fibers.hpp"

struct uint3 {
  unsigned x, y, z;
};
struct dim3 : uint3 {};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

extern "C" unsigned char __start_tl_shared[] __attribute__((weak, visibility("hidden")));
extern "C" unsigned char __stop_tl_shared[] __attribute__((weak, visibility("hidden")));

namespace emulator {

#ifdef TL_CLUSTER
constexpr int kClusterBlocks = TL_CLUSTER;
#else
constexpr int kClusterBlocks = 1;
#endif
constexpr int kWarp = 32, kMaxBlockThreads = 1024;
constexpr int kMaxThreads = kMaxBlockThreads * (kClusterBlocks < 2 ? 1 : 2), kMaxWarps = kMaxThreads / kWarp;
constexpr size_t kStackBytes = 128 * 1024 + 17 * 64;  // not a power of two: the stacks' tops spread over cache sets
constexpr size_t kSharedBytes = 232 * 1024, kGuardBytes = 256;
constexpr unsigned char kPoison = 0xff;  // NaN in every float format, −1 in every integer
constexpr uint64_t kCanary = 0x7f4c6f6f704c7954;

// ---- threads ---------------------------------------------------------------------------------------------------

struct Copy {
  void* shared;
  const void* global;  // null: zeros
  size_t bytes;
};
constexpr int kMaxCopies = 256, kMaxGroups = 32;

// Asynchronous copies of one thread, in order: they land at the wait, not before.
struct CopyQueue {
  Copy copies[kMaxCopies];
  int group_end[kMaxGroups];  // copies up to the end of each committed group
  int num_copies, num_groups;
};

struct Products {  // of a warpgroup, asynchronous: whether their instructions come in a legal order
  bool fenced, memory_fenced;
  int started, groups;  // not committed; committed and not waited for
};

struct Thread {
  Context context;
  uint3 index;
  int block, warp, lane;  // block: of the cluster
  CopyQueue queue;
  Products products;
  unsigned meeting;  // of the cluster, that this thread arrived for last
};

// ---- a cluster's state --------------------------------------------------------------------------------------------

enum class Meeting { none, mma, wgmma, matrix, shuffle, ballot, sync };

struct Lane {  // what a lane brings to a warp-wide instruction, and where its result goes
  uint32_t a[4], b[4];  // of b, two are read and four may be loaded at once
  void* c;  // four sums, or more
  const void* row;
  uint32_t* result;
  uint32_t value;
  int source;
};

struct Warp {
  uint32_t ready, arrived, live;  // lanes that can run; wait in `meeting`; have not returned
  uint32_t parked;                // wait for other blocks of the cluster
  Meeting meeting;
  Lane lanes[kWarp];
};

struct Block {
  uint3 index;
  int num_live, num_at_barrier;
};

struct ClusterBarrier {
  int num_arrived;
  unsigned meeting;  // how often all have arrived
};

inline Thread threads[kMaxThreads];
inline Warp warps[kMaxWarps];
inline unsigned char* stacks;
inline Thread* current;
inline Context scheduler;
inline Block blocks[kClusterBlocks];
inline ClusterBarrier cluster_barrier;
inline int num_threads, num_warps, num_live;  // of the cluster
inline int block_warps;
inline bool descending;
inline uint3 grid_size, block_size;
inline char error[512];
alignas(1024) inline unsigned char shared_memory[kClusterBlocks][kSharedBytes + kGuardBytes];

struct Body {
  void (*call)(void*);
  void* state;
};
inline Body body;

inline Block& my_block() { return blocks[current->block]; }

// Ends the launch with a sentence; the fibers of the block are abandoned.
[[noreturn]] inline void fail(const char* sentence) {
  const uint3& block = my_block().index;
  std::snprintf(error, sizeof error, "%s (block %u,%u,%u thread %u,%u,%u)", sentence, block.x, block.y, block.z,
                current->index.x, current->index.y, current->index.z);
  Context abandoned;
  switch_to(abandoned, scheduler);
  std::abort();
}

inline Thread* next_in_warp(int w) {
  const int lane = descending ? 31 - __builtin_clz(warps[w].ready) : __builtin_ctz(warps[w].ready);
  return &threads[w * kWarp + lane];
}

// The next thread that can run: of this warp if possible, else of the next warp in order.  Null: none.
inline Thread* next_ready() {
  for (int i = 0; i < num_warps; ++i) {
    const int w = descending ? (current->warp + num_warps - i) % num_warps : (current->warp + i) % num_warps;
    if (warps[w].ready) return next_in_warp(w);
  }
  return nullptr;
}

inline const char* deadlock() {
  for (int w = 0; w < num_warps; ++w)
    if (warps[w].arrived) return "some lanes wait in a warp-wide instruction that others never reach";
  for (int w = 0; w < num_warps; ++w)
    if (warps[w].parked) return "some threads wait for others of the cluster, or for bytes, that never come";
  return "some threads wait at __syncthreads() while others never reach it";
}

inline void run_another() {
  Thread* next = next_ready();
  if (!next) fail(deadlock());
  Thread* self = current;
  current = next;
  switch_to(self->context, next->context);
}

// All threads of the block that have not returned go on.
inline void leave_barrier(Block& block) {
  block.num_at_barrier = 0;
  const int first = static_cast<int>(&block - blocks) * block_warps;
  for (int w = first; w < first + block_warps; ++w) warps[w].ready = warps[w].live;
}

// Until somebody calls wake_parked; what was waited for is to be looked at again.
inline void park() {
  Warp& warp = warps[current->warp];
  const uint32_t bit = 1u << current->lane;
  warp.ready &= ~bit;
  warp.parked |= bit;
  run_another();
}

inline void wake_parked() {
  for (int w = 0; w < num_warps; ++w) {
    warps[w].ready |= warps[w].parked;
    warps[w].parked = 0;
  }
}

inline void fiber_main() {
  body.call(body.state);
  if (current->products.started || current->products.groups) fail("products of a warpgroup that nobody waited for");
  Warp& warp = warps[current->warp];
  warp.ready &= ~(1u << current->lane);
  warp.live &= ~(1u << current->lane);
  --num_live;
  Block& block = my_block();
  Context finished;
  if (--block.num_live && block.num_at_barrier == block.num_live) leave_barrier(block);  // nobody waits for the dead
  if (!num_live) switch_to(finished, scheduler);
  Thread* next = next_ready();
  if (!next) fail(deadlock());
  current = next;
  switch_to(finished, next->context);
  std::abort();
}

// ---- meetings -------------------------------------------------------------------------------------------------------

inline Lane& my_lane() { return warps[current->warp].lanes[current->lane]; }

// The lanes of a warp meet; the last one calls complete(lanes) for all, then everyone goes on.
template <class Complete>
inline void meet(Meeting meeting, Complete complete) {
  Warp& warp = warps[current->warp];
  const uint32_t bit = 1u << current->lane;
  if (warp.arrived && warp.meeting != meeting) fail("lanes of a warp meet in different warp-wide instructions");
  if (warp.live != ~0u) fail("a warp-wide instruction after some lanes have returned");
  warp.meeting = meeting;
  warp.arrived |= bit;
  warp.ready &= ~bit;
  if (warp.arrived != ~0u) return run_another();
  complete(warp.lanes);
  warp.arrived = 0;
  warp.ready = ~0u;
}

inline void sync_warp() {
  meet(Meeting::sync, [](Lane*) {});
}

inline void sync_block() {
  warps[current->warp].ready &= ~(1u << current->lane);
  Block& block = my_block();
  if (++block.num_at_barrier != block.num_live) return run_another();
  leave_barrier(block);
}

// ---- launching --------------------------------------------------------------------------------------------------------

inline unsigned char* stack_of(int thread) { return stacks + thread * kStackBytes; }

inline void prepare_thread(Thread& thread, int number) {
  const unsigned n = number % (block_warps * kWarp), row = n / block_size.x;
  thread.index = {n % block_size.x, row % block_size.y, row / block_size.y};
  thread.block = number / (block_warps * kWarp);
  thread.warp = number / kWarp;
  thread.lane = number % kWarp;
  thread.queue.num_copies = thread.queue.num_groups = 0;
  thread.products = {};
  thread.meeting = 0;
  prepare(thread.context, stack_of(number) + 64, kStackBytes - 64, fiber_main);
  std::memcpy(stack_of(number), &kCanary, sizeof kCanary);
}

inline void prepare_cluster(uint3 first, size_t shared_bytes) {
  for (unsigned i = 0; i < kClusterBlocks; ++i) {
    blocks[i] = {{first.x, first.y + i, first.z}, block_warps * kWarp, 0};
    std::memset(shared_memory[i], kPoison, shared_bytes);
    std::memset(shared_memory[i] + shared_bytes, 0x5a, kGuardBytes);
  }
  if (__start_tl_shared) std::memset(__start_tl_shared, kPoison, __stop_tl_shared - __start_tl_shared);
  for (int i = 0; i < num_threads; ++i) prepare_thread(threads[i], i);
  for (int w = 0; w < num_warps; ++w) warps[w].ready = warps[w].live = ~0u, warps[w].arrived = warps[w].parked = 0;
  num_live = num_threads;
  cluster_barrier = {};
}

inline void check_cluster(size_t shared_bytes) {
  for (const Block& block : blocks)
    for (size_t i = 0; i < kGuardBytes && !error[0]; ++i)
      if (shared_memory[&block - blocks][shared_bytes + i] != 0x5a)
        std::snprintf(error, sizeof error, "block %u,%u,%u wrote past its %zu bytes of shared memory", block.index.x,
                      block.index.y, block.index.z, shared_bytes);
  for (int i = 0; i < num_threads && !error[0]; ++i)
    if (std::memcmp(stack_of(i), &kCanary, sizeof kCanary))
      std::snprintf(error, sizeof error, "thread %d used more than %zu bytes of stack", i, kStackBytes);
}

inline void run_cluster(unsigned number, size_t shared_bytes) {
  const unsigned clusters = grid_size.y / kClusterBlocks;
  const unsigned y = number / grid_size.x % clusters * kClusterBlocks;
  prepare_cluster({number % grid_size.x, y, number / grid_size.x / clusters}, shared_bytes);
  current = descending ? &threads[num_threads - 1] : &threads[0];
  switch_to(scheduler, current->context);
  check_cluster(shared_bytes);
}

// What is wrong with a launch; null: nothing.
inline const char* refuse(size_t shared_bytes) {
  const int block_threads = block_warps * kWarp;
  if (block_threads < kWarp || block_threads > kMaxBlockThreads || block_size.x * block_size.y * block_size.z % kWarp)
    return "a block has 32 to 1024 threads, in whole warps";
  if (shared_bytes > kSharedBytes) return "a block has at most 232 KiB of shared memory";
  if (grid_size.y % kClusterBlocks) return "the grid is not whole clusters along y";
  if (num_threads > kMaxThreads) return "the emulator has at most 2048 threads for a cluster";
  if (kClusterBlocks > 1 && __start_tl_shared) return "a kernel with clusters has dynamic shared memory only";
  return nullptr;
}

inline int run(const unsigned* grid, const unsigned* block, size_t shared_bytes, bool reverse) {
  error[0] = 0;
  grid_size = {grid[0], grid[1], grid[2]};
  block_size = {block[0], block[1], block[2]};
  block_warps = block[0] * block[1] * block[2] / kWarp;
  num_warps = block_warps * kClusterBlocks;
  num_threads = num_warps * kWarp;
  descending = reverse;
  if (const char* sentence = refuse(shared_bytes)) {
    std::snprintf(error, sizeof error, "%s: %u x %u x %u threads, %zu bytes of shared memory, %u x %u x %u blocks",
                  sentence, block[0], block[1], block[2], shared_bytes, grid[0], grid[1], grid[2]);
    return 1;
  }
  if (!stacks) stacks = static_cast<unsigned char*>(std::aligned_alloc(64, kMaxThreads * kStackBytes));
  const unsigned num_clusters = grid[0] * grid[1] * grid[2] / kClusterBlocks;
  for (unsigned i = 0; i < num_clusters && !error[0]; ++i)
    run_cluster(reverse ? num_clusters - 1 - i : i, shared_bytes);
  return error[0] != 0;
}

// ---- what a generated launcher calls ------------------------------------------------------------------------------

template <class T>
constexpr char kind_of(const T*) {
  return sizeof(T) == 8 ? 'l' : 'i';
}
constexpr char kind_of(const float*) { return 'f'; }
template <class T>
constexpr char kind_of(T* const*) {
  return 'p';
}

// One letter a parameter: p pointer, i 32-bit integer, l 64-bit integer, f float.
template <class... P>
const char* signature(void (*)(P...)) {
  static const char letters[] = {kind_of(static_cast<const P*>(nullptr))..., 0};
  return letters;
}

template <class... P, size_t... I>
void call_kernel(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<P*>(arguments[I])...);
}

template <class... P>
int launch(void (*kernel)(P...), const unsigned* grid, const unsigned* block, size_t shared_bytes, bool reverse,
           void** arguments) {
  struct State {
    void (*kernel)(P...);
    void** arguments;
  } state{kernel, arguments};
  body.state = &state;
  body.call = [](void* erased) {
    auto* s = static_cast<State*>(erased);
    call_kernel(s->kernel, s->arguments, std::index_sequence_for<P...>{});
  };
  return run(grid, block, shared_bytes, reverse);
}

}  // namespace emulator

#define TL_EXPORTED extern "C" __attribute__((used, visibility("default")))

TL_EXPORTED inline const char* tl_error() { return emulator::error; }
