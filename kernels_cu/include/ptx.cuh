// Every instruction that plain C++ cannot spell, and nothing else: the only file with inline PTX, but for
// ptx_sm90.cuh.
//
// Two back ends with the same names:
//   default        real PTX for sm_80 and later, compiled by NVRTC (no CUDA header is included)
//   TL_EMULATED    C++ on fibers, tests/emulation/emulated_ptx.hpp: the same kernels on a machine without a GPU
//
// Half-precision values are 16 bits in memory (u16) and pairs in registers (u32, the first one in the low half).
// Both back ends compile without contraction: a·b + c is fused only where a kernel writes fmaf.  So a row's bits
// cannot depend on what the compiler made of one variant of a kernel or another.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#ifdef TL_EMULATED
#include "emulated_ptx.hpp"
#else

#define DEVICE __device__ __forceinline__
#define DEVICE_CALL __device__ __noinline__  // large, and used from several places

// Dynamic shared memory of the launch, 16-byte aligned, as bytes.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

#define TL_FULL_WARP 0xffffffffu

// ---- bits and halves ------------------------------------------------------------------------------------------

// (a & mask) | bits, in one instruction.
DEVICE u32 lop3_and_or(u32 a, u32 mask, u32 bits) {
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(mask), "r"(bits));
  return result;
}

// Bytes of the eight in (high:low) picked by the nibbles of selector.
DEVICE u32 permute_bytes(u32 low, u32 high, u32 selector) {
  u32 result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
}

DEVICE u32 half2_add(u32 a, u32 b) {
  u32 result;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

DEVICE u32 half2_sub(u32 a, u32 b) {
  u32 result;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

DEVICE u32 half2_mul(u32 a, u32 b) {
  u32 result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// a·b + c, rounded once.
DEVICE u32 half2_fma(u32 a, u32 b, u32 c) {
  u32 result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// The greater of each half; NaN where either is.
DEVICE u32 half2_max_nan(u32 a, u32 b) {
  u32 result;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

DEVICE float half_to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

DEVICE u16 float_to_half(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

DEVICE u32 pack_half2(float low, float high) {
  u32 bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

// 2^x to about 2 ulp; denormal results are zero; 2^(-inf) = 0.
DEVICE float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1/x to 1 ulp; 1/inf = 0.
DEVICE float reciprocal_fast(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// NaN where either is.
DEVICE float min_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

DEVICE float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// ---- tensor cores ---------------------------------------------------------------------------------------------

// c[16x8] += a[16x16] · b[16x8] over a warp, fp16 operands, fp32 accumulators.  Lane = 4·g + t holds
//   a[0] (g, 2t..2t+1)  a[1] (g+8, 2t..)  a[2] (g, 2t+8..)  a[3] (g+8, 2t+8..)      (row, k)
//   b0 (2t..2t+1, g)    b1 (2t+8.., g)                                              (k, column)
//   c[0], c[1] (g, 2t..2t+1)              c[2], c[3] (g+8, 2t..2t+1)                (row, column)
DEVICE void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c[16x8] += a[16x32] · b[32x8] over a warp: bytes, exact sums.  b is signed, a signed or unsigned.  Lane = 4·g + t holds
//   a[0] (g, 4t..4t+3)  a[1] (g+8, 4t..)  a[2] (g, 4t+16..)  a[3] (g+8, 4t+16..)    (row, k)
//   b0 (4t..4t+3, g)    b1 (4t+16.., g)                                             (k, column)
//   c as mma_m16n8k16
#define TL_MMA_BYTES(a_type)                                                                                        \
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." a_type                                                      \
               ".s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                            \
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

DEVICE void mma_m16n8k32_s8(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { TL_MMA_BYTES("s8"); }
DEVICE void mma_m16n8k32_u8(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { TL_MMA_BYTES("u8"); }

DEVICE u32 shared_address(const void* shared) { return static_cast<u32>(__cvta_generic_to_shared(shared)); }

// Four 8x8 matrices of halves.  Lane i names row i%8 of matrix i/8 (16 bytes, 16-byte aligned); r[m] of lane 4·g + t
// becomes matrix m at (row g, columns 2t..2t+1).
DEVICE void ldmatrix_x4(u32 (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared))
               : "memory");
}

// The same with every matrix transposed: r[m] of lane 4·g + t is matrix m at (rows 2t..2t+1, column g).
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared))
               : "memory");
}

// ---- memory ---------------------------------------------------------------------------------------------------

// Data that is read once (K and V pages): first to leave L2, passes L1 by.
DEVICE uint4 load_stream(const uint4* global) {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(global), "l"(policy)
               : "memory");
  return v;
}

// The same where `wanted`, else zeros; straight-line code, so that many can be under way at once.
DEVICE uint4 load_stream_if(const uint4* global, bool wanted) {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  uint4 v = {0, 0, 0, 0};
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %6, 0;\n"
      "@wanted ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;\n}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(global), "l"(policy), "r"(static_cast<u32>(wanted))
      : "memory");
  return v;
}

// Both for 8 bytes.
DEVICE uint2 load_stream(const uint2* global) {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  uint2 v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
               : "=r"(v.x), "=r"(v.y)
               : "l"(global), "l"(policy)
               : "memory");
  return v;
}

DEVICE uint2 load_stream_if(const uint2* global, bool wanted) {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  uint2 v = {0, 0};
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %4, 0;\n"
      "@wanted ld.global.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;\n}"
      : "+r"(v.x), "+r"(v.y)
      : "l"(global), "l"(policy), "r"(static_cast<u32>(wanted))
      : "memory");
  return v;
}

DEVICE uint4 load_global(const uint4* global) { return *global; }

// What another block of the same kernel wrote before a fence: passes L1 by, which may hold an older copy.  Zeros
// where not wanted.
DEVICE float2 load_l2(const float2* global, bool wanted = true) {
  float2 v = {0.0f, 0.0f};
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %3, 0;\n@wanted ld.global.cg.v2.f32 {%0, %1}, [%2];\n}"
      : "+f"(v.x), "+f"(v.y)
      : "l"(global), "r"(static_cast<u32>(wanted))
      : "memory");
  return v;
}

// 16 bytes from global to shared memory, both 16-byte aligned, without waiting; zeros where not valid.  Complete for
// this thread after cp_async_wait, for the block after a further __syncthreads.
DEVICE void cp_async16(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}

// How long lines stay in L2: to the last (weights that other layers and steps read again), or first to go.
DEVICE u64 cache_policy(bool keep) {
  u64 stay, leave;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(stay));
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(leave));
  return keep ? stay : leave;
}

// cp_async16 of constant data under a cache policy.  Not where threads are mere offsets from one shared address, as of
// a short array: ptxas 13.0 then splits the address, and encodes an instruction that no device knows.
DEVICE void cp_async16(void* shared, const void* global, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "l"(policy)
               : "memory");
}

// 8 bytes and 4, always.
DEVICE void cp_async8(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

DEVICE void cp_async4(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most `kGroups` of this thread's committed groups are still under way.
template <int kGroups>
DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

DEVICE i32 atomic_add(i32* address, i32 value) { return atomicAdd(address, value); }

DEVICE void thread_fence() { __threadfence(); }

// ---- a warp ---------------------------------------------------------------------------------------------------
// All 32 lanes take part in each of these.

DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(TL_FULL_WARP, value, mask); }
DEVICE u32 shuffle_xor(u32 value, int mask) { return __shfl_xor_sync(TL_FULL_WARP, value, mask); }
DEVICE i32 shuffle_xor(i32 value, int mask) { return __shfl_xor_sync(TL_FULL_WARP, value, mask); }
DEVICE float shuffle_down(float value, int delta) { return __shfl_down_sync(TL_FULL_WARP, value, delta); }
DEVICE u32 shuffle_down(u32 value, int delta) { return __shfl_down_sync(TL_FULL_WARP, value, delta); }
DEVICE i32 shuffle_down(i32 value, int delta) { return __shfl_down_sync(TL_FULL_WARP, value, delta); }
DEVICE float shuffle_from(float value, int lane) { return __shfl_sync(TL_FULL_WARP, value, lane); }
DEVICE u32 shuffle_from(u32 value, int lane) { return __shfl_sync(TL_FULL_WARP, value, lane); }
DEVICE i32 shuffle_from(i32 value, int lane) { return __shfl_sync(TL_FULL_WARP, value, lane); }

DEVICE i32 reduce_min(i32 value) { return __reduce_min_sync(TL_FULL_WARP, value); }
DEVICE i32 reduce_max(i32 value) { return __reduce_max_sync(TL_FULL_WARP, value); }

DEVICE u32 ballot(bool predicate) { return __ballot_sync(TL_FULL_WARP, predicate); }

// ---- programmatic dependent launch ----------------------------------------------------------------------------

// Until the kernel before this one has finished and its writes are visible.  Every kernel that may be launched with
// dependent=True calls it before it reads or writes anything another kernel touches.  Nothing below sm_90.
DEVICE void dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel's blocks may start to be scheduled.
DEVICE void dependency_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

#endif  // TL_EMULATED
