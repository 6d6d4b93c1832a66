// Activations in columns, half [K/8][rows rounded up to 8][8]: as wgmma reads them from shared memory, and so that a
// stretch of K is one stretch of memory.
//
//   k = 64·block + 32·half + 8·t + 2·c + 0, 1   →   column 8·block + 4·half + c, word t of its row
//
// which are the k that one step of a weight tile multiplies (weight_tiles.cuh).
#pragma once
#include "ptx.cuh"

DEVICE int rows_of_columns(int rows) { return (rows + 7) / 8 * 8; }

// Where k and k + 1 of a row are, k even: which of the words.  num_rows: rows_of_columns.
DEVICE int word_in_columns(int k, int row, int num_rows) {
  return ((k / 32 * 4 + k % 8 / 2) * num_rows + row) * 4 + k % 32 / 8;
}
