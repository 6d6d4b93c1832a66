// append: the newest token of every decoding row, which linear_qkv left in a scratch page in fp16, into its int8 page.
//
//   levels, scale = coding of K[row][g][·], and of V[row][g][·]       int8_pages.cuh
//
//   scratch    fp16   [R][2·G·64·D]          an fp16 page a row; row r's token is at position[r] % 64
//   position   int32  [R]                    negative: a padding row, nothing is written
//   row_slot   int32  [R]                    likewise
//   tables     int32  [slots][max_layers][max_blocks]   page of a sequence's 64-token block
//   pool       int8   [num_pages][64·G·(2·D + 4)]       pages
//   layer, R, G, max_layers, max_blocks.   D is 64 or 128; 16-byte alignment.
//
// A warp for every vector of D elements, four warps a block; lane i has elements i, i + 32 …  V lies across its page,
// in the scratch as in the pool, so an element of it is a sector of memory of its own; that is what it costs.
// Where rows go is looked up before the wait: positions, slots and tables must be older than the kernel in front.
// fp32: the coding.  Bytes: 3·2·G·D a row, and as sectors of V 64·G·D.
#include "int8_pages.cuh"

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kElements = kHeadDim / 32;  // of a lane

struct Vector {
  int row, head;  // head: K of g, or G + g: V of g
  int place;      // of the token in its page
  int page;       // −1: nothing is to do
};

DEVICE Vector find_vector(int unit, const i32* position, const i32* row_slot, const i32* tables, int layer,
                          int num_rows, int num_kv_heads, int max_layers, int max_blocks) {
  const int row = unit / (2 * num_kv_heads), head = unit - row * 2 * num_kv_heads;
  const int at = row < num_rows ? position[row] : -1, slot = row < num_rows ? row_slot[row] : -1;
  if (at < 0 || slot < 0) return {row, head, 0, -1};
  return {row, head, at % kPageTokens, tables[(slot * max_layers + layer) * max_blocks + at / kPageTokens]};
}

// In a page, of K (a row of D) or of V (a column).
DEVICE int element_of(const Vector& v, int dim, int num_kv_heads) {
  const bool key = v.head < num_kv_heads;
  return v.head * kHeadElements + (key ? v.place * kHeadDim + dim : dim * kPageTokens + v.place);
}

DEVICE u32 largest_in_warp(u32 largest) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) largest = max(largest, shuffle_xor(largest, mask));
  return largest;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    append_int8(const u16* scratch, const i32* position, const i32* row_slot, const i32* tables, Stored* pool,
                i32 layer, i32 num_rows, i32 num_kv_heads, i32 max_layers, i32 max_blocks) {
  const int unit = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  const Vector v = find_vector(unit, position, row_slot, tables, layer, num_rows, num_kv_heads, max_layers, max_blocks);
  dependency_launch();
  dependency_wait();
  if (v.page < 0) return;
  const u16* source = scratch + static_cast<u64>(v.row) * 2 * num_kv_heads * kHeadElements;
  float x[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) x[i] = half_to_float(source[element_of(v, lane + 32 * i, num_kv_heads)]);
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < kElements; ++i) largest = max(largest, magnitude_of(x[i]));
  const Scale scale = int8_scale(largest_in_warp(largest));
  Stored* levels = levels_of_head(pool, v.page, 0, num_kv_heads);
#pragma unroll
  for (int i = 0; i < kElements; ++i)
    levels[element_of(v, lane + 32 * i, num_kv_heads)] = static_cast<Stored>(int8_level(x[i], scale));
  if (lane == 0) scales_of_head(pool, v.page, v.head, num_kv_heads)[v.place] = scale.half;
}
