// Products of levels (page_products.cuh): q of a head and the weights of a row and page are coded when they are read.
//
//   f = half(127 / largest |q|)                level = ⌊q·f⌉, −127 … 127                unit = 1 / f
//   unit = the power of two above the largest w·scale of V      level = ⌊w·scale / unit · 255⌉, 0 … 255
//   o = unit · Σ level · V level, 255 times what it stands for, of every page: so units are powers of two
//
// A scale that is NaN, or a q that is not finite, makes a unit NaN, so that it is noticed.  docs/quality.md has what such
// rounding costs.
#pragma once

#include "page_operands.cuh"

typedef i32 ProductSum;
constexpr int kMixSteps = kPageTokens / 32;  // products of weights and V, of 32 tokens each
constexpr float kWeightsOne = 255.0f;        // what o is times

// The larger of each half of two pairs, by magnitude.
DEVICE u32 larger_of(u32 most, u32 pair) { return half2_max_nan(most, pair & 0x7fff7fff); }

// Of a row of q, of which kLanes neighbouring lanes have a part each: f, in both halves of a pair.
template <int kLanes>
DEVICE u32 query_factor(u32 most) {
  constexpr float kLeast = 1.0f / 256;  // or f would be too large for a half
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) most = half2_max_nan(most, shuffle_xor(most, mask));
  const float largest = max_nan(half_to_float(static_cast<u16>(most)), half_to_float(static_cast<u16>(most >> 16)));
  const u32 factor = float_to_half(127.0f * reciprocal_fast(max_nan(largest, kLeast)) + (largest - largest));
  return factor << 16 | factor;
}

DEVICE float query_unit(u32 factor) { return reciprocal_fast(half_to_float(static_cast<u16>(factor))); }

// Four levels.  A half of 1536 counts in ones.
DEVICE u32 query_levels(u32 first, u32 second, u32 factor) {
  constexpr u32 kWhole = 0x66006600;
  return permute_bytes(half2_fma(first, factor, kWhole), half2_fma(second, factor, kWhole), 0x6420);
}

// Levels of a row of q, of which four lanes have a quarter each: its unit.
template <int kWords>
DEVICE float code_query(u32 (&levels)[kWords], const u32 (&pairs)[2 * kWords]) {
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < 2 * kWords; ++i) most = larger_of(most, pairs[i]);
  const u32 factor = query_factor<4>(most);
#pragma unroll
  for (int i = 0; i < kWords; ++i) levels[i] = query_levels(pairs[2 * i], pairs[2 * i + 1], factor);
  return query_unit(factor);
}

// A row of q as the four lanes that hold it multiply it.
struct CodedRow {
  Piece pieces[kDimPieces];
  float unit;
};

DEVICE CodedRow coded_row(const uint4 (&halves)[kDimPieces]) {
  u32 pairs[4 * kDimPieces], levels[2 * kDimPieces];
  CodedRow row;
#pragma unroll
  for (int j = 0; j < kDimPieces; ++j) {
    pairs[4 * j] = halves[j].x, pairs[4 * j + 1] = halves[j].y;
    pairs[4 * j + 2] = halves[j].z, pairs[4 * j + 3] = halves[j].w;
  }
  row.unit = code_query(levels, pairs);
#pragma unroll
  for (int j = 0; j < kDimPieces; ++j) row.pieces[j] = make_uint2(levels[2 * j], levels[2 * j + 1]);
  return row;
}

// Products of a tile and a step's 16 tokens.  queries.piece(j): piece j.
template <class Queries>
DEVICE void score(StepScores& scores, const Queries& queries, const StepKeys& keys) {
  i32 sums[2][4] = {};
#pragma unroll
  for (int j = 0; j < kDimPieces; ++j) {
    const QueryPieces q = queries.piece(j);
#pragma unroll
    for (int u = 0; u < 2; ++u)
      mma_m16n8k32_s8(sums[u], {q.low.x, q.high.x, q.low.y, q.high.y}, keys.of[u][j].x, keys.of[u][j].y);
  }
#pragma unroll
  for (int u = 0; u < 2; ++u)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores.of[u][i] = times_scale(static_cast<float>(sums[u][i]), keys.scales, u, i % 2);
}

// Weights of one half of a step with the scales of V in them; the largest of them, or `largest`.
DEVICE float scale_weights(StepScores& weights, int half, const StepScales& values, float largest) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float& weight = weights.of[i / 2][2 * half + i % 2];
    weight = times_scale(weight, values, i / 2, i % 2);
    largest = max_nan(largest, weight);
  }
  return largest;
}

// Of a row and page: what 255 levels of its weights are worth.
struct WeightUnit {
  float value;
};

// largest: the row's largest weight.
DEVICE WeightUnit weight_unit(float largest) {
  constexpr u32 kLeast = (127u - 30u) << 23;  // where nothing is seen
  const u32 exponent = max(__float_as_uint(largest) & 0x7f800000u, kLeast);
  return {__uint_as_float(exponent + (1u << 23)) + (largest - largest)};
}

// Such weights as levels, of four neighbouring tokens.  A sum with 2^23 counts in ones.
DEVICE u32 weight_levels(const StepScores& weights, int half, const WeightUnit& unit) {
  const float factor = kWeightsOne * __uint_as_float((254u << 23) - __float_as_uint(unit.value));
  u32 levels[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    levels[i] = __float_as_uint(fmaf(weights.of[i / 2][2 * half + i % 2], factor, 8388608.0f));
  return permute_bytes(permute_bytes(levels[0], levels[1], 0x0040), permute_bytes(levels[2], levels[3], 0x0040), 0x5410);
}

// o of eight output dims += step s's; `piece` is the lane's of its half of the page.
DEVICE void mix_step(i32 (&o)[4], const uint4& weights, const Piece& piece, int) {
  mma_m16n8k32_u8(o, {weights.x, weights.y, weights.z, weights.w}, piece.x, piece.y);
}

// Two dims of o, of one half's row.
DEVICE float2 mixed(const i32 (&o)[4], int half, const WeightUnit& unit) {
  return make_float2(static_cast<float>(o[2 * half]) * unit.value, static_cast<float>(o[2 * half + 1]) * unit.value);
}
