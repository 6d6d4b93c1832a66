// Decode linears: s[r][n] = Σ_k weight[n][k] · x[r][k] for 1 to 64 rows r, and what each linear's sums become.
//
//   linear_qkv       q[r] = rope(s) as half; K = rope(s) and V = s as half into the row's page
//   linear_gate_up   h[r][c] = silu(s_gate) · s_up as half
//   linear_partials  partials[blockIdx.y][r][n] = s over this block's parts of K; fold_norm adds them up
//   linear_logits    logits[r][n] = s
//
// weights  INT4 or half tiles (weight_tiles.cuh), num_tiles · 16 outputs × num_inputs, 16-byte aligned
// scales   half [num_tiles][num_inputs/group][8][2]; null for half weights
// x        half [rows][num_inputs]
// num_inputs is a multiple of max(64, group); head_dim of 16.  keep: may the weights stay in L2 for their next use?
//
// Instead of x, qkv, gate_up and logits of up to 4 rows (TL_FOLD_ROWS) take the residual stream and do fold_norm's work
// themselves, with its bits (fold_row.cuh, whose names the parameters have): stream and partials are read, stream_out
// and injected written; stream_out is other memory than stream.
//
// Tile rows: of qkv, tile row g and g+8 of a query or key head are a RoPE pair (i = 8·(tile in head) + g turns i with
// i + head_dim/2, or 2i with 2i+1), value heads are in order; of gate_up, g is the gate and g+8 the up of channel
// 8·tile + g; the others are in order.
//
// Mapping, order of sums, shared memory: matmul.cuh.  grid: x the tiles / (kWarpsM · kTiles), y the partials; 256
// threads.  Accumulators and epilogues are fp32; q, K, V and h are rounded once, as they are stored.
// Bytes: the weights once; x (rows · num_inputs / gridDim.y halves) by every block, out of L2.
#include "fold_row.cuh"
#include "matmul.cuh"

#define QKV 0
#define GATE_UP 1
#define PARTIALS 2
#define LOGITS 3
#ifndef TL_EPILOGUE
#define TL_EPILOGUE PARTIALS
#endif

#ifndef TL_FOLD_ROWS
#define TL_FOLD_ROWS 0
#endif

constexpr int kFoldRows = TL_FOLD_ROWS;  // 0: x is given; else the number of rows, and x comes out of fold_row.cuh
constexpr int kScratchBytes = 16 * 16 * ((kFoldRows * kFoldScratch * 4 + 255) / 256);  // before the rings
static_assert(kFoldRows == 0 || (kResident && kRowTiles == 1));

// The stream as the kernels get it.  Only the first thread block stores it, and what is injected.
DEVICE Fold fold_of(const float* stream, float* stream_out, const float* partials, int num_partials, const u16* post_gain,
                    const u16* loop_gain, const u16* gain, int inject, float* injected, const Product& p, float eps) {
  float* out = blockIdx.x == 0 ? stream_out : nullptr;
  return {stream, out, partials, num_partials, post_gain, loop_gain, gain, inject, injected, p.rows, p.num_inputs, eps};
}

// x as the rings keep it, out of the residual stream: every thread block for itself.
template <int kRows>
DEVICE void fold_x(const Product& p, const Share& s, const Fold& f, const Gains& gains, float* scratch) {
  uint2* x = reinterpret_cast<uint2*>(s.x);
  fold_rows<kRows>(f, gains, 0, scratch, [&](int row, int column, uint2 halves) {
    const int block = column / kBlockInputs, half = column / 32 % 2, in_half = column % 32 / 4;
    x[((block * 2 + half) * p.rows + row) * 8 + in_half] = halves;
  });
  for (int stage = 0; stage < kDepth - 1; ++stage) cp_async_commit();
}

// Everything but the epilogue.  prepare() runs while x is under way.
template <class Prepare, class Store>
DEVICE void matmul(const Product& p, const Fold& fold, unsigned char* shared, Prepare prepare, Store store) {
  unsigned char* rings = shared + kScratchBytes;
  const u64 policy = cache_policy(p.keep);
  const Share share = take_share(p, rings);
  Sums sums[kWarpParts] = {};
  start_weights(p, share, policy);
  dependency_launch();
  if constexpr (kFoldRows > 0) {
    const Gains gains = load_gains(fold);
    dependency_wait();
    prepare();
    fold_x<kFoldRows>(p, share, fold, gains, reinterpret_cast<float*>(shared));
  } else {
    dependency_wait();
    start_x(p, share);
    prepare();
  }
  multiply<(kFoldRows > 0)>(sums, p, share, policy);
  reduce_and_store(sums, p, share, rings, store);
}

#if TL_EPILOGUE == QKV
constexpr int kPageTokens = 64;
constexpr int kTargetBytes = 64 * 16;

// Where the key and the value of one row of the batch go: a page is K [G][64][D], then V transposed [G][D][64].
struct Target {
  u16* page;     // null: a padding row
  int position;  // absolute
};

struct Heads {
  int num_heads, num_kv_heads, head_dim;
  bool interleaved;
};

DEVICE Target find_target(int row, const i32* position, const i32* row_slot, const i32* tables, int layer,
                          int max_layers, int max_blocks, u16* pool, int page_size) {
  const int at = position[row], slot = row_slot[row];
  if (at < 0 || slot < 0) return {nullptr, -1};
  const i32 page = tables[(static_cast<long long>(slot) * max_layers + layer) * max_blocks + at / kPageTokens];
  return {pool + static_cast<long long>(page) * page_size, at};
}

struct Pair {
  float first, second;
};

DEVICE Pair turn(float a, float b, float cos, float sin) {
  return {fmaf(a, cos, -(b * sin)), fmaf(b, cos, a * sin)};
}

DEVICE void store_rotated(const Heads& h, const Target& target, int head, int i, const Pair& value, u16* q_row) {
  const int first = h.interleaved ? 2 * i : i, second = h.interleaved ? 2 * i + 1 : i + h.head_dim / 2;
  u16* to = head < h.num_heads ? q_row + head * h.head_dim
                               : target.page + ((head - h.num_heads) * kPageTokens + target.position % kPageTokens) * h.head_dim;
  to[first] = float_to_half(value.first);
  to[second] = float_to_half(value.second);
}

DEVICE void store_value(const Heads& h, const Target& target, int head, int dim, float low, float high) {
  u16* to = target.page + (h.num_kv_heads + head) * kPageTokens * h.head_dim + target.position % kPageTokens;
  to[dim * kPageTokens] = float_to_half(low);
  to[(dim + 8) * kPageTokens] = float_to_half(high);
}

// position   int32 [rows], −1: a padding row, which stores nothing
// row_slot   int32 [rows]              tables  int32 [slots][max_layers][max_blocks], page ids
// pool       half [pages][2·G·64·D]    cos, sin  float [max_seq_len][D/2]    q  half [rows][H·D]
extern "C" __global__ void __launch_bounds__(kThreads)
    linear_qkv(const uint4* weights, const u32* scales, const u16* x, int rows, int num_tiles, int num_inputs, int keep,
               const float* stream, float* stream_out, const float* partials, int num_partials, const u16* post_gain,
               const u16* loop_gain, const u16* gain, int inject, float* injected, float eps, const i32* position,
               const i32* row_slot, const i32* tables, int layer, int max_layers, int max_blocks, u16* pool,
               const float* cos, const float* sin, u16* q, int num_heads, int num_kv_heads, int head_dim,
               int interleaved) {
  DYNAMIC_SHARED(shared);
  Target* targets = reinterpret_cast<Target*>(shared);  // [rows], before the rest
  const Heads heads = {num_heads, num_kv_heads, head_dim, interleaved != 0};
  const Product p = {weights, scales, x, rows, num_tiles, num_inputs, keep != 0};
  const Fold fold = fold_of(stream, stream_out, partials, num_partials, post_gain, loop_gain, gain, inject, injected, p, eps);
  auto find_targets = [&] {
    if (threadIdx.x < rows)
      targets[threadIdx.x] = find_target(threadIdx.x, position, row_slot, tables, layer, max_layers, max_blocks, pool,
                                         2 * num_kv_heads * kPageTokens * head_dim);
  };
  matmul(p, fold, shared + kTargetBytes, find_targets, [&](int tile, int g, int row, float low, float high) {
    const Target target = targets[row];
    if (!target.page) return;
    const int tiles_per_head = head_dim / kTileRows, head = tile / tiles_per_head, tile_in_head = tile % tiles_per_head;
    if (head < num_heads + num_kv_heads) {
      const int i = tile_in_head * 8 + g;
      const long long angle = static_cast<long long>(target.position) * (head_dim / 2) + i;
      store_rotated(heads, target, head, i, turn(low, high, cos[angle], sin[angle]),
                    q + static_cast<long long>(row) * num_heads * head_dim);
    } else {
      store_value(heads, target, head - num_heads - num_kv_heads, tile_in_head * kTileRows + g, low, high);
    }
  });
}
#endif

#if TL_EPILOGUE == GATE_UP
// h  half [rows][num_tiles·8]
extern "C" __global__ void __launch_bounds__(kThreads)
    linear_gate_up(const uint4* weights, const u32* scales, const u16* x, int rows, int num_tiles, int num_inputs,
                   int keep, const float* stream, float* stream_out, const float* partials, int num_partials,
                   const u16* post_gain, const u16* loop_gain, const u16* gain, int inject, float* injected, float eps,
                   u16* h) {
  DYNAMIC_SHARED(shared);
  const Product p = {weights, scales, x, rows, num_tiles, num_inputs, keep != 0};
  const Fold fold = fold_of(stream, stream_out, partials, num_partials, post_gain, loop_gain, gain, inject, injected, p, eps);
  matmul(p, fold, shared, [] {}, [&](int tile, int g, int row, float gate, float up) {
    const float silu = gate / (1.0f + exp2_fast(gate * -1.44269504f));  // far below zero: −x / inf = −0
    h[static_cast<long long>(row) * num_tiles * 8 + tile * 8 + g] = float_to_half(silu * up);
  });
}
#endif

#if TL_EPILOGUE == PARTIALS
// partials  float [gridDim.y][rows][num_tiles·16]
extern "C" __global__ void __launch_bounds__(kThreads)
    linear_partials(const uint4* weights, const u32* scales, const u16* x, int rows, int num_tiles, int num_inputs,
                    int keep, float* partials) {
  DYNAMIC_SHARED(shared);
  const Product p = {weights, scales, x, rows, num_tiles, num_inputs, keep != 0};
  matmul(p, {}, shared, [] {}, [&](int tile, int g, int row, float low, float high) {
    const long long start = (static_cast<long long>(blockIdx.y) * rows + row) * num_tiles * kTileRows;
    partials[start + tile * kTileRows + g] = low;
    partials[start + tile * kTileRows + g + 8] = high;
  });
}
#endif

#if TL_EPILOGUE == LOGITS
// logits  float [rows][num_tiles·16]
extern "C" __global__ void __launch_bounds__(kThreads)
    linear_logits(const uint4* weights, const u32* scales, const u16* x, int rows, int num_tiles, int num_inputs,
                  int keep, const float* stream, float* stream_out, const float* partials, int num_partials,
                  const u16* post_gain, const u16* loop_gain, const u16* gain, int inject, float* injected, float eps,
                  float* logits) {
  DYNAMIC_SHARED(shared);
  const Product p = {weights, scales, x, rows, num_tiles, num_inputs, keep != 0};
  const Fold fold = fold_of(stream, stream_out, partials, num_partials, post_gain, loop_gain, gain, inject, injected, p, eps);
  matmul(p, fold, shared, [] {}, [&](int tile, int g, int row, float low, float high) {
    const long long start = static_cast<long long>(row) * num_tiles * kTileRows;
    logits[start + tile * kTileRows + g] = low;
    logits[start + tile * kTileRows + g + 8] = high;
  });
}
#endif
