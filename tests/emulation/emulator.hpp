// CUDA's execution model on one CPU thread: a fiber per CUDA thread, blocks one after the other.
//
// In: a kernel (a plain C++ function) with its grid, block and arguments.  Out: 0, or 1 and a sentence in tl_error().
// A fiber runs until it meets a barrier or a warp-wide instruction; the last one to arrive does the work of all and
// the others go on.  What a GPU leaves undefined is made visible: shared memory starts as NaNs, warp-wide
// instructions that not all lanes reach, barriers that not all threads reach and writes past the end of shared
// memory are errors.  `descending` runs blocks, warps and lanes in reverse, so that a missing barrier shows in one of
// the two orders.  Refuses: blocks that are not whole warps, cooperative grids, waiting for another block.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#ifndef __x86_64__
#include <ucontext.h>
#endif

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

constexpr int kWarp = 32, kMaxThreads = 1024, kMaxWarps = kMaxThreads / kWarp;
constexpr size_t kStackBytes = 128 * 1024 + 17 * 64;  // not a power of two: the stacks' tops spread over cache sets
constexpr size_t kSharedBytes = 232 * 1024, kGuardBytes = 256;
constexpr unsigned char kPoison = 0xff;  // NaN in every float format, −1 in every integer
constexpr uint64_t kCanary = 0x7f4c6f6f704c7954;

// ---- fibers -----------------------------------------------------------------------------------------------------

#ifdef __x86_64__
using Context = void*;  // a stack pointer; what the caller of a function may count on lies on the stack
extern "C" __attribute__((visibility("hidden"))) void tl_switch_stack(void** save, void* resume);
asm(R"(
  .text
  .hidden tl_switch_stack
  .type tl_switch_stack, @function
tl_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size tl_switch_stack, . - tl_switch_stack
)");

inline void switch_to(Context& from, Context& to) { tl_switch_stack(&from, to); }

inline void prepare(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
  auto top = reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t{15};
  auto* words = reinterpret_cast<void**>(top) - 2;  // entry sees the stack as after a call: 16k + 8
  words[1] = nullptr;
  words[0] = reinterpret_cast<void*>(entry);
  context = words - 6;  // six registers, whatever they hold
}
#else
using Context = ucontext_t;
inline void switch_to(Context& from, Context& to) { swapcontext(&from, &to); }

inline void prepare(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = bytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
#endif

struct Copy {
  void* shared;
  const void* global;  // null: zeros
};
constexpr int kMaxCopies = 256, kMaxGroups = 32;

// Asynchronous copies of one thread, in order: they land at the wait, not before.
struct CopyQueue {
  Copy copies[kMaxCopies];
  int group_end[kMaxGroups];  // copies up to the end of each committed group
  int num_copies, num_groups;
};

struct Thread {
  Context context;
  uint3 index;
  int warp, lane;
  CopyQueue queue;
};

// ---- a block's state ----------------------------------------------------------------------------------------------

enum class Meeting { none, mma, matrix, shuffle, ballot, sync };

struct Lane {  // what a lane brings to a warp-wide instruction, and where its result goes
  uint32_t a[4], b[4];  // of b, two are read and four may be loaded at once
  float* c;
  const void* row;
  uint32_t* result;
  uint32_t value;
  int source;
};

struct Warp {
  uint32_t ready, arrived, live;  // lanes that can run; wait in `meeting`; have not returned
  Meeting meeting;
  Lane lanes[kWarp];
};

inline Thread threads[kMaxThreads];
inline Warp warps[kMaxWarps];
inline unsigned char* stacks;
inline Thread* current;
inline Context scheduler;
inline int num_threads, num_warps, num_live, num_at_barrier;
inline bool descending;
inline uint3 block_index, grid_size, block_size;
inline char error[512];
alignas(128) inline unsigned char shared_memory[kSharedBytes + kGuardBytes];

struct Body {
  void (*call)(void*);
  void* state;
};
inline Body body;

// Ends the launch with a sentence; the fibers of the block are abandoned.
[[noreturn]] inline void fail(const char* sentence) {
  std::snprintf(error, sizeof error, "%s (block %u,%u,%u thread %u,%u,%u)", sentence, block_index.x, block_index.y,
                block_index.z, current->index.x, current->index.y, current->index.z);
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
  return "some threads wait at __syncthreads() while others never reach it";
}

inline void run_another() {
  Thread* next = next_ready();
  if (!next) fail(deadlock());
  Thread* self = current;
  current = next;
  switch_to(self->context, next->context);
}

inline void fiber_main() {
  body.call(body.state);
  Warp& warp = warps[current->warp];
  warp.ready &= ~(1u << current->lane);
  warp.live &= ~(1u << current->lane);
  --num_live;
  Context finished;
  if (num_live && num_at_barrier == num_live) {  // those that returned do not keep the others at a barrier
    num_at_barrier = 0;
    for (int w = 0; w < num_warps; ++w) warps[w].ready = warps[w].live;
  }
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
  if (++num_at_barrier != num_live) return run_another();
  num_at_barrier = 0;
  for (int w = 0; w < num_warps; ++w) warps[w].ready = warps[w].live;
}

// ---- launching --------------------------------------------------------------------------------------------------------

inline unsigned char* stack_of(int thread) { return stacks + thread * kStackBytes; }

inline void prepare_block(size_t shared_bytes) {
  std::memset(shared_memory, kPoison, shared_bytes);
  std::memset(shared_memory + shared_bytes, 0x5a, kGuardBytes);
  if (__start_tl_shared) std::memset(__start_tl_shared, kPoison, __stop_tl_shared - __start_tl_shared);
  for (int i = 0; i < num_threads; ++i) {
    Thread& thread = threads[i];
    const unsigned n = i, row = n / block_size.x;
    thread.index = {n % block_size.x, row % block_size.y, row / block_size.y};
    thread.warp = i / kWarp;
    thread.lane = i % kWarp;
    thread.queue.num_copies = thread.queue.num_groups = 0;
    prepare(thread.context, stack_of(i) + 64, kStackBytes - 64, fiber_main);
    std::memcpy(stack_of(i), &kCanary, sizeof kCanary);
  }
  for (int w = 0; w < num_warps; ++w) warps[w].ready = warps[w].live = ~0u, warps[w].arrived = 0;
  num_live = num_threads;
  num_at_barrier = 0;
}

inline void check_block(size_t shared_bytes) {
  for (size_t i = 0; i < kGuardBytes && !error[0]; ++i)
    if (shared_memory[shared_bytes + i] != 0x5a)
      std::snprintf(error, sizeof error, "block %u,%u,%u wrote past its %zu bytes of shared memory", block_index.x,
                    block_index.y, block_index.z, shared_bytes);
  for (int i = 0; i < num_threads && !error[0]; ++i)
    if (std::memcmp(stack_of(i), &kCanary, sizeof kCanary))
      std::snprintf(error, sizeof error, "thread %d used more than %zu bytes of stack", i, kStackBytes);
}

inline void run_block(unsigned number, size_t shared_bytes) {
  block_index = {number % grid_size.x, number / grid_size.x % grid_size.y, number / grid_size.x / grid_size.y};
  prepare_block(shared_bytes);
  current = descending ? &threads[num_threads - 1] : &threads[0];
  switch_to(scheduler, current->context);
  check_block(shared_bytes);
}

inline int run(const unsigned* grid, const unsigned* block, size_t shared_bytes, bool reverse) {
  error[0] = 0;
  grid_size = {grid[0], grid[1], grid[2]};
  block_size = {block[0], block[1], block[2]};
  num_threads = block[0] * block[1] * block[2];
  num_warps = num_threads / kWarp;
  descending = reverse;
  if (num_threads < kWarp || num_threads > kMaxThreads || num_threads % kWarp || shared_bytes > kSharedBytes) {
    std::snprintf(error, sizeof error, "a block has %d threads and %zu bytes of shared memory: 32 to 1024 in whole warps and at most %zu are possible",
                  num_threads, shared_bytes, kSharedBytes);
    return 1;
  }
  if (!stacks) stacks = static_cast<unsigned char*>(std::aligned_alloc(64, kMaxThreads * kStackBytes));
  const unsigned num_blocks = grid[0] * grid[1] * grid[2];
  for (unsigned i = 0; i < num_blocks && !error[0]; ++i) run_block(reverse ? num_blocks - 1 - i : i, shared_bytes);
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
