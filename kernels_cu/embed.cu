// embed: token ids → rows of the residual stream, and rows of a matrix by index.
//
//   embed          x[r] = table[token[row_slot[r]]],  position[r] = length[row_slot[r]]      a decode step's first kernel
//   embed_prompt   x[t] = table[ids[t]]                                                       prompt tokens
//   gather_rows    out[i] = x[index[i]]
//
//   table      fp16   [V][d]     d a multiple of 8
//   row_slot   int32  [R]        a row's slot, −1: padding, which gets zeros and position −1
//   token      int32  [S]        of every slot, what was sampled last; negative: it has ended, as padding
//   length     int32  [S]        of every slot, tokens stored: the position of the token fed now
//   ids        int32  [T]        negative reads row 0
//   x          fp32   [R or T][d]
//   position   int32  [R]
//   gather_rows: x fp32 [T][E], index int32 [n], out fp32 [n][E], E a multiple of 4
//
// A block of 256 threads for every row, 16 bytes read at a time.  fp16 → fp32 is exact: nothing is rounded.
// Bytes: 6·d a row; gather_rows 8·E.
#include "ptx.cuh"

constexpr int kThreads = 256;
constexpr int kHalves = 8;  // of a uint4

DEVICE float4 widen(u32 first, u32 second) {
  return make_float4(half_to_float(first & 0xffff), half_to_float(first >> 16), half_to_float(second & 0xffff),
                     half_to_float(second >> 16));
}

// x[0..d) = source[0..d), or zeros where source is null.
DEVICE void write_row(float* x, const u16* source, i32 d) {
  float4* target = reinterpret_cast<float4*>(x);
  for (int piece = threadIdx.x; piece < d / kHalves; piece += kThreads) {
    uint4 halves = {0, 0, 0, 0};
    if (source) halves = load_global(reinterpret_cast<const uint4*>(source) + piece);
    target[2 * piece] = widen(halves.x, halves.y);
    target[2 * piece + 1] = widen(halves.z, halves.w);
  }
}

DEVICE const u16* table_row(const u16* table, i32 id, i32 d) {
  return table + static_cast<long long>(id < 0 ? 0 : id) * d;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    embed(const u16* table, const i32* row_slot, const i32* token, const i32* length, float* x, i32* position, i32 d) {
  dependency_wait();
  dependency_launch();
  const int row = blockIdx.x, slot = row_slot[row];
  const i32 id = slot < 0 ? -1 : token[slot];
  if (threadIdx.x == 0) position[row] = id < 0 ? -1 : length[slot];
  write_row(x + static_cast<long long>(row) * d, id < 0 ? nullptr : table_row(table, id, d), d);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    embed_prompt(const u16* table, const i32* ids, float* x, i32 d) {
  dependency_wait();
  dependency_launch();
  write_row(x + static_cast<long long>(blockIdx.x) * d, table_row(table, ids[blockIdx.x], d), d);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    gather_rows(const float4* x, const i32* index, float4* out, i32 pieces) {
  dependency_wait();
  dependency_launch();
  const float4* source = x + static_cast<long long>(index[blockIdx.x]) * pieces;
  float4* target = out + static_cast<long long>(blockIdx.x) * pieces;
  for (int piece = threadIdx.x; piece < pieces; piece += kThreads) target[piece] = source[piece];
}
