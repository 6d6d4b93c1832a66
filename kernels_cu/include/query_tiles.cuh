// Queries in shared memory, as tiles of 16 rows: what warps of decode_attention multiply keys by.
//
// A row is kHeadDim halves in 16-byte pieces; the two halves of each 128 bytes of odd rows change places, so that the
// eight lanes that read at once, two neighbouring rows of four pieces, take all banks.
#pragma once

#include "page_sums.cuh"

constexpr int kRowPieces = kHeadDim / 8;  // pieces of a query, and of a token's K

template <int kRows>
struct QueryRows {
  uint4 rows[kRows][kRowPieces];
};

typedef QueryRows<16> QueryTile;

DEVICE int place_of_piece(int row, int piece) { return piece ^ (row % 2 * 4); }

// A tile as `score` reads it; rows past the last repeat it.  kHalves is 1 where only rows 0..7 exist.
template <int kHalves, int kRows = 16>
struct TileQueries {
  const QueryRows<kRows>& tile;

  DEVICE const uint4& of_row(int tile_row, int j) const {
    const int row = kRows < 8 * kHalves ? min(tile_row, kRows - 1) : tile_row;
    return tile.rows[row][place_of_piece(row, 4 * j + threadIdx.x % 4)];
  }
  DEVICE QueryPieces piece(int j) const {
    const int g = threadIdx.x % 32 / 4;
    return {of_row(g, j), kHalves == 2 ? of_row(g + 8, j) : no_piece()};
  }
};
