// decode_attention: one token per row, against the pages of its sequence; decode_attention_merge ends it.  This file's
// is for batches whose queries of a K/V head fit one tile, R ≤ 16·G/H; decode_attention_many.cu has it for more.
//
//   a[r, h] = Σ_p w_p·V[p] / Σ_p w_p     w_p = 2^(q[r, h]·K[p]·scale)     over the positions p that row r sees
//
//   q            fp16   [R][H·D]                  turned by RoPE
//   pool         fp16   [num_pages][2·G·64·D]     pages (attention.cuh); with TL_INT8 int8 [num_pages][64·G·(2·D + 4)]
//   newest       fp16   [R][2][G][D]             with TL_INT8: K and V of the rows' tokens (newest.cuh)
//   tables       int32  [slots][max_layers][max_blocks]   page of a sequence's 64-token block; −1: none
//   items        int32  [max_items][6]            slot whose table names the page, block, first entry, entries 1..64;
//                                                 another slot, whose page of the block has the first n tokens too, n
//   num_items    int32  [3]                       items; of these, the first, those of more than one entry; of these, again
//                                                 the first, quads
//   entries      int32  [max_entries][2]          row, ordinal of this split among the row's, ascending from 0
//   row_items    int32  [R]                       splits of the row
//   position     int32  [R]                       of the row's token; its K and V are in its page, or in `newest`
//   window       int32  [R]                       p is seen iff p ≤ position and (window = 0 or p > position − window)
//   partial_o    fp32   [R][H][max_blocks][D]     scratch
//   partial_ml   fp32   [R][H][max_blocks][2]     scratch
//   a            fp16   [R][H·D]                  rows without a split are not written
//   table_offset = layer·max_blocks, table_stride = max_layers·max_blocks; scale = log2(e)/√D
//   R ≤ 256; D is 64 or 128; H/G ≤ 16; 16-byte alignment.
//
// Each page is attended as if it stood alone, and leaves, per row and head, unnormalised o = Σ w·V, l = Σ w and its largest
// exponent m (page_sums.cuh).  A *quad* is four pages, from a block on that is a multiple of 4: they are added up in
// ascending order, then quads in theirs (merge_splits.cuh).  A *split* is what is left to the merge: a page, or of many
// rows a quad that is added up, a quarter of the traffic (decode_attention_wide.cu).
// Hence a row's bits depend on nothing but its own query and pages: not on the other rows of its items, not on how its
// items are grouped, nor on which pages come as quads.  A split of which a row sees nothing has m = −inf and weighs
// exactly 0, so it may as well be left out.  A page or quad that more rows read than an item has entries is several items.
//
// Unit of work: an item and a K/V head, by 4 warps; blockIdx.x is the K/V head, the blocks along y stride over the
// items.  All of the page's K and V that any row sees is asked for at once, straight into the registers of the warp
// that multiplies it.  Warp w scores the 16 tokens of step w and mixes output dims w·D/4 .. +D/4 of all 64 tokens; the
// rows' largest exponents and the weights go through shared memory.
//
// Before the previous kernel ends, a block loads the page of its first unit, but for the tokens that this step adds
// and up to seven before each.  This takes for granted that the positions, and K and V of all earlier tokens, were
// written before a kernel that was not launched as a dependent one.
//
// fp32: scores, exponents, sums, merge.  fp16: a, and the weights that multiply V (relative to the largest of their
// page).  With TL_INT8 levels multiply levels (page_products.cuh), and until the merge o is 255 times what it says above.
// Bytes: each page that an item names once, as far as it is seen and not read through another (they hold the same
// bits, so it never shows which is read); partials (D + 2)·4 per row, head and split, written and read once (L2).
#include "decode_work.cuh"
#include "merge_splits.cuh"
#include "newest.cuh"
#include "query_tiles.cuh"

constexpr int kBlocksPerSm = 4;
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

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    decode_attention(const u16* q, const Stored* pool, const u16* newest, const i32* tables, const Item* items,
                     const i32* num_items, const uint2* all_entries, const i32* position, const i32* window,
                     float* partial_o, float2* partial_ml, i32 table_offset, i32 table_stride, i32 num_rows,
                     i32 num_heads, i32 num_kv_heads, i32 max_blocks, float scale) {
  __shared__ Batch batch;
  __shared__ Progress progress;
  __shared__ Entries entries;
  __shared__ Exchange exchange;
  const Lists lists = {items,        all_entries, tables + table_offset, pool,
                       table_stride, num_heads,   num_kv_heads,          max_blocks,
                       static_cast<int>(blockIdx.y), true};
  const Partials partials = {partial_o, partial_ml};
  if (threadIdx.x == 0) progress = {items[blockIdx.y], static_cast<int>(blockIdx.y), 0, num_items[0]};
  read_batch(batch, position, window, num_rows);
  __syncthreads();

  while (progress.index < progress.num_items) {
    const Unit unit = read_unit(progress.item, lists);
    const int round = progress.round;
    read_entries(entries, unit, lists, batch);
    __syncthreads();  // and all know which item this is
    if (threadIdx.x == kThreads - 1) advance(progress, lists);
    const UnitSight sight = sight_of_unit(unit, entries);
    const CopiedPage from = copied_page(lists, unit);
    PagePieces page;
    load_page(page, from, sight);
    wait_once(round);
    if (sight.settled_end < kPageTokens) load_unsettled(page, from, sight);
    const int place = unit.num_entries == 1 ? place_of_newest(entries.of[0].sight) : -1, which = threadIdx.x / 32;
    const bool has_newest = place >= 0 && which <= kValue;  // K of the row's token one warp, V another
    NewestPart part = {};
    if (has_newest) part = load_newest(newest, which, entries.of[0].row, lists);
    load_queries(exchange.queries, q, unit, entries, num_heads);
    if (has_newest) share_newest(exchange, from, part, which, place);
    cp_async_wait<0>();
    __syncthreads();
    if (place >= 0) put_newest(page, from, exchange, place);
    attend(partials, exchange, unit, entries, lists, page, sight.any, scale);
    __syncthreads();  // nobody still reads the entries
  }
  if (blockIdx.y == 0) dependency_wait();  // a kernel without items, too, ends after the one before it
}

// A block per row and some heads, a warp per 64 output dims.
extern "C" __global__ void __launch_bounds__(kMostMergeThreads)
    decode_attention_merge(const i32* row_items, const float* partial_o, const float2* partial_ml, u16* a,
                           i32 num_heads, i32 max_blocks) {
  __shared__ SplitFactors factors[kMostMergeThreads / 32];
  dependency_launch();
  const int row = blockIdx.x, warp = threadIdx.x / 32;
  const int head = static_cast<int>(blockIdx.y * (blockDim.x / (32 * kMergeWarps))) + warp / kMergeWarps;
  const int num_splits = row_items[row];
  dependency_wait();
  if (num_splits == 0 || head >= num_heads) return;
  const int row_head = row * num_heads + head;
  const u64 split = static_cast<u64>(row_head) * max_blocks;
  merge_splits(a + row_head * kHeadDim, partial_o + split * kHeadDim, partial_ml + split, factors[warp],
               warp % kMergeWarps * kMergeDims, num_splits);
}
