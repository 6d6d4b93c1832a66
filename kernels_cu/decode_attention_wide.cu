// decode_attention of many rows off long prefixes, on sm_90: decode_attention_many.cu, whose bits it has, but first come
// quads: four pages at a time, whose sums are added up before they are left to the merge (decode_quads.cuh).
//
//   items     0 ……… num_quads ……… num_shared ……… num_items
//             quads   │   pages that rows share   │   pages of one row
//
// While a block's first pages come, it attends items of one row, if they are its next.
//
// Shared memory: two pages of a K/V head as halves, 512·D bytes, or four as levels, 68 KB for D = 128; then as
// decode_attention_many.cu.  Bytes moved: as decode_attention.cu, of partials a quarter.
#include "decode_quads.cuh"

constexpr int kBlocksPerSm = 2;

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    decode_attention(const u16* q, const Stored* pool, const u16* newest, const i32* tables, const Item* items,
                     const i32* num_items, const uint2* all_entries, const i32* position, const i32* window,
                     float* partial_o, float2* partial_ml, i32 table_offset, i32 table_stride, i32 num_rows,
                     i32 num_heads, i32 num_kv_heads, i32 max_blocks, float scale) {
  __shared__ Batch batch;
  __shared__ Progress progress;
  __shared__ Entries entries;
  DYNAMIC_SHARED_ALIGNED(shared);
  const Lists lists = {items,        all_entries, tables + table_offset, pool,
                       table_stride, num_heads,   num_kv_heads,          max_blocks,
                       spread_rank(), kLongQuads};
  const Partials partials = {partial_o, partial_ml};
  const Alone alone = {newest, num_items[1], num_items[0]};
  if (threadIdx.x == 0) progress = {items[lists.rank], lists.rank, 0, alone.num_shared};
  read_batch(batch, position, window, num_rows);
  __syncthreads();
  QuadShared& of_quads = *reinterpret_cast<QuadShared*>(shared);
  Shared& of_pages = *reinterpret_cast<Shared*>(shared);
  const bool next_is_done =
      work_quads(partials, of_quads, entries, progress, num_items[2], alone, q, lists, batch, scale);
  work_together(partials, of_pages.page, entries, progress, alone, q, lists, batch, scale);
  work_alone(partials, of_pages, progress.round + next_is_done, alone, q, lists, batch, scale);
  if (blockIdx.y == 0) dependency_wait();  // a kernel without items, too, ends after the one before it
}
