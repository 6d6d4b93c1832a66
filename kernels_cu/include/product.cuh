// What a decode linear multiplies, and the parts of K that fix the order of its sums, however it is cut into blocks.
#pragma once
#include "weight_tiles.cuh"

struct Product {
  const uint4* weights;  // tiles, weight_tiles.cuh
  const u32* scales;     // null: fp16
  const u16* x;          // half [rows][num_inputs]
  int rows;              // of this thread block
  int num_tiles;
  int num_inputs;
  bool keep;      // weights stay in L2
  int first_row;  // of the batch, that is the block's first
};

// Where row `first` begins.
template <class T>
DEVICE T* from_row(T* array, int first, int width) {
  return array + static_cast<long long>(first) * width;
}

// A thread block's, of x half [rows][num_inputs].  Rows are shared out among the blocks along z, `most` to each of them.
// The last may begin among those of the block in front, whose bits it makes as well: so all are alike.
DEVICE Product product_of_block(const uint4* weights, const u32* scales, const u16* x, int rows, int num_tiles,
                                int num_inputs, int keep, int most) {
  const int first = max(0, min(static_cast<int>(blockIdx.z) * most, rows - most));
  const u16* block_x = from_row(x, first, num_inputs);
  return {weights, scales, block_x, min(rows, most), num_tiles, num_inputs, keep != 0, first};
}

// Parts of K: begin(p) … begin(p+1), in units.
DEVICE int part_begin(int part, int num_parts, int num_units) { return num_units * part / num_parts; }
