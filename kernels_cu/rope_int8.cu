// rope_int8: as rope.cu, into int8 pages: q is turned by its position, K is turned, and K and V are coded.
//
//   q = half(turned q);   levels, scale = coding of turned K in fp32, and of V       int8_pages.cuh
//
//   pool   int8  [num_pages][64·G·(2·D + 4)]    everything else, and what must divide what, is as in rope.cu
//
// The mapping is that of rope.cu.  A vector's largest magnitude is found by its threads, which are neighbours in a
// warp: 8 or 4 of them for a K head, 16 or 8 for a token's V head.  V is transposed as bytes, four dims of a token a
// word; 8 tokens of four dims are written at once where 8 rows that begin at a multiple of 8 are an octet of a page.
//
// fp32: the rotation, products and sum each rounded, and the coding of what it gives; fp16: q, scales.  Bytes a token:
// (H + 2G)·D·2 read, 2·H·D + 2·G·(D + 2) written, and D·4 of cos and sin per group of heads.
#include "int8_pages.cuh"
#include "rope.cuh"

constexpr int kQuads = kThreads / kOctets;   // of dims, that a block transposes at once
constexpr int kRowWords = kHeadDim / 4 + 1;  // of a token in shared memory: an odd number of banks

// Over neighbouring lanes, a power of two of them; every lane of the warp takes part.
template <int kLanes>
DEVICE u32 largest_of_lanes(u32 largest) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) largest = max(largest, shuffle_xor(largest, mask));
  return largest;
}

DEVICE u32 largest_of(const float (&values)[8]) {
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = max(largest, magnitude_of(values[i]));
  return largest;
}

DEVICE uint2 levels_of(const float (&values)[8], const Scale& scale) {
  return {int8_levels_of(values, scale), int8_levels_of(values + 4, scale)};
}

// A thread's 16 elements of a turned K head.
DEVICE void store_key(const float (&values)[2][8], const Scale& scale, const Token& token, int kv_head, Stored* pool,
                      const Shape& shape) {
  const int chunk = threadIdx.x % kTokenThreads, place = token.position % kPageTokens;
  Stored* levels = levels_of_head(pool, token.page, kv_head, shape.num_kv_heads) + place * kHeadDim;
  uint2* row = reinterpret_cast<uint2*>(levels) + first_piece(chunk);
  row[0] = levels_of(values[0], scale);
  row[other_piece()] = levels_of(values[1], scale);
  if (chunk == 0) scales_of_head(pool, token.page, kv_head, shape.num_kv_heads)[place] = scale.half;
}

DEVICE void store_query(const float (&values)[2][8], const Token& token, int head, u16* q, const Shape& shape) {
  const uint4 first = pack_piece(values[0]), second = pack_piece(values[1]);
  uint4* row = reinterpret_cast<uint4*>(query_target(token, head, q, shape)) + first_piece(threadIdx.x % kTokenThreads);
  row[0] = first;
  row[other_piece()] = second;
}

// All lanes of a warp come here, those without a token (position −1) too, and store nothing.
DEVICE void turn_heads(const Pieces& pieces, const Token& token, int first_head, const float* cos_table,
                       const float* sin_table, Stored* pool, u16* q, const Shape& shape) {
  const int chunk = threadIdx.x % kTokenThreads, position = max(token.position, 0);
  float cos[kPairs], sin[kPairs];
  read_angles(cos, cos_table, position, chunk);
  read_angles(sin, sin_table, position, chunk);
  const bool some_keys = ballot(first_head + kHeads > shape.num_heads) != 0;  // in the warp
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int head = first_head + i, kv_head = head - shape.num_heads;
    float values[2][8];
    turn_pieces(values, pieces.first[i], pieces.second[i], cos, sin);
    u32 largest = 0;
    if (some_keys) largest = largest_of_lanes<kTokenThreads>(max(largest_of(values[0]), largest_of(values[1])));
    if (token.position < 0 || kv_head >= shape.num_kv_heads) continue;
    if (kv_head < 0) store_query(values, token, head, q, shape);
    else store_key(values, int8_scale(largest), token, kv_head, pool, shape);
  }
}

// Levels of 64 tokens × D of one V head, in shared memory, and where each token goes.
struct Values {
  u32 words[kTokens * kRowWords + 4];
  u16 scale[kTokens];
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
    const int at = i * kThreads + threadIdx.x, token = at / kRowPieces, piece = at % kRowPieces;
    float x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = half_of(pieces[i], j);
    const Scale scale = int8_scale(largest_of_lanes<kRowPieces>(largest_of(x)));
    const uint2 levels = levels_of(x, scale);
    u32* words = values.words + row_of(token) + 2 * piece;
    words[0] = levels.x;
    words[1] = levels.y;
    if (piece == 0) values.scale[token] = scale.half;
  }
}

// Four tokens' words of four dims → four dims' words of four tokens.
DEVICE void transpose_bytes(u32 (&out)[4], const u32* in) {
  const u32 low[2] = {permute_bytes(in[0], in[1], 0x5140), permute_bytes(in[2], in[3], 0x5140)};   // dims 0, 1
  const u32 high[2] = {permute_bytes(in[0], in[1], 0x7362), permute_bytes(in[2], in[3], 0x7362)};  // dims 2, 3
  out[0] = permute_bytes(low[0], low[1], 0x5410);
  out[1] = permute_bytes(low[0], low[1], 0x7632);
  out[2] = permute_bytes(high[0], high[1], 0x5410);
  out[3] = permute_bytes(high[0], high[1], 0x7632);
}

DEVICE Stored* value_target(const Values& values, int token, int dim, Stored* pool, int kv_head, const Shape& shape) {
  const int heads = shape.num_kv_heads;
  Stored* levels = levels_of_head(pool, values.places.page[token], heads + kv_head, heads);
  const int place = values.places.place[token];
  return levels + value_piece(dim, place / kPieceElements) * kPieceElements + place % kPieceElements;
}

// Whether 8 rows from `first` on are 8 tokens of a page from a multiple of 8 on.
DEVICE bool is_octet(const Places& places, int first) {
  const int page = places.page[first], place = places.place[first];
  bool octet = page >= 0 && place % 8 == 0;
#pragma unroll
  for (int i = 1; i < 8; ++i) octet &= places.page[first + i] == page && places.place[first + i] == place + i;
  return octet;
}

// Of 8 tokens four dims, a word a token.
DEVICE void store_octet(const u32 (&words)[8], Stored* target) {
  u32 early[4], late[4];
  transpose_bytes(early, words);
  transpose_bytes(late, words + 4);
  uint4* pieces = reinterpret_cast<uint4*>(target);
  pieces[0] = {early[0], late[0], early[1], late[1]};
  pieces[1] = {early[2], late[2], early[3], late[3]};
}

// The thread's 8 rows, every kQuads-th four dims of them.
DEVICE void store_values(const Values& values, Stored* pool, int kv_head, const Shape& shape) {
  const int first = threadIdx.x % kOctets * 8;
  const bool octet = is_octet(values.places, first);
  for (int quad = threadIdx.x / kOctets; quad < kHeadDim / 4; quad += kQuads) {
    u32 words[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) words[i] = values.words[row_of(first) + i * kRowWords + quad];
    if (octet) {
      store_octet(words, value_target(values, first, 4 * quad, pool, kv_head, shape));
      continue;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (values.places.page[first + i] < 0) continue;
      Stored* target = value_target(values, first + i, 4 * quad, pool, kv_head, shape);
#pragma unroll
      for (int dim = 0; dim < 4; ++dim) target[dim * kPieceElements] = static_cast<Stored>(words[i] >> 8 * dim);
    }
  }
}

DEVICE void store_value_scale(const Values& values, int token, Stored* pool, int kv_head, const Shape& shape) {
  const int page = values.places.page[token], heads = shape.num_kv_heads;
  if (page < 0) return;
  scales_of_head(pool, page, heads + kv_head, heads)[values.places.place[token]] = values.scale[token];
}

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    rope_int8(const u16* qkv, const i32* token_slot, const i32* token_position, const float* cos, const float* sin,
              const i32* tables, Stored* pool, u16* q, i32 layer, i32 num_tokens, i32 num_heads, i32 num_kv_heads,
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
    const int first_head = (item - index * num_groups) * kHeads;
    Pieces pieces = {};
    load_pieces(pieces, qkv, min(index, num_tokens - 1), first_head, shape);
    const Token token =
        read_token(index, num_tokens, token_slot, token_position, tables, layer, max_layers, max_blocks);
    turn_heads(pieces, token, first_head, cos, sin, pool, q, shape);
    return;
  }
  const int kv_head = blockIdx.x % num_kv_heads, first_token = blockIdx.x / num_kv_heads * kTokens;
  read_places(values.places, first_token, num_tokens, token_slot, token_position, tables, layer, max_layers,
              max_blocks);
  stage_values(values, qkv, first_token, num_tokens, num_heads + num_kv_heads + kv_head, shape);
  __syncthreads();
  store_values(values, pool, kv_head, shape);
  if (threadIdx.x < kTokens) store_value_scale(values, threadIdx.x, pool, kv_head, shape);
}
