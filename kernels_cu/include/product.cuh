// What a decode linear multiplies, and the parts of K that fix the order of its sums, however it is cut into blocks.
#pragma once
#include "weight_tiles.cuh"

struct Product {
  const uint4* weights;  // tiles, weight_tiles.cuh
  const u32* scales;     // null: fp16
  const u16* x;          // half [rows][num_inputs]
  int rows;
  int num_tiles;
  int num_inputs;
  bool keep;  // weights stay in L2
};

// Parts of K: begin(p) … begin(p+1), in units.
DEVICE int part_begin(int part, int num_parts, int num_units) { return num_units * part / num_parts; }
