// What decode_attention multiplies of a page, as lanes hold it.
#pragma once

#include "attention.cuh"

// Of a tile's queries, a piece of rows g and g + 8.
struct QueryPieces {
  Piece low, high;
};

// A lane's two tokens of a step: all their dims; and the scales of its columns of scores.
struct StepKeys {
  Piece of[2][kDimPieces];
  StepScales scales;
};

// A lane's scores of a step: of tile u, rows g and g + 8.
struct StepScores {
  float of[2][4];
};
