// append: the newest token of every decoding row, which linear_qkv left in fp16, into its int8 page.
//
//   levels, scale = coding of K[row][g][·], and of V[row][g][·]       int8_pages.cuh
//
//   kv         fp16   [R][2][G][D]           K of a row's token, V
//   position   int32  [R]                    negative: a padding row, nothing is written
//   row_slot   int32  [R]                    likewise
//   tables     int32  [slots][max_layers][max_blocks]   page of a sequence's 64-token block
//   pool       int8   [num_pages][64·G·(2·D + 4)]       pages
//   layer, R, G, max_layers, max_blocks.   D is 64 or 128; 16-byte alignment.
//
// A warp for every vector of D elements, four warps a block; lane i has the elements 2i and 2i + 1 of every 64.  Of V
// that is two neighbouring pieces (stored.cuh), of which it replaces a byte each: they are read whole, before the wait,
// and written whole, so that a token's V of a head costs a few stores of whole lines.  Before the wait: positions,
// slots and tables must be older than the kernel in front, and so must be the other tokens of the row's page; nobody
// else writes to it meanwhile.
// fp32: the coding.  Bytes: 6·G·D a row, and for V's octet 16·G·D.
#include "int8_pages.cuh"

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kPairs = kHeadDim / 64;  // of elements, of a lane

struct Vector {
  int head;   // K of g, or G + g: V of g
  int place;  // of the token in its page
  int page;   // −1: nothing is to do
};

DEVICE Vector find_vector(int unit, const i32* position, const i32* row_slot, const i32* tables, int layer,
                          int num_rows, int num_kv_heads, int max_layers, int max_blocks) {
  const int row = unit / (2 * num_kv_heads), head = unit - row * 2 * num_kv_heads;
  const int at = row < num_rows ? position[row] : -1, slot = row < num_rows ? row_slot[row] : -1;
  if (at < 0 || slot < 0) return {head, 0, -1};
  return {head, at % kPageTokens, tables[(slot * max_layers + layer) * max_blocks + at / kPageTokens]};
}

// The first element of a lane's pair.
DEVICE int dim_of(int pair) { return 64 * pair + 2 * (threadIdx.x % 32); }

DEVICE void load_vector(float (&x)[2 * kPairs], const u16* vector) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const u32 pair = *reinterpret_cast<const u32*>(vector + dim_of(i));
    x[2 * i] = half_to_float(static_cast<u16>(pair));
    x[2 * i + 1] = half_to_float(static_cast<u16>(pair >> 16));
  }
}

// Pieces of V that are to have one token more.
struct Octets {
  uint4 pairs[kPairs];  // of a lane's two dims
};

DEVICE uint4* octet_of(const Vector& v, int pair, Stored* pool, int num_kv_heads) {
  Piece* pieces = reinterpret_cast<Piece*>(levels_of_head(pool, v.page, v.head, num_kv_heads));
  return reinterpret_cast<uint4*>(pieces + value_piece(dim_of(pair), v.place / kPieceElements));
}

// A piece with its byte of a token.
DEVICE void put_level(u32& low, u32& high, u32 level, int nth) {
  const u32 shift = 8 * (nth % 4), others = ~(0xffu << shift);
  if (nth < 4) low = (low & others) | level << shift;
  else high = (high & others) | level << shift;
}

DEVICE void store_key(const u32 (&levels)[2 * kPairs], const Vector& v, Stored* pool, int num_kv_heads) {
  Stored* row = levels_of_head(pool, v.page, v.head, num_kv_heads) + v.place * kHeadDim;
#pragma unroll
  for (int i = 0; i < kPairs; ++i)
    *reinterpret_cast<u16*>(row + dim_of(i)) = static_cast<u16>(levels[2 * i] | levels[2 * i + 1] << 8);
}

DEVICE void store_value(Octets& octets, const u32 (&levels)[2 * kPairs], const Vector& v, Stored* pool,
                        int num_kv_heads) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    uint4& pair = octets.pairs[i];
    put_level(pair.x, pair.y, levels[2 * i], v.place % kPieceElements);
    put_level(pair.z, pair.w, levels[2 * i + 1], v.place % kPieceElements);
    *octet_of(v, i, pool, num_kv_heads) = pair;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    append_int8(const u16* kv, const i32* position, const i32* row_slot, const i32* tables, Stored* pool, i32 layer,
                i32 num_rows, i32 num_kv_heads, i32 max_layers, i32 max_blocks) {
  const int unit = blockIdx.x * kWarps + threadIdx.x / 32;
  dependency_launch();
  const Vector v = find_vector(unit, position, row_slot, tables, layer, num_rows, num_kv_heads, max_layers, max_blocks);
  const bool is_value = v.head >= num_kv_heads;
  Octets octets;
  if (is_value && v.page >= 0) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) octets.pairs[i] = load_global(octet_of(v, i, pool, num_kv_heads));
  }
  dependency_wait();
  if (v.page < 0) return;
  float x[2 * kPairs];
  load_vector(x, kv + static_cast<u64>(unit) * kHeadDim);
  u32 largest = 0, levels[2 * kPairs];
#pragma unroll
  for (int i = 0; i < 2 * kPairs; ++i) largest = max(largest, magnitude_of(x[i]));
  const Scale scale = int8_scale(static_cast<u32>(reduce_max(static_cast<int>(largest))));
#pragma unroll
  for (int i = 0; i < 2 * kPairs; ++i) levels[i] = int8_level(x[i], scale);
  if (is_value) store_value(octets, levels, v, pool, num_kv_heads);
  else store_key(levels, v, pool, num_kv_heads);
  if (threadIdx.x % 32 == 0) scales_of_head(pool, v.page, v.head, num_kv_heads)[v.place] = scale.half;
}
