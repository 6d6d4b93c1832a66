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
// The first blocks are a V head of 64 tokens each: V is transposed through shared memory, an octet of rows a warp, and
// written two tokens at a time where two rows that begin at an even one are neighbours in a page too, so that a warp
// fills whole lines.  The others turn: a thread takes 8 pairs of a token in 4 heads of q and K; a token's threads are
// neighbours, so that its cos and sin are read once.
// All loads are under way while the tokens' places are looked up, and 1024 tokens are on the device at once.
//
// fp32: the rotation, products and sum each rounded; fp16: what is stored.  Bytes: (H + 2G)·D·2 read and written a
// token, and D·4 of cos and sin per group of heads.
#include "rope.cuh"

static_assert(kThreads / 32 == kTokens / kPieceElements, "an octet a warp");

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

// 64 tokens × D of one V head, in shared memory, and where each token goes.  Rows are a piece apart: those of an octet
// lie in banks of their own.
struct Values {
  uint4 rows[kTokens][kRowPieces + 1];
  Places places;
};

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
    values.rows[at / kRowPieces][at % kRowPieces] = pieces[i];
  }
}

// Where V of two tokens goes, of one dim; null: nowhere.
struct PairTarget {
  u16 *first, *second;
  bool together;  // the two are a word
};

DEVICE u16* value_target(const Values& values, int token, int dim, u16* pool, int kv_head, const Shape& shape) {
  const int page = values.places.page[token], place = values.places.place[token];
  if (page < 0) return nullptr;
  const u16* octet = page_values(pool, page, kv_head, shape.num_kv_heads) +
                     value_piece(dim, place / kPieceElements) * kPieceElements;
  return const_cast<u16*>(octet) + place % kPieceElements;
}

DEVICE PairTarget pair_target(const Values& values, int token, int dim, u16* pool, int kv_head, const Shape& shape) {
  u16* first = value_target(values, token, dim, pool, kv_head, shape);
  u16* second = value_target(values, token + 1, dim, pool, kv_head, shape);
  return {first, second, first && second == first + 1 && values.places.place[token] % 2 == 0};
}

// Of the dim that lies `halves` further on.
DEVICE void store_pair(u32 pair, const PairTarget& target, int halves) {
  if (target.together) {
    *reinterpret_cast<u32*>(target.first + halves) = pair;
    return;
  }
  if (target.first) target.first[halves] = static_cast<u16>(pair & 0xffff);
  if (target.second) target.second[halves] = static_cast<u16>(pair >> 16);
}

// The warp's octet of rows: lane 4·g + t stores rows 2t and 2t + 1 of dims g, g + 8, g + 16 …
DEVICE void store_values(const Values& values, u16* pool, int kv_head, const Shape& shape) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * kPieceElements;
  const PairTarget target = pair_target(values, row + lane % 4 * 2, lane / 4, pool, kv_head, shape);
#pragma unroll
  for (int piece = 0; piece < kRowPieces; piece += 4) {
    u32 pairs[4];
    ldmatrix_x4_trans(pairs, &values.rows[row + lane % 8][piece + lane / 8]);
#pragma unroll
    for (int i = 0; i < 4; ++i) store_pair(pairs[i], target, value_piece(8 * (piece + i), 0) * kPieceElements);
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
