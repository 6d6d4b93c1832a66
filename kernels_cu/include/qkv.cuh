// What becomes of the sums of query, key and value heads: turned by RoPE, rounded to half, stored to q and to pages.
//
// A page is K [G][64 tokens][D], then V transposed [G][D][64 tokens].  Where rows go and their angles are looked up
// while the product runs: load() asks for positions, prepare() for pages and angles, finish() shows them to all.
#pragma once
#include "matmul.cuh"

constexpr int kPageTokens = 64;

struct Target {  // of one row of the batch
  u16* page;     // null: a padding row, which stores nothing
  int position;  // absolute
};

struct Pages {
  const i32* position;  // [rows], −1: a padding row
  const i32* row_slot;  // [rows], −1: likewise
  const i32* tables;    // [slots][max_layers][max_blocks], page ids
  int layer, max_layers, max_blocks;
  u16* pool;            // [pages][2·G·64·D]
};

struct Heads {
  int num_heads, num_kv_heads;
  int log2_tiles;    // D = 16 << log2_tiles
  bool interleaved;  // which dimensions are a pair: 2i and 2i+1, or i and i + D/2
};

DEVICE int head_dim(const Heads& h) { return kTileRows << h.log2_tiles; }

constexpr int kTargetBytes = 64 * sizeof(Target);
constexpr int kAngles = 16;                          // floats of one tile and row: cos of 8 pairs, sin of 8 pairs
constexpr int kRowItems = kBlockTiles * kAngles / 4;  // 16-byte pieces of a row's angles

// Bytes before the rings: targets, then angles [row][tile of the thread block][kAngles].
DEVICE int qkv_bytes(int rows) { return kTargetBytes + rows * kRowItems * 16; }

struct StoreHeads {
  Pages pages;
  Heads heads;
  const float* cos;  // [max_seq_len][D/2]
  const float* sin;
  u16* q;            // [rows][H·D]
  int rows;
  Target* targets;   // shared
  float* angles;     // shared
  int at, slot, angle_at;  // this thread's row, and the position of its first piece of angles
  i32 page;

  DEVICE void load() {
    const int row = threadIdx.x, angle_row = row / kRowItems;
    at = row < rows ? pages.position[row] : -1;
    slot = row < rows ? pages.row_slot[row] : -1;
    angle_at = angle_row < rows ? pages.position[angle_row] : -1;
  }

  DEVICE void prepare() {
    page = -1;
    if (at >= 0 && slot >= 0) {
      const long long table = static_cast<long long>(slot) * pages.max_layers + pages.layer;
      page = pages.tables[table * pages.max_blocks + at / kPageTokens];
    }
#pragma unroll 1
    for (int item = threadIdx.x; item < rows * kRowItems; item += kThreads) {
      const int row = item / kRowItems, tile = item % kRowItems / 4, piece = item % 4;
      copy_angles(item == threadIdx.x ? angle_at : pages.position[row], tile, piece, angles + item * 4);
    }
  }

  // A quarter of one tile's angles: the first or last four cosines or sines.
  DEVICE void copy_angles(int position, int tile, int piece, float* to) {
    const int head_tile = blockIdx.x * kBlockTiles + tile, in_head = head_tile & ((1 << heads.log2_tiles) - 1);
    if (position < 0 || head_tile >> heads.log2_tiles >= heads.num_heads + heads.num_kv_heads) return;
    const long long start = static_cast<long long>(position) * (head_dim(heads) / 2) + in_head * 8 + piece % 2 * 4;
    cp_async16(to, (piece < 2 ? cos : sin) + start, true);
  }

  DEVICE void finish() {
    const int page_size = 2 * heads.num_kv_heads * kPageTokens * head_dim(heads);
    const int row = threadIdx.x;
    if (row < rows) targets[row] = {page < 0 ? nullptr : pages.pool + static_cast<long long>(page) * page_size, at};
  }

  DEVICE void store(int tile, int g, int row, float low, float high) {
    const Target target = targets[row];
    if (!target.page) return;
    const int head = tile >> heads.log2_tiles, in_head = tile & ((1 << heads.log2_tiles) - 1);
    if (head >= heads.num_heads + heads.num_kv_heads) {
      store_value(target, head - heads.num_heads - heads.num_kv_heads, in_head * kTileRows + g, low, high);
      return;
    }
    const float* angle = angles + (row * kBlockTiles + tile - blockIdx.x * kBlockTiles) * kAngles + g;
    const float c = angle[0], s = angle[8];
    store_pair(target, head, in_head * 8 + g, row, fmaf(low, c, -(high * s)), fmaf(high, c, low * s));
  }

  DEVICE void store_pair(const Target& target, int head, int i, int row, float first, float second) {
    const int d = head_dim(heads), token = target.position % kPageTokens;
    u16* query = q + (static_cast<long long>(row) * heads.num_heads + head) * d;
    u16* key = target.page + ((head - heads.num_heads) * kPageTokens + token) * d;
    u16* to = head < heads.num_heads ? query : key;
    to[heads.interleaved ? 2 * i : i] = float_to_half(first);
    to[heads.interleaved ? 2 * i + 1 : i + d / 2] = float_to_half(second);
  }

  DEVICE void store_value(const Target& target, int head, int dim, float low, float high) {
    u16* to = target.page + (heads.num_kv_heads + head) * kPageTokens * head_dim(heads) + target.position % kPageTokens;
    to[dim * kPageTokens] = float_to_half(low);
    to[(dim + 8) * kPageTokens] = float_to_half(high);
  }
};
