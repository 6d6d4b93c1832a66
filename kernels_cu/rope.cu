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
//   H = 0: K and V alone, q is not read.  G = 0 with TL_QUERIES_ONLY: q alone, tables and pool are not read.
//
// The first blocks are a V head of 64 tokens each: V is transposed through shared memory, and written 8 tokens at a
// time where 8 rows that begin at a multiple of 8 are neighbours in a page too.  The others turn: a thread takes 8
// pairs of a token in 4 heads of q and K; a token's threads are neighbours, so that its cos and sin are read once.
// All loads are under way while the tokens' places are looked up, and 1024 tokens are on the device at once.
//
// fp32: the rotation, products and sum each rounded; fp16: what is stored.  Bytes: (H + 2G)·D·2 read and written a
// token, and D·4 of cos and sin per group of heads.
#include "attention.cuh"

#ifndef TL_INTERLEAVED
#define TL_INTERLEAVED 0
#endif
#ifndef TL_QUERIES_ONLY
#define TL_QUERIES_ONLY 0
#endif

constexpr int kThreads = 256;
constexpr int kTokens = 64;                                    // whose V a block transposes
constexpr int kHeads = 4;                                      // that a thread turns
constexpr int kPairs = 8;                                      // of a thread
constexpr int kTokenThreads = kHeadDim / (2 * kPairs);         // threads that turn one token
constexpr int kRowPieces = kHeadDim / 8;                       // 16-byte pieces of a token's head
constexpr int kOctets = kTokens / 8;
constexpr int kOctetPairs = kThreads / kOctets;                // pairs of dims that a block transposes at once
constexpr int kRowWords = kHeadDim / 2 + 1;                    // of a token in shared memory: an odd number of banks
constexpr int kValuePieces = kTokens * kRowPieces / kThreads;  // of a thread
static_assert(kHeadDim / 2 % kOctetPairs == 0);

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
  if constexpr (TL_QUERIES_ONLY) return {index, position, -1};
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
  uint4 first[kHeads], second[kHeads];
};

DEVICE void load_pieces(Pieces& pieces, const u16* qkv, int token, int first_head, const Shape& shape) {
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
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
  for (int i = 0; i < kHeads; ++i) {
    const int head = first_head + i;
    if (head >= shape.num_heads + shape.num_kv_heads) return;
    turn_pieces(pieces.first[i], pieces.second[i], cos, sin);
    uint4* target = reinterpret_cast<uint4*>(target_of(token, head, q, pool, shape)) + first_piece(chunk);
    target[0] = pieces.first[i];
    target[other_piece()] = pieces.second[i];
  }
}

// 64 tokens × D of one V head, in shared memory, and where each token goes.
struct Values {
  u32 words[kTokens * kRowWords + 4];
  alignas(16) int page[kTokens];   // −1: nowhere
  alignas(16) int place[kTokens];  // in the page
};

// The words of a token; those that are read together, 8 tokens apart, lie in banks of their own.
DEVICE int row_of(int token) { return token * kRowWords + token / (kTokens / 2) * 4; }

DEVICE void stage_values(Values& values, const u16* qkv, int first_token, int num_tokens, int head,
                         const Shape& shape) {
  uint4 pieces[kValuePieces];
#pragma unroll
  for (int i = 0; i < kValuePieces; ++i) {
    const int at = i * kThreads + threadIdx.x, token = min(first_token + at / kRowPieces, num_tokens - 1);
    pieces[i] = load_piece(head_of(qkv, token, head, shape) + at % kRowPieces * 8);
  }
#pragma unroll
  for (int i = 0; i < kValuePieces; ++i) {
    const int at = i * kThreads + threadIdx.x;
    u32* words = values.words + row_of(at / kRowPieces) + at % kRowPieces * 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = word_of(pieces[i], j);
  }
}

// Whether 8 rows from `first` on are 8 tokens of a page from a multiple of 8 on.
DEVICE bool is_octet(const Values& values, int first) {
  const int page = values.page[first], place = values.place[first];
  bool octet = page >= 0 && place % 8 == 0;
#pragma unroll
  for (int i = 1; i < 8; ++i) octet &= values.page[first + i] == page && values.place[first + i] == place + i;
  return octet;
}

DEVICE u16* value_target(const Values& values, int token, int dim, u16* pool, int kv_head, const Shape& shape) {
  const u16* page = page_values(pool, values.page[token], kv_head, shape.num_kv_heads);
  return const_cast<u16*>(page) + dim * kPageTokens + values.place[token];
}

// Of 8 tokens two neighbouring dims, a word a token.
DEVICE void store_octet(const u32 (&words)[8], u16* low, u16* high) {
  constexpr u32 kLow = 0x5410, kHigh = 0x7632;
  uint4* targets[2] = {reinterpret_cast<uint4*>(low), reinterpret_cast<uint4*>(high)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 half = i == 0 ? kLow : kHigh;
    *targets[i] = {permute_bytes(words[0], words[1], half), permute_bytes(words[2], words[3], half),
                   permute_bytes(words[4], words[5], half), permute_bytes(words[6], words[7], half)};
  }
}

// The thread's 8 rows, every kOctetPairs-th pair of dims of them.
DEVICE void store_values(const Values& values, u16* pool, int kv_head, const Shape& shape) {
  const int first = threadIdx.x % kOctets * 8;
  const bool octet = is_octet(values, first);
#pragma unroll
  for (int pair = threadIdx.x / kOctets; pair < kHeadDim / 2; pair += kOctetPairs) {
    u32 words[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) words[i] = values.words[row_of(first) + i * kRowWords + pair];
    if (octet) {
      u16* target = value_target(values, first, 2 * pair, pool, kv_head, shape);
      store_octet(words, target, target + kPageTokens);
      continue;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (values.page[first + i] < 0) continue;
      u16* target = value_target(values, first + i, 2 * pair, pool, kv_head, shape);
      target[0] = static_cast<u16>(words[i] & 0xffff);
      target[kPageTokens] = static_cast<u16>(words[i] >> 16);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    rope(const u16* qkv, const i32* token_slot, const i32* token_position, const float* cos, const float* sin,
         const i32* tables, u16* pool, u16* q, i32 layer, i32 num_tokens, i32 num_heads, i32 num_kv_heads,
         i32 max_layers, i32 max_blocks) {
  __shared__ Values values;
  const Shape shape = {num_heads, num_kv_heads};
  const int num_tiles = (num_tokens + kTokens - 1) / kTokens;
  const int turning = static_cast<int>(blockIdx.x) - num_tiles * num_kv_heads;  // negative: a V head
  dependency_wait();
  dependency_launch();
  if (turning >= 0) {
    const int num_groups = (num_heads + num_kv_heads + kHeads - 1) / kHeads;
    const int item = (turning * kThreads + threadIdx.x) / kTokenThreads, index = item / num_groups;
    if (index >= num_tokens) return;
    const int first_head = (item - index * num_groups) * kHeads;
    Pieces pieces;
    load_pieces(pieces, qkv, index, first_head, shape);
    const Token token =
        read_token(index, num_tokens, token_slot, token_position, tables, layer, max_layers, max_blocks);
    if (token.position >= 0) turn_heads(pieces, token, first_head, cos, sin, pool, q, shape);
    return;
  }
  const int kv_head = blockIdx.x % num_kv_heads, first_token = blockIdx.x / num_kv_heads * kTokens;
  if (threadIdx.x < kTokens) {
    const Token token = read_token(first_token + threadIdx.x, num_tokens, token_slot, token_position, tables, layer,
                                   max_layers, max_blocks);
    values.page[threadIdx.x] = token.page;
    values.place[threadIdx.x] = token.position % kPageTokens;
  }
  stage_values(values, qkv, first_token, num_tokens, num_heads + num_kv_heads + kv_head, shape);
  __syncthreads();
  store_values(values, pool, kv_head, shape);
}
