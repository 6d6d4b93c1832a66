// The arithmetic of decode_attention: 16 queries against one page.  Whoever attends a page does it by these functions,
// so that a row's bits are the same whoever else is in its tile, and whether a block shares the page or a warp has it
// alone.
//
//   m = ⌈max q·K·scale⌉      w = 2^(q·K·scale − m)      l = Σ w      o = Σ fp16(w)·V      over the page's tokens
//
// With scales, m is 6 less, and the scale of V goes into fp16(w) (stored.cuh).  m is whole, so that 2^(m − m') is exact.
//
// A lane holds rows g and g + 8 of a tile ("half" 0 and 1), in the fragments of mma_m16n8k16, step by step of 16
// tokens; attention.cuh says which token a column is.  o: steps ascending; a tensor core gives the 16 products of a step
// no order.  l: of weights so rounded that their sum is exact, in any order.  Steps of which no row sees anything may be
// left out: their weights are zeros.
//
// o and l of several pages are added in ascending order, relative to whichever m, for powers of two are exact.
#pragma once

#include "attention.cuh"

// Of a tile's queries, a 16-byte piece of rows g and g + 8.
struct QueryPieces {
  uint4 low, high;
};

// A lane's two tokens of a step: all their dims; and the scales of its columns of scores.
struct StepKeys {
  Piece of[2][kDimPieces];
  StepScales scales;
};

// A lane's scores of a step.
struct StepScores {
  float of[2][4];
};

DEVICE void clear(float (&sums)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = 0.0f;
}

DEVICE bool sees_some(Sight sight, int token, int count) { return token < sight.end && token + count > sight.begin; }

// Of some of the tokens of steps 2·j and 2·j + 1.
DEVICE bool sees_half(Sight sight, int j) { return sees_some(sight, 32 * j, 32); }

// Products of a tile and a step's 16 tokens: pieces of odd number summed by themselves.  queries.piece(j): piece j.
template <class Queries>
DEVICE void score(StepScores& scores, const Queries& queries, const StepKeys& keys) {
  float odd[2][4];
#pragma unroll
  for (int u = 0; u < 2; ++u) clear(scores.of[u]), clear(odd[u]);
#pragma unroll
  for (int j = 0; j < kDimPieces; ++j) {
    const QueryPieces q = queries.piece(j);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const uint4& k = halves_of(keys.of[u][j]);
      mma_m16n8k16(j % 2 ? odd[u] : scores.of[u], {q.low.x, q.high.x, q.low.y, q.high.y}, k.x, k.y);
    }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const uint4& k = halves_of(keys.of[u][j]);
      mma_m16n8k16(j % 2 ? odd[u] : scores.of[u], {q.low.z, q.high.z, q.low.w, q.high.w}, k.z, k.w);
    }
  }
#pragma unroll
  for (int u = 0; u < 2; ++u)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores.of[u][i] = times_scale(scores.of[u][i] + odd[u][i], keys.scales, u, i % 2);
}

// Of one half of step s: what is not seen is −inf.  The largest of the lane's, or `top`.
DEVICE float hide(StepScores& scores, int half, int s, Sight sight, float top) {
  const bool sees_all = sight.begin <= 0 && sight.end >= kPageTokens;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float& value = scores.of[i / 2][2 * half + i % 2];
    if (!sees_all && !sees(sight, token_of_column(s, i / 2, 2 * (threadIdx.x % 4) + i % 2))) value = minus_infinity();
    top = fmaxf(top, value);
  }
  return top;
}

// m of a page whose largest score is `top`.
DEVICE float page_exponent(float top, float scale) {
  const float exponent = ceilf(top * scale);
  return kWeightBits > 0.0f ? exponent - kWeightBits : exponent;
}

// A weight as l counts it: a multiple of 2^-18 of the largest possible, of which 64 add up to at most 2^24.
DEVICE float mass_of(float weight) {
  constexpr float kRounder = 48.0f * (kWeightBits > 0.0f ? 64.0f : 1.0f);
  return (weight + kRounder) - kRounder;
}

// Of one half: scores become weights, relative to the page's exponent.  The lane's mass.
DEVICE float weigh_half_step(StepScores& scores, int half, float scale, float base) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float& value = scores.of[i / 2][2 * half + i % 2];
    value = weigh(value, scale, base);
    sum += mass_of(value);
  }
  return sum;
}

// Of tile u, rows of one half: two neighbouring columns.
DEVICE u32 pack_pair(const StepScores& scores, int u, int half, const StepScales& values) {
  const float* pair = scores.of[u] + 2 * half;
  return pack_half2(times_scale(pair[0], values, u, 0), times_scale(pair[1], values, u, 1));
}

// The a operand of the mix, with the scales of V.  kHalves is 1 where only rows 0..7 exist: the others weigh nothing.
template <int kHalves>
DEVICE uint4 pack_weights(const StepScores& scores, const StepScales& values) {
  uint4 weights = {pack_pair(scores, 0, 0, values), 0, pack_pair(scores, 1, 0, values), 0};
  if (kHalves == 2) {
    weights.y = pack_pair(scores, 0, 1, values);
    weights.w = pack_pair(scores, 1, 1, values);
  }
  return weights;
}

// o of eight output dims += step s's; `piece` is the lane's of its half of the page.
DEVICE void mix_step(float (&o)[4], const uint4& weights, const Piece& piece, int s) {
  const uint4& values = halves_of(piece);
  const u32 low = s % 2 ? values.z : values.x, high = s % 2 ? values.w : values.y;
  mma_m16n8k16(o, {weights.x, weights.y, weights.z, weights.w}, low, high);
}

// What a warp that has the whole page makes of its scores: the weights of all steps; m and l, the same in the four
// lanes of a row.
template <int kHalves>
struct PageWeights {
  uint4 steps[kSteps];
  float2 ml[kHalves];
};

template <int kHalves>
DEVICE void weigh_page(PageWeights<kHalves>& weights, StepScores (&scores)[kSteps], const Sight (&sights)[kHalves],
                       const StepScales (&values)[kSteps], float scale) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    float top = minus_infinity(), sum = 0.0f;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) top = hide(scores[s], half, s, sights[half], top);
    top = page_exponent(row_max(top), scale);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) sum += weigh_half_step(scores[s], half, scale, exponent_base(top));
    weights.ml[half] = make_float2(top, row_sum(sum));
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) weights.steps[s] = pack_weights<kHalves>(scores[s], values[s]);
}
