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
// were written before a kernel that was not launched as a dependent one.
//
// fp32: scores, exponents, sums, merge.  fp16: the weights that multiply V (relative to the largest of their 16
// tokens), and a.  Bytes: each page that an item names once, as far as it is seen; partials (D + 2)·4 per row, head and
// split, written and read once (L2).
#include "decode_work.cuh"
#include "merge_splits.cuh"

constexpr int kBlocksPerSm = 4;
constexpr int kWarpDims = kHeadDim / kWarps;  // output dims a warp mixes
constexpr int kDimTiles = kWarpDims / 8;
static_assert(kWarps == kSteps, "a warp scores the tokens of one step");

// A lane's share of a page: of K the two tokens it is a column of, of Vᵀ its rows of output dims.
struct PagePieces {
  uint4 keys[2][kDimPieces];
  uint4 values[kDimTiles][kTokenPieces];
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

// Asks for everything in `sight`; what lies outside reads as zeros, whose weight is an exact zero.
DEVICE void load_page(PagePieces& page, const Unit& unit, Sight sight, const Lists& lists) {
  const u16 *keys = keys_of(unit, lists), *values = values_of(unit, lists);
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int token = token_of_column(warp, u, g);
    const uint4* row = reinterpret_cast<const uint4*>(keys + token * kHeadDim) + t;
#pragma unroll
    for (int j = 0; j < kDimPieces; ++j) page.keys[u][j] = load_stream_if(row + 4 * j, sees(sight, token));
  }
  const uint4* rows = reinterpret_cast<const uint4*>(values + (warp * kWarpDims + g) * kPageTokens) + t;
#pragma unroll
  for (int j = 0; j < kTokenPieces; ++j) {
    const int token = 32 * j + 8 * t;
    const bool seen = token < sight.end && token + 8 > sight.begin;
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n)
      page.values[n][j] = load_stream_if(rows + 8 * n * (kPageTokens / 8) + 4 * j, seen);
  }
}

// The same to L2, by sectors of 16 elements.
DEVICE void prefetch_page(const Unit& unit, Sight sight, const Lists& lists) {
  const u16 *keys = keys_of(unit, lists), *values = values_of(unit, lists);
#pragma unroll 1
  for (int i = threadIdx.x; i < kHeadElements / 16; i += kThreads) {
    const int token = 16 * (i % (kPageTokens / 16));
    if (sees(sight, i / (kHeadDim / 16))) prefetch_l2(keys + 16 * i);
    if (token < sight.end && token + 16 > sight.begin) prefetch_l2(values + 16 * i);
  }
}

// Where rows g and g + 8 of a tile begin in q.
struct QueryOffsets {
  int low, high;
};

DEVICE QueryOffsets query_offsets(int tile, const Unit& unit, const Entries& entries, int num_heads) {
  const int g = threadIdx.x % 32 / 4;
  const Query low = query_of(tile, g, unit, entries), high = query_of(tile, g + 8, unit, entries);
  return {(low.row * num_heads + low.head) * kHeadDim, (high.row * num_heads + high.head) * kHeadDim};
}

// Warp j asks for pieces 4·j .. 4·j + 3 of each row.
DEVICE QueryPieces load_queries(const u16* q, QueryOffsets offsets) {
  const int warp = threadIdx.x / 32, t = threadIdx.x % 4;
  if (warp >= kDimPieces) return {};
  const u16* lane_q = q + 32 * warp + 8 * t;
  return {load_piece(lane_q + offsets.low), load_piece(lane_q + offsets.high)};
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
DEVICE void publish_weights(Exchange& exchange, int tile, const Unit& unit, const Entries& entries,
                            const Batch& batch, const PagePieces& page, float scale) {
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
  exchange.weights[warp][lane] = {pack_half2(scores[0][0], scores[0][1]), pack_half2(scores[0][2], scores[0][3]),
                                  pack_half2(scores[1][0], scores[1][1]), pack_half2(scores[1][2], scores[1][3])};
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
      const u32 low = s % 2 ? piece.z : piece.x, high = s % 2 ? piece.w : piece.y;
      mma_m16n8k16(part, {weights.x, weights.y, weights.z, weights.w}, low, high);
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = fmaf(factor[i / 2][s], part[i], o[n][i]);
    }
  }
}

// The warp's output dims of a tile, and by warp 0 m and l.
DEVICE void store_partials(const Partials& partials, int tile, const Unit& unit, const Entries& entries,
                           const Lists& lists, const Exchange& exchange, const PagePieces& page) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float factor[2][kSteps], o[kDimTiles][4];
  int splits[2];  // −1: not stored
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Query query = query_of(tile, g + 8 * half, unit, entries);
    splits[half] = query.exists ? first_split(query.row, query.head, lists) + query.ordinal : -1;
    const float2 top_sum = combine_steps(factor[half], exchange, g + 8 * half);
    if (query.exists && warp == 0 && t == 0) partials.ml[splits[half]] = top_sum;
  }
  mix(o, factor, exchange, page);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (splits[half] < 0) continue;
    float* dims = partials.o + static_cast<u64>(splits[half]) * kHeadDim + warp * kWarpDims + 2 * t;
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n)
      *reinterpret_cast<float2*>(dims + 8 * n) = make_float2(o[n][2 * half], o[n][2 * half + 1]);
  }
}

// All query tiles of a unit.
DEVICE void attend(const Partials& partials, Exchange& exchange, const u16* q, QueryOffsets first, const Unit& unit,
                   const Entries& entries, const Lists& lists, const Batch& batch, const PagePieces& page,
                   float scale) {
  QueryPieces queries = load_queries(q, first);
  const int num_tiles = (unit.num_entries + kTileEntries - 1) / kTileEntries;
#pragma unroll 1
  for (int tile = 0; tile < num_tiles; ++tile) {
    publish_queries(exchange, queries);
    __syncthreads();
    if (tile + 1 < num_tiles) queries = load_queries(q, query_offsets(tile + 1, unit, entries, lists.num_heads));
    publish_weights(exchange, tile, unit, entries, batch, page, scale);
    __syncthreads();
    store_partials(partials, tile, unit, entries, lists, exchange, page);
  }
}

// The same for a page that none of the rows has come to: o = 0, m = −inf, l = 0.
DEVICE void store_unseen(const Partials& partials, const Unit& unit, const Entries& entries, const Lists& lists) {
  constexpr int kPieces = kHeadDim / 4;
#pragma unroll 1
  for (int i = threadIdx.x; i < unit.num_entries * kQueriesPerKv * kPieces; i += kThreads) {
    const uint2 entry = entries.row_ordinal[i / kPieces / kQueriesPerKv];
    const int head = static_cast<int>(blockIdx.x) * kQueriesPerKv + i / kPieces % kQueriesPerKv;
    const int split = first_split(entry.x, head, lists) + entry.y;
    float4* o = reinterpret_cast<float4*>(partials.o + static_cast<u64>(split) * kHeadDim);
    o[i % kPieces] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (i % kPieces == 0) partials.ml[split] = make_float2(minus_infinity(), 0.0f);
  }
  __syncthreads();  // as in attend: the merge before is over for all
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    decode_attention(const u16* q, const u16* pool, const i32* tables, const int4* items, const i32* num_items,
                     const uint2* all_entries, const i32* row_items, const i32* position, const i32* window,
                     float* partial_o, float2* partial_ml, i32* counters, u16* a, i32 table_offset, i32 table_stride,
                     i32 num_rows, i32 num_heads, i32 num_kv_heads, i32 max_blocks, float scale) {
  __shared__ Batch batch;
  __shared__ Progress progress;
  __shared__ Entries entries;
  __shared__ Exchange exchange;
  __shared__ Completed completed;
  const Lists lists = {items, all_entries, tables + table_offset, pool, table_stride, num_heads, num_kv_heads, max_blocks};
  const Partials partials = {partial_o, partial_ml};
  dependency_launch();
  if (threadIdx.x == 0) progress = {items[blockIdx.y], static_cast<int>(blockIdx.y), num_items[0]};
  read_batch(batch, position, window, row_items, num_rows);
  __syncthreads();

  while (progress.index < progress.num_items) {
    const Unit unit = read_unit(progress.item, lists);
    read_entries(entries, unit, lists);
    __syncthreads();
    const UnitSight sight = sight_of_unit(unit, entries.row_ordinal, batch);
    const bool is_first = progress.index == static_cast<int>(blockIdx.y);
    if (is_first && !sight.settled) {
      prefetch_page(unit, sight.any, lists);
      dependency_wait();
    }
    PagePieces page;
    load_page(page, unit, sight.any, lists);
    const int next = progress.index + gridDim.y;
    if (next < progress.num_items) {
      const Unit next_unit = read_unit(items[next], lists);
      const uint2* next_entries = lists.entries + next_unit.first_entry;
      prefetch_page(next_unit, sight_of_unit(next_unit, next_entries, batch).any, lists);
    }
    const QueryOffsets first_queries = query_offsets(0, unit, entries, num_heads);
    if (is_first) dependency_wait();
    if (sight.any.end > 0)
      attend(partials, exchange, q, first_queries, unit, entries, lists, batch, page, scale);
    else
      store_unseen(partials, unit, entries, lists);
    if (threadIdx.x == 0) completed.count = 0;
    if (threadIdx.x == kThreads - 1) advance(progress, lists);
    __syncthreads();  // all of the unit's partials are stored
    if (counters == nullptr) continue;
    arrive(completed, unit, entries, lists, batch, counters);
    __syncthreads();
    merge_completed(a, partials, completed, lists, batch);
  }
  if (blockIdx.y == 0) dependency_wait();  // a kernel without items, too, ends after the one before it
}

// The merge of all rows by itself: a block per row and head, a warp per 64 output dims.
extern "C" __global__ void __launch_bounds__(kMergeThreads)
    decode_attention_merge(const i32* row_items, const float* partial_o, const float2* partial_ml, u16* a,
                           i32 num_heads, i32 max_blocks) {
  __shared__ SplitFactors factors[kMergeThreads / 32];
  dependency_launch();
  const int row = blockIdx.x, row_head = row * num_heads + blockIdx.y, warp = threadIdx.x / 32;
  const int num_splits = row_items[row];
  dependency_wait();
  if (num_splits == 0) return;
  const u64 split = static_cast<u64>(row_head) * max_blocks;
  merge_splits(a + row_head * kHeadDim, partial_o + split * kHeadDim, partial_ml + split, factors[warp],
               warp * kMergeDims, num_splits);
}
