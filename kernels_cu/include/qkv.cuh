// The sums of query, key and value heads on their way to q and to pages (heads.cuh), for the blocks of matmul.cuh.
//
// Where rows go and their angles are looked up while the product runs: load() asks for positions, prepare() for pages
// and angles, finish() shows them to all.
#pragma once
#include "heads.cuh"
#include "matmul.cuh"

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
  int rows;
  Target* targets;   // shared
  float* angles;     // shared
  int at, slot, angle_at;  // this thread's row, and the position of its first piece of angles
  i32 page;

  DEVICE void load() {
    const int row = threadIdx.x, angle_row = row / kRowItems;
    at = row < rows ? pages.position[row] : -1;
    slot = row < rows ? slot_of(pages, row) : -1;
    angle_at = angle_row < rows ? pages.position[angle_row] : -1;
  }

  DEVICE void prepare() {
    page = page_of(pages, threadIdx.x, at, slot);
#pragma unroll 1
    for (int item = threadIdx.x; item < rows * kRowItems; item += kThreads) {
      const int row = item / kRowItems, tile = item % kRowItems / 4, piece = item % 4;
      copy_angles(item == threadIdx.x ? angle_at : pages.position[row], tile, piece, angles + item * 4);
    }
  }

  // A quarter of one tile's angles: the first or last four cosines or sines.
  DEVICE void copy_angles(int position, int tile, int piece, float* to) {
    const int head_tile = blockIdx.x * kBlockTiles + tile;
    if (position < 0 || !is_turned(heads, head_tile)) return;
    const int first = tile_in_head(heads, head_tile) * 8 + piece % 2 * 4;
    const long long start = static_cast<long long>(position) * (head_dim(heads) / 2) + first;
    cp_async16(to, (piece < 2 ? cos : sin) + start, true);
  }

  DEVICE void finish() {
    if (threadIdx.x < rows) targets[threadIdx.x] = target_of(pages, heads, page, at);
  }

  DEVICE void store(int tile, int g, int row, float low, float high) {
    const Target target = targets[row];
    if (!target.page) return;
    if (!is_turned(heads, tile)) return store_value(heads, target, tile, g, low, high);
    const float* angle = angles + (row * kBlockTiles + tile - blockIdx.x * kBlockTiles) * kAngles + g;
    store_turned(heads, target, tile, g, row, low, high, angle[0], angle[8]);
  }
};
