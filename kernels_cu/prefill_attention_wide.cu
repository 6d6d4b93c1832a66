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
// K and V come to shared memory by asynchronous copies two pages ahead, K a page before V, in rings of three:
//
//    turn j reads K of page j + 1 and V of page j; on their way are K of j + 2, j + 3 and V of j + 1, j + 2.
//
// In shared memory rows of 64 halves of K follow each other, their 16-byte pieces swizzled (ptx_sm90.cuh); V lies as in
// the page, where 8 dims of an octet are an 8x8 matrix.  Copies and products meet no bank twice, and a copy asks the L2
// cache for whole lines.
//
//    K  [D/64][64 tokens][64 dims]          b operand of the scores
//    V  [8 octets][D dims][8 tokens]        b operand of the mix
#include "prefill_softmax.cuh"
#include "ptx_sm90.cuh"

constexpr int kRing = 3;
constexpr int kRowBytes = 128, kRowPieces = kRowBytes / 16;
constexpr int kBlockBytes = 64 * kRowBytes;   // 64 rows
constexpr int kStepBytes = 32;                // 16 halves of a row
constexpr int kMatrixBytes = 128;             // 8 dims of an octet
constexpr int kOctetBytes = kHeadDim / 8 * kMatrixBytes;
constexpr int kDimSteps = kHeadDim / 16;      // wgmma steps over the dimensions
constexpr int kHeadPieces = kHeadElements / 8;
constexpr int kOutputTiles = 8;               // column tiles of one wgmma
static_assert(kThreads == 128, "a block is a warpgroup");

struct Rings {
  unsigned char keys[kRing][2 * kHeadElements];
  unsigned char values[kRing][2 * kHeadElements];
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

// The pages of a tile on their way to shared memory.
struct Feed {
  const u16* pool;
  const i32* pages;  // of the layer
  int table_stride, kv_head, num_kv_heads;
  Step step;         // of the next page of K
  int page, before;  // its id, and that of the page whose V is next; −1: there is none
  int key_slot, value_slot;
};

DEVICE int page_of(const Feed& feed) { return feed.pages[feed.step.slot * feed.table_stride + feed.step.block]; }

// A head's K, [64][D].
DEVICE void copy_keys(unsigned char* matrix, const u16* keys) {
  constexpr u32 kBlocks = kHeadDim / 64;  // of 64 halves, of a row
  constexpr u32 kPieces = kBlocks * kRowPieces, kRows = kThreads / kPieces;  // of a row; that all threads copy at once
  static_assert(kRows % 8 == 0, "a thread's pieces are swizzled alike");
  const u32 n = threadIdx.x, row = n / kPieces, block = n / kRowPieces % kBlocks, piece = n % kRowPieces ^ row % 8;
  unsigned char* to = matrix + block * kBlockBytes + row * kRowBytes + piece * 16;
  const u16* from = keys + 8 * n;
#pragma unroll
  for (int i = 0; i < kHeadPieces / kThreads; ++i)
    cp_async16(to + i * kRows * kRowBytes, from + i * 8 * kThreads, true);
}

// A head's V.
DEVICE void copy_values(unsigned char* matrix, const u16* values) {
  unsigned char* to = matrix + 16 * threadIdx.x;
  const u16* from = values + 8 * threadIdx.x;
#pragma unroll
  for (int i = 0; i < kHeadPieces / kThreads; ++i) cp_async16(to + i * 16 * kThreads, from + i * 8 * kThreads, true);
}

DEVICE int slot_after(int slot) { return slot + 1 == kRing ? 0 : slot + 1; }

// Starts the copies of the next K and of the V before it; one group, empty at the end.
DEVICE void copy_next(Feed& feed, Rings& rings, const Rows& rows, const Tile& tile) {
  if (feed.before >= 0) {
    const u16* values = page_values(feed.pool, feed.before, feed.kv_head, feed.num_kv_heads);
    copy_values(rings.values[feed.value_slot], values);
    feed.value_slot = slot_after(feed.value_slot);
  }
  if (feed.page >= 0) {
    const u16* keys = page_keys(feed.pool, feed.page, feed.kv_head, feed.num_kv_heads);
    copy_keys(rings.keys[feed.key_slot], keys);
    feed.key_slot = slot_after(feed.key_slot);
  }
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

// Scores of a block become weights; `factor`: softmax.
DEVICE void weigh_block(State& state, float (&factor)[2], Scores& scores, const Attending& attending, int window,
                        int block, float scale) {
  const int begin = block * kPageTokens, end = begin + kPageTokens;
  if (begin < attending.sight.all_begin || end > attending.sight.all_end)
    hide(scores, attending.position, window, block, [](int n, int column) { return 8 * n + column; });
  weigh_page(state, factor, scores, scale);
}

// All pages of the tile from `step` on, into the state; the first kRing copies are under way.
DEVICE void attend(State& state, const Queries& queries, Rings& rings, Feed& feed, Step step, const Rows& rows,
                   const Tile& tile, float scale) {
  Attending attending;
  attending.sight = select_rows(attending.position, step, rows, tile);
  Scores scores;
  u32 weights[kSteps][4];
  float factor[2];
  wait_for_pages<kRing - 1>();
  wgmma_fence();
  start_scores(scores, queries, rings.keys[0]);
  wgmma_wait<0>();
  weigh_block(state, factor, scores, attending, tile.window, step.block, scale);
  pack_weights(weights, scores);
  int slot = 0;  // of V
#pragma unroll 1
  for (int first = step.first, end = step.end; advance(step, rows, tile); first = step.first, end = step.end) {
    wait_for_pages<kRing - 2>();
    if (step.first != first || step.end != end) attending.sight = select_rows(attending.position, step, rows, tile);
    wgmma_fence();
    start_scores(scores, queries, rings.keys[slot_after(slot)]);
    start_mix(state, weights, rings.values[slot]);
    copy_next(feed, rings, rows, tile);
    wgmma_wait<1>();
    weigh_block(state, factor, scores, attending, tile.window, step.block, scale);
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
    prefill_attention(const u16* q, const u16* pool, const i32* tables, const i32* tiles, const i32* token_slot,
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
  Feed feed = {pool, tables + table_offset, table_stride, kv_head, num_kv_heads, step, 0, -1, 0, 0};
  feed.page = page_of(feed);
#pragma unroll 1
  for (int i = 0; i < kRing; ++i) copy_next(feed, rings, rows, tile);
  Queries queries;
  load_queries(queries, q, tile, head, num_heads);
  State state = no_state();
  attend(state, queries, rings, feed, step, rows, tile, scale);
  store(a, state, tile, head, num_heads);
}
