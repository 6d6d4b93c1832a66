// The names of kernels_cu/include/ptx_sm90.cuh in C++ on fibers; included by it when TL_EMULATED is defined.
//
// A product of a warpgroup is done when it is started, warp by warp, with the numbers of mma_m16n8k16; what a GPU would
// let happen later shows only in the order of the instructions, which is checked.  Stores to other blocks of a cluster
// and bulk copies land at once.
#pragma once

#include "emulator.hpp"

#define CLUSTER_ALONG_Y(blocks)

#define DYNAMIC_SHARED_ALIGNED(name) DYNAMIC_SHARED(name)

struct SharedMatrix {
  const unsigned char* first;
  int next_k, next_rows;  // next_k 16: swizzled rows of 128 bytes
};

inline SharedMatrix shared_matrix(const void* shared, int next_k, int next_rows) {
  return {static_cast<const unsigned char*>(shared), next_k, next_rows};
}

inline SharedMatrix swizzled_matrix(const void* shared) {
  if (reinterpret_cast<uintptr_t>(shared) % 1024) emulator::fail("a swizzled matrix is not at a multiple of 1024 bytes");
  return {static_cast<const unsigned char*>(shared), 16, 1024};
}

inline SharedMatrix operator+(SharedMatrix m, int bytes) { return {m.first + bytes, m.next_k, m.next_rows}; }

namespace emulator {

// The first of 8 k of a row; which 8 k: 0 or 1.
inline const unsigned char* row_of(const SharedMatrix& m, int row, int which) {
  const unsigned char* tile = m.first + row / 8 * m.next_rows + which * m.next_k;
  if (m.next_k != 16) return tile + row % 8 * 16;
  const auto place = reinterpret_cast<uintptr_t>(tile + row % 8 * 128);
  return reinterpret_cast<const unsigned char*>(place ^ (place >> 7 & 7) << 4);
}

// One warp's 16 rows: the matrix's tiles of 8 rows and 16 bytes unfolded, then as a warp's own product.
template <int kTiles, void complete(Lane*)>
inline void complete_wgmma(Lane* lanes) {
  const auto* first = static_cast<const unsigned char*>(lanes[0].row);
  const SharedMatrix matrix = {first, static_cast<int>(lanes[0].b[0]), static_cast<int>(lanes[0].b[1])};
  u32 sums_before[kWarp][2];
  for (int i = 0; i < kWarp; ++i) std::memcpy(sums_before[i], lanes[i].b, 8);
  for (int i = 1; i < kWarp; ++i)
    if (lanes[i].row != first || std::memcmp(sums_before[i], sums_before[0], 8) || lanes[i].value != lanes[0].value)
      fail("lanes of a warp multiply by different matrices");
  unsigned char* sums[kWarp];
  for (int lane = 0; lane < kWarp; ++lane) {
    sums[lane] = static_cast<unsigned char*>(lanes[lane].c);
    if (!lanes[lane].value) std::memset(lanes[lane].c, 0, kTiles * 16);
  }
  for (int tile = 0; tile < kTiles; ++tile) {
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int i = 0; i < 2; ++i)
        std::memcpy(&lanes[lane].b[i], row_of(matrix, 8 * tile + lane / 4, i) + lane % 4 * 4, 4);
      lanes[lane].c = sums[lane] + tile * 16;
    }
    complete(lanes);
  }
}

template <int kTiles, void complete(Lane*)>
inline void multiply_by_warpgroup(void* c, const u32 (&a)[4], SharedMatrix b, bool add) {
  Products& products = current->products;
  if (!products.fenced) fail("a wgmma without a wgmma_fence since its registers were last used");
  if (!products.memory_fenced) fail("a wgmma of a thread that never called fence_for_wgmma");
  ++products.started;
  check_aligned(b.first);
  Lane& lane = my_lane();
  std::memcpy(lane.a, a, sizeof lane.a);
  lane.b[0] = b.next_k;
  lane.b[1] = b.next_rows;
  lane.c = c;
  lane.row = b.first;
  lane.value = add;
  meet(Meeting::wgmma, complete_wgmma<kTiles, complete>);
}

}  // namespace emulator

template <int kTiles>
inline void wgmma(float (&c)[kTiles][4], const u32 (&a)[4], SharedMatrix b, bool add) {
  emulator::multiply_by_warpgroup<kTiles, emulator::complete_mma>(c, a, b, add);
}

template <int kTiles>
inline void wgmma_s8(i32 (&c)[kTiles][4], const u32 (&a)[4], SharedMatrix b, bool add) {
  emulator::multiply_by_warpgroup<kTiles, emulator::complete_mma_bytes<signed char>>(c, a, b, add);
}

template <int kTiles>
inline void wgmma_u8(i32 (&c)[kTiles][4], const u32 (&a)[4], SharedMatrix b, bool add) {
  emulator::multiply_by_warpgroup<kTiles, emulator::complete_mma_bytes<unsigned char>>(c, a, b, add);
}

inline void wgmma_fence() { emulator::current->products.fenced = true; }

inline void wgmma_commit() {
  emulator::Products& products = emulator::current->products;
  products.groups += products.started > 0;
  products.started = 0;
}

template <int kGroups>
inline void wgmma_wait() {
  emulator::Products& products = emulator::current->products;
  if (products.started) emulator::fail("a wgmma_wait before the wgmma_commit");
  products.groups = min(products.groups, kGroups);
  products.fenced = false;
}

inline void wait_for_value(float) {}

inline void fence_for_wgmma() { emulator::current->products.memory_fenced = true; }

// ---- clusters -------------------------------------------------------------------------------------------------

inline void cluster_arrive() {
  emulator::ClusterBarrier& barrier = emulator::cluster_barrier;
  emulator::current->meeting = barrier.meeting + 1;
  if (++barrier.num_arrived < emulator::num_threads) return;
  barrier = {0, barrier.meeting + 1};
  emulator::wake_parked();
}

inline void cluster_wait() {
  while (emulator::cluster_barrier.meeting < emulator::current->meeting) emulator::park();
}

struct alignas(8) Arrivals {
  static constexpr unsigned short kStarted = 0x7e11;
  int bytes;  // still to come
  unsigned short started;
  unsigned char expecting, rounds;
};

namespace emulator {

inline void check_started(const Arrivals* arrivals) {
  if (arrivals->started != Arrivals::kStarted) fail("arrivals are used before start_arrivals");
}

inline void count_bytes(Arrivals* arrivals, int bytes) {
  arrivals->bytes += bytes;
  if (!arrivals->expecting || arrivals->bytes) return;
  arrivals->expecting = 0;
  ++arrivals->rounds;
  wake_parked();
}

// The same place in the shared memory of another block of the cluster.
template <class T>
inline T* in_block(T* shared, int rank) {
  auto* own = reinterpret_cast<unsigned char*>(shared);
  return reinterpret_cast<T*>(own - shared_memory[current->block] + shared_memory[rank]);
}

}  // namespace emulator

inline void start_arrivals(Arrivals* arrivals) { *arrivals = {0, Arrivals::kStarted, 0, 0}; }

inline void expect_bytes(Arrivals* arrivals, int bytes) {
  emulator::check_started(arrivals);
  arrivals->expecting = 1;
  emulator::count_bytes(arrivals, bytes);
}

inline void wait_for_bytes(Arrivals* arrivals, int round) {
  emulator::check_started(arrivals);
  while (arrivals->rounds % 2 == round % 2) emulator::park();
}

inline void copy_bulk(void* shared, const void* global, int bytes, Arrivals* arrivals) {
  emulator::check_started(arrivals);
  emulator::check_aligned(shared);
  emulator::check_aligned(global);
  if (bytes % 16) emulator::fail("a bulk copy of bytes that are no multiple of 16");
  std::memcpy(shared, global, bytes);
  emulator::count_bytes(arrivals, -bytes);
}

inline void store_in_cluster(float4* shared, Arrivals* arrivals, int rank, const float4& v) {
  emulator::check_aligned(shared);
  *emulator::in_block(shared, rank) = v;
  Arrivals* there = emulator::in_block(arrivals, rank);
  emulator::check_started(there);
  emulator::count_bytes(there, -static_cast<int>(sizeof v));
}
