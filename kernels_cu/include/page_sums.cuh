// The arithmetic of decode_attention: 16 queries against one page.  Whoever attends a page does it by these functions,
// so that a row's bits are the same whoever else is in its tile, and whether a block shares the page or a warp has it
// alone.
//
//   m = ⌈max q·K·scale⌉      w = 2^(q·K·scale − m)      l = Σ w      o = Σ rounded(w)·V      over the page's tokens
//
// page_products.cuh has the products and what they round; in int8 `scale` has a row's unit in it.  m is whole, so that
// 2^(m − m') is exact.
//
// A lane holds rows g and g + 8 of a tile ("half" 0 and 1), in the fragments of mma_m16n8k16, step by step of 16
// tokens; attention.cuh says which token a column is.  o: steps ascending; a tensor core gives the products of a step
// no order.  l: of weights so rounded that their sum is exact, in any order.  Steps of which no row sees anything may be
// left out: their weights are zeros.
//
// o and l of several pages are added in ascending order, relative to whichever m, for powers of two are exact.
#pragma once

#include "page_products.cuh"

DEVICE bool sees_some(Sight sight, int token, int count) { return token < sight.end && token + count > sight.begin; }

// Of some of the tokens of steps 2·j and 2·j + 1.
DEVICE bool sees_half(Sight sight, int j) { return sees_some(sight, 32 * j, 32); }

// Of one half of step s: what is not seen is −inf.  The largest of the lane's, or `top`; NaN if any is.
DEVICE float hide(StepScores& scores, int half, int s, Sight sight, float top) {
  const bool sees_all = sight.begin <= 0 && sight.end >= kPageTokens;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float& value = scores.of[i / 2][2 * half + i % 2];
    if (!sees_all && !sees(sight, token_of_column(s, i / 2, 2 * (threadIdx.x % 4) + i % 2))) value = minus_infinity();
    top = max_nan(top, value);
  }
  return top;
}

// m of a page whose largest score is `top`.
DEVICE float page_exponent(float top, float scale) { return ceilf(top * scale); }

// A weight as l counts it, in 2^-18: 64 of them add up to at most 2^24.
DEVICE u32 mass_of(float weight) {
  constexpr float kRounder = 48.0f;
  return __float_as_uint(weight + kRounder) - 0x42400000u;  // its bits
}

DEVICE float mass_of_page(u32 mass) { return static_cast<float>(static_cast<i32>(mass)) * (1.0f / 262144); }

// Of one half: scores become weights, relative to the page's exponent.  The lane's mass.
DEVICE u32 weigh_half_step(StepScores& scores, int half, float scale, float base) {
  u32 sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float& value = scores.of[i / 2][2 * half + i % 2];
    value = weigh(value, scale, base);
    sum += mass_of(value);
  }
  return sum;
}

// What a warp that has the whole page makes of its scores: the weights, as a operands of the mix; and of each row, in
// all four lanes, m and l, and what its weights are levels of.
template <int kHalves>
struct PageWeights {
  uint4 steps[kMixSteps];
  float2 ml[kHalves];
  WeightUnit units[kHalves];
};

#ifdef TL_INT8

template <int kHalves>
DEVICE void pack_weights(PageWeights<kHalves>& weights, StepScores (&scores)[kSteps],
                         const StepScales (&values)[kSteps]) {
  u32 levels[2][kSteps] = {};
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    float largest = 0.0f;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) largest = scale_weights(scores[s], half, values[s], largest);
    weights.units[half] = weight_unit(row_largest(largest));
#pragma unroll
    for (int s = 0; s < kSteps; ++s) levels[half][s] = weight_levels(scores[s], half, weights.units[half]);
  }
#pragma unroll
  for (int s = 0; s < kMixSteps; ++s)
    weights.steps[s] = make_uint4(levels[0][2 * s], levels[1][2 * s], levels[0][2 * s + 1], levels[1][2 * s + 1]);
}

#else

template <int kHalves>
DEVICE void pack_weights(PageWeights<kHalves>& weights, const StepScores (&scores)[kSteps],
                         const StepScales (&)[kSteps]) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) weights.steps[s] = pack_step<kHalves>(scores[s]);
}

#endif

// scales: of each half.
template <int kHalves>
DEVICE void weigh_page(PageWeights<kHalves>& weights, StepScores (&scores)[kSteps], const Sight (&sights)[kHalves],
                       const StepScales (&values)[kSteps], const float (&scales)[kHalves]) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    float top = minus_infinity();
    u32 mass = 0;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) top = hide(scores[s], half, s, sights[half], top);
    top = page_exponent(row_largest(top), scales[half]);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) mass += weigh_half_step(scores[s], half, scales[half], exponent_base(top));
    weights.ml[half] = make_float2(top, mass_of_page(row_sum(mass)));
  }
  pack_weights(weights, scores, values);
}
