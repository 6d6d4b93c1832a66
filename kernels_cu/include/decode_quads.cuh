// A quad by a warpgroup: 64 queries, a tile of 16 a warp, against four pages of which they see everything, by wgmma, with
// the bits of page_sums.cuh.  What it makes of a page is added to what it made of those before.
//
// A step of either product has the 16 elements that it has in mma.m16n8k16 (attention.cuh), halves of four pieces, in
// another order, which does not show: element 32·j + 8·a + 4·i + b of a row of q, of K or of Vᵀ is the (4·a + b)th of
// step 2·j + i.  Tokens are columns of the scores in the same order.  quad_pages.cuh has the pages so.
#pragma once

#include "quad_pages.cuh"

constexpr int kDimSteps = kHeadDim / 16;
static_assert(sizeof(Shared) <= sizeof(QuadShared));

// A lane's queries, as operands of all steps.
typedef u32 QuadQueries[kDimSteps][4];

// The first of the lane's pairs of step s, of tokens or of dims; the second is 16 elements on.
DEVICE int element_of_lane(int s) { return 32 * (s / 2) + 4 * (s % 2) + threadIdx.x % 4 / 2 * 8 + threadIdx.x % 2 * 2; }

DEVICE void load_queries(QuadQueries& held, const u16* q, const Query (&queries)[2], int num_heads) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u16* row = q + (queries[half].entry.row * num_heads + queries[half].head) * kHeadDim;
#pragma unroll
    for (int s = 0; s < kDimSteps; ++s) {
      held[s][half] = *reinterpret_cast<const u32*>(row + element_of_lane(s));
      held[s][2 + half] = *reinterpret_cast<const u32*>(row + element_of_lane(s) + 16);
    }
  }
}

// Pieces of odd number summed by themselves, as `score` does.
DEVICE void score_page(StepScores (&scores)[kSteps], const QuadQueries& queries, const unsigned char* keys,
                       const SharedScales& scales) {
  float even[2 * kSteps][4], odd[2 * kSteps][4];
  const SharedMatrix matrix = swizzled_matrix(keys);
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < kDimSteps; ++s)
    wgmma(s / 2 % 2 ? odd : even, queries[s], matrix + (s / 4 * kKeyBlockBytes + s % 4 * kKeyStepBytes), s >= 4 || s % 2);
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const StepScales of_keys = scales.key_scales(element_of_lane(s), element_of_lane(s) + 16);
#pragma unroll
    for (int u = 0; u < 2; ++u)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        scores[s].of[u][i] = times_scale(even[2 * s + u][i] + odd[2 * s + u][i], of_keys, u, i % 2);
  }
}

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
  float before[2], of_page[2];  // factors, powers of two
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float m = weights.ml[half].x, top = fmaxf(sums.top[half], m), base = exponent_base(top);
    before[half] = exp2_fast(sums.top[half] - base), of_page[half] = exp2_fast(m - base);
    sums.top[half] = top;
    sums.mass[half] = fmaf(of_page[half], weights.ml[half].y, before[half] * sums.mass[half]);
  }
  const SharedMatrix matrix = shared_matrix(values, kStripBytes, 128);
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    float o[kGroupTiles][4];
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint4 step = weights.steps[s];
      const u32 a[4] = {step.x, step.y, step.z, step.w};
      wgmma(o, a, matrix + (s * 2 * kStripBytes + group * kStripBytes / 2), s > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < kGroupTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums.o[group][n][i] = fmaf(of_page[i / 2], o[n][i], before[i / 2] * sums.o[group][n][i]);
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
  if (n < kQuadPages) ask_for_page(shared, n, page_head(lists, pages.page(n)));
  cp_async_commit();
}

DEVICE void ask_for_first(QuadShared& shared, const QuadPages& pages, const Lists& lists) {
#pragma unroll 1
  for (int n = 0; n < kQuadSlots; ++n) ask_for(shared, pages, n, lists);
}

// All queries of a unit, once its first pages are under way; `meanwhile` is done while its queries are.
template <class Meanwhile>
DEVICE void attend_quad(const Partials& partials, QuadShared& shared, const u16* q, const Unit& unit,
                        const QuadPages& pages, const Entries& entries, const Lists& lists, float scale,
                        Meanwhile meanwhile) {
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
    if (first == 0) meanwhile();
    begin(sums);
#pragma unroll 1
    for (int n = 0; n < kQuadPages; ++n) {
      begin_page(shared, n, [&](int next) { ask_for(shared, pages, next, lists); });
      const HalvesOfPage& page = shared.page(n);
      const auto& scales = shared.scales();
      StepScores scores[kSteps];
      StepScales of_values[kSteps];
      PageWeights<2> weights;
      score_page(scores, held, page.keys, scales);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) of_values[s] = scales.value_scales(element_of_lane(s), element_of_lane(s) + 16);
      weigh_page(weights, scores, whole, of_values, scale);
      add_page(sums, weights, page.values);
    }
    store(partials, sums, queries, unit.block + kQuadPages - 1, lists);
  }
}

// Quads: the first num_quads items.
DEVICE void work_quads(const Partials& partials, QuadShared& shared, Entries& entries, Progress& progress,
                       int num_quads, const Alone& alone, const u16* q, const Lists& lists, const Batch& batch,
                       float scale) {
  while (progress.index < num_quads) {
    const Unit unit = read_unit(progress.item, lists);
    const QuadPages pages = read_quad(progress.item, lists);
    const int round = progress.round;
    read_entries(entries, unit, lists, batch);
    __syncthreads();  // and all know which item this is
    if (threadIdx.x == kThreads - 1) advance(progress, lists);
    ask_for_first(shared, pages, lists);
    wait_once(round);
    attend_quad(partials, shared, q, unit, pages, entries, lists, scale, [&] {
      if (round == 0) put_newest(alone, round, lists, batch);
    });
    __syncthreads();  // nobody still reads the pages and the entries
  }
}
