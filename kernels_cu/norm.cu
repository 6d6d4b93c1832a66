// fold_norm: partial sums of the last linear into the residual stream, and the next linear's input out of it.
// The algebra, its order and its roundings are in fold_row.cuh; one row is one block of 256 threads.
//
// x         float [rows][width], read and written     partials  float [num_partials][rows][width], 0 to 16 of them
// gains     half [width] or null                      injected  float [rows][width] or null
// y         half [rows][width]
// width is a multiple of 4 and at most 1024 · TL_CHUNKS; everything 16-byte aligned.
// Bytes of a row: x twice, partials once, y once.  Gains are read before the kernel that makes x has finished.
#include "fold_row.cuh"

extern "C" __global__ void __launch_bounds__(kFoldThreads)
    fold_norm(float* x, const float* partials, int num_partials, const u16* post_gain, const u16* loop_gain, int inject,
              float* injected, const u16* out_gain, u16* y, int rows, int width, float eps) {
  __shared__ float scratch[kFoldScratch];
  const Fold f = {x, x, partials, num_partials, post_gain, loop_gain, out_gain, inject, injected, rows, width, eps};
  dependency_launch();
  dependency_wait();
  const int row = blockIdx.x;
  fold_row(f, row, scratch, [&](int column, uint2 halves) {
    *reinterpret_cast<uint2*>(y + static_cast<long long>(row) * width + column) = halves;
  });
}
