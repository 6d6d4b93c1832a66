// A page of a quad as halves, and its products.
//
//   K   [D/64][64 tokens][64 dims]     tokens and dims in steps; 16-byte pieces of a row swizzled (ptx_sm90.cuh)
//   V   [8][D dims][8 tokens]          tokens in steps
//
// A step of either product has the 16 elements that it has in mma.m16n8k16 (attention.cuh), halves of four pieces, in
// another order, which does not show: element 32·j + 8·a + 4·i + b of a row of q, of K or of Vᵀ is the (4·a + b)th of
// step 2·j + i.  Tokens are columns of the scores in the same order.
#pragma once

#include "quad_operands.cuh"

constexpr int kQuadSlots = 2;
constexpr int kDimSteps = kHeadDim / 16;
constexpr int kSecondPair = 16;
constexpr int kUnit = 4;  // elements that stay side by side
constexpr int kKeyBlockBytes = kPageTokens * kKeyRowBytes;
constexpr int kKeyStepBytes = 32;

struct QuadPage : SharedScales {
  alignas(1024) unsigned char keys[2 * kHeadElements];
  unsigned char values[2 * kHeadElements];
};

// Element i of a row: where it is.
DEVICE constexpr int place_in_steps(int i) { return i / 32 * 32 + i / 4 % 2 * 16 + i / 8 % 4 * 4 + i % 4; }

// The first of the lane's pairs of step s, of tokens or of dims; the second is 16 elements on.
DEVICE int token_of_lane(int s) { return 32 * (s / 2) + 4 * (s % 2) + threadIdx.x % 4 / 2 * 8 + threadIdx.x % 2 * 2; }

// The bytes of piece `piece` of a token's K.
DEVICE int place_of_dims(int row, int piece) { return piece / 8 * kKeyBlockBytes + place_of_key_piece(row, piece % 8); }

// And of element `token`, in its place, of a dim of Vᵀ.
DEVICE int place_of_value(int token, int dim) { return token / 8 * kStripBytes + dim * 16 + token % 8 * 2; }

DEVICE void ask_for_page(QuadPage& page, const PageHead& from) {
  constexpr int kUnits = kHeadDim / kUnit, kTokens = kThreads / kUnits, kRounds = kHeadElements / kUnit / kThreads;
  const int thread = threadIdx.x, row = place_in_steps(thread / kUnits);
  const int place = place_in_steps(thread % kUnits * kUnit);  // of the first dim
  unsigned char* to = page.keys + place_of_dims(row, place / 8) + place % 8 * 2;
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

struct QuadQueries {
  u32 of[kDimSteps][4];

  DEVICE float unit(int) const { return 1.0f; }
};

DEVICE void load_queries(QuadQueries& held, const u16* q, const Query (&queries)[2], int num_heads) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u16* row = q + (queries[half].entry.row * num_heads + queries[half].head) * kHeadDim;
#pragma unroll
    for (int s = 0; s < kDimSteps; ++s) {
      held.of[s][half] = *reinterpret_cast<const u32*>(row + token_of_lane(s));
      held.of[s][2 + half] = *reinterpret_cast<const u32*>(row + token_of_lane(s) + kSecondPair);
    }
  }
}

// Pieces of odd number summed by themselves, as `score` does.
DEVICE void score_page(StepScores (&scores)[kSteps], const QuadQueries& queries, const QuadPage& page) {
  float even[2 * kSteps][4], odd[2 * kSteps][4];
  const SharedMatrix matrix = swizzled_matrix(page.keys);
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < kDimSteps; ++s)
    wgmma(s / 2 % 2 ? odd : even, queries.of[s], matrix + (s / 4 * kKeyBlockBytes + s % 4 * kKeyStepBytes), s >= 4 || s % 2);
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int u = 0; u < 2; ++u)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[s].of[u][i] = even[2 * s + u][i] + odd[2 * s + u][i];
}

template <int kTiles>
DEVICE void multiply_values(float (&o)[kTiles][4], const u32 (&weights)[4], SharedMatrix values, bool add) {
  wgmma(o, weights, values, add);
}

DEVICE float worth_of(float factor, const WeightUnit&) { return factor; }
