// The names of kernels_cu/include/ptx.cuh, and CUDA's own that kernels use, in C++ on fibers.
//
// Included by ptx.cuh when TL_EMULATED is defined.  Numbers: halves round to nearest even; mma adds its 16 products in
// double and rounds once, so that their order does not show (it does not on hardware, which truncates), so compare with
// a tolerance, never for equality with a GPU.  Asynchronous copies land at the wait, so that a missing wait shows, or in a descending run at once,
// so that a copy to what is still read shows.
#pragma once

#include "emulator.hpp"

// C's functions, declared here: <cmath> takes the compiler longer than a kernel does.
extern "C" {
float expf(float) noexcept;
float exp2f(float) noexcept;
float logf(float) noexcept;
float log2f(float) noexcept;
float log1pf(float) noexcept;
float sqrtf(float) noexcept;
float fabsf(float) noexcept;
float floorf(float) noexcept;
float ceilf(float) noexcept;
float rintf(float) noexcept;
float fmaxf(float, float) noexcept;
float fminf(float, float) noexcept;
float fmaf(float, float, float) noexcept;
double ceil(double) noexcept;
double exp(double) noexcept;
double fabs(double) noexcept;
double floor(double) noexcept;
double log(double) noexcept;
double sqrt(double) noexcept;
double fma(double, double, double) noexcept;
}
#define INFINITY __builtin_inff()

#define __global__ __attribute__((used, noinline))  // builder.py looks for exactly this
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__ static __attribute__((section("tl_shared")))  // not inside templates: use DYNAMIC_SHARED there
#define DEVICE inline
#define DEVICE_CALL inline
#define DYNAMIC_SHARED(name) unsigned char* const name = emulator::shared_memory[emulator::current->block]

#define threadIdx (emulator::current->index)
#define blockIdx (emulator::my_block().index)
#define gridDim (emulator::grid_size)
#define blockDim (emulator::block_size)

#define __syncthreads() emulator::sync_block()
#define __syncwarp() emulator::sync_warp()

// ---- CUDA's functions -----------------------------------------------------------------------------------------

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
inline u32 max(u32 a, u32 b) { return a > b ? a : b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline int __clz(int v) { return v ? __builtin_clz(static_cast<u32>(v)) : 32; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline u32 __brev(u32 v) {
  u32 reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (v >> i & 1) << (31 - i);
  return reversed;
}
inline u32 __umulhi(u32 a, u32 b) { return static_cast<u32>(static_cast<u64>(a) * b >> 32); }
inline u32 __float_as_uint(float f) { return __builtin_bit_cast(u32, f); }
inline int __float_as_int(float f) { return __builtin_bit_cast(int, f); }
inline float __uint_as_float(u32 v) { return __builtin_bit_cast(float, v); }
inline float __int_as_float(int v) { return __builtin_bit_cast(float, v); }
template <class T>
inline T __ldg(const T* p) {
  return *p;
}

namespace emulator {

inline float widen(u32 bits) { return __builtin_bit_cast(_Float16, static_cast<u16>(bits)); }
inline u16 narrow(float value) {
  return value != value ? 0x7fff : __builtin_bit_cast(u16, static_cast<_Float16>(value));  // PTX's NaN
}

// A double to a half in one rounding: on the way through float the inexact bit is kept odd.
inline u16 narrow_exactly(double value) {
  float nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) != value && __builtin_isfinite(nearest)) {
    u32 bits = __builtin_bit_cast(u32, nearest);
    if (fabs(static_cast<double>(nearest)) > fabs(value)) --bits;
    nearest = __builtin_bit_cast(float, bits | 1);
  }
  return narrow(nearest);
}

inline u32 pair(u16 low, u16 high) { return low | static_cast<u32>(high) << 16; }

inline void check_aligned(const void* address, int bytes = 16) {
  if (reinterpret_cast<uintptr_t>(address) % bytes)
    fail(bytes == 16 ? "a 16-byte access at an address that is not a multiple of 16" : "a misaligned access");
}

typedef float Row8 __attribute__((vector_size(32)));
typedef double Wide8 __attribute__((vector_size(64)));

inline void widen_eight(float* wide, const u32* pairs) {
#ifdef __F16C__
  typedef short Halves __attribute__((vector_size(16)));
  Halves halves;
  std::memcpy(&halves, pairs, sizeof halves);
  const Row8 values = __builtin_ia32_vcvtph2ps256(halves);
  std::memcpy(wide, &values, sizeof values);
#else
  for (int i = 0; i < 8; ++i) wide[i] = widen(pairs[i / 2] >> 16 * (i & 1));
#endif
}

// Eight sums at a time, so that none waits for itself.
inline void multiply_eight_rows(float (*c)[8], const float (*a)[16], const float (*b)[8]) {
  Wide8 sums[8] = {};
  for (int k = 0; k < 16; ++k) {
    Row8 row_k;
    std::memcpy(&row_k, b[k], sizeof row_k);
    const Wide8 columns = __builtin_convertvector(row_k, Wide8);
    for (int row = 0; row < 8; ++row) sums[row] += a[row][k] * columns;
  }
  for (int row = 0; row < 8; ++row) {
    Row8 before;
    std::memcpy(&before, c[row], sizeof before);
    const Row8 after = __builtin_convertvector(sums[row] + __builtin_convertvector(before, Wide8), Row8);
    std::memcpy(c[row], &after, sizeof after);
  }
}

// ptx.cuh draws the fragments: unfold A, B and C from the lanes, multiply, fold C back.
inline void complete_mma(Lane* lanes) {
  float a[16][16], b[16][8];
  float c[16][8];
  for (int lane = 0; lane < kWarp; ++lane) {
    const Lane& from = lanes[lane];
    const int g = lane / 4, t = lane % 4;
    float wide[8];
    widen_eight(wide, from.a);
    for (int i = 0; i < 4; ++i) std::memcpy(&a[g + 8 * (i & 1)][2 * t + 8 * (i >> 1)], wide + 2 * i, 8);
    widen_eight(wide, from.b);
    for (int i = 0; i < 4; ++i) b[2 * t + 8 * (i >> 1) + (i & 1)][g] = wide[i];
    std::memcpy(&c[g][2 * t], from.c, 8);
    std::memcpy(&c[g + 8][2 * t], static_cast<float*>(from.c) + 2, 8);
  }
  multiply_eight_rows(c, a, b);
  multiply_eight_rows(c + 8, a + 8, b);
  for (int lane = 0; lane < kWarp; ++lane) {
    const int g = lane / 4, t = lane % 4;
    std::memcpy(lanes[lane].c, &c[g][2 * t], 8);
    std::memcpy(static_cast<float*>(lanes[lane].c) + 2, &c[g + 8][2 * t], 8);
  }
}

// The same of bytes; sums are exact.
template <class A>
inline void complete_mma_bytes(Lane* lanes) {
  A a[16][32];
  signed char b[32][8];
  for (int lane = 0; lane < kWarp; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) std::memcpy(&a[g + 8 * (i & 1)][4 * t + 16 * (i >> 1)], &lanes[lane].a[i], 4);
    for (int i = 0; i < 8; ++i)
      b[4 * t + 16 * (i / 4) + i % 4][g] = static_cast<signed char>(lanes[lane].b[i / 4] >> 8 * (i % 4));
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    const int g = lane / 4, t = lane % 4;
    int c[4];
    std::memcpy(c, lanes[lane].c, sizeof c);
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < 32; ++k) c[i] += a[g + i / 2 * 8][k] * b[k][2 * t + i % 2];
    std::memcpy(lanes[lane].c, c, sizeof c);
  }
}

template <bool kTransposed>
inline void complete_ldmatrix(Lane* lanes) {
  for (int matrix = 0; matrix < 4; ++matrix) {
    u16 values[8][8];
    for (int row = 0; row < 8; ++row) std::memcpy(values[row], lanes[8 * matrix + row].row, 16);
    for (int lane = 0; lane < kWarp; ++lane) {
      const int g = lane / 4, t = lane % 4;
      lanes[lane].result[matrix] = kTransposed ? pair(values[2 * t][g], values[2 * t + 1][g])
                                               : pair(values[g][2 * t], values[g][2 * t + 1]);
    }
  }
}

template <bool kTransposed>
inline void load_matrices(u32 (&r)[4], const void* shared) {
  check_aligned(shared);
  my_lane().row = shared;
  my_lane().result = r;
  meet(Meeting::matrix, complete_ldmatrix<kTransposed>);
}

inline u32 exchange(u32 value, int source) {
  u32 result;
  Lane& lane = my_lane();
  lane.value = value;
  lane.source = source < 0 || source >= kWarp ? current->lane : source;
  lane.result = &result;
  meet(Meeting::shuffle, [](Lane* lanes) {
    for (int i = 0; i < kWarp; ++i) *lanes[i].result = lanes[lanes[i].source].value;
  });
  return result;
}

template <class T>
inline T exchange_as(T value, int source) {
  return __builtin_bit_cast(T, exchange(__builtin_bit_cast(u32, value), source));
}

inline void land(const Copy& copy) {
  if (copy.global) std::memcpy(copy.shared, copy.global, copy.bytes);
  else std::memset(copy.shared, 0, copy.bytes);
}

inline void start_copy(void* shared, const void* global, size_t bytes) {
  if (descending) return land({shared, global, bytes});
  CopyQueue& queue = current->queue;
  if (queue.num_copies == kMaxCopies) fail("more asynchronous copies under way than the emulator keeps");
  queue.copies[queue.num_copies++] = {shared, global, bytes};
}

inline void land_groups(CopyQueue& queue, int under_way) {
  const int landed = queue.num_groups - under_way;
  if (landed <= 0) return;
  const int end = queue.group_end[landed - 1];
  for (int i = 0; i < end; ++i) land(queue.copies[i]);
  std::memmove(queue.copies, queue.copies + end, (queue.num_copies - end) * sizeof(Copy));
  queue.num_copies -= end;
  for (int i = landed; i < queue.num_groups; ++i) queue.group_end[i - landed] = queue.group_end[i] - end;
  queue.num_groups = under_way;
}

}  // namespace emulator

// ---- ptx.cuh --------------------------------------------------------------------------------------------------

inline u32 lop3_and_or(u32 a, u32 mask, u32 bits) { return (a & mask) | bits; }

inline u32 permute_bytes(u32 low, u32 high, u32 selector) {
  const u64 bytes = static_cast<u64>(high) << 32 | low;
  u32 result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<u32>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}

inline float half_to_float(u16 bits) { return emulator::widen(bits); }
inline u16 float_to_half(float value) { return emulator::narrow(value); }
inline u32 pack_half2(float low, float high) { return emulator::pair(float_to_half(low), float_to_half(high)); }

// Sums and products of halves are exact or correctly rounded in float with bits to spare: one rounding is seen.
inline u32 half2_add(u32 a, u32 b) {
  using emulator::widen;
  return pack_half2(widen(a) + widen(b), widen(a >> 16) + widen(b >> 16));
}
inline u32 half2_sub(u32 a, u32 b) {
  using emulator::widen;
  return pack_half2(widen(a) - widen(b), widen(a >> 16) - widen(b >> 16));
}
inline u32 half2_mul(u32 a, u32 b) {
  using emulator::widen;
  return pack_half2(widen(a) * widen(b), widen(a >> 16) * widen(b >> 16));
}
inline u32 half2_fma(u32 a, u32 b, u32 c) {
  using emulator::widen;
  const double low = static_cast<double>(widen(a)) * widen(b) + widen(c);
  const double high = static_cast<double>(widen(a >> 16)) * widen(b >> 16) + widen(c >> 16);
  return emulator::pair(emulator::narrow_exactly(low), emulator::narrow_exactly(high));
}

inline u32 half2_max_nan(u32 a, u32 b) {
  using emulator::widen;
  const auto greater = [](float x, float y) { return x != x || x > y ? x : y; };
  return pack_half2(greater(widen(a), widen(b)), greater(widen(a >> 16), widen(b >> 16)));
}

inline float reciprocal_fast(float x) { return 1.0f / x; }

inline float exp2_fast(float x) {
  const float result = exp2f(x);
  return result < 1.17549435e-38f ? 0.0f : result;
}

inline float min_nan(float a, float b) { return a != a || a < b ? a : b; }
inline float max_nan(float a, float b) { return a != a || a > b ? a : b; }

inline void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emulator::Lane& lane = emulator::my_lane();
  std::memcpy(lane.a, a, sizeof a);
  lane.b[0] = b0;
  lane.b[1] = b1;
  lane.c = c;
  emulator::meet(emulator::Meeting::mma, emulator::complete_mma);
}

namespace emulator {

template <class A>
inline void multiply_bytes(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  Lane& lane = my_lane();
  std::memcpy(lane.a, a, sizeof a);
  lane.b[0] = b0;
  lane.b[1] = b1;
  lane.c = c;
  meet(Meeting::mma, complete_mma_bytes<A>);
}

}  // namespace emulator

inline void mma_m16n8k32_s8(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emulator::multiply_bytes<signed char>(c, a, b0, b1);
}
inline void mma_m16n8k32_u8(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emulator::multiply_bytes<unsigned char>(c, a, b0, b1);
}

inline void ldmatrix_x4(u32 (&r)[4], const void* shared) { emulator::load_matrices<false>(r, shared); }
inline void ldmatrix_x4_trans(u32 (&r)[4], const void* shared) { emulator::load_matrices<true>(r, shared); }

inline uint4 load_global(const uint4* global) {
  emulator::check_aligned(global);
  return *global;
}
inline uint4 load_stream(const uint4* global) { return load_global(global); }

inline uint4 load_stream_if(const uint4* global, bool wanted) { return wanted ? load_global(global) : uint4{}; }
inline uint2 load_stream(const uint2* global) {
  emulator::check_aligned(global, 8);
  return *global;
}
inline uint2 load_stream_if(const uint2* global, bool wanted) { return wanted ? load_stream(global) : uint2{}; }
inline float2 load_l2(const float2* global, bool wanted = true) { return wanted ? *global : float2{}; }

inline void cp_async16(void* shared, const void* global, bool valid) {
  emulator::check_aligned(shared);
  emulator::check_aligned(global);
  emulator::start_copy(shared, valid ? global : nullptr, 16);
}

inline void cp_async8(void* shared, const void* global) {
  emulator::check_aligned(shared, 8);
  emulator::check_aligned(global, 8);
  emulator::start_copy(shared, global, 8);
}

inline void cp_async4(void* shared, const void* global) {
  emulator::check_aligned(shared, 4);
  emulator::check_aligned(global, 4);
  emulator::start_copy(shared, global, 4);
}

inline u64 cache_policy(bool keep) { return keep; }
inline void cp_async16(void* shared, const void* global, u64) { cp_async16(shared, global, true); }

inline void cp_async_commit() {
  emulator::CopyQueue& queue = emulator::current->queue;
  if (queue.num_groups == emulator::kMaxGroups) emulator::fail("more groups of copies under way than the emulator keeps");
  queue.group_end[queue.num_groups++] = queue.num_copies;
}

template <int kGroups>
inline void cp_async_wait() {
  emulator::land_groups(emulator::current->queue, kGroups);
}

inline i32 atomic_add(i32* address, i32 value) {
  const i32 before = *address;
  *address = before + value;
  return before;
}


inline void thread_fence() {}

template <class T>
inline T shuffle_xor(T value, int mask) {
  return emulator::exchange_as(value, emulator::current->lane ^ mask);
}
template <class T>
inline T shuffle_down(T value, int delta) {
  return emulator::exchange_as(value, emulator::current->lane + delta);
}
template <class T>
inline T shuffle_from(T value, int lane) {
  return emulator::exchange_as(value, lane & 31);
}

inline i32 reduce_min(i32 value) {
  for (int mask = 16; mask > 0; mask /= 2) value = min(value, shuffle_xor(value, mask));
  return value;
}
inline i32 reduce_max(i32 value) {
  for (int mask = 16; mask > 0; mask /= 2) value = max(value, shuffle_xor(value, mask));
  return value;
}

inline u32 ballot(bool predicate) {
  u32 result;
  emulator::Lane& lane = emulator::my_lane();
  lane.value = predicate;
  lane.result = &result;
  emulator::meet(emulator::Meeting::ballot, [](emulator::Lane* lanes) {
    u32 votes = 0;
    for (int i = 0; i < emulator::kWarp; ++i) votes |= lanes[i].value << i;
    for (int i = 0; i < emulator::kWarp; ++i) *lanes[i].result = votes;
  });
  return result;
}

inline void dependency_wait() {}
inline void dependency_launch() {}
