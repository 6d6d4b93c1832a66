// prefill_attention: the tokens of prompts, many per sequence, against the pages of their sequences.
//
//   a[i, h] = Σ_p w_p·V[p] / Σ_p w_p     w_p = 2^(q[i, h]·K[p]·scale)     over the positions p that token i sees
//
//   q        fp16   [T][H·D]                   turned by RoPE
//   pool     fp16   [num_pages][2·G·64·D]      pages (attention.cuh); the tokens' own K and V are in them
//   tables   int32  [slots][max_layers][max_blocks]   page of a sequence's 64-token block
//   tiles    int32  [N][6]                     slot, first row of q, rows 1..64, position of the first, window, 0
//   a        fp16   [T][H·D]                   rows of no tile are not written
//   layer, H, G, max_layers, max_blocks; scale = log2(e)/√D.   D is 64 or 128; H/G ≤ 16; 16-byte alignment.
//   A token at position x sees p iff p ≤ x and (window = 0 or p > x − window).
//
// A block is a tile and a head: 4 warps of 16 queries, which go through the tile's pages in order, K and V of the next
// page on their way to shared memory while this one is attended.  Online softmax: per query the state o, sum, top.  A
// page of which a query sees nothing leaves the bits of its state alone (factor 1, weights 0), so they depend on the
// query and its pages only: not on how the prompt was cut, nor on which queries are its neighbours.
//
// fp32: scores, exponents, state.  fp16: the weights that multiply V (relative to the largest so far), and a.  Bytes:
// per tile and head (2·rows + 2·pages·64)·D·2, from L2 after the first tile of a sequence.
#include "attention.cuh"

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kDimTiles = kHeadDim / 8;     // mma column tiles of the output
constexpr int kGroup = 4;                   // pieces of K or V in registers at once
constexpr int kRowPieces = kHeadDim / 8;    // 16-byte pieces of a K row
constexpr int kHeadPieces = kHeadElements / 8;
constexpr int kStages = 2;

struct Tile {
  int slot, first_row, num_rows, position, window;
};

// K and V of one head in a page, in shared memory.
struct Stage {
  uint4 keys[kHeadPieces];    // [64][D/8]
  uint4 values[kHeadPieces];  // [D][8]
};

// A lane's part of its warp's 16 queries: rows g and g + 8.
struct Queries {
  uint4 pieces[2][kDimPieces];
  int position[2];  // −1: no query
};

struct State {
  float o[kDimTiles][4];
  float top[2];  // of score·scale
  float sum[2];  // of this lane's columns
};

// Where piece c of a row lies.  Two rows at a time are read, 4 pieces each: they must not meet in a bank.
DEVICE int swizzled(int row, int piece, int row_pieces) { return row * row_pieces + (piece ^ (row % 2 * 4)); }

DEVICE Tile read_tile(const i32* tiles, int n) {
  const i32* tile = tiles + 6 * n;
  return {tile[0], tile[1], tile[2], tile[3], tile[4]};
}

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
    const bool exists = i < tile.num_rows;
    const u16* row = q + (static_cast<u64>(tile.first_row + i) * num_heads + head) * kHeadDim;
    queries.position[half] = exists ? tile.position + i : -1;
#pragma unroll
    for (int j = 0; j < kDimPieces; ++j) queries.pieces[half][j] = exists ? load_piece(row + 32 * j + 8 * t) : no_piece();
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

// The positions that all 16 queries of the warp see, and those that at least one does, as [begin, end).
struct WarpSight {
  int any_begin, any_end, all_begin, all_end;
};

DEVICE WarpSight sight_of_warp(const Tile& tile) {
  const int warp = threadIdx.x / 32;
  const int first = tile.position + 16 * warp, last = tile.position + min(16 * warp + 15, tile.num_rows - 1);
  if (16 * warp >= tile.num_rows) return {0, 0, 0, 0};
  return {tile.window > 0 ? first - tile.window + 1 : 0, last + 1, tile.window > 0 ? last - tile.window + 1 : 0, first + 1};
}

DEVICE void attend(State& state, const Queries& queries, const Stage& stage, const WarpSight& sight, int window, int block,
                   float scale) {
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
    prefill_attention(const u16* q, const u16* pool, const i32* tables, const i32* tiles, u16* a, i32 layer,
                      i32 num_heads, i32 num_kv_heads, i32 max_layers, i32 max_blocks, float scale) {
  DYNAMIC_SHARED(shared);
  Stage* stages = reinterpret_cast<Stage*>(shared);
  const int head = blockIdx.x, kv_head = head / kQueriesPerKv;
  dependency_wait();
  dependency_launch();
  const Tile tile = read_tile(tiles, gridDim.y - 1 - blockIdx.y);
  const i32* pages = tables + (tile.slot * max_layers + layer) * max_blocks;
  const int first_block = tile.window > 0 ? max(tile.position - tile.window + 1, 0) / kPageTokens : 0;
  const int last_block = (tile.position + tile.num_rows - 1) / kPageTokens;
  copy_page(stages[0], pool, pages[first_block], kv_head, num_kv_heads);
  int next_page = first_block < last_block ? pages[first_block + 1] : 0;

  Queries queries;
  load_queries(queries, q, tile, head, num_heads);
  const WarpSight sight = sight_of_warp(tile);
  State state = {{}, {minus_infinity(), minus_infinity()}, {0.0f, 0.0f}};
  for (int block = first_block; block <= last_block; ++block) {
    const int turn = block - first_block;
    cp_async_wait<0>();
    __syncthreads();  // this page is here for all, and nobody still reads the one before
    if (block < last_block) {
      copy_page(stages[(turn + 1) % kStages], pool, next_page, kv_head, num_kv_heads);
      if (block + 1 < last_block) next_page = pages[block + 2];
    }
    attend(state, queries, stages[turn % kStages], sight, tile.window, block, scale);
  }
  store(a, state, tile, head, num_heads);
}
