// fold_norm: partial sums of the last linear into the residual stream, and the next linear's input out of it.
// The algebra, its order and its roundings are in fold_row.cuh; one row is one block of 256 threads.
//
// x, x_out  float [rows][width], may be the same; x_out null: x is as it should be
// partials  float [num_partials][rows][width], 0 to 16 of them
// gains     half [width] or null                      injected  float [rows][width] or null
// y         half [rows][width], or in columns (TL_COLUMNS, columns.cuh), block_rows at a time, which divides rows
// width is a multiple of 4 and at most 1024 · TL_CHUNKS; everything 16-byte aligned.
// With TL_NORM_ONLY there is nothing but x, gain and y, and the other arguments are not read: the same bits out of fewer
// registers, so that all rows of a prompt are under way at once.
// Bytes of a row: x once or twice, partials once, y once.  Gains are read before the kernel that makes x has finished.
#include "columns.cuh"
#include "fold_row.cuh"

#ifndef TL_NORM_ONLY
#define TL_NORM_ONLY 0
#endif
#ifndef TL_COLUMNS
#define TL_COLUMNS 0
#endif

extern "C" __global__ void __launch_bounds__(kFoldThreads)
    fold_norm(const float* x, float* x_out, const float* partials, int num_partials, const u16* post_gain,
              const u16* loop_gain, const u16* gain, int inject, float* injected, float eps, u16* y, int rows,
              int width, int block_rows) {
  __shared__ float scratch[kFoldScratch];
  const float inverse_width = 1.0f / static_cast<float>(width);
  const Fold whole = {x, x_out, partials, num_partials, post_gain, loop_gain, gain, inject, injected, rows, width, eps,
                      inverse_width};
  const Fold norm_only = {x, nullptr, nullptr, 0, nullptr, nullptr, gain, kInjectNone, nullptr, rows, width, eps,
                          inverse_width};
  const Fold f = TL_NORM_ONLY ? norm_only : whole;
  const Gains gains = load_gains(f);
  const int row = blockIdx.x;
  u16* y_row = y + static_cast<long long>(row) * width;
  const InColumns y_columns = in_columns(y, row, width, block_rows);
  dependency_launch();
  dependency_wait();
  fold_rows<1>(f, gains, row, scratch, [&](int, int column, uint2 halves) {
    if constexpr (TL_COLUMNS) store_columns(y_columns, column, halves);
    else *reinterpret_cast<uint2*>(y_row + column) = halves;
  });
}
