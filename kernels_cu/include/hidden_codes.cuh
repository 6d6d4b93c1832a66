// How h, the input of a block, is coded: engine/cache_modes.py's encode and decode, bit for bit, and where codes lie.
//
//   TL_CODING            of a token in one cache layer       of a stored page, its fields one after the other
//   0  h-fp16            d halves                            h [64][d]
//   1  h-int8            d levels 0 … 255                    levels [64][d], scales [64][d/64], minima [64][d/64]
//   2  h-int4            d levels 0 … 15, two a byte         levels [64][d/2], scales and minima likewise
//
//   h-int8, h-int4: every 64 channels have a scale and a minimum, halves; value = minimum + level · scale.  A byte of
//   h-int4 is channel c of a group in its low nibble, channel c + 32 in its high one.
//
// A block of 256 threads has a row.  Of channels 2048·i … + 2047, its chunk i, thread t has in group t / 8 of 64 the
// channels 4·(t % 8) … + 3 and those 32 further on: so 8 neighbouring lanes share a group, and the codes of four
// channels are a word (of halves, two), in every coding.
//
// d is a multiple of 64, for h-fp16 of 8.  fp32, each operation rounded by itself; the division is IEEE's.
#pragma once
#include "row_norm.cuh"

#define H_FP16 0
#define H_INT8 1
#define H_INT4 2
#ifndef TL_CODING
#define TL_CODING H_INT8
#endif
#ifndef TL_CHUNKS
#define TL_CHUNKS 1
#endif

constexpr int kGroup = 64, kHalf = 32;  // channels
constexpr int kGroupLanes = 8;
constexpr int kChunks = TL_CHUNKS;      // 2048 channels each, the last one partly idle
constexpr int kPageTokens = 64;
constexpr bool kHasLevels = TL_CODING != H_FP16;
constexpr float kLargest = 65504.0f;    // a half
constexpr float kMostLevel = TL_CODING == H_INT4 ? 15.0f : 255.0f;
constexpr float kLeastStep = 0x1p-16f;   // of a scale: halves keep eight bits of it
constexpr float kResolution = 0x1p-11f;  // of halves, relative

typedef float4 Channels[kChunks][2];  // of a row, this thread's

struct Code {  // of a chunk, this thread's
  uint2 halves[2];     // h-fp16
  u32 levels[2];       // four bytes each
  u16 scale, minimum;  // of the group
};

DEVICE int column_of(int chunk, int half) {
  const int group = (chunk * kRowThreads + threadIdx.x) / kGroupLanes;
  return group * kGroup + half * kHalf + threadIdx.x % kGroupLanes * 4;
}

// Whether the row has the thread's four channels.  In codings with groups it has both fours of a chunk or neither.
DEVICE bool has_four(int chunk, int half, int width) { return column_of(chunk, kHasLevels ? 0 : half) < width; }

// visit(chunk, half, column) of the thread's fours.
template <class Visit>
DEVICE void for_fours(int width, Visit visit) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (has_four(chunk, half, width)) visit(chunk, half, column_of(chunk, half));
}

template <class Visit>
DEVICE void for_chunks(int width, Visit visit) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk)
    if (has_four(chunk, 0, width)) visit(chunk);
}

// ---- the coding -----------------------------------------------------------------------------------------------

DEVICE float clamp(float x) { return min_nan(max_nan(x, -kLargest), kLargest); }
DEVICE float4 clamp(float4 v) { return make_float4(clamp(v.x), clamp(v.y), clamp(v.z), clamp(v.w)); }

DEVICE float least_of(float4 v) { return min_nan(min_nan(v.x, v.y), min_nan(v.z, v.w)); }
DEVICE float most_of(float4 v) { return max_nan(max_nan(v.x, v.y), max_nan(v.z, v.w)); }

// a / b as IEEE rounds it, where b is a half and inverse is 1 / b rounded.  Corrected once, the quotient is off by
// 2^-45 of itself before it is rounded.  No a / b comes so near to the middle between two floats: of 24 and 11 bits, it
// is 2^-36 of itself away.  (A quotient that underflows is another matter, and far below half a level.)
DEVICE float divide(float a, float b, float inverse) {
  const float quotient = a * inverse;
  return fmaf(fmaf(-quotient, b, a), inverse, quotient);
}

// The nearest whole number, ties to even, in the low bits of the word.  0 ≤ x < 2^22.
DEVICE u32 round_to_word(float x) { return __float_as_uint(x + 0x1.8p23f); }

// Bytes 0 of four words.
DEVICE u32 pack_bytes(u32 a, u32 b, u32 c, u32 d) {
  return permute_bytes(permute_bytes(a, b, 0x0040), permute_bytes(c, d, 0x0040), 0x5410);
}

DEVICE u32 levels_of(float4 v, float least, float scale, float inverse) {
  const auto level = [&](float x) { return round_to_word(divide(x - least, scale, inverse)); };
  return pack_bytes(level(v.x), level(v.y), level(v.z), level(v.w));
}

// Byte i of a word as a number: 2^23 + byte, spelt out, less 2^23.
template <int kByte>
DEVICE float level_of(u32 levels) {
  return __uint_as_float(permute_bytes(levels, 0x4b000000, 0x7440 + kByte)) - 0x1p23f;
}

// All lanes of the group's warp take part.
DEVICE Code encode(float4 low, float4 high) {
  if constexpr (!kHasLevels) return {{pack_half4(clamp(low)), pack_half4(clamp(high))}, {}, 0, 0};
  float least = min_nan(least_of(low), least_of(high)), most = max_nan(most_of(low), most_of(high));
#pragma unroll
  for (int mask = kGroupLanes / 2; mask; mask /= 2) {
    least = min_nan(least, shuffle_xor(least, mask));
    most = max_nan(most, shuffle_xor(most, mask));
  }
  if (least < -kLargest || most > kLargest) {
    low = clamp(low), high = clamp(high);
    least = clamp(least), most = clamp(most);
  }
  const u16 minimum = float_to_half(least);
  const float span = max_nan(most - least, fabsf(half_to_float(minimum)) * kResolution);
  const u16 scale = float_to_half(max_nan(span, kMostLevel * kLeastStep) / kMostLevel);
  const float step = half_to_float(scale), inverse = 1.0f / step;
  return {{}, {levels_of(low, least, step, inverse), levels_of(high, least, step, inverse)}, scale, minimum};
}

// Level and scale have so few bits that their product is exact: fmaf rounds what a sum of it would.
DEVICE float4 decode(const Code& code, int half) {
  if constexpr (!kHasLevels) {
    const uint2 h = code.halves[half];
    return make_float4(half_to_float(h.x & 0xffff), half_to_float(h.x >> 16), half_to_float(h.y & 0xffff),
                       half_to_float(h.y >> 16));
  }
  const float scale = half_to_float(code.scale), minimum = half_to_float(code.minimum);
  const u32 levels = code.levels[half];
  return make_float4(fmaf(level_of<0>(levels), scale, minimum), fmaf(level_of<1>(levels), scale, minimum),
                     fmaf(level_of<2>(levels), scale, minimum), fmaf(level_of<3>(levels), scale, minimum));
}

// ---- where codes lie ------------------------------------------------------------------------------------------

// Stored pages, several in a slab of the pool, which otherwise is a page of K and V.
struct Slabs {
  u8* pool;
  int slab_bytes, per_slab, page_bytes;
};

DEVICE int row_bytes(int width) { return TL_CODING == H_FP16 ? 2 * width : TL_CODING == H_INT8 ? width : width / 2; }
DEVICE int num_groups(int width) { return kHasLevels ? width / kGroup : 0; }

DEVICE u8* page_of(const Slabs& slabs, u32 place) {
  const u32 slab = place / static_cast<u32>(slabs.per_slab), nth = place - slab * slabs.per_slab;
  return slabs.pool + static_cast<long long>(slab) * slabs.slab_bytes + nth * slabs.page_bytes;
}

DEVICE u16* scales_of(u8* page, int width) { return reinterpret_cast<u16*>(page + kPageTokens * row_bytes(width)); }
DEVICE u16* minima_of(u8* page, int width) { return scales_of(page, width) + kPageTokens * num_groups(width); }

// The thread's codes of one chunk of a token.
struct CodePlace {
  uint2* halves[2];
  u32* levels[2];
  u16 *scale, *minimum;
};

DEVICE CodePlace code_place(u8* page, int token, int chunk, int width) {
  u8* row = page + token * row_bytes(width);
  const int column = column_of(chunk, 0), group = column / kGroup, at = token * num_groups(width) + group;
  u8* first = row + (TL_CODING == H_FP16 ? 2 * column : TL_CODING == H_INT8 ? column : column - group * kHalf);
  uint2* halves = reinterpret_cast<uint2*>(first);
  u32* levels = reinterpret_cast<u32*>(first);
  return {{halves, halves + kHalf / 4},
          {levels, levels + kHalf / 4},
          scales_of(page, width) + at,
          minima_of(page, width) + at};
}

DEVICE void write_code(const Code& code, const CodePlace& to, int chunk, int width) {
  if constexpr (!kHasLevels) {
    *to.halves[0] = code.halves[0];
    if (has_four(chunk, 1, width)) *to.halves[1] = code.halves[1];
    return;
  }
  if constexpr (TL_CODING == H_INT8) {
    *to.levels[0] = code.levels[0];
    *to.levels[1] = code.levels[1];
  } else {
    *to.levels[0] = code.levels[0] | code.levels[1] << 4;
  }
  if (threadIdx.x % kGroupLanes) return;
  *to.scale = code.scale;
  *to.minimum = code.minimum;
}

DEVICE Code read_code(const CodePlace& from, int chunk, int width) {
  Code code = {};
  if constexpr (!kHasLevels) {
    code.halves[0] = *from.halves[0];
    if (has_four(chunk, 1, width)) code.halves[1] = *from.halves[1];
    return code;
  }
  code.scale = *from.scale;
  code.minimum = *from.minimum;
  code.levels[0] = *from.levels[0];
  if constexpr (TL_CODING == H_INT8) {
    code.levels[1] = *from.levels[1];
  } else {
    code.levels[1] = code.levels[0] >> 4 & 0x0f0f0f0f;
    code.levels[0] &= 0x0f0f0f0f;
  }
  return code;
}
