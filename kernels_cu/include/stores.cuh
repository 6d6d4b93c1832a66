// What becomes of a decode linear's sums where no head is turned: channels, or the sums as they are.
//
// An epilogue has load, prepare and finish, in which it may look things up while the product runs, and
// store(tile, g, row, low, high): the sums of rows g and g + 8 of a weight tile for one row of the batch.
#pragma once
#include "weight_tiles.cuh"

struct NothingToPrepare {
  template <class... Tile>
  DEVICE void load(Tile...) {}
  DEVICE void prepare() {}
  DEVICE void finish() {}
};

// silu(gate) · up.
DEVICE float gated(float gate, float up) {
  const float silu = gate / (1.0f + exp2_fast(gate * -1.44269504f));  // far below zero: −x / inf = −0
  return silu * up;
}

// h[row][8·tile + g] = silu(gate) · up, rounded to half.
struct StoreChannels : NothingToPrepare {
  u16* h;  // [rows][width]
  int width;

  DEVICE void store(int tile, int g, int row, float gate, float up) {
    h[static_cast<long long>(row) * width + tile * 8 + g] = float_to_half(gated(gate, up));
  }
};

struct StoreSums : NothingToPrepare {
  float* to;  // [rows][width]
  int width;

  DEVICE void store(int tile, int g, int row, float low, float high) {
    float* at = to + static_cast<long long>(row) * width + tile * kTileRows + g;
    at[0] = low;
    at[8] = high;
  }
};
