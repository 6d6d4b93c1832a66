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
//   table_offset = layer·max_blocks, table_stride = max_layers·max_blocks; scale = log2(e)/√D
//   R ≤ 64; D is 64 or 128; H/G ≤ 16; 16-byte alignment.
//
// A *split* is one page.  Each is attended as if it stood alone and leaves, per row and head, unnormalised
// o = Σ w·V, l = Σ w and its largest exponent m; the splits of a row are then merged in ascending order.  Hence a row's
// bits depend on nothing but its own query and pages: not on the other rows of its items, not on how its items are
// grouped.  A split of which a row sees nothing has m = −inf and weighs exactly 0, so it may as well be left out.
//
// Unit of work: an item and a K/V head, by 4 warps; blockIdx.x is the K/V head, the blocks along y stride over the
// items.  All of the page's K and V that any row sees is asked for at once, straight into the registers of the warp
// that multiplies it, and kept there for all query tiles (16 rows of q: rows of the batch × the heads that share the
// K/V head).  Warp w scores the 16 tokens of step w and mixes output dims w·D/4 .. +D/4 of all 64 tokens, the weights
// having gone through shared memory in fp16.  The unit that is the last of a row and K/V head to arrive merges it
// (merge_splits.cuh).
//
// Before the previous kernel ends, a block loads the page of its first unit; where that kernel adds a row's token to
// the page, it is only brought to L2.  This takes for granted that the positions, and K and V of all earlier tokens,
// were there when the previous kernel let this one start.
//
// fp32: scores, exponents, sums, merge.  fp16: the weights that multiply V (relative to the largest of their 16
// tokens), and a.  Bytes: each page that an item names once, as far as it is seen; partials (D + 2)·4 per row, head and
// split, written and read once (L2).
#include "attention.cuh"
#include "merge_splits.cuh"

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = 4;
constexpr int kMaxRows = 64;
constexpr int kTileEntries = 16 / kQueriesPerKv;  // rows of the batch in a query tile
constexpr int kTileQueries = kTileEntries * kQueriesPerKv;
constexpr int kWarpDims = kHeadDim / kWarps;      // output dims a warp mixes
constexpr int kDimTiles = kWarpDims / 8;
static_assert(kWarps == kSteps, "a warp scores the tokens of one step");

struct Shape {
  int num_heads, num_kv_heads, max_blocks;
};

// What the whole block knows about the batch.
struct Batch {
  int position[kMaxRows], window[kMaxRows], splits[kMaxRows];
};

// Where the block is in the list of items.  In shared memory, as few registers are left beside a page.
struct Progress {
  int4 item;
  int index, num_items;
};

struct Unit {
  int block, first_entry, num_entries;
  const u16 *keys, *values;  // of this head in the page: [64][D], [D][64]
};

// What the unit's rows see of its page together; settled: none of their tokens of this step lies in it.
struct UnitSight {
  Sight any;
  bool settled;
};

// A lane's share of a page: of K the two tokens it is a column of, of Vᵀ its rows of output dims.
struct PagePieces {
  uint4 keys[2][kDimPieces];
  uint4 values[kDimTiles][kTokenPieces];
};

// A row of a tile.  Rows past the unit's last query repeat it, and are not stored.
struct Query {
  int row, head, ordinal;
  bool exists;
};

// What a tile's warps tell each other.  An a operand is a piece of each lane.
struct Exchange {
  uint4 queries[2 * kDimPieces][32];  // a operands of the scores
  uint4 weights[kSteps][32];          // a operands of the mix
  float2 top_sum[kSteps][16];         // of step s and row: the largest exponent, the sum of weights relative to it
};

// Of a tile's queries, what a lane brings to the exchange: a piece of rows g and g + 8.
struct QueryPieces {
  uint4 low, high;
};

// The rows that a unit completes.
struct Completed {
  int count;
  int rows[kMaxRows];
  SplitFactors factors[kWarps];  // scratch of their merge
};

DEVICE void read_batch(Batch& batch, const i32* position, const i32* window, const i32* row_items, int num_rows) {
  const int row = threadIdx.x;
  if (row < num_rows) {
    batch.position[row] = position[row];
    batch.window[row] = window[row];
    batch.splits[row] = row_items[row];
  }
}

DEVICE void advance(Progress& progress, const int4* items) {
  progress.index += gridDim.y;
  if (progress.index < progress.num_items) progress.item = items[progress.index];
}

DEVICE Unit read_unit(int4 item, const i32* tables, const u16* pool, int table_stride, const Shape& shape) {
  const int kv_head = blockIdx.x;
  const int page = tables[item.x * table_stride + item.y];
  return {item.y, item.z, item.w, page_keys(pool, page, kv_head, shape.num_kv_heads),
          page_values(pool, page, kv_head, shape.num_kv_heads)};
}

DEVICE UnitSight sight_of_unit(const Unit& unit, const uint2* entries, const Batch& batch) {
  int begin = kPageTokens, end = 0, first_end = kPageTokens + 1;
#pragma unroll 1
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
#pragma unroll
    for (int j = 0; j < kDimPieces; ++j) page.keys[u][j] = load_stream_if(row + 4 * j, sees(sight, token));
  }
  const uint4* rows = reinterpret_cast<const uint4*>(unit.values + (warp * kWarpDims + g) * kPageTokens) + t;
#pragma unroll
  for (int j = 0; j < kTokenPieces; ++j) {
    const int token = 32 * j + 8 * t;
    const bool seen = token < sight.end && token + 8 > sight.begin;
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n) page.values[n][j] = load_stream_if(rows + 8 * n * (kPageTokens / 8) + 4 * j, seen);
  }
}

// The same to L2, by sectors of 16 elements.
DEVICE void prefetch_page(const Unit& unit, Sight sight) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kHeadElements / 16; i += kThreads) {
    const int token = 16 * (i % (kPageTokens / 16));
    if (sees(sight, i / (kHeadDim / 16))) prefetch_l2(unit.keys + 16 * i);
    if (token < sight.end && token + 16 > sight.begin) prefetch_l2(unit.values + 16 * i);
  }
}

DEVICE Query query_of(int tile, int i, const Unit& unit, const uint2* entries) {
  const int e = tile * kTileEntries + i / kQueriesPerKv;
  const uint2 entry = entries[unit.first_entry + min(e, unit.num_entries - 1)];
  const int head = static_cast<int>(blockIdx.x) * kQueriesPerKv + i % kQueriesPerKv;
  return {static_cast<int>(entry.x), head, static_cast<int>(entry.y), i < kTileQueries && e < unit.num_entries};
}

// Warp j asks for pieces 4·j .. 4·j + 3 of each row.
DEVICE QueryPieces load_queries(const u16* q, int tile, const Unit& unit, const uint2* entries, const Shape& shape) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  QueryPieces pieces = {};
  if (warp < kDimPieces) {
    const Query low = query_of(tile, g, unit, entries), high = query_of(tile, g + 8, unit, entries);
    const u16* lane_q = q + 32 * warp + 8 * t;
    pieces.low = load_piece(lane_q + (low.row * shape.num_heads + low.head) * kHeadDim);
    pieces.high = load_piece(lane_q + (high.row * shape.num_heads + high.head) * kHeadDim);
  }
  return pieces;
}

DEVICE void publish_queries(Exchange& exchange, const QueryPieces& pieces) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint4 &low = pieces.low, &high = pieces.high;
  if (warp < kDimPieces) {
    exchange.queries[2 * warp][lane] = make_uint4(low.x, high.x, low.y, high.y);
    exchange.queries[2 * warp + 1][lane] = make_uint4(low.z, high.z, low.w, high.w);
  }
}

// Scores of the tile against the warp's 16 tokens.
DEVICE void score(float (&scores)[2][4], const Exchange& exchange, const PagePieces& page) {
#pragma unroll
  for (int u = 0; u < 2; ++u)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[u][i] = 0.0f;
#pragma unroll
  for (int s = 0; s < 2 * kDimPieces; ++s) {
    const uint4 a = exchange.queries[s][threadIdx.x % 32];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const uint4 piece = page.keys[u][s / 2];
      mma_m16n8k16(scores[u], {a.x, a.y, a.z, a.w}, s % 2 ? piece.z : piece.x, s % 2 ? piece.w : piece.y);
    }
  }
}

// Row `half`'s scores become weights; returns their largest exponent and their sum.
DEVICE float2 weigh_row(float (&scores)[2][4], int half, Sight sight, float scale) {
  const int warp = threadIdx.x / 32, t = threadIdx.x % 4;
  float top = minus_infinity();
#pragma unroll
  for (int u = 0; u < 2; ++u)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& value = scores[u][2 * half + i];
      if (!sees(sight, token_of_column(warp, u, 2 * t + i))) value = minus_infinity();
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
  return make_float2(top, row_sum(sum));
}

// The warp's share of a tile: weights of its 16 tokens.
DEVICE void publish_weights(Exchange& exchange, int tile, const Unit& unit, const uint2* entries, const Batch& batch,
                            const PagePieces& page, float scale) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  Sight sights[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = query_of(tile, g + 8 * half, unit, entries).row;
    sights[half] = sight_of(batch.position[row], batch.window[row], unit.block);
  }
  float scores[2][4];
  score(scores, exchange, page);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 top_sum = weigh_row(scores, half, sights[half], scale);
    if (t == 0) exchange.top_sum[warp][g + 8 * half] = top_sum;
  }
  exchange.weights[warp][lane] = make_uint4(pack_half2(scores[0][0], scores[0][1]), pack_half2(scores[0][2], scores[0][3]),
                                            pack_half2(scores[1][0], scores[1][1]), pack_half2(scores[1][2], scores[1][3]));
}

// A row's largest exponent and sum over all steps, and the factor that brings each step to it.
DEVICE float2 combine_steps(float (&factor)[kSteps], const Exchange& exchange, int row) {
  float2 top_sum[kSteps];
  float top = minus_infinity(), sum = 0.0f;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    top_sum[s] = exchange.top_sum[s][row];
    top = fmaxf(top, top_sum[s].x);
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    factor[s] = exp2_fast(top_sum[s].x - exponent_base(top));
    sum = fmaf(factor[s], top_sum[s].y, sum);
  }
  return make_float2(top, sum);
}

// o of the warp's output dims: steps in order, each brought to the row's largest exponent in fp32.
DEVICE void mix(float (&o)[kDimTiles][4], const float (&factor)[2][kSteps], const Exchange& exchange,
                const PagePieces& page) {
#pragma unroll
  for (int n = 0; n < kDimTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) o[n][i] = 0.0f;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const uint4 weights = exchange.weights[s][threadIdx.x % 32];
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n) {
      const uint4 piece = page.values[n][s / 2];
      float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      mma_m16n8k16(part, {weights.x, weights.y, weights.z, weights.w}, s % 2 ? piece.z : piece.x, s % 2 ? piece.w : piece.y);
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = fmaf(factor[i / 2][s], part[i], o[n][i]);
    }
  }
}

// Where the partials of a row and head begin, in splits.
DEVICE int first_split(int row, int head, const Shape& shape) { return (row * shape.num_heads + head) * shape.max_blocks; }

// The warp's output dims of a tile, and by warp 0 m and l.
DEVICE void store_partials(float* partial_o, float2* partial_ml, int tile, const Unit& unit, const uint2* entries,
                           const Exchange& exchange, const PagePieces& page, const Shape& shape) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float factor[2][kSteps], o[kDimTiles][4];
  int splits[2];  // −1: not stored
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Query query = query_of(tile, g + 8 * half, unit, entries);
    splits[half] = query.exists ? first_split(query.row, query.head, shape) + query.ordinal : -1;
    const float2 top_sum = combine_steps(factor[half], exchange, g + 8 * half);
    if (query.exists && warp == 0 && t == 0) partial_ml[splits[half]] = top_sum;
  }
  mix(o, factor, exchange, page);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (splits[half] < 0) continue;
    float* dims = partial_o + static_cast<u64>(splits[half]) * kHeadDim + warp * kWarpDims + 2 * t;
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n)
      *reinterpret_cast<float2*>(dims + 8 * n) = make_float2(o[n][2 * half], o[n][2 * half + 1]);
  }
}

// Counts the unit for each of its rows.
DEVICE void arrive(Completed& completed, const Unit& unit, const uint2* entries, const Batch& batch, i32* counters,
                   const Shape& shape) {
  if (threadIdx.x < unit.num_entries) {
    const int row = entries[unit.first_entry + threadIdx.x].x;
    i32* counter = counters + row * shape.num_kv_heads + blockIdx.x;
    if (atomic_arrive(counter) + 1 == batch.splits[row]) {
      *counter = 0;
      completed.rows[atomic_add(&completed.count, 1)] = row;
    }
  }
}

DEVICE void merge_completed(u16* a, const float* partial_o, const float2* partial_ml, Completed& completed, int kv_head,
                            const Batch& batch, const Shape& shape) {
  constexpr int kParts = kHeadDim / kMergeDims;
  const int num_tasks = completed.count * kQueriesPerKv * kParts;
#pragma unroll 1
  for (int task = threadIdx.x / 32; task < num_tasks; task += kWarps) {
    const int row = completed.rows[task / kParts / kQueriesPerKv];
    const int head = kv_head * kQueriesPerKv + task / kParts % kQueriesPerKv;
    const int split = first_split(row, head, shape);
    merge_splits(a + (row * shape.num_heads + head) * kHeadDim, partial_o + static_cast<u64>(split) * kHeadDim,
                 partial_ml + split, completed.factors[threadIdx.x / 32], task % kParts * kMergeDims, batch.splits[row]);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    decode_attention(const u16* q, const u16* pool, const i32* tables, const int4* items, const i32* num_items,
                     const uint2* entries, const i32* row_items, const i32* position, const i32* window,
                     float* partial_o, float2* partial_ml, i32* counters, u16* a, i32 table_offset, i32 table_stride,
                     i32 num_rows, i32 num_heads, i32 num_kv_heads, i32 max_blocks, float scale) {
  __shared__ Batch batch;
  __shared__ Exchange exchange;
  __shared__ Completed completed;
  __shared__ Progress progress;
  const Shape shape = {num_heads, num_kv_heads, max_blocks};
  if (threadIdx.x == 0) progress = {items[blockIdx.y], static_cast<int>(blockIdx.y), num_items[0]};
  read_batch(batch, position, window, row_items, num_rows);
  __syncthreads();

  while (progress.index < progress.num_items) {
    const Unit unit = read_unit(progress.item, tables + table_offset, pool, table_stride, shape);
    const UnitSight sight = sight_of_unit(unit, entries, batch);
    const bool is_first = progress.index == static_cast<int>(blockIdx.y);
    if (is_first && !sight.settled) {
      prefetch_page(unit, sight.any);
      dependency_wait();
    }
    PagePieces page;
    load_page(page, unit, sight.any);
    if (is_first) {
      dependency_wait();
      dependency_launch();
    }
    QueryPieces queries = load_queries(q, 0, unit, entries, shape);
    for (int tile = 0; tile * kTileEntries < unit.num_entries; ++tile) {
      publish_queries(exchange, queries);
      __syncthreads();
      queries = load_queries(q, tile + 1, unit, entries, shape);
      publish_weights(exchange, tile, unit, entries, batch, page, scale);
      __syncthreads();
      store_partials(partial_o, partial_ml, tile, unit, entries, exchange, page, shape);
    }
    if (threadIdx.x == 0) completed.count = 0;
    __syncthreads();
    if (threadIdx.x == kThreads - 1) advance(progress, items);
    arrive(completed, unit, entries, batch, counters, shape);
    __syncthreads();
    merge_completed(a, partial_o, partial_ml, completed, blockIdx.x, batch, shape);
  }
  dependency_wait();  // also where there was nothing to do: a kernel ends after the one before it
}
