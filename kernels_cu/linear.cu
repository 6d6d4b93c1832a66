// Decode linears: s[r][n] = Σ_k weight[n][k] · x[r][k] for the rows r of a batch, and what each linear's sums become.
//
//   linear_qkv       q[r] = rope(s) as half; K = rope(s) and V = s as half into the row's page (qkv.cuh), or with TL_KV_ROWS
//                    into the row's kv, half [rows][2][G][D], which is then the pool; q or K and V alone
//   linear_gate_up   h[r][c] = silu(s_gate) · s_up as half
//   linear_partials  partials[blockIdx.y][r][n] = s over this block's parts of K; fold_norm adds them up
//   linear_logits    logits[r][n] = s
//
// weights  INT4 or half tiles (weight_tiles.cuh), num_tiles · 16 outputs × num_inputs, 16-byte aligned
// scales   half [num_tiles][num_inputs/group][8][2]; null for half weights
// x        half [rows][num_inputs]
// num_inputs is a multiple of max(64, group); head_dim is 16, 32, 64 …
// keep     whether the weights should stay in L2 for their next use
// Read ahead of dependency_wait, so that they must be older than the kernel in front: weights, scales, gains; of qkv,
// positions, slots, tables, cos and sin.
//
// Instead of x, qkv, gate_up and logits of up to 4 rows (TL_FOLD_ROWS) take the residual stream and do fold_norm's work
// themselves, with its bits (fold_row.cuh, whose names the parameters have): stream and partials are read, stream_out
// and injected written; stream_out is other memory than stream.
//
// Tile rows: of qkv, tile row g and g+8 of a query or key head are a RoPE pair (i = 8·(tile in head) + g turns i with
// i + head_dim/2, or 2i with 2i+1), value heads are in order; of gate_up, g is the gate and g+8 the up of channel
// 8·tile + g; the others are in order.
//
// Mapping, order of sums, shared memory: matmul.cuh, held.cuh.  grid: x the tiles / (kWarpsM · kTiles), y the partials,
// z the rows / (8 · kRowTiles); 256 threads.  Accumulators and epilogues are fp32; q, K, V and h are rounded once, as
// they are stored.
// Bytes: the weights once; x (rows · num_inputs / gridDim.y halves) by every block, out of L2.
#include "fold_row.cuh"
#include "held.cuh"
#include "qkv.cuh"
#include "stores.cuh"

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

constexpr int kFoldRows = TL_FOLD_ROWS;  // 0: x is given; else the number of rows, and x comes out of the stream
constexpr int kScratchBytes = (kFoldRows * kFoldScratch * 4 + 255) / 256 * 256;  // before the rings
static_assert(kFoldRows == 0 || (kResident && kRowTiles == 1));

// The stream as the kernels get it.  Only the first thread block stores it, and what is injected.
DEVICE Fold fold_of(const float* stream, float* stream_out, const float* partials, int num_partials,
                    const u16* post_gain, const u16* loop_gain, const u16* gain, int inject, float* injected, float eps,
                    const Product& p) {
  float* out = blockIdx.x == 0 ? stream_out : nullptr;
  const float inverse_width = 1.0f / static_cast<float>(p.num_inputs);
  return {stream, out,      partials, num_partials, post_gain, loop_gain,    gain,
          inject, injected, p.rows,   p.num_inputs, eps,       inverse_width};
}

// x as it lies in shared memory, out of the residual stream: every thread block for itself.
template <int kRows>
DEVICE void fold_x(const Product& p, uint4* to, const Fold& f, const Gains& gains, float* scratch) {
  uint2* x = reinterpret_cast<uint2*>(to);
  fold_rows<kRows>(f, gains, 0, scratch, [&](int row, int column, uint2 halves) {
    const int half_block = column / 32, in_half = column % 32 / 4;
    x[(half_block * p.rows + row) * 8 + in_half] = halves;
  });
}

// Everything, out of rings.  Epilogue: as StoreHeads in qkv.cuh.
template <class Epilogue>
DEVICE void matmul_in_rings(const Product& p, const Fold& fold, unsigned char* shared, Epilogue& epilogue) {
  unsigned char* rings = shared + kScratchBytes;
  const u64 policy = cache_policy(p.keep);
  const Share share = take_share(p, rings);
  Sums sums[kWarpParts] = {};
  start_weights(p, share, policy);
  epilogue.load();
  dependency_launch();
  epilogue.prepare();
  if constexpr (kFoldRows > 0) {
    const Gains gains = load_gains(fold);
    dependency_wait();
    fold_x<kFoldRows>(p, share.x, fold, gains, reinterpret_cast<float*>(shared));
    for (int stage = 0; stage < kDepth - 1; ++stage) cp_async_commit();
  } else {
    dependency_wait();
    start_x(p, share);
  }
  multiply<(kFoldRows > 0)>(sums, p, share, policy);
  epilogue.finish();
  reduce_and_store(sums, p, share, rings, epilogue);
}

// Everything, all weights held.  Few rows leave the kernels in front so little to do that the start of two more kernels
// at once is in their way: there the next one is let in after the wait.  (One H200, a whole step: 8 % faster for one
// row, 3 % for two, 11 % for four, no difference for eight.)
template <class Epilogue>
DEVICE void matmul_held(const Product& p, const Fold& fold, unsigned char* shared, Epilogue& epilogue) {
  const Held held = take_held(p, shared + kScratchBytes);
  const bool is_late = p.rows <= 4;
  Sums sums[kWarpParts] = {};
  hold_weights(p, held, cache_policy(p.keep));
  epilogue.load();
  if (!is_late) dependency_launch();
  epilogue.prepare();
  Unpacked unpacked;
  if constexpr (kUnpacksAhead) {
    if (p.rows > 0) unpack_all(unpacked, held);  // always; without a branch the compiler moves it behind the wait
  }
  if constexpr (kFoldRows > 0) {
    const Gains gains = load_gains(fold);
    dependency_wait();
    if (is_late) dependency_launch();
    fold_x<kFoldRows>(p, held.x, fold, gains, reinterpret_cast<float*>(shared));
  } else {
    dependency_wait();
    if (is_late) dependency_launch();
    hold_x(p, held);
  }
  cp_async_commit();
  epilogue.finish();
  cp_async_wait<0>();
  __syncthreads();
  multiply_held(sums, p, held, unpacked);
  reduce_held(sums, p, held, epilogue);
}

template <class Epilogue>
DEVICE void matmul(const Product& p, const Fold& fold, unsigned char* shared, Epilogue epilogue) {
  if constexpr (kHeldBlocks > 0) matmul_held(p, fold, shared, epilogue);
  else matmul_in_rings(p, fold, shared, epilogue);
}

#if TL_EPILOGUE == QKV
// position   int32 [rows], −1: a padding row, which stores nothing
// row_slot   int32 [rows]              tables  int32 [slots][max_layers][max_blocks], page ids; null with TL_KV_ROWS
// pool       half [pages][2·G·64·D]    cos, sin  float [max_seq_len][D/2]    q  half [rows][H·D]
extern "C" __global__ void __launch_bounds__(kThreads)
    linear_qkv(const uint4* weights, const u32* scales, const u16* x, int rows, int num_tiles, int num_inputs, int keep,
               const float* stream, float* stream_out, const float* partials, int num_partials, const u16* post_gain,
               const u16* loop_gain, const u16* gain, int inject, float* injected, float eps, const i32* position,
               const i32* row_slot, const i32* tables, int layer, int max_layers, int max_blocks, u16* pool,
               const float* cos, const float* sin, u16* q, int num_heads, int num_kv_heads, int log2_head_tiles,
               int interleaved) {
  DYNAMIC_SHARED(shared);
  const Product p = product_of_block(weights, scales, x, rows, num_tiles, num_inputs, keep, kRowTiles * 8);
  const Fold fold = fold_of(stream, stream_out, partials, num_partials, post_gain, loop_gain, gain, inject, injected,
                            eps, p);
  const Heads heads = {num_heads, num_kv_heads, log2_head_tiles, interleaved != 0, q};
  const Pages pages = {position, row_slot, tables, layer, max_layers, max_blocks, pool};
  StoreHeads epilogue = {pages_from(pages, heads, p.first_row),
                         heads_from(heads, p.first_row),
                         cos,
                         sin,
                         p.rows,
                         reinterpret_cast<Target*>(shared),
                         reinterpret_cast<float*>(shared + kTargetBytes)};
  matmul(p, fold, shared + qkv_bytes(p.rows), epilogue);
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
  const Product p = product_of_block(weights, scales, x, rows, num_tiles, num_inputs, keep, kRowTiles * 8);
  const Fold fold = fold_of(stream, stream_out, partials, num_partials, post_gain, loop_gain, gain, inject, injected,
                            eps, p);
  matmul(p, fold, shared, StoreChannels{{}, from_row(h, p.first_row, num_tiles * 8), num_tiles * 8});
}
#endif

#if TL_EPILOGUE == PARTIALS
// partials  float [gridDim.y][rows][num_tiles·16]
extern "C" __global__ void __launch_bounds__(kThreads)
    linear_partials(const uint4* weights, const u32* scales, const u16* x, int rows, int num_tiles, int num_inputs,
                    int keep, float* partials) {
  DYNAMIC_SHARED(shared);
  const Product p = product_of_block(weights, scales, x, rows, num_tiles, num_inputs, keep, kRowTiles * 8);
  const int width = num_tiles * kTileRows;
  matmul(p, {}, shared, StoreSums{{}, from_row(partials, blockIdx.y * rows + p.first_row, width), width});
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
  const Product p = product_of_block(weights, scales, x, rows, num_tiles, num_inputs, keep, kRowTiles * 8);
  const Fold fold = fold_of(stream, stream_out, partials, num_partials, post_gain, loop_gain, gain, inject, injected,
                            eps, p);
  const int width = num_tiles * kTileRows;
  matmul(p, fold, shared, StoreSums{{}, from_row(logits, p.first_row, width), width});
}
#endif
