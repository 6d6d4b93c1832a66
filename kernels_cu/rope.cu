// rope: q, K and V of prompt tokens, out of one product: q and K are turned by their position, K and V go to pages.
//
//   (x_i, x_j) → (x_i·cos − x_j·sin, x_j·cos + x_i·sin)    per pair i of a head, cos and sin of (position, i)
//   pairs: "half" (i, i + D/2), TL_INTERLEAVED=0;  "interleaved" (2i, 2i + 1), TL_INTERLEAVED=1
//
//   qkv              fp16   [T][(H + 2G)·D]     q heads, K heads, V heads
//   token_slot       int32  [T]                 negative: padding, nothing is written
//   token_position   int32  [T]
//   cos, sin         fp32   [max_seq_len][D/2]
//   tables           int32  [slots][max_layers][max_blocks]   page of a sequence's 64-token block
//   pool             fp16   [num_pages][2·G·64·D]             pages (attention.cuh)
//   q                fp16   [T][H·D]
//   layer, T, H, G, max_layers, max_blocks.   D is 64 or 128; 16-byte alignment.
//
// blockIdx.x: a tile of tokens; blockIdx.y: first the groups of 8 heads of q and K, then the V heads.  To turn, a
// thread takes 8 pairs of a token and reads their cos and sin once for its 8 heads.  V is transposed through shared
// memory, so that neighbouring lanes write neighbouring tokens of a page's row.
//
// fp32: the rotation, products and sum each rounded; fp16: what is stored.  Bytes: (H + 2G)·D·2 read and written a
// token, and D·4 of cos and sin per group of heads.
#include "attention.cuh"

#ifndef TL_INTERLEAVED
#define TL_INTERLEAVED 0
#endif

constexpr int kThreads = 256;
constexpr int kHeadsPerBlock = 8;
constexpr int kPairs = 8;                                      // of a thread
constexpr int kTokenThreads = kHeadDim / (2 * kPairs);         // threads that turn one token
constexpr int kTokens = kThreads / kTokenThreads;              // of a block
constexpr int kRowHalves = kHeadDim + 2;                       // of a token in shared memory: an odd number of banks
static_assert(kTokens % 32 == 0, "a warp writes the same dim of 32 tokens");

struct Shape {
  int num_heads, num_kv_heads;
};

// Where in its sequence a token is.
struct Token {
  int index, position, page;
};

DEVICE Token read_token(int index, int num_tokens, const i32* token_slot, const i32* token_position, const i32* tables,
                        int layer, int max_layers, int max_blocks) {
  const int slot = index < num_tokens ? token_slot[index] : -1;
  if (slot < 0) return {index, -1, -1};
  const int position = token_position[index];
  return {index, position, tables[(slot * max_layers + layer) * max_blocks + position / kPageTokens]};
}

DEVICE const u16* head_of(const u16* qkv, int token, int head, const Shape& shape) {
  return qkv + (static_cast<u64>(token) * (shape.num_heads + 2 * shape.num_kv_heads) + head) * kHeadDim;
}

// Elements 2i and 2i + 1 of a piece, i = 0..3.
DEVICE u32 word_of(const uint4& piece, int i) {
  return i == 0 ? piece.x : i == 1 ? piece.y : i == 2 ? piece.z : piece.w;
}

DEVICE float half_of(const uint4& piece, int i) {
  return half_to_float(static_cast<u16>(word_of(piece, i / 2) >> 16 * (i % 2)));
}

DEVICE uint4 pack_piece(const float (&values)[8]) {
  return {pack_half2(values[0], values[1]), pack_half2(values[2], values[3]), pack_half2(values[4], values[5]),
          pack_half2(values[6], values[7])};
}

// The thread's 8 pairs of a head lie in two pieces, this one and the one `other_piece()` further on.
DEVICE int first_piece(int chunk) { return TL_INTERLEAVED ? 2 * chunk : chunk; }
DEVICE int other_piece() { return TL_INTERLEAVED ? 1 : kHeadDim / 16; }

DEVICE void turn_pair(float& x, float& y, float cos, float sin) {
  const float turned = x * cos - y * sin;
  y = y * cos + x * sin;
  x = turned;
}

// 16 elements as they lie in the two pieces.
DEVICE void turn_pieces(uint4& first, uint4& second, const float (&cos)[kPairs], const float (&sin)[kPairs]) {
  float values[2][8];
#pragma unroll
  for (int i = 0; i < 8; ++i) values[0][i] = half_of(first, i), values[1][i] = half_of(second, i);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    float& x = TL_INTERLEAVED ? values[i / 4][2 * (i % 4)] : values[0][i];
    float& y = TL_INTERLEAVED ? values[i / 4][2 * (i % 4) + 1] : values[1][i];
    turn_pair(x, y, cos[i], sin[i]);
  }
  first = pack_piece(values[0]);
  second = pack_piece(values[1]);
}

DEVICE void read_angles(float (&angles)[kPairs], const float* table, int position, int chunk) {
  const float* first = table + static_cast<u64>(position) * (kHeadDim / 2) + kPairs * chunk;
  const float4* row = reinterpret_cast<const float4*>(first);
#pragma unroll
  for (int i = 0; i < kPairs / 4; ++i) {
    const float4 four = row[i];
    angles[4 * i] = four.x, angles[4 * i + 1] = four.y, angles[4 * i + 2] = four.z, angles[4 * i + 3] = four.w;
  }
}

// A q head goes to its row of q, a K head to its row of the page.
DEVICE u16* target_of(const Token& token, int head, u16* q, u16* pool, const Shape& shape) {
  if (head < shape.num_heads) return q + (static_cast<u64>(token.index) * shape.num_heads + head) * kHeadDim;
  u16* keys = const_cast<u16*>(page_keys(pool, token.page, head - shape.num_heads, shape.num_kv_heads));
  return keys + token.position % kPageTokens * kHeadDim;
}

// A thread's part of its heads; those beyond the last are not read.
struct Pieces {
  uint4 first[kHeadsPerBlock], second[kHeadsPerBlock];
};

DEVICE void load_pieces(Pieces& pieces, const u16* qkv, int token, int first_head, const Shape& shape) {
#pragma unroll
  for (int i = 0; i < kHeadsPerBlock; ++i) {
    if (first_head + i >= shape.num_heads + shape.num_kv_heads) return;
    const u16* head = head_of(qkv, token, first_head + i, shape);
    const uint4* source = reinterpret_cast<const uint4*>(head) + first_piece(threadIdx.x % kTokenThreads);
    pieces.first[i] = load_global(source);
    pieces.second[i] = load_global(source + other_piece());
  }
}

DEVICE void turn_heads(Pieces& pieces, const Token& token, int first_head, const float* cos_table,
                       const float* sin_table, u16* pool, u16* q, const Shape& shape) {
  const int chunk = threadIdx.x % kTokenThreads;
  float cos[kPairs], sin[kPairs];
  read_angles(cos, cos_table, token.position, chunk);
  read_angles(sin, sin_table, token.position, chunk);
#pragma unroll
  for (int i = 0; i < kHeadsPerBlock; ++i) {
    const int head = first_head + i;
    if (head >= shape.num_heads + shape.num_kv_heads) return;
    turn_pieces(pieces.first[i], pieces.second[i], cos, sin);
    uint4* target = reinterpret_cast<uint4*>(target_of(token, head, q, pool, shape)) + first_piece(chunk);
    target[0] = pieces.first[i];
    target[other_piece()] = pieces.second[i];
  }
}

// The block's tokens × D of one V head, by rows.
DEVICE void stage_values(u16* rows, const u16* qkv, int first_token, int num_tokens, int head, const Shape& shape) {
  for (int i = threadIdx.x; i < kTokens * kHeadDim / 8; i += kThreads) {
    const int token = i / (kHeadDim / 8), piece = i % (kHeadDim / 8);
    if (first_token + token >= num_tokens) return;
    const uint4 halves = load_piece(head_of(qkv, first_token + token, head, shape) + 8 * piece);
    u32* words = reinterpret_cast<u32*>(rows + token * kRowHalves + 8 * piece);
    words[0] = halves.x, words[1] = halves.y, words[2] = halves.z, words[3] = halves.w;
  }
}

// The thread's token, every kStep-th dim of it.
DEVICE void store_values(const u16* rows, const Token& token, int place, u16* pool, int kv_head, const Shape& shape) {
  constexpr int kStep = kThreads / kTokens;
  u16* values = const_cast<u16*>(page_values(pool, token.page, kv_head, shape.num_kv_heads));
#pragma unroll 4
  for (int dim = threadIdx.x / kTokens; dim < kHeadDim; dim += kStep)
    values[dim * kPageTokens + token.position % kPageTokens] = rows[place * kRowHalves + dim];
}

extern "C" __global__ void __launch_bounds__(kThreads)
    rope(const u16* qkv, const i32* token_slot, const i32* token_position, const float* cos, const float* sin,
         const i32* tables, u16* pool, u16* q, i32 layer, i32 num_tokens, i32 num_heads, i32 num_kv_heads,
         i32 max_layers, i32 max_blocks) {
  __shared__ u32 words[kTokens * kRowHalves / 2];
  u16* rows = reinterpret_cast<u16*>(words);
  const Shape shape = {num_heads, num_kv_heads};
  const int first_token = blockIdx.x * kTokens;
  const int num_groups = (num_heads + num_kv_heads + kHeadsPerBlock - 1) / kHeadsPerBlock;
  const int kv_head = static_cast<int>(blockIdx.y) - num_groups;  // negative: a group to turn
  dependency_wait();
  dependency_launch();
  const int place = kv_head < 0 ? threadIdx.x / kTokenThreads : threadIdx.x % kTokens;
  const int first_head = blockIdx.y * kHeadsPerBlock;
  Pieces pieces;  // on their way while the token's place is looked up
  if (kv_head < 0) {
    if (first_token + place < num_tokens) load_pieces(pieces, qkv, first_token + place, first_head, shape);
  } else {
    stage_values(rows, qkv, first_token, num_tokens, num_heads + num_kv_heads + kv_head, shape);
  }
  const Token token = read_token(first_token + place, num_tokens, token_slot, token_position, tables, layer, max_layers,
                                 max_blocks);
  if (kv_head < 0) {
    if (token.position >= 0) turn_heads(pieces, token, first_head, cos, sin, pool, q, shape);
    return;
  }
  __syncthreads();
  if (token.position >= 0) store_values(rows, token, place, pool, kv_head, shape);
}
