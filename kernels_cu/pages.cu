// pages: what happens to whole pages besides attention: they are taken, given back, and partly copied.
//
//   clone   K[target][g][t] = K[source][g][t],  V[target][g][·][t] = V[source][g][·][t]    for t < num_tokens
//   fill    page[·] = a pattern                                                            zeros when taken, NaN in debug
//
//   pool      fp16   [num_pages][2·G·64·D]          a page: K [G][64 tokens][D], then V transposed [G][D][64 tokens]
//             int8   [num_pages][64·G·(2·D + 4)]    for clone_int8: levels likewise, but V [G][8 octets][D][8 tokens],
//                                                   then fp16 scales [K and V][G][64]
//   triples   int32  [n][3]                         (source page, target page, num_tokens 0 … 64), targets no sources
//   pages     int32  [n]                            D a multiple of 8, for int8 of 16
//
// clone is one launch for every layer of every row: a block of 256 threads for each (head, triple) copies 16 bytes at a
// time, several under way.  Rows of K are neighbours, so a head's first num_tokens are one run; so are whole octets of
// V's levels.  A row of V holds 64 tokens of one dimension, a row of scales those of a head, an octet 8 tokens of each
// dimension; of them whole sectors of 32 bytes are written, zeros from num_tokens on: the target was zeros, and memory
// takes a whole sector without reading it first.
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
static_assert(pieces_of<u16>(kPageTokens) % kSectorPieces == 0);

// The first `keep` elements of a word, zeros behind.
DEVICE u32 keep_halves(u32 word, i32 keep) { return keep >= 2 ? word : keep == 1 ? word & 0xffff : 0; }
DEVICE u32 keep_bytes(u32 word, i32 keep) { return keep >= 4 ? word : keep > 0 ? word & (1u << 8 * keep) - 1 : 0; }

// The first halves of a piece.
DEVICE uint4 keep_first(uint4 piece, i32 keep) {
  return make_uint4(keep_halves(piece.x, keep), keep_halves(piece.y, keep - 2), keep_halves(piece.z, keep - 4),
                    keep_halves(piece.w, keep - 6));
}

// The first tokens of two dimensions' octets.
DEVICE uint4 keep_tokens(uint4 piece, i32 keep) {
  return make_uint4(keep_bytes(piece.x, keep), keep_bytes(piece.y, keep - 4), keep_bytes(piece.z, keep),
                    keep_bytes(piece.w, keep - 4));
}

DEVICE void copy_run(uint4* target, const uint4* source, i32 num_pieces) {
  for (int first = threadIdx.x; first < num_pieces; first += kBatch * kThreads) {
    uint4 held[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (first + b * kThreads < num_pieces) held[b] = load_global(source + first + b * kThreads);
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (first + b * kThreads < num_pieces) target[first + b * kThreads] = held[b];
  }
}

// The first num_tokens of every one of so many rows of 64 halves, which begin `stride` pieces apart.
DEVICE void copy_rows(uint4* target, const uint4* source, i32 num_rows, i32 stride, i32 num_tokens) {
  constexpr int kPieceTokens = sizeof(uint4) / sizeof(u16), kSectorTokens = kSectorPieces * kPieceTokens;
  const int row_pieces = (num_tokens + kSectorTokens - 1) / kSectorTokens * kSectorPieces;
  const int num_pieces = num_rows * row_pieces;
  for (int first = threadIdx.x; first < num_pieces; first += kBatch * kThreads) {
    uint4 held[kBatch];
    int at[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = first + b * kThreads, row = i / row_pieces, piece = i - row * row_pieces;
      at[b] = row * stride + piece;
      if (i < num_pieces) held[b] = keep_first(load_global(source + at[b]), num_tokens - piece * kPieceTokens);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (first + b * kThreads < num_pieces) target[at[b]] = held[b];
  }
}

// The first num_tokens of a head's levels of V, of which those of an octet are octet_pieces.
DEVICE void copy_octets(uint4* target, const uint4* source, i32 octet_pieces, i32 num_tokens) {
  const int whole = num_tokens / 8 * octet_pieces, keep = num_tokens % 8;
  copy_run(target, source, whole);
  if (keep == 0) return;
  for (int i = threadIdx.x; i < octet_pieces; i += kThreads)
    target[whole + i] = keep_tokens(load_global(source + whole + i), keep);
}

extern "C" __global__ void __launch_bounds__(kThreads) clone(uint4* pool, const i32* triples, i32 head_dim) {
  const i32* triple = triples + 3 * blockIdx.y;
  const int head = blockIdx.x, num_heads = gridDim.x;
  const int head_pieces = pieces_of<u16>(kPageTokens * head_dim);  // of K, and of V
  const long long page_pieces = 2ll * num_heads * head_pieces;
  const uint4* source = pool + triple[0] * page_pieces + head * head_pieces;
  uint4* target = pool + triple[1] * page_pieces + head * head_pieces;
  const int values = num_heads * head_pieces;
  copy_run(target, source, pieces_of<u16>(triple[2] * head_dim));
  copy_rows(target + values, source + values, head_dim, pieces_of<u16>(kPageTokens), triple[2]);
}

extern "C" __global__ void __launch_bounds__(kThreads) clone_int8(uint4* pool, const i32* triples, i32 head_dim) {
  constexpr int kScalePieces = pieces_of<u16>(kPageTokens);  // of K, and of V
  const i32* triple = triples + 3 * blockIdx.y;
  const int head = blockIdx.x, num_heads = gridDim.x;
  const int head_pieces = pieces_of<u8>(kPageTokens * head_dim);
  const int scales = 2 * num_heads * head_pieces + head * kScalePieces;
  const long long page_pieces = 2ll * num_heads * (head_pieces + kScalePieces);
  const uint4* source = pool + triple[0] * page_pieces;
  uint4* target = pool + triple[1] * page_pieces;
  copy_rows(target + scales, source + scales, 2, num_heads * kScalePieces, triple[2]);
  const int keys = head * head_pieces, values = (num_heads + head) * head_pieces;
  copy_run(target + keys, source + keys, pieces_of<u8>(triple[2] * head_dim));
  copy_octets(target + values, source + values, pieces_of<u8>(8 * head_dim), triple[2]);
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
