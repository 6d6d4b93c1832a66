// A unit of decode_attention where the queries of a K/V head fit one tile: an item and a K/V head, by 4 warps.
//
// All of the page's K and V that any row sees is asked for at once, straight into the registers of the warp that
// multiplies it.  Warp w scores the 16 tokens of step w and mixes output dims w·D/4 .. +D/4 of all 64 tokens; the rows'
// largest exponents and the weights go through shared memory.
#pragma once

#include "decode_work.cuh"
#include "newest.cuh"
#include "query_tiles.cuh"

constexpr int kWarpDims = kHeadDim / kWarps;  // output dims a warp mixes
constexpr int kWarpTiles = kWarpDims / 8;
static_assert(kWarps == kSteps, "a warp scores the tokens of one step");

// A warp's share of a page: K of the tokens it scores, Vᵀ of the dims it mixes.
struct PagePieces {
  StepKeys keys;
  Piece values[kWarpTiles][kTokenPieces];
  StepScales value_scales;  // of the tokens it scores: their weights are its to round
};

#ifdef TL_INT8

// Of a row: the largest weight of each step, scales of V in them.
struct LargestWeights {
  float largest[16][kSteps];
};

#else

struct LargestWeights {};

#endif

// What the warps tell each other.
struct Exchange : Newest, LargestWeights {
  QueryTile queries;
  float top[16][kSteps];        // of a row: the largest score of each step
  u32 masses[16][4][kSteps];    // of a row: what each of its four lanes makes of the weights of each step
  uint4 weights[kMixSteps][32];  // a operands of the mix
};

// A page, and where its source has the same.
struct CopiedPage : PageHead {
  i64 to_source;  // bytes
  int copied_end;

  // `own`, an address of something of a token: where it had better be read.  Rows have copies of a page of their
  // parent's, each its own in memory; that page itself they find in the cache.
  template <class T>
  DEVICE const T* of_token(const T* own, int token) const {
    return reinterpret_cast<const T*>(reinterpret_cast<const u8*>(own) + (token < copied_end ? to_source : 0));
  }
};

DEVICE CopiedPage copied_page(const Lists& lists, const Unit& unit) {
  const i64 page_bytes = 2 * lists.num_kv_heads * static_cast<i64>(kHeadElements * sizeof(Stored) + kHeadScaleBytes);
  return {page_head(lists, unit.page), (unit.source - unit.page) * page_bytes, unit.copied_end};
}

// Where a lane's pieces begin.
struct PageRows {
  const Piece* keys[2];
  int token[2];  // of each
  const Piece* values[kTokenPieces];
};

// First of the eight tokens of a lane's piece j of Vᵀ.
DEVICE int value_token(int j) { return 32 * j + 8 * (threadIdx.x % 4); }

DEVICE PageRows page_rows(const CopiedPage& page) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  PageRows rows;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    rows.token[u] = token_of_column(warp, u, g);
    const Piece* keys = reinterpret_cast<const Piece*>(page.keys + rows.token[u] * kHeadDim) + t;
    rows.keys[u] = page.of_token(keys, rows.token[u]);
  }
  const Piece* values = reinterpret_cast<const Piece*>(page.values) + value_piece(warp * kWarpDims + g, t);
#pragma unroll
  for (int j = 0; j < kTokenPieces; ++j)
    rows.values[j] = page.of_token(values + value_piece(0, 4 * j), value_token(j));
  return rows;
}

DEVICE void load_warp_scales(PagePieces& page, const CopiedPage& from, bool wanted) {
  const int warp = threadIdx.x / 32, token = value_token(warp / 2);
  page.keys.scales = load_scales(from.of_token(from.key_scales, token), warp, wanted);
  page.value_scales = load_scales(from.of_token(from.value_scales, token), warp, wanted);
}

// Asks for everything that is seen of the settled tokens; the rest reads as zeros, whose weight is an exact zero.
DEVICE void load_page(PagePieces& page, const CopiedPage& from, const UnitSight& sight) {
  const PageRows rows = page_rows(from);
  const int scaled = value_token(threadIdx.x / 32 / 2);
  load_warp_scales(page, from, scaled < sight.settled_end && sees_some(sight.any, scaled, 8));
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const bool wanted = rows.token[u] < sight.settled_end && sees(sight.any, rows.token[u]);
#pragma unroll
    for (int j = 0; j < kDimPieces; ++j) page.keys.of[u][j] = load_stream_if(rows.keys[u] + 4 * j, wanted);
  }
#pragma unroll
  for (int j = 0; j < kTokenPieces; ++j) {
    const int token = value_token(j);
    const bool wanted = token < sight.settled_end && sees_some(sight.any, token, 8);
#pragma unroll
    for (int n = 0; n < kWarpTiles; ++n)
      page.values[n][j] = load_stream_if(rows.values[j] + value_piece(8 * n, 0), wanted);
  }
}

// Asks for what was left out.
DEVICE void load_unsettled(PagePieces& page, const CopiedPage& from, const UnitSight& sight) {
  const PageRows rows = page_rows(from);
  const int scaled = value_token(threadIdx.x / 32 / 2);
  if (scaled >= sight.settled_end && sees_some(sight.any, scaled, 8)) load_warp_scales(page, from, true);
#pragma unroll
  for (int u = 0; u < 2; ++u)
    if (rows.token[u] >= sight.settled_end && sees(sight.any, rows.token[u])) {
#pragma unroll
      for (int j = 0; j < kDimPieces; ++j) page.keys.of[u][j] = load_stream(rows.keys[u] + 4 * j);
    }
#pragma unroll
  for (int j = 0; j < kTokenPieces; ++j)
    if (value_token(j) >= sight.settled_end && sees_some(sight.any, value_token(j), 8)) {
#pragma unroll
      for (int n = 0; n < kWarpTiles; ++n) page.values[n][j] = load_stream(rows.values[j] + value_piece(8 * n, 0));
    }
}

// Into the warp's share of the page.
DEVICE void put_newest(PagePieces& page, const CopiedPage& to, const Newest& coded, int place) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  const PageRows rows = page_rows(to);
  put_key(page.keys, coded, warp, place);
  put_scale(page.value_scales, coded, kValue, warp, place);
#pragma unroll
  for (int j = 0; j < kTokenPieces; ++j)
    if (value_token(j) == place / kPieceElements * kPieceElements) {
#pragma unroll
      for (int n = 0; n < kWarpTiles; ++n)
        put_value(page.values[n][j], rows.values[j] + value_piece(8 * n, 0), coded, warp * kWarpDims + 8 * n + g, place);
    }
}

// Where piece n of the tile's queries is, and whether it exists.
DEVICE const u16* query_piece(const u16* q, int n, const Query& query, int num_heads) {
  return q + (query.entry.row * num_heads + query.head) * kHeadDim + 8 * (n % kRowPieces);
}

// The tile's queries, there after cp_async_wait and a barrier; rows that do not exist are zeros.
DEVICE void load_queries(QueryTile& tile, const u16* q, const Unit& unit, const Entries& entries, int num_heads) {
  constexpr int kPieces = 16 * kRowPieces / kThreads;  // of a thread
#ifdef TL_INT8
  uint4 halves[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int n = i * kThreads + static_cast<int>(threadIdx.x);
    const Query query = query_of(0, n / kRowPieces, unit, entries);
    halves[i] = query.exists ? load_piece(query_piece(q, n, query, num_heads)) : no_piece();
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) tile.put(i * kThreads + static_cast<int>(threadIdx.x), halves[i]);
#else
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int n = i * kThreads + static_cast<int>(threadIdx.x), row = n / kRowPieces;
    const Query query = query_of(0, row, unit, entries);
    cp_async16(&tile.rows[row][place_of_piece(row, n % kRowPieces)], query_piece(q, n, query, num_heads), query.exists);
  }
  cp_async_commit();
#endif
}

// Of a row's steps.
DEVICE float largest_of(const float (&of_step)[kSteps]) {
  return max_nan(max_nan(of_step[0], of_step[1]), max_nan(of_step[2], of_step[3]));
}

#ifdef TL_INT8

DEVICE WeightUnit unit_of_row(const Exchange& exchange, int row) {
  return weight_unit(largest_of(exchange.largest[row]));
}

// All warps' together.  Two steps are an a operand of the mix: rows g and g + 8 of one, then of the other.
DEVICE void publish_packed(Exchange& exchange, StepScores& weights, const StepScales& values, bool has_high) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half == 1 && !has_high) continue;
    const float largest = row_largest(scale_weights(weights, half, values, 0.0f));
    if (lane % 4 == 0) exchange.largest[g + 8 * half][warp] = largest;
  }
  __syncthreads();
  u32 levels[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (half == 0 || has_high) levels[half] = weight_levels(weights, half, unit_of_row(exchange, g + 8 * half));
  reinterpret_cast<uint2*>(&exchange.weights[warp / 2][lane])[warp % 2] = make_uint2(levels[0], levels[1]);
}

#else

DEVICE WeightUnit unit_of_row(const Exchange&, int) { return {}; }
DEVICE void publish_packed(Exchange& exchange, const StepScores& weights, const StepScales&, bool) {
  exchange.weights[threadIdx.x / 32][threadIdx.x % 32] = pack_step<2>(weights);
}

#endif

// Whether rows 8..15 of the tile exist.
DEVICE bool has_high(const Unit& unit) { return unit.num_entries * kQueriesPerKv > 8; }

// The warp's scores, and what the others need to know of them.
DEVICE void publish_tops(Exchange& exchange, StepScores& scores, float (&scales)[2], const Unit& unit,
                         const Entries& entries, const PagePieces& page, Sight any, float scale) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  if (sees_half(any, warp / 2)) score(scores, exchange.queries, page.keys);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half == 1 && !has_high(unit)) continue;
    const int row = g + 8 * half;
    const Sight sight = query_of(0, row, unit, entries).entry.sight;
    scales[half] = scale * exchange.queries.unit(half);
    const float top = row_largest(hide(scores, half, warp, sight, minus_infinity()));
    if (t == 0) exchange.top[row][warp] = top;
  }
}

// The warp's share of the weights: those of its 16 tokens, and their masses.
DEVICE void publish_weights(Exchange& exchange, StepScores& scores, const float (&scales)[2],
                            const StepScales& values, bool has_high) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half == 1 && !has_high) continue;
    const int row = g + 8 * half;
    const float base = exponent_base(page_exponent(largest_of(exchange.top[row]), scales[half]));
    exchange.masses[row][t][warp] = weigh_half_step(scores, half, scales[half], base);
  }
  publish_packed(exchange, scores, values, has_high);
}

// m and l of the rows, by one warp.
DEVICE void store_tile_sums(const Partials& partials, const Exchange& exchange, const Query (&queries)[2],
                            const Lists& lists, int block, const float (&scales)[2]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32(&masses)[kSteps] = exchange.masses[g + 8 * half][t];
    const float mass = mass_of_page(row_sum(masses[0] + masses[1] + masses[2] + masses[3]));
    const float m = page_exponent(largest_of(exchange.top[g + 8 * half]), scales[half]);
    if (queries[half].exists && t == 0) store_sums(partials, queries[half], lists, block, make_float2(m, mass));
  }
}

// o of the warp's output dims.
DEVICE void store_outputs(const Partials& partials, const Exchange& exchange, const Query (&queries)[2],
                          const PagePieces& page, Sight any, const Lists& lists) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  ProductSum o[kWarpTiles][4] = {};
#pragma unroll
  for (int s = 0; s < kMixSteps; ++s) {
    if (!sees_half(any, half_of(s))) continue;
    const uint4 weights = exchange.weights[s][lane];
#pragma unroll
    for (int n = 0; n < kWarpTiles; ++n) mix_step(o[n], weights, page.values[n][half_of(s)], s);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!queries[half].exists) continue;
    const WeightUnit unit = unit_of_row(exchange, g + 8 * half);
    float* dims = output_of(partials, queries[half], lists) + warp * kWarpDims + 2 * t;
#pragma unroll
    for (int n = 0; n < kWarpTiles; ++n) *reinterpret_cast<float2*>(dims + 8 * n) = mixed(o[n], half, unit);
  }
}

// A unit, once its page and queries are there.
DEVICE void attend(const Partials& partials, Exchange& exchange, const Unit& unit, const Entries& entries,
                   const Lists& lists, const PagePieces& page, Sight any, float scale) {
  const int g = threadIdx.x % 32 / 4;
  StepScores scores = {};
  float scales[2] = {};
  publish_tops(exchange, scores, scales, unit, entries, page, any, scale);
  __syncthreads();
  publish_weights(exchange, scores, scales, page.value_scales, has_high(unit));
  __syncthreads();
  const Query queries[2] = {query_of(0, g, unit, entries), query_of(0, g + 8, unit, entries)};
  if (threadIdx.x / 32 == 0) store_tile_sums(partials, exchange, queries, lists, unit.block, scales);
  store_outputs(partials, exchange, queries, page, any, lists);
}
