// Activations in columns, half [K/8][rows][8], rows a multiple of 8: as wgmma reads them from shared memory, and so that
// a stretch of K is one stretch of memory.  Where blocks share the rows of a batch, those of each are in columns by
// themselves, one block's behind another's.
//
//   k = 64·block + 32·half + 8·t + 2·c + 0, 1   →   column 8·block + 4·half + c, word t of its row
//
// which are the k that one step of a weight tile multiplies (weight_tiles.cuh).
#pragma once
#include "ptx.cuh"

// Where k and k + 1 of a row are, k even: which of the words.
DEVICE int word_in_columns(int k, int row, int num_rows) {
  return ((k / 32 * 4 + k % 8 / 2) * num_rows + row) * 4 + k % 32 / 8;
}

// Where a row of a batch is whose rows are in columns block_rows at a time.
struct InColumns {
  u32* words;  // of the row's block
  int row, num_rows;
};

DEVICE InColumns in_columns(u16* y, int row, int width, int block_rows) {
  const long long first = row / block_rows * block_rows;
  return {reinterpret_cast<u32*>(y + first * width), row % block_rows, block_rows};
}

// Channels k to k + 3, k a multiple of 4.
DEVICE void store_columns(const InColumns& to, int k, uint2 halves) {
  to.words[word_in_columns(k, to.row, to.num_rows)] = halves.x;
  to.words[word_in_columns(k + 2, to.row, to.num_rows)] = halves.y;
}
