// decode_attention of many rows: arguments, splits and bits of decode_attention.cu, another division of work.  Any number
// of rows will do; it pays where the queries of a K/V head fill more than one tile of 16.
//
// Items of several rows come first.  Their unit is an item and a K/V head, by 4 warps: the page, as far as any row sees
// it, goes to shared memory once, and each warp attends tiles of 16 queries of its own, all of the page and all output
// dims (softmax and sums stay in its registers).  Then, four at a time, items of one row, one a warp (decode_alone.cuh);
// what the four have copies of, as rows off one prefix do of its last page, goes to shared memory once, out of that page.
//
//   work      0 …………………………… num_shared ……………………………………………… num_shared + ⌈(num_items − num_shared)/4⌉
//   items     0 …………………………… num_shared  + 4  + 8 …………………… num_items
//
// Before the previous kernel ends, a block asks for the page of its first unit, as in decode_attention.cu, or for what
// its warps have copies of; what is a warp's alone comes later.
//
// Shared memory: a page of a K/V head as it is stored, 256·D bytes or half of that, and four rows' queries.  Bytes
// moved: as decode_attention.cu.
#include "decode_many.cuh"

constexpr int kBlocksPerSm = 4;

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    decode_attention(const u16* q, const Stored* pool, const u16* newest, const i32* tables, const Item* items,
                     const i32* num_items, const uint2* all_entries, const i32* position, const i32* window,
                     float* partial_o, float2* partial_ml, i32 table_offset, i32 table_stride, i32 num_rows,
                     i32 num_heads, i32 num_kv_heads, i32 max_blocks, float scale) {
  __shared__ Batch batch;
  __shared__ Progress progress;
  __shared__ Entries entries;
  __shared__ Shared shared;
  const Lists lists = {items,        all_entries, tables + table_offset, pool,
                       table_stride, num_heads,   num_kv_heads,          max_blocks,
                       spread_rank(), true};
  const Partials partials = {partial_o, partial_ml};
  const Alone alone = {newest, num_items[1], num_items[0]};
  if (threadIdx.x == 0) progress = {items[lists.rank], lists.rank, 0, alone.num_shared};
  read_batch(batch, position, window, num_rows);
  __syncthreads();
  work_together(partials, shared.page, entries, progress, alone, q, lists, batch, scale);
  work_alone(partials, shared, progress.round, alone, q, lists, batch, scale);
  if (blockIdx.y == 0) dependency_wait();  // a kernel without items, too, ends after the one before it
}
