// decode_attention's work list: which page a block attends next, for which rows, and what they see of it.
//
// A unit is an item and a K/V head (blockIdx.x); the blocks along y stride over the items.  The layouts of items,
// entries and tables are in decode_attention.cu.
#pragma once

#include "attention.cuh"

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kMaxRows = 64;
constexpr int kTileEntries = 16 / kQueriesPerKv;  // rows of the batch in a query tile
constexpr int kTileQueries = kTileEntries * kQueriesPerKv;

// The device's arrays, and their sizes.
struct Lists {
  const int4* items;
  const uint2* entries;
  const i32* tables;  // of the layer: rows of max_blocks, table_stride apart
  const u16* pool;
  int table_stride, num_heads, num_kv_heads, max_blocks;
};

// The rows, in shared memory.
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
  int page;  // not yet its address: nothing waits for it while the entries are read
};

// What the unit's rows see of its page together; settled: none of their tokens of this step lies in it.
struct UnitSight {
  Sight any;
  bool settled;
};

// A row of a tile.  Rows past the unit's last query repeat it, and are not stored.
struct Query {
  int row, head, ordinal;
  bool exists;
};

DEVICE void read_batch(Batch& batch, const i32* position, const i32* window, const i32* row_items, int num_rows) {
  const int row = threadIdx.x;
  if (row < num_rows) {
    batch.position[row] = position[row];
    batch.window[row] = window[row];
    batch.splits[row] = row_items[row];
  }
}

DEVICE void advance(Progress& progress, const Lists& lists) {
  progress.index += gridDim.y;
  if (progress.index < progress.num_items) progress.item = lists.items[progress.index];
}

DEVICE Unit read_unit(int4 item, const Lists& lists) {
  return {item.y, item.z, item.w, lists.tables[item.x * lists.table_stride + item.y]};
}

// K [64][D] and Vᵀ [D][64] of the block's head.
DEVICE const u16* keys_of(const Unit& unit, const Lists& lists) {
  return page_keys(lists.pool, unit.page, blockIdx.x, lists.num_kv_heads);
}

DEVICE const u16* values_of(const Unit& unit, const Lists& lists) {
  return page_values(lists.pool, unit.page, blockIdx.x, lists.num_kv_heads);
}

// Of a unit, in shared memory.
struct Entries {
  uint2 row_ordinal[kMaxRows];
};

DEVICE void read_entries(Entries& entries, const Unit& unit, const Lists& lists) {
  if (threadIdx.x < unit.num_entries) entries.row_ordinal[threadIdx.x] = lists.entries[unit.first_entry + threadIdx.x];
}

// entries: the unit's, in shared memory or among all.
DEVICE UnitSight sight_of_unit(const Unit& unit, const uint2* entries, const Batch& batch) {
  int begin = kPageTokens, end = 0, first_end = kPageTokens + 1;
#pragma unroll 1
  for (int e = threadIdx.x % 32; e < unit.num_entries; e += 32) {
    const int row = entries[e].x;
    const Sight sight = sight_of(batch.position[row], batch.window[row], unit.block);
    begin = min(begin, sight.begin);
    end = max(end, sight.end);
    first_end = min(first_end, sight.end);
  }
  return {{reduce_min(begin), reduce_max(end)}, reduce_min(first_end) > kPageTokens};
}

DEVICE Query query_of(int tile, int i, const Unit& unit, const Entries& entries) {
  const int e = tile * kTileEntries + i / kQueriesPerKv;
  const uint2 entry = entries.row_ordinal[min(e, unit.num_entries - 1)];
  const int head = static_cast<int>(blockIdx.x) * kQueriesPerKv + i % kQueriesPerKv;
  return {static_cast<int>(entry.x), head, static_cast<int>(entry.y), i < kTileQueries && e < unit.num_entries};
}

// What is known of a row, head and split by itself, for the merge.
struct Partials {
  float* o;    // [R][H][max_blocks][D]: Σ w·V
  float2* ml;  // [R][H][max_blocks]: the largest exponent m, and l = Σ w
};

// Index of a row and head's first split in both.
DEVICE int first_split(int row, int head, const Lists& lists) {
  return (row * lists.num_heads + head) * lists.max_blocks;
}
