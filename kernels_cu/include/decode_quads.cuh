// A quad by a warpgroup: 64 queries, a tile of 16 a warp, against four pages of which they see everything, by wgmma, with
// the bits of page_sums.cuh.  What it makes of a page is added to what it made of those before.
//
// A step of either product has the 16 elements that it has in mma.m16n8k16 (attention.cuh), halves of four pieces, in
// another order, which does not show: element 32·j + 8·a + 4·i + b of a row of q, of K or of Vᵀ is the (4·a + b)th of
// step 2·j + i.  Tokens are columns of the scores in the same order.
//
//   K   [D/64][64 tokens][64 dims]     tokens and dims so ordered; 16-byte pieces of a row swizzled (ptx_sm90.cuh)
//   V   [8][D dims][8 tokens]          tokens so ordered
//
// In shared memory: halves of two pages, which come by copies of four elements; or the levels of two, of which all threads
// make halves of one before they multiply it.
#pragma once

#include "decode_many.cuh"
#include "ptx_sm90.cuh"

constexpr int kQuadSlots = 2;               // pages under way
constexpr int kUnit = 4;                    // elements that stay side by side
constexpr int kKeyRowBytes = 128;           // 64 dims
constexpr int kKeyBlockBytes = kPageTokens * kKeyRowBytes;
constexpr int kKeyStepBytes = 32;
constexpr int kStripBytes = kHeadDim * 16;  // 8 tokens of all dims
constexpr int kDimSteps = kHeadDim / 16;
static_assert(kThreads == 128, "a block is a warpgroup");

struct HalvesOfPage {
  unsigned char keys[2 * kHeadElements], values[2 * kHeadElements];
};

// Element i of a row: where it is.
DEVICE constexpr int place_in_steps(int i) { return i / 32 * 32 + i / 4 % 2 * 16 + i / 8 % 4 * 4 + i % 4; }

// The bytes of piece `piece` of a row of K, rows in their places.
DEVICE int place_of_key_piece(int row, int piece) {
  return piece / 8 * kKeyBlockBytes + row * kKeyRowBytes + (piece % 8 ^ row % 8) * 16;
}

// And of element `token`, in its place, of a dim of Vᵀ.
DEVICE int place_of_value(int token, int dim) { return token / 8 * kStripBytes + dim * 16 + token % 8 * 2; }

#ifdef TL_INT8

constexpr int kLandedOctet = kHeadDim * 8 + 64;  // octets begin in banks of their own

struct LevelsOfPage : SharedScales {
  unsigned char keys[kHeadElements], values[kOctets * kLandedOctet];
};

struct alignas(1024) QuadShared {
  HalvesOfPage halves;
  LevelsOfPage landed[kQuadSlots];
  SharedScales of_halves;

  DEVICE const HalvesOfPage& page(int) const { return halves; }
  DEVICE const SharedScales& scales() const { return of_halves; }
};

// Asks for a page, as the nth.
DEVICE void ask_for_page(QuadShared& shared, int n, const PageHead& from) {
  LevelsOfPage& landed = shared.landed[n % kQuadSlots];
#pragma unroll
  for (int i = 0; i < kHeadElements / 16 / kThreads; ++i) {
    const int at = 16 * (i * kThreads + static_cast<int>(threadIdx.x));
    cp_async16(landed.keys + at, from.keys + at, true);
    cp_async16(landed.values + at / (8 * kHeadDim) * kLandedOctet + at % (8 * kHeadDim), from.values + at, true);
  }
  landed.copy_scales(from.key_scales, from.value_scales,
                     [&](uint4* to, const uint4* scales, int) { cp_async16(to, scales, true); });
}

DEVICE uint2 widened(u32 levels) {
  u32 pairs[2];
  widen_levels(pairs, levels);
  return make_uint2(pairs[0], pairs[1]);
}

DEVICE void swap_if(u32& a, u32& b, bool swapped) {
  const u32 old = a;
  a = swapped ? b : a;
  b = swapped ? old : b;
}

// K of a page: 16 dims of a token at a time, four by four.  Which four a lane stores first is such that lanes meet no
// bank twice.
DEVICE void widen_keys(unsigned char* keys, const LevelsOfPage& landed) {
  constexpr int kPieces = kHeadDim / 16;  // of a token
#pragma unroll
  for (int i = 0; i < kHeadElements / 16 / kThreads; ++i) {
    const int n = i * kThreads + static_cast<int>(threadIdx.x), token = n / kPieces, nth = n % kPieces;
    uint4 levels = *reinterpret_cast<const uint4*>(landed.keys + 16 * n);
    const bool odd_step = nth / 4 % 2, odd_half = token % 2;  // first
    swap_if(levels.x, levels.y, odd_step), swap_if(levels.z, levels.w, odd_step);
    swap_if(levels.x, levels.z, odd_half), swap_if(levels.y, levels.w, odd_half);
    const int piece = place_in_steps(16 * nth) / 8;
    const int first = place_of_key_piece(place_in_steps(token), piece) ^ (odd_step ? 32 : 0) ^ (odd_half ? 8 : 0);
    *reinterpret_cast<uint2*>(keys + first) = widened(levels.x);
    *reinterpret_cast<uint2*>(keys + (first ^ 32)) = widened(levels.y);
    *reinterpret_cast<uint2*>(keys + (first ^ 8)) = widened(levels.z);
    *reinterpret_cast<uint2*>(keys + (first ^ 40)) = widened(levels.w);
  }
}

// V: an octet of two dims at a time, four tokens of a dim by four; likewise.
DEVICE void widen_values(unsigned char* values, const LevelsOfPage& landed) {
  constexpr int kPieces = kHeadDim;  // of two octets
#pragma unroll
  for (int i = 0; i < kHeadElements / 16 / kThreads; ++i) {
    const int n = i * kThreads + static_cast<int>(threadIdx.x);
    const int octet = n / kPieces * 2 + n % 2, dim = n % kPieces / 2 * 2;
    uint4 levels = *reinterpret_cast<const uint4*>(landed.values + octet * kLandedOctet + dim * 8);
    const bool odd_dim = dim / 8 % 2;  // first
    swap_if(levels.x, levels.z, odd_dim), swap_if(levels.y, levels.w, odd_dim);
    unsigned char* low = values + place_of_value(place_in_steps(8 * octet), dim);
    unsigned char* high = values + place_of_value(place_in_steps(8 * octet + kUnit), dim);
    const int first = odd_dim ? 16 : 0;
    *reinterpret_cast<uint2*>(low + first) = widened(levels.x);
    *reinterpret_cast<uint2*>(high + first) = widened(levels.y);
    *reinterpret_cast<uint2*>(low + (16 - first)) = widened(levels.z);
    *reinterpret_cast<uint2*>(high + (16 - first)) = widened(levels.w);
  }
}

// The nth page has landed, and nobody still reads the one before; `ask` asks for a later one.
template <class Ask>
DEVICE void begin_page(QuadShared& shared, int n, Ask ask) {
  const LevelsOfPage& landed = shared.landed[n % kQuadSlots];
  cp_async_wait<kQuadSlots - 1>();
  __syncthreads();
  widen_keys(shared.halves.keys, landed);
  widen_values(shared.halves.values, landed);
  shared.of_halves.copy_scales(landed.of_keys, landed.of_values,
                               [](uint4* to, const uint4* scales, int) { *to = *scales; });
  fence_for_wgmma();
  __syncthreads();
  ask(n + kQuadSlots);
}

#else

struct alignas(1024) QuadShared {
  HalvesOfPage pages[kQuadSlots];

  DEVICE const HalvesOfPage& page(int n) const { return pages[n % kQuadSlots]; }
  DEVICE SharedScales scales() const { return {}; }
};

DEVICE void ask_for_page(QuadShared& shared, int n, const PageHead& from) {
  constexpr int kUnits = kHeadDim / kUnit, kTokens = kThreads / kUnits, kRounds = kHeadElements / kUnit / kThreads;
  HalvesOfPage& page = shared.pages[n % kQuadSlots];
  const int thread = threadIdx.x, row = place_in_steps(thread / kUnits);
  const int place = place_in_steps(thread % kUnits * kUnit);  // of the first dim
  unsigned char* to = page.keys + place_of_key_piece(row, place / 8) + place % 8 * 2;
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int on = place_in_steps(i * kTokens);  // rows further
    unsigned char* there = page.keys + ((to - page.keys) ^ on % 8 / 4 * 64) + on * kKeyRowBytes;
    cp_async8(there, from.keys + kUnit * (i * kThreads + thread));
  }
  to = page.values + place_of_value(place_in_steps(thread % 2 * kUnit), thread / 2 % kHeadDim);
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int first = i * kThreads / 2;  // octet and dim as one
    cp_async8(to + place_of_value(place_in_steps(first / kHeadDim * 8), first % kHeadDim),
              from.values + kUnit * (i * kThreads + thread));
  }
}

template <class Ask>
DEVICE void begin_page(QuadShared&, int n, Ask ask) {
  if (n == 0) cp_async_wait<kQuadSlots - 1>();
  else cp_async_wait<kQuadSlots - 2>();
  fence_for_wgmma();
  __syncthreads();
  if (n > 0) ask(n - 1 + kQuadSlots);
}

#endif

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
