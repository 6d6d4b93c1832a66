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
// Unit of work: an item and a K/V head, by 4 warps (decode_few.cuh); blockIdx.x is the K/V head, the blocks along y stride
// over the items.
//
// Before the previous kernel ends, a block loads the page of its first unit, but for the tokens that this step adds
// and up to seven before each.  This takes for granted that the positions, and K and V of all earlier tokens, were
// written before a kernel that was not launched as a dependent one.
//
// fp32: scores, exponents, sums, merge.  fp16: a, and the weights that multiply V (relative to the largest of their
// page).  With TL_INT8 levels multiply levels (page_products.cuh), and until the merge o is 255 times what it says above.
// Bytes: each page that an item names once, as far as it is seen and not read through another (they hold the same
// bits, so it never shows which is read); partials (D + 2)·4 per row, head and split, written and read once (L2).
#include "decode_few.cuh"
#include "merge_splits.cuh"

constexpr int kBlocksPerSm = 4;

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
