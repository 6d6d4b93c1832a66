// prefill_attention on sm_90a: what prefill_attention.cu says, with the products of a warpgroup (wgmma).
//
// The algebra, the arguments, the tiles and the rounding points are those of prefill_attention.cu.  Only a product's
// own order of summing differs, so the two give bits of their own; each gives a token the same under every cut.
//
// A block is a tile and a head: one warpgroup, which goes through the tile's pages in order.  The scores of a page and
// the mix of the page before it are under way together, so that the tensor cores work while exponents are taken:
//
//    tensor cores   scores 0 |            scores 1, mix 0 | scores 2, mix 1 | …           | mix n−1
//    the others              | weigh 0 |          weigh 1 |         weigh 2 | … weigh n−1 |
//
// K and V come two pages ahead, K a page before V.  Halves come to shared memory by asynchronous copies, in rings of
// three:
//
//    turn j reads K of page j + 1 and V of page j; on their way are K of j + 2, j + 3 and V of j + 1, j + 2.
//
// Levels (TL_INT8) come to registers; turn j makes halves of K of j + 2 and V of j + 1, in rings of two, while the tensor
// cores work, and asks for the next ones.  The scales of both are in shared memory with K.
//
// In shared memory rows of 64 halves of K follow each other, their 16-byte pieces swizzled (ptx_sm90.cuh); V lies as in
// the page, where 8 dims of an octet are an 8x8 matrix.  Copies and products meet no bank twice, and a copy asks the L2
// cache for whole lines.
//
//    K  [D/64][64 tokens][64 dims]          b operand of the scores
//    V  [8 octets][D dims][8 tokens]        b operand of the mix
#include "prefill_softmax.cuh"
#include "ptx_sm90.cuh"

constexpr int kAhead = 3;
constexpr int kRing = sizeof(Stored) == 1 ? 2 : kAhead;
constexpr int kRowBytes = 128, kRowPieces = kRowBytes / 16;
constexpr int kBlockBytes = 64 * kRowBytes;   // 64 rows
constexpr int kStepBytes = 32;                // 16 halves of a row
constexpr int kMatrixBytes = 128;             // 8 dims of an octet
constexpr int kOctetBytes = kHeadDim / 8 * kMatrixBytes;
constexpr int kDimSteps = kHeadDim / 16;      // wgmma steps over the dimensions
constexpr int kHeadPieces = kHeadElements / 8;
constexpr int kOutputTiles = 8;               // column tiles of one wgmma
static_assert(kThreads == 128, "a block is a warpgroup");

struct Operands {
  unsigned char keys[kRing][2 * kHeadElements];
  unsigned char values[kRing][2 * kHeadElements];
};

// Scales of the pages of K in the ring, if there are any.
struct ScalesOfHalves {
  DEVICE SharedScales of(int) const { return {}; }
};

struct ScalesOfLevels {
  SharedScales scales[kRing];

  DEVICE const SharedScales& of(int slot) const { return scales[slot]; }
};

// Fragments of the queries: step s is dimensions 16·s … + 15.
typedef u32 Queries[kDimSteps][4];

DEVICE void load_queries(Queries& queries, const u16* q, const Tile& tile, int head, int num_heads) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = 16 * warp + g + 8 * half;
    const u16* first = q + (static_cast<u64>(tile.first_row + i) * num_heads + head) * kHeadDim;
    const u32* row = reinterpret_cast<const u32*>(first);
#pragma unroll
    for (int s = 0; s < kDimSteps; ++s) {
      queries[s][half] = i < tile.num_rows ? row[8 * s + t] : 0;
      queries[s][2 + half] = i < tile.num_rows ? row[8 * s + 4 + t] : 0;
    }
  }
}

DEVICE int slot_after(int slot) { return slot + 1 == kRing ? 0 : slot + 1; }

// Where piece n of a head's K, [64][D], is in its matrix.
DEVICE u32 place_of_key(u32 n) {
  constexpr u32 kBlocks = kHeadDim / 64;  // of 64 halves, of a row
  const u32 row = n / (kBlocks * kRowPieces);
  return n / kRowPieces % kBlocks * kBlockBytes + row * kRowBytes + (n % kRowPieces ^ row % 8) * 16;
}

#ifdef TL_INT8

struct Rings : Operands, ScalesOfLevels {};

constexpr int kHeldPieces = kHeadPieces / kCopyPieces / kThreads;  // 16 levels each, of K and of V

// On its way in a thread's registers: K of a page, of its scales a piece; V of another.
struct Held {
  uint4 keys[kHeldPieces], values[kHeldPieces], scales;
  bool has_keys, has_values;
};

DEVICE void hold(uint4 (&held)[kHeldPieces], const Stored* levels) {
#pragma unroll
  for (int i = 0; i < kHeldPieces; ++i)
    held[i] = load_global(reinterpret_cast<const uint4*>(levels) + i * kThreads + threadIdx.x);
}

DEVICE void take_keys(Held& held, Rings&, int&, const Stored* keys, const uint4* key_scales,
                      const uint4* value_scales) {
  const uint4* scales = threadIdx.x < kScalePieces ? key_scales : value_scales;
  hold(held.keys, keys);
  if (threadIdx.x < 2 * kScalePieces) held.scales = load_global(scales + threadIdx.x % kScalePieces);
  held.has_keys = true;
}

DEVICE void take_values(Held& held, Rings&, int&, const Stored* values) {
  hold(held.values, values);
  held.has_values = true;
}

// put(n, halves) for all pieces that are held.
template <class Put>
DEVICE void widen_held(const uint4 (&held)[kHeldPieces], Put put) {
#pragma unroll
  for (int i = 0; i < kHeldPieces; ++i) {
    const int n = 2 * (i * kThreads + static_cast<int>(threadIdx.x));
    put(n, halves_of(make_uint2(held[i].x, held[i].y)));
    put(n + 1, halves_of(make_uint2(held[i].z, held[i].w)));
  }
}

// What is held goes to shared memory.
DEVICE void store_held(Held& held, Rings& rings, int& key_slot, int& value_slot) {
  if (held.has_values) {
    widen_held(held.values, [&](int n, const uint4& halves) {
      *reinterpret_cast<uint4*>(rings.values[value_slot] + 16 * n) = halves;
    });
    value_slot = slot_after(value_slot);
  }
  if (held.has_keys) {
    widen_held(held.keys, [&](int n, const uint4& halves) {
      *reinterpret_cast<uint4*>(rings.keys[key_slot] + place_of_key(n)) = halves;
    });
    SharedScales& scales = rings.scales[key_slot];
    uint4* to = threadIdx.x < kScalePieces ? scales.of_keys : scales.of_values;
    if (threadIdx.x < 2 * kScalePieces) to[threadIdx.x % kScalePieces] = held.scales;
    key_slot = slot_after(key_slot);
  }
  held.has_keys = held.has_values = false;
}

#else

struct Rings : Operands, ScalesOfHalves {};

struct Held {};

DEVICE void take_keys(Held&, Rings& rings, int& slot, const u16* keys, const uint4*, const uint4*) {
  constexpr int kAtOnce = kThreads / (kHeadDim / 8);  // rows that all threads copy at once
  static_assert(kAtOnce % 8 == 0, "a thread's pieces are swizzled alike");
  unsigned char* to = rings.keys[slot] + place_of_key(threadIdx.x);
  const u16* from = keys + 8 * threadIdx.x;
#pragma unroll
  for (int i = 0; i < kHeadPieces / kThreads; ++i)
    cp_async16(to + i * kAtOnce * kRowBytes, from + i * 8 * kThreads, true);
  slot = slot_after(slot);
}

DEVICE void take_values(Held&, Rings& rings, int& slot, const u16* values) {
  unsigned char* to = rings.values[slot] + 16 * threadIdx.x;
  const u16* from = values + 8 * threadIdx.x;
#pragma unroll
  for (int i = 0; i < kHeadPieces / kThreads; ++i) cp_async16(to + i * 16 * kThreads, from + i * 8 * kThreads, true);
  slot = slot_after(slot);
}

DEVICE void store_held(Held&, Rings&, int&, int&) {}

#endif

// The pages of a tile on their way to shared memory.
struct Feed {
  const Stored* pool;
  const i32* pages;  // of the layer
  int table_stride, kv_head, num_kv_heads;
  Step step;         // of the next page of K
  int page, before;  // its id, and that of the page whose V is next; −1: there is none
  int key_slot, value_slot;
  Held held;
};

DEVICE int page_of(const Feed& feed) { return feed.pages[feed.step.slot * feed.table_stride + feed.step.block]; }

// Asks for the next K and for the V before it; one group of copies, empty at the end.
DEVICE void copy_next(Feed& feed, Rings& rings, const Rows& rows, const Tile& tile) {
  const int head = feed.kv_head, num_heads = feed.num_kv_heads;
  store_held(feed.held, rings, feed.key_slot, feed.value_slot);
  if (feed.before >= 0)
    take_values(feed.held, rings, feed.value_slot, page_values(feed.pool, feed.before, head, num_heads));
  if (feed.page >= 0)
    take_keys(feed.held, rings, feed.key_slot, page_keys(feed.pool, feed.page, head, num_heads),
              page_scales(feed.pool, feed.page, head, num_heads),
              page_scales(feed.pool, feed.page, num_heads + head, num_heads));
  cp_async_commit();
  feed.before = feed.page;
  if (feed.page >= 0) feed.page = advance(feed.step, rows, tile) ? page_of(feed) : -1;
}

// What was to land has landed, for all threads and for products too; and nobody reads what the last turn read.
template <int kGroups>
DEVICE void wait_for_pages() {
  cp_async_wait<kGroups>();
  fence_for_wgmma();
  __syncthreads();
}

// Starts scores = queries · Kᵀ.
DEVICE void start_scores(Scores& scores, const Queries& queries, const unsigned char* keys) {
  const SharedMatrix matrix = swizzled_matrix(keys);
#pragma unroll
  for (int s = 0; s < kDimSteps; ++s)
    wgmma(scores, queries[s], matrix + (s / 4 * kBlockBytes + s % 4 * kStepBytes), s > 0);
  wgmma_commit();
}

// Starts o += weights · V.
DEVICE void start_mix(State& state, const u32 (&weights)[kSteps][4], const unsigned char* values) {
  const SharedMatrix matrix = shared_matrix(values, kOctetBytes, kMatrixBytes);
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int first = 0; first < kDimTiles; first += kOutputTiles) {
      auto& o = reinterpret_cast<float(&)[kOutputTiles][4]>(state.o[first]);
      wgmma(o, weights[s], matrix + (s * 2 * kOctetBytes + first * kMatrixBytes), true);
    }
  wgmma_commit();
}

// Which of the rows attend a step, and where the warp's are.
struct Attending {
  int position[2];
  WarpSight sight;
};

// Scores, or weights, times their tokens' scales.
template <class ScalesOf>
DEVICE void scale_columns(Scores& scores, ScalesOf scales_of) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int token = 16 * s + 2 * (threadIdx.x % 4);
    const StepScales scales = scales_of(token, token + 8);
#pragma unroll
    for (int u = 0; u < 2; ++u)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[2 * s + u][i] = times_scale(scores[2 * s + u][i], scales, u, i % 2);
  }
}

// Scores of a block become weights; `factor`: softmax.
DEVICE void weigh_block(State& state, float (&factor)[2], Scores& scores, const SharedScales& scales,
                        const Attending& attending, int window, int block, float scale) {
  scale_columns(scores, [&](int first, int second) { return scales.key_scales(first, second); });
  const int begin = block * kPageTokens, end = begin + kPageTokens;
  if (begin < attending.sight.all_begin || end > attending.sight.all_end)
    hide(scores, attending.position, window, block, [](int n, int column) { return 8 * n + column; });
  weigh_page(state, factor, scores, scale);
  scale_columns(scores, [&](int first, int second) { return scales.value_scales(first, second); });
}

// All pages of the tile from `step` on, into the state; the first kAhead copies are under way.
DEVICE void attend(State& state, const Queries& queries, Rings& rings, Feed& feed, Step step, const Rows& rows,
                   const Tile& tile, float scale) {
  Attending attending;
  attending.sight = select_rows(attending.position, step, rows, tile);
  Scores scores;
  u32 weights[kSteps][4];
  float factor[2];
  wait_for_pages<kAhead - 1>();
  wgmma_fence();
  start_scores(scores, queries, rings.keys[0]);
  wgmma_wait<0>();
  weigh_block(state, factor, scores, rings.of(0), attending, tile.window, step.block, scale);
  pack_weights(weights, scores);
  int slot = 0;  // of V
#pragma unroll 1
  for (int first = step.first, end = step.end; advance(step, rows, tile); first = step.first, end = step.end) {
    wait_for_pages<kAhead - 2>();
    if (step.first != first || step.end != end) attending.sight = select_rows(attending.position, step, rows, tile);
    wgmma_fence();
    start_scores(scores, queries, rings.keys[slot_after(slot)]);
    start_mix(state, weights, rings.values[slot]);
    copy_next(feed, rings, rows, tile);
    wgmma_wait<1>();
    weigh_block(state, factor, scores, rings.of(slot_after(slot)), attending, tile.window, step.block, scale);
    wait_for_value(state.sum[0] + state.sum[1]);
    wgmma_wait<0>();
    bring_to_top(state, factor);
    pack_weights(weights, scores);
    slot = slot_after(slot);
  }
  wait_for_pages<0>();
  wgmma_fence();
  start_mix(state, weights, rings.values[slot]);
  wgmma_wait<0>();
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    prefill_attention(const u16* q, const Stored* pool, const i32* tables, const i32* tiles, const i32* token_slot,
                      const i32* token_position, u16* a, i32 table_offset, i32 table_stride, i32 num_tiles,
                      i32 num_heads, i32 num_kv_heads, i32 num_sms, float scale) {
  DYNAMIC_SHARED_ALIGNED(shared);
  Rings& rings = *reinterpret_cast<Rings*>(shared);
  Rows& rows = *reinterpret_cast<Rows*>(shared + sizeof(Rings));
  const int rank = rank_of_block(num_sms), head = rank % num_heads, kv_head = head / kQueriesPerKv;
  dependency_wait();
  dependency_launch();
  const Tile tile = read_tile(tiles, num_tiles - 1 - rank / num_heads);
  if (tile.num_rows == 0) return;
  read_rows(rows, tile, token_slot, token_position);
  fence_for_wgmma();
  __syncthreads();
  const Step step = first_step(rows, tile);
  Feed feed = {pool, tables + table_offset, table_stride, kv_head, num_kv_heads, step, 0, -1, 0, 0, {}};
  feed.page = page_of(feed);
#pragma unroll 1
  for (int i = 0; i < kAhead; ++i) copy_next(feed, rings, rows, tile);
  Queries queries;
  load_queries(queries, q, tile, head, num_heads);
  State state = no_state();
  attend(state, queries, rings, feed, step, rows, tile, scale);
  store(a, state, tile, head, num_heads);
}
