// The online softmax of both prefill attentions: per query the state o, sum, top, in the fragments of m16n8 products.
//
// Lane = 4·g + t of a warp has rows g and g + 8 of its 16 queries ("half" 0 and 1), and of each tile of 8 columns
// columns 2t and 2t + 1.  Which token of the page a column of the scores is, differs: `TokenOf` says it.
#pragma once

#include "prefill_work.cuh"

constexpr int kDimTiles = kHeadDim / 8;      // column tiles of the output
constexpr int kScoreTiles = kPageTokens / 8;  // of the scores of a page

typedef float Scores[kScoreTiles][4];

struct State {
  float o[kDimTiles][4];
  float top[2];  // what the weights are relative to: the largest score·scale so far (stored.cuh)
  float sum[2];  // of this lane's columns
};

DEVICE State no_state() { return {{}, {minus_infinity(), minus_infinity()}, {0.0f, 0.0f}}; }

// What the queries at `position` do not see becomes −inf.
template <class TokenOf>
DEVICE void hide(Scores& scores, const int (&position)[2], int window, int block, TokenOf token_of) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Sight sight = sight_of(position[half], window, block);
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (!sees(sight, token_of(n, 2 * t + i))) scores[n][2 * half + i] = minus_infinity();
  }
}

// What the weights of a softmax whose largest score is `top` are taken relative to.
DEVICE float reference_exponent(float top, float scale) {
  return kWeightBits > 0.0f ? top * scale - kWeightBits : top * scale;
}

// Scores become weights relative to the new top, the sum is brought to it; `factor` is what o is still to be times.
DEVICE void weigh_page(State& state, float (&factor)[2], Scores& scores, float scale) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = minus_infinity();
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) top = fmaxf(top, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
    top = fmaxf(state.top[half], reference_exponent(row_max(top), scale));
    const float base = exponent_base(top);
    factor[half] = exp2_fast(state.top[half] - base);
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& value = scores[n][2 * half + i];
        value = weigh(value, scale, base);
        sum += value;
      }
    state.top[half] = top;
    state.sum[half] = fmaf(state.sum[half], factor[half], sum);
  }
}

DEVICE void bring_to_top(State& state, const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < kDimTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) state.o[n][i] *= factor[i / 2];
}

// Weights as a operands of the mix: step s is tiles 2·s and 2·s + 1.
DEVICE void pack_weights(u32 (&weights)[kSteps][4], const Scores& scores) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      weights[s][i] = pack_half2(scores[2 * s + i / 2][2 * (i % 2)], scores[2 * s + i / 2][2 * (i % 2) + 1]);
}

// words[j] of lane t of four neighbours ↔ words[t] of lane j.
DEVICE void transpose_quad(u32 (&words)[4]) {
#pragma unroll
  for (int mask = 1; mask <= 2; mask *= 2) {
    const bool upper = threadIdx.x & mask;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j & mask) continue;
      const u32 got = shuffle_xor(upper ? words[j] : words[j + mask], mask);
      words[j] = upper ? got : words[j];
      words[j + mask] = upper ? words[j + mask] : got;
    }
  }
}

// a's rows, 16 bytes of a row at a time.
DEVICE void store(u16* a, const State& state, const Tile& tile, int head, int num_heads) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const float inverse[2] = {1.0f / row_sum(state.sum[0]), 1.0f / row_sum(state.sum[1])};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = 16 * warp + g + 8 * half;
    uint4* row = reinterpret_cast<uint4*>(a + (static_cast<u64>(tile.first_row + i) * num_heads + head) * kHeadDim);
#pragma unroll
    for (int first = 0; first < kDimTiles; first += 4) {
      u32 words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* o = state.o[first + j] + 2 * half;
        words[j] = pack_half2(o[0] * inverse[half], o[1] * inverse[half]);
      }
      transpose_quad(words);
      if (i < tile.num_rows) row[first + t] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}
