// Merging the splits of a row and head: a = Σ f_s·o_s / Σ f_s·l_s,  f_s = 2^(m_s − max m): those of a quad in ascending
// order, then quads in theirs.
//
// A split is a page, or a quad whose pages are added up already; l is negative where one ends its quad.  A split of which
// nothing is seen has m = −inf, o = 0 and l = 0: it changes no bit.  What o is times for its levels (level_products.cuh)
// is taken off at the end.  One warp merges 64 output dims, two a lane; the partials of up to 32 splits are under way at
// once, and lane i computes the factor of split i.
#pragma once

#include "page_products.cuh"

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

// Of a lane's two dims, and of l.
struct MergeSums {
  float2 o;
  float mass;
};

DEVICE void add(MergeSums& total, const MergeSums& quad) {
  total.o = make_float2(total.o.x + quad.o.x, total.o.y + quad.o.y);
  total.mass += quad.mass;
}

DEVICE void load_parts(SplitParts& parts, const float2* o, const float2* ml, int first, int num_splits) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kMergeSplits; ++i)
    parts.o[i] = load_l2(o + (first + i) * (kHeadDim / 2), first + i < num_splits);
  const bool is_split = first + lane < num_splits;
  parts.ml = load_l2(ml + first + lane, is_split);
  if (!is_split) parts.ml.x = minus_infinity();
}

// Adds splits in eights: those past the last are zeros with factor 0, as if nothing were seen of them.  `quad`: of the
// quad that has not ended.
DEVICE void add_parts(MergeSums& total, MergeSums& quad, const SplitParts& parts, SplitFactors& factors, float base,
                      int num_splits) {
  const int lane = threadIdx.x % 32;
  const float factor = exp2_fast(parts.ml.x - base);
  const u32 ends = ballot(parts.ml.y < 0.0f);  // where nothing is seen it does not matter
  __syncwarp();  // nobody still reads those of the splits before
  factors.factor_mass[lane] = make_float2(factor, factor * fabsf(parts.ml.y));
  __syncwarp();
#pragma unroll
  for (int eight = 0; eight < kMergeSplits; eight += 8) {
    if (eight >= num_splits) return;
#pragma unroll
    for (int i = eight; i < eight + 8; ++i) {
      const float2 factor_mass = factors.factor_mass[i];
      quad.o.x = fmaf(factor_mass.x, parts.o[i].x, quad.o.x);
      quad.o.y = fmaf(factor_mass.x, parts.o[i].y, quad.o.y);
      quad.mass += factor_mass.y;
      if (ends >> i & 1) {
        add(total, quad);
        quad = {};
      }
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
  MergeSums total = {}, quad = {};
  for (int first = 0; first < num_splits; first += kMergeSplits) {
    if (first > 0) load_parts(parts, lane_o, ml, first, num_splits);
    add_parts(total, quad, parts, factors, exponent_base(top), num_splits - first);
  }
  add(total, quad);
  const float inverse = total.mass > 0.0f ? 1.0f / (total.mass * kWeightsOne) : 0.0f;
  reinterpret_cast<u32*>(a + first_dim)[lane] = pack_half2(total.o.x * inverse, total.o.y * inverse);
}
