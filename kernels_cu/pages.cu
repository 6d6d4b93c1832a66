// pages: what happens to whole pages besides attention: they are taken, given back, and partly copied.
//
//   clone   K[target][g][t] = K[source][g][t],  V[target][g][·][t] = V[source][g][·][t]    for t < num_tokens
//   fill    page[·] = a pattern                                                            zeros when taken, NaN in debug
//
//   pool      fp16   [num_pages][2·G·64·D]          a page: K [G][64 tokens][D], then V [G][8 octets][D][8 tokens]
//             int8   [num_pages][64·G·(2·D + 4)]    for clone_int8: levels likewise, then fp16 scales [K and V][G][64]
//   triples   int32  [n][3]                         (source page, target page, num_tokens 0 … 64), targets no sources
//   pages     int32  [n]                            D a multiple of 8, for int8 of 16
//
// clone is one launch for every layer of every row: a block of 256 threads for each (head, triple) copies 16 bytes at a
// time, several under way.  Rows of K are neighbours, so a head's first num_tokens are one run; so are octets of V.  Of
// the last octet all is written, and of a row of scales whole sectors of 32 bytes, zeros from num_tokens on: the target
// was zeros, and memory takes a whole sector without reading it first.
// fill: a block for every 16 KiB of a page.
// Bytes: clone reads (from L2 where rows share a source) and writes 2·G·D·2·num_tokens a triple, in int8 2·G·(D +
// 2)·num_tokens; fill writes its pages.
#include "ptx.cuh"

constexpr int kThreads = 256;
constexpr int kBatch = 4;  // 16-byte pieces that a thread has under way
constexpr int kPageTokens = 64;
constexpr int kSectorPieces = 2;  // of 32 bytes

// 16-byte pieces of so many elements.
template <class Element>
DEVICE constexpr int pieces_of(int num_elements) {
  return num_elements / static_cast<int>(sizeof(uint4) / sizeof(Element));
}
constexpr int kScalePieces = pieces_of<u16>(kPageTokens);  // of a head, of K, and of V
static_assert(kScalePieces % kSectorPieces == 0);

// The first `keep` elements of a word, zeros behind.
DEVICE u32 keep_halves(u32 word, i32 keep) { return keep >= 2 ? word : keep == 1 ? word & 0xffff : 0; }
DEVICE u32 keep_bytes(u32 word, i32 keep) { return keep >= 4 ? word : keep > 0 ? word & (1u << 8 * keep) - 1 : 0; }

// The first tokens of a piece of V: an octet of one dimension, in levels of two.
template <class Element>
DEVICE uint4 keep_tokens(uint4 piece, i32 keep) {
  if constexpr (sizeof(Element) == 1)
    return make_uint4(keep_bytes(piece.x, keep), keep_bytes(piece.y, keep - 4), keep_bytes(piece.z, keep),
                      keep_bytes(piece.w, keep - 4));
  return make_uint4(keep_halves(piece.x, keep), keep_halves(piece.y, keep - 2), keep_halves(piece.z, keep - 4),
                    keep_halves(piece.w, keep - 6));
}

// A run of pieces, of which those from `whole` on keep their first tokens only.
template <class Element>
DEVICE void copy_run(uint4* target, const uint4* source, i32 num_pieces, i32 whole, i32 keep) {
  for (int first = threadIdx.x; first < num_pieces; first += kBatch * kThreads) {
    uint4 held[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (first + b * kThreads < num_pieces) held[b] = load_global(source + first + b * kThreads);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = first + b * kThreads;
      if (i < num_pieces) target[i] = i < whole ? held[b] : keep_tokens<Element>(held[b], keep);
    }
  }
}

// The first num_tokens of a head's V, of which an octet is octet_pieces.
template <class Element>
DEVICE void copy_octets(uint4* target, const uint4* source, i32 octet_pieces, i32 num_tokens) {
  const int whole = num_tokens / 8 * octet_pieces, keep = num_tokens % 8;
  copy_run<Element>(target, source, keep ? whole + octet_pieces : whole, whole, keep);
}

// The first num_tokens of a head's scales of K and of V, which lie `apart` pieces apart.
DEVICE void copy_scales(uint4* target, const uint4* source, i32 apart, i32 num_tokens) {
  constexpr int kPieceTokens = kPageTokens / kScalePieces, kSectorTokens = kSectorPieces * kPieceTokens;
  const int piece = threadIdx.x % kScalePieces, token = piece * kPieceTokens;
  if (threadIdx.x >= 2 * kScalePieces || token / kSectorTokens * kSectorTokens >= num_tokens) return;
  const int at = threadIdx.x / kScalePieces * apart + piece;
  target[at] = keep_tokens<u16>(load_global(source + at), num_tokens - token);
}

// The block's head of a triple.
template <class Element>
DEVICE void clone_head(uint4* pool, const i32* triple, i32 head_dim) {
  constexpr bool kScaled = sizeof(Element) == 1;
  const int head = blockIdx.x, num_heads = gridDim.x, num_tokens = triple[2];
  const int head_pieces = pieces_of<Element>(kPageTokens * head_dim);  // of K, and of V
  const long long page_pieces = 2ll * num_heads * (head_pieces + (kScaled ? kScalePieces : 0));
  const uint4* source = pool + triple[0] * page_pieces;
  uint4* target = pool + triple[1] * page_pieces;
  const int keys = head * head_pieces, values = (num_heads + head) * head_pieces;
  const int scales = 2 * num_heads * head_pieces + head * kScalePieces;
  if constexpr (kScaled) copy_scales(target + scales, source + scales, num_heads * kScalePieces, num_tokens);
  const int key_pieces = pieces_of<Element>(num_tokens * head_dim);
  copy_run<Element>(target + keys, source + keys, key_pieces, key_pieces, 0);
  copy_octets<Element>(target + values, source + values, pieces_of<Element>(8 * head_dim), num_tokens);
}

extern "C" __global__ void __launch_bounds__(kThreads) clone(uint4* pool, const i32* triples, i32 head_dim) {
  clone_head<u16>(pool, triples + 3 * blockIdx.y, head_dim);
}

extern "C" __global__ void __launch_bounds__(kThreads) clone_int8(uint4* pool, const i32* triples, i32 head_dim) {
  clone_head<u8>(pool, triples + 3 * blockIdx.y, head_dim);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    fill(uint4* pool, const i32* pages, i32 page_pieces, i32 pattern) {
  uint4* page = pool + static_cast<long long>(pages[blockIdx.x]) * page_pieces;
  const u32 word = static_cast<u32>(pattern);
  const int first = blockIdx.y * kBatch * kThreads + threadIdx.x;
#pragma unroll
  for (int b = 0; b < kBatch; ++b)
    if (first + b * kThreads < page_pieces) page[first + b * kThreads] = make_uint4(word, word, word, word);
}
