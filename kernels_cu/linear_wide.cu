// Decode linears of many rows on sm_90a: as linear.cu, whose bits they have.
//
//   linear_qkv       q[r] = rope(s) as half; K = rope(s) and V = s as half into the row's page (heads.cuh)
//   linear_gate_up   h[r][c] = silu(s_gate) · s_up as half
//   linear_partials  partials[blockIdx.y / cluster][r][n] = s over this cluster's parts of K; fold_norm adds them up
//   linear_logits    logits[r][n] = s
//
// weights  INT4 or half tiles (weight_tiles.cuh), num_tiles · 16 outputs × num_inputs, 16-byte aligned
// scales   half [num_tiles][num_inputs/group][8][2]; null for half weights
// x        half [rows][num_inputs]
// num_inputs is a multiple of max(64, group); head_dim is 16, 32, 64 …
// keep     whether the weights should stay in L2 for their next use
// Tile rows: linear.cu.
//
// Mapping, order of sums, shared memory: wide.cuh.  grid: x the outputs / (64 · warpgroups), or fewer for several
// rounds; y the slices of K.  Of all but linear_partials a cluster is all slices;
// linear_qkv has one round.
// Accumulators and epilogues are fp32; q, K, V and h are rounded once, as they are stored.
// Bytes: the weights once; x (rows · num_inputs / gridDim.y halves) by every block, out of L2.
#include "heads.cuh"
#include "stores.cuh"
#include "wide.cuh"

#define QKV 0
#define GATE_UP 1
#define PARTIALS 2
#define LOGITS 3
#ifndef TL_EPILOGUE
#define TL_EPILOGUE PARTIALS
#endif

#if TL_EPILOGUE == QKV
// Of each of this lane's rows, in shared memory, [row][what][thread]: looked up while the product runs.
constexpr int kOwnRows = kOwnTiles * 2;
constexpr int kLookUps = 3;  // page, cosine, sine
constexpr int kLookUpBytes = kOwnRows * kLookUps * kThreads * 4;

struct StoreHeads {
  Pages pages;
  Heads heads;
  const float* cos;  // [max_seq_len][D/2]
  const float* sin;
  int rows, rank;
  i32* found;        // this thread's
  int tile;
  int at[kOwnRows], slot[kOwnRows];

  DEVICE void load(int first_tile) {
    tile = first_tile;
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const int row = (i / 2 * kCluster + rank) * 8 + threadIdx.x % 4 * 2 + i % 2;
      at[i] = row < rows ? pages.position[row] : -1;
      slot[i] = row < rows ? pages.row_slot[row] : -1;
    }
  }

  DEVICE void prepare() {
    const int pair = tile_in_head(heads, tile) * 8 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      if (at[i] < 0 || slot[i] < 0) continue;
      i32* to = found + i * kLookUps * kThreads;
      cp_async4(to, page_of(pages, at[i], slot[i]));
      if (!is_turned(heads, tile)) continue;
      const long long from = static_cast<long long>(at[i]) * (head_dim(heads) / 2) + pair;
      cp_async4(to + kThreads, cos + from);
      cp_async4(to + 2 * kThreads, sin + from);
    }
  }

  DEVICE void finish() { cp_async_wait<0>(); }

  DEVICE void store(int, int g, int row, float low, float high) {
    const int i = row / 8 / kCluster * 2 + row % 2;
    const i32* from = found + i * kLookUps * kThreads;
    if (at[i] < 0 || slot[i] < 0) return;
    const Target target = target_of(pages, heads, from[0], at[i]);
    if (!is_turned(heads, tile)) return store_value(heads, target, tile, g, low, high);
    store_turned(heads, target, tile, g, row, low, high, __int_as_float(from[kThreads]),
                 __int_as_float(from[2 * kThreads]));
  }
};

// position   int32 [rows], −1: a padding row, which stores nothing
// row_slot   int32 [rows]              tables  int32 [slots][max_layers][max_blocks], page ids
// pool       half [pages][2·G·64·D]    cos, sin  float [max_seq_len][D/2]    q  half [rows][H·D]
extern "C" __global__ void CLUSTER_ALONG_Y(kCluster) __launch_bounds__(kThreads, 1)
    linear_qkv(const uint4* weights, const u32* scales, const u16* x, int rows, int num_tiles, int num_inputs, int keep,
               const i32* position, const i32* row_slot, const i32* tables, int layer, int max_layers, int max_blocks,
               u16* pool, const float* cos, const float* sin, u16* q, int num_heads, int num_kv_heads,
               int log2_head_tiles, int interleaved) {
  DYNAMIC_SHARED(shared);
  const Product p = {weights, scales, x, rows, num_tiles, num_inputs, keep != 0};
  StoreHeads epilogue = {{position, row_slot, tables, layer, max_layers, max_blocks, pool},
                         {num_heads, num_kv_heads, log2_head_tiles, interleaved != 0, q},
                         cos,
                         sin,
                         rows,
                         static_cast<int>(blockIdx.y % kCluster),
                         reinterpret_cast<i32*>(shared) + threadIdx.x};
  multiply_wide(p, shared + kLookUpBytes, epilogue);
}
#endif

#if TL_EPILOGUE == GATE_UP
// h  half [rows][num_tiles·8]
extern "C" __global__ void CLUSTER_ALONG_Y(kCluster) __launch_bounds__(kThreads, 1)
    linear_gate_up(const uint4* weights, const u32* scales, const u16* x, int rows, int num_tiles, int num_inputs,
                   int keep, u16* h) {
  DYNAMIC_SHARED(shared);
  StoreChannels epilogue = {{}, h, num_tiles * 8};
  multiply_wide({weights, scales, x, rows, num_tiles, num_inputs, keep != 0}, shared, epilogue);
}
#endif

#if TL_EPILOGUE == PARTIALS
// partials  float [gridDim.y / cluster][rows][num_tiles·16]
extern "C" __global__ void CLUSTER_ALONG_Y(kCluster) __launch_bounds__(kThreads, 1)
    linear_partials(const uint4* weights, const u32* scales, const u16* x, int rows, int num_tiles, int num_inputs,
                    int keep, float* partials) {
  DYNAMIC_SHARED(shared);
  const int width = num_tiles * kTileRows, partial = blockIdx.y / kCluster;
  StoreSums epilogue = {{}, partials + static_cast<long long>(partial) * rows * width, width};
  multiply_wide({weights, scales, x, rows, num_tiles, num_inputs, keep != 0}, shared, epilogue);
}
#endif

#if TL_EPILOGUE == LOGITS
// logits  float [rows][num_tiles·16]
extern "C" __global__ void CLUSTER_ALONG_Y(kCluster) __launch_bounds__(kThreads, 1)
    linear_logits(const uint4* weights, const u32* scales, const u16* x, int rows, int num_tiles, int num_inputs,
                  int keep, float* logits) {
  DYNAMIC_SHARED(shared);
  StoreSums epilogue = {{}, logits, num_tiles * kTileRows};
  multiply_wide({weights, scales, x, rows, num_tiles, num_inputs, keep != 0}, shared, epilogue);
}
#endif
