// A quad by a warpgroup: 64 queries, a tile of 16 a warp, against four pages of which they see everything, by wgmma
// (quad_pages.cuh), with the bits of page_sums.cuh.  What it makes of a page is added to what it made of those before.
#pragma once

#include "quad_pages.cuh"

static_assert(sizeof(Shared) <= sizeof(QuadShared));

// Of a tile, of the quad's pages so far.
struct QuadSums {
  float top[2], mass[2];  // m and l of each half
  float o[2][kGroupTiles][4];
};

DEVICE void begin(QuadSums& sums) {
  sums = {};
  sums.top[0] = sums.top[1] = minus_infinity();
}

// Adds a page's, which is weighed.
DEVICE void add_page(QuadSums& sums, const PageWeights<2>& weights, const unsigned char* values) {
  float before[2], of_page[2];  // factors of o, powers of two
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float m = weights.ml[half].x, top = fmaxf(sums.top[half], m), base = exponent_base(top);
    const float factor = exp2_fast(m - base);
    before[half] = exp2_fast(sums.top[half] - base), of_page[half] = worth_of(factor, weights.units[half]);
    sums.top[half] = top;
    sums.mass[half] = fmaf(factor, weights.ml[half].y, before[half] * sums.mass[half]);
  }
  const SharedMatrix matrix = shared_matrix(values, kStripBytes, 128);
  ProductSum o[2][kGroupTiles][4];
  wgmma_fence();
#pragma unroll
  for (int group = 0; group < 2; ++group) {
#pragma unroll
    for (int s = 0; s < kMixSteps; ++s) {
      const uint4 step = weights.steps[s];
      const u32 a[4] = {step.x, step.y, step.z, step.w};
      multiply_values(o[group], a, matrix + (s * 2 * kStripBytes + group * kStripBytes / 2), s > 0);
    }
    wgmma_commit();
  }
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    if (group == 0) wgmma_wait<1>();
    else wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < kGroupTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums.o[group][n][i] =
            fmaf(of_page[i / 2], static_cast<float>(o[group][n][i]), before[i / 2] * sums.o[group][n][i]);
  }
}

DEVICE void store(const Partials& partials, const QuadSums& sums, const Query (&queries)[2], int last_block,
                  const Lists& lists) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Query& query = queries[half];
    if (!query.exists) continue;
    if (t == 0) store_sums(partials, query, lists, last_block, make_float2(sums.top[half], sums.mass[half]));
    float* dims = output_of(partials, query, lists) + 2 * t;
#pragma unroll
    for (int n = 0; n < 2 * kGroupTiles; ++n) {
      const float* o = sums.o[n / kGroupTiles][n % kGroupTiles] + 2 * half;
      *reinterpret_cast<float2*>(dims + 8 * n) = make_float2(o[0], o[1]);
    }
  }
}

// The pages of a quad.
struct QuadPages {
  int of[kQuadPages];

  DEVICE int page(int n) const { return n < 2 ? (n == 0 ? of[0] : of[1]) : n == 2 ? of[2] : of[3]; }
};

DEVICE QuadPages read_quad(const Item& item, const Lists& lists) {
  const i32* pages = lists.tables + item.block + item.slot * lists.table_stride;
  QuadPages quad;
#pragma unroll
  for (int n = 0; n < kQuadPages; ++n) quad.of[n] = pages[n];
  return quad;
}

// One group of copies; empty where there is no nth page.
DEVICE void ask_for(QuadShared& shared, const QuadPages& pages, int n, const Lists& lists) {
  if (n < kQuadPages) ask_for_page(shared.page(n), page_head(lists, pages.page(n)));
  cp_async_commit();
}

DEVICE void ask_for_first(QuadShared& shared, const QuadPages& pages, const Lists& lists) {
#pragma unroll 1
  for (int n = 0; n < kQuadSlots; ++n) ask_for(shared, pages, n, lists);
}

// All queries of a unit, once its first pages are under way.
DEVICE void attend_quad(const Partials& partials, QuadShared& shared, const u16* q, const Unit& unit,
                        const QuadPages& pages, const Entries& entries, const Lists& lists, float scale) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  const Sight whole[2] = {{0, kPageTokens}, {0, kPageTokens}};
#pragma unroll 1
  for (int first = 0; first * kTileEntries < unit.num_entries; first += kWarps) {
    const Query queries[2] = {query_of(first + warp, g, unit, entries), query_of(first + warp, g + 8, unit, entries)};
    if (first > 0) {
      __syncthreads();  // nobody still reads the last pages
      ask_for_first(shared, pages, lists);
    }
    QuadQueries held;
    QuadSums sums;
    load_queries(held, q, queries, lists.num_heads);
    begin(sums);
    const float of_rows[2] = {scale * held.unit(0), scale * held.unit(1)};
#pragma unroll 1
    for (int n = 0; n < kQuadPages; ++n) {
      begin_page(n, [&](int next) { ask_for(shared, pages, next, lists); });
      const QuadPage& page = shared.page(n);
      StepScores scores[kSteps];
      StepScales of_values[kSteps];
      PageWeights<2> weights;
      score_page(scores, held, page);
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
        of_values[s] = page.value_scales(token_of_lane(s), token_of_lane(s) + kSecondPair);
      weigh_page(weights, scores, whole, of_values, of_rows);
      add_page(sums, weights, page.values);
    }
    store(partials, sums, queries, unit.block + kQuadPages - 1, lists);
  }
}

// Where quads are of halves, a block with one of them had better get the least of what follows; where of levels, it has
// the time for items of one row.
constexpr bool kLongQuads = sizeof(Stored) > 1;

// Items of one row while the quad of a round is under way, if they are the block's next and nothing of their pages is in
// shared memory.  Whether they are done.
DEVICE bool attend_meanwhile(const Partials& partials, Shared& shared, int round, const Alone& alone, const u16* q,
                             const Lists& lists, const Batch& batch, float scale) {
  const int index = index_of_round(round + 1, lists), first = alone.first(index);
  const bool comes_next = index >= alone.num_shared && first < alone.num_items;
  OwnItem own = {};
  if (comes_next) own = read_own_item(first, alone, lists, batch);
  wait_once(round);
  if (round == 0) {
    if (comes_next) put_newest(own, alone, lists);
    put_newest(2, alone, lists, batch);
  }
  if (!comes_next || own.lead.copied_end > 0) return false;
  __syncwarp();
  const OwnPage page = {shared.page, page_head(lists, own.unit.page), 0};
  const auto arrive = [&] { return DirectQueries(q, own.entry.row, lists.num_heads); };
  attend_alone(partials, arrive, page, own.entry, own.unit.block, own.exists, lists, scale);
  return true;
}

// Quads: the first num_quads items.  Whether the block's next items, of one row, are done.
DEVICE bool work_quads(const Partials& partials, QuadShared& shared, Entries& entries, Progress& progress, int num_quads,
                       const Alone& alone, const u16* q, const Lists& lists, const Batch& batch, float scale) {
  Shared& of_pages = reinterpret_cast<Shared&>(shared);
  bool next_is_done = false;
  while (progress.index < num_quads) {
    const Unit unit = read_unit(progress.item, lists);
    const QuadPages pages = read_quad(progress.item, lists);
    const int round = progress.round;
    read_entries(entries, unit, lists, batch);
    __syncthreads();  // and all know which item this is
    if (threadIdx.x == kThreads - 1) advance(progress, lists);
    ask_for_first(shared, pages, lists);
    next_is_done = attend_meanwhile(partials, of_pages, round, alone, q, lists, batch, scale);
    attend_quad(partials, shared, q, unit, pages, entries, lists, scale);
    __syncthreads();  // nobody still reads the pages and the entries
  }
  return next_is_done;
}
