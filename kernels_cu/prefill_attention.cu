// prefill_attention: the tokens of prompts, many per sequence, against the pages of their sequences.
//
//   a[i, h] = Σ_p w_p·V[p] / Σ_p w_p     w_p = 2^(q[i, h]·K[p]·scale)     over the positions p that token i sees
//
//   q        fp16   [T][H·D]                   turned by RoPE
//   pool     fp16   [num_pages][2·G·64·D]      pages (attention.cuh); the tokens' own K and V are in them; with TL_INT8
//            int8   [num_pages][64·G·(2·D + 4)]
//   tables   int32  [slots][max_layers][max_blocks]   page of a sequence's 64-token block
//   tiles    int32  [N][6]                     slot, first row of q, rows 0..64, position of the first, window, shared
//   token_slot, token_position  int32 [T]      of each row of q; read for tiles with shared > 0 only
//   a        fp16   [T][H·D]                   rows of no tile are not written
//   table_offset = layer·max_blocks, table_stride = max_layers·max_blocks; scale = log2(e)/√D
//   D is 64 or 128; H/G ≤ 16; 16-byte alignment.
//   A token at position x sees p iff p ≤ x and (window = 0 or p > x − window).
//
// A tile with shared = 0 is neighbouring tokens of one sequence.  With shared > 0 it is the tokens of several, one
// after the other, whose tables name the same pages for the first `shared` blocks, and whose tokens all lie behind these.
//
// A block is a tile and a head: 4 warps of 16 queries, which go through the tile's pages, first those that all share,
// then each sequence's own, K and V of the next page on their way to shared memory while this one is attended.  Online
// softmax: per query the state o, sum, top.  A page of which a query sees nothing leaves the bits of its state alone
// (factor 1, weights 0), so they depend on the query and its pages only: not on how the prompt was cut, nor on which
// queries are its neighbours.
//
// With TL_INT8 the next page is on its way as it is stored; the block's threads widen its levels together.
//
// fp32: scores, exponents, state.  fp16: the weights that multiply V (relative to the largest so far), and a.  Bytes:
// per tile and head (2·rows + 2·pages·64)·D·2, from L2 after the first tile of a sequence.
#include "prefill_softmax.cuh"

constexpr int kGroup = 4;                   // pieces of K or V in registers at once
constexpr int kRowPieces = kHeadDim / 8;    // pieces of a K row
constexpr int kHeadPieces = kHeadElements / 8;

// K and V of one head in a page, in shared memory: halves or levels, and their scales if they have any.
struct Stage : SharedScales {
  uint4 keys[kHeadPieces];  // place_of_key
  SharedValues<uint4> values;
};

// A lane's part of its warp's 16 queries: rows g and g + 8.
struct Queries {
  uint4 pieces[2][kDimPieces];
  int position[2];  // −1: none, or not among the rows that attend
};

// Where a piece of K lies.  Two tokens at a time are read, 4 pieces each: they must not meet in a bank.
DEVICE int place_of_key(int token, int piece) { return token * kRowPieces + (piece ^ (token % 2 * 4)); }
DEVICE int place_of_key(int nth) { return place_of_key(nth / kRowPieces, nth % kRowPieces); }

#ifdef TL_INT8

// A page comes as levels.  Once it is here all threads widen it, so that warps do not each do it.
struct Arrival : SharedScales {
  uint4 keys[kHeadPieces / kCopyPieces], values[kHeadPieces / kCopyPieces];
};

struct Pages {
  Arrival arrival;
  Stage stage;

  DEVICE void copy(int, const uint4* keys, const uint4* values, const uint4* key_scales, const uint4* value_scales) {
#pragma unroll
    for (int i = 0; i < kHeadPieces / kCopyPieces / kThreads; ++i) {
      const int c = i * kThreads + threadIdx.x;
      cp_async16(&arrival.keys[c], keys + c, true);
      cp_async16(&arrival.values[c], values + c, true);
    }
    arrival.copy_scales(key_scales, value_scales,
                        [](uint4* shared, const uint4* scales, int) { cp_async16(shared, scales, true); });
  }

  // Then the next page may come.
  DEVICE const Stage& take(int) {
    const Piece* keys = reinterpret_cast<const Piece*>(arrival.keys) + threadIdx.x;
    const Piece* values = reinterpret_cast<const Piece*>(arrival.values) + threadIdx.x;
    uint4* to_keys = stage.keys + place_of_key(threadIdx.x);
#pragma unroll 4  // all at once would take the registers of the state
    for (int i = 0; i < kHeadPieces; i += kThreads) {  // an even number of tokens further on
      to_keys[i] = halves_of(keys[i]);
      stage.values.of_piece(i + threadIdx.x) = halves_of(values[i]);
    }
    stage.copy_scales(arrival.of_keys, arrival.of_values,
                      [](uint4* shared, const uint4* scales, int) { *shared = *scales; });
    __syncthreads();
    return stage;
  }
};

#else

// A page comes as it is multiplied, while the one before is attended.
struct Pages {
  Stage stages[2];

  DEVICE void copy(int turn, const uint4* keys, const uint4* values, const uint4*, const uint4*) {
    Stage& stage = stages[turn % 2];
#pragma unroll
    for (int i = 0; i < kHeadPieces / kThreads; ++i) {
      const int c = i * kThreads + threadIdx.x;
      cp_async16(&stage.keys[place_of_key(c)], keys + c, true);
      cp_async16(&stage.values.of_piece(c), values + c, true);
    }
  }

  DEVICE const Stage& take(int turn) { return stages[turn % 2]; }
};

#endif

// Starts the copy of a page's K and V of a head, to be taken in its turn; one group.
DEVICE void copy_page(Pages& pages, int turn, const Stored* pool, int page, int kv_head, int num_kv_heads) {
  pages.copy(turn, reinterpret_cast<const uint4*>(page_keys(pool, page, kv_head, num_kv_heads)),
             reinterpret_cast<const uint4*>(page_values(pool, page, kv_head, num_kv_heads)),
             page_scales(pool, page, kv_head, num_kv_heads),
             page_scales(pool, page, num_kv_heads + kv_head, num_kv_heads));
  cp_async_commit();
}

DEVICE void load_queries(Queries& queries, const u16* q, const Tile& tile, int head, int num_heads) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = 16 * warp + g + 8 * half;
    const u16* row = q + (static_cast<u64>(tile.first_row + i) * num_heads + head) * kHeadDim;
#pragma unroll
    for (int j = 0; j < kDimPieces; ++j)
      queries.pieces[half][j] = i < tile.num_rows ? load_piece(row + 32 * j + 8 * t) : no_piece();
  }
}

// Tile 2·s + u of the scores is tile u of step s of attention.cuh.
DEVICE int token_of(int n, int column) { return token_of_column(n / 2, n % 2, column); }

// Scores or weights of a tile times the scales of their tokens, if there are any.
DEVICE void scale_tile(float (&tile)[4], const StepScales& scales, int u) {
#pragma unroll
  for (int i = 0; i < 4; ++i) tile[i] = times_scale(tile[i], scales, u, i % 2);
}

// The scores of the warp's queries against the page.
DEVICE void score(Scores& scores, const Queries& queries, const Stage& stage) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
#pragma unroll
  for (int j = 0; j < kDimPieces; ++j) {
    const uint4 low = queries.pieces[0][j], high = queries.pieces[1][j];
#pragma unroll
    for (int first = 0; first < kScoreTiles; first += kGroup) {
      uint4 keys[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) keys[i] = stage.keys[place_of_key(token_of(first + i, g), 4 * j + t)];
#pragma unroll
      for (int i = 0; i < kGroup; ++i)
        mma_m16n8k16(scores[first + i], {low.x, high.x, low.y, high.y}, keys[i].x, keys[i].y);
#pragma unroll
      for (int i = 0; i < kGroup; ++i)
        mma_m16n8k16(scores[first + i], {low.z, high.z, low.w, high.w}, keys[i].z, keys[i].w);
    }
  }
#pragma unroll
  for (int n = 0; n < kScoreTiles; ++n) scale_tile(scores[n], stage.key_scales(n / 2), n % 2);
}

// o += weights · V; `scores` are the weights, and become what is rounded of them.
DEVICE void mix(State& state, Scores& scores, const Stage& stage) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  u32 weights[kSteps][4];
#pragma unroll
  for (int n = 0; n < kScoreTiles; ++n) scale_tile(scores[n], stage.value_scales(n / 2), n % 2);
  pack_weights(weights, scores);
#pragma unroll
  for (int j = 0; j < kTokenPieces; ++j)
#pragma unroll
    for (int first = 0; first < kDimTiles; first += kGroup) {
      uint4 values[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) values[i] = stage.values.of(8 * (first + i) + g, 4 * j + t);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) mma_m16n8k16(state.o[first + i], weights[2 * j], values[i].x, values[i].y);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) mma_m16n8k16(state.o[first + i], weights[2 * j + 1], values[i].z, values[i].w);
    }
}

DEVICE void attend(State& state, const Queries& queries, const Stage& stage, const WarpSight& sight, int window,
                   int block, float scale) {
  const int begin = block * kPageTokens, end = begin + kPageTokens;
  if (end <= sight.any_begin || begin >= sight.any_end) return;
  Scores scores;
  score(scores, queries, stage);
  if (begin < sight.all_begin || end > sight.all_end) hide(scores, queries.position, window, block, token_of);
  float factor[2];
  weigh_page(state, factor, scores, scale);
  bring_to_top(state, factor);
  mix(state, scores, stage);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    prefill_attention(const u16* q, const Stored* pool, const i32* tables, const i32* tiles, const i32* token_slot,
                      const i32* token_position, u16* a, i32 table_offset, i32 table_stride, i32 num_tiles,
                      i32 num_heads, i32 num_kv_heads, i32 num_sms, float scale) {
  DYNAMIC_SHARED(shared);
  Pages& pages = *reinterpret_cast<Pages*>(shared);
  Rows& rows = *reinterpret_cast<Rows*>(shared + sizeof(Pages));
  const int rank = rank_of_block(num_sms), head = rank % num_heads, kv_head = head / kQueriesPerKv;
  dependency_wait();
  dependency_launch();
  const Tile tile = read_tile(tiles, num_tiles - 1 - rank / num_heads);
  if (tile.num_rows == 0) return;
  read_rows(rows, tile, token_slot, token_position);
  Queries queries;
  load_queries(queries, q, tile, head, num_heads);
  __syncthreads();

  const i32* page_ids = tables + table_offset;
  Step step = first_step(rows, tile), next = step;
  copy_page(pages, 0, pool, page_ids[step.slot * table_stride + step.block], kv_head, num_kv_heads);
  bool more = advance(next, rows, tile);
  int next_page = more ? page_ids[next.slot * table_stride + next.block] : 0;
  WarpSight sight = select_rows(queries.position, step, rows, tile);
  State state = no_state();
  for (int turn = 0;; ++turn) {
    cp_async_wait<0>();
    __syncthreads();  // this page is here for all, and nobody still reads the one before
    const Stage& stage = pages.take(turn);
    if (more) copy_page(pages, turn + 1, pool, next_page, kv_head, num_kv_heads);
    attend(state, queries, stage, sight, tile.window, step.block, scale);
    if (!more) break;
    if (next.first != step.first || next.end != step.end) sight = select_rows(queries.position, next, rows, tile);
    step = next;
    more = advance(next, rows, tile);
    if (more) next_page = page_ids[next.slot * table_stride + next.block];
  }
  store(a, state, tile, head, num_heads);
}
