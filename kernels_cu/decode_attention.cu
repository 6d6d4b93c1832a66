// decode_attention: one token per row, against the pages of its sequence.
//
//   a[r, h] = Σ_p w_p·V[p] / Σ_p w_p     w_p = 2^(q[r, h]·K[p]·scale)     over the positions p that row r sees
//
//   q            fp16   [R][H·D]                  turned by RoPE
//   pool         fp16   [num_pages][2·G·64·D]     pages (attention.cuh)
//   tables       int32  [slots][max_layers][max_blocks]   page of a sequence's 64-token block; −1: none
//   items        int32  [max_items][4]            slot whose table names the page, block, first entry, entries 1..64
//   num_items    int32  [1]
//   entries      int32  [max_entries][2]          row, ordinal of this split among the row's, ascending from 0
//   row_items    int32  [R]                       splits of the row
//   position     int32  [R]                       of the row's token; its K and V are in its page
//   window       int32  [R]                       p is seen iff p ≤ position and (window = 0 or p > position − window)
//   partial_o    fp32   [R][H][max_blocks][D]     scratch
//   partial_ml   fp32   [R][H][max_blocks][2]     scratch
//   counters     int32  [R][G]                    zero before and after
//   a            fp16   [R][H·D]                  rows without a split are not written
//   layer, H, G, max_layers, max_blocks, R; scale = log2(e)/√D.   R ≤ 64; D is 64 or 128; H/G ≤ 16; 16-byte alignment.
//
// A *split* is one page.  Each is attended as if it stood alone and leaves, per row and head, unnormalised
// o = Σ w·V, l = Σ w and its largest exponent m; the splits of a row are then merged in ascending order.  Hence a row's
// bits depend on nothing but its own query and pages: not on the other rows of its items, not on how its items are
// grouped.  A split of which a row sees nothing has m = −inf and weighs exactly 0, so it may as well be left out.
//
// Unit of work: an item and a K/V head, by 4 warps.  All of the page's K and V that any row sees is asked for at once,
// straight into the registers of the warp that multiplies it, and kept there for all query tiles (16 rows of q: rows
// of the batch × the heads that share the K/V head).  Warp w scores the 16 tokens of step w and mixes output dims
// w·D/4 .. +D/4 of all 64 tokens, the weights having gone through shared memory in fp16.  The unit that is the last of
// a row and K/V head to arrive merges it.  The grid is fixed; blocks stride over the units, of which the first may be
// loaded before the previous kernel ends if that kernel has no token to add to its page.
//
// fp32: scores, exponents, sums, merge.  fp16: the weights that multiply V (relative to the largest of their 16
// tokens), and a.  Bytes: each page that an item names once, as far as it is seen; partials (D + 2)·4 per row, head and
// split, written and read once (L2).
#include "attention.cuh"

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kMaxRows = 64;
constexpr int kTileEntries = 16 / kQueriesPerKv;      // rows of the batch in a query tile
constexpr int kWarpDims = kHeadDim / kWarps;          // output dims a warp mixes
constexpr int kDimTiles = kWarpDims / 8;
constexpr int kMergeDims = 64;                        // output dims a warp merges: two a lane
constexpr int kMergeSplits = 16;                      // splits in flight in a merge, one weight a lane
static_assert(kWarps == kSteps, "a warp scores the tokens of one step");

struct Shape {
  int num_heads, num_kv_heads, max_blocks;
};

struct Unit {
  int kv_head, block, first_entry, num_entries;
  const u16 *keys, *values;  // of this head in the page: [64][D], [D][64]
};

// A lane's share of a page: of K the two tokens it is a column of, of Vᵀ its rows of output dims.
struct PagePieces {
  uint4 keys[2][kDimPieces];
  uint4 values[kDimTiles][kTokenPieces];
};

// One query, that is one row of a tile: where it comes from and where its partial goes.
struct Query {
  bool exists;
  int row, head, ordinal;
  Sight sight;
};

// What the whole block knows about the batch.
struct Batch {
  int position[kMaxRows], window[kMaxRows], splits[kMaxRows];
};

// How a tile's warps tell each other their weights; two of them, so that one barrier a tile is enough.
struct Exchange {
  uint4 weights[kSteps][32];  // of step s: the a operand of lane i
  float top[kSteps][16], sum[kSteps][16];
};

DEVICE void read_batch(Batch& batch, const i32* position, const i32* window, const i32* row_items, int num_rows) {
  const int row = threadIdx.x;
  if (row < num_rows) {
    batch.position[row] = position[row];
    batch.window[row] = window[row];
    batch.splits[row] = row_items[row];
  }
}

// Unit n is item n / G, head n % G.
DEVICE Unit read_unit(int n, const int4* items, const i32* tables, const u16* pool, int layer, int max_layers,
                      const Shape& shape) {
  const int4 item = items[n / shape.num_kv_heads];
  const int kv_head = n % shape.num_kv_heads;
  const int page = tables[(item.x * max_layers + layer) * shape.max_blocks + item.y];
  return {kv_head,
          item.y,
          item.z,
          item.w,
          page_keys(pool, page, kv_head, shape.num_kv_heads),
          page_values(pool, page, kv_head, shape.num_kv_heads)};
}

// What the unit's rows see of its page together; settled: none of their tokens of this step lies in it.
struct UnitSight {
  Sight any;
  bool settled;
};

DEVICE UnitSight sight_of_unit(const Unit& unit, const uint2* entries, const Batch& batch) {
  int begin = kPageTokens, end = 0, first_end = kPageTokens + 1;
  for (int e = threadIdx.x % 32; e < unit.num_entries; e += 32) {
    const int row = entries[unit.first_entry + e].x;
    const Sight sight = sight_of(batch.position[row], batch.window[row], unit.block);
    begin = min(begin, sight.begin);
    end = max(end, sight.end);
    first_end = min(first_end, sight.end);
  }
  return {{reduce_min(begin), reduce_max(end)}, reduce_min(first_end) > kPageTokens};
}

// Asks for everything in `sight`; what lies outside reads as zeros, whose weight is an exact zero.
DEVICE void load_page(PagePieces& page, const Unit& unit, Sight sight) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int token = token_of_column(warp, u, g);
    const uint4* row = reinterpret_cast<const uint4*>(unit.keys + token * kHeadDim) + t;
    const bool seen = sees(sight, token);
#pragma unroll
    for (int j = 0; j < kDimPieces; ++j) page.keys[u][j] = seen ? load_stream(row + 4 * j) : no_piece();
  }
#pragma unroll
  for (int n = 0; n < kDimTiles; ++n) {
    const int dim = warp * kWarpDims + 8 * n + g;
    const uint4* row = reinterpret_cast<const uint4*>(unit.values + dim * kPageTokens) + t;
#pragma unroll
    for (int j = 0; j < kTokenPieces; ++j) {
      const int token = 32 * j + 8 * t;
      const bool seen = token < sight.end && token + 8 > sight.begin;
      page.values[n][j] = seen ? load_stream(row + 4 * j) : no_piece();
    }
  }
}

// Row `i` (0..15) of a tile.
DEVICE Query query_of(int tile, int i, const Unit& unit, const uint2* entries, const Batch& batch) {
  const int e = tile * kTileEntries + i / kQueriesPerKv;
  Query query = {i < kTileEntries * kQueriesPerKv && e < unit.num_entries, 0, 0, 0, {0, 0}};
  if (query.exists) {
    const uint2 entry = entries[unit.first_entry + e];
    query.row = entry.x;
    query.ordinal = entry.y;
    query.head = unit.kv_head * kQueriesPerKv + i % kQueriesPerKv;
    query.sight = sight_of(batch.position[query.row], batch.window[query.row], unit.block);
  }
  return query;
}

DEVICE uint4 load_query(const u16* q, const Query& query, const Shape& shape, int piece) {
  if (!query.exists) return no_piece();
  return load_piece(q + (query.row * shape.num_heads + query.head) * kHeadDim + 8 * piece);
}

// Scores of the tile against the warp's 16 tokens.
DEVICE void score(float (&scores)[2][4], const u16* q, const Query (&queries)[2], const PagePieces& page,
                  const Shape& shape) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int u = 0; u < 2; ++u)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[u][i] = 0.0f;
#pragma unroll
  for (int j = 0; j < kDimPieces; ++j) {
    const uint4 low = load_query(q, queries[0], shape, 4 * j + t);
    const uint4 high = load_query(q, queries[1], shape, 4 * j + t);
#pragma unroll
    for (int u = 0; u < 2; ++u) mma_m16n8k16(scores[u], {low.x, high.x, low.y, high.y}, page.keys[u][j].x, page.keys[u][j].y);
#pragma unroll
    for (int u = 0; u < 2; ++u) mma_m16n8k16(scores[u], {low.z, high.z, low.w, high.w}, page.keys[u][j].z, page.keys[u][j].w);
  }
}

// The warp's share of the softmax: weights in fp16 for all warps, and per row their largest exponent and their sum.
DEVICE void publish_weights(Exchange& exchange, float (&scores)[2][4], const Query (&queries)[2], float scale) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = minus_infinity();
#pragma unroll
    for (int u = 0; u < 2; ++u)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& value = scores[u][2 * half + i];
        if (!sees(queries[half].sight, token_of_column(warp, u, 2 * t + i))) value = minus_infinity();
        top = fmaxf(top, value);
      }
    top = row_max(top) * scale;
    float sum = 0.0f;
#pragma unroll
    for (int u = 0; u < 2; ++u)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& value = scores[u][2 * half + i];
        value = weigh(value, scale, exponent_base(top));
        sum += value;
      }
    sum = row_sum(sum);
    if (t == 0) {
      exchange.top[warp][g + 8 * half] = top;
      exchange.sum[warp][g + 8 * half] = sum;
    }
  }
  exchange.weights[warp][lane] = make_uint4(pack_half2(scores[0][0], scores[0][1]), pack_half2(scores[0][2], scores[0][3]),
                                            pack_half2(scores[1][0], scores[1][1]), pack_half2(scores[1][2], scores[1][3]));
}

// o of the warp's output dims, and the split's largest exponent and sum, from all four warps' weights.  Steps in order.
DEVICE void mix(float (&o)[kDimTiles][4], float (&top)[2], float (&sum)[2], const Exchange& exchange,
                const PagePieces& page) {
  const int lane = threadIdx.x % 32, g = lane / 4;
  float factor[kSteps][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    top[half] = minus_infinity();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) top[half] = fmaxf(top[half], exchange.top[s][g + 8 * half]);
    sum[half] = 0.0f;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      factor[s][half] = exp2_fast(exchange.top[s][g + 8 * half] - exponent_base(top[half]));
      sum[half] = fmaf(factor[s][half], exchange.sum[s][g + 8 * half], sum[half]);
    }
  }
#pragma unroll
  for (int n = 0; n < kDimTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) o[n][i] = 0.0f;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const uint4 weights = exchange.weights[s][lane];
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n) {
      const uint4 piece = page.values[n][s / 2];
      float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      mma_m16n8k16(part, {weights.x, weights.y, weights.z, weights.w}, s % 2 ? piece.z : piece.x, s % 2 ? piece.w : piece.y);
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = fmaf(factor[s][i / 2], part[i], o[n][i]);
    }
  }
}

// Where the partials of a query lie, in splits from the start.
DEVICE int partial_index(int row, int head, int ordinal, const Shape& shape) {
  return (row * shape.num_heads + head) * shape.max_blocks + ordinal;
}

DEVICE void store_partials(float* partial_o, float2* partial_ml, const float (&o)[kDimTiles][4], const float (&top)[2],
                           const float (&sum)[2], const Query (&queries)[2], const Shape& shape) {
  const int warp = threadIdx.x / 32, t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Query& query = queries[half];
    if (!query.exists) continue;
    const int index = partial_index(query.row, query.head, query.ordinal, shape);
    float* dims = partial_o + static_cast<u64>(index) * kHeadDim + warp * kWarpDims + 2 * t;
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n)
      *reinterpret_cast<float2*>(dims + 8 * n) = make_float2(o[n][2 * half], o[n][2 * half + 1]);
    if (warp == 0 && t == 0) partial_ml[index] = make_float2(top[half], sum[half]);
  }
}

// Of one row and head: 64 output dims of all splits from `first` on, two dims a lane, and a split's m and l a lane.
struct SplitParts {
  float2 o[kMergeSplits];
  float2 ml;
};

DEVICE void load_parts(SplitParts& parts, const float2* o, const float2* ml, int first, int num_splits) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kMergeSplits; ++i)
    if (first + i < num_splits) parts.o[i] = load_l2(o + (first + i) * (kHeadDim / 2));
  parts.ml = first + lane < num_splits ? load_l2(ml + first + lane) : make_float2(minus_infinity(), 0.0f);
}

// Adds the splits from `first` on, in order.
DEVICE void merge_parts(float2& o, float& sum, const SplitParts& parts, float base, int first, int num_splits) {
  const float factor = exp2_fast(parts.ml.x - base);
  const float mass = factor * parts.ml.y;
#pragma unroll
  for (int i = 0; i < kMergeSplits; ++i)
    if (first + i < num_splits) {
      const float weight = shuffle_from(factor, i);
      o = make_float2(fmaf(weight, parts.o[i].x, o.x), fmaf(weight, parts.o[i].y, o.y));
      sum += shuffle_from(mass, i);
    }
}

// a of 64 dims of one row and head: a warp's work.
DEVICE void merge(u16* a, const float* partial_o, const float2* partial_ml, int query, int first_dim, int num_splits,
                  int max_blocks) {
  const int lane = threadIdx.x % 32;
  const u64 index = static_cast<u64>(query) * max_blocks;
  const float2* o_parts = reinterpret_cast<const float2*>(partial_o + index * kHeadDim + first_dim) + lane;
  const float2* ml_parts = partial_ml + index;
  SplitParts parts;
  load_parts(parts, o_parts, ml_parts, 0, num_splits);
  float top = parts.ml.x;
  for (int split = kMergeSplits + lane; split < num_splits; split += 32) top = fmaxf(top, load_l2(ml_parts + split).x);
  for (int mask = 16; mask > 0; mask /= 2) top = fmaxf(top, shuffle_xor(top, mask));
  float2 o = make_float2(0.0f, 0.0f);
  float sum = 0.0f;
  for (int first = 0; first < num_splits; first += kMergeSplits) {
    if (first > 0) load_parts(parts, o_parts, ml_parts, first, num_splits);
    merge_parts(o, sum, parts, exponent_base(top), first, num_splits);
  }
  const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
  reinterpret_cast<u32*>(a + query * kHeadDim + first_dim)[lane] = pack_half2(o.x * inverse, o.y * inverse);
}

// The rows that a unit completes.
struct Completed {
  int count;
  int rows[kMaxRows];
};

// Counts the unit for each of its rows, once all of its partials are stored.
DEVICE void arrive(Completed& completed, const Unit& unit, const uint2* entries, const Batch& batch, i32* counters,
                   const Shape& shape) {
  if (threadIdx.x == 0) completed.count = 0;
  __syncthreads();
  if (threadIdx.x < unit.num_entries) {
    const int row = entries[unit.first_entry + threadIdx.x].x;
    i32* counter = counters + row * shape.num_kv_heads + unit.kv_head;
    thread_fence();
    if (atomic_add(counter, 1) + 1 == batch.splits[row]) {
      *counter = 0;
      completed.rows[atomic_add(&completed.count, 1)] = row;
      thread_fence();
    }
  }
  __syncthreads();
}

DEVICE void merge_completed(const Completed& completed, int kv_head, u16* a, const float* partial_o,
                            const float2* partial_ml, const Batch& batch, const Shape& shape) {
  constexpr int kParts = kHeadDim / kMergeDims;
  const int num_tasks = completed.count * kQueriesPerKv * kParts;
  for (int task = threadIdx.x / 32; task < num_tasks; task += kWarps) {
    const int row = completed.rows[task / kParts / kQueriesPerKv];
    const int head = kv_head * kQueriesPerKv + task / kParts % kQueriesPerKv;
    merge(a, partial_o, partial_ml, row * shape.num_heads + head, task % kParts * kMergeDims, batch.splits[row],
          shape.max_blocks);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    decode_attention(const u16* q, const u16* pool, const i32* tables, const int4* items, const i32* num_items,
                     const uint2* entries, const i32* row_items, const i32* position, const i32* window,
                     float* partial_o, float2* partial_ml, i32* counters, u16* a, i32 layer, i32 num_rows,
                     i32 num_heads, i32 num_kv_heads, i32 max_layers, i32 max_blocks, float scale) {
  __shared__ Batch batch;
  __shared__ Exchange exchanges[2];
  __shared__ Completed completed;
  const Shape shape = {num_heads, num_kv_heads, max_blocks};
  read_batch(batch, position, window, row_items, num_rows);
  const int num_units = num_items[0] * num_kv_heads;
  __syncthreads();

  int turn = 0;  // of this block's query tiles, all units together
  for (int n = blockIdx.x; n < num_units; n += gridDim.x) {
    const Unit unit = read_unit(n, items, tables, pool, layer, max_layers, shape);
    const UnitSight sight = sight_of_unit(unit, entries, batch);
    if (turn == 0 && !sight.settled) dependency_wait();
    PagePieces page;
    load_page(page, unit, sight.any);
    if (turn == 0) {
      dependency_wait();
      dependency_launch();
    }
    for (int tile = 0; tile * kTileEntries < unit.num_entries; ++tile, ++turn) {
      Exchange& exchange = exchanges[turn % 2];
      const int i = threadIdx.x % 32 / 4;
      {
        const Query queries[2] = {query_of(tile, i, unit, entries, batch), query_of(tile, i + 8, unit, entries, batch)};
        float scores[2][4];
        score(scores, q, queries, page, shape);
        publish_weights(exchange, scores, queries, scale);
      }
      __syncthreads();
      {
        const Query queries[2] = {query_of(tile, i, unit, entries, batch), query_of(tile, i + 8, unit, entries, batch)};
        float o[kDimTiles][4], top[2], sum[2];
        mix(o, top, sum, exchange, page);
        store_partials(partial_o, partial_ml, o, top, sum, queries, shape);
      }
    }
    arrive(completed, unit, entries, batch, counters, shape);
    merge_completed(completed, unit.kv_head, a, partial_o, partial_ml, batch, shape);
  }
  if (turn == 0) dependency_wait();  // so that this kernel ends after the one before it
}
