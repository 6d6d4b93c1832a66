// decode_attention: one token per row, against the pages of its sequence; decode_attention_merge ends it.
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
//   a            fp16   [R][H·D]                  rows without a split are not written
//   table_offset = layer·max_blocks, table_stride = max_layers·max_blocks; scale = log2(e)/√D
//   R ≤ 64; D is 64 or 128; H/G ≤ 16; 16-byte alignment.
//
// A *split* is one page.  Each is attended as if it stood alone and leaves, per row and head, unnormalised
// o = Σ w·V, l = Σ w and its largest exponent m; the splits of a row are then merged in ascending order
// (merge_splits.cuh).  Hence a row's bits depend on nothing but its own query and pages: not on the other rows of its
// items, not on how its items are grouped.  A split of which a row sees nothing has m = −inf and weighs exactly 0, so
// it may as well be left out.
//
// Unit of work: an item and a K/V head, by 4 warps; blockIdx.x is the K/V head, the blocks along y stride over the
// items.  All of the page's K and V that any row sees is asked for at once, straight into the registers of the warp
// that multiplies it, and kept there for all query tiles (16 rows of q: rows of the batch × the heads that share the
// K/V head).  Warp w scores the 16 tokens of step w and mixes output dims w·D/4 .. +D/4 of all 64 tokens, the weights
// having gone through shared memory in fp16.  Steps of which no row sees anything are skipped.
//
// Before the previous kernel ends, a block loads the page of its first unit, but for the tokens that this step adds
// and up to seven before each.  This takes for granted that the positions, and K and V of all earlier tokens, were
// written before a kernel that was not launched as a dependent one.
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

// Where a lane's pieces begin.
struct PageRows {
  const uint4* keys[2];
  int token[2];  // of each
  const uint4* values;
};

DEVICE PageRows page_rows(const Unit& unit, const Lists& lists) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const u16* keys = page_keys(lists.pool, unit.page, blockIdx.x, lists.num_kv_heads);
  const u16* values = page_values(lists.pool, unit.page, blockIdx.x, lists.num_kv_heads);
  PageRows rows;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    rows.token[u] = token_of_column(warp, u, g);
    rows.keys[u] = reinterpret_cast<const uint4*>(keys + rows.token[u] * kHeadDim) + t;
  }
  rows.values = reinterpret_cast<const uint4*>(values + (warp * kWarpDims + g) * kPageTokens) + t;
  return rows;
}

// First of the eight tokens of a lane's piece j of Vᵀ.
DEVICE int value_token(int j) { return 32 * j + 8 * (threadIdx.x % 4); }

DEVICE bool sees_some(Sight sight, int token, int count) { return token < sight.end && token + count > sight.begin; }

// Asks for everything that is seen of the settled tokens; the rest reads as zeros, whose weight is an exact zero.
DEVICE void load_page(PagePieces& page, const Unit& unit, const UnitSight& sight, const Lists& lists) {
  const PageRows rows = page_rows(unit, lists);
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const bool wanted = rows.token[u] < sight.settled_end && sees(sight.any, rows.token[u]);
#pragma unroll
    for (int j = 0; j < kDimPieces; ++j) page.keys[u][j] = load_stream_if(rows.keys[u] + 4 * j, wanted);
  }
#pragma unroll
  for (int j = 0; j < kTokenPieces; ++j) {
    const int token = value_token(j);
    const bool wanted = token < sight.settled_end && sees_some(sight.any, token, 8);
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n)
      page.values[n][j] = load_stream_if(rows.values + 8 * n * (kPageTokens / 8) + 4 * j, wanted);
  }
}

// Asks for what was left out.
DEVICE void load_unsettled(PagePieces& page, const Unit& unit, const UnitSight& sight, const Lists& lists) {
  const PageRows rows = page_rows(unit, lists);
#pragma unroll
  for (int u = 0; u < 2; ++u)
    if (rows.token[u] >= sight.settled_end && sees(sight.any, rows.token[u])) {
#pragma unroll
      for (int j = 0; j < kDimPieces; ++j) page.keys[u][j] = load_stream(rows.keys[u] + 4 * j);
    }
#pragma unroll
  for (int j = 0; j < kTokenPieces; ++j)
    if (value_token(j) >= sight.settled_end && sees_some(sight.any, value_token(j), 8)) {
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n)
        page.values[n][j] = load_stream(rows.values + 8 * n * (kPageTokens / 8) + 4 * j);
    }
}

// Warp j asks for pieces 4·j .. 4·j + 3 of each row of a tile.
DEVICE QueryPieces load_queries(const u16* q, int tile, const Unit& unit, const Entries& entries, int num_heads) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  if (warp >= kDimPieces) return {};
  const Query low = query_of(tile, g, unit, entries), high = query_of(tile, g + 8, unit, entries);
  const u16* lane_q = q + 32 * warp + 8 * t;
  return {load_piece(lane_q + (low.entry.row * num_heads + low.head) * kHeadDim),
          load_piece(lane_q + (high.entry.row * num_heads + high.head) * kHeadDim)};
}

DEVICE void publish_queries(Exchange& exchange, const QueryPieces& pieces) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint4 &low = pieces.low, &high = pieces.high;
  if (warp < kDimPieces) {
    exchange.queries[2 * warp][lane] = make_uint4(low.x, high.x, low.y, high.y);
    exchange.queries[2 * warp + 1][lane] = make_uint4(low.z, high.z, low.w, high.w);
  }
}

// Scores of the tile against the warp's 16 tokens: pieces of odd number summed by themselves.
DEVICE void score(float (&scores)[2][4], const Exchange& exchange, const PagePieces& page, Sight any) {
  float odd[2][4];
#pragma unroll
  for (int u = 0; u < 2; ++u)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[u][i] = odd[u][i] = 0.0f;
  if (!sees_some(any, 32 * (static_cast<int>(threadIdx.x) / 64), 32)) return;
#pragma unroll
  for (int s = 0; s < 2 * kDimPieces; ++s) {
    const uint4 a = exchange.queries[s][threadIdx.x % 32];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const uint4 piece = page.keys[u][s / 2];
      const u32 low = s % 2 ? piece.z : piece.x, high = s % 2 ? piece.w : piece.y;
      mma_m16n8k16(s / 2 % 2 ? odd[u] : scores[u], {a.x, a.y, a.z, a.w}, low, high);
    }
  }
#pragma unroll
  for (int u = 0; u < 2; ++u)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[u][i] += odd[u][i];
}

// The scores of rows g and g + 8 become weights; their largest exponents and their sums go to top_sum.
DEVICE void weigh_rows(float (&scores)[2][4], float2 (&top_sum)[2], const Sight (&sights)[2], float scale) {
  const int warp = threadIdx.x / 32, t = threadIdx.x % 4;
  float top[2] = {minus_infinity(), minus_infinity()}, sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int u = i / 4, half = i / 2 % 2;
    float& value = scores[u][i % 4];
    if (!sees(sights[half], token_of_column(warp, u, 2 * t + i % 2))) value = minus_infinity();
    top[half] = fmaxf(top[half], value);
  }
#pragma unroll
  for (int mask = 1; mask <= 2; ++mask)
#pragma unroll
    for (int half = 0; half < 2; ++half) top[half] = fmaxf(top[half], shuffle_xor(top[half], mask));
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int half = i / 2 % 2;
    float& value = scores[i / 4][i % 4];
    value = weigh(value, scale, exponent_base(top[half] * scale));
    sum[half] += value;
  }
#pragma unroll
  for (int mask = 1; mask <= 2; ++mask)
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] += shuffle_xor(sum[half], mask);
#pragma unroll
  for (int half = 0; half < 2; ++half) top_sum[half] = make_float2(top[half] * scale, sum[half]);
}

// The warp's share of a tile: weights of its 16 tokens.
DEVICE void publish_weights(Exchange& exchange, const Query (&queries)[2], const PagePieces& page, Sight any,
                            float scale) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Sight sights[2] = {queries[0].entry.sight, queries[1].entry.sight};
  float scores[2][4];
  float2 top_sum[2];
  score(scores, exchange, page, any);
  weigh_rows(scores, top_sum, sights, scale);
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (t == 0) exchange.top_sum[warp][g + 8 * half] = top_sum[half];
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
                const PagePieces& page, Sight any) {
#pragma unroll
  for (int n = 0; n < kDimTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) o[n][i] = 0.0f;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    if (!sees_some(any, 32 * (s / 2), 32)) continue;
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
DEVICE void store_partials(const Partials& partials, const Query (&queries)[2], const int (&splits)[2],
                           const Exchange& exchange, const PagePieces& page, Sight any) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float factor[2][kSteps], o[kDimTiles][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 top_sum = combine_steps(factor[half], exchange, g + 8 * half);
    if (queries[half].exists && warp == 0 && t == 0) partials.ml[splits[half]] = top_sum;
  }
  mix(o, factor, exchange, page, any);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!queries[half].exists) continue;
    float* dims = partials.o + static_cast<u64>(splits[half]) * kHeadDim + warp * kWarpDims + 2 * t;
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n)
      *reinterpret_cast<float2*>(dims + 8 * n) = make_float2(o[n][2 * half], o[n][2 * half + 1]);
  }
}

// All query tiles of a unit.
DEVICE void attend(const Partials& partials, Exchange& exchange, const u16* q, QueryPieces pieces, const Unit& unit,
                   const Entries& entries, const Lists& lists, const PagePieces& page, Sight any, float scale) {
  const int g = threadIdx.x % 32 / 4;
  const int num_tiles = (unit.num_entries + kTileEntries - 1) / kTileEntries;
#pragma unroll 1
  for (int tile = 0; tile < num_tiles; ++tile) {
    const Query queries[2] = {query_of(tile, g, unit, entries), query_of(tile, g + 8, unit, entries)};
    const int splits[2] = {split_of(queries[0], lists), split_of(queries[1], lists)};
    publish_queries(exchange, pieces);
    __syncthreads();
    if (tile + 1 < num_tiles) pieces = load_queries(q, tile + 1, unit, entries, lists.num_heads);
    publish_weights(exchange, queries, page, any, scale);
    __syncthreads();
    store_partials(partials, queries, splits, exchange, page, any);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    decode_attention(const u16* q, const u16* pool, const i32* tables, const int4* items, const i32* num_items,
                     const uint2* all_entries, const i32* position, const i32* window, float* partial_o,
                     float2* partial_ml, i32 table_offset, i32 table_stride, i32 num_rows, i32 num_heads,
                     i32 num_kv_heads, i32 max_blocks, float scale) {
  __shared__ Batch batch;
  __shared__ Progress progress;
  __shared__ Entries entries;
  __shared__ Exchange exchange;
  const Lists lists = {items,        all_entries, tables + table_offset, pool,
                       table_stride, num_heads,   num_kv_heads,          max_blocks};
  const Partials partials = {partial_o, partial_ml};
  if (threadIdx.x == 0) progress = {items[blockIdx.y], static_cast<int>(blockIdx.y), num_items[0]};
  read_batch(batch, position, window, num_rows);
  __syncthreads();

  while (progress.index < progress.num_items) {
    const Unit unit = read_unit(progress.item, lists);
    const bool is_first = progress.index == static_cast<int>(blockIdx.y);
    read_entries(entries, unit, lists, batch);
    __syncthreads();  // and all know which item this is
    if (threadIdx.x == kThreads - 1) advance(progress, lists);
    const UnitSight sight = sight_of_unit(unit, entries);
    PagePieces page;
    load_page(page, unit, sight, lists);
    if (is_first) {
      dependency_wait();
      dependency_launch();
    }
    const QueryPieces queries = load_queries(q, 0, unit, entries, num_heads);
    if (sight.settled_end < kPageTokens) load_unsettled(page, unit, sight, lists);
    attend(partials, exchange, q, queries, unit, entries, lists, page, sight.any, scale);
    __syncthreads();  // nobody still reads the entries
  }
  if (blockIdx.y == 0) dependency_wait();  // a kernel without items, too, ends after the one before it
}

// A block per row and head, a warp per 64 output dims.
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
