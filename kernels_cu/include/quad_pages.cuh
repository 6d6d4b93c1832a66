// A quad's pages in shared memory, as wgmma reads them: how they get there.
//
//   K   [D/64][64 tokens][64 dims]     tokens and dims in steps; 16-byte pieces of a row swizzled (ptx_sm90.cuh)
//   V   [8][D dims][8 tokens]          tokens in steps
//
// In steps: element 32·j + 8·a + 4·i + b of a row is the (4·a + b)th of step 2·j + i (decode_quads.cuh says why).  Halves of
// two pages, which come by copies of four elements; or the levels of two, of which all threads make halves of one before
// they multiply it.
#pragma once

#include "decode_many.cuh"
#include "ptx_sm90.cuh"

constexpr int kQuadSlots = 2;               // pages under way
constexpr int kUnit = 4;                    // elements that stay side by side
constexpr int kKeyRowBytes = 128;           // 64 dims
constexpr int kKeyBlockBytes = kPageTokens * kKeyRowBytes;
constexpr int kKeyStepBytes = 32;
constexpr int kStripBytes = kHeadDim * 16;  // 8 tokens of all dims
static_assert(kThreads == 128, "a block is a warpgroup");

struct HalvesOfPage {
  unsigned char keys[2 * kHeadElements], values[2 * kHeadElements];
};

// Element i of a row: where it is.
DEVICE constexpr int place_in_steps(int i) { return i / 32 * 32 + i / 4 % 2 * 16 + i / 8 % 4 * 4 + i % 4; }

// The bytes of piece `piece` of a row of K, rows in their places.
DEVICE int place_of_key_piece(int row, int piece) {
  return piece / 8 * kKeyBlockBytes + row * kKeyRowBytes + (piece % 8 ^ row % 8) * 16;
}

// And of element `token`, in its place, of a dim of Vᵀ.
DEVICE int place_of_value(int token, int dim) { return token / 8 * kStripBytes + dim * 16 + token % 8 * 2; }

#ifdef TL_INT8

constexpr int kLandedOctet = kHeadDim * 8 + 64;  // octets begin in banks of their own

struct LevelsOfPage : SharedScales {
  unsigned char keys[kHeadElements], values[kOctets * kLandedOctet];
};

struct alignas(1024) QuadShared {
  HalvesOfPage halves;
  LevelsOfPage landed[kQuadSlots];
  SharedScales of_halves;

  DEVICE const HalvesOfPage& page(int) const { return halves; }
  DEVICE const SharedScales& scales() const { return of_halves; }
};

// Asks for a page, as the nth.
DEVICE void ask_for_page(QuadShared& shared, int n, const PageHead& from) {
  LevelsOfPage& landed = shared.landed[n % kQuadSlots];
#pragma unroll
  for (int i = 0; i < kHeadElements / 16 / kThreads; ++i) {
    const int at = 16 * (i * kThreads + static_cast<int>(threadIdx.x));
    cp_async16(landed.keys + at, from.keys + at, true);
    cp_async16(landed.values + at / (8 * kHeadDim) * kLandedOctet + at % (8 * kHeadDim), from.values + at, true);
  }
  landed.copy_scales(from.key_scales, from.value_scales,
                     [&](uint4* to, const uint4* scales, int) { cp_async16(to, scales, true); });
}

DEVICE uint2 widened(u32 levels) {
  u32 pairs[2];
  widen_levels(pairs, levels);
  return make_uint2(pairs[0], pairs[1]);
}

DEVICE void swap_if(u32& a, u32& b, bool swapped) {
  const u32 old = a;
  a = swapped ? b : a;
  b = swapped ? old : b;
}

// K of a page: 16 dims of a token at a time, four by four.  Which four a lane stores first is such that lanes meet no
// bank twice.
DEVICE void widen_keys(unsigned char* keys, const LevelsOfPage& landed) {
  constexpr int kPieces = kHeadDim / 16;  // of a token
#pragma unroll
  for (int i = 0; i < kHeadElements / 16 / kThreads; ++i) {
    const int n = i * kThreads + static_cast<int>(threadIdx.x), token = n / kPieces, nth = n % kPieces;
    uint4 levels = *reinterpret_cast<const uint4*>(landed.keys + 16 * n);
    const bool odd_step = nth / 4 % 2, odd_half = token % 2;  // first
    swap_if(levels.x, levels.y, odd_step), swap_if(levels.z, levels.w, odd_step);
    swap_if(levels.x, levels.z, odd_half), swap_if(levels.y, levels.w, odd_half);
    const int piece = place_in_steps(16 * nth) / 8;
    const int first = place_of_key_piece(place_in_steps(token), piece) ^ (odd_step ? 32 : 0) ^ (odd_half ? 8 : 0);
    *reinterpret_cast<uint2*>(keys + first) = widened(levels.x);
    *reinterpret_cast<uint2*>(keys + (first ^ 32)) = widened(levels.y);
    *reinterpret_cast<uint2*>(keys + (first ^ 8)) = widened(levels.z);
    *reinterpret_cast<uint2*>(keys + (first ^ 40)) = widened(levels.w);
  }
}

// V: an octet of two dims at a time, four tokens of a dim by four; likewise.
DEVICE void widen_values(unsigned char* values, const LevelsOfPage& landed) {
  constexpr int kPieces = kHeadDim;  // of two octets
#pragma unroll
  for (int i = 0; i < kHeadElements / 16 / kThreads; ++i) {
    const int n = i * kThreads + static_cast<int>(threadIdx.x);
    const int octet = n / kPieces * 2 + n % 2, dim = n % kPieces / 2 * 2;
    uint4 levels = *reinterpret_cast<const uint4*>(landed.values + octet * kLandedOctet + dim * 8);
    const bool odd_dim = dim / 8 % 2;  // first
    swap_if(levels.x, levels.z, odd_dim), swap_if(levels.y, levels.w, odd_dim);
    unsigned char* low = values + place_of_value(place_in_steps(8 * octet), dim);
    unsigned char* high = values + place_of_value(place_in_steps(8 * octet + kUnit), dim);
    const int first = odd_dim ? 16 : 0;
    *reinterpret_cast<uint2*>(low + first) = widened(levels.x);
    *reinterpret_cast<uint2*>(high + first) = widened(levels.y);
    *reinterpret_cast<uint2*>(low + (16 - first)) = widened(levels.z);
    *reinterpret_cast<uint2*>(high + (16 - first)) = widened(levels.w);
  }
}

// The nth page has landed, and nobody still reads the one before; `ask` asks for a later one.
template <class Ask>
DEVICE void begin_page(QuadShared& shared, int n, Ask ask) {
  const LevelsOfPage& landed = shared.landed[n % kQuadSlots];
  cp_async_wait<kQuadSlots - 1>();
  __syncthreads();
  widen_keys(shared.halves.keys, landed);
  widen_values(shared.halves.values, landed);
  shared.of_halves.copy_scales(landed.of_keys, landed.of_values,
                               [](uint4* to, const uint4* scales, int) { *to = *scales; });
  fence_for_wgmma();
  __syncthreads();
  ask(n + kQuadSlots);
}

#else

struct alignas(1024) QuadShared {
  HalvesOfPage pages[kQuadSlots];

  DEVICE const HalvesOfPage& page(int n) const { return pages[n % kQuadSlots]; }
  DEVICE SharedScales scales() const { return {}; }
};

DEVICE void ask_for_page(QuadShared& shared, int n, const PageHead& from) {
  constexpr int kUnits = kHeadDim / kUnit, kTokens = kThreads / kUnits, kRounds = kHeadElements / kUnit / kThreads;
  HalvesOfPage& page = shared.pages[n % kQuadSlots];
  const int thread = threadIdx.x, row = place_in_steps(thread / kUnits);
  const int place = place_in_steps(thread % kUnits * kUnit);  // of the first dim
  unsigned char* to = page.keys + place_of_key_piece(row, place / 8) + place % 8 * 2;
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int on = place_in_steps(i * kTokens);  // rows further
    unsigned char* there = page.keys + ((to - page.keys) ^ on % 8 / 4 * 64) + on * kKeyRowBytes;
    cp_async8(there, from.keys + kUnit * (i * kThreads + thread));
  }
  to = page.values + place_of_value(place_in_steps(thread % 2 * kUnit), thread / 2 % kHeadDim);
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int first = i * kThreads / 2;  // octet and dim as one
    cp_async8(to + place_of_value(place_in_steps(first / kHeadDim * 8), first % kHeadDim),
              from.values + kUnit * (i * kThreads + thread));
  }
}

template <class Ask>
DEVICE void begin_page(QuadShared&, int n, Ask ask) {
  if (n == 0) cp_async_wait<kQuadSlots - 1>();
  else cp_async_wait<kQuadSlots - 2>();
  fence_for_wgmma();
  __syncthreads();
  if (n > 0) ask(n - 1 + kQuadSlots);
}

#endif
