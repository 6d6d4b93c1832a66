// prefill_attention: the tokens of prompts, many per sequence, against the pages of their sequences.
//
//   a[i, h] = Σ_p w_p·V[p] / Σ_p w_p     w_p = 2^(q[i, h]·K[p]·scale)     over the positions p that token i sees
//
//   q        fp16   [T][H·D]                   turned by RoPE
//   pool     fp16   [num_pages][2·G·64·D]      pages (attention.cuh); the tokens' own K and V are in them
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
// fp32: scores, exponents, state.  fp16: the weights that multiply V (relative to the largest so far), and a.  Bytes:
// per tile and head (2·rows + 2·pages·64)·D·2, from L2 after the first tile of a sequence.
#include "prefill_work.cuh"

constexpr int kDimTiles = kHeadDim / 8;     // mma column tiles of the output
constexpr int kGroup = 4;                   // pieces of K or V in registers at once
constexpr int kRowPieces = kHeadDim / 8;    // 16-byte pieces of a K row
constexpr int kHeadPieces = kHeadElements / 8;
constexpr int kStages = 2;

// K and V of one head in a page, in shared memory.
struct Stage {
  uint4 keys[kHeadPieces];    // [64][D/8]
  uint4 values[kHeadPieces];  // [D][8]
};

// A lane's part of its warp's 16 queries: rows g and g + 8.
struct Queries {
  uint4 pieces[2][kDimPieces];
  int position[2];  // −1: none, or not among the rows that attend
};

struct State {
  float o[kDimTiles][4];
  float top[2];  // of score·scale
  float sum[2];  // of this lane's columns
};

// Where piece c of a row lies.  Two rows at a time are read, 4 pieces each: they must not meet in a bank.
DEVICE int swizzled(int row, int piece, int row_pieces) { return row * row_pieces + (piece ^ (row % 2 * 4)); }

// Starts the copy of a page's K and V of a head; one group.
DEVICE void copy_page(Stage& stage, const u16* pool, int page, int kv_head, int num_kv_heads) {
  const uint4* keys = reinterpret_cast<const uint4*>(page_keys(pool, page, kv_head, num_kv_heads));
  const uint4* values = reinterpret_cast<const uint4*>(page_values(pool, page, kv_head, num_kv_heads));
#pragma unroll
  for (int i = 0; i < kHeadPieces / kThreads; ++i) {
    const int c = i * kThreads + threadIdx.x;
    cp_async16(&stage.keys[swizzled(c / kRowPieces, c % kRowPieces, kRowPieces)], keys + c, true);
    cp_async16(&stage.values[swizzled(c / 8, c % 8, 8)], values + c, true);
  }
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

// scores[s][u] of the warp's queries against the page: tile u of step s (attention.cuh).
DEVICE void score(float (&scores)[kSteps][2][4], const Queries& queries, const Stage& stage) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int u = 0; u < 2; ++u)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[s][u][i] = 0.0f;
#pragma unroll
  for (int j = 0; j < kDimPieces; ++j) {
    const uint4 low = queries.pieces[0][j], high = queries.pieces[1][j];
#pragma unroll
    for (int first = 0; first < 2 * kSteps; first += kGroup) {
      uint4 keys[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const int token = token_of_column((first + i) / 2, (first + i) % 2, g);
        keys[i] = stage.keys[swizzled(token, 4 * j + t, kRowPieces)];
      }
#pragma unroll
      for (int i = 0; i < kGroup; ++i)
        mma_m16n8k16(scores[(first + i) / 2][(first + i) % 2], {low.x, high.x, low.y, high.y}, keys[i].x, keys[i].y);
#pragma unroll
      for (int i = 0; i < kGroup; ++i)
        mma_m16n8k16(scores[(first + i) / 2][(first + i) % 2], {low.z, high.z, low.w, high.w}, keys[i].z, keys[i].w);
    }
  }
}

// What the queries do not see becomes −inf.
DEVICE void hide(float (&scores)[kSteps][2][4], const Queries& queries, int window, int block) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Sight sight = sight_of(queries.position[half], window, block);
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int u = 0; u < 2; ++u)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (!sees(sight, token_of_column(s, u, 2 * t + i))) scores[s][u][2 * half + i] = minus_infinity();
  }
}

// Scores become weights relative to the new top; the state so far is brought to it.
DEVICE void weigh_page(State& state, float (&scores)[kSteps][2][4], float scale) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = minus_infinity();
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int u = 0; u < 2; ++u) top = fmaxf(top, fmaxf(scores[s][u][2 * half], scores[s][u][2 * half + 1]));
    top = fmaxf(state.top[half], row_max(top) * scale);
    const float base = exponent_base(top);
    const float factor = exp2_fast(state.top[half] - base);
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int u = 0; u < 2; ++u)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& value = scores[s][u][2 * half + i];
          value = weigh(value, scale, base);
          sum += value;
        }
    state.top[half] = top;
    state.sum[half] = fmaf(state.sum[half], factor, sum);
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n) {
      state.o[n][2 * half] *= factor;
      state.o[n][2 * half + 1] *= factor;
    }
  }
}

// o += weights · V.
DEVICE void mix(State& state, const float (&scores)[kSteps][2][4], const Stage& stage) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  u32 weights[kSteps][4];
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      weights[s][i] = pack_half2(scores[s][i / 2][2 * (i % 2)], scores[s][i / 2][2 * (i % 2) + 1]);
#pragma unroll
  for (int j = 0; j < kTokenPieces; ++j)
#pragma unroll
    for (int first = 0; first < kDimTiles; first += kGroup) {
      uint4 values[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) values[i] = stage.values[swizzled(8 * (first + i) + g, 4 * j + t, 8)];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) mma_m16n8k16(state.o[first + i], weights[2 * j], values[i].x, values[i].y);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) mma_m16n8k16(state.o[first + i], weights[2 * j + 1], values[i].z, values[i].w);
    }
}

// Lets the rows of a step attend, and no others.
DEVICE WarpSight select_rows(Queries& queries, const Step& step, const Rows& rows, const Tile& tile) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  int lowest = kFarPosition, highest = -1, least = kFarPosition;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = 16 * warp + g + 8 * half;
    const bool attends = i >= step.first && i < step.end;
    const int position = attends ? rows.position[i] : -1;
    queries.position[half] = position;
    highest = max(highest, position);
    if (attends) lowest = min(lowest, position);
    if (i < tile.num_rows) least = min(least, position);
  }
  lowest = reduce_min(lowest), highest = reduce_max(highest), least = reduce_min(least);
  const int any_begin = tile.window > 0 ? lowest - tile.window + 1 : 0;
  return {any_begin, highest + 1, tile.window > 0 ? highest - tile.window + 1 : 0, least + 1};
}

DEVICE void attend(State& state, const Queries& queries, const Stage& stage, const WarpSight& sight, int window,
                   int block, float scale) {
  const int begin = block * kPageTokens, end = begin + kPageTokens;
  if (end <= sight.any_begin || begin >= sight.any_end) return;
  float scores[kSteps][2][4];
  score(scores, queries, stage);
  if (begin < sight.all_begin || end > sight.all_end) hide(scores, queries, window, block);
  weigh_page(state, scores, scale);
  mix(state, scores, stage);
}

DEVICE void store(u16* a, const State& state, const Tile& tile, int head, int num_heads) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = row_sum(state.sum[half]);
    const int i = 16 * warp + g + 8 * half;
    if (i >= tile.num_rows) continue;
    const float inverse = 1.0f / sum;
    u32* row = reinterpret_cast<u32*>(a + (static_cast<u64>(tile.first_row + i) * num_heads + head) * kHeadDim);
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n)
      row[4 * n + t] = pack_half2(state.o[n][2 * half] * inverse, state.o[n][2 * half + 1] * inverse);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    prefill_attention(const u16* q, const u16* pool, const i32* tables, const i32* tiles, const i32* token_slot,
                      const i32* token_position, u16* a, i32 table_offset, i32 table_stride, i32 num_tiles,
                      i32 num_heads, i32 num_kv_heads, i32 num_sms, float scale) {
  DYNAMIC_SHARED(shared);
  Stage* stages = reinterpret_cast<Stage*>(shared);
  Rows& rows = *reinterpret_cast<Rows*>(shared + kStages * sizeof(Stage));
  const int rank = rank_of_block(num_sms), head = rank % num_heads, kv_head = head / kQueriesPerKv;
  dependency_wait();
  dependency_launch();
  const Tile tile = read_tile(tiles, num_tiles - 1 - rank / num_heads);
  if (tile.num_rows == 0) return;
  read_rows(rows, tile, token_slot, token_position);
  Queries queries;
  load_queries(queries, q, tile, head, num_heads);
  __syncthreads();

  const i32* pages = tables + table_offset;
  Step step = first_step(rows, tile), next = step;
  copy_page(stages[0], pool, pages[step.slot * table_stride + step.block], kv_head, num_kv_heads);
  bool more = advance(next, rows, tile);
  int next_page = more ? pages[next.slot * table_stride + next.block] : 0;
  WarpSight sight = select_rows(queries, step, rows, tile);
  State state = {{}, {minus_infinity(), minus_infinity()}, {0.0f, 0.0f}};
  for (int turn = 0;; ++turn) {
    cp_async_wait<0>();
    __syncthreads();  // this page is here for all, and nobody still reads the one before
    if (more) copy_page(stages[(turn + 1) % kStages], pool, next_page, kv_head, num_kv_heads);
    attend(state, queries, stages[turn % kStages], sight, tile.window, step.block, scale);
    if (!more) break;
    if (next.first != step.first || next.end != step.end) sight = select_rows(queries, next, rows, tile);
    step = next;
    more = advance(next, rows, tile);
    if (more) next_page = pages[next.slot * table_stride + next.block];
  }
  store(a, state, tile, head, num_heads);
}
