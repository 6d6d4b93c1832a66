// Products of halves (page_products.cuh).
#pragma once

#include "page_operands.cuh"

typedef float ProductSum;
constexpr int kMixSteps = kSteps;
constexpr float kWeightsOne = 1.0f;

struct CodedRow {
  Piece pieces[kDimPieces];
  static constexpr float unit = 1.0f;
};

DEVICE CodedRow coded_row(const uint4 (&halves)[kDimPieces]) {
  CodedRow row;
#pragma unroll
  for (int j = 0; j < kDimPieces; ++j) row.pieces[j] = halves[j];
  return row;
}

// Pieces of odd number summed by themselves.
template <class Queries>
DEVICE void score(StepScores& scores, const Queries& queries, const StepKeys& keys) {
  float odd[2][4] = {};
  scores = {};
#pragma unroll
  for (int j = 0; j < kDimPieces; ++j) {
    const QueryPieces q = queries.piece(j);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const uint4& k = keys.of[u][j];
      mma_m16n8k16(j % 2 ? odd[u] : scores.of[u], {q.low.x, q.high.x, q.low.y, q.high.y}, k.x, k.y);
    }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const uint4& k = keys.of[u][j];
      mma_m16n8k16(j % 2 ? odd[u] : scores.of[u], {q.low.z, q.high.z, q.low.w, q.high.w}, k.z, k.w);
    }
  }
#pragma unroll
  for (int u = 0; u < 2; ++u)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores.of[u][i] += odd[u][i];
}

struct WeightUnit {};

// Weights of tile u, rows of one half: two neighbouring tokens.
DEVICE u32 weight_halves(const StepScores& scores, int u, int half) {
  return pack_half2(scores.of[u][2 * half], scores.of[u][2 * half + 1]);
}

// Of a step, as an a operand.  kHalves is 1 where only rows 0..7 exist: the others weigh nothing.
template <int kHalves>
DEVICE uint4 pack_step(const StepScores& scores) {
  const u32 none = 0;
  return make_uint4(weight_halves(scores, 0, 0), kHalves == 2 ? weight_halves(scores, 0, 1) : none,
                    weight_halves(scores, 1, 0), kHalves == 2 ? weight_halves(scores, 1, 1) : none);
}

DEVICE void mix_step(float (&o)[4], const uint4& weights, const Piece& piece, int s) {
  const u32 low = s % 2 ? piece.z : piece.x, high = s % 2 ? piece.w : piece.y;
  mma_m16n8k16(o, {weights.x, weights.y, weights.z, weights.w}, low, high);
}

DEVICE float2 mixed(const float (&o)[4], int half, const WeightUnit&) {
  return make_float2(o[2 * half], o[2 * half + 1]);
}
