// fold_norm: partial sums of the last linear into the residual stream, and the next linear's input out of it.
// The algebra, its order and its roundings are in fold_row.cuh; a block of 256 threads folds TL_FOLD_ROWS rows at a
// time, which are a divisor of `rows`.
//
// x, x_out  float [rows][width], may be the same; x_out null: x is as it should be
// partials  float [num_partials][rows][width], 0 to 16 of them
// gains     half [width] or null                      injected  float [rows][width] or null
// y         half [rows][width]
// width is a multiple of 4 and at most 1024 · TL_CHUNKS; everything 16-byte aligned.
// Bytes of a row: x once or twice, partials once, y once.  Gains are read before the kernel that makes x has finished.
#include "fold_row.cuh"

#ifndef TL_FOLD_ROWS
#define TL_FOLD_ROWS 1
#endif

extern "C" __global__ void __launch_bounds__(kFoldThreads)
    fold_norm(const float* x, float* x_out, const float* partials, int num_partials, const u16* post_gain,
              const u16* loop_gain, const u16* gain, int inject, float* injected, float eps, u16* y, int rows,
              int width) {
  __shared__ float scratch[TL_FOLD_ROWS * kFoldScratch];
  const Fold f = {x, x_out, partials, num_partials, post_gain, loop_gain, gain, inject, injected, rows, width, eps,
                  1.0f / static_cast<float>(width)};
  const Gains gains = load_gains(f);
  const int first_row = blockIdx.x * TL_FOLD_ROWS;
  u16* first_y = y + static_cast<long long>(first_row) * width;
  dependency_launch();
  dependency_wait();
  fold_rows<TL_FOLD_ROWS>(f, gains, first_row, scratch, [&](int r, int column, uint2 halves) {
    *reinterpret_cast<uint2*>(first_y + r * width + column) = halves;
  });
}
