// Raw weights to the orders in which kernels read them.
//
//   pack_int4     tiles of nibbles (weight_tiles.cuh)           from qweight [N][K/2], even input in the low nibble
//   pack_scales   their scales, pairs of rows g and g+8         from scales [N][K/group]
//   pack_fp16     tiles of halves                               from weight [N][K]
//   dequantise    weight[n][k] = half((nibble − 8) · scale)     rounded once, rows in their own order
//
// row_of  int32 [num_tiles·16]: the raw row that becomes each packed row; −1: a row of zeros (nibbles 8, scale 0).
// K is a multiple of 64, group 32, 64 or 128 and a divisor of K.  One thread per 16 bytes of output (pack_scales: per
// half), 256 a block, the last block partly idle.  Run once at load; bytes: the raw and the packed weights.
#include "weight_tiles.cuh"

constexpr int kThreads = 256;

DEVICE long long thread_number() { return static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x; }

// Where a thread's 16 bytes go: lane 4·g + t of a tile.
struct Place {
  int tile, block, g, t;  // block: k / 64
};

DEVICE Place place_of(long long lane_index, int num_blocks) {
  const int lane = static_cast<int>(lane_index % 32);
  const long long block_index = lane_index / 32;
  return {static_cast<int>(block_index / num_blocks), static_cast<int>(block_index % num_blocks), lane / 4, lane % 4};
}

// Inputs 0, 1, 2, 3 of a row, from nibbles 0 … 3 to nibbles 0, 4, 2, 6.
DEVICE u32 spread_nibbles(u32 quad) {
  return (quad & 0x000f) | (quad & 0x00f0) << 12 | (quad & 0x0f00) | (quad & 0xf000) << 12;
}

DEVICE u32 load_quad(const u16* qweight, int row, int k, int num_inputs) {
  return row < 0 ? 0x8888 : qweight[(static_cast<long long>(row) * num_inputs + k) / 4];
}

// qweight  uint8 [N][K/2], read as four nibbles at a time    packed  uint4 [num_tiles][K/64][32]
extern "C" __global__ void __launch_bounds__(kThreads)
    pack_int4(const u16* qweight, const i32* row_of, uint4* packed, int num_tiles, int num_inputs) {
  const int num_blocks = num_inputs / kBlockInputs;
  const long long index = thread_number();
  if (index >= static_cast<long long>(num_tiles) * num_blocks * 32) return;
  const Place place = place_of(index, num_blocks);
  const int low_row = row_of[place.tile * kTileRows + place.g], high_row = row_of[place.tile * kTileRows + place.g + 8];
  u32 words[4];
  for (int step = 0; step < 4; ++step) {
    const int k = place.block * kBlockInputs + 32 * (step / 2) + 8 * place.t + 4 * (step % 2);
    const u32 low = load_quad(qweight, low_row, k, num_inputs), high = load_quad(qweight, high_row, k, num_inputs);
    words[step] = spread_nibbles(low) | spread_nibbles(high) << 4;
  }
  packed[index] = make_uint4(words[0], words[1], words[2], words[3]);
}

// scales  half [N][num_groups]    packed  half [num_tiles][num_groups][8][2]
extern "C" __global__ void __launch_bounds__(kThreads)
    pack_scales(const u16* scales, const i32* row_of, u16* packed, int num_tiles, int num_groups) {
  const long long index = thread_number();
  if (index >= static_cast<long long>(num_tiles) * num_groups * kTileRows) return;
  const int in_tile = static_cast<int>(index % kTileRows), g = in_tile / 2, upper = in_tile % 2;
  const long long pair = index / kTileRows;
  const int group = static_cast<int>(pair % num_groups), tile = static_cast<int>(pair / num_groups);
  const int row = row_of[tile * kTileRows + g + 8 * upper];
  packed[index] = row < 0 ? 0 : scales[static_cast<long long>(row) * num_groups + group];
}

// weight  half [N][K], read as four at a time    packed  uint4 [num_tiles][K/64][4 steps][32]
extern "C" __global__ void __launch_bounds__(kThreads)
    pack_fp16(const uint2* weight, const i32* row_of, uint4* packed, int num_tiles, int num_inputs) {
  const int num_blocks = num_inputs / kBlockInputs;
  const long long index = thread_number();
  if (index >= static_cast<long long>(num_tiles) * num_blocks * 4 * 32) return;
  const int step = static_cast<int>(index / 32 % 4);
  const Place place = place_of(index / 128 * 32 + index % 32, num_blocks);
  const int k = place.block * kBlockInputs + 32 * (step / 2) + 8 * place.t + 4 * (step % 2);
  uint2 halves[2];
  for (int upper = 0; upper < 2; ++upper) {
    const int row = row_of[place.tile * kTileRows + place.g + 8 * upper];
    halves[upper] = row < 0 ? make_uint2(0, 0) : weight[(static_cast<long long>(row) * num_inputs + k) / 4];
  }
  packed[index] = make_uint4(halves[0].x, halves[1].x, halves[0].y, halves[1].y);
}

// qweight  uint8 [N][K/2], read as eight nibbles at a time    scales  half [N][K/group]    weight  half [N][K]
extern "C" __global__ void __launch_bounds__(kThreads)
    dequantise(const u32* qweight, const u16* scales, uint4* weight, int num_rows, int num_inputs, int group) {
  const long long index = thread_number();
  if (index >= static_cast<long long>(num_rows) * num_inputs / 8) return;
  const float scale = half_to_float(scales[index * 8 / group]);
  const u32 nibbles = qweight[index];
  u32 pairs[4];
  for (int i = 0; i < 4; ++i) {
    const int even = nibbles >> 8 * i & 15, odd = nibbles >> (8 * i + 4) & 15;
    pairs[i] = pack_half2(static_cast<float>(even - 8) * scale, static_cast<float>(odd - 8) * scale);
  }
  weight[index] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}
