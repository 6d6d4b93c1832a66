// int8 pages: where their levels and scales lie, and how a vector of K or V of one token and head becomes both.
//
// A page holds 64 tokens of one cache layer, 64·G·(2·D + 4) bytes:
//
//   levels  int8  K [G][64][D], then V transposed [G][D][64]     value = level · scale, level −127 … 127
//   scales  fp16  K [G][64], then V [G][64]
//
// The coding is that of engine/cache_modes.py, bit for bit: magnitudes beyond fp16's largest count as that; scale =
// largest magnitude / 127, at least 2^-17, rounded to fp16; level = x / that scale to the nearest, ties to even.  A
// vector with a NaN in it has a NaN for scale, so that whoever reads it notices.
#pragma once

#include "attention.cuh"

constexpr float kLargestHalf = 65504.0f;
constexpr float kMostLevel = 127.0f;
constexpr float kLeastScale = 1.0f / 131072;  // fp16 keeps seven bits of it

DEVICE u8* int8_page(u8* pool, int page, int num_kv_heads) {
  constexpr int kHeadBytes = 2 * kHeadElements + 2 * kPageTokens * static_cast<int>(sizeof(u16));
  return pool + static_cast<u64>(page) * (num_kv_heads * kHeadBytes);
}

// K levels of a head in a page: [64][D].  Its V levels, [D][64], are those of "head" G + kv_head.
DEVICE u8* int8_levels(u8* page, int head) { return page + head * kHeadElements; }

// Scales of a head's K, [64].  Those of its V are those of "head" G + kv_head.
DEVICE u16* int8_scales(u8* page, int head, int num_kv_heads) {
  return reinterpret_cast<u16*>(page + 2 * num_kv_heads * kHeadElements) + head * kPageTokens;
}

// Bits that are in the order of magnitudes, NaN above them all: the largest of a vector is taken of these.
DEVICE u32 magnitude_of(float x) { return __float_as_uint(x) & 0x7fffffffu; }

struct Scale {
  u16 half;              // as it is stored
  float value, inverse;
};

DEVICE Scale int8_scale(u32 largest) {
  const float magnitude = __uint_as_float(largest);  // comparisons are such that NaN stays
  const float scale = (magnitude > kLargestHalf ? kLargestHalf : magnitude) / kMostLevel;
  const u16 half = float_to_half(scale < kLeastScale ? kLeastScale : scale);
  return {half, half_to_float(half), 1.0f / half_to_float(half)};
}

// As a byte.  The quotient is that of an IEEE division, at a third of its price: with eleven bits of scale and the
// inverse rounded to the nearest, one correction is enough (tried for every scale around all 128 edges of levels).
// The last sum rounds to whole numbers, for there its last bit is 1, and its low bits count them.
DEVICE u32 int8_level(float x, const Scale& scale) {
  constexpr float kRounding = 12582912.0f;  // 1.5 · 2^23
  x = fminf(fmaxf(x, -kLargestHalf), kLargestHalf);
  const float rough = x * scale.inverse;
  const float quotient = fmaf(fmaf(-rough, scale.value, x), scale.inverse, rough);
  return __float_as_uint(quotient + kRounding) & 0xff;
}

DEVICE u32 int8_levels_of(const float* four, const Scale& scale) {
  return int8_level(four[0], scale) | int8_level(four[1], scale) << 8 | int8_level(four[2], scale) << 16 |
         int8_level(four[3], scale) << 24;
}
