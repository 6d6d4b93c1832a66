// pages: what happens to whole pages besides attention: they are taken, given back, and partly copied.
//
//   clone   K[target][g][t] = K[source][g][t],  V[target][g][·][t] = V[source][g][·][t]    for t < num_tokens
//   fill    page[·] = a pattern                                                            zeros when taken, NaN in debug
//
//   pool      fp16   [num_pages][2·G·64·D]   a page: K [G][64 tokens][D], then V transposed [G][D][64 tokens]
//   triples   int32  [n][3]                  (source page, target page, num_tokens 0 … 64); targets differ from sources
//   pages     int32  [n]                     D a multiple of 8
//
// clone is one launch for every layer of every row: a block of 256 threads for each (head, triple) copies 16 bytes at a
// time, several under way.  Rows of K are neighbours, so a head's first num_tokens are one run.  A row of V holds 64
// tokens of one dimension; of it whole sectors of 16 tokens are written, zeros from num_tokens on: the target
// was zeros, and memory takes a whole sector without reading it first.
// fill: a block for every 16 KiB of a page.
// Bytes: clone reads (from L2 where rows share a source) and writes 2·G·D·2·num_tokens a triple; fill writes its pages.
#include "ptx.cuh"

constexpr int kThreads = 256;
constexpr int kBatch = 4;            // 16-byte pieces that a thread has under way
constexpr int kPageTokens = 64;
constexpr int kHalves = 8;           // of a uint4
constexpr int kSectorPieces = 2;     // of 32 bytes
constexpr int kRowPieces = kPageTokens / kHalves;
static_assert(kRowPieces % kSectorPieces == 0);

DEVICE u32 keep_low_halves(u32 pair, i32 keep) { return keep >= 2 ? pair : keep == 1 ? pair & 0xffff : 0; }

// The first `keep` halves, zeros behind.
DEVICE uint4 keep_halves(uint4 piece, i32 keep) {
  return make_uint4(keep_low_halves(piece.x, keep), keep_low_halves(piece.y, keep - 2),
                    keep_low_halves(piece.z, keep - 4), keep_low_halves(piece.w, keep - 6));
}

DEVICE void copy_keys(uint4* target, const uint4* source, i32 num_pieces) {
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

// The first num_tokens of every one of a head's D rows.
DEVICE void copy_values(uint4* target, const uint4* source, i32 head_dim, i32 num_tokens) {
  constexpr int kSectorTokens = kSectorPieces * kHalves;
  const int row_pieces = (num_tokens + kSectorTokens - 1) / kSectorTokens * kSectorPieces;
  const int num_pieces = head_dim * row_pieces;
  for (int first = threadIdx.x; first < num_pieces; first += kBatch * kThreads) {
    uint4 held[kBatch];
    int at[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = first + b * kThreads, row = i / row_pieces, piece = i - row * row_pieces;
      at[b] = row * kRowPieces + piece;
      if (i < num_pieces) held[b] = keep_halves(load_global(source + at[b]), num_tokens - piece * kHalves);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (first + b * kThreads < num_pieces) target[at[b]] = held[b];
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) clone(uint4* pool, const i32* triples, i32 head_dim) {
  const i32* triple = triples + 3 * blockIdx.y;
  const int head = blockIdx.x, num_heads = gridDim.x, num_tokens = triple[2];
  const int head_pieces = kPageTokens * head_dim / kHalves;  // of K, and of V
  const long long page_pieces = 2ll * num_heads * head_pieces;
  const uint4* source = pool + triple[0] * page_pieces + head * head_pieces;
  uint4* target = pool + triple[1] * page_pieces + head * head_pieces;
  copy_keys(target, source, num_tokens * head_dim / kHalves);
  const int values = num_heads * head_pieces;
  copy_values(target + values, source + values, head_dim, num_tokens);
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
