// decode_attention's work list: which page a block attends next, for which rows, and what they see of it.
//
// A unit is an item and a K/V head (blockIdx.x); the blocks along y go over the items, mostly each round the other way,
// so that a block with an item of many rows gets the least of what follows.  An item is a page or a quad.  The layouts of
// items, entries and tables are in decode_attention.cu.
#pragma once

#include "attention.cuh"

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kMaxRows = 256;     // of a batch
constexpr int kMostEntries = 64;  // of an item
constexpr int kTileEntries = 16 / kQueriesPerKv;  // rows of the batch in a query tile
constexpr int kTileQueries = kTileEntries * kQueriesPerKv;
static_assert(kMostEntries <= kThreads, "a thread reads an entry");

struct alignas(8) Item {
  i32 slot, block, first_entry, num_entries, source_slot, num_copied;
};

// The device's arrays, and their sizes.
struct Lists {
  const Item* items;
  const uint2* entries;
  const i32* tables;  // of the layer: rows of max_blocks, table_stride apart
  const Stored* pool;
  int table_stride, num_heads, num_kv_heads, max_blocks;
  int rank;  // of the block among those along y: which takes which items
  bool turns;  // each round goes the other way
};

// The rows, in shared memory.
struct Batch {
  int position[kMaxRows], window[kMaxRows];
};

// Where the block is in the list of items, in shared memory.
struct Progress {
  Item item;
  int index, round, num_items;
};

struct Unit {
  int block, first_entry, num_entries;
  int page;  // not yet its address: nothing waits for it while the entries are read
  int source, copied_end;  // another page that holds the tokens before copied_end, a multiple of 8, bit for bit
};

// What the unit's rows see of its page together.  The tokens before settled_end, a multiple of 8, are not of this
// step.
struct UnitSight {
  Sight any;
  int settled_end;
};

// A row that takes part in a unit, and what it sees of the page.
struct Entry {
  int row, ordinal;
  Sight sight;
};

// Of a unit, in shared memory.
struct Entries {
  Entry of[kMostEntries];
};

// A row of a tile.  Rows past the unit's last query repeat it, and are not stored.
struct Query {
  Entry entry;
  int head;
  bool exists;
};

DEVICE void read_batch(Batch& batch, const i32* position, const i32* window, int num_rows) {
#pragma unroll 1  // or the compiler has fewer registers for what follows
  for (int row = threadIdx.x; row < num_rows; row += kThreads) {
    batch.position[row] = position[row];
    batch.window[row] = window[row];
  }
}

DEVICE int index_of_round(int round, const Lists& lists) {
  const int n = gridDim.y;
  return round * n + (lists.turns && round % 2 ? n - 1 - lists.rank : lists.rank);
}

DEVICE void advance(Progress& progress, const Lists& lists) {
  progress.index = index_of_round(++progress.round, lists);
  if (progress.index < progress.num_items) progress.item = lists.items[progress.index];
}

DEVICE Unit read_unit(const Item& item, const Lists& lists) {
  const i32* pages = lists.tables + item.block;
  return {item.block,
          item.first_entry,
          item.num_entries,
          pages[item.slot * lists.table_stride],
          pages[item.source_slot * lists.table_stride],
          item.num_copied / kPieceElements * kPieceElements};
}

DEVICE Entry read_entry(int at, const Unit& unit, const Lists& lists, const Batch& batch) {
  const uint2 entry = lists.entries[at];
  const int row = static_cast<int>(entry.x);
  return {row, static_cast<int>(entry.y), sight_of(batch.position[row], batch.window[row], unit.block)};
}

DEVICE void read_entries(Entries& entries, const Unit& unit, const Lists& lists, const Batch& batch) {
  const int e = threadIdx.x;
  if (e < unit.num_entries) entries.of[e] = read_entry(unit.first_entry + e, unit, lists, batch);
}

// K and V of a page, of the block's K/V head, and their scales if they have any.
struct PageHead {
  const Stored *keys, *values;
  const uint4 *key_scales, *value_scales;
};

DEVICE PageHead page_head(const Lists& lists, int page) {
  const int head = blockIdx.x, num_heads = lists.num_kv_heads;
  return {page_keys(lists.pool, page, head, num_heads), page_values(lists.pool, page, head, num_heads),
          page_scales(lists.pool, page, head, num_heads), page_scales(lists.pool, page, num_heads + head, num_heads)};
}

DEVICE UnitSight sight_of_unit(const Unit& unit, const Entries& entries) {
  int begin = kPageTokens, end = 0, settled_end = kPageTokens;
#pragma unroll 1
  for (int e = threadIdx.x % 32; e < unit.num_entries; e += 32) {
    const Sight sight = entries.of[e].sight;
    begin = min(begin, sight.begin);
    end = max(end, sight.end);
    if (sight.end > 0) settled_end = min(settled_end, (sight.end - 1) / kPieceElements * kPieceElements);
  }
  return {{reduce_min(begin), reduce_max(end)}, reduce_min(settled_end)};
}

DEVICE Query query_of(int tile, int i, const Unit& unit, const Entries& entries) {
  const int e = tile * kTileEntries + i / kQueriesPerKv;
  const int head = static_cast<int>(blockIdx.x) * kQueriesPerKv + i % kQueriesPerKv;
  return {entries.of[min(e, unit.num_entries - 1)], head, i < kTileQueries && e < unit.num_entries};
}

// What is known of a row, head and split by itself, for the merge.
struct Partials {
  float* o;    // [R][H][max_blocks][D]: Σ w·V
  float2* ml;  // [R][H][max_blocks]: the largest exponent m, and l = Σ w, negative where the split ends a quad
};

// Index of a query's split in both.
DEVICE int split_of(const Query& query, const Lists& lists) {
  return (query.entry.row * lists.num_heads + query.head) * lists.max_blocks + query.entry.ordinal;
}

DEVICE float* output_of(const Partials& partials, const Query& query, const Lists& lists) {
  return partials.o + static_cast<u64>(split_of(query, lists)) * kHeadDim;
}

// m and l of a split that ends with `block`.
DEVICE void store_sums(const Partials& partials, const Query& query, const Lists& lists, int block, float2 ml) {
  const bool ends_quad = block % kQuadPages == kQuadPages - 1;
  partials.ml[split_of(query, lists)] = make_float2(ml.x, ends_quad ? -ml.y : ml.y);
}

// Once a block, before it reads what the kernel before wrote; dependents may start once that one has ended.
DEVICE void wait_once(int round) {
  if (round > 0) return;
  dependency_wait();
  dependency_launch();
}
