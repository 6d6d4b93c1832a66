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

DEVICE int place_of_piece(int row, int piece) { return piece ^ (row % 2 * 4); }

// The 16-byte piece 4·j + t of a row of the tile; rows past the last repeat it where kHalves · 8 are more than there are.
template <int kHalves, int kRows>
DEVICE const uint4& piece_of_row(const QueryRows<kRows>& tile, int tile_row, int j) {
  const int row = kRows < 8 * kHalves ? min(tile_row, kRows - 1) : tile_row;
  return tile.rows[row][place_of_piece(row, 4 * j + threadIdx.x % 4)];
}

// A lane's queries as `score` reads them; kHalves is 1 where only rows 0..7 exist.  And a tile of 16 that a block shares,
// which is read likewise: of halves as they are, of levels coded when it is filled.
#ifdef TL_INT8

template <int kHalves, int kRows>
struct TileQueries {
  CodedRow rows[kHalves];

  DEVICE explicit TileQueries(const QueryRows<kRows>& tile) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      uint4 halves[kDimPieces];
#pragma unroll
      for (int j = 0; j < kDimPieces; ++j) halves[j] = piece_of_row<kHalves>(tile, threadIdx.x % 32 / 4 + 8 * half, j);
      rows[half] = coded_row(halves);
    }
  }
  DEVICE QueryPieces piece(int j) const {
    return {rows[0].pieces[j], kHalves == 2 ? rows[kHalves - 1].pieces[j] : make_uint2(0, 0)};
  }
  DEVICE float unit(int half) const { return rows[half].unit; }
};

// Pieces are half as long: of a row, those that lanes read at once lie in banks that three neighbouring rows leave.
struct QueryTile {
  Piece rows[16][kRowPieces];
  float units[16];

  DEVICE static int place_of(int row, int piece) { return piece ^ (kHeadDim == 128 ? row % 4 : row / 2 % 2) * 4; }

  DEVICE const Piece& of_row(int row, int j) const { return rows[row][place_of(row, 4 * j + threadIdx.x % 4)]; }
  DEVICE QueryPieces piece(int j) const {
    const int g = threadIdx.x % 32 / 4;
    return {of_row(g, j), of_row(g + 8, j)};
  }
  DEVICE float unit(int half) const { return units[threadIdx.x % 32 / 4 + 8 * half]; }

  // Piece n of the tile, of threads n, n + 1 … together; kRowPieces of them have a row.
  DEVICE void put(int n, const uint4& halves) {
    const u32 factor = query_factor<kRowPieces>(
        larger_of(larger_of(halves.x & 0x7fff7fff, halves.y), larger_of(halves.z & 0x7fff7fff, halves.w)));
    const int row = n / kRowPieces, piece = n % kRowPieces;
    rows[row][place_of(row, piece)] =
        make_uint2(query_levels(halves.x, halves.y, factor), query_levels(halves.z, halves.w, factor));
    if (piece == 0) units[row] = query_unit(factor);
  }
};

#else

template <int kHalves, int kRows>
struct TileQueries {
  const QueryRows<kRows>& tile;

  DEVICE explicit TileQueries(const QueryRows<kRows>& tile) : tile(tile) {}
  DEVICE QueryPieces piece(int j) const {
    const int g = threadIdx.x % 32 / 4;
    return {piece_of_row<kHalves>(tile, g, j), kHalves == 2 ? piece_of_row<kHalves>(tile, g + 8, j) : no_piece()};
  }
  DEVICE float unit(int) const { return 1.0f; }
};

struct QueryTile : QueryRows<16> {
  DEVICE QueryPieces piece(int j) const { return TileQueries<2, 16>(*this).piece(j); }
  DEVICE float unit(int) const { return 1.0f; }
};

#endif
