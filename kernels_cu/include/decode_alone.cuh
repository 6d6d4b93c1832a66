// A warp attends an item of one row alone: the heads that share the K/V head are its tile.  K goes from the page
// straight to registers, half a page at a time, then V, half of the dims at a time; but what the page is a copy of comes
// out of shared memory, where the block has it for all its warps.
#pragma once

#include "shared_page.cuh"

constexpr int kHalfSteps = kSteps / 2;
constexpr int kHalfTokens = kPageTokens / 2;
constexpr int kOwnHalves = kQueriesPerKv > 8 ? 2 : 1;  // of a tile that hold heads

typedef QueryRows<kQueriesPerKv> OwnQueries;

struct HalfKeys {
  StepKeys steps[kHalfSteps];
};

// Of a group's output dims: the lane's 8 tokens of each half of the page.
struct GroupValues {
  Piece tiles[kGroupTiles][kTokenPieces];
};

// A row's page: its first tokens in shared memory, the others where they are.
struct OwnPage {
  const SharedPage& copied;
  PageHead own;
  int copied_end;  // a multiple of 8

  DEVICE Sight of_copied(Sight sight) const { return {sight.begin, min(sight.end, copied_end)}; }
  DEVICE Sight of_own(Sight sight) const { return {max(sight.begin, copied_end), sight.end}; }
};

// First of the eight tokens of a lane's piece of V in half j of the page, and of its columns of scores.
DEVICE int first_token(int j) { return kHalfTokens * j + 8 * (threadIdx.x % 4); }

// Token of column g of tile u of step i of half j.
DEVICE int token_of_half(int j, int i, int u) {
  return kHalfTokens * j + token_of_column(i, u, threadIdx.x % 32 / 4);
}

// Asks for what is seen of half j; the rest is zeros.
DEVICE void load_half_keys(HalfKeys& keys, const PageHead& page, int j, Sight sight) {
  const Piece* lane_keys = reinterpret_cast<const Piece*>(page.keys) + threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < kHalfSteps; ++i) {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int token = token_of_half(j, i, u);
      const Piece* row = lane_keys + token * kRowPieces;
#pragma unroll
      for (int n = 0; n < kDimPieces; ++n) keys.steps[i].of[u][n] = load_stream_if(row + 4 * n, sees(sight, token));
    }
    const bool scaled = sees_some(sight, first_token(j), 8);
    keys.steps[i].scales = load_scales(page.key_scales, kHalfSteps * j + i, scaled);
  }
}

// And what is seen of what is in shared memory.
DEVICE void read_half_keys(HalfKeys& keys, const SharedPage& page, int j, Sight sight) {
#pragma unroll
  for (int i = 0; i < kHalfSteps; ++i) {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int token = token_of_half(j, i, u);
      if (!sees(sight, token)) continue;
#pragma unroll
      for (int n = 0; n < kDimPieces; ++n)
        keys.steps[i].of[u][n] = page.keys[token][place_of_key(token, 4 * n + threadIdx.x % 4)];
    }
    if (sees_some(sight, first_token(j), 8)) keys.steps[i].scales = page.key_scales(kHalfSteps * j + i);
  }
}

// Asks for what is seen of a group's values.
DEVICE void load_group_values(GroupValues& loaded, const OwnPage& page, int group, Sight sight) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const Sight own = page.of_own(sight);
  const Piece* values = reinterpret_cast<const Piece*>(page.own.values) + value_piece(group * kHeadDim / 2 + g, t);
#pragma unroll
  for (int j = 0; j < kTokenPieces; ++j)
#pragma unroll
    for (int n = 0; n < kGroupTiles; ++n)
      loaded.tiles[n][j] = load_stream_if(values + value_piece(8 * n, 4 * j), sees_some(own, first_token(j), 8));
  __syncwarp();  // all of them are under way
}

// And what is seen of what is in shared memory.
DEVICE void read_group_values(GroupValues& loaded, const OwnPage& page, int group, Sight sight) {
  const Sight copied = page.of_copied(sight);
#pragma unroll
  for (int j = 0; j < kTokenPieces; ++j)
    if (sees_some(copied, first_token(j), 8)) {
#pragma unroll
      for (int n = 0; n < kGroupTiles; ++n) loaded.tiles[n][j] = value_piece(page.copied, group, n, j);
    }
}

// Asks for the heads' queries.
DEVICE void load_own_queries(OwnQueries& held, const u16* q, int row, int num_heads) {
  const u16* queries = q + (row * num_heads + static_cast<int>(blockIdx.x) * kQueriesPerKv) * kHeadDim;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < kQueriesPerKv * kRowPieces; i += 32) {
    const int head = i / kRowPieces, piece = i % kRowPieces;
    cp_async16(&held.rows[head][place_of_piece(head, piece)], queries + 8 * i, true);
  }
  cp_async_commit();
}

// The heads' queries, straight from memory.
struct DirectQueries {
  CodedRow rows[kOwnHalves];

  DEVICE DirectQueries(const u16* q, int row, int num_heads) {
    q += (row * num_heads + static_cast<int>(blockIdx.x) * kQueriesPerKv) * kHeadDim + 8 * (threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < kOwnHalves; ++half) {
      const u16* head = q + min(static_cast<int>(threadIdx.x) % 32 / 4 + 8 * half, kQueriesPerKv - 1) * kHeadDim;
      uint4 halves[kDimPieces];
#pragma unroll
      for (int j = 0; j < kDimPieces; ++j) halves[j] = load_piece(head + 32 * j);
      rows[half] = coded_row(halves);
    }
  }
  DEVICE QueryPieces piece(int j) const {
    return {rows[0].pieces[j], kOwnHalves == 2 ? rows[kOwnHalves - 1].pieces[j] : Piece{}};
  }
  DEVICE float unit(int half) const { return rows[half].unit; }
};

// The second half of the page comes first: it is what the row has of its own where it has copies, and is under way while
// the queries and the copies come, which arrive() waits for; it gives the queries.
template <class Arrive>
DEVICE void weigh_own(PageWeights<kOwnHalves>& weights, GroupValues& group, Arrive arrive, const OwnPage& page,
                      Sight sight, float scale) {
  const Sight own = page.of_own(sight), copied = page.of_copied(sight);
  StepScores scores[kSteps] = {};
  StepScales values[kSteps];
  HalfKeys keys;
  const int first = sees_half(sight, 1) ? 1 : 0;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) values[s] = load_scales(page.own.value_scales, s, sees_some(own, first_token(s / 2), 8));
  load_half_keys(keys, page.own, first, own);
  __syncwarp();  // not only after the queries have come
  const auto tile = arrive();
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
    if (sees_some(copied, first_token(s / 2), 8)) values[s] = page.copied.value_scales(s);
#pragma unroll
  for (int j = 1; j >= 0; --j) {
    if (!sees_half(sight, j)) continue;
    if (j == 0 && first == 1) load_half_keys(keys, page.own, 0, own);
    read_half_keys(keys, page.copied, j, copied);
#pragma unroll
    for (int i = 0; i < kHalfSteps; ++i) score(scores[kHalfSteps * j + i], tile, keys.steps[i]);
  }
  load_group_values(group, page, 0, sight);  // in time
  Sight sights[kOwnHalves];
  float scales[kOwnHalves];
#pragma unroll
  for (int half = 0; half < kOwnHalves; ++half) sights[half] = sight, scales[half] = scale * tile.unit(half);
  weigh_page(weights, scores, sights, values, scales);
}

// o of a group's dims, to dims[half] where that is not null.
DEVICE void mix_own(float* const (&dims)[kOwnHalves], const PageWeights<kOwnHalves>& weights, const OwnPage& page,
                    GroupValues& values, int group, Sight sight) {
  ProductSum o[kGroupTiles][4] = {};
  read_group_values(values, page, group, sight);
#pragma unroll
  for (int s = 0; s < kMixSteps; ++s) {
    if (!sees_half(sight, half_of(s))) continue;
#pragma unroll
    for (int n = 0; n < kGroupTiles; ++n) mix_step(o[n], weights.steps[s], values.tiles[n][half_of(s)], s);
  }
#pragma unroll
  for (int half = 0; half < kOwnHalves; ++half)
    if (dims[half]) {
#pragma unroll
      for (int n = 0; n < kGroupTiles; ++n)
        *reinterpret_cast<float2*>(dims[half] + group * kHeadDim / 2 + 8 * n) = mixed(o[n], half, weights.units[half]);
    }
}

// What a row sees of a page, by this warp: o, m and l of each head; nothing is stored unless the row `exists`.  Its
// queries are under way.
template <class Arrive>
DEVICE void attend_alone(const Partials& partials, Arrive arrive, const OwnPage& page, const Entry& entry, int block,
                         bool exists, const Lists& lists, float scale) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  PageWeights<kOwnHalves> weights;
  float* dims[kOwnHalves];  // null: no head
  GroupValues values;
  weigh_own(weights, values, arrive, page, entry.sight, scale);
#pragma unroll
  for (int half = 0; half < kOwnHalves; ++half) {
    const int nth = g + 8 * half, head = static_cast<int>(blockIdx.x) * kQueriesPerKv + nth;
    const Query query = {entry, head, exists && nth < kQueriesPerKv};
    if (query.exists && t == 0) store_sums(partials, query, lists, block, weights.ml[half]);
    dims[half] = query.exists ? output_of(partials, query, lists) + 2 * t : nullptr;
  }
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    if (group > 0) load_group_values(values, page, group, entry.sight);
    mix_own(dims, weights, page, values, group, entry.sight);
  }
}
