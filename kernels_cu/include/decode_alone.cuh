// A warp attends an item of one row alone: the heads that share the K/V head are its tile.  K goes from the page
// straight to registers, half a page at a time, then V, half of the dims at a time.
#pragma once

#include "decode_work.cuh"
#include "query_tiles.cuh"

constexpr int kHalfSteps = kSteps / 2;
constexpr int kGroupTiles = kHeadDim / 16;             // tiles of 8 output dims that are mixed at once: two groups
constexpr int kOwnHalves = kQueriesPerKv > 8 ? 2 : 1;  // of a tile that hold heads

struct HalfKeys {
  StepKeys steps[kHalfSteps];
};

// Of a group's output dims: the lane's 8 tokens of each half of the page.
struct GroupValues {
  Piece tiles[kGroupTiles][kTokenPieces];
};

// First of the eight tokens of a lane's piece of V in half j of the page, and of its columns of scores.
DEVICE int first_token(int j) { return 32 * j + 8 * (threadIdx.x % 4); }

// The scales of the lane's columns of step s, if they or neighbours of theirs are seen.
DEVICE StepScales load_columns(const PageHead& page, const uint4* scales, int s, Sight sight) {
  const int token = first_token(s / 2);
  return load_scales(page.of_token(scales, token), s, sees_some(sight, token, 8));
}

DEVICE void load_half_keys(HalfKeys& keys, const PageHead& page, int j, Sight sight) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < kHalfSteps; ++i) {
    const int s = kHalfSteps * j + i;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int token = token_of_column(s, u, g);
      const Piece* row = page.of_token(reinterpret_cast<const Piece*>(page.keys + token * kHeadDim) + t, token);
#pragma unroll
      for (int n = 0; n < kDimPieces; ++n) keys.steps[i].of[u][n] = load_stream_if(row + 4 * n, sees(sight, token));
    }
    keys.steps[i].scales = load_columns(page, page.key_scales, s, sight);
  }
}

// values: the first piece of the group's first dim.
DEVICE void load_group_values(GroupValues& loaded, const PageHead& page, const Piece* values, Sight sight) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kTokenPieces; ++j) {
    const Piece* row = page.of_token(values + value_piece(g, 4 * j + t), first_token(j));
#pragma unroll
    for (int n = 0; n < kGroupTiles; ++n)
      loaded.tiles[n][j] = load_stream_if(row + value_piece(8 * n, 0), sees_some(sight, first_token(j), 8));
  }
}

// Asks for the heads' queries; the tile's rows past the last head hold anything.
DEVICE void load_own_queries(QueryTile& tile, const u16* q, int row, int num_heads) {
  const u16* queries = q + (row * num_heads + static_cast<int>(blockIdx.x) * kQueriesPerKv) * kHeadDim;
  __syncwarp();  // nobody still reads those before
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < kQueriesPerKv * kRowPieces; i += 32) {
    const int head = i / kRowPieces, piece = i % kRowPieces;
    cp_async16(&tile.rows[head][place_of_piece(head, piece)], queries + 8 * i, true);
  }
  cp_async_commit();
}

DEVICE void weigh_own(PageWeights<kOwnHalves>& weights, const QueryTile& tile, const PageHead& page, Sight sight,
                      float scale) {
  StepScores scores[kSteps] = {};
  StepScales values[kSteps];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) values[s] = load_columns(page, page.value_scales, s, sight);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (!sees_half(sight, j)) continue;
    HalfKeys keys;
    load_half_keys(keys, page, j, sight);
    if (j == 0 || !sees_half(sight, 0)) {  // the queries come with the first keys
      cp_async_wait<0>();
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kHalfSteps; ++i)
      score(scores[kHalfSteps * j + i], TileQueries<kOwnHalves>{tile}, keys.steps[i]);
  }
  Sight sights[kOwnHalves];
  for (Sight& of_half : sights) of_half = sight;
  weigh_page(weights, scores, sights, values, scale);
}

// o of a group's dims, to dims[half] where that is not null.
DEVICE void mix_own(float* const (&dims)[kOwnHalves], const PageWeights<kOwnHalves>& weights, const PageHead& page,
                    const Piece* values, Sight sight) {
  GroupValues group;
  float o[kGroupTiles][4] = {};
  load_group_values(group, page, values, sight);
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    if (!sees_half(sight, s / 2)) continue;
#pragma unroll
    for (int n = 0; n < kGroupTiles; ++n) mix_step(o[n], weights.steps[s], group.tiles[n][s / 2], s);
  }
#pragma unroll
  for (int half = 0; half < kOwnHalves; ++half)
    if (dims[half]) {
#pragma unroll
      for (int n = 0; n < kGroupTiles; ++n)
        *reinterpret_cast<float2*>(dims[half] + 8 * n) = make_float2(o[n][2 * half], o[n][2 * half + 1]);
    }
}

// What a row sees of a page, by this warp: o, m and l of each head.  Its queries are under way.
DEVICE void attend_alone(const Partials& partials, const QueryTile& tile, const PageHead& page, const Entry& entry,
                         const Lists& lists, float scale) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  PageWeights<kOwnHalves> weights;
  float* dims[kOwnHalves];  // null: no head
  weigh_own(weights, tile, page, entry.sight, scale);
#pragma unroll
  for (int half = 0; half < kOwnHalves; ++half) {
    const int nth = g + 8 * half, head = static_cast<int>(blockIdx.x) * kQueriesPerKv + nth;
    const Query query = {entry, head, nth < kQueriesPerKv};
    if (query.exists && t == 0) partials.ml[split_of(query, lists)] = weights.ml[half];
    dims[half] = query.exists ? output_of(partials, query, lists) + 2 * t : nullptr;
  }
#pragma unroll 1
  for (int group = 0; group < 2; ++group) {
    const Piece* values = reinterpret_cast<const Piece*>(page.values) + value_piece(group * kHeadDim / 2, 0);
    mix_own(dims, weights, page, values, entry.sight);
#pragma unroll
    for (int half = 0; half < kOwnHalves; ++half)
      if (dims[half]) dims[half] += kHeadDim / 2;
  }
}
