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
#include "rope.cuh"

constexpr int kOctetPairs = kThreads / kOctets;  // pairs of dims that a block transposes at once
constexpr int kRowWords = kHeadDim / 2 + 1;      // of a token in shared memory: an odd number of banks
static_assert(kHeadDim / 2 % kOctetPairs == 0);

// A q head goes to its row of q, a K head to its row of the page.
DEVICE u16* target_of(const Token& token, int head, u16* q, u16* pool, const Shape& shape) {
  if (head < shape.num_heads) return query_target(token, head, q, shape);
  u16* keys = const_cast<u16*>(page_keys(pool, token.page, head - shape.num_heads, shape.num_kv_heads));
  return keys + token.position % kPageTokens * kHeadDim;
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
    float values[2][8];
    turn_pieces(values, pieces.first[i], pieces.second[i], cos, sin);
    const uint4 first = pack_piece(values[0]), second = pack_piece(values[1]);
    uint4* target = reinterpret_cast<uint4*>(target_of(token, head, q, pool, shape)) + first_piece(chunk);
    target[0] = first;
    target[other_piece()] = second;
  }
}

// 64 tokens × D of one V head, in shared memory, and where each token goes.
struct Values {
  u32 words[kTokens * kRowWords + 4];
  Places places;
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

DEVICE u16* value_target(const Values& values, int token, int dim, u16* pool, int kv_head, const Shape& shape) {
  const u16* page = page_values(pool, values.places.page[token], kv_head, shape.num_kv_heads);
  return const_cast<u16*>(page) + dim * kPageTokens + values.places.place[token];
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
  const bool octet = is_octet(values.places, first);
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
      if (values.places.page[first + i] < 0) continue;
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
  read_places(values.places, first_token, num_tokens, token_slot, token_position, tables, layer, max_layers,
              max_blocks);
  stage_values(values, qkv, first_token, num_tokens, num_heads + num_kv_heads + kv_head, shape);
  __syncthreads();
  store_values(values, pool, kv_head, shape);
}
