// Decode linears of many rows on sm_90a: as linear.cu, whose bits they have.
//
//   linear_qkv       q[r] = rope(s) as half; K = rope(s) and V = s as half into the row's page, or with TL_KV_ROWS
//                    into the row's kv, half [rows][2][G][D], which is then the pool (heads.cuh)
//   linear_gate_up   h[r][c] = silu(s_gate) · s_up as half
//   linear_partials  partials[blockIdx.y / cluster][r][n] = s over this cluster's parts of K; fold_norm adds them up
//   linear_logits    logits[r][n] = s
//
// weights  INT4 or half tiles (weight_tiles.cuh), num_tiles · 16 outputs × num_inputs, 16-byte aligned
// scales   half [num_tiles][num_inputs/group][8][2]; null for half weights
// x        half [rows][num_inputs], or in columns (TL_COLUMNS, columns.cuh)
// num_inputs is a multiple of max(64, group); head_dim is 16, 32, 64 …
// keep     whether the weights should stay in L2 for their next use
// Read ahead of dependency_wait, so that they must be older than the kernel in front: as linear.cu.
// Tile rows: linear.cu.
//
// Mapping, order of sums, shared memory: wide.cuh.  grid: x the outputs / (64 · warpgroups), or fewer for several
// rounds; y the slices of K, z the rows / (8 · kRowTiles).  Of all but linear_partials a cluster is all slices;
// linear_qkv has one round.
// Accumulators and epilogues are fp32; q, K, V and h are rounded once, as they are stored.
// Bytes: the weights once; x (rows · num_inputs / gridDim.y halves) by every block, out of L2.
#include "columns.cuh"
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
#ifndef TL_H_COLUMNS
#define TL_H_COLUMNS 0
#endif

// Epilogues get the sums of two rows of the batch at a time: `row` is even, x and y of the sums are tile row g's for
// row and row + 1, z and w tile row g+8's.

// An epilogue of single rows (stores.cuh), of all rows in turn.
template <class Store>
struct EachRow {
  Store row_store;
  int rows;

  DEVICE void load() {}

  DEVICE void store(int tile, int g, int row, const float4& sums) {
    if (row < rows) row_store.store(tile, g, row, sums.x, sums.z);
    if (row + 1 < rows) row_store.store(tile, g, row + 1, sums.y, sums.w);
  }
};

#if TL_EPILOGUE == QKV
// In shared memory before all else: of each row that this block finishes where it goes, then its angles
// [row][warp][kAngles], 8 cosines and 8 sines of the warp's tile.
constexpr int kOwnRows = kOwnTiles * 8;
constexpr int kAngles = 16;
constexpr int kTargetBytes = kOwnRows * sizeof(Target);
constexpr int kLookUpBytes = kTargetBytes + kOwnRows * kWarps * kAngles * 4;

struct StoreHeads {
  Pages pages;
  Heads heads;
  const float* cos;  // [max_seq_len][D/2]
  const float* sin;
  int rows, rank;
  Target* targets;   // shared
  float* angles;     // shared

  // Row i of the ith of this block's own row tiles.
  DEVICE int own_row(int tile, int i) const { return (tile * kCluster + rank) * 8 + i; }

  // Pieces of angles: [row of a row tile][warp][4], of which each thread has one for every row tile.
  DEVICE void load() {
    const int piece = threadIdx.x % 4, tile = tile_of(threadIdx.x / 4 % kWarps, 0), i = threadIdx.x / 4 / kWarps;
    int position[kOwnTiles];
#pragma unroll
    for (int n = 0; n < kOwnTiles; ++n) position[n] = own_row(n, i) < rows ? pages.position[own_row(n, i)] : -1;
    load_target();
    const int pair = tile_in_head(heads, tile) * 8 + piece % 2 * 4;
    const float* table = (piece < 2 ? cos : sin) + pair;
#pragma unroll
    for (int n = 0; n < kOwnTiles; ++n) {
      if (position[n] < 0 || !is_turned(heads, tile)) continue;
      const long long from = static_cast<long long>(position[n]) * (head_dim(heads) / 2);
      *reinterpret_cast<uint4*>(angles + (n * kThreads + threadIdx.x) * 4) =
          load_global(reinterpret_cast<const uint4*>(table + from));
    }
  }

  DEVICE void load_target() {
    if (threadIdx.x >= kOwnRows) return;
    const int row = own_row(threadIdx.x / 8, threadIdx.x % 8);
    const int position = row < rows ? pages.position[row] : -1, slot = row < rows ? slot_of(pages, row) : -1;
    targets[threadIdx.x] = target_of(pages, heads, page_of(pages, row, position, slot), position);
  }

  DEVICE void store(int tile, int g, int row, const float4& sums) {
    const int own = row / 8 / kCluster * 8 + row % 8;  // among this block's rows
    store_row(tile, g, row, own, sums.x, sums.z);
    store_row(tile, g, row + 1, own + 1, sums.y, sums.w);
  }

  DEVICE void store_row(int tile, int g, int row, int own, float low, float high) {
    const Target target = targets[own];
    if (!target.page) return;
    if (!is_turned(heads, tile)) return store_value(heads, target, tile, g, low, high);
    const float* angle = angles + (own * kWarps + threadIdx.x / 32) * kAngles + g;
    store_turned(heads, target, tile, g, row, low, high, angle[0], angle[8]);
  }
};

// position   int32 [rows], −1: a padding row, which stores nothing
// row_slot   int32 [rows]              tables  int32 [slots][max_layers][max_blocks], page ids; null with TL_KV_ROWS
// pool       half [pages][2·G·64·D]    cos, sin  float [max_seq_len][D/2]    q  half [rows][H·D]
extern "C" __global__ void CLUSTER_ALONG_Y(kCluster) __launch_bounds__(kThreads, 1)
    linear_qkv(const uint4* weights, const u32* scales, const u16* x, int rows, int num_tiles, int num_inputs, int keep,
               const i32* position, const i32* row_slot, const i32* tables, int layer, int max_layers, int max_blocks,
               u16* pool, const float* cos, const float* sin, u16* q, int num_heads, int num_kv_heads,
               int log2_head_tiles, int interleaved) {
  DYNAMIC_SHARED(shared);
  const Product p = product_of_block(weights, scales, x, rows, num_tiles, num_inputs, keep, kRowTiles * 8);
  const Heads heads = {num_heads, num_kv_heads, log2_head_tiles, interleaved != 0, q};
  const Pages pages = {position, row_slot, tables, layer, max_layers, max_blocks, pool};
  StoreHeads epilogue = {pages_from(pages, heads, p.first_row),
                         heads_from(heads, p.first_row),
                         cos,
                         sin,
                         p.rows,
                         static_cast<int>(blockIdx.y % kCluster),
                         reinterpret_cast<Target*>(shared),
                         reinterpret_cast<float*>(shared + kTargetBytes)};
  multiply_wide(p, shared + kLookUpBytes, epilogue);
}
#endif

#if TL_EPILOGUE == GATE_UP
// h in columns: neighbouring channels are two lanes', which share what they have of two rows.
struct StoreColumns {
  u32* h;

  DEVICE void load() {}

  DEVICE void store(int tile, int g, int row, const float4& sums) {
    const float first = gated(sums.x, sums.z), second = gated(sums.y, sums.w);
    const bool is_odd = g % 2 == 1;
    const float others = shuffle_xor(is_odd ? first : second, 4);
    const u32 pair = is_odd ? pack_half2(others, second) : pack_half2(first, others);
    h[word_in_columns(tile * 8 + g - g % 2, row + g % 2, kRowTiles * 8)] = pair;
  }
};

// h  half [rows][num_tiles·8], or in columns (TL_H_COLUMNS)
extern "C" __global__ void CLUSTER_ALONG_Y(kCluster) __launch_bounds__(kThreads, 1)
    linear_gate_up(const uint4* weights, const u32* scales, const u16* x, int rows, int num_tiles, int num_inputs,
                   int keep, u16* h) {
  DYNAMIC_SHARED(shared);
  const Product p = product_of_block(weights, scales, x, rows, num_tiles, num_inputs, keep, kRowTiles * 8);
  u16* h_rows = from_row(h, p.first_row, num_tiles * 8);
#if TL_H_COLUMNS
  StoreColumns epilogue = {reinterpret_cast<u32*>(h_rows)};
#else
  EachRow<StoreChannels> epilogue = {{{}, h_rows, num_tiles * 8}, p.rows};
#endif
  multiply_wide(p, shared, epilogue);
}
#endif

#if TL_EPILOGUE == PARTIALS
// partials  float [gridDim.y / cluster][rows][num_tiles·16]
extern "C" __global__ void CLUSTER_ALONG_Y(kCluster) __launch_bounds__(kThreads, 1)
    linear_partials(const uint4* weights, const u32* scales, const u16* x, int rows, int num_tiles, int num_inputs,
                    int keep, float* partials) {
  DYNAMIC_SHARED(shared);
  const Product p = product_of_block(weights, scales, x, rows, num_tiles, num_inputs, keep, kRowTiles * 8);
  const int width = num_tiles * kTileRows, partial = blockIdx.y / kCluster;
  EachRow<StoreSums> epilogue = {{{}, from_row(partials, partial * rows + p.first_row, width), width}, p.rows};
  multiply_wide(p, shared, epilogue);
}
#endif

#if TL_EPILOGUE == LOGITS
// logits  float [rows][num_tiles·16]
extern "C" __global__ void CLUSTER_ALONG_Y(kCluster) __launch_bounds__(kThreads, 1)
    linear_logits(const uint4* weights, const u32* scales, const u16* x, int rows, int num_tiles, int num_inputs,
                  int keep, float* logits) {
  DYNAMIC_SHARED(shared);
  const Product p = product_of_block(weights, scales, x, rows, num_tiles, num_inputs, keep, kRowTiles * 8);
  const int width = num_tiles * kTileRows;
  EachRow<StoreSums> epilogue = {{{}, from_row(logits, p.first_row, width), width}, p.rows};
  multiply_wide(p, shared, epilogue);
}
#endif
