// int8 pages, for who writes them: how a vector of K or V of one token and head becomes levels and a scale.
//
// The coding is that of engine/cache_modes.py, bit for bit: magnitudes beyond fp16's largest count as that; scale =
// largest magnitude / 127, at least 2^-17, rounded to fp16; level = x / that scale to the nearest, ties to even.  A
// vector with a NaN in it has a NaN for scale, so that whoever reads it notices.  Where both lie, attention.cuh says.
#pragma once

#ifndef TL_INT8
#define TL_INT8 1
#endif
#include "attention.cuh"

constexpr float kLargestHalf = 65504.0f;
constexpr float kMostLevel = 127.0f;
constexpr float kLeastScale = 1.0f / 131072;  // fp16 keeps seven bits of it

// K levels of a head in a page; V levels are those of head G + kv_head (stored.cuh).
DEVICE Stored* levels_of_head(Stored* pool, int page, int head, int num_kv_heads) {
  return const_cast<Stored*>(page_keys(pool, page, head, num_kv_heads));
}

// Its scales, [64], likewise.
DEVICE u16* scales_of_head(Stored* pool, int page, int head, int num_kv_heads) {
  return reinterpret_cast<u16*>(const_cast<uint4*>(page_scales(pool, page, head, num_kv_heads)));
}

// Bits that are in the order of magnitudes, NaN above them all: the largest of a vector is taken of these.
DEVICE u32 magnitude_of(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// x / divisor as IEEE's division rounds it, at a third of its price: a divisor of at most eleven bits and an inverse
// rounded to the nearest leave so little to correct that once is enough.  Tried for 127 with every x, and for every
// scale around all 128 edges of levels.
DEVICE float divide(float x, float divisor, float inverse) {
  const float rough = x * inverse;
  return fmaf(fmaf(-rough, divisor, x), inverse, rough);
}

struct Scale {
  u16 half;  // as it is stored
  float value, inverse;
};

DEVICE Scale int8_scale(u32 largest) {
  const float magnitude = __uint_as_float(largest);  // comparisons are such that NaN stays
  const float most = magnitude > kLargestHalf ? kLargestHalf : magnitude;
  const float scale = divide(most, kMostLevel, 1.0f / kMostLevel);
  const u16 half = float_to_half(scale < kLeastScale ? kLeastScale : scale);
  return {half, half_to_float(half), 1.0f / half_to_float(half)};
}

// As a byte.  The sum rounds to whole numbers, for there its last bit is 1, and its low bits count them.
DEVICE u32 int8_level(float x, const Scale& scale) {
  constexpr float kRounding = 12582912.0f;  // 1.5 · 2^23
  x = fminf(fmaxf(x, -kLargestHalf), kLargestHalf);
  return __float_as_uint(divide(x, scale.value, scale.inverse) + kRounding) & 0xff;
}

DEVICE u32 int8_levels_of(const float* four, const Scale& scale) {
  return int8_level(four[0], scale) | int8_level(four[1], scale) << 8 | int8_level(four[2], scale) << 16 |
         int8_level(four[3], scale) << 24;
}
