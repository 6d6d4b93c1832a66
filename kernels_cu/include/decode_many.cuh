// What both kernels of many rows (decode_attention_many.cu, decode_attention_wide.cu) do with pages: those that several
// rows share, by a block of 4 warps, a page in shared memory for all of them; then those of one row, a warp each.
#pragma once

#include "decode_alone.cuh"
#include "decode_work.cuh"
#include "newest.cuh"
#include "shared_page.cuh"

// A shared unit's page, or what warps alone have copies of; and the queries of these.
struct SideBySide {
  SharedPage page;
  OwnQueries queries[kWarps];
};

// Without copies: 13 heads of 128 halves, or more, do not fit beside a page.
union TakingTurns {
  SharedPage page;
  OwnQueries queries[kWarps];
};

template <bool kCopies>
struct SharedOf {
  typedef SideBySide type;
};

template <>
struct SharedOf<false> {
  typedef TakingTurns type;
};

constexpr bool kCopies = sizeof(SideBySide) + sizeof(Entries) + sizeof(Batch) + sizeof(Progress) <= 48 * 1024;
typedef SharedOf<kCopies>::type Shared;

// A lane's queries of a tile.
struct HeldQueries {
  CodedRow rows[2];

  DEVICE QueryPieces piece(int j) const { return {rows[0].pieces[j], rows[1].pieces[j]}; }
};

DEVICE void read_keys(StepKeys& keys, const SharedPage& page, int s) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int token = token_of_column(s, u, g);
#pragma unroll
    for (int j = 0; j < kDimPieces; ++j) keys.of[u][j] = page.keys[token][place_of_key(token, 4 * j + t)];
  }
  keys.scales = page.key_scales(s);
}

DEVICE HeldQueries load_tile(const u16* q, const Query (&queries)[2], int num_heads) {
  const u16* lane_q = q + 8 * (threadIdx.x % 4);
  const u16* rows[2];
  uint4 halves[2][kDimPieces];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    rows[half] = lane_q + (queries[half].entry.row * num_heads + queries[half].head) * kHeadDim;
#pragma unroll
  for (int j = 0; j < kDimPieces; ++j)
    halves[0][j] = load_piece(rows[0] + 32 * j), halves[1][j] = load_piece(rows[1] + 32 * j);
  return {{coded_row(halves[0]), coded_row(halves[1])}};
}

DEVICE void weigh_tile(PageWeights<2>& weights, const HeldQueries& held, const Query (&queries)[2],
                       const SharedPage& page, Sight any, float scale) {
  const Sight sights[2] = {queries[0].entry.sight, queries[1].entry.sight};
  const float scales[2] = {scale * held.rows[0].unit, scale * held.rows[1].unit};
  StepScores scores[kSteps] = {};
  StepScales values[kSteps];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    values[s] = page.value_scales(s);
    if (!sees_half(any, s / 2)) continue;
    StepKeys keys;
    read_keys(keys, page, s);
    score(scores[s], held, keys);
  }
  weigh_page(weights, scores, sights, values, scales);
}

// Levels in pairs of words, as they lie: a word at a time they would meet in banks.
DEVICE void read_group_values(GroupValues& values, const SharedPage& page, int group) {
#pragma unroll
  for (int j = 0; j < kTokenPieces; ++j)
#pragma unroll
    for (int n = 0; n < kGroupTiles; ++n) values.tiles[n][j] = value_piece(page, group, n, j);
}

// o of a group of output dims, to dims[half] where that is not null.
DEVICE void mix_group(float* const (&dims)[2], const PageWeights<2>& weights, const SharedPage& page, int group,
                      Sight any) {
  constexpr bool kReadFirst = kCopyPieces > 1;
  GroupValues values;
  if (kReadFirst) read_group_values(values, page, group);
  ProductSum o[kGroupTiles][4] = {};
#pragma unroll
  for (int s = 0; s < kMixSteps; ++s) {
    const int j = half_of(s);
    if (!sees_half(any, j)) continue;
#pragma unroll
    for (int n = 0; n < kGroupTiles; ++n)
      mix_step(o[n], weights.steps[s], kReadFirst ? values.tiles[n][j] : value_piece(page, group, n, j), s);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (dims[half]) {
#pragma unroll
      for (int n = 0; n < kGroupTiles; ++n)
        *reinterpret_cast<float2*>(dims[half] + 8 * (group * kGroupTiles + n)) = mixed(o[n], half, weights.units[half]);
    }
}

DEVICE void attend_tile(const Partials& partials, const HeldQueries& held, const Query (&queries)[2],
                        const SharedPage& page, int block, Sight any, const Lists& lists, float scale) {
  const int t = threadIdx.x % 4;
  PageWeights<2> weights;
  float* dims[2];  // null: no query
  weigh_tile(weights, held, queries, page, any, scale);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (queries[half].exists && t == 0) store_sums(partials, queries[half], lists, block, weights.ml[half]);
    dims[half] = queries[half].exists ? output_of(partials, queries[half], lists) + 2 * t : nullptr;
  }
#pragma unroll
  for (int group = 0; group < 2; ++group) mix_group(dims, weights, page, group, any);
}

// All tiles of a unit, once its page is under way.
DEVICE void attend_together(const Partials& partials, const SharedPage& page, const u16* q, const Unit& unit,
                            const Entries& entries, const Lists& lists, Sight any, float scale) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
#pragma unroll 1
  for (int first = 0; first * kTileEntries < unit.num_entries; first += kWarps) {
    const int tile = first + warp;
    const bool exists = tile * kTileEntries < unit.num_entries;
    const Query queries[2] = {query_of(tile, g, unit, entries), query_of(tile, g + 8, unit, entries)};
    HeldQueries held;
    if (exists) held = load_tile(q, queries, lists.num_heads);
    if (first == 0) {
      cp_async_wait<0>();
      __syncthreads();
    }
    if (exists) attend_tile(partials, held, queries, page, unit.block, any, lists, scale);
  }
}

// Blocks that start before the kernel in front ends are neighbours, on the few SMs that it leaves free.  So neighbours take
// items half the list apart: some that many rows share, which take longest, and some of one row.
DEVICE int spread_rank() {
  const int n = gridDim.y, half = n / 2;
  const int step = n % 2 == 1 ? half + 1 : half % 2 == 0 ? half + 1 : half + 2;  // has no divisor with n
  return static_cast<int>(blockIdx.y) * step % n;
}

// Which items of one row the block's warps take in a round, four neighbours; all in all num_items, from num_shared on.
struct Alone {
  const u16* newest;
  int num_shared, num_items;

  DEVICE int first(int index) const { return num_shared + (index - num_shared) * kWarps; }
};

// A warp's among four neighbouring items of one row; nothing that is looked up is of this step.
struct OwnItem {
  Unit lead, unit;  // of the first of the four, and the warp's own
  Entry entry;
  bool exists;
};

DEVICE OwnItem read_own_item(int first, const Alone& alone, const Lists& lists, const Batch& batch) {
  const int item = first + static_cast<int>(threadIdx.x / 32);
  OwnItem own;
  own.exists = item < alone.num_items;
  own.lead = read_unit(lists.items[first], lists);
  own.unit = read_unit(lists.items[min(item, alone.num_items - 1)], lists);
  own.entry = read_entry(own.unit.first_entry, own.unit, lists, batch);
  if (!own.exists) own.entry.sight = {0, 0};
  return own;
}

// The newest token of an item's row into its page, by the warp that will attend it.
DEVICE void put_newest(const OwnItem& own, const Alone& alone, const Lists& lists) {
  const int place = place_of_newest(own.entry.sight);
  if (place >= 0) put_in_page(page_head(lists, own.unit.page), alone.newest, own.entry.row, lists, place);
}

// Those of all rounds from `round` on, before all else that the block does with what the kernel before wrote.
DEVICE void put_newest(int round, const Alone& alone, const Lists& lists, const Batch& batch) {
  if constexpr (kCodesNewest) {
#pragma unroll 1
    for (int index = index_of_round(round, lists); alone.first(index) < alone.num_items;
         index = index_of_round(++round, lists))
      if (index >= alone.num_shared) put_newest(read_own_item(alone.first(index), alone, lists, batch), alone, lists);
  }
}

// Items of several rows: progress.num_items of them.
DEVICE void work_together(const Partials& partials, SharedPage& page, Entries& entries, Progress& progress,
                          const Alone& alone, const u16* q, const Lists& lists, const Batch& batch, float scale) {
  while (progress.index < progress.num_items) {
    const Unit unit = read_unit(progress.item, lists);
    const int round = progress.round;
    read_entries(entries, unit, lists, batch);
    __syncthreads();  // and all know which item this is
    if (threadIdx.x == kThreads - 1) advance(progress, lists);
    const UnitSight sight = sight_of_unit(unit, entries);
    const PageHead from = page_head(lists, unit.page);
    copy_page(page, from, sight.any, 0, sight.settled_end);
    wait_once(round);
    if (round == 0) put_newest(1, alone, lists, batch);
    if (sight.settled_end < kPageTokens) copy_page(page, from, sight.any, sight.settled_end, kPageTokens);
    attend_together(partials, page, q, unit, entries, lists, sight.any, scale);
    __syncthreads();  // nobody still reads the page and the entries
  }
}

// Items of one row, from `num_shared` on.  Those of one source are neighbours: what its first warp's page is a copy of
// goes to shared memory for all four.
DEVICE void work_alone(const Partials& partials, Shared& shared, int round, const Alone& alone, const u16* q,
                       const Lists& lists, const Batch& batch, float scale) {
  const int warp = threadIdx.x / 32;
#pragma unroll 1
  for (int index = index_of_round(round, lists); alone.first(index) < alone.num_items;
       index = index_of_round(++round, lists)) {
    const OwnItem own = read_own_item(alone.first(index), alone, lists, batch);
    __syncthreads();  // nobody still reads the page
    if (kCopies) copy_first(shared.page, page_head(lists, own.lead.source), own.lead.copied_end);
    wait_once(round);
    if (round == 0) {
      put_newest(own, alone, lists);
      put_newest(1, alone, lists, batch);
    }
    __syncwarp();
    load_own_queries(shared.queries[warp], q, own.entry.row, lists.num_heads);
    const bool copied = kCopies && own.unit.source == own.lead.source;
    const int copied_end = copied ? min(own.unit.copied_end, own.lead.copied_end) : 0;
    const OwnPage page = {shared.page, page_head(lists, own.unit.page), copied_end};
    const auto arrive = [&] {
      cp_async_wait<0>();
      __syncthreads();
      return TileQueries<kOwnHalves, kQueriesPerKv>(shared.queries[warp]);
    };
    attend_alone(partials, arrive, page, own.entry, own.unit.block, own.exists, lists, scale);
  }
}
