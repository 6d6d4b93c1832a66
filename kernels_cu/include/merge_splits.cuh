// Merging the splits of a row and head: a = Σ f_s·o_s / Σ f_s·l_s,  f_s = 2^(m_s − max m),  s ascending.
//
// A split of which nothing is seen has m = −inf, o = 0 and l = 0: it changes no bit.  One warp merges 64 output dims,
// two a lane; the partials of up to 32 splits are under way at once, and lane i computes the factor of split i.
#pragma once

#include "attention.cuh"

constexpr int kMergeDims = 64;
constexpr int kMergeSplits = 32;
constexpr int kMergeWarps = kHeadDim / kMergeDims;  // of a row and head
constexpr int kMostMergeThreads = 256;
static_assert(kMergeSplits <= 32, "a lane holds the factor of a split");

struct SplitParts {
  float2 o[kMergeSplits];  // of the lane's two dims
  float2 ml;               // of the lane's split
};

// Of a warp, in shared memory: f and f·l of each split.
struct SplitFactors {
  float2 factor_mass[kMergeSplits];
};

DEVICE void load_parts(SplitParts& parts, const float2* o, const float2* ml, int first, int num_splits) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kMergeSplits; ++i)
    parts.o[i] = load_l2(o + (first + i) * (kHeadDim / 2), first + i < num_splits);
  const bool is_split = first + lane < num_splits;
  parts.ml = load_l2(ml + first + lane, is_split);
  if (!is_split) parts.ml.x = minus_infinity();
}

// Adds splits in eights: those past the last are zeros with factor 0, as if nothing were seen of them.
DEVICE void add_parts(float2& o, float& sum, const SplitParts& parts, SplitFactors& factors, float base,
                      int num_splits) {
  const int lane = threadIdx.x % 32;
  const float factor = exp2_fast(parts.ml.x - base);
  __syncwarp();  // nobody still reads those of the splits before
  factors.factor_mass[lane] = make_float2(factor, factor * parts.ml.y);
  __syncwarp();
#pragma unroll
  for (int eight = 0; eight < kMergeSplits; eight += 8) {
    if (eight >= num_splits) return;
#pragma unroll
    for (int i = eight; i < eight + 8; ++i) {
      const float2 factor_mass = factors.factor_mass[i];
      o = make_float2(fmaf(factor_mass.x, parts.o[i].x, o.x), fmaf(factor_mass.x, parts.o[i].y, o.y));
      sum += factor_mass.y;
    }
  }
}

// a's 64 dims from `first_dim` on.  o: [splits][D] and ml: [splits] of the row and head.
DEVICE void merge_splits(u16* a, const float* o, const float2* ml, SplitFactors& factors, int first_dim,
                         int num_splits) {
  const int lane = threadIdx.x % 32;
  const float2* lane_o = reinterpret_cast<const float2*>(o + first_dim) + lane;
  SplitParts parts;
  load_parts(parts, lane_o, ml, 0, num_splits);
  float top = parts.ml.x;
#pragma unroll 1
  for (int split = kMergeSplits + lane; split < num_splits; split += 32) top = fmaxf(top, load_l2(ml + split).x);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) top = fmaxf(top, shuffle_xor(top, mask));
  float2 total = make_float2(0.0f, 0.0f);
  float sum = 0.0f;
  for (int first = 0; first < num_splits; first += kMergeSplits) {
    if (first > 0) load_parts(parts, lane_o, ml, first, num_splits);
    add_parts(total, sum, parts, factors, exponent_base(top), num_splits - first);
  }
  const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
  reinterpret_cast<u32*>(a + first_dim)[lane] = pack_half2(total.x * inverse, total.y * inverse);
}
