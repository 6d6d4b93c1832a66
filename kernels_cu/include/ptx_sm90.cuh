// Inline PTX that only sm_90a has: products of a warpgroup (wgmma) and clusters of thread blocks.  As ptx.cuh, with the
// emulated back end in tests/emulation/emulated_sm90.hpp.  For other architectures the functions compile, and trap.
#pragma once
#include "ptx.cuh"

#ifdef TL_EMULATED
#include "emulated_sm90.hpp"
#else

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TL_ONLY_SM90(...) __VA_ARGS__
#define CLUSTER_ALONG_Y(blocks) __cluster_dims__(1, blocks, 1)
#else
#define TL_ONLY_SM90(...) __trap()
#define CLUSTER_ALONG_Y(blocks)
#endif

// ---- products of a warpgroup ----------------------------------------------------------------------------------
// All 128 threads of four neighbouring warps, the first one a multiple of four, take part in each of these.

// Dynamic shared memory as DYNAMIC_SHARED, from a multiple of 1024 bytes on: swizzled_matrix wants it.
#define DYNAMIC_SHARED_ALIGNED(name) extern __shared__ __align__(1024) unsigned char name[]

// A matrix in shared memory as 8x8 matrices of halves (128 bytes, 8 rows of 16 bytes): where the first one is.
struct SharedMatrix {
  u64 descriptor;
};

// next_k, next_rows: bytes from one 8x8 matrix to that of the next 8 k, and of the next 8 rows.  All multiples of 16.
DEVICE SharedMatrix shared_matrix(const void* shared, int next_k, int next_rows) {
  const u64 start = (shared_address(shared) & 0x3ffff) >> 4;
  return {start | static_cast<u64>(next_k >> 4) << 16 | static_cast<u64>(next_rows >> 4) << 32};
}

// The same where rows of 64 halves follow each other, 128 bytes each, and piece c (16 bytes) of row r is at c ^ r % 8.
// shared: of row 0, a multiple of 1024; 16 further k are 32 bytes on, 8 further rows 1024.
DEVICE SharedMatrix swizzled_matrix(const void* shared) {
  const u64 start = (shared_address(shared) & 0x3ffff) >> 4;
  return {start | 1ull << 16 | 1024ull >> 4 << 32 | 1ull << 62};
}

DEVICE SharedMatrix operator+(SharedMatrix m, int bytes) { return {m.descriptor + (bytes >> 4)}; }

#define TL_SUMS_1 "{%0, %1, %2, %3"
#define TL_SUMS_2 TL_SUMS_1 ", %4, %5, %6, %7"
#define TL_SUMS_3 TL_SUMS_2 ", %8, %9, %10, %11"
#define TL_SUMS_4 TL_SUMS_3 ", %12, %13, %14, %15"
#define TL_SUMS_5 TL_SUMS_4 ", %16, %17, %18, %19"
#define TL_SUMS_6 TL_SUMS_5 ", %20, %21, %22, %23"
#define TL_SUMS_7 TL_SUMS_6 ", %24, %25, %26, %27"
#define TL_SUMS_8 TL_SUMS_7 ", %28, %29, %30, %31"
#define TL_BOUND_1(kind, c) kind(c[0][0]), kind(c[0][1]), kind(c[0][2]), kind(c[0][3])
#define TL_BOUND_2(kind, c) TL_BOUND_1(kind, c), kind(c[1][0]), kind(c[1][1]), kind(c[1][2]), kind(c[1][3])
#define TL_BOUND_3(kind, c) TL_BOUND_2(kind, c), kind(c[2][0]), kind(c[2][1]), kind(c[2][2]), kind(c[2][3])
#define TL_BOUND_4(kind, c) TL_BOUND_3(kind, c), kind(c[3][0]), kind(c[3][1]), kind(c[3][2]), kind(c[3][3])
#define TL_BOUND_5(kind, c) TL_BOUND_4(kind, c), kind(c[4][0]), kind(c[4][1]), kind(c[4][2]), kind(c[4][3])
#define TL_BOUND_6(kind, c) TL_BOUND_5(kind, c), kind(c[5][0]), kind(c[5][1]), kind(c[5][2]), kind(c[5][3])
#define TL_BOUND_7(kind, c) TL_BOUND_6(kind, c), kind(c[6][0]), kind(c[6][1]), kind(c[6][2]), kind(c[6][3])
#define TL_BOUND_8(kind, c) TL_BOUND_7(kind, c), kind(c[7][0]), kind(c[7][1]), kind(c[7][2]), kind(c[7][3])
// The operands after the sums: a, b and whether to accumulate, numbered from 4 · tiles.
#define TL_WGMMA(tiles, columns, a_numbers, b_number, flag_number)                                              \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" flag_number ", 0;\n"                                    \
               "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.f16.f16 " TL_SUMS_##tiles "}, {" a_numbers  \
               "}, %" b_number ", add, 1, 1, 0;\n}"                                                             \
               : TL_BOUND_##tiles("+f", c)                                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor), "r"(static_cast<u32>(add)))

// c[64 x 8·kTiles] = a[64x16] · b[16 x 8·kTiles], plus c if `add`; fp16 operands, fp32 accumulators.  Warp w has rows
// 16·w … + 15 of a and c, in the fragments of mma_m16n8k16; c[i] is columns 8·i … + 7.  b: two by kTiles 8x8 matrices,
// row = column of b.  Asynchronous: neither a nor c may be touched before wgmma_wait.
template <int kTiles>
DEVICE void wgmma(float (&c)[kTiles][4], const u32 (&a)[4], SharedMatrix b, bool add) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (kTiles == 1) TL_WGMMA(1, "8", "%4, %5, %6, %7", "8", "9");
  if constexpr (kTiles == 2) TL_WGMMA(2, "16", "%8, %9, %10, %11", "12", "13");
  if constexpr (kTiles == 3) TL_WGMMA(3, "24", "%12, %13, %14, %15", "16", "17");
  if constexpr (kTiles == 4) TL_WGMMA(4, "32", "%16, %17, %18, %19", "20", "21");
  if constexpr (kTiles == 5) TL_WGMMA(5, "40", "%20, %21, %22, %23", "24", "25");
  if constexpr (kTiles == 6) TL_WGMMA(6, "48", "%24, %25, %26, %27", "28", "29");
  if constexpr (kTiles == 7) TL_WGMMA(7, "56", "%28, %29, %30, %31", "32", "33");
  if constexpr (kTiles == 8) TL_WGMMA(8, "64", "%32, %33, %34, %35", "36", "37");
#else
  __trap();
#endif
}

#define TL_WGMMA_BYTES(tiles, columns, a_type, a_numbers, b_number, flag_number)                                 \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" flag_number ", 0;\n"                                    \
               "wgmma.mma_async.sync.aligned.m64n" columns "k32.s32." a_type ".s8 " TL_SUMS_##tiles "}, {"        \
               a_numbers "}, %" b_number ", add;\n}"                                                             \
               : TL_BOUND_##tiles("+r", c)                                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor), "r"(static_cast<u32>(add)))
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TL_WGMMA_BYTES_OF(a_type)                                                                                \
  static_assert(kTiles == 4 || kTiles == 8, "32 or 64 columns");                                                 \
  if constexpr (kTiles == 4) TL_WGMMA_BYTES(4, "32", a_type, "%16, %17, %18, %19", "20", "21");                  \
  if constexpr (kTiles == 8) TL_WGMMA_BYTES(8, "64", a_type, "%32, %33, %34, %35", "36", "37")
#else
#define TL_WGMMA_BYTES_OF(a_type) __trap()
#endif

// The same of bytes, 32 of them a step, with exact sums: fragments of mma_m16n8k32, b as above, where 16 bytes are 16 k.
// b is signed, a is signed or unsigned; 4 or 8 tiles.
template <int kTiles>
DEVICE void wgmma_s8(i32 (&c)[kTiles][4], const u32 (&a)[4], SharedMatrix b, bool add) {
  TL_WGMMA_BYTES_OF("s8");
}

template <int kTiles>
DEVICE void wgmma_u8(i32 (&c)[kTiles][4], const u32 (&a)[4], SharedMatrix b, bool add) {
  TL_WGMMA_BYTES_OF("u8");
}

// Between ordinary accesses to a and c and the first wgmma after them.
DEVICE void wgmma_fence() { TL_ONLY_SM90(asm volatile("wgmma.fence.sync.aligned;" ::: "memory")); }

DEVICE void wgmma_commit() { TL_ONLY_SM90(asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory")); }

// Until at most kGroups committed groups are still under way.
template <int kGroups>
DEVICE void wgmma_wait() {
  TL_ONLY_SM90(asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory"));
}

// What comes next waits for `value`, which is nowhere negative: compilers would else move a wgmma_wait before
// arithmetic that is meant to overlap with the products.
DEVICE void wait_for_value(float value) {
  TL_ONLY_SM90(asm volatile("{\n.reg .pred sound, any;\nsetp.geu.f32 sound, %0, 0f00000000;\n"
                            "vote.sync.any.pred any, sound, 0xffffffff;\n@any bra.uni next;\ntrap;\nnext:\n}"
                            ::"f"(value)
                            : "memory"));
}

// This thread's writes to shared memory, landed copies too, become visible to wgmma after the next barrier.
DEVICE void fence_for_wgmma() { TL_ONLY_SM90(asm volatile("fence.proxy.async.shared::cta;" ::: "memory")); }

// ---- clusters -------------------------------------------------------------------------------------------------

// A barrier of all threads of the cluster in two halves.  It orders steps, not memory: what was stored before
// arrive need not be visible after wait (that is what Arrivals are for), but what was read before has been read.
DEVICE void cluster_arrive() { TL_ONLY_SM90(asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory")); }
DEVICE void cluster_wait() { TL_ONLY_SM90(asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory")); }

// In shared memory: counts the bytes that bulk copies and other blocks have stored to this one.
struct alignas(8) Arrivals {
  u64 state;
};

// By one thread, before the barrier (or, for others' stores, the cluster_arrive) that comes before the first use.
DEVICE void start_arrivals(Arrivals* arrivals) {
  TL_ONLY_SM90(asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(
                                shared_address(arrivals))
                            : "memory"));
}

// By one thread, once a round: how many bytes are to come.
DEVICE void expect_bytes(Arrivals* arrivals, int bytes) {
  TL_ONLY_SM90(asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrivals)),
                            "r"(bytes)
                            : "memory"));
}

// Whether all bytes of this round have come; rounds are even and odd in turn, the first one even.  Bytes from other
// blocks, too, are seen then without the scope of a cluster, which would empty the L1 cache every time.
DEVICE bool has_arrived(Arrivals* arrivals, int round) {
  u32 done = 0;
  TL_ONLY_SM90(asm volatile("{\n.reg .pred done;\n"
                            "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                            "selp.u32 %0, 1, 0, done;\n}"
                            : "=r"(done)
                            : "r"(shared_address(arrivals)), "r"(round & 1)
                            : "memory"));
  return done != 0;
}

// Until they have.  All lanes of a warp wait together: so the compiler sees that they go on together, and keeps
// addresses of wgmma in uniform registers.
DEVICE void wait_for_bytes(Arrivals* arrivals, int round) {
  while (ballot(has_arrived(arrivals, round)) != TL_FULL_WARP) {
  }
}

// Copies from global to this block's shared memory, without waiting, and counts the bytes in `arrivals`.  By one
// thread; addresses and bytes are multiples of 16.
DEVICE void copy_bulk(void* shared, const void* global, int bytes, Arrivals* arrivals) {
  TL_ONLY_SM90(asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
                                "r"(shared_address(shared)),
                            "l"(global), "r"(bytes), "r"(shared_address(arrivals))
                            : "memory"));
}

// Stores to the same place in the shared memory of block `rank` of the cluster, without waiting, and counts the bytes
// in the `arrivals` there.
DEVICE void store_in_cluster(float4* shared, Arrivals* arrivals, int rank, const float4& v) {
  TL_ONLY_SM90(asm volatile("{\n.reg .u32 there, count;\nmapa.shared::cluster.u32 there, %0, %2;\n"
                            "mapa.shared::cluster.u32 count, %1, %2;\n"
                            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, "
                            "[count];\n}" ::"r"(shared_address(shared)),
                            "r"(shared_address(arrivals)), "r"(rank), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                            : "memory"));
}

#endif  // TL_EMULATED
