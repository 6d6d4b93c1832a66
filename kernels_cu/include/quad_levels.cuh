// A page of a quad as levels, and its products.
//
//   K   [64 tokens][128 bytes]     tokens in fours, D levels each; 16-byte pieces of a row swizzled (ptx_sm90.cuh)
//   V   [4][D dims][16 tokens]
//
// Sums of levels are exact, so only the tokens of K are placed, columns of the scores: token 16·j + 4·t + 2·u + c is
// column 2·t + c of tile 2·j + u.  So a lane's columns are four neighbours, a word of the levels by which it multiplies V.
#pragma once

#include "quad_operands.cuh"

constexpr int kQuadSlots = 4;                // pages under way
constexpr int kDimSteps = kHeadDim / 32;     // of the scores
constexpr int kSecondPair = 2;               // tokens from a lane's first pair of a step to its second

struct QuadPage : SharedScales {
  alignas(1024) unsigned char keys[kPageTokens * kKeyRowBytes];
  unsigned char values[kHeadElements];
};

// Column of the scores.
DEVICE constexpr int place_of_token(int token) {
  return token / 16 * 16 + token / 2 % 2 * 8 + token / 4 % 4 * 2 + token % 2;
}

// The first of a lane's tokens of step s.
DEVICE int token_of_lane(int s) { return 16 * s + 4 * (threadIdx.x % 4); }

DEVICE void ask_for_page(QuadPage& page, const PageHead& from) {
  constexpr int kPieces = kHeadDim / 16;  // of a token
#pragma unroll
  for (int i = 0; i < kHeadElements / 16 / kThreads; ++i) {
    const int n = i * kThreads + static_cast<int>(threadIdx.x);
    cp_async16(page.keys + place_of_key_piece(place_of_token(n / kPieces), n % kPieces), from.keys + 16 * n, true);
  }
#pragma unroll
  for (int i = 0; i < kHeadElements / 8 / kThreads; ++i) {
    const int n = i * kThreads + static_cast<int>(threadIdx.x), octet = n / kHeadDim, dim = n % kHeadDim;
    cp_async8(page.values + octet / 2 * kStripBytes + dim * 16 + octet % 2 * 8, from.values + 8 * n);
  }
  page.copy_scales(from.key_scales, from.value_scales,
                          [&](uint4* to, const uint4* scales, int) { cp_async16(to, scales, true); });
}

// A lane's queries, as operands of all steps; of rows g and g + 8.
struct QuadQueries {
  u32 of[kDimSteps][4];
  float units[2];

  DEVICE float unit(int half) const { return units[half]; }
};

DEVICE void load_queries(QuadQueries& held, const u16* q, const Query (&queries)[2], int num_heads) {
  uint2 halves[2][2 * kDimSteps];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u16* row = q + (queries[half].entry.row * num_heads + queries[half].head) * kHeadDim + 4 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < 2 * kDimSteps; ++i) halves[half][i] = *reinterpret_cast<const uint2*>(row + 16 * i);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 pairs[4 * kDimSteps], levels[2 * kDimSteps];
#pragma unroll
    for (int i = 0; i < 2 * kDimSteps; ++i) pairs[2 * i] = halves[half][i].x, pairs[2 * i + 1] = halves[half][i].y;
    held.units[half] = code_query(levels, pairs);
#pragma unroll
    for (int s = 0; s < kDimSteps; ++s) held.of[s][half] = levels[2 * s], held.of[s][2 + half] = levels[2 * s + 1];
  }
}

DEVICE void score_page(StepScores (&scores)[kSteps], const QuadQueries& queries, const QuadPage& page) {
  i32 sums[2 * kSteps][4];
  const SharedMatrix matrix = swizzled_matrix(page.keys);
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < kDimSteps; ++s) wgmma_s8(sums, queries.of[s], matrix + 32 * s, s > 0);
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const StepScales of_keys = page.key_scales(token_of_lane(s), token_of_lane(s) + kSecondPair);
#pragma unroll
    for (int u = 0; u < 2; ++u)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        scores[s].of[u][i] = times_scale(static_cast<float>(sums[2 * s + u][i]), of_keys, u, i % 2);
  }
}

// Of a step of the mix, for wgmma.
template <int kTiles>
DEVICE void multiply_values(i32 (&o)[kTiles][4], const u32 (&weights)[4], SharedMatrix values, bool add) {
  wgmma_u8(o, weights, values, add);
}

// What a sum of products with V counts for, of a page that counts for `factor`: powers of two.
DEVICE float worth_of(float factor, const WeightUnit& unit) { return factor * unit.value; }
