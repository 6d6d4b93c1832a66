// What both attentions share: where a page keeps K and V, which token a column of scores is, who may see it.
//
// A page holds 64 tokens of one cache layer, halves or levels: K [G][64][D], then V transposed and in octets,
// [G][8][D][8 tokens]; then, where there are any, the scales [G][64] of K and [G][64] of V (stored.cuh).  In K and V, 8
// elements that a product sums over lie next to each other, so every operand of mma.m16n8k16 comes in such pieces, with
// no ldmatrix and no transposition: lane = 4·g + t of a warp takes the 8 elements from 32·j + 8·t on, and mma step s =
// 2·j + i sums over elements 32·j + 8·t + 4·i .. +3 of its four lanes.  Both operands use this order.
//
//   scores   a: 16 queries × D of q          b: D × tokens of K              sum over D
//   mix      a: 16 queries × 64 of weights   b: 64 × output dims of Vᵀ       sum over the tokens of the page
//
// The scores of step s's 16 tokens are two tiles of 8 columns, u = 0, 1.  `token_of_column` arranges them so that a
// lane's eight accumulators, rounded to fp16, are its a operand of step s of the mix.  So of steps 2·j and 2·j + 1 a
// lane's columns are tokens 32·j + 8·t .. +7: their scales are one 16-byte piece.
#pragma once

#include "stored.cuh"

#ifndef TL_QUERIES_PER_KV
#define TL_QUERIES_PER_KV 1
#endif

constexpr int kQueriesPerKv = TL_QUERIES_PER_KV;     // H / G
constexpr int kSteps = kPageTokens / 16;             // mma steps over the tokens of a page
constexpr int kDimPieces = kHeadDim / 32;            // pieces a lane takes of a q or K row
constexpr int kTokenPieces = kPageTokens / 32;       // the same of a Vᵀ row
constexpr int kQuadPages = 4;                         // neighbours, from a block that is a multiple of it on
constexpr int kHeadElements = kPageTokens * kHeadDim;  // of K, and of V, of one head in a page
constexpr int kHeadScaleBytes = kPageTokens * kScaleBytes;
static_assert(kHeadDim == 64 || kHeadDim == 128, "head_dim is 64 or 128");
static_assert(kQueriesPerKv >= 1 && kQueriesPerKv <= 16, "the heads that share a K/V head fill at most one tile");

DEVICE float minus_infinity() { return __int_as_float(static_cast<int>(0xff800000u)); }

// Column 0..7 of tile u of step s of the scores: the token's place in the page.
DEVICE int token_of_column(int s, int u, int column) {
  return 32 * (s / 2) + 8 * (column / 2) + 4 * (s % 2) + 2 * u + column % 2;
}

// K of a head in a page: [64][D].
DEVICE const Stored* page_keys(const Stored* pool, int page, int kv_head, int num_kv_heads) {
  return pool + (static_cast<u64>(page) * 2 * num_kv_heads + kv_head) * kHeadElements +
         static_cast<u64>(page) * 2 * num_kv_heads * kHeadScaleBytes;
}

// V of a head in a page: pieces, in the order of value_piece.
DEVICE const Stored* page_values(const Stored* pool, int page, int kv_head, int num_kv_heads) {
  return page_keys(pool, page, kv_head + num_kv_heads, num_kv_heads);
}

// Scales of a head in a page, [64], 8 tokens a piece; of V: those of head G + kv_head.
DEVICE const uint4* page_scales(const Stored* pool, int page, int kv_head, int num_kv_heads) {
  const Stored* scales = page_keys(pool, page, 2 * num_kv_heads, num_kv_heads) + kv_head * kHeadScaleBytes;
  return reinterpret_cast<const uint4*>(scales);
}

DEVICE uint4 load_piece(const u16* halves) { return load_global(reinterpret_cast<const uint4*>(halves)); }

DEVICE uint4 no_piece() { return make_uint4(0, 0, 0, 0); }

// The tokens of a page that a query sees: begin ≤ token < end.  None: end ≤ begin.
struct Sight {
  int begin, end;
};

// Of a query at `position` (negative: it sees nothing); window 0: everything up to itself.
DEVICE Sight sight_of(int position, int window, int block) {
  const int page_start = block * kPageTokens;
  return {window > 0 ? position - window + 1 - page_start : 0, position + 1 - page_start};
}

DEVICE bool sees(Sight sight, int token) { return token >= sight.begin && token < sight.end; }

// The exponents of a softmax are taken from its largest score; where nothing is seen, from 0: then they give 0.
DEVICE float exponent_base(float top) { return top == minus_infinity() ? 0.0f : top; }

// Two scores in base 2 and their distance below `top`: 2^(score·scale − top).
DEVICE float weigh(float score, float scale, float base) { return exp2_fast(fmaf(score, scale, -base)); }

// Over the four lanes that hold a row of scores.
DEVICE float row_max(float value) {
  value = fmaxf(value, shuffle_xor(value, 1));
  return fmaxf(value, shuffle_xor(value, 2));
}

// The same; NaN if any is.
DEVICE float row_largest(float value) {
  value = max_nan(value, shuffle_xor(value, 1));
  return max_nan(value, shuffle_xor(value, 2));
}

template <class Sum>
DEVICE Sum row_sum(Sum value) {
  value += shuffle_xor(value, 1);
  return value + shuffle_xor(value, 2);
}
